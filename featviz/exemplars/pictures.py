"""The pictures of exemplars: crops of the chosen images as tiles; a picture of each channel, and a
sheet of all channels of a layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from featviz.drawing.values import to_pixels
from featviz.errors import FeatvizError
from featviz.exemplars.collect import ExemplarSource, Top
from featviz.exemplars.receptive import Box, ReceptiveFields
from featviz.models.load import LoadedModel
from featviz.options import InputOptions
from featviz.records import Sample
from featviz.run.visit import batches
from featviz.rundir import write
from featviz.rundir.studies import Exemplar, ExemplarChannel, ExemplarLayer
from featviz.text import counted, printable, safe_name

log = logging.getLogger(__name__)

TILE = 128
"""Pixels a side of a tile in the picture of a channel."""

_GAP, _TEXT, _LINE = 8, 12, 15
_TITLE = 2 * _LINE + _GAP
_CAPTION = 2 * _LINE + 2
_LABEL = 92
_BETWEEN, _COLUMN_GAP = 4, 24
_SMALL, _MOST_PIXELS, _MOST_SHOWN = (64, 48, 32), 2**26, 40
"""Pixels a side of a tile in a sheet, pixels of it and tiles in a row at most."""
_LONGEST_NAME = 19
_PAPER, _INK, _FAINT, _EMPTY = "#ffffff", "#1b2129", "#66707c", "#e3e6ea"
_MARK = "#ffd400"
_SMALLEST_MARK = 6

_COUNTS = {"max": "the highest value in their map", "mean": "the highest mean of their map"}
_MOST_TILES = 2000
"""Tiles that are held at once: 100 MB."""
_MOST_READ = 2**28
"""Bytes of images that are held; those beyond are read again for each layer."""
_SHAPES = 2


def sheet_path(row: ExemplarLayer, class_number: int = 0) -> str:
    """The relative path of a layer's sheet: `012_layer4/output.png`, and for a class
    `012_layer4/output/003_cat.png`."""
    name = safe_name(f"{row.index:03d}_{row.label}")
    if row.class_name is None:
        return f"{name}/{safe_name(row.stem + '.png')}"
    return f"{name}/{safe_name(row.stem)}/{safe_name(f'{class_number:03d}_{row.class_name}.png')}"


Crop = tuple[Box | None, Image.Image]
"""What a unit sees, and the tile of it."""


@dataclass
class Cutter:
    """Reads images again, cuts out what units see, and writes the pictures."""

    model: LoadedModel
    samples: Sequence[Sample]
    inputs: InputOptions
    targets: Sequence[ExemplarSource]
    fields: dict[tuple[int, ...], ReceptiveFields]
    """By the shape of the input; those that were asked for last."""
    _read: dict[int, tuple[Image.Image, list[Tensor]] | None] = field(default_factory=dict)
    """Images as the model saw them, and its arguments without their values; None for one that
    cannot be read again."""
    _bytes: int = 0

    def draw(
        self, target: ExemplarSource, top: Top, row: ExemplarLayer, by: str, seen: int, folder: Path
    ) -> ExemplarLayer:
        """Write the pictures of a tensor, of one class or of all images; its row with the
        exemplars. `seen` images went through, and were ranked `by` max or mean."""
        (label, *lines), count = _title(row, by, seen), len(top.values)
        room = max(1, min(top.values.shape[1], len(self.samples)))
        sheet, channels, step = Sheet(lines, count, room), [], max(1, _MOST_TILES // room)
        nothing = None, cut(Image.new("RGB", (1, 1)), None, (1, 1))
        for channel in range(count):
            if channel % step == 0:
                crops = self._crops(target, top, range(channel, min(count, channel + step)))
            found, tiles = [], []
            for rank in np.flatnonzero(top.is_image[channel]).tolist():
                box, tile = crops.get((channel, rank), nothing)
                at_row, column, *size = top.places[channel, rank].tolist()
                place, grid = (None, None) if at_row < 0 else ([at_row, column], size)
                number, value = int(top.images[channel, rank]), top.values[channel, rank]
                edges = None if box is None else list(box)
                name = self.samples[number].name
                found.append(Exemplar(name, number, float(str(value)), place, grid, edges))
                tiles.append(tile)
            path = None
            if found:
                path = f"{row.sheet.removesuffix('.png')}/c{channel:05d}.png"
                title = f"{label}, channel {channel}", lines[-1]
                texts = [(one.value, one.image) for one in found]
                _save(folder / path, draw_channel(title, tiles, texts, room))
            sheet.add(channel, tiles, [one.value for one in found])
            channels.append(ExemplarChannel(channel, path, found))
        _save(folder / row.sheet, sheet.picture)
        return replace(row, channels=channels)

    def _crops(
        self, target: ExemplarSource, top: Top, channels: range
    ) -> dict[tuple[int, int], Crop]:
        """By channel and rank."""
        wanted, crops = dict[int, list[tuple[int, int]]](), dict[tuple[int, int], Crop]()
        for channel in channels:
            for rank in np.flatnonzero(top.is_image[channel]).tolist():
                wanted.setdefault(int(top.images[channel, rank]), []).append((channel, rank))
        for number, picture, args in self._pictures(sorted(wanted)):
            for at in wanted[number]:
                place = top.places[at].tolist()
                box: Box | None = (0, 0, *picture.size)
                if place[0] < 0:
                    tile = cut(picture, box, picture.size[::-1])
                else:
                    fields = self._fields_of(args)
                    box = fields.box(target, *place[:2])
                    tile = cut(picture, box, fields.size(target), place)
                crops[at] = box, tile
        return crops

    def _pictures(
        self, numbers: Sequence[int]
    ) -> Iterator[tuple[int, Image.Image, Sequence[Tensor]]]:
        """The images of these numbers; those that fit into memory are decoded once."""
        for number in numbers:
            if (known := self._read.get(number)) is not None:
                yield number, *known

        def vanished(number: int, error: FeatvizError) -> None:
            log.warning("%s cannot be read again: %s", self.samples[number].name, error.message)
            self._read[number] = None

        missing = [number for number in numbers if number not in self._read]
        for batch in batches(self.samples, self.model, self.inputs, 1, vanished, missing):
            pixels = to_pixels(self.model.preprocess.shown(batch.inputs)[0])
            grey = pixels.shape[2] == 1
            picture = Image.fromarray(pixels[..., 0] if grey else pixels).convert("RGB")
            args = [arg.to("meta") for arg in batch.inputs]
            self._bytes += 3 * picture.width * picture.height
            if self._bytes <= _MOST_READ:
                self._read[batch.images[0]] = picture, args
            yield batch.images[0], picture, args

    def _fields_of(self, args: Sequence[Tensor]) -> ReceptiveFields:
        shape = tuple(args[0].shape)
        if shape not in self.fields:
            if len(self.fields) >= _SHAPES:
                self.fields.pop(next(iter(self.fields)))
            self.fields[shape] = ReceptiveFields(self.model, self.targets, args)
        return self.fields[shape]


def _title(row: ExemplarLayer, by: str, images: int) -> list[str]:
    """The layer's name; its line with type and class, how images are ranked, what a unit sees."""
    key, call = f".{row.key}" if row.key else "", f" call {row.call}" if row.call else ""
    name, seen = printable(f"{row.label}{key}") + call, row.receptive_field
    of_class = "" if row.class_name is None else f" of class {printable(row.class_name)}"
    size = " x ".join(map(str, seen.size))
    sees = {
        "no place": "a unit has no place in the image: the whole input is shown",
        "unknown": "what a unit sees is not known: the whole input is shown",
    }.get(seen.how, f"a unit sees up to {size} pixels of the input")
    return [
        name,
        f"{name} ({printable(row.type)}){of_class}",
        f"{counted(len(row.channels), 'channel')}, each with the images that give {_COUNTS[by]}; "
        f"{counted(images, 'image')} seen",
        sees if by == "max" else "whole inputs are shown",
    ]


