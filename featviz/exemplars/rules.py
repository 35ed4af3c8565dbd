"""What each function does to the receptive fields of the tensors that it is given.

One table, by the name of the function (`hooks.naming.function_name`). torch's own modules are not
in it: their forward calls these functions. What is not in the table is not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

import featviz.exemplars.fields as fields
from featviz.exemplars.fields import NOWHERE
from featviz.exemplars.sights import FunctionCall, Seen, Sight
from featviz.records import Integers

Rule = Callable[[FunctionCall], Seen]


def sight_of(call: FunctionCall, sights: Sequence[Seen]) -> Seen:
    """What a call's result sees.

    Args:
        sights: of all tensors among the arguments.
    """
    if all(sight is Sight.CONSTANT for sight in sights):
        return Sight.CONSTANT
    if Sight.WHOLE in sights or (call.name in _ATTENTION and _is_of_one_image(call)):
        return Sight.WHOLE
    rule = _RULES.get(call.name)
    if rule is None or Sight.UNKNOWN in sights:
        return Sight.UNKNOWN
    return rule(call)


_ATTENTION = {"multi_head_attention_forward": (3, 1), "scaled_dot_product_attention": (4, 0)}
"""Functions that mix all tokens: how many axes their first argument has, and which of them counts
batches."""


def _is_of_one_image(call: FunctionCall) -> bool:
    """Whether attention sees all tokens of an image, and not windows of it one by one."""
    axes, batch = _ATTENTION[call.name]
    return call.input.dim() == axes and call.input.shape[batch] == 1


def _pointwise(call: FunctionCall) -> Seen:
    """Each position looks at its own; where tensors are added, at its own in each of them."""
    return fields.united(call.fields) or Sight.UNKNOWN


def _pair(value: Any) -> tuple[int, int]:
    """(rows, columns) of an argument that is one number for both, or two."""
    if isinstance(value, int):
        return value, value
    numbers = [int(number) for number in value]
    return numbers[0], numbers[-1]


def _is_of_a_map(call: FunctionCall) -> bool:
    return call.field.axes == (-2, -1) and len(call.fields) == 1


def _windows(call: FunctionCall, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Seen:
    """A convolution or a pooling; its padding is a number for each axis, or `same` or `valid`."""
    if not _is_of_a_map(call):
        return Sight.UNKNOWN
    sources = []
    sides = zip(call.output.shape[-2:], _pair(kernel), _pair(stride), _pair(dilation), strict=True)
    for axis, (count, size, step, apart) in enumerate(sides):
        before = _before(padding, axis, apart * (size - 1))
        sources.append(fields.window(count, size, step, before, apart))
    return call.on_map(*sources)


def _before(padding: Any, axis: int, span: int) -> int:
    """Padding in front of an axis, for a window that spans so many positions beside its first."""
    if isinstance(padding, str):
        return span // 2 if padding == "same" else 0
    return _pair(padding)[axis]


def _convolution(call: FunctionCall) -> Seen:
    kernel = call.argument(1, "weight").shape[-2:]
    stride, padding = call.argument(3, "stride", default=1), call.argument(4, "padding", default=0)
    return _windows(call, kernel, stride, padding, call.argument(5, "dilation", default=1))


def _transposed(call: FunctionCall) -> Seen:
    if not _is_of_a_map(call):
        return Sight.UNKNOWN
    options = [call.argument(1, "weight").shape[-2:], call.argument(3, "stride", default=1)]
    options += [call.argument(4, "padding", default=0), call.argument(7, "dilation", default=1)]
    sides = zip(call.output.shape[-2:], *map(_pair, options), strict=True)
    return call.on_map(*(fields.transposed(*side) for side in sides))


def _pooling(dilation_at: int | None) -> Rule:
    """A pooling with a kernel; `dilation_at` is where its dilation stands, if it has one."""

    def rule(call: FunctionCall) -> Seen:
        kernel = call.argument(1, "kernel_size")
        stride = call.argument(2, "stride") or kernel
        padding = call.argument(3, "padding", default=0)
        dilation = 1 if dilation_at is None else call.argument(dilation_at, "dilation", default=1)
        return _windows(call, kernel, stride, padding, dilation)

    return rule


def _adaptive(call: FunctionCall) -> Seen:
    if not _is_of_a_map(call):
        return Sight.UNKNOWN
    sides = zip(call.input.shape[-2:], call.output.shape[-2:], strict=True)
    return call.on_map(*(fields.adaptive(*side) for side in sides))


def _resized(call: FunctionCall) -> Seen:
    """Only by the sizes of input and output: a scale that is no whole number may round otherwise,
    and smoothing looks further."""
    scale = call.argument(2, "scale_factor")
    whole = scale is None or all(float(s).is_integer() for s in _as_tuple(scale))
    if not (_is_of_a_map(call) and whole) or call.argument(6, "antialias", default=False):
        return Sight.UNKNOWN
    mode = call.argument(3, "mode", default="nearest")
    corners = bool(call.argument(4, "align_corners", default=False))
    sides = zip(call.input.shape[-2:], call.output.shape[-2:], strict=True)
    rows, columns = (fields.resized(*side, mode, corners) for side in sides)
    return Sight.UNKNOWN if rows is None or columns is None else call.on_map(rows, columns)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _padded(call: FunctionCall) -> Seen:
    """Constants are seen by nobody; a border that mirrors or repeats shows what it shows."""
    amounts = [*call.argument(1, "pad")] + [0] * 4
    mode = call.argument(2, "mode", default="constant")
    if not _is_of_a_map(call) or any(amounts[4:]) or mode not in _BORDERS:
        return Sight.UNKNOWN
    sides = zip(
        call.input.shape[-2:], call.output.shape[-2:], (amounts[2], amounts[0]), strict=True
    )
    return call.on_map(*(_BORDERS[mode](np.arange(n) - start, size) for size, n, start in sides))


_BORDERS: Mapping[str, Callable[[Integers, int], Integers]] = {
    "constant": lambda at, size: np.where(at < 0, NOWHERE, at)[:, None],
    "replicate": lambda at, size: np.clip(at, 0, size - 1)[:, None],
    "circular": lambda at, size: (at % size)[:, None],
    "reflect": lambda at, size: (size - 1 - np.abs(size - 1 - np.abs(at)))[:, None],
}
"""Where a position of a padded axis looks; a negative one lies in front."""


def _shuffled(call: FunctionCall) -> Seen:
    """pixel_shuffle: blocks of channels become blocks of positions."""
    factor = call.argument(1, "upscale_factor")
    counts = call.output.shape[-2:]
    return call.on_map(*(np.arange(count)[:, None] // factor for count in counts))


def _unshuffled(call: FunctionCall) -> Seen:
    factor = call.argument(1, "downscale_factor")
    return _windows(call, factor, factor, 0, 1)


def _reduced(call: FunctionCall) -> Seen:
    """A mean, sum or extreme: over both axes of the map it sees all, over others its own."""
    given = call.argument(1, "dim", "axis")
    if isinstance(given, Tensor):  # the larger of two
        return _pointwise(call)
    if given is None:
        return Sight.WHOLE
    dims = {_from_end(dim, call.input) for dim in _as_tuple(given)}
    hit = dims & {*call.field.axes}
    if len(hit) == 2:
        return Sight.WHOLE
    keeps = call.output.dim() == call.input.dim()
    if hit or not keeps:
        return Sight.UNKNOWN
    return call.field


def _from_end(axis: int, tensor: Tensor) -> int:
    return axis if axis < 0 else axis - tensor.dim()


def _along(position: int, default: int | None = None) -> Rule:
    """A function along one axis, which leaves the map alone where that is another axis."""

    def rule(call: FunctionCall) -> Seen:
        axis = call.argument(position, "dim", "axis", default=default)
        if not isinstance(axis, int) or _from_end(axis, call.output) in call.field.axes:
            return Sight.UNKNOWN
        return _pointwise(call)

    return rule


def _layer_norm(call: FunctionCall) -> Seen:
    """Over the channels only, each position is by itself; over the map, it sees all."""
    axes = {-1 - n for n in range(len(_as_tuple(call.argument(1, "normalized_shape"))))}
    return Sight.WHOLE if axes & {*call.field.axes} else call.field


def _linear(call: FunctionCall) -> Seen:
    return Sight.UNKNOWN if -1 in call.field.axes else call.field


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
    return call.field.at((rows, columns))


def _reshaped(call: FunctionCall) -> Seen:
    """A map whose axes come last keeps them where only axes in front change."""
    same = call.input.shape[-2:] == call.output.shape[-2:]
    return call.field if same and _is_of_a_map(call) else Sight.UNKNOWN


def _taken(call: FunctionCall) -> Seen:
    """Slices: each axis of the map may be cut or thinned out; indices are not followed."""
    index = _as_tuple(call.argument(1, "key"))
    size = call.input.dim()
    if not all(part is Ellipsis or isinstance(part, slice) for part in index):
        return Sight.UNKNOWN
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (size - len(index) + 1), *index[at + 1 :])
    index += (slice(None),) * (size - len(index))
    lengths = (call.input.shape[axis] for axis in call.field.axes)
    cuts = [
        np.arange(n)[index[axis]][:, None] for axis, n in zip(call.field.axes, lengths, strict=True)
    ]
    return call.on_map(*cuts)


_POINTWISE = (
    *("abs", "add", "sub", "mul", "div", "neg", "pow", "exp", "log", "sqrt", "rsqrt", "square"),
    *("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where", "lerp", "addcmul"),
    *(
        "relu",
        "relu6",
        "leaky_relu",
        "prelu",
        "rrelu",
        "elu",
        "selu",
        "celu",
        "gelu",
        "silu",
        "mish",
    ),
    *("sigmoid", "logsigmoid", "tanh", "hardtanh", "hardsigmoid", "hardswish", "hardshrink"),
    *("softplus", "softsign", "softshrink", "tanhshrink", "threshold", "sin", "cos", "erf"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    *("batch_norm", "native_batch_norm_legit_no_training", "local_response_norm"),
    *("clone", "contiguous", "detach", "to", "type", "type_as", "float", "half", "double"),
    *("bfloat16", "copy", "requires_grad", "channel_shuffle", "native_channel_shuffle"),
)
"""Functions whose result at a position comes from that position alone, of one tensor or several."""

_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(("conv2d", "convolution"), _convolution),
    "conv_transpose2d": _transposed,
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices"), _pooling(4)),
    "avg_pool2d": _pooling(None),
    **dict.fromkeys(
        ("adaptive_avg_pool2d", "adaptive_max_pool2d", "adaptive_max_pool2d_with_indices"),
        _adaptive,
    ),
    **dict.fromkeys(("interpolate", "upsample"), _resized),
    "pad": _padded,
    "pixel_shuffle": _shuffled,
    "pixel_unshuffle": _unshuffled,
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min"), _reduced),
    **dict.fromkeys(("group_norm", "instance_norm"), lambda call: Sight.WHOLE),
    "layer_norm": _layer_norm,
    "linear": _linear,
    **dict.fromkeys(("cat", "softmax", "log_softmax"), _along(1, 0)),
    "glu": _along(1, -1),
    "chunk": _along(2, 0),
    **dict.fromkeys(("split", "split_with_sizes"), _along(2, 0)),
    "permute": _permuted,
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _reshaped),
    "getitem": _taken,
}
