"""Which grids of a length have an image's proportions, and windows put back into their map."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from featviz.errors import LayoutError
from featviz.records import Hints, Windows

Size = tuple[int, int]


@dataclass(frozen=True)
class Grid:
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


def parse(text: str) -> Grid:
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
    return Grid(height, width, prefix=("extra_token",) * extra)


def find(length: int, hints: Hints) -> Grid | None:
    """The grid of the input's proportions that so many tokens make, with the model's prefix, with
    a part of it, or without; None where there is none."""
    if hints.input_size is None:
        return None
    for prefix in _prefixes(hints.prefix):
        count, rest = divmod(length - len(prefix), hints.time or 1)
        if rest == 0 and count > 1:
            for height, width in factors(count):
                if in_step(height, width, hints.input_size):
                    return Grid(height, width, hints.time or 1, prefix)
    return None


def is_of_patches(grid: Grid, hints: Hints) -> bool:
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


def factors(count: int) -> Iterator[Size]:
    """All (rows, columns) whose product is `count`."""
    for rows in range(1, count + 1):
        if count % rows == 0:
            yield rows, count // rows


def in_step(height: int, width: int, size: Size) -> bool:
    """Whether one stride makes a map of this size from an input of that size.

    That is, whether for some real stride p both sides are floor(side / p), or both ceil(side / p);
    for a square input only square maps are.
    """
    high, wide = size
    floors = max(high / (height + 1), wide / (width + 1)) < min(high / height, wide / width)
    most = min(_over(high, height - 1), _over(wide, width - 1))
    return floors or max(high / height, wide / width) < most


def _over(side: int, count: int) -> float:
    return side / count if count else float("inf")


def in_proportion(height: int, width: int, size: Size | None) -> bool:
    """Whether a map has the input's proportions, but for a pixel of rounding."""
    return size is not None and abs(width - height * size[1] / size[0]) <= 1


def windows_in(shape: Sequence[int], windows: Windows) -> int:
    """How many windows a tensor of this shape holds; 0 if it is not cut into such windows."""
    height, width = windows.size
    rest = tuple(shape[1:])
    if len(shape) == 3 and rest[0] == height * width:
        return shape[0]
    if len(shape) == 4 and (rest[:2] == windows.size or rest[1:] == windows.size):
        return shape[0]
    if len(shape) == 4 and shape[0] == 1 and shape[2] == height * width:
        return shape[1]
    return 0


def join_windows(tensor: Tensor, windows: Windows, grid: Grid) -> Tensor:
    """Put windows back into their map: [C, H, W].

    Neighbouring windows stand where they were cut out; strided ones are interleaved. A map that
    was rolled before it was cut is rolled back.
    """
    (height, width), high, wide = windows.size, grid.height, grid.width
    if tensor.ndim == 4 and tensor.shape[1:3] != windows.size and tensor.shape[0] > 1:
        tensor = tensor.permute(0, 2, 3, 1)  # [n, C, a, b]
    parts = tensor.reshape(high // height, wide // width, height, width, -1)
    order = (4, 2, 0, 3, 1) if windows.strided else (4, 0, 2, 1, 3)
    joined = parts.permute(order).reshape(-1, high, wide)
    return joined.roll(windows.shift, (1, 2)) if any(windows.shift) else joined.contiguous()
