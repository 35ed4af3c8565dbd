"""The story of `sheet`: from runs to one figure, or to an animation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from featviz.drawing import animation, vector
from featviz.drawing.colormap import check_cmap, resolved
from featviz.drawing.figure import (
    ColorScale,
    TableLayout,
    TableRow,
    TileTable,
    draw_table,
    draw_vectors,
    lay_out,
)
from featviz.errors import StoreError, UsageError
from featviz.files.urls import Url
from featviz.options.commands import SheetOptions
from featviz.records import Bytes
from featviz.rundir.image import DamagedError
from featviz.rundir.mirror import copied
from featviz.rundir.place import check_file, picture_of, writing
from featviz.rundir.read import read_run
from featviz.rundir.studies import read_steps
from featviz.sheets.cells import (
    ALL,
    SheetContent,
    SheetLayer,
    SheetRun,
    cut_tiles,
    input_frames,
    read_content,
)
from featviz.text import printable, quoted

FORMATS = ("png", *vector.FORMATS, *animation.FORMATS)
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
    channels: Mapping[str, list[int]]
    """The channels of each layer, by its name; none where all are one tile."""
    frames: int
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
        return f"<Sheet of {len(self.images)} images: {width}×{height}>"


class _Sources(NamedTuple):
    runs: list[SheetRun]
    are_steps: bool
    """Whether they are the steps of one training."""


class SheetFrame(NamedTuple):
    """What one picture of an animation shows, or a figure."""

    title: str
    runs: Sequence[int]
    images: Sequence[str]
    slice: int | None = None
    """Of a clip; None lays all side by side."""


class _TileBook:
    """The tiles of a sheet, which are read once."""

    def __init__(self, content: SheetContent) -> None:
        self.damaged: dict[str, str] = {}
        """Images that cannot be read, and why."""
        self.inputs: dict[str, list[Bytes]] = {}
        """The frames of what the model saw, by the name of the image."""
        self._tiles: dict[tuple[int, str, str], dict[int, list[Bytes]]] = {}
        self._most_slices = content.slices
        channels = {layer.label: layer.channels for layer in content.layers}
        for key, capture in content.captures.items():
            _, label, name = key
            if label not in channels:
                continue
            try:
                self._tiles[key] = cut_tiles(capture, channels[label])
                if name not in self.inputs:
                    self.inputs[name] = input_frames(capture.image)
            except DamagedError as error:
                self.damaged[name] = error.message

    def seen(self, name: str, slice: int | None) -> Bytes | None:
        """What the model saw of an image; of a clip at a slice the frame under it."""
        if name not in self.inputs:
            return None
        frames = self.inputs[name]
        if slice is None:
            return np.hstack(frames)
        return frames[int((slice + 0.5) * len(frames) / self._most_slices)]

    def tile(
        self, key: tuple[int, str, str], channel: int, slice: int | None
    ) -> Bytes | None:
        """The tile of a channel; None where it was not drawn.

        Args:
            key: the number of a run, the label of a layer and the name of an image.
            slice: of the most that a layer has; None lays all side by side.
        """
        tiles = self._tiles.get(key, {}).get(channel)
        if tiles is None:
            return None
        if slice is None:
            return np.hstack(tiles)
        return tiles[slice * len(tiles) // self._most_slices]


def make_sheet(sources: Sequence[Path | Url], options: SheetOptions) -> Sheet:
    """Draw layers of runs into one figure, or an animation: a column for each image, a
    row for each channel, layer and run, with the tiles that are in the runs' grids.

    Args:
        sources: run directories, or the folder of a `featviz.Watcher`.

    Raises:
        UsageError: there is no such image, layer or channel, or the figure would be too
            large.
        StoreError: the runs have no complete image.
    """
    format = "png"
    if options.out is not None:
        format = options.out.suffix[1:].lower()
        if format not in FORMATS:
            raise UsageError(
                f"--out {quoted(str(options.out))} is none of {', '.join(FORMATS)}",
                "--out figure.pdf",
            )
        check_file(options.out, _SHEET_FILE, overwrite=options.overwrite)
        animation.check_format(format)
    with ExitStack() as copies:
        runs, are_steps = _read_runs(sources, copies)
        content = read_content(runs, options)
        book = _TileBook(content)
    images = [name for name in content.images if name in book.inputs]
    if not images:
        raise StoreError(next(iter(book.damaged.values()), "no image has the layers"))
    content = replace(content, images=images)
    frames = [SheetFrame(options.title, range(len(runs)), images)]
    if format in animation.FORMATS:
        frames = _moving(content, are_steps, options.title)
    scale = _shared_scale(content)
    tables = [_table(content, book, frame, scale) for frame in frames]
    layout = lay_out(tables[0], options.width)
    first = draw_table(tables[0], layout, options.dpi).pixels
    if options.out is not None:
        with writing(options.out, _SHEET_FILE, overwrite=options.overwrite) as file:
            if format in vector.FORMATS:
                draw_vectors(tables[0], layout).save(file, format)
            elif format in animation.FORMATS:
                pictures = _drawn(tables, layout, options.dpi)
                animation.write_animation(pictures, file, format, options.fps)
            else:
                dpi = (options.dpi, options.dpi)
                picture = Image.fromarray(first)
                picture.save(file, "png", pnginfo=_TEXT_CHUNK, dpi=dpi)
    left_out = dict(book.damaged)
    for run in runs:
        left_out |= run.run.left_out
    channels = {}
    for layer in content.layers:
        channels[layer.label] = [n for n in layer.channels if n != ALL]
    return Sheet(options.out, images, channels, len(tables), left_out, first)


def _read_runs(sources: Sequence[Path | Url], copies: ExitStack) -> _Sources:
    """Read run directories; one folder of a training stands for the run of each step."""
    if len(sources) == 1 and isinstance(sources[0], Path):
        steps = read_steps(sources[0])
        if steps:
            runs = [
                SheetRun(f"step {number}", read_run(path, hold=True))
                for number, path in steps.items()
            ]
            return _Sources(runs, are_steps=True)
    runs = []
    for source in sources:
        run = read_run(copies.enter_context(copied(source)), hold=True)
        runs.append(SheetRun(printable(source.name), run))
    if not any(run.run.images for run in runs):
        root = runs[0].run.root
        reason = next(iter(runs[0].run.left_out.values()), "its run.json says why")
        raise StoreError(f"{root} has no complete image", reason)
    return _Sources(runs, are_steps=False)


def _moving(content: SheetContent, are_steps: bool, title: str) -> list[SheetFrame]:
    """The frames of an animation: the steps of a training, else the slices of a clip,
    else the images."""
    all_runs = range(len(content.runs))
    if are_steps:
        return [
            SheetFrame(f"{title} {run.name}".strip(), [number], content.images)
            for number, run in enumerate(content.runs)
        ]
    if content.slices > 1:
        return [
            SheetFrame(title, all_runs, content.images, slice)
            for slice in range(content.slices)
        ]
    return [SheetFrame(title, all_runs, [name]) for name in content.images]


def _drawn(
    tables: Sequence[TileTable], layout: TableLayout, dpi: int
) -> Iterator[Bytes]:
    for table in tables:
        yield draw_table(table, layout, dpi).pixels


def _table(
    content: SheetContent, book: _TileBook, frame: SheetFrame, scale: ColorScale | None
) -> TileTable:
    """Images side by side; of one image the channels."""
    if len(frame.images) == 1:
        rows = _rows_of_image(content, book, frame)
        heads = [PurePosixPath(frame.images[0]).stem, *[""] * (len(rows[0].tiles) - 1)]
    else:
        rows = _rows_of_images(content, book, frame)
        heads = [PurePosixPath(name).stem for name in frame.images]
    return TileTable([printable(head) for head in heads], rows, frame.title, scale)


def _rows_of_images(
    content: SheetContent, book: _TileBook, frame: SheetFrame
) -> list[TableRow]:
    """A row for each channel of each layer of each run, below what the model saw."""
    seen = [book.seen(name, frame.slice) for name in frame.images]
    rows = [TableRow("input", seen)]
    for number in frame.runs:
        block = content.runs[number].name if len(frame.runs) > 1 else ""
        for layer in _present(content, number):
            for channel in layer.channels:
                tiles = [
                    book.tile((number, layer.label, name), channel, frame.slice)
                    for name in frame.images
                ]
                rows.append(TableRow(_label(content, layer, channel), tiles, block))
    return rows


def _label(content: SheetContent, layer: SheetLayer, channel: int) -> str:
    """What tells a row from others: its layer, its channel, or both."""
    if channel == ALL:
        return _layer_label(content, layer)
    return (
        f"{printable(layer.label)}  {channel}"
        if len(content.layers) > 1
        else f"{channel}"
    )


def _layer_label(content: SheetContent, layer: SheetLayer) -> str:
    """The name of a layer; nothing where the names of runs alone tell rows apart."""
    if len(content.layers) == 1 and len(content.runs) > 1:
        return ""
    return printable(layer.label)


def _rows_of_image(
    content: SheetContent, book: _TileBook, frame: SheetFrame
) -> list[TableRow]:
    """A row for each layer of each run: what the model saw, then the channels side by
    side, each above its number."""
    name = frame.images[0]
    columns = max(len(layer.channels) for layer in content.layers)
    rows: list[TableRow] = []
    for number in frame.runs:
        block = content.runs[number].name if len(frame.runs) > 1 else ""
        for layer in _present(content, number):
            tiles: list[Bytes | None] = [None] * (columns + 1)
            captions = [""] * (columns + 1)
            if not rows:
                tiles[0] = book.seen(name, frame.slice)
            for column, channel in enumerate(layer.channels, start=1):
                key = (number, layer.label, name)
                tiles[column] = book.tile(key, channel, frame.slice)
                captions[column] = "" if channel == ALL else str(channel)
            if not any(captions):
                captions = []
            label = _layer_label(content, layer)
            rows.append(TableRow(label, tiles, block, captions))
    return rows


def _present(content: SheetContent, number: int) -> list[SheetLayer]:
    """The layers that a run has for some image."""
    present = []
    for layer in content.layers:
        if any(
            (number, layer.label, name) in content.captures for name in content.images
        ):
            present.append(layer)
    return present


def _shared_scale(content: SheetContent) -> ColorScale | None:
    """The scale of a colour bar; None where tiles have scales of their own, or the
    colours stand for no value."""
    labels = {layer.label for layer in content.layers}
    scales = set()
    for (number, label, _), (_, row) in content.captures.items():
        if label not in labels:
            continue
        if row.range is None or None in row.range or row.reduce == "pca":
            return None
        low, high = row.range
        options = content.runs[number].run.record.get("options") or {}
        name = row.cmap or str(options.get("cmap", "auto"))
        over = row.overlay is not None
        cmap = resolved(name, row.kind, over=over, reduce=row.reduce)
        scales.add(ColorScale(cmap, float(low or 0), float(high or 0)))
    if len(scales) != 1:
        return None
    (scale,) = scales
    try:
        check_cmap(scale.cmap)
    except UsageError:  # the record may be anybody's
        return None
    return scale
