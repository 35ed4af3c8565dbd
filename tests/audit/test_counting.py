"""Counting: running statistics of channels and the loops below them, against numpy in
float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from featviz.audit import counting, findings
from featviz.audit.audit import layer_row
from featviz.audit.counting import TOP, Measurement, Tally
from featviz.audit.gates import Evidence
from featviz.audit.parts import PARTS, Activation, Call, module_parts
from featviz.audit.plan import CountedCall
from featviz.errors import LayoutError
from featviz.options.commands import Thresholds
from featviz.records import RECTIFIERS

UNBOUNDED = Activation()

DISTRIBUTIONS = {
    "normal": lambda g, n: g.normal(0, 1, n),
    "relu": lambda g, n: np.maximum(g.normal(0, 1, n), 0),
    "far from zero": lambda g, n: g.normal(2.9, 1, n),
    "far off": lambda g, n: g.normal(40, 1, n),
    "constant": lambda g, n: np.full(n, 0.1),
    "zero": lambda g, n: np.zeros(n),
    "wide": lambda g, n: g.normal(0, 1, n) * 10 ** g.uniform(-3, 3, n),
}
"""Values [n] of a channel, by a generator g."""


def tallied(
    maps: np.ndarray,
    batch: int,
    activation: Activation = UNBOUNDED,
    correlates: bool = False,
) -> Tally:
    """The outputs [images, channels, positions], counted batch by batch."""
    saturates = bool(activation.bounds)
    tally = Tally.empty(maps.shape[1], saturates, correlates)
    for rows in torch.from_numpy(maps).split(batch):
        measurement = counting.measure(rows, activation, correlates)
        tally.add(measurement, np.arange(len(rows)))
    return tally


def by_channel(maps: np.ndarray) -> np.ndarray:
    """float64 [channels, values] of all images."""
    return maps.astype(np.float64).swapaxes(0, 1).reshape(maps.shape[1], -1)


@pytest.mark.parametrize("batch", [5, 12])
def test_streamed_correlation_equals_numpys(batch: int) -> None:
    """Pearson's r of every pair as np.corrcoef has it, for means far apart, too."""
    generator = np.random.default_rng(5)
    channels = [draw(generator, (12, 99)) for draw in DISTRIBUTIONS.values()]
    maps = np.stack(channels, 1).astype(np.float32)
    maps[:, 4] = maps[:, 0] * -3 + 7  # a channel that repeats another
    correlation = tallied(maps, batch, correlates=True).correlation()
    with np.errstate(invalid="ignore"):
        expected = np.corrcoef(by_channel(maps))
    np.testing.assert_allclose(correlation, np.nan_to_num(expected), atol=1e-5)


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
    np.testing.assert_array_equal(got.at_bound, expected.at_bound)


@pytest.mark.parametrize(
    ("tensor", "images"),
    [(torch.zeros(3, 4), 2), (torch.zeros(0, 4), 1), (torch.zeros(4), 1)],
)
def test_what_has_no_rows_is_refused(tensor: Tensor, images: int) -> None:
    """A first axis that is no batch, and nothing at all."""
    with pytest.raises(LayoutError):
        counting.to_rows(tensor, 1, images)


def test_of_a_call_that_is_refused_the_first_reason_counts() -> None:
    """A later image may give it another shape."""
    census = counting.Census({}, correlates=(), foreseen=())
    call = Call("attention", "MultiheadAttention")
    for reason in ("first", "second"):
        images = np.zeros(1, np.int64)
        census.add_batch(counting.CensusOfBatch(images, [], {call: reason}, set()))
    assert census.refused == {call: "first"}


