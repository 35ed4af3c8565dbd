"""The loops over values and pixels, compiled by numba, without the GIL.

They compile in little time, since a fresh machine compiles them all: one signature,
loops over indices of plain rows. LLVM takes several values at a time: extremes are
those of integers that have the order of the floats (`min` and `max` of floats take five
times as long), and sums of short blocks are float32. What every run needs is compiled
or loaded as this module is imported."""

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
"""Values that are summed in float32, before their sum is added to one in float64."""
_CANCELLATION = 4.0
"""Where the squared distance of the mean from the shift exceeds the variance by this
factor, digits are lost in E[d²] - E[d]²: shift by the mean."""
_TINY = 1e-30
"""Variances below lose digits to float32's smallest squares."""
_MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits of a float32 but its sign. A positive float has the order of its bits as an
integer; a negative one has the opposite order, so its magnitude is inverted."""
_INFINITE = np.int32(0x7F800000)
"""The magnitude of an infinite float32; NaN has a greater one."""
_REORDER = {"reassoc", "nsz", "contract"}
"""Sums may be taken in another order, so that several values are added at once. NaN
counts."""
_SUB = 1
"""The PNG filter that takes the pixel on the left away."""
_UP = 2
"""The PNG filter that takes the pixel above away."""
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
"""Where compiled loops are kept: in the user's cache folder, or where NUMBA_CACHE_DIR
says. numba's own choice is in the package, and pip would leave it; that of a
`.numba_config.yaml` in the current folder may be a stranger's. The name has a checksum,
since numba compiles a file anew when it has changed, but not when another has, whose
loops it calls."""

_ONE_FOLDER = Lock()
"""`config.CACHE_DIR` is the whole process's: one thread at a time may change it."""

inlined = njit(inline="always", **_PLAIN)
"""A decorator: paste a function into each loop that calls it, before types are known.
It costs no call, sums in the order that the loop allows, and knows factors that are
constants there as constants."""


def compiled(signature: str | None, function: Any, **options: Any) -> Any:
    """Compile a function, and keep it in numba's cache, if that can be written.

    Args:
        signature: types of its arguments, as numba writes them: it is compiled, or
            loaded from the cache, at once. None waits for the arguments of its first
            call.
        options: further ones of numba's `njit`.
    """
    signatures = [] if signature is None else [signature]
    with _ONE_FOLDER:
        before = config.CACHE_DIR
        config.CACHE_DIR = _FOLDER
        try:
            return njit(*signatures, **_PLAIN, **options, cache=True)(function)
        except (RuntimeError, OSError):  # numba finds no folder, or cannot write there
            return njit(*signatures, **_PLAIN, **options)(function)
        finally:
            config.CACHE_DIR = before


# Statistics of maps


@inlined
@no_type_check
def _ordered(bits):
    """Bits of float32 as integers in the order of the floats; and back again.

    Among negative floats a greater magnitude is a smaller number, so theirs is
    inverted:

        float      1.0         0.0   -0.0        -1.0
        bits       0x3F800000  0x0   0x80000000  0xBF800000
        integer    1065353216  0     -1          -1065353217
    """
    # shifted by 31, the sign fills all bits: -1 for a negative number, else 0
    return bits ^ ((bits >> np.int32(31)) & _MAGNITUDE)


