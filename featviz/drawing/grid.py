"""From tiles to one picture, in the arrangement of torchvision's `make_grid`, one row of
tiles after the other; and what is written on it: channel numbers, how many channels
share a tile, marks on constant maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from PIL import ImageFont

from featviz.drawing.colormap import Palette
from featviz.drawing.values import for_loops
from featviz.errors import LayoutError
from featviz.options import DrawOptions
from featviz.records import FORMATS, Bytes, GridPlan, Tiles
from featviz.text import by

MAX_PIXELS = 178_956_970
"""Pillow refuses to open larger pictures by default."""
PIECE_BYTES = 2**19
"""About how many bytes of a picture are made at a time: they stay in a core's cache."""
STRIP_WIDTH = 1024
"""Pixels of an enlarged strip's width at most, if each number has at least one pixel."""
_STRIP_RATIO = 8
"""How many times as wide as high a strip is at most."""
_ALONE = 224
"""Pixels of the longer side of a tile without neighbours, at least."""
NONE = 0
"""The mark on an ordinary map: none."""
ZERO = 1
"""The mark on a map of nothing but zeros: a cross."""
CONSTANT = 2
"""The mark on a map of another single value: a stroke."""
SMALLEST = 5
"""Pixels below which a tile has no room for a mark."""
_STROKE = 48
"""A mark's line is one pixel wide for so many pixels of the tile's longer side, and at
least 1 pixel."""


class Label(NamedTuple):
    """What is written on a tile."""

    corner: str = ""
    """The text at the tile's upper left: the channel's number."""
    shared_by: str = ""
    """The text at the tile's lower right: how many channels share the tile."""


