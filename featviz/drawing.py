"""One tensor's way to a picture: layout, stats, scale, grid; then encode and write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from featviz import mosaic, palette, png, scale, stats
from featviz.errors import LayoutError
from featviz.layout import Maps, to_maps
from featviz.palette import Palette
from featviz.records import Bytes, Capture, DrawOptions, Floats, GridPlan, Hints, Site
from featviz.scale import Limits, Scale

GRADIENTS = {"normalize": "symmetric", "cmap": "coolwarm"}
"""How gradients are drawn where `auto` stands: zero in the middle, and a colour for either sign."""

LARGEST_SIDE = {"png": 2**31 - 1, "webp": 16_383, "jpg": 65_500}
"""Pixels that a format can hold in one direction."""


class Drawer:
    """How tensors are drawn: the options, with the scales read, for gradients and all else."""

    def __init__(self, options: DrawOptions) -> None:
        """Read the options.

        Raises:
            UsageError: no such scale.
        """
        self.options = options
        autos = {k: v for k, v in GRADIENTS.items() if getattr(options, k) == "auto"}
        ways = {False: options, True: replace(options, **autos)}  # type: ignore[arg-type]
        self._ways = {key: (way, scale.parse_scale(way.normalize)) for key, way in ways.items()}

    def of(self, kind: str) -> tuple[DrawOptions, Scale]:
        """The options for tensors of a kind: output, input, grad or grad-input."""
        return self._ways[kind.startswith("grad")]


@dataclass(frozen=True)
class Drawing:
    """A picture ready to be encoded; nothing in it refers to the tensor any more."""

    layout: str
    plan: GridPlan
    tiles: Bytes
    """[N, H, W], or [N, H, W, 3] for RGB."""
    palette: Palette
    limits: Limits
    stats: Floats
    """[channels, 6], of all maps, drawn or not."""
    channels: list[int] | None
    """The drawn channels, where not all are."""
    slices: tuple[int, int]
    """Tiles of each channel: drawn, and held by the tensor."""


def draw(
    tensor: Tensor, options: DrawOptions, mode: Scale, hints: Hints | None = None
) -> dict[str, Drawing]:
    """Turn a tensor into tiles and statistics, on its device.

    Returns:
        The tensor's maps under the empty key; tokens beside the grid under their names.

    Raises:
        LayoutError: no layout fits, or a picture is larger than its format can hold.
    """
    parts = to_maps(tensor, hints or Hints())
    return {key: draw_maps(maps, options, mode) for key, maps in parts.items()}


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
    channels = mosaic.pick_maps(numbers[:, stats.MEAN].tolist(), options)
    limits = scale.limits(mode, rows, numbers[:, stats.MIN], numbers[:, stats.MAX])
    if channels is not None:
        rows = rows[channels]
        if limits.shared is None:
            limits = Limits(limits.low[channels], limits.high[channels], limits.mode)
    plan = plan_for((len(rows), slices, height, width), False, options)
    paint = _rgb_tiles if colours == 3 else _level_tiles
    tiles, colors = paint(rows, height, limits, options, bool(numbers[:, stats.NONFINITE].any()))
    return Drawing(layout, plan, tiles, colors, limits, numbers, channels, (slices, slices))


def draw_maps(maps: Maps, options: DrawOptions, mode: Scale) -> Drawing:
    """Turn maps into tiles and statistics.

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    numbers = stats.channel_stats(maps.data)
    channels = mosaic.pick_maps(numbers[:, stats.MEAN].tolist(), options)
    mode = Scale("layer") if maps.strip and mode.mode == "map" else mode
    limits = scale.limits(mode, maps.data, numbers[:, stats.MIN], numbers[:, stats.MAX])
    held = maps.data.shape[1]
    drawn = (maps.data if channels is None else maps.data[channels])[:, : options.max_slices]
    limits = _for_tiles(limits, channels, drawn.shape[1])
    plan = plan_for(drawn.shape, maps.strip, options)
    colors = _palette(options, bool(numbers[:, stats.NONFINITE].any()))
    tiles = scale.to_tiles(drawn.flatten(0, 1), limits, colors.levels, colors.nonfinite)
    slices = (drawn.shape[1], held)
    return Drawing(maps.layout, plan, tiles, colors, limits, numbers, channels, slices)


