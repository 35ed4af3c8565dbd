"""The compiled loops over tiles: laid out, enlarged, marked, filtered for PNG, resized and blended.

As in `compiled`, of which this is the other half, LLVM takes several bytes at a time; in ns a byte
on one core: a copy 0.006, the sum of the differences of two rows 0.04, a row enlarged 0.01.
"""

from __future__ import annotations

from typing import Any, no_type_check

import numpy as np
from numba import njit

_FAR = 2**40
"""More than any sum of differences in a row."""

_SUB, _UP = 1, 2
"""The numbers of PNG's filters."""

_POINT, _HALF = 22, 1 << 21
"""Bits behind the point of the weights by which maps are resized, and a half."""


def compiled(signature: str, **options: Any) -> Any:
    """A decorator: compile a function for this signature, without the GIL."""
    return njit(signature, nogil=True, cache=True, **options)


@compiled("void(uint8[::1],uint8[::1])")
@no_type_check
def _copy(source, target):
    for i in range(source.size):
        target[i] = source[i]


@compiled("void(uint8[::1],uint8[::1],int64)", inline="always")
@no_type_check
def _repeat(pixels, wide, times):
    for n in range(pixels.size):
        for again in range(times):
            wide[n * times + again] = pixels[n]


@compiled("void(uint8[::1],uint8[::1],int64)")
@no_type_check
def _spread(pixels, wide, times):
    """Repeat each pixel of a byte; a factor that LLVM knows makes it twenty times as fast."""
    if times == 2:
        _repeat(pixels, wide, 2)
    elif times == 3:
        _repeat(pixels, wide, 3)
    elif times == 4:
        _repeat(pixels, wide, 4)
    elif times == 5:
        _repeat(pixels, wide, 5)
    else:
        _repeat(pixels, wide, times)


@compiled("uint8[:,:,::1](uint8[:,:,::1],int64,int64)")
@no_type_check
def _widened(tiles, times, depth):
    """Tiles [N, h, depth · w] with each pixel repeated across."""
    count, height, width = tiles.shape
    wide = np.empty((count, height, width * times), np.uint8)
    if depth == 1:
        _spread(tiles.reshape(-1), wide.reshape(-1), times)
        return wide
    pixels, repeated = tiles.reshape(-1, depth), wide.reshape(-1, times, depth)
    for n in range(len(pixels)):
        repeated[n] = pixels[n]
    return wide


@compiled("void(uint8[:,:,::1],int64,int64,uint8[::1])")
@no_type_check
def _lay_row(tiles, y, gap, line):
    """Put row `y` of tiles [N, h, w] into a line, each behind a gap."""
    width = tiles.shape[2]
    for n in range(len(tiles)):
        place = gap + n * (gap + width)
        _copy(tiles[n, y], line[place : place + width])