def _save(path: Path, picture: Image.Image) -> None:
    with write.atomic(path) as file:
        picture.save(file, "png", compress_level=1)  # 6 % larger than usual, in half the time


# Tiles


def cut(
    picture: Image.Image, box: Box | None, size: tuple[int, int], place: Sequence[int] | None = None
) -> Image.Image:
    """A crop as a tile of TILE × TILE pixels, in the middle of it.

    Args:
        picture: the input as the model saw it, RGB.
        box: left, top, right, bottom in its pixels; None gives an empty tile.
        size: height and width of the largest crop of the layer, which fills the tile: all crops of
            a layer have one scale.
        place: row, column, rows and columns of the map. Where the crop is the whole picture, the
            place is marked.
    """
    tile = Image.new("RGB", (TILE, TILE), _EMPTY)
    if box is None:
        return tile
    crop = picture.crop(box)
    factor = TILE / max(*size, *crop.size)
    width, height = (max(1, min(TILE, round(side * factor))) for side in crop.size)
    kind = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BILINEAR
    left, top = (TILE - width) // 2, (TILE - height) // 2
    tile.paste(crop.resize((width, height), kind), (left, top))
    if place is not None and box == (0, 0, *picture.size) and max(place[2:]) > 1:
        row, column, rows, columns = place
        across, down = (max(_SMALLEST_MARK, n) for n in (width / columns, height / rows))
        x, y = left + (column + 0.5) * width / columns, top + (row + 0.5) * height / rows
        mark = [x - across / 2, y - down / 2]
        mark += [mark[0] + across - 1, mark[1] + down - 1]
        draw = ImageDraw.Draw(tile)
        draw.rectangle([mark[0] - 1, mark[1] - 1, mark[2] + 1, mark[3] + 1], outline=_INK)
        draw.rectangle(mark, outline=_MARK)
    return tile


def slot(rank: int, count: int) -> Box:
    """Where the tile of a rank lies in the picture of a channel that has room for `count`."""
    row, column = divmod(rank, max(1, ceil(sqrt(count))))
    left = _GAP + column * (TILE + _GAP)
    top = _TITLE + _GAP + row * (TILE + _CAPTION + _GAP)
    return left, top, left + TILE, top + TILE


