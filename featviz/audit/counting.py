"""Counting: the outputs of watched calls in numbers, image after image, into running statistics.

Memory goes with the channels, not with the images. Mean and variance follow T. F. Chan, G. H.
Golub, R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
Stanford CS-79-773 (1979), in float64.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from featviz import layout
from featviz.audit.plan import Spot
from featviz.drawing import values
from featviz.drawing.values import compiled
from featviz.errors import LayoutError
from featviz.pipeline.batches import Batch
from featviz.records import Activation, Call, Floats, Integers
from featviz.records.findings import Doubles

TOP = 4
"""Images kept for each channel: those that excite it most."""

_NO_BOUND = np.empty((0, 0), np.int64)


def to_rows(tensor: Tensor, axis: int, images: int) -> Tensor:
    """A layer's output as [images, channels, positions].

    Args:
        tensor: dense, float32 (`layout.to_floats`).
        axis: where the channels are.
        images: how many went in as one batch; the first axis holds so many, or a multiple.

    Raises:
        LayoutError: no values, or an axis that is no batch.
    """
    if tensor.numel() == 0 or tensor.dim() < 2 or tensor.shape[0] % images:
        raise LayoutError(f"shape {list(tensor.shape)} is no batch of {images}: --batch-size 1")
    if axis != 1:
        tensor = tensor.movedim(axis, 1)
    rows = tensor.flatten(2) if tensor.dim() > 2 else tensor[..., None]
    if len(rows) != images:  # windows, regions: several rows to an image
        rows = rows.reshape(images, -1, *rows.shape[1:]).movedim(2, 1).flatten(2)
    return rows


def statistics(rows: Tensor, activation: Activation) -> tuple[Floats, Integers | None]:
    """Statistics of rows [B, C, P], and how many values are at a bound of the activation.

    Returns:
        float32 [B, C, 6] in the order of `records.STAT_COLUMNS`, and int64 [B, C]; None without
        bounds.
    """
    count, channels, positions = rows.shape
    on_cpu = rows.device.type == "cpu"
    if on_cpu and not rows.is_contiguous():  # channels lie last: image by image torch transposes
        copy = rows.new_empty(rows.shape)  # up to five times as fast as all at once, or numpy
        for image, place in zip(rows, copy, strict=True):
            place.copy_(image)
        rows = copy
    flat = rows.reshape(-1, positions)
    bounds, margin = activation.bounds, activation.margin
    low = bounds[0] + margin if len(bounds) > 1 else math.nan
    high = bounds[-1] - margin if bounds else math.nan
    reached = None
    if not on_cpu:
        numbers = values.channel_stats(flat)
        if bounds:
            reached = ((flat <= low) | (flat >= high)).sum(1).cpu().numpy()
    elif bounds:
        numbers, reached = values.statistics_and_outside(flat.numpy(), low, high)
    else:
        numbers = values.statistics(flat.numpy())
    saturated = None if reached is None else reached.reshape(count, channels)
    return numbers.reshape(count, channels, -1), saturated


def _column(number: int, doc: str) -> Any:
    return property(lambda self: self.sums[:, number], doc=doc)


@dataclass
class ChannelStats:
    """Count, extremes, mean, squared deviations, zeros and more of C channels.

    Extremes, mean and deviations are those of finite values; a channel without any has min inf,
    max -inf and mean 0.
    """

    sums: Doubles
    """[C, 8]; the columns are named below. One array, so that a channel lies in one line of the
    cache."""

    @classmethod
    def nothing(cls, channels: int, saturates: bool = False) -> ChannelStats:
        """Before the first batch."""
        sums = np.zeros((channels, 8))
        sums[:, 1:3] = np.inf, -np.inf
        sums[:, 7] = 0 if saturates else np.nan
        return cls(sums)

    count = _column(0, "Finite values.")
    low = _column(1, "The minimum.")
    high = _column(2, "The maximum.")
    mean = _column(3, "Of the finite values.")
    m2 = _column(4, "Sum of squared deviations from the mean.")
    zeros = _column(5, "How many values are zero.")
    nonfinite = _column(6, "How many are NaN or infinite.")
    saturated = _column(7, "How many are at a bound; NaN where the layer has none.")

    def add(self, stats: np.ndarray, positions: int, saturated: Integers | None = None) -> None:
        """Add one batch, from the statistics of its maps.

        Args:
            stats: float32 [B, C, 6] in the order of `records.STAT_COLUMNS`.
            positions: values of one map.
            saturated: [B, C], how many of them are at a bound.
        """
        reached = _NO_BOUND if saturated is None else saturated
        compiled().add_maps(stats, reached, positions, self.sums)

    values = property(lambda self: self.count + self.nonfinite, doc="All seen, finite or not.")

    def table(self) -> Doubles:
        """float64 [C, 8]: count (of finite values), min, max, mean, variance, zero_fraction,
        nonfinite, saturated_fraction. The fractions are of all values, and NaN where the layer
        cannot saturate or nothing was seen."""
        nothing = self.count == 0
        low, high, mean, variance = (
            np.where(nothing, np.nan, v)
            for v in (self.low, self.high, self.mean, _ratio(self.m2, self.count))
        )
        with np.errstate(invalid="ignore"):
            zeros, saturated = self.zeros / self.values, self.saturated / self.values
        columns = (self.count, low, high, mean, variance, zeros, self.nonfinite, saturated)
        return np.stack(columns, axis=1)


@dataclass
class Covariance:
    """Streamed covariance of C channels over images and positions, float64 [C, C].

    Memory goes with the square of the channels. NaN and infinite values count as zero: the
    verdicts leave out the channels that have them.
    """

    count: int
    mean: Doubles
    comoment: Doubles
    """Sum of products of deviations, [C, C]."""

    @classmethod
    def of_rows(cls, rows: Tensor) -> Covariance:
        """One batch [B, C, P]; products in float32 about the batch's own mean."""
        values = rows.movedim(1, 0).flatten(1).nan_to_num(0.0, 0.0, 0.0)
        mean = values.mean(1)
        values = values - mean[:, None]
        comoment = (values @ values.T).cpu().numpy().astype(np.float64)
        return cls(values.shape[1], mean.cpu().numpy().astype(np.float64), comoment)

    def merge(self, other: Covariance) -> Covariance:
        """The covariance of both: Chan's update, by the outer product of the means' difference."""
        count = self.count + other.count
        delta = other.mean - self.mean
        weight = self.count * other.count / max(1, count)
        comoment = self.comoment + other.comoment + np.outer(delta, delta) * weight
        return Covariance(count, self.mean + delta * (other.count / max(1, count)), comoment)

    def correlation(self) -> Doubles:
        """Pearson's r of each pair, [C, C]; 0 where a channel does not vary."""
        scale = np.sqrt(np.diag(self.comoment))
        return _ratio(self.comoment, np.outer(scale, scale))


