"""The story of `sheet`: one picture of one layer, images by channels, cut from a run's grids."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from featviz.drawing.png import MAX_PIXELS
from featviz.errors import StoreError, UsageError
from featviz.files.urls import Url
from featviz.records import Floats
from featviz.rundir import INPUT_FILE
from featviz.rundir.atomic import atomic
from featviz.rundir.destination import check_picture
from featviz.rundir.image import DamagedError, DrawnGrid, ReadImage
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.store.fetch import here
from featviz.text import cut, read_ranges, safe_name

_MARGIN, _GAP, _TEXT = 12, 4, 13
"""Pixels around the sheet, between cells and of its letters."""
_SMALLEST = 32
"""Pixels that the picture of what the model saw has at least, on its longer side."""
_INPUT = "input"
_PAPER, _INK, _NO_PICTURE = (255, 255, 255), (27, 33, 41), (223, 227, 232)
_SOFTWARE = "featviz sheet"
_MARK = PngInfo()
_MARK.add_text("Software", _SOFTWARE)
_LONGEST_NAME = 28
"""Letters of an image's name; the middle of a longer one is left out."""


@dataclass(frozen=True)
class SheetOptions:
    """The options of `sheet`."""

    layer: str
    stem: str = "output"
    """The tensor of the layer whose tiles are cut: `output`, `output.call1`, `grad`."""
    channels: str | None = None
    """`0-31`, `3,7,12-15`; None takes all that are drawn."""
    sort: str = "index"
    transpose: bool = False
    """A row for each image, instead of a column."""
    out: Path | None = None
    """None is `sheet-LAYER.png` in the current folder."""


@dataclass(frozen=True)
class SheetResult:
    """What was drawn."""

    path: Path
    images: tuple[str, ...]
    channels: tuple[int, ...]
    """In the order of the rows; none where all channels are one tile."""
    left_out: Mapping[str, str]
    """Images that are not whole, and why."""


ALL = -1
"""Stands for the one tile that all channels became (`run --reduce`)."""

Cell = Image.Image | None
"""A tile; None where an image does not have the channel."""


def make_sheet(place: Path | Url, options: SheetOptions) -> SheetResult:
    """Draw a layer's maps of all images of a run, here or in an object store, into one picture.

    Tiles look as in the grids they are cut from: each map by the scale with which it was drawn.

    Raises:
        StoreError: no run, or the picture cannot be written.
        UsageError: no such layer, tensor or channels, or too large a picture.
    """
    with here(place) as root:
        return _make(read_run(root, hold=True), options)


def _make(run: ReadRun, options: SheetOptions) -> SheetResult:
    columns = _find(run, options)
    grids = [grid for _, grid in columns]
    channels = sort_channels(grids, _wanted(options, grids), options.sort)
    _check_size(grids, channels)
    lines, left_out = _cut(columns, channels, run.left_out)
    picture = _compose(
        list(lines.values()),
        [cut(name, _LONGEST_NAME) for name in lines],
        channels,
        options.transpose,
    )
    out = options.out or Path(safe_name(f"sheet-{options.layer}.png"))
    check_picture(out, _SOFTWARE, "sheet of featviz")
    with atomic(out) as file:
        picture.save(file, "png", pnginfo=_MARK)
    return SheetResult(out, tuple(lines), tuple(c for c in channels if c != ALL), left_out)


def tile(picture: Image.Image, grid: DrawnGrid, channel: int) -> Image.Image:
    """Cut a channel's tile out of its grid, with all its slices side by side; RGB."""
    plan, side = grid.capture.plan, grid.capture.side
    first = _drawn(grid).index(channel) * side
    strip = Image.new("RGB", (plan.tile[1] * side, plan.tile[0]))
    for n in range(side):
        left, top, width, height = plan.box(first + n)
        one = picture.crop((left, top, left + width, top + height))
        strip.paste(one.convert("RGB"), (n * width, 0))
    return strip


