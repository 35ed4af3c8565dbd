"""Figures for papers: tiles in rows and columns, with names beside them.

    title
                    head     head
    block   label +------+ +------+
      |           | tile | | tile |    +-+- 3.2
      |           +------+ +------+    | |
      |           caption  caption     | |  colour bar, where all tiles
      |     label +------+ +------+    | |  share one scale
      |           | tile | | tile |    +-+- 0
                  +------+ +------+

All lengths are inches. One layout serves pixels, PDF and SVG, and all frames of an
animation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

from featviz.drawing import colormap, grid
from featviz.drawing.page import draw_color_bar
from featviz.drawing.sheet import DPI, INK, Canvas, Cell, Letters, checked_canvas
from featviz.drawing.vector import VectorCanvas
from featviz.errors import UsageError
from featviz.records import Bytes

_MARGIN = 0.08
_GAP = 0.04
"""Distance of tiles."""
_TITLE = 0.26
_HEAD = 0.2
_CAPTION = 0.14
_BLOCK = 0.22
"""The width of the column that names blocks."""
_BAR = 0.1
_BAR_ROOM = 0.75
"""The width of a colour bar with its numbers."""
_SMALLEST_CELL = 64
_LARGEST_CELL = 224
"""Pixels at DPI that a tile is wide, at least and at most, if no width is asked for."""
_NARROWEST_CELL = 0.1
_LONG = 8.0
"""A tile whose width divided by height is at least this counts as a strip."""
_CENTIMETRES = 2.54
"""Centimetres in an inch."""
_TITLE_LETTERS = Letters(10, INK, bold=True)
_LETTERS = Letters(8, INK)
_SMALL = Letters(6.5, INK)


@dataclass(frozen=True)
class TableRow:
    """A row of tiles."""

    label: str
    tiles: Sequence[Bytes | None]
    """uint8 [h, w, 3] for each column; None leaves its place white."""
    block: str = ""
    """The name of the block. Neighbouring rows with the same name share it: it stands once
    beside them."""
    captions: Sequence[str] = ()
    """A text below each tile. Columns at the end without tiles need none. Empty if no tile
    has a caption."""
    numbers: Sequence[str] = ()
    """For each tile, the number that `run --labels` may have written into its corner; as
    long as `captions`. Empty if no tile has a number."""
    is_input: bool = False
    """Whether the tiles are what the model saw."""


class ColorScale(NamedTuple):
    """The values that the colours of all tiles of a table stand for."""

    cmap: str
    low: float
    high: float
    title: str = ""
    """What the values are; empty for values of maps."""


@dataclass(frozen=True)
class TileTable:
    """The content of a figure."""

    heads: Sequence[str]
    """A text above each column."""
    rows: Sequence[TableRow]
    title: str = ""
    scale: ColorScale | None = None
    note: str = ""
    """A text in small letters below all rows."""


class TableLayout(NamedTuple):
    """Where the parts of a figure lie, in inches."""

    width: float
    height: float
    columns: Sequence[tuple[float, float]]
    """Left edge and width of each column. A column of wide tiles is wide."""
    top: float
    """The upper edge of the first row of tiles."""
    tile_height: float
    step: float
    """From the upper edge of a tile to that of the tile below."""
    note: Sequence[str]
    """The lines of the table's note."""

    def cell(self, row: int, column: int) -> Cell:
        """The rectangle of a tile, by its row and column from 0."""
        left, width = self.columns[column]
        return Cell(left, self.top + row * self.step, width, self.tile_height)


def lay_out(table: TileTable, width: float | None = None) -> TableLayout:
    """Choose the size of the tiles and of the figure.

    Args:
        table: it has at least one row and one tile.
        width: width of the figure in centimetres. None enlarges small tiles by a whole
            factor until they can be seen, and shrinks large ones.

    Raises:
        UsageError: the columns have no room in this width.
    """
    first_column = _left_edge(table)
    right = _MARGIN + (_BAR_ROOM if table.scale is not None else 0)
    aspects = _aspects(table)
    # All tiles have one height, and each column is as wide as its tiles, so that no cell
    # is mostly white; but very wide and very narrow columns are brought nearer to the
    # middle.
    middle = geometric_mean(aspects)
    shares = [min(max(aspect, middle / 2), 2 * middle) for aspect in aspects]
    tile_height = _natural_height(table, aspects)
    if width is not None:
        tile_height = _free_width(width, first_column + right, len(shares)) / sum(
            shares
        )
    columns = []
    end = first_column
    for share in shares:
        columns.append((end, share * tile_height))
        end += share * tile_height + _GAP
    step = tile_height + _GAP
    if any(any(row.captions) for row in table.rows):
        step += _CAPTION
    top = _upper_edge(table)
    paper_width = end - _GAP + right
    note = _note_lines(table.note, paper_width - first_column - _MARGIN)
    height = top + len(table.rows) * step - _GAP + _MARGIN + len(note) * _CAPTION
    return TableLayout(paper_width, height, columns, top, tile_height, step, note)


