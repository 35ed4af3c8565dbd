"""Which grid so many tokens make, and where pieces of a map belong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

from featviz.errors import LayoutError
from featviz.records import Hints, Origin
from featviz.text import quoted

if TYPE_CHECKING:
    from torch import Tensor

Size = tuple[int, int]

BEFORE, BEHIND = "extra_token", "token_behind"
"""Names of tokens beside a grid that the model does not name."""

_USUAL_STRIDES = (1, 2, 4, 8, 16, 32, 64)
_GRID = re.compile(r"([1-9]\d{,17})x([1-9]\d{,17})(?:\+(\d{1,4})(?:,(\d{1,4}))?)?")
"""Few enough digits for int(), and for a name for each token beside the grid."""

STRIDES = (*_USUAL_STRIDES, *(p for p in range(1, 64) if p not in _USUAL_STRIDES))
"""Pixels of the input from one place of a map to the next, the usual ones first."""


@dataclass(frozen=True)
class TokenGrid:
    """Tokens in rows and columns, of one or several time steps, between others that have names."""

    height: int
    width: int
    time: int = 1
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens there are, those beside the grid included."""
        return len(self.prefix) + self.time * self.height * self.width + len(self.suffix)


def parse_grid(text: str) -> TokenGrid:
    """Read `14x20`, `14x20+1` with the number of tokens in front of the grid, or `14x20+1,10` with
    that of tokens behind it, too; 9999 at most.

    Raises:
        LayoutError: the text is none of these.
    """
    sides = _GRID.fullmatch(text)
    if sides is None:
        raise LayoutError(
            f"{quoted(repr(text))} is no grid",
            "rows and columns of tokens, for example 14x20, 14x20+1 with one token (of at most "
            "9999) in front, or 14x20+1,10 with ten behind",
        )
    height, width, before, behind = (int(number or 0) for number in sides.groups())
    return TokenGrid(height, width, 1, (BEFORE,) * before, (BEHIND,) * behind)


def find_grid(length: int, hints: Hints) -> TokenGrid | None:
    """Find the grid into which `length` tokens divide the input; None where there is no such grid.

    The tokens may have the model's prefix in front of the grid, the first part of it, or nothing;
    one token where the model names none.
    """
    if hints.input_size is None:
        return None
    known = hints.prefix
    prefixes = [known[:count] for count in range(len(known), -1, -1)]
    for prefix in prefixes if known else [(), (BEFORE,)]:
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


@cache
def map_sizes(size: Size) -> tuple[Size, ...]:
    """Sizes of the maps that strides of whole pixels make of an input, the likelier ones first.

    With a stride p, H pixels give ceil(H / p) rows where the border is padded, floor(H / p) where
    it is not, and one less where the kernel is larger than the stride; several strides of 2 in a
    row may round rows up and columns down. A square input gives square maps only.
    """
    sizes: dict[Size, None] = {}
    for stride in STRIDES:
        rows, columns = (  # rounded up, rounded down, and one less
            (-(-side // stride), side // stride, side // stride - 1) for side in size
        )
        mixed = product(rows[:2], columns[:2]) if stride in _USUAL_STRIDES else ()
        for pair in (*zip(rows, columns, strict=True), *mixed):
            if min(pair) > 0 and (size[0] != size[1] or pair[0] == pair[1]):
                sizes[pair] = None
    return tuple(sizes)


def channels_of_pieces(shape: Sequence[int], origin: Origin) -> list[int]:
    """The axes of pieces of a map that count channels: one, or heads and what each of them has."""
    return [i for i in range(len(shape)) if i not in origin.axes and shape[i] > 1]


def join_pieces(tensor: Tensor, origin: Origin | None) -> Tensor:
    """Put each value of a tensor back into its place in the map: [C, T, H, W]; padding goes."""
    assert origin is not None and origin.grid is not None and origin.places is not None
    channels = channels_of_pieces(tensor.shape, origin)
    rest = [i for i in range(tensor.ndim) if i not in (*origin.axes, *channels)]
    known = origin.places >= 0
    rows = tensor.permute(*channels, *rest, *origin.axes).reshape(-1, len(known))
    joined = tensor.new_empty(len(rows), int(known.sum()))
    joined[:, origin.places[known]] = rows[:, known]
    return joined.reshape(-1, *origin.grid)
