"""Geometry and statistics of grids as JavaScript files, which work from file:// where fetching JSON
does not.

The statistics of a grid stand in one script, which the page of its image and that of its layer both
load: of up to 16 grids, a few images by a few layers. They are those of stats.npz bit for bit.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from featviz.layout.layouts import LAYOUTS
from featviz.records import STAT_COLUMNS, DifferenceMap, Floats
from featviz.report.legend import key
from featviz.report.network import is_numbers
from featviz.report.views import Figure, Group, ImagePage
from featviz.report.words import all_zero
from featviz.rundir.schema import CaptureRow


def figures(groups: Iterable[Group]) -> Iterable[Figure]:
    """All figures of some groups."""
    return (figure for group in groups for figure in group.figures)


def scripts_of(groups: Iterable[Group]) -> list[str]:
    """The files that hold the numbers of some groups, each once."""
    return list(dict.fromkeys(figure.script for figure in figures(groups)))


@dataclass(frozen=True)
class Numbers:
    """The statistics of all figures of the page of an image, by the pictures' ids."""

    stats: Mapping[str, Floats]
    """[maps, 6], in the order of `records.STAT_COLUMNS`."""
    dark: Mapping[str, list[int]]
    """Channels that are all zero."""


def read_numbers(page: ImagePage) -> Numbers:
    """Read the statistics of an image, and of its double in the run that is compared.

    Raises:
        DamagedError: they have been damaged since the run was read.
    """
    files = {other: image.stats() for other, image in page.images.items()}
    stats = {f.picture.id: files[f.other][f.row.place.stats_key] for f in figures(page.groups)}
    return Numbers(stats, {id: all_zero(rows) for id, rows in stats.items()})


def entries(
    page: ImagePage, numbers: Numbers, options: Mapping[bool, Mapping[str, Any]]
) -> dict[str, dict[str, str]]:
    """The grids of an image as JSON, by the scripts that are to hold them and the pictures' ids.

    Args:
        options: those of this run under False, of the one that is compared under True.
    """
    by_script: dict[str, dict[str, str]] = {}
    for figure in figures(page.groups):
        id = figure.picture.id
        by_script.setdefault(figure.script, {})[id] = entry(
            figure, numbers.stats[id], key(figure.row, options[figure.other]).grey
        )
    return by_script


def script(entries: Mapping[str, str]) -> str:
    """A script that puts some grids into `window.FEATVIZ`, beside those of other scripts."""
    lines = ",\n".join(f'"{id}":{entry}' for id, entry in entries.items())
    return f"window.FEATVIZ = Object.assign(window.FEATVIZ || {{}}, {{\n{lines}\n}});\n"


class _Entry(msgspec.Struct, omit_defaults=True):
    """What the scripts of a page know of a grid; what is nothing is left out."""

    nrow: int
    padding: int
    tile: tuple[int, int]
    """Height and width."""
    size: tuple[int, int]
    """Width and height."""
    slices: int
    maps: int
    stats: list[str]
    """One for each column of stats.npz."""
    top: int = 0
    """Pixels above the grid, for its title."""
    channels: Sequence[int] | None = None
    collapsed: Mapping[str, Sequence[int]] | None = None
    over: bool = False
    """Whether its maps lie over the input already."""
    grey: bool = False
    """Whether the picture is grey, and may be shown in other colours."""
    scene: bool = False
    """Whether its maps show the places of the input, and may be laid over it."""
    change: str | None = None
    """How far each map is from that of another run, 0..1."""


def difference_entry(drawn: DifferenceMap, change: np.ndarray) -> str:
    """The grid of a map of differences as JSON; `change` as in `entry`."""
    plan = drawn.plan
    unknown = np.full((1, len(STAT_COLUMNS)), np.nan, np.float32)
    content = _Entry(
        nrow=plan.columns,
        padding=plan.padding,
        tile=plan.tile,
        size=(plan.width, plan.height),
        slices=drawn.slices,
        maps=len(change),
        stats=_columns(unknown),
        channels=drawn.channels,
        change=_column(change),
    )
    return _in_script(msgspec.json.encode(content).decode())


def entry(figure: Figure, stats: Floats, grey: bool, change: np.ndarray | None = None) -> str:
    """A grid as JSON.

    Args:
        stats: [maps, 6].
        grey: whether it may be shown in other colours.
        change: [maps]: how far each map is from that of another run, 0..1.
    """
    row, plan = figure.row, figure.row.plan
    content = _Entry(
        nrow=plan.columns,
        padding=plan.padding,
        tile=plan.tile,
        size=figure.picture.size,
        top=plan.top,
        slices=row.side,
        maps=row.maps,
        stats=_columns(stats),
        change=None if change is None else _column(change),
        channels=[] if row.reduce is not None else row.channels,
        collapsed=row.collapsed,
        over=row.overlay is not None,
        grey=grey,
        scene=_shows_the_scene(row),
    )
    return _in_script(msgspec.json.encode(content).decode())


def _shows_the_scene(row: CaptureRow) -> bool:
    layout = LAYOUTS.get(row.layout)
    return layout is not None and layout.aligned and not is_numbers(row) and row.reduce is None


def _columns(stats: Floats) -> list[str]:
    """Base64 of little-endian float32 for each column; of a single number where all are the same,
    bit for bit, as zeros and non-finite values mostly are."""
    bits = np.ascontiguousarray(stats.astype("<f4").T).view("<u4")
    same = (bits == bits[:, :1]).all(axis=1)
    kept = (column[:1] if one else column for column, one in zip(bits, same, strict=True))
    return [base64.b64encode(column.tobytes()).decode() for column in kept]


def _column(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def geometry(row: CaptureRow) -> str:
    """Where the tiles of a picture are, as JSON; without statistics."""
    plan = row.plan
    size = (plan.width, plan.height)
    entry = _Entry(
        *(plan.columns, plan.padding, plan.tile, size, row.side, row.maps, []),
        top=plan.top,
        channels=row.channels,
    )
    return msgspec.json.encode(entry).decode()


def _in_script(text: str) -> str:
    """JSON as a script may hold it: without anything that ends the script, or that another parser
    takes for the end of a line (https://html.spec.whatwg.org/#restrictions-for-contents-of-script-elements)."""
    for ending in "<>&\u2028\u2029":
        text = text.replace(ending, f"\\u{ord(ending):04x}")
    return text
