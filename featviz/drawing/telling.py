"""Which maps of a layer tell most, and look unlike each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from featviz.drawing import stats
from featviz.records import Bytes, Floats

ALIKE = 0.9
"""Correlation from which on a map looks like another that is shown already."""

_COMPARED = 64
"""Pixels a side of what is compared of a map."""


def ranked(numbers: Floats, by: str) -> list[int]:
    """Channels by how much their maps tell, the most telling one first.

    Maps of one value everywhere are left out where others are; those without a finite value come
    last, and equal ones in their order.

    Args:
        numbers: statistics [C, 6] in the order of `records.STAT_COLUMNS`.
        by: `deviation` or `value`; where each map is constant, the mean decides.
    """
    constant = stats.is_constant(numbers)
    column = stats.MEAN if by == "value" or constant.all() else stats.STD
    keys = np.nan_to_num(-numbers[:, column], nan=np.inf)
    order = [int(channel) for channel in np.argsort(keys, kind="stable")]
    return [channel for channel in order if not constant[channel]] or order


def unlike(maps: Bytes, order: Sequence[int], count: int) -> list[int]:
    """The first `count` channels of an order of which no two look alike, and none is blank; where
    there are fewer, the others follow in their order.

    Args:
        maps: levels [C, H, W], of which every so many-th is compared where they are large.
    """
    step = max(1, max(maps.shape[1:]) // _COMPARED)
    taken, alike = [], []
    rows = np.empty((0, maps[0, ::step, ::step].size), np.float32)
    for channel in order:
        row = maps[channel, ::step, ::step].ravel().astype(np.float32)
        row -= row.mean()
        length = float(np.linalg.norm(row))
        row /= max(length, 1e-6)
        if length < 1e-6 or (len(rows) and float((rows @ row).max()) >= ALIKE):
            alike.append(channel)
            continue
        taken.append(channel)
        rows = np.vstack([rows, row])
        if len(taken) == count:
            break
    return (taken + alike)[:count]
