"""Kernels of convolutions: read by output channel, and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from featviz.drawing import grid, tensorboard
from featviz.drawing.drawer import draw_tiles
from featviz.drawing.normalize import parse_scale
from featviz.drawing.picture import GridPicture, to_png
from featviz.drawing.tensorboard import Board
from featviz.errors import LayoutError
from featviz.hooks.layers import EXPORTED, class_names, function_name, modules_by_name
from featviz.layout import to_floats
from featviz.options import DrawOptions
from featviz.records import CaptureSite, GridPlan, Layer
from featviz.text import by

DRAW = DrawOptions(normalize="symmetric")
"""How kernels are drawn unless the user says otherwise: zero stays in the middle."""

AUTO_PIXELS, AUTO_SIDE = 2**26, 480
"""Pixels of a picture at most, and of its longer side at least, under `--scale auto`: sixteen
kernels of 3×3 would else take 142."""

_TRANSPOSED = "_ConvTransposeNd"
_CONVOLUTIONS = frozenset({"_ConvNd", "DeformConv2d"})
"""Classes of modules with kernels; all of torch's convolutions are `_ConvNd`."""

_RECOMPUTED = (BasePruningMethod, SpectralNorm, WeightNorm)
"""Hooks that set the effective weight before each forward pass; until then it may be stale."""

Filters = tuple[Tensor, list[int], int, bool]
"""The kernels of a convolution by output channel, float32 [output channels, input channels in a
group, time, height, width], where time and height are 1 if the kernel has none; the shape of the
weight as the module holds it; groups; and whether it is transposed."""


def is_convolution(module: nn.Module) -> bool:
    """Whether a module, or what an exported one stands for, has kernels."""
    return not _CONVOLUTIONS.isdisjoint(class_names(module))


def read_filters(module: nn.Module) -> Filters:
    """The effective kernels of a module in eval mode: parametrized, normalised, pruned; LayoutError
    where it has none with real values. Channel i is output channel i of the module's feature maps.
    A convolution's are correlated with its input, a transposed one's are stamped on its output."""
    name = class_names(module)[0]
    if not is_convolution(module):
        raise LayoutError(f"{name} has no convolution kernels")
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _RECOMPUTED):
            hook(module, ())
    weight: Any = getattr(module, "weight", None)
    if callable(weight) and not isinstance(weight, Tensor):  # torch.ao.nn.quantized
        weight = weight()
    if not isinstance(weight, Tensor):
        raise LayoutError("it has no weight that is a tensor")
    groups = getattr(module, "groups", 1)
    graph: Any = getattr(module, "graph", None)
    is_exported = type(module).__module__ == EXPORTED  # where only the call has them
    for node in graph.nodes if is_exported else ():
        name = function_name(node.target) if node.op == "call_function" else ""
        if name.startswith("conv"):
            place = 8 if name == "convolution" else 6
            groups = int(node.kwargs.get("groups", (*node.args, *[1] * 9)[place]))
            break
    if type(groups) is not int or groups < 1:
        raise LayoutError("its number of groups is none")
    if isinstance(weight, UninitializedParameter):
        raise LayoutError(f"its weight has no size yet: the {name} saw no input")
    try:
        values = to_floats(weight.detach())
    except LayoutError as error:
        raise LayoutError(f"its weight {error.message}") from None
    if values.numel() == 0:
        raise LayoutError(f"its weight is empty: {by(values.shape)}")
    by_output, transposed = values, _TRANSPOSED in class_names(module)
    if transposed:  # [inputs, outputs / groups, ...] to [outputs, inputs / groups, ...]
        split = values.reshape(groups, -1, *values.shape[1:])
        by_output = split.transpose(1, 2).flatten(0, 1)
    # [O, I, W] or [O, I, H, W] to [O, I, T, H, W]
    size = (*by_output.shape[:2], *[1] * (5 - values.ndim), *by_output.shape[2:])
    return by_output.reshape(size), list(values.shape), groups, transposed


def draw_filters(
    kernels: Filters, options: DrawOptions, all_slices: bool = False
) -> tuple[GridPicture, str]:
    """The picture of a layer's kernels, by output channel, and what its tiles are, in words. A tile
    is RGB for three input channels, else the mean over the inputs, or with `all_slices` one
    input's: a row is then an output channel, a column an input. Kernels with a time axis have a
    tile for each step. `auto` makes few kernels large enough to be seen, and no picture huge."""
    (data, _, groups, _), layout = kernels, "mean"
    outputs, inputs, steps, *size = data.shape
    if inputs == 1 or all_slices:
        layout = "slices"
        words = "one input's kernel" + f", {inputs} inputs a channel" * (inputs > 1)
        tiles = data.reshape(outputs, inputs * steps, 1, *size)
    elif inputs == 3 and groups == 1:
        layout, words, tiles = "rgb", "RGB of three inputs", data.transpose(1, 2)
    else:
        words, tiles = f"mean over {inputs} inputs", data.mean(1)[:, :, None]
    slices = tiles.shape[1]
    shape = (min(outputs, options.max_maps or outputs), slices, *size)
    plan = grid.plan(shape, options)
    if options.nrow is None and slices > 1:
        beside = 1 if all_slices else max(1, plan.columns // slices)
        options = structs.replace(options, nrow=beside * slices)
    factor = plan.scale[0]

    def enlarged(factor: int) -> GridPlan:
        return grid.plan(shape, structs.replace(options, scale=factor))

    if options.scale is None:
        while max(enlarged(factor).height, enlarged(factor).width) < AUTO_SIDE:
            factor += 1
        while factor > 1 and enlarged(factor).pixels > AUTO_PIXELS:
            factor -= 1
    options = structs.replace(options, scale=factor, max_slices=slices)
    picture = draw_tiles(tiles, layout, options, parse_scale(options.normalize))
    return picture, words + f", {steps} time steps a channel" * (steps > 1)


def post_kernels(model: nn.Module, layers: Sequence[Layer], board: Board) -> None:
    """Show the kernels of those layers that have some, as `featviz kernels` draws them."""
    modules = modules_by_name(model)
    for layer in layers:
        with suppress(LayoutError), torch.no_grad():
            if layer.name in modules and is_convolution(modules[layer.name]):
                post_filters(board, layer, read_filters(modules[layer.name]))


def post_filters(board: Board, layer: Layer, kernels: Filters, options: DrawOptions = DRAW) -> None:
    """Show a layer's kernels in TensorBoard, with a histogram of all weights."""
    most = min(options.max_maps or tensorboard.MOST_MAPS, tensorboard.MOST_MAPS)
    picture, _ = draw_filters(kernels, structs.replace(options, max_maps=most))
    site, counts = CaptureSite(layer, "kernel", 0, ""), tensorboard.histogram(kernels[0])
    shown = picture.stats, len(picture.drawn)
    board.post(board.values(site, partial(to_png, picture), *shown, counts))
