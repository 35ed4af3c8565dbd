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
"""Up to so many images always stand side by side."""
_SHEET_FILE = picture_of("sheet")
# this text marks a file as a sheet, which a later sheet may replace
_TEXT_CHUNK = PngInfo()
_TEXT_CHUNK.add_text("Software", "featviz sheet")


@dataclass(frozen=True, repr=False)
class Sheet:
    """A figure or an animation of runs."""

    path: Path | None
    """The sheet's file; None if none was written."""
    images: list[str]
    """Names of the images on the sheet."""
    channels: Mapping[str, list[int]]
    """The channels that are shown, by the label of the layer or of its call (`relu`,
    `relu.call1`); an empty list for one tile of all channels."""
    layers: int
    """Number of layers; a layer with several calls counts once."""
    frames: int
    """Number of pictures of an animation; 1 for a figure."""
    left_out: Mapping[str, str]
    """Names of images that are not on the sheet, and the reasons."""
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
    """The runs that a sheet shows."""

    runs: list[SheetRun]
    are_steps: bool
    """Whether the runs are the steps of one training."""


class SheetFrame(NamedTuple):
    """The content of a figure, or of one picture of an animation."""

    title: str
    runs: Sequence[int]
    """Numbers among the runs of the sheet, from 0."""
    images: Sequence[str]
    """Names of images. If there is only one, its channels stand side by side."""
    slice: int | None = None
    """Number of the slice that is shown; None puts all slices side by side."""


def make_sheet(sources: Sequence[Path | Url], options: SheetOptions) -> Sheet:
    """Draw layers of runs into one figure, or an animation: a column for each image, a
    row for each channel of each layer and run. The tiles are cut out of the runs' grids.

    Args:
        sources: run directories, at least one, local or URLs; or the folder of a
            `featviz.Watcher`, whose steps are the runs.
        options: the ending of `out` chooses the format; if it is None, nothing is
            written.

    Raises:
        UsageError: there is no such image, layer or channel; options exclude each other;
            the figure would be too large; or its format cannot be written.
        StoreError: a run cannot be read or has no complete image, or `out` cannot be
            written.
    """
    format = _check_format(options)
    # The local copies of URLs are removed at the end of the block, when tiles and inputs
    # are in memory.
    with ExitStack() as copies:
        runs, are_steps = _read_runs(sources, copies)
        content = read_content(runs, options)
    frames = [SheetFrame(options.title, range(len(runs)), content.images)]
    if format in animation.FORMATS:
        frames = _animation_frames(content, are_steps, options.title)
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


def _check_format(options: SheetOptions) -> str:
    """Check `options.out` before any run is read, so that a mistake costs no time.

    Returns:
        The format of the sheet's file; `png` if none is written.

    Raises:
        UsageError: the ending is none of FORMATS, or a package that the format needs is
            missing.
        StoreError: `options.out` is a folder, or a file that may not be replaced.
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
        file: open for writing.
        format: one of FORMATS.
        tables: a table for each frame; a figure shows the first one.
        layout: the layout of all tables.
        first: the first table as pixels.
        options: `dpi`, and `fps` of an animation.
    """
    if format == "png":
        # with dpi in the file, other programs insert it in the size of its layout
        dpi = (options.dpi, options.dpi)
        Image.fromarray(first).save(file, "png", pnginfo=_TEXT_CHUNK, dpi=dpi)
        return
    if format in vector.FORMATS:
        draw_vectors(tables[0], layout).save(file, format)
        return
    # a generator, so that only one frame is in memory at a time
    pictures = (draw_table(table, layout, options.dpi).pixels for table in tables)
    animation.write_animation(pictures, file, format, options.fps)


