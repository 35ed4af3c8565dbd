"""How far two runs are apart over the depth of the model: SQNR and cosine as lines.

dB 40 |--.                       | 1.00 cosine
      |   `--.__   ,--.          |
   10 |         `-'    `--       | 0.90
      +--------------------------+
      conv1                     fc
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from featviz.diff.comparison import ComparedLayer
from featviz.text import counted


class PlotBox(NamedTuple):
    """Where the lines of a chart lie, in pixels."""

    left: float
    top: float
    width: float
    height: float


PLOT_BOX = PlotBox(left=56.0, top=12.0, width=760.0, height=150.0)
_NAMES_AT = 180.0


class DepthPoint(NamedTuple):
    """A layer on a line of the chart."""

    x: float
    y: float
    text: str
    """`layer1.relu: 31.2 dB`."""


class DepthCurve(NamedTuple):
    """A measure of all layers in which it is known and finite."""

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
    """The first layer, at the left end."""
    last: str
    between: Sequence[DepthPoint]
    """The names of the other layers; none where they would run into each other."""
    box: PlotBox = PLOT_BOX

    @property
    def description(self) -> str:
        """The chart in words, for who cannot see it."""
        return "; ".join(curve.summary for curve in self.curves)


class _DepthMeasure(NamedTuple):
    """A number of a layer, and how an axis shows it."""

    name: str
    style: str
    of_layer: Callable[[ComparedLayer], float]
    format: str
    unit: str
    """Behind the ends of the axis."""
    axis_step: float
    """Both ends of the axis are multiples of it."""
    top: float
    """The axis reaches at most so far up."""


_MEASURES = (
    _DepthMeasure(
        "SQNR", "sqnr", lambda layer: layer.sqnr, "{:.1f} dB", " dB", 10.0, math.inf
    ),
    _DepthMeasure(
        "cosine", "cosine", lambda layer: layer.cosine, "{:.4f}", "", 0.05, 1.0
    ),
)


def depth_chart(layers: Sequence[ComparedLayer]) -> DepthChart | None:
    """The chart of some layers in the model's order; None where no line has two points.

    Args:
        layers: may be empty; those without a number leave a gap in x, so that both lines
            have a layer at the same place.
    """
    curves = []
    for measure in _MEASURES:
        curve = _curve(measure, layers)
        if curve is not None:
            curves.append(curve)
    if not curves:
        return None
    return DepthChart(curves, layers[0].label, layers[-1].label, _between(layers))


def _between(layers: Sequence[ComparedLayer]) -> list[DepthPoint]:
    """The names of all layers but the first and the last, below their points."""
    step = PLOT_BOX.width / (len(layers) - 1)
    # A letter is 8 pixels wide; the first name and half of the second lie in one step.
    longest = max(len(layer.label) for layer in layers)
    if 12 * longest > step:
        return []
    names = []
    for position, layer in enumerate(layers[1:-1], 1):
        across = round(PLOT_BOX.left + step * position, 1)
        names.append(DepthPoint(across, _NAMES_AT, layer.label))
    return names


def _curve(
    measure: _DepthMeasure, layers: Sequence[ComparedLayer]
) -> DepthCurve | None:
    """The line of one measure; None where fewer than two layers have a number."""
    values = []
    positions = []
    for position, layer in enumerate(layers):
        value = measure.of_layer(layer)
        # an equal layer has an infinite SQNR, and no place on an axis
        if math.isfinite(value):
            positions.append(position)
            values.append(value)
    if len(values) < 2:
        return None
    # Ends are round numbers. All values may be equal, and lie on one: then the axis is
    # one step long.
    low = math.floor(min(values) / measure.axis_step) * measure.axis_step
    # an axis has a length, also where all values are at its top
    low = min(low, measure.top - measure.axis_step)
    high = math.ceil(max(values) / measure.axis_step) * measure.axis_step
    high = min(max(high, low + measure.axis_step), measure.top)
    points = []
    for position, value in zip(positions, values, strict=True):
        across = position / (len(layers) - 1)
        # pixels count downwards
        down = 1 - (value - low) / (high - low)
        point = DepthPoint(
            x=round(PLOT_BOX.left + PLOT_BOX.width * across, 1),
            y=round(PLOT_BOX.top + PLOT_BOX.height * down, 1),
            text=f"{layers[position].label}: {measure.format.format(value)}",
        )
        points.append(point)
    lowest = values.index(min(values))
    # in words the first layer, the last and the worst
    ends = []
    for n in (0, -1, lowest):
        value_text = measure.format.format(values[n])
        ends.append(f"{value_text} at {layers[positions[n]].label}")
    summary = f"{measure.name} from {ends[0]} to {ends[1]}, lowest {ends[2]}"
    infinite = sum(measure.of_layer(layer) == math.inf for layer in layers)
    if infinite:
        summary += f", infinite (no point) at {counted(infinite, 'layer')}"
    return DepthCurve(
        name=measure.name,
        style=measure.style,
        low=f"{low:g}{measure.unit}",
        high=f"{high:g}{measure.unit}",
        points=points,
        summary=summary,
    )
