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
"""Values that are summed up in float32, before the sum is added to one in float64."""
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
part = njit(**_PLAIN, no_cpython_wrapper=True)
"""A decorator: compile a function with each loop that calls it, and not by itself. Not
for sums in any order: their last digits would depend on whether numba's cache was
used."""


def compiled(signature: str | None, function: Any, **options: Any) -> Any:
    """Compile a function for this signature, or for its arguments at its first call,
    and keep it in numba's cache, if that can be written."""
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


@partial(
    compiled,
    "void(float32[:,::1],int32[:,::1],float32[:,::1],int32[:,::1],float32,float32,int64[::1])",
    fastmath=_REORDER,
)
@no_type_check
def statistics(rows, bits, stats, ends, lower, upper, outside):
    """Fill `stats` with the columns of `records.STAT_COLUMNS`.

    Args:
        rows: float32 [N, W].
        bits, ends: the memory of `rows` and of `stats` as integers.
        stats: [N, 6]. A deviation of -1 stands for a row whose first four numbers need
            float64 or have to leave out values.
        lower, upper: limits for `outside`.
        outside: [N], how many values are at `lower` or below, or at `upper` or above;
            empty where that is not asked for.
    """
    width = rows.shape[1]
    for n in range(rows.shape[0]):
        row = rows[n]
        keys = bits[n]
        low = np.int32(_MAGNITUDE)
        high = np.int32(~_MAGNITUDE)
        zeros = np.int32(0)
        nonfinite = np.int32(0)
        for i in range(keys.size):
            magnitude = keys[i] & _MAGNITUDE
            # ordered as the floats
            key = keys[i] ^ ((keys[i] >> np.int32(31)) & _MAGNITUDE)
            low = key if key < low else low
            high = key if key > high else high
            zeros += np.int32(magnitude == 0)
            nonfinite += np.int32(magnitude >= _INFINITE)
        low = low ^ ((low >> np.int32(31)) & _MAGNITUDE)
        high = high ^ ((high >> np.int32(31)) & _MAGNITUDE)
        ends[n, 0] = low if low & _MAGNITUDE else np.int32(0)  # -0 is 0
        ends[n, 1] = high if high & _MAGNITUDE else np.int32(0)
        lowest = stats[n, 0]
        highest = stats[n, 1]
        # Mean and variance of the distances from a shift, which lose fewer digits than
        # those of the values. The first shift is the first value; where it lies too far
        # off, the second one is the mean that was found.
        shift = rows[n, 0]
        mean = 0.0
        variance = 0.0
        for _ in range(2):
            shift = np.float32(shift + mean)
            total = 0.0
            squares = 0.0
            for start in range(0, width, _BLOCK):
                block = row[start : start + _BLOCK]
                block_total = np.float32(0)
                block_squares = np.float32(0)
                for i in range(block.size):
                    distance = block[i] - shift
                    block_total += distance
                    block_squares += distance * distance
                total = total + block_total
                squares = squares + block_squares
            mean = total / width
            variance = squares / width - mean * mean
            if nonfinite > 0 or not mean * mean > _CANCELLATION * variance:
                break
        stats[n, 2] = shift + mean
        stats[n, 3] = math.sqrt(variance if variance > 0 else 0.0)
        stats[n, 4] = zeros / width
        stats[n, 5] = nonfinite
        if nonfinite == 0 and lowest == highest:
            stats[n, 2] = lowest
            stats[n, 3] = 0
        elif nonfinite > 0 or not (_TINY < variance < math.inf):
            stats[n, 3] = -1
        if outside.size > 0:
            count = np.int32(0)
            for i in range(row.size):
                count += np.int32((row[i] <= lower) | (row[i] >= upper))
            outside[n] = count


@partial(
    compiled,
    "void(float32[:,::1],float32[::1],float32[::1],float32,float32,uint8[:,::1])",
)
@no_type_check
def quantise(rows, low, factor, half, top, levels):
    """Fill `levels` [N, W] with (value - low[n]) · factor[n] + half, clipped to 0..top
    unless that is negative, and cut to a whole number."""
    for n in range(rows.shape[0]):
        start = low[n]
        times = factor[n]
        if top < 0:
            for i in range(rows.shape[1]):
                levels[n, i] = np.int32((rows[n, i] - start) * times + half)
        else:
            for i in range(rows.shape[1]):
                level = (rows[n, i] - start) * times + half
                # also for NaN
                level = level if level > np.float32(0) else np.float32(0)
                levels[n, i] = np.int32(level if level < top else top)


@partial(compiled, "void(uint8[:,:,::1],int64,int64,int64,int64,int64,uint8[:,::1])")
@no_type_check
def lay_tiles(tiles, columns, down, across, depth, padding, piece):
    """Lay tiles into a piece of a picture, enlarged by whole factors.

    Each row of a tile is written once, enlarged, into a line of the piece; when the
    line has the rows of all its tiles, it is copied below itself for the factor `down`.

    Args:
        tiles: uint8 [N, h, depth · w].
        columns: tiles beside each other.
        down, across: the factors.
        depth: colours of a pixel.
        padding: pixels to the left of each tile and below it.
        piece: uint8 [rows, depth · width], which is the padding's colour before.
    """
    count, height, width = tiles.shape
    pixels = width // depth
    large_width = width * across
    for start in range(0, count, columns):
        top = start // columns * (height * down + padding)
        end = start + columns if start + columns < count else count
        for y in range(height):
            line = piece[top + y * down]
            x0 = padding * depth
            for n in range(start, end):
                source = tiles[n, y]
                target = line[x0 : x0 + large_width]
                if across == 1:
                    for x in range(source.size):
                        target[x] = source[x]
                # a known factor makes it ten times as fast
                elif across == 2 and depth == 1:
                    for x in range(source.size):
                        target[2 * x] = target[2 * x + 1] = source[x]
                elif across == 3 and depth == 1:
                    for x in range(source.size):
                        target[3 * x] = target[3 * x + 1] = target[3 * x + 2] = source[
                            x
                        ]
                elif across == 4 and depth == 1:
                    for x in range(source.size):
                        target[4 * x] = target[4 * x + 1] = source[x]
                        target[4 * x + 2] = target[4 * x + 3] = source[x]
                elif across == 5 and depth == 1:
                    for x in range(source.size):
                        target[5 * x] = target[5 * x + 1] = target[5 * x + 2] = source[
                            x
                        ]
                        target[5 * x + 3] = target[5 * x + 4] = source[x]
                else:
                    for repeat in range(across):
                        for colour in range(depth):
                            at = repeat * depth + colour
                            for x in range(pixels):
                                target[at + x * across * depth] = source[
                                    x * depth + colour
                                ]
                x0 += large_width + padding * depth
            for repeat in range(1, down):
                copy = piece[top + y * down + repeat]
                for x in range(copy.size):
                    copy[x] = line[x]


