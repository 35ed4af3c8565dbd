"""Running statistics of channels, against numpy over everything at once."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from featviz.audit import activations, findings, measuring, running_stats
from featviz.audit.running_stats import ChannelStats, Covariance, TopImages
from featviz.drawing import stats
from featviz.errors import LayoutError
from featviz.records import RECTIFIERS, Activation
from featviz.records.findings import Evidence, Thresholds

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


def of(tensor: Tensor) -> ChannelStats:
    """Statistics of one batch [B, C, ...], the way the audit gets them."""
    rows = running_stats.to_rows(tensor, 1, len(tensor))
    numbers = stats.channel_stats(rows.flatten(0, 1)).reshape(*rows.shape[:2], 6)
    added = ChannelStats.nothing(rows.shape[1])
    added.add(numbers, rows.shape[2])
    return added


def split(tensor: Tensor, cuts: set[int]) -> list[Tensor]:
    edges = [0, *sorted(cuts), len(tensor)]
    return [tensor[a:b] for a, b in pairwise(edges) if b > a]


def total(parts: list[ChannelStats]) -> ChannelStats:
    return reduce(ChannelStats.merge, parts)


def two_pass(tensor: Tensor) -> np.ndarray:
    """The oracle [C, 7]: the columns without saturation, in float64 over everything."""
    values = tensor.double().movedim(1, 0).flatten(1).numpy()
    rows = []
    for channel in values:
        finite = channel[np.isfinite(channel)]
        zeros, bad = (channel == 0).mean(), len(channel) - len(finite)
        numbers = [finite.min(), finite.max(), finite.mean(), finite.var()] if len(finite) else []
        rows.append([len(finite), *(numbers or [np.nan] * 4), zeros, bad])
    return np.array(rows)


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(1, 11)))
def test_any_split_equals_two_passes_over_the_whole(cuts: set[int]) -> None:
    """Every column within 1e-5 of numpy in float64, however the images are parted."""
    tensor = outputs()
    table = total([of(part) for part in split(tensor, cuts)]).table()
    np.testing.assert_allclose(table[:, :7], two_pass(tensor), rtol=1e-5, atol=1e-9)


def test_order_of_merging_does_not_matter() -> None:
    """(a + b) + c and a + (b + c) agree to float64's last digits."""
    a, b, c = (of(part) for part in split(outputs(), {2, 9}))
    left, right = a.merge(b).merge(c).table(), a.merge(b.merge(c)).table()
    np.testing.assert_allclose(left, right, rtol=1e-13, atol=1e-13)


def test_nonfinite_values_are_counted_and_left_out() -> None:
    """NaN and infinities count in their column; a channel of nothing else has NaN for the rest."""
    tensor = outputs(4)
    tensor[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    tensor[:, 1] = torch.nan
    table = total([of(part) for part in split(tensor, {1, 2, 3})]).table()
    np.testing.assert_allclose(table[:, :7], two_pass(tensor), rtol=1e-5, atol=1e-9)
    assert table[0, 6] == 3 and table[1, 6] == 4 * 99 and table[1, 0] == 0


def test_nothing_seen_is_no_number() -> None:
    """Where no value is finite the table says NaN, and merging it changes no other column."""
    nothing, some = of(torch.full((3, 7, 9, 11), torch.nan)), of(outputs(3))
    table = nothing.table()
    assert np.isnan(table[:, 1:5]).all() and (table[:, 0] == 0).all()
    np.testing.assert_array_equal(some.merge(nothing).table()[:, :5], some.table()[:, :5])


@pytest.mark.parametrize("cuts", [set(), {1}, {3, 4, 9}, set(range(1, 12))])
def test_streamed_correlation_equals_numpys(cuts: set[int]) -> None:
    """Pearson's r of every pair as np.corrcoef has it, for means far apart, too."""
    tensor = outputs()
    tensor[:, 4] = tensor[:, 0] * -3 + 7  # a channel that repeats another
    rows = (running_stats.to_rows(part, 1, len(part)) for part in split(tensor, cuts))
    whole = reduce(Covariance.merge, map(Covariance.of_rows, rows))
    with np.errstate(invalid="ignore"):
        expected = np.corrcoef(tensor.double().movedim(1, 0).flatten(1).numpy())
    np.testing.assert_allclose(whole.correlation(), np.nan_to_num(expected), atol=1e-5)


def top_of(images: np.ndarray, maxima: np.ndarray) -> TopImages:
    """The best of these images, by the maxima [all images, C]."""
    numbers = np.zeros((len(images), maxima.shape[1], 6), np.float32)
    numbers[..., stats.MAX] = maxima[images]
    top = TopImages.nothing(maxima.shape[1])
    top.add(images, numbers)
    return top


def test_top_images_are_the_best_of_all() -> None:
    """In any split the same images as sorting all maxima at once; of equals, the first."""
    generator = np.random.default_rng(1)
    maxima = generator.integers(0, 6, (20, 5)).astype(float)  # with many ties
    batches = np.split(np.arange(20), [3, 4, 11])
    top = reduce(TopImages.merge, (top_of(n, maxima) for n in batches))
    order = np.argsort(-maxima, axis=0, kind="stable")[:4].T
    assert np.array_equal(top.images, order)
    assert np.array_equal(top.values, np.take_along_axis(maxima.T, order, 1))
    other_way = reduce(TopImages.merge, (top_of(n, maxima) for n in batches[::-1]))
    assert np.array_equal(top.images, other_way.images)
    assert top_of(np.array([7]), np.full((8, 1), 0.5)).of(0) == [7]


def test_rows_of_every_layout() -> None:
    """Channels first and last, vectors, and windows of which several make an image."""
    x = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    assert torch.equal(running_stats.to_rows(x, 1, 2), x.flatten(2))
    assert torch.equal(running_stats.to_rows(x.movedim(1, -1), -1, 2), x.flatten(2))
    assert torch.equal(running_stats.to_rows(x[:, :, 0, 0], 1, 2), x[:, :, :1, 0])
    windows = x.flatten(2).movedim(1, -1).reshape(8, 5, 3)  # 4 windows of 5 tokens an image
    assert torch.equal(running_stats.to_rows(windows, -1, 2), x.flatten(2))


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("shape", [(9, 11, 70), (99, 70), (2, 70)])
def test_channels_that_lie_last_have_the_same_statistics(
    images: int, shape: tuple[int, ...]
) -> None:
    """Tokens and channels-last maps, one image and several: as if the channels came first."""
    last = torch.randn(images, *shape, generator=torch.Generator().manual_seed(2))
    first = last.movedim(-1, 1).contiguous()
    clip = Activation(bounds=(-1.0, 1.0))
    got = measuring.statistics(running_stats.to_rows(last, -1, images), clip)
    expected = measuring.statistics(running_stats.to_rows(first, 1, images), clip)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "images"),
    [
        (torch.zeros(3, 4), 2),
        (torch.zeros(0, 4), 1),
        (torch.zeros(4), 1),
    ],
)
def test_what_has_no_rows_is_refused(tensor: Tensor, images: int) -> None:
    """A first axis that is no batch, and nothing at all."""
    with pytest.raises(LayoutError):
        running_stats.to_rows(tensor, 1, images)


