"""Two pages of captioned tiles: a figure, which shows the input and some maps with colour
bars; and the page of `look`, which has a row of maps for each layer. All lengths are
inches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from featviz.drawing import colormap, grid, sheet, vector
from featviz.drawing.picture import GridPicture, write_pixels
from featviz.drawing.sheet import DPI, INK, Canvas, Cell, Letters, Tile, TileGrid
from featviz.models.requirements import require_matplotlib
from featviz.records import REDUCTIONS, Bytes
from featviz.text import counted, percent, printable

_TITLE = 0.45
"""Height of the title's line."""

# A figure: maps beside the input, with colour bars

FIRST = 16
"""Maps that a figure shows."""
_SIDE = 1.7
"""Longer side of a tile in a figure of many tiles, in which the input is twice as large.
"""
_APART = 0.15
"""Distance of tiles."""
_HEAD = 0.28
"""Height above a tile for its title."""
_BESIDE = 0.05
"""Distance of a tile and its colour bar."""
_BAR = 0.08
"""Width of a colour bar."""
_TICKS = 0.5
"""Width of the numbers beside a colour bar."""
_TICK = 0.03
"""Length of a tick."""
_LINE = 0.12
"""Height of a tick's number."""
_ABOVE = 0.08
"""Distance of a tile and its title."""
_IN_A_ROW = 3
"""Up to so many tiles stand in one row with the input."""
_TITLE_POINTS = 115
"""A title of n letters fits a line of i inches at 115 · i / n points."""
_LONG = 8
"""A tile whose longer side is at least so many times the shorter one is stretched to fill
its cell."""
# what a tile's title says of the map's mark
_MARKED = {grid.NONE: "", grid.ZERO: " (all zero)", grid.CONSTANT: " (constant)"}


def figure_tiles(picture: GridPicture, cmap: str) -> list[Tile]:
    """The first maps of a picture in the colormap `cmap`: a tile for each channel, with
    its slices side by side. A strip of numbers, or a picture of all channels, is one tile.
    """
    colors = colormap.ramp(cmap)
    palette = picture.palette
    slices = picture.plan.tile_count if picture.strip else picture.slices[0]
    tiles = []
    for number, title in enumerate(_figure_titles(picture)):
        first = number * slices
        pixels = picture.tiles[first : first + slices]
        # tiles have limits of their own, or all have one pair
        index = first if len(picture.limits.low) > 1 else 0
        ends = [picture.limits.low[index], picture.limits.high[index]]
        low, high = np.nan_to_num(ends)
        if pixels.ndim == 3:
            # levels; a constant map gets the colour in the middle of the colormap
            shades = np.full(pixels.shape, 128)
            if high > low:
                shades = pixels.astype(np.int64) * 256 // (palette.levels - 1)
            painted = colors[np.minimum(shades, 255)]
            if palette.nonfinite is not None:
                painted[pixels == palette.nonfinite] = colormap.MAGENTA
            pixels = painted
        limits = None if picture.reduce == "pca" else (float(low), float(high))
        tiles.append(Tile(title, np.concatenate(list(pixels), axis=1), limits))
    return tiles


def _figure_titles(picture: GridPicture) -> list[str]:
    """The titles of a figure's tiles, at most FIRST."""
    if picture.strip:
        description = (
            "numbers" if picture.constant is None else "constant maps, a value each"
        )
        return [f"{len(picture.drawn)} {description}"]
    if picture.reduce is not None:
        channels = counted(len(picture.stats), "channel")
        return [f"{REDUCTIONS[picture.reduce].title} of {channels}"]
    titles = []
    marks = picture.marks[:: picture.slices[0]]
    for channel, mark in zip(picture.drawn[:FIRST], marks, strict=False):
        group = picture.collapsed.get(channel)
        shared_by = f" ×{len(group)}" if group else ""
        titles.append(f"channel {channel}{shared_by}{_MARKED[int(mark)]}")
    return titles


class FigureSize(NamedTuple):
    """The geometry of a figure."""

    height: int
    """Pixels."""
    width: int
    """Pixels."""
    seen: Cell
    """The rectangle of the input, in inches."""
    grid: TileGrid
    """Where the tiles lie, on the right of the input, in inches."""


