"""What modules and functions do to channels, and which findings an activation can have.

A wrong guess here is a wrong verdict, hence a table by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from featviz.hooks.layers import class_names, function_in, modules_by_name


@dataclass(frozen=True)
class Call:
    """One call of a module or a function in a forward pass."""

    name: str
    """The name of the layer; empty for the model itself."""
    type: str
    """The class of the module, or the name of the function."""
    index: int = 0
    """Which call of the layer it is, from 0."""

    @property
    def label(self) -> str:
        """For people: `layer1.0.relu`, and `layer1.0.relu.call1` for its second call."""
        label = self.name or self.type
        if self.index:
            label += f".call{self.index}"
        return label


@dataclass(frozen=True)
class Activation:
    """An activation function, as far as findings depend on it."""

    zero: bool = False
    """Whether it has no values below zero, and exact zeros: its channels can be dead."""
    bounds: tuple[float, ...] = ()
    """Values at which it saturates, ascending: an upper one, or a lower and an upper one;
    empty if it does not saturate."""
    margin: float = 0.0
    """A value that is this near to a bound, or beyond it, is at the bound."""


@dataclass(frozen=True)
class Part:
    """What a module or function does to channels."""

    role: Literal[
        "maker", "activation", "channelwise", "norm", "flatten", "mixing", "other"
    ]
    """maker: a convolution or linear module. channelwise: channel i of the output depends
    only on channel i of the input, and is 0 where that is 0. norm: the first alone holds
    (BatchNorm). flatten: the axes after axis 1 are joined with it, or averaged. mixing:
    channel i depends on other channels, too (GroupNorm)."""
    axis: int | None = None
    """The axis of the output that counts channels; None if it is the axis that counts them
    in the input."""
    activation: Activation | None = None
    """Which activation function it is; None in other roles."""
    can_be_cut: bool = True
    """Whether a channel can be cut out of the parameters by slicing them; True if there are
    none."""


# share of the range between two bounds within which a value is at one of them
_MARGIN = 1e-3


def _activation(activation: Activation) -> Part:
    return Part("activation", activation=activation)


def _clipped(low: float, high: float) -> Part:
    """The part of a Hardtanh with these ends. If `low` is 0, it is a ReLU with a ceiling.

    Args:
        low: below `high`, which torch checks.
    """
    # A channel that is always at the lower end 0 is dead. So this end is no bound: else the
    # channel would be saturated, too.
    if low == 0:
        return _activation(Activation(zero=True, bounds=(high,), margin=_MARGIN * high))
    return _activation(Activation(bounds=(low, high), margin=_MARGIN * (high - low)))


_OTHER = Part("other")

_NAMES_OF_PARTS: Sequence[tuple[Part, str]] = (
    (_activation(Activation(zero=True)), "ReLU Relu relu"),
    (_clipped(0.0, 6.0), "ReLU6 relu6"),
    (
        _activation(Activation(bounds=(0.0, 1.0), margin=_MARGIN)),
        "Sigmoid Hardsigmoid HardSigmoid sigmoid hardsigmoid",
    ),
    (_clipped(-1.0, 1.0), "Tanh Hardtanh tanh hardtanh"),
    (
        # neither exact zeros nor bounds: its channels can only be constant
        _activation(Activation()),
        "SiLU Swish silu GELU Gelu GELUTanh QuickGELU gelu Mish HardMish mish"
        " Hardswish HardSwish hardswish LeakyReLU LeakyRelu leaky_relu PReLU PRelu prelu"
        " RReLU rrelu"
        " ELU Elu elu CELU Celu celu SELU Selu selu Softplus softplus Softsign softsign"
        " LogSigmoid logsigmoid",
    ),
    (Part("maker", axis=1), "_ConvNd Conv ConvTranspose"),
    (Part("maker", axis=-1), "Linear Gemm"),
    (
        Part("norm"),
        "_BatchNorm FrozenBatchNorm2d batch_norm _InstanceNorm instance_norm"
        " BatchNormalization InstanceNormalization",
    ),
    (
        Part("channelwise"),
        "_DropoutNd StochasticDepth DropPath dropout dropout2d"
        " _MaxPoolNd max_pool2d _AdaptiveMaxPoolNd adaptive_max_pool2d MaxPool"
        " _AvgPoolNd avg_pool2d _AdaptiveAvgPoolNd adaptive_avg_pool2d AveragePool"
        " GlobalAveragePool"
        " Upsample Resize upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"
        " interpolate Identity contiguous clone detach float to",
    ),
    (
        Part("mixing"),
        "GroupNorm group_norm LayerNorm layer_norm RMSNorm rms_norm"
        " GroupNormalization LayerNormalization",
    ),
)

PARTS: dict[str, Part] = {}
"""By name: modules by class name anywhere in the MRO, and functions of torch,
torch.nn.functional and Tensor; nodes of ONNX by operator."""
for _part, _names in _NAMES_OF_PARTS:
    PARTS.update(dict.fromkeys(_names.split(), _part))


def module_parts(model: nn.Module) -> dict[str, Part]:
    """The parts of a model's modules, by qualified name. Left out are modules whose class is
    not in PARTS, and modules that hold other modules."""
    parts = {}
    modules = modules_by_name(model)
    places = Counter(map(id, modules.values()))
    for name, module in modules.items():
        # before the table: ReLU6 is a Hardtanh, too, and each module has ends of its own
        if isinstance(module, nn.Hardtanh):
            parts[name] = _clipped(module.min_val, module.max_val)
            continue
        classes = class_names(module)
        has_children = any(True for _ in module.children())
        # An exported Hardtanh does not know its ends. The call of the function inside it
        # does, and becomes the node.
        if has_children or classes[0] == "Hardtanh":
            continue
        # the nearest known class in the MRO: what a subclass adds is not looked at
        for class_name in classes:
            if class_name in PARTS:
                part = PARTS[class_name]
                # what is cut out in one place would be missing in the others
                is_alone = places[id(module)] == 1
                can_be_cut = part.role != "maker" or _is_plain(module)
                parts[name] = replace(part, can_be_cut=is_alone and can_be_cut)
                break
    return parts


_PLAIN = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


def _is_plain(module: nn.Module) -> bool:
    """Whether each channel of a convolution or linear module has slices of the weight of
    its own."""
    # A subclass may standardise the weight over all channels, and so may a hook. Such a hook
    # leaves no parameter of this name.
    has_weight = type(module) in _PLAIN and "weight" in module._parameters
    return has_weight and getattr(module, "groups", 1) == 1


def function_part(
    call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Part | None:
    """The part of a function, with the role `other` if the function is not in PARTS; None
    for the call of a module.

    Args:
        args, kwargs: the arguments of the call; those of hardtanh hold its ends.
    """
    function = function_in(call.name)
    if function is None:
        return None
    if function in _PARTS_BY_ARGUMENTS:
        return _PARTS_BY_ARGUMENTS[function](*args, **kwargs)
    return PARTS.get(function, _OTHER)


def _hardtanh(
    input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Part:
    """The part of a call of torch.nn.functional.hardtanh, which has these parameters."""
    return _clipped(min_val, max_val)


_FLATTEN = Part("flatten", axis=1)


def _flatten(input: Tensor, start_dim: Any = 0, *args: Any, **kwargs: Any) -> Part:
    """The part of a call of torch.flatten."""
    return _FLATTEN if start_dim == 1 else _OTHER


def _view(input: Tensor, *shape: Any, **kwargs: Any) -> Part:
    """The part of a call of Tensor.view or reshape. It flattens as `view(len(x), -1)`. With
    a number in place of -1, fewer channels would not fit."""
    sizes = shape[0] if len(shape) == 1 else shape
    is_flat = isinstance(sizes, Sequence) and list(sizes) == [len(input), -1]
    return _FLATTEN if is_flat else _OTHER


def _mean(input: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Part:
    """The part of a call of torch.mean."""
    axes = dim if isinstance(dim, Sequence) else [dim]
    for axis in axes:
        if not isinstance(axis, int) or axis % input.ndim < 2:
            return _OTHER
    return _FLATTEN


_PARTS_BY_ARGUMENTS: dict[str, Callable[..., Part]] = {
    "hardtanh": _hardtanh,
    "flatten": _flatten,
    "view": _view,
    "reshape": _view,
    "mean": _mean,
}
