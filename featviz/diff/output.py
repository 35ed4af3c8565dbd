"""The result of a comparison as a table, as JSON, and as verdicts for JUnit."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from featviz.diff.comparison import ComparedLayer, Comparison, DifferenceMap, OnlyIn
from featviz.records import Verdict, finite
from featviz.text import TextTable, counted

SCHEMA_VERSION = 1
"""The version of the JSON document. 1: first release."""


def diff_table(result: Comparison) -> TextTable:
    """A row for each layer that differs, for people."""
    rows = [layer.cells for layer in result.differing]
    footer = [f"only in BASE: {line}" for line in result.only_in_base.lines]
    footer += [f"only in NEW: {line}" for line in result.only_in_new.lines]
    return TextTable(
        headings=tuple(rows[0]) if rows else (),
        numbers=("images", "channels", "absolute", "relative", "cosine"),
        rows=[tuple(row.values()) for row in rows],
        footer=[*footer, result.summary],
    )


def verdicts(result: Comparison) -> list[Verdict]:
    """One for each layer, and one each for what only one run has."""
    checks = []
    for layer in result.layers:
        differing, total = layer.count
        message = f"{differing:,} of {counted(total, 'channel')} differ"
        if layer.reason:
            message += f": {layer.reason}"
        else:
            absolute = layer.channels.absolute.max(initial=0)
            relative = layer.channels.relative.max(initial=0)
            message += f"; largest difference {absolute:.3g} ({relative:.3g} relative)"
        held = result.within or not layer.differs
        checks.append(Verdict(f"{layer.label} {layer.key.stem}", held, message))
    removed = result.only_in_base.lines
    added = result.only_in_new.lines
    added_held = not added or result.thresholds.ignore_added
    checks.append(Verdict("only in BASE", not removed, "; ".join(removed) or "nothing"))
    checks.append(Verdict("only in NEW", added_held, "; ".join(added) or "nothing"))
    return checks


def as_json(result: Comparison) -> dict[str, Any]:
    """The whole result, for JSON."""
    differing, total = result.channel_images
    layers = [_layer_json(layer) for layer in result.layers]
    first = next((row for row in layers if row["differing"]), None)
    if first is not None:
        names = ("layer", "type", "index", "kind", "call", "key", "image")
        first = {name: first[name] for name in names}
    return {
        "schema_version": SCHEMA_VERSION,
        "base": str(result.base),
        "new": str(result.new),
        **structs.asdict(result.thresholds),
        "equal": result.equal,
        "images": list(result.images),
        "channels": {"differing": differing, "total": total, "ratio": result.ratio},
        "first_divergence": first,
        "layers": layers,
        "only_in_base": _only_in_json(result.only_in_base),
        "only_in_new": _only_in_json(result.only_in_new),
        "incomplete": {side: list(names) for side, names in result.incomplete.items()},
        "maps": [_map_json(layer.difference) for layer in result.layers if layer.difference],
    }


def _layer_json(layer: ComparedLayer) -> dict[str, Any]:
    differing, total = layer.channel_images
    return {
        "type": layer.type,
        "index": layer.index,
        **layer.key._asdict(),
        "image": layer.image,
        "by": layer.by,
        "reason": layer.reason,
        "images": {name: change._asdict() for name, change in layer.images.items()},
        "differing": differing,
        "total": total,
        "most_changed": layer.most_changed,
        "channels": {
            "absolute": layer.channels.absolute.tolist(),
            "relative": layer.channels.relative.tolist(),
            "unlike": layer.channels.unlike.tolist(),
            "cosine": [finite(value) for value in layer.channels.cosine.tolist()],
        },
    }


def _only_in_json(only_in: OnlyIn) -> dict[str, Any]:
    return {
        "images": dict(only_in.images),
        "layers": [
            {**key._asdict(), "type": type, "reason": reason}
            for key, type, reason in only_in.captures
        ],
    }


def _map_json(difference: DifferenceMap) -> dict[str, Any]:
    return {
        "file": difference.file,
        "image": difference.image,
        "label": difference.label,
        "stem": difference.stem,
        "source": difference.source,
        "limit": difference.limit,
        "channels": difference.channels,
    }
