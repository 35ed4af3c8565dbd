"""Receptive fields as tables, and what each function does to those of the tensors that it takes.

A table for each axis says which pixels of the input each row and each column of a map sees. It is
exact where a formula of size, stride and offset is not: at borders, under adaptive pooling, and
behind layers that enlarge a map. A field is a rectangle, so the two axes go their own ways; of
several branches it is the smallest rectangle around all.

The rules stand in one table, by the name of the function (`hooks.layers.function_name`). torch's
own modules are not in it: their forward calls these functions. What is not in it is not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import reduce
from typing import Any

import numpy as np
from torch import Tensor

from featviz.records import Integers

_NOWHERE = -1
"""Stands for a position that is none, as every negative one does: the padding."""
_FAR = 2**40
"""Beyond every pixel."""


@dataclass(frozen=True)
class Reach:
    """What each of n positions along an axis sees of the input, in pixels, both ends included; the
    first is beyond the last where a position sees only padding."""

    first: Integers
    last: Integers

    @classmethod
    def of_input(cls, size: int) -> Reach:
        """Each pixel sees itself."""
        return cls(np.arange(size), np.arange(size))

    def __len__(self) -> int:
        return len(self.first)

    def through(self, sources: Integers) -> Reach:
        """What m positions see that each look at some of these: [m, k], negative for none."""
        inside = (sources >= 0) & (sources < len(self))
        at = np.where(inside, sources, 0)
        first = np.where(inside, self.first[at], _FAR).min(1, initial=_FAR)
        return Reach(first, np.where(inside, self.last[at], -1).max(1, initial=-1))

    def joined(self, other: Reach) -> Reach:
        """What either sees; one position stands for as many as the other has."""
        return Reach(np.minimum(self.first, other.first), np.maximum(self.last, other.last))

    @property
    def size(self) -> int:
        """Pixels that the position with the largest view sees."""
        return int(max(0, (self.last - self.first).max(initial=-1) + 1))


@dataclass(frozen=True)
class ReceptiveField:
    """What the rows and columns of a tensor see."""

    rows: Reach
    columns: Reach
    axes: tuple[int, int] = (-2, -1)
    """The tensor's axes of rows and columns, from the end: (-2, -1) of [1, C, H, W]."""

    def through(self, rows: Integers, columns: Integers) -> ReceptiveField:
        """That of a layer whose positions look at these ones: each [m, k]."""
        return ReceptiveField(self.rows.through(rows), self.columns.through(columns), self.axes)

    def box(self, row: int, column: int) -> tuple[int, int, int, int] | None:
        """Left, top, right and bottom in pixels of the input, right and bottom excluded; None where
        the position sees only padding."""
        top, bottom = int(self.rows.first[row]), int(self.rows.last[row]) + 1
        left, right = int(self.columns.first[column]), int(self.columns.last[column]) + 1
        return (left, top, right, bottom) if left < right and top < bottom else None


class Sees(Enum):
    """What a tensor sees of the input, where that is no table."""

    ALL = "all of it, at every position"
    UNKNOWN = "nobody knows"
    NOTHING = "a parameter, or what is computed of parameters"


Seen = ReceptiveField | Sees


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function, and what the tensors that it takes see."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    fields: tuple[ReceptiveField, ...]
    """Of the tensors that see something of the input, in the order of the arguments."""
    output: Tensor

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by position or by one of its names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    @property
    def input(self) -> Tensor:
        """The first argument."""
        tensor: Tensor = self.argument(0, "input", "self", "query")
        return tensor

    @property
    def field(self) -> ReceptiveField:
        """That of the one tensor."""
        return self.fields[0]

    @property
    def is_of_a_map(self) -> bool:
        """True for one tensor [..., H, W]."""
        return len(self.fields) == 1 and self.field.axes == (-2, -1)


Rule = Callable[[FunctionCall], Seen]

_ATTENTION = {"multi_head_attention_forward": (3, 1), "scaled_dot_product_attention": (4, 0)}
"""Functions that mix all tokens: how many axes their first argument has, and which of them counts
batches. Of a batch of one they see all tokens of an image, and not windows of it one by one."""


