"""What a comparison found: as data, in words, as JSON, as verdicts for JUnit, and as maps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from featviz.diff.compare import Change, Finding, ImagePair, map_shape, scale_of, signed
from featviz.drawing import colormap, grid
from featviz.drawing.picture import write_png
from featviz.drawing.values import ValueLimits, to_levels
from featviz.errors import CHECK_FAILED
from featviz.files.urls import Url
from featviz.layout.layouts import LAYOUTS
from featviz.options import DiffThresholds, DrawOptions
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
HEADINGS = (
    *("layer", "type", "tensor", "images", "channels"),
    *("absolute", "relative", "cosine", "most changed", "by"),
)
"""Headings of a table of layers; `cells` gives its rows."""
_MOST_CHANGED = 5
"""Channels of a layer that a summary names."""
_PICTURES = 8
"""How many layers are drawn at most, each in its worst image."""
_CHANNELS = 16
"""How many channels a picture shows at most."""
_OPTIONS = DrawOptions(min_tile=96)


@dataclass(frozen=True)
class OnlyIn:
    """The images and layers that one run has and the other has not."""

    images: Mapping[str, str] = field(default_factory=dict)
    """What became of each image, by name, in the other run."""
    places: Mapping[tuple[Place, str], str] = field(default_factory=dict)
    """What became of each (place, type of the layer) in the other run."""

    def __bool__(self) -> bool:
        return bool(self.images or self.places)


@dataclass(frozen=True)
class LayerFindings:
    """One place of the model, over all images."""

    findings: tuple[Finding, ...]

    @property
    def place(self) -> Place:
        """Where in the model the tensors were met."""
        return self.findings[0].place

    @property
    def type(self) -> str:
        """Class name of the layer."""
        return self.findings[0].type

    @property
    def label(self) -> str:
        """`layer1.0.conv1`; the class name for the model itself."""
        return self.place.layer or self.type

    @property
    def differing(self) -> tuple[Finding, ...]:
        """The findings of the images in which the layer differs."""
        return tuple(finding for finding in self.findings if finding.differs.any())

    @property
    def worst(self) -> Finding:
        """The finding of the image in which the layer differs most; of equals the first."""
        return max(self.findings, key=lambda finding: finding.severity)

    @property
    def reason(self) -> str | None:
        """Why the layer could not be compared, in the first image where it could not."""
        return next((one.reason for one in self.findings if one.reason), None)

    @property
    def channels(self) -> tuple[int, int]:
        """How many channels differ in some image, and how many there are."""
        differing = np.zeros(max(len(one.differs) for one in self.findings), bool)
        for one in self.findings:
            differing[: len(one.differs)] |= one.differs
        return int(differing.sum()), len(differing)

    @property
    def channel_images(self) -> tuple[int, int]:
        """The same, with each channel counted in each image."""
        return _summed((int(one.differs.sum()), len(one.differs)) for one in self.findings)

    @property
    def cosine(self) -> float:
        """The smallest `Change.layer_cosine` over the images in which the layer differs; NaN where
        only statistics are known."""
        cosines = [one.change.layer_cosine for one in self.differing if one.reason is None]
        return float(np.fmin.reduce(cosines, initial=np.nan))

    def over_images(self) -> Change:
        """The worst change of each channel over the images that could be compared, of the channels
        that all of these have; may be empty."""
        changes = [one.change for one in self.findings if one.reason is None]
        count = min((len(change.relative) for change in changes), default=0)

        def by_image(name: str) -> list[np.ndarray]:
            return [getattr(change, name)[:count] for change in changes] or [np.zeros(0)]

        largest = {name: np.max(by_image(name), 0) for name in ("absolute", "relative", "unlike")}
        smallest = np.fmin.reduce(by_image("cosine"), 0)
        return Change(**largest, cosine=smallest, products=np.full((count, 3), np.nan))

    def most_changed(self) -> list[int]:
        """The channels that differ, the most changed first, of those that all images have."""
        if self.reason is not None:
            return []
        count = min(len(one.differs) for one in self.findings)
        differs = np.any([one.differs[:count] for one in self.findings], axis=0)
        return self.over_images().worst_first(differs)[:_MOST_CHANGED]


@dataclass(frozen=True)
class DiffResult:
    """The result of comparing two runs."""

    base: Path | Url
    new: Path | Url
    asked: DiffThresholds
    images: tuple[str, ...]
    layers: tuple[LayerFindings, ...]
    """The layers that both runs have, in the order in which the model came to them."""
    only_in_base: OnlyIn
    only_in_new: OnlyIn
    incomplete: Mapping[str, Sequence[str]]
    """Names of images that are left out as incomplete, under `base` and `new`."""
    maps: tuple[DifferenceMap, ...] = field(default=())

    @property
    def differing(self) -> tuple[LayerFindings, ...]:
        """The layers that differ."""
        return tuple(layer for layer in self.layers if layer.differing)

    @property
    def first(self) -> LayerFindings | None:
        """The first layer that diverges."""
        return next(iter(self.differing), None)

    @property
    def channels(self) -> tuple[int, int]:
        """How many channels of all layers differ in some image, and how many there are."""
        return _summed(layer.channels for layer in self.layers)

    @property
    def channel_images(self) -> tuple[int, int]:
        """The same, with each channel counted in each image."""
        return _summed(layer.channel_images for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Share of channels that differ, each counted in each image."""
        differing, total = self.channel_images
        return differing / total if total else 0.0

    @property
    def within(self) -> bool:
        """Whether no more channels differ than the thresholds allow."""
        return self.ratio <= self.asked.max_diff_ratio

    @property
    def equal(self) -> bool:
        """Whether the runs are equal, as far as the thresholds ask."""
        added = self.only_in_new and not self.asked.ignore_added
        return self.within and not self.only_in_base and not added

    @property
    def exit_code(self) -> int:
        """0, or 4 where the runs differ."""
        return 0 if self.equal else CHECK_FAILED