@lru_cache(1024)
def plan(
    shape: tuple[int, ...],
    options: DrawOptions,
    *,
    strip: bool = False,
    alone: bool = False,
) -> GridPlan:
    """Lay out the tiles of maps. As in make_grid, fewer maps than `nrow` make a
    narrower picture, and a single map gets no padding.

    Args:
        shape: [C, S, H, W]: S maps of H × W for each of C channels.
        options: if `scale` is None, tiles are enlarged until their longer side has
            `min_tile` pixels; if `nrow` (tiles in a row) is None, the picture becomes
            about square.
        strip: whether the maps are single numbers: they are drawn in one row, unless
            `nrow` says otherwise, without padding.
        alone: whether the tile has no neighbours: if `scale` is None, it is enlarged to
            the size of a picture.

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    channels, slices, height, width = shape
    count = channels * slices
    columns = min(options.nrow or count, count)
    min_side = max(options.min_tile, _ALONE) if alone else options.min_tile
    # the smallest whole factor that makes the longer side long enough; `-(-a // b)`
    # divides and rounds up
    factor = options.scale or max(1, -(-min_side // max(height, width)))
    scale = (factor, factor)
    padding = options.gap
    if strip:
        padding = 0
        if not options.scale:
            scale = _strip_scale(height, columns, options.min_tile)
    elif options.nrow is None:
        # a channel's slices stay side by side, so whole channels are laid out
        tile_height = height * factor + padding
        tile_width = (width * factor + padding) * slices
        columns = square(channels, tile_height, tile_width) * slices
    # make_grid, too, returns a single map as it is
    if count == 1:
        padding = 0
    rows = -(-count // columns)
    grid_plan = GridPlan(count, columns, rows, (height, width), scale, padding)
    _check_size(grid_plan, options.format)
    return grid_plan


def _check_size(plan: GridPlan, format: str) -> None:
    """Raise LayoutError for a picture that is larger than its format can hold."""
    largest = FORMATS[format].largest
    if max(plan.height, plan.width) > largest:
        size = by((plan.width, plan.height))
        limit = f"{format} holds ({largest} a side)"
        hint = "--format png, or --channels and --nrow"
        raise LayoutError(f"its picture of {size} pixels is more than {limit}; {hint}")


def _strip_scale(height: int, columns: int, min_tile: int) -> tuple[int, int]:
    """The factors, down and across, by which a strip is enlarged. The strip becomes at
    most STRIP_WIDTH wide, if each number can have a pixel, and not too low to be seen.

    Args:
        height: rows of a tile; a vector has 1.
        columns: numbers beside each other.
        min_tile: pixels of a number's width at most, and of its height at least.
    """
    across = min(min_tile, max(1, STRIP_WIDTH // columns))
    down = max(min_tile, min(columns * across, STRIP_WIDTH) // _STRIP_RATIO)
    return -(-down // height), across


def square(count: int, height: int, width: int) -> int:
    """The number of columns that makes a picture about square: its longer side is as
    short as possible. Of equally good numbers, the largest.

    Args:
        count: number of tiles.
        height, width: size of a tile with its padding, in any unit.
    """
    # the largest first, since `min` takes the first of equals
    return min(
        range(count, 0, -1),
        key=lambda columns: max(columns * width, -(-count // columns) * height),
    )


def strips(
    plan: GridPlan,
    tiles: Tiles,
    colors: Palette,
    labels: Mapping[int, Label] | None = None,
    marks: Bytes | None = None,
) -> Iterator[Bytes]:
    """Yield the picture from top to bottom in pieces, each of which is overwritten by
    the next one.

    Args:
        tiles: levels uint8 [N, h, w], or RGB [N, h, w, 3], before they are enlarged.
        colors: levels of the padding and of the letters.
        labels: labels by number of the tile, written on the enlarged tiles.
        marks: the mark on each tile, uint8 [N]: NONE, ZERO or CONSTANT. It is drawn
            before the label.

    Yields:
        uint8 [rows, width], or [rows, 3 · width] with the colours side by side.
    """
    from featviz.drawing import loops

    depth = prod(tiles.shape[3:])  # 1 for levels
    row_height = plan.tile[0] + plan.padding
    # A picture may have 100 MB, but a core's cache only one. So a piece of a few rows of
    # tiles is made, filtered and compressed before the next one.
    rows_at_a_time = max(1, PIECE_BYTES // (plan.width * depth * row_height))
    rows_at_a_time = min(plan.rows, rows_at_a_time)
    step = rows_at_a_time * plan.columns
    # the first piece has the padding above all tiles, too
    buffer_height = plan.padding + rows_at_a_time * row_height
    buffer = np.full((buffer_height, plan.width * depth), colors.pad, np.uint8)
    piece = buffer[plan.padding :]
    for first in range(0, plan.tile_count, step):
        levels = for_loops(tiles[first : first + step])
        count = len(levels)
        # the last piece may have fewer tiles: those of the piece before are erased
        if count < step:
            piece[:] = colors.pad
        rows = levels.reshape(count, plan.map_size[0], -1)
        loops.lay_tiles(rows, plan.columns, *plan.scale, depth, plan.padding, piece)
        enlarged = _enlarged_tiles(piece, plan)
        if marks is not None and marks[first : first + count].any():
            draw_marks(enlarged, marks[first : first + count], colors)
        for number, label in (labels or {}).items():
            if first <= number < first + count:
                tile = enlarged[divmod(number - first, plan.columns)]
                write_label(tile, label, colors)
        height = -(-count // plan.columns) * row_height
        yield piece[:height] if first else buffer[: plan.padding + height]


def _enlarged_tiles(pixels: Bytes, plan: GridPlan) -> Bytes:
    """The enlarged tiles in a piece of a picture, a view [rows, columns, h, w, depth].

    Args:
        pixels: uint8 [rows, depth · width]: whole rows of tiles, each with the padding
            below it.
    """
    height, width = plan.tile
    padding = plan.padding
    depth = pixels.shape[1] // plan.width
    shape = (-1, height + padding, plan.columns, width + padding, depth)
    cells = pixels[:, padding * depth :].reshape(shape).swapaxes(1, 2)
    return cells[:, :, :height, :width]


def draw_marks(tiles: Bytes, marks: Bytes, colors: Palette) -> None:
    """Draw marks across tiles, in place.

    Args:
        tiles: uint8 [rows, columns, h, w, depth], enlarged.
        marks: uint8 [N], row by row; the last row may have fewer.
    """
    size = (tiles.shape[2], tiles.shape[3])
    for mark in (ZERO, CONSTANT):
        numbers = (marks == mark).nonzero()[0]
        rows, columns = np.divmod(numbers[:, None], tiles.shape[1])
        # A marked map is constant, so its first pixel is its colour. Ink that is half of
        # all levels away can be seen on any colour.
        backgrounds = tiles[rows, columns, 0, 0, :1].astype(int)
        inks = (backgrounds + colors.levels // 2) % colors.levels
        y, x = mark_shapes(size)[mark - 1].nonzero()
        tiles[rows, columns, y, x] = inks


def write_label(tile: Bytes, label: Label, colors: Palette) -> None:
    """Write a label on one tile, in place. A text that has no room is left out.

    Args:
        tile: uint8 [h, w, depth], enlarged.
    """
    height, width = tile.shape[:2]
    taken_lines = taken_columns = 0
    if label.corner:
        letters = lettering(label.corner, colors.light, colors.dark)
        lines, columns = letters.shape[:2]
        if lines <= height and columns <= width:
            tile[:lines, :columns] = letters
            taken_lines = lines
            taken_columns = columns
    if label.shared_by:
        letters = lettering(label.shared_by, colors.light, colors.dark)
        top = height - letters.shape[0]
        left = width - letters.shape[1]
        # it must not cover the channel's number
        is_free = top >= taken_lines or left >= taken_columns
        if is_free and top >= 0 and left >= 0:
            tile[top:, left:] = letters


@lru_cache(4096)
def lettering(text: str, light: int, dark: int) -> Bytes:
    """A text as pixels, uint8 [height, width, 1]: letters of the level `light` on a ground
    of the level `dark`."""
    return np.where(glyphs(text), light, dark).astype(np.uint8)[..., None]


def glyphs(text: str) -> np.ndarray:
    """The pixels of a text's letters in Pillow's bitmap font, bool [height, width], with
    a margin of a pixel on each side. (Digits fill rows 2 to 8 of the font's 11, and the
    last column of a letter is empty.)"""
    mask = ImageFont.load_default_imagefont().getmask(text, mode="1")
    ink = np.asarray(mask, np.uint8).reshape(mask.size[::-1]) > 0
    return np.pad(ink[1:10], ((0, 0), (1, 0)))


@lru_cache(64)
def mark_shapes(size: tuple[int, int]) -> np.ndarray:
    """The pixels of both marks, bool [2, height, width]: ZERO is both diagonals, CONSTANT
    the rising one. All pixels are False if the tile has no room for a mark.

    Args:
        size: height and width of the tile, enlarged.
    """
    height, width = size
    y, x = np.mgrid[0:height, 0:width]
    reach = max(1, max(size) // _STROKE) * max(size) / 2
    # pixels near the line from the lower left to the upper right corner
    rising = abs((height - 1 - y) * (width - 1) - x * (height - 1)) < reach
    rising &= min(size) >= SMALLEST
    return np.stack([rising | rising[:, ::-1], rising])
