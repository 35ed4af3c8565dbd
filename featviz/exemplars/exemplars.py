"""The story of `exemplars`: from a model and images to the images that excite each
channel most. They become a picture for each channel, and a sheet for each layer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from threading import Event
from typing import NamedTuple

import numpy as np
from msgspec import structs
from PIL import Image

from featviz.drawing.channels import choose_channels, warn_of_missing
from featviz.drawing.picture import write_pixels
from featviz.errors import LayoutError
from featviz.exemplars.collect import ExemplarCollector, ExemplarSource, TopImages
from featviz.exemplars.crops import CropReader
from featviz.exemplars.fields import is_map_of_input, receptive_fields
from featviz.exemplars.pictures import LayerPicture, draw_channel
from featviz.files.urls import Url
from featviz.hooks.capture import hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.layout.tracing.fields import ReceptiveField
from featviz.models.load import LoadedModel
from featviz.options import ModelOptions
from featviz.options.commands import ExemplarOptions
from featviz.records import CaptureSite, Sample
from featviz.run import workers
from featviz.run.choose import choose_layers, no_channels
from featviz.run.prepare import blank_input
from featviz.run.study import BatchProgress, Study, begin_study
from featviz.rundir import EXEMPLARS_FILE, studies, write
from featviz.rundir.folder import Folder
from featviz.rundir.place import EXEMPLARS
from featviz.rundir.studies import ExemplarChannel, ExemplarLayer, FieldOfView, Seen
from featviz.text import TextTable, by, counted, layer_named, printable, safe_name

log = logging.getLogger(__name__)

_MAX_TILES = 2000
"""Tiles in memory at the same time, which take 100 MB."""


def exemplar_table(record: studies.ExemplarRecord) -> TextTable:
    """The record as a table for people, with a row for each sheet. With `--per-class`, it
    has a column of classes."""
    per_class = any(row.class_name is not None for row in record.layers)
    headings = ["layer", "type", "channels", "receptive field", "sheet"]
    if per_class:
        headings.append("class")
    rows = []
    for row in record.layers:
        view = row.receptive_field
        cells = [
            row.title,
            row.type,
            str(len(row.channels)),
            f"{by(view.size)} ({view.how})",
            row.sheet,
        ]
        if per_class:
            cells.append(row.class_name or "")
        rows.append(cells)
    return TextTable(headings, ("channels",), rows)


def find_exemplars(
    model: ModelOptions | LoadedModel,
    images: Sequence[str],
    options: ExemplarOptions,
    progress: BatchProgress = lambda image, error, total: None,
) -> studies.ExemplarRecord:
    """Find the images, and the positions in them, that excite each channel of some
    layers most.

    Args:
        images: files, folders, archives, URLs or globs, as on the command line.
        options: `out` is the folder that is written; an earlier result in it is replaced
            only with `overwrite`.
        progress: called for each image with its name, its error if it failed, and the
            number of all images.

    Returns:
        The content of exemplars.json, which is written into `options.out` with the
        pictures.

    Raises:
        UsageError: no selected layer returns a tensor with channels, or none of these
            tensors has one of `options.channels`.
        FeatvizError: no image can be shown to the model; or `run.study.begin_study`
            raises.
    """
    with begin_study(model, images, options, EXEMPLARS) as (folder, loaded, samples):
        blank, _ = blank_input(loaded, samples, options.inputs)
        layers = choose_layers(loaded, options.layers, blank)
        classes: Sequence[str | None] = [None] * len(samples)
        if options.per_class:
            classes = class_names(samples)
        collector = ExemplarCollector(
            loaded, layers, blank, options.rank_by, options.top, classes
        )
        if not collector.sources:
            raise no_channels(len(layers), collector.skipped, collector.never_ran)
        study = Study(loaded, samples, options, progress)
        with (
            in_eval_mode(loaded.module),
            hooked(loaded.module, layers, collector.keep_candidates) as recorder,
        ):
            collector.recorder = recorder
            study.show(collector)
        sources = list(collector.sources.values())
        fields = receptive_fields(loaded, sources, blank)
        input_size = list(blank[0].shape[-2:])
        reader = CropReader(
            study, options.inputs, sources, {tuple(blank[0].shape): fields}
        )
        sheets = _sheets(loaded, sources, fields, input_size, collector)
        rows = []
        # Pictures are drawn after all images were seen: only now the best are known.
        for sheet, drawn in zip(
            sheets, _draw_sheets(sheets, reader, options, folder), strict=True
        ):
            if isinstance(drawn, LayoutError):  # the tensor has none of --channels
                collector.skipped.setdefault(sheet.row.label, drawn.message)
            else:
                rows.append(drawn)
        if not rows:
            raise no_channels(len(layers), collector.skipped, collector.never_ran)
        record = _record(study, options, collector, rows)
        write.write_record(folder, EXEMPLARS_FILE, record.as_json())
    return record


class _Sheet(NamedTuple):
    """What is needed to draw the sheet of a tensor."""

    source: ExemplarSource
    """The tensor."""
    top: TopImages
    """The best images of each channel."""
    row: ExemplarLayer
    """The tensor's record, still without channels."""
    is_framed: bool
    """Whether a tile may show the whole input with a frame around the unit's position."""