@pytest.mark.parametrize(
    ("activation", "at_bound"),
    [
        (Activation(bounds=(1.0,)), [[1]]),
        (Activation(bounds=(0.0, 1.0)), [[2]]),
        (Activation(bounds=(0.0, 1.0), margin=0.0011), [[4]]),
        (Activation(), None),
    ],
    ids=["ceiling", "both", "margin", "none"],
)
def test_values_at_a_bound(
    activation: Activation, at_bound: list[list[int]] | None
) -> None:
    """One bound is a ceiling; of two, both count; the margin is inclusive."""
    rows = torch.tensor([[[0.0, 0.001, 0.5, 0.999, 1.0]]])
    assert np.array_equal(counting.measure(rows, activation).at_bound, at_bound)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.ReLU6(), Activation(zero=True, bounds=(6.0,), margin=0.006)),
        (nn.Hardtanh(0, 2), Activation(zero=True, bounds=(2,), margin=0.002)),
        (nn.Hardtanh(-3, 1), Activation(bounds=(-3, 1), margin=0.004)),
        (nn.Tanh(), Activation(bounds=(-1, 1), margin=0.002)),
        (nn.Sigmoid(), Activation(bounds=(0, 1), margin=0.001)),
        (nn.ReLU(), Activation(zero=True)),
        (nn.LeakyReLU(), Activation()),
    ],
    ids=lambda value: repr(value) if isinstance(value, nn.Module) else "",
)
def test_a_margin_is_a_thousandth_of_the_range(
    module: nn.Module, expected: Activation
) -> None:
    """From zero to a ceiling, or between both ends; what can be zero has no lower end."""
    part = module_parts(nn.Sequential(module))["0"]
    assert part.activation is not None
    assert (part.activation.zero, part.activation.bounds) == (
        expected.zero,
        expected.bounds,
    )
    assert part.activation.margin == pytest.approx(expected.margin)


def evidence(low: list[float], high: list[float], **more: list[float]) -> Evidence:
    """Of 100 finite values in each channel, unless `more` says otherwise."""
    lists = {
        "count": [100.0] * len(low),
        "nonfinite": [0.0] * len(low),
        "low": low,
        "high": high,
        **more,
    }
    return Evidence(**{name: np.array(values, float) for name, values in lists.items()})


def test_a_channel_with_nan_is_judged_for_nothing_else() -> None:
    """All else about it may look dead, constant and saturated."""
    seen = evidence([0, 0], [0, 0], ceiling=[0, 0], saturated=[1, 1], nonfinite=[1, 0])
    assert findings.judge(seen, Thresholds()) == {
        "dead": [1],
        "constant": [],
        "saturated": [1],
        "nonfinite": [0],
    }


@pytest.mark.parametrize("nonfinite", [0, 1])
def test_a_channel_of_no_value_has_no_finding(nonfinite: int) -> None:
    """It is unknown, not dead: its maps are empty; one that gave only NaN is not."""
    seen = evidence(
        [np.inf],
        [-np.inf],
        count=[0],
        ceiling=[-np.inf],
        saturated=[1],
        nonfinite=[nonfinite],
    )
    found = findings.judge(seen, Thresholds())
    assert found.pop("nonfinite") == [0] * nonfinite
    assert found == {"dead": [], "constant": [], "saturated": []}


def test_a_channel_at_the_threshold_is_not_saturated() -> None:
    """More values than the share are to be at a bound."""
    seen = evidence([0, 0, 0], [6, 6, 6], saturated=[0.7, 0.75, 0.8])
    assert findings.judge(seen, Thresholds(saturated_at=0.75))["saturated"] == [2]


@pytest.mark.parametrize(
    ("thresholds", "dead"), [(Thresholds(eps=0.1), [0]), (Thresholds(), [])]
)
def test_eps_is_inclusive(thresholds: Thresholds, dead: list[int]) -> None:
    """A channel is dead whose largest value is eps."""
    seen = evidence([0, 0, 5], [0.1, 0.2, 5.000001], ceiling=[0.1, 0.2, 5])
    assert findings.judge(seen, thresholds)["dead"] == dead


@pytest.mark.parametrize(
    ("high", "count", "constant"), [(5.000001, 100, [0]), (5.1, 100, []), (5, 1, [])]
)
def test_constant_allows_for_rounding(
    high: float, count: float, constant: list[int]
) -> None:
    """Values that differ by less than rounding are one; a single value is no verdict."""
    seen = evidence([5], [high], count=[count])
    assert findings.judge(seen, Thresholds())["constant"] == constant


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


LIMITS = Thresholds(redundant_at=0.98)