def seen_by(call: FunctionCall, given: Sequence[Seen]) -> Seen:
    """What a call's result sees.

    Args:
        given: what all tensors among the arguments see.
    """
    if all(seen is Sees.NOTHING for seen in given):
        return Sees.NOTHING
    axes, batch = _ATTENTION.get(call.name, (0, 0))
    attends = axes > 0 and call.input.dim() == axes and call.input.shape[batch] == 1
    if Sees.ALL in given or attends:
        return Sees.ALL
    rule = _RULES.get(call.name)
    return Sees.UNKNOWN if rule is None or Sees.UNKNOWN in given else rule(call)


def _pointwise(call: FunctionCall) -> Seen:
    """Each position looks at its own; of tensors that are added or joined, in each of them."""
    fields = call.fields
    for lengths in ({len(f.rows) for f in fields}, {len(f.columns) for f in fields}):
        if len(lengths - {1}) > 1:
            return Sees.UNKNOWN
    if len({field.axes for field in fields}) > 1:
        return Sees.UNKNOWN
    rows = reduce(Reach.joined, [field.rows for field in fields])
    return ReceptiveField(
        rows, reduce(Reach.joined, [field.columns for field in fields]), call.field.axes
    )


# Functions that look at other positions of each axis


def _by_axis(call: FunctionCall, look: Callable[..., Integers], *options: Any) -> Seen:
    """What a map sees each of whose axes looks at `look(size, count, ...)` positions, [count, k].

    Args:
        options: for `look`, each one value for both axes, or two.
    """
    if not call.is_of_a_map:
        return Sees.UNKNOWN
    pairs = (one if isinstance(one, (tuple, list)) else (one,) for one in options)
    both = ((pair[0], pair[-1]) for pair in pairs)
    sides = zip(call.input.shape[-2:], call.output.shape[-2:], *both, strict=True)
    return call.field.through(*(look(*side) for side in sides))


def _window(
    size: int, count: int, kernel: int, stride: int, padding: int | str, dilation: int
) -> Integers:
    """A convolution or a pooling; its padding is a number, `same` or `valid`."""
    if isinstance(padding, str):
        padding = dilation * (kernel - 1) // 2 if padding == "same" else 0
    return np.arange(count)[:, None] * stride - padding + np.arange(kernel) * dilation


def _convolution(call: FunctionCall) -> Seen:
    kernel = tuple(call.argument(1, "weight").shape[-2:])
    stride, padding = call.argument(3, "stride", default=1), call.argument(4, "padding", default=0)
    dilation = call.argument(5, "dilation", default=1)
    return _by_axis(call, _window, kernel, stride, padding, dilation)