def figure_size(count: int, aspect: float = 1.0) -> FigureSize:
    """The geometry of a figure. Up to three tiles stand in a row with the input, and are
    as large; more tiles are half as large as the input.

    Args:
        count: number of tiles.
        aspect: height divided by width of the tiles and of the input.
    """
    columns = ceil(sqrt(count))
    length = _SIDE
    seen_length = 2 * _SIDE
    if count <= _IN_A_ROW:
        columns = count
        seen_length = length = _SIDE * (2 if count == 1 else 1.5)
    across = min(1.0, 1 / aspect)
    down = min(1.0, aspect)
    tile = _Size(length * across, length * down)
    seen = Cell(_APART, _TITLE + _HEAD, seen_length * across, seen_length * down)
    x = seen.width + 2 * _APART
    step = _Size(tile.width + _APART + _BAR + _TICKS, tile.height + _HEAD + _APART)
    rows = ceil(count / columns)
    height = max(_TITLE + rows * step.height, seen.top + seen.height + _APART)
    width = x + columns * step.width + _APART
    tiles = TileGrid(columns, *tile, x, seen.top, *step)
    return FigureSize(round(height * DPI), round(width * DPI), seen, tiles)


def write_figure(
    file: BinaryIO,
    title: str,
    seen: Tile,
    tiles: Sequence[Tile],
    cmap: str,
    text: Mapping[str, str],
    aspect: float = 1.0,
    format: str = "png",
) -> None:
    """Write a figure to an open file.

    Args:
        file: open for writing.
        title: one line above all tiles; a long title gets small letters.
        seen: what the model saw, with pixels uint8 [H, W, 1] or [H, W, 3]; it stands on
            the left.
        tiles: the tiles on the right, at least one.
        cmap: the name of the colormap of the colour bars.
        text: texts about the figure that a PNG holds, by keyword.
        aspect: see `figure_size`.
        format: `png`, or one of `vector.FORMATS`.
    """
    size = figure_size(len(tiles), aspect)
    canvas = Canvas(size.height, size.width)
    if format in vector.FORMATS:
        canvas = vector.VectorCanvas(size.height / DPI, size.width / DPI)
    colors = colormap.ramp(cmap)
    width = size.width / DPI
    title = printable(title)
    points = min(10.0, _TITLE_POINTS * width / max(len(title), 1))
    canvas.write(title, width / 2, _TITLE / 2, Letters(points), "middle")
    # one channel becomes RGB with three equal numbers
    shape = (*seen.pixels.shape[:2], 3)
    seen = replace(seen, pixels=np.broadcast_to(seen.pixels, shape))
    _draw_tile(canvas, seen, size.seen, colors)
    for number, tile in enumerate(tiles):
        _draw_tile(canvas, tile, size.grid.cell(number), colors)
    if isinstance(canvas, vector.VectorCanvas):
        canvas.save(file, format)
    else:
        write_pixels(file, canvas.pixels, text)


def _draw_tile(canvas: Canvas, tile: Tile, cell: Cell, colors: Bytes) -> None:
    """Draw a tile in the middle of a cell, with its title above. If it has limits, a
    colour bar in `colors` and the note stand on its right. Pixels that are large enough
    to be seen stay sharp squares."""
    spot, share = cell.fit(tile.pixels)
    rows, columns = tile.pixels.shape[:2]
    # in its proportions, a strip of numbers would be a line one pixel high
    if max(rows, columns) >= _LONG * min(rows, columns):
        spot = cell
    x, top, width, height = spot
    canvas.paste(tile.pixels, spot, smooth=share * DPI < 3)
    # the title may reach over the colour bar, but not into the factor of its numbers
    max_width = width + 2 * _APART
    if tile.limits is not None and ticks(*tile.limits).factor:
        max_width = width + 2 * _BESIDE
    canvas.write(
        tile.title, x + width / 2, top - _ABOVE, Letters(8), "above", max_width
    )
    if tile.limits is not None:
        bar = Cell(x + width + _BESIDE, top, _BAR, height)
        draw_color_bar(canvas, bar, tile.limits, colors)
        # on the right of the ticks' numbers
        x = bar.left + _BAR + _TICKS
        canvas.write(
            tile.note, x, top + height / 2, Letters(8), max_width=height, upright=True
        )


