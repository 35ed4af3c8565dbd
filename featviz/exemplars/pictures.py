"""The pictures of exemplars: one of each channel, and one of all channels of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

from PIL import Image

from featviz.drawing import sheet
from featviz.drawing.sheet import Caption, Cell, PixelCanvas, TileGrid
from featviz.exemplars.crops import TILE

_GAP = 8
_TEXT = 12
_LINE = sheet.line_height(_TEXT)
_TITLE = 2 * _LINE + _GAP
"""Pixels of the title of a channel's picture."""
_CAPTION = 2 * _LINE + 2
"""Pixels of the lines below a tile."""
_LABEL = 92
"""Pixels of the column of a layer's picture that names channels."""
_BETWEEN = 4
"""Pixels between tiles in a layer's picture."""
_COLUMN_GAP = 24
_SMALL_TILES = (64, 48, 32)
"""Pixels a side of a tile in a layer's picture; smaller ones where there are many."""
_MOST_PIXELS = 2**26
"""Of a layer's picture."""
_MOST_SHOWN = 40
"""Tiles in a row of a layer's picture."""
_NAME_LETTERS = 19
_FAINT: sheet.Color = (102, 112, 124)


def tile_grid(count: int) -> TileGrid:
    """Where the tiles lie in the picture of a channel that has room for `count`, about
    square."""
    columns = max(1, ceil(sqrt(count)))
    down = TILE + _CAPTION + _GAP
    return TileGrid(
        columns, TILE, TILE, _GAP, _TITLE + _GAP, across=TILE + _GAP, down=down
    )


def draw_channel(
    title: Sequence[str],
    tiles: Sequence[Image.Image],
    texts: Sequence[tuple[float, str]],
    count: int,
) -> Image.Image:
    """A channel's tiles, the best first, each above its value and the name of its
    image."""
    grid = tile_grid(count)
    last = grid.cell(count - 1)
    width = max(grid.columns * (TILE + _GAP), 2 * (TILE + _GAP)) + _GAP
    canvas = PixelCanvas(width, round(last.top + TILE + _CAPTION + _GAP), _TEXT)
    for number, (line, color) in enumerate(
        zip(title, (sheet.INK, _FAINT), strict=True)
    ):
        line = sheet.begin_of(line, _TEXT, width - 2 * _GAP)
        canvas.write(line, _GAP, _GAP + number * _LINE, color)
    for rank, (tile, (value, image)) in enumerate(zip(tiles, texts, strict=True)):
        cell = grid.cell(rank)
        canvas.paste(tile, cell)
        name = sheet.end_of(image, _NAME_LETTERS)
        canvas.caption(cell, [Caption(f"{value:.4g}"), Caption(name, _FAINT)])
    return canvas.image


class LayerPicture:
    """The picture of a layer, about square: a row of small tiles for each channel, in
    several columns of rows. Where it has no room tiles are made smaller, then left out,
    then channels are."""

    def __init__(self, title: Sequence[str], channels: int, count: int) -> None:
        """Begin the picture of a layer with so many channels, each of up to `count`
        images."""
        self._side, self._shown = _fitting_row(channels, count)
        row_width = _LABEL + self._shown * (self._side + _BETWEEN) + _COLUMN_GAP
        row_height = self._side + _LINE + _GAP
        self._drawn = 0
        self._channels = min(channels, _MOST_PIXELS // (row_width * row_height))
        left_out = []
        if self._shown < count:
            left_out.append(f"the first {self._shown} of up to {count} images")
        if self._channels < channels:
            left_out.append(f"the first {self._channels} of {channels} channels")
        lines = list(title)
        if left_out:
            lines.append(f"for want of room only {' of '.join(left_out)}")
        columns = max(1, round(sqrt(self._channels * row_height / row_width)))
        self._rows = ceil(self._channels / columns)
        top = len(lines) * _LINE + 3 * _GAP
        columns = ceil(self._channels / self._rows)
        self._grid = TileGrid(
            columns, row_width, row_height, _GAP, top, across=row_width, down=row_height
        )
        widest = max(int(sheet.text_width(line, _TEXT)) for line in lines) + 2 * _GAP
        width = max(columns * row_width + _GAP, widest)
        self._canvas = PixelCanvas(width, top + self._rows * row_height + _GAP, _TEXT)
        for number, line in enumerate(lines):
            color = _FAINT if number else sheet.INK
            self._canvas.write(line, _GAP, _GAP + number * _LINE, color)

    @property
    def image(self) -> Image.Image:
        """What is drawn so far."""
        return self._canvas.image

    def add_row(
        self, channel: int, tiles: Sequence[Image.Image], values: Sequence[float]
    ) -> None:
        """Draw the row of a channel, its tiles and their values, the best first."""
        if self._drawn == self._channels:
            return
        column, row = divmod(self._drawn, self._rows)  # channels run down, then across
        self._drawn += 1
        cell = self._grid.cell(row * self._grid.columns + column)
        side = self._side
        label_top = cell.top + (side - _LINE) // 2
        self._canvas.write(f"channel {channel}", cell.left, label_top)
        note = "" if values else "no finite value"
        if len(values) > 1 and values[0] == values[-1]:  # dead, or saturated
            note = "all equal"
        self._canvas.write(note, cell.left, cell.top + (side + _LINE) // 2, _FAINT)
        left = cell.left + _LABEL
        for tile, value in zip(tiles, values[: self._shown], strict=False):
            small = tile.resize((side, side), Image.Resampling.BOX)
            self._canvas.paste(small, Cell(left, cell.top, side, side))
            self._canvas.write(f"{value:.3g}", left, cell.top + side, _FAINT)
            left += side + _BETWEEN


def _fitting_row(channels: int, count: int) -> tuple[int, int]:
    """Pixels a side of a tile, and tiles in a row, with which a layer's picture is not
    too large; the smallest there are where it is anyway."""
    most = min(count, _MOST_SHOWN)
    choices = [(side, most) for side in _SMALL_TILES]
    choices += [(_SMALL_TILES[-1], shown) for shown in range(most - 1, 0, -1)]
    for side, shown in choices:
        width = _LABEL + shown * (side + _BETWEEN) + _COLUMN_GAP
        if channels * width * (side + _LINE + _GAP) <= _MOST_PIXELS:
            return side, shown
    return choices[-1]