def _sheets(
    model: LoadedModel,
    sources: Sequence[ExemplarSource],
    fields: Mapping[CaptureSite, ReceptiveField],
    input_size: list[int],
    collector: ExemplarCollector,
) -> list[_Sheet]:
    """The sheets that are to be drawn, one for each tensor and class.

    Args:
        sources: the tensors.
        fields: receptive fields of tensors; unknown ones are missing.
        input_size: height and width of the first image as the model sees it.
        collector: has the best images.
    """
    sheets = []
    for source in sources:
        if source.site in fields:
            view = FieldOfView("computed", list(fields[source.site].largest))
        else:
            view = FieldOfView(
                "unknown" if is_map_of_input(model, source) else "no place", input_size
            )
        # a map of one value has only one position
        has_places = view.how != "no place" and max(source.shape[-2:]) > 1
        is_framed = has_places and view.size == input_size
        for number, class_name in enumerate(collector.class_names):
            top = collector.tops[source.site, class_name]
            row = _row(source, view, number, class_name)
            sheets.append(_Sheet(source, top, row, is_framed))
    return sheets


def _draw_sheets(
    sheets: Sequence[_Sheet],
    reader: CropReader,
    options: ExemplarOptions,
    folder: Folder,
) -> Iterator[ExemplarLayer | LayoutError]:
    """Draw sheets, in this process or in parallel worker processes. Yield the record of
    each sheet, in order, or the error of a tensor that has none of `options.channels`."""
    study = reader.study

    def draw_some(numbers: Iterable[int]) -> Iterator[ExemplarLayer | LayoutError]:
        """Draw the sheets with these numbers; yield a record or an error for each."""
        for number in numbers:
            try:
                yield _draw_layer(reader, options, sheets[number], folder)
            except LayoutError as error:
                yield error

    def raise_lost(number: int, error: workers.WorkerDiedError) -> ExemplarLayer:
        """Stop if a worker died: the result would lack its sheet."""
        raise error

    count = workers.worker_count(study.model, study.samples, None, backward=False)
    if count == 1:
        return draw_some(range(len(sheets)))
    return workers.side_by_side(
        draw_some([0]), len(sheets), draw_some, count, Event(), raise_lost
    )


def class_names(samples: Sequence[Sample]) -> list[str]:
    """The class of each sample: the name of the folder in which the image lies. A clip of
    several files is a folder of frames, which lies in the folder of its class."""
    names = []
    for sample in samples:
        path = sample.path
        absolute = (
            PurePosixPath(path.shown_path) if isinstance(path, Url) else path.absolute()
        )
        is_clip = len(sample.paths) > 1
        folder = absolute.parent.parent if is_clip else absolute.parent
        names.append(folder.name)
    return names


def _row(
    source: ExemplarSource, view: FieldOfView, number: int, class_name: str | None
) -> ExemplarLayer:
    """The row of a tensor in exemplars.json, still without channels.

    Args:
        view: what a unit sees of the image.
        number: number of the class. It is part of the sheet's file name, since `safe_name`
            may give two classes the same name.
        class_name: name of the class; None without `--per-class`.
    """
    site = source.site
    sheet = safe_name(f"{site.layer.index:03d}_{site.layer.label}")
    if class_name is None:
        sheet += f"/{safe_name(site.stem + '.png')}"
    else:
        file_name = safe_name(f"{number:03d}_{class_name}.png")
        sheet += f"/{safe_name(site.stem)}/{file_name}"
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
    """The content of exemplars.json.

    Args:
        rows: the rows of the tensors that were drawn.
    """
    failures = study.failures
    skipped = sorted(collector.skipped.items())
    return studies.ExemplarRecord(
        studies.SCHEMA_VERSION,
        **study.about,
        options={
            "layers": options.layers,
            "top": options.top,
            "by": options.rank_by,
            "channels": options.channels,
            "per_class": options.per_class,
            **structs.asdict(options.inputs),
        },
        images=Seen(len(study.seen), len(study.samples), failures),
        skipped=[{"layer": layer, "reason": reason} for layer, reason in skipped],
        never_ran=collector.never_ran,
        layers=rows,
    )


