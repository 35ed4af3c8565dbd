"""The picture of one tensor: its tiles, what is written on them, and what it says of itself."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import PIL
from PIL import Image

from featviz.drawing import grid, labels, png, stats
from featviz.drawing.colormap import Palette
from featviz.drawing.labels import CONSTANT, ZERO, Stamps
from featviz.drawing.levels import ValueLimits
from featviz.errors import UsageError
from featviz.records import FORMATS, Bytes, Capture, Floats, GridPlan, Site, Tiles
from featviz.text import by, ranges


@dataclass(frozen=True)
class GridPicture:
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
    steps: list[int] | slice = field(default_factory=lambda: slice(None))
    """Which slices are drawn of those that are held; all as a slice."""
    strip: bool = False
    """Numbers side by side: those of a vector, or one for each constant map."""
    constant: tuple[int, int, int] | None = None
    """Slices, height and width of each map, where all maps are constant and `strip` has their
    values."""
    groups: dict[int, list[int]] = field(default_factory=dict)
    """Channels that share a tile, by the one that is drawn."""
    labels: bool = False
    """Whether channels stand on the tiles."""
    marked: Sequence[int] = (ZERO, CONSTANT)
    """The marks of `labels` that are drawn."""
    reduce: str | None = None
    """How all channels became the one tile."""
    overlay: float | None = None
    """How much of the maps lies over the input, 0..1."""
    title: str = ""
    """A line above the grid, where the plan has room for one."""

    @property
    def drawn(self) -> Sequence[int]:
        """The channel of each tile; of slices side by side the one they share."""
        return range(len(self.stats)) if self.channels is None else self.channels

    @property
    def levels(self) -> bool:
        """Whether tiles are levels of the palette, not colours."""
        return len(self.tiles.shape) == 3

    @property
    def numbers(self) -> dict[int, str]:
        """The channel's number, by the first tile of each."""
        side = self.slices[0]
        if not self.labels:
            return {}
        return {place * side: str(channel) for place, channel in enumerate(self.drawn)}

    @property
    def counts(self) -> dict[int, str]:
        """How many channels share a tile, by the last tile of those that several do."""
        side = self.slices[0]
        return {
            place * side + side - 1: f"×{len(self.groups[channel])}"
            for place, channel in enumerate(self.drawn if self.groups else ())
            if channel in self.groups
        }

    @property
    def marks(self) -> Bytes:
        """The mark that is drawn on each tile, of `labels`."""
        return labels.only(tuple(self.marked))[self.flat]

    @property
    def flat(self) -> Bytes:
        """The mark, of `labels`, that fits each tile, drawn or not; maps of one number are constant
        by nature."""
        whole = self.strip or self.reduce is not None or self.overlay is not None
        if whole or self.plan.map_size == (1, 1):
            return np.zeros(self.plan.maps, np.uint8)
        flat = stats.is_constant(self.stats)
        if not flat.any():
            return np.zeros(self.plan.maps, np.uint8)
        marks = (np.where(self.stats[:, stats.MIN] == 0, ZERO, CONSTANT) * flat).astype(np.uint8)
        drawn: Bytes = marks if self.channels is None else marks[self.channels]
        return drawn.repeat(self.slices[0])

    @property
    def stamps(self) -> Stamps | None:
        """What is written on the tiles, and above them; None where nothing is."""
        numbers, counts, marks = self.numbers, self.counts, self.marks
        if not (numbers or counts or marks.any() or self.title):
            return None
        colors = self.palette
        inks = colors.dark, colors.light, colors.levels // 2
        return Stamps(numbers, counts, marks, *inks, self.title, colors.ink)

    @property
    def labels_fit(self) -> bool:
        """Whether all labels have room on their tiles."""
        texts = [*self.numbers.values(), *self.counts.values()]
        return all(labels.fits(text, self.plan.tile) for text in texts)


def check_format(name: str) -> None:
    """Say so early where Pillow cannot write a format of `records.FORMATS`.

    Raises:
        UsageError: with what is needed.
    """
    kind = FORMATS[name]
    if kind.save is not None and kind.pillow not in Image.SAVE:
        Image.init()
        if kind.pillow not in Image.SAVE:
            raise UsageError(
                f"--format {name}: Pillow {PIL.__version__} cannot write {kind.pillow} here",
                f"{kind.needs or 'install another build of it'}, or choose another format",
            )


