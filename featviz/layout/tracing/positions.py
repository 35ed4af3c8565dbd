"""Places: which value of a tensor lies where in the image, followed through functions.

A tensor has a table of places beside it: float64 of its shape, 0 for a value that belongs to no
place of the image, else the number of a place. What moves values moves their places in the same
way; what mixes them keeps the places along the axes that stay apart. What is not understood gives
results without places.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from featviz.records import Trace


@dataclass
class SourceMaps:
    """The maps that a forward pass has made so far: the number of the first place, time steps,
    height and width of each. Places are numbered row by row, time step by time step."""

    _maps: list[tuple[int, int, int, int]] = field(default_factory=list)
    _next: int = 1

    def add(self, sides: Sequence[int]) -> Tensor:
        """Begin a map of these sides, [height, width] or [time, height, width]; its places."""
        first, self._next = self._next, self._next + prod(sides)
        time, height, width = [*[1] * (3 - len(sides)), *sides]
        self._maps.append((first, time, height, width))
        return torch.arange(first, self._next, dtype=torch.float64).reshape(*sides)

    def table(self, shape: Sequence[int], channel_axis: int = 1) -> Tensor:
        """Places of a new map for a tensor [N, C, H, W] or [N, C, T, H, W]; [N, T, C, H, W] where
        that says the axis of channels."""
        new = self.add([*shape[1:channel_axis], *shape[channel_axis + 1 :]])
        return new.unsqueeze(channel_axis - 1).expand(*shape)

    def only(self, numbers: Tensor) -> tuple[int, int, int, int] | None:
        """The one map to which all numbers but 0 belong; None where there are none or several."""
        numbers = numbers[numbers > 0]
        if numbers.numel() == 0:
            return None
        at = self._maps[bisect_right(self._maps, int(numbers.min()), key=lambda m: m[0]) - 1]
        return at if int(numbers.max()) < at[0] + prod(at[1:]) else None

    def coarser(self, table: Tensor) -> Tensor:
        """Places [..., 1] of patches that a layer merges, of places [..., P]: those of a new map
        whose rows and columns are the patches' means; ValueError where they make none."""
        source, known = self.only(table.flatten()), (table > 0).double()
        if source is None or source[1] > 1:
            raise ValueError("no patches of one image")
        places, count = table - source[0], known.sum(-1).clamp(min=1)
        rows, columns = places // source[3], places % source[3]
        mean = [((side * known).sum(-1) / count).mul(1024).round() for side in (rows, columns)]
        (high, row), (wide, column) = map(_ranked, mean)
        cells = row * len(wide) + column
        if len(high) * len(wide) != cells.numel() or len(_ranked(cells)[0]) != cells.numel():
            raise ValueError("no rows and columns of patches")
        return self.add((len(high), len(wide))).flatten()[cells][..., None]

    def trace(self, table: Tensor) -> Trace:
        """Sum up a table whose values, or rows of values that lie near to each other (patches that
        nobody has mixed yet), lie on a map or evenly spread over it."""
        free = tuple(axis for axis in range(table.ndim) if varies(table, axis))
        if not free:
            return Trace()
        first = tuple(slice(None) if i in free else 0 for i in range(table.ndim))
        found = self._spread(table[first].flatten(), free)
        if found.grid is None and len(free) == 2 and table.ndim == 3:
            for axis in free:
                with suppress(ValueError):
                    coarser = self.coarser(table.movedim(axis, 0).flatten(1))
                    return self._spread(coarser.flatten(), (axis,))
            return Trace()
        return found

    def _spread(self, numbers: Tensor, axes: tuple[int, ...]) -> Trace:
        """Places that are all of a map's, or every n-th row and column of it, each once."""
        source = self.only(numbers)
        if source is None:
            return Trace()
        known, (first, time, height, width) = numbers > 0, source
        places = (numbers[known] - first).long()
        if len(places) < time * height * width and time == 1:
            (rows, row), (columns, column) = _ranked(places // width), _ranked(places % width)
            if not (_is_even(rows, height) and _is_even(columns, width)):
                return Trace()
            height, width = len(rows), len(columns)
            places = row * width + column
        if len(places) != time * height * width or len(_ranked(places)[0]) != len(places):
            return Trace()
        everywhere = torch.full(numbers.shape, -1, dtype=torch.long)
        everywhere[known] = places
        return Trace(grid=(time, height, width), axes=axes, positions=everywhere.numpy())


_ranked: Callable[[Tensor], tuple[Tensor, Tensor]] = partial(torch.unique, return_inverse=True)
"""The distinct values, the smallest first, and the place of each value among them."""


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


# What functions do to places


@dataclass(frozen=True)
class FollowedCall:
    """A function that has returned."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    given: Sequence[Tensor]
    """The tensors among its arguments."""
    results: Sequence[Tensor]
    result: Any
    """The first of them; None where there is none."""

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def joined(self, tables: Sequence[Tensor | None], nothing: Tensor) -> Tensor:
        """The tables of tensors that the function joins, `nothing` where one has none."""
        pairs = zip(tables, self.given, strict=True)
        known = [nothing.expand(one.shape) if table is None else table for table, one in pairs]
        made: Tensor = self.on(JOINS[self.name], known)
        return made

    def on(self, function: Callable[..., Any], table: Any) -> Any:
        """The result of a function that takes a table in the place of the first argument."""
        named = () if self.args else ("input", "self", "tensors")
        kwargs = {name: value for name, value in self.kwargs.items() if name not in named}
        return function(table, *self.args[1:], **kwargs)


Rule = Callable[[SourceMaps, Tensor, FollowedCall], Any]
"""Places of the result, or of each of several, from the maps so far and the places of the call's
first tensor; None where nothing is known."""


def _kept_rows(maps: SourceMaps, table: Tensor, call: FollowedCall) -> Tensor:
    """What mixes the last axis (a linear layer, an attention's queries) keeps the others."""
    last, shape = table.ndim - 1, call.result.shape
    if not varies(table, last):
        return table[..., :1].expand(shape)
    if table.shape == shape and not any(varies(table, i) for i in range(last)):
        return table  # the tokens themselves are mixed, and each is given back
    return maps.coarser(table).expand(shape)


def _map(maps: SourceMaps, table: Tensor, call: FollowedCall) -> Tensor | None:
    """A convolution or a pooling keeps the places, or makes a map of another resolution."""
    shape = call.result.shape
    if table.ndim not in (4, 5):
        return None
    if table.shape[2:] == shape[2:] and not varies(table, 1):
        return table[:, :1].expand(shape)
    if not (varies(table, table.ndim - 1) and varies(table, table.ndim - 2)):
        return None
    if not varies(table, 0):  # one image, or heads of it
        return maps.table(shape)
    source = maps.only(table)
    if source is not None and source[1] == len(table):
        frames = (table.movedim(0, -1) - source[0]) // (source[2] * source[3])
        if torch.equal(frames, torch.arange(len(table)).expand_as(frames)):
            return maps.table([1, *shape], 2)[0]
    # pieces of a map, each of which became smaller by a whole factor
    (count, _, height, width), (high, wide) = table.shape, shape[2:]
    if height % high or width % wide or varies(table, 1):
        return None
    blocks = table[:, :1].reshape(count, 1, high, height // high, wide, width // wide)
    return maps.coarser(blocks.transpose(3, 4).flatten(4))[..., 0].expand(shape)


def still(table: Tensor, *axes: int) -> Tensor:
    """The places along the other axes; ValueError where they change along these."""
    for axis in axes:
        if varies(table, axis):
            raise ValueError("places are mixed")
        table = table.narrow(axis, 0, 1)
    return table


def einsum_factors(
    call: FollowedCall, tables: Sequence[Tensor | None], mixed: Callable[..., Tensor]
) -> list[Tensor]:
    """The tables of the factors of torch.einsum, `mixed` along the axes that are summed over; an
    axis of the output that a factor lacks has one value."""
    inputs, _, output = call.args[0].replace(" ", "").partition("->")
    factors = []
    for table, letters in zip(tables, inputs.split(","), strict=True):
        if table is not None:
            table = mixed(table, *[axis for axis, x in enumerate(letters) if x not in output])
            sides = zip(table.shape, letters, strict=True)
            table = table.reshape([n for n, letter in sides if letter in output])
            kept = [letter for letter in letters if letter in output]
            table = table.permute([kept.index(letter) for letter in output if letter in kept])
            factors.append(table[tuple(slice(None) if x in kept else None for x in output)])
    return factors


def _reduced(maps: SourceMaps, table: Tensor, call: FollowedCall) -> Tensor | None:
    """A mean or a sum over axes along which the places do not change, or one over patches."""
    dims = call.argument(1, "dim")
    if isinstance(dims, Tensor):  # the larger of two
        return table if table.shape == call.result.shape else None
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        return None
    keep = table.ndim == call.result.ndim
    if any(varies(table, dim) for dim in dims):
        for axis in (axis for axis in range(table.ndim) if not varies(table, axis)):
            table = table.narrow(axis, 0, 1)
        (dim,) = dims  # ValueError where there are several
        coarser = maps.coarser(table.movedim(dim, -1)).movedim(-1, dim)
        return (coarser if keep else coarser.squeeze(dim)).expand(call.result.shape)
    return table.amax(list(dims), keepdim=keep)


def _item(table: Tensor, index: Any) -> Tensor:
    parts = index if isinstance(index, tuple) else (index,)
    return table[tuple(part.cpu() if isinstance(part, Tensor) else part for part in parts)]


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
    **dict.fromkeys(
        ("pad", "constant_pad_nd"),
        lambda table, pad, mode="constant", value=None: functional.pad(table, pad, mode),
    ),
    "unfold": _unfolded,
    "T": lambda table: table.permute(*range(table.ndim - 1, -1, -1)),
    "mT": lambda table: table.mT,
}
"""Functions that move values and change none."""

JOINS: dict[str, Callable[..., Any]] = {"cat": torch.cat, "stack": torch.stack}

_POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
MAPS = {"convolution", "fold", "max_pool2d_with_indices"}
MAPS |= {f"{kind}{n}d" for kind in ("conv", "conv_transpose", *_POOLS) for n in (2, 3)}
"""Functions that make maps of the image, of whatever they get."""

PRODUCTS = frozenset({"matmul", "bmm", "mm"})
ATTENDING = PRODUCTS | {"scaled_dot_product_attention"}
"""Functions of queries and of what they attend to."""
MULTI_HEAD = "multi_head_attention_forward"
"""The function whose second result is an attention's weights."""

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(MAPS | {"interpolate", "pixel_shuffle", "pixel_unshuffle"}, _map),
    **dict.fromkeys(("linear", "lstm", "gru"), _kept_rows),
    **dict.fromkeys(("scaled_dot_product_attention", MULTI_HEAD), _kept_rows),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "argmax", "max", "min"), _reduced),
    # a product of matrices has the rows of its first factor
    **dict.fromkeys(PRODUCTS, lambda maps, table, call: still(table, -1).expand(call.result.shape)),
    "einsum": lambda maps, table, call: einsum_factors(
        call, [table, *[None] * (len(call.given) - 1)], still
    )[0].expand(call.result.shape),
}
"""What functions that do not only move values do to places, by the name of the function."""

LOST = frozenset(
    (
        *("sort", "argsort", "topk", "gather", "take_along_dim", "scatter", "index"),
        *("index_select", "rot90", "fliplr", "flipud"),
    )
)
"""Functions that put values where other values say; where that is, is not followed."""
