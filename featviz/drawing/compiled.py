"""The loops over values that `scan` runs on a CPU, compiled by numba; without the GIL.

A row is read while it lies in the cache. The loops are written so that LLVM takes several values
at a time; in ns a value on one core, for maps of 112² as of 28²: the extremes of integers that have
the order of the floats, with both counts, 0.09 (`min` and `max` of floats take five times as long);
float32 sums of short blocks 0.04 (in float64 0.29); levels 0.05. Loops go over indices, since those
over the values themselves take up to ten times as long, and each has a function of its own.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import numpy as np
from numba import njit

_BLOCK = 2048
"""Values that are summed up in float32, before the sum is added to one in float64."""

_CANCELLATION = 4.0
"""Where the squared distance of the mean from the shift exceeds the variance by this factor, digits
are lost in E[d²] - E[d]²: shift by the mean."""

_TINY = 1e-30
"""Variances below lose digits to float32's smallest squares."""

_LAST = np.int32(0x7FFFFFFF)
"""All bits of a float32 but its sign."""

_INFINITE = np.int32(0x7F800000)
"""The bits of an infinite float32; NaN has more."""

_FAR = 2**40
"""More than any sum of differences in a row."""

_REORDER = {"reassoc", "nsz", "contract"}
"""Sums may be taken in another order, so that several values are added at once. NaN counts."""

_POINT, _HALF = 22, 1 << 21
"""Bits behind the point of the weights by which maps are resized, and a half."""


def _compiled(signature: str, **options: Any) -> Any:
    return njit(signature, nogil=True, cache=True, **options)


@_compiled("int32(int32)", inline="always")
@no_type_check
def _key(bits):
    """An integer for a float32's bits, or back, whose order is that of the floats."""
    return bits ^ ((bits >> np.int32(31)) & _LAST)


@_compiled("UniTuple(int32,4)(int32[::1])")
@no_type_check
def _extremes(bits):
    """Keys of the smallest and largest value; how many are zero, and NaN or infinite."""
    low, high = np.int32(_LAST), np.int32(~_LAST)
    zeros, nonfinite = np.int32(0), np.int32(0)
    for i in range(bits.size):
        key, size = _key(bits[i]), bits[i] & _LAST
        low, high = min(low, key), max(high, key)
        zeros += np.int32(size == 0)
        nonfinite += np.int32(size >= _INFINITE)
    return low, high, zeros, nonfinite


@_compiled("UniTuple(float32,2)(float32[::1],float32)", fastmath=_REORDER)
@no_type_check
def _block_sums(block, shift):
    total, squares = np.float32(0), np.float32(0)
    for i in range(block.size):
        distance = block[i] - shift
        total += distance
        squares += distance * distance
    return total, squares


@_compiled("UniTuple(float64,2)(float32[::1],float32)")
@no_type_check
def _moments(row, shift):
    """Mean of the distances from `shift`, and their variance."""
    total = squares = 0.0
    for start in range(0, row.size, _BLOCK):
        some, square = _block_sums(row[start : start + _BLOCK], shift)
        total, squares = total + some, squares + square
    mean = total / row.size
    return mean, squares / row.size - mean * mean


@_compiled("UniTuple(float64,4)(float32[::1])")
@no_type_check
def _careful(row):
    """Minimum, maximum, mean and standard deviation of the finite values, in float64."""
    low, high, total, count = math.inf, -math.inf, 0.0, 0
    for value in row:
        if math.isfinite(value):
            low, high = min(low, value), max(high, value)
            total, count = total + value, count + 1
    if count == 0:
        return math.nan, math.nan, math.nan, math.nan
    mean, squares = total / count, 0.0
    for value in row:
        if math.isfinite(value):
            squares += (value - mean) ** 2
    return low, high, mean, math.sqrt(squares / count)