def draw_color_bar(
    canvas: Canvas, bar: Cell, limits: tuple[float, float], colors: Bytes
) -> None:
    """Draw an upright colour bar with ticks. If the ticks' numbers have a common factor,
    it stands above the bar.

    Args:
        bar: the rectangle of the bar.
        limits: the values at the lower and the upper end.
        colors: uint8 [levels, 3], from the lower end on.
    """
    scale = ticks(*limits)
    low, high = scale.limits
    canvas.paste(colors[::-1, None], bar)
    canvas.frame(bar)
    right = bar.left + bar.width
    apart = bar.height / max(1, len(scale.values) - 1)
    # a low bar has only every n-th tick, so that the numbers do not overlap
    step = max(1, ceil(_LINE / apart))
    for value, number in zip(scale.values[::step], scale.numbers[::step], strict=True):
        y = bar.top + bar.height * (high - value) / (high - low)
        canvas.fill(Cell(right, y - 0.5 / DPI, _TICK, 1 / DPI), sheet.BLACK)
        canvas.write(number, right + _TICK + 0.02, y, Letters(7))
    if scale.factor:
        canvas.write(scale.factor, bar.left, bar.top - 0.07, Letters(7))


class Ticks(NamedTuple):
    """The ticks of a colour bar."""

    values: list[float]
    numbers: list[str]
    """The text at each value."""
    factor: str
    """`1e-5` or `+1e3`: what all numbers are multiplied by, or what is added to them; may
    be empty."""
    limits: tuple[float, float]
    """The values at the ends of the bar. If the limits are equal, these are half a unit
    below and above."""


def ticks(low: float, high: float) -> Ticks:
    """The ticks that matplotlib puts on an axis from `low` to `high`, at round numbers."""
    if not high > low:
        low, high = low - 0.5, low + 0.5
    require_matplotlib()
    from matplotlib.ticker import AutoLocator, ScalarFormatter

    formatter: Any = ScalarFormatter(useMathText=False)
    with sheet.matplotlib_lock:
        # the formatter needs an axis: its range says how many digits tell numbers apart
        formatter.create_dummy_axis()
        values = [v for v in AutoLocator().tick_values(low, high) if low <= v <= high]
        formatter.axis.set_view_interval(low, high)
        numbers = formatter.format_ticks(values)
        return Ticks(values, numbers, formatter.get_offset(), (low, high))


# The page of `look`

# the colours of text and lines
_SOFT = (92, 100, 112)
_FAINT = (104, 112, 124)
_RULE = (226, 229, 234)
_SMALL = Letters(9, _SOFT)

_MARGIN = 0.3
"""Margin of the page."""
_NAMES = 1.8
"""Width of the column of names."""
_TILE = 1.2
"""Side of a square tile."""
_GAP = 0.08
"""Distance of tiles."""
_COLUMNS = 8
"""Tiles on one line at most; a row with more tiles has several lines."""
_NUMBERS = 0.2
"""Height below a tile for its numbers."""
_BETWEEN = 0.14
"""Distance of rows."""
_CAPTION = 0.25
"""Height of a caption above a picture."""
_KEY = 0.4
"""Height of the key below all rows."""
_LEADING = 0.18
"""Distance of lines of text."""
_WIDEST_STEP = 0.5
"""Distance of the bars of a prediction at most."""
_PICTURE = 2.2
"""Height of the input's picture, if there is a prediction."""
_ALONE = 3.0
"""Height of the input's picture, if there is no prediction."""
_WIDEST_PICTURE = 4.2
_NARROWEST_PAGE = 8.0
"""Width of the page at least, so that the prediction has room."""
_WIDTHS = (0.85, 1.55)
"""Width of a tile, at least and at most. Maps of other shapes get white around them."""
_HEIGHTS = (0.3, 1.55)
"""Height of a tile, at least and at most, before few tiles are enlarged."""
_TALLEST = 3.6
"""Height of an enlarged tile at most."""
_TOGETHER = 6.0
"""Height of the enlarged tiles of all rows together, at most."""
_STRIP = 0.3
"""Height of a strip of numbers."""
_NAME_LETTERS = 18
"""Letters on one line of a layer's name, which has at most `_NAME_LINES` lines."""
_NAME_LINES = 3


