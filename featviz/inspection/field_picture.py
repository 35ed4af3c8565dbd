"""The picture of `field`: a tile for each layer, and below the tiles a chart of how far each
layer looks.

    layer1              layer2
    limit 43×43         limit 99×99
    +-------------+     +-------------+    the gradient on a logarithmic scale, and the
    |   +-----+   |     | +---------+ |    theoretical field as a frame, a little of what
    |   |  *  |   |     | |    *    | |    lies around it
    |   +-----+   |     | +---------+ |
    +-------------+     +-------------+
                                20 %  30 %  50 %  99 %  limit
    layer1    [##|==|----]  |      9    12    18    41     43
    layer2    [###|===|------]|   16    21    31    83     99

A bar is as long as the side of the square that holds this share of the field. A line stands
at the limit, the side of the theoretical field."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from featviz.drawing import colormap
from featviz.drawing.outlines import with_boxes
from featviz.drawing.sheet import DPI, INK, Canvas, Cell, Letters, TileGrid
from featviz.layout.tracing.fields import PixelBox
from featviz.records import Bytes
from featviz.text import by, counted, printable

_DECADES = 4
"""Powers of ten from the brightest colour to the darkest."""
_PIXELS = 220
"""The longer side of a tile has at least this many pixels."""
_AROUND = 8
"""The margin around a theoretical field is the longer side of the field divided by this."""
_COLUMNS = 5
"""A row has at most this many tiles."""
_MARGIN = 0.3
"""Inches around the picture."""
_TILE = 2.2
"""Inches of a tile's side."""
_GAP = 0.15
"""Inches between tiles."""
_CAPTION = 0.4
"""Inches of two lines of text above a tile."""
_BAR = 0.3
"""Inches from a bar to the one below."""
_NUMBER = 0.55
"""Inches of a column of numbers beside the bars."""
_TITLE_POINTS = 110
"""A title of n bold letters fits into i inches at 110 · i / n points."""
_SOFT = (92, 100, 112)
_LINE = (164, 38, 44)
"""The colour of the theoretical field's side."""
_SHADES = ((204, 219, 240), (134, 172, 222), (74, 126, 196), (27, 72, 138))
"""Colours of the bars, from the largest share to the smallest."""


class FieldTile(NamedTuple):
    """A layer's field, as it is drawn."""

    model: str
    """The model's name; empty if there is only one model, which the title names."""
    layer: str
    values: np.ndarray
    """float64 [H, W], none below zero."""
    theoretical: PixelBox | None
    sides: Mapping[float, int]
    """By share 0..1: the side in pixels of the square that holds it."""

    @property
    def theoretical_side(self) -> int | None:
        """The longer side of the theoretical field in pixels; None if it is not known."""
        return self.theoretical and max(self.theoretical.size)

    @property
    def numbers(self) -> list[str]:
        """The sides of the squares, the smallest first, and the side of the theoretical
        field, `?` if it is not known."""
        sides = map(str, sorted(self.sides.values()))
        return [*sides, str(self.theoretical_side or "?")]

    @property
    def caption(self) -> str:
        """`resnet18: limit 43×43 pixels`; without the model's name if that is empty."""
        size = "limit unknown"
        if self.theoretical is not None:
            size = f"limit {by(self.theoretical.size)} pixels"
        return f"{self.model}: {size}" if self.model else size

    def cut(self) -> FieldTile:
        """The tile, cut to the theoretical field and a margin around it: in an image of 224
        pixels, a field of 7 pixels would be a dot. A tile without a theoretical field is
        returned as it is."""
        box = self.theoretical
        if box is None:
            return self
        margin = ceil(max(box.size) / _AROUND)
        x = max(0, box.left - margin)
        y = max(0, box.top - margin)
        values = self.values[y : box.bottom + margin, x : box.right + margin]
        moved = PixelBox(box.left - x, box.top - y, box.right - x, box.bottom - y)
        return self._replace(values=values, theoretical=moved)


