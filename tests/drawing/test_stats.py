"""Per-channel numbers against float64 numpy in two passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featviz.drawing.stats import channel_stats, overall

NAN = float("nan")
INF = float("inf")


def oracle(maps: torch.Tensor) -> np.ndarray:
    """The same columns in float64, over each map's finite values."""
    rows = []
    for values in maps.double().numpy().reshape(len(maps), -1):
        finite = values[np.isfinite(values)]
        four = [NAN] * 4
        if finite.size:
            mean = finite.mean()
            std = np.sqrt(np.square(finite - mean).mean())
            four = [finite.min(), finite.max(), mean, std]
        rows.append([*four, (values == 0).mean(), values.size - finite.size])
    return np.array(rows)


def check(maps: torch.Tensor) -> None:
    """Extremes, zeros and counts are exact; mean and std near by float32's digits."""
    found, expected = channel_stats(maps), oracle(maps)
    assert found.dtype == np.float32 and found.shape == (len(maps), 6)
    for column in (0, 1, 4, 5):
        exact = expected[:, column].astype(np.float32)
        np.testing.assert_array_equal(found[:, column], exact)
    assert np.array_equal(np.isnan(found[:, 2:4]), np.isnan(expected[:, 2:4]))
    size = np.fmax(np.abs(expected[:, 0]), np.abs(expected[:, 1]))
    error = np.abs(found[:, 2:4] - expected[:, 2:4])
    assert not (error[:, 0] > 2e-6 * size).any()
    assert not (error[:, 1] > 2e-4 * expected[:, 3] + 2e-7 * size).any()


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([0, 1, -9, 300, 1e4, -1e6]),
    st.sampled_from([1e-4, 1, 50]),
    st.integers(0, 2**32 - 1),
)
def test_stats_match_two_passes_in_float64(
    count: int, height: int, width: int, offset: float, spread: float, seed: int
) -> None:
    """All columns agree with the oracle for any size, far from zero too, half of them rectified."""
    random = torch.Generator().manual_seed(seed)
    maps = torch.randn(count, height, width, generator=random) * spread + offset
    maps[::2] = maps[::2].relu()
    check(maps)


@pytest.mark.parametrize("offset", [0.0, 1.0, 9.9, 10.1, 100.0, 1e4])
def test_large_maps_keep_their_digits(offset: float) -> None:
    """Neither a long sum nor a large offset costs the std more than four digits."""
    check(torch.randn(3, 224, 224, generator=torch.Generator().manual_seed(1)) + offset)


@pytest.mark.parametrize("side", [29, 30, 32])
def test_last_block_may_hold_fewer_maps(side: int) -> None:
    """More maps than are looked at together, not a whole number of times, are all counted."""
    maps = torch.randn(200, side, side, generator=torch.Generator().manual_seed(4))
    check(maps.relu_())


@pytest.mark.parametrize("width", [*range(1, 18), 31, 32, 33, 65_535, 65_540, 70_001])
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_zeros_are_counted_exactly(width: int, density: float) -> None:
    """The share of exact zeros (0 and -0) is exact for any width and across blocks."""
    random = np.random.default_rng(width)
    values = np.where(random.random((5, 1, width)) < density, 0.0, 1e-45).astype(np.float32)
    values[1] *= -1
    shares = (values == 0).mean(axis=(1, 2))
    found = channel_stats(torch.from_numpy(values))[:, 4]
    np.testing.assert_array_equal(found, shares.astype(np.float32))


@pytest.mark.filterwarnings("error")
def test_nonfinite_values_touch_only_their_channel() -> None:
    """NaN and Inf are counted, left out of their own channel's numbers, and make no noise."""
    maps = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(2)) + 3
    clean = channel_stats(maps)
    maps[1, 2, 3] = NAN
    maps[2, :, 1] = INF
    maps[3, 0, :2] = torch.tensor([-INF, INF])
    maps[4] = NAN
    check(maps)
    found = channel_stats(maps)
    assert found[:, 5].tolist() == [0, 1, 5, 2, 35, 0]
    np.testing.assert_allclose(found[[0, 5]], clean[[0, 5]], rtol=1e-5)


