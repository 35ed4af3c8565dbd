"""Which grid so many tokens make: one whose sides some stride makes of the input's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

from featviz.errors import LayoutError
from featviz.records import Hints
from featviz.text import quoted

if TYPE_CHECKING:
    from torch import Tensor

Size = tuple[int, int]

_USUAL_STRIDES = (1, 2, 4, 8, 16, 32, 64)
_GRID = re.compile(r"([1-9]\d{,17})x([1-9]\d{,17})(?:\+(\d{1,4}))?")
"""Few enough digits for int(), and for a name for each token in front of the grid."""

STRIDES = (*_USUAL_STRIDES, *(p for p in range(1, 64) if p not in _USUAL_STRIDES))
"""Pixels of the input from one place of a map to the next, the usual ones first."""


@dataclass(frozen=True)
class TokenGrid:
    """Tokens in rows and columns, of one or several time steps, with a prefix in front of them."""

    height: int
    width: int
    time: int = 1
    prefix: tuple[str, ...] = ()
    """A name for each token in front of the grid."""

    @property
    def tokens(self) -> int:
        """How many tokens there are, those of the prefix included."""
        return self.time * self.height * self.width + len(self.prefix)


def parse(text: str) -> TokenGrid:
    """Read `14x20`, or `14x20+1` with the number of tokens in front of the grid, 9999 at most.

    Raises:
        LayoutError: the text is neither.
    """
    sides = _GRID.fullmatch(text)
    if sides is None:
        raise LayoutError(
            f"{quoted(repr(text))} is no grid",
            "rows and columns of tokens, for example 14x20, or 14x20+1 with one token (of at most "
            "9999) in front",
        )
    height, width, extra = (int(number or 0) for number in sides.groups())
    return TokenGrid(height, width, prefix=("extra_token",) * extra)


def find(length: int, hints: Hints) -> TokenGrid | None:
    """Find the grid into which `length` tokens divide the input; None where there is no such grid.

    The tokens may have the model's prefix in front of the grid, the first part of it, or nothing.
    """
    if hints.input_size is None:
        return None
    for prefix in _prefixes(hints.prefix):
        count, rest = divmod(length - len(prefix), hints.time or 1)
        if rest == 0 and count > 1 and hints.tokens in (None, count, length):
            for height, width in map_sizes(hints.input_size):
                if height * width == count:
                    return TokenGrid(height, width, hints.time or 1, prefix)
    return None


def is_of_patches(grid: TokenGrid, hints: Hints) -> bool:
    """Whether a grid has one token for each patch of the input."""
    if hints.input_size is None or hints.patch is None:
        return False
    sides = zip((grid.height, grid.width), hints.input_size, hints.patch, strict=True)
    return all(count == side // patch for count, side, patch in sides)


def _prefixes(known: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The prefixes to try, the longest first; one token where the model names none."""
    for count in range(len(known), -1, -1):
        yield known[:count]
    if not known:
        yield ("extra_token",)


@cache
def map_sizes(size: Size) -> tuple[Size, ...]:
    """Sizes of the maps that strides of whole pixels make of an input, the likelier ones first.

    With a stride p, H pixels give ceil(H / p) rows where the border is padded, floor(H / p) where
    it is not, and one less where the kernel is larger than the stride; several strides of 2 in a
    row may round rows up and columns down. A square input gives square maps only.
    """
    sizes: dict[Size, None] = {}
    for stride in STRIDES:
        rows, columns = (_sides(side, stride) for side in size)
        mixed = product(rows[:2], columns[:2]) if stride in _USUAL_STRIDES else ()
        for pair in (*zip(rows, columns, strict=True), *mixed):
            if min(pair) > 0 and (size[0] != size[1] or pair[0] == pair[1]):
                sizes[pair] = None
    return tuple(sizes)


def _sides(side: int, stride: int) -> tuple[int, int, int]:
    """Rows (or columns) of a map: rounded up, rounded down, and one less."""
    return -(-side // stride), side // stride, side // stride - 1


def reroll(tokens: Tensor, last: Size) -> Tensor:
    """Sort tokens [C, T] that stand in the order of their pooling into [C, H · W], row by row.

    Tokens that are pooled together stand farthest apart: [C, 2, 2, ..., h, w], where the first pair
    of axes is pooled first. `last` is (h, w). timm's `hiera.Reroll` does the same.
    """
    parts = tokens.reshape(len(tokens), -1, *last)
    while parts.shape[1] > 1:
        channels, count, height, width = parts.shape
        pairs = parts.reshape(channels, count // 4, 2, 2, height, width)
        parts = pairs.permute(0, 1, 4, 2, 5, 3).reshape(channels, -1, 2 * height, 2 * width)
    return parts.flatten(1)
