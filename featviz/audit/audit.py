"""The story of `audit`: a model and images to findings, files and verdicts; which layers make the
dead channels, and the proof that the output does without them."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from featviz.audit import findings, output
from featviz.audit.counting import Census, Tally
from featviz.audit.gates import parse_gate
from featviz.audit.plan import AuditPlan, Call, choose
from featviz.errors import CHECK_FAILED, StoreError, UsageError
from featviz.gradients.passes import largest_change
from featviz.hooks.capture import forward, tensors
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel
from featviz.options import InputOptions, ModelOptions
from featviz.options.commands import AuditOptions
from featviz.records import Layer, Sample, Verdict
from featviz.run.prepare import blank_input
from featviz.run.study import Batch, BatchProgress, Study, begun
from featviz.rundir import write
from featviz.rundir.folder import Folder
from featviz.rundir.place import AUDIT, JUNIT, PRUNING, writing
from featviz.rundir.studies import junit, read_audit
from featviz.text import listed

log = logging.getLogger(__name__)


def audit(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: AuditOptions,
    progress: BatchProgress = lambda image, error, total: None,
) -> tuple[dict[str, Any], tuple[Verdict, ...], int]:
    """Audit a model on images: audit.json, the verdicts of gates and the baseline, and the exit
    code: 0 all held, 3 some images failed, 4 a gate is broken or something got worse."""
    gates, limits = [parse_gate(text) for text in options.fail_on], options.thresholds
    baseline = None
    if options.baseline is not None:
        try:
            baseline = read_audit(options.baseline.parent, options.baseline)
        except StoreError as error:
            raise UsageError(f"--baseline {error.message}", error.hint) from error
    asked = ("--junit", options.junit, JUNIT), ("--prune-out", options.prune_out, PRUNING)
    files = [(option, path, kind) for option, path, kind in asked if path is not None]
    with begun(model, arguments, options, AUDIT, files) as (folder, loaded, samples):
        plan = choose(loaded, options.layers, blank_input(loaded, samples, options.inputs)[0])
        nothing = Tally.nothing(0, True, limits.redundant_at is not None)
        before = dict.fromkeys(plan.spots, nothing)
        expected = [findings.row_of(target, before, limits) for target in plan.targets]
        for gate in gates:
            findings.covered(gate, expected)
        counted, document = _counted(Study(loaded, samples, options, progress), plan, options)
        layers = document["layers"]
        activations = {target.call.label for target in plan.targets if target.activation}
        skipped = ["{layer} ({reason})".format(**row) for row in document["skipped"]]
        unjudged = [
            f"{row['label']} ({row['not_judged']['dead']})"
            for row in layers
            if row["not_judged"] and row["label"] not in activations
        ]
        for what, names in (
            ("skipped", skipped),
            ("never ran", plan.never_ran),
            ("not judged for dead", unjudged),
            ("calls that a blank image does not cause, not counted", sorted(counted.unforeseen)),
        ):
            if names:
                log.warning("%s: %s", what, listed(names, 3))
        output.write_files(folder, document, loaded, plan, counted.tallies, samples, options)
        verdicts = [findings.check(gate, layers) for gate in gates]
        if baseline is not None:
            earlier = {row.label: row.findings for row in baseline[0].layers}
            verdicts.append(findings.worse(layers, earlier))
    if options.prune_out is not None:
        with writing(options.prune_out, PRUNING, "--prune-out", options.overwrite) as file:
            file.write(write.as_json(document["prune"]))
    if options.junit is not None:
        if isinstance(model, LoadedModel):
            label = str(model.source.get("name", type(model.module).__name__))
        else:
            label = Path(model.spec).name
        with writing(options.junit, JUNIT, "--junit", options.overwrite) as file:
            file.write(junit({label: verdicts}))
    code = 3 if document["images"]["failures"] else 0
    broken = any(not verdict.held for verdict in verdicts)
    return document, tuple(verdicts), CHECK_FAILED if broken else code


def _counted(study: Study, plan: AuditPlan, options: AuditOptions) -> tuple[Census, dict[str, Any]]:
    """Stream all images through the model, and judge; audit.json without the pictures."""
    model, limits = study.model, options.thresholds
    correlate = [target.call for target in plan.targets] if limits.redundant_at is not None else ()
    counted = Census(plan.spots, correlate, plan.gave.keys())
    with in_eval_mode(model.module), plan.watching(model.module, counted.take, counted.spots):
        study.show(counted)
    sound = {call: own for call, own in counted.tallies.items() if call not in counted.faults}
    judged = [target for target in plan.targets if target.call in sound]
    rows = [findings.row_of(target, counted.tallies, limits) for target in judged]
    layers, refused, forced = find_prunable(plan, rows)
    proof = None
    if options.prove:
        with in_eval_mode(model.module):
            proof = prove(model, plan, forced, study.batches(sorted(study.seen) if layers else []))
        proof = {"channels": sum(map(len, layers.values())), **proof}
    skipped = [*plan.skipped, *((call.label, reason) for call, reason in counted.faults.items())]
    asked = {**structs.asdict(limits), **structs.asdict(options.inputs)}
    document = {
        "schema_version": output.SCHEMA_VERSION,
        **study.about,
        "options": {"layers": options.layers, **asked},
        "images": {
            "total": len(study.samples),
            "seen": len(study.seen),
            "failures": [{"image": name, "error": error} for name, _, error in study.failures],
        },
        "layers": rows,
        "total": findings.totals(rows),
        "skipped": [{"layer": layer, "reason": reason} for layer, reason in skipped],
        "never_ran": plan.never_ran,
        "prune": layers,
        "not_prunable": refused,
        "verify": proof,
    }
    return counted, document


def find_prunable(
    plan: AuditPlan, rows: Sequence[findings.Row]
) -> tuple[dict[str, list[int]], dict[str, str], dict[Call, list[int]]]:
    """The layers that make dead channels: what can be cut out of each, by name; activations whose
    dead channels cannot be cut out of one layer, with the reason; and the calls of activations
    where forcing channels to zero has the same effect. A layer that runs several times loses a
    channel only if it is dead behind each call."""
    dead = {row["label"]: row["findings"].get("dead") for row in rows}
    # by the maker's name and call: the activation behind it, and the channels dead there
    behind: defaultdict[str, dict[Call, tuple[Call, list[int]]]] = defaultdict(dict)
    layers, refused, forced = dict[str, list[int]](), dict[str, str](), dict[Call, list[int]]()
    for target in plan.targets:
        channels = dead.get(target.call.label)
        if target.dead_at is None or not channels:
            continue
        at = target.dead_at.call
        maker = plan.maker_of(plan.given_by[at])
        if isinstance(maker, str):
            refused[at.label] = maker
        else:
            behind[maker.name][maker] = at, channels
    runs = [node.call.name for node in plan.nodes]
    for name, calls in behind.items():
        common = sorted(set.intersection(*({*channels} for _, channels in calls.values())))
        if common and len(calls) == runs.count(name):
            layers[name] = common
            forced |= {at: common for at, _ in calls.values()}
    return layers, refused, forced


def prove(
    model: LoadedModel, plan: AuditPlan, forced: Mapping[Call, list[int]], batches: Iterable[Batch]
) -> dict[str, Any]:
    """Compare a model's output with and without channels, for `verify` of audit.json."""
    spots = plan.spots

    def force(call: Call, output: Any) -> None:
        """In place: what stands behind sees a model that lacks these channels."""
        if call in forced:
            chosen = torch.tensor(forced[call], device=output.device)
            output.index_fill_(spots[call].axis % output.dim(), chosen, 0)

    images, nonfinite, largest, comparable = 0, 0, 0.0, True
    for batch in batches:
        inputs = [arg.to(model.device) for arg in batch.inputs]
        plain = [value.clone() for value in tensors(forward(model.module, inputs))]
        with plan.watching(model.module, force, forced):
            changed = tensors(forward(model.module, inputs))
        change, count = largest_change(plain, changed)
        images, nonfinite = images + len(batch.images), nonfinite + count
        comparable &= change is not None
        largest = max(largest, change or 0.0)
    proof = {"images": images, "largest_change": largest if comparable else None}
    return {**proof, "nonfinite": nonfinite} if nonfinite else proof


def health_check(
    model: LoadedModel,
    samples: Sequence[Sample],
    layers: Sequence[Layer],
    inputs: InputOptions,
    blank: Sequence[Any],
) -> Callable[[LoadedModel, Folder], Mapping[str, Any]]:
    """What audits a model as it is when it is called: it writes audit.json into a folder, and gives
    its content. Where each layer is judged a forward pass on `blank` decides now."""
    names = [re.escape(layer.name) for layer in layers if not layer.is_function]
    if not names:
        given = listed([layer.name for layer in layers], 3)
        raise UsageError(f"channels are judged of modules, and all layers are functions: {given}")
    options = AuditOptions(f"re:^({'|'.join(names)})$", inputs, batch_size=16)
    plan = choose(model, options.layers, blank)

    def check(model: LoadedModel, folder: Folder) -> Mapping[str, Any]:
        _, document = _counted(Study(model, samples, options), plan, options)
        output.write_document(folder, document)
        return document

    return check
