"""The picture of one tensor: its tiles, what is written on them, what lies under them,
and what it says of itself; and the encoder of PNG, for pictures that arrive piece by
piece.

PNG (https://www.w3.org/TR/png-3/) is 8-bit grey, palette or RGB. Rows are filtered by
sub or up, whichever gives the smaller sum of differences; paeth would save 3 % of the
bytes of resnet50's maps (`benchmarks/encode.py`), for a pass over each row that is
several times as long."""

from __future__ import annotations

import io
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import PIL
from isal import isal_zlib
from PIL import Image

from featviz.drawing.colormap import Palette, color_table, picture_palette
from featviz.drawing.grid import CONSTANT, MAX_PIXELS, NONE, ZERO, Label, strips
from featviz.drawing.grid import plan as plan_grid
from featviz.drawing.values import MIN, ValueLimits, for_loops, is_constant, overall
from featviz.errors import UsageError
from featviz.options import DrawOptions
from featviz.records import FORMATS, Bytes, CaptureSite, Floats, GridPlan, Tiles
from featviz.rundir.schema import Capture
from featviz.text import by, ranges

log = logging.getLogger(__name__)

_LONGEST_COMMENT = 65_000
"""Bytes of a JPEG's comment, whose length has 16 bits."""

# of a PNG: its first bytes, its last chunk, the checksum of the name of chunks of
# pixels, and the numbers of its colour types
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_END = b"\0\0\0\0IEND\xaeB`\x82"
_IDAT_CHECKSUM = isal_zlib.crc32(b"IDAT")
_GREY = 0
_RGB = 2
_PALETTE = 3


@dataclass(frozen=True)
class GridPicture:
    """A picture ready to be encoded. It does not share memory with the tensor, which the
    model may write over."""

    layout: str
    """A name of LAYOUTS, or what a tile of kernels shows."""
    plan: GridPlan
    tiles: Tiles
    """uint8 [N, h, w], or [N, h, w, 3] for RGB, before they are enlarged."""
    palette: Palette
    limits: ValueLimits
    """The limits of each tile, or one pair for all."""
    stats: Floats
    """[channels, 6], of all maps, drawn or not."""
    deviations: Floats
    """[channels]: standard deviations without the border that padding makes."""
    channels: list[int] | None
    """The drawn channels in tile order; None for all channels in their own order."""
    slices: tuple[int, int]
    """How many slices of each channel are drawn, and how many the tensor has."""
    values: int
    """How many numbers each channel has in the tensor."""
    steps: list[int] | slice
    """Numbers of the drawn slices; `slice(None)` for all."""
    strip: bool
    """Whether the tiles are single numbers side by side: those of a vector, or one for
    each constant map."""
    constant: tuple[int, int, int] | None
    """Slices, height and width of each map in the tensor, if all maps are constant and
    `strip` shows their values; else None."""
    collapsed: dict[int, list[int]]
    """The channels that share a tile, by the channel that is drawn. Each list holds this
    channel, too."""
    numbered: bool
    """Whether each tile shows the number of its channel."""
    marked: Sequence[int]
    """The marks of `grid` that are drawn: ZERO and CONSTANT, only ZERO, or none."""
    reduce: str | None = None
    """How all channels became one tile; None if they did not."""
    overlay: float | None = None
    """How opaque the maps are over the input, 0..1; None if they do not lie over it."""
    cmap: str | None = None
    """The colormap; None for the one that the options name."""

    @property
    def drawn(self) -> Sequence[int]:
        """The channels that the tiles show, in tile order. Each has a tile for each drawn
        slice. In a reduced picture, one tile shows all channels."""
        return range(len(self.stats)) if self.channels is None else self.channels

    @property
    def marks(self) -> Bytes:
        """The mark on each tile, uint8 [tiles]: `grid.NONE`, `ZERO` or `CONSTANT`."""
        # A mark would hide the input under the maps, or the one tile of all channels.
        # Maps of one number are always constant, so a mark would say nothing.
        is_mixed = self.reduce is not None or self.overlay is not None
        are_numbers = self.strip or self.plan.map_size == (1, 1)
        if is_mixed or are_numbers or not self.marked:
            return np.zeros(self.plan.tile_count, np.uint8)
        marks = np.where(self.stats[:, MIN] == 0, ZERO, CONSTANT).astype(np.uint8)
        if CONSTANT not in self.marked:
            marks[marks == CONSTANT] = NONE
        marks[~is_constant(self.stats)] = NONE
        if self.channels is not None:
            marks = marks[self.channels]
        return marks.repeat(self.slices[0])

    @property
    def tile_labels(self) -> dict[int, Label]:
        """The labels, by tile number. The first tile of a channel has the channel's number,
        the last one says how many channels share the tiles."""
        labels: dict[int, Label] = {}
        # most pictures have no labels, and some have thousands of channels
        if not self.numbered and not self.collapsed:
            return labels
        slices = self.slices[0]
        for position, channel in enumerate(self.drawn):
            first = position * slices
            last = first + slices - 1
            group = self.collapsed.get(channel)
            labels[last] = Label(shared_by=f"×{len(group)}" if group else "")
            corner = str(channel) if self.numbered else ""
            labels[first] = labels.get(first, Label())._replace(corner=corner)
        return labels

    def pieces(self) -> Iterator[Bytes]:
        """The pixels from top to bottom, as `grid.strips` yields them: each piece is
        overwritten by the next one."""
        return strips(self.plan, self.tiles, self.palette, self.tile_labels, self.marks)