def parse_channels(text: str) -> list[int]:
    """`0-3,7` to 0, 1, 2, 3, 7.

    Raises:
        UsageError: it is something else.
    """
    try:
        return read_ranges(text)
    except ValueError as error:
        raise UsageError(
            f"--channels {text!r}: {str(error)!r} is no channel or range", "0-31, 3,7,12"
        ) from None


def sort_channels(grids: Sequence[DrawnGrid], channels: Sequence[int], by: str) -> list[int]:
    """Order channels by a statistic, its mean over the images; the largest comes first.

    Channels without a finite value come last, equal ones in their order.
    """
    if by == "index":
        return sorted(channels)
    stats = [grid.stats for grid in grids]
    return sorted(channels, key=lambda channel: (_rank(stats, channel, ORDERS[by]), channel))


def _rank(stats: Sequence[Floats], channel: int, order: Callable[[Floats], float]) -> float:
    values = [order(rows[channel]) for rows in stats if channel < len(rows)]
    finite = [value for value in values if np.isfinite(value)]
    return -float(np.mean(finite)) if finite else np.inf


ORDERS: dict[str, Callable[[Floats], float]] = {
    "mean": lambda row: float(row[2]),
    "max": lambda row: float(row[1]),
    "variance": lambda row: float(row[3]) ** 2,
    "zeros": lambda row: float(row[4]),
}
"""Statistics by which channels are sorted, from a row of stats.npz; `index` sorts by number."""


def _find(run: ReadRun, options: SheetOptions) -> list[tuple[ReadImage, DrawnGrid]]:
    """The grid of each image that has it."""
    if not run.images:
        reason = next(iter(run.left_out.values()), "its run.json says why")
        raise StoreError(f"{run.root} has no complete image", reason)
    grids = [(image, grid) for image in run.images.values() for grid in image.grids]
    of_layer = [column for column in grids if column[1].capture.label == options.layer]
    columns = [column for column in of_layer if column[1].capture.place.stem == options.stem]
    if columns:
        return columns
    if stems := {grid.capture.place.stem: None for _, grid in of_layer}:
        raise UsageError(
            f"{options.layer} has no {options.stem!r}", f"it has {', '.join(stems)}; see --tensor"
        )
    layers = {grid.capture.label: None for _, grid in grids}
    raise UsageError(f"the run has no layer {options.layer!r}", f"it has {', '.join(layers)}")


def _drawn(grid: DrawnGrid) -> list[int]:
    """The channels that have a tile; ALL where they have one together."""
    return grid.capture.drawn or [ALL]


def _wanted(options: SheetOptions, grids: Sequence[DrawnGrid]) -> list[int]:
    drawn = sorted({channel for grid in grids for channel in _drawn(grid)})
    text = options.channels
    if text is None:
        return drawn
    if drawn == [ALL]:
        raise UsageError(
            f"--channels {text}: all channels of {options.layer} are one tile "
            f"({grids[0].capture.reduce})",
            "leave out --channels, or run without --reduce",
        )
    wanted = parse_channels(text)
    missing = sorted(set(wanted) - set(drawn))
    if missing:
        raise UsageError(
            f"--channels {text}: channel {missing[0]} was not drawn",
            f"{len(drawn)} channels were, from {drawn[0]} to {drawn[-1]}",
        )
    return wanted


def _check_size(grids: Sequence[DrawnGrid], channels: Sequence[int]) -> None:
    pixels = len(channels) * sum(math.prod(g.capture.plan.tile) * g.capture.side for g in grids)
    if pixels > MAX_PIXELS:
        raise UsageError(
            f"the sheet would have {pixels // 1_000_000} megapixels, more than Pillow opens",
            "--channels takes fewer rows",
        )


def _cut(
    columns: Sequence[tuple[ReadImage, DrawnGrid]],
    channels: Sequence[int],
    left_out: dict[str, str],
) -> tuple[dict[str, list[Cell]], dict[str, str]]:
    """The cells of each image, and why others are left out.

    Raises:
        DamagedError: no picture can be read.
    """
    lines, errors = {}, []
    for image, grid in columns:
        try:
            lines[image.name] = _column(image, grid, channels)
        except DamagedError as error:
            errors.append(error)
    if errors and not lines:
        raise errors[0]
    return lines, left_out | {error.image.name: error.message for error in errors}


