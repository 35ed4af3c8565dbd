"""The files of an audit: audit.json, the chart of APoZ, pictures of the suspects; and its table.

The charts are drawn from the numbers of audit.json; the same numbers give the same file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from featviz import layout
from featviz.audit.counting import Tally, to_rows
from featviz.audit.plan import AuditPlan, AuditTarget, Spot, watching_calls
from featviz.drawing import colormap
from featviz.drawing.page import DPI, Canvas
from featviz.drawing.picture import write_png
from featviz.drawing.values import ValueLimits, to_levels, to_pixels
from featviz.errors import FileError, UsageError
from featviz.files import read_json
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.models.load import LoadedModel
from featviz.options import InputOptions
from featviz.records import Bytes, Call, Sample, TextTable
from featviz.records.findings import FINDINGS, Doubles
from featviz.run.visit import batches
from featviz.rundir import AUDIT_FILE, write
from featviz.rundir.schema import MOST_RECORD, Audit, check_version, convert
from featviz.text import printable, quoted, safe_name

SCHEMA_VERSION = 1

PER_LAYER = 8


def write_files(
    folder: Path,
    document: Mapping[str, Any],
    tables: Mapping[str, Doubles],
    pictures: Iterable[tuple[SuspectSheet, Image.Image]],
) -> None:
    """Write audit.json, channels.npz, the chart of APoZ and the pictures of the suspects."""
    drawn = []
    for sheet, picture in pictures:
        with write.atomic(folder / sheet.file) as file:
            picture.save(file, "png")
        drawn.append(
            {
                "layer": sheet.target.spot.call.label,
                "shown": sheet.source.call.label,
                "channels": [channel for _, channel, _ in sheet.suspects],
                "suspects": sheet.total,
                "rows": [_TOP, _ROW_HEIGHT],
                "file": sheet.file,
            }
        )
    with write.atomic(folder / "channels.npz") as file:
        write.write_arrays(file, tables)
    by_activation = {  # a bar for each activation that gives zeros, however many are judged by it
        row["dead_at"]: (row["label"], row["apoz"], len(row["findings"]["dead"]) / row["channels"])
        for row in reversed(document["layers"])
        if row["apoz"] is not None
    }
    if bars := list(reversed(by_activation.values())):
        pixels = apoz_chart(
            bars, f"Average percentage of zeros, {document['images']['seen']} images"
        )
        with write.atomic(folder / "apoz.png") as file:
            write_png(file, (len(pixels), pixels.shape[1] // 3), [pixels])
    write_document(folder, document, drawn, None)


def write_document(
    folder: Path,
    document: Mapping[str, Any],
    drawn: Sequence[Mapping[str, Any]] = (),
    files: Iterable[str] | None = (),
) -> None:
    """Write audit.json; its `files` are the others of the audit, None for all in the folder."""
    content = {"schema_version": SCHEMA_VERSION, **document, "drawn": list(drawn)}
    write.write_record(folder, AUDIT_FILE, content, files)


def read_baseline(path: Path) -> list[Mapping[str, Any]]:
    """The layers of an earlier audit.json."""
    try:
        content = read_json(path, MOST_RECORD)
        check_version(content, SCHEMA_VERSION)
        convert(content, Audit)
    except (OSError, FileError, ValueError) as error:
        raise UsageError(
            f"--baseline {path} is no audit.json: {quoted(str(error))}",
            "give one that featviz audit wrote",
        ) from error
    layers: list[Mapping[str, Any]] = content["layers"]
    return layers


def audit_table(audit: Mapping[str, Any]) -> TextTable:
    """The findings of an audit.json, for people: how many channels of each layer have each."""
    total = {"label": "total", "type": "", **audit["total"]}
    sought = [name for name in FINDINGS if name in total["findings"]]
    figures, rows = ("channels", "APoZ", *sought), []
    for row in (*audit["layers"], total):
        apoz = "-" if row["apoz"] is None else f"{100 * row['apoz']:.1f}%"
        counts = {k: v if row is total else len(v) for k, v in row["findings"].items()}
        cells = (str(counts.get(name, "-")) for name in sought)
        rows.append((row["label"], row["type"], str(row["channels"]), apoz, *cells))
    return TextTable(("layer", "type", *figures), figures, rows[:-1], rows[-1:])


# The chart of APoZ

_BAR, _SUSPECT, _GRID = (
    np.array([[color]], np.uint8) for color in ((107, 140, 174), (192, 57, 43), (221, 221, 221))
)
_BARS, _ROW, _LETTER = 5.0, 0.24, 0.07


def apoz_chart(layers: Sequence[tuple[str, float, float]], title: str) -> Bytes:
    """Bars of the average percentage of zeros of each layer, uint8 [H, 3 W].

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
    return canvas.rows()


