"""One pass over the values: the compiled loops against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from featviz.drawing import loops, values

ROUNDING = 512 / 4 * 2**-24
"""Of a float32 sum of 512 values in 4 lanes, the fewest there are: an addition is off
by 2^-24."""

RNG = np.random.default_rng(13)


def _normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def _ending_in(value: float, width: int = 3000) -> np.ndarray:
    """What an activation gives, but for the last value: the loops take another way
    there."""
    rows = np.maximum(_normal(4, width), 0)
    rows[:, -1] = value
    return rows


def _with(rows: np.ndarray, value: float, share: float = 0.1) -> np.ndarray:
    return np.where(RNG.random(rows.shape) < share, np.float32(value), rows)


def _behind(value: float, rows: np.ndarray) -> np.ndarray:
    return np.pad(rows, ((0, 0), (1, 0)), constant_values=value)


MAPS = {
    "normal": _normal(7, 4999),
    "relu": np.maximum(_normal(64, 49), 0),
    "negative at last": _ending_in(-2.5),
    "minus zero at last": _ending_in(-0.0),
    "a row of two blocks and one": _normal(3, 4097),
    "constant": np.full((3, 1000), 0.1, np.float32),
    "zeros of both signs": _normal(4, 100) * np.float32(0),
    "an outlier first": _behind(1e4, _normal(4, 5000)),
    "far from zero": _normal(4, 3000) + np.float32(1e5),
    "nearly constant": np.float32(1) + np.float32(1e-6) * _normal(4, 3000),
    "denormal": _normal(4, 300) * np.float32(1e-40),
    "tiny": _normal(4, 300) * np.float32(1e-25),
    "largest": np.array([[3.4e38, -3.4e38, 1.0]], np.float32),
    "NaN": _with(_normal(6, 500), np.nan),
    "infinite": _with(_with(_normal(6, 500), np.inf), -np.inf),
    "first is infinite": np.array([[np.inf, 1, 2, 3], [np.nan, -1, 0, 5]], np.float32),
    "none finite": np.array([[np.nan, np.inf], [1, 2]], np.float32),
    "strided": _normal(64, 9, 40).transpose(1, 0, 2)[:, :, ::2].reshape(9, -1)[:, ::3],
}
EVERY_MAP = pytest.mark.parametrize("rows", MAPS.values(), ids=MAPS)


def _statistics(rows: np.ndarray) -> np.ndarray:
    stats = values.statistics(torch.from_numpy(rows.copy()))
    return stats


def _statistics_on_device(rows: np.ndarray) -> np.ndarray:
    return values.statistics_on_device(torch.from_numpy(rows.copy()))


def _expected(row: np.ndarray) -> list[float]:
    """The statistics of a row, of its finite values in float64."""
    finite = row[np.isfinite(row)].astype(np.float64)
    moments = [np.nan] * 4
    if len(finite):
        moments = [finite.min(), finite.max(), finite.mean(), finite.std()]
    return [*moments, (row == 0).mean(), row.size - finite.size]


@pytest.mark.parametrize("statistics", [_statistics, _statistics_on_device])
@EVERY_MAP
def test_statistics_are_those_of_float64(
    rows: np.ndarray,
    statistics: Callable[[np.ndarray], np.ndarray],
) -> None:
    """Extremes and counts exactly, the deviation and, beside both, the mean within
    rounding; in a compiled loop, and by torch where the values are."""
    stats = statistics(rows)
    expected = np.array([_expected(row) for row in rows])
    exact = [0, 1, 4, 5]
    assert stats.dtype == np.float32
    assert_array_equal(stats[:, exact], expected[:, exact].astype(np.float32))
    mean, std = expected[:, 2:4].astype(np.float32).T
    assert_allclose(stats[:, 3], std, rtol=ROUNDING, atol=1e-45)
    has_values = ~np.isnan(mean)
    assert_array_equal(np.isnan(stats[:, 2]), ~has_values)
    error = np.abs(stats[:, 2] - mean)
    assert (error <= ROUNDING * (np.abs(mean) + std))[has_values].all()


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (np.nan, 0.5),
        (-0.5, 0.1),
        (0.0, np.inf),
    ],
)
@EVERY_MAP
def test_values_outside_are_counted_with_the_statistics(
    rows: np.ndarray,
    low: float,
    high: float,
) -> None:
    """At the ends or beyond them; NaN is nowhere; the statistics are the same as alone."""
    maps = torch.from_numpy(rows.copy())
    outside = np.empty(len(maps), np.int64)
    stats = values.statistics(maps, low, high, outside)
    is_outside = (rows <= np.float32(low)) | (rows >= np.float32(high))
    assert_array_equal(outside, is_outside.sum(1))
    assert_array_equal(stats, _statistics(rows))


def _by_loop(
    rows: np.ndarray,
    low: np.ndarray,
    factor: np.ndarray,
    half: np.ndarray,
    top: float,
) -> np.ndarray:
    levels = np.empty(rows.shape, np.uint8)
    rows = np.require(rows, np.float32, ["C", "W"])
    loops.quantise(rows, low, factor, half, top, levels)
    return levels


def _on_device(rows: np.ndarray, *numbers: np.ndarray) -> np.ndarray:
    *line, top = numbers
    maps = torch.from_numpy(rows.copy())
    return values.quantise_on_device(maps, values.Line(*line), float(top))


QUANTISERS = pytest.mark.parametrize("quantise", [_by_loop, _on_device])
FINITE = {name: rows for name, rows in MAPS.items() if np.ptp(rows) < np.inf}


@QUANTISERS
@pytest.mark.parametrize("rows", FINITE.values(), ids=FINITE)
@pytest.mark.parametrize("top", [-1.0, 255.5])
def test_levels_are_those_of_numpy(
    rows: np.ndarray,
    top: float,
    quantise: Callable[..., np.ndarray],
) -> None:
    """The same float32 operations in the same order, so the same bytes; on a device,
    too."""
    low = rows.min(1)
    span = np.maximum(rows.max(1) - low, np.float32(1e-30))
    factor = (255 / span).astype(np.float32)
    expected = (rows - low[:, None]) * factor[:, None] + np.float32(0.5)
    if top > 0:
        expected = expected.clip(0, top)
    levels = quantise(rows, low, factor, np.full_like(low, 0.5), top)
    assert_array_equal(levels, expected.astype(np.uint8))


@QUANTISERS
def test_values_outside_the_limits_are_clipped_and_nan_is_dark(
    quantise: Callable[..., np.ndarray],
) -> None:
    """Levels end at 0 and at the top, and NaN has level 0."""
    rows = np.array([[-9, 0, 1, 2, 9, np.nan, np.inf, -np.inf]], np.float32)
    low = np.zeros(1, np.float32)
    factor = np.full(1, 100, np.float32)
    levels = quantise(rows, low, factor, np.full_like(low, 0.5), 200.5)
    assert levels.tolist() == [[0, 0, 100, 200, 200, 0, 200, 0]]


@EVERY_MAP
def test_overall_joins_the_rows(rows: np.ndarray) -> None:
    """The statistics of all rows together are those of all finite values, from float64
    numbers."""
    total = values.overall(_statistics(rows), rows.shape[1])
    expected = _expected(rows.flatten())
    largest = np.abs(rows[np.isfinite(rows)]).max()
    rounding = 1e-6 * float(largest) + 1e-44
    assert total["min"] == expected[0]
    assert total["max"] == expected[1]
    assert total["mean"] == pytest.approx(expected[2], rel=1e-5, abs=rounding)
    assert total["std"] == pytest.approx(expected[3], rel=1e-4, abs=rounding)
    assert total["zero_fraction"] == pytest.approx(expected[4], rel=1e-6)
    assert total["nonfinite"] == expected[5]


def test_overall_of_no_finite_value() -> None:
    """Rows without a finite value have counts, and no moments."""
    rows = np.full((2, 3), np.nan, np.float32)
    total = values.overall(_statistics(rows), 3)
    assert total == {
        **dict.fromkeys(("min", "max", "mean", "std")),
        "zero_fraction": 0,
        "nonfinite": 6,
    }


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("across", range(1, 8))
def test_tiles_lie_enlarged_in_rows(across: int, depth: int) -> None:
    """Each pixel of a tile is repeated down and across, and what is between tiles stays
    as it was."""
    down = 2
    tiles = RNG.integers(0, 200, (3, 5, 4, depth), dtype=np.uint8)
    piece = np.full((2 * 11, (1 + 2 * (4 * across + 1)) * depth), 255, np.uint8)
    expected = piece.reshape(22, -1, depth).copy()
    for number, tile in enumerate(tiles):
        row, column = divmod(number, 2)
        y = row * 11
        x = 1 + column * (4 * across + 1)
        large = tile.repeat(down, 0).repeat(across, 1)
        expected[y : y + 10, x : x + 4 * across] = large

    loops.lay_tiles(tiles.reshape(3, 5, -1), 2, down, across, depth, 1, piece)

    assert_array_equal(piece, expected.reshape(22, -1))
