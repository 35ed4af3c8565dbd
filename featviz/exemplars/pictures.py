"""The pictures of exemplars: one of each channel, and one of all channels of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from pathlib import PurePosixPath
from typing import NamedTuple

from PIL import Image

from featviz.drawing import sheet
from featviz.drawing.sheet import Caption, Cell, PixelCanvas, TileGrid

TILE = 128
"""Pixels of a tile's edge in the picture of a channel."""
_GAP = 8
_TEXT = 11
_LINE = sheet.line_height(_TEXT)
_TITLE = 2 * _LINE + _GAP
"""Pixels of the title of a channel's picture."""
_CAPTION = 2 * _LINE + 2
"""Pixels of the lines below a tile."""
_LABEL = 112
"""Pixels of the column of a layer's picture that names channels."""
BETWEEN = 4
"""Pixels between tiles in a layer's picture."""
_COLUMN_GAP = 24
_SMALL_TILES = (64, 48, 32)
"""Pixels a side of a tile in a layer's picture; smaller ones where there are many."""
_MOST_PIXELS = 2**26
"""The most pixels of a layer's picture."""
_MOST_SHOWN = 40
"""Tiles in a row of a layer's picture."""
_FAINT: sheet.Color = (80, 89, 100)


def tile_grid(count: int) -> TileGrid:
    """Where the tiles lie in the picture of a channel, in pixels.

    Args:
        count: tiles that there is room for, at least 1; they stand about square.
    """
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
    image.

    Args:
        title: two lines.
        tiles: RGB, TILE × TILE.
        texts: value and image of each tile.
        count: tiles that there is room for: all channels of a layer get pictures of one
            size, as they stand beside each other in a viewer.

    Returns:
        RGB.
    """
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
        name = sheet.end_of(image, _TEXT, TILE)
        canvas.caption(cell, [Caption(f"{value:.4g}"), Caption(name, _FAINT)])
    return canvas.image


class _RowSize(NamedTuple):
    """The row of a channel in the picture of a layer, in pixels."""

    tile: int
    """The edge of a tile."""
    images: int
    """How many tiles stand side by side."""

    @property
    def width(self) -> int:
        """With the column that names the channel, and the gap behind the row."""
        return _LABEL + self.images * (self.tile + BETWEEN) + _COLUMN_GAP

    @property
    def height(self) -> int:
        """With the lines of values and images below the tiles."""
        return self.tile + _CAPTION + _GAP


class LayerPicture:
    """The picture of a layer, about square: a row of small tiles for each channel.

        channel 0  [] [] []      channel 2  [] [] []     channels run down, then across
        channel 1  [] [] []      channel 3  [] [] []

    Where it has no room tiles are made smaller, then images are left out, then
    channels."""

    def __init__(self, title: Sequence[str], channels: int, count: int) -> None:
        """Begin the picture of a layer.

        Args:
            title: the lines above the tiles; another says what has no room.
            channels: how many will be added, at least 1.
            count: of images of each channel, at least 1.
        """
        self._row = _fitting_row(channels, count)
        area = self._row.width * self._row.height
        self._channels = min(channels, _MOST_PIXELS // area)
        self._drawn = 0
        lines = list(title)
        omissions = []
        if self._row.images < count:
            omissions.append(f"the first {self._row.images} of up to {count} images")
        if self._channels < channels:
            omissions.append(f"the first {self._channels} of {channels} channels")
        if omissions:
            lines.append(f"for want of room only {' of '.join(omissions)}")
        # columns c and rows n / c are as wide as high where c² · width = n · height
        square = self._channels * self._row.height / self._row.width
        columns = max(1, round(sqrt(square)))
        self._rows = ceil(self._channels / columns)
        top = len(lines) * _LINE + 3 * _GAP
        self._grid = TileGrid(
            columns=ceil(self._channels / self._rows),
            width=self._row.width,
            height=self._row.height,
            left=_GAP,
            top=top,
            across=self._row.width,
            down=self._row.height,
        )
        widest = max(int(sheet.text_width(line, _TEXT)) for line in lines) + 2 * _GAP
        width = max(self._grid.columns * self._row.width + _GAP, widest)
        height = top + self._rows * self._row.height + _GAP
        self._canvas = PixelCanvas(width, height, _TEXT)
        for number, line in enumerate(lines):
            color = _FAINT if number else sheet.INK
            self._canvas.write(line, _GAP, _GAP + number * _LINE, color)

    @property
    def image(self) -> Image.Image:
        """What is drawn so far."""
        return self._canvas.image

    def add_row(
        self,
        channel: int,
        tiles: Sequence[Image.Image],
        texts: Sequence[tuple[float, str]],
        *,
        is_zero: bool = False,
    ) -> list[int] | None:
        """Draw the row of a channel, and return where its tiles are: left, top, width
        and height. Beyond the channels that have room, nothing is drawn.

        Args:
            channel: its index, for its name.
            tiles: RGB, the best first; those that have no room are left out.
            texts: value and image of each tile; none where the channel has no exemplar.
            is_zero: whether it has none because it is zero in every image.
        """
        if self._drawn == self._channels:
            return None
        # channels run down, then across; the cells of a TileGrid run across
        column, row = divmod(self._drawn, self._rows)
        self._drawn += 1
        cell = self._grid.cell(row * self._grid.columns + column)
        size = self._row.tile
        label_top = cell.top + (size - _LINE) // 2
        self._canvas.write(f"channel {channel}", cell.left, label_top)
        note = ""
        if is_zero:
            note = "zero in all images"
        elif not texts:
            note = "no finite value"
        # a channel that is saturated, say, ranks its images by nothing
        elif len(texts) > 1 and texts[0][0] == texts[-1][0]:
            note = "all equal"
        self._canvas.write(note, cell.left, cell.top + (size + _LINE) // 2, _FAINT)
        left = x = round(cell.left) + _LABEL
        shown = texts[: self._row.images]
        for tile, (value, image) in zip(tiles, shown, strict=False):
            small = tile.resize((size, size), Image.Resampling.BOX)
            spot = self._canvas.paste(small, Cell(x, cell.top, size, size))
            # without its ending: there is room for a few letters
            name = sheet.end_of(PurePosixPath(image).stem, _TEXT, size)
            self._canvas.caption(spot, [Caption(f"{value:.3g}"), Caption(name, _FAINT)])
            x += size + BETWEEN
        return [left, round(cell.top), max(0, x - left - BETWEEN), size]


def _fitting_row(channels: int, count: int) -> _RowSize:
    """The largest row with which the picture of a layer does not become too large; the
    smallest one where it becomes too large all the same.

    Args:
        channels: how many the picture shows, a row each.
        count: exemplars of each channel, of which a row shows as many as fit.
    """
    images = min(count, _MOST_SHOWN)
    # in the order in which something is given up: the size of tiles, then images
    rows = [_RowSize(tile, images) for tile in _SMALL_TILES]
    rows += [_RowSize(_SMALL_TILES[-1], fewer) for fewer in range(images - 1, 0, -1)]
    for row in rows:
        if channels * row.width * row.height <= _MOST_PIXELS:
            return row
    return rows[-1]
