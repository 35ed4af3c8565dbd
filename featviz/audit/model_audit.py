"""The story of one model's audit: stream the images, count, judge, prove, draw."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torchvision
from PIL import Image

from featviz.audit import counting, gates, pruning, suspects, targets, verdicts
from featviz.audit.counting import Census
from featviz.audit.findings import Thresholds
from featviz.audit.pruning import Pruning, Verification
from featviz.audit.running_stats import Doubles
from featviz.audit.suspects import SuspectSheet
from featviz.audit.targets import AuditPlan, AuditTarget
from featviz.audit.verdicts import Row
from featviz.errors import FeatvizError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel
from featviz.models.preprocess import InputOptions
from featviz.pipeline.prepare import blank_input
from featviz.pipeline.processes import ALONE, World
from featviz.records import Sample
from featviz.version import __version__

log = logging.getLogger(__name__)

Progress = Callable[[str, FeatvizError | None, int], None]
"""Called with each image's name, what went wrong with it, and how many there are in all."""

_NAMED = 3
"""Layers that a warning names; audit.json has them all."""


@dataclass(frozen=True)
class AuditRequest:
    """What is asked of a model."""

    layers: str | None = None
    """Selectors; None takes all activations."""
    inputs: InputOptions = field(default_factory=InputOptions)
    batch_size: int = 1
    """Images of one shape that go through together, at most."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    verify: bool = False
    """Run again with the dead channels forced to zero."""
    max_suspects: int = 48
    """Channels that are drawn at most."""
    gates: tuple[gates.Gate, ...] = ()


@dataclass(frozen=True)
class Examined:
    """What was found in a model."""

    document: Mapping[str, Any]
    """The content of audit.json."""
    tables: Mapping[str, Doubles]
    """The arrays of channels.npz: a call's label to [C, 8]."""
    pictures: Sequence[tuple[SuspectSheet, Image.Image]]


@dataclass
class ModelVisit:
    """The images on their way through a model."""

    model: LoadedModel
    samples: Sequence[Sample]
    asked: AuditRequest
    progress: Progress
    team: World = ALONE
    seen: list[int] = field(default_factory=list)
    """Numbers of the images that went through."""
    failures: dict[int, FeatvizError] = field(default_factory=dict)

    def count(self, plan: AuditPlan) -> Census:
        """Stream all images through the model.

        Raises:
            FeatvizError: not one image went through.
        """
        correlate = {t.spot.call for t in plan.targets} if self._correlating else ()
        counted = Census(plan.spots, frozenset(correlate), plan.trace.gave.keys())
        names = frozenset(call.name for call in plan.spots)
        with (
            in_eval_mode(self.model.module),
            counting.watching(self.model.module, plan, names, counted.take),
        ):
            own = range(len(self.samples))[self.team.rank :: self.team.size]
            for batch in self._batches([self.samples[number] for number in own], own):
                counting.run_batch(self.model, batch, counted, self._failed, self._passed)
        counted = self._joined(counted)
        if not self.seen:
            first = next(iter(self.failures.values()))
            raise FeatvizError(
                f"not one of {len(self.samples)} images went through: {first.message}", first.hint
            )
        return counted

    def _joined(self, counted: Census) -> Census:
        """What all processes have counted; merged in the order of their ranks, so all agree."""
        if self.team.size == 1:
            return counted
        alone = replace(counted, known=(), spots={}, _pending=[])  # what another process needs
        parts = self.team.gather((alone, self.seen, self.failures))
        joined = Census(counted.spots, counted.correlate, counted.known)
        seen: list[int] = []
        failures: dict[int, FeatvizError] = {}
        for part, passed, failed in parts:
            joined.absorb(part)
            seen += passed
            failures |= failed
        self.seen = seen
        self.failures = failures
        return joined

    def verify(self, plan: AuditPlan, cut: Pruning) -> dict[str, Any]:
        """Run the images again, with and without the channels that could be cut out."""
        proof = Verification(self.model, plan, cut)
        good = sorted(self.seen) if cut.channels else []
        with in_eval_mode(self.model.module):
            for batch in self._batches([self.samples[number] for number in good], good):
                proof.show(batch)
        finite = math.isfinite(proof.largest)
        change = proof.largest if finite else None
        return {"channels": cut.channels, "images": proof.images, "largest_change": change}

    def as_json(self) -> dict[str, Any]:
        """`images` of audit.json."""
        failures = [
            {"image": self.samples[number].name, "error": error.message}
            for number, error in sorted(self.failures.items())
        ]
        return {"total": len(self.samples), "seen": len(self.seen), "failures": failures}

    @property
    def _correlating(self) -> bool:
        return self.asked.thresholds.redundant_at is not None

    def _batches(
        self, samples: Sequence[Sample], numbers: Sequence[int] | None = None
    ) -> Iterable[counting.Batch]:
        asked, size = self.asked, self.asked.batch_size
        return counting.batches(samples, self.model, asked.inputs, size, self._failed, numbers)

    def _failed(self, number: int, error: FeatvizError) -> None:
        log.debug("%s failed", self.samples[number].name, exc_info=error)
        self.failures[number] = error
        self.progress(self.samples[number].name, error, len(self.samples))

    def _passed(self, number: int) -> None:
        self.seen.append(number)
        self.progress(self.samples[number].name, None, len(self.samples))