def _left_edge(table: TileTable) -> float:
    """Inches from the left edge of the paper to the first column: room for the names of
    rows and blocks."""
    ruler = Canvas(1, 1)
    labels = max(ruler.width(row.label, _LETTERS) for row in table.rows)
    left = _MARGIN
    if any(row.block for row in table.rows):
        left += _BLOCK
    if labels:
        left += labels + _MARGIN
    return _whole_pixels(left)


def _upper_edge(table: TileTable) -> float:
    """Inches from the upper edge of the paper to the first row: room for title and heads."""
    top = _MARGIN
    if table.title:
        top += _TITLE
    if any(table.heads):
        top += _HEAD
    return _whole_pixels(top)


def _whole_pixels(inches: float) -> float:
    """Inches rounded up to a whole pixel at DPI. In a tile that begins inside a pixel, some
    squares would be drawn larger than others."""
    return ceil(inches * DPI) / DPI


def _free_width(width: float, taken: float, columns: int) -> float:
    """Inches that are left for all tiles of a row together.

    Args:
        width: width of the figure in centimetres.
        taken: inches that are not for columns, on their left and right.
        columns: number of columns.

    Raises:
        UsageError: the columns would be too narrow.
    """
    free = width / _CENTIMETRES - taken - (columns - 1) * _GAP
    if free / columns < _NARROWEST_CELL:
        raise UsageError(
            f"--width {width:g} has no room for {columns} columns beside the labels",
            "a greater --width, or fewer --images",
        )
    return free


def _note_lines(note: str, width: float) -> list[str]:
    """A note, broken between words into lines of `width` inches at most."""
    ruler = Canvas(1, 1)
    lines: list[str] = []
    for word in note.split():
        if lines and ruler.width(f"{lines[-1]} {word}", _SMALL) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _aspects(table: TileTable) -> list[float]:
    """Width divided by height of the tallest tile in each column. Strips (of numbers, or
    of many slices) count only if all tiles are strips. A column without a tile that counts
    gets the proportions of the tallest tile of all columns."""
    columns = []
    for tiles in zip(*[row.tiles for row in table.rows], strict=True):
        columns.append(
            [tile.shape[1] / len(tile) for tile in tiles if tile is not None]
        )
    counted = [[aspect for aspect in column if aspect < _LONG] for column in columns]
    if not any(counted):
        counted = columns
    tallest = min(map(min, filter(None, counted)))
    return [min(column, default=tallest) for column in counted]


def _natural_height(table: TileTable, aspects: Sequence[float]) -> float:
    """The height of a tile in inches if no width is asked for: the widest map becomes
    between _SMALLEST_CELL and _LARGEST_CELL pixels wide. The pictures of the input do not
    count, since they may be many times as large as maps.

    Args:
        aspects: width divided by height of each column.
    """
    # the input is the first row, or, in a table of one row, the first tile
    first = 1 if len(table.rows) == 1 else 0
    heights: list[float] = []
    widest = 0
    for row in table.rows[1:] or table.rows:
        if row.is_input:
            continue
        for tile, aspect in zip(row.tiles[first:], aspects[first:], strict=True):
            if tile is not None:
                widest = max(widest, tile.shape[1])
                heights.append(tile.shape[1] / aspect)
    if not heights:
        return _LARGEST_CELL / DPI / min(aspects)
    pixels = widest
    if pixels < _SMALLEST_CELL:
        pixels *= ceil(_SMALLEST_CELL / pixels)
    scale = min(pixels, _LARGEST_CELL) / DPI / widest
    return scale * max(heights)


def draw_table(table: TileTable, layout: TableLayout, dpi: int = DPI) -> Canvas:
    """Draw a figure in pixels.

    Args:
        layout: the layout of this table, or of another table with as many rows and
            columns: all frames of an animation have the layout of the first one.
        dpi: pixels in an inch.

    Raises:
        UsageError: the figure would be too large.
    """
    hint = "fewer --channels, --images or --layers, or a smaller --dpi"
    canvas = checked_canvas(layout.height, layout.width, hint, dpi)
    _draw(canvas, table, layout)
    return canvas


def draw_vectors(table: TileTable, layout: TableLayout) -> VectorCanvas:
    """Draw a figure for PDF or SVG."""
    canvas = VectorCanvas(layout.height, layout.width)
    _draw(canvas, table, layout)
    return canvas


