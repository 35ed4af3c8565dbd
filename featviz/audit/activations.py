"""What modules and functions are to channels: activations, and what stands before them.

Found by class name anywhere in the MRO, and by function name; hand-written, since a wrong guess
here is a wrong verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from featviz.hooks.naming import class_names, operation
from featviz.records import Activation, Part

_NEAR = 1e-3
"""Share of the range between two bounds within which a value is at one of them."""


def bounded(low: float, high: float) -> Activation:
    """Saturates at both ends; one whose lower end is zero and exact can be dead there instead."""
    return Activation(bounds=(low, high), margin=_NEAR * (high - low))


def clipped(low: float, high: float) -> Activation:
    """Hardtanh with its own ends: from zero up it is a ReLU with a ceiling."""
    if low == 0:
        return Activation(zero=True, bounds=(high,), margin=_NEAR * high)
    return bounded(low, high)


RELU = Activation(zero=True)
RELU6 = clipped(0.0, 6.0)
UNIT = bounded(0.0, 1.0)
TANH = bounded(-1.0, 1.0)
SMOOTH = Activation()
"""Neither exact zeros nor a bound: whether it varies is the right question."""

MODULES: dict[str, Activation] = {
    "ReLU": RELU,
    "ReLU6": RELU6,
    "Sigmoid": UNIT,
    "Hardsigmoid": UNIT,
    "HardSigmoid": UNIT,
    "Tanh": TANH,
    "Hardtanh": TANH,
    "SiLU": SMOOTH,
    "Swish": SMOOTH,
    "GELU": SMOOTH,
    "GELUTanh": SMOOTH,
    "QuickGELU": SMOOTH,
    "Hardswish": SMOOTH,
    "HardSwish": SMOOTH,
    "Mish": SMOOTH,
    "HardMish": SMOOTH,
    "LeakyReLU": SMOOTH,
    "PReLU": SMOOTH,
    "RReLU": SMOOTH,
    "ELU": SMOOTH,
    "CELU": SMOOTH,
    "SELU": SMOOTH,
    "Softplus": SMOOTH,
    "Softsign": SMOOTH,
    "LogSigmoid": SMOOTH,
}
"""Activation modules by class name; torch.nn's, and those that timm and torchvision add."""

FUNCTIONS: dict[str, Activation] = {
    "relu": RELU,
    "relu6": RELU6,
    "sigmoid": UNIT,
    "hardsigmoid": UNIT,
    "tanh": TANH,
    "hardtanh": TANH,
    "silu": SMOOTH,
    "gelu": SMOOTH,
    "hardswish": SMOOTH,
    "mish": SMOOTH,
    "leaky_relu": SMOOTH,
    "prelu": SMOOTH,
    "rrelu": SMOOTH,
    "elu": SMOOTH,
    "celu": SMOOTH,
    "selu": SMOOTH,
    "softplus": SMOOTH,
    "softsign": SMOOTH,
    "logsigmoid": SMOOTH,
}
"""The same as functions of torch, torch.nn.functional and Tensor."""

_CHANNELS_FIRST = Part("maker", axis=1)
_CHANNELWISE, _MIXING, _OTHER = Part("channelwise"), Part("mixing"), Part("other")

PARTS: dict[str, Part] = {
    "_ConvNd": _CHANNELS_FIRST,
    "Linear": Part("maker", axis=-1),
    "_BatchNorm": _CHANNELWISE,
    "FrozenBatchNorm2d": _CHANNELWISE,
    "_InstanceNorm": _CHANNELWISE,
    "_DropoutNd": _CHANNELWISE,
    "StochasticDepth": _CHANNELWISE,
    "DropPath": _CHANNELWISE,
    "Identity": _CHANNELWISE,
    "_MaxPoolNd": _CHANNELWISE,
    "_AvgPoolNd": _CHANNELWISE,
    "_AdaptiveMaxPoolNd": _CHANNELWISE,
    "_AdaptiveAvgPoolNd": _CHANNELWISE,
    "Upsample": _CHANNELWISE,
    "GroupNorm": _MIXING,
    "LayerNorm": _MIXING,
    "RMSNorm": _MIXING,
}
"""Other modules by class name; what is in neither table is looked into, or ends a chain."""

FUNCTION_PARTS: dict[str, Part] = {
    "batch_norm": _CHANNELWISE,
    "instance_norm": _CHANNELWISE,
    "dropout": _CHANNELWISE,
    "dropout2d": _CHANNELWISE,
    "max_pool2d": _CHANNELWISE,
    "avg_pool2d": _CHANNELWISE,
    "adaptive_avg_pool2d": _CHANNELWISE,
    "adaptive_max_pool2d": _CHANNELWISE,
    "interpolate": _CHANNELWISE,
    "upsample_nearest2d": _CHANNELWISE,
    "upsample_bilinear2d": _CHANNELWISE,
    "upsample_bicubic2d": _CHANNELWISE,
    "contiguous": _CHANNELWISE,
    "clone": _CHANNELWISE,
    "detach": _CHANNELWISE,
    "float": _CHANNELWISE,
    "to": _CHANNELWISE,
    "group_norm": _MIXING,
    "layer_norm": _MIXING,
    "rms_norm": _MIXING,
}
"""Functions that leave channel i channel i."""


def of_module(module: nn.Module) -> Part | None:
    """What a module is; None for one that is looked into instead (it has parts of its own, or is
    none that is known)."""
    if next(module.children(), None) is not None:
        return None
    for name in class_names(module):
        if name in MODULES:
            return Part("activation", activation=_with_own_ends(module, MODULES[name]))
        if name in PARTS:
            return PARTS[name]
    return None


def of_function(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Part:
    """What a function is, by its name and the arguments of the call."""
    if name not in FUNCTIONS:
        return FUNCTION_PARTS.get(name, _OTHER)
    activation = FUNCTIONS[name]
    if name == "hardtanh":
        given = dict(zip(("min_val", "max_val"), args[1:3], strict=False)) | dict(kwargs)
        activation = clipped(given.get("min_val", -1.0), given.get("max_val", 1.0))
    return Part("activation", activation=activation)


def _with_own_ends(module: nn.Module, activation: Activation) -> Activation:
    if isinstance(module, nn.Hardtanh):
        return clipped(float(module.min_val), float(module.max_val))
    if activation == TANH and (own := operation(module, "hardtanh")) is not None:
        return clipped(float(own.arguments["min_val"]), float(own.arguments["max_val"]))
    return activation
