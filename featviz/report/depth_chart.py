"""How far two runs are apart over the depth of the model: SQNR and cosine as lines.

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
    """Where the lines of a chart lie, in pixels."""

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
    """`layer1.relu: 31.2 dB`; of a label below the chart, that alone."""


class DepthCurve(NamedTuple):
    """The line of a measure, through all tensors where it is known and finite."""

    name: str
    style: str
    """The CSS class."""
    low: str
    """The lower end of its axis."""
    high: str
    points: Sequence[DepthPoint]
    summary: str
    """`SQNR from 40.1 dB at conv1 to 21.3 dB at fc, lowest 12.0 dB at layer4`."""


@dataclass(frozen=True)
class DepthChart:
    """What the template draws."""

    curves: Sequence[DepthCurve]
    first: str
    """The label of the first tensor, at the left end."""
    last: str
    between: Sequence[DepthPoint]
    """The labels of tensors between these, as many as there is room for."""
    box: PlotBox = PLOT_BOX

    @property
    def description(self) -> str:
        """The chart in words, for who cannot see it."""
        return "; ".join(curve.summary for curve in self.curves)


class _DepthMeasure(NamedTuple):
    """A number of a tensor, and how an axis shows it."""

    name: str
    style: str
    of_tensor: Callable[[ComparedTensor], float]
    format: str
    unit: str
    """Behind the ends of the axis."""
    axis_step: float
    """Both ends of the axis are multiples of it."""
    top: float
    """The axis reaches at most so far up."""


_MEASURES = (
    _DepthMeasure(
        "SQNR", "sqnr", lambda tensor: tensor.sqnr, "{:.1f} dB", " dB", 10.0, math.inf
    ),
    _DepthMeasure(
        "cosine", "cosine", lambda tensor: tensor.cosine, "{:.4f}", "", 0.05, 1.0
    ),
)


def depth_chart(tensors: Sequence[ComparedTensor]) -> DepthChart | None:
    """The chart of compared tensors; None where no line would have two points.

    Args:
        tensors: in the model's order; may be empty. Each has its place on the x axis,
            whether or not it has a point there: both lines have it at the same x.
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
    """The labels of tensors between the first and the last, each below its point: those for
    which there is room, from left to right."""
    step = PLOT_BOX.width / (len(tensors) - 1)
    # The first label begins below its point, the last one ends there, and the others have
    # theirs in the middle.
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
    """The line of one measure; None where fewer than two tensors have a point."""
    values = {}
    for position, tensor in enumerate(tensors):
        value = measure.of_tensor(tensor)
        # an equal tensor has an infinite SQNR, and no point
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
    """The lower and the upper end of the axis: multiples of its step, with all values
    between them, and one step apart at least."""
    step = measure.axis_step
    low = min(math.floor(min(values) / step) * step, measure.top - step)
    high = max(math.ceil(max(values) / step) * step, low + step)
    return low, min(high, measure.top)


def _summary(
    measure: _DepthMeasure,
    tensors: Sequence[ComparedTensor],
    values: Mapping[int, float],
) -> str:
    """A line in words: its ends, its lowest point, and how many tensors are infinite.

    Args:
        values: of the tensors that have a point, by their position in `tensors`.
    """

    def at(position: int) -> str:
        value = measure.format.format(values[position])
        return f"{value} at {tensors[position].label}"

    first, *_, last = values
    lowest = min(values, key=lambda position: values[position])
    summary = f"{measure.name} from {at(first)} to {at(last)}, lowest {at(lowest)}"
    infinite = sum(measure.of_tensor(tensor) == math.inf for tensor in tensors)
    if infinite:
        summary += f", infinite (no point) at {counted(infinite, 'layer')}"
    return summary
