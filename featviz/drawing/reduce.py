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


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda data: data.mean(0, keepdim=True),
    "max": lambda data: data.amax(0, keepdim=True),
    "l2": lambda data: torch.linalg.vector_norm(data, dim=0, keepdim=True),
    "max-abs": lambda data: data.abs().amax(0, keepdim=True),
}
"""From [C, ...] to [1, ...]: those of `records.REDUCTIONS` with one component; `pca` has three and
is not among them."""


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


def basis_of(data: Tensor) -> Basis:
    """The principal components of a tensor [C, ...]: eigenvectors of the channels'
    covariance, got from the pixels' where these are fewer (they share their eigenvalues); pixels
    that are not finite in some channel are left out."""
    values = data.flatten(1).cpu().double()
    values = values[:, torch.isfinite(values).all(0)]
    average = values.mean(1) if values.shape[1] else values.new_zeros(len(values))
    centred = values - average[:, None]
    count = max(values.shape[1], 1)
    if len(values) <= count:
        return Basis(average, _leading(*torch.linalg.eigh(centred @ centred.T / count)))
    powers, pixels = torch.linalg.eigh(centred.T @ centred / count)
    return Basis(average, _leading(powers, centred @ pixels))


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