def check_format(name: str) -> None:
    """Raise UsageError if Pillow, as it was built here, cannot write a format. Called
    before anything is drawn.

    Args:
        name: one of `records.FORMATS`.
    """
    format = FORMATS[name]
    if format.save is not None:
        Image.init()
        if format.pillow not in Image.SAVE:
            pillow = f"Pillow {PIL.__version__}"
            raise UsageError(
                f"--format {name}: {pillow} cannot write {format.pillow} here",
                "install another build of it, or choose another format",
            )


def to_image(picture: GridPicture) -> Image.Image:
    """The picture as a Pillow image of mode L, P with its palette, or RGB."""
    plan = picture.plan
    colors = picture.palette.colors
    pixels = np.empty((plan.height, plan.width, *picture.tiles.shape[3:]), np.uint8)
    top = 0
    for piece in picture.pieces():
        pixels[top : top + len(piece)] = piece.reshape(len(piece), *pixels.shape[1:])
        top += len(piece)
    image = Image.fromarray(pixels)
    if colors is not None:
        image.putpalette(colors)
    return image


def to_png(picture: GridPicture) -> bytes:
    """The picture as the bytes of a PNG."""
    file = io.BytesIO()
    encode(picture, file, "png", {})
    return file.getvalue()


def encode(
    picture: GridPicture, file: BinaryIO, format: str, text: dict[str, str]
) -> None:
    """Write the picture to an open file: PNG by our own encoder, other formats through
    Pillow. The user is warned of a picture with more pixels than Pillow opens.

    Args:
        file: open for writing.
        format: a name of FORMATS.
        text: texts about the picture, by keyword. PNG and JPEG hold them, WebP does not.
    """
    record = FORMATS[format]
    plan = picture.plan
    if plan.pixels > MAX_PIXELS:
        log.warning(
            "the picture of %s has %d megapixels, more than Pillow opens; --channels,"
            " --scale 1",
            text.get("Layer", "a layer"),
            plan.pixels // 1_000_000,
        )
    if record.save is None:
        size = (plan.height, plan.width)
        colors = picture.palette.colors
        write_png(file, size, picture.pieces(), colors=colors, text=text)
        return
    image = to_image(picture)
    # JPEG has no palettes; Pillow writes greys as WebP by itself
    if image.mode != "L":
        image = image.convert("RGB")
    options = dict(record.save)
    if record.comment is not None:
        # JPEG has one text without keywords
        lines = [f"{key}: {value}" for key, value in text.items()]
        options[record.comment] = "; ".join(lines).encode()[:_LONGEST_COMMENT]
    image.save(file, record.pillow, **options)


