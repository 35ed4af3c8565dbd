"""Sheets: captioned tiles in rows and columns.

`look`, figures, exemplars and the suspects of an audit are drawn with this:

    title
             head     head           columns may have a head,
    label   +------+ +------+        rows a label on their left,
            | tile | | tile |
            +------+ +------+
            caption  caption         and tiles some lines of text below

A `TileGrid` says where tiles lie on a canvas. `Canvas` counts inches and has matplotlib's
letters, which are smooth in every size and hold most scripts, and the ticks of colour
bars. `PixelCanvas` counts pixels, and Pillow draws its letters: a line takes it a tenth
of the time, which counts where there is a picture for each of a thousand channels."""

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
"""Pixels in an inch, unless a figure asks for others."""
_LONGEST_SIDE = 2**16 - 1
"""Pixels; matplotlib writes on no longer paper."""

Color = tuple[int, int, int]
"""Red, green and blue, 0..255."""
WHITE: Color = (255, 255, 255)
BLACK: Color = (0, 0, 0)
INK: Color = (27, 33, 41)

Anchor = Literal["middle", "above", "left", "right"]
"""Where a text lies by its point: around it, centred above it, or to its left or right.
"""

_LONGEST_TEXT = 300
"""Letters of a text that are measured: a name from outside may have any number."""
matplotlib_lock = Lock()
"""matplotlib's font cache is not safe in several threads."""


@dataclass(frozen=True)
class Tile:
    """A picture with its caption."""

    title: str
    pixels: Bytes
    """uint8 [h, w, 3]."""
    limits: tuple[float, float] | None = None
    """The values drawn darkest and brightest, for a colour bar; None for colours of no
    value."""
    note: str = ""
    """A second text, which is left out where there is no room for it; of a tile with a
    colour bar what its values are."""


class Cell(NamedTuple):
    """A rectangle of a sheet, in the unit of its canvas, from the upper left corner."""

    left: float
    top: float
    width: float
    height: float

    def fitted(self, pixels: Bytes) -> tuple[Cell, float]:
        """The largest rectangle for a picture [h, w, ...] in the middle of this one, and
        the length of a pixel there."""
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
    """Where the first tile begins."""
    top: float
    across: float
    """From the left edge of a tile to that of its neighbour."""
    down: float
    """From the top of a tile to that of the one below."""

    def cell(self, number: int) -> Cell:
        """Where a tile lies, by its number."""
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
        hint: of the error, what makes a picture smaller.
        dpi: pixels in an inch.

    Raises:
        UsageError: it would have more pixels than Pillow opens, or a longer side than
            matplotlib draws.
    """
    size = round(height * dpi), round(width * dpi)
    # refused before the memory is taken
    if max(size) > _LONGEST_SIDE or size[0] * size[1] > MAX_PIXELS:
        pixels = f"{by(size[::-1])} pixels"
        message = f"the picture would have {pixels}, more than Pillow opens"
        raise UsageError(message, hint)
    return Canvas(*size, dpi)


class _TextSize(NamedTuple):
    """The size of a line of text, in pixels."""

    width: float
    height: float
    """From its highest letter to its lowest one."""
    descent: float
    """From its base down."""


class Canvas:
    """White paper in inches, which are rounded to pixels. Inches are counted from its
    upper left corner, to the right and down.

    It talks to matplotlib's renderer: axes, of which a figure has 33, take twenty times
    as long."""

    def __init__(self, height: int, width: int, dpi: int = DPI) -> None:
        """Take paper of a height and width in pixels, `dpi` of them to the inch."""
        require_matplotlib()
        from matplotlib.backends import backend_agg

        agg: Any = backend_agg
        self.dpi = dpi
        self._renderer = agg.RendererAgg(width, height, dpi)
        self._pixels: Bytes = np.asarray(self._renderer.buffer_rgba())
        self._pixels[:] = 255

    @property
    def pixels(self) -> Bytes:
        """What is drawn, uint8 [height, width, 3]."""
        return np.ascontiguousarray(self._pixels[..., :3])

    def _spot(self, cell: Cell) -> Bytes:
        """The pixels [h, w, 3] of a rectangle, at least one, to be painted."""
        # both edges are rounded, not the width: rectangles that meet leave no gap
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
        """Draw a picture [h, w, 3] over a rectangle, its pixels as they are unless
        `smooth`."""
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
            anchor: where the text lies by the point: `right` of it, for one.
            max_width: inches; of a longer text the middle is left out. None takes the
                text as it is.
            upright: the text runs upwards, and is centred around the point, whatever
                `anchor` says.

        Returns:
            How wide the text is, in inches.
        """
        if max_width is not None:
            text = self.shortened(text, letters, max_width)
        width = self._measured(text, letters).width
        # of letters that reach up and down, so that all lines stand on one base
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

    def shortened(self, text: str, letters: Letters, max_width: float) -> str:
        """A text, of which the middle is left out where it is wider than `max_width`
        inches; its control characters are escaped."""
        text = cut(printable(text), _LONGEST_TEXT)
        if self.width(text, letters) <= max_width:
            return text
        lengths = range(1, len(text))
        fitting = bisect(
            lengths, max_width, key=lambda n: self.width(cut(text, n), letters)
        )
        return cut(text, max(1, fitting))

    def width(self, text: str, letters: Letters) -> float:
        """Inches that a line of text takes."""
        return self._measured(text, letters).width / self.dpi

    def _measured(self, text: str, letters: Letters) -> _TextSize:
        """The size of a line of text, whatever is in it."""
        font = _font(letters)
        with matplotlib_lock:
            size = self._renderer.get_text_width_height_descent(text, font, False)
            return _TextSize._make(size)


