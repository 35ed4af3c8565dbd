"""What is laid under the tiles of a drawing, and what is written on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt

import numpy as np

from featviz.drawing import colormap, grid, labels, normalize, stats
from featviz.drawing.figure import FigurePage, Panel
from featviz.drawing.overlay import Overlay
from featviz.drawing.tiles import Drawing, for_one, plan_for
from featviz.layout import Maps
from featviz.layout.layouts import LAYOUTS
from featviz.records import Bytes, DrawOptions, Floats

FIRST = 16
"""Maps in a figure, if not said otherwise."""

REDUCED = {
    "mean": "mean",
    "max": "maximum",
    "l2": "L2 norm",
    "pca": "components 1 to 3",
}
"""Titles of reductions."""

FLAT_WORDS = {labels.ZERO: " (all zero)", labels.CONSTANT: " (constant)"}


def coloured(options: DrawOptions, maps: Maps) -> DrawOptions:
    """With the colormap that `auto` is for maps that will lie over the input."""
    if options.overlay is None or options.cmap != "auto" or not LAYOUTS[maps.layout].aligned:
        return options
    return replace(options, cmap=colormap.OVER_INPUT)


def lay_over(drawing: Drawing, ground: Sequence[Bytes], options: DrawOptions) -> Drawing:
    """Lay a drawing's maps over what the model saw; one that does not lie over it stays as it is.

    Args:
        ground: uint8 [H, W, 3]: the picture, or the frames of a clip, of which each time step gets
            the one in its middle.

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    if options.overlay is None or not LAYOUTS[drawing.layout].aligned:
        return drawing
    side, held = drawing.slices
    count = drawing.tiles.shape[0] // side
    frames = [int((step + 0.5) * len(ground) / held) for step in range(side)] * count
    colors = drawing.palette
    maps = drawing.tiles[:]
    told = options if drawing.reduce is None else for_one(options)
    tiles = Overlay(
        maps, colormap.table(colors), colors.nonfinite, ground, frames, float(options.overlay)
    )
    return replace(
        drawing,
        plan=plan_for((count, side, *ground[0].shape[:2]), False, told),
        tiles=tiles,
        palette=colormap.plain_grey(options.pad_value),
        overlay=options.overlay,
    )


def sheet(drawing: Drawing, options: DrawOptions, title: str, shown: Bytes) -> FigurePage:
    """What the figure of a drawing shows: its first tiles by value, beside the input [H, W, C]."""
    cmap = "viridis" if options.cmap == "auto" else options.cmap
    cmap = "gray" if cmap in colormap.GREYS else cmap
    return FigurePage(
        title, shown, _panels(drawing, options), cmap, drawing.limits.shared is not None
    )


def shown_first(options: DrawOptions, tiles: int) -> int:
    """How many of a picture's maps its figure shows."""
    return min(options.first or FIRST, tiles)


def _panels(drawing: Drawing, options: DrawOptions) -> list[Panel]:
    if drawing.strip:
        values = _values(drawing, slice(None))[..., 0].T
        return [Panel(f"{len(drawing.drawn)} numbers", values, drawing.limits.shared)]
    side, marks = drawing.slices[0], _marks(drawing)
    if drawing.reduce is not None:
        titles = [f"{REDUCED[drawing.reduce]} of {len(drawing.stats)} channels"]
    else:
        titles = [
            f"channel {channel}"
            + (f" ×{len(drawing.groups[channel])}" if channel in drawing.groups else "")
            + FLAT_WORDS.get(marks.get(place * side, ""), "")
            for place, channel in enumerate(drawing.drawn)
        ]
    count = shown_first(options, len(titles))
    return [
        Panel(title, *_beside(drawing, slice(place * side, (place + 1) * side)))
        for place, title in enumerate(titles[:count])
    ]


def _beside(drawing: Drawing, part: slice) -> tuple[Floats | Bytes, tuple[float, float] | None]:
    """The slices of a channel side by side, with its limits; colours stand for no value."""
    limits = drawing.limits
    place = part.start if limits.shared is None else 0
    low, high = np.nan_to_num([limits.low[place], limits.high[place]])
    own = (float(low), float(high))
    if drawing.levels:
        return np.concatenate(list(_values(drawing, part)), axis=1), own
    plain = drawing.overlay is not None and drawing.reduce != "pca"
    return np.concatenate(list(drawing.tiles[part]), axis=1), own if plain else None


def _values(drawing: Drawing, part: slice) -> Floats:
    """The numbers that levels stand for, NaN for those that are not finite."""
    limits, colors, tiles = drawing.limits, drawing.palette, drawing.tiles[part]
    shared = limits.shared is not None
    low, high = (v if shared else v[part] for v in (limits.low, limits.high))
    span = (high - low)[:, None, None] / (colors.levels - 1)
    values = tiles * span + low[:, None, None]
    if colors.nonfinite is not None:
        values[tiles == colors.nonfinite] = np.nan
    found: Floats = values.astype(np.float32)
    return found


def as_make_grid(drawing: Drawing, options: DrawOptions) -> Drawing:
    """The same tiles in the geometry of `make_grid(nrow=int(sqrt(C)))`, but for what was told.

    A vector stays one strip.
    """
    if drawing.strip:
        return drawing
    plan, side = drawing.plan, drawing.slices[0]
    channels = plan.maps // side
    nrow, factor = options.nrow or isqrt(channels) * side, options.scale or 1
    told = replace(options, nrow=nrow, scale=factor)
    return replace(drawing, plan=grid.plan((channels, side, *plan.map_size), told))


def stamper(drawing: Drawing) -> labels.Stamps | None:
    """What is written on the tiles; None where nothing is."""
    corner, count, marks = _labels(drawing), _counts(drawing), _marks(drawing)
    if not (corner or count or marks):
        return None
    colors = drawing.palette
    return labels.Stamps(corner, count, marks, colors.dark, colors.light, colors.levels)


def labels_fit(drawing: Drawing) -> bool:
    """Whether all labels have room on their tiles."""
    texts = [*_labels(drawing).values(), *_counts(drawing).values()]
    return all(labels.fits(text, drawing.plan.tile) for text in texts)


def _labels(drawing: Drawing) -> dict[int, str]:
    """Channels, on the first tile of each."""
    if not drawing.labels:
        return {}
    side = drawing.slices[0]
    return {place * side: str(channel) for place, channel in enumerate(drawing.drawn)}


def _counts(drawing: Drawing) -> dict[int, str]:
    """How many channels share a tile, on the last tile of those that several do."""
    if not drawing.groups:
        return {}
    side = drawing.slices[0]
    return {
        place * side + side - 1: f"×{len(drawing.groups[channel])}"
        for place, channel in enumerate(drawing.drawn)
        if channel in drawing.groups
    }


def _marks(drawing: Drawing) -> dict[int, str]:
    """Marks of constant maps; maps of one number are constant by nature."""
    whole = drawing.strip or drawing.reduce is not None or drawing.overlay is not None
    if whole or drawing.plan.map_size == (1, 1):
        return {}
    low, high, nonfinite = drawing.stats.T[[stats.MIN, stats.MAX, stats.NONFINITE]]
    flat = normalize.is_flat(low, high) & (nonfinite == 0)
    if not flat.any():
        return {}
    side = drawing.slices[0]
    return {
        place * side + step: labels.CONSTANT if low[channel] else labels.ZERO
        for place, channel in enumerate(drawing.drawn)
        if flat[channel]
        for step in range(side)
    }
