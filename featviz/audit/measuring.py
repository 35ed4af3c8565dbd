"""The output of one call in numbers: statistics of each channel of each image of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from featviz import layout
from featviz.audit.plan import Spot
from featviz.audit.running_stats import Covariance, to_rows
from featviz.drawing import scan, stats
from featviz.errors import LayoutError
from featviz.records import Activation, Floats, Integers


@dataclass(frozen=True)
class Measured:
    """What a call gave for B images, in numbers."""

    images: Integers
    """Their numbers among the samples, [B]."""
    stats: Floats
    """[B, C, 6] in the order of `records.STAT_COLUMNS`."""
    positions: int
    """Values of one channel of one image."""
    saturated: Integers | None = None
    """How many of them are at a bound, [B, C]; None where the layer has no bound."""
    covariance: Covariance | None = None
    """Of the channels, over all images and positions, where it is asked for."""

    @property
    def channels(self) -> int:
        """How many channels the call's output has."""
        return int(self.stats.shape[1])


def measure(images: Integers, output: Any, spot: Spot, correlate: bool) -> Measured:
    """Measure what a call gave for these images.

    Raises:
        LayoutError: it gave no tensor of channels.
    """
    if not isinstance(output, Tensor):
        raise LayoutError(f"gives a {type(output).__name__}, not a tensor")
    rows = to_rows(layout.to_floats(output.detach()), spot.axis, len(images))
    numbers, saturated = statistics(rows, spot.activation or Activation())
    covariance = Covariance.of_rows(rows) if correlate else None
    return Measured(images, numbers, rows.shape[2], saturated, covariance)


def statistics(rows: Tensor, activation: Activation) -> tuple[Floats, Integers | None]:
    """Statistics of rows [B, C, P], and how many values are at a bound of the activation.

    Returns:
        float32 [B, C, 6] in the order of `records.STAT_COLUMNS`, and int64 [B, C]; None without
        bounds.
    """
    count, channels, positions = rows.shape
    flat = _without_gaps(rows).reshape(-1, positions)
    low, high = _ends(activation)
    reached = None
    if flat.device.type != "cpu":
        numbers = stats.channel_stats(flat)
        if activation.bounds:
            reached = ((flat <= low) | (flat >= high)).sum(1).cpu().numpy()
    elif activation.bounds:
        numbers, reached = scan.statistics_and_outside(flat.numpy(), low, high)
    else:
        numbers = scan.statistics(flat.numpy())
    saturated = None if reached is None else reached.reshape(count, channels)
    return numbers.reshape(count, channels, -1), saturated


def _ends(activation: Activation) -> tuple[float, float]:
    """From where down and from where up a value is at a bound; NaN where there is none."""
    bounds, margin = activation.bounds, activation.margin
    low = bounds[0] + margin if len(bounds) > 1 else math.nan
    return low, bounds[-1] - margin if bounds else math.nan


def _without_gaps(rows: Tensor) -> Tensor:
    """Rows whose channels lie last in memory are copied image by image: on a CPU torch transposes
    a matrix up to five times as fast as a stack of them, and as numpy does."""
    if rows.is_contiguous() or rows.device.type != "cpu":
        return rows
    copy = rows.new_empty(rows.shape)
    for image, place in zip(rows, copy, strict=True):
        place.copy_(image)
    return copy
