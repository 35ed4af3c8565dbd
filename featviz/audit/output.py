"""The files of an audit: audit.json, the chart of APoZ, pictures of the suspects; and its table."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from featviz import layout
from featviz.audit.counting import Tally, to_rows
from featviz.audit.gates import FINDINGS
from featviz.audit.plan import AuditPlan, Call, Spot
from featviz.drawing import colormap
from featviz.drawing.picture import write_png
from featviz.drawing.sheet import (
    DPI,
    Canvas,
    Caption,
    Cell,
    Color,
    Letters,
    PixelCanvas,
    TileGrid,
    end_of,
    resized,
    text_width,
)
from featviz.drawing.values import ValueLimits, to_levels, to_pixels
from featviz.hooks.capture import forward
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel
from featviz.options import InputOptions
from featviz.options.commands import AuditOptions
from featviz.records import Bytes, Sample
from featviz.run.study import batches
from featviz.rundir import AUDIT_FILE, write
from featviz.rundir.folder import Folder
from featviz.text import TextTable, printable, quoted, safe_name

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1

PER_LAYER = 8


def write_files(
    folder: Folder,
    document: Mapping[str, Any],
    model: LoadedModel,
    plan: AuditPlan,
    tallies: Mapping[Call, Tally],
    samples: Sequence[Sample],
    options: AuditOptions,
) -> None:
    """Write audit.json, channels.npz, the chart of APoZ and the pictures of the suspects."""
    sheets = choose_suspects(plan, document["layers"], tallies, options.max_suspects)
    drawn: list[dict[str, Any]] = []
    shown = _shown(model, plan, sheets, samples, options.inputs)
    for sheet in sheets:
        target, source, suspects, total = sheet
        dead = "" if source.call == target.call else ".dead"
        file = f"suspects/{safe_name(target.call.label + dead)}.png"
        with folder.write(file) as opened:
            _compose(sheet, *shown, samples).save(opened, "png")
        row: dict[str, Any] = {"layer": target.call.label, "shown": source.call.label}
        row |= {"channels": [channel for _, channel, _ in suspects], "suspects": total}
        drawn.append({**row, "rows": [_TOP, _ROW_HEIGHT], "file": file})
    count = sum(len(row["channels"]) for row in drawn)
    if count < (every := sum(document["total"]["findings"].values())):
        most = f"{PER_LAYER} of a layer, and --max-suspects {options.max_suspects}"
        log.info("%d of %d suspects are drawn: at most %s in all", count, every, most)
    with folder.write("channels.npz") as archive:
        write.write_arrays(archive, {call.label: own.table() for call, own in tallies.items()})
    by_activation = {  # a bar for each activation that gives zeros, however many are judged by it
        row["dead_at"]: (row["label"], row["apoz"], len(row["findings"]["dead"]) / row["channels"])
        for row in reversed(document["layers"])
        if row["apoz"] is not None
    }
    if bars := list(reversed(by_activation.values())):
        title = f"Average percentage of zeros, {document['images']['seen']} images"
        pixels = apoz_chart(bars, title)
        with folder.write("apoz.png") as picture:
            write_png(picture, pixels.shape[:2], [pixels.reshape(len(pixels), -1)])
    write_document(folder, document, drawn, None)


def write_document(
    folder: Folder,
    document: Mapping[str, Any],
    drawn: Sequence[Mapping[str, Any]] = (),
    files: Iterable[str] | None = (),
) -> None:
    """Write audit.json; its `files` are the others of the audit, None for all in the folder."""
    write.write_record(folder, AUDIT_FILE, {**document, "drawn": list(drawn)}, files)


def audit_table(audit: Mapping[str, Any]) -> TextTable:
    """The findings of an audit.json, for people: how many channels of each layer have each."""
    total, rows = {"label": "total", "type": "", **audit["total"]}, []
    sought = [name for name in FINDINGS if name in total["findings"]]
    figures = ("channels", "APoZ", *sought)
    for row in (*audit["layers"], total):
        apoz = "-" if row["apoz"] is None else f"{100 * row['apoz']:.1f}%"
        counts = {k: v if row is total else len(v) for k, v in row["findings"].items()}
        cells = (str(counts.get(name, "-")) for name in sought)
        rows.append((row["label"], row["type"], str(row["channels"]), apoz, *cells))
    return TextTable(("layer", "type", *figures), figures, rows[:-1], rows[-1:])


# The chart of APoZ

_BAR: Color = (107, 140, 174)
_DEAD_BAR: Color = (192, 57, 43)
_RULE: Color = (221, 221, 221)
_FULL_BAR = 5.0
"""Inches of a share of 1."""
_ROW = 0.24
"""Inches from one layer's bar to the next."""
_LETTER = 0.07
"""Inches of a letter of a layer's name, about."""


