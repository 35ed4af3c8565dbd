"""What a comparison found: summed up, as a table, as JSON, as verdicts for JUnit, and as maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from featviz.diff.compare import Finding, TensorPair, map_shape, scale_of, signed, worst_first
from featviz.drawing import colormap, grid
from featviz.drawing.picture import write_png
from featviz.drawing.values import ValueLimits, to_levels
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions
from featviz.records import (
    ComparedLayer,
    Comparison,
    DifferenceMap,
    Place,
    TextTable,
    Verdict,
    finite,
)
from featviz.rundir.atomic import atomic
from featviz.rundir.read import ReadRun
from featviz.text import counted, safe_name

SCHEMA_VERSION = 1
"""Version of the JSON document. 1: first release."""
_PICTURES = 8
"""How many layers are drawn at most, each in its worst image."""
_CHANNELS = 16
_OPTIONS = DrawOptions(min_tile=96)


def summed_up(findings: Sequence[Finding]) -> ComparedLayer:
    """One place of the model, from what was found of it in each image."""
    worst, first = max(findings, key=lambda one: one.severity), findings[0]
    reason = next((one.reason for one in findings if one.reason), None)
    compared = [one for one in findings if one.reason is None]
    differs = np.zeros(max(len(one.differs) for one in findings), bool)
    images: dict[str, dict[str, float | None]] = {}
    for one in findings:
        differs[: len(one.differs)] |= one.differs
        numbers = (one.change.absolute.max(), one.change.relative.max(), one.change.layer_cosine)
        known = (None,) * 3 if one.reason else tuple(finite(float(number)) for number in numbers)
        names = ("differing", "absolute", "relative", "cosine")
        images[one.image] = dict(zip(names, (int(one.differs.sum()), *known), strict=True))
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
    footer = [f"only in BASE: {line}" for line in result.only_in_base.words]
    footer += [f"only in NEW: {line}" for line in result.only_in_new.words]
    numbers = ("images", "channels", "absolute", "relative", "cosine")
    rows = [layer.cells for layer in result.differing]
    headings = tuple(rows[0]) if rows else ()
    return TextTable(
        headings, numbers, [tuple(row.values()) for row in rows], (), [*footer, result.words]
    )


def verdicts(result: Comparison) -> list[Verdict]:
    """One for each layer, and one each for what only one run has."""
    found = []
    for layer in result.layers:
        words = f"{layer.differing:,} of {counted(layer.total, 'channel')} differ"
        if layer.reason:
            words += f": {layer.reason}"
        else:
            absolute, relative = (layer.channels[name].max() for name in ("absolute", "relative"))
            words += f"; largest difference {absolute:.3g} ({relative:.3g} relative)"
        held = result.within or not layer.differing
        found.append(Verdict(f"{layer.label} {layer.place.stem}", held, words))
    for name, side, ignored in (
        ("only in BASE", result.only_in_base, False),
        ("only in NEW", result.only_in_new, result.asked.ignore_added),
    ):
        lines = side.words
        found.append(Verdict(name, ignored or not lines, "; ".join(lines) or "nothing"))
    return found


def as_json(result: Comparison) -> dict[str, Any]:
    """The whole result, for JSON."""
    differing, total = result.channel_images
    sides = {"only_in_base": result.only_in_base, "only_in_new": result.only_in_new}
    named = ("file", "image", "label", "stem", "source", "limit", "channels")
    maps = [layer.difference for layer in result.layers if layer.difference]
    return {
        "schema_version": SCHEMA_VERSION,
        "base": str(result.base),
        "new": str(result.new),
        **structs.asdict(result.asked),
        "equal": result.equal,
        "images": list(result.images),
        "channels": {"differing": differing, "total": total, "ratio": result.ratio},
        "first_divergence": None if result.first is None else _where(result.first),
        "layers": [_layer(layer) for layer in result.layers],
        **{
            name: {
                "images": dict(side.images),
                "layers": [
                    {**place._asdict(), "type": type, "reason": reason}
                    for (place, type), reason in side.places.items()
                ],
            }
            for name, side in sides.items()
        },
        "incomplete": {side: list(names) for side, names in result.incomplete.items()},
        "maps": [{name: getattr(one, name) for name in named} for one in maps],
    }


def _where(layer: ComparedLayer) -> dict[str, Any]:
    own = {"layer": layer.place.layer, "type": layer.type, "index": layer.index}
    return {**own, **layer.place._asdict(), "image": layer.image}


def _layer(layer: ComparedLayer) -> dict[str, Any]:
    differing, total = layer.channel_images
    each = {name: layer.channels[name].tolist() for name in ("absolute", "relative")}
    each["cosine"] = [finite(float(value)) for value in layer.channels["cosine"]]
    return {
        **_where(layer),
        "by": list(layer.by),
        "reason": layer.reason,
        "images": dict(layer.images),
        "differing": differing,
        "total": total,
        "most_changed": list(layer.most_changed),
        "channels": {**each, "unlike": layer.channels["unlike"].tolist()},
    }


def draw(
    layers: Sequence[ComparedLayer], base: ReadRun, new: ReadRun, folder: Path
) -> tuple[ComparedLayer, ...]:
    """The layers, of which the worst that differ, and the first always, are drawn on one scale.

    The colours' ends are the largest relative difference of all pictures; what has a number on
    one side only is magenta.
    """
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
    colors, drawn = colormap.colored("coolwarm", 0.0), dict[Place, DifferenceMap]()
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
        with atomic(folder / name) as file:
            size = one.plan.height, one.plan.width
            write_png(file, size, pieces, colors=colors.colors, text=text)
    return tuple(replace(layer, difference=drawn.get(layer.place)) for layer in layers)


def _differences(
    layer: ComparedLayer, base: ReadRun, new: ReadRun
) -> tuple[DifferenceMap, np.ndarray] | None:
    """The map of a layer before it has a file and a limit, and its signed relative differences
    [C, S, H, W], NaN where one side is not finite; None where no file shows what differs."""
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
    ids = [channel for channel in layer.changed if channel in set(values[0].ids)][:_CHANNELS]
    if not ids:
        return None
    before, after = values[0].only(ids), values[1].only(ids)
    slack = before.slack + after.slack
    data = signed(before.data, after.data, scale_of(*pair.stats), slack)
    data = data.reshape(len(ids), slices, height, width)[:, : _OPTIONS.max_slices]
    plan = grid.plan(data.shape, _OPTIONS, strip=layout is not None and layout.strip)
    what = ("", layer.image, layer.label, layer.place.stem, tuple(ids), source)
    return DifferenceMap(*what, math.nan, plan, data.shape[1]), data
