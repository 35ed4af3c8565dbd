"""What is shown beside a run: audits, kernels and exemplars of the same model; audits and kernels
have pages of their own, too."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from featviz.errors import CompareError, StoreError
from featviz.report import words
from featviz.report.channels import Found
from featviz.report.views import LayerPage, PictureView, ReportViews
from featviz.report.words import Key
from featviz.rundir import AUDIT_FILE
from featviz.rundir.image import ReadImage
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import AuditRow, Capture
from featviz.rundir.studies import (
    ExemplarRecord,
    ReadAudit,
    ReadKernels,
    exemplar_pictures,
    read_audit,
    read_exemplars,
    read_kernels,
)
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


@dataclass(frozen=True)
class Extras:
    """What is shown beside a run."""

    audit: ReadAudit | None
    kernels: ReadKernels | None
    exemplars: tuple[ExemplarRecord, ReadImage] | None

    @classmethod
    def read(
        cls, run: ReadRun, audit: Path | None, kernels: Path | None, exemplars: Path | None
    ) -> Extras:
        """Read what is to be shown beside a run.

        Args:
            audit: an audit.json, or its folder; None takes the one in the run, if there is one.
            kernels: the folder of some, or None; so `exemplars`.

        Raises:
            StoreError: one of them is not what it should be, or shows nothing of the run.
            CompareError: it is of another model.
        """
        by_audit = read_audit(run.root, audit)
        drawn = None if kernels is None else read_kernels(kernels)
        record = None if exemplars is None else read_exemplars(exemplars)
        if by_audit is not None:
            check(run, "audit", audit or run.root / AUDIT_FILE, by_audit.record.model)
        if drawn is not None and kernels is not None:
            check(run, "kernels", kernels, drawn.model)
            here = {row.layer for image in run.images.values() for row in image.captures.values()}
            layers = [row.layer for row in drawn.pictures.captures.values()]
            if here and here.isdisjoint(layers):
                raise StoreError(
                    f"{quoted(str(drawn.pictures.root))} has kernels of no layer of this run",
                    "run again with these --layers: "
                    + listed([quoted(name or ".") for name in layers], _LISTED),
                )
        if record is None or exemplars is None:
            return cls(by_audit, drawn, None)
        check(run, "exemplars", exemplars, record.model)
        return cls(by_audit, drawn, (record, exemplar_pictures(exemplars, record)))

    def beside(self, views: ReportViews) -> ReportViews:
        """The pages of a run, with what is given."""
        if self.kernels is not None:
            views = replace(views, kernels=kernel_views(self.kernels, views.layers))
        if self.audit is not None:
            pages = {page.name for page in views.layers}
            views = replace(views, audit=AuditViews.of_record(self.audit, pages))
        if self.exemplars is None:
            return views
        return replace(views, exemplars=exemplar_views(views.layers, *self.exemplars))


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
    digests = [name for name in _DIGESTS if model.get(name) and given.get(name)][:1]
    told = any(record.get(name) for record in (model, given) for name in _DIGESTS)
    names = digests or [name for name in _NAMES if name in model and name in given and not told]
    differing = [name for name in names if model.get(name) != given.get(name)]
    if differing:
        raise CompareError(
            f"{where} is of another model than the run {quoted(str(run.place))}: "
            f"{_said(given, differing)} there, {_said(model, differing)} in the run",
            f"make it with featviz {option} {quoted(words.name_of(model))}, or report a run of "
            f"{quoted(words.name_of(given))}",
        )
    if not names:
        log.warning("%s: whether it is of the run's model is not known", where)


def _said(model: Mapping[str, Any], names: Collection[str]) -> str:
    """`digits_cnn.pth (sha256 fda36d5078de)`."""
    own = (f"{name} {quoted(str(model.get(name)))[:_SHOWN]}" for name in names if name != "name")
    inside = ", ".join(own)
    return quoted(words.name_of(model)) + (f" ({inside})" if inside else "")


@dataclass(frozen=True)
class ExemplarView:
    """The exemplars of a tensor; with `--per-class`, those of one class."""

    title: str
    """The name of the class; else empty."""
    sheet: PictureView
    words: str
    """By what, of how many images, and what a unit sees."""
    channels: Mapping[int, PictureView]


def exemplar_views(
    pages: Sequence[LayerPage], record: ExemplarRecord, pictures: ReadImage
) -> Mapping[tuple[str, str], Sequence[ExemplarView]]:
    """Sort exemplars to the pages of layers, and the stems of tensors.

    Raises:
        StoreError: no layer of theirs has a page.
    """
    ids = {(page.name, group.stem): page.id for page in pages for group in page.groups}
    found: dict[tuple[str, str], list[ExemplarView]] = {}
    for number, layer in enumerate(record.layers):
        page = ids.get((layer.label, layer.stem))
        if page is None:
            continue

        def view(id: str, file: str, alt: str, page: str = page) -> PictureView:
            return PictureView(id, pictures, file, pictures.pixels[file], alt, page)

        shown = {}
        for row in layer.channels:
            if row.file:
                best = ", ".join(f"{one.image} {words.number(one.value)}" for one in row.exemplars)
                alt = f"What excites channel {row.channel} of {layer.label} most: {best}"
                shown[row.channel] = view(f"e{number}-{row.channel}", row.file, alt)
        by_what = "value" if record.options["by"] == "max" else "mean"
        told = f"of {counted(record.images.seen, 'image')} those with the largest {by_what}"
        if layer.receptive_field.how in ("computed", "measured"):
            told += f"; a unit sees {by(layer.receptive_field.size)} pixels of the input"
        sheet = view(f"e{number}", layer.sheet, f"Exemplars of all channels of {layer.label}")
        own = ExemplarView(layer.class_name or "", sheet, told, shown)
        found.setdefault((page, layer.stem), []).append(own)
    if not found:
        raise StoreError(
            f"{quoted(str(pictures.root))} has exemplars of no layer of this run",
            "give featviz exemplars the --layers of the run",
        )
    return found


@dataclass(frozen=True)
class KernelView:
    """The kernels of a convolution, a tile or a row of tiles for each channel that it makes."""

    id: str
    picture: PictureView
    row: Capture
    options: Mapping[str, Any]

    @property
    def words(self) -> str:
        """What a tile is."""
        inputs = self.row.shape[1] if len(self.row.shape) > 1 else 1
        what = "mean over the inputs, " if self.row.layout == "mean" else ""
        return f"{what}{counted(inputs, 'input')} to a channel"

    @property
    def brief(self) -> str:
        """How many there are, and the shape and range of their weights, on one line."""
        row, drawn = self.row, len(self.row.drawn)
        shown = f"{drawn} of " if drawn < row.maps else ""
        span = f"weights {words.number(row.min)} to {words.number(row.max)}"
        return f"{shown}{counted(row.maps, 'kernel')} · {by(row.shape)} · {span}"

    @property
    def key(self) -> Key:
        """What dark and bright are."""
        return words.key(self.row, self.options)


def kernel_views(kernels: ReadKernels, layers: Iterable[LayerPage]) -> dict[str, KernelView]:
    """The kernels of the layers of a run, by the names of these, for the pages of the layers."""
    pages = {page.name: page.id for page in layers}
    return {
        view.row.layer: replace(view, picture=replace(view.picture, home=pages[view.row.layer]))
        for view in KernelPage(kernels).layers
        if view.row.layer in pages
    }


@dataclass(frozen=True)
class KernelPage:
    """The kernels of a model as a page of their own shows them."""

    kernels: ReadKernels

    @property
    def layers(self) -> list[KernelView]:
        """In the order of the model."""
        views = []
        for n, row in enumerate(self.kernels.pictures.captures.values()):
            size = (row.plan.width, row.plan.height)
            alt = f"{counted(row.maps, 'kernel')} of {row.label}"
            picture = PictureView(f"k{n}", self.kernels.pictures, row.file, size, alt, "")
            views.append(KernelView(f"kernels-{n:03d}", picture, row, self.kernels.options))
        return views

    @property
    def name(self) -> str:
        """What the model is called."""
        return words.name_of(self.kernels.model)

    @property
    def total(self) -> int:
        """The kernels of all layers."""
        return sum(row.maps for row in self.kernels.pictures.captures.values())

    @property
    def legend(self) -> list[tuple[str, str]]:
        """What the colours mean."""
        return words.legend(self.kernels.options, self.kernels.pictures.captures.values())

    @property
    def facts(self) -> words.Facts:
        """What was drawn, for the foot of the page."""
        return words.run_facts({**self.kernels.record, "model": self.kernels.model})


@dataclass(frozen=True)
class SuspectView:
    """The picture of some suspects of a layer: a row for each, with the images that excite it."""

    picture: PictureView
    words: str
    """`8 of 17 channels with a finding`, and whose maps are shown."""
    rows: str
    """For the script, as JSON: the channels from the top, where their rows begin, and how high each
    is; without `rows`, where the audit does not say."""


@dataclass(frozen=True)
class AuditedLayer:
    """A row of the table of an audit."""

    row: AuditRow
    id: str
    suspects: Sequence[SuspectView]
    home: str
    """The layer on whose page it stands: itself, or where the run has no page of it, the one before
    it whose maps come to it; else empty."""

    @property
    def found(self) -> Found:
        """Channels by what was found of them; what was found of none is left out."""
        return {name: channels for name, channels in self.row.findings.items() if channels}


@dataclass(frozen=True)
class AuditViews:
    """An audit as pages show it."""

    audit: ReadAudit
    layers: Sequence[AuditedLayer]

    @classmethod
    def of_record(cls, audit: ReadAudit, pages: Collection[str] | None = None) -> AuditViews:
        """Sort the pictures of an audit to its layers, and these to the pages of a run.

        Args:
            pages: names of the layers of the run; None where each layer has its own place.
        """
        drawn: dict[str, list[SuspectView]] = {}
        for number, own in enumerate(audit.record.drawn):
            if (size := audit.pictures.pixels.get(own.file)) is None:
                continue
            shown = words.channel_list(own.channels)
            alt = f"Suspects of {own.layer}, channels {shown}, with the images that excite each"
            told = f"{len(own.channels)} of {counted(own.suspects, 'channel')} with a finding"
            if own.shown and own.shown != own.layer:
                told += f"; the maps are those of {own.shown}, which come to {own.layer}"
            content: dict[str, Any] = {"channels": own.channels, "width": size[0]}
            content |= {} if own.rows is None else {"rows": own.rows}
            picture = PictureView(f"s{number}", audit.pictures, own.file, size, f"{alt} most", "")
            view = SuspectView(picture, told, msgspec.json.encode(content).decode())
            drawn.setdefault(own.layer, []).append(view)
        layers = []
        for n, row in enumerate(audit.record.layers):
            home = row.layer or row.label
            if pages is not None:
                names = (sheet.shown for sheet in audit.record.drawn if sheet.layer == row.label)
                home = next((name for name in (home, *names) if name in pages), "")
            layers.append(AuditedLayer(row, f"audited-{n:03d}", drawn.get(row.label, ()), home))
        return cls(audit, layers)

    @property
    def name(self) -> str:
        """What the model is called."""
        return words.name_of(self.audit.record.model)

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
        return f"{where}, by the audit of {counted(self.audit.record.images.seen, 'image')}"

    @property
    def facts(self) -> words.Facts:
        """What was audited, for the foot of its page."""
        record = self.audit.record
        named = {"featviz": record.featviz, "torch": record.torch}
        options = {name: own for name, own in record.options.items() if own not in (None, [])}
        return [
            ("Weights", words.setting(record.model.get("taken") or "")),
            ("SHA-256", words.setting(record.model.get("sha256") or "")),
            ("Versions", ", ".join(f"{name} {own}" for name, own in named.items() if own)),
            ("Device", record.device),
            ("Options", words.settings(options)),
        ]

    def of(self, name: str) -> Mapping[str, list[int]]:
        """What was found of a layer, all its calls together."""
        found: dict[str, list[int]] = {}
        for layer in self._calls(name):
            for finding, channels in layer.found.items():
                found[finding] = sorted({*found.get(finding, ()), *channels})
        return found

    def badges(self, name: str) -> dict[str, list[int]]:
        """The same, for badges that tell it from what the run itself shows."""
        return {f"{finding} (audit)": own for finding, own in self.of(name).items()}

    def suspects(self, name: str, page: str) -> list[SuspectView]:
        """The pictures of a layer's suspects, for the page of the layer."""
        views = (view for layer in self._calls(name) for view in layer.suspects)
        return [replace(view, picture=replace(view.picture, home=page)) for view in views]

    def _calls(self, name: str) -> Iterator[AuditedLayer]:
        return (layer for layer in self.layers if layer.home == name)
