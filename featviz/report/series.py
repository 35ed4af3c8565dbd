"""The page of a series: the maps of each layer at each training step, and the health of its
channels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featviz.errors import StoreError
from featviz.files import real
from featviz.records.findings import FINDINGS
from featviz.report import pages, words
from featviz.report.beside import AuditViews
from featviz.report.views import Links, PictureView
from featviz.rundir import SERIES_ASSETS
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.schema import Capture
from featviz.rundir.studies import read_audit, read_steps
from featviz.text import quoted

BOX = {"left": 6.0, "width": 308.0, "top": 6.0, "height": 52.0, "room": 40.0}
"""Where the curves of a chart lie, in pixels, and the room at their right for the scale."""


@dataclass(frozen=True)
class ReadStep:
    """One step of a series."""

    number: int
    run: ReadRun
    audit: AuditViews | None

    def audited(self, layer: str) -> int:
        """How many channels of a layer its audit has looked at; 0 where it has not."""
        rows = [one.row for one in (self.audit.layers if self.audit else ())]
        return max((row.channels for row in rows if (row.layer or row.label) == layer), default=0)


@dataclass(frozen=True)
class WatchedLayer:
    """A tensor of a layer over the training."""

    row: Capture
    strips: Mapping[str, Sequence[tuple[int, Capture, PictureView]]]
    """The pictures of each image, with their steps and rows."""
    channels: int
    """How many the audits have looked at; 0 where none did."""
    curves: Mapping[str, Mapping[int, int]]
    """How many channels have each finding, step by step; none where no step has a finding."""

    @property
    def most(self) -> int:
        """The most channels with one finding, the top of the chart."""
        return max(max(counts.values()) for counts in self.curves.values())

    def y(self, count: int) -> float:
        """Where a count lies in the chart, in pixels."""
        return round(BOX["top"] + BOX["height"] * (1 - count / max(1, self.most)), 2)


@dataclass(frozen=True)
class SeriesViews:
    """All of a series' page."""

    root: Path
    steps: Sequence[ReadStep]
    left_out: Mapping[str, str]

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step."""
        return self.steps[0].number, self.steps[-1].number

    @property
    def layers(self) -> list[WatchedLayer]:
        """In the order of the model."""
        strips: dict[tuple[int, str, str], dict[str, list[tuple[int, Capture, PictureView]]]] = {}
        for step in self.steps:
            for name, image in step.run.images.items():
                for row in image.captures.values():
                    own = strips.setdefault((row.index, row.label, row.place.stem), {})
                    size = (row.plan.width, row.plan.height)
                    alt = f"{words.tiles(row)} of {row.label} at step {step.number}, of {name}"
                    picture = PictureView("", image, row.file, size, alt)
                    own.setdefault(name, []).append((step.number, row, picture))
        found = []
        for _, own in sorted(strips.items()):
            _, row, _ = next(iter(own.values()))[0]
            channels = max(step.audited(row.layer) for step in self.steps)
            findings = {
                step.number: step.audit.of(row.layer)
                for step in self.steps
                if step.audit and step.audited(row.layer)
            }
            curves = {  # names that are known alone: the record may be anybody's
                name: {n: len(own.get(name, ())) for n, own in findings.items()}
                for name in FINDINGS
                if any(name in own for own in findings.values())
            }
            found.append(WatchedLayer(row, own, channels, curves))
        return found

    def x(self, step: int) -> float:
        """Where a step lies in a chart, in pixels."""
        first, last = self.span
        return round(BOX["left"] + BOX["width"] * (step - first) / max(1, last - first), 2)


def read_series(root: Path) -> SeriesViews:
    """Read all steps of a series; one that is no whole run is left out and named."""
    steps, left_out = [], {}
    for number, path in read_steps(root).items():
        try:
            run, audit = read_run(path), read_audit(path, None)
        except StoreError as error:
            left_out[path.name] = error.message
            continue
        steps.append(ReadStep(number, run, AuditViews.of_record(audit) if audit else None))
        faults = {**run.failures, **run.left_out}
        left_out |= {f"{path.name}/{name}": reason for name, reason in faults.items()}
    if not steps:
        reason = next(iter(left_out.values()), "none is there")
        raise StoreError(f"{quoted(str(root))} has no step that can be shown: {reason}")
    return SeriesViews(root, steps, left_out)


def render(views: SeriesViews, links: Links) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the name of each file of the report, and its text in pieces; of one file, the page."""
    record: Mapping[str, Any] = views.steps[-1].run.record.get("model") or {}
    model, title = str(record.get("type") or words.name_of(record)), real(views.root).name
    return pages.render_alone(links, "series", model, title, views, SERIES_ASSETS, box=BOX)
