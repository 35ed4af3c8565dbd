"""White paper in inches for pictures, lines and letters, and the page of `look` on it: the image,
the prediction, a row for each layer.

matplotlib draws the letters, in its own font; its artists and axes are not used. Nothing here needs
torch.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from threading import Lock
from typing import Any, Literal

import numpy as np
from PIL import Image

from featviz.drawing import colormap
from featviz.records import Bytes
from featviz.text import cut, percent, printable

DPI = 100

Anchor = Literal["middle", "above", "left", "right"]
"""Where a text lies by its point: around it, centred above it, or to its left or right."""

Color = tuple[int, int, int]
"""Red, green and blue, 0..255."""

drawing = Lock()
"""matplotlib's font cache is not safe in several threads."""


class Canvas:
    """Pixels that places in inches from the upper left are rounded to."""

    def __init__(self, size: tuple[int, int]) -> None:
        """Take white paper of a height and width in pixels."""
        from matplotlib.backends import backend_agg

        agg: Any = backend_agg
        self._renderer = agg.RendererAgg(size[1], size[0], DPI)
        self._pixels: Bytes = np.asarray(self._renderer.buffer_rgba())
        self._pixels[:] = 255

    def rows(self) -> Bytes:
        """The pixels, uint8 [height, 3 · width]."""
        return self._pixels[..., :3].reshape(len(self._pixels), -1)

    def paste(
        self,
        pixels: Bytes,
        left: float,
        top: float,
        width: float,
        height: float,
        smooth: bool = False,
    ) -> None:
        """Draw a picture [h, w, 3] over a rectangle, its pixels as they are unless `smooth`."""
        spot = self._spot(left, top, width, height)
        how = Image.Resampling.HAMMING if smooth else Image.Resampling.NEAREST
        image = Image.fromarray(np.ascontiguousarray(pixels))
        spot[:] = np.asarray(image.resize(spot.shape[1::-1], how))

    def fill(self, color: Color, left: float, top: float, width: float, height: float) -> None:
        """Paint a rectangle."""
        self._spot(left, top, width, height)[:] = color

    def frame(self, left: float, top: float, width: float, height: float) -> None:
        """Draw the black edge of a rectangle, inside it."""
        spot = self._spot(left, top, width, height)
        spot[[0, -1]] = spot[:, [0, -1]] = 0

    def write(
        self,
        text: str,
        x: float,
        y: float,
        points: float,
        anchor: Anchor,
        ink: Color = (0, 0, 0),
        bold: bool = False,
        room: float | None = None,
    ) -> float:
        """Write a line of text at a point, and return how wide it is.

        Args:
            room: inches that it may take; the middle of longer words is left out.
        """
        if room is not None:
            text = words = cut(printable(text), _LONGEST)
            length = len(words)
            while length > 1 and self.width(text, points, bold) > room:
                length -= 1
                text = cut(words, length)
        with drawing:
            font = _font(points, bold)
            width, _, _ = self._extent(text, font)
            _, height, descent = self._extent("lp", font)
            before = {"left": width, "right": 0}.get(anchor, width / 2)
            down = 0 if anchor == "above" else height / 2 - descent
            pen = self._renderer.new_gc()
            pen.set_foreground(tuple(part / 255 for part in ink))
            self._renderer.draw_text(pen, x * DPI - before, y * DPI + down, text, font, 0)
        return width / DPI

    def width(self, text: str, points: float, bold: bool = False) -> float:
        """Inches that a line of text takes."""
        with drawing:
            return self._extent(text, _font(points, bold))[0] / DPI

    def _extent(self, text: str, font: Any) -> tuple[float, float, float]:
        """Width, height and descent of a line of text in pixels."""
        extent: tuple[float, float, float] = self._renderer.get_text_width_height_descent(
            text, font, False
        )
        return extent

    def _spot(self, left: float, top: float, width: float, height: float) -> Bytes:
        """The pixels [h, w, 3] of a rectangle, at least one."""
        x, y = round(left * DPI), round(top * DPI)
        right, bottom = round((left + width) * DPI), round((top + height) * DPI)
        return self._pixels[y : max(y + 1, bottom), x : max(x + 1, right), :3]