def correlated(values: float) -> Evidence:
    """0-1-2 is a chain whose ends do not correlate; 3 and 4 are a pair; 5 is alone."""
    links = np.eye(6)
    links[[0, 1, 3], [1, 2, 4]] = 0.99
    links[0, 5] = 0.98  # not above
    unit = np.ones(6)
    return Evidence(
        count=unit * values,
        low=unit * 0,
        high=unit,
        nonfinite=unit * 0,
        correlation=np.maximum(links, links.T),
    )


def test_redundant_channels_come_in_connected_components() -> None:
    """Each channel of a component repeats some other one."""
    seen = correlated(values=100)
    assert findings.redundant_groups(seen, LIMITS) == [[0, 1, 2], [3, 4]]
    assert findings.judge(seen, LIMITS)["redundant"] == [0, 1, 2, 3, 4]


def test_nine_values_say_nothing_of_redundancy() -> None:
    """They correlate by chance."""
    assert findings.judge(correlated(values=9), LIMITS)["redundant"] == []


def test_redundancy_is_judged_only_on_request() -> None:
    """It has no threshold by default."""
    assert "redundant" not in findings.judge(correlated(values=100), Thresholds())


def test_rectifiers_are_the_activations_that_can_be_dead() -> None:
    """The names by which a report knows an activation are those of the table of parts."""
    names = set()
    for name, part in PARTS.items():
        if part.activation and part.activation.zero:
            names.add(name if name[0].isupper() else f"fn:{name}")
    assert names == RECTIFIERS


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


EXACT = [0, 1, 2, 5, 6, 7]
"""Columns of the statistics that no sum is behind."""


def expected_statistics(values: np.ndarray) -> list[float]:
    """Of a channel in float64: count, min, max, mean, deviation, the share of zeros,
    the count of non-finite values, and the share of those from 0.25 on."""
    finite = values[np.isfinite(values)]
    numbers = [np.nan] * 4
    if len(finite):
        numbers = [finite.min(), finite.max(), finite.mean(), finite.std()]
    zeros = (values == 0).mean()
    high = (values >= 0.25).mean()
    return [len(finite), *numbers, zeros, values.size - len(finite), high]


@pytest.mark.parametrize("distribution", [*DISTRIBUTIONS, *ODD])
@pytest.mark.parametrize("batch", [1, 3])
def test_added_maps_are_one_channel(distribution: str, batch: int) -> None:
    """The table of a channel over 9 images is that of all its values at once, in
    float64; means and deviations within the rounding of float32 sums."""
    draw = {**DISTRIBUTIONS, **ODD}[distribution]
    images = draw(np.random.default_rng(49), (9, 4, 49)).astype(np.float32)
    table = tallied(images, batch, Activation(bounds=(0.25,))).table()
    table[:, 4] **= 0.5
    expected = np.array([expected_statistics(values) for values in by_channel(images)])
    rounding = ROUNDING * (np.abs(expected[:, 3]) + expected[:, 4]) + 1e-45
    assert np.array_equal(np.isnan(table), np.isnan(expected))
    assert not (np.abs(table - expected)[:, 3:5] > rounding[:, None]).any()
    np.testing.assert_array_equal(table[:, EXACT], expected[:, EXACT])


@pytest.mark.parametrize("batch", [1, 7])
def test_images_are_ranked_as_by_a_stable_sort(batch: int) -> None:
    """With many ties, NaN as the largest, in any batches; of equals the first image."""
    generator = np.random.default_rng(batch)
    numbers = np.zeros((20, 40, 6), np.float32)
    numbers[..., 1] = generator.integers(-2, 4, (20, 40))
    numbers[..., 5] = generator.random((20, 40)) < 0.05
    tally = Tally.empty(40)
    order = generator.permutation(20)
    for images in np.split(order, range(batch, 20, batch)):
        tally.add(Measurement(numbers[images], 1, at_bound=None, moments=None), images)
    maxima = np.where(numbers[..., 5] > 0, np.inf, numbers[..., 1])
    best = np.argsort(-maxima, axis=0, kind="stable")[:TOP].T
    np.testing.assert_array_equal(tally.images, best)
    np.testing.assert_array_equal(tally.best, np.take_along_axis(maxima.T, best, 1))
