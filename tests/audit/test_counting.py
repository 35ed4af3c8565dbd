"""Counting: running statistics of channels and the loops below them, against numpy in
float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from featviz.audit import counting, findings
from featviz.audit.audit import layer_row
from featviz.audit.counting import TOP, Measurement, Tally
from featviz.audit.gates import Evidence
from featviz.audit.parts import PARTS, Activation, Call
from featviz.audit.plan import CountedCall
from featviz.errors import LayoutError
from featviz.options.commands import Thresholds
from featviz.records import RECTIFIERS

KINDS = {
    "normal": lambda g, n: g.normal(0, 1, n),
    "relu": lambda g, n: np.maximum(g.normal(0, 1, n), 0),
    "far from zero": lambda g, n: g.normal(2.9, 1, n),
    "far off": lambda g, n: g.normal(40, 1, n),
    "constant": lambda g, n: np.full(n, 0.1),
    "zero": lambda g, n: np.zeros(n),
    "wide": lambda g, n: g.normal(0, 1, n) * 10 ** g.uniform(-3, 3, n),
}


def outputs(images: int = 12) -> Tensor:
    """[images, 7, 9, 11] float32, a channel of each kind."""
    generator = np.random.default_rng(5)
    parts = [make(generator, (images, 1, 9, 11)) for make in KINDS.values()]
    return torch.from_numpy(np.concatenate(parts, 1).astype(np.float32))


def split(tensor: Tensor, cuts: set[int]) -> list[Tensor]:
    edges = [0, *sorted(cuts), len(tensor)]
    return [tensor[a:b] for a, b in pairwise(edges) if b > a]


@pytest.mark.parametrize("cuts", [set(), {3, 4, 9}])
def test_streamed_correlation_equals_numpys(cuts: set[int]) -> None:
    """Pearson's r of every pair as np.corrcoef has it, for means far apart, too."""
    tensor = outputs()
    tensor[:, 4] = tensor[:, 0] * -3 + 7  # a channel that repeats another
    whole = Tally.empty(7, correlates=True)
    for rows in (counting.to_rows(part, 1, len(part)) for part in split(tensor, cuts)):
        whole.add(
            counting.measure(rows, Activation(), correlates=True), np.arange(len(rows))
        )
    with np.errstate(invalid="ignore"):
        expected = np.corrcoef(tensor.double().movedim(1, 0).flatten(1).numpy())
    np.testing.assert_allclose(whole.correlation(), np.nan_to_num(expected), atol=1e-5)


def test_rows_of_every_layout() -> None:
    """Channels first and last, vectors, and windows of which several make an image."""
    x = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    assert torch.equal(counting.to_rows(x, 1, 2), x.flatten(2))
    assert torch.equal(counting.to_rows(x.movedim(1, -1), -1, 2), x.flatten(2))
    assert torch.equal(counting.to_rows(x[:, :, 0, 0], 1, 2), x[:, :, :1, 0])
    # 4 windows of 5 tokens an image
    windows = x.flatten(2).movedim(1, -1).reshape(8, 5, 3)
    assert torch.equal(counting.to_rows(windows, -1, 2), x.flatten(2))


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("shape", [(9, 11, 70), (2, 70)])
def test_channels_that_lie_last_have_the_same_statistics(
    images: int, shape: tuple[int, ...]
) -> None:
    """Tokens and channels-last maps, one image and several: as if the channels came
    first."""
    last = torch.randn(images, *shape, generator=torch.Generator().manual_seed(2))
    first = last.movedim(-1, 1).contiguous()
    clip = Activation(bounds=(-1.0, 1.0))
    got = counting.measure(counting.to_rows(last, -1, images), clip)
    expected = counting.measure(counting.to_rows(first, 1, images), clip)
    np.testing.assert_array_equal(got.statistics, expected.statistics)
    np.testing.assert_array_equal(got.at_bound, expected.at_bound)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "images"),
    [(torch.zeros(3, 4), 2), (torch.zeros(0, 4), 1), (torch.zeros(4), 1)],
)
def test_what_has_no_rows_is_refused(tensor: Tensor, images: int) -> None:
    """A first axis that is no batch, and nothing at all."""
    with pytest.raises(LayoutError):
        counting.to_rows(tensor, 1, images)