def examine(
    model: LoadedModel,
    samples: Sequence[Sample],
    asked: AuditRequest,
    progress: Progress,
    team: World = ALONE,
) -> Examined | None:
    """Audit a model.

    Of a team each process counts its share of the images; the first judges for all, and the others
    get None.

    Raises:
        FeatvizError: nothing to look at, a gate that speaks of nothing, or not one image went
            through.
    """
    plan = targets.choose(model, asked.layers, blank_input(model, samples, asked.inputs))
    for gate in asked.gates:
        gates.covered(gate, [verdicts.expected(t, asked.thresholds) for t in plan.targets])
    visit = ModelVisit(model, samples, asked, progress, team)
    counted = visit.count(plan)
    if not team.first:
        return None
    rows = verdicts.rows(plan, counted, asked.thresholds)
    _warn(plan, counted, list(rows.values()))
    cut = pruning.find(plan, [(t, row["findings"].get("dead", ())) for t, row in rows.items()])
    document = {
        **_record(model, asked),
        "images": visit.as_json(),
        **_findings(plan, counted, list(rows.values())),
        "prune": dict(cut.layers),
        "not_prunable": dict(cut.refused),
        "verify": visit.verify(plan, cut) if asked.verify else None,
    }
    tables = {call.label: tally.stats.table() for call, tally in counted.tallies.items()}
    sheets = _line_up(plan, counted, rows, asked.max_suspects)
    drawn = list(suspects.draw(model, plan, sheets, samples, asked.inputs))
    return Examined(document, tables, drawn)


def _record(model: LoadedModel, asked: AuditRequest) -> dict[str, Any]:
    """What was audited and how; nothing of when and where."""
    return {
        "featviz": __version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "device": model.device.type,
        "model": dict(model.source),
        "preprocessing": model.preprocess.words,
        "options": {"layers": asked.layers, **asdict(asked.thresholds), **asdict(asked.inputs)},
    }


def _findings(plan: AuditPlan, counted: Census, layers: list[Row]) -> dict[str, Any]:
    faults = [{"layer": call.label, "reason": why} for call, why in counted.faults.items()]
    skipped = [{"layer": skip.layer, "reason": skip.reason} for skip in plan.skipped]
    return {
        "layers": layers,
        "total": verdicts.total(layers),
        "skipped": [*skipped, *faults],
        "never_ran": list(plan.never_ran),
    }


def _warn(plan: AuditPlan, counted: Census, layers: Sequence[Row]) -> None:
    """Say what was asked for and could not be looked at, or not be judged."""
    skipped = [f"{skip.layer} ({skip.reason})" for skip in plan.skipped]
    faults = [f"{call.label} ({why})" for call, why in counted.faults.items()]
    own = {t.spot.call.label for t in plan.targets if t.spot.activation is not None}
    refused = [
        f"{row['label']} ({row['not_judged']['dead']})"
        for row in layers
        if row["not_judged"] and row["label"] not in own
    ]
    _name("skipped", [*skipped, *faults])
    _name("never ran", plan.never_ran)
    _name("not judged for dead", refused)
    _name("calls that a blank image does not cause, not counted", sorted(counted.unforeseen))


def _line_up(
    plan: AuditPlan, counted: Census, rows: Mapping[AuditTarget, Row], limit: int
) -> Sequence[SuspectSheet]:
    """What is drawn of the suspects; says so where it is not all."""
    found = {target.spot.call: row["findings"] for target, row in rows.items()}
    sheets = suspects.line_up(plan, found, counted.tallies, limit)
    drawn = sum(len(sheet.suspects) for sheet in sheets)
    every = sum(verdicts.suspicious(row) for row in rows.values())
    if drawn < every:
        most = f"at most {suspects.PER_LAYER} of a layer, and --max-suspects {limit} in all"
        log.info("%d of %d suspects are drawn: %s", drawn, every, most)
    return sheets


def _name(what: str, layers: Sequence[str]) -> None:
    if layers:
        more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
        log.warning("%s: %s%s", what, ", ".join(layers[:_NAMED]), more)
