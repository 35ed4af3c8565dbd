"""The files of an audit, and its table. Of the files, audit.json is written last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from featviz.audit.chart import ZeroShares, apoz_chart
from featviz.audit.counting import Tally
from featviz.audit.findings import AuditedRow
from featviz.audit.gates import FINDINGS
from featviz.audit.parts import Call
from featviz.drawing.picture import write_pixels
from featviz.rundir import APOZ_FILE, AUDIT_FILE, write
from featviz.rundir.folder import Folder
from featviz.text import TextTable, counted, ranges

SCHEMA_VERSION = 1
"""The version of audit.json. 1: first release."""


# ranges of dead channels of a layer, and layers, that are written out
_MAX_RANGES = 12
_MAX_DEAD_LAYERS = 12


def write_files(
    folder: Folder,
    document: Mapping[str, Any],
    tallies: Mapping[Call, Tally],
    drawn: Sequence[Mapping[str, Any]],
) -> None:
    """Write channels.npz, the chart of APoZ (average percentage of zeros) and audit.json.

    Args:
        folder: the folder of the audit; it holds the pictures of suspects already.
        document: the content of audit.json, without `drawn` and `files`.
        tallies: the tallies of all counted calls; channels.npz has an array for each.
        drawn: the entry `drawn` of audit.json, a row for each picture of suspects.
    """
    with folder.write("channels.npz") as file:
        write.write_arrays(
            file, {call.label: tally.table() for call, tally in tallies.items()}
        )
    bars = _bars(document["layers"])
    if bars:
        images = counted(document["images"]["seen"], "image")
        pixels = apoz_chart(bars, f"Average percentage of zeros, {images}")
        with folder.write(APOZ_FILE) as file:
            write_pixels(file, pixels)
    write_document(folder, document, drawn, None)


def _bars(rows: Sequence[AuditedRow]) -> list[ZeroShares]:
    """A bar for each activation where layers are judged for `dead`. It has the label of
    the first of these layers."""
    # a convolution and its BatchNorm are both judged at the ReLU behind: one bar for both
    bars = {}
    for row in rows:
        if row["apoz"] is not None and row["dead_at"] not in bars:
            dead = len(row["findings"]["dead"]) / row["channels"]
            bars[row["dead_at"]] = ZeroShares(row["label"], row["apoz"], dead)
    return list(bars.values())


def write_document(
    folder: Folder,
    document: Mapping[str, Any],
    drawn: Sequence[Mapping[str, Any]] = (),
    files: Iterable[str] | None = (),
) -> None:
    """Write audit.json.

    Args:
        document: the content, without `drawn` and `files`.
        drawn: the entry `drawn`, a row for each picture of suspects.
        files: the entry `files`, names of the other files of the audit; None for all files
            in the folder.
    """
    write.write_record(folder, AUDIT_FILE, {**document, "drawn": list(drawn)}, files)


def audit_table(document: Mapping[str, Any]) -> TextTable:
    """The audit for people: how many channels of each layer have each finding, and which
    are dead.

    Args:
        document: the content of an audit.json.
    """
    # Only findings for which some layer was judged have a column. `redundant` has one if
    # the user asked for it.
    total = document["total"]
    findings = [name for name in FINDINGS if name in total["findings"]]
    rows = []
    dead_lines = []
    for row in document["layers"]:
        counts = {name: len(channels) for name, channels in row["findings"].items()}
        cells = [counts.get(finding) for finding in findings]
        rows.append(_cells(row["label"], row["type"], row, cells))
        dead = row["findings"].get("dead")
        if dead:
            noun = "channel" if len(dead) == 1 else "channels"
            channels = ranges(dead, _MAX_RANGES, comma=", ")
            dead_lines.append(f"dead in {row['label']}: {noun} {channels}")
    # a terminal has no room for hundreds of lines; audit.json has all
    if len(dead_lines) > _MAX_DEAD_LAYERS:
        hidden = len(dead_lines) - _MAX_DEAD_LAYERS
        dead_lines[_MAX_DEAD_LAYERS:] = [f"dead in {counted(hidden, 'more layer')}"]
    total_counts = [total["findings"][name] for name in findings]
    figures = ("channels", "APoZ", *findings)
    return TextTable(
        headings=("layer", "type", *figures),
        numbers=figures,
        rows=rows,
        totals=[_cells("total", "", total, total_counts)],
        footer=dead_lines,
    )


def _cells(
    label: str, type: str, row: Mapping[str, Any], counts: Sequence[int | None]
) -> list[str]:
    """A row of the table; `-` stands for what cannot be judged.

    Args:
        label, type: the layer's label and type, for the first two columns.
        row: an entry of `layers`, or the entry `total`.
        counts: how many channels have each finding; None for a finding that cannot be
            judged.
    """
    apoz = "-" if row["apoz"] is None else f"{100 * row['apoz']:.1f}%"
    findings = ["-" if count is None else str(count) for count in counts]
    return [label, type, str(row["channels"]), apoz, *findings]
