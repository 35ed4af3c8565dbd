"""What each value of a tensor sees of the input, from the functions of a forward pass.

A value sees a box of pixels. Its four sides travel in four tables of the tensor's shape, written so
that the box around two boxes is a minimum: the first row and column, and the last ones negated,
each less `_FAR`; 0 stands for a value that sees no pixel (padding, parameters). What moves values
does the same to the tables, and what mixes values takes the minimum of all that it mixes. What is
in no table here is not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from featviz.layout.tracing.positions import (
    JOINS,
    MAPS,
    MOVES,
    FollowedCall,
    einsum_factors,
    varies,
)

_FAR = 2.0**20
"""Beyond every pixel; float32 counts so far."""

Views = tuple[Tensor, ...]
"""Tables of the first rows, first columns, last rows and last columns, or no table for a tensor
that is made of parameters and constants alone."""


def of_image(shape: Sequence[int]) -> Views:
    """Each pixel of [..., H, W] sees itself."""
    rows = torch.arange(shape[-2], dtype=torch.float32)[:, None]
    columns = torch.arange(shape[-1], dtype=torch.float32)
    sides = (rows, columns, -rows, -columns)
    return tuple((side - _FAR).expand(*shape) for side in sides)


def to_box(sides: Sequence[float]) -> tuple[int, int, int, int] | None:
    """Left, top, right and bottom, right and bottom excluded; None where no pixel is seen."""
    if min(sides) == 0:
        return None
    top, left, bottom, right = (side + _FAR for side in sides)
    return int(left), int(top), 1 - int(right), 1 - int(bottom)


def result_views(call: FollowedCall, given: Sequence[Views | None]) -> list[Views | None]:
    """What each result of a call sees, by what the tensors `given` to it see; None where nobody
    knows."""
    unknown: list[Views | None] = [None] * len(call.results)
    if call.name in _CONSTANTS or not any(views is None or views for views in given):
        return [()] * len(call.results)
    if None in given:
        return unknown
    sides: Sequence[Sequence[Tensor]]
    try:
        if call.name in _WINDOWED and given[0]:
            sides = [[table] * len(call.results) for table in _windowed(call, given[0])]
        else:
            tables = ([views[i] if views else None for views in given] for i in range(4))
            sides = [_tables(call, each) for each in tables]
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError):
        return unknown  # its rule does not know the call in this form
    for at, (result, views) in enumerate(zip(call.results, zip(*sides, strict=True), strict=False)):
        if all(table.shape == result.shape for table in views):
            unknown[at] = views
    return unknown


def _tables(call: FollowedCall, tables: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """One side of what each result sees, from the same side of what the arguments see."""
    known, shape = [table for table in tables if table is not None], call.result.shape
    if call.name in JOINS:
        return [_slim(call.joined(tables, torch.zeros(())))]
    if call.name in _MIXERS:
        return [_union(*_MIXERS[call.name](call, tables)).expand(shape)]
    if call.name in _POINTWISE or (call.name in ("max", "min") and len(call.given) == 2):
        return [_union(*known).expand(shape)]
    (table,) = known  # of a function of one tensor; others are parameters
    if table is not tables[0]:
        raise ValueError("its first argument sees nothing")
    if call.name in _MOVES:
        moved = call.on(_MOVES[call.name], table)
        return [_slim(one) for one in ([moved] if isinstance(moved, Tensor) else moved)]
    return [_RULES[call.name](call, table).expand(shape)] * len(call.results)


def _union(*tables: Tensor) -> Tensor:
    """The boxes around several, whose shapes are broadcast; what is expanded stays so."""
    once = ([slice(None) if n else slice(1) for n in table.stride()] for table in tables)
    slim = [table[tuple(part)] for table, part in zip(tables, once, strict=True)]
    shape = torch.broadcast_tensors(*tables)[0].shape  # type: ignore[no-untyped-call]
    return reduce(torch.minimum, slim).expand(shape)


def _slim(table: Tensor) -> Tensor:
    """The same table, expanded along axes where nothing changes: channels cost no time then."""
    if 0 not in table.stride():
        for axis in range(table.ndim):
            if not varies(table, axis):
                table = table.narrow(axis, 0, 1).expand(table.shape)
    return table


def _mixed(table: Tensor, *axes: int) -> Tensor:
    """The boxes around all values along some axes, each of which has one value then."""
    for axis in axes:
        still = table.stride(axis) == 0 and table.shape[axis]
        table = table.narrow(axis, 0, 1) if still else table.amin(axis, keepdim=True)
    return table


# Functions that mix several tensors


def _attended(call: FollowedCall, tables: Sequence[Tensor | None]) -> list[Tensor]:
    """Each query sees all keys and values; tokens lie along axis -2, or 0 where axis 1 counts
    images (the function of nn.MultiheadAttention)."""
    token_axis = 0 if call.name == "multi_head_attention_forward" else -2
    query, *others = tables[:3]
    mixed = [_mixed(table, token_axis, -1) for table in others if table is not None]
    return mixed if query is None else [_mixed(query, -1), *mixed]


_MIXERS: Mapping[str, Callable[[FollowedCall, Sequence[Tensor | None]], list[Tensor]]] = {
    **dict.fromkeys(("scaled_dot_product_attention", "multi_head_attention_forward"), _attended),
    **dict.fromkeys(  # rows of the first matrix, columns of the second
        ("matmul", "bmm", "mm"),
        lambda call, tables: [
            _mixed(t, axis) for t, axis in zip(tables, (-1, -2), strict=True) if t is not None
        ],
    ),
    "einsum": lambda call, tables: einsum_factors(call, tables, _mixed),
}

# Functions of one tensor


def _windowed(call: FollowedCall, tables: Views) -> list[Tensor]:
    """Convolutions, poolings and resizing: along each axis, the function itself says of each
    position of the result which others it takes, from a map for each that is 1 there alone."""
    if "conv" in call.name:
        tables = tuple(_mixed(table, 1) for table in tables)
    for axis in range(2, call.result.ndim):
        size = tables[0].shape[axis]
        taken = _taken(call, axis, size)[:, 0].T.abs() > 1e-6  # [positions of the result, size]
        order = taken.int().argsort(1, descending=True)[:, : int(taken.sum(1).max())]
        at = torch.where(taken.gather(1, order), order, size)  # behind the last is nothing
        behind = [*[0, 0] * (call.result.ndim - 1 - axis), 0, 1]
        picked = (functional.pad(t, behind).index_select(axis, at.flatten()) for t in tables)
        tables = tuple(t.unflatten(axis, at.shape).amin(axis + 1) for t in picked)  # type: ignore[no-untyped-call]
    return [table.expand(call.result.shape) for table in tables]


def _taken(call: FollowedCall, axis: int, size: int) -> Tensor:
    """What a function makes of the maps [size, 1, size] along an axis: [size, 1, positions]."""

    def one(place: int, name: str, default: Any = None) -> Any:
        value = call.argument(place, name, default)
        return value[(axis - 2) % len(value)] if isinstance(value, (tuple, list)) else value

    unit, kind = torch.eye(size)[:, None], call.name.rstrip("d123")
    if kind == "interpolate":
        sides = [size if other == axis else 1 for other in range(2, call.result.ndim)]
        resized: Tensor = call.on(functional.interpolate, unit.reshape(size, 1, *sides))
        moved = resized.transpose(2, axis)
        return moved.reshape(*moved.shape[:3], -1)[..., 0]
    if kind.startswith("adaptive"):
        return functional.adaptive_avg_pool1d(unit, one(1, "output_size") or size)
    if "conv" in kind:
        kernel = torch.ones(1, 1, call.argument(1, "weight").shape[axis])
        stride, padding = one(3, "stride", 1), one(4, "padding", 0)
        if kind == "conv_transpose":
            further = one(5, "output_padding", 0), 1, one(7, "dilation", 1)
            return functional.conv_transpose1d(unit, kernel, None, stride, padding, *further)
        return functional.conv1d(unit, kernel, None, stride, padding, one(5, "dilation", 1))
    kernel, padding = one(1, "kernel_size"), one(3, "padding", 0)
    window = (kernel, one(2, "stride", kernel) or kernel, padding)
    if kind == "avg_pool":
        return functional.avg_pool1d(unit, *window, one(4, "ceil_mode", False))
    return functional.max_pool1d(unit, *window, one(4, "dilation", 1), one(5, "ceil_mode", False))


def _reduced(call: FollowedCall, table: Tensor) -> Tensor:
    dims = call.argument(1, "dim")
    dims = range(table.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    least = _mixed(table, *dims)
    return least if call.result.ndim == table.ndim else least.squeeze(tuple(dims))


_WINDOWED = MAPS - {"fold"} | {"conv1d", "conv_transpose1d", "interpolate"}
_RULES: Mapping[str, Callable[[FollowedCall, Tensor], Tensor]] = {
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "var", "std", "norm"), _reduced),
    **dict.fromkeys(
        ("softmax", "log_softmax"), lambda call, t: _mixed(t, call.argument(1, "dim", -1))
    ),
    **dict.fromkeys(
        ("layer_norm", "rms_norm"),
        lambda call, t: _mixed(t, *range(-len(call.argument(1, "normalized_shape")), 0)),
    ),
    **dict.fromkeys(("group_norm", "instance_norm"), lambda call, t: _mixed(t, *range(1, t.ndim))),
    "normalize": lambda call, t: _mixed(t, call.argument(2, "dim", 1)),
    "linear": lambda call, t: _mixed(t, -1),
    "glu": lambda call, t: _union(*t.chunk(2, call.argument(1, "dim", -1))),
}
"""Functions of one tensor that mix values along some axes."""

_MOVES: Mapping[str, Callable[..., Any]] = MOVES | {
    "pixel_shuffle": functional.pixel_shuffle,
    "pixel_unshuffle": functional.pixel_unshuffle,
    "channel_shuffle": functional.channel_shuffle,
    "native_channel_shuffle": functional.channel_shuffle,
}

_POINTWISE_NAMES = """
    abs add sub mul div neg pow exp log sqrt rsqrt square clamp clamp_min clamp_max maximum minimum
    where lerp addcmul relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish sigmoid
    logsigmoid tanh hardtanh hardsigmoid hardswish hardshrink softplus softsign softshrink
    tanhshrink threshold sin cos erf dropout dropout1d dropout2d dropout3d alpha_dropout
    feature_alpha_dropout batch_norm native_batch_norm_legit_no_training local_response_norm clone
    contiguous detach to type type_as float half double bfloat16 copy requires_grad masked_fill
"""
_POINTWISE = frozenset(_POINTWISE_NAMES.split())
"""Functions whose result at a position comes from that position alone, of one tensor or several."""

_CONSTANTS = frozenset(
    name for kind in ("zeros", "ones", "full", "empty") for name in (f"new_{kind}", f"{kind}_like")
)
"""Functions that take a tensor for its shape or type alone."""
