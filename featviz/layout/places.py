"""Places: which place of which map each value of a tensor belongs to, carried through functions.

A tensor has a table of places beside it (`source_maps`). What only moves values moves their places
in the same way; what mixes them keeps the places along the axes that stay apart. Where a function
is not understood its results have no places, so nothing is claimed of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from featviz.layout.source_maps import SourceMaps, varies

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
        coarser = maps.coarser(table)
        return None if coarser is None else coarser.expand(result.shape)
    return table[..., :1].expand(result.shape)


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
    coarser = maps.coarser(blocks.transpose(3, 4).flatten(4))
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

PRODUCTS = frozenset({"matmul", "bmm", "mm"})

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