def test_values_at_a_bound() -> None:
    """One bound is a ceiling; of two, both count; the margin is inclusive."""
    rows = torch.tensor([[[0.0, 0.001, 0.5, 0.999, 1.0]]])
    for bounds, margin, count in (
        ((1.0,), 0.0, 1),
        ((0.0, 1.0), 0.0, 2),
        ((0.0, 1.0), 0.0011, 4),
    ):
        activation = Activation(bounds=bounds, margin=margin)
        at_bound = counting.measure(rows, activation).at_bound
        assert at_bound is not None
        assert at_bound.tolist() == [[count]]
    assert counting.measure(rows, Activation()).at_bound is None


def evidence(low: list[float], high: list[float], **more: list[float]) -> Evidence:
    """Of 100 finite values in each channel, unless `more` says otherwise."""
    count = [100.0] * len(low)
    given = {
        "count": count,
        "nonfinite": [0.0] * len(low),
        "low": low,
        "high": high,
        **more,
    }
    return Evidence(**{name: np.array(values, float) for name, values in given.items()})


def test_a_channel_with_nan_is_judged_for_nothing_else() -> None:
    """All else about it may look dead, constant and saturated."""
    seen = evidence([0, 0], [0, 0], ceiling=[0, 0], saturated=[1, 1], nonfinite=[1, 0])
    assert findings.judge(seen, Thresholds()) == {
        "dead": [1],
        "constant": [],
        "saturated": [1],
        "nonfinite": [0],
    }


def test_thresholds_of_dead_and_constant() -> None:
    """eps is inclusive; without it constant allows for rounding, and one value is no
    verdict."""
    seen = evidence([0, 0, 5], [0.1, 0.2, 5.000001], ceiling=[0.1, 0.2, 5])
    assert findings.judge(seen, Thresholds(eps=0.1))["dead"] == [0]
    assert findings.judge(seen, Thresholds())["dead"] == []
    assert findings.judge(seen, Thresholds())["constant"] == [2]
    once = evidence([5], [5], count=[1])
    assert findings.judge(once, Thresholds())["constant"] == []


def test_what_is_not_finite_behind_is_not_known_to_be_dead() -> None:
    """Zeros and a NaN at the activation are no verdict of the layer before it."""
    conv = CountedCall(Call("conv", "X"), channel_axis=1)
    relu = CountedCall(Call("relu", "X"), channel_axis=1)
    tallies = {counted.call: Tally.empty(2) for counted in (conv, relu)}
    tallies[conv.call].sums[:, :3] = 4, -1, 1
    tallies[relu.call].sums[:] = [[4, 0, 0, 0, 0, 4, 0, 0], [4, 0, 0, 0, 0, 4, 1, 0]]
    row = layer_row(replace(conv, dead_at=relu), tallies, Thresholds())
    assert row["findings"]["dead"] == [0]
    assert row["apoz"] == pytest.approx((1 + 0.8) / 2)


def test_redundant_channels_come_in_connected_components() -> None:
    """0-1-2 is a chain whose ends do not correlate; 3 and 4 are a pair; 5 is alone."""
    links = np.eye(6)
    for a, b in ((0, 1), (1, 2), (3, 4)):
        links[a, b] = links[b, a] = 0.99
    links[5, 0] = links[0, 5] = 0.98  # not above
    limits = Thresholds(redundant_at=0.98)
    seen = Evidence(*np.ones((4, 6)) * [[100], [0], [1], [0]], correlation=links)
    assert findings.redundant_groups(seen, limits) == [[0, 1, 2], [3, 4]]
    assert findings.judge(seen, limits)["redundant"] == [0, 1, 2, 3, 4]
    few = Evidence(*np.ones((4, 6)) * [[9], [0], [1], [0]], correlation=links)
    assert findings.judge(few, limits)["redundant"] == []
    assert "redundant" not in findings.judge(seen, Thresholds())


