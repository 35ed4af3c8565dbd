"""Tiles of exemplars: the images are read again, and cut to what a unit sees."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from featviz.drawing.sheet import resize
from featviz.drawing.values import to_rgb
from featviz.errors import FeatvizError
from featviz.exemplars.collect import ExemplarSource, TopImages
from featviz.exemplars.fields import receptive_fields
from featviz.exemplars.pictures import TILE, ExemplarTile
from featviz.layout.tracing.fields import PixelBox, ReceptiveField
from featviz.options import InputOptions
from featviz.records import CaptureSite
from featviz.run.study import Study, batches
from featviz.rundir.studies import Exemplar

log = logging.getLogger(__name__)

# colours of a tile
_BACKGROUND = "#e3e6ea"
_FRAME_OUTSIDE = "#1b2129"
_FRAME_INSIDE = "#ffd400"
_MIN_FRAME = 6
"""Pixels of a frame's side at least."""
_MAX_CACHED_BYTES = 2**28
"""Bytes of images in memory at most; all further images are read again for each layer."""
_MAX_CACHED_SHAPES = 8
"""Input shapes whose receptive fields are kept at most."""


class MapPosition(NamedTuple):
    """The position of a value in a map."""

    row: int
    column: int
    rows: int
    """How many rows the map has."""
    columns: int
    """How many columns the map has."""


class _SeenImage(NamedTuple):
    """An image as the model saw it."""

    number: int
    """Number of the image among the samples."""
    picture: Image.Image
    """RGB."""
    args: Sequence[Tensor]
    """The model's arguments, on the device meta: only their shapes are kept."""


@dataclass
class CropReader:
    """Reads the images of exemplars again, and cuts tiles out of them."""

    study: Study
    inputs: InputOptions
    sources: Sequence[ExemplarSource]
    fields: dict[tuple[int, ...], dict[CaptureSite, ReceptiveField]]
    """Receptive fields of all sources, by the shape of the input. The fields of further
    shapes are added when they are needed."""
    _cache: dict[int, _SeenImage | None] = field(default_factory=dict)
    """Images in memory, by number; None for an image that could not be read again."""
    _cached_bytes: int = 0
    """Bytes of all images that were read, in memory or not."""

    def tiles(
        self, source: ExemplarSource, top: TopImages, channels: Sequence[int]
    ) -> dict[int, list[ExemplarTile]]:
        """The exemplars of some channels, by channel, the best first. If an image cannot be
        read again, the user is warned, and its tile is empty.

        Args:
            source: a tensor.
            top: the best images of all channels of the tensor.
            channels: the channels whose exemplars are returned. The tiles of all of them
                are in memory at the same time.
        """
        empty = Image.new("RGB", (TILE, TILE), _BACKGROUND)
        tiles = {}
        ranks_of_image = defaultdict(list)
        # By image, not by channel: an image that excites many channels is read once.
        for channel in channels:
            exemplars = self._exemplars(top, channel)
            tiles[channel] = [ExemplarTile(exemplar, empty) for exemplar in exemplars]
            for rank, exemplar in enumerate(exemplars):
                ranks_of_image[exemplar.number].append((channel, rank))
        for seen in self._seen_images(sorted(ranks_of_image)):
            receptive_field = self._field(source, seen.args)
            for channel, rank in ranks_of_image[seen.number]:
                exemplar = tiles[channel][rank].exemplar
                tiles[channel][rank] = _exemplar_tile(
                    seen.picture, receptive_field, exemplar
                )
        return tiles

    def _exemplars(self, top: TopImages, channel: int) -> list[Exemplar]:
        """A channel's exemplars, the best first; none if the channel is zero in every
        image. `box` is still None, since the images have to be read for it."""
        exemplars: list[Exemplar] = []
        if top.is_zero[channel]:
            return exemplars
        for rank in np.flatnonzero(np.isfinite(top.values[channel])).tolist():
            row, column, *map_size = top.positions[channel, rank].tolist()
            number = int(top.images[channel, rank])
            exemplars.append(
                Exemplar(
                    image=self.study.samples[number].name,
                    number=number,
                    # the shortest text of the float32: 0.1, not 0.10000000149
                    value=float(str(top.values[channel, rank])),
                    place=[row, column] if row >= 0 else None,
                    map=map_size if row >= 0 else None,
                    box=None,
                )
            )
        return exemplars

    def _field(
        self, source: ExemplarSource, args: Sequence[Tensor]
    ) -> ReceptiveField | None:
        """The receptive field of a source, for inputs of the shape of `args`; None if it is
        unknown."""
        # fields are cut off at the edges of the input, so each input shape has its own
        shape = tuple(args[0].shape)
        if shape not in self.fields:
            if len(self.fields) == _MAX_CACHED_SHAPES:
                self.fields.clear()
            self.fields[shape] = receptive_fields(self.study.model, self.sources, args)
        return self.fields[shape].get(source.site)

    def _seen_images(self, numbers: Sequence[int]) -> Iterator[_SeenImage]:
        """Yield the images of these numbers, first those in memory. Images that cannot be
        read again are left out."""
        for number in numbers:
            seen = self._cache.get(number)
            if seen is not None:
                yield seen
        missing = [number for number in numbers if number not in self._cache]
        study = self.study
        for batch in batches(
            study.samples, study.model, self.inputs, 1, self._vanished, missing
        ):
            # the image as the model saw it: fields count pixels after resizing and cropping
            pixels = to_rgb(study.model.preprocess.shown(batch.inputs)[0])
            args = [arg.to("meta") for arg in batch.inputs]
            seen = _SeenImage(batch.images[0], Image.fromarray(pixels), args)
            self._cached_bytes += pixels.nbytes
            if self._cached_bytes <= _MAX_CACHED_BYTES:
                self._cache[seen.number] = seen
            yield seen

    def _vanished(self, number: int, error: FeatvizError) -> None:
        """Warn that an image, which could be read before, cannot be read again. It is not
        tried a third time."""
        log.warning(
            "%s cannot be read again: %s",
            self.study.samples[number].name,
            error.message,
        )
        self._cache[number] = None