@inlined
@no_type_check
def _count_values(bits):
    """The bits of a row's smallest and of its largest value, how many values are zero,
    and how many are NaN or infinite.

    Args:
        bits: int32 [W], the memory of a row of float32.
    """
    low = np.int32(_MAGNITUDE)
    high = np.int32(~_MAGNITUDE)
    zeros = np.int32(0)
    nonfinite = np.int32(0)
    # Without branches, so that LLVM takes several values at a time. Counts of 32 bits
    # are as wide as the values, which fills its registers.
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

    They are those of the distances from a shift, since E[x²] - E[x]² loses digits where
    values lie far from zero for their variance: the squares of 1000.1 and 1000.2 share
    four of float32's seven digits. The first shift is the first value; where that lies
    too far off, too, the mean that was found is the second one.

    Args:
        row: float32 [W], lines one after the other.
        length: values of a line.
        height: lines of a slice.
        border: lines that are left out at both ends of a slice, and values at both ends
            of a line.
        at_once: whether to stop after the first shift: for rows with NaN, whose sums
            nobody reads.
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
            # float32 adds twice as many values at a time as float64; a short sum of them
            # loses little
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
    """How many values of a row are at `lower` or below, or at `upper` or above; NaN is
    neither, and as a limit bounds nothing."""
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
        bits: int32 [N, W], the same memory.
        stats: float32 [N, 6], to be filled. A deviation of -1 stands for a row whose
            first four numbers need float64, or have to leave out values.
        stats_bits: int32 [N, 6], the same memory.
        lower, upper: limits for `outside`; NaN bounds nothing.
        outside: int64 [N], to be filled: how many values are at `lower` or below, or
            at `upper` or above. Empty where nobody asks.
    """
    for n in range(rows.shape[0]):
        row = stats[n]
        low, high, zeros, nonfinite = _count_values(bits[n])
        # bits become floats by going through memory; -0 becomes 0
        stats_bits[n, 0] = low if low & _MAGNITUDE else np.int32(0)
        stats_bits[n, 1] = high if high & _MAGNITUDE else np.int32(0)
        mean, variance = _mean_and_variance(
            rows[n], _BLOCK, rows.shape[1], 0, nonfinite > 0
        )
        row[2] = mean
        row[3] = math.sqrt(variance if variance > 0 else 0.0)
        row[4] = zeros / rows.shape[1]
        row[5] = nonfinite
        # of a constant row the mean is off by rounding, and the deviation not quite 0
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
        border: pixels that are left out on each side of a slice.
        deviations: float32 [N], to be filled; -1 stands for a row as in `statistics`.
    """
    for n in range(rows.shape[0]):
        row = rows[n]
        mean, variance = _mean_and_variance(row, width, height, border, False)
        # no value differs from the first one
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
        starts: float32 [N], the value of each row that becomes level 0.
        factors: float32 [N], levels for each unit of a row's values.
        halves: float32 [N]: 0.5 to round to the nearest level, 0 to cut.
        top: the highest level, to which values are clipped, and NaN becomes 0; -1 where
            all values are finite and known to fit 0..255.
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
                # also for NaN
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
        factor: how often.
        depth: bytes of a pixel.
        target: uint8 [factor · depth · w], to be filled.
    """
    # A factor that is a constant makes the loop ten times as fast: LLVM turns it into
    # shuffles of registers.
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

    Each row of a tile is written once, enlarged, into a line of the piece; when the
    line has the rows of all its tiles, it is copied below itself for the factor `down`.
    Two tiles of 1 x 2 pixels, down 2, across 3, padding 1 (the dots):

        a b    c d    becomes    . a a a b b b . c c c d d d .     written
                                 . a a a b b b . c c c d d d .     copied
                                 . . . . . . . . . . . . . . .     the padding below

    Args:
        tiles: uint8 [N, h, depth · w].
        columns: tiles beside each other.
        down, across: the factors.
        depth: bytes of a pixel: 1, or 3 for RGB.
        padding: pixels to the left of each tile and below it.
        piece: uint8 [rows, depth · width], which has the padding's colour before.
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
    """The sum of the differences of two rows of bytes, modulo 256: 255 and 0 differ by
    1."""
    total = np.int32(0)
    for i in range(row.size):
        total += abs(np.int32(np.int8(row[i] - other[i])))
    return total


@inlined
@no_type_check
def _subtract(row, other, difference):
    """Fill `difference` with `row` less `other`, modulo 256."""
    for i in range(row.size):
        difference[i] = row[i] - other[i]


@partial(compiled, "void(uint8[:,::1],uint8[::1],int64,uint8[:,::1])")
@no_type_check
def filter_rows(piece, above, depth, filtered):
    """Filter rows for PNG: each byte less the one above it (filter `up`), or less that
    of the pixel on its left (`sub`).

    The filter is the one that makes the smaller sum of differences, as the
    specification advises (https://www.w3.org/TR/png-3/, 12.7): small numbers occur
    often, and deflate codes what occurs often in few bits.

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
        # the first pixel, which has none on its left, counts for neither
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
    """Fill `mixed` with the colours of levels, laid over pixels.

    Args:
        levels: uint8 [P].
        colors: float [256, 3], what each level adds: its colour times its share.
        background: uint8 [P, 3].
        share: of the background, 0 to 1.
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
    """Add the extremes, the mean and the deviation of a map's finite values.

    Means and sums of squared deviations are joined as Chan, Golub and LeVeque do
    ("Updating formulae and a pairwise algorithm for computing sample variances", 1979),
    which loses fewer digits than a sum of squares.

    Args:
        row: float32 [6], the statistics of the map: min, max, mean, deviation, share of
            zeros, non-finite values.
        finite: how many values they are of, 1 at least.
        total: float64 [columns] of its channel, of which the first five are added to:
            finite values, min, max, mean, squared deviations.
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
        stats: float32 [B, C, 6], the statistics of B images: min, max, mean, deviation,
            share of zeros, non-finite values.
        saturated: int64 [B, C], how many values saturate; empty where nothing does.
        positions: values of each map.
        sums: float64 [C, columns], to be added to: finite values, min, max, mean,
            squared deviations, zeros, non-finite values, saturated values.
    """
    for b in range(stats.shape[0]):
        for c in range(stats.shape[1]):
            row = stats[b, c]
            total = sums[c]
            finite = positions - np.float64(row[5])
            if finite > 0:
                _add_moments(row, finite, total)
            # zeros are given as a share, whose float32 may miss the whole number
            total[5] += math.floor(np.float64(row[4]) * positions + 0.5)
            total[6] += row[5]
            if saturated.size > 0:
                total[7] += saturated[b, c]


@inlined
@no_type_check
def _insert(value, image, values, numbers):
    """Insert an image with its value into the ranking of a channel, in place.

    Args:
        values: float64 [ranks], the greatest first.
        numbers: int64 [ranks], the images that they are of.
    """
    for rank in range(values.size):
        ranked_value = values[rank]
        ranked_image = numbers[rank]
        if value > ranked_value or (value == ranked_value and image < ranked_image):
            # what was there moves on to the next rank
            values[rank] = value
            numbers[rank] = image
            value = ranked_value
            image = ranked_image


@partial(compiled, None)
@no_type_check
def add_images(stats, images, values, numbers):
    """Insert images, by the maxima of their maps, into the rankings of a `Tally`:
    before smaller values, and before later images of the same value.

    Args:
        stats: float32 [B, C, 6], as of `add_maps`.
        images: int64 [B], the numbers of the images.
        values: float64 [C, ranks], maxima, the greatest first.
        numbers: int64 [C, ranks], the images that they are of.
    """
    for b in range(stats.shape[0]):
        for c in range(stats.shape[1]):
            value = np.float64(stats[b, c, 1])
            # maps with NaN or infinite values come first: they are to be looked at
            if stats[b, c, 5] > 0:
                value = math.inf
            _insert(value, images[b], values[c], numbers[c])
