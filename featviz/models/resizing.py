"""Sizes that depend on the image: rules that keep its proportions, and padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from featviz.text import by

HeightWidth = tuple[int, int]


class SizeRule(Protocol):
    """How large an image becomes."""

    def __call__(self, size: HeightWidth) -> HeightWidth:
        """From the (height, width) of an image to that of the resized one, in pixels."""

    @property
    def words(self) -> str:
        """What follows "resize", for people."""


@dataclass(frozen=True)
class Longer:
    """The longer side becomes `side` pixels, as SAM's image processor does."""

    side: int

    def __call__(self, size: HeightWidth) -> HeightWidth:
        """Keep the proportions; halves round up."""
        scale = self.side / max(size)
        return max(int(size[0] * scale + 0.5), 1), max(int(size[1] * scale + 0.5), 1)

    @property
    def words(self) -> str:
        """For people."""
        return f"longer side to {self.side}"


@dataclass(frozen=True)
class Between:
    """The shorter side becomes `shorter` pixels, or fewer where the longer one would be more than
    `longer`, as DETR's image processor does."""

    shorter: int
    longer: int
    multiple: int = 1
    """Both sides are then enlarged to a multiple of so many pixels, as Mask2Former's are."""

    def __call__(self, size: HeightWidth) -> HeightWidth:
        """Keep the proportions; the longer side is rounded down."""
        height, width = self._in_proportion(size)
        return _up(height, self.multiple), _up(width, self.multiple)

    def _in_proportion(self, size: HeightWidth) -> HeightWidth:
        low, high = min(size), max(size)
        exact: float = self.shorter
        if high / low * self.shorter > self.longer:
            exact = self.longer * low / high
        short = max(round(exact), 1)
        if low == short:
            return size
        long = int(exact * high / low)
        return (short, long) if size[0] <= size[1] else (long, short)

    @property
    def words(self) -> str:
        """For people."""
        up = f", up to multiples of {self.multiple}" if self.multiple > 1 else ""
        return f"shorter side to {self.shorter}, longer side to at most {self.longer}{up}"


@dataclass(frozen=True)
class Inside:
    """The largest size that fits into (`height`, `width`)."""

    height: int
    width: int

    def __call__(self, size: HeightWidth) -> HeightWidth:
        """Keep the proportions; both sides are rounded down."""
        scale = min(self.height / size[0], self.width / size[1])
        return max(int(size[0] * scale), 1), max(int(size[1] * scale), 1)

    @property
    def words(self) -> str:
        """For people."""
        return f"to fit into {by((self.height, self.width))}"


@dataclass(frozen=True)
class Multiples:
    """About (`height`, `width`), in multiples of `multiple`, as DPT's image processor does."""

    height: int
    width: int
    multiple: int
    proportions: bool
    """Keep the proportions: scale both sides by what changes the image less."""

    def __call__(self, size: HeightWidth) -> HeightWidth:
        """Round each side to the nearest multiple."""
        tall, wide = self.height / size[0], self.width / size[1]
        if self.proportions:
            tall = wide = wide if abs(1 - wide) < abs(1 - tall) else tall
        return self._rounded(tall * size[0]), self._rounded(wide * size[1])

    def _rounded(self, side: float) -> int:
        return max(round(side / self.multiple), 1) * self.multiple

    @property
    def words(self) -> str:
        """For people."""
        kept = "in proportion " if self.proportions else ""
        return f"{kept}to about {by((self.height, self.width))}, multiples of {self.multiple}"


@dataclass(frozen=True)
class Padding:
    """A border that is added after the values are normalised."""

    size: HeightWidth | None = None
    """Height and width in pixels; an image that is larger stays as it is."""
    multiple: int = 1
    """Sides become multiples of so many pixels."""
    centred: bool = False
    """Half of the border on each side; otherwise all of it is below and to the right."""
    value: float = 0.0
    """Value of the border, in normalised units."""

    def border(self, size: HeightWidth) -> list[int]:
        """Pixels to add to the left, top, right and bottom of an image of (height, width)."""
        tall, wide = (new - old for new, old in zip(self.padded(size), size, strict=True))
        left, top = (wide // 2, tall // 2) if self.centred else (0, 0)
        return [left, top, wide - left, tall - top]

    def padded(self, size: HeightWidth) -> HeightWidth:
        """The (height, width) of the padded image."""
        least = self.size or (0, 0)
        height, width = max(size[0], least[0]), max(size[1], least[1])
        return _up(height, self.multiple), _up(width, self.multiple)

    @property
    def words(self) -> str:
        """For people."""
        to = by(self.size) if self.size else f"multiples of {self.multiple}"
        place = "on all sides" if self.centred else "right and below"
        return f"pad to {to} {place}"


def _up(side: int, multiple: int) -> int:
    return math.ceil(side / multiple) * multiple
