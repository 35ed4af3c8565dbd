"""From maps to a picture's tiles of levels or colours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from featviz.drawing import class_maps, colormap, grid, labels, levels, order, reduce, stats
from featviz.drawing.colormap import Palette
from featviz.drawing.levels import ValueLimits
from featviz.drawing.normalize import Scale
from featviz.drawing.picture import GridPicture
from featviz.drawing.reduce import Basis
from featviz.layout import Maps
from featviz.layout.layouts import LAYOUTS
from featviz.records import Bytes, DrawOptions, Floats

PCA_SPAN = 2.5
"""Standard deviations from the mean at which a principal component is darkest and brightest."""


def draw_maps(
    maps: Maps,
    options: DrawOptions,
    scale: Scale,
    basis: Basis | None = None,
    gradient: Maps | None = None,
) -> GridPicture:
    """Draw the maps of a tensor: a tile for each channel and slice, or one for all channels.

    Args:
        basis: of the principal components, for `reduce="pca"`; None takes the tensor's own.
        gradient: of the target at these maps, for class activation maps.

    Raises:
        LayoutError: the picture is larger than its format can hold, or there is no class activation
            map of these maps.
    """
    if maps.strip and gradient is None:
        return draw_tiles(maps.data[:, :, None], maps.layout, options, scale.for_layer, strip=True)
    if options.reduce is None:
        return draw_tiles(maps.data[:, :, None], maps.layout, options, scale, heat=True)
    steps = _steps(maps.layout, maps.data.shape[1], options)
    data = maps.data[:, steps]
    if options.reduce == "pca":
        if basis is None or len(basis.mean) != len(data):
            basis = reduce.basis_of(maps.data)
        one = basis.project(data).transpose(0, 1)[None]
        scale = Scale("range", (-PCA_SPAN, PCA_SPAN))
    elif gradient is not None:
        one = class_maps.class_map(options.reduce, maps, gradient)[:, steps, None]
        scale = scale.for_layer
    else:
        one = reduce.REDUCTIONS[options.reduce](data)[:, :, None]
        scale = scale.for_layer
    return replace(
        draw_tiles(one, maps.layout, options, scale, alone=True),
        stats=stats.channel_stats(maps.data),
        slices=(data.shape[1], maps.data.shape[1]),
        steps=steps,
        values=maps.data[0].numel(),
        reduce=options.reduce,
    )


def draw_tiles(
    data: Tensor,
    layout: str,
    options: DrawOptions,
    scale: Scale,
    *,
    strip: bool = False,
    alone: bool = False,
    heat: bool = False,
) -> GridPicture:
    """Draw maps float32 [C, S, K, H, W]: S tiles for each channel in K colours.

    The tiles of a channel share its limits. Where K is 3, so do the colours, which makes equal
    values grey; the colormap is then not used, and a pixel that is not finite in some colour is
    magenta. Statistics and limits are those of all slices, drawn or not.

    Args:
        strip: the numbers of a vector, side by side and in their order.
        alone: the one tile of all channels.
        heat: draw maps that are all constant, and not all zero, as a strip of their values.

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    rows = data.flatten(1)
    numbers = stats.channel_stats(rows)
    constant = None
    if heat and options.marks and _says_nothing(data, numbers):
        constant, strip, scale = (data.shape[1], *data.shape[3:]), True, scale.for_layer
    choice = _choose(rows, numbers, options, strip)
    limits = levels.limits(scale, rows, numbers[:, stats.MIN], numbers[:, stats.MAX])
    held = data if constant is None else data[:, :1, :, :1, :1]
    steps = _steps(layout, held.shape[1], options)
    drawn = (held if choice.channels is None else held[choice.channels])[:, steps]
    count, slices, colours, height, width = drawn.shape
    plan = grid.plan_file((count, slices, height, width), options, strip=strip, alone=alone)
    limits = limits.of_tiles(choice.channels, slices)
    paint = _rgb_tiles if colours == 3 else _level_tiles
    nonfinite = bool(numbers[:, stats.NONFINITE].any())
    painted, colors = paint(drawn.flatten(0, 1), limits, options, nonfinite)
    return GridPicture(
        *(layout, plan, painted, colors, limits, numbers, choice.channels),
        slices=(slices, held.shape[1]),
        steps=steps,
        values=data[0].numel(),
        strip=strip,
        constant=constant,
        groups=choice.groups,
        labels=options.labels,
        marked=(labels.ZERO, labels.CONSTANT) if options.marks else (),
    )


