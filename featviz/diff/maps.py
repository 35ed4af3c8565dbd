"""Signed difference maps: where NEW is higher (red) and where it is lower (blue)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from featviz.diff.comparing import scale_of, signed
from featviz.diff.findings import Finding, LayerFindings, Map
from featviz.diff.pairing import Pair
from featviz.diff.readback import held, is_spatial
from featviz.diff.sides import Sides, slack_of
from featviz.drawing import colormap, grid, png
from featviz.drawing.levels import ValueLimits, to_levels
from featviz.records import DrawOptions
from featviz.rundir import write
from featviz.rundir.read import ReadRun
from featviz.text import safe_name

COLORMAP = "coolwarm"
KEPT, DRAWN = "kept tensors", "pixels"

_PICTURES = 8
"""Layers that are drawn at most, each in its worst image."""
_CHANNELS = 16
"""Maps of a picture at most."""
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
    """A vector: drawn as one row."""

    @property
    def largest(self) -> float:
        """The largest finite magnitude."""
        magnitudes = np.abs(self.data)
        return float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))


def draw(layers: Sequence[LayerFindings], base: ReadRun, new: ReadRun, folder: Path) -> list[Map]:
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
    """In the order of the model."""
    differing = [layer for layer in layers if layer.differing and not layer.reason]
    ranked = sorted(differing[1:], key=lambda layer: layer.worst.severity, reverse=True)
    chosen = [*differing[:1], *ranked][:_PICTURES]
    places = {layer.place for layer in chosen}
    return [layer for layer in differing if layer.place in places]


def _sketch(layer: LayerFindings, base: ReadRun, new: ReadRun) -> Sketch | None:
    """None where the pictures do not show what differs."""
    worst = layer.worst
    sides = Sides.of(base.images[worst.image], new.images[worst.image])
    row = sides.base.captures[worst.place]
    pair = Pair(worst.image, worst.place, row, sides.new.captures[worst.place])
    values = sides.tensors(pair) if is_spatial(row) else None
    source, (slices, height, width) = KEPT, held(row)
    if values is None:
        source, values = DRAWN, sides.pixels(pair)
        slices = row.slices[0] if row.slices else 1
    ids = [] if values is None else _to_draw(worst, values[0].ids)
    if values is None or not ids:
        return None
    chosen = values[0].only(ids), values[1].only(ids)
    scale = scale_of(*sides.stats(pair))
    data = signed(chosen[0].data, chosen[1].data, scale, slack_of(chosen))
    data = data.reshape(len(ids), slices, height, width)[:, : _OPTIONS.max_slices]
    return Sketch(worst, layer.label, data, tuple(ids), source, row.layout == "vector")


def _to_draw(finding: Finding, ids: Sequence[int]) -> list[int]:
    """Those of these channels that differ, the most changed first."""
    known = set(ids)
    differing = finding.change.worst_first(finding.differs)
    return [channel for channel in differing if channel in known][:_CHANNELS]


def _write(sketch: Sketch, limit: float, number: int, folder: Path) -> Map:
    place, image = sketch.finding.place, sketch.finding.image
    name = safe_name(f"{number:02d}_{sketch.label}.{place.stem}.png")
    found = Map(name, image, sketch.label, place.stem, sketch.channels, sketch.source, limit)
    colors = colormap.colored(COLORMAP, 0.0)
    plan = grid.plan(sketch.data.shape, _OPTIONS, sketch.strip)
    maps = sketch.data.reshape(-1, *sketch.data.shape[2:])
    ends = ValueLimits.fixed(-limit, limit)
    tiles = to_levels(maps, ends, colors.levels, colors.nonfinite)
    pieces = grid.strips(plan, tiles, colors.pad, lead=1)
    with write.atomic(folder / name) as file:
        size = plan.height, plan.width
        png.write_png(file, size, pieces, colors=colors.colors, text=_caption(found, sketch))
    return found


def _caption(found: Map, sketch: Sketch) -> dict[str, str]:
    return {
        "Software": "featviz",
        "Layer": f"{found.label} ({sketch.finding.type})",
        "Image": found.image,
        "Channels": ",".join(map(str, found.channels)),
        "Range": f"NEW - BASE, relative: {-found.limit:g} to {found.limit:g}",
        "Source": found.source,
    }
