"""Pictures of what changed: of each layer that differs the most changed channels as
they are in BASE, as they are in NEW, and the signed difference.

    before          after           difference
    [5] [12] [3]    [5] [12] [3]    [5] [12] [3]     the most changed channel first

Before and after share a scale, so that a grey is one value in both; the differences of
all layers share one, so that layers can be compared. The gaps are wide enough for the
number of a channel below its tile.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from featviz.diff.compare import scale_of, signed
from featviz.diff.comparison import (
    ChangedNumber,
    ComparedLayer,
    DifferenceMap,
    ValueSpan,
)
from featviz.diff.tensors import TensorPair, map_shape
from featviz.drawing import colormap, grid
from featviz.drawing.picture import write_png
from featviz.drawing.sheet import pixel_font
from featviz.drawing.values import MEAN, ValueLimits, to_levels
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions
from featviz.records import Bytes, GridPlan
from featviz.rundir.read import ReadRun
from featviz.text import printable, safe_name

# layers that are drawn at most, each in the image in which it differs most
_MAX_LAYERS = 60
_MAX_CHANNELS = 16
_DRAW_OPTIONS = DrawOptions(min_tile=96)
# A page scales a picture to its column, and the numbers with it: their size is a share
# of the picture's width, and the gap holds one line of them.
_GAP = 0.045
# pixels from the left edge to the line above all tiles
_MARGIN = 4
# the grey between tiles, on which white numbers can be read
_GAP_GREY = 51


class DrawnMaps(NamedTuple):
    """The layers of a comparison, and the pictures of those that were drawn."""

    layers: tuple[ComparedLayer, ...]
    pictures: dict[str, bytes]
    """PNG files by name."""


class _ChangedValues(NamedTuple):
    """The values of a layer's most changed channels, each [C, S, H, W]."""

    channels: list[int]
    base: np.ndarray
    new: np.ndarray
    signed: np.ndarray
    """NEW - BASE, relative; NaN where only one is finite."""
    source: str


def draw(layers: Sequence[ComparedLayer], base: ReadRun, new: ReadRun) -> DrawnMaps:
    """Draw the layers that differ most, and the first one that differs in model order.

    Args:
        layers: of the comparison of `base` and `new`, in the model's order.

    Returns:
        All layers, in their order, those that were drawn with their maps.
    """
    # The values of all layers first: the end of the colours is the largest difference of
    # any of them. They are small, 16 channels a layer.
    changed = {}
    for position in _drawn_positions(layers):
        values = _changed_values(layers[position], base, new)
        if values is not None:
            changed[position] = values
    limit = 0.0
    for values in changed.values():
        limit = max(limit, scale_of(values.signed.reshape(-1, 1)))
    drawn = list(layers)
    pictures: dict[str, bytes] = {}
    # `changed` is in the model's order, and so are the names of the files
    for number, (position, values) in enumerate(changed.items()):
        layer = layers[position]
        stem = safe_name(f"{number:02d}_{layer.label}.{layer.key.stem}")
        difference = _difference_map(layer, values, stem, limit or 1.0)
        drawn[position] = replace(layer, difference=difference)
        pictures |= _pictures(difference, layer, values)
    return DrawnMaps(tuple(drawn), pictures)


def _drawn_positions(layers: Sequence[ComparedLayer]) -> list[int]:
    """The first layer that differs and the worst of the others, in the model's order."""
    # tensors of two shapes have no difference that could be drawn
    differing = []
    for position, layer in enumerate(layers):
        if layer.differs and layer.reason is None:
            differing.append(position)

    def rank(position: int) -> tuple[float, float]:
        layer = layers[position]
        return -layer.severity, -len(layer.changed) / len(layer.change)

    worst = sorted(differing[1:], key=rank)
    return sorted([*differing[:1], *worst][:_MAX_LAYERS])


def _changed_values(
    layer: ComparedLayer, base: ReadRun, new: ReadRun
) -> _ChangedValues | None:
    """The values of a layer's most changed channels; None where no file shows them: the
    runs kept no tensors, and their pictures are lossy, reduced or drawn on two scales.
    """
    pair = _pair(layer, base, new)
    row = pair.rows[0]
    layout = LAYOUTS.get(row.layout)
    slices, height, width = map_shape(row)
    # A kept tensor has all slices of its channels, a picture those that were drawn. Pieces
    # of a tensor (a token beside a grid) have no file of their own.
    source = "kept tensors"
    values = None
    if layout is not None and not layout.of_pieces:
        values = pair.tensors()
    if values is None:
        source = "pixels"
        values = pair.pixels()
        slices = row.slice_count
    if values is None:
        return None
    # a picture may lack some of the changed channels, as under --channels
    index_of = {channel: index for index, channel in enumerate(values.channels)}
    channels: list[int] = []
    index = []
    for channel in layer.changed:
        if channel in index_of and len(channels) < _MAX_CHANNELS:
            channels.append(channel)
            index.append(index_of[channel])
    if not channels:
        return None
    old = values.base[index]
    now = values.new[index]
    # of a single number, eight bits of a pixel know less than the statistics
    if source == "pixels" and old.size == len(channels):
        means = [stats[channels, MEAN].reshape(old.shape) for stats in pair.stats]
        old, now = means
    differences = signed(old, now, scale_of(*pair.stats), values.slack[index])
    shape = (len(channels), slices, height, width)
    shown = slice(_DRAW_OPTIONS.max_slices)
    return _ChangedValues(
        channels=channels,
        base=old.reshape(shape)[:, shown],
        new=now.reshape(shape)[:, shown],
        signed=differences.reshape(shape)[:, shown],
        source=source,
    )


