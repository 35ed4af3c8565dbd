"""From maps to tiles of grey levels or colours, with the geometry of their picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from featviz.drawing import colormap as palette
from featviz.drawing import grid, normalize, order, stats
from featviz.drawing import reduce as reduction
from featviz.drawing.colormap import Palette
from featviz.drawing.normalize import Scale, ValueLimits
from featviz.drawing.reduce import Basis
from featviz.errors import LayoutError
from featviz.layout import Maps
from featviz.records import Bytes, DrawOptions, Floats, GridPlan, Tiles

LARGEST_SIDE = {"png": 2**31 - 1, "webp": 16_383, "jpg": 65_500}
"""Pixels that a format can hold in one direction."""

ALONE = 224
"""Pixels that the longer side of a tile without neighbours should have."""

PCA_SPAN = 2.5
"""Standard deviations from the mean at which a principal component is darkest and brightest."""


@dataclass(frozen=True)
class Drawing:
    """A picture ready to be encoded; nothing in it refers to the tensor any more."""

    layout: str
    plan: GridPlan
    tiles: Tiles
    """[N, H, W], or [N, H, W, 3] for RGB."""
    palette: Palette
    limits: ValueLimits
    stats: Floats
    """[channels, 6], of all maps, drawn or not."""
    channels: list[int] | None
    """The drawn channels in tile order, where they are not simply all."""
    slices: tuple[int, int]
    """Tiles of each channel: drawn, and held by the tensor."""
    values: int
    """Numbers in each channel."""
    strip: bool = False
    """The numbers of a vector, side by side."""
    groups: dict[int, list[int]] = field(default_factory=dict)
    """Channels that share a tile, by the one that is drawn."""
    labels: bool = False
    """Whether channels stand on the tiles."""
    reduce: str | None = None
    overlay: float | None = None

    @property
    def drawn(self) -> Sequence[int]:
        """The channel of each tile; of slices side by side the one they share."""
        return range(len(self.stats)) if self.channels is None else self.channels

    @property
    def levels(self) -> bool:
        """Whether tiles are levels of the palette, not colours."""
        return len(self.tiles.shape) == 3


@dataclass(frozen=True)
class Choice:
    """Which channels are drawn, in which order."""

    channels: list[int] | None
    """None where simply all are."""
    groups: dict[int, list[int]] = field(default_factory=dict)


def choose(data: Tensor, numbers: Floats, options: DrawOptions) -> Choice:
    """Near-equal maps share a tile, then `max_maps` picks, then the tiles are ordered.

    Args:
        data: maps [C, ...] with their statistics `numbers` [C, 6].
    """
    means = numbers[:, stats.MEAN].tolist()
    if options.order == "index" and options.collapse is None:
        return Choice(grid.pick_maps(means, options))
    flat = normalize.is_flat(numbers[:, stats.MIN], numbers[:, stats.MAX])
    finite = numbers[:, stats.NONFINITE] == 0
    channels = order.Channels(data.flatten(1), numbers[:, stats.MEAN], flat, finite)
    groups = {}
    if options.collapse is not None:
        groups = order.collapse(channels, options.collapse)
    ids = list(groups) or list(range(len(data)))
    picked = grid.pick_maps([means[i] for i in ids], options)
    ids = ids if picked is None else [ids[i] for i in picked]
    if options.order != "index":
        ids = [ids[i] for i in order.ORDERS[options.order](channels.part(ids))]
    shared = {leader: group for leader in ids if len(group := groups.get(leader, [])) > 1}
    return Choice(None if ids == list(range(len(data))) else ids, shared)


def draw_tiles(data: Tensor, layout: str, options: DrawOptions, mode: Scale) -> Drawing:
    """Draw what is maps already: float32 [C, S, K, H, W], S tiles for each channel in K colours.

    The tiles of a channel share its limits. Where K is 3, so do the colours, which makes equal
    values grey; the colormap is then not used, and a pixel that is not finite in some colour is
    magenta. Statistics are those of a channel's tiles.

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    count, slices, colours, height, width = data.shape
    rows = data.reshape(count, slices * colours * height, width)
    numbers = stats.channel_stats(rows)
    choice = choose(rows, numbers, options)
    limits = normalize.limits(mode, rows, numbers[:, stats.MIN], numbers[:, stats.MAX])
    limits = _for_tiles(limits, choice.channels, 1)
    rows = rows if choice.channels is None else rows[choice.channels]
    plan = plan_for((len(rows), slices, height, width), False, options)
    paint = _rgb_tiles if colours == 3 else _level_tiles
    tiles, colors = paint(rows, height, limits, options, bool(numbers[:, stats.NONFINITE].any()))
    return Drawing(
        *(layout, plan, tiles, colors, limits, numbers, choice.channels, (slices, slices)),
        values=data[0].numel(),
        groups=choice.groups,
        labels=options.labels,
    )


