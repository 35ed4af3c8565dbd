"""Sheets: captioned tiles in rows and columns.

`look`, figures, exemplars and the suspects of an audit are drawn with this:

    title
             head     head           columns may have a head,
    label   +------+ +------+        rows a label on their left,
            | tile | | tile |
            +------+ +------+
            caption  caption         and tiles some lines of text below

A `TileGrid` says where tiles lie on a canvas. There are two canvases. `Canvas` counts
inches; matplotlib draws its letters, which are smooth in every size and cover most
scripts. `PixelCanvas` counts pixels; Pillow draws its letters in a tenth of the time,
which counts for pictures of a thousand channels."""

from __future__ import annotations

import warnings
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from featviz.drawing.grid import MAX_PIXELS
from featviz.errors import UsageError
from featviz.models.requirements import require_matplotlib
from featviz.records import Bytes
from featviz.text import by, cut, printable

DPI = 100
"""Pixels in an inch by default."""
_LONGEST_SIDE = 2**16 - 1
"""Pixels of the longest side that matplotlib can draw."""

Color = tuple[int, int, int]
"""Red, green and blue, 0..255."""
WHITE: Color = (255, 255, 255)
BLACK: Color = (0, 0, 0)
INK: Color = (27, 33, 41)

Anchor = Literal["middle", "above", "left", "right"]
"""Where a text lies from its point: around the point, centred above it, to its left, or
to its right."""

_LONGEST_TEXT = 300
"""Letters of a text that are measured at most: a user's name may have any number."""
matplotlib_lock = Lock()
"""matplotlib's font cache is not safe in several threads."""


@dataclass(frozen=True)
class Tile:
    """A picture with its caption."""

    title: str
    pixels: Bytes
    """uint8 [h, w, 3]."""
    limits: tuple[float, float] | None = None
    """The values drawn darkest and brightest, for a colour bar; None if the colours do not
    stand for values."""
    note: str = ""
    """A second text, which is left out if it has no room. Beside a colour bar, it says
    what the values are."""


class Cell(NamedTuple):
    """A rectangle of a sheet, in the unit of its canvas, from the upper left corner."""

    left: float
    top: float
    width: float
    height: float

    def fit(self, pixels: Bytes) -> tuple[Cell, float]:
        """The largest rectangle with the proportions of a picture [h, w, ...] that fits
        into the middle of this one, and the side of one of the picture's pixels there."""
        height, width = pixels.shape[:2]
        length = min(self.height / height, self.width / width)
        left = self.left + (self.width - width * length) / 2
        top = self.top + (self.height - height * length) / 2
        return Cell(left, top, width * length, height * length), length


class TileGrid(NamedTuple):
    """Where tiles of one size lie, row by row, in the unit of the canvas."""

    columns: int
    width: float
    height: float
    left: float
    """The left edge of the first tile."""
    top: float
    """The upper edge of the first tile."""
    across: float
    """From the left edge of a tile to the left edge of the next one in the row."""
    down: float
    """From the upper edge of a tile to the upper edge of the one below."""

    def cell(self, number: int) -> Cell:
        """The rectangle of a tile, by its number from 0."""
        row, column = divmod(number, self.columns)
        left = self.left + column * self.across
        top = self.top + row * self.down
        return Cell(left, top, self.width, self.height)


# Inches, with matplotlib's letters


class Letters(NamedTuple):
    """How a text looks."""

    points: float
    color: Color = BLACK
    bold: bool = False


def checked_canvas(height: float, width: float, hint: str, dpi: int = DPI) -> Canvas:
    """White paper of a height and width in inches.

    Args:
        hint: hint of the error: how the user gets a smaller picture.
        dpi: pixels in an inch.

    Raises:
        UsageError: the paper would have more pixels than Pillow opens, or a longer side
            than matplotlib draws.
    """
    size = round(height * dpi), round(width * dpi)
    # checked before the memory is taken
    if max(size) > _LONGEST_SIDE or size[0] * size[1] > MAX_PIXELS:
        pixels = f"{by(size[::-1])} pixels"
        message = f"the picture would have {pixels}, more than Pillow opens"
        raise UsageError(message, hint)
    return Canvas(*size, dpi)