def _draw_layer(
    reader: CropReader, options: ExemplarOptions, to_draw: _Sheet, folder: Folder
) -> ExemplarLayer:
    """Write the sheet of a tensor, and a picture of each channel that has exemplars.

    Args:
        folder: folder of the result; `to_draw.row.sheet` is a path in it.

    Returns:
        The tensor's record, with its channels.

    Raises:
        LayoutError: the tensor has none of the channels of --channels.
    """
    source, top, row, _ = to_draw
    channels = _choose(options, top)
    warn_of_missing(options.channels, {row.title: range(len(top.values))})
    # if there are fewer images than --top, no columns are left empty
    count = min(top.values.shape[1], len(reader.study.samples))
    label = printable(layer_named(row.title))
    images_seen = len(reader.study.seen)
    title = _sheet_title(to_draw, label, len(channels), options.rank_by, images_seen)
    # the third line of the title says what a unit sees
    _, _, view_note, *_ = title
    sheet = LayerPicture(title, len(channels), count)
    drawn_channels = []
    step = max(1, _MAX_TILES // count)
    for first in range(0, len(channels), step):
        tiles_by_channel = reader.tiles(source, top, channels[first : first + step])
        for channel, tiles in tiles_by_channel.items():
            path = None
            # a channel without exemplars has no picture of its own
            if tiles:
                path = f"{row.sheet.removesuffix('.png')}/c{channel:05d}.png"
                lines = (f"{label}, channel {channel}", view_note)
                _save(folder, path, draw_channel(lines, tiles, count))
            # if all images of a class failed, `is_zero` is still True, but no value is 0
            is_zero = bool(top.is_zero[channel] and top.values[channel, 0] == 0)
            sheet_row = sheet.add_row(channel, tiles, is_zero=is_zero)
            exemplars = [exemplar for exemplar, _ in tiles]
            drawn_channels.append(ExemplarChannel(channel, path, exemplars, sheet_row))
    _save(folder, row.sheet, sheet.image)
    return replace(row, channels=drawn_channels)


def _choose(options: ExemplarOptions, top: TopImages) -> list[int]:
    """The channels that `--channels` chooses. Both rankings, `top` and `varied`, use the
    value of each channel's best image, since deviations are not kept.

    Raises:
        LayoutError: the tensor has none of the channels that are named.
    """
    candidates = range(len(top.values))
    if options.channels is None:
        return list(candidates)
    best = top.values[:, 0]
    return choose_channels(options.channels, candidates, means=best, deviations=best)


def _sheet_title(
    to_draw: _Sheet, label: str, channels: int, rank_by: str, images_seen: int
) -> list[str]:
    """The lines of text above a sheet's tiles: the layer; the ranking; what a unit sees;
    what frames mean, if there may be any; and where larger pictures are.

    Args:
        label: label of the tensor, printable.
        channels: number of channels that are drawn.
        rank_by: `max` or `mean`.
        images_seen: number of images that were ranked.
    """
    row = to_draw.row
    folder = printable(PurePosixPath(row.sheet).stem)
    notes = []
    of_class = ""
    if row.class_name is not None:
        of_class = f" of class {printable(row.class_name)}"
    view = row.receptive_field
    if rank_by == "mean":
        criterion = "the highest mean of their map"
        view_note = "whole inputs are shown"
    else:
        criterion = "the highest value in their map"
        view_note = {
            "no place": "a unit has no place in the image: the whole input is shown",
            "unknown": "what a unit sees is not known: the whole input is shown",
            "computed": f"a unit sees up to {by(view.size)} pixels of the input",
        }[view.how]
        if to_draw.is_framed:
            notes.append("in a whole input a frame marks the place of the unit")
    return [
        f"{label} ({printable(row.type)}){of_class}",
        (
            f"{counted(channels, 'channel')}, each with the images that give"
            f" {criterion}; {counted(images_seen, 'image')} seen"
        ),
        view_note,
        *notes,
        f"{folder}/c*.png show each channel larger",
    ]


def _save(folder: Folder, path: str, picture: Image.Image) -> None:
    """Write an RGB picture as PNG under a path in a folder."""
    with folder.write(path) as file:
        # Pillow would take ten times as long
        write_pixels(file, np.asarray(picture), repeats=True)