def test_values_at_a_bound() -> None:
    """One bound is a ceiling; of two, both count; the margin is inclusive."""
    rows = torch.tensor([[[0.0, 0.001, 0.5, 0.999, 1.0]]])
    for bounds, margin, count in (((1.0,), 0.0, 1), ((0.0, 1.0), 0.0, 2), ((0.0, 1.0), 0.0011, 4)):
        activation = Activation(bounds=bounds, margin=margin)
        reached = measuring.statistics(rows, activation)[1]
        assert reached is not None and reached.tolist() == [[count]]
    assert measuring.statistics(rows, Activation())[1] is None


def evidence(low: list[float], high: list[float], **more: list[float]) -> Evidence:
    """Of 100 finite values in each channel, unless `more` says otherwise."""
    count = [100.0] * len(low)
    given = {"count": count, "nonfinite": [0.0] * len(low), "low": low, "high": high, **more}
    return Evidence(**{name: np.array(values, float) for name, values in given.items()})


def test_a_channel_with_nan_is_judged_for_nothing_else() -> None:
    """All else about it may look dead, constant and saturated."""
    seen = evidence([0, 0], [0, 0], ceiling=[0, 0], saturated=[1, 1], nonfinite=[1, 0])
    assert findings.judge(seen, Thresholds()) == {
        "dead": [1], "constant": [], "saturated": [1], "nonfinite": [0],
    }  # fmt: skip


def test_thresholds_of_dead_and_constant() -> None:
    """eps is inclusive; without it constant allows for rounding, and one value is no verdict."""
    seen = evidence([0, 0, 5], [0.1, 0.2, 5.000001], ceiling=[0.1, 0.2, 5])
    assert findings.judge(seen, Thresholds(eps=0.1))["dead"] == [0]
    assert findings.judge(seen, Thresholds())["dead"] == []
    assert findings.judge(seen, Thresholds())["constant"] == [2]
    once = evidence([5], [5], count=[1])
    assert findings.judge(once, Thresholds())["constant"] == []


def test_redundant_channels_come_in_connected_components() -> None:
    """0-1-2 is a chain whose ends do not correlate; 3 and 4 are a pair; 5 is alone."""
    links = np.eye(6)
    for a, b in ((0, 1), (1, 2), (3, 4)):
        links[a, b] = links[b, a] = 0.99
    links[5, 0] = links[0, 5] = 0.98  # not above
    limits = Thresholds(redundant_at=0.98)
    seen = Evidence(*np.ones((4, 6)) * [[100], [0], [1], [0]], correlation=links)
    assert findings.groups(seen, limits) == [[0, 1, 2], [3, 4]]
    assert findings.judge(seen, limits)["redundant"] == [0, 1, 2, 3, 4]
    few = Evidence(*np.ones((4, 6)) * [[9], [0], [1], [0]], correlation=links)
    assert findings.judge(few, limits)["redundant"] == []
    assert "redundant" not in findings.judge(seen, Thresholds())


def test_rectifiers_are_the_activations_that_can_be_dead() -> None:
    """The names by which a report knows an activation are those of the table of activations."""
    dead = [
        {start + name for name, part in table.items() if part.activation and part.activation.zero}
        for start, table in (("", activations.MODULES), ("fn:", activations.FUNCTIONS))
    ]
    assert set.union(*dead) == RECTIFIERS