class PageRow(NamedTuple):
    """One layer on the page of `look`."""

    name: str
    lines: Sequence[str]
    """Lines of text below the name."""
    tiles: Sequence[Tile]
    strip: bool = False
    """Whether the row has one tile, a strip of numbers, which is as wide as the row."""


class PageBar(NamedTuple):
    """One line of the model's prediction."""

    title: str
    share: float
    """0..1, the length of the bar."""
    color: Bytes | None = None
    """[3]: the colour of a region in the picture of the output; None for the page's own
    colour."""


@dataclass(frozen=True)
class Page:
    """The content of the page of `look`, or of the page of `kernels`, which has neither
    pictures nor bars."""

    title: str
    subtitle: str
    pictures: Sequence[Tile]
    """The input, and the output if it is a picture."""
    bars: Sequence[PageBar]
    """The likeliest classes, the first boxes with their scores, or the largest regions.
    """
    remarks: Sequence[str]
    """Lines of text, which are shown if there are no `bars`."""
    rows: Sequence[PageRow]
    key: str
    """A line that explains the tiles and the numbers below them."""
    cmap: str
    bars_title: str = "prediction"
    color_key_note: str = (
        "max of each map; the border that padding makes does not count"
    )
    """The end of the key of the colours."""


class _Size(NamedTuple):
    """Inches."""

    width: float
    height: float


@dataclass(frozen=True)
class _Layout:
    """Where things stand on a page, in inches."""

    width: float
    height: float
    tile: _Size
    """The size of all tiles; see `_tile_size`."""
    picture: _Size
    """The size of the input's and the output's picture at most."""
    tops: list[float]
    """The upper edges of the rows."""

    @property
    def right(self) -> float:
        """Where the right margin begins."""
        return self.width - _MARGIN


def draw_page(page: Page) -> Bytes:
    """Draw the page of `look` or of `kernels`, uint8 [H, W, 3].

    Raises:
        UsageError: the page would be too large.
    """
    layout = _lay_out(page)
    hint = "--maps shows fewer of each layer, and --layers takes fewer"
    canvas = sheet.checked_canvas(layout.height, layout.width, hint)
    colors = colormap.ramp(page.cmap)
    _draw_head(canvas, page, layout, colors)
    x = _MARGIN + _NAMES
    for row, top in zip(page.rows, layout.tops, strict=True):
        width, height = layout.tile
        if row.strip:
            width = layout.right - x
            height = _STRIP
        across = width + _GAP
        tiles = TileGrid(_COLUMNS, width, height, x, top, across, height + _NUMBERS)
        _draw_row(canvas, row, tiles)
    # the key, below all rows
    y = layout.height - _MARGIN
    soft = Letters(8, _SOFT)
    x = _MARGIN
    x += canvas.write("min", x, y, soft) + 0.08
    canvas.paste(colors[None], Cell(x, y - 0.06, 1.2, 0.12))
    x += 1.28
    x += canvas.write(page.color_key_note, x, y, soft) + 0.4
    canvas.write(page.key, layout.right, y, soft, "left", max_width=layout.right - x)
    return canvas.pixels


def _lay_out(page: Page) -> _Layout:
    """Choose the size of the tiles and of the page, and the upper edges of the rows."""
    tile = _tile_size(page)
    columns = _columns(page)
    width = 2 * _MARGIN + _NAMES + columns * (tile.width + _GAP) - _GAP
    width = max(width, _NARROWEST_PAGE)
    picture = _picture_size(page, width - 2 * _MARGIN)
    of_maps = [row for row in page.rows if not row.strip]
    # all rows of maps are at least as high as the highest label
    lowest = max([_row_height(row, tile, lines=1) for row in of_maps], default=0.0)
    top = _MARGIN + _TITLE + _CAPTION + picture.height + 2 * _BETWEEN
    tops = []
    for row in page.rows:
        tops.append(top)
        lines = ceil(len(row.tiles) / _COLUMNS)
        height = _row_height(row, tile, lines)
        if not row.strip:
            height = max(height, lowest)
        top += height + _NUMBERS + _BETWEEN
    return _Layout(width, top + _KEY + _MARGIN / 2, tile, picture, tops)


def _columns(page: Page) -> int:
    """How many tiles the longest line of tiles has."""
    return min(_COLUMNS, max(len(row.tiles) for row in page.rows))


