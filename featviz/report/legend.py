"""What the colours of maps mean, by how they were drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from featviz.drawing.colormap import GREYS, MAGENTA, OVER_INPUT, colored
from featviz.records import KINDS
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import CaptureRow

_WORDS: dict[str, tuple[tuple[int | str, str], ...]] = {
    "map": (
        (0, "all of a map, crossed out: zero everywhere"),
        (128, "all of a map, with a stroke: constant"),
    ),
    "layer": ((0, "one scale for all maps: the smallest value"), (255, "the largest")),
    "none": ((0, "0 or less"), (255, "1 or more")),
    "range": ((0, "the lower limit or less"), (255, "the upper limit or more")),
    "symmetric": ((0, "most negative"), (128, "zero"), (255, "most positive")),
    "over": (
        (0, "over the input: the smallest value of a map"),
        (255, "over the input: the largest value of a map"),
    ),
    "pca": (
        ("#ff0000", "much of the first principal component"),
        ("#00ff00", "much of the second"),
        ("#0000ff", "much of the third"),
    ),
    "percentile": ((0, "the lower percentile or less"), (255, "the upper percentile or more")),
}
"""By the mode of the scale, or what else decides: grey levels 0..255, or colours, and what they
stand for."""


@dataclass(frozen=True)
class Entry:
    """A colour and its meaning."""

    color: str
    """`#rrggbb`."""
    words: str


def legend(run: ReadRun, captures: Iterable[CaptureRow]) -> list[Entry]:
    """The entries that hold for these pictures."""
    own = (run.record.get("options") or {}).get("cmap") or "grey"
    used = {(_cmap(str(own), row), _mode(row)): None for row in captures}
    entries = {
        Entry(color, meaning): None
        for cmap, mode in used
        for level, meaning in _WORDS.get(mode, ())
        if (color := level if isinstance(level, str) else _color(cmap, level)) is not None
    }
    return [*entries, Entry(_hex(MAGENTA), "NaN or infinite")]


def _mode(row: CaptureRow) -> str:
    """Of `_WORDS`. Only maps by themselves are marked: no overlay, and no tile of all channels."""
    if row.reduce == "pca":
        return "pca"
    return "over" if row.overlay is not None and row.normalize == "map" else row.normalize


def _cmap(own: str, row: CaptureRow) -> str:
    """What `auto` was for this picture."""
    if own == "auto" and row.kind in KINDS:
        own = KINDS[row.kind].cmap
    if own == "auto":
        own = "grey" if row.overlay is None else OVER_INPUT
    return own


def _color(cmap: str, level: int) -> str | None:
    """Of a level; None for a colormap that is not known here."""
    if cmap in GREYS:
        return _hex((level, level, level))
    try:
        palette = colored(cmap, 0.0)
    except KeyError:
        return None
    at = 3 * round(level * (palette.levels - 1) / 255)
    return _hex(tuple((palette.colors or b"")[at : at + 3]))


def _hex(rgb: tuple[int, ...]) -> str:
    return "#" + "".join(f"{value:02x}" for value in rgb)