def _font(points: float, bold: bool) -> Any:
    from matplotlib.font_manager import FontProperties

    warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
    return FontProperties(size=points, weight="bold" if bold else "normal")


# The page of `look`

_INK, _SOFT, _FAINT, _RULE = (27, 33, 41), (92, 100, 112), (139, 146, 158), (226, 229, 234)

_MARGIN, _NAMES, _TILE, _GAP = 0.3, 1.8, 1.2, 0.08
"""Inches around the page, of the column of names, of a square tile's side, between tiles."""
_NUMBERS, _BETWEEN = 0.2, 0.14
"""Inches below a tile for its numbers, and between two rows."""
_TITLE, _CAPTION, _KEY = 0.45, 0.25, 0.4
"""Inches of the title, of a caption, of the key below."""
_PICTURE, _ALONE = 2.2, 3.0
"""Inches of the height of the input's picture, beside a prediction and without one."""
_LEADING = 0.18
"""Inches from a line of text to the next."""
_NARROWEST = 8.0
"""Inches that a page is wide at least, so that the prediction has room."""
_WIDTHS, _HEIGHTS = (0.85, 1.55), (0.3, 1.55)
"""Inches of the narrowest and the widest tile, the lowest and the highest one; maps of other shapes
lie in such a tile with white around them."""
_STRIP = 0.3
"""Inches of the height of a strip of numbers."""
_LONGEST_SIDE = 4.2
"""Inches of the width of the input's picture."""
_LONGEST = 300
"""Letters of a text that are measured."""
_LETTERS, _LINES = 20, 3
"""Letters of a line of a layer's name, and lines that the name may take."""


@dataclass(frozen=True)
class OverviewTile:
    """One map."""

    title: str
    note: str
    pixels: Bytes
    """uint8 [h, w, 3]."""


@dataclass(frozen=True)
class OverviewRow:
    """One layer."""

    name: str
    lines: Sequence[str]
    tiles: Sequence[OverviewTile]
    strip: bool = False
    """Whether its one tile is a strip of numbers, as wide as the row."""


