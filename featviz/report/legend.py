"""What the colours of maps mean, by how they were drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from featviz.drawing import colormap, normalize
from featviz.records import REDUCTIONS
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
    for cmap, words in {
        (colormap.resolved(named, row.kind, row.overlay is not None), _words(row)): None
        for row in captures
    }:
        for level, meaning in words:
            color = level if isinstance(level, str) else _color(cmap, level)
            if color is not None:
                entries[Entry(color, meaning)] = None
    return [*entries, Entry(_hex(colormap.MAGENTA), "NaN or infinite")]


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
