"""One pass over the values: the compiled loops against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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


MAPS = {
    "normal": _normal(7, 4999),
    "relu": np.maximum(_normal(64, 49), 0),
    "negative at last": _ending_in(-2.5),
    "minus zero at last": _ending_in(-0.0),
    "a row of two blocks and one": _normal(3, 4097),
    "constant": np.full((3, 1000), 0.1, np.float32),
    "zeros of both signs": np.where(_normal(4, 100) > 0, 0.0, -0.0).astype(np.float32),
    "an outlier first": np.concatenate(
        [np.full((4, 1), 1e4, np.float32), _normal(4, 5000)], 1
    ),
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


def _by_loop(
    rows: np.ndarray,
    low: np.ndarray,
    factor: np.ndarray,
    half: float,
    top: float | None,
) -> np.ndarray:
    levels = np.empty(rows.shape, np.uint8)
    rows = np.require(rows, np.float32, ["C", "W"])
    loops.quantise(rows, low, factor, half, -1.0 if top is None else top, levels)
    return levels


def _expected(rows: np.ndarray) -> np.ndarray:
    """Each row by itself, its finite values in float64."""
    numbers = []
    for row in rows.astype(np.float64):
        values = row[np.isfinite(row)]
        four = [np.nan] * 4
        if len(values):
            four = [values.min(), values.max(), values.mean(), values.std()]
        numbers.append([*four, (row == 0).mean(), (~np.isfinite(row)).sum()])
    return np.array(numbers)


@pytest.mark.parametrize("where", ["loop", "device"])
@pytest.mark.parametrize("name", MAPS)
def test_statistics_are_those_of_float64(name: str, where: str) -> None:
    """Extremes and counts exactly, the deviation and, beside both, the mean within
    rounding; in a compiled loop, and by torch where the values are."""
    rows = MAPS[name]
    on_device = values.statistics_on_device
    got = (
        values.statistics(rows)[0]
        if where == "loop"
        else on_device(torch.from_numpy(rows.copy()))
    )
    expected = _expected(rows)
    assert got.dtype == np.float32
    exact = expected.astype(np.float32)
    np.testing.assert_array_equal(got[:, [0, 1, 4, 5]], exact[:, [0, 1, 4, 5]])
    np.testing.assert_allclose(got[:, 3], exact[:, 3], rtol=ROUNDING, atol=1e-45)
    off = np.abs(got[:, 2] - exact[:, 2])
    assert (off <= ROUNDING * (np.abs(exact[:, 2]) + exact[:, 3]))[~np.isnan(off)].all()
    np.testing.assert_array_equal(np.isnan(off), np.isnan(exact[:, 2]))


@pytest.mark.parametrize("name", MAPS)
def test_values_outside_are_counted_beside_the_statistics(name: str) -> None:
    """At the ends or beyond them; NaN is nowhere; the statistics are the same as alone."""
    rows = MAPS[name]
    for low, high in ((np.nan, 0.5), (-0.5, 0.1), (0.0, np.inf)):
        numbers, outside = values.statistics(rows, low, high, counted=True)
        expected = (rows <= np.float32(low)).sum(1) + (rows >= np.float32(high)).sum(1)
        np.testing.assert_array_equal(outside, expected)
        np.testing.assert_array_equal(numbers, values.statistics(rows)[0])


@pytest.mark.parametrize("name", [name for name in MAPS if np.ptp(MAPS[name]) < np.inf])
@pytest.mark.parametrize("top", [None, 255.5])
def test_levels_are_those_of_numpy(name: str, top: float | None) -> None:
    """The same float32 operations in the same order, so the same bytes; on a device,
    too."""
    rows = MAPS[name]
    low = rows.min(1)
    span = np.maximum(rows.max(1) - low, np.float32(1e-30))
    factor = (255 / span).astype(np.float32)
    scaled = (rows - low[:, None]) * factor[:, None] + np.float32(0.5)
    expected = scaled if top is None else np.clip(scaled, 0, top)
    line = low, factor, 0.5, top
    np.testing.assert_array_equal(_by_loop(rows, *line), expected.astype(np.uint8))
    on_device = values.quantise_on_device(torch.from_numpy(rows.copy()), *line)
    np.testing.assert_array_equal(on_device, expected.astype(np.uint8))


def test_values_outside_the_limits_are_clipped_and_nan_is_dark() -> None:
    rows = np.array([[-9, 0, 1, 2, 9, np.nan, np.inf, -np.inf]], np.float32)
    one = np.ones(1, np.float32)
    line = 0 * one, 100 * one, 0.5, 200.5
    for levels in (
        _by_loop(rows, *line),
        values.quantise_on_device(torch.from_numpy(rows), *line),
    ):
        assert levels.tolist() == [[0, 0, 100, 200, 200, 0, 200, 0]]


@pytest.mark.parametrize("name", MAPS)
def test_overall_joins_the_rows(name: str) -> None:
    """The statistics of all rows together are those of all finite values, from float64
    numbers."""
    rows = MAPS[name]
    stats = values.statistics(rows)[0]
    total = values.overall(stats, rows.shape[1])
    finite = rows[np.isfinite(rows)].astype(np.float64)
    assert total.pop("zero_fraction") == pytest.approx((rows == 0).mean(), rel=1e-6)
    assert total.pop("nonfinite") == rows.size - finite.size
    if not finite.size:
        assert total == dict.fromkeys(("min", "max", "mean", "std"))
        return
    margin = 1e-6 * float(abs(finite).max()) + 1e-44
    assert (total["min"], total["max"]) == (finite.min(), finite.max())
    assert total["mean"] == pytest.approx(finite.mean(), rel=1e-5, abs=margin)
    assert total["std"] == pytest.approx(finite.std(), rel=1e-4, abs=margin)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("across", range(1, 8))
def test_tiles_lie_enlarged_in_rows(across: int, depth: int) -> None:
    """Each pixel of a tile is repeated down and across, and what is between tiles stays
    as it was."""
    down = 2
    tiles = RNG.integers(0, 200, (3, 5, 4, depth), dtype=np.uint8)
    large = tiles.repeat(down, 1).repeat(across, 2)
    tile_height, tile_width = large.shape[1:3]
    piece = np.full((2 * (tile_height + 1), (1 + 2 * (tile_width + 1)) * depth), 255)
    piece = piece.astype(np.uint8)

    loops.lay_tiles(tiles.reshape(3, 5, -1), 2, down, across, depth, 1, piece)

    pixels = piece.reshape(len(piece), -1, depth)
    for number, tile in enumerate(large):
        row, column = divmod(number, 2)
        y = row * (tile_height + 1)
        x = 1 + column * (tile_width + 1)
        drawn = pixels[y : y + tile_height, x : x + tile_width]
        assert np.array_equal(drawn, tile)
        drawn[:] = 255
    assert (pixels == 255).all()