def _summed(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    pairs = list(counts)
    return sum(differing for differing, _ in pairs), sum(total for _, total in pairs)


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
    found = []
    for layer in result.layers:
        (differing, total), worst = layer.channels, layer.over_images()
        words = f"{differing:,} of {counted(total, 'channel')} differ"
        if layer.reason:
            words += f": {layer.reason}"
        else:
            size = f"{worst.absolute.max():.3g} ({worst.relative.max():.3g} relative)"
            words += f"; largest difference {size}"
        held = result.within or not layer.differing
        found.append(Verdict(f"{layer.label} {layer.place.stem}", held, words))
    sides = (
        ("only in BASE", result.only_in_base, False),
        ("only in NEW", result.only_in_new, result.asked.ignore_added),
    )
    for name, side, ignored in sides:
        words = "; ".join(only_words(side)) or "nothing"
        found.append(Verdict(name, ignored or not side, words))
    return found


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
    layers = []
    for layer in result.layers:
        worst, rows = layer.worst, zip(HEADINGS[3:], cells(layer)[3:], strict=True)
        change = np.where(worst.change.unlike > 0, 1.0, worst.change.relative)
        head = (layer.place, layer.label, layer.type, *layer.channels)
        said = [(heading, value) for heading, value in rows if value]
        drawn = maps.get((layer.label, layer.place.stem))
        layers.append(ComparedLayer(*head, worst.severity[0], said, worst.image, change, drawn))
    lists = {
        "Only in BASE": only_words(result.only_in_base),
        "Only in NEW": only_words(result.only_in_new),
        **{f"Incomplete in {side.upper()}": names for side, names in result.incomplete.items()},
    }
    return Comparison(result.equal, verdict_words(result), layers, lists)


def as_json(result: DiffResult) -> dict[str, Any]:
    """The whole result, for JSON."""
    differing, total = result.channel_images
    named = ("file", "image", "label", "stem", "source", "limit")
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
        "only_in_base": _only(result.only_in_base),
        "only_in_new": _only(result.only_in_new),
        "incomplete": {side: list(names) for side, names in result.incomplete.items()},
        "maps": [
            {name: getattr(one, name) for name in named} | {"channels": list(one.channels)}
            for one in result.maps
        ],
    }


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


