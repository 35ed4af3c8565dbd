"""The story of `exemplars`: from a model and images to the images that excite each channel most, as
a picture of each channel, and a sheet of all channels of a layer."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, sqrt
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from msgspec import structs
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from featviz.drawing.values import to_pixels
from featviz.errors import FeatvizError, UsageError
from featviz.exemplars.collect import (
    Box,
    ExemplarCollector,
    ExemplarSource,
    Top,
    has_places,
    largest_view,
    receptive_fields,
)
from featviz.files.urls import Url
from featviz.hooks.capture import hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.layout.views import to_box
from featviz.models.load import LoadedModel
from featviz.options import ModelOptions
from featviz.options.commands import ExemplarOptions
from featviz.records import CaptureSite
from featviz.records.findings import TextTable
from featviz.run.choose import choose_layers
from featviz.run.prepare import blank_input
from featviz.run.study import BatchProgress, Study, batches, begun
from featviz.rundir import EXEMPLARS_FILE, studies, write
from featviz.rundir.place import EXEMPLARS
from featviz.rundir.read import Failure
from featviz.rundir.studies import Seen
from featviz.text import by, counted, listed, printable, safe_name

log = logging.getLogger(__name__)


def exemplar_table(record: studies.ExemplarRecord) -> TextTable:
    """For people: a row for each sheet."""
    headings, rows = ["layer", "type", "channels", "sees", "known", "sheet"], []
    per_class = any(row.class_name is not None for row in record.layers)
    for row in record.layers:
        label = row.layer + (f".call{row.call}" if row.call else "")
        label += f".{row.key}" if row.key else ""
        view = row.receptive_field
        cells = [label or row.type, row.type, str(len(row.channels)), by(view.size), view.how]
        rows.append([*cells, row.sheet, *([row.class_name or ""] if per_class else [])])
    headings += ["class"] if per_class else []
    return TextTable(headings, ("channels", "sees"), rows)


def find_exemplars(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: ExemplarOptions,
    progress: BatchProgress = lambda image, error, total: None,
) -> studies.ExemplarRecord:
    """Find the images, and the places in them, that excite each channel of some layers most."""
    with begun(model, arguments, options, EXEMPLARS) as (folder, loaded, samples):
        blank, _ = blank_input(loaded, samples, options.inputs)
        layers = choose_layers(loaded, options.layers, blank)
        classes: list[str | None] = [None] * len(samples)
        for number, sample in enumerate(samples if options.per_class else ()):
            path, is_clip = sample.path, len(sample.paths) > 1  # which is a folder of frames
            own = PurePosixPath(path.place) if isinstance(path, Url) else path.absolute()
            classes[number] = own.parents[is_clip].name
        found = ExemplarCollector(loaded, layers, blank, options.pick, options.top, classes)
        if not found.targets:
            reasons = [f"{layer} {reason}" for layer, reason in found.skipped.items()]
            reasons += [f"{layer} never ran" for layer in found.never_ran]
            words = f"none of the {len(layers)} selected layers gives a tensor with channels"
            raise UsageError(words, listed(reasons, 3, "; "))
        study = Study(loaded, samples, options, progress)
        with in_eval_mode(loaded.module), hooked(loaded.module, layers, found.take) as recorder:
            found.recorder = recorder
            study.show(found)
        fields = receptive_fields(loaded, list(found.targets.values()), blank)
        cutter = Cutter(study, options, found, {tuple(blank[0].shape): fields})
        rows = []
        for site, target in found.targets.items():
            how = "unknown" if has_places(loaded, target) else "no place"
            view = studies.FieldOfView(how, list(blank[0].shape[-2:]))
            if site in fields:
                view = studies.FieldOfView("computed", list(largest_view(fields[site])))
            place = (site.layer.name, site.layer.type, site.layer.index, site.call, site.key)
            for number, name in enumerate(sorted({*classes}, key=str)):
                shape, layout = list(target.shape), target.layout
                row = studies.ExemplarLayer(*place, name, shape, layout, view, "", [])
                sheet = safe_name(f"{row.index:03d}_{row.label}")
                sheet += f"/{safe_name(row.stem + '.png' if name is None else row.stem)}"
                sheet += "" if name is None else f"/{safe_name(f'{number:03d}_{name}.png')}"
                row = replace(row, sheet=sheet)
                rows.append(cutter.draw(target, found.tops[site, name], row, folder))
        failures = [Failure(name, error, number) for name, number, error in study.failures]
        skipped = sorted(found.skipped.items())
        asked = {"layers": options.layers, "top": options.top, "by": options.pick}
        asked |= {"per_class": options.per_class, **structs.asdict(options.inputs)}
        record = studies.ExemplarRecord(
            studies.SCHEMA_VERSION,
            **study.about,
            options=asked,
            images=Seen(len(study.seen), len(samples), failures),
            skipped=[{"layer": layer, "reason": reason} for layer, reason in skipped],
            never_ran=found.never_ran,
            layers=rows,
        )
        write.write_record(folder, EXEMPLARS_FILE, record.as_json())
    return record


# Pictures

TILE = 128  # pixels a side of a tile in the picture of a channel

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
_MOST_TILES, _MOST_READ, _SHAPES = 2000, 2**28, 8
"""Tiles (100 MB), bytes of images, and shapes of input whose receptive fields are held at once;
images beyond are read again for each layer."""


@dataclass
class Cutter:
    """Reads images again, cuts out what units see, and writes the pictures."""

    study: Study
    options: ExemplarOptions
    found: ExemplarCollector
    fields: dict[tuple[int, ...], dict[CaptureSite, Tensor]]  # by the shape of the input
    _read: dict[int, tuple[Image.Image, list[Tensor]] | None] = field(default_factory=dict)
    """Images as the model saw them, its arguments without values; None where they vanished."""
    _bytes: int = 0

    def draw(
        self, target: ExemplarSource, top: Top, row: studies.ExemplarLayer, folder: Path
    ) -> studies.ExemplarLayer:
        """Write the pictures of a tensor for one class or all images; its row with exemplars."""
        is_max, count = self.options.pick == "max", len(top[0])
        room = max(1, min(top[0].shape[1], len(self.study.samples)))
        label = printable(row.label + (f".{row.key}" if row.key else ""))
        label += f" call {row.call}" if row.call else ""
        of_class = "" if row.class_name is None else f" of class {printable(row.class_name)}"
        what = "the highest value in their map" if is_max else "the highest mean of their map"
        size = " x ".join(map(str, row.receptive_field.size))
        sees = {
            "no place": "a unit has no place in the image: the whole input is shown",
            "unknown": "what a unit sees is not known: the whole input is shown",
            "computed": f"a unit sees up to {size} pixels of the input",
        }[row.receptive_field.how]
        lines = [
            f"{label} ({printable(row.type)}){of_class}",
            f"{counted(count, 'channel')}, each with the images that give {what}; "
            f"{counted(len(self.study.seen), 'image')} seen",
            sees if is_max else "whole inputs are shown",
        ]
        sheet, add_row = begin_sheet(lines, count, room)
        channels, step = [], max(1, _MOST_TILES // room)
        for channel in range(count):
            if channel % step == 0:
                shown = self._shown(target, top, range(channel, min(count, channel + step)))
            exemplars, path = [exemplar for exemplar, _ in shown[channel]], None
            tiles = [tile for _, tile in shown[channel]]
            if exemplars:
                path = f"{row.sheet.removesuffix('.png')}/c{channel:05d}.png"
                title = f"{label}, channel {channel}", lines[-1]
                texts = [(one.value, one.image) for one in exemplars]
                _save(folder / path, draw_channel(title, tiles, texts, room))
            add_row(channel, tiles, [one.value for one in exemplars])
            channels.append(studies.ExemplarChannel(channel, path, exemplars))
        _save(folder / row.sheet, sheet)
        return replace(row, channels=channels)

    def _shown(
        self, target: ExemplarSource, top: Top, channels: range
    ) -> dict[int, list[tuple[studies.Exemplar, Image.Image]]]:
        """Exemplars and their tiles, by channel; best first."""
        values, images, places = top
        shown: dict[int, list[tuple[studies.Exemplar, Image.Image]]] = {c: [] for c in channels}
        wanted: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        nothing = Image.new("RGB", (TILE, TILE), _EMPTY)
        for channel in channels:
            for rank in np.flatnonzero(np.isfinite(values[channel])).tolist():
                number, value = int(images[channel, rank]), float(str(values[channel, rank]))
                row, column, *size = places[channel, rank].tolist()
                place, grid = (None, None) if row < 0 else ([row, column], size)
                name = self.study.samples[number].name
                exemplar = studies.Exemplar(name, number, value, place, grid, None)
                shown[channel].append((exemplar, nothing))
                wanted[number].append((channel, rank))
        for number, picture, args in self._pictures(sorted(wanted)):
            shape = tuple(args[0].shape)
            if shape not in self.fields:
                if len(self.fields) == _SHAPES:
                    self.fields.clear()
                targets = list(self.found.targets.values())
                self.fields[shape] = receptive_fields(self.study.model, targets, args)
            sides = self.fields[shape].get(target.site)
            largest = picture.size[::-1] if sides is None else largest_view(sides)
            for channel, rank in wanted[number]:
                exemplar, _ = shown[channel][rank]
                box: Box | None = (0, 0, *picture.size)
                if exemplar.place is None:
                    tile = cut(picture, box, picture.size[::-1])
                else:
                    row, column = exemplar.place
                    box = box if sides is None else to_box(sides[:, row, column].tolist())
                    tile = cut(picture, box, largest, [row, column, *(exemplar.map or ())])
                shown[channel][rank] = replace(exemplar, box=box and list(box)), tile
        return shown

    def _pictures(
        self, numbers: Sequence[int]
    ) -> Iterator[tuple[int, Image.Image, Sequence[Tensor]]]:
        """The images of these numbers; those that fit into memory are decoded once."""
        study, inputs = self.study, self.options.inputs
        for number in numbers:
            if (known := self._read.get(number)) is not None:
                yield number, *known

        def vanished(number: int, error: FeatvizError) -> None:
            log.warning("%s cannot be read again: %s", study.samples[number].name, error.message)
            self._read[number] = None

        missing = [number for number in numbers if number not in self._read]
        for batch in batches(study.samples, study.model, inputs, 1, vanished, missing):
            pixels = to_pixels(study.model.preprocess.shown(batch.inputs)[0])
            rgb = np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))
            picture = Image.fromarray(rgb)
            args = [arg.to("meta") for arg in batch.inputs]
            self._bytes += 3 * picture.width * picture.height
            if self._bytes <= _MOST_READ:
                self._read[batch.images[0]] = picture, args
            yield batch.images[0], picture, args


def _save(path: Path, picture: Image.Image) -> None:
    with write.atomic(path) as file:
        picture.save(file, "png", compress_level=1)  # 6 % larger than usual, in half the time


def cut(
    picture: Image.Image, box: Box | None, size: Sequence[int], place: Sequence[int] | None = None
) -> Image.Image:
    """A crop of the input as a tile, in its middle; an empty one without a box. `size` is that of
    the layer's largest crop, which fills the tile. The place (row, column, rows and columns of the
    map) is marked where the crop is the whole input."""
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
        x = left + (column + 0.5) * width / columns - across / 2
        y = top + (row + 0.5) * height / rows - down / 2
        draw = ImageDraw.Draw(tile)
        draw.rectangle([x - 1, y - 1, x + across, y + down], outline=_INK)
        draw.rectangle([x, y, x + across - 1, y + down - 1], outline=_MARK)
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
    """A channel's tiles, the best first, each above its value and the name of its image."""
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


