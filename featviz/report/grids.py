"""Writes the data of grids for the scripts of a page: the places of tiles, and the
statistics of channels.

The data stand in scripts, since a page that was opened from a file may not load JSON:

    window.FEATVIZ = Object.assign(window.FEATVIZ || {}, {"p0-3": {"nrow": 8, ...},
    ...});

A column of the statistics has the same bits as in stats.npz: it is base64 of little-endian
float32. A column of equal numbers has only one of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from featviz.diff.comparison import DifferenceMap
from featviz.layout.layouts import LAYOUTS
from featviz.records import STAT_COLUMNS, Floats, GridPlan
from featviz.report.figures import Figure
from featviz.report.stages import is_numbers
from featviz.rundir.schema import Capture


def script(grids: Mapping[str, str]) -> str:
    """The text of a script with grids. A page may load several such scripts.

    Args:
        grids: the grids as JSON, by the id of the picture; may be empty.
    """
    lines = ",\n".join(f'"{id}":{grid}' for id, grid in grids.items())
    return f"window.FEATVIZ = Object.assign(window.FEATVIZ || {{}}, {{\n{lines}\n}});\n"


def tiles_of(row: Capture, is_grey: bool) -> str:
    """The grid of a picture as JSON, without statistics.

    Args:
        row: the capture that the picture shows.
        is_grey: whether the picture is grey, so that a page may show it in other colours.
    """
    return script_json(_row_grid(row, np.empty((row.maps, 0), np.float32), is_grey))


def figure_grid(figure: Figure, stats: Floats, is_grey: bool) -> str:
    """The grid of a figure as JSON.

    Args:
        figure: the figure, of either run.
        stats: the statistics [channels, 6], in the order of `records.STAT_COLUMNS`.
        is_grey: whether the picture is grey, so that a page may show it in other colours.
    """
    row = figure.row
    layout = LAYOUTS.get(row.layout)
    is_reduced = row.reduce is not None
    is_aligned = layout is not None and layout.aligned
    grid = _row_grid(row, stats, is_grey)
    if row.collapsed is not None:
        grid["collapsed"] = row.collapsed
    flags = {
        "over": row.overlay is not None,  # maps already lie over the input
        # maps that the page may lay over the input
        "scene": is_aligned and not is_numbers(row) and not is_reduced,
    }
    # scripts read a missing flag as false
    grid |= {name: True for name, holds in flags.items() if holds}
    return script_json(grid)


def changed_grid(
    maps: DifferenceMap, change: np.ndarray, stats: Floats | None, is_grey: bool
) -> str:
    """The grid of a picture of a comparison as JSON.

    Args:
        maps: the difference map, which says which channels are drawn.
        change: [channels]: how much each channel changed, 0..1.
        stats: the statistics [channels, 6]; None for a picture of differences.
        is_grey: whether the picture is grey, so that a page may show it in other colours.
    """
    if stats is None:
        stats = np.full((len(change), len(STAT_COLUMNS)), np.nan, np.float32)
    grid = _grid(maps.plan, maps.slices, stats, is_grey)
    grid["channels"] = maps.channels
    grid["change"] = base64_of(change.astype("<f4"))
    return script_json(grid)


def _row_grid(row: Capture, stats: Floats, is_grey: bool) -> dict[str, Any]:
    """The entries of a row's grid that every page needs.

    Args:
        row: the capture that the picture shows.
        stats: the statistics [channels, 6] of all channels, drawn or not; [channels, 0]
            for a grid without statistics.
        is_grey: whether the picture is grey.
    """
    grid = _grid(row.plan, row.slice_count, stats, is_grey)
    # Scripts read a missing list as all channels in order, and an empty list as one tile
    # of all channels.
    if row.reduce is not None:
        grid["channels"] = []
    elif row.channels is not None:
        grid["channels"] = row.channels
    return grid


def _grid(plan: GridPlan, slices: int, stats: Floats, is_grey: bool) -> dict[str, Any]:
    """The entries that all grids have; sizes are in pixels of the picture.

    Args:
        plan: the geometry of the picture.
        slices: how many tiles a channel has, side by side.
        stats: the statistics [channels, 6], or [channels, 0] for none.
        is_grey: whether the picture is grey.
    """
    columns = []
    for column in np.ascontiguousarray(stats.astype("<f4").T):
        # The bits are compared, not the numbers, since NaN does not equal NaN.
        bits = column.view("<u4")
        columns.append(base64_of(column[:1] if (bits == bits[:1]).all() else column))
    grid = {
        "nrow": plan.columns,
        "padding": plan.padding,
        "tile": plan.tile,
        "size": (plan.width, plan.height),
        "slices": slices,
        "maps": len(stats),
        "stats": columns,
    }
    if is_grey:
        grid["grey"] = True
    return grid


def base64_of(values: np.ndarray) -> str:
    """The bytes of an array in base64."""
    return base64.b64encode(values.tobytes()).decode()


def script_json(content: object) -> str:
    """JSON that may stand in a script of HTML: `<`, `>` and `&` are escaped
    (https://html.spec.whatwg.org/#restrictions-for-contents-of-script-elements)."""
    # json.dumps escapes all but ASCII. So bytes of names that are not UTF-8, and the line
    # ends of Unicode, cannot break the script.
    text = json.dumps(msgspec.to_builtins(content), separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
