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

_CHANNELWISE, _MIXING, _OTHER = Part("channelwise"), Part("mixing"), Part("other")
_DROPOUT = "_DropoutNd StochasticDepth DropPath"
_POOLS = "_MaxPoolNd _AvgPoolNd _AdaptiveMaxPoolNd _AdaptiveAvgPoolNd"
_POOL_FUNCTIONS = "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d"
_UPSAMPLING = "interpolate upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"

_KNOWN: tuple[tuple[Activation | Part, str, str], ...] = (
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
    (Part("maker", axis=1), "_ConvNd", ""),
    (Part("maker", axis=-1), "Linear", ""),
    (_CHANNELWISE, "_BatchNorm FrozenBatchNorm2d _InstanceNorm", "batch_norm instance_norm"),
    (_CHANNELWISE, _DROPOUT, "dropout dropout2d"),
    (_CHANNELWISE, _POOLS, _POOL_FUNCTIONS),
    (_CHANNELWISE, "Upsample", _UPSAMPLING),
    (_CHANNELWISE, "Identity", "contiguous clone detach float to"),
    (_MIXING, "GroupNorm LayerNorm RMSNorm", "group_norm layer_norm rms_norm"),
)
"""What can be asked of an activation, or what another part does to channels; its modules by class
name (torch.nn's, and those that timm and torchvision add), and the same as functions of torch,
torch.nn.functional and Tensor. A module that is not here is looked into, or ends a chain."""


def _part(known: Activation | Part) -> Part:
    return known if isinstance(known, Part) else Part("activation", activation=known)


MODULES = {name: _part(known) for known, modules, _ in _KNOWN for name in modules.split()}
FUNCTIONS = {name: _part(known) for known, _, functions in _KNOWN for name in functions.split()}


def of_module(module: nn.Module) -> Part | None:
    """What a module is; None for one that is looked into instead (it has parts of its own, or is
    none that is known)."""
    if next(module.children(), None) is not None:
        return None
    part = next((MODULES[name] for name in class_names(module) if name in MODULES), None)
    if part is None or part.activation is None:
        return part
    return Part("activation", activation=_with_own_ends(module, part.activation))


def of_function(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Part:
    """What a function is, by its name and the arguments of the call."""
    if name == "hardtanh":
        given = dict(zip(("min_val", "max_val"), args[1:3], strict=False)) | dict(kwargs)
        ends = given.get("min_val", -1.0), given.get("max_val", 1.0)
        return Part("activation", activation=clipped(*ends))
    return FUNCTIONS.get(name, _OTHER)


def _with_own_ends(module: nn.Module, activation: Activation) -> Activation:
    if isinstance(module, nn.Hardtanh):
        return clipped(float(module.min_val), float(module.max_val))
    if activation == TANH and (hardtanh := operation(module, "hardtanh")) is not None:
        return clipped(float(hardtanh.arguments["min_val"]), float(hardtanh.arguments["max_val"]))
    return activation
