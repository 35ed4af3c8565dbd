"""What a comparison found, in words, as JSON and as verdicts for JUnit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from featviz.diff.pairing import OnlyIn
from featviz.diff.result import DiffResult, Finding, LayerFindings
from featviz.records import ComparedLayer, Comparison, DifferenceMap, TextTable, Verdict, finite
from featviz.text import counted

SCHEMA_VERSION = 1
"""Version of the JSON document. 1: first release."""

HEADINGS = (
    "layer",
    "type",
    "tensor",
    "images",
    "channels",
    "absolute",
    "relative",
    "cosine",
    "most changed",
    "by",
)
"""Headings of a table of layers; `cells` gives its rows."""


def cells(layer: LayerFindings) -> tuple[str, ...]:
    """A row of HEADINGS: how many images and channels of a layer differ, and by how much at most;
    a channel differs that does so in some image; the cosine is the smallest of all images."""
    differing, total = layer.channels
    names = (layer.label, layer.type, layer.place.stem)
    counts = (f"{len(layer.differing)}/{len(layer.findings)}", f"{differing:,}/{total:,}")
    if layer.reason is not None:
        return (*names, *counts, "", "", "", layer.reason, "")
    change = layer.over_images()
    unlike = f" ({change.unlike.max()} not finite)" if change.unlike.any() else ""
    return (
        *names,
        *counts,
        f"{change.absolute.max():.3g}{unlike}",
        f"{change.relative.max():.3g}",
        f"{layer.cosine:.6f}" if math.isfinite(layer.cosine) else "",
        ", ".join(map(str, layer.most_changed())),
        " or ".join(sorted({one.by for one in layer.findings})),
    )


def diff_table(result: DiffResult) -> TextTable:
    """For people: a row for each layer that differs."""
    footer = [
        *(f"only in BASE: {line}" for line in only_words(result.only_in_base)),
        *(f"only in NEW: {line}" for line in only_words(result.only_in_new)),
        verdict_words(result),
    ]
    numbers = ("images", "channels", "absolute", "relative", "cosine")
    return TextTable(HEADINGS, numbers, [cells(layer) for layer in result.differing], (), footer)


def verdict_words(result: DiffResult) -> str:
    """The whole result in a line."""
    differing, total = result.channels
    first = result.first
    where = "" if first is None else f", first at {first.label} ({first.type})"
    tensors, images = counted(len(result.layers), "tensor"), counted(len(result.images), "image")
    share = f"{result.ratio:.2%}"
    if len(result.images) > 1:
        some, every = result.channel_images
        share = f"{some:,} of {every:,} counted in each image, {share}"
    return (
        f"{'equal' if result.equal else 'different'}: {tensors} of {images} compared, "
        f"{differing:,} of {counted(total, 'channel')} differ ({share}){where}"
    )


def verdicts(result: DiffResult) -> list[Verdict]:
    """One for each layer, and one each for what only one run has."""
    ignored = result.asked.ignore_added
    return [
        *(
            Verdict(_title(layer), result.within or not layer.differing, layer_words(layer))
            for layer in result.layers
        ),
        _one_sided("only in BASE", result.only_in_base, False),
        _one_sided("only in NEW", result.only_in_new, ignored),
    ]


def _title(layer: LayerFindings) -> str:
    return f"{layer.label} {layer.place.stem}"


def _one_sided(name: str, side: OnlyIn, ignored: bool) -> Verdict:
    return Verdict(name, ignored or not side, "; ".join(only_words(side)) or "nothing")


def layer_words(layer: LayerFindings) -> str:
    """One line on a layer."""
    differing, total = layer.channels
    if layer.reason:
        return f"{differing:,} of {counted(total, 'channel')} differ: {layer.reason}"
    worst = layer.over_images()
    return (
        f"{differing:,} of {counted(total, 'channel')} differ; largest difference "
        f"{worst.absolute.max():.3g} ({worst.relative.max():.3g} relative)"
    )


def only_words(side: OnlyIn) -> list[str]:
    """A line for each image and layer that the other run lacks."""
    images = [f"image {name} ({reason})" for name, reason in side.images.items()]
    return images + [
        f"layer {place.layer or type} {place.stem} ({reason})"
        for (place, type), reason in side.places.items()
    ]


def comparison(result: DiffResult) -> Comparison:
    """What the page of the whole result shows."""
    maps = {(one.label, one.stem): one for one in result.maps}
    return Comparison(
        result.equal,
        verdict_words(result),
        [_compared(layer, maps.get((layer.label, layer.place.stem))) for layer in result.layers],
        {
            "Only in BASE": only_words(result.only_in_base),
            "Only in NEW": only_words(result.only_in_new),
            **{f"Incomplete in {side.upper()}": names for side, names in result.incomplete.items()},
        },
    )


def _compared(layer: LayerFindings, drawn: DifferenceMap | None) -> ComparedLayer:
    worst, rows = layer.worst, zip(HEADINGS[3:], cells(layer)[3:], strict=True)
    change = np.where(worst.change.unlike > 0, 1.0, worst.change.relative)
    head = (layer.place, layer.label, layer.type, *layer.channels)
    said = [(heading, value) for heading, value in rows if value]
    return ComparedLayer(*head, worst.severity[0], said, worst.image, change, drawn)


def as_json(result: DiffResult) -> dict[str, Any]:
    """The whole result, for JSON."""
    differing, total = result.channel_images
    return {
        "schema_version": SCHEMA_VERSION,
        "base": str(result.base),
        "new": str(result.new),
        **vars(result.asked),
        "equal": result.equal,
        "images": list(result.images),
        "channels": {"differing": differing, "total": total, "ratio": result.ratio},
        "first_divergence": None if result.first is None else _where(result.first),
        "layers": [_layer(layer) for layer in result.layers],
        "only_in_base": _only(result.only_in_base),
        "only_in_new": _only(result.only_in_new),
        "incomplete": {side: list(names) for side, names in result.incomplete.items()},
        "maps": [_drawn(one) for one in result.maps],
    }


def _drawn(one: DifferenceMap) -> dict[str, Any]:
    names = ("file", "image", "label", "stem", "source", "limit")
    return {**{name: getattr(one, name) for name in names}, "channels": list(one.channels)}


def _where(layer: LayerFindings) -> dict[str, Any]:
    first = layer.findings[0]
    return {
        "layer": layer.place.layer,
        "type": layer.type,
        "index": first.index,
        **{name: getattr(layer.place, name) for name in ("kind", "call", "key")},
        "image": layer.worst.image,
    }


def _layer(layer: LayerFindings) -> dict[str, Any]:
    change, (differing, total) = layer.over_images(), layer.channel_images
    return {
        **_where(layer),
        "by": sorted({one.by for one in layer.findings}),
        "reason": layer.reason,
        "images": {one.image: _numbers(one) for one in layer.findings},
        "differing": differing,
        "total": total,
        "most_changed": layer.most_changed(),
        "channels": {
            "absolute": change.absolute.tolist(),
            "relative": change.relative.tolist(),
            "cosine": [finite(float(value)) for value in change.cosine],
            "unlike": change.unlike.tolist(),
        },
    }


def _numbers(one: Finding) -> dict[str, Any]:
    if one.reason is not None:
        return {"differing": len(one.differs), "absolute": None, "relative": None, "cosine": None}
    return {
        "differing": int(one.differs.sum()),
        "absolute": float(one.change.absolute.max()),
        "relative": float(one.change.relative.max()),
        "cosine": finite(one.change.layer_cosine),
    }


def _only(side: OnlyIn) -> dict[str, Any]:
    return {
        "images": dict(side.images),
        "layers": [
            {**place._asdict(), "type": type, "reason": reason}
            for (place, type), reason in side.places.items()
        ],
    }
