"""Difference maps. A tensor that differs has three pictures: its most changed channels in
BASE, the same channels in NEW, and the signed difference.

    before          after           difference
    [5] [12] [3]    [5] [12] [3]    [5] [12] [3]     the most changed channel first

Before and after share a scale, so that a grey is one value in both. The differences of each
tensor have their own: on one scale for all tensors, those of the first to diverge, which
are often the smallest, would all be grey. The gaps are wide enough for the number of a
channel below its tile.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from featviz.diff.compare import scale_of, signed
from featviz.diff.comparison import (
    ChangedNumber,
    ComparedTensor,
    DifferenceMap,
    ValueSpan,
)
from featviz.diff.tensors import TensorPair, ValuePair, map_shape
from featviz.drawing import colormap, grid
from featviz.drawing.picture import write_png
from featviz.drawing.sheet import pixel_font
from featviz.drawing.values import MEAN, ValueLimits, to_levels
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions
from featviz.records import Bytes, GridPlan
from featviz.rundir.read import ReadRun
from featviz.text import printable, safe_name

# At most this many tensors are drawn, each in the image in which it differs most.
_MAX_TENSORS = 60
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
    """The tensors of a comparison, and the pictures of those that were drawn."""

    tensors: tuple[ComparedTensor, ...]
    pictures: dict[str, bytes]
    """PNG files by name."""


class _ChangedValues(NamedTuple):
    """The values of a tensor's most changed channels; arrays [C, S, H, W], of S slices."""

    channels: list[int]
    """Their numbers, the most changed first."""
    base: np.ndarray
    new: np.ndarray
    signed: np.ndarray
    """`diff.compare.signed` of NEW and BASE."""
    source: str
    """`DifferenceMap.source`."""


def draw(tensors: Sequence[ComparedTensor], base: ReadRun, new: ReadRun) -> DrawnMaps:
    """Draw the tensors that differ most, and the first one that differs.

    Args:
        tensors: the tensors of the comparison of `base` and `new`, in the model's order.

    Returns:
        All tensors, in the same order, with `difference` set for those that were drawn;
        and the pictures.

    Raises:
        DamagedError: a file of an image cannot be read.
    """
    drawn = list(tensors)
    pictures: dict[str, bytes] = {}
    number = 0
    # positions are in the model's order, and so are the names of the files
    for position in _drawn_positions(tensors):
        tensor = tensors[position]
        values = _changed_values(tensor, base, new)
        if values is None:
            continue
        stem = safe_name(f"{number:02d}_{tensor.label}.{tensor.key.stem}")
        number += 1
        difference = _difference_map(tensor, values, stem)
        drawn[position] = replace(tensor, difference=difference)
        pictures |= _pictures(difference, tensor.type, values)
    return DrawnMaps(tuple(drawn), pictures)


def _drawn_positions(tensors: Sequence[ComparedTensor]) -> list[int]:
    """Indices of the tensors that are drawn, ascending: the first one that differs, and the
    most changed of the others."""
    # a tensor that could not be compared has no difference to draw
    differing = []
    for position, tensor in enumerate(tensors):
        if tensor.differs and tensor.reason is None:
            differing.append(position)

    def extent(position: int) -> tuple[float, float]:
        """The largest difference, and the share of channels that differ."""
        tensor = tensors[position]
        return tensor.severity, len(tensor.changed) / len(tensor.change)

    worst = sorted(differing[1:], key=extent, reverse=True)
    return sorted([*differing[:1], *worst][:_MAX_TENSORS])


def _changed_values(
    tensor: ComparedTensor, base: ReadRun, new: ReadRun
) -> _ChangedValues | None:
    """The values of a tensor's most changed channels in the image in which it differs
    most; None if no file shows them.

    Raises:
        DamagedError: a file of the image cannot be read.
    """
    pairs = TensorPair.read(base.images[tensor.image], new.images[tensor.image])
    pair = next(pair for pair in pairs if pair.key == tensor.key)
    shown = _shown_values(pair)
    if shown is None:
        return None
    # a picture may not show all of the changed channels, as with --channels
    index_of = {channel: index for index, channel in enumerate(shown.values.channels)}
    channels = [channel for channel in tensor.changed if channel in index_of]
    channels = channels[:_MAX_CHANNELS]
    if not channels:
        return None
    index = [index_of[channel] for channel in channels]
    old = shown.values.base[index]
    now = shown.values.new[index]
    # the statistics of a single number are more exact than the eight bits of a pixel
    if shown.source == "pixels" and old.size == len(channels):
        old, now = (stats[channels, MEAN].reshape(old.shape) for stats in pair.stats)
    differences = signed(old, now, scale_of(*pair.stats), shown.values.slack[index])
    map_size = map_shape(pair.rows[0])[1:]
    shape = (len(channels), shown.slices, *map_size)
    drawn_slices = slice(_DRAW_OPTIONS.max_slices)
    return _ChangedValues(
        channels=channels,
        base=old.reshape(shape)[:, drawn_slices],
        new=now.reshape(shape)[:, drawn_slices],
        signed=differences.reshape(shape)[:, drawn_slices],
        source=shown.source,
    )


class _ShownValues(NamedTuple):
    """The values of a tensor in both runs, as their files show them."""

    source: str
    """`DifferenceMap.source`."""
    slices: int
    """How many slices of each channel the values are of."""
    values: ValuePair


def _shown_values(pair: TensorPair) -> _ShownValues | None:
    """The values of a tensor from kept tensors, or else from pictures. None if neither
    shows them: the runs kept no tensors, and the pictures are lossy, reduced, or have
    different scale modes.

    Raises:
        DamagedError: a file of an image cannot be read.
    """
    row = pair.rows[0]
    layout = LAYOUTS.get(row.layout)
    # a kept tensor of windows has its values in another order than the maps
    if layout is not None and not layout.of_pieces:
        kept = pair.tensors()
        if kept is not None:
            return _ShownValues("kept tensors", map_shape(row).slices, kept)
    pixels = pair.pixels()
    if pixels is None:
        return None
    return _ShownValues("pixels", row.slice_count, pixels)


