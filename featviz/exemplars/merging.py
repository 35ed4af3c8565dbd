"""Parts of exemplars that were found apart (`--shard`), as one; no image and no model is needed.

The tiles of the result are cut out of the parts' pictures, so they are those of one run over all
images, pixel for pixel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

import featviz.exemplars.tiles as tiles
from featviz.errors import CompareError, FileError, StoreError, UsageError
from featviz.exemplars.output import LayerWriter, write_record
from featviz.files import Folder
from featviz.rundir import destination
from featviz.rundir.exemplars import (
    Exemplar,
    ExemplarLayer,
    ExemplarRecord,
    ImagesSeen,
    read_record,
)
from featviz.text import quoted, ranges

_SHARED = (
    *("featviz", "torch", "torchvision", "device", "model", "preprocessing", "options"),
    "never_ran",
)
"""Entries of exemplars.json that are the same in all parts of one whole."""
_BROKEN = (OSError, FileError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What Pillow raises on broken pictures, and `files` on what is no file."""


@dataclass(frozen=True)
class _Shard:
    root: Path
    folder: Folder
    record: ExemplarRecord


def merge_exemplars(parts: Sequence[Path], out: Path, overwrite: bool = False) -> ExemplarRecord:
    """Join all parts of one whole into `out`, in which nothing may be missing.

    Raises:
        FeatvizError: a part is missing, twice there, damaged, or of another model, layers or
            images; or `out` cannot be written. Then nothing is left under `out`.
    """
    destination.check_apart(out, "--out", parts)
    destination.check_free(out, destination.EXEMPLARS, overwrite)
    with ExitStack() as stack:
        read = [
            _Shard(root, stack.enter_context(Folder(root)), read_record(root)) for root in parts
        ]
        read.sort(key=lambda part: part.record.shard or [0, 0])
        _check_whole([part.record.shard for part in read])
        for part in read[1:]:
            _check_alike(read[0], part)
        images = _images([part.record.images for part in read])
        with destination.replacing(out, destination.EXEMPLARS) as fresh:
            layers = [
                _layer(number, read, fresh, images.seen)
                for number in range(len(read[0].record.layers))
            ]
            skipped = {one.layer: one for part in reversed(read) for one in part.record.skipped}
            record = replace(
                read[0].record,
                shard=None,
                images=images,
                skipped=sorted(skipped.values(), key=lambda one: one.layer),
                layers=layers,
            )
            write_record(fresh, record)
    return record


def _check_whole(shards: Sequence[Sequence[int] | None]) -> None:
    """Whether the parts are all parts of one whole, each once.

    Raises:
        UsageError: they are not; says which are missing.
    """
    if None in shards or len({shard[1] for shard in shards if shard is not None}) > 1:
        raise UsageError(
            "these exemplars are not parts of one whole", "name the folders of --shard 1/N to N/N"
        )
    numbers = [shard[0] for shard in shards if shard is not None]
    count = next(shard[1] for shard in shards if shard is not None)
    if twice := sorted({number for number in numbers if numbers.count(number) > 1}):
        raise UsageError(f"part {twice[0]} of {count} is there twice", "name each part once")
    if len(numbers) < count:
        missing = ranges(sorted({*range(1, count + 1)} - {*numbers})) if count < 10**6 else "many"
        raise UsageError(f"of {count} parts these are missing: {missing}", "name all parts")


def _check_alike(one: _Shard, other: _Shard) -> None:
    """Whether two parts have the same model, layers and options, and parts of the same images.

    Raises:
        CompareError: names the first entry of exemplars.json that differs.
    """
    differing = [
        name for name in _SHARED if getattr(one.record, name) != getattr(other.record, name)
    ]
    if one.record.images.total != other.record.images.total:
        differing.append("images.total")
    if [row.identity for row in one.record.layers] != [row.identity for row in other.record.layers]:
        differing.append("layers")
    if differing:
        raise CompareError(
            f"{one.root} and {other.root} are not parts of one whole: {differing[0]} differs",
            "look for exemplars in all parts with the same model, layers, images and options",
        )


def _images(parts: Sequence[ImagesSeen]) -> ImagesSeen:
    failures = sorted((one for part in parts for one in part.failures), key=lambda one: one.number)
    return ImagesSeen(parts[0].total, sum(part.seen for part in parts), failures)


def _layer(number: int, parts: Sequence[_Shard], fresh: Path, images: int) -> ExemplarLayer:
    """A layer's pictures, from those of the parts."""
    record = parts[0].record
    writer = LayerWriter(
        fresh, record.layers[number], str(record.options.get("by")), record.room, images
    )
    for channel in range(len(record.layers[number].channels)):
        best = sorted(_found(number, channel, parts), key=lambda found: found[0])[: record.room]
        exemplars = [exemplar for _, exemplar, _, _ in best]
        cut = _tiles([(part, rank) for *_, part, rank in best], number, channel, record.room)
        writer.add(channel, exemplars, cut)
    return writer.finish()


def _found(
    number: int, channel: int, parts: Sequence[_Shard]
) -> Iterator[tuple[tuple[float, int], Exemplar, _Shard, int]]:
    """All exemplars of a channel, with what ranks them."""
    for part in parts:
        for rank, exemplar in enumerate(part.record.layers[number].channels[channel].exemplars):
            yield (-exemplar.value, exemplar.number), exemplar, part, rank


def _tiles(
    wanted: Sequence[tuple[_Shard, int]], number: int, channel: int, room: int
) -> list[Image.Image]:
    """The tiles of these ranks, out of the parts' pictures."""
    pictures = {
        part.root: _picture(part, part.record.layers[number].channels[channel].file, room)
        for part, _ in wanted
    }
    return [tiles.tile_of(pictures[part.root], rank, room) for part, rank in wanted]


def _picture(part: _Shard, way: str | None, room: int) -> Image.Image:
    """The picture of a channel.

    Raises:
        StoreError: it is missing, broken, or of another size than featviz gives it.
    """
    try:
        with (
            part.folder.open(str(way)) as file,
            Image.open(file, formats=["PNG"]) as picture,
        ):
            if picture.size != tiles.channel_size(room):
                raise ValueError(f"its size is {picture.size}")
            return picture.convert("RGB")
    except _BROKEN as error:
        raise StoreError(
            f"{quoted(str(part.root))}: {quoted(str(way))} cannot be read: {quoted(str(error))}",
            "look for the exemplars of this part again",
        ) from error
