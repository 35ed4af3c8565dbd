"""Running statistics of channels over any number of images; memory goes with the channels.

Parts merge: what two accumulators saw, the merged one saw. Mean and variance follow T. F. Chan,
G. H. Golub, R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", Stanford CS-79-773 (1979), in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from featviz.drawing import scan
from featviz.drawing.stats import MAX, NONFINITE
from featviz.errors import LayoutError
from featviz.records import Integers

Doubles = NDArray[np.float64]

COLUMNS = (
    *("count", "min", "max", "mean", "variance"),
    *("zero_fraction", "nonfinite", "saturated_fraction"),
)
"""The columns of every array in `channels.npz`, float64. count: finite values. The fractions are of
all values, and NaN where the layer cannot saturate or nothing was seen."""

TOP = 4
"""Images kept for each channel: those that excite it most."""


_NONE = np.empty((0, 0), np.int64)


def compiled() -> ModuleType | None:
    """The compiled loops of the audit; None where there are none, and numpy serves."""
    return None if scan.compiled() is None else _loops()


@cache
def _loops() -> ModuleType:
    with scan.kept_for_the_user():
        return import_module("featviz.audit.compiled")


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
    values = tensor.flatten(2) if tensor.dim() > 2 else tensor[..., None]
    if len(values) != images:  # windows, regions: several rows to an image
        values = values.reshape(images, -1, *values.shape[1:]).movedim(2, 1).flatten(2)
    return values


@dataclass
class ChannelStats:
    """Count, extremes, mean, squared deviations, zeros and more of C channels.

    Extremes, mean and deviations are those of finite values; a channel without any has min inf,
    max -inf and mean 0.
    """

    sums: Doubles
    """[C, 8]; the properties say what the columns are, in this order. One array, so that a channel
    lies in one line of the cache."""

    @classmethod
    def nothing(cls, channels: int, saturates: bool = False) -> ChannelStats:
        """Before the first batch."""
        sums = np.zeros((channels, 8))
        sums[:, 1:3] = np.inf, -np.inf
        sums[:, 7] = 0 if saturates else np.nan
        return cls(sums)

    @property
    def count(self) -> Doubles:
        """Finite values."""
        return self.sums[:, 0]

    @property
    def low(self) -> Doubles:
        """The minimum."""
        return self.sums[:, 1]

    @property
    def high(self) -> Doubles:
        """The maximum."""
        return self.sums[:, 2]

    @property
    def mean(self) -> Doubles:
        """Of the finite values."""
        return self.sums[:, 3]

    @property
    def m2(self) -> Doubles:
        """Sum of squared deviations from the mean."""
        return self.sums[:, 4]

    @property
    def zeros(self) -> Doubles:
        """How many values are zero."""
        return self.sums[:, 5]

    @property
    def nonfinite(self) -> Doubles:
        """How many are NaN or infinite."""
        return self.sums[:, 6]

    @property
    def saturated(self) -> Doubles:
        """How many are at a bound; NaN where the layer has none."""
        return self.sums[:, 7]

    def add(self, stats: np.ndarray, positions: int, saturated: Integers | None = None) -> None:
        """Add one batch, from the statistics of its maps.

        Args:
            stats: float32 [B, C, 6] in the order of `records.STAT_COLUMNS`.
            positions: values of one map.
            saturated: [B, C], how many of them are at a bound.
        """
        if (loops := compiled()) is not None:
            loops.add_maps(stats, _NONE if saturated is None else saturated, positions, self.sums)
        else:
            self.sums = self.merge(_of_maps(stats, positions, saturated)).sums

    def merge(self, other: ChannelStats) -> ChannelStats:
        """The statistics of both together, by Chan's update (equations 2.1)."""
        count = self.count + other.count
        delta = other.mean - self.mean
        columns = [
            count,
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
            self.mean + _ratio(delta * other.count, count),
            self.m2 + other.m2 + _ratio(delta**2 * self.count * other.count, count),
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.saturated + other.saturated,
        ]
        return ChannelStats(np.stack(columns, axis=1))

    @property
    def values(self) -> Doubles:
        """All values seen, finite or not."""
        return self.count + self.nonfinite

    def table(self) -> Doubles:
        """[C, 8] in the order of COLUMNS; NaN where no finite value was seen."""
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
        return np.asarray(_ratio(self.comoment, np.outer(scale, scale)))


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
        if (loops := compiled()) is not None:
            loops.add_images(stats, images, self.values, self.images)
            return
        maxima = np.where(stats[..., NONFINITE] > 0, np.inf, stats[..., MAX]).astype(np.float64)
        numbers = np.broadcast_to(images, maxima.T.shape)
        best = self.merge(TopImages(maxima.T, numbers))
        self.values, self.images = best.values, best.images

    def merge(self, other: TopImages) -> TopImages:
        """The best images of both; of equals, those with the lower numbers."""
        values = np.concatenate([self.values, other.values], axis=1)
        images = np.concatenate([self.images, other.images], axis=1)
        order = np.lexsort((images, -values), axis=1)[:, :TOP]
        return TopImages(np.take_along_axis(values, order, 1), np.take_along_axis(images, order, 1))


def _of_maps(stats: np.ndarray, positions: int, saturated: Integers | None) -> ChannelStats:
    """One batch, as `ChannelStats.add` takes it."""
    low, high, mean, std, zeros, nonfinite = np.moveaxis(stats.astype(np.float64), 2, 0)
    count = positions - nonfinite
    total = count.sum(0)
    mean, std = (np.where(count > 0, values, 0) for values in (mean, std))
    centre = _ratio((count * mean).sum(0), total)
    columns = [
        total,
        np.where(count > 0, low, np.inf).min(0),
        np.where(count > 0, high, -np.inf).max(0),
        centre,
        (count * (std**2 + (mean - centre) ** 2)).sum(0),
        np.rint(zeros * positions).sum(0),
        nonfinite.sum(0),
        np.full(len(total), np.nan) if saturated is None else saturated.sum(0),
    ]
    return ChannelStats(np.stack(columns, axis=1))


def _ratio(above: Doubles, below: Doubles) -> Doubles:
    """Quotients; 0 where the divisor is 0."""
    return np.asarray(np.divide(above, below, out=np.zeros_like(above), where=below != 0))