def _read_runs(sources: Sequence[Path | Url], copies: ExitStack) -> _Sources:
    """Read run directories.

    Args:
        sources: as in `make_sheet`. If the only one is the folder of a training, the run of
            each step is read.
        copies: removes the local copies of URLs when it is closed.

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
        # `a/featviz-out` and `b/featviz-out` have equal names: use whole paths
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


def _animation_frames(
    content: SheetContent, are_steps: bool, title: str
) -> list[SheetFrame]:
    """The frames of an animation: one for each step of a training; else one for each slice
    of a clip; else one for each image.

    Args:
        are_steps: whether the runs are steps of a training.
        title: title of each frame; at a step, the step's name is added.
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
        scale: scale of the colour bar; None for no colour bar.
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
                rows = _wrap_rows(rows, heads, columns)
                heads = [""] * columns
    notes = []
    # what holds for all rows is not repeated in their labels
    if len(content.layers) == 1 and len(content.runs) > 1:
        notes.append(layer_named(printable(content.layers[0].label)))
    if all(row.normalize == "map" for row in content.rows.values()):
        notes.append("each map from its least to its greatest value")
    return TileTable(heads, rows, frame.title, scale, ", ".join(notes))


def _columns(images: int, rows: int) -> int:
    """How many images stand side by side in a figure of many images: it becomes about
    square, and all blocks of rows have about as many images.

    Args:
        images: number of images.
        rows: number of rows for each image.
    """
    columns = max(_IMAGES, grid.square(images, rows, 1))
    return ceil(images / ceil(images / columns))


def _wrap_rows(
    rows: Sequence[TableRow], heads: Sequence[str], columns: int
) -> list[TableRow]:
    """Divide rows of many images into blocks, which stand one below the other. In each
    block, the names of its images stand below their inputs.

    Args:
        rows: the rows; the first one shows the inputs.
        heads: the names of the images.
        columns: how many images stand side by side in a block.
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
    """Rows with a column for each image: first the inputs, then a row for each channel of
    each layer of each run."""
    seen = [
        content.cell_picture(content.inputs[name], frame.slice) for name in frame.images
    ]
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
    """Rows with the channels of one image side by side: a row for each layer of each run,
    or several for a layer with many channels. The first column shows the input, only in
    the first row."""
    (name,) = frame.images
    most = max(len(layer.channels) for layer in content.layers)
    # as few rows as _CHANNELS allows, with about as many channels each
    columns = ceil(most / ceil(most / _CHANNELS))
    first_tile = content.cell_picture(content.inputs[name], frame.slice)
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
            # further rows of the layer have no label, and only the first one the input
            label = ""
            first_tile = None
    return rows


def _number(channel: int) -> str:
    """The number of a channel as text; "" for a tile of all channels."""
    return "" if channel == ALL else str(channel)


def _options_of(content: SheetContent, run: int) -> Mapping[str, Any]:
    """The options of a run, as they stand in its run.json."""
    return content.runs[run].run.record.get("options") or {}


def _blocks(content: SheetContent, frame: SheetFrame) -> list[tuple[int, SheetLayer]]:
    """The layers that get rows in a frame, each with the number of its run.

    If a frame shows several runs, each run has only its own layers, since models differ.
    If it shows one run, such as a step of a training, it has all layers, and a layer that
    the run lacks is white: so all frames of an animation have one layout."""
    present = {(key.run, key.layer) for key in content.tiles}
    blocks = []
    for run in frame.runs:
        for layer in content.layers:
            if len(frame.runs) == 1 or (run, layer.label) in present:
                blocks.append((run, layer))
    return blocks


def _block_name(content: SheetContent, frame: SheetFrame, run: int) -> str:
    """The name beside the rows of a run; "" if the frame shows only one run."""
    return content.runs[run].name if len(frame.runs) > 1 else ""


def _label(content: SheetContent, layer: SheetLayer) -> str:
    """The name of a layer for its rows; "" if the rows of several runs all show one layer."""
    if len(content.layers) == 1 and len(content.runs) > 1:
        return ""
    return layer_named(printable(layer.label))


def _shared_scale(content: SheetContent) -> ColorScale | None:
    """The scale of a colour bar; None if tiles have different scales, the colours do not
    stand for values, or the colormap is unknown."""
    # tiles keep the colours of their runs: a colour bar needs the same scale in all
    scales = set()
    for key, row in content.rows.items():
        low, high = row.range or (None, None)
        # the components of `pca`, as red, green and blue, have no common scale
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
    # run.json may come from anywhere, and name an unknown colormap
    except UsageError:
        return None
    return scale
