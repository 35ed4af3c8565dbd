"""The picture of one tensor: its tiles, what is written on them, what lies under them, and what it
says of itself; and the encoder of PNG, for pictures that arrive piece by piece.

PNG (https://www.w3.org/TR/png-3/) is 8-bit grey, palette or RGB. Rows are filtered by sub or up,
whichever gives the smaller sum of differences; paeth would save 3 % of the bytes of resnet50's maps
(`benchmarks/encode.py`), for a pass over each row that is several times as long.
"""

from __future__ import annotations

import io
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import PIL
from isal import isal_zlib
from PIL import Image

from featviz.drawing.colormap import Palette, chosen, table
from featviz.drawing.grid import CONSTANT, ZERO, Words, strips
from featviz.drawing.grid import plan as plan_grid
from featviz.drawing.values import MIN, ValueLimits, is_constant, overall
from featviz.errors import UsageError
from featviz.options import DrawOptions
from featviz.records import FORMATS, Bytes, CaptureSite, Floats, GridPlan, Tiles
from featviz.rundir.schema import Capture
from featviz.text import by, ranges

log = logging.getLogger(__name__)

MAX_PIXELS = 178_956_970
"""Pillow refuses to open larger pictures without a word from the user."""
_SIGNATURE, _END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"
_IDAT_CHECKSUM = isal_zlib.crc32(b"IDAT")
_GREY, _RGB, _PALETTE = 0, 2, 3


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
    """Slices, height and width of each map, where all are constant and `strip` has their values."""
    groups: dict[int, list[int]] = field(default_factory=dict)
    """Channels that share a tile, by the one that is drawn."""
    labels: bool = False
    marked: Sequence[int] = (ZERO, CONSTANT)
    reduce: str | None = None
    """How all channels became the one tile."""
    overlay: float | None = None
    """How much of the maps lies over the input, 0..1."""
    cmap: str | None = None
    """The colormap, where it is not the one that the options name."""

    @property
    def drawn(self) -> Sequence[int]:
        """The channel of each tile; of slices side by side the one they share."""
        return range(len(self.stats)) if self.channels is None else self.channels

    @property
    def marks(self) -> Bytes:
        """The mark on each tile, of `grid`; maps of one number are constant by nature."""
        whole = self.strip or self.reduce is not None or self.overlay is not None
        if whole or not self.marked or self.plan.map_size == (1, 1):
            return np.zeros(self.plan.maps, np.uint8)
        marks = np.where(self.stats[:, MIN] == 0, ZERO, CONSTANT)
        marks = (marks * (is_constant(self.stats) & np.isin(marks, self.marked))).astype(np.uint8)
        drawn: Bytes = marks if self.channels is None else marks[self.channels]
        return drawn.repeat(self.slices[0])

    @property
    def written(self) -> dict[int, Words]:
        """What is written on tiles: the channel's number on its first one, how many channels share
        it on its last one, and marks."""
        if not (self.labels or self.groups or self.marked):
            return {}
        marks, side = self.marks, self.slices[0]
        found = {int(tile): ("", "", int(marks[tile])) for tile in np.flatnonzero(marks)}
        for place, channel in enumerate(self.drawn if self.labels or self.groups else ()):
            first, last = place * side, place * side + side - 1
            if self.labels:
                found[first] = (str(channel), "", int(marks[first]))
            if channel in self.groups:
                corner, _, mark = found.get(last, ("", "", int(marks[last])))
                found[last] = (corner, f"×{len(self.groups[channel])}", mark)
        return found


def check_format(name: str) -> None:
    """Say so early where Pillow cannot write a format of `records.FORMATS`."""
    kind = FORMATS[name]
    if kind.save is not None and kind.pillow not in Image.SAVE:
        Image.init()
        if kind.pillow not in Image.SAVE:
            words = f"--format {name}: Pillow {PIL.__version__} cannot write {kind.pillow} here"
            needs = kind.needs or "install another build of it"
            raise UsageError(words, f"{needs}, or choose another format")


