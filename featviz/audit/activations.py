"""Activations and other parts: what each module and function does to channels.

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

_ACTIVATIONS = (
    (RELU, "ReLU", "relu"),
    (RELU6, "ReLU6", "relu6"),
    (UNIT, "Sigmoid Hardsigmoid HardSigmoid", "sigmoid hardsigmoid"),
    (TANH, "Tanh Hardtanh", "tanh hardtanh"),
    (SMOOTH, "SiLU Swish", "silu"),
    (SMOOTH, "GELU GELUTanh QuickGELU", "gelu"),
    (SMOOTH, "Hardswish HardSwish", "hardswish"),
    (SMOOTH, "Mish HardMish", "mish"),
    (SMOOTH, "LeakyReLU PReLU RReLU", "leaky_relu prelu rrelu"),
    (SMOOTH, "ELU CELU SELU", "elu celu selu"),
    (SMOOTH, "Softplus Softsign LogSigmoid", "softplus softsign logsigmoid"),
)
"""What can be asked of an activation; its modules by class name (torch.nn's, and those that timm
and torchvision add), and the same as functions of torch, torch.nn.functional and Tensor."""

MODULES = {name: kind for kind, modules, _ in _ACTIVATIONS for name in modules.split()}
FUNCTIONS = {name: kind for kind, _, functions in _ACTIVATIONS for name in functions.split()}

_CHANNELS_FIRST = Part("maker", axis=1)
_CHANNELWISE, _MIXING, _OTHER = Part("channelwise"), Part("mixing"), Part("other")

_MODULE_PARTS = (
    (_CHANNELS_FIRST, "_ConvNd"),
    (Part("maker", axis=-1), "Linear"),
    (_CHANNELWISE, "_BatchNorm FrozenBatchNorm2d _InstanceNorm"),
    (_CHANNELWISE, "_DropoutNd StochasticDepth DropPath Identity Upsample"),
    (_CHANNELWISE, "_MaxPoolNd _AvgPoolNd _AdaptiveMaxPoolNd _AdaptiveAvgPoolNd"),
    (_MIXING, "GroupNorm LayerNorm RMSNorm"),
)
"""Other modules by class name; what is in neither table is looked into, or ends a chain."""

_FUNCTION_PARTS = (
    (_CHANNELWISE, "batch_norm instance_norm dropout dropout2d"),
    (_CHANNELWISE, "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d"),
    (_CHANNELWISE, "interpolate upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"),
    (_CHANNELWISE, "contiguous clone detach float to"),
    (_MIXING, "group_norm layer_norm rms_norm"),
)
"""Functions that leave channel i channel i."""

PARTS = {name: part for part, names in _MODULE_PARTS for name in names.split()}
FUNCTION_PARTS = {name: part for part, names in _FUNCTION_PARTS for name in names.split()}


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
    if activation == TANH and (hardtanh := operation(module, "hardtanh")) is not None:
        return clipped(float(hardtanh.arguments["min_val"]), float(hardtanh.arguments["max_val"]))
    return activation
