"""The page of a series: the maps of each layer at each training step, and the health of its
channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from markupsafe import Markup

from featviz.errors import StoreError
from featviz.files import real
from featviz.records.findings import FINDINGS
from featviz.report import words
from featviz.report.audited import AuditViews, arrange
from featviz.report.links import InlineLinks, Links
from featviz.report.pages import RUN_PAGE, asset, fill, templates
from featviz.report.views import PictureView
from featviz.rundir import SERIES_ASSETS
from featviz.rundir.audits import read_audit
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.schema import CaptureRow
from featviz.rundir.series import read_steps
from featviz.text import quoted

_LEFT, _WIDTH, _TOP, _HEIGHT = 6.0, 308.0, 6.0, 52.0
"""Where the curves of a chart lie, in pixels."""
_ROOM = 40.0
"""Pixels at the right of them for the numbers of the scale."""

Key = tuple[int, str, str]
"""What identifies a tensor: the position of its layer, its label, and the stem of its file."""


@dataclass(frozen=True)
class ReadStep:
    """One step of a series."""

    number: int
    run: ReadRun
    audit: AuditViews | None

    @property
    def findings(self) -> int:
        """How many channels have a finding, all kinds together."""
        return sum(count for _, count in self.audit.total) if self.audit else 0


@dataclass(frozen=True)
class Frame:
    """A picture at one step."""

    step: int
    picture: PictureView
    words: str


@dataclass(frozen=True)
class Strip:
    """The pictures of a tensor of a layer for one image, step by step."""

    image: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class HealthCurve:
    """How many channels of a layer have one finding, step by step."""

    finding: str
    counts: Mapping[int, int]
    """Channels by step."""
    points: tuple[tuple[float, float], ...]
    """Where they lie in the chart, in pixels."""


@dataclass(frozen=True)
class HealthChart:
    """The findings of a layer over the training."""

    channels: int
    most: int
    """The value at the upper edge."""
    curves: tuple[HealthCurve, ...]

    @property
    def words(self) -> str:
        """What the chart shows, for who cannot see it."""
        told = []
        for curve in self.curves:
            (first, before), *_, (last, after) = [*curve.counts.items()] * 2
            told.append(f"{before} {curve.finding} at step {first}, {after} at step {last}")
        return f"Of {self.channels} channels: {'; '.join(told)}"


@dataclass(frozen=True)
class WatchedLayer:
    """A tensor of a layer over the training."""

    id: str
    layer: str
    type: str
    stem: str
    strips: tuple[Strip, ...]
    chart: HealthChart | None
    """None where no channel has a finding at any step, or none was looked for."""
    judged: bool
    """Whether its channels were audited."""


@dataclass(frozen=True)
class SeriesViews:
    """All of a series' page."""

    root: Path
    steps: tuple[ReadStep, ...]
    left_out: Mapping[str, str]
    """Steps and images that cannot be shown, and why."""

    @property
    def model(self) -> str:
        """What the model is called."""
        record: Mapping[str, Any] = self.steps[-1].run.record.get("model") or {}
        return str(record.get("type") or words.model_name(self.steps[-1].run))

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step."""
        return self.steps[0].number, self.steps[-1].number

    @cached_property
    def layers(self) -> tuple[WatchedLayer, ...]:
        """In the order of the model."""
        rows: dict[Key, dict[str, list[Frame]]] = {}
        types: dict[Key, CaptureRow] = {}
        for step in self.steps:
            for key, row, image, frame in _frames(step, len(rows)):
                types.setdefault(key, row)
                rows.setdefault(key, {}).setdefault(image, []).append(frame)
        return tuple(
            self._layer(n, key, types[key], rows[key]) for n, key in enumerate(sorted(rows))
        )

    def _layer(
        self, number: int, key: Key, row: CaptureRow, frames: Mapping[str, Sequence[Frame]]
    ) -> WatchedLayer:
        strips = tuple(Strip(image, tuple(own)) for image, own in frames.items())
        label, stem = key[1:]
        judged = any(_audited(step.audit, row.layer) for step in self.steps)
        chart = self._chart(row.layer)
        return WatchedLayer(f"layer-{number:03d}", label, row.type, stem, strips, chart, judged)

    def _chart(self, layer: str) -> HealthChart | None:
        found: dict[str, dict[int, int]] = {}
        channels = 0
        audited = [step for step in self.steps if (n := _audited(step.audit, layer)) and n > 0]
        for step in audited:
            channels = max(channels, _audited(step.audit, layer))
            for name, own in step.audit.of(layer).items() if step.audit else ():
                if name in FINDINGS:  # the record may be anybody's
                    found.setdefault(name, {})[step.number] = len(own)
        if not found:
            return None
        most = max(max(counts.values()) for counts in found.values())
        curves = []
        for name, counts in found.items():
            full = {step.number: counts.get(step.number, 0) for step in audited}
            points = tuple((self.x(step), _y(count, most)) for step, count in full.items())
            curves.append(HealthCurve(name, full, points))
        return HealthChart(channels, most, tuple(curves))

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
            steps.append(ReadStep(number, run, None if audit is None else arrange(audit)))
        except StoreError as error:
            left_out[path.name] = error.message
        else:
            faults = {**run.failures, **run.left_out}
            left_out |= {f"{path.name}/{name}": reason for name, reason in faults.items()}
    if not steps:
        reason = next(iter(left_out.values()), "none is there")
        raise StoreError(f"{quoted(str(root))} has no step that can be shown: {reason}")
    return SeriesViews(root, tuple(steps), left_out)


def render_folder(views: SeriesViews, links: Links) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each file of the report, and its text in pieces."""
    for name in SERIES_ASSETS:
        yield name, [asset(name)]
    yield f"{RUN_PAGE}.html", [_document(views, links)]


