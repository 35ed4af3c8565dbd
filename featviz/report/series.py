"""The page of a series: the runs of a model during its training, step by step.

OUT/step-000000/  OUT/step-000100/  ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from featviz.audit.gates import FINDINGS
from featviz.errors import StoreError
from featviz.report.audits import AuditView
from featviz.report.color_keys import ColorKey, LegendEntry, color_key, legend
from featviz.report.depth_chart import PlotBox
from featviz.report.descriptions import tile_count
from featviz.report.figures import input_view
from featviz.report.grids import tiles_of
from featviz.report.links import PictureView
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.schema import Capture
from featviz.rundir.studies import read_audit, read_steps
from featviz.text import quoted

_BOX = PlotBox(left=6.0, top=6.0, width=308.0, height=52.0)


class SeriesStep(NamedTuple):
    """A training step."""

    number: int
    run: ReadRun
    audit: AuditView | None
    """The audit of the step; None without one."""


class SeriesFrame(NamedTuple):
    """A grid at a training step."""

    step: int
    row: Capture
    picture: PictureView
    key: ColorKey

    @property
    def tiles(self) -> str:
        """The grid as JSON, for the script."""
        return tiles_of(self.row, self.key.is_grey)


@dataclass
class SeriesStrip:
    """The grids of a tensor for one image, step by step."""

    input: PictureView
    """The picture of what the model saw at the first step."""
    frames: list[SeriesFrame] = field(default_factory=list)


@dataclass
class WatchedTensor:
    """A tensor of a layer over all steps."""

    row: Capture
    """The capture of the tensor at the first step that has it."""
    strips: dict[str, SeriesStrip] = field(default_factory=dict)
    """The strip for each image, by the name of the image."""
    channels: int = 0
    """How many channels were audited."""
    curves: dict[str, dict[int, int]] = field(default_factory=dict)
    """How many channels have a finding: by finding, then by the number of the step."""

    @property
    def top_count(self) -> int:
        """The upper end of the chart: the largest number in `curves`."""
        tops = [max(curve.values()) for curve in self.curves.values()]
        return max(tops, default=0)


@dataclass(frozen=True)
class SeriesPage:
    """What the template of a series shows."""

    steps: Sequence[SeriesStep]
    tensors: Sequence[WatchedTensor]
    left_out: Mapping[str, str]
    """The steps, and the images of steps, that cannot be shown, each with the reason."""
    box: PlotBox = _BOX
    scale_width: float = 40.0
    """The width in pixels for the numbers on the right of the curves."""

    @property
    def legend(self) -> list[LegendEntry]:
        """The legend of the grids."""
        rows = [tensor.row for tensor in self.tensors]
        return legend(self.steps[-1].run.record.get("options") or {}, rows)

    def x(self, step: int) -> float:
        """The position of a step in the charts, in pixels from the left.

        Args:
            step: the number of the step, from that of the first to that of the last step.
        """
        first = self.steps[0].number
        last = self.steps[-1].number
        return round(
            self.box.left + self.box.width * (step - first) / max(1, last - first), 2
        )


def read_series(root: Path) -> SeriesPage:
    """Read the steps of a series. Steps that cannot be read are named in `left_out`.

    Args:
        root: the folder of the series.

    Raises:
        StoreError: no step can be shown.
    """
    steps = []
    left_out = {}
    for number, path in read_steps(root).items():
        try:
            run = read_run(path)
            audit_and_pictures = read_audit(path, None)
        except StoreError as error:
            left_out[path.name] = error.message
            continue
        audit = None
        if audit_and_pictures is not None:
            audit = AuditView.of_record(*audit_and_pictures)
        steps.append(SeriesStep(number, run, audit))
        for name, reason in {**run.failures, **run.left_out}.items():
            left_out[f"{path.name}/{name}"] = reason
    if not steps:
        reason = next(iter(left_out.values()), "none is there")
        raise StoreError(f"{quoted(str(root))} has no step that can be shown: {reason}")
    tensors = _watched_tensors(steps)
    for tensor in tensors:
        _add_curves(tensor, steps)
    return SeriesPage(steps, tensors, left_out)


class _TensorKey(NamedTuple):
    """A tensor of a series; keys sort in the order of the model."""

    position: int
    label: str
    stem: str


def _watched_tensors(steps: Sequence[SeriesStep]) -> list[WatchedTensor]:
    """The tensors of all steps in the model's order, with their pictures."""
    tensors: dict[_TensorKey, WatchedTensor] = {}
    for number, run, _ in steps:
        for name, image in run.images.items():
            for row in image.captures.values():
                key = _TensorKey(row.index, row.label, row.capture_key.stem)
                tensor = tensors.setdefault(key, WatchedTensor(row))
                alt = f"{tile_count(row)} of {row.label} at step {number}, of {name}"
                picture = PictureView("", image, row.file, row.size, alt)
                color_scale = color_key(row, run.record.get("options") or {})
                if name not in tensor.strips:
                    tensor.strips[name] = SeriesStrip(input_view("", image, ""))
                frame = SeriesFrame(number, row, picture, color_scale)
                tensor.strips[name].frames.append(frame)
    return [tensors[key] for key in sorted(tensors)]


def _add_curves(tensor: WatchedTensor, steps: Sequence[SeriesStep]) -> None:
    """Set the curves of a tensor, and its number of audited channels.

    Args:
        tensor: the tensor.
        steps: all steps; the curves have points at those with an audit.
    """
    label = tensor.row.label
    findings_at = {}
    for number, _, audit in steps:
        if audit is None:
            continue
        rows = [audited.row for audited in audit.layers]
        # the row of the model itself has no name of a layer, only a label
        channels = [row.channels for row in rows if (row.layer or row.label) == label]
        if channels:
            tensor.channels = max(tensor.channels, *channels)
            findings_at[number] = audit.findings_of(label)
    # a record may come from anybody, so findings with unknown names are left out
    for name in FINDINGS:
        if any(name in findings for findings in findings_at.values()):
            curve = {}
            for number, findings in findings_at.items():
                curve[number] = len(findings.get(name, ()))
            tensor.curves[name] = curve
