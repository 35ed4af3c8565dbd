"""From tiles to one picture, in make_grid's arrangement, row of tiles by row of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from featviz.drawing.labels import Stamps
from featviz.errors import LayoutError
from featviz.options import DrawOptions
from featviz.records import FORMATS, Bytes, GridPlan, Tiles
from featviz.text import by

PIECE_BYTES = 2**19
"""About so many pixels of a picture are made at a time: they stay in a core's cache."""

STRIP_WIDTH = 1024
"""Pixels that a strip of numbers should at most be wide when its cells are enlarged."""

STRIP_RATIO = 8
"""A strip is enlarged until it is no more than so many times as wide as it is high."""

ALONE = 224
"""Pixels that the longer side of a tile without neighbours should have."""


@lru_cache(1024)
def plan(
    shape: tuple[int, ...], options: DrawOptions, *, strip: bool = False, alone: bool = False
) -> GridPlan:
    """Lay out the tiles of maps [C, S, H, W], S of them side by side for each channel.

    As in make_grid, fewer maps than `nrow` make a narrower picture, and a single map gets no
    padding. A strip is one row without padding, unless `nrow` says otherwise.

    Args:
        alone: the tile of a layer that is reduced to one, which `auto` makes as large as a picture.

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    channels, slices, height, width = shape
    count = channels * slices
    across = min(options.nrow or count, count)
    least = max(options.min_tile, ALONE if alone else 0)
    factor = options.scale or max(1, -(-least // max(height, width)))
    scale = _strip_scale(across, height, options) if strip else (factor, factor)
    padding = 0 if strip or count == 1 else options.gap
    if options.nrow is not None or strip:
        columns = across
    else:
        tile = (height * scale[0] + padding, width * scale[1] + padding)
        columns = _square(channels, tile[0], tile[1] * slices) * slices
    made = GridPlan(count, columns, -(-count // columns), (height, width), scale, padding)
    most = FORMATS[options.format].largest
    if max(made.height, made.width) > most:
        raise LayoutError(
            f"its picture of {by((made.width, made.height))} pixels is more than "
            f"{options.format} holds ({most} a side); --format png, or --max-maps and --nrow"
        )
    return made


def strips(plan: GridPlan, tiles: Tiles, pad: int, stamps: Stamps | None = None) -> Iterator[Bytes]:
    """Yield the picture from top to bottom in pieces, never the whole; each is overwritten by the
    next one.

    Args:
        tiles: uint8 [maps, h, w] or [maps, h, w, 3], not yet enlarged.
        pad: the index (or the grey) between and around tiles, and where the last row has none.
        stamps: what is written on the tiles once they are enlarged.

    Yields:
        uint8 [rows, width], or [rows, 3 · width] with the colours side by side.
    """
    from featviz.drawing import loops

    depth = 3 if len(tiles.shape) == 4 else 1
    columns, high, top = plan.columns, plan.tile[0] + plan.padding, plan.padding
    at_a_time = min(plan.rows, max(1, PIECE_BYTES // (plan.width * depth * high)))
    whole = np.full((top + at_a_time * high, plan.width * depth), pad, np.uint8)
    piece = whole[top:]
    for first in range(0, plan.maps, at_a_time * columns):
        last = min(plan.maps, first + at_a_time * columns)
        if last - first < at_a_time * columns:
            piece[:] = pad
        part = np.require(tiles[first:last], requirements=["C", "W"])
        part = part.reshape(*part.shape[:2], -1)
        loops.lay_tiles(part, columns, *plan.scale, depth, plan.padding, piece)
        if stamps is not None:
            pixels = piece.reshape(len(piece), -1, depth)
            for number in stamps.within(first, last):
                row, column = divmod(number - first, columns)
                left = plan.padding + column * (plan.tile[1] + plan.padding)
                here = pixels[row * high :, left : left + plan.tile[1]]
                stamps.write(number, here[: plan.tile[0]])
        rows = -(-(last - first) // columns) * high
        yield piece[:rows] if first else whole[: top + rows]  # the first has the padding above


def compose(plan: GridPlan, tiles: Tiles, pad: int, stamps: Stamps | None = None) -> Bytes:
    """The whole picture at once, uint8 [height, width] or [height, width, 3]."""
    whole = np.empty((plan.height, plan.width, *tiles.shape[3:]), np.uint8)
    top = 0
    for piece in strips(plan, tiles, pad, stamps):
        whole[top : top + len(piece)] = piece.reshape(len(piece), *whole.shape[1:])
        top += len(piece)
    return whole


def _strip_scale(columns: int, rows: int, options: DrawOptions) -> tuple[int, int]:
    """The cells of a strip are as wide as `min_tile`, or narrower where it would get too wide; the
    strip is as high as `min_tile`, or higher where it would be a line."""
    if options.scale:
        return options.scale, options.scale
    across = min(options.min_tile, max(1, STRIP_WIDTH // columns))
    height = max(options.min_tile, min(columns * across, STRIP_WIDTH) // STRIP_RATIO)
    return -(-height // rows), across


@lru_cache(1024)
def _square(count: int, tile_height: int, tile_width: int) -> int:
    """Columns for which the picture's longer side is shortest; of equals, the wider picture."""

    def side(columns: int) -> tuple[int, int]:
        return max(columns * tile_width, -(-count // columns) * tile_height), -columns

    return min(range(1, count + 1), key=side)