def _column(image: ReadImage, grid: DrawnGrid, channels: Sequence[int]) -> list[Cell]:
    """What the model saw, as large as a tile, then the tiles of an image."""
    drawn, picture = set(_drawn(grid)), image.picture(grid.capture.file)
    height, width = grid.capture.plan.tile
    room = max(width * grid.capture.side, _SMALLEST), max(height, _SMALLEST)
    seen = _fitted(image.picture(INPUT_FILE).convert("RGB"), room)
    return [seen, *(tile(picture, grid, c) if c in drawn else None for c in channels)]


def _fitted(picture: Image.Image, room: tuple[int, int]) -> Image.Image:
    """A picture that fills a width and height in one direction; enlarged, its pixels stay sharp."""
    factor = min(room[0] / picture.width, room[1] / picture.height)
    size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
    kind = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BICUBIC
    return picture.resize(size, kind)


@dataclass(frozen=True)
class _Table:
    """Cells in rows and columns, with names above and to the left."""

    heads: Sequence[str]
    sides: Sequence[str]
    cells: Sequence[Sequence[Cell]]
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont

    def draw(self) -> Image.Image:
        """The table as a picture."""
        widths = [max(_size(row[n])[0] for row in self.cells) for n in range(len(self.heads))]
        heights = [max(_size(cell)[1] for cell in row) for row in self.cells]
        upright = max(self.font.getlength(head) for head in self.heads) > max(widths)
        heads = [self._text(head, upright) for head in self.heads]
        widths = [max(pair) for pair in zip(widths, (head.width for head in heads), strict=True)]
        sides = [self._text(side) for side in self.sides]
        lefts = _offsets(max(side.width for side in sides), widths)
        tops = _offsets(max(head.height for head in heads), heights)
        sheet = Image.new("RGB", (lefts[-1] + _MARGIN, tops[-1] + _MARGIN), _PAPER)
        for left, head in zip(lefts, heads, strict=False):
            sheet.paste(head, (left, tops[0] - 2 * _GAP - head.height))
        for row, side, top, height in zip(self.cells, sides, tops, heights, strict=False):
            sheet.paste(side, (lefts[0] - 2 * _GAP - side.width, top + (height - side.height) // 2))
            for cell, left, width in zip(row, lefts, widths, strict=False):
                place = (left, top) if cell else (left, top, left + width, top + height)
                sheet.paste(cell or _NO_PICTURE, place)
        return sheet

    def _text(self, text: str, upright: bool = False) -> Image.Image:
        """A line of text, or one that runs upwards."""
        left, _, right, _ = self.font.getbbox(text)
        height = self.font.getbbox("Ag")[3] + 1
        line = Image.new("RGB", (max(1, round(right - left)), round(height)), _PAPER)
        ImageDraw.Draw(line).text((-left, 0), text, _INK, self.font)
        return line.transpose(Image.Transpose.ROTATE_90) if upright else line


def _size(cell: Cell) -> tuple[int, int]:
    return (1, 1) if cell is None else cell.size


def _offsets(names: int, sizes: Sequence[int]) -> list[int]:
    """Where each row or column begins, and the end of the last."""
    at = [_MARGIN + names + 2 * _GAP]
    for size in sizes:
        at.append(at[-1] + size + _GAP)
    return [*at[:-1], at[-1] - _GAP]


def _compose(
    lines: Sequence[Sequence[Cell]], names: Sequence[str], channels: Sequence[int], transpose: bool
) -> Image.Image:
    """Lay the images' cells out in columns, or in rows."""
    numbers = [_INPUT, *("all" if channel == ALL else str(channel) for channel in channels)]
    font = ImageFont.load_default(_TEXT)
    if transpose:
        return _Table(numbers, names, lines, font).draw()
    return _Table(names, numbers, list(zip(*lines, strict=True)), font).draw()
