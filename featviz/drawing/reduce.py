"""All channels of a layer in one picture."""

from __future__ import annotations

from collections.abc import Callable

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


def principal_components(data: Tensor) -> Tensor:
    """[C, ...] to float32 [3, ...]: in standard deviations from the mean, along the directions in
    which the channels vary most; NaN where some channel is not finite, 0 where the channels do not
    vary in so many directions.

    The directions are eigenvectors of the channels' covariance over the finite pixels, got from the
    pixels' where these are fewer (they share their eigenvalues). The largest number of each is
    positive.
    """
    values = data.flatten(1).cpu().double()
    finite = torch.isfinite(values).all(0)
    count = max(int(finite.sum()), 1)
    average = torch.where(finite, values, 0.0).sum(1, keepdim=True) / count
    centred = (values - average)[:, finite]
    if len(values) <= count:
        powers, vectors = torch.linalg.eigh(centred @ centred.T / count)
    else:
        powers, pixels = torch.linalg.eigh(centred.T @ centred / count)
        vectors = centred @ pixels
    std = powers.flip(0)[:COMPONENTS].clamp_min(0).sqrt()
    directions = torch.nn.functional.normalize(vectors.T.flip(0)[:COMPONENTS], dim=1, eps=1e-300)
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    scale = torch.where(std > _NOTHING * std[:1], std, torch.inf)[:, None]
    known = directions * largest.sign() / scale @ centred
    components = torch.full((COMPONENTS, values.shape[1]), torch.nan)
    components[:, finite] = 0.0
    components[: len(known), finite] = known.float()
    return components.reshape(COMPONENTS, *data.shape[1:])