# Pictures of the suspects: each channel with the images that excite it most

_TILE, _LABEL, _GAP, _TEXT, _KEY = 88, 160, 6, 13, 130
"""Pixels of an image on its longer side, of a label, a gap, a line of text and a colour key."""
_CMAP = "viridis"
_TOP, _ROW_HEIGHT = 2 * (_TEXT + _GAP) + _GAP, _TILE + _TEXT + 2 * _GAP
"""Where the row of the first channel begins, and how high each is."""


@dataclass(frozen=True)
class SuspectSheet:
    """The drawn suspects of one layer."""

    target: AuditTarget
    suspects: Sequence[tuple[str, int, Sequence[int]]]
    """Finding, channel, and numbers of the images that excite it most, best first."""
    total: int
    """Suspects of the layer, drawn or not."""
    source: Spot
    """The call whose maps are drawn: the layer itself, or for a dead activation what feeds it."""

    @property
    def file(self) -> str:
        """Relative to the folder of the audit."""
        dead = ".dead" if self.source.call != self.target.spot.call else ""
        return f"suspects/{safe_name(self.target.spot.call.label + dead)}.png"


ChannelMaps = dict[tuple[Call, int, int], np.ndarray]
"""(call, channel, image) to float32 [h, w]."""


def choose_suspects(
    plan: AuditPlan,
    findings: Mapping[str, Mapping[str, Sequence[int]]],
    tallies: Mapping[Call, Tally],
    limit: int,
) -> list[SuspectSheet]:
    """Choose what is drawn: PER_LAYER suspects of a layer and `limit` in all, worst first."""
    sheets, left, traced = [], limit, plan.trace
    worst_first = sorted(FINDINGS, key=lambda name: FINDINGS[name].severity)
    for target in plan.targets:
        spot = target.spot
        channels = findings.get(spot.call.label, {})
        every = [(name, channel) for name in worst_first for channel in channels.get(name, ())]
        chosen = every[: min(PER_LAYER, left)]
        left -= len(chosen)
        for dead in (True, False):
            some = [(name, i) for name, i in chosen if (name == "dead") is dead]
            if not some:
                continue
            source = spot
            if dead and spot.activation is not None:  # black: what reaches the activation is drawn
                feeding = traced.nodes[traced.given_by[spot.call]].sources
                if len(feeding) == 1:
                    source = Spot(traced.nodes[feeding[0]].call, spot.axis)
            suspects = [(name, i, tallies[spot.call].top(i)) for name, i in some]
            sheets.append(SuspectSheet(target, suspects, len(every), source))
    return sheets


def draw_suspects(
    model: LoadedModel,
    plan: AuditPlan,
    sheets: Sequence[SuspectSheet],
    samples: Sequence[Sample],
    inputs: InputOptions,
) -> list[tuple[SuspectSheet, Image.Image]]:
    """Show the images that are needed to the model once more, and draw the sheets."""
    wanted: dict[int, dict[Call, set[tuple[int, int]]]] = {}
    for sheet in sheets:
        for _, channel, numbers in sheet.suspects:
            for number in numbers:
                at = wanted.setdefault(number, {}).setdefault(sheet.source.call, set())
                at.add((sheet.source.axis, channel))
    maps, images, current = ChannelMaps(), dict[int, Image.Image](), 0
    names = frozenset(sheet.source.call.name for sheet in sheets)

    def sink(call: Call, args: Any, kwargs: Any, output: Any) -> None:
        for axis, channel in wanted[current].get(call, ()):
            maps[call, channel, current] = _map(output, axis, channel)

    with in_eval_mode(model.module), watching_calls(model.module, sink, names, plan.trace.atoms):
        for batch in batches(samples, model, inputs, 1, lambda *failed: None, sorted(wanted)):
            (current,) = batch.images
            pixels = to_pixels(model.preprocess.shown(batch.inputs)[0])
            image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
            images[current] = _fitted(image.convert("RGB"))
            forward(model.module, [arg.to(model.device) for arg in batch.inputs])
    return [(sheet, _compose(sheet, maps, images, samples)) for sheet in sheets]


