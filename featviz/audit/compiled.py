"""The loops over channels that an audit runs on a CPU, compiled by numba; without the GIL. Beside
those of `drawing.compiled`, so that a run that does not audit need not load them."""

from __future__ import annotations

import math
from typing import no_type_check

import numpy as np

from featviz.drawing.compiled import compiled


@compiled("void(float32[:,:,::1],int64[:,::1],int64,float64[:,::1])")
@no_type_check
def add_maps(stats, saturated, positions, sums):
    """Add the statistics of maps [B, C, 6] to `ChannelStats.sums`, one map after the other.

    Args:
        saturated: [B, C]; empty where nothing saturates.
        positions: values of one map.
    """
    for b in range(stats.shape[0]):
        for c in range(stats.shape[1]):
            bad = np.float64(stats[b, c, 5])
            count, more = sums[c, 0], positions - bad
            if more > 0:
                mean, std = np.float64(stats[b, c, 2]), np.float64(stats[b, c, 3])
                delta, share = mean - sums[c, 3], more / (count + more)
                sums[c, 0] = count + more
                sums[c, 1] = min(sums[c, 1], np.float64(stats[b, c, 0]))
                sums[c, 2] = max(sums[c, 2], np.float64(stats[b, c, 1]))
                sums[c, 3] += delta * share
                sums[c, 4] += more * std * std + delta * delta * count * share
            sums[c, 5] += math.floor(np.float64(stats[b, c, 4]) * positions + 0.5)
            sums[c, 6] += bad
            if saturated.size > 0:
                sums[c, 7] += saturated[b, c]


@compiled("void(float64,int64,float64[::1],int64[::1])", inline="never")
@no_type_check
def _insert(value, image, values, numbers):
    """Put an image that is better than the last in its place: before smaller values, and before
    later images of the same value."""
    at = values.size - 1
    while at > 0 and (
        value > values[at - 1] or (value == values[at - 1] and image < numbers[at - 1])
    ):
        values[at], numbers[at] = values[at - 1], numbers[at - 1]
        at -= 1
    values[at], numbers[at] = value, image


@compiled("void(float32[:,:,::1],int64[::1],float64[:,::1],int64[:,::1])")
@no_type_check
def add_images(stats, images, values, numbers):
    """Insert images [B], by the maxima of their maps [B, C, 6], into those of `TopImages`."""
    last = values.shape[1] - 1
    for b in range(stats.shape[0]):
        image = images[b]
        for c in range(stats.shape[1]):
            value = np.float64(stats[b, c, 1]) if stats[b, c, 5] == 0 else math.inf
            least = values[c, last]
            if value > least or (value == least and image < numbers[c, last]):
                _insert(value, image, values[c], numbers[c])
