"""White paper in inches for pictures, lines and letters, and what is drawn on it: figures of some
maps beside the input, with colour bars, and the page of `look`.

matplotlib draws the letters and chooses the ticks of colour bars; its axes, of which a figure has
33, would take twenty times as long.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from threading import Lock
from typing import Any, BinaryIO, Literal

import numpy as np
from PIL import Image

from featviz.drawing import colormap, grid
from featviz.drawing.picture import MAX_PIXELS, GridPicture, write_png
from featviz.errors import UsageError
from featviz.models.requirements import require_matplotlib
from featviz.records import REDUCTIONS, Bytes
from featviz.text import by, cut, percent, printable

DPI = 100

Anchor = Literal["middle", "above", "left", "right"]
"""Where a text lies by its point: around it, centred above it, or to its left or right."""
_LONGEST = 300
"""Letters of a text that are measured."""
_fonts = Lock()
"""matplotlib's font cache is not safe in several threads."""


@dataclass(frozen=True)
class Panel:
    """A map of a figure or of a page."""

    title: str
    pixels: Bytes
    """uint8 [h, w, 3]."""
    limits: tuple[float, float] | None = None
    """The values drawn darkest and brightest, for a colour bar; None for colours of no value."""
    note: str = ""


class Canvas:
    """Pixels that places in inches from the upper left are rounded to."""

    def __init__(self, size: tuple[int, int]) -> None:
        """Take white paper of a height and width in pixels."""
        require_matplotlib()
        from matplotlib.backends import backend_agg

        agg: Any = backend_agg
        self._renderer = agg.RendererAgg(size[1], size[0], DPI)
        self._pixels: Bytes = np.asarray(self._renderer.buffer_rgba())
        self._pixels[:] = 255

    def rows(self) -> Bytes:
        """The pixels, uint8 [height, 3 · width]."""
        return self._pixels[..., :3].reshape(len(self._pixels), -1)

    def spot(self, left: float, top: float, width: float, height: float) -> Bytes:
        """The pixels [h, w, 3] of a rectangle, at least one, to be painted."""
        x, y = round(left * DPI), round(top * DPI)
        right, bottom = round((left + width) * DPI), round((top + height) * DPI)
        return self._pixels[y : max(y + 1, bottom), x : max(x + 1, right), :3]

    def paste(self, pixels: Bytes, *rectangle: float, smooth: bool = False) -> None:
        """Draw a picture [h, w, 3] over a rectangle, its pixels as they are unless `smooth`."""
        spot = self.spot(*rectangle)
        how = Image.Resampling.HAMMING if smooth else Image.Resampling.NEAREST
        image = Image.fromarray(np.ascontiguousarray(pixels))
        spot[:] = np.asarray(image.resize(spot.shape[1::-1], how))

    def frame(self, *rectangle: float) -> None:
        """Draw the black edge of a rectangle, inside it."""
        spot = self.spot(*rectangle)
        spot[[0, -1]] = spot[:, [0, -1]] = 0

    def write(
        self,
        text: str,
        x: float,
        y: float,
        points: float,
        anchor: Anchor,
        ink: tuple[int, ...] = (0, 0, 0),
        bold: bool = False,
        room: float | None = None,
    ) -> float:
        """Write a line of text at a point, and return how wide it is; of `room` inches, the middle
        of longer words is left out."""
        if room is not None:
            text = words = cut(printable(text), _LONGEST)
            if self.width(words, points, bold) > room:
                lengths = range(1, len(words))
                fits = bisect(lengths, room, key=lambda n: self.width(cut(words, n), points, bold))
                text = cut(words, max(1, fits))
        font = _font(points, bold)
        with _fonts:
            width, _, _ = self._renderer.get_text_width_height_descent(text, font, False)
            _, height, descent = self._renderer.get_text_width_height_descent("lp", font, False)
            before = {"left": width, "right": 0}.get(anchor, width / 2)
            down = 0 if anchor == "above" else height / 2 - descent
            pen = self._renderer.new_gc()
            pen.set_foreground(tuple(part / 255 for part in ink))
            self._renderer.draw_text(pen, x * DPI - before, y * DPI + down, text, font, 0)
        return float(width / DPI)

    def width(self, text: str, points: float, bold: bool = False) -> float:
        """Inches that a line of text takes."""
        font = _font(points, bold)
        with _fonts:
            return float(self._renderer.get_text_width_height_descent(text, font, False)[0] / DPI)