@compiled("void(uint8[:,:,::1],int64,int64,int64,int64,int64,int64,uint8[:,::1])")
@no_type_check
def lay_tiles(tiles, columns, down, across, depth, padding, pad, piece):
    """Fill a piece of a picture with rows of tiles; see `grid._lay`."""
    count, height = tiles.shape[:2]
    wide = _widened(tiles, across, depth) if across > 1 else tiles
    for row in range(-(-count // columns)):
        part = wide[row * columns : min(count, (row + 1) * columns)]
        top = row * (height * down + padding)
        for y in range(height):
            line = piece[top + y * down]
            line[:] = pad
            _lay_row(part, y, padding * depth, line)
            for again in range(1, down):
                _copy(line, piece[top + y * down + again])
        piece[top + height * down : top + height * down + padding] = pad


@compiled("int64(uint8[::1],uint8[::1])")
@no_type_check
def _distance(one, other):
    """Sum of the differences, as bytes of -128 to 127 without their sign."""
    total = np.int32(0)
    for i in range(one.size):
        total += abs(np.int32(np.int8(one[i] - other[i])))
    return total


@compiled("void(uint8[::1],uint8[::1],uint8[::1])")
@no_type_check
def _subtract(one, other, difference):
    for i in range(one.size):
        difference[i] = one[i] - other[i]


@compiled("void(uint8[::1],uint8[::1],boolean,int64,uint8[::1])")
@no_type_check
def _filter_row(row, above, is_first, step, filtered):
    """Filter one row; see `png.filter_rows`."""
    width = row.size
    by_up = _FAR if is_first else _distance(row, above)
    if by_up == 0:
        filtered[0], filtered[1:] = _UP, 0
        return
    left, right, first = row[: width - step], row[step:], row[:step]
    by_sub = _distance(right, left)
    for i in range(step):
        by_sub += abs(np.int32(np.int8(first[i])))
    if by_up < by_sub:
        filtered[0] = _UP
        _subtract(row, above, filtered[1:])
    else:
        filtered[0], filtered[1 : 1 + step] = _SUB, first
        _subtract(right, left, filtered[1 + step :])


@compiled("void(uint8[:,::1],uint8[::1],int64,uint8[:,::1])")
@no_type_check
def filter_rows(piece, before, step, filtered):
    """Filter rows [R, W] for PNG into [R, 1 + W]; see `png.filter_rows`."""
    for r in range(len(piece)):
        above = piece[r - 1] if r > 0 else before
        _filter_row(piece[r], above, above.size == 0, step, filtered[r])


@compiled("void(uint8[::1],uint8,uint8[::1])")
@no_type_check
def _ink(shape, ink, row):
    for x in range(row.size):
        row[x] = ink if shape[x] else row[x]


@compiled("void(uint8[:,:,::1],uint8[::1],uint8[:,:,::1],int64,int64,int64,uint8[::1])")
@no_type_check
def _mark(tiles, marks, shapes, half, y, gap, line):
    """Write marks on row `y` of enlarged tiles, which lies in a line; see `labels.Stamps`."""
    width = shapes.shape[2]
    for n in range(len(marks)):
        if marks[n] == 0:
            continue
        ground, shape = tiles[n, 0, 0], shapes[marks[n] - 1, y]
        ink = ground + half if ground < half else ground - half
        place = gap + n * (gap + width)
        _ink(shape, np.uint8(ink), line[place : place + width])


@compiled(
    "void(uint8[:,:,::1],int64,int64,int64,int64,int64,int64,"
    "uint8[::1],uint8[:,:,::1],int64,uint8[::1],boolean,uint8[:,::1])"
)
@no_type_check
def lay_filtered(
    tiles,
    columns,
    down,
    across,
    depth,
    padding,
    pad,
    marks,
    shapes,
    half,
    above,
    is_first,
    filtered,
):
    """Fill rows [R, 1 + W] that are filtered for PNG with rows of tiles [N, h, depth · w] and the
    padding below each, so that no pixel is written twice; see `grid.filtered_strips`.

    Args:
        marks: [N], the number of each tile's mark.
        shapes: [2, H, depth · W], the pixels of each mark on an enlarged tile.
        half: how far a mark is from its ground.
        above: [W], the row above the first; the last one takes its place.
        is_first: whether there is no row above.
    """
    count, height, gap, r = tiles.shape[0], tiles.shape[1], padding * depth, 0
    wide = _widened(tiles, across, depth) if across > 1 else tiles
    blank = np.full(above.size, pad, np.uint8)
    plain, line = np.empty_like(blank), np.empty_like(blank)
    for start in range(0, count, columns):
        end = min(count, start + columns)
        is_marked = marks[start:end].any()
        times = down if is_marked else 1
        _copy(blank, plain)
        for y in range(height):
            _lay_row(wide[start:end], y, gap, plain)
            for again in range(times):
                _copy(plain, line)
                if is_marked:
                    row, some = y * down + again, slice(start, end)
                    _mark(tiles[some], marks[some], shapes, half, row, gap, line)
                _filter_row(line, above, is_first, depth, filtered[r])
                _copy(line, above)
                is_first, r = False, r + 1
            for _ in range(times, down):
                filtered[r, 0], filtered[r, 1:] = _UP, 0
                r += 1
        for _ in range(padding):
            _filter_row(blank, above, False, depth, filtered[r])
            _copy(blank, above)
            r += 1


@compiled("void(uint8[::1],int64[:,::1],uint32[:,::1],uint8[::1])")
@no_type_check
def _widen(row, places, weights, wide):
    for x in range(wide.size):
        total = row[places[0, x]] * weights[0, x] + row[places[1, x]] * weights[1, x]
        wide[x] = (total + _HALF) >> _POINT


@compiled("void(uint8[::1],uint8[::1],uint32,uint32,uint8[::1])")
@no_type_check
def _between(above, below, first, second, row):
    for x in range(row.size):
        total = np.uint32(above[x]) * first + np.uint32(below[x]) * second + np.uint32(_HALF)
        row[x] = total >> np.uint32(_POINT)


@compiled(
    "void(uint8[:,:,::1],int64[:,::1],uint32[:,::1],int64[:,::1],uint32[:,::1],uint8[:,:,::1])"
)
@no_type_check
def enlarge(tiles, rows, down, columns, across, enlarged):
    """Resize tiles [N, h, w] to [N, H, W], first across, then down; see `overlay.resized`.

    Args:
        rows: [2, H], the two rows between which an output row lies, with their weights `down`
            [2, H] in 2^-22; `columns` and `across` are [2, W].
    """
    wide = np.empty((tiles.shape[1], enlarged.shape[2]), np.uint8)
    for n in range(len(tiles)):
        for y in range(len(wide)):
            _widen(tiles[n, y], columns, across, wide[y])
        for y in range(enlarged.shape[1]):
            above, below = wide[rows[0, y]], wide[rows[1, y]]
            _between(above, below, down[0, y], down[1, y], enlarged[n, y])


@compiled("void(uint8[::1],float64[:,::1],uint8[:,::1],float64,uint8[:,::1])")
@no_type_check
def blend(levels, over, ground, share, mixed):
    """Fill `mixed` [P, 3] with over[levels] + share · ground, rounded.

    Args:
        over: [256, 3], what the colour of each level gives to the sum, 0..255.
        ground: [P, 3].
    """
    for i in range(levels.size):
        level = levels[i]
        for colour in range(3):
            total = share * ground[i, colour] + over[level, colour]
            mixed[i, colour] = np.uint8(np.int32(total + 0.5))
