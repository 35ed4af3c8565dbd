"""The pictures of exemplars: one of each channel, and one of all channels of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from pathlib import PurePosixPath
from typing import NamedTuple

from PIL import Image

from featviz.drawing import sheet
from featviz.drawing.sheet import Caption, Cell, PixelCanvas, TileGrid
from featviz.rundir.studies import Exemplar

TILE = 128
"""Pixels of a tile's edge in the picture of a channel."""
_GAP = 8
_TEXT = 11
_LINE = sheet.line_height(_TEXT)
_TITLE = 2 * _LINE + _GAP
"""Height of the title of a channel's picture, in pixels."""
_CAPTION = 2 * _LINE + 2
"""Height of the lines below a tile, in pixels."""
_LABEL = 112
"""Width of the column that names channels in a layer's picture, in pixels."""
BETWEEN = 4
"""Pixels between tiles in a layer's picture."""
_COLUMN_GAP = 24
_SMALL_TILES = (64, 48, 32)
"""Sides of a tile in a layer's picture, in pixels; the smaller ones are for many tiles."""
_MOST_PIXELS = 2**26
"""Pixels of a layer's picture at most."""
_MOST_SHOWN = 40
"""Tiles of a channel in a layer's picture at most."""
_FAINT: sheet.Color = (80, 89, 100)


class ExemplarTile(NamedTuple):
    """An exemplar and its picture."""

    exemplar: Exemplar
    picture: Image.Image
    """RGB, TILE × TILE pixels."""


def tile_grid(count: int) -> TileGrid:
    """Where the tiles lie in the picture of a channel, in pixels. Rows and columns make
    about a square.

    Args:
        count: number of tiles that have room, at least 1.
    """
    columns = ceil(sqrt(count))
    down = TILE + _CAPTION + _GAP
    return TileGrid(
        columns, TILE, TILE, _GAP, _TITLE + _GAP, across=TILE + _GAP, down=down
    )


def draw_channel(
    title: Sequence[str], tiles: Sequence[ExemplarTile], count: int
) -> Image.Image:
    """Draw a channel's picture, RGB: its tiles, with value and name of the image below
    each.

    Args:
        title: two lines of text.
        tiles: the best first, at most `count`.
        count: number of tiles that have room. With one `count` for all channels of a
            layer, their pictures have one size.
    """
    grid = tile_grid(count)
    last = grid.cell(count - 1)
    width = max(grid.columns * (TILE + _GAP), 2 * (TILE + _GAP)) + _GAP
    canvas = PixelCanvas(width, round(last.top + TILE + _CAPTION + _GAP), _TEXT)
    for number, line in enumerate(title):
        line = sheet.begin_of(line, _TEXT, width - 2 * _GAP)
        color = _FAINT if number else sheet.INK
        canvas.write(line, _GAP, _GAP + number * _LINE, color)
    for rank, (exemplar, picture) in enumerate(tiles):
        cell = grid.cell(rank)
        canvas.paste(picture, cell)
        value = Caption(f"{exemplar.value:.4g}")
        name = sheet.end_of(exemplar.image, _TEXT, TILE)
        canvas.caption(cell, [value, Caption(name, _FAINT)])
    return canvas.image


class _RowSize(NamedTuple):
    """The row of a channel in the picture of a layer, in pixels."""

    tile: int
    """The side of a tile."""
    images: int
    """How many tiles stand side by side."""

    @property
    def width(self) -> int:
        """The width of the row, with the column that names the channel, and the gap after
        the row."""
        return _LABEL + self.images * (self.tile + BETWEEN) + _COLUMN_GAP

    @property
    def height(self) -> int:
        """The height of the row, with the lines of text below the tiles."""
        return self.tile + _CAPTION + _GAP