def test_channel_without_a_finite_value_has_no_numbers() -> None:
    """A map of nothing but NaN has NaN for min, max, mean and std, and no zeros."""
    found = channel_stats(torch.full((1, 2, 2), NAN))
    np.testing.assert_array_equal(found, [[NAN, NAN, NAN, NAN, 0, 4]])


def test_one_number_maps_have_no_spread() -> None:
    """The std of a single number is exactly 0, whatever the number."""
    values = torch.tensor([0.0, 7.0, -3.3, 1e7, 1e-7])
    found = channel_stats(values.reshape(-1, 1, 1))
    for column in (0, 1, 2):
        np.testing.assert_array_equal(found[:, column], values.numpy())
    np.testing.assert_array_equal(found[:, 3], 0)
    np.testing.assert_array_equal(found[:, 4], [1, 0, 0, 0, 0])


@pytest.mark.parametrize("value", [0.0, 0.1, -1234.567, 1e-12])
def test_constant_maps_have_next_to_no_spread(value: float) -> None:
    """Rounding does not give a constant map a std that one could see."""
    found = channel_stats(torch.full((2, 33, 31), value))
    assert (found[:, 3] <= 1e-6 * abs(value)).all()


@pytest.mark.parametrize("power", [19, 20, 30, 38])
def test_huge_finite_values_have_finite_numbers(power: int) -> None:
    """Squares that overflow float32 do not make the std of finite values infinite."""
    maps = torch.linspace(-2, 3, 35).reshape(1, 5, 7) * 10.0**power
    check(maps)


@pytest.mark.parametrize("power", [-8, -15, -20])
def test_minute_values_keep_their_spread(power: int) -> None:
    """Squares that underflow float32 do not make the std of differing values 0."""
    maps = torch.linspace(-2, 3, 35).reshape(1, 5, 7) * 10.0**power
    found = channel_stats(maps)
    np.testing.assert_allclose(found[:, 3], oracle(maps)[:, 3], rtol=2e-4)


@pytest.mark.parametrize(
    "maps",
    [
        torch.randn(4, 6, 8).permute(2, 0, 1),
        torch.randn(6, 9, 10)[::2, 1:, ::3],
        torch.randn(3, 1, 1).expand(3, 4, 5),
    ],
    ids=["permuted", "sliced", "expanded"],
)
def test_any_strides_give_the_numbers_of_the_copy(maps: torch.Tensor) -> None:
    """Views are read as they are, and left as they were."""
    before = maps.clone()
    found = channel_stats(maps)
    np.testing.assert_allclose(found, channel_stats(before), rtol=1e-5, atol=1e-7)
    assert torch.equal(maps, before)


@pytest.mark.parametrize("holes", [False, True], ids=["finite", "nonfinite"])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_overall_is_over_all_values(offset: float, holes: bool) -> None:
    """The layer's numbers are those of all its finite values together."""
    maps = torch.randn(9, 6, 5, generator=torch.Generator().manual_seed(3)) + offset
    maps *= torch.arange(9.0)[:, None, None]
    if holes:
        maps[2, 1, 1:4] = NAN
        maps[5] = INF
    values = maps.double().numpy()
    finite = values[np.isfinite(values)]
    found = overall(channel_stats(maps), 30)
    assert (found["min"], found["max"]) == (finite.min(), finite.max())
    assert found["mean"] == pytest.approx(finite.mean(), rel=1e-5)
    assert found["std"] == pytest.approx(finite.std(), rel=1e-4)
    assert found["zero_fraction"] == pytest.approx((values == 0).mean(), rel=1e-6)
    assert found["nonfinite"] == values.size - finite.size


def test_overall_without_a_finite_value_has_no_numbers() -> None:
    """Where nothing is finite, min, max, mean and std are None rather than NaN."""
    found = overall(channel_stats(torch.full((3, 2, 2), NAN)), 4)
    assert [found[name] for name in ("min", "max", "mean", "std")] == [None] * 4
    assert (found["zero_fraction"], found["nonfinite"]) == (0, 12)