def draw_channel(
    title: Sequence[str],
    tiles: Sequence[Image.Image],
    texts: Sequence[tuple[float, str]],
    count: int,
) -> Image.Image:
    """The picture of a channel with room for `count` tiles: two lines of title, then its tiles, the
    best first, each above its value and the name of its image."""
    right = slot(max(1, ceil(sqrt(count))) - 1, count)[2]
    bottom = slot(count - 1, count)[3]
    size = max(right, 2 * (TILE + _GAP)) + _GAP, bottom + _CAPTION + _GAP
    picture = Image.new("RGB", size, _PAPER)
    for number, (line, color) in enumerate(zip(title, (_INK, _FAINT), strict=True)):
        most = picture.width - 2 * _GAP
        if _font().getlength(line) > most:  # cut it where the picture ends
            ends = range(len(line), -1, -1)
            line = next(f"{line[:n]}…" for n in ends if _font().getlength(f"{line[:n]}…") <= most)
        _write(picture, (_GAP, _GAP + number * _LINE), line, color)
    for rank, (tile, (value, image)) in enumerate(zip(tiles, texts, strict=True)):
        left, top, _, bottom = slot(rank, count)
        picture.paste(tile, (left, top))
        _write(picture, (left, bottom + 1), f"{value:.4g}", _INK)
        name = printable(image)  # its end tells images apart
        name = name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]
        _write(picture, (left, bottom + 1 + _LINE), name, _FAINT)
    return picture


def sheet_plan(channels: int, count: int) -> tuple[int, int, int]:
    """Pixels a side of a tile, tiles in a row, and rows: tiles are made smaller, then tiles of each
    channel are left out, then channels."""
    tile, shown = _SMALL[-1], min(count, _MOST_SHOWN)
    for tile in _SMALL:
        width, height = _row_size(tile, shown)
        if channels * width * height <= _MOST_PIXELS:
            return tile, shown, channels
    room = _MOST_PIXELS // (channels * height) - _LABEL - _COLUMN_GAP
    shown = min(shown, max(1, room // (tile + _BETWEEN)))
    width, height = _row_size(tile, shown)
    return tile, shown, min(channels, _MOST_PIXELS // (width * height))


def _row_size(tile: int, shown: int) -> tuple[int, int]:
    """Width and height of a sheet's row, with the space beside and below it."""
    return _LABEL + shown * (tile + _BETWEEN) + _COLUMN_GAP, tile + _LINE + _GAP


class Sheet:
    """The picture of a layer: a row of small tiles for each channel, in as many columns of rows as
    make it about square."""

    def __init__(self, title: Sequence[str], channels: int, count: int) -> None:
        """An empty sheet for at most `count` tiles of each channel."""
        self._tile, self._shown, self._rows = sheet_plan(channels, count)
        left = []
        if self._shown < count:
            left.append(f"the first {self._shown} of up to {count} images")
        if self._rows < channels:
            left.append(f"the first {self._rows} of {channels} channels")
        lines = [*title, *([f"for want of room only {' of '.join(left)}"] if left else [])]
        self._size = width, height = _row_size(self._tile, self._shown)
        self._high = ceil(self._rows / max(1, round(sqrt(self._rows * height / width))))
        widest = max(int(_font().getlength(line)) for line in lines) + 2 * _GAP
        self._top = len(lines) * _LINE + 3 * _GAP
        size = ceil(self._rows / self._high) * width + _GAP, self._top + self._high * height + _GAP
        self.picture = Image.new("RGB", (max(size[0], widest), size[1]), _PAPER)
        for number, line in enumerate(lines):
            _write(self.picture, (_GAP, _GAP + number * _LINE), line, _FAINT if number else _INK)

    def add(self, channel: int, tiles: Sequence[Image.Image], values: Sequence[float]) -> None:
        """The row of a channel."""
        if channel >= self._rows:
            return
        column, down = divmod(channel, self._high)
        left, top = _GAP + column * self._size[0], self._top + down * self._size[1]
        side = self._tile
        _write(self.picture, (left, top + (side - _LINE) // 2), f"channel {channel}", _INK)
        note = "" if values else "no finite value"
        if len(values) > 1 and values[0] == values[-1]:  # dead, or saturated
            note = "all equal"
        _write(self.picture, (left, top + (side + _LINE) // 2), note, _FAINT)
        for rank, (tile, value) in enumerate(zip(tiles, values[: self._shown], strict=False)):
            at = left + _LABEL + rank * (side + _BETWEEN)
            self.picture.paste(tile.resize((side, side), Image.Resampling.BOX), (at, top))
            _write(self.picture, (at, top + side), f"{value:.3g}", _FAINT)


def _write(picture: Image.Image, at: tuple[int, int], text: str, color: str) -> None:
    ImageDraw.Draw(picture).text(at, text, fill=color, font=_font())


@cache
def _font() -> Any:
    return ImageFont.load_default(_TEXT)
