"""What is known of torch functions: where in the image their results lie, which pixels
the results see, and whether they are the weights of an attention. Each function is one
entry of `FUNCTIONS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from featviz.layout.tracing import fields, positions
from featviz.layout.tracing.calls import FollowedCall


@dataclass(frozen=True)
class FollowedFunction:
    """What is known of one function. A function that is not in FUNCTIONS has the defaults."""

    position_rule: positions.PositionRule = positions.keep_positions
    field_rule: fields.FieldRule | None = None
    """None if it is unknown which pixels the results see."""
    weights: Literal["kept", "lost", "softmax", "second"] = "kept"
    """What the function does to the weights of an attention. `kept`: if its first tensor
    is weights, the result is, too. `lost`: the result never is. `softmax`: the function
    makes weights. `second`: the function is a whole attention, and its second result is
    the weights."""

    def are_weights(
        self, call: FollowedCall, is_weights: bool, in_attention: bool
    ) -> list[bool]:
        """Tell for each result of a call whether it is the weights of an attention.

        Args:
            is_weights: whether the call's first tensor is such weights.
            in_attention: whether the call is made inside an attention module.
        """
        if self.weights == "second":
            return [index == 1 for index in range(len(call.results))]
        if self.weights == "softmax":
            # Weights come from a softmax over the keys, which are the last axis.
            axis = call.argument(1, "dim")
            return [
                in_attention and axis in (-1, result.ndim - 1)
                for result in call.results
            ]
        if not is_weights or self.weights == "lost":
            return [False] * len(call.results)
        # a result with another number of values is not these weights any more
        count = call.tensors[0].numel()
        return [result.numel() == count for result in call.results]


def _move(function: Callable[..., Any]) -> FollowedFunction:
    """The entry of a function that moves values: it is applied to the tables, too."""
    return FollowedFunction(
        positions.move_positions(function), fields.move_fields(function)
    )


def _join(function: Callable[..., Any]) -> FollowedFunction:
    """The entry of a function that joins tensors: it is applied to their tables, too."""
    return FollowedFunction(
        positions.join_positions(function), fields.join_fields(function)
    )


def _each(names: str, function: FollowedFunction) -> dict[str, FollowedFunction]:
    """The same entry for several names, which are separated by spaces."""
    return dict.fromkeys(names.split(), function)


def _item(table: Tensor, index: Any) -> Tensor:
    """`table[index]`, with an index of any kind that a tensor takes."""
    # tables are on the CPU, the model's indices may be on another device
    if isinstance(index, Tensor):
        index = index.cpu()
    elif isinstance(index, tuple):
        index = tuple(x.cpu() if isinstance(x, Tensor) else x for x in index)
    return table[index]


def _pad(table: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    """Pad a table with 0, whatever `value` says: padding lies nowhere in the image, and
    sees no pixel."""
    return functional.pad(table, pad, mode)


def _unfold(table: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Two functions of torch have this name: the method of a tensor, which takes axis,
    size and step, and `functional.unfold`. Call the one that the arguments fit."""
    is_method = len(args) == 3 and all(isinstance(number, int) for number in args)
    if is_method or "dimension" in kwargs:
        return table.unfold(*args, **kwargs)
    return functional.unfold(table, *args, **kwargs)


_MOVING = """
    reshape flatten unflatten permute transpose t swapaxes swapdims movedim moveaxis squeeze
    unsqueeze expand repeat chunk split unbind tensor_split narrow select roll flip
"""
_POINTWISE = """
    abs add sub mul div neg pow exp log sqrt rsqrt square clamp clamp_min clamp_max maximum minimum
    where lerp addcmul relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish sigmoid
    logsigmoid tanh hardtanh hardsigmoid hardswish hardshrink softplus softsign softshrink
    tanhshrink threshold sin cos erf dropout dropout1d dropout2d dropout3d alpha_dropout
    feature_alpha_dropout batch_norm native_batch_norm_legit_no_training local_response_norm clone
    contiguous detach to type type_as float half double bfloat16 copy requires_grad masked_fill
"""
_CONVOLVING = """
    convolution conv2d conv3d conv_transpose2d conv_transpose3d max_pool2d_with_indices
    max_pool2d max_pool3d avg_pool2d avg_pool3d
    adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool2d adaptive_avg_pool3d
"""
_CONSTANT = """
    new_zeros zeros_like new_ones ones_like new_full full_like new_empty empty_like
"""
_LOSING = """
    sort argsort topk gather take_along_dim scatter index index_select rot90 fliplr flipud
"""