def _tile_size(page: Page) -> _Size:
    """The size of all tiles. They have the median proportions of the layers' maps: those
    of the input, in most models. Few tiles are enlarged to fill the narrowest page."""
    shapes = [row.tiles[0].pixels.shape for row in page.rows if not row.strip]
    aspect = float(np.median([width / height for height, width, _ in shapes] or [1.0]))
    width = min(max(_TILE * sqrt(aspect), _WIDTHS[0]), _WIDTHS[1])
    height = min(max(width / aspect, _HEIGHTS[0]), _HEIGHTS[1])
    room = _NARROWEST_PAGE - 2 * _MARGIN - _NAMES
    room_each = (room + _GAP) / _columns(page) - _GAP
    tallest = min(_TALLEST, _TOGETHER / len(page.rows))
    growth = max(1.0, min(room_each / width, tallest / height))
    return _Size(width * growth, height * growth)


def _picture_size(page: Page, width: float) -> _Size:
    """The size of the input's or the output's picture at most. Bars of a prediction leave
    less room for it than remarks.

    Args:
        width: width of the page without its margins.
    """
    # the height of the captions is taken off again: without pictures there are none
    if not page.pictures:
        return _Size(0, -_CAPTION)
    share = 0.45 if page.bars else 0.65
    width = min(_WIDEST_PICTURE, width * share / len(page.pictures))
    if page.bars:
        return _Size(width, _PICTURE)
    heights = [_fitted(tile.pixels, width, _ALONE)[1] for tile in page.pictures]
    return _Size(width, max(len(page.remarks) * _LEADING - _CAPTION, *heights))


def _row_height(row: PageRow, tile: _Size, lines: int) -> float:
    """The height of a row without the numbers below its last line of tiles; at least the
    height of its label.

    Args:
        lines: lines of tiles.
    """
    label_height = (len(_name_lines(row.name)) + len(row.lines)) * _LEADING
    if row.strip:
        return max(_STRIP, label_height)
    return max(tile.height + (lines - 1) * (tile.height + _NUMBERS), label_height)


def _name_lines(name: str) -> list[str]:
    """A layer's name, broken into lines after dots, slashes and underscores. Of a very
    long name, only the first and the last line are kept."""
    lines = [""]
    for part in re.findall(r"[^./_]*[./_]|[^./_]+", printable(name)):
        if lines[-1] and len(lines[-1] + part) > _NAME_LETTERS:
            lines.append("")
        lines[-1] += part
    return [lines[0], "…", lines[-1]] if len(lines) > _NAME_LINES else lines