def to_image(picture: GridPicture) -> Image.Image:
    """The picture as a Pillow image of mode L, P with its palette, or RGB."""
    plan, colors, top = picture.plan, picture.palette, 0
    pixels = np.empty((plan.height, plan.width, *picture.tiles.shape[3:]), np.uint8)
    for piece in strips(plan, picture.tiles, colors, picture.written):
        pixels[top : top + len(piece)] = piece.reshape(len(piece), *pixels.shape[1:])
        top += len(piece)
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
    """Write the picture to an open file: PNG by our own encoder, other formats through Pillow."""
    kind, plan, colors = FORMATS[format], picture.plan, picture.palette
    if plan.pixels > MAX_PIXELS:
        log.warning(
            "the picture of %s has %d megapixels, more than Pillow opens; --max-maps, --scale 1",
            *(text.get("Layer", "a layer"), plan.pixels // 1_000_000),
        )
    if kind.save is None:
        pieces = strips(plan, picture.tiles, colors, picture.written)
        write_png(file, (plan.height, plan.width), pieces, colors=colors.colors, text=text)
        return
    image = to_image(picture)
    image = image if image.mode == "L" and kind.grey else image.convert("RGB")
    words = "; ".join(f"{key}: {value}" for key, value in text.items()).encode()[:65_000]
    said: dict[str, Any] = {kind.comment: words} if kind.comment else {}
    image.save(file, kind.pillow, **kind.save, **said)


def describe(
    picture: GridPicture,
    site: CaptureSite,
    shape: Sequence[int],
    file: str,
    values: int | None = None,
) -> Capture:
    """The manifest's row for a picture."""
    plan, limits, layer = picture.plan, picture.limits, site.layer
    down, across = plan.scale
    scale = down if down == across else [down, across]
    return Capture(
        *(layer.name, layer.type, layer.index, site.kind, site.call, site.key, list(shape)),
        *(picture.layout, len(picture.stats), file),
        {"nrow": plan.columns, "padding": plan.padding, "tile": list(plan.tile), "scale": scale},
        limits.mode,
        None if limits.shared is None else list(limits.shared),
        channels=picture.channels,
        slices=list(picture.slices) if picture.slices[1] > 1 else None,
        collapsed={str(leader): group for leader, group in picture.groups.items()} or None,
        reduce=picture.reduce,
        overlay=picture.overlay,
        cmap=picture.cmap,
        steps=None if isinstance(picture.steps, slice) else picture.steps,
        constant=None if picture.constant is None else list(picture.constant),
        **overall(picture.stats, values or picture.values),  # type: ignore[arg-type]
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
        text["Constant"] = f"every map ({by(capture.constant[1:])}): the value of each is drawn"
    if capture.collapsed:
        groups = (f"{leader}: {ranges(ids)}" for leader, ids in capture.collapsed.items())
        text["Collapsed"] = "; ".join(groups)
    if capture.reduce:
        text["Reduce"] = f"{capture.reduce} of all channels"
    if capture.overlay is not None:
        text["Overlay"] = f"{capture.overlay:g} over the input"
    ends = "each map its own" if capture.range is None else "{} to {}".format(*capture.range)
    return {**text, "Range": f"{capture.normalize}: {ends}"}


# Over what the model saw


def lay_over(
    picture: GridPicture,
    ground: Sequence[Bytes],
    options: DrawOptions,
    window: Sequence[int] | None = None,
) -> GridPicture:
    """Lay a picture's maps over what the model saw, the part in a window (top, left, height, width)
    or all: a picture, or the frames of a clip, of which each time step gets the one in its middle.
    """
    side, held = picture.slices
    count, window = picture.plan.maps // side, window or (0, 0, *ground[0].shape[:2])
    steps = np.arange(held)[picture.steps]
    frames = ((steps + 0.5) * len(ground) / held).astype(int).tolist() * count
    shape, alone = (count, side, *window[2:]), picture.reduce is not None
    colors, alpha, maps = picture.palette, float(options.overlay or 0), picture.tiles[:]
    size = (len(maps), *window[2:], 3), maps.nbytes + sum(one.nbytes for one in ground)
    return replace(
        picture,
        plan=plan_grid(shape, options, alone=alone),
        tiles=Overlay(*size, maps, table(colors), colors.nonfinite, ground, frames, alpha, window),
        palette=chosen(options, nonfinite=False, rgb=True),
        overlay=options.overlay,
    )


@dataclass(frozen=True)
class Overlay:
    """RGB tiles [N, H, W, 3] of the input's size, or of the part of it that is drawn. A map covers
    the whole input: it is resized bilinearly (as Pillow does, for which pixels are areas, not
    points), coloured, and mixed in by `alpha`: 0 is the input, 1 the map."""

    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the maps, and of the input under them."""
    maps: Bytes
    """Levels [N, h, w], or RGB [N, h, w, 3]."""
    colors: Bytes
    nonfinite: int | None
    """The level that is not mixed with its neighbours when a map is resized."""
    ground: Sequence[Bytes]
    """What the model saw, [H, W, 3]: one picture, or the frames of a clip."""
    frames: Sequence[int]
    alpha: float
    window: Sequence[int]

    def __getitem__(self, part: slice) -> Bytes:
        """Some of the tiles, uint8 [n, H, W, 3]."""
        from featviz.drawing import loops

        maps, frames, size = self.maps[part], self.frames[part], self.ground[0].shape[1::-1]
        top, left, height, width = self.window
        drawn = slice(top, top + height), slice(left, left + width)
        tiles = np.empty((len(maps), height, width, 3), np.uint8)
        holes = np.zeros(maps.shape, bool) if self.nonfinite is None else maps == self.nonfinite
        levels, how = np.where(holes, 0, maps).astype(np.uint8), Image.Resampling.BILINEAR
        over = np.stack([np.asarray(Image.fromarray(one).resize(size, how)) for one in levels])
        for number in np.flatnonzero(holes.reshape(len(maps), -1).any(1)):
            where = Image.fromarray(holes[number]).resize(size, Image.Resampling.NEAREST)
            over[number, np.asarray(where)] = self.nonfinite or 0
        share, colors = 1.0 - self.alpha, self.alpha * self.colors
        for tile, frame, mine in zip(tiles, frames, over, strict=True):
            ground = np.require(self.ground[frame][drawn], requirements=["C", "W"])
            if mine.ndim == 3:
                tile[:] = share * ground + self.alpha * mine[drawn] + 0.5
            else:
                pixels, mixed = ground.reshape(-1, 3), tile.reshape(-1, 3)
                loops.blend(mine[drawn].reshape(-1), colors, pixels, share, mixed)
        return tiles


# The encoder of PNG


def write_png(
    file: BinaryIO,
    size: tuple[int, int],
    pieces: Iterable[Bytes],
    *,
    colors: bytes | None = None,
    text: Mapping[str, str] | None = None,
) -> None:
    """Write a PNG of a height and width, of pieces uint8 [rows, width], or [rows, 3 · width] for
    RGB, from top to bottom, each of which is done with before the next one is asked for; with a
    palette of RGB triples, or greys, and texts by keywords (79 Latin-1 characters at most)."""
    from featviz.drawing import deflate, loops  # numba takes a while to import

    pieces = iter(pieces)
    first = next(pieces)
    width = first.shape[1]
    depth, above = width // size[1], np.zeros(width, np.uint8)

    def filtered() -> Iterator[Bytes]:
        buffer = np.empty(0, np.uint8)
        for piece in chain([first], pieces):
            if len(buffer) < len(piece) * (1 + width):
                buffer = np.empty(len(piece) * (1 + width), np.uint8)
            rows = buffer[: len(piece) * (1 + width)]
            piece = np.require(piece, requirements=["C", "W"])
            loops.filter_rows(piece, above, depth, rows.reshape(len(piece), -1))
            yield rows

    parts = [_head(size, depth, colors, tuple((text or {}).items()))]
    for data in deflate.deflated(filtered(), size[0] * (1 + width)):
        length, checksum = len(data), isal_zlib.crc32(data, _IDAT_CHECKSUM)
        framed = struct.pack(">I", length), b"IDAT", data, struct.pack(">I", checksum)
        file.write(b"".join((*parts, *framed)))
        parts = []
    file.write(_END)


@lru_cache(1024)
def _head(
    size: tuple[int, int], depth: int, colors: bytes | None, text: tuple[tuple[str, str], ...]
) -> bytes:
    """All that stands before the pixels, which is the same for a layer's picture of each image:
    text is tEXt, or iTXt where Latin-1 cannot hold it."""
    color_type = _PALETTE if colors is not None else _GREY if depth == 1 else _RGB
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", size[1], size[0], 8, color_type, 0, 0, 0))]
    for keyword, value in text:
        key = keyword.encode("latin-1") + b"\0"
        try:
            chunks.append((b"tEXt", key + value.encode("latin-1")))
        except UnicodeEncodeError:
            chunks.append((b"iTXt", key + b"\0\0\0\0" + value.encode("utf-8", "replace")))
    if colors is not None:
        chunks.append((b"PLTE", colors))
    sums = (isal_zlib.crc32(data, isal_zlib.crc32(kind)) for kind, data in chunks)
    framed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
        for (kind, data), checksum in zip(chunks, sums, strict=True)
    )
    return _SIGNATURE + b"".join(framed)