def render_single(views: SeriesViews) -> str:
    """The report as one HTML document with everything inside."""
    inside = {name: Markup(asset(name)) for name in SERIES_ASSETS}  # our own files
    return _document(views, InlineLinks(), inside | {"data": Markup()})


def _document(views: SeriesViews, links: Links, inside: Mapping[str, Markup] | None = None) -> str:
    engine = templates()
    engine.globals |= {"links": links, "home": links.page(RUN_PAGE), "words": words}
    engine.globals |= {"model": views.model}
    chart = {"left": _LEFT, "width": _WIDTH, "top": _TOP, "height": _HEIGHT, "room": _ROOM}
    article = fill(engine, "series", views=views, name=real(views.root).name, box=chart)
    page: dict[str, Any] = {
        "id": RUN_PAGE,
        "name": real(views.root).name,
        "scripts": (),
        "inside": inside,
    }
    return fill(engine, "document", articles=[article], assets=SERIES_ASSETS, **page)


def _frames(step: ReadStep, known: int) -> Iterator[tuple[Key, CaptureRow, str, Frame]]:
    """The pictures of a step, with the tensor and the image that each belongs to."""
    for name, image in step.run.images.items():
        for n, row in enumerate(image.captures.values()):
            size = (row.plan.width, row.plan.height)
            alt = f"{words.tiles(row)} of {row.label} at step {step.number}, of {name}"
            id = f"s{step.number}-{known}-{n}"
            picture = PictureView(id, image, row.file, size, alt, RUN_PAGE)
            said = f"values {words.number(row.min)} to {words.number(row.max)}"
            frame = Frame(step.number, picture, said)
            yield (row.index, row.label, row.place.stem), row, name, frame


def _audited(audit: AuditViews | None, layer: str) -> int:
    """How many channels of a layer an audit has looked at; 0 where it has not."""
    rows = [one.row for one in (audit.layers if audit else ())]
    return max((row.channels for row in rows if (row.layer or row.label) == layer), default=0)


def _y(count: int, most: int) -> float:
    return round(_TOP + _HEIGHT * (1 - count / max(1, most)), 2)
