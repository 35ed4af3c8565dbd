"""Geometry and statistics of grids as a JavaScript file, which works from file:// where fetching
JSON does not."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping

from featviz.report.views import Figure, Group

_ENDING = re.compile("[<>&\u2028\u2029]")


def figures(groups: Iterable[Group]) -> Iterable[Figure]:
    """All figures of some groups."""
    return (figure for group in groups for figure in group.figures)


def entries(groups: Iterable[Group]) -> dict[str, str]:
    """The grids of all figures as JSON, by the pictures' ids."""
    return {figure.picture.id: _entry(figure) for figure in figures(groups)}


def script(known: Mapping[str, str], groups: Iterable[Group]) -> str:
    """A script that puts the grids of these groups into `window.FEATVIZ`."""
    ids = [figure.picture.id for figure in figures(groups)]
    lines = ",\n".join(f'"{id}":{known[id]}' for id in ids)
    return f"window.FEATVIZ = {{ grids: {{\n{lines}\n}} }};\n"


def _entry(figure: Figure) -> str:
    """One grid. `stats` is base64 of little-endian float32 [maps, 6], row by row."""
    row, plan = figure.grid.capture, figure.grid.capture.plan
    entry = {
        "nrow": plan.columns,
        "padding": plan.padding,
        "tile": plan.tile,
        "size": figure.picture.size,
        "slices": row.side,
        "channels": [] if row.reduce is not None else row.channels,
        "collapsed": row.collapsed,
        "over": row.overlay is not None,
        "maps": row.maps,
        "stats": base64.b64encode(figure.grid.stats.astype("<f4").tobytes()).decode(),
    }
    return _in_script(json.dumps(entry, separators=(",", ":")))


def _in_script(text: str) -> str:
    """JSON as a script may hold it: without anything that ends the script, or that another parser
    takes for the end of a line (https://html.spec.whatwg.org/#restrictions-for-contents-of-script-elements)."""
    return _ENDING.sub(lambda ending: f"\\u{ord(ending[0]):04x}", text)
