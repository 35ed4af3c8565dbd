"""The loops over values and pixels, compiled by numba, without the GIL.

They compile in little time, since a fresh machine compiles them all: one signature, loops over
indices of plain rows. LLVM takes several values at a time: extremes are those of integers that have
the order of the floats (`min` and `max` of floats take five times as long), and sums of short
blocks are float32. What every run needs is compiled or loaded as this module is imported.
"""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, no_type_check
from zlib import crc32

import numpy as np
from platformdirs import user_cache_dir

from featviz.models.requirements import require_numba

_BLOCK = 512
"""Values that are summed up in float32, before the sum is added to one in float64."""
_CANCELLATION = 4.0
"""Where the squared distance of the mean from the shift exceeds the variance by this factor, digits
are lost in E[d²] - E[d]²: shift by the mean."""
_TINY = 1e-30
"""Variances below lose digits to float32's smallest squares."""
_LAST, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
"""All bits of a float32 but its sign; those of an infinite one (NaN has more)."""
_REORDER = {"reassoc", "nsz", "contract"}
"""Sums may be taken in another order, so that several values are added at once. NaN counts."""
_SUB, _UP = 1, 2
_PLAIN: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}

numba: Any = require_numba()
config: Any = numba.config
njit: Any = numba.njit
_FILES = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("loops", "deflate")]
_CACHE = Path(os.environ.get("NUMBA_CACHE_DIR") or user_cache_dir("featviz", appauthor=False))
_FOLDER = str(_CACHE / f"{crc32(b''.join(_FILES)):08x}")
"""Where compiled loops are kept: in the user's cache folder, or where NUMBA_CACHE_DIR says. numba's
own choice is in the package, and pip would leave it; that of a `.numba_config.yaml` in the current
folder may be a stranger's. The name has a checksum, since numba compiles a file anew when it has
changed, but not when another has, whose loops it calls."""

_ONE_FOLDER = Lock()
part = njit(**_PLAIN, no_cpython_wrapper=True)
"""A decorator: compile a function with each loop that calls it, and not by itself. Not for sums in
any order: their last digits would depend on whether numba's cache was used."""


def compiled(signature: str | None, function: Any, **options: Any) -> Any:
    """Compile a function for this signature, or for its arguments at its first call, and keep it in
    numba's cache, if that can be written."""
    given = () if signature is None else (signature,)
    with _ONE_FOLDER:
        before, config.CACHE_DIR = config.CACHE_DIR, _FOLDER
        try:
            return njit(*given, **_PLAIN, **options, cache=True)(function)
        except (RuntimeError, OSError):  # numba finds no folder, or cannot write there
            return njit(*given, **_PLAIN, **options)(function)
        finally:
            config.CACHE_DIR = before


