"""A figure of some maps beside the input, with colour bars.

matplotlib draws the letters and chooses the ticks; its axes, of which such a figure has 33, would
take twenty times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, sqrt
from typing import Any, BinaryIO, Literal

import numpy as np

from featviz.drawing import colormap, labels
from featviz.drawing.page import DPI, Canvas, drawing
from featviz.drawing.picture import GridPicture, write_png
from featviz.records import REDUCTIONS, Bytes, Floats
from featviz.text import printable

FIRST = 16
"""Maps in a figure, if not said otherwise."""

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
_FLAT = {labels.NONE: "", labels.ZERO: " (all zero)", labels.CONSTANT: " (constant)"}

Room = tuple[float, float, float, float]
"""Left, top, width and height of a picture, in inches."""


@dataclass(frozen=True)
class FigureGeometry:
    """Where things stand, in inches."""

    panels: int
    bars: Literal["own", "shared", "none"]
    """A colour bar beside each panel, one for all, or none."""

    @property
    def columns(self) -> int:
        """Panels in a row."""
        return ceil(sqrt(self.panels))

    @property
    def side(self) -> float:
        """Inches of a panel's picture; one alone is as large as the input."""
        return 2 * _CELL if self.panels == 1 else _CELL

    @property
    def cell(self) -> tuple[float, float]:
        """Inches of a panel across and down, with its title and bar."""
        bar = (self.bars == "own") * (_BAR + _TICKS)
        return self.side + _GAP + bar, self.side + _HEAD + _GAP

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height of the figure."""
        across, down = self.cell
        width = _FIRST + self.columns * across + _GAP
        width += (self.bars == "shared") * (_BAR + _TICKS)
        rows = -(-self.panels // self.columns)
        return width, _TITLE + max(rows * down, 2 * _CELL + _HEAD + _GAP)

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width of the figure."""
        width, height = self.inches
        return round(height * DPI), round(width * DPI)

    def corner(self, place: int) -> tuple[float, float]:
        """Left and top of a panel."""
        row, column = divmod(place, self.columns)
        return _FIRST + column * self.cell[0], _TITLE + _HEAD + row * self.cell[1]


@dataclass(frozen=True)
class Panel:
    """One map of a figure."""

    title: str
    pixels: Floats | Bytes
    """Values [h, w], or RGB [h, w, 3]."""
    limits: tuple[float, float] | None
    """Values drawn darkest and brightest; None for colours that stand for no value."""

    @property
    def ends(self) -> tuple[float, float]:
        """The values at the ends of its scale; a constant is in the middle of it."""
        low, high = self.limits or (0.0, 1.0)
        return (low, high) if high > low else (low - 0.5, high + 0.5)

    def painted(self, colors: Bytes) -> Bytes:
        """Its colours [h, w, 3]; values that are not finite are magenta."""
        if self.pixels.ndim == 3:
            return self.pixels.astype(np.uint8)
        low, high = self.ends
        share = (self.pixels.astype(np.float64) - low) / (high - low)
        holes = ~np.isfinite(share)
        painted: Bytes = colors[np.clip(np.where(holes, 0, share) * 256, 0, 255).astype(np.uint8)]
        painted[holes] = colormap.MAGENTA
        return painted


@dataclass(frozen=True)
class FigurePage:
    """All that a figure shows."""

    title: str
    shown: Bytes
    """What the model saw, uint8 [H, W, 1] or [H, W, 3]."""
    panels: Sequence[Panel]
    cmap: str
    shared: bool
    """Whether the panels have one scale, and one colour bar."""

    @property
    def geometry(self) -> FigureGeometry:
        """By the panels and their bars."""
        valued = self.panels[0].limits is not None
        bars: Literal["own", "shared"] = "shared" if self.shared else "own"
        return FigureGeometry(len(self.panels), bars if valued else "none")


def page(picture: GridPicture, cmap: str, title: str, shown: Bytes) -> FigurePage:
    """What the figure of a picture shows: its first tiles by value, beside the input.

    Args:
        cmap: a colormap, `auto` being none.
        shown: what the model saw, uint8 [H, W, C].
    """
    shared = picture.limits.shared
    if picture.strip:
        values = _values(picture, slice(None))[..., 0].T
        what = "numbers" if picture.constant is None else "constant maps, a value each"
        panels = [Panel(f"{len(picture.drawn)} {what}", values, shared)]
    else:
        side, titles = picture.slices[0], _titles(picture)
        panels = [
            Panel(title, *_beside(picture, slice(place * side, (place + 1) * side)))
            for place, title in enumerate(titles[:FIRST])
        ]
    cmap = "gray" if cmap in colormap.GREYS else cmap
    return FigurePage(title, shown, panels, cmap, shared is not None)


