"""Which maps are drawn, and in which order: like beside like, and one tile for near-equals.

Maps are the values [C, P] of each channel with their statistics [C, 6].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from featviz.drawing.values import MEAN, NONFINITE, is_constant
from featviz.options import DrawOptions
from featviz.records import Floats

_ROUNDING = 1e-5
"""By which the correlation of a map with its own copy may miss 1 in float32."""


def choose(
    maps: Tensor, numbers: Floats, options: DrawOptions, strip: bool
) -> tuple[list[int] | None, dict[int, list[int]]]:
    """The channels that are drawn, in their order (None where simply all are), and those of them
    that stand for several: near-equal maps share a tile, then `max_maps` picks, then the tiles are
    ordered.

    Args:
        strip: only pick.
    """
    if strip or (options.order == "index" and options.collapse is None):
        return pick_maps(numbers[:, MEAN], options), {}
    groups = {} if options.collapse is None else collapse(maps, numbers, options.collapse)
    ids = list(groups) or list(range(len(maps)))
    picked = pick_maps(numbers[ids, MEAN], options)
    ids = ids if picked is None else [ids[i] for i in picked]
    if options.order == "mean":
        ids = [ids[i] for i in by_mean(numbers[ids])]
    elif options.order == "similarity":
        ids = [ids[i] for i in by_similarity(maps[ids], numbers[ids])]
    shared = {leader: group for leader in ids if len(group := groups.get(leader, [])) > 1}
    return None if ids == list(range(len(maps))) else ids, shared


def pick_maps(means: Sequence[float] | Floats, options: DrawOptions) -> list[int] | None:
    """The maps to draw, in channel order, by their `means`; None where all are drawn."""
    count, limit = len(means), options.max_maps
    if limit is None or count <= limit:
        return None
    if options.pick == "first":
        return list(range(limit))
    if options.pick == "spread":
        return sorted({round(i) for i in np.linspace(0, count - 1, limit)})
    strongest = np.argsort(-np.nan_to_num(means, nan=-np.inf), kind="stable")
    return sorted(strongest[:limit].tolist())


def correlations(maps: Tensor) -> Floats:
    """Pearson's correlation of each map [N, P] with each, float32 [N, N]; 0 with a constant."""
    centred = maps - maps.mean(1, keepdim=True)
    length = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    unit = centred / length.clamp_min(torch.finfo(torch.float32).tiny)
    cosines: Floats = (unit @ unit.T).clamp_(-1, 1).cpu().numpy()
    return cosines


def by_mean(numbers: Floats) -> list[int]:
    """Places of the channels from the largest mean to the smallest; without a finite value last."""
    keys = np.nan_to_num(-numbers[:, MEAN], nan=np.inf)
    return [int(i) for i in np.argsort(keys, kind="stable")]


def by_similarity(maps: Tensor, numbers: Floats) -> list[int]:
    """Places of the channels as a chain: from the first, each time the most correlated of the rest.

    Constant channels correlate with nothing and follow at the end by value; then those with
    non-finite values.
    """
    finite, constant = numbers[:, NONFINITE] == 0, is_constant(numbers)
    varied, flat = np.flatnonzero(finite & ~constant), np.flatnonzero(constant)
    flat = flat[np.argsort(-numbers[flat, MEAN], kind="stable")]
    alike = correlations(maps[varied])
    chain, left = [0] if len(varied) else [], np.arange(len(varied)) > 0
    while left.any():
        chain.append(int(np.argmax(np.where(left, alike[chain[-1]], -np.inf))))
        left[chain[-1]] = False
    return [int(place) for place in (*varied[chain], *flat, *np.flatnonzero(~finite))]


def collapse(maps: Tensor, numbers: Floats, threshold: float) -> dict[int, list[int]]:
    """Groups of near-equal maps: the first of each, to all of it (itself included).

    In order of index, a map that no group has becomes a leader, and takes what correlates with it
    by `threshold` or more: the same picture up to brightness and contrast. Constant maps are alike
    only if they are equal, and maps with non-finite values are like nothing.
    """
    constant, means = is_constant(numbers), numbers[:, MEAN]
    varied = np.flatnonzero((numbers[:, NONFINITE] == 0) & ~constant)
    alike = constant[:, None] & constant & (means[:, None] == means)
    alike[np.ix_(varied, varied)] = correlations(maps[varied]) >= threshold - _ROUNDING
    groups: dict[int, list[int]] = {}
    left = np.ones(len(means), bool)
    for leader in range(len(means)):
        if left[leader]:
            alike[leader, leader] = True
            groups[leader] = [int(i) for i in np.flatnonzero(alike[leader] & left)]
            left[groups[leader]] = False
    return groups