@partial(
    compiled,
    "void(float32[:,::1],int32[:,::1],float32[:,::1],int32[:,::1],float32,float32,int64[::1])",
    fastmath=_REORDER,
)
@no_type_check
def statistics(rows, bits, stats, ends, lower, upper, outside):
    """Fill `stats` [N, 6] with the columns of `records.STAT_COLUMNS` of rows [N, W], and `outside`
    [N], unless it is empty, with how many values are at `lower` or below, or at `upper` or above;
    `bits` and `ends` are the memory of `rows` and `stats` as integers. A deviation of -1 stands
    for a row whose first four numbers need float64 or have to leave out values."""
    width = rows.shape[1]
    for n in range(rows.shape[0]):
        low, high = np.int32(_LAST), np.int32(~_LAST)
        zeros, nonfinite = np.int32(0), np.int32(0)
        row, keys = rows[n], bits[n]
        for i in range(keys.size):
            size = keys[i] & _LAST
            key = keys[i] ^ ((keys[i] >> np.int32(31)) & _LAST)  # ordered as the floats
            low, high = key if key < low else low, key if key > high else high
            zeros += np.int32(size == 0)
            nonfinite += np.int32(size >= _INFINITE)
        low, high = low ^ ((low >> np.int32(31)) & _LAST), high ^ ((high >> np.int32(31)) & _LAST)
        ends[n, 0] = low if low & _LAST else np.int32(0)  # -0 is 0
        ends[n, 1] = high if high & _LAST else np.int32(0)
        least, most, shift, mean, variance = stats[n, 0], stats[n, 1], rows[n, 0], 0.0, 0.0
        for _ in range(2):
            shift, total, squares = np.float32(shift + mean), 0.0, 0.0
            for start in range(0, width, _BLOCK):
                some, square = np.float32(0), np.float32(0)
                block = row[start : start + _BLOCK]
                for i in range(block.size):
                    distance = block[i] - shift
                    some += distance
                    square += distance * distance
                total, squares = total + some, squares + square
            mean = total / width
            variance = squares / width - mean * mean
            if nonfinite > 0 or not mean * mean > _CANCELLATION * variance:
                break
        stats[n, 2], stats[n, 3] = shift + mean, math.sqrt(variance if variance > 0 else 0.0)
        stats[n, 4], stats[n, 5] = zeros / width, nonfinite
        if nonfinite == 0 and least == most:
            stats[n, 2], stats[n, 3] = least, 0
        elif nonfinite > 0 or not (_TINY < variance < math.inf):
            stats[n, 3] = -1
        if outside.size > 0:
            reached = np.int32(0)
            for i in range(row.size):
                reached += np.int32((row[i] <= lower) | (row[i] >= upper))
            outside[n] = reached


@partial(compiled, "void(float32[:,::1],float32[::1],float32[::1],float32,float32,uint8[:,::1])")
@no_type_check
def quantise(rows, low, factor, half, top, levels):
    """Fill `levels` [N, W] with (value - low[n]) · factor[n] + half, clipped to 0..top unless that
    is negative, and cut to a whole number."""
    for n in range(rows.shape[0]):
        below, times = low[n], factor[n]
        if top < 0:
            for i in range(rows.shape[1]):
                levels[n, i] = np.int32((rows[n, i] - below) * times + half)
        else:
            for i in range(rows.shape[1]):
                level = (rows[n, i] - below) * times + half
                level = level if level > np.float32(0) else np.float32(0)  # also for NaN
                levels[n, i] = np.int32(level if level < top else top)


@partial(compiled, "void(uint8[:,:,::1],int64,int64,int64,int64,int64,uint8[:,::1])")
@no_type_check
def lay_tiles(tiles, columns, down, across, depth, padding, piece):
    """Lay tiles [N, h, depth · w] into a piece of a picture; see `grid.strips`."""
    count, height, width = tiles.shape
    pixels, wide = width // depth, width * across
    for start in range(0, count, columns):
        top = start // columns * (height * down + padding)
        end = start + columns if start + columns < count else count
        for y in range(height):
            line, left = piece[top + y * down], padding * depth
            for n in range(start, end):
                source, target = tiles[n, y], line[left : left + wide]
                if across == 1:
                    for x in range(source.size):
                        target[x] = source[x]
                elif across == 2 and depth == 1:  # a known factor makes it ten times as fast
                    for x in range(source.size):
                        target[2 * x] = target[2 * x + 1] = source[x]
                elif across == 3 and depth == 1:
                    for x in range(source.size):
                        target[3 * x] = target[3 * x + 1] = target[3 * x + 2] = source[x]
                elif across == 4 and depth == 1:
                    for x in range(source.size):
                        target[4 * x] = target[4 * x + 1] = source[x]
                        target[4 * x + 2] = target[4 * x + 3] = source[x]
                elif across == 5 and depth == 1:
                    for x in range(source.size):
                        target[5 * x] = target[5 * x + 1] = target[5 * x + 2] = source[x]
                        target[5 * x + 3] = target[5 * x + 4] = source[x]
                else:
                    for again in range(across):
                        for colour in range(depth):
                            at = again * depth + colour
                            for x in range(pixels):
                                target[at + x * across * depth] = source[x * depth + colour]
                left += wide + padding * depth
            for again in range(1, down):
                copy = piece[top + y * down + again]
                for x in range(copy.size):
                    copy[x] = line[x]


