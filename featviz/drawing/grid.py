"""From tiles to one picture, in make_grid's arrangement, row of tiles by row of tiles, and what is
written on it: channel numbers, how many share a tile, marks on constant maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
from PIL import ImageFont

from featviz.drawing.colormap import Palette
from featviz.errors import LayoutError
from featviz.options import DrawOptions
from featviz.records import FORMATS, Bytes, GridPlan, Tiles
from featviz.text import by

PIECE_BYTES = 2**19
"""About so many pixels of a picture are made at a time: they stay in a core's cache."""
STRIP_WIDTH, STRIP_RATIO = 1024, 8
"""Pixels that a strip of numbers should at most be wide when its cells are enlarged, and how many
times as wide as it is high."""
ALONE = 224
"""Pixels that the longer side of a tile without neighbours should have."""
NONE, ZERO, CONSTANT = range(3)
"""Marks: a cross on a map of nothing but zeros, a stroke on a map of another single value."""
SMALLEST = 5
"""Pixels below which a tile has no room for a mark."""
_STROKE = 48
"""A mark's line is a pixel wide for every so many pixels of the tile's longer side, at least 1."""

Words = tuple[str, str, int]
"""What is written on a tile: at its upper left, at its lower right, and its mark."""


@lru_cache(1024)
def plan(
    shape: tuple[int, ...], options: DrawOptions, *, strip: bool = False, alone: bool = False
) -> GridPlan:
    """Lay out the tiles of maps [C, S, H, W], S of them side by side for each channel; LayoutError
    where the picture is larger than its format can hold.

    As in make_grid, fewer maps than `nrow` make a narrower picture, and a single map gets no
    padding. A strip is one row without padding, unless `nrow` says otherwise; `auto` makes a tile
    that stands alone as large as a picture.
    """
    channels, slices, height, width = shape
    count = channels * slices
    columns, padding = min(options.nrow or count, count), options.gap
    least = max(options.min_tile, ALONE if alone else 0)
    factor = options.scale or max(1, -(-least // max(height, width)))
    scale = factor, factor
    if strip:
        padding = 0
        if not options.scale:  # not too wide, and not so low that it is a line
            across = min(options.min_tile, max(1, STRIP_WIDTH // columns))
            down = max(options.min_tile, min(columns * across, STRIP_WIDTH) // STRIP_RATIO)
            scale = -(-down // height), across
    elif options.nrow is None:  # of equals, the wider picture
        high, wide = height * factor + padding, (width * factor + padding) * slices
        sides = ((max(n * wide, -(-channels // n) * high), -n) for n in range(1, channels + 1))
        columns = -min(sides)[1] * slices
    if count == 1:
        padding = 0
    made = GridPlan(count, columns, -(-count // columns), (height, width), scale, padding)
    most = FORMATS[options.format].largest
    if max(made.height, made.width) > most:
        size, most_of = by((made.width, made.height)), f"{options.format} holds ({most} a side)"
        hint = "--format png, or --max-maps and --nrow"
        raise LayoutError(f"its picture of {size} pixels is more than {most_of}; {hint}")
    return made


def strips(
    plan: GridPlan, tiles: Tiles, colors: Palette, written: Mapping[int, Words] | None = None
) -> Iterator[Bytes]:
    """Yield the picture from top to bottom in pieces, each of which is overwritten by the next one:
    uint8 [rows, width], or [rows, 3 · width] with the colours side by side. `written` is what is
    written on tiles, by their numbers, once they are enlarged."""
    from featviz.drawing import loops

    depth = 3 if len(tiles.shape) == 4 else 1
    columns, high, top = plan.columns, plan.tile[0] + plan.padding, plan.padding
    at_a_time = min(plan.rows, max(1, PIECE_BYTES // (plan.width * depth * high)))
    whole = np.full((top + at_a_time * high, plan.width * depth), colors.pad, np.uint8)
    piece = whole[top:]
    for first in range(0, plan.maps, at_a_time * columns):
        last = min(plan.maps, first + at_a_time * columns)
        if last - first < at_a_time * columns:
            piece[:] = colors.pad
        part = np.require(tiles[first:last], requirements=["C", "W"])
        part = part.reshape(*part.shape[:2], -1)
        loops.lay_tiles(part, columns, *plan.scale, depth, plan.padding, piece)
        pixels = piece.reshape(len(piece), -1, depth)
        for number in range(first, last):
            if written and (words := written.get(number)):
                row, column = divmod(number - first, columns)
                left = plan.padding + column * (plan.tile[1] + plan.padding)
                here = pixels[row * high :, left : left + plan.tile[1]]
                write(here[: plan.tile[0]], words, colors)
        rows = -(-(last - first) // columns) * high
        yield piece[:rows] if first else whole[: top + rows]  # the first has the padding above


def write(tile: Bytes, words: Words, colors: Palette) -> None:
    """Write on one tile, uint8 [h, w, depth]; the mark is half of all levels from what it is drawn
    on, which is the tile's first pixel."""
    size, (corner, count, mark) = (tile.shape[0], tile.shape[1]), words
    if mark:
        ground, half = int(tile[0, 0, 0]), colors.levels // 2
        tile[marks(size)[mark - 1]] = ground + half if ground < half else ground - half
    taken = (0, 0)
    for text in filter(None, (corner, count)):
        ink = glyphs(text)
        high, wide = ink.shape
        meet = taken[0] + high > size[0] and taken[1] + wide > size[1]
        if high <= size[0] and wide <= size[1] and not (taken[0] and meet):
            top, left = (0, 0) if text is corner else (size[0] - high, size[1] - wide)
            pixels = np.where(ink, colors.light, colors.dark)[..., None]
            tile[top : top + high, left : left + wide] = pixels
            taken = high, wide


@lru_cache(4096)
def glyphs(text: str) -> np.ndarray:
    """bool [height, width]: the ink of a text in Pillow's bitmap font, one pixel of ground around
    (its digits fill rows 2 to 8 of 11, and the last column of a letter is empty)."""
    mask = ImageFont.load_default_imagefont().getmask(text, mode="1")
    ink = np.asarray(mask, np.uint8).reshape(mask.size[::-1]) > 0
    return np.pad(ink[1:10], ((0, 0), (1, 0)))


@lru_cache(64)
def marks(size: tuple[int, int]) -> np.ndarray:
    """bool [2, height, width]: the pixels of the marks ZERO, both diagonals, and CONSTANT, the one
    that rises; none where a tile has no room for a mark."""
    height, width = size
    y, x = np.mgrid[0:height, 0:width]
    reach = max(1, max(size) // _STROKE) * max(size) / 2
    rising = abs((height - 1 - y) * (width - 1) - x * (height - 1)) < reach
    rising &= min(size) >= SMALLEST
    return np.stack([rising | rising[:, ::-1], rising])