def describe(
    picture: GridPicture, site: CaptureSite, shape: Sequence[int], file: str
) -> Capture:
    """The manifest's row for a picture. The caller adds `tensor`, `figure` and
    `receptive_field`.

    Args:
        site: the capture that the picture shows.
        shape: of the capture's tensor.
        file: the picture's path, relative to the image's folder.
    """
    plan = picture.plan
    layer = site.layer
    shared = picture.limits.shared
    collapsed = {str(leader): group for leader, group in picture.collapsed.items()}
    down, across = plan.scale
    summary: dict[str, Any] = overall(picture.stats, picture.values)
    # Optional fields that are None are left out of the manifest.
    return Capture(
        layer=layer.name,
        type=layer.type,
        index=layer.index,
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
        },
        normalize=picture.limits.mode,
        range=None if shared is None else list(shared),
        channels=picture.channels,
        slices=list(picture.slices) if picture.slices[1] > 1 else None,
        collapsed=collapsed or None,
        reduce=picture.reduce,
        overlay=picture.overlay,
        cmap=picture.cmap,
        steps=None if isinstance(picture.steps, slice) else picture.steps,
        constant=None if picture.constant is None else list(picture.constant),
        **summary,
    )


def caption(capture: Capture) -> dict[str, str]:
    """The texts about a picture that its file holds, by keyword."""
    drawn = range(capture.maps) if capture.channels is None else capture.channels
    text = {
        "Software": "featviz",
        "Layer": f"{capture.layer} ({capture.type})",
        "Call": f"{capture.call} {capture.kind} {capture.key}".rstrip(),
        "Channels": ranges(drawn),
        "Maps": f"{len(drawn)} of {capture.maps}",
    }
    if len(drawn) < capture.maps:
        text["Maps"] += f" ({_options_that_hide(capture, len(drawn))})"
    if capture.slices is not None:
        text["Slices"] = _count_of_slices(capture.slices, capture.steps)
    if capture.constant is not None:
        size = by(capture.constant[1:])
        # each tile is one number here, and does not show how large the map was
        text["Constant"] = f"every map ({size}): the value of each is drawn"
    if capture.collapsed:
        groups = capture.collapsed.items()
        text["Collapsed"] = "; ".join(f"{n}: {ranges(group)}" for n, group in groups)
    if capture.reduce:
        text["Reduce"] = f"{capture.reduce} of all channels"
    if capture.overlay is not None:
        text["Overlay"] = f"{capture.overlay:g} over the input"
    ends = "each map its own"
    if capture.range is not None:
        ends = "{} to {}".format(*capture.range)
    text["Range"] = f"{capture.normalize}: {ends}"
    return text


def _options_that_hide(capture: Capture, drawn: int) -> str:
    """The options that left maps of a capture without a tile: `--channels, --collapse`.

    Args:
        drawn: how many maps have a tile.
    """
    sharing = sum(len(group) - 1 for group in (capture.collapsed or {}).values())
    options = []
    if drawn + sharing < capture.maps:
        options.append("--channels")
    if sharing:
        options.append("--collapse")
    return ", ".join(options)


def _count_of_slices(slices: Sequence[int], steps: Sequence[int] | None) -> str:
    """How many slices of each channel are drawn, and which.

    Args:
        slices: how many are drawn, and how many the tensor has.
        steps: numbers of the drawn slices; None if all are drawn.
    """
    text = "{} of {} side by side for each channel".format(*slices)
    return f"{text}: {ranges(steps)} (--max-slices)" if steps else text


# Over what the model saw


def lay_over(
    picture: GridPicture,
    background: Sequence[Bytes],
    options: DrawOptions,
    window: Sequence[int] | None = None,
) -> GridPicture:
    """A picture whose maps lie over what the model saw, as opaque as `options.overlay`
    says.

    Args:
        background: uint8 [H, W, 3] each: one picture, or the frames of a clip. Each time
            step of the maps lies over the frame in the middle of the step.
        window: top, left, height and width in pixels of the part that is drawn; None
            for the whole input.
    """
    shown, slices = picture.slices
    count = picture.plan.tile_count // shown
    if window is None:
        window = (0, 0, *background[0].shape[:2])
    steps = np.arange(slices)[picture.steps]
    # A layer that halves time has 8 steps for 16 frames: step 0 covers the frames 0 and
    # 1, and lies over frame 1, the later one.
    frames = ((steps + 0.5) * len(background) / slices).astype(int).tolist() * count
    height, width = window[2:]
    # tiles may be made only when they are asked for: an overlay needs them now
    maps = picture.tiles[:]
    alone = picture.reduce is not None
    return replace(
        picture,
        plan=plan_grid((count, shown, height, width), options, alone=alone),
        tiles=Overlay(
            shape=(len(maps), height, width, 3),
            nbytes=maps.nbytes + sum(frame.nbytes for frame in background),
            maps=maps,
            palette=picture.palette,
            background=background,
            frames=frames,
            alpha=float(options.overlay or 0),
            window=window,
        ),
        palette=picture_palette(options, nonfinite=False, rgb=True),
        overlay=options.overlay,
    )