def _difference_map(
    tensor: ComparedTensor, values: _ChangedValues, stem: str
) -> DifferenceMap:
    """Describe the pictures of a tensor, before they are drawn.

    Args:
        values: what the pictures show.
        stem: how the names of the three files begin.
    """
    numbers = []
    # a channel of one number would be a square of one grey: the number itself says more
    if values.base.size == len(values.channels):
        for old, now in zip(values.base.flat, values.new.flat, strict=True):
            numbers.append(ChangedNumber(float(old), float(now)))
    return DifferenceMap(
        file=f"{stem}.png",
        before_file=f"{stem}.before.png",
        after_file=f"{stem}.after.png",
        image=tensor.image,
        label=tensor.label,
        stem=tensor.key.stem,
        channels=tuple(values.channels),
        source=values.source,
        limit=scale_of(values.signed.reshape(-1, 1)) or 1.0,
        range=_extremes(values),
        plan=_plan(values.base.shape),
        slices=values.base.shape[1],
        numbers=numbers,
    )


def _extremes(values: _ChangedValues) -> ValueSpan:
    """The smallest and the largest finite value of both runs; zeros if none is finite."""
    shown = np.concatenate([values.base, values.new])
    finite = shown[np.isfinite(shown)]
    if not len(finite):
        return ValueSpan(0.0, 0.0)
    return ValueSpan(float(finite.min()), float(finite.max()))


def _plan(shape: tuple[int, ...]) -> GridPlan:
    """The grid of a picture, with room for a number below each tile.

    Args:
        shape: [C, S, H, W] of the values.
    """
    # `plan.width` is the width with the usual padding. With the new one the picture is
    # wider, so the gap is a little less than the share _GAP of its width.
    plan = grid.plan(shape, _DRAW_OPTIONS)
    return replace(plan, padding=max(2, round(_GAP * plan.width)))


def _pictures(
    difference: DifferenceMap, layer_type: str, values: _ChangedValues
) -> dict[str, bytes]:
    """Draw before, after and difference.

    Args:
        difference: the names of the files, how tiles are laid out, and the limits.
        layer_type: the layer's type, for the text of the pictures.
        values: what is drawn.

    Returns:
        The three PNG files by name.
    """
    # the text chunks still say what the picture is when the file was moved elsewhere
    layer = f"{difference.label} ({layer_type})"
    if difference.stem != "output":
        layer += f", {difference.stem}"
    text = {
        "Software": "featviz",
        "Layer": layer,
        "Image": difference.image,
        "Channels": ",".join(map(str, difference.channels)),
        "Source": difference.source,
    }
    low, high = difference.range
    limit = difference.limit
    # One scale for both. On scales of their own, a map and its half would look the same.
    scale = ValueLimits.fixed(low, high)
    greys = colormap.palette_of("grey", _GAP_GREY)
    described = {**text, "Range": f"{low:.3g} (black) to {high:.3g} (white)"}
    before = _png(difference.plan, values.base, scale, greys, described)
    after = _png(difference.plan, values.new, scale, greys, described)
    signed_scale = ValueLimits.fixed(-limit, limit)
    signed_colors = colormap.palette_of("coolwarm", _GAP_GREY)
    ends = f"{-limit:.3g} (blue) to {limit:.3g} (red)"
    described = {**text, "Range": f"NEW - BASE, relative: {ends}"}
    change = _png(
        difference.plan, values.signed, signed_scale, signed_colors, described
    )
    return {
        difference.before_file: before,
        difference.after_file: after,
        difference.file: change,
    }


def _png(
    plan: GridPlan,
    data: np.ndarray,
    limits: ValueLimits,
    colors: colormap.Palette,
    text: Mapping[str, str],
) -> bytes:
    """Draw a grid, and return it as a PNG file.

    Args:
        plan: how its tiles are laid out.
        data: [C, S, H, W]; the slices of a channel stand side by side.
        limits: the values of the darkest and the brightest colour.
        colors: the palette of the tiles and the gaps.
        text: the text chunks of the file, by keyword; `Layer` and `Range` are also written
            into the picture.
    """
    maps = data.reshape(-1, *data.shape[2:])
    tiles = to_levels(maps, limits, colors.levels, colors.nonfinite)
    # copied, since each piece is overwritten by the next one
    pixels = np.concatenate(
        [piece.copy() for piece in grid.strips(plan, tiles, colors)]
    )
    line = f"{text['Layer']}: {text['Range']}"
    # the middle colour of both colormaps can be read on the grey of the gap
    _write_above(pixels[: plan.padding], line, colors.levels // 2)
    file = io.BytesIO()
    write_png(
        file, (plan.height, plan.width), [pixels], colors=colors.colors, text=text
    )
    return file.getvalue()


def _write_above(gap: Bytes, text: str, level: int) -> None:
    """Write a line of text into the gap above all tiles. A text that is too long is not
    written: the text chunks of the file say the same.

    Args:
        gap: levels [H, W] of the gap; the text is written into this array.
        level: the level of the letters.
    """
    letters = pixel_font(max(8, int(0.6 * len(gap))))
    # without smooth edges: the levels between have unlike colours
    mask = letters.getmask(printable(text), mode="1")
    width, height = mask.size
    spot = gap[(len(gap) - height) // 2 :, _MARGIN:][:height, :width]
    if spot.shape == (height, width):
        spot[np.asarray(mask, bool).reshape(spot.shape)] = level
