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
from featviz.rundir.audits import read_audit
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.schema import Capture
from featviz.rundir.series import read_steps
from featviz.text import quoted

_LEFT, _WIDTH, _TOP, _HEIGHT = 6.0, 308.0, 6.0, 52.0
"""Where the curves of a chart lie, in pixels."""
_ROOM = 40.0
"""Pixels at the right of them for the numbers of the scale."""


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
class HealthChart:
    """The findings of a layer over the training."""

    channels: int
    most: int
    curves: Mapping[str, Mapping[int, int]]
    """How many channels have each finding, step by step."""

    @property
    def words(self) -> str:
        """What the chart shows, for who cannot see it."""
        told = []
        for finding, counts in self.curves.items():
            (first, before), *_, (last, after) = [*counts.items()] * 2
            told.append(f"{before} {finding} at step {first}, {after} at step {last}")
        return f"Of {self.channels} channels: {'; '.join(told)}"

    def y(self, count: int) -> float:
        """Where a count lies in the chart, in pixels."""
        return round(_TOP + _HEIGHT * (1 - count / max(1, self.most)), 2)


@dataclass(frozen=True)
class WatchedLayer:
    """A tensor of a layer over the training."""

    row: Capture
    """That of the first step."""
    strips: Mapping[str, Sequence[tuple[int, Capture, PictureView]]]
    """The pictures of each image, with their steps and rows."""
    chart: HealthChart | None
    """None where no channel has a finding at any step, or none was looked for."""
    judged: bool


@dataclass(frozen=True)
class SeriesViews:
    """All of a series' page."""

    root: Path
    steps: Sequence[ReadStep]
    left_out: Mapping[str, str]
    """Steps and images that cannot be shown, and why."""

    @property
    def model(self) -> str:
        """What the model is called."""
        record: Mapping[str, Any] = self.steps[-1].run.record.get("model") or {}
        return str(record.get("type") or words.name_of(record))

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
            judged = any(step.audited(row.layer) for step in self.steps)
            found.append(WatchedLayer(row, own, self._chart(row.layer), judged))
        return found

    def _chart(self, layer: str) -> HealthChart | None:
        audited = {step.number: step for step in self.steps if step.audited(layer)}
        found = {n: step.audit.of(layer) for n, step in audited.items() if step.audit}
        # the record may be anybody's
        names = [name for name in FINDINGS if any(name in own for own in found.values())]
        if not names:
            return None
        curves = {name: {n: len(own.get(name, ())) for n, own in found.items()} for name in names}
        most = max(max(counts.values()) for counts in curves.values())
        channels = max(step.audited(layer) for step in audited.values())
        return HealthChart(channels, most, curves)

    def x(self, step: int) -> float:
        """Where a step lies in a chart, in pixels."""
        first, last = self.span
        return round(_LEFT + _WIDTH * (step - first) / max(1, last - first), 2)


def read_series(root: Path) -> SeriesViews:
    """Read all steps of a series; one that is no whole run is left out and named.

    Raises:
        StoreError: not one can be read.
    """
    steps, left_out = [], {}
    for number, path in read_steps(root).items():
        try:
            run = read_run(path)
            audit = read_audit(path, None)
            steps.append(
                ReadStep(number, run, None if audit is None else AuditViews.of_record(audit))
            )
        except StoreError as error:
            left_out[path.name] = error.message
        else:
            faults = {**run.failures, **run.left_out}
            left_out |= {f"{path.name}/{name}": reason for name, reason in faults.items()}
    if not steps:
        reason = next(iter(left_out.values()), "none is there")
        raise StoreError(f"{quoted(str(root))} has no step that can be shown: {reason}")
    return SeriesViews(root, steps, left_out)


def render(views: SeriesViews, links: Links) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the name of each file of the report, and its text in pieces; of one file, the page."""
    box = {"left": _LEFT, "width": _WIDTH, "top": _TOP, "height": _HEIGHT, "room": _ROOM}
    title = real(views.root).name
    return pages.render_alone(links, "series", views.model, title, views, SERIES_ASSETS, box=box)