def apoz_chart(layers: Sequence[tuple[str, float, float]], title: str) -> Bytes:
    """Bars of the share of zeros of each layer (name, APoZ, dead; 0..1), uint8 [H, W, 3]."""
    names = [quoted(name, 60) for name, _, _ in layers]
    left = 0.3 + _LETTER * max(map(len, names))
    top = 0.35
    height = _ROW * len(layers)
    canvas = Canvas(round(DPI * (top + height + 0.75)), round(DPI * (left + _FULL_BAR + 0.3)))
    canvas.write(title, left, top / 2, Letters(10))
    bottom = top + height
    for tick in range(0, 101, 20):
        x = left + _FULL_BAR * tick / 100
        canvas.fill(Cell(x, top, 0, height + 0.05), _RULE)
        canvas.write(str(tick), x, bottom + 0.15, Letters(9), "middle")
    canvas.write("per cent", left + _FULL_BAR / 2, bottom + 0.33, Letters(9), "middle")
    for row, (name, (_, apoz, dead)) in enumerate(zip(names, layers, strict=True)):
        y = top + _ROW * row
        canvas.write(name, left - 0.08, y + _ROW / 2, Letters(9), "left")
        canvas.fill(Cell(left, y + 0.03, _FULL_BAR * apoz, _ROW - 0.06), _BAR)
        canvas.fill(Cell(left, y + 0.08, _FULL_BAR * dead, _ROW - 0.16), _DEAD_BAR)
    canvas.frame(Cell(left, top, _FULL_BAR, height))
    for x, color, label in ((left, _BAR, "APoZ"), (left + 0.9, _DEAD_BAR, "dead channels")):
        canvas.fill(Cell(x, bottom + 0.5, 0.2, 0.1), color)
        canvas.write(label, x + 0.28, bottom + 0.55, Letters(8))
    return canvas.pixels


# Pictures of the suspects: each channel with the images that excite it most

_TILE = 88
"""Pixels of the longer side of an image and of its map."""
_LABEL = 160
"""Pixels of the column on the left, which names channels."""
_GAP = 6
_TEXT = 13
"""Pixels of a line of text."""
_KEY = 130
"""Pixels of a colour key's width."""
_NAME_LETTERS = 28
_INK: Color = (34, 34, 34)
_CMAP = "viridis"
_TOP = 2 * (_TEXT + _GAP) + _GAP
"""Where the row of the first channel begins."""
_ROW_HEIGHT = _TILE + _TEXT + 2 * _GAP

SuspectSheet = tuple[Spot, Spot, Sequence[tuple[str, int, Sequence[int]]], int]
"""A call; the one whose maps are drawn: itself, or for a dead activation what feeds it; suspects
(finding, channel, images that excite it most, best first); and how many it has, drawn or not."""
ChannelMaps = dict[tuple[Call, int, int], np.ndarray]
"""(call, channel, image) to float32 [h, w]."""


def choose_suspects(
    plan: AuditPlan, rows: Sequence[Mapping[str, Any]], tallies: Mapping[Call, Tally], limit: int
) -> list[SuspectSheet]:
    """Choose what is drawn: PER_LAYER suspects of a layer and `limit` in all, worst first."""
    sheets, left = list[SuspectSheet](), limit
    found = {row["label"]: row["findings"] for row in rows}
    worst_first = sorted(FINDINGS, key=lambda name: FINDINGS[name].severity)
    for target in plan.targets:
        channels = found.get(target.call.label, {})
        every = [(name, channel) for name in worst_first for channel in channels.get(name, ())]
        chosen = every[: min(PER_LAYER, left)]
        left -= len(chosen)
        for dead in (True, False):
            source = target
            if dead and target.activation is not None:  # black: what reaches it is drawn
                feeding = plan.nodes[plan.given_by[target.call]].sources
                if len(feeding) == 1:
                    source = Spot(plan.nodes[feeding[0]].call, target.axis)
            suspects = []
            for name, channel in chosen:
                if (name == "dead") is dead:
                    best = tallies[target.call].images[channel]
                    suspects.append((name, channel, best[best >= 0].tolist()))
            if suspects:
                sheets.append((target, source, suspects, len(every)))
    return sheets


