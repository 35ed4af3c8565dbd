"""exemplars.json, which `featviz exemplars` writes beside its pictures, and how it is read.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from featviz import files
from featviz.errors import FileError, StoreError
from featviz.files import Folder
from featviz.options import MOST_TOP
from featviz.records import Place
from featviz.rundir import EXEMPLARS_FILE, schema
from featviz.rundir.image import ReadImage, pictures_beside, png_header
from featviz.rundir.ownership import is_exemplar_file
from featviz.rundir.schema import Count, Reason, Text
from featviz.text import quoted

SCHEMA_VERSION = 1
"""The version of exemplars.json. 1: first release."""

_MOST = 2**28
"""Bytes of an exemplars.json: two million exemplars."""
_Small = Annotated[int, Meta(ge=0, lt=2**31)]
_Two = Annotated[list[_Small], Meta(min_length=2, max_length=2)]
_Four = Annotated[list[_Small], Meta(min_length=4, max_length=4)]


@dataclass(frozen=True)
class Exemplar:
    """An image that excites a channel."""

    image: Text
    number: Count
    """Its number among all images, from 0: of equal values the lower one comes first."""
    value: float
    place: _Two | None
    """Row and column in the channel's map; None where the layer gives no map of the input, or the
    whole map counts."""
    map: _Two | None
    """Rows and columns of that map."""
    box: _Four | None
    """What the unit there sees, in pixels of the input: left, top, right and bottom, the last two
    excluded. None where it sees only padding, or the image could not be read again."""


@dataclass(frozen=True)
class ExemplarChannel:
    """A channel of a layer."""

    channel: _Small
    file: Text | None
    """Its picture; None where no image excites it."""
    exemplars: Annotated[list[Exemplar], Meta(max_length=100_000)]
    """Best first."""


@dataclass(frozen=True)
class FieldOfView:
    """The receptive field of a layer's units, for the first image's input size."""

    how: Text
    """computed, unknown, or no place (the layer gives no map of the input): in the last two cases
    units are shown with the whole input."""
    size: _Two
    """Height and width in pixels of the input, of the unit that sees most."""


@dataclass(frozen=True)
class ExemplarLayer:
    """A tensor of a layer; with `--per-class`, for the images of one class."""

    layer: Text
    type: Text
    index: _Small
    call: _Small
    key: Text
    class_name: Text | None
    shape: Annotated[list[Count], Meta(max_length=64)]
    layout: Text
    receptive_field: FieldOfView
    sheet: Text
    channels: Annotated[list[ExemplarChannel], Meta(max_length=2**20)]

    @property
    def label(self) -> str:
        """Its name; its class for the model itself."""
        return self.layer or self.type

    @property
    def stem(self) -> str:
        """`output`, `output.call1`."""
        return Place(self.layer, "output", self.call, self.key).stem


@dataclass(frozen=True)
class FailedImage:
    """An image that did not go through."""

    image: Text
    number: Count
    error: Reason


@dataclass(frozen=True)
class ImagesSeen:
    """The images."""

    total: Count
    seen: Count
    failures: list[FailedImage]


@dataclass(frozen=True)
class LeftOut:
    """A layer that cannot be looked at."""

    layer: Text
    reason: Reason


@dataclass(frozen=True)
class ExemplarRecord:
    """exemplars.json."""

    schema_version: Count
    featviz: Text
    torch: Text
    torchvision: Text
    device: Text
    model: dict[Text, Any]
    preprocessing: Text
    options: dict[Text, Any]
    images: ImagesSeen
    skipped: list[LeftOut]
    never_ran: list[Text]
    layers: list[ExemplarLayer]

    @property
    def top(self) -> int:
        """How many exemplars of a channel were asked for; 0 where it does not say."""
        top = self.options.get("top")
        return top if isinstance(top, int) else 0

    @property
    def room(self) -> int:
        """For how many exemplars the picture of a channel has room."""
        return max(1, min(self.top, self.images.total))

    def as_json(self) -> Mapping[str, Any]:
        """The content of the file."""
        content: Mapping[str, Any] = msgspec.to_builtins(self)
        return content


def read_record(root: Path) -> ExemplarRecord:
    """The exemplars that a folder holds.

    Raises:
        StoreError: it holds none, or they cannot be read.
    """
    path = root / EXEMPLARS_FILE
    try:
        content = files.read_json(path, _MOST)
        schema.check_version(content, SCHEMA_VERSION)
        record = schema.convert(content, ExemplarRecord)
        for contradiction in _contradictions(record):
            raise ValueError(contradiction)
        return record
    except FileNotFoundError:
        raise StoreError(
            f"{quoted(str(root))} holds no exemplars: it has no {EXEMPLARS_FILE}",
            "give a folder that featviz exemplars wrote",
        ) from None
    except (OSError, FileError, ValueError) as error:
        words = str(error).removeprefix("cannot be read: ")
        raise StoreError(f"{quoted(str(path))} cannot be read: {quoted(words)}") from error


def read_pictures(root: Path, record: ExemplarRecord) -> ReadImage:
    """The pictures of exemplars, as those of an image that has no input and no grids.

    Raises:
        StoreError: one of them is missing, or is no PNG.
    """
    named = [layer.sheet for layer in record.layers]
    named += [row.file for layer in record.layers for row in layer.channels if row.file]
    try:
        with Folder(root) as folder:
            found = {name: png_header(folder, name) for name in named}
    except FileNotFoundError as error:
        missing = quoted(str(root / str(error.filename)))
        raise StoreError(f"{missing} is missing", "draw the exemplars again") from None
    except (FileError, OSError) as error:
        raise StoreError(f"{quoted(str(root))}: {quoted(str(error))}") from error
    return pictures_beside(root, "exemplars", found)


def _contradictions(record: ExemplarRecord) -> Iterator[str]:
    """What one field says against another, or against what featviz writes."""
    if record.options.get("by") not in ("max", "mean"):
        yield "options.by is neither max nor mean"
    if not 1 <= record.top <= MOST_TOP:
        yield f"options.top is not 1 to {MOST_TOP}"
    for layer in record.layers:
        if not is_exemplar_file(layer.sheet):
            yield f"{layer.sheet!r} is no name of a sheet"
        for row in layer.channels:
            if len(row.exemplars) > record.room or bool(row.file) != bool(row.exemplars):
                yield f"channel {row.channel} of {layer.sheet} has {len(row.exemplars)} exemplars"
            if row.file and not is_exemplar_file(row.file):
                yield f"{row.file!r} is no name of a channel's picture"