def _map(output: Tensor, axis: int, channel: int) -> np.ndarray:
    """One channel's map of the first image, float32 [h, w], thinned out to about a tile's size."""
    rows = to_rows(layout.to_floats(output.detach()), axis, 1)
    values = rows[0, channel].cpu().numpy().copy()
    shape = list(output.shape[1:])
    del shape[axis - 1 if axis > 0 else axis]
    if len(shape) != 2 or shape[0] * shape[1] != values.size:
        shape = [1, values.size]
        for first in (0, 1):  # tokens as a square, without the class token; else one row
            side = round((values.size - first) ** 0.5)
            if side * side == values.size - first:
                values, shape = values[first:], [side, side]
                break
    step = -(-max(shape) // _TILE)
    return np.asarray(values.reshape(shape)[::step, ::step])


def _fitted(image: Image.Image) -> Image.Image:
    factor = _TILE / max(image.size)
    width, height = (max(1, round(side * factor)) for side in image.size)
    kind = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BILINEAR
    return image.resize((width, height), kind)


def _compose(
    sheet: SuspectSheet,
    views: ChannelMaps,
    images: Mapping[int, Image.Image],
    samples: Sequence[Sample],
) -> Image.Image:
    cell, font = 2 * _TILE + 3 * _GAP, ImageFont.load_default(_TEXT)
    call, source = sheet.target.spot.call, sheet.source.call
    label, what = printable(call.label), "with the images that excite each most, and its map"
    if source != call:
        feeds = f"what {printable(source.label)} gives to {label}"
        what = f"no image excites these; the first ones, and {feeds}"
    count = f"{len(sheet.suspects)} of {sheet.total} suspects"
    title = f"{label} ({printable(call.type)}): {count}\n{what}"
    widest = max(font.getlength(line) for line in title.split("\n"))
    width = _LABEL + max(len(numbers) for _, _, numbers in sheet.suspects) * cell
    size = max(width, round(widest) + 2 * _GAP), _TOP + len(sheet.suspects) * _ROW_HEIGHT
    picture = Image.new("RGB", size, "white")
    write = partial(ImageDraw.Draw(picture).multiline_text, fill="#222222", font=font, spacing=4)
    write((_GAP, _GAP), title)
    colors = colormap.colored(_CMAP, 0.0)
    for index, (finding, channel, numbers) in enumerate(sheet.suspects):
        y = _TOP + index * _ROW_HEIGHT
        maps = [views.get((source, channel, n)) for n in numbers]
        finite = [m[np.isfinite(m)] for m in maps if m is not None]
        values = np.concatenate([np.zeros(1, np.float32), *finite])
        limits = float(values.min()), float(values.max())  # zero among them
        write((_GAP, y), f"channel {channel}\n{finding}")
        key = y + 3 * (_TEXT + _GAP)
        ramp = Image.fromarray(colormap.ramp(_CMAP)[None])
        picture.paste(ramp.resize((_KEY, _TEXT - 3)), (_GAP, key))
        low, high = (f"{value:.4g}" for value in limits)
        write((_GAP, key + _TEXT), low)
        write((_GAP + _KEY - round(font.getlength(high)), key + _TEXT), high)
        for column, (number, drawn) in enumerate(zip(numbers, maps, strict=True)):
            left = _LABEL + column * cell
            if number in images and drawn is not None:
                picture.paste(images[number], (left, y))
                ends = ValueLimits.fixed(*limits)
                levels = to_levels(drawn[None], ends, colors.levels, colors.nonfinite)
                painted = Image.fromarray(levels[0])
                painted.putpalette(colors.colors or b"")
                picture.paste(_fitted(painted.convert("RGB")), (left + _TILE + _GAP, y))
            name = printable(samples[number].name)
            name = name if len(name) <= 28 else "…" + name[-27:]
            write((left, y + _TILE + 1), name)
    return picture
