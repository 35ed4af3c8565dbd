"""What the scripts of a page know of grids: where tiles lie, and the statistics of
their channels.

These stand in scripts, which work from file:// where JSON does not:

    window.FEATVIZ = Object.assign(window.FEATVIZ || {}, {"p0-3": {"nrow": 8, ...},
    ...});

A column of the statistics (those of stats.npz bit for bit) is base64 of little-endian
float32, of one number where all are the same."""

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
    """The text of a script with grids, which the page adds to those of other scripts.

    Args:
        grids: JSON by the id of the picture; may be empty.
    """
    lines = ",\n".join(f'"{id}":{grid}' for id, grid in grids.items())
    return f"window.FEATVIZ = Object.assign(window.FEATVIZ || {{}}, {{\n{lines}\n}});\n"


def tiles_of(row: Capture, is_grey: bool) -> str:
    """The grid of a picture as JSON, without statistics.

    Args:
        is_grey: whether a page may show it in other colours.
    """
    return script_json(_row_grid(row, np.empty((row.maps, 0), np.float32), is_grey))


def figure_grid(figure: Figure, stats: Floats, is_grey: bool) -> str:
    """The grid of a figure as JSON.

    Args:
        figure: of either run.
        stats: [channels, 6], in the order of `records.STAT_COLUMNS`.
        is_grey: whether a page may show it in other colours.
    """
    row = figure.row
    layout = LAYOUTS.get(row.layout)
    is_reduced = row.reduce is not None
    is_aligned = layout is not None and layout.aligned
    grid = _row_grid(row, stats, is_grey)
    if row.collapsed is not None:
        grid["collapsed"] = row.collapsed
    flags = {
        "over": row.overlay is not None,  # its maps lie over the input already
        "scene": is_aligned and not is_numbers(row) and not is_reduced,
    }
    # a script takes a flag that is missing for false
    grid |= {name: True for name, holds in flags.items() if holds}
    return script_json(grid)


def changed_grid(
    maps: DifferenceMap, change: np.ndarray, stats: Floats | None, is_grey: bool
) -> str:
    """The grid of a picture of a comparison as JSON.

    Args:
        maps: the difference map, which says which channels are drawn.
        change: [channels], how far each changed, 0..1.
        stats: [channels, 6]; None for a picture of differences.
        is_grey: whether a page may show it in other colours.
    """
    if stats is None:
        stats = np.full((len(change), len(STAT_COLUMNS)), np.nan, np.float32)
    grid = _grid(maps.plan, maps.slices, stats, is_grey)
    grid["channels"] = maps.channels
    grid["change"] = base64_of(change.astype("<f4"))
    return script_json(grid)


def _row_grid(row: Capture, stats: Floats, is_grey: bool) -> dict[str, Any]:
    """The entries of a row's grid that it has on every page.

    Args:
        stats: [channels, 6] of all channels, drawn or not; [channels, 0] for none.
    """
    grid = _grid(row.plan, row.slice_count, stats, is_grey)
    # The scripts take a missing list for all channels in order, and an empty one for a
    # tile that is not a channel.
    if row.reduce is not None:
        grid["channels"] = []
    elif row.channels is not None:
        grid["channels"] = row.channels
    return grid


def _grid(plan: GridPlan, slices: int, stats: Floats, is_grey: bool) -> dict[str, Any]:
    """The entries that all grids have; sizes are in pixels of the picture.

    Args:
        slices: how many tiles a channel has, side by side.
        stats: as in `_row_grid`.
        is_grey: whether a page may show the picture in other colours.
    """
    columns = []
    for column in np.ascontiguousarray(stats.astype("<f4").T):
        # A column of one value is written once. Bits are compared: NaN equals itself then.
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
    """The bytes of an array as text."""
    return base64.b64encode(values.tobytes()).decode()


def script_json(content: object) -> str:
    """JSON without text that ends a script
    (https://html.spec.whatwg.org/#restrictions-for-contents-of-script-elements)."""
    # json.dumps writes ASCII: the name of a file need not be UTF-8, and an escape never is
    # the end of a line.
    text = json.dumps(msgspec.to_builtins(content), separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