@partial(compiled, "void(uint8[:,::1],uint8[::1],int64,uint8[:,::1])")
@no_type_check
def filter_rows(piece, above, depth, filtered):
    """Filter rows for PNG: each byte less the one above it, or less that of the pixel
    on its left, whichever makes the smaller sum of differences, taken as numbers from
    -128 to 127. Small numbers occur often, and deflate codes what occurs often in few
    bits.

    Args:
        piece: uint8 [R, W].
        above: the row above the piece, [W]; at the end its last row.
        depth: bytes of a pixel.
        filtered: [R, 1 + W]: the number of the filter, then the filtered row.
    """
    for r in range(piece.shape[0]):
        row = piece[r]
        pixel = piece[r, depth:]
        neighbour = piece[r, :-depth]
        out = filtered[r, 1:]
        out_pixel = filtered[r, 1 + depth :]
        by_up = np.int32(0)
        by_sub = np.int32(0)
        for i in range(row.size):
            by_up += abs(np.int32(np.int8(row[i] - above[i])))
        if by_up > 0:
            for i in range(pixel.size):
                by_sub += abs(np.int32(np.int8(pixel[i] - neighbour[i])))
        if by_up == 0 or by_up < by_sub:
            filtered[r, 0] = _UP
            for i in range(row.size):
                out[i] = row[i] - above[i]
        else:
            filtered[r, 0] = _SUB
            for i in range(depth):
                out[i] = row[i]
            for i in range(pixel.size):
                out_pixel[i] = pixel[i] - neighbour[i]
        for i in range(row.size):
            above[i] = row[i]


@partial(compiled, None)
@no_type_check
def blend(levels, over, ground, share, mixed):
    """Fill `mixed` [P, 3] with over[levels] + share · ground [P, 3], rounded; `over`
    [256, 3] is what the colour of each level adds."""
    for i in range(levels.size):
        for colour in range(3):
            total = share * ground[i, colour] + over[levels[i], colour]
            mixed[i, colour] = np.int32(total + 0.5)


@partial(compiled, None)
@no_type_check
def add_maps(stats, saturated, positions, sums):
    """Add the statistics of maps to `Tally.sums`, one map after the other.

    Means and sums of squared deviations are joined as Chan, Golub and LeVeque do
    ("Updating formulae and a pairwise algorithm for computing sample variances", 1979).

    Args:
        stats: [B, C, 6].
        saturated: [B, C], how many values saturate; empty where nothing does.
        positions: values of each map.
        sums: [C, columns]: finite values, min, max, mean, squared deviations, zeros,
            non-finite values, saturated values.
    """
    for b in range(stats.shape[0]):
        for c in range(stats.shape[1]):
            nonfinite = np.float64(stats[b, c, 5])
            finite = positions - nonfinite
            count = sums[c, 0]
            if finite > 0:
                mean = np.float64(stats[b, c, 2])
                std = np.float64(stats[b, c, 3])
                low = np.float64(stats[b, c, 0])
                high = np.float64(stats[b, c, 1])
                delta = mean - sums[c, 3]
                share = finite / (count + finite)
                sums[c, 0] = count + finite
                sums[c, 1] = low if low < sums[c, 1] else sums[c, 1]
                sums[c, 2] = high if high > sums[c, 2] else sums[c, 2]
                sums[c, 3] += delta * share
                sums[c, 4] += finite * std * std + delta * delta * count * share
            sums[c, 5] += math.floor(np.float64(stats[b, c, 4]) * positions + 0.5)
            sums[c, 6] += nonfinite
            if saturated.size > 0:
                sums[c, 7] += saturated[b, c]


@partial(compiled, None)
@no_type_check
def add_images(stats, images, values, numbers):
    """Insert images, by the maxima of their maps, into the rankings of a `Tally`:
    before smaller values, and before later images of the same value.

    Args:
        stats: [B, C, 6].
        images: [B], the numbers of the images.
        values: [C, ranks], maxima, the greatest first.
        numbers: [C, ranks], the images that they are of.
    """
    for b in range(stats.shape[0]):
        for c in range(stats.shape[1]):
            image = images[b]
            value = np.float64(stats[b, c, 1]) if stats[b, c, 5] == 0 else math.inf
            for rank in range(values.shape[1]):
                ranked_value = values[c, rank]
                ranked_image = numbers[c, rank]
                if value > ranked_value or (
                    value == ranked_value and image < ranked_image
                ):
                    # what was there moves on to the next rank
                    values[c, rank] = value
                    numbers[c, rank] = image
                    value = ranked_value
                    image = ranked_image
