"""The files of exemplars: pictures as the channels come, exemplars.json last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

import featviz.exemplars.tiles as tiles
from featviz.exemplars.tiles import Sheet, TileText
from featviz.rundir import EXEMPLARS_FILE, write
from featviz.rundir.exemplars import Exemplar, ExemplarChannel, ExemplarLayer, ExemplarRecord
from featviz.text import counted, printable, safe_name

_LEVEL = 1
"""zlib's level: with the usual one, crops of photographs shrink by 6 % more, and take twice as
long."""
_COUNTS = {"max": "the highest value in their map", "mean": "the highest mean of their map"}


def sheet_way(row: ExemplarLayer, class_number: int = 0) -> str:
    """The file of a layer's sheet, relative to the folder: `012_layer4/output.png`, and for a class
    `012_layer4/output/003_cat.png`."""
    name = safe_name(f"{row.index:03d}_{row.layer or row.type}")
    call, key = f".call{row.call}" if row.call else "", f".{row.key}" if row.key else ""
    stem = f"output{call}{key}"
    if row.class_name is None:
        return f"{name}/{safe_name(stem + '.png')}"
    return f"{name}/{safe_name(stem)}/{safe_name(f'{class_number:03d}_{row.class_name}.png')}"


class LayerWriter:
    """The pictures of one tensor of a layer."""

    def __init__(
        self, folder: Path, row: ExemplarLayer, by_what: str, count: int, images: int
    ) -> None:
        """Begin.

        Args:
            row: what is known of the layer; its `channels` are replaced by those that are added.
            by_what: `max` or `mean`.
            count: exemplars of a channel, at most.
            images: how many were seen.
        """
        self._folder, self._row, self._count = folder, row, count
        self._rows: list[ExemplarChannel] = []
        self._sees = _sees(row) if by_what == "max" else "whole inputs are shown"
        of_class = "" if row.class_name is None else f" of class {printable(row.class_name)}"
        self._label = printable(f"{row.layer or row.type}{f'.{row.key}' if row.key else ''}")
        self._label += f" call {row.call}" if row.call else ""
        title = [
            f"{self._label} ({printable(row.type)}){of_class}",
            f"{counted(len(row.channels), 'channel')}, each with the images that give "
            f"{_COUNTS[by_what]}; {counted(images, 'image')} seen",
            self._sees,
        ]
        self._sheet = Sheet(title, len(row.channels), count)

    def add(self, channel: int, exemplars: Sequence[Exemplar], cut: Sequence[Image.Image]) -> None:
        """A channel, with a tile for each of its exemplars."""
        way = None
        values = [exemplar.value for exemplar in exemplars]
        if exemplars:
            way = f"{self._row.sheet.removesuffix('.png')}/c{channel:05d}.png"
            texts = [TileText(exemplar.value, exemplar.image) for exemplar in exemplars]
            title = (f"{self._label}, channel {channel}", self._sees)
            picture = tiles.draw_channel(title, cut, texts, self._count)
            self._save(way, picture)
        self._sheet.add(channel, cut, values)
        self._rows.append(ExemplarChannel(channel, way, list(exemplars)))

    def finish(self) -> ExemplarLayer:
        """Write the sheet; the row with all channels."""
        self._save(self._row.sheet, self._sheet.picture)
        return replace(self._row, channels=self._rows)

    def _save(self, way: str, picture: Image.Image) -> None:
        with write.atomic(self._folder / way) as file:
            picture.save(file, "png", compress_level=_LEVEL)


def _sees(row: ExemplarLayer) -> str:
    """What a unit sees, in words."""
    seen = row.receptive_field
    if seen.how == "no place":
        return "a unit has no place in the image: the whole input is shown"
    if seen.how == "unknown":
        return "what a unit sees is not known: the whole input is shown"
    known = "" if seen.how == "computed" else " (measured by gradients)"
    return f"a unit sees up to {' x '.join(map(str, seen.size))} pixels of the input{known}"


def write_record(folder: Path, record: ExemplarRecord) -> None:
    """exemplars.json, the last file."""
    write.write_json(folder / EXEMPLARS_FILE, record.as_json())
