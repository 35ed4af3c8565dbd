"""The chart of a comparison: where its points lie, and what its axes and words say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest

from featviz.report.depth_chart import DepthChart, depth_chart


def chart_of(
    sqnr: Sequence[float], cosine: Sequence[float], name: str = "l{}"
) -> DepthChart | None:
    """The chart of layers l0, l1, ... with these numbers."""
    layers: list[Any] = []
    for number, values in enumerate(zip(sqnr, cosine, strict=True)):
        label = name.format(number)
        layers.append(SimpleNamespace(label=label, sqnr=values[0], cosine=values[1]))
    return depth_chart(layers)


def test_a_layer_without_a_number_leaves_a_gap() -> None:
    """The others stay at their places; an equal layer has an infinite SQNR."""
    chart = chart_of([40, 20, inf, 12.5], [1, 0.96, 0.9, nan])
    assert chart is not None
    sqnr, cosine = chart.curves
    places = [(point.x, point.y) for point in sqnr.points]
    assert places == [(56, 12), (309.3, 112), (816, 149.5)]
    texts = [(point.x, point.text) for point in cosine.points][1:]
    assert texts == [(309.3, "l1: 0.9600"), (562.7, "l2: 0.9000")]
    assert cosine.points[0].x == 56


@pytest.mark.parametrize(
    ("label", "names"),
    [("layer{}", [(309.3, "layer1"), (562.7, "layer2")]), ("l" * 21 + "{}", [])],
)
def test_layers_have_their_names_below_them_where_there_is_room(
    label: str, names: list[tuple[float, str]]
) -> None:
    """Those between the ends, which have theirs anyway."""
    chart = chart_of([40, 20, 30, 12.5], [1, 1, 1, 1], label)
    assert chart is not None
    assert [(name.x, name.text) for name in chart.between] == names


def test_a_deep_network_has_the_names_for_which_there_is_room() -> None:
    """A letter takes 8 pixels, and names do not run into each other."""
    chart = chart_of([20] * 100, [1] * 100, "layer{}")
    assert chart is not None
    names = [(name.x - 4 * len(name.text), name.text) for name in chart.between]
    names = [(56, chart.first), *names, (816 - 8 * len(chart.last), chart.last)]
    gaps = []
    for (left, text), (right, _) in pairwise(names):
        gaps.append(right - left - 8 * len(text))
    assert len(names) > 8
    assert min(gaps) > 8 and max(gaps) < 56


def test_a_chart_says_where_its_curves_begin_end_and_are_lowest() -> None:
    """For who does not see it, without the layers that have no number."""
    chart = chart_of([40, 20, inf, 12.5], [1, 0.96, 0.9, nan])
    assert chart is not None
    assert (chart.first, chart.last) == ("l0", "l3")
    assert chart.description == (
        "SQNR from 40.0 dB at l0 to 12.5 dB at l3, lowest 12.5 dB at l3,"
        " infinite (no point) at 1 layer;"
        " cosine from 1.0000 at l0 to 0.9000 at l2, lowest 0.9000 at l2"
    )


@pytest.mark.parametrize(
    ("values", "ends", "heights"),
    [
        ([40, 12.5], ("10 dB", "40 dB"), [12, 149.5]),
        ([20, 20], ("20 dB", "30 dB"), [162, 162]),
        ([-3, 14], ("-10 dB", "20 dB"), [127, 42]),
    ],
)
def test_the_axis_of_sqnr_ends_at_tens(
    values: list[float], ends: tuple[str, str], heights: list[float]
) -> None:
    """It has a length where all values are one."""
    chart = chart_of(values, [nan, nan])
    assert chart is not None
    (curve,) = chart.curves
    assert (curve.low, curve.high) == ends
    assert [point.y for point in curve.points] == heights


@pytest.mark.parametrize(
    ("values", "low", "heights"),
    [([1, 1], "0.95", [12, 12]), ([0.9, 1], "0.9", [162, 12])],
)
def test_the_axis_of_cosines_ends_at_one(
    values: list[float], low: str, heights: list[float]
) -> None:
    """Also where all are 1."""
    chart = chart_of([inf, inf], values)
    assert chart is not None
    (curve,) = chart.curves
    assert (curve.low, curve.high) == (low, "1")
    assert [point.y for point in curve.points] == heights


@pytest.mark.parametrize(("sqnr", "cosine"), [([inf, 20], [nan, 0.9]), ([], [])])
def test_one_point_is_no_line(sqnr: list[float], cosine: list[float]) -> None:
    """There is no chart."""
    assert chart_of(sqnr, cosine) is None