def _exemplar_tile(
    picture: Image.Image, receptive_field: ReceptiveField | None, exemplar: Exemplar
) -> ExemplarTile:
    """Cut the tile of an exemplar: what its unit sees, or the whole image if that is not
    known. The returned exemplar has this part as its `box`.

    Args:
        picture: the image as the model saw it, resized and cropped. Receptive fields and
            `Exemplar.box` count its pixels.
        receptive_field: receptive field of the exemplar's layer; None if it is unknown.
    """
    box: PixelBox | None = PixelBox(0, 0, picture.width, picture.height)
    largest = picture.height, picture.width
    position = None
    if exemplar.place is not None and exemplar.map is not None:
        position = MapPosition(*exemplar.place, *exemplar.map)
        if receptive_field is not None:
            box = receptive_field.box(position.row, position.column)
            largest = receptive_field.largest
    tile = cut_tile(picture, box, largest, position)
    return ExemplarTile(replace(exemplar, box=None if box is None else list(box)), tile)


def cut_tile(
    picture: Image.Image,
    box: PixelBox | None,
    largest: tuple[int, int],
    position: MapPosition | None = None,
) -> Image.Image:
    """Cut a part out of an image, and draw it in the middle of a tile.

    Args:
        picture: the image as the model saw it, RGB.
        box: the part, in pixels of the picture; None, if a unit sees no pixel, makes an
            empty tile.
        largest: height and width of the layer's largest part. This one fills a tile;
            smaller parts are drawn at the same scale.
        position: position of the unit in its map. It is framed if the part is the whole
            image, which does not tell the position.
    """
    tile = Image.new("RGB", (TILE, TILE), _BACKGROUND)
    if box is None:
        return tile
    crop = picture.crop(box)
    # one scale for all parts, though a unit at the edge of the image sees a smaller one
    crop = resize(crop, TILE / max(*largest, *crop.size))
    x = (TILE - crop.width) // 2
    y = (TILE - crop.height) // 2
    inside = PixelBox(x, y, right=x + crop.width, bottom=y + crop.height)
    tile.paste(crop, inside)
    is_whole = box == (0, 0, picture.width, picture.height)
    if is_whole and position is not None and max(position.rows, position.columns) > 1:
        _draw_frame(tile, inside, position)
    return tile


def _draw_frame(tile: Image.Image, inside: PixelBox, position: MapPosition) -> None:
    """Draw a frame around a position of a map. The map is stretched over a rectangle of
    the tile.

    Args:
        tile: the tile, on which the frame is drawn.
        inside: the rectangle, in pixels of the tile.
        position: the position that is framed.
    """
    # a position may cover a pixel: the frame gets a size that can be seen
    cell_width = (inside.right - inside.left) / position.columns
    cell_height = (inside.bottom - inside.top) / position.rows
    width = max(_MIN_FRAME, cell_width)
    height = max(_MIN_FRAME, cell_height)
    x = inside.left + (position.column + 0.5) * cell_width - width / 2
    y = inside.top + (position.row + 0.5) * cell_height - height / 2
    draw = ImageDraw.Draw(tile)
    # Two colours, so that one of them can be seen on any picture. Lines of one pixel
    # would fade when tiles are made smaller for a layer's picture.
    outside = [x - 2, y - 2, x + width + 1, y + height + 1]
    draw.rectangle(outside, outline=_FRAME_OUTSIDE, width=2)
    mark = [x, y, x + width - 1, y + height - 1]
    draw.rectangle(mark, outline=_FRAME_INSIDE, width=2)