def _draw(canvas: Canvas, table: TileTable, layout: TableLayout) -> None:
    """Draw a table on a canvas of its layout's size: title, heads, rows, blocks and the
    colour bar."""
    x = layout.width / 2
    y = _MARGIN + _TITLE / 2
    width = layout.width - 2 * _MARGIN
    canvas.write(table.title, x, y, _TITLE_LETTERS, "middle", width)
    cells = [layout.cell(0, column) for column in range(len(table.heads))]
    letters = _LETTERS
    for head, cell in zip(table.heads, cells, strict=True):
        # if one head is too long, all get small letters
        if canvas.width(head, _LETTERS) > cell.width:
            letters = _SMALL
    for head, cell in zip(table.heads, cells, strict=True):
        x = cell.left + cell.width / 2
        canvas.write(head, x, cell.top - _HEAD / 2, letters, "middle", cell.width)
    for number, row in enumerate(table.rows):
        _draw_row(canvas, row, layout, number)
    _draw_blocks(canvas, table.rows, layout)
    left, _ = layout.columns[0]
    y = layout.height - (len(layout.note) - 0.5) * _CAPTION
    for line in layout.note:
        # at another resolution, letters may be a little wider: the margin has room
        canvas.write(line, left, y, _SMALL, max_width=layout.width - left)
        y += _CAPTION
    if table.scale is not None:
        _draw_scale(canvas, table.scale, layout)


def _draw_scale(canvas: Canvas, scale: ColorScale, layout: TableLayout) -> None:
    """Draw the colour bar on the right of all tiles, and its title."""
    x = layout.width - _BAR_ROOM
    height = layout.height - _MARGIN - layout.top
    bar = Cell(x, layout.top, _BAR, height)
    draw_color_bar(canvas, bar, (scale.low, scale.high), colormap.ramp(scale.cmap))
    y = bar.top + height / 2
    canvas.write(scale.title, x + 0.5, y, _SMALL, max_width=height, upright=True)


def _draw_row(canvas: Canvas, row: TableRow, layout: TableLayout, number: int) -> None:
    """Draw the label of a row, and its tiles with their captions. Each tile is as large as
    fits into its cell.

    Args:
        number: number of the row, from 0.
    """
    first = layout.cell(number, 0)
    middle = first.top + first.height / 2
    canvas.write(row.label, first.left - _MARGIN, middle, _LETTERS, "left")
    for column, tile in enumerate(row.tiles):
        if tile is None:
            continue
        cell = layout.cell(number, column)
        fitting, share = cell.fit(tile)
        canvas.paste(tile, fitting, smooth=share * canvas.dpi < 1)
        if row.numbers and share * DPI < 1:
            _redraw_number(canvas, tile, row.numbers[column], fitting)
        if row.captions:
            y = cell.top + cell.height + _CAPTION / 2
            x = cell.left + cell.width / 2
            canvas.write(row.captions[column], x, y, _SMALL, "middle", cell.width)


def _redraw_number(canvas: Canvas, tile: Bytes, number: str, cell: Cell) -> None:
    """Draw the channel's number over the corner of a tile that was made smaller, in the
    size that it has in the run's picture, so that it can be read. Nothing is drawn if the
    tile has no number, or is too small for it.

    Args:
        tile: uint8 [h, w, 3], as it was cut from the run's picture.
        number: the number that may be in the tile's corner.
        cell: the tile's rectangle, in inches.
    """
    ink = grid.glyphs(number)
    height, width = ink.shape
    corner = tile[:height, :width]
    fits = min(cell.width / width, cell.height / height) * DPI >= 1
    if corner.shape[:2] != ink.shape or not fits:
        return
    # in a run without --labels, the corner shows values of the map, not two colours in
    # the shape of digits
    colors = [np.unique(corner[pixels], axis=0) for pixels in (ink, ~ink)]
    if len(colors[0]) == len(colors[1]) == 1 and (colors[0] != colors[1]).any():
        canvas.paste(corner, Cell(cell.left, cell.top, width / DPI, height / DPI))


def _draw_blocks(canvas: Canvas, rows: Sequence[TableRow], layout: TableLayout) -> None:
    """Write the name of each block beside its rows."""
    first = 0
    for block, members in groupby(rows, key=lambda row: row.block):
        count = len(list(members))
        height = count * layout.step - _GAP
        y = layout.top + first * layout.step + height / 2
        x = _MARGIN + _BLOCK / 2
        canvas.write(block, x, y, _LETTERS, max_width=height, upright=True)
        first += count
