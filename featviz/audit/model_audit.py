"""The story of one model's audit: stream the images, count, judge, prove, draw."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from PIL import Image

from featviz.audit.call_graph import watching_calls
from featviz.audit.counting import Census
from featviz.audit.findings import Row, expected_row, judged_rows, suspicious, totals
from featviz.audit.judging import covered
from featviz.audit.plan import AuditPlan, AuditTarget, choose
from featviz.audit.pruning import Pruning, Verification, find_prunable
from featviz.audit.running_stats import Doubles
from featviz.audit.suspects import PER_LAYER, SuspectSheet, draw_suspects, line_up
from featviz.errors import FeatvizError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel
from featviz.models.preprocess import InputOptions
from featviz.models.requirements import versions
from featviz.pipeline.batches import Batch, BatchProgress, batches, run_batch
from featviz.pipeline.dealing import Deal
from featviz.pipeline.prepare import blank_input
from featviz.pipeline.processes import ALONE, World
from featviz.records import Sample, Shard
from featviz.records.findings import Thresholds
from featviz.records.gates import Gate
from featviz.text import listed

log = logging.getLogger(__name__)

_NAMED = 3
"""Layers that a warning names; audit.json has them all."""


@dataclass(frozen=True)
class AuditRequest:
    """The options of an audit that hold for each model."""

    layers: str | None = None
    """Selectors; None takes all activations."""
    inputs: InputOptions = field(default_factory=InputOptions)
    batch_size: int = 1
    """The largest number of images of one shape that go through together."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    verify: bool = False
    """Run again with the dead channels forced to zero."""
    max_suspects: int = 48
    """The largest number of channels that are drawn."""
    gates: tuple[Gate, ...] = ()


@dataclass(frozen=True)
class Examined:
    """The results of one model's audit."""

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
    progress: BatchProgress
    team: World = ALONE
    seen: list[int] = field(default_factory=list)
    """Numbers of the images that went through."""
    failures: dict[int, FeatvizError] = field(default_factory=dict)

    def count(self, chosen: AuditPlan) -> Census:
        """Stream all images through the model.

        Raises:
            FeatvizError: not one image went through.
        """
        correlating = self.asked.thresholds.redundant_at is not None
        correlate = {t.spot.call for t in chosen.targets} if correlating else ()
        counted = Census(chosen.spots, frozenset(correlate), chosen.trace.gave.keys())
        names = frozenset(call.name for call in chosen.spots)
        share = Shard(self.team.rank, self.team.size)
        with (
            in_eval_mode(self.model.module),
            watching_calls(self.model.module, counted.take, names, chosen.trace.atoms),
        ):
            for batch in self._batches(share.numbers(self.samples)):
                run_batch(self.model, batch, counted, self._failed, self._passed)
        counted = self._joined(counted)
        if not self.seen:
            first = next(iter(self.failures.values()))
            words = f"no image of {len(self.samples)} went through: {first.message}"
            raise FeatvizError(words, first.hint)
        return counted

    def _joined(self, counted: Census) -> Census:
        """The counts of all processes, merged in the order of their ranks, so that all agree."""
        if self.team.size == 1:
            return counted
        alone = replace(counted, known=(), spots={}, _measured=[])  # what another process needs
        parts = self.team.gather((alone, self.seen, self.failures))
        joined = Census(counted.spots, counted.correlate, counted.known)
        self.seen, self.failures = [], {}
        for part, seen, failures in parts:
            joined.absorb(part)
            self.seen += seen
            self.failures |= failures
        return joined

    def verify(self, chosen: AuditPlan, cut: Pruning) -> dict[str, Any]:
        """Run the images again, with and without the channels that could be cut out; processes
        divide them."""
        proof = Verification(self.model, chosen, cut)
        images = Deal(self.team, sorted(self.seen) if cut.channels else [], "verify")
        with in_eval_mode(self.model.module):
            for batch in self._batches(images):
                proof.show(batch)
        proof.join(self.team)
        return proof.as_json()

    def as_json(self) -> dict[str, Any]:
        """`images` of audit.json."""
        failures = [
            {"image": self.samples[number].name, "error": error.message}
            for number, error in sorted(self.failures.items())
        ]
        return {"total": len(self.samples), "seen": len(self.seen), "failures": failures}

    def _batches(self, numbers: Iterable[int]) -> Iterable[Batch]:
        inputs, size = self.asked.inputs, self.asked.batch_size
        return batches(self.samples, self.model, inputs, size, self._failed, numbers)

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
    progress: BatchProgress,
    team: World = ALONE,
) -> Examined | None:
    """Audit a model.

    Several processes divide the images, those of the proof and of the pictures, too; all but the
    first return None.

    Raises:
        FeatvizError: nothing to look at, a gate that speaks of nothing, or not one image went
            through.
    """
    chosen = choose(model, asked.layers, blank_input(model, samples, asked.inputs))
    for gate in asked.gates:
        covered(gate, [expected_row(target, asked.thresholds) for target in chosen.targets])
    visit = ModelVisit(model, samples, asked, progress, team)
    counted = visit.count(chosen)
    rows = judged_rows(chosen, counted, asked.thresholds)
    by_call = {target.spot.call: row["findings"] for target, row in rows.items()}
    sheets = line_up(chosen, by_call, counted.tallies, asked.max_suspects)
    document = documented(visit, chosen, counted, rows)
    if team.first:
        _warn(chosen, counted, document)
        _tell_left_out(sheets, document["layers"], asked.max_suspects)
    tables = {call.label: tally.stats.table() for call, tally in counted.tallies.items()}
    drawn = draw_suspects(model, chosen, sheets, samples, asked.inputs, team)
    return Examined(document, tables, drawn) if team.first else None


