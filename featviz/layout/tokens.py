"""Which grid so many tokens make, and how windows lie in the map from which they were cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

from featviz.errors import LayoutError
from featviz.records import Hints, Origin, Windows
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

    @property
    def tokens(self) -> int:
        """How many tokens there are, those of the prefix included."""
        return self.time * self.height * self.width + len(self.prefix)


def parse_grid(text: str) -> TokenGrid:
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


def find_grid(length: int, hints: Hints) -> TokenGrid | None:
    """Find the grid into which `length` tokens divide the input; None where there is no such grid.

    The tokens may have the model's prefix in front of the grid, the first part of it, or nothing;
    one token where the model names none.
    """
    if hints.input_size is None:
        return None
    known = hints.prefix
    prefixes = [known[:count] for count in range(len(known), -1, -1)]
    for prefix in prefixes if known else [(), ("extra_token",)]:
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


def count_windows(shape: Sequence[int], windows: Windows) -> int:
    """How many windows a tensor of this shape holds; 0 if it does not hold such windows."""
    places, size = windows.size[0] * windows.size[1], windows.size
    if windows.axes:
        named = (
            dict(zip(windows.axes, shape, strict=True)) if len(windows.axes) == len(shape) else {}
        )
        fits = named.get("s") == places and named.get("1", 1) == 1
        return named["n"] if fits else 0
    rest = tuple(shape[1:])
    if (len(shape) == 3 and rest[0] == places) or (
        len(shape) == 4 and size in (rest[:2], rest[1:])
    ):
        return shape[0] if shape[0] > 1 else 0
    return 0


def channel_of_windows(shape: Sequence[int], windows: Windows) -> int:
    """The axis of a tensor of windows that counts channels."""
    if windows.axes:
        return windows.axes.index("c")
    return 1 if len(shape) == 4 and tuple(shape[1:3]) != windows.size else len(shape) - 1


def size_of_windowed(number: int, windows: Windows, input_size: Size) -> Size | None:
    """Height and width of the map that was cut into `number` windows, without its padding."""
    height, width = windows.size
    for high, wide in map_sizes(input_size):
        whole = high % height == 0 and wide % width == 0
        if -(-high // height) * -(-wide // width) == number and (whole or not windows.strided):
            return high, wide
    return None


def join_windows(tensor: Tensor, windows: Windows, grid: TokenGrid) -> Tensor:
    """Put windows back into their map: [C, H, W].

    Neighbouring windows stand where they were cut out; strided ones are interleaved. What padded
    the map to whole windows is cut off, and a map that was rolled before is rolled back.
    """
    height, width = windows.size
    rows, columns = -(-grid.height // height), -(-grid.width // width)
    if windows.axes:
        places = [windows.axes.index(letter) for letter in "nsc"]
        tensor = tensor.permute([i for i in range(tensor.ndim) if i not in places] + places)
    elif tensor.ndim == 4 and tensor.shape[1:3] != windows.size:
        tensor = tensor.permute(0, 2, 3, 1)
    parts = tensor.reshape(rows, columns, height, width, -1)  # of [n, a·b, C] or [n, a, b, C]
    order = (4, 2, 0, 3, 1) if windows.strided else (4, 0, 2, 1, 3)
    joined = parts.permute(order).reshape(-1, rows * height, columns * width)
    joined = joined[:, : grid.height, : grid.width]
    return joined.roll(windows.shift, (1, 2)) if any(windows.shift) else joined.contiguous()


def channels_of_pieces(shape: Sequence[int], origin: Origin) -> int:
    """The axis of pieces of a map that counts channels."""
    return next(i for i in range(len(shape)) if i not in origin.axes and shape[i] > 1)


def join_pieces(tensor: Tensor, origin: Origin) -> Tensor:
    """Put each value of a tensor back into its place in the map: [C, H, W]; padding goes."""
    assert origin.grid is not None and origin.places is not None
    _, height, width = origin.grid
    channel = channels_of_pieces(tensor.shape, origin)
    rest = [i for i in range(tensor.ndim) if i not in origin.axes and i != channel]
    rows = tensor.permute(channel, *rest, *origin.axes).reshape(tensor.shape[channel], -1)
    known = origin.places >= 0
    joined = tensor.new_empty(len(rows), height * width)
    joined[:, origin.places[known]] = rows[:, known]
    return joined.reshape(-1, height, width)
