"""The strongest images of each channel; any division of the images gives the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from featviz.records import Floats, Integers

_NONE = 2**62
"""Stands for the number of an image where there is none; comes after all."""


@dataclass(frozen=True)
class Top:
    """The best images of C channels, best first; of equal values the image with the lower number is
    the better one. Holds no more than K images of a channel, however many were seen."""

    values: Floats
    """float32 [C, K]; -inf where there is no image."""
    images: Integers
    """Numbers among the samples, [C, K]."""
    places: Integers
    """Row, column, and how many rows and columns the map has, [C, K, 4]; -1 where the layer gives
    no map of the input, or the whole map is meant."""

    @classmethod
    def none(cls, channels: int, count: int) -> Top:
        """Before the first image."""
        return cls(
            np.full((channels, count), -np.inf, np.float32),
            np.full((channels, count), _NONE),
            np.full((channels, count, 4), -1),
        )

    @property
    def channels(self) -> int:
        """How many there are."""
        return len(self.values)

    @property
    def is_image(self) -> np.ndarray:
        """Where there is an image, [C, K]."""
        return np.isfinite(self.values)

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.values.nbytes + self.images.nbytes + self.places.nbytes

    def with_image(self, number: int, values: Floats, places: Integers) -> Top:
        """One more image.

        Args:
            values: [C]; what is not finite excites nothing.
            places: [C, 4].
        """
        values = np.where(np.isfinite(values), values, np.float32(-np.inf))
        if not (values >= self.values[:, -1]).any():
            return self
        numbers = np.where(np.isfinite(values), number, _NONE)
        return self.merged(Top(values[:, None], numbers[:, None], places[:, None]))

    def merged(self, other: Top) -> Top:
        """The best of both, which saw different images; as many as this one holds."""
        values = np.concatenate([self.values, other.values], 1)
        images = np.concatenate([self.images, other.images], 1)
        places = np.concatenate([self.places, other.places], 1)
        order = np.lexsort((images, -values))[:, : self.values.shape[1]]
        return Top(
            np.take_along_axis(values, order, 1),
            np.take_along_axis(images, order, 1),
            np.take_along_axis(places, order[..., None], 1),
        )


def best_of(parts: list[Top]) -> Top:
    """The best of several parts."""
    return reduce(Top.merged, parts)
