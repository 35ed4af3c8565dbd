"""Maps of the image, and tables that say which place of which map each value belongs to.

A table is float64 of its tensor's shape: 0 for a value that belongs to no place of the image, else
the number of a place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featviz.records import Origin


@dataclass(frozen=True)
class SourceMap:
    """A map of the image: its places are numbered row by row, time step by time step."""

    first: int
    """The number of its first place; 0 stands for no place."""
    time: int
    height: int
    width: int

    @property
    def after(self) -> int:
        """The number behind that of its last place."""
        return self.first + self.time * self.height * self.width


class SourceMaps:
    """The maps that a forward pass has made so far."""

    def __init__(self) -> None:
        self._maps: list[SourceMap] = []

    def add(self, sides: Sequence[int]) -> SourceMap:
        """Begin a map of these sides: [height, width], or [time, height, width]."""
        first = self._maps[-1].after if self._maps else 1
        self._maps.append(SourceMap(first, *([1] * (3 - len(sides))), *sides))
        return self._maps[-1]

    def table(self, shape: Sequence[int]) -> Tensor:
        """Places of a new map for a tensor [N, C, H, W] or [N, C, T, H, W]."""
        new = self.add(shape[2:])
        numbers = torch.arange(new.first, new.after, dtype=torch.float64)
        return numbers.reshape(shape[2:]).expand(*shape)

    def only(self, numbers: Tensor) -> SourceMap | None:
        """The one map to which all numbers but 0 belong; None where there are none or several."""
        numbers = numbers[numbers > 0]
        if numbers.numel() == 0:
            return None
        at = self._maps[bisect_right(self._maps, int(numbers.min()), key=lambda m: m.first) - 1]
        return at if int(numbers.max()) < at.after else None

    def coarser(self, table: Tensor) -> Tensor | None:
        """Places of patches that a layer merges, along the last axis: those of a new map whose
        rows and columns are the patches' means; None where the patches make no rows and columns.

        Args:
            table: [..., P] with P places in each patch; the result is [..., 1].
        """
        source, known = self.only(table.flatten()), (table > 0).double()
        if source is None or source.time > 1:
            return None
        places, count = table - source.first, known.sum(-1).clamp(min=1)
        rows, columns = (places // source.width), (places % source.width)
        mean = [((side * known).sum(-1) / count).mul(1024).round() for side in (rows, columns)]
        (high, row), (wide, column) = map(_ranked, mean)
        cells = row * len(wide) + column
        if len(high) * len(wide) != cells.numel() or len(_ranked(cells)[0]) != cells.numel():
            return None
        first = self.add((len(high), len(wide))).first
        return cells.add(first).double()[..., None]

    def origin(self, table: Tensor) -> Origin:
        """Sum up a table whose values, or rows of values, lie on a map or evenly spread over it."""
        free = tuple(axis for axis in range(table.ndim) if varies(table, axis))
        if not free:
            return Origin()
        first = tuple(slice(None) if i in free else 0 for i in range(table.ndim))
        found = self._spread(table[first].flatten(), free)
        if found.grid is None and len(free) == 2 and table.ndim == 3:
            return self._by_rows(table, free)
        return found

    def _by_rows(self, table: Tensor, free: Sequence[int]) -> Origin:
        """Rows of values that lie near to each other, as patches that nobody has mixed yet."""
        for axis in free:
            coarser = self.coarser(table.movedim(axis, 0).flatten(1))
            if coarser is not None:
                return self._spread(coarser.flatten(), (axis,))
        return Origin()

    def _spread(self, numbers: Tensor, axes: tuple[int, ...]) -> Origin:
        """Places that are all of a map's, or every n-th row and column of it, each once."""
        source = self.only(numbers)
        if source is None:
            return Origin()
        known = numbers > 0
        places = (numbers[known] - source.first).long()
        time, height, width = source.time, source.height, source.width
        if len(places) < time * height * width and time == 1:
            (rows, row), (columns, column) = _ranked(places // width), _ranked(places % width)
            if not (_is_even(rows, height) and _is_even(columns, width)):
                return Origin()
            height, width = len(rows), len(columns)
            places = row * width + column
        if len(places) != time * height * width or len(_ranked(places)[0]) != len(places):
            return Origin()
        everywhere = torch.full(numbers.shape, -1, dtype=torch.long)
        everywhere[known] = places
        return Origin(grid=(time, height, width), axes=axes, places=everywhere.numpy())


def _ranked(values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct values, the smallest first, and the place of each value among them."""
    distinct, rank = values.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    return distinct, rank


def _is_even(kept: Tensor, side: int) -> bool:
    """Whether the rows (or columns) that were kept are every n-th one, from end to end."""
    steps = _ranked(kept.diff())[0]
    step = int(steps[0]) if len(steps) == 1 else side
    return len(steps) < 2 and int(kept[0]) < step and int(kept[-1]) + step >= side


def varies(table: Tensor, axis: int) -> bool:
    """Whether the places change along an axis."""
    if table.shape[axis] < 2 or table.stride(axis) == 0:
        return False
    return not torch.equal(table, table.narrow(axis, 0, 1).expand_as(table))
