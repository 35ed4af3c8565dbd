"""Kernels of convolutions: read by output channel, and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from featviz.drawing import grid, tensorboard
from featviz.drawing.channels import count_chosen
from featviz.drawing.drawer import draw_tiles
from featviz.drawing.normalize import parse_scale
from featviz.drawing.picture import GridPicture, to_png
from featviz.drawing.tensorboard import Board
from featviz.errors import LayoutError
from featviz.hooks.layers import EXPORTED, class_names, function_name, modules_by_name
from featviz.layout import to_floats
from featviz.options import DrawOptions
from featviz.options.commands import KernelOptions
from featviz.records import CaptureSite, GridPlan, Layer
from featviz.text import by

DRAW = KernelOptions().draw
"""How kernels are drawn unless the user says otherwise."""

AUTO_PIXELS = 2**26
"""Pixels of a picture at most with `--scale auto`."""
AUTO_SIDE = 480
"""Pixels of a picture's longer side at least with `--scale auto`. Without this, sixteen
kernels of 3×3 would make a picture of 142 pixels."""

_TRANSPOSED = "_ConvTransposeNd"
"""The class of torch's transposed convolutions."""
_CONVOLUTIONS = frozenset({"_ConvNd", "DeformConv2d"})
"""Classes of modules with kernels; all of torch's convolutions are `_ConvNd`."""

_RECOMPUTED = (BasePruningMethod, SpectralNorm, WeightNorm)
"""Hooks that compute a module's `weight` before each forward pass. Before their first
call, `weight` may be out of date."""


class Filters(NamedTuple):
    """The kernels of a convolution, by output channel."""

    kernels: Tensor
    """float32 [output channels, input channels of a group, time, height, width]. Time and
    height are 1 if the kernel does not have them."""
    weight_shape: list[int]
    """The shape of the module's weight."""
    groups: int
    """Number of groups, as `groups` of torch's convolutions."""
    transposed: bool
    """Whether the module is a transposed convolution."""


def is_convolution(module: nn.Module) -> bool:
    """Whether a module has kernels. In an exported model, the class that the module had
    before the export counts."""
    return not _CONVOLUTIONS.isdisjoint(class_names(module))


def read_filters(module: nn.Module) -> Filters:
    """The kernels of a module as its next forward pass in eval mode would use them:
    parametrized, normalised, pruned. If a hook computes `module.weight` before each pass,
    it is computed now.

    Channel i is output channel i of the module's feature maps. A convolution correlates
    its kernels with its input; a transposed convolution stamps them on its output.

    Raises:
        LayoutError: the module is not a convolution; or its weight has no size yet, no
            values, or values that are not real.
    """
    name = class_names(module)[0]
    if not is_convolution(module):
        raise LayoutError(f"{name} has no convolution kernels")
    weight = _weight(module)
    groups = _groups(module)
    if isinstance(weight, UninitializedParameter):
        raise LayoutError(f"its weight has no size yet: the {name} saw no input")
    try:
        kernels = to_floats(weight.detach())
    except LayoutError as error:
        raise LayoutError(f"its weight {error.message}") from None
    if kernels.numel() == 0:
        raise LayoutError(f"its weight is empty: {by(kernels.shape)}")
    weight_shape = list(kernels.shape)
    transposed = _TRANSPOSED in class_names(module)
    if transposed:  # [inputs, outputs / groups, ...] to [outputs, inputs / groups, ...]
        by_group = kernels.reshape(groups, -1, *weight_shape[1:])
        kernels = by_group.transpose(1, 2).flatten(0, 1)
    # [O, I, W] or [O, I, H, W] to [O, I, T, H, W]
    missing_axes = [1] * (5 - kernels.ndim)
    kernels = kernels.reshape(*kernels.shape[:2], *missing_axes, *kernels.shape[2:])
    return Filters(kernels, weight_shape, groups, transposed)


def _weight(module: nn.Module) -> Tensor:
    """The weight of a module as the next forward pass would use it. LayoutError if the
    module has no weight that is a tensor."""
    # pruning and torch's older normalisations compute `weight` before each pass
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _RECOMPUTED):
            hook(module, ())
    weight = getattr(module, "weight", None)
    if callable(weight) and not isinstance(weight, Tensor):  # torch.ao.nn.quantized
        weight = weight()
    if not isinstance(weight, Tensor):
        raise LayoutError("it has no weight that is a tensor")
    return weight


def _groups(module: nn.Module) -> int:
    """The number of groups of a convolution. In an exported module, only the call in its
    graph says it. 1 if nothing says it."""
    if type(module).__module__ != EXPORTED:
        return getattr(module, "groups", 1)
    graph: Any = module.graph
    for node in graph.nodes:
        name = function_name(node.target) if node.op == "call_function" else ""
        if name.startswith("conv"):
            if "groups" in node.kwargs:
                return int(node.kwargs["groups"])
            # aten.convolution takes `transposed` and `output_padding` before groups
            before = 8 if name == "convolution" else 6
            if len(node.args) > before:
                return int(node.args[before])
            return 1
    return getattr(module, "groups", 1)


