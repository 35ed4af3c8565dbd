"""The story of `sheet`: from runs to one figure, or to an animation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from featviz.drawing import animation, grid, vector
from featviz.drawing.colormap import check_cmap, decide_cmap
from featviz.drawing.figure import (
    ColorScale,
    TableLayout,
    TableRow,
    TileTable,
    draw_table,
    draw_vectors,
    lay_out,
)
from featviz.drawing.place_tiles import SIMILARITY_CMAP
from featviz.errors import StoreError, UsageError
from featviz.files.urls import Url
from featviz.options.commands import SheetOptions
from featviz.records import Bytes
from featviz.rundir.mirror import copied
from featviz.rundir.place import check_file, picture_of, writing
from featviz.rundir.read import read_run
from featviz.rundir.studies import read_steps
from featviz.sheets.cells import (
    ALL,
    CellKey,
    SheetContent,
    SheetLayer,
    SheetRun,
    read_content,
)
from featviz.text import counted, layer_named, printable, quoted

FORMATS = ("png", *vector.FORMATS, *animation.FORMATS)
_CHANNELS = 8
"""Channels of one image that stand side by side at most."""
_IMAGES = 12
"""Images that stand side by side in any case."""
_SHEET_FILE = picture_of("sheet")
# by which an earlier sheet is known, and may be replaced
_TEXT_CHUNK = PngInfo()
_TEXT_CHUNK.add_text("Software", "featviz sheet")


@dataclass(frozen=True, repr=False)
class Sheet:
    """A figure or an animation of runs."""

    path: Path | None
    """Its file; None where none was asked for."""
    images: list[str]
    """Names of those that are on it."""
    channels: Mapping[str, list[int]]
    """The channels of each layer, or call of it, by its name; none where all are one
    tile."""
    layers: int
    """How many there are; one with several calls counts once."""
    frames: int
    """How many pictures an animation has; 1 of a figure."""
    left_out: Mapping[str, str]
    """Images that are not on it, and why."""
    pixels: Bytes = field(compare=False)
    """The figure, or the first frame, uint8 [height, width, 3]."""

    @property
    def image(self) -> Image.Image:
        """The figure, or the first frame, mode RGB."""
        return Image.fromarray(self.pixels)

    def __repr__(self) -> str:
        width, height = self.image.size
        return f"<Sheet of {counted(len(self.images), 'image')}: {width}×{height}>"


class _Sources(NamedTuple):
    """What a sheet is made of."""

    runs: list[SheetRun]
    are_steps: bool
    """Whether they are the steps of one training."""


class SheetFrame(NamedTuple):
    """What a figure shows, or one picture of an animation."""

    title: str
    runs: Sequence[int]
    """Numbers among the runs of the sheet."""
    images: Sequence[str]
    """Names; of a single one the channels stand side by side."""
    slice: int | None = None
    """Which slice of a clip is shown; None lays all side by side."""


def make_sheet(sources: Sequence[Path | Url], options: SheetOptions) -> Sheet:
    """Draw layers of runs into one figure, or an animation: a column for each image, a
    row for each channel, layer and run, with the tiles that are in the runs' grids.

    Args:
        sources: run directories, at least one, local or behind URLs; or the folder of a
            `featviz.Watcher`, whose steps are the runs.
        options: `out` chooses the format by its ending; without it nothing is written.

    Raises:
        UsageError: there is no such image, layer or channel; options exclude each other;
            the figure would be too large; or its format cannot be written.
        StoreError: a run cannot be read or has no complete image, or `out` cannot be
            written.
    """
    format = _checked_format(options)
    # Runs behind URLs are copies, which go when the block ends; tiles and inputs are in
    # memory then.
    with ExitStack() as copies:
        runs, are_steps = _read_runs(sources, copies)
        content = read_content(runs, options)
    frames = [SheetFrame(options.title, range(len(runs)), content.images)]
    if format in animation.FORMATS:
        frames = _animated(content, are_steps, options.title)
    scale = _shared_scale(content)
    if options.similar_to is not None:
        scale = ColorScale(SIMILARITY_CMAP, 0.0, 1.0, "cosine of the vectors")
    tables = [_table(content, frame, scale) for frame in frames]
    # the frames of an animation have one size: all are laid out as the first
    layout = lay_out(tables[0], options.width)
    first = draw_table(tables[0], layout, options.dpi).pixels
    if options.out is not None:
        with writing(options.out, _SHEET_FILE, overwrite=options.overwrite) as file:
            _write(file, format, tables, layout, first, options)
    left_out = dict(content.damaged)
    for run in runs:
        left_out |= run.run.left_out
    channels = {}
    for layer in content.layers:
        channels[layer.label] = [n for n in layer.channels if n != ALL]
    return Sheet(
        path=options.out,
        images=list(content.images),
        channels=channels,
        layers=len({row.label for row in content.rows.values()}),
        frames=len(tables),
        left_out=left_out,
        pixels=first,
    )


def _checked_format(options: SheetOptions) -> str:
    """The format of the sheet's file, `png` without one. It is asked before a run is
    read, so that a mistake costs no time.

    Raises:
        UsageError: the ending is none of FORMATS, or what writes the format is not
            installed.
        StoreError: the file is a folder, or somebody else's.
    """
    if options.out is None:
        return "png"
    format = options.out.suffix[1:].lower()
    if format not in FORMATS:
        raise UsageError(
            f"--out {quoted(str(options.out))} is none of {', '.join(FORMATS)}",
            "--out figure.pdf",
        )
    check_file(options.out, _SHEET_FILE, overwrite=options.overwrite)
    animation.check_format(format)
    return format


def _write(
    file: BinaryIO,
    format: str,
    tables: Sequence[TileTable],
    layout: TableLayout,
    first: Bytes,
    options: SheetOptions,
) -> None:
    """Write a figure or an animation.

    Args:
        format: one of FORMATS.
        tables: the frames; a figure is the first one.
        layout: of all tables.
        first: the first table in pixels.
        options: `dpi`, and `fps` of an animation.
    """
    if format == "png":
        # a paper takes the figure in the size in which it was laid out
        dpi = (options.dpi, options.dpi)
        Image.fromarray(first).save(file, "png", pnginfo=_TEXT_CHUNK, dpi=dpi)
        return
    if format in vector.FORMATS:
        draw_vectors(tables[0], layout).save(file, format)
        return
    # a generator: each frame is drawn when it is written, and one is in memory at a time
    pictures = (draw_table(table, layout, options.dpi).pixels for table in tables)
    animation.write_animation(pictures, file, format, options.fps)


def _read_runs(sources: Sequence[Path | Url], copies: ExitStack) -> _Sources:
    """Read run directories; one folder of a training stands for the run of each step.

    Args:
        copies: gets the local copies of runs behind URLs, and removes them at its end.

    Raises:
        StoreError: a run directory cannot be read, or none has a complete image.
    """
    runs = []
    if len(sources) == 1 and isinstance(sources[0], Path):
        for number, path in read_steps(sources[0]).items():
            runs.append(SheetRun(f"step {number}", read_run(path, keep_stats=True)))
    if runs:
        return _Sources(runs, are_steps=True)
    for source in sources:
        run = read_run(copies.enter_context(copied(source)), keep_stats=True)
        runs.append(SheetRun(printable(_name_of(source)), run))
    if len({run.name for run in runs}) < len(runs):
        # `a/featviz-out` and `b/featviz-out`, whose rows nothing else tells apart
        texts = [printable(str(source)) for source in sources]
        runs = [run._replace(name=text) for run, text in zip(runs, texts, strict=True)]
    if not any(run.run.images for run in runs):
        first = runs[0].run
        reason = next(iter(first.left_out.values()), "its run.json says why")
        raise StoreError(f"{first.root} has no complete image", reason)
    return _Sources(runs, are_steps=False)


def _name_of(source: Path | Url) -> str:
    """The name of a run directory, also of `.` and `..`."""
    if isinstance(source, Path) and source.name in ("", ".."):
        return source.resolve().name
    return source.name


def _animated(content: SheetContent, are_steps: bool, title: str) -> list[SheetFrame]:
    """The frames of an animation: the steps of a training, else the slices of a clip,
    else the images.

    Args:
        are_steps: whether the runs are steps of a training.
        title: of each frame.
    """
    all_runs = range(len(content.runs))
    frames = []
    if are_steps:
        for number, run in enumerate(content.runs):
            frames.append(
                SheetFrame(f"{title} {run.name}".strip(), [number], content.images)
            )
        return frames
    if content.slices > 1:
        for slice in range(content.slices):
            frames.append(SheetFrame(title, all_runs, content.images, slice))
        return frames
    return [SheetFrame(title, all_runs, [name]) for name in content.images]


def _table(
    content: SheetContent, frame: SheetFrame, scale: ColorScale | None
) -> TileTable:
    """The table of a frame: several images side by side, or the channels of one image.

    Args:
        scale: of the colour bar; None for a table without one.
    """
    heads = [printable(PurePosixPath(name).stem) for name in frame.images]
    if len(heads) == 1:
        rows = _rows_of_image(content, frame)
        heads += [""] * (len(rows[0].tiles) - 1)
    else:
        rows = _rows_of_images(content, frame)
        if len(heads) > _IMAGES:
            columns = _columns(len(heads), len(rows))
            if columns < len(heads):
                rows = _wrapped(rows, heads, columns)
                heads = [""] * columns
    notes = []
    # what the labels leave out, since it holds for all rows
    if len(content.layers) == 1 and len(content.runs) > 1:
        notes.append(layer_named(printable(content.layers[0].label)))
    if all(row.normalize == "map" for row in content.rows.values()):
        notes.append("each map from its least to its greatest value")
    return TileTable(heads, rows, frame.title, scale, ", ".join(notes))


def _columns(images: int, rows: int) -> int:
    """How many images stand side by side where a figure of many is about square, and all
    its blocks of rows are about full.

    Args:
        rows: of each image.
    """
    columns = max(_IMAGES, grid.square(images, rows, 1))
    return ceil(images / ceil(images / columns))


def _wrapped(
    rows: Sequence[TableRow], heads: Sequence[str], columns: int
) -> list[TableRow]:
    """Rows of many images as blocks of rows of some, one below the other; names stand
    below what the model saw.

    Args:
        rows: the first one is what the model saw.
        heads: the names of the images.
        columns: how many images stand side by side.
    """
    wrapped = []
    for first in range(0, len(heads), columns):
        for row in rows:
            tiles = list(row.tiles[first : first + columns])
            # the last block leaves the rest of its rows white
            tiles += [None] * (columns - len(tiles))
            captions = heads[first : first + columns] if row.is_input else ()
            wrapped.append(replace(row, tiles=tiles, captions=captions))
    return wrapped


def _rows_of_images(content: SheetContent, frame: SheetFrame) -> list[TableRow]:
    """A column for each image: what the model saw, and below it a row for each channel
    of each layer of each run."""
    seen = [content.shown(content.inputs[name], frame.slice) for name in frame.images]
    rows = [TableRow("input", seen, is_input=True)]
    for run, layer in _blocks(content, frame):
        for channel in layer.channels:
            label = _label(content, layer)
            if channel != ALL and len(content.layers) > 1:
                label = f"{label}  {channel}"
            elif channel != ALL:
                label = f"{label}, channel {channel}".removeprefix(", ")
            tiles = []
            for name in frame.images:
                key = CellKey(run, layer.label, name)
                tiles.append(content.tile(key, channel, frame.slice))
            block = _block_name(content, frame, run)
            numbers = [_number(channel)] * len(tiles)
            rows.append(TableRow(label, tiles, block, numbers=numbers))
    return rows


def _rows_of_image(content: SheetContent, frame: SheetFrame) -> list[TableRow]:
    """The channels of one image side by side, each with its number: a row for each
    layer of each run, or several of a layer with many channels. The first column has
    what the model saw, beside the first row."""
    (name,) = frame.images
    most = max(len(layer.channels) for layer in content.layers)
    # as few rows as _CHANNELS allow, each of them about full
    columns = ceil(most / ceil(most / _CHANNELS))
    first_tile = content.shown(content.inputs[name], frame.slice)
    rows: list[TableRow] = []
    for run, layer in _blocks(content, frame):
        key = CellKey(run, layer.label, name)
        label = _label(content, layer)
        block = _block_name(content, frame, run)
        for first in range(0, len(layer.channels), columns):
            channels = layer.channels[first : first + columns]
            tiles = [content.tile(key, channel, frame.slice) for channel in channels]
            # fewer channels leave the rest of the row white
            white = [None] * (columns - len(tiles))
            numbers = ["", *map(_number, channels)]
            # the tiles of `run --labels` have their numbers in the corner
            captions = [] if _options_of(content, run).get("labels") else numbers
            row = [first_tile, *tiles, *white]
            rows.append(TableRow(label, row, block, captions, numbers))
            # the next row goes on with the same layer
            label = ""
            first_tile = None
    return rows


def _number(channel: int) -> str:
    """The number of a channel; nothing for the one tile of all channels."""
    return "" if channel == ALL else str(channel)


def _options_of(content: SheetContent, run: int) -> Mapping[str, Any]:
    """The options of a run, as its record has them."""
    return content.runs[run].run.record.get("options") or {}


def _blocks(content: SheetContent, frame: SheetFrame) -> list[tuple[int, SheetLayer]]:
    """The layers that get rows in a frame, each with the number of its run.

    Of several runs each has its own layers, since models differ. A frame of one run, such
    as a step of a training, has all layers, white where the run lacks one: the frames of
    an animation have one layout."""
    present = {(key.run, key.layer) for key in content.tiles}
    blocks = []
    for run in frame.runs:
        for layer in content.layers:
            if len(frame.runs) == 1 or (run, layer.label) in present:
                blocks.append((run, layer))
    return blocks


def _block_name(content: SheetContent, frame: SheetFrame, run: int) -> str:
    """The name beside the rows of a run, where there are several."""
    return content.runs[run].name if len(frame.runs) > 1 else ""


def _label(content: SheetContent, layer: SheetLayer) -> str:
    """The name of a layer; nothing where the names of runs alone tell rows apart."""
    if len(content.layers) == 1 and len(content.runs) > 1:
        return ""
    return layer_named(printable(layer.label))


def _shared_scale(content: SheetContent) -> ColorScale | None:
    """The scale of a colour bar; None where tiles have scales of their own, the colours
    stand for no value, or their colormap is unknown."""
    # tiles keep the colours of their runs, so a bar is true only if all agree
    scales = set()
    for key, row in content.rows.items():
        low, high = row.range or (None, None)
        # the three components of `pca`, as red, green and blue, stand on no one scale
        if low is None or high is None or row.reduce == "pca":
            return None
        cmap = row.cmap or str(_options_of(content, key.run).get("cmap", "auto"))
        over = row.overlay is not None
        cmap = decide_cmap(cmap, row.kind, over=over, reduce=row.reduce)
        scales.add(ColorScale(cmap, low, high))
    if len(scales) > 1:
        return None
    (scale,) = scales
    try:
        check_cmap(scale.cmap)
    # the record may be anybody's, and name an unknown colormap
    except UsageError:
        return None
    return scale