def draw_field(values: np.ndarray, theoretical: PixelBox | None, cmap: str) -> Bytes:
    """Draw a field, uint8 [h, w, 3], on a logarithmic scale from its largest value down to a
    ten-thousandth of that. A small field is enlarged by a whole factor.

    Args:
        values: [H, W] of the input, none below zero, and not all zero.
        theoretical: drawn as a frame, in pixels of `values`; None for no frame.
        cmap: the name of a colormap, as in `draw_fields`.
    """
    share = values / values.max()
    exponents = np.log10(np.maximum(share, 10.0**-_DECADES))
    levels = np.rint(255 * (1 + exponents / _DECADES)).astype(np.uint8)
    # pixels are repeated, so that each pixel of a small input stays a sharp square
    factor = ceil(_PIXELS / max(values.shape))
    pixels: Bytes = colormap.ramp(cmap)[levels].repeat(factor, 0).repeat(factor, 1)
    if theoretical is None:
        return pixels
    # the frame lies on the outermost pixels of the field
    x0, y0, x1, y1 = (edge * factor for edge in theoretical)
    return with_boxes(pixels, [(x0, y0, x1 - 1, y1 - 1)], [""])


def draw_fields(tiles: Sequence[FieldTile], images: int, cmap: str) -> Bytes:
    """Draw all fields and their chart, uint8 [H, W, 3].

    Args:
        tiles: at least one.
        images: how many images the fields are the mean of.
        cmap: a name of `colormap.GREYS`, or of matplotlib's colormaps.

    Raises:
        KeyError: there is no such colormap.
    """
    # rows of equal length: six tiles make two rows of three
    rows = ceil(len(tiles) / _COLUMNS)
    columns = ceil(len(tiles) / rows)
    across = _TILE + _GAP
    down = _TILE + _CAPTION + _GAP
    top = _MARGIN + _CAPTION
    grid = TileGrid(columns, _TILE, _TILE, _MARGIN, top + _CAPTION, across, down)
    chart_top = top + rows * down
    # at least 8 inches, which the title and the bars need even if there is only one tile
    width = max(2 * _MARGIN + columns * across - _GAP, 8.0)
    height = chart_top + (len(tiles) + 1) * _BAR + _MARGIN
    canvas = Canvas(round(height * DPI), round(width * DPI))
    layers = "layers"
    if len({tile.model for tile in tiles}) == 1:
        layers = f"the layers of {tiles[0].model}"
        tiles = [tile._replace(model="") for tile in tiles]
    title = f"How far {layers} look: effective receptive fields"
    _draw_title(canvas, title, width - 2 * _MARGIN)
    _draw_key(canvas, images, cmap)
    for number, tile in enumerate(tiles):
        _draw_tile(canvas, tile, grid.cell(number), cmap)
    chart = Cell(_MARGIN, chart_top, width - 2 * _MARGIN, (len(tiles) + 1) * _BAR)
    _draw_chart(canvas, tiles, chart)
    return canvas.pixels


def _draw_title(canvas: Canvas, title: str, max_width: float) -> None:
    """Write the title at the top, in letters small enough for `max_width` inches."""
    points = min(12.0, _TITLE_POINTS * max_width / len(title))
    bold = Letters(points, INK, bold=True)
    canvas.write(title, _MARGIN, _MARGIN, bold, max_width=max_width)


def _draw_key(canvas: Canvas, images: int, cmap: str) -> None:
    """Draw the colour bar below the title, and write what the tiles show.

    Args:
        images: how many images the fields are the mean of.
    """
    soft = Letters(8, _SOFT)
    y = _MARGIN + 0.25
    x = _MARGIN + canvas.write("0.0001", _MARGIN, y, soft) + 0.08
    canvas.paste(colormap.ramp(cmap)[None], Cell(x, y - 0.06, 1.2, 0.12))
    note = "1 of the strongest influence on the map's middle, logarithmic"
    note += f"; mean of {counted(images, 'image')}; frame: limit"
    canvas.write(note, x + 1.28, y, soft)