def begin_sheet(
    title: Sequence[str], channels: int, count: int
) -> tuple[Image.Image, Callable[[int, Sequence[Image.Image], Sequence[float]], None]]:
    """The picture of a layer, a row of at most `count` small tiles for each channel, about square;
    and what draws the row of a channel, its tiles and their values, into it."""
    most = min(count, _MOST_SHOWN)  # tiles are made smaller, then left out, then channels are
    for side, shown in [(n, most) for n in _SMALL] + [(_SMALL[-1], n) for n in range(most)[:0:-1]]:
        width, height = _LABEL + shown * (side + _BETWEEN) + _COLUMN_GAP, side + _LINE + _GAP
        if channels * width * height <= _MOST_PIXELS:
            break
    rows = min(channels, _MOST_PIXELS // (width * height))
    left_out = [f"the first {shown} of up to {count} images"] if shown < count else []
    left_out += [f"the first {rows} of {channels} channels"] if rows < channels else []
    lines = [*title, *([f"for want of room only {' of '.join(left_out)}"] if left_out else [])]
    high = ceil(rows / max(1, round(sqrt(rows * height / width))))
    begin = len(lines) * _LINE + 3 * _GAP
    widest = max(int(_font().getlength(line)) for line in lines) + 2 * _GAP
    size = max(ceil(rows / high) * width + _GAP, widest), begin + high * height + _GAP
    picture = Image.new("RGB", size, _PAPER)
    for number, line in enumerate(lines):
        _write(picture, (_GAP, _GAP + number * _LINE), line, _FAINT if number else _INK)

    def add_row(channel: int, tiles: Sequence[Image.Image], values: Sequence[float]) -> None:
        if channel >= rows:
            return
        column, down = divmod(channel, high)
        left, top = _GAP + column * width, begin + down * height
        _write(picture, (left, top + (side - _LINE) // 2), f"channel {channel}", _INK)
        note = "" if values else "no finite value"
        if len(values) > 1 and values[0] == values[-1]:  # dead, or saturated
            note = "all equal"
        _write(picture, (left, top + (side + _LINE) // 2), note, _FAINT)
        for rank, (tile, value) in enumerate(zip(tiles, values[:shown], strict=False)):
            at = left + _LABEL + rank * (side + _BETWEEN)
            picture.paste(tile.resize((side, side), Image.Resampling.BOX), (at, top))
            _write(picture, (at, top + side), f"{value:.3g}", _FAINT)

    return picture, add_row


def _write(picture: Image.Image, at: tuple[int, int], text: str, color: str) -> None:
    ImageDraw.Draw(picture).text(at, text, fill=color, font=_font())


@cache
def _font() -> Any:
    return ImageFont.load_default(_TEXT)
