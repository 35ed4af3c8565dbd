"""What the colours of maps mean, by how they were drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from featviz.drawing import colormap, normalize
from featviz.records import REDUCTIONS
from featviz.report.words import is_saliency, number
from featviz.rundir.schema import CaptureRow


@dataclass(frozen=True)
class Entry:
    """A colour and its meaning."""

    color: str
    """`#rrggbb`."""
    words: str


def legend(options: Mapping[str, Any], captures: Iterable[CaptureRow]) -> list[Entry]:
    """The entries that hold for these pictures.

    Args:
        options: those of their run.
    """
    entries: dict[Entry, None] = {}
    for cmap, words in {(_colormap(row, options), _words(row, options)): None for row in captures}:
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
    cmap = _colormap(row, options)
    if row.reduce in REDUCTIONS and REDUCTIONS[row.reduce].colors:
        return Key("", "", "", (), False)
    colors = scale(cmap)
    grey = cmap in colormap.GREYS and row.overlay is None
    if row.range is None:
        return Key("min", "max", "of each map" if len(row.drawn) > 1 else "", colors, grey)
    low, high = _ends(row, *row.range)
    if row.layout == "rgb":  # kernels of three inputs
        return Key("", "", f"red, green and blue, each from {low} to {high}", (), False)
    return Key(low, high, _shared(row), colors, grey)


def _colormap(row: CaptureRow, options: Mapping[str, Any]) -> str:
    """The colormap of a picture; the saliency of an image has no sign, and is no gradient there."""
    named = str(options.get("cmap") or "grey")
    kind = "output" if is_saliency(row) else row.kind
    return colormap.resolved(named, kind, row.overlay is not None, row.reduce)


def _ends(row: CaptureRow, low: float | None, high: float | None) -> tuple[str, str]:
    """The values drawn darkest and brightest; with a sign where other values are drawn alike."""
    mode = normalize.MODES.get(row.normalize)
    if mode is None or not mode.clips:
        return number(low), number(high)
    if row.reduce is not None or row.layout == "mean":  # the row's extremes are not the tiles' own
        below = above = bool(mode.takes)
    else:
        below = None in (row.min, low) or row.min < low  # type: ignore[operator]
        above = None in (row.max, high) or row.max > high  # type: ignore[operator]
    return "≤ " * below + number(low), "≥ " * above + number(high)


def _shared(row: CaptureRow) -> str:
    """What has the one scale."""
    if row.maps == 1 or row.reduce is not None:
        return ""
    if row.constant is not None:
        return "a stripe for each channel, whose map is constant; one scale for all"
    if row.kind == "kernel":
        return "one scale for all kernels"
    what = "values" if row.layout == "vector" else "maps"
    return f"one scale for all {what}" + " of this image" * (not _is_fixed(row))


def _is_fixed(row: CaptureRow) -> bool:
    return row.normalize in normalize.MODES and normalize.MODES[row.normalize].fixed


def strip_keys(rows: Iterable[CaptureRow], options: Mapping[str, Any]) -> list[Key]:
    """What the colours mean in strips of many layers, each once.

    Args:
        options: those of their run.
    """
    keys = (_strip_key(row, key(row, options)) for row in rows)
    return list(dict.fromkeys(key for key in keys if key.colors))


def _strip_key(row: CaptureRow, own: Key) -> Key:
    if row.range is None:
        return replace(own, low="lowest", high="highest", words="value of each map by itself")
    if _is_fixed(row):
        return own
    if _has_zero_in_the_middle(row):
        return replace(own, low="−", high="+", words="0 in the middle; one scale for each layer")
    return replace(own, low="lowest", high="highest", words="value of each layer")


def _has_zero_in_the_middle(row: CaptureRow) -> bool:
    low, high = row.range or (None, None)
    return low is not None and high is not None and low == -high


def lowest(row: CaptureRow, low: float) -> str:
    """Where the darkest values of a strip lie, if a reader may take them for zero and they are not:
    `below 0`, `above 0`; else empty.

    Args:
        low: the layer's smallest value.
    """
    if _is_fixed(row) or _has_zero_in_the_middle(row) or low == 0 or not math.isfinite(low):
        return ""
    return "below 0" if low < 0 else "above 0"


@lru_cache
def scale(cmap: str) -> tuple[str, ...]:
    """Colours of a colormap, `#rrggbb`, from the darkest level to the brightest."""
    return tuple(color for level in _STOPS if (color := _color(cmap, level)) is not None)


def _words(row: CaptureRow, options: Mapping[str, Any]) -> tuple[tuple[int | str, str], ...]:
    """Grey levels 0..255, or colours, and what they stand for. Only maps by themselves are marked:
    no overlay, no tile of all channels, and nothing under `--no-marks`."""
    if row.reduce in REDUCTIONS and (colors := REDUCTIONS[row.reduce].colors):
        return colors
    mode = normalize.MODES.get(row.normalize)
    if mode is None:
        return ()
    if mode.over is not None and row.overlay is not None:
        return mode.over
    return mode.legend if mode.shared or options.get("marks") is not False else ()


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