def to_image(picture: GridPicture) -> Image.Image:
    """The picture as a Pillow image of mode L, P with its palette, or RGB."""
    colors = picture.palette
    pixels = grid.compose(picture.plan, picture.tiles, colors.pad, picture.stamps)
    image = Image.fromarray(pixels)
    if colors.colors is not None:
        image.putpalette(colors.colors)
    return image


def to_png(picture: GridPicture) -> bytes:
    """The picture as the bytes of a PNG."""
    file = io.BytesIO()
    encode(picture, file, "png", {})
    return file.getvalue()


def encode(picture: GridPicture, file: BinaryIO, format: str, text: dict[str, str]) -> None:
    """Write the picture to an open file: PNG piece by piece by our own encoder, other formats
    through Pillow.

    Args:
        format: of `records.FORMATS`.
        text: what the picture says of itself, where the format has a place for it.
    """
    kind, plan, colors = FORMATS[format], picture.plan, picture.palette
    if kind.save is None:
        rows = grid.filtered_strips(plan, picture.tiles, colors.pad, picture.stamps)
        size, depth = (plan.height, plan.width), 1 if picture.levels else 3
        png.write_filtered(file, size, depth, rows, colors=colors.colors, text=text)
        return
    image = to_image(picture)
    image = image if image.mode == "L" and kind.grey else image.convert("RGB")
    words = "; ".join(f"{key}: {value}" for key, value in text.items()).encode()[:65_000]
    said: dict[str, Any] = {kind.comment: words} if kind.comment else {}
    image.save(file, kind.pillow, **kind.save, **said)


def describe(
    picture: GridPicture, site: Site, shape: Sequence[int], file: str, values: int | None = None
) -> Capture:
    """The manifest's row for a picture.

    Args:
        shape: of the tensor.
        values: numbers in each channel, where they are not a map's.
    """
    plan, limits = picture.plan, picture.limits
    down, across = plan.scale
    return Capture(
        layer=site.layer.name,
        type=site.layer.type,
        index=site.layer.index,
        kind=site.kind,
        call=site.call,
        key=site.key,
        shape=list(shape),
        layout=picture.layout,
        maps=len(picture.stats),
        file=file,
        grid={
            "nrow": plan.columns,
            "padding": plan.padding,
            "tile": list(plan.tile),
            "scale": down if down == across else [down, across],
            **({"top": plan.top} if plan.top else {}),
        },
        normalize=limits.mode,
        range=None if limits.shared is None else list(limits.shared),
        channels=picture.channels,
        slices=list(picture.slices) if picture.slices[1] > 1 else None,
        collapsed={str(leader): group for leader, group in picture.groups.items()} or None,
        reduce=picture.reduce,
        overlay=picture.overlay,
        steps=None if isinstance(picture.steps, slice) else picture.steps,
        constant=None if picture.constant is None else list(picture.constant),
        **stats.overall(picture.stats, values or picture.values),  # type: ignore[arg-type]
    )


def caption(capture: Capture) -> dict[str, str]:
    """What a picture says of itself, in its text chunks."""
    every = range(capture.maps) if capture.channels is None else capture.channels
    hidden = sum(len(group) - 1 for group in (capture.collapsed or {}).values())
    reasons = ["--max-maps"] if len(every) + hidden < capture.maps else []
    reasons += ["--collapse"] if hidden else []
    text = {
        "Software": "featviz",
        "Layer": f"{capture.layer} ({capture.type})",
        "Call": f"{capture.call} {capture.kind} {capture.key}".rstrip(),
        "Channels": ranges(every),
        "Maps": f"{len(every)} of {capture.maps}" + (f" ({', '.join(reasons)})" if reasons else ""),
    }
    if capture.slices is not None:
        side, every_slice = capture.slices
        text["Slices"] = f"{side} of {every_slice} side by side for each channel" + (
            f": {ranges(capture.steps)} (--max-slices)" if capture.steps else ""
        )
    if capture.constant is not None:
        text["Constant"] = (
            f"every map ({by(capture.constant[1:])}) is constant: the value of each channel is "
            "drawn, side by side (--no-marks draws the maps)"
        )
    if capture.collapsed:
        groups = (f"{leader}: {ranges(ids)}" for leader, ids in capture.collapsed.items())
        text["Collapsed"] = "; ".join(groups)
    if capture.reduce:
        text["Reduce"] = f"{capture.reduce} of all channels"
    if capture.overlay is not None:
        text["Overlay"] = f"{capture.overlay:g} over the input"
    ends = "each map its own" if capture.range is None else "{} to {}".format(*capture.range)
    return {**text, "Range": f"{capture.normalize}: {ends}"}
