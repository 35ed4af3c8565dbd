"""The loops that `scan` runs on a CPU, compiled by numba; without the GIL. Those over values stand
here, those over tiles in `compiled_tiles`, and that which deflates pictures in `compiled_deflate`.

A row is read while it lies in the cache. The loops are written so that LLVM takes several values
at a time; in ns a value on one core, for maps of 112² as of 28²: the extremes of integers that have
the order of the floats, with both counts, 0.09 (`min` and `max` of floats take five times as long),
and half of that where no value is negative; float32 sums of short blocks 0.04 (in float64 0.29);
levels 0.05. Loops go over indices, since those over the values themselves take up to ten times as
long, and each has a function of its own.
"""

from __future__ import annotations

import math
from typing import no_type_check

import numpy as np

from featviz.drawing.compiled_deflate import deflate
from featviz.drawing.compiled_tiles import (
    blend,
    compiled,
    enlarge,
    filter_rows,
    lay_filtered,
    lay_tiles,
)

__all__ = [
    "blend",
    "compiled",
    "count",
    "crc32c",
    "deflate",
    "enlarge",
    "filter_rows",
    "lay_filtered",
    "lay_tiles",
    "overall",
    "quantise",
    "statistics",
]

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

_PROBE = 256
"""Values of a row that are looked at first: where none is negative, all may be as an activation
gives them, and the integers of their bits are in the order of the values, in half the time."""

_REORDER = {"reassoc", "nsz", "contract"}
"""Sums may be taken in another order, so that several values are added at once. NaN counts."""


@compiled("int32(int32)", inline="always")
@no_type_check
def _key(bits):
    """An integer for a float32's bits, or back, whose order is that of the floats."""
    return bits ^ ((bits >> np.int32(31)) & _LAST)


@compiled("UniTuple(int32,3)(int32[::1])")
@no_type_check
def _plain_extremes(bits):
    """The smallest and the largest of the integers, and how many of the values are zero."""
    low, high, zeros = np.int32(_LAST), np.int32(~_LAST), np.int32(0)
    for i in range(bits.size):
        low, high = min(low, bits[i]), max(high, bits[i])
        zeros += np.int32(bits[i] & _LAST == 0)
    return low, high, zeros


@compiled("UniTuple(int32,4)(int32[::1])")
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


@compiled("UniTuple(float32,2)(float32[::1],float32)", fastmath=_REORDER)
@no_type_check
def _block_sums(block, shift):
    total, squares = np.float32(0), np.float32(0)
    for i in range(block.size):
        distance = block[i] - shift
        total += distance
        squares += distance * distance
    return total, squares


@compiled("UniTuple(float64,2)(float32[::1],float32)")
@no_type_check
def _moments(row, shift):
    """Mean of the distances from `shift`, and their variance."""
    total = squares = 0.0
    for start in range(0, row.size, _BLOCK):
        some, square = _block_sums(row[start : start + _BLOCK], shift)
        total, squares = total + some, squares + square
    mean = total / row.size
    return mean, squares / row.size - mean * mean


@compiled("UniTuple(float64,4)(float32[::1])")
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


@compiled("int32(float32[::1],float32,float32)")
@no_type_check
def _outside(row, low, high):
    count = np.int32(0)
    for i in range(row.size):
        count += np.int32((row[i] <= low) | (row[i] >= high))
    return count


@compiled("float32(int32,int32[::1],float32[::1])", inline="always")
@no_type_check
def _value(bits, place, same):
    """The value of these bits; `place` and `same` are one memory of one value."""
    place[0] = bits
    return same[0]


