"""What is written on a picture: channel numbers, how many share a tile, marks on constant maps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from PIL import ImageFont

from featviz.records import Bytes

NONE, ZERO, CONSTANT = range(3)
"""Marks: a cross on a map of nothing but zeros, a stroke on a map of another single value."""

SMALLEST = 5
"""Pixels below which a tile has no room for a mark."""

_STROKE = 48
"""A mark's line is a pixel wide for every so many pixels of the tile's longer side, at least 1."""


@dataclass(frozen=True)
class Stamps:
    """What is written on the tiles of a picture."""

    corner: Mapping[int, str]
    """Texts at the upper left, by tile."""
    count: Mapping[int, str]
    """Texts at the lower right, by tile."""
    marks: Bytes
    """NONE, ZERO or CONSTANT for each tile."""
    dark: int
    light: int
    """The index or grey of a text's ground, and of its ink."""
    half: int
    """Half of a tile's levels: so far is a mark from what it is drawn on, a tile's first pixel."""

    @cached_property
    def _numbers(self) -> list[int]:
        return sorted({*self.corner, *self.count, *np.flatnonzero(self.marks).tolist()})

    def within(self, first: int, last: int) -> list[int]:
        """The tiles from `first` to before `last` on which something is written."""
        return self._numbers[bisect_left(self._numbers, first) : bisect_left(self._numbers, last)]

    def write(self, number: int, tile: Bytes) -> None:
        """Write on one tile, uint8 [h, w, depth]."""
        size = (tile.shape[0], tile.shape[1])
        if mark := self.marks[number]:
            ground, half = int(tile[0, 0, 0]), self.half
            tile[shapes(size)[mark - 1]] = ground + half if ground < half else ground - half
        taken = (0, 0)
        for text, last in ((self.corner.get(number), False), (self.count.get(number), True)):
            high, wide = extent(text or "")
            meet = taken[0] + high > size[0] and taken[1] + wide > size[1]
            if text and high <= size[0] and wide <= size[1] and not (taken[0] and meet):
                top, left = (size[0] - high, size[1] - wide) if last else (0, 0)
                ink = np.where(_glyphs(text), self.light, self.dark)[..., None]
                tile[top : top + high, left : left + wide], taken = ink, (high, wide)


def extent(text: str) -> tuple[int, int]:
    """Height and width of a text's box in pixels."""
    return _glyphs(text).shape if text else (0, 0)


@lru_cache(4096)
def _glyphs(text: str) -> np.ndarray:
    """bool [height, width]: the ink of a text in Pillow's bitmap font, one pixel of ground around
    (its digits fill rows 2 to 8 of 11, and the last column of a letter is empty)."""
    mask = ImageFont.load_default_imagefont().getmask(text, mode="1")
    ink = np.asarray(mask, np.uint8).reshape(mask.size[::-1]) > 0
    return np.pad(ink[1:10], ((0, 0), (1, 0)))


@lru_cache(64)
def shapes(size: tuple[int, int]) -> np.ndarray:
    """bool [2, height, width]: the pixels of the marks ZERO, both diagonals, and CONSTANT, the one
    that rises; none where a tile has no room for a mark."""
    height, width = size
    y, x = np.mgrid[0:height, 0:width]
    reach = max(1, max(size) // _STROKE) * max(size) / 2
    rising = abs((height - 1 - y) * (width - 1) - x * (height - 1)) < reach
    rising &= min(size) >= SMALLEST
    return np.stack([rising | rising[:, ::-1], rising])