def draw_maps(maps: Maps, options: DrawOptions, mode: Scale, basis: Basis | None = None) -> Drawing:
    """Turn maps into tiles and statistics.

    Args:
        basis: of the principal components, for `reduce="pca"`; None takes the tensor's own.

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    numbers = stats.channel_stats(maps.data)
    if maps.strip:
        plain = replace(options, order="index", collapse=None)
        mode = Scale("layer") if mode.mode == "map" else mode
        return _draw_chosen(maps, numbers, choose(maps.data, numbers, plain), options, mode)
    if options.reduce is not None:
        return _draw_reduced(maps, numbers, options, mode, basis)
    return _draw_chosen(maps, numbers, choose(maps.data, numbers, options), options, mode)


def _draw_chosen(
    maps: Maps, numbers: Floats, choice: Choice, options: DrawOptions, mode: Scale
) -> Drawing:
    """A tile for each channel that was chosen, and each of its slices."""
    chosen, held = choice.channels, maps.data.shape[1]
    limits = normalize.limits(mode, maps.data, numbers[:, stats.MIN], numbers[:, stats.MAX])
    drawn = (maps.data if chosen is None else maps.data[chosen])[:, : options.max_slices]
    _, slices, height, _ = drawn.shape
    limits = _for_tiles(limits, chosen, slices)
    plan = plan_for(drawn.shape, maps.strip, options)
    holes = bool(numbers[:, stats.NONFINITE].any())
    tiles, colors = _level_tiles(drawn.flatten(0, 1), height, limits, options, holes)
    return Drawing(
        *(maps.layout, plan, tiles, colors, limits, numbers, chosen, (slices, held)),
        values=maps.data[0].numel(),
        strip=maps.strip,
        groups=choice.groups,
        labels=options.labels,
    )


def _draw_reduced(
    maps: Maps, numbers: Floats, options: DrawOptions, mode: Scale, basis: Basis | None
) -> Drawing:
    """One tile of all channels; the statistics stay those of each."""
    assert options.reduce is not None
    data = maps.data[:, : options.max_slices]
    if options.reduce == "pca":
        if basis is None or len(basis.mean) != len(data):
            basis = reduction.basis_of(maps.data)
        data = basis.project(data)
        one = data.transpose(0, 1)[None]
        mode = Scale("range", (-PCA_SPAN, PCA_SPAN))
    else:
        one = reduction.REDUCTIONS[options.reduce](data)[:, :, None]
        mode = Scale("layer") if mode.mode == "map" else mode
    return replace(
        draw_tiles(one, maps.layout, for_one(options), mode),
        stats=numbers,
        slices=(data.shape[1], maps.data.shape[1]),
        values=maps.data[0].numel(),
        reduce=options.reduce,
    )


def for_one(options: DrawOptions) -> DrawOptions:
    """How the one tile of a reduced layer is drawn: `auto` makes it as large as a picture."""
    return replace(options, min_tile=max(options.min_tile, ALONE))


def plan_for(shape: Sequence[int], strip: bool, options: DrawOptions) -> GridPlan:
    """The geometry for maps of shape [C, S, H, W].

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    plan = grid.plan(shape, options, strip)
    most = LARGEST_SIDE[options.format]
    if max(plan.height, plan.width) > most:
        raise LayoutError(
            f"its picture of {plan.width}×{plan.height} pixels is more than {options.format} holds "
            f"({most} a side); --format png, or --max-maps and --nrow"
        )
    return plan


def _for_tiles(limits: ValueLimits, channels: list[int] | None, slices: int) -> ValueLimits:
    """The limits of each tile, from those of each channel."""
    if limits.shared is not None:
        return limits
    low, high = (v if channels is None else v[channels] for v in (limits.low, limits.high))
    return ValueLimits(np.repeat(low, slices), np.repeat(high, slices), limits.mode)


def _level_tiles(
    rows: Tensor, height: int, limits: ValueLimits, options: DrawOptions, nonfinite: bool
) -> tuple[Bytes, Palette]:
    """[C, S·H, W] to levels [C·S, H, W]."""
    labelled = options.labels or options.collapse is not None
    colors = palette.chosen(options.cmap, options.pad_value, nonfinite, labelled)
    levels = normalize.to_tiles(rows, limits, colors.levels, colors.nonfinite)
    return levels.reshape(-1, height, levels.shape[2]), colors


def _rgb_tiles(
    rows: Tensor, height: int, limits: ValueLimits, options: DrawOptions, nonfinite: bool
) -> tuple[Bytes, Palette]:
    """[C, S·3·H, W] to pixels [C·S, H, W, 3]."""
    colors = palette.plain_grey(options.pad_value)
    levels = normalize.to_tiles(rows, limits, colors.levels, 0 if nonfinite else None)
    shape = (-1, 3, height, levels.shape[2])
    tiles = levels.reshape(shape).transpose(0, 2, 3, 1).copy()
    tiles[~torch.isfinite(rows).reshape(shape).all(1).cpu().numpy()] = palette.MAGENTA
    return tiles, colors