@_compiled("void(float32[:,::1],int32[:,::1],float32[:,::1])")
@no_type_check
def statistics(rows, bits, stats):
    """Fill `stats` [N, 6] with the columns of `records.STAT_COLUMNS` of rows [N, W].

    Args:
        bits: the same memory as integers.
    """
    extremes = np.empty(2, np.int32)
    for n in range(len(rows)):
        row = rows[n]
        low, high, zeros, nonfinite = _extremes(bits[n])
        extremes[0], extremes[1] = _key(low), _key(high)
        ends = extremes.view(np.float32)
        shift = row[0]
        mean, variance = _moments(row, shift)
        if mean * mean > _CANCELLATION * variance and nonfinite == 0:
            shift = np.float32(shift + mean)
            mean, variance = _moments(row, shift)
        stats[n, 0], stats[n, 1] = ends[0] + np.float32(0), ends[1] + np.float32(0)
        stats[n, 2], stats[n, 3] = shift + mean, math.sqrt(max(variance, 0.0))
        if nonfinite == 0 and ends[0] == ends[1]:
            stats[n, 2], stats[n, 3] = ends[0], 0
        elif nonfinite > 0 or not (_TINY < variance < math.inf):
            stats[n, 0], stats[n, 1], stats[n, 2], stats[n, 3] = _careful(row)
        stats[n, 4], stats[n, 5] = zeros / row.size, nonfinite


@_compiled("void(float32[::1],float32,float32,float32,uint8[::1])")
@no_type_check
def _scale(row, low, factor, half, levels):
    for i in range(row.size):
        levels[i] = np.uint8(np.int32((row[i] - low) * factor + half))


@_compiled("void(float32[::1],float32,float32,float32,float32,uint8[::1])")
@no_type_check
def _scale_and_clip(row, low, factor, half, top, levels):
    for i in range(row.size):
        level = (row[i] - low) * factor + half
        level = level if level > np.float32(0) else np.float32(0)  # also for NaN
        level = level if level < top else top
        levels[i] = np.uint8(np.int32(level))


@_compiled("void(float32[:,::1],float32[::1],float32[::1],float32,float32,uint8[:,::1])")
@no_type_check
def quantise(rows, low, factor, half, top, levels):
    """Fill `levels` [N, W] with (value - low[n]) · factor[n] + half, cut to a whole number.

    Args:
        top: clip to 0..top first; below 0 where no value can lie outside.
    """
    for n in range(len(rows)):
        if top < 0:
            _scale(rows[n], low[n], factor[n], half, levels[n])
        else:
            _scale_and_clip(rows[n], low[n], factor[n], half, top, levels[n])


@_compiled("void(uint8[::1],uint8[::1])")
@no_type_check
def _copy(source, target):
    for i in range(source.size):
        target[i] = source[i]


@_compiled("void(uint8[:,::1],uint8[:,:,::1])")
@no_type_check
def _spread(pixels, wide):
    """Repeat pixels [N, depth] in [N, times, depth]."""
    for again in range(wide.shape[1]):
        for colour in range(wide.shape[2]):
            for n in range(pixels.shape[0]):
                wide[n, again, colour] = pixels[n, colour]