def _draw_head(canvas: Canvas, page: Page, layout: _Layout, colors: Bytes) -> None:
    """Draw the top of the page: titles, pictures, bars or remarks, and a rule below.

    Args:
        colors: the colormap, uint8 [levels, 3]; one of its colours is that of the bars.
    """
    y = _MARGIN + 0.1
    bold = Letters(15, INK, bold=True)
    title_width = canvas.write(
        page.title, _MARGIN, y, bold, max_width=layout.width * 0.6
    )
    x = _MARGIN + title_width + 0.2
    y = _MARGIN + 0.12
    canvas.write(page.subtitle, x, y, Letters(10, _SOFT), max_width=layout.right - x)

    top = _MARGIN + _TITLE
    x = _MARGIN
    for tile in page.pictures:
        width, height = _fitted(tile.pixels, *layout.picture)
        canvas.write(tile.title, x, top + 0.08, _SMALL)
        _paste_squares(canvas, tile.pixels, Cell(x, top + _CAPTION, width, height))
        x += width + 0.3
    x = max(x, _MARGIN + _NAMES)
    if page.bars:
        accent = colors[len(colors) * 2 // 5]  # not too bright for white paper
        canvas.write(page.bars_title, x, top + 0.08, _SMALL)
        _draw_prediction(canvas, page.bars, x, layout.right, accent)
    else:
        for number, line in enumerate(page.remarks):
            y = top + 0.08 + number * _LEADING
            canvas.write(line, x, y, _SMALL, max_width=layout.right - x)
    y = top + _CAPTION + layout.picture.height + _BETWEEN
    canvas.fill(Cell(_MARGIN, y, layout.right - _MARGIN, 1 / DPI), _RULE)


def _draw_prediction(
    canvas: Canvas, bars: Sequence[PageBar], x: float, right: float, accent: Bytes
) -> None:
    """Draw a line for each class, box or region: its name, a bar, and its share as a
    percentage. A bar of full length is a share of 1.

    Args:
        bars: at least one.
        x, right: left and right edge of the drawing, in inches.
        accent: uint8 [3], the colour of a bar whose `color` is None.
    """
    top = _MARGIN + _TITLE
    names = [printable(bar.title) for bar in bars]
    widest = max(canvas.width(name, Letters(10, bold=True)) for name in names)
    column = min(widest, (right - x) * 0.45) + 0.15
    full = right - x - column - 0.7
    # few bars stay close together instead of filling the picture's height
    step = min(_PICTURE / len(bars), _WIDEST_STEP)
    for number, (name, bar) in enumerate(zip(names, bars, strict=True)):
        y = top + _CAPTION + step * (number + 0.5)
        bold = number == 0
        name_letters = Letters(10, INK if bold else _SOFT, bold)
        canvas.write(name, x, y, name_letters, max_width=column - 0.1)
        canvas.fill(Cell(x + column, y - 0.09, full, 0.18), _RULE)
        if bar.share * full * DPI >= 1:
            color = accent if bar.color is None else bar.color
            canvas.fill(Cell(x + column, y - 0.09, full * bar.share, 0.18), color)
        canvas.write(
            percent(bar.share), x + column + full + 0.08, y, Letters(10, INK, bold)
        )


def _draw_row(canvas: Canvas, row: PageRow, tiles: TileGrid) -> None:
    """Draw a layer's name, the lines below it, and its tiles with titles and notes."""
    lines = [(line, Letters(10.0, INK, bold=True)) for line in _name_lines(row.name)]
    lines += [(line, Letters(8.5, _SOFT)) for line in row.lines]
    middle = tiles.top + tiles.height / 2
    y = max(tiles.top, middle - len(lines) * _LEADING / 2) + _LEADING / 2
    for line, letters in lines:
        canvas.write(line, _MARGIN, y, letters, max_width=_NAMES - 0.1)
        y += _LEADING
    for number, tile in enumerate(row.tiles):
        cell = tiles.cell(number)
        below = cell.top + cell.height + 0.09
        if row.strip:
            canvas.paste(
                tile.pixels, cell, smooth=tile.pixels.shape[1] > cell.width * DPI
            )
        else:
            width, height = _fitted(tile.pixels, cell.width, cell.height)
            x = cell.left + (cell.width - width) / 2
            top = cell.top + (cell.height - height) / 2
            _paste_squares(canvas, tile.pixels, Cell(x, top, width, height))
        title = canvas.write(tile.title, cell.left, below, Letters(8, INK, bold=True))
        note = Letters(7, _FAINT)
        # a note that does not fit is left out: half a number misleads
        if canvas.width(tile.note, note) <= cell.width - title - 0.08:
            canvas.write(tile.note, cell.left + cell.width, below, note, "left")


def _fitted(pixels: Bytes, width: float, height: float) -> tuple[float, float]:
    """The size of a picture that is as large as fits into a rectangle of `width` and
    `height` inches, cut to whole pixels of the page. Width and height in inches."""
    share = min(width / pixels.shape[1], height / pixels.shape[0])
    return _whole(pixels.shape[1] * share), _whole(pixels.shape[0] * share)


def _whole(inches: float) -> float:
    """Inches cut to whole pixels of the page, at least one."""
    return max(1, int(inches * DPI + 1e-6)) / DPI


def _paste_squares(canvas: Canvas, pixels: Bytes, cell: Cell) -> None:
    """Draw a picture so that its pixels stay squares of one size: it is enlarged by a
    whole factor, to at least the cell's size, and then reduced smoothly to the cell."""
    # Enlarged by a factor that is not whole, some pixels would be larger than others,
    # which looks like a pattern in the map.
    factor = max(1, ceil(cell.width * DPI / pixels.shape[1] - 0.01))
    large = pixels.repeat(factor, 0).repeat(factor, 1)
    corner = cell._replace(left=_whole(cell.left), top=_whole(cell.top))
    canvas.paste(large, corner, smooth=True)