def draw(
    layers: Sequence[LayerFindings], base: ReadRun, new: ReadRun, folder: Path
) -> list[DifferenceMap]:
    """Draw the worst of the layers that differ, the first always, on one scale for all.

    The colours' ends are the largest relative difference of all pictures; what has a number on
    one side only is magenta.

    Raises:
        StoreError: a file cannot be read or written.
    """
    differing = [layer for layer in layers if layer.differing and not layer.reason]
    ranked = sorted(differing[1:], key=lambda layer: layer.worst.severity, reverse=True)
    places = {layer.place for layer in [*differing[:1], *ranked][:_PICTURES]}
    worst = [layer for layer in differing if layer.place in places]
    found = [own for layer in worst if (own := _differences(layer, base, new)) is not None]
    magnitudes = [np.abs(data) for _, data, _ in found]
    largest = [float(np.max(m, initial=0.0, where=np.isfinite(m))) for m in magnitudes]
    limit = max(largest, default=0.0) or 1.0
    colors, drawn = colormap.colored("coolwarm", 0.0), []
    for number, (one, data, type) in enumerate(found):
        name = safe_name(f"{number:02d}_{one.label}.{one.stem}.png")
        drawn.append(replace(one, file=name, limit=limit))
        maps = data.reshape(-1, *data.shape[2:])
        tiles = to_levels(maps, ValueLimits.fixed(-limit, limit), colors.levels, colors.nonfinite)
        pieces = grid.strips(one.plan, tiles, colors.pad)
        text = {
            "Software": "featviz",
            "Layer": f"{one.label} ({type})",
            "Image": one.image,
            "Channels": ",".join(map(str, one.channels)),
            "Range": f"NEW - BASE, relative: {-limit:g} to {limit:g}",
            "Source": one.source,
        }
        size = one.plan.height, one.plan.width
        with atomic(folder / name) as file:
            write_png(file, size, pieces, colors=colors.colors, text=text)
    return drawn


def _differences(
    layer: LayerFindings, base: ReadRun, new: ReadRun
) -> tuple[DifferenceMap, np.ndarray, str] | None:
    """The map of a layer before it has a file and a limit, its signed relative differences
    [C, S, H, W], NaN where one side is not finite, and the layer's class; None where no file shows
    what differs."""
    worst, place = layer.worst, layer.place
    images = ImagePair.read(base.images[worst.image], new.images[worst.image])
    row, _ = images.rows(place)
    layout = LAYOUTS.get(row.layout)
    values = images.tensors(place) if layout is not None and layout.in_map_order else None
    source, (slices, height, width) = "kept tensors", map_shape(row)
    if values is None:
        source, values, slices = "pixels", images.pixels(place), row.side
    if values is None:
        return None
    changed = worst.change.worst_first(worst.differs)
    ids = [channel for channel in changed if channel in set(values[0].ids)][:_CHANNELS]
    if not ids:
        return None
    before, after = values[0].only(ids), values[1].only(ids)
    slack = before.slack + after.slack
    data = signed(before.data, after.data, scale_of(*images.stats(place)), slack)
    data = data.reshape(len(ids), slices, height, width)[:, : _OPTIONS.max_slices]
    plan = grid.plan(data.shape, _OPTIONS, strip=layout is not None and layout.strip)
    what = ("", worst.image, layer.label, place.stem, tuple(ids), source)
    return DifferenceMap(*what, math.nan, plan, data.shape[1]), data, layer.type