@partial(compiled, "void(uint8[:,::1],uint8[::1],int64,uint8[:,::1])")
@no_type_check
def filter_rows(piece, above, depth, filtered):
    """Filter rows [R, W] for PNG into [R, 1 + W]; the last one takes the place of that `above`."""
    for r in range(piece.shape[0]):
        row, left, right = piece[r], piece[r, :-depth], piece[r, depth:]
        out, behind = filtered[r, 1:], filtered[r, 1 + depth :]
        by_up, by_sub = np.int32(0), np.int32(0)
        for i in range(row.size):
            by_up += abs(np.int32(np.int8(row[i] - above[i])))
        if by_up > 0:
            for i in range(right.size):
                by_sub += abs(np.int32(np.int8(right[i] - left[i])))
        if by_up == 0 or by_up < by_sub:
            filtered[r, 0] = _UP
            for i in range(row.size):
                out[i] = row[i] - above[i]
        else:
            filtered[r, 0] = _SUB
            for i in range(depth):
                out[i] = row[i]
            for i in range(right.size):
                behind[i] = right[i] - left[i]
        for i in range(row.size):
            above[i] = row[i]


@partial(compiled, None)
@no_type_check
def blend(levels, over, ground, share, mixed):
    """Fill `mixed` [P, 3] with over[levels] + share · ground [P, 3], rounded; `over` [256, 3] is
    what the colour of each level adds."""
    for i in range(levels.size):
        for colour in range(3):
            total = share * ground[i, colour] + over[levels[i], colour]
            mixed[i, colour] = np.int32(total + 0.5)


@partial(compiled, None)
@no_type_check
def add_maps(stats, saturated, positions, sums):
    """Add the statistics of maps [B, C, 6] of so many positions to `Tally.sums`, one map after the
    other; `saturated` [B, C] is empty where nothing saturates."""
    for b in range(stats.shape[0]):
        for c in range(stats.shape[1]):
            bad = np.float64(stats[b, c, 5])
            count, more = sums[c, 0], positions - bad
            if more > 0:
                mean, std = np.float64(stats[b, c, 2]), np.float64(stats[b, c, 3])
                delta, share = mean - sums[c, 3], more / (count + more)
                sums[c, 0] = count + more
                low, high = np.float64(stats[b, c, 0]), np.float64(stats[b, c, 1])
                sums[c, 1] = low if low < sums[c, 1] else sums[c, 1]
                sums[c, 2] = high if high > sums[c, 2] else sums[c, 2]
                sums[c, 3] += delta * share
                sums[c, 4] += more * std * std + delta * delta * count * share
            sums[c, 5] += math.floor(np.float64(stats[b, c, 4]) * positions + 0.5)
            sums[c, 6] += bad
            if saturated.size > 0:
                sums[c, 7] += saturated[b, c]


@partial(compiled, None)
@no_type_check
def add_images(stats, images, values, numbers):
    """Insert images [B], by the maxima of their maps [B, C, 6], into those of a `Tally`: before
    smaller values, and before later images of the same value."""
    for b in range(stats.shape[0]):
        for c in range(stats.shape[1]):
            image = images[b]
            value = np.float64(stats[b, c, 1]) if stats[b, c, 5] == 0 else math.inf
            for at in range(values.shape[1]):  # what is put in a place moves on what was there
                other, number = values[c, at], numbers[c, at]
                if value > other or (value == other and image < number):
                    values[c, at], numbers[c, at] = value, image
                    value, image = other, number
