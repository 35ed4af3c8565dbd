"""How a report of one file becomes small: without figures, with fewer pixels of large maps, and
with fewer maps of each layer, the most telling ones."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from PIL import Image

from featviz.records import Place
from featviz.report.network import is_numbers, telling
from featviz.report.views import Form
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import ReadImage, format_of
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import CaptureRow

FEWEST = 4
"""Tiles of a layer below which it shows too little."""
READABLE = 48
"""Pixels of a map's longer side, below which it loses no more of them."""
_REPEATED, _AVERAGED = 0.5, 1.9
"""A picture of 1/k of the pixels a side has about 1/k^e of the bytes: e was 0.52 to 0.53 for
enlarged maps of resnet18 (random weights, sample scenes; 0.52 to 0.83 in the digits demonstration),
and 1.97 where values were averaged."""

Channels = Mapping[Place, list[int]]
"""The channels that stay."""


def form_within(runs: Sequence[ReadRun], room: float) -> Form | None:
    """The form that shows most of some runs in so many bytes of pictures; None where even FEWEST
    tiles of each layer take more."""
    pictures = [_Bytes.of(i, _lettered(run)) for run in runs for i in run.images.values()]
    drawn = sum(own.figures for own in pictures)
    whole = sum(own.input + sum(bytes for _, bytes, _ in own.grids) for own in pictures)
    for form in (Form(whole + drawn), Form(whole, figures=not drawn)):
        if form.bytes <= room:
            return form
    most = max((tiles for own in pictures for tiles, _, _ in own.grids), default=1)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _small(pictures, middle) <= room else (low, middle - 1)
    if low < min(FEWEST, most) or _small(pictures, low) > room:
        return None
    tiles = None if low == most else low
    return Form(_small(pictures, low), figures=not drawn, smaller=True, tiles=tiles)


@dataclass(frozen=True)
class _Bytes:
    """The bytes of the pictures of an image."""

    input: int
    figures: int
    grids: Sequence[tuple[int, int, float]]
    """Tiles of each grid, its bytes, and about how many it has where large maps lose pixels."""

    @classmethod
    def of(cls, image: ReadImage, lettered: bool) -> _Bytes:
        sizes, rows = image.sizes, list(image.captures.values())
        figures = sum(sizes[row.figure] for row in rows if row.figure)
        shares = [1.0 if lettered else _share(row) for row in rows]
        grids = [
            (max(1, len(row.drawn)), sizes[row.file], sizes[row.file] * share)
            for row, share in zip(rows, shares, strict=True)
        ]
        return cls(sizes[INPUT_FILE], figures, grids)


def _lettered(run: ReadRun) -> bool:
    """Whether pictures have letters (`--labels`, `--titles`), which fewer pixels would make
    unreadable."""
    options = run.record.get("options") or {}
    return bool(options.get("labels") or options.get("titles"))


def _small(pictures: Sequence[_Bytes], most: int) -> float:
    """Bytes with so many tiles of each layer, and fewer pixels of large maps."""
    return sum(
        own.input + sum(small * min(1, most / tiles) for tiles, _, small in own.grids)
        for own in pictures
    )


def _share(row: CaptureRow) -> float:
    """How many bytes a grid has of fewer pixels, for each that it has."""
    return float(thinned(row) ** -(_REPEATED if _enlarged(row) else _AVERAGED))


def _enlarged(row: CaptureRow) -> bool:
    return min(row.plan.scale) > 1


def thinned(row: CaptureRow) -> int:
    """Pixels of a grid, down and across, that become one: those of an enlarged map's value, or as
    many as leave a map READABLE."""
    if is_numbers(row):
        return 1
    return min(row.plan.scale) if _enlarged(row) else max(1, max(row.plan.tile) // READABLE)


@dataclass(frozen=True)
class CutImage(ReadImage):
    """An image of which some grids have fewer tiles, or pixels, than their files."""

    whole: Mapping[str, tuple[CaptureRow, CaptureRow]] = field(default_factory=dict)
    """The row of a grid as its file is, and as it is shown; by file."""
    smaller: bool = False

    def content(self, relative: str) -> bytes:
        """A picture's bytes; of a grid that has fewer tiles or pixels, of a new picture."""
        if relative not in self.whole:
            return super().content(relative)
        old, new = self.whole[relative]
        picture = self.picture(relative)
        if old is not new:
            picture = _cut(picture, old, new)
        factor = thinned(old) if self.smaller else 1
        return _saved(_reduced(picture, factor), relative)


def shrunk(runs: Sequence[ReadRun], form: Form) -> list[ReadRun]:
    """Runs as one file shows them; the first says which channels stay."""
    if form.tiles is None and not form.smaller:
        return list(runs)
    chosen = {} if form.tiles is None else telling_channels(runs[0], form.tiles)
    return [_shrunk(run, chosen, form.smaller and not _lettered(run)) for run in runs]


def _shrunk(run: ReadRun, channels: Channels, smaller: bool) -> ReadRun:
    images = {name: _fewer(image, channels, smaller) for name, image in run.images.items()}
    return replace(run, images=images)


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


def _fewer(image: ReadImage, channels: Channels, smaller: bool) -> CutImage:
    """An image whose grids have these channels only, where they have them; vectors stay."""
    old = list(image.captures.values())
    new = [_row(row, channels.get(row.place, [])) for row in old]
    own = {name: getattr(image, name) for name in ReadImage.__dataclass_fields__}
    own["manifest"] = replace(image.manifest, captures=new)
    changed = {
        one.file: (one, other)
        for one, other in zip(old, new, strict=True)
        if one is not other or (smaller and thinned(one) > 1)
    }
    return CutImage(**own, whole=changed, smaller=smaller)


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


def _cut(picture: Image.Image, whole: CaptureRow, part: CaptureRow) -> Image.Image:
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
    return canvas


def _reduced(picture: Image.Image, factor: int) -> Image.Image:
    """A picture of fewer pixels; a page shows it as large as before. Indices of a palette have no
    average: of them, one in `factor` stays."""
    if factor == 1:
        return picture
    size = tuple(max(1, round(side / factor)) for side in picture.size)
    way = Image.Resampling.NEAREST if picture.mode == "P" else Image.Resampling.BOX
    return picture.resize((size[0], size[1]), way)


def _saved(picture: Image.Image, file: str) -> bytes:
    target, kind = io.BytesIO(), format_of(file)
    picture.save(target, kind.pillow, **(kind.save or {"optimize": True}))
    return target.getvalue()


def _places(
    whole: CaptureRow, part: CaptureRow
) -> Iterator[tuple[tuple[int, int, int, int], tuple[int, int, int, int]]]:
    slots = {channel: slot for slot, channel in enumerate(whole.drawn)}
    for (place, channel), slice in product(enumerate(part.drawn), range(whole.side)):
        old = slots[channel] * whole.side + slice
        yield whole.plan.box(old), part.plan.box(place * whole.side + slice)
