"""The chart of the difference of two runs over the depth of the model: SQNR and cosine as
lines.

dB 40 |--.                       | 1.00 cosine
      |   `--.__   ,--.          |
   10 |         `-'    `--       | 0.90
      +--------------------------+
      conv1                     fc
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from featviz.diff.comparison import ComparedTensor
from featviz.text import counted


class PlotBox(NamedTuple):
    """The rectangle in which the lines of a chart are drawn, in pixels."""

    left: float
    top: float
    width: float
    height: float


PLOT_BOX = PlotBox(left=56.0, top=12.0, width=760.0, height=150.0)
_LABELS_Y = 180.0
_LETTER = 8.0
"""The width of a letter of a label, in pixels."""
_GAP = 16.0
"""Pixels between two labels."""


class DepthPoint(NamedTuple):
    """A tensor on a line of the chart."""

    x: float
    y: float
    text: str
    """The text of the point: `layer1.relu: 31.2 dB`; for a label below the chart, only
    the name of the layer."""


class DepthCurve(NamedTuple):
    """The line of a measure, through the tensors for which it is finite."""

    name: str
    style: str
    """The CSS class."""
    low: str
    """The lower end of the axis, as text."""
    high: str
    """The upper end of the axis, as text."""
    points: Sequence[DepthPoint]
    summary: str
    """The line in words: `SQNR from 40.1 dB at conv1 to 21.3 dB at fc, lowest 12.0 dB at
    layer4`."""


@dataclass(frozen=True)
class DepthChart:
    """The chart, as the template draws it."""

    curves: Sequence[DepthCurve]
    first: str
    """The label of the first tensor, at the left end."""
    last: str
    """The label of the last tensor, at the right end."""
    between: Sequence[DepthPoint]
    """The labels between these two, as many as there is room for."""
    box: PlotBox = PLOT_BOX

    @property
    def description(self) -> str:
        """The chart in words, for a reader who cannot see it."""
        return "; ".join(curve.summary for curve in self.curves)


class _DepthMeasure(NamedTuple):
    """A measure of the difference of a tensor, and its axis."""

    name: str
    style: str
    """The CSS class of the line."""
    of_tensor: Callable[[ComparedTensor], float]
    """Returns the measure of a tensor."""
    format: str
    """The format of a value, with its unit."""
    unit: str
    """The text after the numbers at the ends of the axis."""
    axis_step: float
    """Both ends of the axis are multiples of this number."""
    top: float
    """The largest possible upper end of the axis."""


_MEASURES = (
    _DepthMeasure(
        "SQNR", "sqnr", lambda tensor: tensor.sqnr, "{:.1f} dB", " dB", 10.0, math.inf
    ),
    _DepthMeasure(
        "cosine", "cosine", lambda tensor: tensor.cosine, "{:.4f}", "", 0.05, 1.0
    ),
)


def depth_chart(tensors: Sequence[ComparedTensor]) -> DepthChart | None:
    """The chart of compared tensors; None if no line has two points.

    Args:
        tensors: the tensors in the model's order; may be empty. Each has one place on the
            x axis, for both lines.
    """
    curves = []
    for measure in _MEASURES:
        curve = _curve(measure, tensors)
        if curve is not None:
            curves.append(curve)
    if not curves:
        return None
    return DepthChart(curves, tensors[0].label, tensors[-1].label, _between(tensors))


def _between(tensors: Sequence[ComparedTensor]) -> list[DepthPoint]:
    """The labels between the first and the last one, each with its middle below its
    point; from left to right, those for which there is room."""
    step = PLOT_BOX.width / (len(tensors) - 1)
    # the first label begins at the left end of the axis, the last one ends at its right end
    free = PLOT_BOX.left + _LETTER * len(tensors[0].label) + _GAP
    end = PLOT_BOX.left + PLOT_BOX.width - _LETTER * len(tensors[-1].label) - _GAP
    labels = []
    for position, tensor in enumerate(tensors):
        across = PLOT_BOX.left + step * position
        half = _LETTER / 2 * len(tensor.label)
        if free <= across - half and across + half <= end:
            labels.append(DepthPoint(round(across, 1), _LABELS_Y, tensor.label))
            free = across + half + _GAP
    return labels


def _curve(
    measure: _DepthMeasure, tensors: Sequence[ComparedTensor]
) -> DepthCurve | None:
    """The line of one measure; None if it has fewer than two points."""
    values = {}
    for position, tensor in enumerate(tensors):
        value = measure.of_tensor(tensor)
        # the SQNR of equal tensors is infinite: they have no point
        if math.isfinite(value):
            values[position] = value
    if len(values) < 2:
        return None
    low, high = _axis(measure, values.values())
    points = []
    for position, value in values.items():
        across = position / (len(tensors) - 1)
        # pixels count downwards
        down = 1 - (value - low) / (high - low)
        point = DepthPoint(
            x=round(PLOT_BOX.left + PLOT_BOX.width * across, 1),
            y=round(PLOT_BOX.top + PLOT_BOX.height * down, 1),
            text=f"{tensors[position].label}: {measure.format.format(value)}",
        )
        points.append(point)
    return DepthCurve(
        name=measure.name,
        style=measure.style,
        low=f"{low:g}{measure.unit}",
        high=f"{high:g}{measure.unit}",
        points=points,
        summary=_summary(measure, tensors, values),
    )


def _axis(measure: _DepthMeasure, values: Collection[float]) -> tuple[float, float]:
    """The lower and the upper end of an axis that contains all values. Both are multiples
    of the axis step, and at least one step apart."""
    step = measure.axis_step
    low = min(math.floor(min(values) / step) * step, measure.top - step)
    high = max(math.ceil(max(values) / step) * step, low + step)
    return low, min(high, measure.top)


def _summary(
    measure: _DepthMeasure,
    tensors: Sequence[ComparedTensor],
    values: Mapping[int, float],
) -> str:
    """A line in words: its ends, its lowest point, and how many tensors have an infinite
    value.

    Args:
        values: the values of the tensors that have a point, by position in `tensors`.
    """

    def at(position: int) -> str:
        """A value, and its layer: `40.1 dB at conv1`."""
        value = measure.format.format(values[position])
        return f"{value} at {tensors[position].label}"

    first, *_, last = values
    lowest = min(values, key=lambda position: values[position])
    summary = f"{measure.name} from {at(first)} to {at(last)}, lowest {at(lowest)}"
    infinite = sum(measure.of_tensor(tensor) == math.inf for tensor in tensors)
    if infinite:
        summary += f", infinite (no point) at {counted(infinite, 'layer')}"
    return summary
