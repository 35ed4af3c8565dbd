"""From tiles to one picture, in make_grid's arrangement, row of tiles by row of tiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from featviz.drawing import labels, png, scan
from featviz.drawing.labels import Stamps
from featviz.errors import LayoutError
from featviz.records import FORMATS, Bytes, DrawOptions, GridPlan, Tiles
from featviz.text import by

PIECE_BYTES = 2**19
"""About so many pixels of a picture are made at a time: they stay in a core's cache."""

STRIP_WIDTH = 1024
"""Pixels that a strip of numbers should at most be wide when its cells are enlarged."""

STRIP_RATIO = 8
"""A strip is enlarged until it is no more than so many times as wide as it is high."""

ALONE = 224
"""Pixels that the longer side of a tile without neighbours should have."""


def plan(shape: Sequence[int], options: DrawOptions, strip: bool = False) -> GridPlan:
    """Lay out the tiles of maps [C, S, H, W], S of them side by side for each channel.

    As in make_grid, fewer maps than `nrow` make a narrower picture, and a single map gets no
    padding. A strip is one row without padding, unless `nrow` says otherwise.
    """
    channels, slices, height, width = shape
    count = channels * slices
    across = min(options.nrow or count, count)
    scale = _strip_scale(across, height, options) if strip else _scale(height, width, options)
    padding = 0 if strip or count == 1 else options.gap
    if options.nrow is not None:
        columns = across
    else:
        tile = (height * scale[0] + padding, width * scale[1] + padding)
        columns = count if strip else _square(channels, tile[0], tile[1] * slices) * slices
    return GridPlan(count, columns, -(-count // columns), (height, width), scale, padding)


def plan_file(
    shape: Sequence[int], options: DrawOptions, *, strip: bool = False, alone: bool = False
) -> GridPlan:
    """`plan`, for a file in the format of the options.

    Args:
        alone: the tile of a layer that is reduced to one, which `auto` makes as large as a picture.

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    if alone:
        options = replace(options, min_tile=max(options.min_tile, ALONE))
    geometry = plan(shape, options, strip)
    check_held(geometry, options.format)
    return geometry


def check_held(plan: GridPlan, format: str) -> None:
    """Refuse a picture that its format cannot hold.

    Raises:
        LayoutError: it is too large.
    """
    most = FORMATS[format].largest
    if max(plan.height, plan.width) > most:
        raise LayoutError(
            f"its picture of {by((plan.width, plan.height))} pixels is more than "
            f"{format} holds ({most} a side); --format png, or --max-maps and --nrow"
        )


def pick_maps(means: Sequence[float], options: DrawOptions) -> list[int] | None:
    """The maps to draw, in channel order, by their `means`; None where all are drawn."""
    count, limit = len(means), options.max_maps
    if limit is None or count <= limit:
        return None
    if options.pick == "first":
        return list(range(limit))
    if options.pick == "spread":
        return sorted({round(i) for i in np.linspace(0, count - 1, limit)})
    strongest = sorted(range(count), key=lambda i: (-np.nan_to_num(means[i], nan=-np.inf), i))
    return sorted(strongest[:limit])


def strips(plan: GridPlan, tiles: Tiles, pad: int, stamps: Stamps | None = None) -> Iterator[Bytes]:
    """Yield the picture from top to bottom in pieces, never the whole; each is overwritten by the
    next one.

    Args:
        tiles: uint8 [maps, h, w] or [maps, h, w, 3], not yet enlarged.
        pad: the index (or the grey) between and around tiles, and where the last row has none.
        stamps: what is written above the tiles, and on them once they are enlarged.

    Yields:
        uint8 [rows, width], or [rows, 3 · width] with the colours side by side.
    """
    head = _head(plan, _depth(tiles), pad, stamps)
    if len(head):
        yield head
    high, at_a_time = _in_pieces(plan, _depth(tiles))
    piece = np.empty((at_a_time * high, head.shape[1]), np.uint8)
    for row in range(0, plan.rows, at_a_time):
        part = piece[: min(at_a_time, plan.rows - row) * high]
        _fill(plan, tiles, pad, row, part, stamps)
        yield part


def filtered_strips(
    plan: GridPlan, tiles: Tiles, pad: int, stamps: Stamps | None = None
) -> Iterator[Bytes]:
    """Yield the pieces of `strips` as PNG has them: each row filtered, behind the number of its
    filter, uint8 [rows, 1 + width] or [rows, 1 + 3 · width]. A compiled loop makes them at once
    where no texts are written on tiles."""
    loops = scan.compiled()
    if loops is None or (stamps is not None and stamps.has_texts):
        yield from png.filtered(strips(plan, tiles, pad, stamps), _depth(tiles))
        return
    depth, columns = _depth(tiles), plan.columns
    head = _head(plan, depth, pad, stamps)
    top, first = len(head), np.zeros(head.shape[1], np.uint8)
    above = head[-1].copy() if top else first
    marks, shapes, half = _marks(plan, stamps, depth)
    high, at_a_time = _in_pieces(plan, depth)
    piece = np.empty((top + at_a_time * high, 1 + len(above)), np.uint8)
    if top:
        png.filter_rows(head, first[:0], depth, piece[:top])
    for row in range(0, plan.rows, at_a_time):
        here = slice(row * columns, (row + at_a_time) * columns)
        part = np.require(tiles[here], requirements=["C", "W"])
        part = part.reshape(*part.shape[:2], -1)
        rows = piece[: top + min(at_a_time, plan.rows - row) * high]
        is_first = row == 0 and not top
        form = (columns, *plan.scale, depth, plan.padding, pad)
        loops.lay_filtered(part, *form, marks[here], shapes, half, above, is_first, rows[top:])
        yield rows
        top = 0  # what is above the tiles is in the first piece


def compose(plan: GridPlan, tiles: Tiles, pad: int, stamps: Stamps | None = None) -> Bytes:
    """The whole picture at once, uint8 [height, width] or [height, width, 3]."""
    depth = _depth(tiles)
    whole = np.full((plan.height, plan.width * depth), pad, np.uint8)
    head = _head(plan, depth, pad, stamps)
    whole[: len(head)] = head
    _fill(plan, tiles, pad, 0, whole[len(head) :], stamps)
    return whole if depth == 1 else whole.reshape(plan.height, plan.width, 3)


def _depth(tiles: Tiles) -> int:
    """Bytes of a pixel."""
    return 3 if len(tiles.shape) == 4 else 1


def _head(plan: GridPlan, depth: int, pad: int, stamps: Stamps | None) -> Bytes:
    """What is above the first row of tiles, [rows, depth · width]: the title, and padding."""
    head = np.full((plan.top + plan.padding, plan.width, depth), pad, np.uint8)
    if plan.top and stamps is not None:
        stamps.write_title(head[: plan.top])
    return head.reshape(len(head), plan.width * depth)


def _in_pieces(plan: GridPlan, depth: int) -> tuple[int, int]:
    """Pixels from a row of tiles to the next one; rows of tiles that make a piece."""
    high = plan.tile[0] + plan.padding
    return high, min(plan.rows, max(1, PIECE_BYTES // (plan.width * depth * high)))


def _marks(plan: GridPlan, stamps: Stamps | None, depth: int) -> tuple[Bytes, Bytes, int]:
    """What the compiled loop takes of marks: that of each tile, their pixels [2, H, depth · W], and
    how far they are from their ground."""
    if stamps is None:
        return np.empty(0, np.uint8), np.empty((2, 0, 0), np.uint8), 0
    return stamps.marks, labels.shapes(plan.tile).repeat(depth, 2).view(np.uint8), stamps.half


def _fill(
    plan: GridPlan, tiles: Tiles, pad: int, row: int, piece: Bytes, stamps: Stamps | None
) -> None:
    """Fill a piece with rows of tiles from `row` on and the padding below each; write on them."""
    height, width = plan.tile
    depth, first = _depth(tiles), row * plan.columns
    last = min(plan.maps, first + len(piece) // (height + plan.padding) * plan.columns)
    part = tiles[first:last]
    _lay(plan, part.reshape(*part.shape[:2], -1), depth, pad, piece)
    if stamps is None:
        return
    pixels = piece.reshape(len(piece), -1, depth)
    for number in stamps.within(first, last):
        top, left = _corner(plan, number - first)
        stamps.write(number, pixels[top : top + height, left : left + width])


def _lay(plan: GridPlan, tiles: Bytes, depth: int, pad: int, piece: Bytes) -> None:
    """Fill a piece with tiles [n, h, depth · w], each enlarged."""
    loops = scan.compiled()
    if loops is not None:
        tiles = np.require(tiles, requirements=["C", "W"])
        loops.lay_tiles(tiles, plan.columns, *plan.scale, depth, plan.padding, pad, piece)
        return
    piece[:] = pad
    (down, across), (height, width) = plan.scale, plan.tile
    for place, tile in enumerate(tiles.reshape(*tiles.shape[:2], -1, depth)):
        top, left = _corner(plan, place)
        enlarged = tile.repeat(down, 0).repeat(across, 1).reshape(height, -1)
        piece[top : top + height, left * depth : (left + width) * depth] = enlarged


def _corner(plan: GridPlan, place: int) -> tuple[int, int]:
    """Pixels above and to the left of a tile in a piece."""
    row, column = divmod(place, plan.columns)
    height, width = plan.tile
    return row * (height + plan.padding), plan.padding + column * (width + plan.padding)


def _scale(height: int, width: int, options: DrawOptions) -> tuple[int, int]:
    factor = options.scale or max(1, -(-options.min_tile // max(height, width)))
    return factor, factor


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
    """Columns for which the picture's longer side is shortest; of equals, the wider picture.

    With more columns the width grows and the height does not: the best lies where they cross.
    """

    def height(columns: int) -> int:
        return -(-count // columns) * tile_height

    crossing = 1 + bisect_left(
        range(1, count), True, key=lambda columns: columns * tile_width >= height(columns)
    )
    near = {max(1, crossing - 1), crossing}
    return min(near, key=lambda columns: (max(columns * tile_width, height(columns)), -columns))
