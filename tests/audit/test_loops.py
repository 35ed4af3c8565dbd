"""The loops of the audit, compiled and by numpy, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from featviz.audit import measuring
from featviz.audit.running_stats import TOP, ChannelStats, TopImages
from featviz.drawing import scan
from featviz.records import Activation

WIDTHS = (1, 2, 7, 49, 197, 785, 2048, 2049, 4099)
TINY = float(np.finfo(np.float32).tiny)


def _rows(kind: str, width: int) -> np.ndarray:
    generator = np.random.default_rng(width)
    rows = generator.standard_normal((11, width)).astype(np.float32)
    some = generator.random(rows.shape) < 0.1
    some[0] = True  # of one row every value
    if kind in KINDS:
        return KINDS[kind](rows)
    return np.where(some, np.float32(kind), np.maximum(rows, 0))


KINDS = {
    "normal": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "below zero": lambda x: -np.abs(x) - np.float32(0.5),
    "negative zero": lambda x: np.where(x > 0, x, np.float32(-0.0)),
    "constant": lambda x: np.broadcast_to(x[:, :1], x.shape).copy(),
    "far from zero": lambda x: np.abs(x) + np.float32(1e4),
    "nearly constant": lambda x: np.float32(3) + np.abs(x) * np.float32(1e-6),
    "an outlier first": lambda x: np.concatenate([x[:, :1] + np.float32(1e4), np.abs(x[:, 1:])], 1),
    "denormal": lambda x: np.abs(x) * np.float32(TINY / 4),
    "huge": lambda x: np.abs(x) * np.float32(1e37),
}
ODD = ("nan", "inf", "-inf")


@pytest.fixture(params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(scan, "compiled", lambda: None)
    elif scan.compiled() is None:
        pytest.skip("numba is not installed")


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


@pytest.mark.parametrize("kind", [*KINDS, *ODD])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.usefixtures("loops")
def test_statistics_are_those_of_float64(kind: str, width: int) -> None:
    """Extremes and counts exactly, the deviation within 1e-6, the mean within 1e-6 of both."""
    rows = _rows(kind, width)
    ceiling = np.sort(rows[1])[width // 2]
    clip = Activation(bounds=(float(ceiling),))
    got, reached = measuring.statistics(torch.from_numpy(rows)[None], clip)
    exact = _expected(rows).astype(np.float32)
    assert got.dtype == np.float32 and reached is not None
    np.testing.assert_array_equal(got[0][:, [0, 1, 4, 5]], exact[:, [0, 1, 4, 5]])
    np.testing.assert_allclose(got[0][:, 3], exact[:, 3], rtol=1e-6, atol=1e-45)
    off = np.abs(got[0][:, 2].astype(float) - exact[:, 2])
    assert (off <= 1e-6 * (np.abs(exact[:, 2]) + exact[:, 3]))[~np.isnan(off)].all()
    np.testing.assert_array_equal(np.isnan(off), np.isnan(exact[:, 2]))
    np.testing.assert_array_equal(reached[0], (rows >= ceiling).sum(1))


@pytest.mark.parametrize("ends", [(-1.0, 1.0), (0.0, 6.0), (-9e9, 9e9)])
@pytest.mark.parametrize("kind", [*KINDS, *ODD])
@pytest.mark.usefixtures("loops")
def test_values_at_either_bound_are_counted(kind: str, ends: tuple[float, float]) -> None:
    """Of two bounds both count, also in rows that hold NaN."""
    rows = _rows(kind, 197)
    reached = measuring.statistics(torch.from_numpy(rows)[None], Activation(bounds=ends))[1]
    assert reached is not None
    np.testing.assert_array_equal(reached[0], ((rows <= ends[0]) | (rows >= ends[1])).sum(1))


@pytest.mark.parametrize("kind", [*KINDS, *ODD])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.usefixtures("loops")
def test_added_maps_are_one_channel(kind: str, batch: int) -> None:
    """The table of a channel over 9 images is that of all its values at once, in float64."""
    values = _rows(kind, 9 * 49)
    images = values.reshape(11, 9, 49).transpose(1, 0, 2).copy()
    clip = Activation(bounds=(0.25,))
    added = ChannelStats.nothing(11, saturates=True)
    for start in range(0, 9, batch):
        part = torch.from_numpy(images[start : start + batch])
        numbers, saturated = measuring.statistics(part, clip)
        added.add(numbers, 49, saturated)
    expected = _expected(values)
    table = added.table()
    finite = np.isfinite(values).sum(1)
    np.testing.assert_array_equal(table[:, 0], finite)
    np.testing.assert_array_equal(table[:, [1, 2]], expected[:, [0, 1]])
    near = 1e-6 * (np.abs(expected[:, 2]) + expected[:, 3]) + 1e-45  # means of maps are float32
    got = np.stack([table[:, 3], np.sqrt(table[:, 4])])
    assert (np.abs(got - expected[:, 2:4].T) <= near)[:, finite > 0].all()
    np.testing.assert_array_equal(table[:, [5, 6]], expected[:, [4, 5]])
    np.testing.assert_array_equal(table[:, 7], (values >= 0.25).mean(1))


@pytest.mark.parametrize("batch", [1, 2, 7, 20])
@pytest.mark.usefixtures("loops")
def test_images_are_ranked_as_by_a_stable_sort(batch: int) -> None:
    """With many ties, NaN as the largest, in any batches; of equals the first image."""
    generator = np.random.default_rng(batch)
    numbers = np.zeros((20, 40, 6), np.float32)
    numbers[..., 1] = generator.integers(-2, 4, (20, 40))
    numbers[..., 5] = generator.random((20, 40)) < 0.05
    top = TopImages.nothing(40)
    order = generator.permutation(20)
    for start in range(0, 20, batch):
        images = order[start : start + batch]
        top.add(images, numbers[images])
    maxima = np.where(numbers[..., 5] > 0, np.inf, numbers[..., 1])
    best = np.argsort(-maxima, axis=0, kind="stable")[:TOP].T
    np.testing.assert_array_equal(top.images, best)
    np.testing.assert_array_equal(top.values, np.take_along_axis(maxima.T, best, 1))


@pytest.mark.usefixtures("loops")
def test_fewer_images_than_places_are_named() -> None:
    """Of two images two are named, best first."""
    numbers = np.zeros((2, 1, 6), np.float32)
    numbers[:, 0, 1] = -5, -3
    top = TopImages.nothing(1)
    top.add(np.array([8, 9]), numbers)
    assert top.of(0) == [9, 8]