def documented(
    visit: ModelVisit, chosen: AuditPlan, counted: Census, rows: Mapping[AuditTarget, Row]
) -> dict[str, Any]:
    """The content of audit.json, without the pictures."""
    layers, asked = list(rows.values()), visit.asked
    skipped = [(skip.layer, skip.reason) for skip in chosen.skipped]
    skipped += [(call.label, reason) for call, reason in counted.faults.items()]
    cut = find_prunable(chosen, [(t, row["findings"].get("dead", ())) for t, row in rows.items()])
    return {
        **_record(visit.model, asked),
        "images": visit.as_json(),
        "layers": layers,
        "total": totals(layers),
        "skipped": [{"layer": layer, "reason": reason} for layer, reason in skipped],
        "never_ran": list(chosen.never_ran),
        "prune": dict(cut.layers),
        "not_prunable": dict(cut.refused),
        "verify": visit.verify(chosen, cut) if asked.verify else None,
    }


def _record(model: LoadedModel, asked: AuditRequest) -> dict[str, Any]:
    """The model and the options for audit.json, without time and place."""
    return {
        **versions(),
        "device": model.device.type,
        "model": dict(model.source),
        "preprocessing": model.preprocess.words,
        "options": {"layers": asked.layers, **asdict(asked.thresholds), **asked.inputs.as_record()},
    }


def _warn(chosen: AuditPlan, counted: Census, document: Mapping[str, Any]) -> None:
    """Say what was asked for and could not be looked at, or not be judged."""
    activations = {t.spot.call.label for t in chosen.targets if t.spot.activation is not None}
    refused = [
        f"{row['label']} ({row['not_judged']['dead']})"
        for row in document["layers"]
        if row["not_judged"] and row["label"] not in activations
    ]
    _name("skipped", ["{layer} ({reason})".format(**row) for row in document["skipped"]])
    _name("never ran", chosen.never_ran)
    _name("not judged for dead", refused)
    _name("calls that a blank image does not cause, not counted", sorted(counted.unforeseen))


def _tell_left_out(sheets: Sequence[SuspectSheet], layers: Sequence[Row], limit: int) -> None:
    """Say where the suspects that are drawn are not all."""
    drawn = sum(len(sheet.suspects) for sheet in sheets)
    every = sum(map(suspicious, layers))
    if drawn < every:
        most = f"at most {PER_LAYER} of a layer, and --max-suspects {limit} in all"
        log.info("%d of %d suspects are drawn: %s", drawn, every, most)


def _name(what: str, layers: Sequence[str]) -> None:
    if layers:
        log.warning("%s: %s", what, listed(layers, _NAMED))
