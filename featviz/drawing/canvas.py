"""White paper in inches, for pictures, lines and letters.

matplotlib draws the letters, in its own font, and chooses the ticks of a scale; its artists and
axes are not used.
"""

from __future__ import annotations

import warnings
from functools import cache
from threading import Lock
from typing import Any, Literal

import numpy as np
from PIL import Image

from featviz.records import Bytes

DPI = 100

Anchor = Literal["middle", "above", "left", "right"]
"""Where a text lies by its point: around it, centred above it, or to its left or right."""

Color = tuple[int, int, int]
"""Red, green and blue, 0..255."""

_drawing = Lock()
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
        spot[..., :3] = np.asarray(image.resize(spot.shape[1::-1], how))

    def fill(self, color: Color, left: float, top: float, width: float, height: float) -> None:
        """Paint a rectangle."""
        self._spot(left, top, width, height)[..., :3] = color

    def frame(self, left: float, top: float, width: float, height: float) -> None:
        """Draw the black edge of a rectangle, inside it."""
        spot = self._spot(left, top, width, height)[..., :3]
        spot[[0, -1]] = spot[:, [0, -1]] = 0

    def line(self, left: float, y: float, width: float) -> None:
        """Draw a black horizontal line, a pixel high."""
        self._spot(left, y - 0.5 / DPI, width, 1 / DPI)[..., :3] = 0

    def write(
        self,
        text: str,
        x: float,
        y: float,
        points: float,
        anchor: Anchor,
        ink: Color = (0, 0, 0),
        bold: bool = False,
    ) -> None:
        """Write a line of text at a point."""
        with _drawing:
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
            font, renderer = _font(points, bold), self._renderer
            width = renderer.get_text_width_height_descent(text, font, False)[0]
            before = {"left": width, "right": 0}.get(anchor, width / 2)
            _, height, descent = renderer.get_text_width_height_descent("lp", font, False)
            down = 0 if anchor == "above" else height / 2 - descent
            pen = renderer.new_gc()
            pen.set_foreground(tuple(part / 255 for part in ink))
            renderer.draw_text(pen, x * DPI - before, y * DPI + down, text, font, 0)

    def width(self, text: str, points: float, bold: bool = False) -> float:
        """Inches that a line of text takes."""
        with _drawing:
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
            font = _font(points, bold)
            width: float = self._renderer.get_text_width_height_descent(text, font, False)[0]
        return width / DPI

    def _spot(self, left: float, top: float, width: float, height: float) -> Bytes:
        """The pixels [h, w, 4] of a rectangle, at least one."""
        x, y = round(left * DPI), round(top * DPI)
        right, bottom = round((left + width) * DPI), round((top + height) * DPI)
        return self._pixels[y : max(y + 1, bottom), x : max(x + 1, right)]


def _font(points: float, bold: bool) -> Any:
    from matplotlib.font_manager import FontProperties

    return FontProperties(size=points, weight="bold" if bold else "normal")


def ticks(low: float, high: float) -> tuple[list[tuple[float, str]], str]:
    """Round values between two ends with what is written at them, and what all of it is to be
    multiplied by or added to, if anything."""
    locator, words = _tick_rules()
    with _drawing:
        values = [v for v in locator.tick_values(low, high) if low <= v <= high]
        words.axis.set_view_interval(low, high)
        return list(zip(values, words.format_ticks(values), strict=True)), words.get_offset()


@cache
def _tick_rules() -> tuple[Any, Any]:
    from matplotlib.ticker import AutoLocator, ScalarFormatter

    words = ScalarFormatter(useMathText=False)
    words.create_dummy_axis()
    return AutoLocator(), words
