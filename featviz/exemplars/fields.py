"""Receptive fields as tables: which pixels of the input each row and each column of a map sees.

A table for each axis is exact where a formula of size, stride and offset is not: at borders, under
adaptive pooling, and behind layers that enlarge a map. A field is a rectangle, so the two axes go
their own ways; of several branches it is the smallest rectangle around all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from featviz.records import Integers

NOWHERE = -1
"""Stands in a list of sources for a place that is none: the padding."""

_FAR = 2**40
"""Beyond every pixel."""


@dataclass(frozen=True)
class Reach:
    """What each of n positions along an axis sees of the input, in pixels, both ends included; the
    first is beyond the last where a position sees only padding."""

    first: Integers
    last: Integers

    @classmethod
    def of_input(cls, size: int) -> Reach:
        """Each pixel sees itself."""
        return cls(np.arange(size), np.arange(size))

    def __len__(self) -> int:
        return len(self.first)

    def through(self, sources: Integers) -> Reach:
        """What m positions see that each look at some of these.

        Args:
            sources: [m, k], positions along this axis, or NOWHERE.
        """
        inside = (sources >= 0) & (sources < len(self))
        at = np.where(inside, sources, 0)
        first = np.where(inside, self.first[at], _FAR).min(1, initial=_FAR)
        return Reach(first, np.where(inside, self.last[at], -1).max(1, initial=-1))

    def joined(self, other: Reach) -> Reach:
        """What either sees; one position stands for as many as the other has."""
        return Reach(np.minimum(self.first, other.first), np.maximum(self.last, other.last))

    @property
    def size(self) -> int:
        """Pixels that the position with the largest view sees."""
        return int(max(0, (self.last - self.first).max(initial=-1) + 1))


@dataclass(frozen=True)
class Field:
    """The views of the rows and columns of a tensor."""

    rows: Reach
    columns: Reach
    axes: tuple[int, int]
    """The tensor's axes of rows and columns, from the end: (-2, -1) of [1, C, H, W]."""

    def through(self, rows: Integers, columns: Integers) -> Field:
        """The views behind a layer whose positions look at these ones: each [m, k]."""
        return Field(self.rows.through(rows), self.columns.through(columns), self.axes)

    def at(self, axes: tuple[int, int]) -> Field:
        """The same on other axes."""
        return Field(self.rows, self.columns, axes)

    def box(self, row: int, column: int) -> tuple[int, int, int, int] | None:
        """Left, top, right and bottom in pixels of the input, right and bottom excluded; None where
        the position sees only padding."""
        top, bottom = int(self.rows.first[row]), int(self.rows.last[row]) + 1
        left, right = int(self.columns.first[column]), int(self.columns.last[column]) + 1
        return (left, top, right, bottom) if left < right and top < bottom else None


def united(fields: Iterable[Field]) -> Field | None:
    """The smallest rectangles around the views of several tensors that are added or joined; None
    where their rows and columns are not the same."""
    fields = list(fields)
    if len({field.axes for field in fields}) > 1:
        return None
    for lengths in ({len(f.rows) for f in fields}, {len(f.columns) for f in fields}):
        if len(lengths - {1}) > 1:
            return None
    rows = reduce(Reach.joined, [field.rows for field in fields])
    columns = reduce(Reach.joined, [field.columns for field in fields])
    return Field(rows, columns, fields[0].axes)


def window(count: int, kernel: int, stride: int, before: int, dilation: int) -> Integers:
    """The positions at which `count` windows of a convolution or pooling look, [count, kernel].

    Args:
        before: padding in front of the axis; positions in it, and behind the end, are outside.
    """
    starts = np.arange(count) * stride - before
    return _outside_is_nowhere(starts[:, None] + np.arange(kernel) * dilation)


def transposed(count: int, kernel: int, stride: int, before: int, dilation: int) -> Integers:
    """The positions from which `count` places of a transposed convolution come, [count, kernel]."""
    scaled = np.arange(count)[:, None] + before - np.arange(kernel) * dilation
    return _outside_is_nowhere(np.where(scaled % stride == 0, scaled // stride, NOWHERE))


def adaptive(size: int, count: int) -> Integers:
    """The positions that adaptive pooling of `size` positions to `count` looks at."""
    at = np.arange(count)
    starts, ends = at * size // count, -(-(at + 1) * size // count)
    sources = starts[:, None] + np.arange((ends - starts).max(initial=0))
    return np.where(sources < ends[:, None], sources, NOWHERE)


_NEIGHBOURS = {"nearest": (0, 0), "nearest-exact": (0, 0), "bilinear": (0, 1), "bicubic": (-1, 2)}
"""How many positions before and behind its own a pixel of a resized map looks at."""


def resized(size: int, count: int, mode: str, corners: bool) -> Integers | None:
    """The positions that resizing `size` positions to `count` looks at; None for a way of resizing
    that is not known here.

    Args:
        mode: of `torch.nn.functional.interpolate`.
        corners: whether the first and the last positions stay where they are.
    """
    if mode not in _NEIGHBOURS:
        return None
    at = np.arange(count)
    if mode == "nearest":
        exact = at * (size / count)
    elif corners:
        exact = at * ((size - 1) / max(1, count - 1))
    else:
        exact = (at + 0.5) * (size / count) - (0 if mode == "nearest-exact" else 0.5)
    before, behind = _NEIGHBOURS[mode]
    own = np.floor(exact + 1e-6).astype(np.int64)[:, None]
    between = (exact[:, None] - own > 1e-6).astype(np.int64)  # on a pixel, the others weigh nothing
    sources: Integers = np.clip(own + between * np.arange(before, behind + 1), 0, size - 1)
    return sources


def _outside_is_nowhere(sources: Integers) -> Integers:
    return np.where(sources < 0, NOWHERE, sources)
