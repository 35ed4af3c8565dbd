"""Pictures of signed differences: of the layers that differ most, all on one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from featviz.diff.compare import scale_of, signed
from featviz.diff.comparison import ComparedLayer, DifferenceMap
from featviz.diff.tensors import TensorPair, ValuePair, map_shape
from featviz.drawing import colormap, grid
from featviz.drawing.picture import write_png
from featviz.drawing.values import ValueLimits, to_levels
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions
from featviz.records import CaptureKey
from featviz.rundir.folder import Folder
from featviz.rundir.read import ReadRun
from featviz.text import safe_name

# layers that are drawn at most, each in the image in which it differs most
_MAX_PICTURES = 8
_MAX_CHANNELS = 16
_DRAW_OPTIONS = DrawOptions(min_tile=96)


class _SignedMaps(NamedTuple):
    """The maps of a layer, before the scale of all layers is known."""

    layer: ComparedLayer
    difference: DifferenceMap
    data: np.ndarray
    """[C, S, H, W]: signed relative differences."""


def draw(
    layers: Sequence[ComparedLayer], base: ReadRun, new: ReadRun, folder: Folder
) -> tuple[ComparedLayer, ...]:
    """Draw maps of the differences of layers into a folder: of the layers that differ
    most, and of the first one that differs in model order. All share one scale, as wide
    as the largest difference; what has a number in one run only is magenta.

    Returns:
        All layers, in their order, those that were drawn with their map.
    """
    maps = []
    for layer in _drawn_layers(layers):
        signed_maps = _signed_maps(layer, base, new)
        if signed_maps is not None:
            maps.append(signed_maps)
    limit = max((scale_of(one.data.reshape(-1, 1)) for one in maps), default=0.0) or 1.0
    drawn: dict[CaptureKey, DifferenceMap] = {}
    for number, (layer, difference, data) in enumerate(maps):
        name = safe_name(f"{number:02d}_{difference.label}.{difference.stem}.png")
        drawn[layer.key] = replace(difference, file=name, limit=limit)
        _write(folder, drawn[layer.key], layer.type, data)
    return tuple(replace(layer, difference=drawn.get(layer.key)) for layer in layers)


def _drawn_layers(layers: Sequence[ComparedLayer]) -> list[ComparedLayer]:
    """The first layer that differs and the worst of the others, in the model's order."""
    differing = [layer for layer in layers if layer.differs and layer.reason is None]
    worst = sorted(
        differing[1:],
        key=lambda layer: (-layer.severity, -len(layer.changed) / len(layer.change)),
    )
    drawn = {layer.key for layer in [*differing[:1], *worst][:_MAX_PICTURES]}
    return [layer for layer in differing if layer.key in drawn]


def _signed_maps(
    layer: ComparedLayer, base: ReadRun, new: ReadRun
) -> _SignedMaps | None:
    """The differences of a layer's most changed channels; None where no file shows
    them."""
    pairs = TensorPair.read(base.images[layer.image], new.images[layer.image])
    pair = next(pair for pair in pairs if pair.key == layer.key)
    row = pair.rows[0]
    layout = LAYOUTS.get(row.layout)
    slices, height, width = map_shape(row)
    source = "kept tensors"
    values: ValuePair | None = None
    if layout is not None and not layout.of_pieces:
        values = pair.tensors()
    if values is None:
        source = "pixels"
        values = pair.pixels()
        slices = row.side
    if values is None:
        return None
    index_of = {channel: index for index, channel in enumerate(values.channels)}
    channels = [channel for channel in layer.changed if channel in index_of][
        :_MAX_CHANNELS
    ]
    if not channels:
        return None
    index = [index_of[channel] for channel in channels]
    scale = scale_of(*pair.stats)
    data = signed(values.base[index], values.new[index], scale, values.slack[index])
    data = data.reshape(len(channels), slices, height, width)[
        :, : _DRAW_OPTIONS.max_slices
    ]
    difference = DifferenceMap(
        file="",
        image=layer.image,
        label=layer.label,
        stem=layer.key.stem,
        channels=tuple(channels),
        source=source,
        limit=math.nan,
        plan=grid.plan(
            data.shape, _DRAW_OPTIONS, strip=layout is not None and layout.strip
        ),
        slices=data.shape[1],
    )
    return _SignedMaps(layer, difference, data)


def _write(
    folder: Folder, difference: DifferenceMap, type: str, data: np.ndarray
) -> None:
    colors = colormap.colored("coolwarm", 0)
    limits = ValueLimits.fixed(-difference.limit, difference.limit)
    maps = data.reshape(-1, *data.shape[2:])
    tiles = to_levels(maps, limits, colors.levels, colors.nonfinite)
    text = {
        "Software": "featviz",
        "Layer": f"{difference.label} ({type})",
        "Image": difference.image,
        "Channels": ",".join(map(str, difference.channels)),
        "Range": f"NEW - BASE, relative: {-difference.limit:g} to {difference.limit:g}",
        "Source": difference.source,
    }
    plan = difference.plan
    with folder.write(difference.file) as file:
        pieces = grid.strips(plan, tiles, colors)
        write_png(
            file, (plan.height, plan.width), pieces, colors=colors.colors, text=text
        )
