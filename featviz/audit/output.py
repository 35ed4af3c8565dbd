"""The files of an audit: audit.json, the chart of APoZ, pictures of the suspects; and its table."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from featviz import layout
from featviz.audit.counting import Tally, to_rows
from featviz.audit.gates import FINDINGS
from featviz.audit.plan import AuditPlan, Call, Spot
from featviz.drawing import colormap
from featviz.drawing.page import DPI, Canvas
from featviz.drawing.picture import write_png
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
            write_png(picture, (len(pixels), pixels.shape[1] // 3), [pixels])
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

_BAR, _SUSPECT, _GRID = (
    np.array([[color]], np.uint8) for color in ((107, 140, 174), (192, 57, 43), (221, 221, 221))
)
_BARS, _ROW, _LETTER = 5.0, 0.24, 0.07


def apoz_chart(layers: Sequence[tuple[str, float, float]], title: str) -> Bytes:
    """Bars of the share of zeros of each layer (name, APoZ, dead; 0..1), uint8 [H, 3 W]."""
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
            images[current] = _fitted(Image.fromarray(np.ascontiguousarray(rgb)))
            forward(model.module, [arg.to(model.device) for arg in batch.inputs])
    return maps, images


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
    target, source, suspects, total = sheet
    cell, font = 2 * _TILE + 3 * _GAP, ImageFont.load_default(_TEXT)
    call, label = target.call, printable(target.call.label)
    what = "with the images that excite each most, and its map"
    if source.call != call:
        feeds = f"what {printable(source.call.label)} gives to {label}"
        what = f"no image excites these; the first ones, and {feeds}"
    title = f"{label} ({printable(call.type)}): {len(suspects)} of {total} suspects\n{what}"
    widest = max(font.getlength(line) for line in title.split("\n"))
    width = _LABEL + max(len(numbers) for _, _, numbers in suspects) * cell
    size = max(width, round(widest) + 2 * _GAP), _TOP + len(suspects) * _ROW_HEIGHT
    picture = Image.new("RGB", size, "white")
    write = partial(ImageDraw.Draw(picture).multiline_text, fill="#222222", font=font, spacing=4)
    write((_GAP, _GAP), title)
    colors = colormap.colored(_CMAP, 0)
    for index, (finding, channel, numbers) in enumerate(suspects):
        y = _TOP + index * _ROW_HEIGHT
        maps = [views.get((source.call, channel, n)) for n in numbers]
        finite = [m[np.isfinite(m)] for m in maps if m is not None]
        values = np.concatenate([np.zeros(1, np.float32), *finite])
        limits = float(values.min()), float(values.max())  # zero among them
        write((_GAP, y), f"channel {channel}\n{finding}")
        key, ramp = y + 3 * (_TEXT + _GAP), Image.fromarray(colormap.ramp(_CMAP)[None])
        picture.paste(ramp.resize((_KEY, _TEXT - 3)), (_GAP, key))
        low, high = (f"{value:.4g}" for value in limits)
        write((_GAP, key + _TEXT), low)
        write((_GAP + _KEY - round(font.getlength(high)), key + _TEXT), high)
        for column, (number, drawn) in enumerate(zip(numbers, maps, strict=True)):
            left = _LABEL + column * cell
            if number in images and drawn is not None:
                picture.paste(images[number], (left, y))
                how = ValueLimits.fixed(*limits), colors.levels, colors.nonfinite
                painted = Image.fromarray(to_levels(drawn[None], *how)[0])
                painted.putpalette(colors.colors or b"")
                picture.paste(_fitted(painted.convert("RGB")), (left + _TILE + _GAP, y))
            name = printable(samples[number].name)
            name = name if len(name) <= 28 else "…" + name[-27:]
            write((left, y + _TILE + 1), name)
    return picture