class _TextSize(NamedTuple):
    """The size of a line of text, in pixels."""

    width: float
    height: float
    """From the top of the highest letter to the bottom of the lowest one."""
    descent: float
    """How far letters such as p reach below the line on which all letters stand."""


class Canvas:
    """White paper. Places on it are given in inches from its upper left corner, to the
    right and down, and are rounded to pixels.

    The methods call matplotlib's renderer directly: a figure with 33 axes would take
    twenty times as long."""

    def __init__(self, height: int, width: int, dpi: int = DPI) -> None:
        """Take paper of a height and width in pixels, with `dpi` pixels in an inch."""
        require_matplotlib()
        from matplotlib.backends import backend_agg

        agg: Any = backend_agg
        self.dpi = dpi
        self._renderer = agg.RendererAgg(width, height, dpi)
        self._pixels: Bytes = np.asarray(self._renderer.buffer_rgba())
        self._pixels[:] = 255

    @property
    def pixels(self) -> Bytes:
        """A copy of what is drawn so far, uint8 [height, width, 3]."""
        return np.ascontiguousarray(self._pixels[..., :3])

    def _spot(self, cell: Cell) -> Bytes:
        """The paper's pixels in a rectangle, a view [h, w, 3] with at least one pixel."""
        # both edges are rounded, not the width: rectangles that touch leave no gap
        left = round(cell.left * self.dpi)
        top = round(cell.top * self.dpi)
        right = max(left + 1, round((cell.left + cell.width) * self.dpi))
        bottom = max(top + 1, round((cell.top + cell.height) * self.dpi))
        return self._pixels[top:bottom, left:right, :3]

    def fill(self, cell: Cell, color: Color | Bytes) -> None:
        """Paint a rectangle in one colour."""
        self._spot(cell)[:] = color

    def frame(self, cell: Cell) -> None:
        """Draw the black edge of a rectangle, inside it."""
        spot = self._spot(cell)
        spot[[0, -1]] = 0
        spot[:, [0, -1]] = 0

    def paste(self, pixels: Bytes, cell: Cell, smooth: bool = False) -> None:
        """Draw a picture [h, w, 3] so that it fills a rectangle. `smooth` blends
        neighbouring pixels; else they stay sharp squares."""
        spot = self._spot(cell)
        method = Image.Resampling.HAMMING if smooth else Image.Resampling.NEAREST
        height, width = spot.shape[:2]
        image = Image.fromarray(pixels)
        spot[:] = np.asarray(image.resize((width, height), method))

    def write(
        self,
        text: str,
        x: float,
        y: float,
        letters: Letters,
        anchor: Anchor = "right",
        max_width: float | None = None,
        upright: bool = False,
    ) -> float:
        """Write a line of text at a point.

        Args:
            x, y: the point, in inches.
            anchor: where the text lies from the point; `right` begins there.
            max_width: inches that the text takes at most; the middle of a longer text is
                left out. None for no limit.
            upright: whether the text runs upwards; it is then centred around the point,
                whatever `anchor` says.

        Returns:
            The width of the text in inches.
        """
        if max_width is not None:
            text = self.shorten(text, letters, max_width)
        width = self._measured(text, letters).width
        # the height of high and low letters, so that all texts stand on one line
        _, height, descent = self._measured("lp", letters)
        left = x * self.dpi - {"left": width, "right": 0}.get(anchor, width / 2)
        base = y * self.dpi
        if anchor != "above":
            base += height / 2 - descent
        angle = 0
        if upright:
            left = x * self.dpi + height / 2 - descent
            base = y * self.dpi + width / 2
            angle = 90
        pen = self._renderer.new_gc()
        pen.set_foreground(tuple(level / 255 for level in letters.color))
        with matplotlib_lock:
            self._renderer.draw_text(pen, left, base, text, _font(letters), angle)
        return width / self.dpi

    def shorten(self, text: str, letters: Letters, max_width: float) -> str:
        """A text with control characters escaped. If it is wider than `max_width` inches,
        its middle is left out."""
        text = cut(printable(text), _LONGEST_TEXT)
        if self.width(text, letters) <= max_width:
            return text
        lengths = range(1, len(text))
        fitting = bisect(
            lengths, max_width, key=lambda n: self.width(cut(text, n), letters)
        )
        return cut(text, max(1, fitting))

    def width(self, text: str, letters: Letters) -> float:
        """The width of a line of text in inches."""
        return self._measured(text, letters).width / self.dpi

    def _measured(self, text: str, letters: Letters) -> _TextSize:
        """The size of a line of text in pixels. A `$` is a letter, not mathematics."""
        font = _font(letters)
        with matplotlib_lock:
            size = self._renderer.get_text_width_height_descent(text, font, False)
            return _TextSize._make(size)