@compiled("void(float32[:,::1],int32[:,::1],float32[:,::1],float32,float32,int64[::1])")
@no_type_check
def statistics(rows, bits, stats, lower, upper, outside):
    """Fill `stats` [N, 6] with the columns of `records.STAT_COLUMNS` of rows [N, W].

    Args:
        bits: the same memory as integers.
        outside: [N], filled with how many values are at `lower` or below, or at `upper` or above;
            empty where nobody asks.
    """
    place = np.empty(1, np.int32)
    same, width = place.view(np.float32), rows.shape[1]
    for n in range(len(rows)):
        row, nonfinite = rows[n], np.int32(0)
        low, high, zeros = _plain_extremes(bits[n, :_PROBE])
        if low >= 0 and width > _PROBE:
            low, high, zeros = _plain_extremes(bits[n])
        if low < 0 or high >= _INFINITE:
            low, high, zeros, nonfinite = _extremes(bits[n])
            low, high = _key(low), _key(high)
        least, most = _value(low, place, same), _value(high, place, same)
        shift = row[0]
        if width <= _BLOCK:
            total, squares = _block_sums(row, shift)
            mean = np.float64(total) / width
            variance = np.float64(squares) / width - mean * mean
        else:
            mean, variance = _moments(row, shift)
        if mean * mean > _CANCELLATION * variance and nonfinite == 0:
            shift = np.float32(shift + mean)
            mean, variance = _moments(row, shift)
        stats[n, 0], stats[n, 1] = least + np.float32(0), most + np.float32(0)
        stats[n, 2], stats[n, 3] = shift + mean, math.sqrt(max(variance, 0.0))
        if nonfinite == 0 and least == most:
            stats[n, 2], stats[n, 3] = least, 0
        elif nonfinite > 0 or not (_TINY < variance < math.inf):
            stats[n, 0], stats[n, 1], stats[n, 2], stats[n, 3] = _careful(row)
        stats[n, 4], stats[n, 5] = zeros / width, nonfinite
        if outside.size > 0:
            # a NaN among the extremes hides the others
            reached = nonfinite > 0 or least <= lower or most >= upper
            outside[n] = _outside(row, lower, upper) if reached else 0


@compiled("UniTuple(float64,6)(float32[:,::1],int64)")
@no_type_check
def overall(stats, values):
    """The statistics of all rows together; see `scan.overall`."""
    count = total = squares = zeros = nonfinite = 0.0
    low, high, mean = math.inf, -math.inf, math.nan
    for n in range(len(stats)):
        finite = values - stats[n, 5]
        zeros += stats[n, 4]
        nonfinite += stats[n, 5]
        if finite > 0:
            count += finite
            total += finite * stats[n, 2]
            low, high = min(low, stats[n, 0]), max(high, stats[n, 1])
    if count == 0:
        return math.nan, math.nan, math.nan, math.nan, zeros / len(stats), nonfinite
    mean = total / count
    for n in range(len(stats)):
        finite = values - stats[n, 5]
        if finite > 0:
            away = np.float64(stats[n, 2]) - mean
            deviation = np.float64(stats[n, 3])
            squares += finite * (deviation * deviation + away * away)
    return low, high, mean, math.sqrt(squares / count), zeros / len(stats), nonfinite


@compiled("void(float32[::1],float32,float32,float32,uint8[::1])")
@no_type_check
def _scale(row, low, factor, half, levels):
    for i in range(row.size):
        levels[i] = np.uint8(np.int32((row[i] - low) * factor + half))


@compiled("void(float32[::1],float32,float32,float32,float32,uint8[::1])")
@no_type_check
def _scale_and_clip(row, low, factor, half, top, levels):
    for i in range(row.size):
        level = (row[i] - low) * factor + half
        level = level if level > np.float32(0) else np.float32(0)  # also for NaN
        level = level if level < top else top
        levels[i] = np.uint8(np.int32(level))


@compiled("void(float32[:,::1],float32[::1],float32[::1],float32,float32,uint8[:,::1])")
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


@compiled("uint32(uint8[::1],uint32[:,::1])")
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


@compiled("UniTuple(float64,2)(float32[::1])", fastmath=_REORDER)
@no_type_check
def _sums(values):
    total = squares = 0.0
    for i in range(values.size):
        value = np.float64(values[i])
        total += value
        squares += value * value
    return total, squares


@compiled("UniTuple(float64,2)(float32[::1],float64,float64,int64[:,::1])")
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
