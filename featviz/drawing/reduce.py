"""All channels of a layer in one picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from featviz import records

COMPONENTS = len(records.REDUCTIONS["pca"].colors)
_NOTHING = 1e-6
"""A component whose deviation is below this share of the first one's is rounding, left out."""


def mean(data: Tensor) -> Tensor:
    """The mean over channels: [C, ...] to [1, ...]."""
    return data.mean(0, keepdim=True)


def maximum(data: Tensor) -> Tensor:
    """The largest value of all channels."""
    return data.amax(0, keepdim=True)


def l2(data: Tensor) -> Tensor:
    """The Euclidean length of the vector of channels."""
    length: Tensor = torch.linalg.vector_norm(data, dim=0, keepdim=True)
    return length


def largest(data: Tensor) -> Tensor:
    """The largest absolute value of all channels."""
    return data.abs().amax(0, keepdim=True)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": mean,
    "max": maximum,
    "l2": l2,
    "max-abs": largest,
}
"""Those of `records.REDUCTIONS` with one component; `pca` has three and is not among them."""


@dataclass(frozen=True)
class Basis:
    """The directions in which the channels of a layer vary most, float64."""

    mean: Tensor
    """[C]"""
    loadings: Tensor
    """[3, C]: orthogonal, each as long as the standard deviation along it (the root of an
    eigenvalue of the covariance), its loading of largest size positive. Zero where the channels do
    not vary in so many directions."""

    def project(self, data: Tensor) -> Tensor:
        """[C, ...] to float32 [3, ...]: components in standard deviations from the mean; NaN where
        some channel is not finite."""
        values = data.flatten(1).cpu().double()
        finite = torch.isfinite(values).all(0)
        centred = torch.where(finite, values - self.mean[:, None], 0.0)
        power = self.loadings.square().sum(1, keepdim=True)
        components = self.loadings @ centred / torch.where(power > 0, power, 1.0)
        components[:, ~finite] = torch.nan
        return components.float().reshape(COMPONENTS, *data.shape[1:])


class Moments:
    """Sums from which a basis comes, over the pixels of any number of tensors [C, ...]."""

    def __init__(self, channels: int) -> None:
        self.count = 0
        self.total = torch.zeros(channels, dtype=torch.float64)
        self.products = torch.zeros(channels, channels, dtype=torch.float64)

    def add(self, data: Tensor) -> None:
        """Take in the pixels in which all channels are finite."""
        values = _finite(data)
        self.count += values.shape[1]
        self.total += values.sum(1)
        self.products += values @ values.T

    def merge(self, other: Moments) -> None:
        """Take in the pixels of other tensors of as many channels."""
        self.count += other.count
        self.total += other.total
        self.products += other.products

    def basis(self) -> Basis:
        """The principal components of all pixels."""
        average = self.total / max(self.count, 1)
        covariance = self.products / max(self.count, 1) - torch.outer(average, average)
        return Basis(average, _leading(*torch.linalg.eigh(covariance)))


def basis_of(data: Tensor) -> Basis:
    """The principal components of the pixels of one tensor [C, ...]: eigenvectors of the channels'
    covariance, got from the pixels' where these are fewer (they share their eigenvalues)."""
    values = _finite(data)
    average = values.mean(1) if values.shape[1] else values.new_zeros(len(values))
    centred = values - average[:, None]
    count = max(values.shape[1], 1)
    if len(values) <= count:
        return Basis(average, _leading(*torch.linalg.eigh(centred @ centred.T / count)))
    powers, pixels = torch.linalg.eigh(centred.T @ centred / count)
    return Basis(average, _leading(powers, centred @ pixels))


def _finite(data: Tensor) -> Tensor:
    """float64 [C, pixels], without pixels that have a value that is not finite."""
    values = data.flatten(1).cpu().double()
    return values[:, torch.isfinite(values).all(0)]


def _leading(powers: Tensor, vectors: Tensor) -> Tensor:
    """Loadings [3, C] from ascending eigenvalues and vectors in columns, of any length."""
    std = powers.flip(0)[:COMPONENTS].clamp_min(0).sqrt()
    directions = vectors.T.flip(0)[:COMPONENTS]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).double()
    kept = (std > _NOTHING * std.amax()) if len(std) else std > 0
    length = torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    loadings = directions * sign * std[:, None] / torch.where(length > 0, length, 1.0)
    loadings = torch.where(kept[:, None], loadings, 0.0)
    return torch.nn.functional.pad(loadings, (0, 0, 0, COMPONENTS - len(std)))