def _titles(picture: GridPicture) -> list[str]:
    if picture.reduce is not None:
        return [f"{REDUCTIONS[picture.reduce].words} of {len(picture.stats)} channels"]
    side, flat, counts = picture.slices[0], picture.flat, picture.counts
    return [
        f"channel {channel} {counts.get(place * side + side - 1, '')}".rstrip()
        + _FLAT[flat[place * side]]
        for place, channel in enumerate(picture.drawn)
    ]


def _beside(picture: GridPicture, part: slice) -> tuple[Floats | Bytes, tuple[float, float] | None]:
    """The slices of a channel side by side, with its limits; colours stand for no value."""
    limits = picture.limits
    place = part.start if limits.shared is None else 0
    low, high = np.nan_to_num([limits.low[place], limits.high[place]])
    ends = (float(low), float(high))
    if picture.levels:
        return np.concatenate(list(_values(picture, part)), axis=1), ends
    plain = picture.overlay is not None and picture.reduce != "pca"
    return np.concatenate(list(picture.tiles[part]), axis=1), ends if plain else None


def _values(picture: GridPicture, part: slice) -> Floats:
    """The numbers that levels stand for, NaN for those that are not finite."""
    limits, colors, tiles = picture.limits, picture.palette, picture.tiles[part]
    shared = limits.shared is not None
    low, high = (v if shared else v[part] for v in (limits.low, limits.high))
    span = (high - low)[:, None, None] / (colors.levels - 1)
    values = tiles * span + low[:, None, None]
    if colors.nonfinite is not None:
        values[tiles == colors.nonfinite] = np.nan
    floats: Floats = values.astype(np.float32)
    return floats


def write_figure(file: BinaryIO, sheet: FigurePage, text: Mapping[str, str]) -> None:
    """Write a figure as PNG to an open file.

    Args:
        text: keywords and texts for the file's text chunks.
    """
    at, colors = sheet.geometry, colormap.ramp(sheet.cmap)
    canvas = Canvas(at.pixels)
    title = printable(sheet.title)
    size = min(10.0, _POINTS * at.inches[0] / max(len(title), 1))
    canvas.write(title, at.inches[0] / 2, _TITLE / 2, size, "middle")
    shown = np.broadcast_to(sheet.shown, (*sheet.shown.shape[:2], 3))
    room = _fitted(shown, (_GAP, _TITLE + _HEAD), 2 * _CELL)
    _picture(canvas, "input", shown, room, smooth=_is_fine(shown, 2 * _CELL))
    rooms = [_fitted(p.pixels, at.corner(n), at.side) for n, p in enumerate(sheet.panels)]
    for panel, room in zip(sheet.panels, rooms, strict=True):
        fine = panel.pixels.ndim == 3 and _is_fine(panel.pixels, at.side)
        _picture(canvas, panel.title, panel.painted(colors), room, smooth=fine)
        if at.bars == "own":
            left, top, width, height = room
            _bar(canvas, colors, panel.ends, left + width + 0.05, top, height)
    if at.bars == "shared":
        right = max(left + width for left, _, width, _ in rooms)
        top, bottom = rooms[0][1], rooms[-1][1] + rooms[-1][3]
        _bar(canvas, colors, sheet.panels[-1].ends, right + 0.1, top, bottom - top)
    write_png(file, at.pixels, [canvas.rows()], text=text)


def _is_fine(pixels: Floats | Bytes, side: float) -> bool:
    """Whether colours [h, w, 3] of a picture need not be seen as squares in a cell."""
    return bool(max(pixels.shape) * 3 > side * DPI)


def _fitted(pixels: Floats | Bytes, corner: tuple[float, float], side: float) -> Room:
    """The room of a picture [h, w, ...] in the middle of a square cell."""
    height, width = pixels.shape[:2]
    long = max(height, width)
    share = [side / long * n for n in (height, width)]
    down, across = share if long < _STRIP * min(height, width) else (side, side)
    return corner[0] + (side - across) / 2, corner[1] + (side - down) / 2, across, down


def _picture(canvas: Canvas, title: str, pixels: Bytes, room: Room, smooth: bool = False) -> None:
    """Draw a picture, and a title above it.

    Args:
        smooth: do not show its pixels as squares.
    """
    left, top, width, _ = room
    canvas.paste(pixels, *room, smooth)
    canvas.write(title, left + width / 2, top - _ABOVE, 8, "above")


def _bar(
    canvas: Canvas,
    colors: Bytes,
    ends: tuple[float, float],
    left: float,
    top: float,
    height: float,
) -> None:
    """Draw a colour bar in a black frame, with ticks and their numbers on its right."""
    low, high = ends
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
    locator, words = _tick_rules()
    with drawing:
        values = [v for v in locator.tick_values(low, high) if low <= v <= high]
        words.axis.set_view_interval(low, high)
        return list(zip(values, words.format_ticks(values), strict=True)), words.get_offset()


@cache
def _tick_rules() -> tuple[Any, Any]:
    from matplotlib.ticker import AutoLocator, ScalarFormatter

    words = ScalarFormatter(useMathText=False)
    words.create_dummy_axis()
    return AutoLocator(), words
