"""The story of `exemplars`: from a model and images to the images that excite each channel most, as
a picture of each channel, and a sheet of all channels of a layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import ceil, sqrt
from pathlib import PurePosixPath
from typing import Any

from msgspec import structs
from PIL import Image, ImageDraw, ImageFont

from featviz.errors import UsageError
from featviz.exemplars.collect import ExemplarCollector, ExemplarSource, TopImages
from featviz.exemplars.crops import TILE, CropReader
from featviz.exemplars.fields import (
    PixelBox,
    is_map_of_input,
    receptive_fields,
)
from featviz.files.urls import Url
from featviz.hooks.capture import hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel
from featviz.options import ModelOptions
from featviz.options.commands import ExemplarOptions
from featviz.records import Layer, Sample
from featviz.run.choose import choose_layers
from featviz.run.prepare import blank_input
from featviz.run.study import BatchProgress, Study, begun
from featviz.rundir import EXEMPLARS_FILE, studies, write
from featviz.rundir.folder import Folder
from featviz.rundir.place import EXEMPLARS
from featviz.rundir.read import Failure
from featviz.rundir.studies import ExemplarChannel, ExemplarLayer, FieldOfView, Seen
from featviz.text import TextTable, by, counted, listed, printable, safe_name

log = logging.getLogger(__name__)

_MAX_TILES = 2000
"""Tiles in memory at a time, 100 MB."""


def exemplar_table(record: studies.ExemplarRecord) -> TextTable:
    """A row for each sheet, for people."""
    per_class = any(row.class_name is not None for row in record.layers)
    headings = ["layer", "type", "channels", "sees", "known", "sheet"]
    if per_class:
        headings.append("class")
    rows = []
    for row in record.layers:
        call = f".call{row.call}" if row.call else ""
        key = f".{row.key}" if row.key else ""
        view = row.receptive_field
        cells = [
            row.layer + call + key or row.type,
            row.type,
            str(len(row.channels)),
            by(view.size),
            view.how,
            row.sheet,
        ]
        if per_class:
            cells.append(row.class_name or "")
        rows.append(cells)
    return TextTable(headings, ("channels", "sees"), rows)


def find_exemplars(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: ExemplarOptions,
    progress: BatchProgress = lambda image, error, total: None,
) -> studies.ExemplarRecord:
    """Find the images, and the positions in them, that excite each channel of some layers most.

    Args:
        arguments: files, folders, archives, URLs or globs, as on the command line.
        progress: called with each image's name, its error if it failed, and the number of images.

    Returns:
        The content of exemplars.json, which stands in `options.out` with the pictures.

    Raises:
        UsageError: no selected layer gives a tensor with channels.
    """
    with begun(model, arguments, options, EXEMPLARS) as (folder, loaded, samples):
        blank, _ = blank_input(loaded, samples, options.inputs)
        layers = choose_layers(loaded, options.layers, blank)
        classes = class_names(samples) if options.per_class else [None] * len(samples)
        collector = ExemplarCollector(loaded, layers, blank, options.pick, options.top, classes)
        if not collector.sources:
            raise _no_channels(layers, collector)
        study = Study(loaded, samples, options, progress)
        with in_eval_mode(loaded.module), hooked(loaded.module, layers, collector.take) as recorder:
            collector.recorder = recorder
            study.show(collector)
        sources = list(collector.sources.values())
        fields = receptive_fields(loaded, sources, blank)
        input_size = list(blank[0].shape[-2:])
        reader = CropReader(study, options.inputs, sources, {tuple(blank[0].shape): fields})
        rows = []
        for source in sources:
            if source.site in fields:
                view = FieldOfView("computed", list(fields[source.site].largest))
            else:
                is_map = is_map_of_input(loaded, source)
                view = FieldOfView("unknown" if is_map else "no place", input_size)
            for number, class_name in enumerate(collector.class_names):
                row = _row(source, view, number, class_name)
                top = collector.tops[source.site, class_name]
                rows.append(_draw_layer(reader, options, source, top, row, folder))
        record = _record(study, options, collector, rows)
        write.write_record(folder, EXEMPLARS_FILE, record.as_json())
    return record


def class_names(samples: Sequence[Sample]) -> list[str | None]:
    """The class of each sample: the name of the folder that its image lies in. A clip is itself a
    folder of frames, and lies in that of its class."""
    names: list[str | None] = []
    for sample in samples:
        path = sample.path
        absolute = PurePosixPath(path.place) if isinstance(path, Url) else path.absolute()
        is_clip = len(sample.paths) > 1
        names.append(absolute.parents[1 if is_clip else 0].name)
    return names


def _no_channels(layers: Sequence[Layer], collector: ExemplarCollector) -> UsageError:
    reasons = [f"{layer} {reason}" for layer, reason in collector.skipped.items()]
    reasons += [f"{layer} never ran" for layer in collector.never_ran]
    message = f"none of the {len(layers)} selected layers gives a tensor with channels"
    return UsageError(message, listed(reasons, 3, "; "))


def _row(
    source: ExemplarSource, view: FieldOfView, number: int, class_name: str | None
) -> ExemplarLayer:
    """A row of exemplars.json, before its channels are drawn.

    Args:
        number: that of the class, which keeps names of sheets apart.
    """
    site = source.site
    sheet = safe_name(f"{site.layer.index:03d}_{site.layer.label}")
    if class_name is None:
        sheet += f"/{safe_name(site.stem + '.png')}"
    else:
        sheet += f"/{safe_name(site.stem)}/{safe_name(f'{number:03d}_{class_name}.png')}"
    return ExemplarLayer(
        layer=site.layer.name,
        type=site.layer.type,
        index=site.layer.index,
        call=site.call,
        key=site.key,
        class_name=class_name,
        shape=list(source.shape),
        layout=source.layout,
        receptive_field=view,
        sheet=sheet,
        channels=[],
    )


def _record(
    study: Study,
    options: ExemplarOptions,
    collector: ExemplarCollector,
    rows: list[ExemplarLayer],
) -> studies.ExemplarRecord:
    failures = [Failure(name, error, number) for name, number, error in study.failures]
    skipped = sorted(collector.skipped.items())
    return studies.ExemplarRecord(
        studies.SCHEMA_VERSION,
        **study.about,
        options={
            "layers": options.layers,
            "top": options.top,
            "by": options.pick,
            "per_class": options.per_class,
            **structs.asdict(options.inputs),
        },
        images=Seen(len(study.seen), len(study.samples), failures),
        skipped=[{"layer": layer, "reason": reason} for layer, reason in skipped],
        never_ran=collector.never_ran,
        layers=rows,
    )


def _draw_layer(
    reader: CropReader,
    options: ExemplarOptions,
    source: ExemplarSource,
    top: TopImages,
    row: ExemplarLayer,
    folder: Folder,
) -> ExemplarLayer:
    """Write the sheet of a tensor and the pictures of its channels; its row with exemplars."""
    channels, top_count = top.values.shape
    tiles_per_channel = max(1, min(top_count, len(reader.study.samples)))
    label = printable(row.label + (f".{row.key}" if row.key else ""))
    label += f" call {row.call}" if row.call else ""
    lines = _sheet_title(row, label, channels, options.pick, len(reader.study.seen))
    sheet, add_row = begin_sheet(lines, channels, tiles_per_channel)
    drawn_channels = []
    step = max(1, _MAX_TILES // tiles_per_channel)
    for first in range(0, channels, step):
        chunk = range(first, min(channels, first + step))
        for channel, shown in reader.tiles(source, top, chunk).items():
            exemplars = [exemplar for exemplar, _ in shown]
            tiles = [tile for _, tile in shown]
            path = None
            if exemplars:
                path = f"{row.sheet.removesuffix('.png')}/c{channel:05d}.png"
                title = (f"{label}, channel {channel}", lines[-1])
                texts = [(exemplar.value, exemplar.image) for exemplar in exemplars]
                _save(folder, path, draw_channel(title, tiles, texts, tiles_per_channel))
            add_row(channel, tiles, [exemplar.value for exemplar in exemplars])
            drawn_channels.append(ExemplarChannel(channel, path, exemplars))
    _save(folder, row.sheet, sheet)
    return replace(row, channels=drawn_channels)


def _sheet_title(
    row: ExemplarLayer, label: str, channels: int, rank_by: str, images_seen: int
) -> list[str]:
    """What a sheet says above its tiles: the layer, what was ranked, and what a unit sees."""
    of_class = "" if row.class_name is None else f" of class {printable(row.class_name)}"
    view = row.receptive_field
    if rank_by == "mean":
        criterion = "the highest mean of their map"
        view_note = "whole inputs are shown"
    else:
        criterion = "the highest value in their map"
        view_note = {
            "no place": "a unit has no place in the image: the whole input is shown",
            "unknown": "what a unit sees is not known: the whole input is shown",
            "computed": f"a unit sees up to {view.size[0]} x {view.size[1]} pixels of the input",
        }[view.how]
    return [
        f"{label} ({printable(row.type)}){of_class}",
        f"{counted(channels, 'channel')}, each with the images that give {criterion}; "
        f"{counted(images_seen, 'image')} seen",
        view_note,
    ]


def _save(folder: Folder, path: str, picture: Image.Image) -> None:
    with folder.write(path) as file:
        picture.save(file, "png", compress_level=1)  # 6 % larger than usual, in half the time


# Pictures

_GAP, _TEXT, _LINE = 8, 12, 15
_TITLE = 2 * _LINE + _GAP
_CAPTION = 2 * _LINE + 2
_LABEL = 92
_BETWEEN, _COLUMN_GAP = 4, 24
_SMALL, _MOST_PIXELS, _MOST_SHOWN = (64, 48, 32), 2**26, 40
"""Pixels a side of a tile in a sheet, pixels of it and tiles in a row at most."""
_LONGEST_NAME = 19
_PAPER, _INK, _FAINT = "#ffffff", "#1b2129", "#66707c"


def slot(rank: int, count: int) -> PixelBox:
    """Where the tile of a rank lies in the picture of a channel that has room for `count`."""
    row, column = divmod(rank, max(1, ceil(sqrt(count))))
    left = _GAP + column * (TILE + _GAP)
    top = _TITLE + _GAP + row * (TILE + _CAPTION + _GAP)
    return PixelBox(left, top, left + TILE, top + TILE)


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