@_compiled("void(uint8[:,:,::1],int64,int64,int64,int64,int64,int64,uint8[:,::1])")
@no_type_check
def lay_tiles(tiles, columns, down, across, depth, padding, pad, piece):
    """Fill a piece of a picture with rows of tiles; see `grid._lay`."""
    count, height, width = tiles.shape
    if across > 1:
        wide = np.empty((count, height, width * across), np.uint8)
        _spread(tiles.reshape(-1, depth), wide.reshape(-1, across, depth))
        tiles, width = wide, width * across
    step = width + padding * depth
    for row in range(-(-count // columns)):
        top = row * (height * down + padding)
        for y in range(height):
            line = piece[top + y * down]
            line[:] = pad
            place = padding * depth
            for n in range(row * columns, min(count, (row + 1) * columns)):
                _copy(tiles[n, y], line[place : place + width])
                place += step
            for again in range(1, down):
                _copy(line, piece[top + y * down + again])
        piece[top + height * down : top + height * down + padding] = pad


@_compiled("int64(uint8[::1],uint8[::1])")
@no_type_check
def _distance(one, other):
    """Sum of the differences, as bytes of -128 to 127 without their sign."""
    total = np.int32(0)
    for i in range(one.size):
        total += abs(np.int32(np.int8(one[i] - other[i])))
    return total


@_compiled("void(uint8[::1],uint8[::1],uint8[::1])")
@no_type_check
def _subtract(one, other, difference):
    for i in range(one.size):
        difference[i] = one[i] - other[i]


@_compiled("void(uint8[:,::1],uint8[::1],int64,uint8[:,::1])")
@no_type_check
def filter_rows(piece, before, step, filtered):
    """Filter rows [R, W] for PNG into [R, 1 + W]; see `png.filter_rows`."""
    width = piece.shape[1]
    for r in range(len(piece)):
        row, out = piece[r], filtered[r]
        above = piece[r - 1] if r > 0 else before
        by_up = _distance(row, above) if above.size > 0 else _FAR
        if by_up == 0:
            out[0], out[1:] = 2, 0
            continue
        left, right, first = row[: width - step], row[step:], row[:step]
        if by_up < _distance(right, left) + _distance(first, np.zeros_like(first)):
            out[0] = 2
            _subtract(row, above, out[1:])
        else:
            out[0], out[1 : 1 + step] = 1, first
            _subtract(right, left, out[1 + step :])


@_compiled("uint32(uint8[::1],uint32[:,::1])")
@no_type_check
def crc32c(data, tables):
    """CRC-32C, eight bytes at a time; see `event_file`."""
    crc = np.uint32(0xFFFFFFFF)
    whole = data.size // 8 * 8
    for i in range(0, whole, 8):
        crc = (
            tables[7, data[i] ^ (crc & 255)]
            ^ tables[6, data[i + 1] ^ (crc >> 8 & 255)]
            ^ tables[5, data[i + 2] ^ (crc >> 16 & 255)]
            ^ tables[4, data[i + 3] ^ (crc >> 24)]
            ^ tables[3, data[i + 4]]
            ^ tables[2, data[i + 5]]
            ^ tables[1, data[i + 6]]
            ^ tables[0, data[i + 7]]
        )
    for i in range(whole, data.size):
        crc = np.uint32(tables[0, (crc ^ data[i]) & 255] ^ (crc >> 8))
    return np.uint32(~crc)


@_compiled("UniTuple(float64,2)(float32[::1])", fastmath=_REORDER)
@no_type_check
def _sums(values):
    total = squares = 0.0
    for i in range(values.size):
        value = np.float64(values[i])
        total += value
        squares += value * value
    return total, squares


@_compiled("UniTuple(float64,2)(float32[::1],float64,float64,int64[:,::1])")
@no_type_check
def count(values, low, factor, counts):
    """Add finite values to counts [4, bins] by (value - low) · factor; their sum, and that of their
    squares.

    The counts of neighbours stand apart: what is alike would have to wait for the count before.
    """
    last = np.int32(counts.shape[1] - 1)
    for i in range(values.size):
        place = np.int32((np.float64(values[i]) - low) * factor)
        counts[i & 3, max(np.int32(0), min(place, last))] += 1
    return _sums(values)


@_compiled("void(uint8[::1],int64[:,::1],uint32[:,::1],uint8[::1])")
@no_type_check
def _widen(row, places, weights, wide):
    for x in range(wide.size):
        total = row[places[0, x]] * weights[0, x] + row[places[1, x]] * weights[1, x]
        wide[x] = (total + _HALF) >> _POINT


@_compiled("void(uint8[::1],uint8[::1],uint32,uint32,uint8[::1])")
@no_type_check
def _between(above, below, first, second, row):
    for x in range(row.size):
        total = np.uint32(above[x]) * first + np.uint32(below[x]) * second + np.uint32(_HALF)
        row[x] = total >> np.uint32(_POINT)


@_compiled(
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


@_compiled("void(uint8[::1],float64[:,::1],uint8[:,::1],float64,uint8[:,::1])")
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