def _font(letters: Letters) -> Any:
    """matplotlib's font. From now on there is no warning of glyphs that it lacks."""
    require_matplotlib()
    from matplotlib.font_manager import FontProperties

    warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
    weight = "bold" if letters.bold else "normal"
    return FontProperties(size=letters.points, weight=weight)


# Pixels, with letters that Pillow draws


class Caption(NamedTuple):
    """A line of text below a tile."""

    text: str
    color: Color = INK


class PixelCanvas:
    """White paper. Places on it are given in pixels. All its text has one size."""

    def __init__(self, width: int, height: int, points: int) -> None:
        """Take paper of a width and height in pixels, for letters of a size in points."""
        self.image = Image.new("RGB", (width, height), WHITE)
        self._points = points

    def write(self, text: str, left: float, top: float, color: Color = INK) -> None:
        """Write one or several lines of text. Their upper left corner is at `left`, `top`."""
        draw = ImageDraw.Draw(self.image)
        draw.multiline_text(
            (left, top), text, fill=color, font=pixel_font(self._points)
        )

    def paste(self, picture: Image.Image, cell: Cell) -> Cell:
        """Draw a picture in its own size, with its upper left corner in that of a cell.
        Return the rectangle that it covers, which may be larger or smaller than the cell.
        """
        covered = Cell(round(cell.left), round(cell.top), *picture.size)
        self.image.paste(picture, (int(covered.left), int(covered.top)))
        return covered

    def caption(self, cell: Cell, captions: Sequence[Caption]) -> None:
        """Write lines of text below a cell."""
        top = cell.top + cell.height + 1
        for caption in captions:
            self.write(caption.text, cell.left, top, caption.color)
            top += line_height(self._points)


@cache
def pixel_font(points: int) -> Any:
    """matplotlib's font for Pillow, whose own font lacks é and ×."""
    require_matplotlib()
    from matplotlib import get_data_path

    return ImageFont.truetype(Path(get_data_path(), "fonts/ttf/DejaVuSans.ttf"), points)


def text_width(text: str, points: int) -> float:
    """The width of a line of text on a `PixelCanvas`, in pixels."""
    return float(pixel_font(points).getlength(text))


def line_height(points: int) -> int:
    """Pixels from one line of text to the next."""
    return points + 3


def end_of(name: str, points: int, max_width: float) -> str:
    """A name that is at most `max_width` pixels wide. A wider one is cut to `…` and its
    end, which tells images apart: `…/cats/0017.jpg`."""
    name = printable(name)[-_LONGEST_TEXT:]
    end = name
    while text_width(end, points) > max_width and len(name) > 1:
        name = name[1:]
        end = f"…{name}"
    return end


def begin_of(line: str, points: int, max_width: float) -> str:
    """A line that is at most `max_width` pixels wide. A wider one is cut to its beginning
    and `…`."""
    if text_width(line, points) <= max_width:
        return line
    length = len(line)
    while text_width(f"{line[:length]}…", points) > max_width:
        length -= 1
    return f"{line[:length]}…"


def resize(image: Image.Image, factor: float) -> Image.Image:
    """A picture `factor` times as wide and as high. If it grows, its pixels stay sharp
    squares."""
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    is_larger = factor > 1
    methods = Image.Resampling
    return image.resize(size, methods.NEAREST if is_larger else methods.BILINEAR)
