"""From a convolution to its kernels: which are the output channels, and what is drawn of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from featviz.errors import LayoutError
from featviz.hooks.naming import class_names, constant, is_exported, operation
from featviz.layout import to_floats
from featviz.text import by

_TRANSPOSED = "_ConvTransposeNd"
_CONVOLUTIONS = frozenset({"_ConvNd", "DeformConv2d"})
"""Classes of modules with kernels; all of torch's convolutions are `_ConvNd`."""

_OPERATORS = (
    *(f"conv{dimensions}d" for dimensions in (1, 2, 3)),
    *(f"conv_transpose{dimensions}d" for dimensions in (1, 2, 3)),
    "convolution",
    "deform_conv2d",
)
"""What a convolution is in the graph of an exported program."""

_RECOMPUTED = (BasePruningMethod, SpectralNorm, WeightNorm)
"""Hooks that set the effective weight before each forward pass; until then it may be stale."""


@dataclass(frozen=True)
class Filters:
    """The kernels of a convolution, by output channel."""

    data: Tensor
    """float32 [output channels, input channels in a group, time, height, width]; time and height
    are 1 where the kernel has none."""
    shape: list[int]
    """The shape of the weight as the module holds it."""
    groups: int
    transposed: bool


@dataclass(frozen=True)
class FilterTiles:
    """What is drawn of them."""

    data: Tensor
    """[output channels, tiles of each, colours (1 or 3), height, width]"""
    layout: str
    """rgb, mean (over the inputs) or slices."""
    words: str
    """What one tile is."""


@dataclass(frozen=True)
class _Weight:
    """A convolution's weight as the module holds it, and what says which axis is which."""

    data: Tensor
    groups: int
    transposed: bool


def is_convolution(module: nn.Module) -> bool:
    """Whether a module has kernels.

    Of an exported one its class tells; where nothing but the name of that is known, whether it
    convolves.
    """
    classes = class_names(module)
    if is_exported(module) and len(classes) == 2:
        return operation(module, *_OPERATORS) is not None
    return not _CONVOLUTIONS.isdisjoint(classes)


def read_filters(module: nn.Module) -> Filters:
    """The effective kernels of a module in eval mode: parametrized, normalised, pruned.

    Channel i is output channel i of the module's feature maps. Kernels are as torch applies them:
    a convolution's are correlated with its input, a transposed one's are stamped on its output.

    Raises:
        LayoutError: no convolution, or one whose weight has no values, or complex ones.
    """
    name = class_names(module)[0]
    if not is_convolution(module):
        raise LayoutError(f"{name} has no convolution kernels")
    convolution = _exported_weight(module) if is_exported(module) else _own_weight(module)
    weight = convolution.data
    if isinstance(weight, UninitializedParameter):
        raise LayoutError(f"its weight has no size yet: the {name} saw no input")
    try:
        values = to_floats(weight.detach())
    except LayoutError as error:
        raise LayoutError(f"its weight {error.message}") from None
    if values.numel() == 0:
        raise LayoutError(f"its weight is empty: {by(values.shape)}")
    by_output = _by_output(values, convolution.groups) if convolution.transposed else values
    return Filters(
        _with_time(by_output), list(values.shape), convolution.groups, convolution.transposed
    )


def _own_weight(module: nn.Module) -> _Weight:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _RECOMPUTED):
            hook(module, ())
    weight: Any = getattr(module, "weight", None)
    if callable(weight) and not isinstance(weight, Tensor):  # torch.ao.nn.quantized
        weight = weight()
    if not isinstance(weight, Tensor):
        raise LayoutError("it has no weight that is a tensor")
    groups = getattr(module, "groups", 1)
    if type(groups) is not int or groups < 1:
        raise LayoutError("its number of groups is none")
    return _Weight(weight, groups, _TRANSPOSED in class_names(module))


def _exported_weight(module: nn.Module) -> _Weight:
    """The weight that the program's convolution takes, computed where it is not a parameter."""
    call = operation(module, *_OPERATORS)
    if call is None:
        raise LayoutError("the exported program calls no convolution in it")
    given = call.arguments
    try:
        weight = constant(module, given["weight"])
    except ValueError:
        raise LayoutError(
            "its kernels are computed from its input, so they have no values"
        ) from None
    transposed = bool(given.get("transposed", call.name.startswith("conv_transpose")))
    return _Weight(weight, int(given.get("groups", 1)), transposed)


def to_tiles(filters: Filters, all_slices: bool) -> FilterTiles:
    """RGB for three input channels, else the mean over the inputs; or each input's slice.

    Kernels with a time axis give a tile for each step, one after the other.
    """
    data = filters.data
    outputs, inputs, steps = data.shape[:3]
    each = f", {steps} time steps a channel" if steps > 1 else ""
    if inputs == 1 or all_slices:
        slices = f", {inputs} inputs a channel" if inputs > 1 else ""
        tiles = data.reshape(outputs, inputs * steps, 1, *data.shape[3:])
        return FilterTiles(tiles, "slices", f"one input's kernel{slices}{each}")
    if inputs == 3 and filters.groups == 1:
        return FilterTiles(data.transpose(1, 2), "rgb", f"RGB of three inputs{each}")
    return FilterTiles(data.mean(1)[:, :, None], "mean", f"mean over {inputs} inputs{each}")


def _by_output(weight: Tensor, groups: int) -> Tensor:
    """[inputs, outputs / groups, ...] of a transposed convolution to [outputs, inputs / groups]."""
    split = weight.reshape(groups, -1, *weight.shape[1:])
    return split.transpose(1, 2).flatten(0, 1)


def _with_time(weight: Tensor) -> Tensor:
    """[O, I, W], [O, I, H, W] or [O, I, T, H, W] to the last of them."""
    missing = 5 - weight.ndim
    return weight.reshape(*weight.shape[:2], *[1] * missing, *weight.shape[2:])
