"""The story of `audit`: from a model and images to findings, files and verdicts."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from featviz.audit import findings, output, pruning, suspects
from featviz.audit.counting import (
    AT_BOUND,
    COUNT,
    HIGH,
    LOW,
    NONFINITE,
    ZEROS,
    Census,
    Tally,
)
from featviz.audit.gates import Evidence, parse_gate
from featviz.audit.parts import Call
from featviz.audit.plan import AuditPlan, CountedCall, plan_audit
from featviz.errors import CHECK_FAILED, StoreError, UsageError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel
from featviz.options import InputOptions, ModelOptions
from featviz.options.commands import AuditOptions, Thresholds
from featviz.records import Layer, Sample, Verdict
from featviz.run.prepare import blank_input
from featviz.run.study import BatchProgress, Study, StudyFile, begun
from featviz.rundir import write
from featviz.rundir.folder import Folder
from featviz.rundir.place import AUDIT, JUNIT, PRUNING, writing
from featviz.rundir.studies import junit, read_audit
from featviz.text import gaps, listed

log = logging.getLogger(__name__)


class AuditResult(NamedTuple):
    """What became of an audit."""

    document: dict[str, Any]
    """The content of audit.json, but for its pictures and files."""
    verdicts: tuple[Verdict, ...]
    """Those of the gates, and of the baseline if there is one."""
    exit_code: int
    """0 all held, 3 some images failed, 4 a gate failed or something got worse."""


def audit(
    model: ModelOptions | LoadedModel,
    images: Sequence[str],
    options: AuditOptions,
    progress: BatchProgress = lambda image, error, total: None,
) -> AuditResult:
    """Audit a model on images.

    Args:
        model: a loaded one, or the options by which it is loaded.
        images: files, folders, archives, URLs or globs, as on the command line.
        options: what is counted and judged, and where files go.
        progress: called with each image's name, its error if it failed, and the number
            of images.

    Raises:
        UsageError: no layer can be counted, a gate is about none, or the baseline is no
            audit.
    """
    # Gates and the baseline are read before the model: loading it takes longest, and a
    # typing error should not have to wait for it.
    gates = [parse_gate(text) for text in options.fail_on]
    baseline = None if options.baseline is None else _read_baseline(options.baseline)
    files = []
    if options.junit is not None:
        files.append(StudyFile("--junit", options.junit, JUNIT))
    if options.prune_out is not None:
        files.append(StudyFile("--prune-out", options.prune_out, PRUNING))
    with begun(model, images, options, AUDIT, files) as (folder, loaded, samples):
        blank = blank_input(loaded, samples, options.inputs)[0]
        plan = plan_audit(loaded, options.layers, blank)
        # Refuse gates that could never fail before any image is seen: a misspelt layer
        # would otherwise hold for ever.
        expected = _rows_without_channels(plan, options.thresholds)
        for gate in gates:
            findings.judged_rows(gate, expected)
        study = Study(loaded, samples, options, progress)
        census, document = _counted(study, plan, options)
        _warn(plan, census, document)
        rows = document["layers"]
        sheets = suspects.choose_suspects(
            plan, rows, census.tallies, options.max_suspects
        )
        # a second pass over the images of the suspects alone: to keep the maps of all
        # channels in the first one would take memory by the image
        drawn = suspects.draw_suspects(
            folder, sheets, loaded, plan, samples, options.inputs
        )
        _note_left_out(drawn, document, options)
        output.write_files(folder, document, census.tallies, drawn)
        verdicts = [findings.check_gate(gate, rows) for gate in gates]
        if baseline is not None:
            verdicts.append(findings.check_baseline(rows, baseline))
    # when the folder is complete
    texts = {
        PRUNING: write.json_bytes(document["prune"]),
        JUNIT: junit({_model_label(model): verdicts}),
    }
    for option, path, file_kind in files:
        with writing(path, file_kind, option, options.overwrite) as file:
            file.write(texts[file_kind])
    return AuditResult(document, tuple(verdicts), _exit_code(document, verdicts))


def _exit_code(document: Mapping[str, Any], verdicts: Sequence[Verdict]) -> int:
    """The end of an audit for the shell; see `AuditResult`."""
    # a failed gate outranks failed images: it is what CI asked for
    if not all(verdict.held for verdict in verdicts):
        return CHECK_FAILED
    return 3 if document["images"]["failures"] else 0


def _read_baseline(path: Path) -> dict[str, Mapping[str, Sequence[int]]]:
    """The channels of each finding, by label of the layer.

    Args:
        path: an audit.json, which need not be called so.

    Raises:
        UsageError: it is not there, or no audit.
    """
    try:
        audit_and_pictures = read_audit(path.parent, path)
    except StoreError as error:
        raise UsageError(f"--baseline {error.message}", error.hint) from error
    # None is for a folder without an audit, when no file was named
    assert audit_and_pictures is not None
    return {row.label: row.findings for row in audit_and_pictures[0].layers}


def _rows_without_channels(
    plan: AuditPlan, thresholds: Thresholds
) -> list[findings.AuditedRow]:
    """The rows of an audit that has seen nothing: they say for which findings a layer
    is judged."""
    nothing = Tally.empty(
        0, saturates=True, correlates=thresholds.redundant_at is not None
    )
    tallies = dict.fromkeys(plan.counted_calls, nothing)
    return [layer_row(target, tallies, thresholds) for target in plan.targets]


def _model_label(model: ModelOptions | LoadedModel) -> str:
    """What JUnit calls the model: the name of its file, where it has one."""
    if isinstance(model, LoadedModel):
        return str(model.source.get("name", type(model.module).__name__))
    return Path(model.spec).name


def _warn(plan: AuditPlan, census: Census, document: Mapping[str, Any]) -> None:
    """Warn of layers that are not audited, or not for everything.

    Args:
        document: the content of audit.json.
    """
    # An activation that cannot be judged for dead (a sigmoid is never zero) is no news:
    # its own row says so.
    activations = {target.call.label for target in plan.targets if target.activation}
    skipped = {row["layer"]: row["reason"] for row in document["skipped"]}
    not_judged = []
    for row in document["layers"]:
        if row["not_judged"] and row["label"] not in activations:
            not_judged.append(f"{row['label']} ({row['not_judged']['dead']})")
    others = {
        "not judged for dead": not_judged,
        "calls that a blank image does not cause, not counted": sorted(
            census.unforeseen
        ),
    }
    for line in gaps(skipped, plan.never_ran, others):
        log.warning("%s", line)


def _note_left_out(
    drawn: Sequence[Mapping[str, Any]],
    document: Mapping[str, Any],
    options: AuditOptions,
) -> None:
    """Say how many suspects have no picture.

    Args:
        drawn: rows of the pictures of suspects.
        document: the content of audit.json.
    """
    count = sum(len(row["channels"]) for row in drawn)
    total = sum(document["total"]["findings"].values())
    if count < total:
        limits = (
            f"{suspects.PER_LAYER} of a layer, and --max-suspects"
            f" {options.max_suspects}"
        )
        log.info("%d of %d suspects are drawn: at most %s in all", count, total, limits)


def _counted(
    study: Study, plan: AuditPlan, options: AuditOptions
) -> tuple[Census, dict[str, Any]]:
    """Stream all images through the model, and judge.

    Returns:
        What was counted, and the content of audit.json without its pictures.
    """
    model = study.model
    thresholds = options.thresholds
    # correlations take a matrix [C, C] for each call: only for who asked for them
    correlates = []
    if thresholds.redundant_at is not None:
        correlates = [target.call for target in plan.targets]
    counted_calls = plan.counted_calls
    census = Census(counted_calls, correlates, foreseen=plan.graph.output_types)
    with (
        in_eval_mode(model.module),
        plan.watching(model.module, census.take, counted_calls),
    ):
        study.show(census)
    # a call may have no tally: a branch that a blank image takes and no other one does
    rows = []
    for target in plan.targets:
        if target.call in census.tallies and target.call not in census.refused:
            rows.append(layer_row(target, census.tallies, thresholds))
    prunable = pruning.find_prunable(plan, rows)
    # a second pass, since only the tallies of all images say which channels are dead
    proof = None
    if options.prove:
        # with nothing to cut out there is nothing to prove, and no image is shown again
        batches = study.batches(sorted(study.seen) if prunable.layers else [])
        with in_eval_mode(model.module):
            proof = pruning.prove(model, plan, prunable.zeroed, batches)
        proof = {"channels": sum(map(len, prunable.layers.values())), **proof}
    skipped = [skip._asdict() for skip in plan.skipped]
    for call, reason in census.refused.items():
        skipped.append({"layer": call.label, "reason": reason})
    failures = []
    for failure in study.failures:
        failures.append({"image": failure.image, "error": failure.error})
    document = {
        "schema_version": output.SCHEMA_VERSION,
        **study.about,
        "options": {
            "layers": options.layers,
            **structs.asdict(thresholds),
            **structs.asdict(options.inputs),
        },
        "images": {
            "total": len(study.samples),
            "seen": len(study.seen),
            "failures": failures,
        },
        "layers": rows,
        "total": findings.total_row(rows),
        "skipped": skipped,
        "never_ran": plan.never_ran,
        "prune": prunable.layers,
        "not_prunable": prunable.refused,
        "verify": proof,
    }
    return census, document


def layer_row(
    target: CountedCall, tallies: Mapping[Call, Tally], thresholds: Thresholds
) -> dict[str, Any]:
    """Judge a call by what was counted of it, for `layers` of audit.json.

    Args:
        target: the call, and the activation behind it at which its channels are judged
            for `dead` (a convolution before BatchNorm and ReLU is dead where the ReLU
            never leaves zero).
        tallies: of the call and of that activation; each has `sums` [channels,
            statistics] and `values` [channels], how many were counted.
    """
    call = target.call
    tally = tallies[call]
    judge = None
    if target.dead_at is not None:
        # missing where the activation ran for the blank image and for no other one
        judge = tallies.get(target.dead_at.call)
    # the most that each channel ever reaches at the activation; None where it was not
    # reached
    ceiling = None
    apoz = None
    if judge is not None:
        # NaN and infinity are not known to stay at zero
        ceiling = np.where(judge.sums[:, NONFINITE] > 0, np.inf, judge.sums[:, HIGH])
        # average percentage of zeros, 0..1: H. Hu, R. Peng, Y.-W. Tai, C.-K. Tang,
        # "Network Trimming", arXiv 1607.03250, equation 1, averaged over the channels
        zero_shares = judge.sums[:, ZEROS] / judge.values
        apoz = float(zero_shares.mean()) if len(zero_shares) else 0.0
    # without bounds the column AT_BOUND is NaN, which is no share of anything
    saturated = None
    if target.activation is not None and target.activation.bounds:
        saturated = tally.sums[:, AT_BOUND] / tally.values
    evidence = Evidence(
        count=tally.sums[:, COUNT],
        low=tally.sums[:, LOW],
        high=tally.sums[:, HIGH],
        nonfinite=tally.sums[:, NONFINITE],
        saturated=saturated,
        ceiling=ceiling,
        correlation=tally.correlation(),
    )
    row = {
        "layer": call.name,
        "call": call.index,
        "label": call.label,
        "type": call.type,
        "channels": len(tally.sums),
        "dead_at": None if target.dead_at is None else target.dead_at.call.label,
        "not_judged": {"dead": target.reason} if target.dead_at is None else {},
        "findings": findings.judge(evidence, thresholds),
        "values": int(tally.values.max(initial=0)),
        "apoz": apoz,
    }
    if thresholds.redundant_at:
        row["groups"] = findings.redundant_groups(evidence, thresholds)
    return row


def health_check(
    model: LoadedModel,
    samples: Sequence[Sample],
    layers: Sequence[Layer],
    inputs: InputOptions,
    blank: Sequence[Any],
) -> Callable[[LoadedModel, Folder], Mapping[str, Any]]:
    """Prepare an audit that is repeated while a model is trained.

    Args:
        model: as it is now; each audit takes one of the same structure.
        samples: the images of each audit.
        layers: functions among them are left out.
        blank: arguments of the model, whose values do not matter: the pass on them
            decides now where each layer is judged.

    Returns:
        A function that audits the model as it is, writes audit.json into a folder, and
        returns its content.

    Raises:
        UsageError: all layers are functions.
    """
    names = [re.escape(layer.name) for layer in layers if not layer.is_function]
    if not names:
        functions = listed([layer.name for layer in layers], 3)
        raise UsageError(
            f"channels are judged of modules, and all layers are functions: {functions}"
        )
    options = AuditOptions(f"re:^({'|'.join(names)})$", inputs, batch_size=16)
    # once, not at each audit: training changes weights and not the structure
    plan = plan_audit(model, options.layers, blank)

    def check(model: LoadedModel, folder: Folder) -> Mapping[str, Any]:
        _, document = _counted(Study(model, samples, options), plan, options)
        output.write_document(folder, document)
        return document

    return check
