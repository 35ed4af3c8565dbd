"""Signed difference maps: where NEW is higher (red) and where it is lower (blue)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from featviz.diff.compare import scale_of, signed
from featviz.diff.pairing import TensorPair
from featviz.diff.result import Finding, LayerFindings
from featviz.diff.values import ImagePair, map_shape, slack_of
from featviz.drawing import colormap, grid, png
from featviz.drawing.levels import ValueLimits, to_levels
from featviz.layout.layouts import LAYOUTS
from featviz.records import DifferenceMap, DrawOptions
from featviz.rundir.atomic import atomic
from featviz.rundir.read import ReadRun
from featviz.text import safe_name

COLORMAP = "coolwarm"
KEPT, DRAWN = "kept tensors", "pixels"

_PICTURES = 8
"""How many layers are drawn at most, each in its worst image."""
_CHANNELS = 16
"""How many channels a picture shows at most."""
_OPTIONS = DrawOptions(min_tile=96)


@dataclass(frozen=True)
class Sketch:
    """A difference map before it has its colours."""

    finding: Finding
    label: str
    data: np.ndarray
    """[C, S, H, W]: signed relative differences; NaN where one side is not finite."""
    channels: tuple[int, ...]
    source: str
    strip: bool
    """Whether the maps are drawn as one row, as those of a vector are."""

    @property
    def largest(self) -> float:
        """The largest finite magnitude."""
        magnitudes = np.abs(self.data)
        return float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))


def draw(
    layers: Sequence[LayerFindings], base: ReadRun, new: ReadRun, folder: Path
) -> list[DifferenceMap]:
    """Draw the worst of the layers that differ, the first always, on one scale for all.

    The colours' ends are the largest relative difference of all pictures; what has a number on
    one side only is magenta.

    Raises:
        StoreError: a file cannot be read or written.
    """
    sketches = [s for layer in _worst(layers) if (s := _sketch(layer, base, new)) is not None]
    limit = max((sketch.largest for sketch in sketches), default=0.0) or 1.0
    return [_write(sketch, limit, number, folder) for number, sketch in enumerate(sketches)]


def _worst(layers: Sequence[LayerFindings]) -> list[LayerFindings]:
    """The first layer that differs and the worst of the others, in the order of the model."""
    differing = [layer for layer in layers if layer.differing and not layer.reason]
    ranked = sorted(differing[1:], key=lambda layer: layer.worst.severity, reverse=True)
    chosen = [*differing[:1], *ranked][:_PICTURES]
    places = {layer.place for layer in chosen}
    return [layer for layer in differing if layer.place in places]


def _sketch(layer: LayerFindings, base: ReadRun, new: ReadRun) -> Sketch | None:
    """The signed differences of a layer; None where no file shows what differs."""
    worst = layer.worst
    images = ImagePair.read(base.images[worst.image], new.images[worst.image])
    row = images.base.captures[worst.place]
    pair = TensorPair(worst.image, worst.place, row, images.new.captures[worst.place])
    layout = LAYOUTS.get(row.layout)
    values = images.tensors(pair) if layout is not None and layout.in_map_order else None
    source, (slices, height, width) = KEPT, map_shape(row)
    if values is None:
        source, values, slices = DRAWN, images.pixels(pair), row.side
    ids = [] if values is None else _to_draw(worst, values[0].ids)
    if values is None or not ids:
        return None
    chosen = values[0].only(ids), values[1].only(ids)
    scale = scale_of(*images.stats(pair))
    data = signed(chosen[0].data, chosen[1].data, scale, slack_of(chosen))
    data = data.reshape(len(ids), slices, height, width)[:, : _OPTIONS.max_slices]
    strip = layout is not None and layout.strip
    return Sketch(worst, layer.label, data, tuple(ids), source, strip)


def _to_draw(finding: Finding, ids: Sequence[int]) -> list[int]:
    """The channels among `ids` that differ, the most changed first."""
    known = set(ids)
    differing = finding.change.worst_first(finding.differs)
    return [channel for channel in differing if channel in known][:_CHANNELS]


def _write(sketch: Sketch, limit: float, number: int, folder: Path) -> DifferenceMap:
    place, image = sketch.finding.place, sketch.finding.image
    name = safe_name(f"{number:02d}_{sketch.label}.{place.stem}.png")
    colors = colormap.colored(COLORMAP, 0.0)
    plan = grid.plan(sketch.data.shape, _OPTIONS, sketch.strip)
    what = (name, image, sketch.label, place.stem, sketch.channels, sketch.source)
    drawn = DifferenceMap(*what, limit, plan, sketch.data.shape[1])
    maps = sketch.data.reshape(-1, *sketch.data.shape[2:])
    ends = ValueLimits.fixed(-limit, limit)
    tiles = to_levels(maps, ends, colors.levels, colors.nonfinite)
    pieces = grid.strips(plan, tiles, colors.pad)
    with atomic(folder / name) as file:
        size = plan.height, plan.width
        png.write_png(file, size, pieces, colors=colors.colors, text=_caption(drawn, sketch))
    return drawn


def _caption(drawn: DifferenceMap, sketch: Sketch) -> dict[str, str]:
    return {
        "Software": "featviz",
        "Layer": f"{drawn.label} ({sketch.finding.type})",
        "Image": drawn.image,
        "Channels": ",".join(map(str, drawn.channels)),
        "Range": f"NEW - BASE, relative: {-drawn.limit:g} to {drawn.limit:g}",
        "Source": drawn.source,
    }