def _font(points: float, bold: bool) -> Any:
    require_matplotlib()
    from matplotlib.font_manager import FontProperties

    warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
    return FontProperties(size=points, weight="bold" if bold else "normal")


# A figure: maps beside the input, with colour bars

FIRST = 16
_CELL = 1.7
"""Inches of a panel's picture; the input has twice as much."""
_APART, _HEAD, _BAR, _TICKS = 0.15, 0.28, 0.08, 0.5
"""Inches between panels, above one for its title, of a colour bar, and of the numbers beside it."""
_ABOVE, _TICK, _LINE = 0.08, 0.03, 0.1
"""Inches between a picture and its title, of a tick's length, and of the height of its number."""
_FIRST = 2 * _CELL + 2 * _APART
_TITLE, _POINTS = 0.45, 115
"""Inches of the title, which with n letters fits a line of i inches at 115 · i / n points."""
_LONG = 8
"""A panel that is so many times as long as it is wide is stretched to fill its cell."""
_MARKED = {grid.NONE: "", grid.ZERO: " (all zero)", grid.CONSTANT: " (constant)"}


def figure_panels(picture: GridPicture, cmap: str) -> list[Panel]:
    """The first maps of a picture, a channel's slices side by side, in the colours of a figure."""
    colors, side = colormap.ramp(cmap), picture.slices[0]
    if picture.strip:
        what = "numbers" if picture.constant is None else "constant maps, a value each"
        titles, side = [f"{len(picture.drawn)} {what}"], picture.plan.maps
    elif picture.reduce is not None:
        titles = [f"{REDUCTIONS[picture.reduce].title} of {len(picture.stats)} channels"]
    else:
        titles, marks = [], picture.marks
        for place, channel in enumerate(picture.drawn[:FIRST]):
            group = picture.groups.get(channel)
            shared_by = f" ×{len(group)}" if group else ""
            titles.append(f"channel {channel}{shared_by}{_MARKED[int(marks[place * side])]}")
    panels, palette = [], picture.palette
    for place, words in enumerate(titles):
        at = place * side if len(picture.limits.low) > 1 else 0
        low, high = np.nan_to_num([picture.limits.low[at], picture.limits.high[at]])
        tiles = picture.tiles[place * side : (place + 1) * side]
        limits = None if picture.reduce == "pca" else (float(low), float(high))
        if tiles.ndim == 3:  # levels; a constant has the colour in the middle of its scale
            shades = tiles.astype(np.int64) * 256 // (palette.levels - 1) if high > low else 128
            painted = colors[np.broadcast_to(np.minimum(shades, 255), tiles.shape)]
            if palette.nonfinite is not None:
                painted[tiles == palette.nonfinite] = colormap.MAGENTA
            tiles = painted
        panels.append(Panel(words, np.concatenate(list(tiles), axis=1), limits))
    return panels


