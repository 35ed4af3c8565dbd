"""From a convolution to its kernels: which are the output channels, and what is drawn of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torchvision.ops import DeformConv2d

from featviz.errors import LayoutError

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, DeformConv2d, *TRANSPOSED)
_RECOMPUTED = (BasePruningMethod, SpectralNorm, WeightNorm)
"""Hooks that set the effective weight before each forward pass; until then it may be stale."""


@dataclass(frozen=True)
class Filters:
    """The kernels of a convolution, by output channel."""

    data: Tensor
    """float32 [output channels, input channels in a group, time, height, width]; time and height
    are 1 where the kernel has none."""
    shape: list[int]
    """Of the weight as the module holds it."""
    groups: int
    transposed: bool


@dataclass(frozen=True)
class Tiles:
    """What is drawn of them."""

    data: Tensor
    """[output channels, tiles of each, colours (1 or 3), height, width]"""
    layout: str
    """rgb, mean (over the inputs) or slices."""
    words: str
    """What one tile is."""


def is_convolution(module: nn.Module) -> bool:
    """Whether a module has kernels."""
    return isinstance(module, CONVOLUTIONS)


def read_filters(module: nn.Module) -> Filters:
    """The effective kernels of a module in eval mode: parametrized, normalised, pruned.

    Channel i is output channel i of the module's feature maps. Kernels are as torch applies them:
    a convolution's are correlated with its input, a transposed one's are stamped on its output.

    Raises:
        LayoutError: no convolution, or one without values.
    """
    if not is_convolution(module):
        raise LayoutError(f"{type(module).__name__} has no convolution kernels")
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _RECOMPUTED):
            hook(module, ())
    weight: Tensor = module.weight  # type: ignore[assignment]
    if isinstance(weight, UninitializedParameter):
        raise LayoutError(f"its weight has no size yet: the {type(module).__name__} saw no input")
    if weight.is_complex():
        raise LayoutError(f"its kernels hold complex numbers ({weight.dtype})")
    groups, transposed = int(module.groups), isinstance(module, TRANSPOSED)  # type: ignore[arg-type]
    by_output = _by_output(weight, groups) if transposed else weight
    return Filters(_with_time(by_output.detach().float()), list(weight.shape), groups, transposed)


def to_tiles(filters: Filters, all_slices: bool) -> Tiles:
    """RGB for three input channels, else the mean over the inputs; or each input's slice.

    Kernels with a time axis give a tile for each step, one after the other.
    """
    data = filters.data
    outputs, inputs, steps = data.shape[:3]
    each = f", {steps} time steps a channel" if steps > 1 else ""
    if inputs == 1 or all_slices:
        slices = f", {inputs} inputs a channel" if inputs > 1 else ""
        tiles = data.reshape(outputs, inputs * steps, 1, *data.shape[3:])
        return Tiles(tiles, "slices", f"one input's kernel{slices}{each}")
    if inputs == 3 and filters.groups == 1:
        return Tiles(data.transpose(1, 2), "rgb", f"RGB of three inputs{each}")
    return Tiles(data.mean(1)[:, :, None], "mean", f"mean over {inputs} inputs{each}")


def _by_output(weight: Tensor, groups: int) -> Tensor:
    """[inputs, outputs / groups, ...] of a transposed convolution to [outputs, inputs / groups]."""
    split = weight.reshape(groups, -1, *weight.shape[1:])
    return split.transpose(1, 2).flatten(0, 1)


def _with_time(weight: Tensor) -> Tensor:
    """[O, I, W], [O, I, H, W] or [O, I, T, H, W] to the last of them."""
    missing = 5 - weight.ndim
    return weight.reshape(*weight.shape[:2], *[1] * missing, *weight.shape[2:])
