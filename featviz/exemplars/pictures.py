"""Crops of the chosen images, which are read once more, and what they show of each channel."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

import featviz.exemplars.tiles as tiles
from featviz.drawing import levels
from featviz.errors import FeatvizError
from featviz.exemplars.collecting import ExemplarSource
from featviz.exemplars.output import LayerWriter
from featviz.exemplars.receptive import ReceptiveFields
from featviz.exemplars.tiles import Box
from featviz.exemplars.top import Top
from featviz.models.load import LoadedModel
from featviz.models.preprocess import InputOptions
from featviz.pipeline.batches import batches
from featviz.records import Sample
from featviz.rundir.exemplars import Exemplar, ExemplarLayer

log = logging.getLogger(__name__)

_MOST_TILES = 2000
"""Tiles that are held at once: 100 MB. For more, images are read again."""
_SHAPES = 2
"""Input shapes whose receptive fields are kept."""


@dataclass(frozen=True)
class ExemplarGroup:
    """A tensor of a layer with its exemplars, of one class or of all images."""

    target: ExemplarSource
    top: Top
    row: ExemplarLayer
    """Its `channels` have no exemplars yet."""


class _Wish(NamedTuple):
    """A tile that is wanted."""

    group: int
    channel: int
    rank: int


class _Crop(NamedTuple):
    box: Box | None
    tile: Image.Image


@dataclass
class Cutter:
    """Reads images again, and cuts out what units see."""

    model: LoadedModel
    samples: Sequence[Sample]
    inputs: InputOptions
    groups: Sequence[ExemplarGroup]
    fields: dict[tuple[int, ...], ReceptiveFields]
    """By the shape of the input; those that were asked for last."""

    def draw(self, folder: Path, by: str, images: int) -> list[ExemplarLayer]:
        """Write the pictures of all groups; their rows with the exemplars.

        Args:
            by: `max` or `mean`.
            images: how many were seen.
        """
        rows = []
        writer: LayerWriter | None = None
        for chunk in self._chunks():
            crops = self._crops(chunk)
            for number, channel in chunk:
                group = self.groups[number]
                if channel == 0:
                    count = max(1, min(group.top.values.shape[1], len(self.samples)))
                    writer = LayerWriter(folder, group.row, by, count, images)
                assert writer is not None
                writer.add(channel, *self._exemplars(number, channel, crops))
                if channel == group.top.channels - 1:
                    rows.append(writer.finish())
        return rows

    def _chunks(self) -> Iterator[list[tuple[int, int]]]:
        """Groups and channels, as many at a time as there is room for tiles."""
        chunk: list[tuple[int, int]] = []
        held = 0
        for number, group in enumerate(self.groups):
            for channel, count in enumerate(group.top.is_image.sum(1).tolist()):
                if chunk and held + count > _MOST_TILES:
                    yield chunk
                    chunk, held = [], 0
                chunk.append((number, channel))
                held += count
        yield chunk

    def _exemplars(
        self, number: int, channel: int, crops: Mapping[_Wish, _Crop]
    ) -> tuple[list[Exemplar], list[Image.Image]]:
        top = self.groups[number].top
        exemplars, cut = [], []
        for rank in np.flatnonzero(top.is_image[channel]).tolist():
            row, column, *size = top.places[channel, rank].tolist()
            image = int(top.images[channel, rank])
            crop = crops.get(_Wish(number, channel, rank), _EMPTY)
            exemplars.append(
                Exemplar(
                    self.samples[image].name,
                    image,
                    float(str(top.values[channel, rank])),
                    None if row < 0 else [row, column],
                    None if row < 0 else size,
                    None if crop.box is None else list(crop.box),
                )
            )
            cut.append(crop.tile)
        return exemplars, cut

    def _crops(self, chunk: Sequence[tuple[int, int]]) -> dict[_Wish, _Crop]:
        """The tiles of these channels."""
        wanted: dict[int, list[_Wish]] = {}
        for number, channel in chunk:
            top = self.groups[number].top
            for rank in np.flatnonzero(top.is_image[channel]).tolist():
                image = int(top.images[channel, rank])
                wanted.setdefault(image, []).append(_Wish(number, channel, rank))
        crops: dict[_Wish, _Crop] = {}
        again = batches(self.samples, self.model, self.inputs, 1, self._vanished, sorted(wanted))
        for batch in again:
            picture = _picture(self.model.preprocess.shown(batch.inputs)[0])
            for wish in wanted[batch.images[0]]:
                crops[wish] = self._cut(wish, picture, batch.inputs)
        return crops

    def _cut(self, wish: _Wish, picture: Image.Image, args: Sequence[Tensor]) -> _Crop:
        group = self.groups[wish.group]
        place = group.top.places[wish.channel, wish.rank].tolist()
        box: Box | None = (0, 0, *picture.size)
        size = picture.size[::-1]
        if place[0] < 0:
            return _Crop(box, tiles.cut(picture, box, size))
        fields = self._fields_for(args)
        box, size = fields.box(group.target, *place[:2]), fields.size(group.target)
        return _Crop(box, tiles.cut(picture, box, size, place))

    def _fields_for(self, args: Sequence[Tensor]) -> ReceptiveFields:
        shape = tuple(args[0].shape)
        if shape not in self.fields:
            if len(self.fields) >= _SHAPES:
                self.fields.pop(next(iter(self.fields)))
            targets = list({group.target.site: group.target for group in self.groups}.values())
            self.fields[shape] = ReceptiveFields(self.model, targets, args)
        return self.fields[shape]

    def _vanished(self, number: int, error: FeatvizError) -> None:
        log.warning("%s cannot be read again: %s", self.samples[number].name, error.message)


_EMPTY = _Crop(None, tiles.cut(Image.new("RGB", (1, 1)), None, (1, 1)))


def _picture(pixels: Tensor) -> Image.Image:
    array = levels.pixels(pixels)
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).convert("RGB")