def _ratio(above: Doubles, below: Doubles) -> Doubles:
    """Quotients; 0 where the divisor is 0."""
    return np.asarray(np.divide(above, below, out=np.zeros_like(above), where=below != 0))


@dataclass
class TopImages:
    """For each of C channels the TOP images with the largest maximum, best first."""

    values: Doubles
    """The maxima [C, TOP]; a non-finite value counts as inf, and -inf stands for no image."""
    images: Integers
    """Numbers of the images, [C, TOP]; -1 for no image."""

    @classmethod
    def nothing(cls, channels: int) -> TopImages:
        """Before the first batch."""
        return cls(np.full((channels, TOP), -np.inf), np.full((channels, TOP), -1))

    def of(self, channel: int) -> list[int]:
        """The images of one channel, best first; fewer than TOP where fewer were seen."""
        return [number for number in self.images[channel].tolist() if number >= 0]

    def add(self, images: Integers, stats: np.ndarray) -> None:
        """Add images [B] by the statistics of their maps, float32 [B, C, 6]."""
        compiled().add_images(stats, images, self.values, self.images)


@dataclass(frozen=True)
class Measured:
    """What a call gave for a batch, in numbers: those of `statistics` and `Covariance`."""

    stats: Floats
    positions: int
    saturated: Integers | None
    covariance: Covariance | None


@dataclass
class Tally:
    """The statistics of one watched call so far."""

    stats: ChannelStats
    top: TopImages
    covariance: Covariance | None = None

    @property
    def channels(self) -> int:
        """How many channels the call's output has."""
        return len(self.stats.sums)


@dataclass
class Census:
    """Statistics of every spot over all images; of an image that failed, nothing stays."""

    spots: Mapping[Call, Spot]
    correlate: frozenset[Call] = frozenset()
    """Calls whose covariance is streamed, too."""
    known: Container[Call] = frozenset()
    tallies: dict[Call, Tally] = field(default_factory=dict)
    faults: dict[Call, str] = field(default_factory=dict)
    """Calls that gave something that cannot be counted, with the reason."""
    unforeseen: set[str] = field(default_factory=set)
    """Calls of watched layers that the trace had not."""
    fault: Exception | None = None
    """A bug of ours, to tell it from a fault of the model."""
    _images: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    _measured: list[tuple[Call, Measured]] = field(default_factory=list)

    def begin(self, batch: Batch) -> None:
        """The next tensors come from these images."""
        self._images, self._measured = np.array(batch.images), []

    def commit(self) -> None:
        """The model is through with them: count what they gave."""
        for call, part in self._measured:
            channels = part.stats.shape[1]
            if call not in self.tallies:
                empty = ChannelStats.nothing(channels, part.saturated is not None)
                self.tallies[call] = Tally(empty, TopImages.nothing(channels))
            tally = self.tallies[call]
            if tally.channels != channels:
                self.faults[call] = f"has {tally.channels} channels, then {channels}"
                continue
            tally.stats.add(part.stats, part.positions, part.saturated)
            tally.top.add(self._images, part.stats)
            if part.covariance is not None:
                so_far = tally.covariance
                tally.covariance = so_far.merge(part.covariance) if so_far else part.covariance
        self._measured = []

    def take(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """The sink of the hooks: measure the tensor now, count it when the image is through."""
        if call not in self.spots:
            if call not in self.known:
                self.unforeseen.add(call.label)
            return
        spot = self.spots[call]
        try:
            if not isinstance(out, Tensor):
                raise LayoutError(f"gives a {type(out).__name__}, not a tensor")
            rows = to_rows(layout.to_floats(out.detach()), spot.axis, len(self._images))
            numbers, saturated = statistics(rows, spot.activation or Activation())
            covariance = Covariance.of_rows(rows) if call in self.correlate else None
            part = Measured(numbers, rows.shape[2], saturated, covariance)
            self._measured.append((call, part))
        except LayoutError as error:
            self.faults.setdefault(call, error.message)
        except Exception as error:
            self.fault = error
            raise
