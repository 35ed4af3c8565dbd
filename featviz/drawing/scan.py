"""One pass over float32 values on a CPU: statistics of rows, counts, and their levels.

The loops are compiled (`compiled`); where numba is missing or cannot keep what it compiles, numpy
does the same several times slower. Nothing here needs torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import ModuleType
from zlib import crc32

import numpy as np
from platformdirs import user_cache_dir

from featviz.records import STAT_COLUMNS, Bytes, Floats, Integers

log = logging.getLogger(__name__)

_BLOCK = 65_536
"""Values that numpy looks at a time, so that they stay in a core's cache."""

_ONE_FOLDER = Lock()


@cache
def compiled() -> ModuleType | None:
    """The compiled loops; None where there are none, and numpy serves."""
    try:
        with kept_for_the_user():
            return import_module("featviz.drawing.compiled")
    except Exception as error:  # numba raises RuntimeError where it finds no folder for its cache
        log.info("numba cannot be used, numpy takes its place and is slower: %s", error)
        return None


@contextmanager
def kept_for_the_user() -> Iterator[None]:
    """Compiled loops are kept in the user's cache folder, or where NUMBA_CACHE_DIR says.

    numba's own choice is a folder inside the package. pip does not know it, and leaves it behind
    when featviz is removed: an empty `featviz` that hides the next one from Python. Where the
    user's folder cannot be written, numba goes on with its own choices.

    The folder's name has a checksum of all compiled loops: numba compiles a file anew when it has
    changed, but not when another has, whose loops it calls. One thread at a time is here: numba has
    one folder for the process, and a second thread would go on in a folder below the first one's.
    """
    config = import_module("numba").config
    files = sorted(Path(__file__).parents[1].glob("*/compiled*.py"))
    loops = f"{crc32(b''.join(file.read_bytes() for file in files)):08x}"
    with _ONE_FOLDER:
        before = config.CACHE_DIR
        config.CACHE_DIR = str(Path(before or user_cache_dir("featviz", appauthor=False)) / loops)
        try:
            yield
        finally:
            config.CACHE_DIR = before


def statistics(rows: np.ndarray) -> Floats:
    """Statistics of each row of float32 [N, W] over its finite values.

    Returns:
        float32 [N, 6] in the order of `records.STAT_COLUMNS`; the standard deviation is the
        population's. A row without a finite value has NaN for its first four.
    """
    return _scanned(rows, math.nan, math.nan, 0)[0]


def statistics_and_outside(rows: np.ndarray, low: float, high: float) -> tuple[Floats, Integers]:
    """The same, and how many values of each row are at `low` or below, or at `high` or above.

    Args:
        low: NaN where only `high` bounds; both are rounded to float32.

    Returns:
        float32 [N, 6] and int64 [N].
    """
    return _scanned(rows, low, high, len(rows))


def _scanned(rows: np.ndarray, low: float, high: float, count: int) -> tuple[Floats, Integers]:
    """Both for all rows; `count` is their number, or 0 where nothing is counted."""
    stats = np.empty((len(rows), len(STAT_COLUMNS)), np.float32)
    outside = np.empty(count, np.int64)
    loops, ends = compiled(), (np.float32(low), np.float32(high))
    if loops is None:
        for part in _blocks(rows):
            stats[part] = _statistics(rows[part])
            if count:
                outside[part] = ((rows[part] <= ends[0]) | (rows[part] >= ends[1])).sum(1)
    else:
        rows = _plain(rows)
        loops.statistics(rows, rows.view(np.int32), stats, *ends, outside)
    return stats, outside


def overall(stats: Floats, values: int) -> tuple[float, float, float, float, float, float]:
    """The statistics of all rows together, from those of each.

    Args:
        stats: float32 [N, 6], as of `statistics`.
        values: numbers in each row.

    Returns:
        As a row of them, in float64, but how many are not finite in all.
    """
    loops = compiled()
    if loops is not None:
        numbers: tuple[float, float, float, float, float, float] = loops.overall(
            _plain(stats), values
        )
        return numbers
    columns = stats.T.astype(np.float64)
    zeros, nonfinite = float(columns[4].sum() / len(stats)), float(columns[5].sum())
    finite = values - columns[5]
    if not finite.any():
        return (*(math.nan,) * 4, zeros, nonfinite)
    low, high, means, stds = columns[:4, finite > 0]
    share = finite[finite > 0] / finite.sum()
    mean = share @ means
    variance = share @ (stds * stds + (means - mean) ** 2)
    ends = float(low.min()), float(high.max())
    return (*ends, float(mean), math.sqrt(variance), zeros, nonfinite)


def quantise(
    rows: np.ndarray, low: Floats, factor: Floats, half: float, top: float | None
) -> Bytes:
    """(value - low) · factor + half of each row of float32 [N, W], cut to a whole number.

    Args:
        low: [N] or [1], as `factor`.
        top: clip to 0..top first, NaN to 0; None where no value can lie outside.
    """
    levels = np.empty(rows.shape, np.uint8)
    if len(low) != len(rows):
        low, factor = np.broadcast_to(low, len(rows)), np.broadcast_to(factor, len(rows))
    low, factor = _plain(low), _plain(factor)
    loops = compiled()
    if loops is None:
        for part in _blocks(rows):
            levels[part] = _scaled(rows[part], low[part], factor[part], half, top)
    else:
        loops.quantise(_plain(rows), low, factor, half, -1.0 if top is None else top, levels)
    return levels


def _plain(array: np.ndarray) -> Floats:
    """As the compiled loops take it: float32, without gaps, writable."""
    is_plain = array.dtype == np.float32 and array.flags.carray  # `np.require` takes its time
    return array if is_plain else np.require(array, np.float32, ["C", "W"])


def _blocks(rows: np.ndarray) -> list[slice]:
    step = max(1, _BLOCK // rows.shape[1])
    return [slice(start, start + step) for start in range(0, len(rows), step)]


def _statistics(rows: np.ndarray) -> np.ndarray:
    """Two passes in float64, for values that are finite or not."""
    finite = np.isfinite(rows)
    count, values = finite.sum(1), np.where(finite, rows, 0.0).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = values.sum(1) / count
        distance = np.where(finite, values - mean[:, None], 0.0)
        std = np.sqrt(np.square(distance).sum(1) / count)
    low, high = np.where(finite, rows, np.inf).min(1), np.where(finite, rows, -np.inf).max(1)
    low, high = (np.where(count, ends, np.nan) for ends in (low, high))
    zeros = (rows == 0).sum(1) / rows.shape[1]
    return np.stack([low, high, mean, std, zeros, rows.shape[1] - count], axis=1)


def _scaled(
    rows: np.ndarray, low: Floats, factor: Floats, half: float, top: float | None
) -> np.ndarray:
    scaled: np.ndarray = (rows - low[:, None]) * factor[:, None] + np.float32(half)
    if top is not None:
        np.clip(np.nan_to_num(scaled, copy=False), 0, top, out=scaled)
    return scaled