class LayerPicture:
    """The picture of a layer, about square: a row of small tiles for each channel.

        channel 0  [] [] []      channel 2  [] [] []     channels run down, then across
        channel 1  [] [] []      channel 3  [] [] []

    If the picture would be too large, tiles become smaller, then images are left out, then
    channels."""

    def __init__(self, title: Sequence[str], channels: int, count: int) -> None:
        """Begin the picture of a layer.

        Args:
            title: lines of text above the tiles. If images or channels have no room, a
                line that says so is added.
            channels: number of channels that `add_row` will add, at least 1.
            count: number of images of the channel with the most images, at least 1.
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
        # c columns with n / c rows make a square if c² · width = n · height
        square = self._channels * self._row.height / self._row.width
        self._rows = ceil(self._channels / max(1, round(sqrt(square))))
        columns = ceil(self._channels / self._rows)
        self._top = len(lines) * _LINE + 3 * _GAP
        widest = max(int(sheet.text_width(line, _TEXT)) for line in lines) + 2 * _GAP
        width = max(columns * self._row.width + _GAP, widest)
        height = self._top + self._rows * self._row.height + _GAP
        self._canvas = PixelCanvas(width, height, _TEXT)
        for number, line in enumerate(lines):
            color = _FAINT if number else sheet.INK
            self._canvas.write(line, _GAP, _GAP + number * _LINE, color)

    @property
    def image(self) -> Image.Image:
        """The picture as it is drawn so far."""
        return self._canvas.image

    def add_row(
        self,
        channel: int,
        tiles: Sequence[ExemplarTile],
        *,
        is_zero: bool = False,
    ) -> list[int] | None:
        """Draw the row of the next channel.

        Args:
            channel: number of the channel, which is written beside the row.
            tiles: the best first; those that have no room are left out.
            is_zero: whether the channel has no tiles because it is zero in every image.

        Returns:
            The rectangle of the row's tiles in pixels: left, top, width and height. None
            if the channel has no room; then nothing is drawn.
        """
        if self._drawn == self._channels:
            return None
        column, row = divmod(self._drawn, self._rows)
        self._drawn += 1
        label_left = _GAP + column * self._row.width
        top = self._top + row * self._row.height
        size = self._row.tile
        self._canvas.write(f"channel {channel}", label_left, top + (size - _LINE) // 2)
        note = ""
        if is_zero:
            note = "zero in all images"
        elif not tiles:
            note = "no finite value"
        # the ranking then says nothing, as for a saturated channel
        elif len(tiles) > 1 and tiles[0].exemplar.value == tiles[-1].exemplar.value:
            note = "all equal"
        self._canvas.write(note, label_left, top + (size + _LINE) // 2, _FAINT)
        left = x = label_left + _LABEL
        for exemplar, picture in tiles[: self._row.images]:
            small = picture.resize((size, size), Image.Resampling.BOX)
            spot = self._canvas.paste(small, Cell(x, top, size, size))
            value = Caption(f"{exemplar.value:.3g}")
            # without the ending: there is room for only a few letters
            name = sheet.end_of(PurePosixPath(exemplar.image).stem, _TEXT, size)
            self._canvas.caption(spot, [value, Caption(name, _FAINT)])
            x += size + BETWEEN
        return [left, top, max(0, x - left - BETWEEN), size]


def _fitting_row(channels: int, count: int) -> _RowSize:
    """The largest row with which the picture of a layer has at most _MOST_PIXELS. If even
    the smallest row is too large, the smallest one.

    Args:
        channels: number of channels, each of which has a row.
        count: number of exemplars of each channel; a row may show fewer.
    """
    images = min(count, _MOST_SHOWN)
    # first the tiles become smaller, then images are left out
    rows = [_RowSize(tile, images) for tile in _SMALL_TILES]
    rows += [_RowSize(_SMALL_TILES[-1], fewer) for fewer in range(images - 1, 0, -1)]
    for row in rows:
        if channels * row.width * row.height <= _MOST_PIXELS:
            return row
    return rows[-1]