def plan_for(shape: Sequence[int], strip: bool, options: DrawOptions) -> GridPlan:
    """The geometry for maps of shape [C, S, H, W].

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    plan = mosaic.plan(shape, options, strip)
    most = LARGEST_SIDE[options.format]
    if max(plan.height, plan.width) > most:
        raise LayoutError(
            f"its picture of {plan.width}×{plan.height} pixels is more than {options.format} holds "
            f"({most} a side); --format png, or --max-maps and --nrow"
        )
    return plan


def _for_tiles(limits: Limits, channels: list[int] | None, slices: int) -> Limits:
    """The limits of each tile, from those of each channel."""
    if limits.shared is not None:
        return limits
    low, high = (v if channels is None else v[channels] for v in (limits.low, limits.high))
    return Limits(np.repeat(low, slices), np.repeat(high, slices), limits.mode)


def describe(
    drawing: Drawing, site: Site, shape: Sequence[int], file: str, values: int | None = None
) -> Capture:
    """The manifest's row for a drawing; `values` of a channel, where they are not a map's."""
    plan, limits = drawing.plan, drawing.limits
    (down, across), area = plan.scale, plan.map_size[0] * plan.map_size[1]
    return Capture(
        layer=site.layer.name,
        type=site.layer.type,
        index=site.layer.index,
        kind=site.kind,
        call=site.call,
        key=site.key,
        shape=list(shape),
        layout=drawing.layout,
        maps=len(drawing.stats),
        file=file,
        grid={
            "nrow": plan.columns,
            "padding": plan.padding,
            "tile": list(plan.tile),
            "scale": down if down == across else [down, across],
        },
        normalize=limits.mode,
        range=None if limits.shared is None else list(limits.shared),
        channels=drawing.channels,
        slices=list(drawing.slices) if drawing.slices[1] > 1 else None,
        **stats.overall(drawing.stats, values or area * drawing.slices[1]),  # type: ignore[arg-type]
    )


def encode(drawing: Drawing, file: BinaryIO, format: str, text: dict[str, str]) -> None:
    """Write the picture to an open file: PNG by our own encoder, other formats through Pillow."""
    if format == "png":
        plan, colors = drawing.plan, drawing.palette
        png.write_png(
            file, (plan.height, plan.width), _png_rows(drawing), colors=colors.colors, text=text
        )
    elif format == "webp":
        to_image(drawing).convert("RGB").save(file, "webp", lossless=True)
    else:
        image = to_image(drawing)
        image = image if image.mode == "L" else image.convert("RGB")
        image.save(file, "jpeg", quality=95, subsampling=0, comment=_comment(text))


def to_image(drawing: Drawing) -> Image.Image:
    """The picture as a Pillow image of mode L, P with its palette, or RGB."""
    colors = drawing.palette
    image = Image.fromarray(_pixels(drawing))
    if colors.colors is not None:
        image.putpalette(colors.colors)
    return image


def caption(capture: Capture) -> dict[str, str]:
    """What a picture says of itself, in its text chunks."""
    drawn = capture.channels
    limits = "each map its own" if capture.range is None else "{} to {}".format(*capture.range)
    count = f"{capture.maps} of {capture.maps}"
    if drawn is not None:
        count = f"{len(drawn)} of {capture.maps} (--max-maps)"
    slices = {}
    if capture.slices is not None:
        side, held = capture.slices
        slices["Slices"] = f"{side} of {held} side by side for each channel" + (
            " (--max-slices)" if side < held else ""
        )
    return {
        "Software": "featviz",
        "Layer": f"{capture.layer} ({capture.type})",
        "Call": f"{capture.call} {capture.kind} {capture.key}".rstrip(),
        "Channels": _ranges(drawn if drawn is not None else range(capture.maps)),
        "Maps": count,
        **slices,
        "Range": f"{capture.normalize}: {limits}",
    }


def _palette(options: DrawOptions, nonfinite: bool) -> Palette:
    if options.cmap in palette.GREYS and not nonfinite:
        return palette.plain_grey(options.pad_value)
    colors = palette.colored(options.cmap, options.pad_value)
    return colors if nonfinite else Palette(colors.levels, colors.pad, None, colors.colors)


def _level_tiles(
    rows: Tensor, height: int, limits: Limits, options: DrawOptions, nonfinite: bool
) -> tuple[Bytes, Palette]:
    """[C, S·H, W] to levels [C·S, H, W]."""
    colors = _palette(options, nonfinite)
    levels = scale.to_tiles(rows, limits, colors.levels, colors.nonfinite)
    return levels.reshape(-1, height, levels.shape[2]), colors


def _rgb_tiles(
    rows: Tensor, height: int, limits: Limits, options: DrawOptions, nonfinite: bool
) -> tuple[Bytes, Palette]:
    """[C, S·3·H, W] to pixels [C·S, H, W, 3]."""
    colors = palette.plain_grey(options.pad_value)
    levels = scale.to_tiles(rows, limits, colors.levels, 0 if nonfinite else None)
    shape = (-1, 3, height, levels.shape[2])
    tiles = levels.reshape(shape).transpose(0, 2, 3, 1).copy()
    tiles[~torch.isfinite(rows).reshape(shape).all(1).cpu().numpy()] = palette.MAGENTA
    return tiles, colors


def _pixels(drawing: Drawing) -> Bytes:
    """The whole picture, [height, width] or [height, width, 3]."""
    plan, tiles, pad = drawing.plan, drawing.tiles, drawing.palette.pad
    if tiles.ndim == 3:
        return mosaic.compose(plan, tiles, pad)
    return np.stack([mosaic.compose(plan, tiles[..., c], pad) for c in range(3)], axis=-1)


def _png_rows(drawing: Drawing) -> Iterable[Bytes]:
    """The picture as the encoder takes it: a column in front, RGB side by side."""
    if drawing.tiles.ndim == 3:
        return mosaic.strips(drawing.plan, drawing.tiles, drawing.palette.pad, lead=1)
    return [np.pad(_pixels(drawing).reshape(drawing.plan.height, -1), ((0, 0), (1, 0)))]


def _comment(text: dict[str, str]) -> bytes:
    return "; ".join(f"{key}: {value}" for key, value in text.items()).encode()[:65_000]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 to `0-2,5`."""
    array = np.asarray(numbers)
    breaks = np.flatnonzero(np.diff(array) != 1) + 1
    runs = np.split(array, breaks)
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