def _shown(
    model: LoadedModel,
    plan: AuditPlan,
    sheets: Sequence[SuspectSheet],
    samples: Sequence[Sample],
    inputs: InputOptions,
) -> tuple[ChannelMaps, dict[int, Image.Image]]:
    """Maps and images of the sheets: those images go through the model once more."""
    wanted: defaultdict[int, set[tuple[Call, int, int]]] = defaultdict(set)
    for _, source, suspects, _ in sheets:
        for _, channel, numbers in suspects:
            for number in numbers:
                wanted[number].add((source.call, source.axis, channel))
    maps, images, current = ChannelMaps(), dict[int, Image.Image](), 0

    def sink(call: Call, output: Any) -> None:
        for at, axis, channel in wanted[current]:
            if at != call:
                continue
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
            step = -(-max(shape) // _TILE)  # thinned out to about a tile's size
            maps[call, channel, current] = values.reshape(shape)[::step, ::step]

    sources = [source.call for _, source, _, _ in sheets]
    with in_eval_mode(model.module), plan.watching(model.module, sink, sources):
        for batch in batches(samples, model, inputs, 1, lambda *failed: None, sorted(wanted)):
            (current,) = batch.images
            pixels = to_pixels(model.preprocess.shown(batch.inputs)[0])
            rgb = np.broadcast_to(pixels, (*pixels.shape[:2], 3))
            images[current] = _as_tile(Image.fromarray(np.ascontiguousarray(rgb)))
            forward(model.module, [arg.to(model.device) for arg in batch.inputs])
    return maps, images


def _as_tile(image: Image.Image) -> Image.Image:
    return resized(image, _TILE / max(image.size))


def _compose(
    sheet: SuspectSheet,
    views: ChannelMaps,
    images: Mapping[int, Image.Image],
    samples: Sequence[Sample],
) -> Image.Image:
    """A row for each suspect: its name with a colour key, then images and its maps of them."""
    target, source, suspects, total = sheet
    across = 2 * _TILE + 3 * _GAP
    call, label = target.call, printable(target.call.label)
    subtitle = "with the images that excite each most, and its map"
    if source.call != call:
        feeds = f"what {printable(source.call.label)} gives to {label}"
        subtitle = f"no image excites these; the first ones, and {feeds}"
    title = f"{label} ({printable(call.type)}): {len(suspects)} of {total} suspects"
    widest = max(text_width(line, _TEXT) for line in (title, subtitle))
    columns = max(len(numbers) for _, _, numbers in suspects)
    width = max(_LABEL + columns * across, round(widest) + 2 * _GAP)
    canvas = PixelCanvas(width, _TOP + len(suspects) * _ROW_HEIGHT, _TEXT)
    canvas.write(f"{title}\n{subtitle}", _GAP, _GAP, _INK)
    colors = colormap.colored(_CMAP, 0)
    tiles = TileGrid(columns, _TILE, _TILE, _LABEL, _TOP, across, _ROW_HEIGHT)
    for row, (finding, channel, numbers) in enumerate(suspects):
        maps = [views.get((source.call, channel, number)) for number in numbers]
        finite = [values[np.isfinite(values)] for values in maps if values is not None]
        every = np.concatenate([np.zeros(1, np.float32), *finite])
        low, high = float(every.min()), float(every.max())  # zero is among them
        top = _TOP + row * _ROW_HEIGHT
        canvas.write(f"channel {channel}\n{finding}", _GAP, top, _INK)
        _draw_key(canvas, top + 3 * (_TEXT + _GAP), low, high)
        limits = ValueLimits.fixed(low, high)
        for column, (number, values) in enumerate(zip(numbers, maps, strict=True)):
            cell = tiles.cell(row * columns + column)
            name = end_of(samples[number].name, _NAME_LETTERS)
            canvas.caption(cell, [Caption(name, _INK)])
            if number in images and values is not None:
                canvas.paste(images[number], cell)
                levels = to_levels(values[None], limits, colors.levels, colors.nonfinite)
                painted = Image.fromarray(levels[0])
                painted.putpalette(colors.colors or b"")
                beside = cell._replace(left=cell.left + _TILE + _GAP)
                canvas.paste(_as_tile(painted.convert("RGB")), beside)
    return canvas.image


def _draw_key(canvas: PixelCanvas, top: float, low: float, high: float) -> None:
    """Draw the colours of a channel's maps with the values at both ends."""
    ramp = Image.fromarray(colormap.ramp(_CMAP)[None]).resize((_KEY, _TEXT - 3))
    canvas.paste(ramp, Cell(_GAP, top, _KEY, _TEXT - 3))
    canvas.write(f"{low:.4g}", _GAP, top + _TEXT, _INK)
    right = _GAP + _KEY - round(text_width(f"{high:.4g}", _TEXT))
    canvas.write(f"{high:.4g}", right, top + _TEXT, _INK)