@dataclass(frozen=True)
class Overview:
    """All that the page shows."""

    title: str
    subtitle: str
    pictures: Sequence[tuple[str, Bytes]]
    """The input, and the output where it is a picture: caption and uint8 [h, w, 3]."""
    bars: Sequence[tuple[str, float]]
    """The likeliest classes with their shares, 0..1."""
    remarks: Sequence[str]
    rows: Sequence[OverviewRow]
    key: str
    """What the tiles and the numbers below them are."""
    cmap: str

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the page in pixels."""
        at = _Geometry.of(self)
        return round(at.height * DPI), round(at.width * DPI)

    def draw(self) -> Bytes:
        """The page, uint8 [H, W, 3]."""
        at, canvas = _Geometry.of(self), Canvas(self.size)
        colors = colormap.ramp(self.cmap)
        red, green, blue = (int(part) for part in colors[len(colors) * 2 // 5])  # seen on white
        _write_head(canvas, self, at, (red, green, blue))
        for row, top in zip(self.rows, at.tops, strict=True):
            _draw_row(canvas, row, at, top)
        _draw_key(canvas, self, at, colors)
        return canvas.rows().reshape(*self.size, 3)


@dataclass(frozen=True)
class _Geometry:
    """Where things stand, in inches."""

    width: float
    height: float
    tile: tuple[float, float]
    """Width and height of each tile."""
    tops: Sequence[float]
    """Upper edges of the rows' tiles."""
    room: float
    """Most of the width of each picture of the input and the output."""
    picture: float
    """Height of these pictures."""

    @classmethod
    def of(cls, page: Overview) -> _Geometry:
        """By the number of the maps and the shape of most of the first ones."""
        sides = [row.tiles[0].pixels.shape for row in page.rows if not row.strip]
        aspect = float(np.median([width / height for height, width, _ in sides] or [1.0]))
        across = min(max(_TILE * sqrt(aspect), _WIDTHS[0]), _WIDTHS[1])
        down = min(max(across / aspect, _HEIGHTS[0]), _HEIGHTS[1])
        most = max(len(row.tiles) for row in page.rows)
        width = max(2 * _MARGIN + _NAMES + most * (across + _GAP) - _GAP, _NARROWEST)
        share = 0.45 if page.bars else 0.65  # a prediction takes more room than remarks
        room = min(_LONGEST_SIDE, (width - 2 * _MARGIN) * share / len(page.pictures))
        heights = [_fitted(pixels, room, _ALONE)[1] for _, pixels in page.pictures]
        remarks = len(page.remarks) * _LEADING - _CAPTION
        picture = _PICTURE if page.bars else max(remarks, *heights)
        top = _MARGIN + _TITLE + _CAPTION + picture + 2 * _BETWEEN
        words = [(len(_name_lines(row.name)) + len(row.lines)) * _LEADING for row in page.rows]
        tall = max([down, *(w for w, row in zip(words, page.rows, strict=True) if not row.strip)])
        tops = []
        for high, row in zip(words, page.rows, strict=True):
            tops.append(top)
            top += (max(_STRIP, high) if row.strip else tall) + _NUMBERS + _BETWEEN
        return cls(width, top + _KEY + _MARGIN / 2, (across, down), tops, room, picture)


def _write_head(canvas: Canvas, page: Overview, at: _Geometry, accent: Color) -> None:
    y = _MARGIN + 0.1
    title = canvas.write(page.title, _MARGIN, y, 15, "right", _INK, True, at.width * 0.6)
    left = _MARGIN + title + 0.2
    room = at.width - _MARGIN - left
    canvas.write(page.subtitle, left, y + 0.02, 10, "right", _SOFT, room=room)
    left, top = _MARGIN, _MARGIN + _TITLE
    for caption, pixels in page.pictures:
        width, height = _fitted(pixels, at.room, at.picture)
        canvas.write(caption, left, top + 0.08, 9, "right", _SOFT)
        _paste(canvas, pixels, left, top + _CAPTION, width, height)
        left += width + 0.3
    left = max(left, _MARGIN + _NAMES)
    _write_prediction(canvas, page, (left, top), at.width - _MARGIN - left, accent)
    rule = top + _CAPTION + at.picture + _BETWEEN
    canvas.fill(_RULE, _MARGIN, rule, at.width - 2 * _MARGIN, 1 / DPI)


def _write_prediction(
    canvas: Canvas, page: Overview, corner: tuple[float, float], width: float, accent: Color
) -> None:
    """A bar for each class, whose full length is a share of 1; or the remarks."""
    left, top = corner
    if not page.bars:
        for place, line in enumerate(page.remarks):
            y = top + 0.08 + place * _LEADING
            canvas.write(line, left, y, 9, "right", _SOFT, room=width)
        return
    canvas.write("prediction", left, top + 0.08, 9, "right", _SOFT)
    names = [printable(name) for name, _ in page.bars]
    widest = max(canvas.width(name, 10, bold=True) for name in names)
    column = min(widest, width * 0.45) + 0.15
    bar, step = width - column - 0.7, _PICTURE / len(page.bars)
    for place, (name, (_, share)) in enumerate(zip(names, page.bars, strict=True)):
        y, first = top + _CAPTION + step * (place + 0.5), place == 0
        canvas.write(name, left, y, 10, "right", _INK if first else _SOFT, first, column - 0.1)
        canvas.fill(_RULE, left + column, y - 0.09, bar, 0.18)
        if share * bar * DPI >= 1:
            canvas.fill(accent, left + column, y - 0.09, bar * share, 0.18)
        canvas.write(percent(share), left + column + bar + 0.08, y, 10, "right", _INK, first)


