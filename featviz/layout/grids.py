"""Which grids of a length have an image's proportions, and windows put back into their map."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from torch import Tensor

from featviz.errors import LayoutError
from featviz.records import Hints, Windows

Size = tuple[int, int]

_USUAL_STRIDES = (1, 2, 4, 8, 16, 32, 64)
STRIDES = (*_USUAL_STRIDES, *(p for p in range(1, 64) if p not in _USUAL_STRIDES))
"""Pixels of the input from one place of a map to the next, the usual ones first."""


@dataclass(frozen=True)
class TokenGrid:
    """Tokens in rows and columns, of one or several time steps, behind those of the prefix."""

    height: int
    width: int
    time: int = 1
    prefix: tuple[str, ...] = ()
    """A name for each token in front of the grid."""

    @property
    def tokens(self) -> int:
        """All of them, the prefix included."""
        return self.time * self.height * self.width + len(self.prefix)


def parse(text: str) -> TokenGrid:
    """Read `14x20` or `14x20+1`, the number of tokens in front of the grid.

    Raises:
        LayoutError: it is neither.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:\+(\d+))?", text)
    if found is None:
        raise LayoutError(
            f"{text!r} is no grid", "rows and columns of tokens, for example 14x20 or 14x20+1"
        )
    height, width, extra = (int(number or 0) for number in found.groups())
    return TokenGrid(height, width, prefix=("extra_token",) * extra)


def find(length: int, hints: Hints) -> TokenGrid | None:
    """The grid that so many tokens make of the input, with the model's prefix, with a part of it,
    or without; None where there is none."""
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
    """Whether a grid has a token for each patch of the input."""
    if hints.input_size is None or hints.patch is None:
        return False
    sides = zip((grid.height, grid.width), hints.input_size, hints.patch, strict=True)
    return all(count == side // patch for count, side, patch in sides)


def _prefixes(known: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
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
    found: dict[Size, None] = {}
    for stride in STRIDES:
        rows, columns = (_sides(side, stride) for side in size)
        mixed = product(rows[:2], columns[:2]) if stride in _USUAL_STRIDES else ()
        for pair in (*zip(rows, columns, strict=True), *mixed):
            if min(pair) > 0 and (size[0] != size[1] or pair[0] == pair[1]):
                found[pair] = None
    return tuple(found)


def _sides(side: int, stride: int) -> tuple[int, int, int]:
    return -(-side // stride), side // stride, side // stride - 1


def in_proportion(height: int, width: int, size: Size | None) -> bool:
    """Whether a map has the input's proportions, but for a pixel of rounding."""
    return size is not None and abs(width - height * size[1] / size[0]) <= 1


def far_from_proportion(height: int, width: int, size: Size | None) -> bool:
    """Whether a map is at least twice as high, for its width, as the input is."""
    return size is not None and height * size[1] >= 2 * width * size[0]


def windows_in(shape: Sequence[int], windows: Windows) -> int:
    """How many windows a tensor of this shape holds; 0 if it is not cut into such windows."""
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


def channels_of_windows(shape: Sequence[int], windows: Windows) -> int:
    """Which axis of a tensor of windows counts channels."""
    if windows.axes:
        return windows.axes.index("c")
    return 1 if len(shape) == 4 and tuple(shape[1:3]) != windows.size else len(shape) - 1


def map_of_windows(count: int, windows: Windows, input_size: Size) -> Size | None:
    """The size of the map that was cut into so many windows, without what padded it."""
    height, width = windows.size
    for high, wide in map_sizes(input_size):
        whole = high % height == 0 and wide % width == 0
        if -(-high // height) * -(-wide // width) == count and (whole or not windows.strided):
            return high, wide
    return None


def join_windows(tensor: Tensor, windows: Windows, grid: TokenGrid) -> Tensor:
    """Put windows back into their map: [C, H, W].

    Neighbouring windows stand where they were cut out; strided ones are interleaved. What padded
    the map to whole windows is cut off, and a map that was rolled before is rolled back.
    """
    height, width = windows.size
    rows, columns = -(-grid.height // height), -(-grid.width // width)
    parts = _usual(tensor, windows).reshape(rows, columns, height, width, -1)
    order = (4, 2, 0, 3, 1) if windows.strided else (4, 0, 2, 1, 3)
    joined = parts.permute(order).reshape(-1, rows * height, columns * width)
    joined = joined[:, : grid.height, : grid.width]
    return joined.roll(windows.shift, (1, 2)) if any(windows.shift) else joined.contiguous()


def _usual(tensor: Tensor, windows: Windows) -> Tensor:
    """[n, a·b, C] or [n, a, b, C]: windows, their places, channels."""
    if windows.axes:
        places = [windows.axes.index(letter) for letter in "nsc"]
        return tensor.permute([i for i in range(tensor.ndim) if i not in places] + places)
    if tensor.ndim == 4 and tensor.shape[1:3] != windows.size:
        return tensor.permute(0, 2, 3, 1)
    return tensor


def reroll(tokens: Tensor, last: Size) -> Tensor:
    """[C, T] in the order of their pooling to [C, H · W], row by row.

    Tokens that are pooled together stand farthest apart: [C, 2, 2, ..., h, w], where the first pair
    of axes is pooled first. `last` is (h, w). (timm's `hiera.Reroll` does the same.)
    """
    parts = tokens.reshape(len(tokens), -1, *last)
    while parts.shape[1] > 1:
        channels, count, height, width = parts.shape
        pairs = parts.reshape(channels, count // 4, 2, 2, height, width)
        parts = pairs.permute(0, 1, 4, 2, 5, 3).reshape(channels, -1, 2 * height, 2 * width)
    return parts.flatten(1)