def figure_geometry(panels: int) -> tuple[tuple[int, int], float, list[tuple[float, float]]]:
    """Of a figure of so many panels: height and width in pixels; inches of the longer side of a
    picture (one alone is large), and left and top of each panel."""
    columns, side = ceil(sqrt(panels)), 2 * _CELL if panels == 1 else _CELL
    across, down = side + _APART + _BAR + _TICKS, side + _HEAD + _APART
    height = _TITLE + max(-(-panels // columns) * down, 2 * _CELL + _HEAD + _APART)
    size = round(height * DPI), round((_FIRST + columns * across + _APART) * DPI)
    grid = (divmod(place, columns) for place in range(panels))
    places = [(_FIRST + column * across, _TITLE + _HEAD + row * down) for row, column in grid]
    return size, side, places


def write_figure(
    file: BinaryIO,
    title: str,
    shown: Bytes,
    panels: Sequence[Panel],
    cmap: str,
    text: Mapping[str, str],
) -> None:
    """Write a figure as PNG to an open file; `shown` is what the model saw, uint8 [H, W, 1] or
    [H, W, 3], and `text` what the file says of itself."""
    size, side, corners = figure_geometry(len(panels))
    canvas, colors, width = Canvas(size), colormap.ramp(cmap), size[1] / DPI
    title = printable(title)
    points = min(10.0, _POINTS * width / max(len(title), 1))
    canvas.write(title, width / 2, _TITLE / 2, points, "middle")
    seen = Panel("input", np.broadcast_to(shown, (*shown.shape[:2], 3)))
    _draw_panel(canvas, seen, _APART, _TITLE + _HEAD, 2 * _CELL, colors)
    for panel, corner in zip(panels, corners, strict=True):
        _draw_panel(canvas, panel, *corner, side, colors)
    write_png(file, size, [canvas.rows()], text=text)


def _draw_panel(
    canvas: Canvas, panel: Panel, left: float, top: float, side: float, colors: Bytes
) -> None:
    """Draw a picture in the middle of a square cell, its title above it, and on its right a colour
    bar with ticks; a constant is in the middle of its scale. Pixels are squares where they are
    large enough to be seen."""
    long, short = max(panel.pixels.shape[:2]), min(panel.pixels.shape[:2])
    height, width = (side * pixels / long for pixels in panel.pixels.shape[:2])
    if long >= _LONG * short:
        height = width = side
    left, top = left + (side - width) / 2, top + (side - height) / 2
    canvas.paste(panel.pixels, left, top, width, height, smooth=long * 3 > side * DPI)
    canvas.write(panel.title, left + width / 2, top - _ABOVE, 8, "above")
    if panel.limits is None:
        return
    (low, high), left = panel.limits, left + width + 0.05
    if not high > low:
        low, high = low - 0.5, low + 0.5
    canvas.paste(colors[::-1, None], left, top, _BAR, height)
    canvas.frame(left, top, _BAR, height)
    numbers, factor = ticks(low, high)
    apart = height / max(1, len(numbers) - 1)
    for value, words in numbers[:: max(1, ceil(_LINE / apart))]:
        y = top + height * (high - value) / (high - low)
        canvas.spot(left + _BAR, y - 0.5 / DPI, _TICK, 1 / DPI)[:] = 0
        canvas.write(words, left + _BAR + _TICK + 0.02, y, 6, "right")
    if factor:
        canvas.write(factor, left + _BAR / 2, top - 0.04, 6, "above")


def ticks(low: float, high: float) -> tuple[list[tuple[float, str]], str]:
    """Round values between two ends with what is written at them, and what all of it is to be
    multiplied by or added to, if anything."""
    require_matplotlib()
    from matplotlib.ticker import AutoLocator, ScalarFormatter

    words: Any = ScalarFormatter(useMathText=False)
    with _fonts:
        words.create_dummy_axis()
        values = [v for v in AutoLocator().tick_values(low, high) if low <= v <= high]
        words.axis.set_view_interval(low, high)
        return list(zip(values, words.format_ticks(values), strict=True)), words.get_offset()


# The page of `look`

_INK, _SOFT, _FAINT, _RULE = (27, 33, 41), (92, 100, 112), (139, 146, 158), (226, 229, 234)

_MARGIN, _NAMES, _TILE, _GAP = 0.3, 1.8, 1.2, 0.08
"""Inches around the page, of the column of names, of a square tile's side, between tiles."""
_NUMBERS, _BETWEEN = 0.2, 0.14
"""Inches below a tile for its numbers, and between two rows."""
_CAPTION, _KEY, _LEADING = 0.25, 0.4, 0.18
"""Inches of a caption, of the key below, and from a line of text to the next."""
_PICTURE, _ALONE, _WIDEST, _NARROWEST = 2.2, 3.0, 4.2, 8.0
"""Inches of the height of the input's picture, beside a prediction and without one; of its width;
of the page's, so that the prediction has room."""
_WIDTHS, _HEIGHTS, _STRIP = (0.85, 1.55), (0.3, 1.55), 0.3
"""Inches of the narrowest and the widest tile, the lowest and the highest one (maps of other shapes
lie in such a tile with white around them), and of the height of a strip of numbers."""
_LETTERS, _LINES = 20, 3
_LONGEST_SIDE = 2**16 - 1
"""Pixels of the longer side of a page; matplotlib writes on none that is longer."""

Row = tuple[str, Sequence[str], Sequence[Panel], bool]
"""One layer: its name, what is said of it, its tiles, and whether its one tile is a strip of
numbers, as wide as the row."""


def draw_page(
    title: str,
    subtitle: str,
    pictures: Sequence[tuple[str, Bytes]],
    bars: Sequence[tuple[str, float]],
    remarks: Sequence[str],
    rows: Sequence[Row],
    key: str,
    cmap: str,
) -> Bytes:
    """The page, uint8 [H, W, 3]; UsageError where it is too large. Its tiles have one size, by the
    number of maps and the shape of most of the first ones.

    Args:
        pictures: the input, and the output where it is a picture: caption and uint8 [h, w, 3].
        bars: the likeliest classes with their shares, 0..1.
        key: what the tiles and the numbers below them are.
    """
    sides = [tiles[0].pixels.shape for _, _, tiles, strip in rows if not strip]
    aspect = float(np.median([width / height for height, width, _ in sides] or [1.0]))
    across = min(max(_TILE * sqrt(aspect), _WIDTHS[0]), _WIDTHS[1])
    down = min(max(across / aspect, _HEIGHTS[0]), _HEIGHTS[1])
    most = max(len(tiles) for _, _, tiles, _ in rows)
    width = max(2 * _MARGIN + _NAMES + most * (across + _GAP) - _GAP, _NARROWEST)
    share = 0.45 if bars else 0.65  # a prediction takes more room than remarks
    room = min(_WIDEST, (width - 2 * _MARGIN) * share / len(pictures))
    heights = [_fitted(pixels, room, _ALONE)[1] for _, pixels in pictures]
    tallest = _PICTURE if bars else max(len(remarks) * _LEADING - _CAPTION, *heights)
    names = [_in_lines(name) for name, *_ in rows]
    words = [(len(name) + len(row[1])) * _LEADING for name, row in zip(names, rows, strict=True)]
    tall = max([down, *(high for high, row in zip(words, rows, strict=True) if not row[3])])
    top, tops = _MARGIN + _TITLE + _CAPTION + tallest + 2 * _BETWEEN, []
    for high, row in zip(words, rows, strict=True):
        tops.append(top)
        top += (max(_STRIP, high) if row[3] else tall) + _NUMBERS + _BETWEEN
    foot = top + _KEY + _MARGIN / 2
    size = round(foot * DPI), round(width * DPI)
    if max(size) > _LONGEST_SIDE or size[0] * size[1] > MAX_PIXELS:
        raise UsageError(
            f"the picture would have {by(size[::-1])} pixels, which is too many",
            "--maps shows fewer of each layer, and --layers takes fewer",
        )
    canvas, colors, end = Canvas(size), colormap.ramp(cmap), width - _MARGIN
    written = canvas.write(title, _MARGIN, _MARGIN + 0.1, 15, "right", _INK, True, width * 0.6)
    left, top = _MARGIN + written + 0.2, _MARGIN + _TITLE
    canvas.write(subtitle, left, _MARGIN + 0.12, 10, "right", _SOFT, room=end - left)
    left = _MARGIN
    for caption, pixels in pictures:
        wide, high = _fitted(pixels, room, tallest)
        canvas.write(caption, left, top + 0.08, 9, "right", _SOFT)
        _paste(canvas, pixels, left, top + _CAPTION, wide, high)
        left += wide + 0.3
    left = max(left, _MARGIN + _NAMES)
    if bars:
        accent = colors[len(colors) * 2 // 5]  # seen on white
        _draw_prediction(canvas, bars, left, top, end, accent)
    for place, line in enumerate(() if bars else remarks):
        y = top + 0.08 + place * _LEADING
        canvas.write(line, left, y, 9, "right", _SOFT, room=end - left)
    canvas.spot(_MARGIN, top + _CAPTION + tallest + _BETWEEN, end - _MARGIN, 1 / DPI)[:] = _RULE
    for name, (_, lines, tiles, strip), top in zip(names, rows, tops, strict=True):
        of_tile = (end - _MARGIN - _NAMES, _STRIP) if strip else (across, down)
        _draw_row(canvas, name, lines, tiles, strip, top, *of_tile)
    y, left = foot - _MARGIN, _MARGIN
    left += canvas.write("min", left, y, 8, "right", _SOFT) + 0.08
    canvas.paste(colors[None], left, y - 0.06, 1.2, 0.12)
    left += 1.28
    left += canvas.write("max, scaled per map", left, y, 8, "right", _SOFT) + 0.4
    canvas.write(key, end, y, 8, "left", _SOFT, room=end - left)
    return canvas.rows().reshape(*size, 3)


def _in_lines(name: str) -> list[str]:
    """A layer's name, broken behind dots and underscores, a very long one shortened."""
    lines = [""]
    for part in re.findall(r"[^./_]*[./_]|[^./_]+", printable(name)):
        if lines[-1] and len(lines[-1] + part) > _LETTERS:
            lines.append("")
        lines[-1] += part
    return [lines[0], "…", lines[-1]] if len(lines) > _LINES else lines


def _draw_prediction(
    canvas: Canvas,
    bars: Sequence[tuple[str, float]],
    left: float,
    top: float,
    end: float,
    accent: Bytes,
) -> None:
    """A bar for each class, whose full length is a share of 1."""
    canvas.write("prediction", left, top + 0.08, 9, "right", _SOFT)
    names = [printable(name) for name, _ in bars]
    widest = max(canvas.width(name, 10, bold=True) for name in names)
    column = min(widest, (end - left) * 0.45) + 0.15
    bar, step = end - left - column - 0.7, _PICTURE / len(bars)
    for place, (name, (_, share)) in enumerate(zip(names, bars, strict=True)):
        y, first = top + _CAPTION + step * (place + 0.5), place == 0
        ink = _INK if first else _SOFT
        canvas.write(name, left, y, 10, "right", ink, first, column - 0.1)
        canvas.spot(left + column, y - 0.09, bar, 0.18)[:] = _RULE
        if share * bar * DPI >= 1:
            canvas.spot(left + column, y - 0.09, bar * share, 0.18)[:] = accent
        canvas.write(percent(share), left + column + bar + 0.08, y, 10, "right", _INK, first)


def _draw_row(
    canvas: Canvas,
    name: Sequence[str],
    lines: Sequence[str],
    tiles: Sequence[Panel],
    strip: bool,
    top: float,
    across: float,
    down: float,
) -> None:
    words = [(line, 10.0, _INK) for line in name] + [(line, 8.5, _SOFT) for line in lines]
    y = max(top, top + down / 2 - len(words) * _LEADING / 2) + _LEADING / 2
    for line, points, ink in words:
        canvas.write(line, _MARGIN, y, points, "right", ink, ink == _INK, _NAMES - 0.1)
        y += _LEADING
    left, below = _MARGIN + _NAMES, top + down + 0.09
    for tile in tiles:
        if strip:
            smooth = tile.pixels.shape[1] > across * DPI
            canvas.paste(tile.pixels, left, top, across, down, smooth=smooth)
        else:
            width, height = _fitted(tile.pixels, across, down)
            x, y = left + (across - width) / 2, top + (down - height) / 2
            _paste(canvas, tile.pixels, x, y, width, height)
        title = canvas.write(tile.title, left, below, 8, "right", _INK, bold=True)
        if canvas.width(tile.note, 7) <= across - title - 0.08:
            canvas.write(tile.note, left + across, below, 7, "left", _FAINT)
        left += across + _GAP


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
