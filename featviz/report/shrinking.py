"""Fewer tiles of each layer, the most telling ones, for a report of one file that must be small."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from PIL import Image

from featviz.records import Place
from featviz.report.network import is_numbers, telling
from featviz.rundir.image import ReadImage, format_of
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import CaptureRow

FEWEST = 4
"""Tiles of a layer below which it shows too little."""

Channels = Mapping[Place, list[int]]
"""The channels that stay."""


@dataclass(frozen=True)
class CutImage(ReadImage):
    """An image of which some grids have fewer tiles than their files."""

    whole: Mapping[str, tuple[CaptureRow, CaptureRow]] = field(default_factory=dict)
    """The row of a grid as its file is, and as it is shown; by file."""

    def content(self, relative: str) -> bytes:
        """A picture's bytes; of a grid that has fewer tiles, of a new picture."""
        if relative not in self.whole:
            return super().content(relative)
        return _cut(self.picture(relative), *self.whole[relative], relative)


def tiles_within(runs: list[ReadRun], room: float) -> int:
    """How many tiles of a layer all pictures may have to fit into so many bytes together."""
    grids = [
        (image.sizes[row.file], len(row.drawn))
        for run in runs
        for image in run.images.values()
        for row in image.captures.values()
        if row.drawn
    ]
    most = max((tiles for _, tiles in grids), default=1)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(size * min(1, middle / tiles) for size, tiles in grids) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def telling_channels(run: ReadRun, count: int) -> Channels:
    """The channels of each tensor that stay: the most telling of the first image that has it."""
    chosen: dict[Place, list[int]] = {}
    for image in run.images.values():
        missing = [row for place, row in image.captures.items() if place not in chosen]
        numbers = image.stats() if missing else {}
        for row in missing:
            if row.drawn:
                stay = telling(row, numbers[row.place.stats_key], count)
                chosen[row.place] = [channel for channel in stay if channel is not None]
    return chosen


def with_fewer_tiles(run: ReadRun, channels: Channels) -> ReadRun:
    """A run whose grids have these channels only, where they have them; vectors stay."""
    return replace(
        run, images={name: _fewer(image, channels) for name, image in run.images.items()}
    )


def _fewer(image: ReadImage, channels: Channels) -> CutImage:
    rows = [_row(row, channels.get(place, [])) for place, row in image.captures.items()]
    pairs = zip(image.captures.values(), rows, strict=True)
    own = {name: getattr(image, name) for name in ReadImage.__dataclass_fields__}
    own["manifest"] = replace(image.manifest, captures=rows)
    return CutImage(**own, whole={old.file: (old, new) for old, new in pairs if old is not new})


def _row(row: CaptureRow, channels: list[int]) -> CaptureRow:
    drawn = row.drawn
    stay = [channel for channel in drawn if channel in set(channels)] or drawn[: len(channels)]
    if len(stay) == len(drawn) or not stay or is_numbers(row):
        return row
    columns = min(row.plan.columns, math.ceil(math.sqrt(len(stay))) * row.side)
    kept = {str(channel) for channel in stay}
    collapsed = {one: own for one, own in (row.collapsed or {}).items() if one in kept}
    grid = row.grid.copy()
    grid["nrow"] = columns
    grid.pop("top", None)
    return replace(row, channels=stay, grid=grid, collapsed=collapsed or None)


def _cut(picture: Image.Image, whole: CaptureRow, part: CaptureRow, file: str) -> bytes:
    """The tiles that stay, in a picture of their own, without a title."""
    plan = part.plan
    canvas = Image.new(picture.mode, (plan.width, plan.height))
    if picture.mode == "P":
        canvas.putpalette(picture.getpalette() or [])
    if plan.padding:
        pad = picture.getpixel((0, whole.plan.top))
        canvas.paste(pad, (0, 0, *canvas.size))  # type: ignore[arg-type]
    for old, new in _places(whole, part):
        left, top, width, height = old
        tile = picture.crop((left, top, left + width, top + height))
        canvas.paste(tile, new[:2])
    target, kind = io.BytesIO(), format_of(file)
    canvas.save(target, kind.pillow, **(kind.save or {"optimize": True}))
    return target.getvalue()


def _places(
    whole: CaptureRow, part: CaptureRow
) -> Iterator[tuple[tuple[int, int, int, int], tuple[int, int, int, int]]]:
    slots = {channel: slot for slot, channel in enumerate(whole.drawn)}
    for (place, channel), slice in product(enumerate(part.drawn), range(whole.side)):
        old = slots[channel] * whole.side + slice
        yield whole.plan.box(old), part.plan.box(place * whole.side + slice)
