"""A figure of some maps beside the input, with colour bars.

matplotlib draws the letters and chooses the ticks; its axes, of which such a figure has 33, would
take twenty times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any, BinaryIO

import numpy as np

from featviz.drawing import colormap, labels
from featviz.drawing.page import DPI, Canvas, drawing
from featviz.drawing.picture import GridPicture, write_png
from featviz.records import REDUCTIONS, Bytes
from featviz.text import printable

FIRST = 16
"""Maps in a figure."""

_CELL = 1.7
"""Inches of a panel's picture; the input has twice as much."""
_GAP, _HEAD, _BAR, _TICKS = 0.15, 0.28, 0.08, 0.5
"""Inches between panels, above one for its title, of a colour bar, and of the numbers beside it."""
_TITLE = 0.45
_FIRST = 2 * _CELL + 2 * _GAP
"""Inches from the left to the first panel."""
_POINTS = 115
"""A title of n letters fits a line of i inches at no more than _POINTS · i / n points."""
_STRIP = 8
"""A panel that is so many times as long as it is wide is stretched to fill its cell."""
_ABOVE, _TICK, _LINE = 0.08, 0.03, 0.1
"""Inches between a picture and its title, of a tick's length, and of the height of its number."""
_MARKED = {labels.NONE: "", labels.ZERO: " (all zero)", labels.CONSTANT: " (constant)"}

Ends = tuple[float, float]
"""The values that are drawn darkest and brightest."""


