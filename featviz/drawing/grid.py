"""From tiles to one picture, in make_grid's arrangement, row of tiles by row of tiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from featviz.errors import LayoutError
from featviz.records import FORMATS, Bytes, DrawOptions, GridPlan, Tiles
from featviz.text import by

PIECE_BYTES = 2**18
"""About so many pixels of a picture are made at a time: they stay in a core's cache."""

STRIP_WIDTH = 1024
"""Pixels that a strip of numbers should at most be wide when its cells are enlarged."""

ALONE = 224
"""Pixels that the longer side of a tile without neighbours should have."""

Stamper = Callable[[int, Bytes], None]
"""Writes on the tile with a number, uint8 [height, width, depth], a view into the picture."""


def plan(shape: Sequence[int], options: DrawOptions, strip: bool = False) -> GridPlan:
    """Lay out the tiles of maps [C, S, H, W], S of them side by side for each channel.

    As in make_grid, fewer maps than `nrow` make a narrower picture, and a single map gets no
    padding. A strip is one row without padding, unless `nrow` says otherwise.
    """
    channels, slices, height, width = shape
    count = channels * slices
    scale = _strip_scale(count, height, options) if strip else _scale(height, width, options)
    padding = 0 if strip or count == 1 else options.padding
    if options.nrow is not None:
        columns = min(options.nrow, count)
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
    found, most = plan(shape, options, strip), FORMATS[options.format].largest
    if max(found.height, found.width) > most:
        raise LayoutError(
            f"its picture of {by((found.width, found.height))} pixels is more than "
            f"{options.format} holds ({most} a side); --format png, or --max-maps and --nrow"
        )
    return found


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


def strips(
    plan: GridPlan, tiles: Tiles, pad: int, lead: int = 0, stamper: Stamper | None = None
) -> Iterator[Bytes]:
    """Yield the picture from top to bottom in pieces, never the whole.

    Args:
        tiles: uint8 [maps, h, w] or [maps, h, w, 3], not yet enlarged.
        pad: the index (or the grey) between and around tiles, and where the last row has none.
        lead: zeros before each row, for an encoder that puts something there.
        stamper: what is written on the tiles once they are enlarged.

    Yields:
        uint8 [rows, lead + width], or [rows, lead + 3 · width] with the colours side by side.
    """
    depth = _depth(tiles)
    if plan.padding:
        yield _blank(plan, plan.padding, pad, lead, depth)
    at_a_time = max(1, PIECE_BYTES // (depth * plan.width * (plan.tile[0] + plan.padding)))
    for row in range(0, plan.rows, at_a_time):
        count = min(at_a_time, plan.rows - row)
        first, last = row * plan.columns, (row + count) * plan.columns
        piece, slots = _rows_of_tiles(plan, tiles[first:last], count, pad, lead)
        if stamper is not None:
            _stamp(plan, slots, range(first, min(last, plan.maps)), depth, stamper)
        yield piece


def compose(plan: GridPlan, tiles: Tiles, pad: int, stamper: Stamper | None = None) -> Bytes:
    """The whole picture at once, uint8 [height, width] or [height, width, 3]."""
    whole = np.concatenate(list(strips(plan, tiles, pad, stamper=stamper)))
    return whole if _depth(tiles) == 1 else whole.reshape(plan.height, plan.width, 3)


def _depth(tiles: Tiles) -> int:
    """Bytes of a pixel."""
    return 3 if len(tiles.shape) == 4 else 1


def _rows_of_tiles(
    plan: GridPlan, tiles: Bytes, rows: int, pad: int, lead: int
) -> tuple[Bytes, Bytes]:
    """Some rows of tiles as a piece of the picture, and the piece's slots for them as a view
    [rows, height, columns, width · depth]."""
    depth = _depth(tiles)
    for axis, factor in zip((1, 2), plan.scale, strict=True):
        tiles = np.repeat(tiles, factor, axis) if factor > 1 else tiles
    tiles = tiles.reshape(*tiles.shape[:2], -1)
    height, width, across = plan.tile[0], plan.tile[1] * depth, plan.padding * depth
    piece = _blank(plan, rows * (height + plan.padding), pad, lead, depth)
    slots = piece[:, lead + across :].reshape(
        rows, height + plan.padding, plan.columns, width + across
    )
    slots = slots[:, :height, :, :width]
    full = len(tiles) // plan.columns
    whole = tiles[: full * plan.columns].reshape(full, plan.columns, height, width)
    slots[:full] = whole.transpose(0, 2, 1, 3)
    rest = tiles[full * plan.columns :]
    slots[full:, :, : len(rest)] = rest.transpose(1, 0, 2)
    return piece, slots


def _stamp(plan: GridPlan, slots: Bytes, numbers: range, depth: int, stamper: Stamper) -> None:
    for place, number in enumerate(numbers):
        row, column = divmod(place, plan.columns)
        stamper(number, slots[row, :, column].reshape(*plan.tile, depth))


def _blank(plan: GridPlan, rows: int, pad: int, lead: int, depth: int) -> Bytes:
    blank = np.full((rows, lead + plan.width * depth), pad, np.uint8)
    blank[:, :lead] = 0
    return blank


def _scale(height: int, width: int, options: DrawOptions) -> tuple[int, int]:
    factor = options.scale or max(1, -(-options.min_tile // max(height, width)))
    return factor, factor


def _strip_scale(count: int, rows: int, options: DrawOptions) -> tuple[int, int]:
    """A strip grows to the height of `min_tile`, its cells narrower where it would get too wide."""
    if options.scale:
        return options.scale, options.scale
    return -(-options.min_tile // rows), min(options.min_tile, max(1, STRIP_WIDTH // count))


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