def test_rectifiers_are_the_activations_that_can_be_dead() -> None:
    """The names by which a report knows an activation are those of the table of parts."""
    parts = PARTS.items()
    dead = [name for name, part in parts if part.activation and part.activation.zero]
    assert {name if name[0].isupper() else f"fn:{name}" for name in dead} == RECTIFIERS


ROUNDING = 512 / 4 * 2**-24
"""Of a float32 sum of 512 values in 4 lanes, the fewest there are: an addition is off
by 2^-24."""

ODD = {
    "below zero": lambda g, n: -np.abs(g.normal(0, 1, n)) - 0.5,
    "negative zero": lambda g, n: np.where(g.random(n) < 0.5, 1, -0.0),
    "nearly constant": lambda g, n: 3 + np.abs(g.normal(0, 1, n)) * 1e-6,
    "outliers": lambda g, n: np.abs(g.normal(0, 1, n)) + 1e4 * (g.random(n) < 0.01),
    "denormal": lambda g, n: np.abs(g.normal(0, 1, n)) * np.finfo(np.float32).tiny / 4,
    "huge": lambda g, n: np.abs(g.normal(0, 1, n)) * 1e37,
    "nan": lambda g, n: np.where(g.random(n) < 0.1, np.nan, g.normal(0, 1, n)),
    "infinite": lambda g, n: np.where(g.random(n) < 0.1, np.inf, g.normal(0, 1, n)),
    "only nan": lambda g, n: np.full(n, np.nan),
    "only -inf": lambda g, n: np.full(n, -np.inf),
}


@pytest.mark.parametrize("activation", [*KINDS, *ODD])
@pytest.mark.parametrize("batch", [1, 3])
def test_added_maps_are_one_channel(activation: str, batch: int) -> None:
    """The table of a channel over 9 images is that of all its values at once, in
    float64."""
    make = {**KINDS, **ODD}[activation]
    images = make(np.random.default_rng(49), (9, 4, 49)).astype(np.float32)
    clip = Activation(bounds=(0.25,))
    added = Tally.empty(4, saturates=True)
    for start in range(0, 9, batch):
        batch_images = torch.from_numpy(images[start : start + batch])
        added.add(counting.measure(batch_images, clip), np.arange(len(batch_images)))
    table = added.table()
    for row, values in zip(
        table, images.swapaxes(0, 1).astype(np.float64), strict=True
    ):
        finite = values[np.isfinite(values)]
        assert row[0] == len(finite)
        assert row[5:].tolist() == [
            (values == 0).mean(),
            values.size - len(finite),
            (values >= 0.25).mean(),
        ]
        if not len(finite):
            assert np.isnan(row[1:5]).all()
            continue
        assert row[1:3].tolist() == [finite.min(), finite.max()]
        mean = finite.mean()
        deviation = finite.std()
        near = ROUNDING * (abs(mean) + deviation) + 1e-45  # means of maps are float32
        assert abs(row[3] - mean) <= near
        assert abs(np.sqrt(row[4]) - deviation) <= near


@pytest.mark.parametrize("batch", [1, 7])
def test_images_are_ranked_as_by_a_stable_sort(batch: int) -> None:
    """With many ties, NaN as the largest, in any batches; of equals the first image."""
    generator = np.random.default_rng(batch)
    numbers = np.zeros((20, 40, 6), np.float32)
    numbers[..., 1] = generator.integers(-2, 4, (20, 40))
    numbers[..., 5] = generator.random((20, 40)) < 0.05
    top = Tally.empty(40)
    order = generator.permutation(20)
    for start in range(0, 20, batch):
        images = order[start : start + batch]
        measurement = Measurement(
            numbers[images], positions=1, at_bound=None, moments=None
        )
        top.add(measurement, images)
    maxima = np.where(numbers[..., 5] > 0, np.inf, numbers[..., 1])
    best = np.argsort(-maxima, axis=0, kind="stable")[:TOP].T
    np.testing.assert_array_equal(top.images, best)
    np.testing.assert_array_equal(top.best, np.take_along_axis(maxima.T, best, 1))
