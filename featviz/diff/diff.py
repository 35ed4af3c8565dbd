"""The story of `diff`: read two runs, match them, compare what both have; the result as a table, as
JSON, as verdicts for JUnit, and as maps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from featviz.diff.compare import (
    Finding,
    TensorPair,
    map_shape,
    measure,
    scale_of,
    signed,
    worst_first,
)
from featviz.diff.comparison import (
    ComparedLayer,
    Comparison,
    DifferenceMap,
    OnlyIn,
    lines_of,
)
from featviz.drawing import colormap, grid
from featviz.drawing.picture import write_png
from featviz.drawing.values import ValueLimits, to_levels
from featviz.errors import CompareError, UsageError
from featviz.files.urls import Url
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions
from featviz.options.commands import DiffFiles, DiffThresholds
from featviz.records import CaptureKey, Verdict, finite
from featviz.rundir import DIFF_FILE
from featviz.rundir import place as outputs
from featviz.rundir.folder import Folder
from featviz.rundir.image import DamagedError
from featviz.rundir.mirror import copied
from featviz.rundir.read import ReadRun, read_run, warn_of
from featviz.rundir.studies import junit
from featviz.rundir.write import write_record
from featviz.text import TextTable, by, counted, listed, safe_name

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1  # version of the JSON document. 1: first release
_PICTURES = 8  # how many layers are drawn at most, each in its worst image
_CHANNELS = 16
_USUAL = DiffThresholds()
_OPTIONS = DrawOptions(min_tile=96)

Render = Callable[[Comparison, ReadRun, ReadRun, Path, Path], tuple[str, Mapping[str, str]]]
"""Takes a comparison, both runs, the page and the folder of the maps; gives the text of the page,
and the texts of files that are to lie with the maps, by name."""


def diff(
    base: Path | Url,
    new: Path | Url,
    thresholds: DiffThresholds,
    files: DiffFiles,
    render: Render | None = None,
) -> Comparison:
    """Compare two runs, here or in object stores; `render` makes the page of `html`."""
    for place in (base, new):
        if isinstance(place, Url) and files.html is not None:
            words = f"the page of --html shows pictures where they are, and {place} is no folder"
            raise UsageError(words, "leave --html out, or copy the run here first")
    asked = ("--html", files.html, outputs.PAGE), ("--junit", files.junit, outputs.JUNIT)
    single = [(option, path, kind) for option, path, kind in asked if path is not None]
    with copied(base) as one, copied(new) as two:
        for option, path, kind in single:
            outputs.check_apart(path, option, (one, two))
            outputs.check_file(path, kind, option, files.overwrite)
        if (folder := maps_folder(files)) is not None:
            outputs.check_apart(folder, "--out", (one, two))
            outputs.check_free(folder, outputs.DIFF, True)
        runs = []
        for side, root, place in (("BASE", one, base), ("NEW", two, new)):
            run = replace(read_run(root), url=None if isinstance(place, Path) else place)
            warn_of(run.left_out, f"{side}: ", ", and left out")
            if run.missing:
                log.warning("%s: the run did not come to %d more images", side, run.missing)
            runs.append(run)
        before, after = runs
        result = compare_runs(before, after, thresholds)
        texts: dict[outputs.FileKind, bytes] = {}
        if folder is not None:
            with outputs.replacing(folder, outputs.DIFF) as fresh:
                result = replace(result, layers=draw(result.layers, before, after, fresh))
                if files.html and render:
                    page, beside = render(result, before, after, files.html, folder)
                    texts[outputs.PAGE] = page.encode("utf-8", "replace")
                    for name, text in beside.items():
                        with fresh.write(name) as file:
                            file.write(text.encode("utf-8", "replace"))
                write_record(fresh, DIFF_FILE, as_json(result))
        texts[outputs.JUNIT] = junit({str(result.new): verdicts(result)}, "diff")
        for option, path, kind in single:
            with outputs.writing(path, kind, option, files.overwrite) as file:
                file.write(texts[kind])
    return result


def maps_folder(files: DiffFiles) -> Path | None:
    """The folder of the maps; None where nobody asked for them."""
    if files.out is not None or files.html is None:
        return files.out
    return files.html.with_name(f"{files.html.stem}-maps")


def compare_runs(base: ReadRun, new: ReadRun, thresholds: DiffThresholds = _USUAL) -> Comparison:
    """Compare two runs. Images of which a file turns out to be broken are left out."""
    images = [name for name in base.images if name in new.images]
    unlike = _unlike(base, new, images)
    findings: dict[str, list[Finding]] = {}
    broken: tuple[dict[str, str], dict[str, str]] = {}, {}
    for name in images:
        a, b = base.images[name], new.images[name]
        try:
            sizes = [by(one.manifest.input.shape) for one in (a, b)]
            if not unlike and sizes[0] != sizes[1]:
                unlike = f"the input made of {name} is {sizes[0]} in BASE and {sizes[1]} in NEW"
            if not unlike:
                old, now = (one.shown().astype(np.int16) for one in (a, b))
                # resizing varies by one level between machines
                if old.shape != now.shape or abs(old - now).max(initial=0) > 1:
                    unlike = f"what the model saw of {name} (input.png) has other pixels in NEW"
            if unlike:
                hint = "run both with the same images, preprocessing and --normalize"
                raise CompareError(f"these runs cannot be compared: {unlike}", hint)
            pairs = TensorPair.read(a, b)
            findings[name] = [measure(pair, thresholds.tolerance) for pair in pairs]
        except DamagedError as error:
            broken[error.image is b][name] = error.message
    runs = []
    for side, run, faults in zip(("BASE", "NEW"), (base, new), broken, strict=True):
        warn_of(faults, f"{side}: ", ", and left out")
        whole = {name: image for name, image in run.images.items() if name not in faults}
        runs.append(replace(run, images=whole, damaged={**run.damaged, **faults}))
    base, new = runs
    if not findings:
        names = f"BASE has {_few(base.images)}, NEW has {_few(new.images)}"
        raise CompareError(f"no image is in both runs: {names}", "compare runs of the same images")
    order, other = (  # of the places in both, as the model came to them
        dict.fromkeys(place for name in findings for place in run.images[name].captures)
        for run in runs
    )
    if order.keys().isdisjoint(other):
        layers_of = [_few(dict.fromkeys(place.layer for place in one)) for one in (order, other)]
        words = "no layer is in both runs: BASE has {}, NEW has {}".format(*layers_of)
        raise CompareError(words, "compare runs with the same --layers")
    layers: dict[CaptureKey, list[Finding]] = {place: [] for place in order}
    for finding in (finding for found in findings.values() for finding in found):
        layers[finding.place].append(finding)
    return Comparison(
        base.place,
        new.place,
        thresholds,
        tuple(findings),
        tuple(summed_up(group) for group in layers.values() if group),
        _only_in(base, new, findings),
        _only_in(new, base, findings),
        {"base": tuple(base.left_out), "new": tuple(new.left_out)},
    )


def _unlike(base: ReadRun, new: ReadRun, images: Sequence[str]) -> str | None:
    """What keeps two runs from being compared: other inputs, or another scale."""
    for name, what in (("preprocessing", "preprocessing"), ("normalize", "scale mode")):
        old, now = (
            run.record.get(name, (run.record.get("options") or {}).get(name)) for run in (base, new)
        )
        if old != now:
            return f"the {what} is {old!r} in BASE and {now!r} in NEW"
    sums = [[run.images[name].manifest.image.sha256 for run in (base, new)] for name in images]
    other = [name for name, (old, now) in zip(images, sums, strict=True) if old != now]
    return f"{_few(other)} is another file in NEW (its sha256 differs)" if other else None


def _only_in(one: ReadRun, other: ReadRun, images: Iterable[str]) -> OnlyIn:
    lacking = {}
    for name in (name for name in one.images if name not in other.images):
        lacking[name] = "incomplete" if name in other.left_out else "not there"
        if (failed := other.failures.get(name)) is not None:
            lacking[name] = f"failed: {failed}"
    places: dict[tuple[CaptureKey, str], str] = {}
    for name in images:
        there = other.images[name]
        ran = dict.fromkeys(there.manifest.never_ran, "never ran")
        skipped = {(s.layer, s.kind, s.call): s.reason for s in reversed(there.manifest.skipped)}
        for place, row in one.images[name].captures.items():
            if place in there.captures:
                continue
            reason = ran.get(place.layer, "not there")
            if (skip := skipped.get(place[:3])) is not None:
                reason = f"skipped: {skip}"
            places.setdefault((place, row.type), reason)
    return lacking, places


def _few(names: Iterable[str]) -> str:
    return listed(list(names), 3) or "none"


# The result


def summed_up(findings: Sequence[Finding]) -> ComparedLayer:
    """One place of the model, from what was found of it in each image."""
    worst, first = max(findings, key=lambda one: one.severity), findings[0]
    reason = next((one.reason for one in findings if one.reason), None)
    compared = [one for one in findings if one.reason is None]
    differs = np.zeros(max(len(one.differs) for one in findings), bool)
    images: dict[str, dict[str, float | None]] = {}
    for one in findings:
        differs[: len(one.differs)] |= one.differs
        numbers = {
            "absolute": one.change.absolute.max(),
            "relative": one.change.relative.max(),
            "cosine": one.change.layer_cosine,
        }
        known = {n: None if one.reason else finite(float(own)) for n, own in numbers.items()}
        images[one.image] = {"differing": int(one.differs.sum()), **known}
    cosines = [one.change.layer_cosine for one in compared if one.differs.any()]
    common = min((len(one.differs) for one in compared), default=0)
    channels = {
        name: np.max([getattr(one.change, name)[:common] for one in compared] or [np.zeros(0)], 0)
        for name in ("absolute", "relative", "unlike")
    }
    each = [one.change.cosine[:common] for one in compared] or [np.zeros(0)]
    channels["cosine"] = np.fmin.reduce(each, 0)
    order = worst_first(channels["relative"], channels["unlike"], differs)
    return ComparedLayer(
        first.place,
        first.type,
        first.index,
        sorted({one.by for one in findings}),
        reason,
        images,
        int(differs.sum()),
        len(differs),
        (sum(int(one.differs.sum()) for one in findings), sum(len(o.differs) for o in findings)),
        channels,
        float(np.fmin.reduce(cosines, initial=np.nan)),
        [] if reason else order[:5],
        worst.image,
        worst.severity[0],
        np.where(worst.change.unlike > 0, 1.0, worst.change.relative),
        worst_first(worst.change.relative, worst.change.unlike, worst.differs),
    )


def diff_table(result: Comparison) -> TextTable:
    """For people: a row for each layer that differs."""
    footer = [f"only in BASE: {line}" for line in lines_of(result.only_in_base)]
    footer += [f"only in NEW: {line}" for line in lines_of(result.only_in_new)]
    numbers = ("images", "channels", "absolute", "relative", "cosine")
    rows = [layer.cells for layer in result.differing]
    headings = tuple(rows[0]) if rows else ()
    return TextTable(
        headings, numbers, [tuple(row.values()) for row in rows], (), [*footer, result.summary]
    )


def verdicts(result: Comparison) -> list[Verdict]:
    """One for each layer, and one each for what only one run has."""
    found = []
    for layer in result.layers:
        absolute, relative = (
            layer.channels[name].max(initial=0) for name in ("absolute", "relative")
        )
        largest = f"; largest difference {absolute:.3g} ({relative:.3g} relative)"
        words = f"{layer.differing:,} of {counted(layer.total, 'channel')} differ"
        words += f": {layer.reason}" if layer.reason else largest
        held = result.within or not layer.differing
        found.append(Verdict(f"{layer.label} {layer.place.stem}", held, words))
    for name, side in (("BASE", result.only_in_base), ("NEW", result.only_in_new)):
        lines = lines_of(side)
        held = not lines or (name == "NEW" and result.thresholds.ignore_added)
        found.append(Verdict(f"only in {name}", held, "; ".join(lines) or "nothing"))
    return found


def as_json(result: Comparison) -> dict[str, Any]:
    """The whole result, for JSON."""
    differing, total = result.channel_images
    sides = {"only_in_base": result.only_in_base, "only_in_new": result.only_in_new}
    named = ("file", "image", "label", "stem", "source", "limit", "channels")
    maps = [layer.difference for layer in result.layers if layer.difference]
    layers: list[dict[str, Any]] = []
    for layer in result.layers:
        each = {name: own.tolist() for name, own in layer.channels.items()}
        each["cosine"] = [finite(value) for value in each["cosine"]]
        own = {name: getattr(layer, name) for name in ("image", "by", "reason", "images")}
        own |= dict(zip(("differing", "total"), layer.channel_images, strict=True))
        own |= {"most_changed": layer.most_changed, "channels": each}
        place = {"type": layer.type, "index": layer.index, **layer.place._asdict()}
        layers.append({"layer": layer.place.layer, **place, **own})
    first = next((row for row in layers if row["differing"]), None)
    where = ("layer", "type", "index", "kind", "call", "key", "image")
    return {
        "schema_version": SCHEMA_VERSION,
        "base": str(result.base),
        "new": str(result.new),
        **structs.asdict(result.thresholds),
        "equal": result.equal,
        "images": list(result.images),
        "channels": {"differing": differing, "total": total, "ratio": result.ratio},
        "first_divergence": None if first is None else {name: first[name] for name in where},
        "layers": layers,
        **{
            name: {
                "images": dict(side[0]),
                "layers": [
                    {**place._asdict(), "type": type, "reason": reason}
                    for (place, type), reason in side[1].items()
                ],
            }
            for name, side in sides.items()
        },
        "incomplete": {side: list(names) for side, names in result.incomplete.items()},
        "maps": [{name: getattr(one, name) for name in named} for one in maps],
    }


def draw(
    layers: Sequence[ComparedLayer], base: ReadRun, new: ReadRun, folder: Folder
) -> tuple[ComparedLayer, ...]:
    """The layers, of which the worst that differ, and the first always, are drawn on one scale, as
    wide as the largest difference of all; what has a number on one side only is magenta."""
    differing = [layer for layer in layers if layer.differing and not layer.reason]
    worst = sorted(
        differing[1:], key=lambda one: (-one.severity, -len(one.changed) / len(one.change))
    )
    shown = {layer.place for layer in [*differing[:1], *worst][:_PICTURES]}
    found, limit = [], 0.0
    for layer in (layer for layer in differing if layer.place in shown):
        if (own := _differences(layer, base, new)) is not None:
            found.append((layer, *own))
            limit = max(limit, scale_of(own[1].reshape(-1, 1)))
    limit = limit or 1.0
    colors, drawn = colormap.colored("coolwarm", 0), dict[CaptureKey, DifferenceMap]()
    for number, (layer, one, data) in enumerate(found):
        name = safe_name(f"{number:02d}_{one.label}.{one.stem}.png")
        drawn[layer.place] = replace(one, file=name, limit=limit)
        maps = data.reshape(-1, *data.shape[2:])
        tiles = to_levels(maps, ValueLimits.fixed(-limit, limit), colors.levels, colors.nonfinite)
        pieces = grid.strips(one.plan, tiles, colors)
        text = {
            "Software": "featviz",
            "Layer": f"{one.label} ({layer.type})",
            "Image": one.image,
            "Channels": ",".join(map(str, one.channels)),
            "Range": f"NEW - BASE, relative: {-limit:g} to {limit:g}",
            "Source": one.source,
        }
        with folder.write(name) as file:
            size = one.plan.height, one.plan.width
            write_png(file, size, pieces, colors=colors.colors, text=text)
    return tuple(replace(layer, difference=drawn.get(layer.place)) for layer in layers)


def _differences(
    layer: ComparedLayer, base: ReadRun, new: ReadRun
) -> tuple[DifferenceMap, np.ndarray] | None:
    """A layer's map without file and limit, and its signed relative differences [C, S, H, W]; None
    where no file shows what differs."""
    images = TensorPair.read(base.images[layer.image], new.images[layer.image])
    pair = next(pair for pair in images if pair.place == layer.place)
    row = pair.rows[0]
    layout = LAYOUTS.get(row.layout)
    values = pair.tensors() if layout is not None and not layout.of_pieces else None
    source, (slices, height, width) = "kept tensors", map_shape(row)
    if values is None:
        source, values, slices = "pixels", pair.pixels(), row.side
    if values is None:
        return None
    shown = {channel: place for place, channel in enumerate(values[0])}
    ids = [channel for channel in layer.changed if channel in shown][:_CHANNELS]
    if not ids:
        return None
    before, after, slack = (side[[shown[channel] for channel in ids]] for side in values[1:])
    data = signed(before, after, scale_of(*pair.stats), slack)
    data = data.reshape(len(ids), slices, height, width)[:, : _OPTIONS.max_slices]
    plan = grid.plan(data.shape, _OPTIONS, strip=layout is not None and layout.strip)
    what = ("", layer.image, layer.label, layer.place.stem, tuple(ids), source)
    return DifferenceMap(*what, math.nan, plan, data.shape[1]), data
