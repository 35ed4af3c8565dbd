"""The story of `audit`: a model and images to findings, files and verdicts."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from featviz.audit import findings, output
from featviz.audit.counting import Census
from featviz.audit.findings import judged_rows
from featviz.audit.output import SCHEMA_VERSION
from featviz.audit.plan import AuditPlan, choose, watching_calls
from featviz.audit.pruning import find_prunable, verify
from featviz.errors import CHECK_FAILED, UsageError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel
from featviz.options import AuditOptions, InputOptions, ModelOptions
from featviz.records import Call, Layer, Sample, Verdict
from featviz.records.findings import parse_gate
from featviz.run.batches import BatchProgress, Study, begun
from featviz.run.prepare import blank_input
from featviz.rundir import write
from featviz.rundir.place import AUDIT, JUNIT, PRUNING, check_file, writing
from featviz.rundir.studies import junit
from featviz.text import listed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuditResult:
    """The audit of a model."""

    out: Path
    document: Mapping[str, Any]
    verdicts: tuple[Verdict, ...]

    @property
    def exit_code(self) -> int:
        """0 all held, 3 some images failed, 4 a gate is broken or something got worse."""
        if not all(verdict.held for verdict in self.verdicts):
            return CHECK_FAILED
        return 3 if self.document["images"]["failures"] else 0

    def as_json(self) -> Mapping[str, Any]:
        """The document, with its version."""
        return {"schema_version": SCHEMA_VERSION, **self.document}


def audit(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: AuditOptions,
    progress: BatchProgress = lambda image, error, total: None,
) -> AuditResult:
    """Audit a model on images."""
    gates = [parse_gate(text) for text in options.fail_on]
    baseline = None if options.baseline is None else output.read_baseline(options.baseline)
    asked = ("--junit", options.junit, JUNIT), ("--prune-out", options.prune_out, PRUNING)
    files = [(option, path, kind) for option, path, kind in asked if path is not None]
    with begun(model, arguments, options, AUDIT, files) as (folder, loaded, samples):
        plan = choose(loaded, options.layers, blank_input(loaded, samples, options.inputs)[0])
        expected = [findings.expected_row(target, options.thresholds) for target in plan.targets]
        for gate in gates:
            findings.covered(gate, expected)
        counted, document = _counted(Study(loaded, samples, options, progress), plan, options)
        _warn(plan, counted, document)
        layers = document["layers"]
        found = {row["label"]: row["findings"] for row in layers}
        sheets = output.choose_suspects(plan, found, counted.tallies, options.max_suspects)
        drawn = sum(len(sheet.suspects) for sheet in sheets)
        every = sum(document["total"]["findings"].values())
        if drawn < every:
            most = f"{output.PER_LAYER} of a layer, and --max-suspects {options.max_suspects}"
            log.info("%d of %d suspects are drawn: at most %s in all", drawn, every, most)
        tables = {call.label: tally.table() for call, tally in counted.tallies.items()}
        pictures = output.draw_suspects(loaded, plan, sheets, samples, options.inputs)
        output.write_files(folder, document, tables, pictures)
        verdicts = [findings.check(gate, layers) for gate in gates]
        if baseline is not None:
            verdicts.append(findings.worse(layers, baseline))
    if options.prune_out is not None:
        check_file(options.prune_out, PRUNING, "--prune-out", options.overwrite)
        write.write_json(options.prune_out, document["prune"])
    if options.junit is not None:
        if isinstance(model, LoadedModel):
            label = str(model.source.get("name", type(model.module).__name__))
        else:
            label = Path(model.spec).name
        with writing(options.junit, JUNIT, "--junit", options.overwrite) as file:
            file.write(junit({label: verdicts}))
    return AuditResult(options.out, document, tuple(verdicts))


def _counted(study: Study, plan: AuditPlan, options: AuditOptions) -> tuple[Census, dict[str, Any]]:
    """Stream all images through the model, and judge; audit.json without the pictures."""
    model, limits = study.model, options.thresholds
    correlate = frozenset[Call]()
    if limits.redundant_at is not None:
        correlate = frozenset(target.spot.call for target in plan.targets)
    counted = Census(plan.spots, correlate, plan.trace.gave.keys())
    names = frozenset(call.name for call in counted.spots)
    watched = watching_calls(model.module, counted.take, names, plan.trace.atoms)
    with in_eval_mode(model.module), watched:
        study.show(counted)
    rows = judged_rows(plan, counted, limits)
    dead = [(target, row["findings"].get("dead", ())) for target, row in rows.items()]
    cut, proof = find_prunable(plan, dead), None
    if options.prove:
        with in_eval_mode(model.module):
            again = study.batches(sorted(study.seen) if cut.layers else [])
            proof = verify(model, plan, cut, again)
    skipped = [(skip.layer, skip.reason) for skip in plan.skipped]
    skipped += [(call.label, reason) for call, reason in counted.faults.items()]
    asked = {**structs.asdict(limits), **structs.asdict(options.inputs)}
    document = {
        **study.about,
        "options": {"layers": options.layers, **asked},
        "images": {
            "total": len(study.samples),
            "seen": len(study.seen),
            "failures": [{"image": name, "error": error} for name, _, error in study.failures],
        },
        "layers": list(rows.values()),
        "total": findings.totals(list(rows.values())),
        "skipped": [{"layer": layer, "reason": reason} for layer, reason in skipped],
        "never_ran": list(plan.never_ran),
        "prune": dict(cut.layers),
        "not_prunable": dict(cut.refused),
        "verify": proof,
    }
    return counted, document


def _warn(plan: AuditPlan, counted: Census, document: Mapping[str, Any]) -> None:
    """Say what was asked for and could not be looked at, or not be judged."""
    activations = {t.spot.call.label for t in plan.targets if t.spot.activation is not None}
    left_out: dict[str, Sequence[str]] = {
        "skipped": ["{layer} ({reason})".format(**row) for row in document["skipped"]],
        "never ran": plan.never_ran,
        "not judged for dead": [
            f"{row['label']} ({row['not_judged']['dead']})"
            for row in document["layers"]
            if row["not_judged"] and row["label"] not in activations
        ],
        "calls that a blank image does not cause, not counted": sorted(counted.unforeseen),
    }
    for what, layers in left_out.items():
        if layers:
            log.warning("%s: %s", what, listed(layers, 3))


class HealthCheck:
    """Counts what the channels of some layers do for the same images, whenever it is asked."""

    def __init__(
        self,
        model: LoadedModel,
        samples: Sequence[Sample],
        layers: Sequence[Layer],
        inputs: InputOptions,
        blank: Sequence[Any],
    ) -> None:
        """Choose where each layer is judged, by a forward pass on `blank`."""
        names = [re.escape(layer.name) for layer in layers if not layer.is_function]
        if not names:
            raise UsageError(
                "channels are judged of modules, and all layers are functions: "
                + listed([layer.name for layer in layers], 3)
            )
        self._samples = samples
        self._options = AuditOptions(f"re:^({'|'.join(names)})$", inputs, batch_size=16)
        self._plan = choose(model, self._options.layers, blank)

    def write(self, model: LoadedModel, folder: Path) -> Mapping[str, Any]:
        """Audit the model as it is now, and write audit.json into a folder.

        Returns:
            The content of audit.json.
        """
        study = Study(model, self._samples, self._options)
        _, document = _counted(study, self._plan, self._options)
        output.write_document(folder, document)
        return document
