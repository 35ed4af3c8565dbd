"""What an audit found: on the pages of layers and channels, and as a page of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from featviz.report import words
from featviz.report.channels import Found
from featviz.report.views import PictureView
from featviz.rundir.audits import ReadAudit
from featviz.rundir.schema import AuditRow, DrawnSuspects
from featviz.text import counted


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
    """Of its section on the page of the audit."""
    suspects: Sequence[SuspectView]
    home: str
    """The layer on whose page it stands: itself, or where the run has no page of it, the one before
    it whose maps come to it; else empty."""

    @property
    def found(self) -> Found:
        """Channels by what was found of them; what was found of none is left out."""
        return {name: channels for name, channels in self.row.findings.items() if channels}

    @property
    def zeros(self) -> str:
        """The average percentage of zeros."""
        return "–" if self.row.apoz is None else words.percent(self.row.apoz)


@dataclass(frozen=True)
class AuditViews:
    """An audit as pages show it."""

    audit: ReadAudit
    layers: Sequence[AuditedLayer]

    @property
    def name(self) -> str:
        """What the model is called."""
        return words.name_of(self.audit.record.model)

    @property
    def total(self) -> Sequence[tuple[str, int]]:
        """How many channels of all layers have each finding, those that were looked for."""
        counts: dict[str, int] = {}
        for layer in self.layers:
            for name, channels in layer.row.findings.items():
                counts[name] = counts.get(name, 0) + len(channels)
        return list(counts.items())

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
        versions = ", ".join(f"{name} {own}" for name, own in named.items() if own)
        options = {name: own for name, own in record.options.items() if own not in (None, [])}
        return [
            ("Weights", words.setting(record.model.get("taken") or "")),
            ("SHA-256", words.setting(record.model.get("sha256") or "")),
            ("Versions", versions),
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


def arrange(audit: ReadAudit, pages: Collection[str] | None = None) -> AuditViews:
    """Sort the pictures of an audit to its layers, and these to the pages of a run.

    Args:
        pages: names of the layers of the run; None where each layer has its own place.
    """
    drawn: dict[str, list[SuspectView]] = {}
    for number, own in enumerate(audit.record.drawn):
        if own.file in audit.pictures.pixels:
            drawn.setdefault(own.layer, []).append(_view(number, own, audit))
    layers = [
        AuditedLayer(row, f"audited-{n:03d}", drawn.get(row.label, ()), _home(row, audit, pages))
        for n, row in enumerate(audit.record.layers)
    ]
    return AuditViews(audit, layers)


def _home(row: AuditRow, audit: ReadAudit, pages: Collection[str] | None) -> str:
    own = row.layer or row.label
    if pages is None:
        return own
    shown = (sheet.shown for sheet in audit.record.drawn if sheet.layer == row.label)
    return next((name for name in (own, *shown) if name in pages), "")


def _view(number: int, own: DrawnSuspects, audit: ReadAudit) -> SuspectView:
    size = audit.pictures.pixels[own.file]
    shown = words.channel_list(own.channels)
    alt = f"Suspects of {own.layer}, channels {shown}, with the images that excite each most"
    told = f"{len(own.channels)} of {counted(own.suspects, 'channel')} with a finding"
    if own.shown and own.shown != own.layer:
        told += f"; the maps are those of {own.shown}, which come to {own.layer}"
    content: dict[str, Any] = {"channels": own.channels, "width": size[0]}
    content |= {} if own.rows is None else {"rows": own.rows}
    picture = PictureView(f"s{number}", audit.pictures, own.file, size, alt, "")
    return SuspectView(picture, told, msgspec.json.encode(content).decode())
