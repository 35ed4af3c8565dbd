"""Places: which place of which map each value of a tensor belongs to, carried through functions.

A tensor has a table of places beside it, float64 of the tensor's shape: 0 for a value that belongs
to no place of the image, else the number of a place. What only moves values moves their places in
the same way; what mixes them keeps the places along the axes that stay apart. Where a function is
not understood its results have no places, so nothing is claimed of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
            coarser = _coarser(self, table.movedim(axis, 0).flatten(1))
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


Rule = Callable[[SourceMaps, Tensor, Tensor, Sequence[Any], Mapping[str, Any]], Tensor | None]
"""Places of a result: takes the maps so far, the places of the first tensor, the result, and the
arguments; None where nothing is known."""


def _kept_rows(
    maps: SourceMaps, table: Tensor, result: Tensor, args: Any, kwargs: Any
) -> Tensor | None:
    """What mixes the last axis (a linear layer, an attention's queries) keeps the others."""
    last = table.ndim - 1
    if varies(table, last):
        if table.shape == result.shape and not any(varies(table, i) for i in range(last)):
            return table  # the tokens themselves are mixed, and each is given back
        coarser = _coarser(maps, table)
        return None if coarser is None else coarser.expand(result.shape)
    return table[..., :1].expand(result.shape)


def _coarser(maps: SourceMaps, table: Tensor) -> Tensor | None:
    """Places of patches that a linear layer merges: those of a new map whose rows and columns are
    the patches' means; None where the patches make no rows and columns."""
    source, known = maps.only(table.flatten()), (table > 0).double()
    if source is None or source.time > 1:
        return None
    places, count = table - source.first, known.sum(-1).clamp(min=1)
    rows, columns = (places // source.width), (places % source.width)
    mean = [((side * known).sum(-1) / count).mul(1024).round() for side in (rows, columns)]
    (high, row), (wide, column) = map(_ranked, mean)
    cells = row * len(wide) + column
    if len(high) * len(wide) != cells.numel() or len(_ranked(cells)[0]) != cells.numel():
        return None
    first = maps.add((len(high), len(wide))).first
    return cells.add(first).double()[..., None]


def _map(maps: SourceMaps, table: Tensor, result: Tensor, args: Any, kwargs: Any) -> Tensor | None:
    """A convolution or a pooling keeps the places, or makes a map of another resolution."""
    if table.ndim not in (4, 5):
        return None
    if table.shape[2:] == result.shape[2:] and not varies(table, 1):
        return table[:, :1].expand(result.shape)
    if not (varies(table, table.ndim - 1) and varies(table, table.ndim - 2)):
        return None
    if not varies(table, 0):  # one image, or heads of it
        return maps.table(result.shape)
    return _pieces(maps, table, result)


def _pieces(maps: SourceMaps, table: Tensor, result: Tensor) -> Tensor | None:
    """Places of pieces of a map, each of which became smaller by a whole factor."""
    (count, _, height, width), (high, wide) = table.shape, result.shape[2:]
    if height % high or width % wide or varies(table, 1):
        return None
    blocks = table[:, :1].reshape(count, 1, high, height // high, wide, width // wide)
    coarser = _coarser(maps, blocks.transpose(3, 4).flatten(4))
    return None if coarser is None else coarser[..., 0].expand(result.shape)


def _product(
    maps: SourceMaps, table: Tensor, result: Tensor, args: Sequence[Any], kwargs: Any
) -> Tensor | None:
    """A product of matrices has the rows of its first factor."""
    return None if varies(table, table.ndim - 1) else table[..., :1].expand(result.shape)


def columns(table: Tensor, result: Tensor) -> Tensor | None:
    """Places of a product's columns, by those of its second factor."""
    return None if varies(table, table.ndim - 2) else table[..., :1, :].expand(result.shape)


def _einsum(
    maps: SourceMaps, table: Tensor, result: Tensor, args: Sequence[Any], kwargs: Any
) -> Tensor | None:
    """A sum of products has the axes of its first factor that it does not sum over."""
    inputs, _, output = args[0].replace(" ", "").partition("->")
    letters = inputs.partition(",")[0]
    if not output or not letters.isalpha() or len(letters) != table.ndim:
        return None
    for axis, letter in enumerate(letters):
        if letter not in output:
            if varies(table, axis):
                return None
            table = table.narrow(axis, 0, 1)
    kept = [letter for letter in letters if letter in output]
    table = table.reshape([n for n, x in zip(table.shape, letters, strict=True) if x in output])
    order = [kept.index(letter) for letter in output if letter in kept]
    place = tuple(slice(None) if letter in kept else None for letter in output)
    return table.permute(order)[place].expand(result.shape)


def _reduced(
    maps: SourceMaps, table: Tensor, result: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """A mean or a sum over axes along which the places do not change."""
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or any(varies(table, dim % table.ndim) for dim in dims):
        return None
    return table.amax(list(dims), keepdim=table.ndim == result.ndim)


def _moved(
    function: Callable[..., Any],
    maps: SourceMaps,
    table: Tensor,
    result: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """What only moves values is done to the places as well."""
    return function(table, *args[1:], **kwargs)


def _item(table: Tensor, index: Any) -> Tensor:
    parts = index if isinstance(index, tuple) else (index,)
    return table[tuple(part.cpu() if isinstance(part, Tensor) else part for part in parts)]


def _padded(table: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    return functional.pad(table, pad, mode)


def _unfolded(table: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Both functions of this name: the tensor's own takes axis, size and step."""
    own = len(args) == 3 and all(isinstance(a, int) for a in args)
    if own or "dimension" in kwargs:
        return table.unfold(*args, **kwargs)
    return functional.unfold(table, *args, **kwargs)


MOVES: dict[str, Callable[..., Any]] = {
    name: getattr(Tensor, name)
    for name in (
        *("reshape", "flatten", "unflatten", "permute", "transpose", "t", "swapaxes", "swapdims"),
        *("movedim", "moveaxis", "squeeze", "unsqueeze", "expand", "repeat", "chunk", "split"),
        *("unbind", "tensor_split", "narrow", "select", "roll", "flip"),
    )
} | {
    "view": Tensor.reshape,
    "unsafe_view": Tensor.reshape,
    "unsafe_split": Tensor.split,
    "slice": torch.ops.aten.slice.Tensor,
    "split_with_sizes": torch.split_with_sizes,
    "getitem": _item,
    "pad": _padded,
    "constant_pad_nd": _padded,
    "unfold": _unfolded,
    "T": lambda table: table.permute(*range(table.ndim - 1, -1, -1)),
    "mT": lambda table: table.mT,
}
"""Functions that move values and change none."""

JOINS: dict[str, Callable[..., Any]] = {"cat": torch.cat, "stack": torch.stack}
"""Functions that put several tensors into one."""

MAPS = frozenset(
    f"{kind}{n}d"
    for kind in (
        *("conv", "conv_transpose", "max_pool", "avg_pool"),
        *("adaptive_avg_pool", "adaptive_max_pool"),
    )
    for n in (2, 3)
) | {"convolution", "fold", "max_pool2d_with_indices"}
"""Functions that make maps of the image, of whatever they get."""

PRODUCTS = frozenset({"matmul", "bmm"})

RULES: dict[str, Rule] = (
    {name: partial(_moved, function) for name, function in MOVES.items()}
    | dict.fromkeys(MAPS | {"interpolate", "pixel_shuffle", "pixel_unshuffle"}, _map)
    | dict.fromkeys(("linear", "lstm", "gru"), _kept_rows)
    | dict.fromkeys(("scaled_dot_product_attention", "multi_head_attention_forward"), _kept_rows)
    | dict.fromkeys(("mean", "sum", "amax", "amin", "argmax"), _reduced)
    | dict.fromkeys(PRODUCTS, _product)
    | {"einsum": _einsum}
)
"""What functions do to places, by the name of the function."""

LOST = frozenset(
    (
        *("sort", "argsort", "topk", "gather", "take_along_dim", "scatter", "index"),
        *("index_select", "rot90", "fliplr", "flipud"),
    )
)
"""Functions that put values where other values say; where that is, is not followed."""


def try_rule(
    name: str,
    maps: SourceMaps,
    table: Tensor,
    result: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Apply a function's rule to the places of its first tensor.

    Returns:
        The table of the result, or of each of several; None where the rule does not fit the call.
    """
    try:
        return RULES[name](maps, table, result, args, kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None  # a call in a way that the rule does not know: nothing is claimed of it
