"""A titled figure of some maps beside the input, with colour bars, by matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from threading import Lock
from typing import Any, BinaryIO, Literal

import numpy as np

from featviz.drawing import colormap, labels
from featviz.drawing.picture import GridPicture
from featviz.records import REDUCTIONS, Bytes, Floats

FIRST = 16
"""Maps in a figure, if not said otherwise."""

DPI = 100
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
_MAGENTA = (1.0, 0.0, 1.0)

_drawing = Lock()
"""matplotlib's font cache and mathtext are not safe in several threads."""


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
    def rows(self) -> int:
        """Rows of panels."""
        return -(-self.panels // self.columns)

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
        return width, _TITLE + max(self.rows * down, 2 * _CELL + _HEAD + _GAP)

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


def shown_first(first: int | None, maps: int) -> int:
    """How many of a picture's maps its figure shows."""
    return min(first or FIRST, maps)


def page(
    picture: GridPicture, cmap: str, first: int | None, title: str, shown: Bytes
) -> FigurePage:
    """What the figure of a picture shows: its first tiles by value, beside the input.

    Args:
        cmap: a colormap, `auto` being none.
        first: maps that are shown; None takes FIRST.
        shown: what the model saw, uint8 [H, W, C].
    """
    shared = picture.limits.shared
    if picture.strip:
        values = _values(picture, slice(None))[..., 0].T
        panels = [Panel(f"{len(picture.drawn)} numbers", values, shared)]
    else:
        titles = _titles(picture)
        side = picture.slices[0]
        panels = [
            Panel(title, *_beside(picture, slice(place * side, (place + 1) * side)))
            for place, title in enumerate(titles[: shown_first(first, len(titles))])
        ]
    cmap = "gray" if cmap in colormap.GREYS else cmap
    return FigurePage(title, shown, panels, cmap, shared is not None)


_FLAT = {labels.ZERO: " (all zero)", labels.CONSTANT: " (constant)"}


def _titles(picture: GridPicture) -> list[str]:
    if picture.reduce is not None:
        return [f"{REDUCTIONS[picture.reduce].words} of {len(picture.stats)} channels"]
    side, marks, counts = picture.slices[0], picture.marks, picture.counts
    return [
        f"channel {channel} {counts.get(place * side + side - 1, '')}".rstrip()
        + _FLAT.get(marks.get(place * side, ""), "")
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
    """Write a figure as PNG to an open file, without pyplot and its global state.

    Args:
        text: keywords and texts for the file's text chunks.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with _drawing:
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        height, width = sheet.geometry.pixels
        # one version of matplotlib rounds the size and another cuts it off: the same for both
        size = ((width + 0.01) / DPI, (height + 0.01) / DPI)
        figure = Figure(figsize=size, dpi=DPI)
        canvas = FigureCanvasAgg(figure)
        _lay_out(figure, sheet)
        canvas.print_png(file, metadata=dict(text))  # type: ignore[no-untyped-call]


def _lay_out(figure: Any, sheet: FigurePage) -> None:
    from matplotlib import colormaps

    at = sheet.geometry
    cmap = colormaps[sheet.cmap].with_extremes(bad=_MAGENTA)
    size = min(10.0, _POINTS * at.inches[0] / max(len(sheet.title), 1))
    where = {"ha": "center", "va": "center", "y": 1 - _TITLE / 2 / at.inches[1]}
    figure.text(x=0.5, s=sheet.title, fontsize=size, parse_math=False, **where)
    axes = _axes(figure, at, _GAP, _TITLE + _HEAD, 2 * _CELL, 2 * _CELL)
    grey = sheet.shown.shape[2] == 1
    axes.imshow(sheet.shown[..., 0] if grey else sheet.shown, cmap="gray", vmin=0, vmax=255)
    axes.set_title("input", fontsize=8)
    for place, panel in enumerate(sheet.panels):
        left, top = at.corner(place)
        image = _draw(_axes(figure, at, left, top, at.side, at.side), panel, cmap)
        if at.bars == "own":
            _bar(figure, image, _axes(figure, at, left + at.side + 0.05, top, _BAR, at.side))
    if at.bars == "shared":
        left, height = at.corner(at.columns - 1)[0] + at.side + 0.1, at.rows * at.cell[1] - _HEAD
        _bar(figure, image, _axes(figure, at, left, _TITLE + _HEAD, _BAR, height - _GAP))


def _draw(axes: Any, panel: Panel, cmap: Any) -> Any:
    """A panel's picture, by which its colour bar goes."""
    low, high = panel.limits or (0.0, 1.0)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    height, width = panel.pixels.shape[:2]
    aspect = "equal" if max(height, width) < _STRIP * min(height, width) else "auto"
    axes.set_title(panel.title, fontsize=8, parse_math=False)
    return axes.imshow(
        panel.pixels, cmap=cmap, vmin=low, vmax=high, interpolation="nearest", aspect=aspect
    )


def _bar(figure: Any, image: Any, axes: Any) -> None:
    figure.colorbar(image, cax=axes)
    axes.set_axis_on()
    axes.tick_params(labelsize=6, length=2, pad=1)


def _axes(
    figure: Any, at: FigureGeometry, left: float, top: float, width: float, height: float
) -> Any:
    """Axes without ticks at a place in inches from the upper left."""
    across, down = at.inches
    axes = figure.add_axes(
        (left / across, 1 - (top + height) / down, width / across, height / down)
    )
    axes.set_axis_off()
    return axes
