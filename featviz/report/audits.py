"""The view of an audit for pages: its layers with their findings, and pictures of
suspects."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from featviz.report import descriptions
from featviz.report.color_keys import ColorKey, scale_colors
from featviz.report.extras import Extra, SuspectRow
from featviz.report.links import PictureView
from featviz.report.totals import ChannelFindings
from featviz.rundir import APOZ_FILE
from featviz.rundir.image import ReadImage
from featviz.rundir.studies import Audit, AuditRow, DrawnSuspects
from featviz.text import counted


@dataclass(frozen=True)
class AuditedLayer:
    """An audited layer: a row of an audit."""

    row: AuditRow
    id: str
    """The id of the layer's section on the page of the audit."""
    home: str
    """The layer on whose page the findings are shown: the audited layer; if it has no
    page, the layer before it whose maps the audit drew; empty if neither has a page."""
    suspects: Sequence[Extra]
    """The pictures of the layer's suspects: its channels with a finding."""

    @property
    def findings(self) -> ChannelFindings:
        """The layer's channels by finding, without findings that no channel has."""
        # a row has an entry for every finding that the audit looked for
        findings = self.row.findings.items()
        return {name: channels for name, channels in findings if channels}

    @property
    def call(self) -> int | None:
        """The number of the audited call, from 0; None if `home` is another layer."""
        return self.row.call if self.home == self.row.layer else None


@dataclass(frozen=True)
class AuditView:
    """An audit, shown alone or on the pages of a run."""

    record: Audit
    layers: Sequence[AuditedLayer]
    chart: PictureView | None
    """The chart of shares of zeros; None if the audit's folder does not have it."""

    @classmethod
    def of_record(
        cls, record: Audit, pictures: ReadImage, pages: Collection[str] | None = None
    ) -> AuditView:
        """Assign the pictures of an audit to its layers, and its layers to the pages of a
        run.

        Args:
            record: the content of audit.json.
            pictures: the pictures of the audit that exist.
            pages: the layers of the run that have pages; None for the report of an audit
                without a run.
        """
        suspects = defaultdict(list)
        sources = defaultdict(list)
        for number, drawn in enumerate(record.drawn):
            sources[drawn.layer].append(drawn.shown)
            size = pictures.pixels.get(drawn.file)
            if size is not None:
                suspects[drawn.layer].append(_suspects(number, drawn, pictures, size))
        # An audit looks at activations by default, and a run often draws convolutions.
        # Dead channels are then shown on the page of the convolution before, whose maps
        # the audit drew for them.
        layers = []
        for number, row in enumerate(record.layers):
            homes = [row.layer or row.label, *sources[row.label]]
            if pages is not None:
                homes = [name for name in homes if name in pages]
            home = homes[0] if homes else ""
            layers.append(
                AuditedLayer(row, f"audited-{number:03d}", home, suspects[row.label])
            )
        chart = None
        size = pictures.pixels.get(APOZ_FILE)
        if size is not None:
            alt = "Average percentage of zeros, and of dead channels, of each layer"
            chart = PictureView("apoz", pictures, APOZ_FILE, size, alt)
        return cls(record, layers, chart)

    @property
    def total(self) -> Mapping[str, int]:
        """How many channels of all layers have each finding; 0 for a finding that the audit
        looked for, and that no channel has."""
        counts: Counter[str] = Counter()
        for layer in self.layers:
            for name, channels in layer.row.findings.items():
                counts[name] += len(channels)
        return counts

    @property
    def dead_summary(self) -> str | None:
        """The number of dead channels: `4 in 1 layer, by the audit of 20 images`; None if
        the audit could judge no layer."""
        counts = []
        for layer in self.layers:
            if "dead" in layer.row.findings:
                counts.append(len(layer.row.findings["dead"]))
        if not counts:
            return None
        # the text names the number of images: after a few, "none" would mean little
        where = "none"
        if any(counts):
            where = f"{sum(counts):,} in {counted(sum(map(bool, counts)), 'layer')}"
        return f"{where}, by the audit of {counted(self.record.images.seen, 'image')}"

    def findings_of(self, name: str, call: int | None = None) -> dict[str, list[int]]:
        """The findings that are shown on the page of a layer.

        Args:
            name: the name of the layer.
            call: the number of a call, for the findings of this call; None for those of
                all calls.

        Returns:
            By finding, the channels in rising order; empty if there are no findings.
        """
        findings: dict[str, list[int]] = {}
        for layer in self.layers:
            if layer.home != name:
                continue
            if None not in (call, layer.call) and layer.call != call:
                continue
            for finding, channels in layer.findings.items():
                findings[finding] = sorted({*findings.get(finding, ()), *channels})
        return findings


def _suspects(
    number: int, drawn: DrawnSuspects, pictures: ReadImage, size: tuple[int, int]
) -> Extra:
    """The picture of a layer's suspects.

    Args:
        number: the number of the picture in the audit, for its id.
        drawn: the entry of the picture in audit.json.
        pictures: all pictures of the audit.
        size: width and height of the picture in pixels.
    """
    text = counted(drawn.suspects, "channel")
    if len(drawn.channels) < drawn.suspects:
        text = f"{len(drawn.channels)} of {text}"
    text += " with a finding"
    if drawn.shown and drawn.shown != drawn.layer:
        text += (
            f"; no image excites {'it' if len(drawn.channels) == 1 else 'these'}: the"
            f" maps show what {drawn.shown} gives to {drawn.layer}, nothing above 0"
        )
    else:
        text += "; the images that excite each most, beside its maps"
    rows = []
    for suspect in drawn.channels:
        low, high = map(descriptions.number, suspect.range)
        key = ColorKey(low, high, colors=scale_colors("viridis"))
        rows.append(SuspectRow(suspect, key))
    picture = PictureView(f"s{number}", pictures, drawn.file, size, "")
    return Extra("Suspects of the audit", text, picture, suspects=rows)
