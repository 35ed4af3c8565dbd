"""Kernels of convolutions, as pictures; `filters` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from featviz.drawing import filters, grid, tensorboard, tiles
from featviz.drawing.filters import Filters, FilterTiles
from featviz.drawing.normalize import parse_scale
from featviz.drawing.picture import GridPicture, to_png
from featviz.drawing.tensorboard import Board, Post
from featviz.errors import LayoutError
from featviz.hooks.layers import modules_by_name
from featviz.records import DrawOptions, Layer, Site

DRAW = DrawOptions(normalize="symmetric")
"""How kernels are drawn unless the user says otherwise: zero stays in the middle."""

AUTO_PIXELS = 2**26
"""`--scale auto` enlarges no kernels beyond a picture of so many pixels."""


AUTO_SIDE = 480
"""Pixels that the longer side of a picture has at least under `--scale auto`: of sixteen kernels of
3×3 it would else have 142."""


def draw_filters(
    kernels: Filters, options: DrawOptions, all_slices: bool = False
) -> tuple[FilterTiles, GridPicture]:
    """The picture of a layer's kernels, by output channel, and what its tiles are.

    Args:
        all_slices: a tile for each input of each kernel, instead of one for each kernel.

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    made = filters.to_tiles(kernels, all_slices)
    draw = _geometry(made, options, all_slices)
    scale = parse_scale(draw.normalize)
    return made, tiles.draw_tiles(made.data, made.layout, draw, scale)


def post_kernels(model: nn.Module, layers: Sequence[Layer], board: Board) -> None:
    """Show the kernels of those layers that have some, as `featviz kernels` draws them.

    Args:
        model: in eval mode.
    """
    modules = modules_by_name(model)
    for layer in layers:
        with suppress(LayoutError), torch.no_grad():
            if layer.name in modules and filters.is_convolution(modules[layer.name]):
                kernels = filters.read_filters(modules[layer.name])
                post_filters(board, layer, kernels, draw_filters(kernels, DRAW)[1])


def post_filters(board: Board, layer: Layer, kernels: Filters, picture: GridPicture) -> None:
    """Show a layer's kernels in TensorBoard, with a histogram of all weights."""
    encoded: Future[bytes] = Future()
    encoded.set_result(to_png(picture))
    size = (picture.plan.height, picture.plan.width)
    counts = tensorboard.histogram(kernels.data)
    site = Site(layer, "kernel", 0, "")
    board.post([Post(site, encoded, size, picture.stats, picture.values, counts)], 0)


def _geometry(made: FilterTiles, options: DrawOptions, all_slices: bool) -> DrawOptions:
    """Settle what is `auto`: a channel's tiles stay in one row and are all drawn, few kernels are
    large enough to be seen, and no picture grows huge.

    With all slices a row of the picture is an output channel and a column an input.
    """
    channels, slices, _, height, width = made.data.shape
    shape = (min(channels, options.max_maps or channels), slices, height, width)
    plan = grid.plan(shape, options)
    if options.nrow is None and slices > 1:
        beside = 1 if all_slices else max(1, plan.columns // slices)
        options = replace(options, nrow=beside * slices)
    factor = plan.scale[0]
    while options.scale is None and max(plan.height, plan.width) < AUTO_SIDE:
        factor += 1
        plan = grid.plan(shape, replace(options, scale=factor))
    while options.scale is None and factor > 1 and plan.pixels > AUTO_PIXELS:
        factor -= 1
        plan = grid.plan(shape, replace(options, scale=factor))
    return replace(options, scale=factor, max_slices=slices)
