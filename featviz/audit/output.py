"""The files of an audit: written, and read back as a baseline.

The charts are drawn from the numbers of audit.json; the same numbers give the same file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from featviz.drawing import png
from featviz.drawing.canvas import DPI, Canvas
from featviz.errors import FileError, UsageError
from featviz.files import read_json
from featviz.records import TextTable
from featviz.records.findings import FINDINGS
from featviz.rundir import AUDIT_FILE, MODELS_FILE, write
from featviz.rundir.schema import MOST_RECORD, check_audit
from featviz.text import printable, quoted, safe_name

if TYPE_CHECKING:
    from featviz.audit import AuditResult
    from featviz.audit.model_audit import Examined

SCHEMA_VERSION = 1
"""The version of audit.json and models.json. 1: first release."""

_BAR, _SUSPECT, _GRID = (
    np.array([[color]], np.uint8) for color in ((107, 140, 174), (192, 57, 43), (221, 221, 221))
)
"""Colours of the chart, as pictures of one pixel."""
_BARS, _ROW, _LETTER = 5.0, 0.24, 0.07
"""Width of the longest bar, height of a layer, and width of a letter of its name, in inches."""


def write_model(folder: Path, result: Examined) -> None:
    """audit.json, channels.npz, the chart of APoZ and the pictures of the suspects."""
    drawn = []
    for sheet, picture in result.pictures:
        name = f"suspects/{safe_name(sheet.stem)}.png"
        with write.atomic(folder / name) as file:
            picture.save(file, "png")
        drawn.append({**sheet.as_json(), "file": name})
    with write.atomic(folder / "channels.npz") as file:
        write.write_arrays(file, result.tables)
    _write_chart(folder, result.document)
    write_document(folder, result.document, drawn)


def write_document(
    folder: Path, document: Mapping[str, Any], drawn: Sequence[Mapping[str, Any]] = ()
) -> None:
    """audit.json.

    Args:
        drawn: which suspects have pictures.
    """
    content = {"schema_version": SCHEMA_VERSION, **document, "drawn": list(drawn)}
    write.write_json(folder / AUDIT_FILE, content)


def _write_chart(folder: Path, document: Mapping[str, Any]) -> None:
    """A bar for each activation that gives zeros, however many layers are judged by it."""
    by_activation = {
        row["dead_at"]: (row["label"], row["apoz"], len(row["findings"]["dead"]) / row["channels"])
        for row in reversed(document["layers"])
        if row["apoz"] is not None
    }
    if bars := list(reversed(by_activation.values())):
        title = f"Average percentage of zeros, {document['images']['seen']} images"
        with write.atomic(folder / "apoz.png") as file:
            file.write(apoz_chart(bars, title))


def write_models(folder: Path, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """models.json and the chart over the models, from their documents by label."""
    rows = [{"model": label, **document["total"]} for label, document in documents.items()]
    write.write_json(folder / MODELS_FILE, {"schema_version": SCHEMA_VERSION, "models": rows})
    shares = {
        name: [_share(row, name) for row in rows]
        for name in FINDINGS
        if name == "dead" or any(_share(row, name) for row in rows)
    }
    with write.atomic(folder / "models.png") as file:
        file.write(dead_chart(list(documents), shares))


def read_baseline(path: Path) -> list[Mapping[str, Any]]:
    """The layers of an earlier audit.json.

    Raises:
        UsageError: no such file, or it is no audit.json of this version.
    """
    try:
        content = read_json(path, MOST_RECORD)
        check_audit(content)
        layers: list[Mapping[str, Any]] = content["layers"]
        if content["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {content['schema_version']}, not {SCHEMA_VERSION}")
        for layer in layers:
            _ = layer["label"], [len(channels) for channels in layer["findings"].values()]
    except (OSError, FileError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--baseline {path} is no audit.json: {quoted(str(error))}",
            "give one that featviz audit wrote",
        ) from error
    return layers


def apoz_chart(layers: Sequence[tuple[str, float, float]], title: str) -> bytes:
    """Bars of the average percentage of zeros, one for each layer, from the input down.

    Args:
        layers: name, APoZ and share of dead channels, both 0..1; names are cut at 60 characters.
    """
    names = [quoted(name, 60) for name, _, _ in layers]
    left, top, height = 0.3 + _LETTER * max(map(len, names)), 0.35, _ROW * len(layers)
    canvas = Canvas((round(DPI * (top + height + 0.75)), round(DPI * (left + _BARS + 0.3))))
    canvas.write(title, left, top / 2, 10, "right")
    for tick in range(0, 101, 20):
        x = left + _BARS * tick / 100
        canvas.paste(_GRID, x, top, 0, height + 0.05)
        canvas.write(str(tick), x, top + height + 0.15, 9, "middle")
    canvas.write("per cent", left + _BARS / 2, top + height + 0.33, 9, "middle")
    for row, (name, (_, apoz, dead)) in enumerate(zip(names, layers, strict=True)):
        y = top + _ROW * row
        canvas.write(name, left - 0.08, y + _ROW / 2, 9, "left")
        canvas.paste(_BAR, left, y + 0.03, _BARS * apoz, _ROW - 0.06)
        canvas.paste(_SUSPECT, left, y + 0.08, _BARS * dead, _ROW - 0.16)
    canvas.frame(left, top, _BARS, height)
    for x, color, words in ((0, _BAR, "APoZ"), (0.9, _SUSPECT, "dead channels")):
        canvas.paste(color, left + x, top + height + 0.5, 0.2, 0.1)
        canvas.write(words, left + x + 0.28, top + height + 0.55, 8, "right")
    file, pixels = io.BytesIO(), canvas.rows()
    png.write_png(file, (len(pixels), pixels.shape[1] // 3), [pixels])
    return file.getvalue()


def dead_chart(models: Sequence[str], shares: Mapping[str, Sequence[float | None]]) -> bytes:
    """Lines of the share of channels with a finding over models, in the order given.

    Args:
        shares: for each finding its share in each model, 0..1; None where it was not judged.
    """
    figure, axes = _chart(max(6.0, 1.5 + 0.45 * len(models)), 4)
    for finding, values in shares.items():
        heights = [float("nan") if value is None else 100 * value for value in values]
        axes.plot(range(len(models)), heights, marker="o", markersize=4, label=finding)
    names = [printable(name) for name in models]
    axes.set_xticks(range(len(models)), names, rotation=45, ha="right")
    axes.set(ylim=(0, None), ylabel="channels, per cent")
    axes.yaxis.grid(True, color="#dddddd")
    axes.legend(fontsize=8, frameon=False)
    return _png_of(figure)


def _chart(width: float, height: float) -> tuple[Figure, Any]:
    """A figure of this size in inches, and its axes, whose grid lies below what is drawn."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    return figure, axes


