"""Which maps are alike: an order in which like stands beside like, and one tile for near-equals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from featviz.records import Floats

_ROUNDING = 1e-5
"""By which the correlation of a map with its own copy may miss 1 in float32."""


@dataclass(frozen=True)
class Channels:
    """The maps of a layer as they are compared."""

    maps: Tensor
    """float32 [N, P]: all values of each channel."""
    means: Floats
    """[N]; NaN where no value is finite."""
    flat: np.ndarray
    """bool [N]: constant."""
    finite: np.ndarray
    """bool [N]: without NaN and infinite values."""

    def part(self, chosen: list[int]) -> Channels:
        """Some of them."""
        return Channels(
            self.maps[chosen], self.means[chosen], self.flat[chosen], self.finite[chosen]
        )


def correlations(maps: Tensor) -> Floats:
    """Pearson's correlation of each map [N, P] with each, float32 [N, N]; 0 with a constant."""
    centred = maps - maps.mean(1, keepdim=True)
    length = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    unit = centred / length.clamp_min(torch.finfo(torch.float32).tiny)
    cosines: Floats = (unit @ unit.T).clamp_(-1, 1).cpu().numpy()
    return cosines


def by_mean(channels: Channels) -> list[int]:
    """Places of the channels from the largest mean to the smallest; without a finite value last."""
    keys = np.nan_to_num(-channels.means, nan=np.inf)
    return [int(i) for i in np.argsort(keys, kind="stable")]


def by_similarity(channels: Channels) -> list[int]:
    """Places of the channels as a chain: from the first, each time the most correlated of the rest.

    Constant channels correlate with nothing and follow at the end by value; then those with
    non-finite values.
    """
    varied = np.flatnonzero(channels.finite & ~channels.flat)
    flat = np.flatnonzero(channels.finite & channels.flat)
    flat = flat[np.argsort(-channels.means[flat], kind="stable")]
    alike = correlations(channels.maps[varied])
    chain, left = [0] if len(varied) else [], np.arange(len(varied)) > 0
    while left.any():
        chain.append(int(np.argmax(np.where(left, alike[chain[-1]], -np.inf))))
        left[chain[-1]] = False
    places = [*varied[chain], *flat, *np.flatnonzero(~channels.finite)]
    return [int(place) for place in places]


ORDERS: dict[str, Callable[[Channels], list[int]]] = {
    "mean": by_mean,
    "similarity": by_similarity,
}


def collapse(channels: Channels, threshold: float) -> dict[int, list[int]]:
    """Groups of near-equal maps: the first of each, to all of it (itself included).

    In order of index, a map that no group has becomes a leader, and takes what correlates with it
    by `threshold` or more: the same picture up to brightness and contrast. Constant maps are alike
    only if they are equal, and maps with non-finite values are like nothing.
    """
    count = len(channels.means)
    varied = channels.finite & ~channels.flat
    alike = np.zeros((count, count), bool)
    alike[np.ix_(varied, varied)] = (
        correlations(channels.maps[np.flatnonzero(varied)]) >= threshold - _ROUNDING
    )
    flat = channels.finite & channels.flat
    alike |= flat[:, None] & flat & (channels.means[:, None] == channels.means)
    groups: dict[int, list[int]] = {}
    left = np.ones(count, bool)
    for leader in range(count):
        if left[leader]:
            alike[leader, leader] = True
            groups[leader] = [int(i) for i in np.flatnonzero(alike[leader] & left)]
            left[groups[leader]] = False
    return groups
