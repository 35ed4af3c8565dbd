"""The loops over values and pixels, compiled by numba, without the GIL.

A fresh machine compiles all of them, so they are written to compile in little time: one
signature each, and loops over the indices of plain rows. They are also written so that
LLVM computes several values at a time: extremes are found among integers that have the
order of the floats (`min` and `max` of floats take five times as long), and short blocks
are summed in float32. Loops that every run needs are compiled, or loaded from the cache,
when this module is imported."""

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
"""Values that are summed in float32, before their sum is added to a sum in float64."""
_CANCELLATION = 4.0
"""If the squared distance of the mean from the shift is more than so many times the
variance, E[d²] - E[d]² loses digits, and the mean becomes the shift."""
_TINY = 1e-30
"""Smaller variances are not exact, since squares of float32 become too small."""
_MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits of a float32 except its sign."""
_INFINITE = np.int32(0x7F800000)
"""The magnitude of an infinite float32; that of NaN is larger."""
_REORDER = {"reassoc", "nsz", "contract"}
"""Options of LLVM: sums may be taken in another order, so that several values are added
at a time. NaN must still be handled correctly."""
_SUB = 1
"""The PNG filter that subtracts the pixel on the left."""
_UP = 2
"""The PNG filter that subtracts the pixel above."""
_PLAIN: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
}

numba: Any = require_numba()
config: Any = numba.config
njit: Any = numba.njit
_SOURCES = [Path(__file__), Path(__file__).with_name("deflate.py")]
_CACHE = Path(
    os.environ.get("NUMBA_CACHE_DIR") or user_cache_dir("featviz", appauthor=False)
)
_CHECKSUM = crc32(b"".join(path.read_bytes() for path in _SOURCES))
_FOLDER = str(_CACHE / f"{_CHECKSUM:08x}")
"""The folder of compiled loops: in NUMBA_CACHE_DIR, or in the user's cache folder. numba's
own choice would be the package's folder, where pip would leave the files behind; a
`.numba_config.yaml` in the current folder does not count, since a stranger may have put
it there. The name has a checksum of both files, since numba compiles a file anew only if
this file itself has changed, but not if a loop that it calls in another file has."""

_ONE_FOLDER = Lock()
"""The whole process shares `config.CACHE_DIR`: one thread at a time may change it."""

inlined = njit(inline="always", **_PLAIN)
"""A decorator: numba copies the function into each loop that calls it, before types are
known. So there is no call, the loop's `fastmath` holds for it, and constant arguments are
constants inside it."""


def compiled(signature: str | None, function: Any, **options: Any) -> Any:
    """Compile a function, and keep it in numba's cache, if the cache can be written.

    Args:
        signature: types of the function's arguments, in numba's notation: it is compiled,
            or loaded from the cache, now. None: at its first call.
        function: the function.
        options: further options of numba's `njit`.
    """
    signatures = [] if signature is None else [signature]
    with _ONE_FOLDER:
        before = config.CACHE_DIR
        config.CACHE_DIR = _FOLDER
        try:
            return njit(*signatures, **_PLAIN, **options, cache=True)(function)
        except (RuntimeError, OSError):  # there is no such folder, or it is read-only
            return njit(*signatures, **_PLAIN, **options)(function)
        finally:
            config.CACHE_DIR = before


# Statistics of maps


@inlined
@no_type_check
def _ordered(bits):
    """Turn the bits of a float32 into an integer, so that integers have the order of the
    floats. The same function turns the integer back into bits.

    A negative float is smaller, the larger its magnitude is. So all bits of a negative
    float except the sign are inverted:

        float      1.0         0.0   -0.0        -1.0
        bits       0x3F800000  0x0   0x80000000  0xBF800000
        integer    1065353216  0     -1          -1065353217
    """
    # shifted by 31, the sign fills all bits: -1 for a negative number, else 0
    return bits ^ ((bits >> np.int32(31)) & _MAGNITUDE)


@inlined
@no_type_check
def _count_values(bits):
    """Find the smallest and the largest value of a row, and count special values.

    Args:
        bits: int32 [W], the memory of a row of float32.

    Returns:
        The bits of the smallest value, the bits of the largest value, the number of
        zeros, and the number of NaN and infinite values.
    """
    low = np.int32(_MAGNITUDE)
    high = np.int32(~_MAGNITUDE)
    zeros = np.int32(0)
    nonfinite = np.int32(0)
    # No branches, so that LLVM treats several values at a time. The counts have 32 bits,
    # as the values, so that its registers are full.
    for i in range(bits.size):
        magnitude = bits[i] & _MAGNITUDE
        key = _ordered(bits[i])
        low = key if key < low else low
        high = key if key > high else high
        zeros += np.int32(magnitude == 0)
        nonfinite += np.int32(magnitude >= _INFINITE)
    return _ordered(low), _ordered(high), zeros, nonfinite


@inlined
@no_type_check
def _mean_and_variance(row, length, height, border, at_once):
    """Mean and variance of a row without the border of its slices, float64.

    All values are shifted by a number near their mean. Without this, E[x²] - E[x]² would
    lose digits if the mean is large compared with the deviation: the squares of 1000.1
    and 1000.2 share four of float32's seven digits. The first shift is the first value.
    If this is too far from the mean, a second pass shifts by the mean of the first pass.

    Args:
        row: float32 [W], lines one after the other.
        length: number of values in a line.
        height: number of lines in a slice.
        border: lines that are left out at both ends of a slice, and values that are left
            out at both ends of a line.
        at_once: whether there is only one pass: for rows with NaN, whose results are not
            used.
    """
    shift = row[border * length + border]
    mean = 0.0
    variance = 0.0
    for _ in range(2):
        shift = np.float32(shift + mean)
        count = 0
        total = 0.0
        squares = 0.0
        for start in range(0, row.size, length):
            y = start // length % height
            if y < border or y >= height - border:
                continue
            # in float32, twice as many values are added at a time as in float64, and a
            # short sum loses little
            line = row[start + border : start + length - border]
            line_total = np.float32(0)
            line_squares = np.float32(0)
            for i in range(line.size):
                distance = line[i] - shift
                line_total += distance
                line_squares += distance * distance
            count += line.size
            total = total + line_total
            squares = squares + line_squares
        mean = total / count
        variance = squares / count - mean * mean
        if at_once or not mean * mean > _CANCELLATION * variance:
            break
    return shift + mean, variance


@inlined
@no_type_check
def _count_outside(row, lower, upper):
    """How many values of a row are at `lower` or below, or at `upper` or above. A value of
    NaN does not count; a limit of NaN is no limit."""
    count = np.int32(0)
    for i in range(row.size):
        count += np.int32((row[i] <= lower) | (row[i] >= upper))
    return count


@partial(
    compiled,
    "void(float32[:,::1],int32[:,::1],float32[:,::1],int32[:,::1],float32,float32,int64[::1])",
    fastmath=_REORDER,
)
@no_type_check
def statistics(rows, bits, stats, stats_bits, lower, upper, outside):
    """Fill `stats` with the columns of `records.STAT_COLUMNS`.

    Args:
        rows: float32 [N, W].
        bits: int32 [N, W], the memory of `rows`.
        stats: float32 [N, 6], to be filled. A deviation of -1 tells the caller to compute
            the first four numbers of the row itself: they need float64, or the row has NaN
            or infinite values, which must be left out.
        stats_bits: int32 [N, 6], the memory of `stats`.
        lower, upper: limits for `outside`; NaN is no limit.
        outside: int64 [N], to be filled: how many values are at `lower` or below, or
            at `upper` or above. Empty if this is not needed.
    """
    for n in range(rows.shape[0]):
        row = stats[n]
        low, high, zeros, nonfinite = _count_values(bits[n])
        # written as integers, the bits are floats in the same memory; -0 becomes 0
        stats_bits[n, 0] = low if low & _MAGNITUDE else np.int32(0)
        stats_bits[n, 1] = high if high & _MAGNITUDE else np.int32(0)
        mean, variance = _mean_and_variance(
            rows[n], _BLOCK, rows.shape[1], 0, nonfinite > 0
        )
        row[2] = mean
        row[3] = math.sqrt(variance if variance > 0 else 0.0)
        row[4] = zeros / rows.shape[1]
        row[5] = nonfinite
        # for a constant row, rounding would make the mean and the deviation inexact
        if nonfinite == 0 and row[0] == row[1]:
            row[2] = row[0]
            row[3] = 0
        elif nonfinite > 0 or not (_TINY < variance < math.inf):
            row[3] = -1
        if outside.size > 0:
            outside[n] = _count_outside(rows[n], lower, upper)


@partial(
    compiled,
    "void(float32[:,::1],int64,int64,int64,float32[::1])",
    fastmath=_REORDER,
)
@no_type_check
def inner_deviations(rows, width, height, border, deviations):
    """Fill `deviations` with the standard deviation of each row without the border of
    its slices.

    Args:
        rows: float32 [N, S · height · width], S slices of each map.
        width, height: size of a slice.
        border: pixels that are left out on each side of a slice.
        deviations: float32 [N], to be filled. -1 tells the caller to compute the deviation
            itself, as in `statistics`.
    """
    for n in range(rows.shape[0]):
        row = rows[n]
        mean, variance = _mean_and_variance(row, width, height, border, False)
        # all values are equal
        if variance == 0 and mean == row[border * width + border]:
            deviations[n] = 0
        elif _TINY < variance < math.inf:
            deviations[n] = math.sqrt(variance)
        else:
            deviations[n] = -1


# Levels and pictures


@partial(
    compiled,
    "void(float32[:,::1],float32[::1],float32[::1],float32[::1],float32,uint8[:,::1])",
)
@no_type_check
def quantise(rows, starts, factors, halves, top, levels):
    """Fill `levels` with (value - start) · factor + half, cut to a whole number.

    Args:
        rows: float32 [N, W].
        starts, factors, halves: float32 [N], start, factor and half of each row.
        top: the highest level: larger ones become this, smaller ones than 0 and NaN become
            0. -1 if all values are finite and known to fit 0..255.
        levels: uint8 [N, W], to be filled.
    """
    for n in range(rows.shape[0]):
        start = starts[n]
        factor = factors[n]
        half = halves[n]
        if top < 0:
            for i in range(rows.shape[1]):
                levels[n, i] = np.int32((rows[n, i] - start) * factor + half)
        else:
            for i in range(rows.shape[1]):
                level = (rows[n, i] - start) * factor + half
                # this is also false for NaN
                level = level if level > np.float32(0) else np.float32(0)
                levels[n, i] = np.int32(level if level < top else top)


@inlined
@no_type_check
def _repeat(source, factor, target):
    """Fill `target` with each value `factor` times: a b c becomes a a b b c c for 2."""
    for x in range(source.size):
        for repeat in range(factor):
            target[factor * x + repeat] = source[x]


@inlined
@no_type_check
def _enlarge(source, factor, depth, target):
    """Repeat each pixel of a tile's row.

    Args:
        source: uint8 [depth · w].
        factor: how often each pixel is repeated.
        depth: bytes of a pixel.
        target: uint8 [factor · depth · w], to be filled.
    """
    # With a constant factor, the loop is ten times as fast: LLVM compiles it to shuffles
    # of registers.
    if factor == 1:
        _repeat(source, 1, target)
    elif factor == 2 and depth == 1:
        _repeat(source, 2, target)
    elif factor == 3 and depth == 1:
        _repeat(source, 3, target)
    elif factor == 4 and depth == 1:
        _repeat(source, 4, target)
    elif factor == 5 and depth == 1:
        _repeat(source, 5, target)
    else:
        step = factor * depth
        for offset in range(step):
            for x in range(source.size // depth):
                target[x * step + offset] = source[x * depth + offset % depth]


@partial(compiled, "void(uint8[:,:,::1],int64,int64,int64,int64,int64,uint8[:,::1])")
@no_type_check
def lay_tiles(tiles, columns, down, across, depth, padding, piece):
    """Lay tiles into a piece of a picture, enlarged by whole factors.

    Each row of a tile is enlarged and written once into a line of the piece. When the
    line has the rows of all its tiles, it is copied into the lines below, as often as
    `down` says. Two tiles of 1 x 2 pixels, down 2, across 3, padding 1 (the dots):

        a b    c d    becomes    . a a a b b b . c c c d d d .     written
                                 . a a a b b b . c c c d d d .     copied
                                 . . . . . . . . . . . . . . .     the padding below

    Args:
        tiles: uint8 [N, h, depth · w].
        columns: how many tiles stand side by side.
        down, across: the factors by which height and width are enlarged.
        depth: bytes of a pixel: 1, or 3 for RGB.
        padding: pixels to the left of each tile and below it.
        piece: uint8 [rows, depth · width], filled with the padding's colour before the
            call.
    """
    count, height, width = tiles.shape
    large_width = width * across
    for start in range(0, count, columns):
        top = start // columns * (height * down + padding)
        end = min(start + columns, count)
        for y in range(height):
            line = piece[top + y * down]
            at = padding * depth
            for n in range(start, end):
                _enlarge(tiles[n, y], across, depth, line[at : at + large_width])
                at += large_width + padding * depth
            for repeat in range(1, down):
                _repeat(line, 1, piece[top + y * down + repeat])


@inlined
@no_type_check
def _differ_by(row, other):
    """The sum of the absolute differences of two rows of bytes. Differences are modulo
    256: 255 and 0 differ by 1."""
    total = np.int32(0)
    for i in range(row.size):
        total += abs(np.int32(np.int8(row[i] - other[i])))
    return total


@inlined
@no_type_check
def _subtract(row, other, difference):
    """Fill `difference` with `row` minus `other`, modulo 256."""
    for i in range(row.size):
        difference[i] = row[i] - other[i]


@partial(compiled, "void(uint8[:,::1],uint8[::1],int64,uint8[:,::1])")
@no_type_check
def filter_rows(piece, above, depth, filtered):
    """Filter rows for PNG. From each byte, the filter `up` subtracts the byte above, and
    the filter `sub` the byte of the pixel on the left.

    For each row, the filter with the smaller sum of differences is taken, as the
    specification advises (https://www.w3.org/TR/png-3/, 12.7): small numbers then occur
    often, and deflate needs few bits for them.

        row above   10 10 20 20
        row         10 10 20 21     up:  2 |  0  0  0  1     taken: sum 1
                                    sub: 1 | 10  0 10  1

    Args:
        piece: uint8 [R, W].
        above: uint8 [W], the row above the piece; afterwards the piece's last row.
        depth: bytes of a pixel.
        filtered: uint8 [R, 1 + W], to be filled: the number of the filter, then the
            filtered row.
    """
    for r in range(piece.shape[0]):
        row = piece[r]
        behind_first = row[depth:]
        before_last = row[: row.size - depth]
        out = filtered[r, 1:]
        by_up = _differ_by(row, above)
        # `sub` is counted without the first pixel, which has none on its left
        if by_up == 0 or by_up < _differ_by(behind_first, before_last):
            filtered[r, 0] = _UP
            _subtract(row, above, out)
        else:
            filtered[r, 0] = _SUB
            _repeat(row[:depth], 1, out)
            _subtract(behind_first, before_last, out[depth:])
        _repeat(row, 1, above)


@partial(compiled, None)
@no_type_check
def blend(levels, colors, background, share, mixed):
    """Mix the colours of levels with a background.

    Args:
        levels: uint8 [P].
        colors: float [256, 3]: the colour of each level, times the share of the levels.
        background: uint8 [P, 3].
        share: share of the background, 0 to 1.
        mixed: uint8 [P, 3], to be filled.
    """
    for i in range(levels.size):
        for channel in range(3):
            total = share * background[i, channel] + colors[levels[i], channel]
            mixed[i, channel] = np.int32(total + 0.5)


# Totals of an audit


@inlined
@no_type_check
def _add_moments(row, finite, total):
    """Add the statistics of a map's finite values to the total of its channel.

    Means and sums of squared deviations are combined as by Chan, Golub and LeVeque
    ("Updating formulae and a pairwise algorithm for computing sample variances", 1979),
    which loses fewer digits than a sum of squares.

    Args:
        row: float32 [6], the statistics of the map: min, max, mean, deviation, share of
            zeros, number of non-finite values.
        finite: number of finite values of the map, at least 1.
        total: float64 [columns], the total of the channel. Its first five numbers are
            changed: number of finite values, min, max, mean, sum of squared deviations.
    """
    std = np.float64(row[3])
    delta = np.float64(row[2]) - total[3]
    count = total[0]
    share = finite / (count + finite)
    total[0] = count + finite
    total[1] = min(total[1], np.float64(row[0]))
    total[2] = max(total[2], np.float64(row[1]))
    total[3] += delta * share
    total[4] += finite * std * std + delta * delta * count * share


@partial(compiled, None)
@no_type_check
def add_maps(stats, saturated, positions, sums):
    """Add the statistics of maps to `Tally.sums`, one map after the other.

    Args:
        stats: float32 [B, C, 6], the statistics of the maps of B images: min, max, mean,
            deviation, share of zeros, number of non-finite values.
        saturated: int64 [B, C], how many values of each map saturate; empty if no values
            are counted.
        positions: number of values of each map.
        sums: float64 [C, columns], which is changed: number of finite values, min, max,
            mean, sum of squared deviations, then the numbers of zeros, of non-finite and
            of saturated values.
    """
    for b in range(stats.shape[0]):
        for c in range(stats.shape[1]):
            row = stats[b, c]
            total = sums[c]
            finite = positions - np.float64(row[5])
            if finite > 0:
                _add_moments(row, finite, total)
            # the share of zeros is float32: rounded, it gives the exact number of zeros
            total[5] += math.floor(np.float64(row[4]) * positions + 0.5)
            total[6] += row[5]
            if saturated.size > 0:
                total[7] += saturated[b, c]


@inlined
@no_type_check
def _insert(value, image, values, numbers):
    """Insert an image into the ranking of a channel, in place.

    Args:
        value: the image's value.
        image: the image's number.
        values: float64 [ranks], the largest value first.
        numbers: int64 [ranks], numbers of the images with these values.
    """
    for rank in range(values.size):
        ranked_value = values[rank]
        ranked_image = numbers[rank]
        if value > ranked_value or (value == ranked_value and image < ranked_image):
            # the image that was here moves on to the next rank
            values[rank] = value
            numbers[rank] = image
            value = ranked_value
            image = ranked_image


@partial(compiled, None)
@no_type_check
def add_images(stats, images, values, numbers):
    """Insert images into the rankings of a `Tally`, by the maximum of their maps. Of equal
    values, the earlier image comes first.

    Args:
        stats: float32 [B, C, 6]; see `add_maps`.
        images: int64 [B], numbers of the images.
        values: float64 [C, ranks], maxima, the largest first.
        numbers: int64 [C, ranks], numbers of the images with these maxima.
    """
    for b in range(stats.shape[0]):
        for c in range(stats.shape[1]):
            value = np.float64(stats[b, c, 1])
            # maps with NaN or infinite values come first, since they need attention
            if stats[b, c, 5] > 0:
                value = math.inf
            _insert(value, images[b], values[c], numbers[c])
