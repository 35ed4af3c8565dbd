"""Running statistics of channels over any number of images; memory goes with the channels.

Parts merge: what two accumulators saw, the merged one saw. Mean and variance follow T. F. Chan,
G. H. Golub, R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", Stanford CS-79-773 (1979), in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
    values = tensor.movedim(axis, 1).flatten(2) if tensor.dim() > 2 else tensor[..., None]
    if len(values) != images:  # windows, regions: several rows to an image
        values = values.reshape(images, -1, *values.shape[1:]).movedim(2, 1).flatten(2)
    return values


@dataclass
class ChannelStats:
    """Count, extremes, mean, squared deviations, zeros and more of C channels; all arrays [C].

    Extremes, mean and deviations are those of finite values; a channel without any has min inf,
    max -inf and mean 0.
    """

    count: Doubles
    """Finite values."""
    low: Doubles
    high: Doubles
    mean: Doubles
    m2: Doubles
    """Sum of squared deviations from the mean."""
    zeros: Doubles
    nonfinite: Doubles
    saturated: Doubles
    """Values at a bound; NaN where the layer has none."""

    @classmethod
    def of_maps(
        cls,
        stats: np.ndarray,
        positions: int | Integers,
        saturated: Integers | None = None,
    ) -> ChannelStats:
        """One batch, from the statistics of its maps.

        Args:
            stats: [B, C, 6] in the order of `records.STAT_COLUMNS`.
            positions: values of one map; as [B, 1] where it depends on the image.
            saturated: [B, C], how many of them are at a bound.
        """
        low, high, mean, std, zeros, nonfinite = np.moveaxis(stats.astype(np.float64), 2, 0)
        count = positions - nonfinite
        total = count.sum(0)
        mean, std = (np.where(count > 0, values, 0) for values in (mean, std))
        centre = _ratio((count * mean).sum(0), total)
        return cls(
            total,
            np.where(count > 0, low, np.inf).min(0),
            np.where(count > 0, high, -np.inf).max(0),
            centre,
            (count * (std**2 + (mean - centre) ** 2)).sum(0),
            np.rint(zeros * positions).sum(0),
            nonfinite.sum(0),
            np.full(len(total), np.nan) if saturated is None else saturated.sum(0, dtype=float),
        )

    def merge(self, other: ChannelStats) -> ChannelStats:
        """The statistics of both together, by Chan's update (equations 2.1)."""
        count = self.count + other.count
        delta = other.mean - self.mean
        return ChannelStats(
            count,
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
            self.mean + _ratio(delta * other.count, count),
            self.m2 + other.m2 + _ratio(delta**2 * self.count * other.count, count),
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.saturated + other.saturated,
        )

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
    """For each of C channels up to TOP images with the largest maximum, best first."""

    values: Doubles
    """The maxima [C, k]; a non-finite value counts as inf."""
    images: Integers
    """Numbers of the images, [C, k]."""

    @classmethod
    def of_batch(cls, images: Integers, maxima: Doubles) -> TopImages:
        """Images [B], in ascending order, with each channel's maximum in them, [B, C]."""
        order = np.argsort(-maxima.T, axis=1, kind="stable")[:, :TOP]
        return cls(np.take_along_axis(maxima.T, order, 1), images[order])

    def merge(self, other: TopImages) -> TopImages:
        """The best images of both; of equals, those with the lower numbers."""
        full, later = self.images.shape[1] == TOP, other.images.min() > self.images.max()
        if full and later and not (other.values > self.values[:, -1:]).any():
            return self
        values = np.concatenate([self.values, other.values], axis=1)
        return self._best(values, np.concatenate([self.images, other.images], axis=1))

    @classmethod
    def _best(cls, values: Doubles, images: Integers) -> TopImages:
        order = np.lexsort((images, -values), axis=1)[:, :TOP]
        return cls(np.take_along_axis(values, order, 1), np.take_along_axis(images, order, 1))


def _ratio(above: Doubles, below: Doubles) -> Doubles:
    """Quotients; 0 where the divisor is 0."""
    return np.asarray(np.divide(above, below, out=np.zeros_like(above), where=below != 0))
