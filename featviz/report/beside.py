"""What is shown beside a run: audits, kernels and exemplars of the same model; audits and kernels
have pages of their own, too."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featviz.errors import CompareError, StoreError
from featviz.options import ReportOptions
from featviz.report import words
from featviz.report.views import LayerPage, PictureView
from featviz.report.words import Key
from featviz.rundir import AUDIT_FILE
from featviz.rundir.audits import ReadAudit, read_audit
from featviz.rundir.exemplars import ExemplarRecord, read_pictures, read_record
from featviz.rundir.image import ReadImage
from featviz.rundir.kernels import ReadKernels, read_kernels
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import Audit, AuditRow
from featviz.text import by, counted, listed, quoted

log = logging.getLogger(__name__)

_DIGESTS = ("parameters", "sha256")
"""Entries of a model's record that tell models apart whatever they are called, the surest first:
the same parameters may come from two files."""
_NAMES = ("name", "weights", "seed")
"""Entries that do so where a model has no digest, as torchvision's own."""
_SHOWN = 12
"""Digits of a digest that a message shows."""
_LISTED = 5
"""Layers that a message names."""

Box = tuple[int, int, int, int]
"""Left, top, width and height in pixels of a picture."""


@dataclass(frozen=True)
class Extra:
    """A picture beside the maps of a layer: kernels, suspects of an audit, or exemplars."""

    title: str
    words: str
    picture: PictureView
    channels: Mapping[int, Box | PictureView]
    """Where a channel is in the picture, or a picture of its own."""
    key: Key | None = None


@dataclass(frozen=True)
class AuditedLayer:
    """A row of the table of an audit."""

    row: AuditRow
    id: str
    suspects: Sequence[Extra]
    home: str
    """The layer on whose page it stands: itself, or where the run has no page of it, the one before
    it whose maps come to it; else empty."""

    @property
    def found(self) -> Mapping[str, Sequence[int]]:
        """Channels by what was found of them; what was found of none is left out."""
        return {name: channels for name, channels in self.row.findings.items() if channels}


@dataclass(frozen=True)
class AuditViews:
    """An audit as pages show it."""

    record: Audit
    layers: Sequence[AuditedLayer]

    @classmethod
    def of_record(cls, audit: ReadAudit, pages: Collection[str] | None = None) -> AuditViews:
        """Sort the pictures of an audit to its layers, and these to the pages of a run.

        Args:
            pages: names of the layers of the run; None where each layer has its own place.
        """
        drawn: dict[str, list[Extra]] = {}
        for number, own in enumerate(audit.record.drawn):
            if (size := audit.pictures.pixels.get(own.file)) is None:
                continue
            shown = words.channel_list(own.channels)
            alt = f"Suspects of {own.layer}, channels {shown}, with the images that excite each"
            told = f"{len(own.channels)} of {counted(own.suspects, 'channel')} with a finding"
            if own.shown and own.shown != own.layer:
                told += f"; the maps are those of {own.shown}, which come to {own.layer}"
            top, height = own.rows or (0, 0)
            boxes = {c: (0, top + n * height, size[0], height) for n, c in enumerate(own.channels)}
            picture = PictureView(f"s{number}", audit.pictures, own.file, size, f"{alt} most")
            extra = Extra("Suspects of the audit", told, picture, boxes if own.rows else {})
            drawn.setdefault(own.layer, []).append(extra)
        layers = []
        for n, row in enumerate(audit.record.layers):
            home = row.layer or row.label
            if pages is not None:
                names = (sheet.shown for sheet in audit.record.drawn if sheet.layer == row.label)
                home = next((name for name in (home, *names) if name in pages), "")
            layers.append(AuditedLayer(row, f"audited-{n:03d}", drawn.get(row.label, ()), home))
        return cls(audit.record, layers)

    @property
    def total(self) -> Mapping[str, int]:
        """How many channels of all layers have each finding, those that were looked for."""
        counts: dict[str, int] = {}
        for layer in self.layers:
            for name, channels in layer.row.findings.items():
                counts[name] = counts.get(name, 0) + len(channels)
        return counts

    @property
    def dead(self) -> str | None:
        """`4 in 1 layer, by the audit of 20 images`; None where no layer could be judged."""
        found = [own["dead"] for layer in self.layers if "dead" in (own := layer.row.findings)]
        if not found:
            return None
        count, layers = sum(map(len, found)), counted(sum(map(bool, found)), "layer")
        where = f"{count:,} in {layers}" if count else "none"
        return f"{where}, by the audit of {counted(self.record.images.seen, 'image')}"

    def of(self, name: str) -> Mapping[str, list[int]]:
        """What was found of a layer, all its calls together."""
        found: dict[str, list[int]] = {}
        for layer in self.layers:
            for finding, channels in layer.found.items() if layer.home == name else ():
                found[finding] = sorted({*found.get(finding, ()), *channels})
        return found