def _draw_tile(canvas: Canvas, tile: FieldTile, cell: Cell, cmap: str) -> None:
    """Draw the field of a layer, with its upper left corner in that of a cell, and above it
    the layer's name and the caption."""
    bold = Letters(9, INK, bold=True)
    soft = Letters(8, _SOFT)
    canvas.write(tile.layer, cell.left, cell.top - 0.28, bold, max_width=cell.width)
    canvas.write(tile.caption, cell.left, cell.top - 0.1, soft, max_width=cell.width)
    tile = tile.cut()
    pixels = draw_field(tile.values, tile.theoretical, cmap)
    scale = _TILE / max(pixels.shape[:2])
    size = Cell(cell.left, cell.top, pixels.shape[1] * scale, pixels.shape[0] * scale)
    canvas.paste(pixels, size, smooth=max(pixels.shape) > _PIXELS)


def _draw_chart(canvas: Canvas, tiles: Sequence[FieldTile], chart: Cell) -> None:
    """Draw a line for each layer: its name, the sides of its squares as bars that lie over
    each other, and as numbers.

    Args:
        tiles: at least one, all with the same shares.
        chart: the rectangle of the headings and of all bars.
    """
    # a name in a file need not be UTF-8, but matplotlib takes only that
    names = [printable(f"{tile.model} {tile.layer}").lstrip() for tile in tiles]
    letters = Letters(8, INK)
    column = min(max(canvas.width(name, letters) for name in names), chart.width / 3)
    zero = chart.left + column + 0.15
    # one scale for all layers, so that the bars can be compared
    longest = max(tile.theoretical_side or max(tile.values.shape) for tile in tiles)
    right = chart.left + chart.width
    bars_end = right - len(tiles[0].numbers) * _NUMBER - 0.1
    inches_per_pixel = (bars_end - zero) / longest
    _draw_headings(canvas, tiles[0].sides, chart)
    for row, (name, tile) in enumerate(zip(names, tiles, strict=True), 1):
        y = chart.top + (row + 0.5) * _BAR
        canvas.write(name, chart.left, y, letters, max_width=column)
        _draw_bars(canvas, tile, zero, y, inches_per_pixel)
        _draw_numbers(canvas, tile.numbers, right, y)


def _draw_headings(canvas: Canvas, shares: Collection[float], chart: Cell) -> None:
    """Draw the first line of the chart: what the numbers mean, and above each column of
    numbers its share and the colour of its bars."""
    y = chart.top + 0.5 * _BAR
    right = chart.left + chart.width
    note = "pixels across the square with this share of the influence; limit: in theory"
    canvas.write(note, chart.left, y, Letters(8, _SOFT))
    headings = [f"{100 * share:g} %" for share in sorted(shares)]
    _draw_numbers(canvas, [*headings, "limit"], right, y)
    for column, color in enumerate((_LINE, *_SHADES), 1):
        x = right - column * _NUMBER
        canvas.fill(Cell(x + 0.12, y - 0.04, 0.08, 0.08), color)


def _draw_numbers(
    canvas: Canvas, numbers: Sequence[str], right: float, y: float
) -> None:
    """Write numbers in columns.

    Args:
        right: the right end of the last column, in inches.
        y: the middle of the line, in inches.
    """
    for position, number in enumerate(reversed(numbers)):
        canvas.write(number, right - position * _NUMBER, y, Letters(8, INK), "left")


def _draw_bars(
    canvas: Canvas, tile: FieldTile, zero: float, y: float, inches_per_pixel: float
) -> None:
    """Draw the bars of one layer, and the line of its theoretical field.

    Args:
        zero: where the bars begin, in inches from the left.
        y: the middle of the bars, in inches from the top.
    """
    # the largest bar first: the smaller ones are drawn over it, in darker shades
    by_size = sorted(tile.sides.values(), reverse=True)
    for pixels, shade in zip(by_size, _SHADES, strict=True):
        bar = Cell(zero, y - _BAR / 3, pixels * inches_per_pixel, _BAR * 2 / 3)
        canvas.fill(bar, shade)
    if tile.theoretical_side is not None:
        x = zero + tile.theoretical_side * inches_per_pixel
        canvas.fill(Cell(x - 0.01, y - _BAR / 2, 0.02, _BAR), _LINE)