def _font(letters: Letters) -> Any:
    """matplotlib's font. Glyphs that it lacks are no longer warned of."""
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
    """White paper in pixels; all its text has one size."""

    def __init__(self, width: int, height: int, points: int) -> None:
        """Take paper of a width and height in pixels, with letters of a size in points."""
        self.image = Image.new("RGB", (width, height), WHITE)
        self._points = points

    def write(self, text: str, left: float, top: float, color: Color = INK) -> None:
        """Write lines of text, from their upper left corner on."""
        draw = ImageDraw.Draw(self.image)
        draw.multiline_text(
            (left, top), text, fill=color, font=pixel_font(self._points)
        )

    def paste(self, picture: Image.Image, cell: Cell) -> Cell:
        """Draw a picture in its own size, from the upper left corner of a cell on, and
        return the rectangle that it covers, which may be another than the cell."""
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
    """The letters of matplotlib's figures for Pillow, whose own lack é and ×."""
    require_matplotlib()
    from matplotlib import get_data_path

    return ImageFont.truetype(Path(get_data_path(), "fonts/ttf/DejaVuSans.ttf"), points)


def text_width(text: str, points: int) -> float:
    """Pixels that a line of text takes on a `PixelCanvas`."""
    return float(pixel_font(points).getlength(text))


def line_height(points: int) -> int:
    """Pixels from a line of text to the next one."""
    return points + 3


def end_of(name: str, points: int, max_width: float) -> str:
    """A name that is at most `max_width` pixels wide: of a wider one `…` and the end,
    which tells images apart: `…/cats/0017.jpg`."""
    name = printable(name)[-_LONGEST_TEXT:]
    end = name
    while text_width(end, points) > max_width and len(name) > 1:
        name = name[1:]
        end = f"…{name}"
    return end


def begin_of(line: str, points: int, max_width: float) -> str:
    """A line that is at most `max_width` pixels wide: of a wider one the beginning, and
    `…`, for which there is room."""
    if text_width(line, points) <= max_width:
        return line
    length = len(line)
    while text_width(f"{line[:length]}…", points) > max_width:
        length -= 1
    return f"{line[:length]}…"


def resized(image: Image.Image, factor: float) -> Image.Image:
    """A picture `factor` times as wide and as high. Its pixels stay squares where it
    grows."""
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    is_larger = factor > 1
    methods = Image.Resampling
    return image.resize(size, methods.NEAREST if is_larger else methods.BILINEAR)