FUNCTIONS: dict[str, FollowedFunction] = {
    # what moves values
    **{name: _move(getattr(Tensor, name)) for name in _MOVING.split()},
    **_each("view unsafe_view", _move(Tensor.reshape)),
    "unsafe_split": _move(Tensor.split),
    "slice": _move(torch.ops.aten.slice.Tensor),
    "split_with_sizes": _move(torch.split_with_sizes),
    "getitem": _move(_item),
    **_each("pad constant_pad_nd", _move(_pad)),
    "unfold": _move(_unfold),
    "T": _move(lambda table: table.permute(*range(table.ndim - 1, -1, -1))),
    "mT": _move(lambda table: table.mT),
    "cat": _join(torch.cat),
    "stack": _join(torch.stack),
    # channels go elsewhere, positions do not
    **_each(
        "channel_shuffle native_channel_shuffle",
        FollowedFunction(field_rule=fields.move_fields(functional.channel_shuffle)),
    ),
    # what keeps values apart
    **_each(_POINTWISE, FollowedFunction(field_rule=fields.unite)),
    **_each(_CONSTANT, FollowedFunction(field_rule=fields.see_nothing)),
    # windows that slide over a map
    **_each(_CONVOLVING, FollowedFunction(positions.convolve, fields.slide, "lost")),
    "fold": FollowedFunction(positions.convolve, None, "lost"),
    **_each("conv1d conv_transpose1d", FollowedFunction(field_rule=fields.slide)),
    "interpolate": FollowedFunction(positions.resample, fields.slide, "lost"),
    **{
        name: FollowedFunction(
            positions.resample,
            fields.move_fields(getattr(functional, name)),
            "lost",
        )
        for name in ("pixel_shuffle", "pixel_unshuffle")
    },
    # what mixes values along axes
    **_each(
        "mean sum amax amin max min",
        FollowedFunction(positions.reduce_positions, fields.reduce_fields, "lost"),
    ),
    "argmax": FollowedFunction(positions.reduce_positions, None, "lost"),
    **_each("var std norm", FollowedFunction(field_rule=fields.reduce_fields)),
    "softmax": FollowedFunction(
        field_rule=fields.mix_fields(lambda call, table: [call.argument(1, "dim", -1)]),
        weights="softmax",
    ),
    "log_softmax": FollowedFunction(
        field_rule=fields.mix_fields(lambda call, table: [call.argument(1, "dim", -1)])
    ),
    **_each(
        "layer_norm rms_norm",
        FollowedFunction(
            field_rule=fields.mix_fields(
                lambda call, table: range(-len(call.argument(1, "normalized_shape")), 0)
            )
        ),
    ),
    **_each(
        "group_norm instance_norm",
        FollowedFunction(
            field_rule=fields.mix_fields(lambda call, table: range(1, table.ndim))
        ),
    ),
    "normalize": FollowedFunction(
        field_rule=fields.mix_fields(lambda call, table: [call.argument(2, "dim", 1)])
    ),
    "glu": FollowedFunction(field_rule=fields.halve),
    "linear": FollowedFunction(
        positions.keep_rows, fields.mix_fields(lambda call, table: [-1]), "lost"
    ),
    **_each("lstm gru", FollowedFunction(positions.keep_rows, None, "lost")),
    # products, and attention: its tokens lie along axis -2, in nn.MultiheadAttention
    # along axis 0
    **_each(
        "matmul bmm mm",
        FollowedFunction(positions.multiply, fields.multiply_fields, "lost"),
    ),
    "einsum": FollowedFunction(
        positions.multiply_by_letters, fields.einsum_fields, "lost"
    ),
    "scaled_dot_product_attention": FollowedFunction(
        positions.keep_queries, fields.attend(token_axis=-2), "lost"
    ),
    "multi_head_attention_forward": FollowedFunction(
        positions.keep_rows, fields.attend(token_axis=0), "second"
    ),
    # what puts values where other values say, which is not followed
    **_each(_LOSING, FollowedFunction(positions.lose_positions)),
}
