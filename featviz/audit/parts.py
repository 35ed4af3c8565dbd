"""What modules and functions do to channels, and which findings an activation can have.

A wrong guess here is a wrong verdict, hence a table by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    role: Literal["maker", "activation", "channelwise", "mixing", "other"]
    """maker: a convolution or linear module. channelwise: channel i of the output depends
    only on channel i of the input. mixing: it depends on other channels, too (GroupNorm)."""
    axis: int | None = None
    """The axis of the output that counts channels; None if it is the axis that counts them
    in the input."""
    activation: Activation | None = None
    """Which activation function it is; None in other roles."""


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
        Part("channelwise"),
        "_BatchNorm FrozenBatchNorm2d batch_norm _InstanceNorm instance_norm"
        " BatchNormalization InstanceNormalization"
        " _DropoutNd StochasticDepth DropPath dropout dropout2d"
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
    for name, module in modules_by_name(model).items():
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
                parts[name] = PARTS[class_name]
                break
    return parts


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
    if function == "hardtanh":
        return _hardtanh(*args, **kwargs)
    return PARTS.get(function, _OTHER)


def _hardtanh(
    input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Part:
    """The part of a call of torch.nn.functional.hardtanh, which has these parameters."""
    return _clipped(min_val, max_val)
