"""What the colours of maps mean, by how they were drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from featviz.palette import GREYS, MAGENTA, colored
from featviz.records import Capture
from featviz.report.reading import Run

_AUTO = {"grad": "coolwarm", "grad-input": "coolwarm"}
"""Colormaps of `--cmap auto`, by kind; the others are grey."""

_WORDS: dict[str, tuple[tuple[int, str], ...]] = {
    "map": (
        (0, "all of a map, crossed out: zero everywhere"),
        (128, "all of a map, with a stroke: constant"),
    ),
    "layer": ((0, "one scale for all maps: the smallest value"), (255, "the largest")),
    "none": ((0, "0 or less"), (255, "1 or more")),
    "range": ((0, "the lower limit or less"), (255, "the upper limit or more")),
    "symmetric": ((0, "most negative"), (128, "zero"), (255, "most positive")),
    "percentile": ((0, "the lower percentile or less"), (255, "the upper percentile or more")),
}
"""By the mode of the scale: grey levels 0..255, and what they stand for."""


@dataclass(frozen=True)
class Entry:
    """A colour and its meaning."""

    color: str
    """`#rrggbb`."""
    words: str


def legend(run: Run, captures: Iterable[Capture]) -> list[Entry]:
    """The entries that hold for these pictures."""
    own = str(run.record.get("options", {}).get("cmap", "grey"))
    used = {(_cmap(own, c.kind), c.normalize): None for c in captures}
    entries = {
        Entry(_color(cmap, level), meaning): None
        for cmap, mode in used
        for level, meaning in _WORDS.get(mode, ())
    }
    return [*entries, Entry(_hex(MAGENTA), "NaN or infinite")]


def _cmap(own: str, kind: str) -> str:
    return _AUTO.get(kind, "grey") if own == "auto" else own


def _color(cmap: str, level: int) -> str:
    if cmap in GREYS:
        return _hex((level, level, level))
    palette = colored(cmap, 0.0)
    at = 3 * round(level * (palette.levels - 1) / 255)
    return _hex(tuple((palette.colors or b"")[at : at + 3]))


def _hex(rgb: tuple[int, ...]) -> str:
    return "#" + "".join(f"{value:02x}" for value in rgb)