def _png_of(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def _share(total: Mapping[str, Any], name: str) -> float | None:
    """The share with a finding of the channels that are judged for it, 0..1; None where none is."""
    channels = total["judged"].get(name, 0)
    return total["findings"][name] / channels if channels else None


def audit_table(result: AuditResult) -> TextTable:
    """The findings, for people: of one model a column for each finding, of several a column for
    each model."""
    if len(result.models) == 1:
        return _one_model(result.models[0].document)
    return _several_models({model.label: model.document for model in result.models})


def _one_model(audit: Mapping[str, Any]) -> TextTable:
    """A column for each finding: how many channels of a layer have it."""
    total = audit["total"]
    sought = [name for name in FINDINGS if name in total["findings"]]
    figures = ("channels", "APoZ", *sought)

    def cells(row: Mapping[str, Any], counts: Mapping[str, int]) -> Iterator[str]:
        yield str(row["channels"])
        yield "-" if row["apoz"] is None else f"{100 * row['apoz']:.1f}%"
        yield from (str(counts.get(name, "-")) for name in sought)

    rows = [
        (row["label"], row["type"], *cells(row, {k: len(v) for k, v in row["findings"].items()}))
        for row in audit["layers"]
    ]
    totals = [("total", "", *cells(total, total["findings"]))]
    return TextTable(("layer", "type", *figures), figures, rows, totals)


def _several_models(audits: Mapping[str, Mapping[str, Any]]) -> TextTable:
    """A column for each model: how many channels of a layer have which finding."""
    columns = [{row["label"]: row for row in audit["layers"]} for audit in audits.values()]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [(label, *(_words(column.get(label)) for column in columns)) for label in labels]
    sums = [audit["total"] for audit in audits.values()]
    totals = [
        (f"total {name}", *(_share_words(total, name) for total in sums))
        for name in FINDINGS
        if any(name in total["findings"] for total in sums)
    ]
    return TextTable(("layer", *audits), (), rows, totals)


def _words(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    counts = [f"{len(channels)} {name}" for name, channels in row["findings"].items() if channels]
    return ", ".join(counts) or "0"


def _share_words(total: Mapping[str, Any], name: str) -> str:
    count, channels = total["findings"].get(name), total["judged"].get(name)
    return "-" if not channels else f"{count} of {channels} ({100 * count / channels:.1f}%)"
