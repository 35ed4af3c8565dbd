"""What the colours of maps mean, by how they were drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from featviz.drawing import colormap, normalize
from featviz.records import REDUCTIONS
from featviz.report.words import number
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import CaptureRow


@dataclass(frozen=True)
class Entry:
    """A colour and its meaning."""

    color: str
    """`#rrggbb`."""
    words: str


def legend(run: ReadRun, captures: Iterable[CaptureRow]) -> list[Entry]:
    """The entries that hold for these pictures."""
    options = run.record.get("options") or {}
    named = str(options.get("cmap") or "grey")
    entries: dict[Entry, None] = {}
    for cmap, words in {(_cmap(named, row), _words(row)): None for row in captures}:
        for level, meaning in words:
            color = level if isinstance(level, str) else _color(cmap, level)
            if color is not None:
                entries[Entry(color, meaning)] = None
    return [*entries, Entry(_hex(colormap.MAGENTA), "NaN or infinite")]


@dataclass(frozen=True)
class Key:
    """What dark and bright are in one picture."""

    low: str
    high: str
    words: str
    """Which maps the numbers hold for."""
    colors: tuple[str, ...]
    """`#rrggbb`, from the darkest level to the brightest; none where the colours are no levels."""
    grey: bool
    """Whether the picture is grey, and may be shown in other colours."""


_STOPS = (0, 51, 102, 153, 204, 255)
"""Levels whose colours a key has."""


def key(row: CaptureRow, options: Mapping[str, Any]) -> Key:
    """The colours of a picture.

    Args:
        options: those of its run.
    """
    named = str(options.get("cmap") or "grey")
    cmap = _cmap(named, row)
    if row.reduce in REDUCTIONS and REDUCTIONS[row.reduce].colors:
        return Key("", "", "", (), False)
    colors = scale(cmap)
    grey = cmap in colormap.GREYS and row.overlay is None
    if row.range is None:
        return Key("min", "max", "of each map" if len(row.drawn) > 1 else "", colors, grey)
    low, high = map(number, row.range)
    if row.layout == "rgb":  # kernels of three inputs
        return Key("", "", f"red, green and blue, each from {low} to {high}", (), False)
    tiles = "kernels" if row.kind == "kernel" else "maps"
    return Key(low, high, f"one scale for all {tiles}" if row.maps > 1 else "", colors, grey)


def _cmap(named: str, row: CaptureRow) -> str:
    return colormap.resolved(named, row.kind, row.overlay is not None, row.reduce)


@lru_cache
def scale(cmap: str) -> tuple[str, ...]:
    """Colours of a colormap, `#rrggbb`, from the darkest level to the brightest."""
    return tuple(color for level in _STOPS if (color := _color(cmap, level)) is not None)


def _words(row: CaptureRow) -> tuple[tuple[int | str, str], ...]:
    """Grey levels 0..255, or colours, and what they stand for. Only maps by themselves are marked:
    no overlay, and no tile of all channels."""
    if row.reduce in REDUCTIONS and (colors := REDUCTIONS[row.reduce].colors):
        return colors
    mode = normalize.MODES.get(row.normalize)
    if mode is None:
        return ()
    return mode.over if mode.over is not None and row.overlay is not None else mode.legend


def _color(cmap: str, level: int) -> str | None:
    """The colour of a level; None for a colormap that matplotlib here does not have."""
    if cmap in colormap.GREYS:
        return _hex((level, level, level))
    try:
        palette = colormap.colored(cmap, 0.0)
    except KeyError:
        return None
    at = 3 * round(level * (palette.levels - 1) / 255)
    return _hex(tuple((palette.colors or b"")[at : at + 3]))


def _hex(rgb: tuple[int, ...]) -> str:
    return "#" + "".join(f"{value:02x}" for value in rgb)