class FilterPicture(NamedTuple):
    """The picture of a layer's kernels."""

    picture: GridPicture
    description: str
    """What a tile shows, for people: `mean over 64 inputs`."""


def draw_filters(
    filters: Filters, options: DrawOptions, all_slices: bool = False
) -> FilterPicture:
    """Draw a layer's kernels: a tile for each output channel and time step. A tile is RGB
    if the convolution has three input channels and no groups, else the mean over the
    input channels.

    Args:
        options: if `scale` is None, it is chosen so that few kernels become large enough
            to be seen, and many do not make a huge picture.
        all_slices: whether each input channel gets a tile of its own: a row is then an
            output channel, a column an input channel.

    Raises:
        LayoutError: the layer has none of the channels that the options name, or the
            picture is too large.
    """
    outputs, _, steps, height, width = filters.kernels.shape
    tiles = _tiles(filters, all_slices)
    description = tiles.description
    if steps > 1:
        description += f", {steps} time steps a channel"
    slices = tiles.data.shape[1]
    # if no channel is chosen, `draw_tiles` raises the error
    count = max(1, count_chosen(options.channels, outputs))
    shape = (count, slices, height, width)
    # the columns that a grid of these tiles would have
    plan = grid.plan(shape, options)
    if options.nrow is None and slices > 1:
        # the slices of a channel stay in one row
        channels_in_row = 1 if all_slices else max(1, plan.columns // slices)
        options = structs.replace(options, nrow=channels_in_row * slices)
    factor = plan.scale[0]
    if options.scale is None:
        factor = _enlargement(shape, options, factor)
    options = structs.replace(options, scale=factor, max_slices=slices)
    scale = parse_scale(options.normalize)
    picture = draw_tiles(tiles.data, tiles.layout, options, scale)
    return FilterPicture(picture, description)


class _FilterTiles(NamedTuple):
    """Kernels as `draw_tiles` takes them."""

    data: Tensor
    """float32 [O, S, K, H, W]: S tiles for each output channel in K colours."""
    layout: str
    """`slices`, `rgb` or `mean`."""
    description: str
    """See `FilterPicture.description`."""


def _tiles(filters: Filters, all_slices: bool) -> _FilterTiles:
    """Kernels as tiles: RGB, the mean over the input channels, or a tile for each input
    channel; see `draw_filters`."""
    kernels = filters.kernels
    inputs = kernels.shape[1]
    if inputs == 1 or all_slices:
        description = "one input's kernel"
        if inputs > 1:
            description += f", {inputs} inputs a channel"
        return _FilterTiles(kernels.flatten(1, 2)[:, :, None], "slices", description)
    # with groups, the three inputs are not the image's colours
    if inputs == 3 and filters.groups == 1:
        return _FilterTiles(kernels.transpose(1, 2), "rgb", "RGB of three inputs")
    mean = kernels.mean(1)[:, :, None]
    return _FilterTiles(mean, "mean", f"mean over {inputs} inputs")


def _enlargement(shape: tuple[int, ...], options: DrawOptions, factor: int) -> int:
    """A whole factor by which the tiles are enlarged: the smallest one, from `factor` on,
    that makes the picture's longer side AUTO_SIDE pixels long. If the picture would have
    more than AUTO_PIXELS, the factor is smaller.

    Args:
        shape: see `grid.plan`.
        factor: the factor at which a single tile is large enough.
    """

    def plan(factor: int) -> GridPlan:
        """The picture's plan, whose size also depends on padding and columns."""
        return grid.plan(shape, structs.replace(options, scale=factor))

    while max(plan(factor).height, plan(factor).width) < AUTO_SIDE:
        factor += 1
    while factor > 1 and plan(factor).pixels > AUTO_PIXELS:
        factor -= 1
    return factor


def post_kernels(model: nn.Module, layers: Sequence[Layer], board: Board) -> None:
    """Show in TensorBoard the kernels of layers as `featviz kernels` draws them. Layers
    without kernels that can be drawn are left out silently."""
    modules = modules_by_name(model)
    for layer in layers:
        with suppress(LayoutError), torch.no_grad():
            if layer.name in modules:
                post_filters(board, layer, read_filters(modules[layer.name]))


def post_filters(
    board: Board, layer: Layer, filters: Filters, options: DrawOptions = DRAW
) -> None:
    """Show a layer's kernels in TensorBoard, with a histogram of all weights. Unless the
    options choose channels, only the first MOST_MAPS are drawn."""
    if options.channels is None:
        options = structs.replace(options, channels=f"first:{tensorboard.MOST_MAPS}")
    picture, _ = draw_filters(filters, options)
    values = board.values(
        CaptureSite(layer, "kernel", 0, ""),
        partial(to_png, picture),
        picture.stats,
        shown=len(picture.drawn),
        histogram=tensorboard.histogram(filters.kernels),
    )
    board.post(values)