def _draw_row(canvas: Canvas, row: OverviewRow, at: _Geometry, top: float) -> None:
    across, down = at.tile
    middle = top + (_STRIP if row.strip else down) / 2
    words = [(line, 10.0, _INK) for line in _name_lines(row.name)]
    words += [(line, 8.5, _SOFT) for line in row.lines]
    y = max(top, middle - len(words) * _LEADING / 2) + _LEADING / 2
    for line, points, ink in words:
        canvas.write(line, _MARGIN, y, points, "right", ink, ink == _INK, _NAMES - 0.1)
        y += _LEADING
    left = _MARGIN + _NAMES
    if row.strip:
        width = at.width - _MARGIN - left
        pixels = row.tiles[0].pixels
        canvas.paste(pixels, left, top, width, _STRIP, smooth=pixels.shape[1] > width * DPI)
        _write_numbers(canvas, row.tiles[0], left, top + _STRIP, width)
        return
    for tile in row.tiles:
        width, height = _fitted(tile.pixels, across, down)
        x, y = left + (across - width) / 2, top + (down - height) / 2
        _paste(canvas, tile.pixels, x, y, width, height)
        _write_numbers(canvas, tile, left, top + down, across)
        left += across + _GAP


def _write_numbers(
    canvas: Canvas, tile: OverviewTile, left: float, top: float, width: float
) -> None:
    y = top + 0.09
    room = width - canvas.write(tile.title, left, y, 8, "right", _INK, bold=True) - 0.08
    if canvas.width(tile.note, 7) <= room:
        canvas.write(tile.note, left + width, y, 7, "left", _FAINT)


def _name_lines(name: str) -> list[str]:
    """A layer's name in lines, broken behind dots and underscores; a very long one is shortened."""
    lines = [""]
    for part in re.findall(r"[^./_]*[./_]|[^./_]+", printable(name)):
        if lines[-1] and len(lines[-1] + part) > _LETTERS:
            lines.append("")
        lines[-1] += part
    if len(lines) > _LINES:
        lines = [lines[0], "…", lines[-1]]
    return lines


def _draw_key(canvas: Canvas, page: Overview, at: _Geometry, colors: Bytes) -> None:
    y, left = at.height - _MARGIN, _MARGIN
    left += canvas.write("min", left, y, 8, "right", _SOFT) + 0.08
    canvas.paste(colors[None], left, y - 0.06, 1.2, 0.12)
    left += 1.28
    left += canvas.write("max, scaled per map", left, y, 8, "right", _SOFT) + 0.4
    right = at.width - _MARGIN
    canvas.write(page.key, right, y, 8, "left", _SOFT, room=right - left)


def _fitted(pixels: Bytes, width: float, height: float) -> tuple[float, float]:
    """Inches of a picture that fills a room in one direction, in whole pixels of the page."""
    share = min(width / pixels.shape[1], height / pixels.shape[0])
    across, down = (pixels.shape[axis] * share * DPI for axis in (1, 0))
    return max(1, int(across + 1e-6)) / DPI, max(1, int(down + 1e-6)) / DPI


def _paste(
    canvas: Canvas, pixels: Bytes, left: float, top: float, width: float, height: float
) -> None:
    """Draw a picture whose pixels stay squares: it is enlarged by a whole factor, and what is too
    much of it is reduced smoothly."""
    factor = max(1, ceil(width * DPI / pixels.shape[1] - 0.01))
    large = pixels.repeat(factor, 0).repeat(factor, 1)
    left, top = (max(1, int(inches * DPI + 1e-6)) / DPI for inches in (left, top))
    canvas.paste(large, left, top, width, height, smooth=True)