@dataclass(frozen=True)
class Overlay:
    """Tiles of maps over the input. They are made when they are asked for: a layer's maps
    are small, but a thousand tiles of the input's size are not.

    A map covers the whole input: it is resized bilinearly (as Pillow does, for which
    pixels are areas, not points), coloured, and mixed with the input by `alpha`.
    """

    shape: tuple[int, ...]
    """Shape of all tiles together, [N, H, W, 3]; H and W are those of `window`."""
    nbytes: int
    """Bytes of the maps, and of the input under them."""
    maps: Bytes
    """Levels [N, h, w], or RGB [N, h, w, 3]."""
    palette: Palette
    """The levels' colours. The colour of NaN and infinity is not mixed with others when a
    map is resized."""
    background: Sequence[Bytes]
    """What the model saw, [H, W, 3]: one picture, or the frames of a clip."""
    frames: Sequence[int]
    """For each map, the number of the picture in `background` under it."""
    alpha: float
    """0 shows the input, 1 the map."""
    window: Sequence[int]
    """Top, left, height and width in pixels of the part of the input that is drawn."""

    def __getitem__(self, numbers: slice) -> Bytes:
        """The tiles of these numbers, uint8 [n, H, W, 3]."""
        from featviz.drawing import loops

        y, x, height, width = self.window
        window = slice(y, y + height), slice(x, x + width)
        maps = self.maps[numbers]
        tiles = np.empty((len(maps), height, width, 3), np.uint8)
        share = 1.0 - self.alpha
        colors = self.alpha * color_table(self.palette)
        for tile, frame, levels in zip(tiles, self.frames[numbers], maps, strict=True):
            pixels = for_loops(self.background[frame][window])
            over = self._resized(levels)[window]
            if over.ndim == 3:  # RGB, not levels
                tile[:] = share * pixels + self.alpha * over + 0.5
            else:
                loops.blend(
                    over.reshape(-1),
                    colors,
                    pixels.reshape(-1, 3),
                    share,
                    tile.reshape(-1, 3),
                )
        return tiles

    def _resized(self, levels: Bytes) -> Bytes:
        """A map, levels [h, w] or RGB [h, w, 3], in the size of the whole input."""
        height, width = self.background[0].shape[:2]
        size = width, height
        # NaN and infinite values have a level of their own. Mixed with other levels, it
        # would look like a value: so it is left out, and put back afterwards.
        hole = self.palette.nonfinite
        is_hole = np.zeros(levels.shape, bool) if hole is None else levels == hole
        filled = np.where(is_hole, 0, levels).astype(np.uint8)
        resized = np.array(
            Image.fromarray(filled).resize(size, Image.Resampling.BILINEAR)
        )
        if is_hole.any():
            holes = Image.fromarray(is_hole).resize(size, Image.Resampling.NEAREST)
            resized[np.asarray(holes)] = hole
        return resized


# The encoder of PNG


def write_pixels(
    file: BinaryIO,
    pixels: Bytes,
    text: Mapping[str, str] | None = None,
    repeats: bool = False,
) -> None:
    """Write a whole picture as a PNG to an open file.

    Args:
        file: open for writing.
        pixels: uint8 [H, W, C] of one channel or three; at least one row.
        text, repeats: see `write_png`.
    """
    rows = pixels.reshape(len(pixels), -1)
    write_png(file, pixels.shape[:2], [rows], text=text, repeats=repeats)