def read_extras(
    run: ReadRun, pages: Sequence[LayerPage], options: ReportOptions
) -> tuple[dict[str, list[Extra]], AuditViews | None]:
    """Read what is to be shown beside a run: pictures by the ids of the groups of figures with
    which they stand, and the audit that was given or lies in the run.

    Raises:
        StoreError: one of them is not what it should be, or shows nothing of the run.
        CompareError: it is of another model.
    """
    extras: dict[str, list[Extra]] = {g.id: [] for page in pages for g in page.groups}
    firsts = {page.name: page.groups[0].id for page in pages}
    if options.kernels is not None:
        kernels = read_kernels(options.kernels)
        check(run, "kernels", options.kernels, kernels.model)
        drawn = dict(kernel_pictures(kernels))
        for layer in drawn.keys() & firsts.keys():
            extras[firsts[layer]].append(drawn[layer])
        _check_layers(bool(drawn.keys() & firsts.keys()), "kernels", options.kernels, drawn)
    audit = None
    if (found := read_audit(run.root, options.audit)) is not None:
        check(run, "audit", options.audit or run.root / AUDIT_FILE, found.record.model)
        audit = AuditViews.of_record(found, firsts.keys())
        for row in audit.layers:
            extras.get(firsts.get(row.home, ""), []).extend(row.suspects)
    if options.exemplars is not None:
        record = read_record(options.exemplars)
        check(run, "exemplars", options.exemplars, record.model)
        ids = {(page.name, group.stem): group.id for page in pages for group in page.groups}
        sheets = dict(_exemplars(record, read_pictures(options.exemplars, record)))
        for place in sheets.keys() & ids.keys():
            extras[ids[place]] += sheets[place]
        layers = dict.fromkeys(layer for layer, _ in sheets)
        _check_layers(bool(sheets.keys() & ids.keys()), "exemplars", options.exemplars, layers)
    return extras, audit


def _check_layers(some: bool, kind: str, place: Path, layers: Collection[str]) -> None:
    if not some:
        raise StoreError(
            f"{quoted(str(place))} has {kind} of no layer of this run",
            "run again with these --layers: "
            + listed([quoted(name or ".") for name in layers], _LISTED),
        )


def check(run: ReadRun, option: str, place: Path, given: Mapping[str, Any]) -> None:
    """Refuse what is of another model; warn where that is not known.

    Args:
        option: what names it, as `exemplars`; the command that makes it has the same name.
        given: the model in its record.

    Raises:
        CompareError: the models differ; names what differs, and in what.
    """
    model = run.record.get("model") or {}
    where = f"--{option} {quoted(str(place))}"
    names = [name for name in _DIGESTS if model.get(name) and given.get(name)][:1]
    if not any(record.get(name) for record in (model, given) for name in _DIGESTS):
        names = [name for name in _NAMES if name in model and name in given]

    def told(record: Mapping[str, Any]) -> str:
        own = [n for n in names if n != "name" and model.get(n) != given.get(n)]
        inside = ", ".join(f"{name} {quoted(str(record.get(name)))[:_SHOWN]}" for name in own)
        return quoted(words.name_of(record)) + (f" ({inside})" if inside else "")

    if any(model.get(name) != given.get(name) for name in names):
        raise CompareError(
            f"{where} is of another model than the run {quoted(str(run.place))}: "
            f"{told(given)} there, {told(model)} in the run",
            f"make it with featviz {option} {quoted(words.name_of(model))}, or report a run of "
            f"{quoted(words.name_of(given))}",
        )
    if not names:
        log.warning("%s: whether it is of the run's model is not known", where)


def kernel_pictures(kernels: ReadKernels) -> Iterator[tuple[str, Extra]]:
    """The kernels of each convolution under its name: a tile, or a row of tiles, for each channel
    that it makes."""
    for number, row in enumerate(kernels.pictures.captures.values()):
        alt, plan = f"{counted(row.maps, 'kernel')} of {row.label}", row.plan
        size = (plan.width, plan.height)
        picture = PictureView(f"k{number}", kernels.pictures, row.file, size, alt)
        what = "mean over the inputs, " if row.layout == "mean" else ""
        inputs = counted(row.shape[1] if len(row.shape) > 1 else 1, "input")
        some = f"{len(row.drawn)} of " if len(row.drawn) < row.maps else ""
        told = (
            f"{what}{inputs} to a channel · {some}{counted(row.maps, 'kernel')} · {by(row.shape)} "
            f"· weights {words.span(row.min, row.max)}"
        )
        boxes: dict[int, Box | PictureView] = {
            channel: plan.box(slot * row.side) for slot, channel in enumerate(row.drawn)
        }
        key = words.key(row, kernels.options)
        yield row.layer, Extra("Kernels", told, picture, boxes, key)


def _exemplars(
    record: ExemplarRecord, pictures: ReadImage
) -> Iterator[tuple[tuple[str, str], list[Extra]]]:
    """The sheets of each tensor, one for each class with `--per-class`, by its layer and stem."""
    found: dict[tuple[str, str], list[Extra]] = {}
    largest = "value" if record.options["by"] == "max" else "mean"
    for number, layer in enumerate(record.layers):
        channels: dict[int, Box | PictureView] = {}
        for row in layer.channels:
            if row.file:
                best = ", ".join(f"{one.image} {words.number(one.value)}" for one in row.exemplars)
                alt = f"What excites channel {row.channel} of {layer.label} most: {best}"
                size = pictures.pixels[row.file]
                channels[row.channel] = PictureView("", pictures, row.file, size, alt)
        told = f"of {counted(record.images.seen, 'image')} those with the largest {largest}"
        if layer.receptive_field.how == "computed":
            told += f"; a unit sees {by(layer.receptive_field.size)} pixels of the input"
        title = f"Exemplars: {layer.class_name}" if layer.class_name else "Exemplars"
        alt = f"Exemplars of all channels of {layer.label}"
        size = pictures.pixels[layer.sheet]
        sheet = PictureView(f"e{number}", pictures, layer.sheet, size, alt)
        own = Extra(title, told, sheet, channels)
        found.setdefault((layer.label, layer.stem), []).append(own)
    yield from found.items()