class FigureGeometry:
    """Where things stand in a figure of so many panels, in inches."""

    def __init__(self, panels: int) -> None:
        self.columns = ceil(sqrt(panels))
        self.side = 2 * _CELL if panels == 1 else _CELL  # of a picture; one alone is large
        self._across = self.side + _GAP + _BAR + _TICKS
        self._down, rows = self.side + _HEAD + _GAP, -(-panels // self.columns)
        height = _TITLE + max(rows * self._down, 2 * _CELL + _HEAD + _GAP)
        self.width = _FIRST + self.columns * self._across + _GAP
        self.pixels = round(height * DPI), round(self.width * DPI)

    def corner(self, place: int) -> tuple[float, float]:
        """Left and top of a panel."""
        row, column = divmod(place, self.columns)
        return _FIRST + column * self._across, _TITLE + _HEAD + row * self._down


@dataclass(frozen=True)
class Panel:
    """One map of a figure."""

    title: str
    pixels: Bytes
    limits: Ends | None
    """None for colours that stand for no value."""


@dataclass(frozen=True)
class FigurePage:
    """All that a figure shows."""

    title: str
    shown: Bytes
    """What the model saw, uint8 [H, W, 1] or [H, W, 3]."""
    panels: Sequence[Panel]
    cmap: str


def page(picture: GridPicture, cmap: str, title: str, shown: Bytes) -> FigurePage:
    """What the figure of a picture shows: its first tiles, a channel's slices side by side, beside
    the input.
    """
    cmap = "gray" if cmap in colormap.GREYS else cmap
    colors, side = colormap.ramp(cmap), picture.slices[0]
    if picture.strip:
        what = "numbers" if picture.constant is None else "constant maps, a value each"
        titles, side = [f"{len(picture.drawn)} {what}"], picture.plan.maps
    elif picture.reduce is not None:
        titles = [f"{REDUCTIONS[picture.reduce].words} of {len(picture.stats)} channels"]
    else:
        titles, marks = [], picture.marks
        for place, channel in enumerate(picture.drawn[:FIRST]):
            group = picture.groups.get(channel)
            shared_by = f" ×{len(group)}" if group else ""
            titles.append(f"channel {channel}{shared_by}{_MARKED[int(marks[place * side])]}")
    panels = []
    for place, words in enumerate(titles):
        at = place * side if len(picture.limits.low) > 1 else 0
        low, high = np.nan_to_num([picture.limits.low[at], picture.limits.high[at]])
        tiles = picture.tiles[place * side : (place + 1) * side]
        limits = None if picture.reduce == "pca" else (float(low), float(high))
        if picture.levels:
            # a constant has the colour in the middle of its scale
            palette, varied = picture.palette, high > low
            shades = tiles.astype(np.int64) * 256 // (palette.levels - 1) if varied else 128
            painted = colors[np.broadcast_to(np.minimum(shades, 255), tiles.shape)]
            painted[tiles == (-1 if palette.nonfinite is None else palette.nonfinite)] = (
                colormap.MAGENTA
            )
            tiles = painted
        panels.append(Panel(words, np.concatenate(list(tiles), axis=1), limits))
    return FigurePage(title, shown, panels, cmap)


def write_figure(file: BinaryIO, sheet: FigurePage, text: Mapping[str, str]) -> None:
    """Write a figure as PNG to an open file."""
    at, colors = FigureGeometry(len(sheet.panels)), colormap.ramp(sheet.cmap)
    canvas = Canvas(at.pixels)
    title = printable(sheet.title)
    size = min(10.0, _POINTS * at.width / max(len(title), 1))
    canvas.write(title, at.width / 2, _TITLE / 2, size, "middle")
    shown = np.broadcast_to(sheet.shown, (*sheet.shown.shape[:2], 3))
    _draw(canvas, Panel("input", shown, None), (_GAP, _TITLE + _HEAD), 2 * _CELL)
    for place, panel in enumerate(sheet.panels):
        left, top, width, height = _draw(canvas, panel, at.corner(place), at.side)
        if panel.limits is not None:
            _bar(canvas, colors, panel.limits, left + width + 0.05, top, height)
    write_png(file, at.pixels, [canvas.rows()], text=text)


def _draw(
    canvas: Canvas, panel: Panel, corner: tuple[float, float], side: float
) -> tuple[float, float, float, float]:
    """Draw a picture in the middle of a square cell, and its title above it.

    Its pixels are seen as squares where they are large enough.

    Returns:
        Left, top, width and height of the picture in inches.
    """
    height, width = panel.pixels.shape[:2]
    long = max(height, width)
    down, across = side * height / long, side * width / long
    if long >= _STRIP * min(height, width):
        down = across = side
    left, top = corner[0] + (side - across) / 2, corner[1] + (side - down) / 2
    canvas.paste(panel.pixels, left, top, across, down, smooth=long * 3 > side * DPI)
    canvas.write(panel.title, left + across / 2, top - _ABOVE, 8, "above")
    return left, top, across, down


def _bar(
    canvas: Canvas, colors: Bytes, limits: Ends, left: float, top: float, height: float
) -> None:
    """Draw a colour bar in a black frame, with ticks and their numbers on its right; a constant is
    in the middle of its scale."""
    low, high = limits if limits[1] > limits[0] else (limits[0] - 0.5, limits[1] + 0.5)
    canvas.paste(colors[::-1, None], left, top, _BAR, height)
    canvas.frame(left, top, _BAR, height)
    numbers, factor = ticks(low, high)
    apart = height / max(1, len(numbers) - 1)
    for value, words in numbers[:: max(1, ceil(_LINE / apart))]:
        y = top + height * (high - value) / (high - low)
        canvas.fill((0, 0, 0), left + _BAR, y - 0.5 / DPI, _TICK, 1 / DPI)
        canvas.write(words, left + _BAR + _TICK + 0.02, y, 6, "right")
    if factor:
        canvas.write(factor, left + _BAR / 2, top - 0.04, 6, "above")


def ticks(low: float, high: float) -> tuple[list[tuple[float, str]], str]:
    """Round values between two ends with what is written at them, and what all of it is to be
    multiplied by or added to, if anything."""
    from matplotlib.ticker import AutoLocator, ScalarFormatter

    words: Any = ScalarFormatter(useMathText=False)
    with drawing:
        words.create_dummy_axis()
        values = [v for v in AutoLocator().tick_values(low, high) if low <= v <= high]
        words.axis.set_view_interval(low, high)
        return list(zip(values, words.format_ticks(values), strict=True)), words.get_offset()