def _steps(layout: str, held: int, options: DrawOptions) -> list[int] | slice:
    """The slices that are drawn of those that each channel holds, all as a slice.

    Of a clip or a volume those in the middle of equal parts; of a batch, whose first regions may be
    its best, the first.
    """
    most = options.max_slices
    if held <= most:
        return slice(None)
    if layout in LAYOUTS and LAYOUTS[layout].allows_many:
        return list(range(most))
    return [(2 * part + 1) * held // (2 * most) for part in range(most)]


def _says_nothing(data: Tensor, numbers: Floats) -> bool:
    """Whether a grid of these maps would be tiles of a single level each: all of several are
    constant, as gradients behind global pooling are. Zeros everywhere are a finding of their own,
    and stay a grid.

    Args:
        data: maps [C, S, K, H, W].
        numbers: their statistics [C, 6].
    """
    if len(data) == 1 or data.shape[2] > 1 or data[0].numel() == 1:
        return False
    if not stats.is_constant(numbers[:1]).all():  # of most layers this one says it
        return False
    return bool(stats.is_constant(numbers).all() and numbers[:, stats.MIN].any())


@dataclass(frozen=True)
class _Choice:
    """Which channels are drawn, in which order."""

    channels: list[int] | None
    """None where simply all are."""
    groups: dict[int, list[int]] = field(default_factory=dict)


def _choose(rows: Tensor, numbers: Floats, options: DrawOptions, strip: bool) -> _Choice:
    """Near-equal maps share a tile, then `max_maps` picks, then the tiles are ordered.

    Args:
        rows: the values [C, N] of each channel, with their statistics `numbers` [C, 6].
        strip: only pick.
    """
    means = numbers[:, stats.MEAN].tolist()
    if strip or (options.order == "index" and options.collapse is None):
        return _Choice(grid.pick_maps(means, options))
    flat = levels.is_flat(numbers[:, stats.MIN], numbers[:, stats.MAX])
    finite = numbers[:, stats.NONFINITE] == 0
    channels = order.Channels(rows, numbers[:, stats.MEAN], flat, finite)
    groups = {}
    if options.collapse is not None:
        groups = order.collapse(channels, options.collapse)
    ids = list(groups) or list(range(len(rows)))
    picked = grid.pick_maps([means[i] for i in ids], options)
    ids = ids if picked is None else [ids[i] for i in picked]
    if options.order != "index":
        ids = [ids[i] for i in order.ORDERS[options.order](channels.part(ids))]
    shared = {leader: group for leader in ids if len(group := groups.get(leader, [])) > 1}
    return _Choice(None if ids == list(range(len(rows))) else ids, shared)


def _level_tiles(
    maps: Tensor, limits: ValueLimits, options: DrawOptions, nonfinite: bool
) -> tuple[Bytes, Palette]:
    """[N, 1, H, W] to levels [N, H, W]."""
    labelled = options.labels or options.collapse is not None
    colors = colormap.chosen(options.cmap, options.gap_grey, nonfinite, labelled)
    return levels.to_levels(maps[:, 0], limits, colors.levels, colors.nonfinite), colors


def _rgb_tiles(
    maps: Tensor, limits: ValueLimits, options: DrawOptions, nonfinite: bool
) -> tuple[Bytes, Palette]:
    """[N, 3, H, W] to pixels [N, H, W, 3]."""
    colors = colormap.plain_grey(options.gap_grey)
    tiles = levels.to_levels(maps, limits, colors.levels, 0 if nonfinite else None)
    tiles = tiles.transpose(0, 2, 3, 1).copy()
    tiles[~torch.isfinite(maps).all(1).cpu().numpy()] = colormap.MAGENTA
    return tiles, colors