def _pair(layer: ComparedLayer, base: ReadRun, new: ReadRun) -> TensorPair:
    """The layer's tensor in the image in which it differs most."""
    pairs = TensorPair.read(base.images[layer.image], new.images[layer.image])
    return next(pair for pair in pairs if pair.key == layer.key)


def _difference_map(
    layer: ComparedLayer, values: _ChangedValues, stem: str, limit: float
) -> DifferenceMap:
    """What is known of the pictures of a layer, before they are drawn.

    Args:
        stem: how the names of the three files begin.
        limit: the relative difference at the ends of the colours, above 0.
    """
    numbers = []
    # squares of one grey each would show less than the numbers
    if math.prod(values.base.shape[1:]) == 1:
        for old, now in zip(values.base.ravel(), values.new.ravel(), strict=True):
            numbers.append(ChangedNumber(float(old), float(now)))
    return DifferenceMap(
        file=f"{stem}.png",
        before_file=f"{stem}.before.png",
        after_file=f"{stem}.after.png",
        image=layer.image,
        label=layer.label,
        stem=layer.key.stem,
        channels=tuple(values.channels),
        source=values.source,
        limit=limit,
        range=_extremes(values),
        plan=_plan(values.base.shape),
        slices=values.base.shape[1],
        numbers=numbers,
    )


def _extremes(values: _ChangedValues) -> ValueSpan:
    """The smallest and the largest finite value before and after; zeros where there is
    none."""
    shown = np.concatenate([values.base, values.new])
    finite = shown[np.isfinite(shown)]
    if not len(finite):
        return ValueSpan(0.0, 0.0)
    return ValueSpan(float(finite.min()), float(finite.max()))


def _plan(shape: tuple[int, ...]) -> GridPlan:
    """Tiles with room for a number below each.

    Args:
        shape: [C, S, H, W] of the values.
    """
    # a share of the width that the picture has with usual gaps: wider ones make it wider,
    # and the numbers a little smaller than the share says
    plan = grid.plan(shape, _DRAW_OPTIONS)
    return replace(plan, padding=max(2, round(_GAP * plan.width)))


def _pictures(
    difference: DifferenceMap, layer: ComparedLayer, values: _ChangedValues
) -> dict[str, bytes]:
    """The three pictures of a layer as PNG files, by name: before, after, difference.

    Args:
        difference: the names of the files, how tiles are laid out, and the limits.
        layer: of which the type is named.
        values: what is drawn, [C, S, H, W] each.
    """
    # the text chunks say what a picture is if it is taken out of its folder
    text = {
        "Software": "featviz",
        "Layer": f"{difference.label} ({layer.type})",
        "Image": difference.image,
        "Channels": ",".join(map(str, difference.channels)),
        "Source": difference.source,
    }
    low, high = difference.range
    limit = difference.limit
    # One scale for both: on a scale of its own, a map times one half looks the same.
    scale = ValueLimits.fixed(low, high)
    greys = colormap.colored("grey", _GAP_GREY)
    pictures = {}
    for file, data in (
        (difference.before_file, values.base),
        (difference.after_file, values.new),
    ):
        described = {**text, "Range": f"{low:.3g} (black) to {high:.3g} (white)"}
        pictures[file] = _png(difference.plan, data, scale, greys, described)
    signed_scale = ValueLimits.fixed(-limit, limit)
    signed_colors = colormap.colored("coolwarm", _GAP_GREY)
    ends = f"{-limit:.3g} (blue) to {limit:.3g} (red)"
    described = {**text, "Range": f"NEW - BASE, relative: {ends}"}
    pictures[difference.file] = _png(
        difference.plan, values.signed, signed_scale, signed_colors, described
    )
    return pictures


def _png(
    plan: GridPlan,
    data: np.ndarray,
    limits: ValueLimits,
    colors: colormap.Palette,
    text: Mapping[str, str],
) -> bytes:
    """A grid as a PNG file.

    Args:
        data: [C, S, H, W]; the slices of a channel stand side by side.
        limits: the values of the darkest and the brightest colour.
        text: chunks, by keyword.
    """
    maps = data.reshape(-1, *data.shape[2:])
    tiles = to_levels(maps, limits, colors.levels, colors.nonfinite)
    # each piece is overwritten by the next one, so it is copied
    pixels = np.concatenate(
        [piece.copy() for piece in grid.strips(plan, tiles, colors)]
    )
    line = f"{text['Layer']}: {text['Range']}"
    # the middle of both colormaps is light enough on the grey of the gap
    _write_above(pixels[: plan.padding], line, colors.levels // 2)
    file = io.BytesIO()
    write_png(
        file, (plan.height, plan.width), [pixels], colors=colors.colors, text=text
    )
    return file.getvalue()


def _write_above(gap: Bytes, text: str, level: int) -> None:
    """Write a line into the gap above all tiles, where it has room; the text chunks say
    the same.

    Args:
        gap: levels [H, W].
        level: of the letters: there is no colour that is not one of values.
    """
    letters = pixel_font(max(8, int(0.6 * len(gap))))
    # without grey edges, which would be values, too
    mask = letters.getmask(printable(text), mode="1")
    width, height = mask.size
    spot = gap[(len(gap) - height) // 2 :, _MARGIN:][:height, :width]
    if spot.shape == (height, width):
        spot[np.asarray(mask, bool).reshape(spot.shape)] = level