def write_png(
    file: BinaryIO,
    size: tuple[int, int],
    pieces: Iterable[Bytes],
    *,
    colors: bytes | None = None,
    text: Mapping[str, str] | None = None,
    repeats: bool = False,
) -> None:
    """Write a PNG to an open file, piece by piece:

        signature  IHDR (size, depth)  tEXt ...  PLTE  IDAT  IDAT ...  IEND

    The compressed pieces become chunks IDAT; joined, the contents of these are one zlib
    stream.

    Args:
        file: open for writing.
        size: height and width in pixels.
        pieces: uint8 [rows, width], or [rows, 3 · width] for RGB, from top to bottom; at
            least one. A piece may be overwritten once the next one is asked for.
        colors: 256 RGB triples of a palette; None for greys, and for RGB.
        text: texts by keyword, which has at most 79 Latin-1 characters.
        repeats: whether the picture has large repeated parts, such as enlarged pixels or
            the same crop twice. ISA-L then compresses it, since `deflate`, which is made
            for maps, finds no such repetition.
    """
    from featviz.drawing import deflate, loops  # numba takes a while to import

    # The first piece tells the depth: a row has one byte for a pixel, or three.
    pieces = iter(pieces)
    first = next(pieces)
    width = first.shape[1]
    depth = width // size[1]
    # the specification takes the row above the first for zeros
    above = np.zeros(width, np.uint8)

    def filtered() -> Iterator[Bytes]:
        """Yield the bytes of each piece with PNG's filters. Each array is overwritten by
        the next one."""
        buffer = np.empty(0, np.uint8)
        for piece in chain([first], pieces):
            if len(buffer) < len(piece) * (1 + width):
                buffer = np.empty(len(piece) * (1 + width), np.uint8)
            # from the buffer's start on, where deflate finds it aligned to eight bytes
            rows = buffer[: len(piece) * (1 + width)]
            piece = for_loops(piece)
            loops.filter_rows(piece, above, depth, rows.reshape(len(piece), -1))
            yield rows

    head = _head(size, depth, colors, tuple((text or {}).items()))
    if repeats:
        compressed = _compressed_by_isal(filtered())
    else:
        compressed = deflate.compress(filtered(), size[0] * (1 + width))
    for chunks in compressed:
        length = 0
        checksum = _IDAT_CHECKSUM
        for data in chunks:
            length += len(data)
            checksum = isal_zlib.crc32(data, checksum)
        file.write(b"".join((head, struct.pack(">I", length), b"IDAT")))
        file.writelines(chunks)  # not joined with the head, which would copy them
        file.write(struct.pack(">I", checksum))
        head = b""
    file.write(_END)


def _compressed_by_isal(pieces: Iterable[Bytes]) -> Iterator[list[bytes]]:
    """Yield the zlib stream of pieces, in parts. ISA-L's level 1 makes files of Pillow's
    size in a tenth of Pillow's time."""
    compressor = isal_zlib.compressobj(1)
    for piece in pieces:
        data = compressor.compress(piece)
        if data:  # empty while the compressor waits for more
            yield [data]
    yield [compressor.flush()]


@lru_cache(1024)
def _head(
    size: tuple[int, int],
    depth: int,
    colors: bytes | None,
    text: tuple[tuple[str, str], ...],
) -> bytes:
    """The bytes of a PNG before its pixels. They are cached, since a layer's pictures of
    all images have the same, unless the text names limits that were measured.

    Args:
        size: height and width in pixels.
        depth: bytes of a pixel, 1 or 3.
        colors: 256 RGB triples of a palette; None for greys, and for RGB.
        text: keywords and texts; a text becomes tEXt, or iTXt if Latin-1 cannot hold it.
    """
    color_type = _PALETTE
    if colors is None:
        color_type = {1: _GREY, 3: _RGB}[depth]
    height, width = size
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    head = _SIGNATURE + _chunk(b"IHDR", header)
    for keyword, value in text:
        key = keyword.encode("latin-1") + b"\0"
        # every tool reads tEXt, and fewer read iTXt
        try:
            head += _chunk(b"tEXt", key + value.encode("latin-1"))
        except UnicodeEncodeError:
            # not compressed (two bytes), without language and translated keyword
            key += b"\0\0" + b"\0" + b"\0"
            head += _chunk(b"iTXt", key + value.encode("utf-8", "replace"))
    if colors is not None:
        head += _chunk(b"PLTE", colors)
    return head


def _chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG: length, name, data, checksum of name and data."""
    checksum = isal_zlib.crc32(data, isal_zlib.crc32(name))
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)