def _transposed(call: FunctionCall) -> Seen:
    def look(size: int, count: int, kernel: int, stride: int, before: int, by: int) -> Integers:
        scaled = np.arange(count)[:, None] + before - np.arange(kernel) * by
        return np.where(scaled % stride == 0, scaled // stride, _NOWHERE)

    kernel = tuple(call.argument(1, "weight").shape[-2:])
    stride, padding = call.argument(3, "stride", default=1), call.argument(4, "padding", default=0)
    return _by_axis(call, look, kernel, stride, padding, call.argument(7, "dilation", default=1))


def _pooling(dilation_at: int | None) -> Rule:
    """A pooling with a kernel; `dilation_at` is where its dilation stands, if it has one."""

    def rule(call: FunctionCall) -> Seen:
        kernel = call.argument(1, "kernel_size")
        stride = call.argument(2, "stride") or kernel
        padding = call.argument(3, "padding", default=0)
        dilation = 1 if dilation_at is None else call.argument(dilation_at, "dilation", default=1)
        return _by_axis(call, _window, kernel, stride, padding, dilation)

    return rule


def _adaptive(size: int, count: int) -> Integers:
    at = np.arange(count)
    starts, ends = at * size // count, -(-(at + 1) * size // count)
    sources = starts[:, None] + np.arange((ends - starts).max(initial=0))
    return np.where(sources < ends[:, None], sources, _NOWHERE)


_NEIGHBOURS = {"nearest": (0, 0), "nearest-exact": (0, 0), "bilinear": (0, 1), "bicubic": (-1, 2)}
"""How many positions before and behind its own a pixel of a resized map looks at."""


def _resized(call: FunctionCall) -> Seen:
    """Only by the sizes of input and output: a scale that is no whole number may round otherwise,
    and smoothing looks further."""
    scale, mode = call.argument(2, "scale_factor"), call.argument(3, "mode", default="nearest")
    whole = scale is None or all(float(s).is_integer() for s in _as_tuple(scale))
    if mode not in _NEIGHBOURS or not whole or call.argument(6, "antialias", default=False):
        return Sees.UNKNOWN
    corners = bool(call.argument(4, "align_corners", default=False))
    before, behind = _NEIGHBOURS[mode]

    def look(size: int, count: int) -> Integers:
        at = np.arange(count)
        if mode == "nearest":
            exact = at * (size / count)
        elif corners:
            exact = at * ((size - 1) / max(1, count - 1))
        else:
            exact = (at + 0.5) * (size / count) - (0 if mode == "nearest-exact" else 0.5)
        own = np.floor(exact + 1e-6).astype(np.int64)[:, None]
        between = exact[:, None] - own > 1e-6  # on a pixel, the others weigh nothing
        sources = own + between.astype(np.int64) * np.arange(before, behind + 1)
        return np.asarray(np.clip(sources, 0, size - 1))

    return _by_axis(call, look)


_BORDERS: Mapping[str, Callable[[Integers, int], Integers]] = {
    "constant": lambda at, size: np.where(at < 0, _NOWHERE, at),
    "replicate": lambda at, size: np.clip(at, 0, size - 1),
    "circular": lambda at, size: at % size,
    "reflect": lambda at, size: size - 1 - np.abs(size - 1 - np.abs(at)),
}
"""Where a position of a padded axis looks; a negative one lies in front. Constants are seen by
nobody; a border that mirrors or repeats shows what it shows."""


def _padded(call: FunctionCall) -> Seen:
    amounts = [*call.argument(1, "pad")] + [0] * 4
    border = _BORDERS.get(call.argument(2, "mode", default="constant"))
    if border is None or any(amounts[4:]):
        return Sees.UNKNOWN

    def look(size: int, count: int, before: int) -> Integers:
        return border(np.arange(count) - before, size)[:, None]

    return _by_axis(call, look, (amounts[2], amounts[0]))


def _shuffled(call: FunctionCall) -> Seen:
    """pixel_shuffle: blocks of channels become blocks of positions."""
    factor = call.argument(1, "upscale_factor")
    return _by_axis(call, lambda size, count: np.arange(count)[:, None] // factor)


def _unshuffled(call: FunctionCall) -> Seen:
    factor = call.argument(1, "downscale_factor")
    return _by_axis(call, _window, factor, factor, 0, 1)


# Functions that reduce or move axes


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _from_end(axis: int, tensor: Tensor) -> int:
    return axis if axis < 0 else axis - tensor.dim()


def _reduced(call: FunctionCall) -> Seen:
    """A mean, sum or extreme: over both axes of the map it sees all, over others its own."""
    given = call.argument(1, "dim", "axis")
    if isinstance(given, Tensor):  # the larger of two
        return _pointwise(call)
    axes = {*call.field.axes}
    hit = axes if given is None else axes & {_from_end(d, call.input) for d in _as_tuple(given)}
    if len(hit) == 2:
        return Sees.ALL
    return Sees.UNKNOWN if hit or call.output.dim() != call.input.dim() else call.field


def _along(position: int, default: int | None = None) -> Rule:
    """A function along one axis, which leaves the map alone where that is another axis."""

    def rule(call: FunctionCall) -> Seen:
        axis = call.argument(position, "dim", "axis", default=default)
        if not isinstance(axis, int) or _from_end(axis, call.output) in call.field.axes:
            return Sees.UNKNOWN
        return _pointwise(call)

    return rule


def _layer_norm(call: FunctionCall) -> Seen:
    """Over the channels only, each position is by itself; over the map, it sees all."""
    axes = {-1 - n for n in range(len(_as_tuple(call.argument(1, "normalized_shape"))))}
    return Sees.ALL if axes & {*call.field.axes} else call.field


def _permuted(call: FunctionCall) -> Seen:
    order = call.args[1:] or [call.argument(1, "dims")]
    order = order[0] if not isinstance(order[0], int) else order
    return _moved(call, [int(axis) % call.input.dim() for axis in order])


def _transpose(call: FunctionCall) -> Seen:
    size = call.input.dim()
    order = [*range(size)]
    one, other = call.argument(1, "dim0") % size, call.argument(2, "dim1") % size
    order[one], order[other] = order[other], order[one]
    return _moved(call, order)


def _moved(call: FunctionCall, order: Sequence[int]) -> Seen:
    size = len(order)
    rows, columns = (order.index(axis + size) - size for axis in call.field.axes)
    return replace(call.field, axes=(rows, columns))


def _reshaped(call: FunctionCall) -> Seen:
    """A map whose axes come last keeps them where only axes in front change."""
    same = call.input.shape[-2:] == call.output.shape[-2:]
    return call.field if same and call.is_of_a_map else Sees.UNKNOWN


def _taken(call: FunctionCall) -> Seen:
    """Slices: each axis of the map may be cut or thinned out; indices are not followed."""
    index, size = _as_tuple(call.argument(1, "key")), call.input.dim()
    if not all(part is Ellipsis or isinstance(part, slice) for part in index):
        return Sees.UNKNOWN
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (size - len(index) + 1), *index[at + 1 :])
    index += (slice(None),) * (size - len(index))
    rows, columns = (np.arange(call.input.shape[a])[index[a]][:, None] for a in call.field.axes)
    return call.field.through(rows, columns)


_POINTWISE = """
    abs add sub mul div neg pow exp log sqrt rsqrt square clamp clamp_min clamp_max maximum minimum
    where lerp addcmul relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish sigmoid
    logsigmoid tanh hardtanh hardsigmoid hardswish hardshrink softplus softsign softshrink
    tanhshrink threshold sin cos erf dropout dropout1d dropout2d dropout3d alpha_dropout
    feature_alpha_dropout batch_norm native_batch_norm_legit_no_training local_response_norm clone
    contiguous detach to type type_as float half double bfloat16 copy requires_grad channel_shuffle
    native_channel_shuffle
"""
"""Functions whose result at a position comes from that position alone, of one tensor or several."""

_KNOWN: tuple[tuple[str, Rule], ...] = (
    (_POINTWISE, _pointwise),
    ("conv2d convolution", _convolution),
    ("conv_transpose2d", _transposed),
    ("max_pool2d max_pool2d_with_indices", _pooling(4)),
    ("avg_pool2d", _pooling(None)),
    (
        "adaptive_avg_pool2d adaptive_max_pool2d adaptive_max_pool2d_with_indices",
        lambda call: _by_axis(call, _adaptive),
    ),
    ("interpolate upsample", _resized),
    ("pad", _padded),
    ("pixel_shuffle", _shuffled),
    ("pixel_unshuffle", _unshuffled),
    ("mean sum amax amin max min", _reduced),
    ("group_norm instance_norm", lambda call: Sees.ALL),
    ("layer_norm", _layer_norm),
    ("linear", lambda call: Sees.UNKNOWN if -1 in call.field.axes else call.field),
    ("cat softmax log_softmax", _along(1, 0)),
    ("glu", _along(1, -1)),
    ("chunk split split_with_sizes", _along(2, 0)),
    ("permute", _permuted),
    ("transpose swapaxes", _transpose),
    ("view reshape flatten unflatten", _reshaped),
    ("getitem", _taken),
)
_RULES = {name: rule for names, rule in _KNOWN for name in names.split()}
