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
from featviz.audit.gates import Evidence, Gate, parse_gate
from featviz.audit.parts import Call
from featviz.audit.plan import AuditPlan, CountedCall, plan_audit
from featviz.errors import CHECK_FAILED, StoreError, UsageError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel
from featviz.options import InputOptions, ModelOptions
from featviz.options.commands import AuditOptions, Thresholds
from featviz.records import Layer, Sample, Verdict
from featviz.run.prepare import blank_input
from featviz.run.study import BatchProgress, Study, StudyFile, begin_study
from featviz.rundir import write
from featviz.rundir.folder import Folder
from featviz.rundir.place import AUDIT, JUNIT, PRUNING, writing
from featviz.rundir.studies import junit, read_audit
from featviz.text import gaps, listed

log = logging.getLogger(__name__)


class AuditResult(NamedTuple):
    """The result of an audit."""

    document: dict[str, Any]
    """The content of audit.json, without `drawn` and `files`."""
    verdicts: tuple[Verdict, ...]
    """On each gate, and on the baseline if there is one."""
    exit_code: int
    """0 all held, 3 some images failed, 4 a gate failed or something got worse; 4 outranks
    3."""


def audit(
    model: ModelOptions | LoadedModel,
    images: Sequence[str],
    options: AuditOptions,
    progress: BatchProgress = lambda image, error, total: None,
) -> AuditResult:
    """Audit a model on images, and write the folder of the audit and the files that
    `options` names.

    Args:
        model: a loaded model, or the options by which it is loaded.
        images: files, folders, archives, URLs or globs, as on the command line.
        options: what is counted and judged, and where files go.
        progress: called with each image's name, its error if it failed, and the number
            of images.

    Raises:
        UsageError: there is no image, no layer can be counted, a gate could never fail,
            the baseline is no audit, or a path may not be written to.
        FeatvizError: the model cannot be loaded, no image goes through it, or a file
            cannot be written.
    """
    # Gates and the baseline are read before the model: loading it takes longest, and a
    # typing error should not have to wait for it.
    gates = [parse_gate(text) for text in options.fail_on]
    baseline = None if options.baseline is None else _read_baseline(options.baseline)
    files = _files_outside(options)
    with begin_study(model, images, options, AUDIT, files) as (folder, loaded, samples):
        blank = blank_input(loaded, samples, options.inputs)[0]
        plan = plan_audit(loaded, options.layers, blank)
        _refuse_idle_gates(gates, plan, options.thresholds)
        study = Study(loaded, samples, options, progress)
        census = _count(study, plan, options)
        document = _judged(study, plan, census, options)
        _warn(plan, census, document)
        rows = document["layers"]
        sheets = suspects.choose_suspects(
            plan, rows, census.tallies, options.max_suspects
        )
        # A pass of its own, over the few images that the sheets show: to keep the maps of
        # all images from the first pass would take too much memory.
        drawn = suspects.draw_suspects(
            folder, sheets, loaded, plan, samples, options.inputs
        )
        _note_left_out(drawn, document, options)
        output.write_files(folder, document, census.tallies, drawn)
        verdicts = [findings.check_gate(gate, rows) for gate in gates]
        if baseline is not None:
            verdicts.append(findings.check_baseline(rows, baseline))
    # only now, when the folder is complete
    texts = {
        PRUNING: write.json_bytes(document["prune"]),
        JUNIT: junit({_model_label(model): verdicts}),
    }
    for option, path, file_kind in files:
        with writing(path, file_kind, option, options.overwrite) as file:
            file.write(texts[file_kind])
    return AuditResult(document, tuple(verdicts), _exit_code(document, verdicts))


def _files_outside(options: AuditOptions) -> list[StudyFile]:
    """The files that the audit writes outside of its folder."""
    files = []
    if options.junit is not None:
        files.append(StudyFile("--junit", options.junit, JUNIT))
    if options.prune_out is not None:
        files.append(StudyFile("--prune-out", options.prune_out, PRUNING))
    return files


def _exit_code(document: Mapping[str, Any], verdicts: Sequence[Verdict]) -> int:
    """See `AuditResult.exit_code`."""
    # a failed gate outranks failed images: it is what CI asked for
    if not all(verdict.held for verdict in verdicts):
        return CHECK_FAILED
    return 3 if document["images"]["failures"] else 0


def _read_baseline(path: Path) -> dict[str, Mapping[str, Sequence[int]]]:
    """Read an earlier audit.

    Args:
        path: an audit.json under any name.

    Returns:
        Of each layer, by its label: the channels of each finding, by the finding's name.

    Raises:
        UsageError: the file does not exist, or is no audit.
    """
    try:
        audit_and_pictures = read_audit(path.parent, path)
    except StoreError as error:
        raise UsageError(f"--baseline {error.message}", error.hint) from error
    # `read_audit` returns None only where it gets no file
    assert audit_and_pictures is not None
    return {row.label: row.findings for row in audit_and_pictures[0].layers}


def _refuse_idle_gates(
    gates: Sequence[Gate], plan: AuditPlan, thresholds: Thresholds
) -> None:
    """Refuse gates that could never fail, before any image is seen.

    Raises:
        UsageError: no audited layer has the name in a gate, or none of those that have it
            can be judged for the gate's finding.
    """
    # rows without channels still say for which findings each layer is judged
    nothing = Tally.empty(
        0, saturates=True, correlates=thresholds.redundant_at is not None
    )
    tallies = dict.fromkeys(plan.counted_calls, nothing)
    rows = [layer_row(target, tallies, thresholds) for target in plan.targets]
    for gate in gates:
        findings.judged_rows(gate, rows)


def _model_label(model: ModelOptions | LoadedModel) -> str:
    """What the JUnit file calls the model: for MODEL `nets/a.pth` it is `a.pth`, for a
    loaded model the name in its record, or else its class."""
    if isinstance(model, LoadedModel):
        return str(model.source.get("name", type(model.module).__name__))
    return Path(model.spec).name


def _warn(plan: AuditPlan, census: Census, document: Mapping[str, Any]) -> None:
    """Warn of layers that are not audited, or not judged for `dead`.

    Args:
        document: the content of audit.json.
    """
    # No warning for activations, such as a sigmoid, that cannot be judged for `dead`: their
    # rows in audit.json say so.
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
    """Log how many of the suspects are drawn, unless all are.

    Args:
        drawn: the entry `drawn` of audit.json.
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


def _count(study: Study, plan: AuditPlan, options: AuditOptions) -> Census:
    """Run the model on all images, and count the values of the audited calls."""
    # only on demand: correlations take a matrix [C, C] for each call
    correlates = []
    if options.thresholds.redundant_at is not None:
        correlates = [target.call for target in plan.targets]
    counted_calls = plan.counted_calls
    census = Census(counted_calls, correlates, foreseen=plan.graph.output_types)
    module = study.model.module
    with (
        in_eval_mode(module),
        plan.watching(module, census.measure_output, counted_calls),
    ):
        study.show(census)
    return census


def _judged(
    study: Study, plan: AuditPlan, census: Census, options: AuditOptions
) -> dict[str, Any]:
    """Judge what was counted, and return the content of audit.json, without `drawn` and
    `files`.

    Args:
        study: its images were shown already; with `options.prove` it shows them again.
        census: what was counted of these images.
    """
    # a call has no tally if only the blank image, on which the plan was made, reached it
    rows = []
    for target in plan.targets:
        if target.call in census.tallies and target.call not in census.refused:
            rows.append(layer_row(target, census.tallies, options.thresholds))
    prunable = pruning.find_prunable(plan, rows)
    skipped = [skip._asdict() for skip in plan.skipped]
    for call, reason in census.refused.items():
        skipped.append({"layer": call.label, "reason": reason})
    # before the failures are read: an image may fail when it is shown again
    proof = _prove_prunable(study, plan, prunable) if options.prove else None
    failures = []
    for failure in study.failures:
        failures.append({"image": failure.image, "error": failure.error})
    return {
        "schema_version": output.SCHEMA_VERSION,
        **study.about,
        "options": {
            "layers": options.layers,
            **structs.asdict(options.thresholds),
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


def _prove_prunable(
    study: Study, plan: AuditPlan, prunable: pruning.Prunable
) -> dict[str, Any]:
    """Show all images again, without the channels that can be cut out, and return the
    entry `verify` of audit.json. A second pass is needed, since only the first one shows
    which channels these are."""
    # with nothing to cut out, no image is shown again
    batches = study.batches(sorted(study.seen) if prunable.layers else [])
    with in_eval_mode(study.model.module):
        proof = pruning.prove(study.model, plan, prunable.zeroed, batches)
    return {"channels": sum(map(len, prunable.layers.values())), **proof}


def layer_row(
    target: CountedCall, tallies: Mapping[Call, Tally], thresholds: Thresholds
) -> dict[str, Any]:
    """Judge the channels of a call, and return the call's entry of `layers` in audit.json.

    Args:
        target: the call. `target.dead_at` is the activation where its channels are judged
            for `dead`: a channel of a convolution before BatchNorm and ReLU is dead if the
            ReLU's output is never above `thresholds.eps` in it.
        tallies: must hold the tally of the call; may hold that of the activation.
        thresholds: the limits of the findings.
    """
    call = target.call
    tally = tallies[call]
    activation_tally = None
    if target.dead_at is not None:
        # The plan is made on a blank image. The activation has no tally if its branch of the
        # model ran only for that image.
        activation_tally = tallies.get(target.dead_at.call)
    evidence = _evidence(target, tally, activation_tally)
    # values: how many each channel has. apoz: the average percentage of zeros.
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
        "apoz": None if activation_tally is None else _zero_share(activation_tally),
    }
    if thresholds.redundant_at:
        row["groups"] = findings.redundant_groups(evidence, thresholds)
    return row


def _evidence(
    target: CountedCall, tally: Tally, activation_tally: Tally | None
) -> Evidence:
    """What is known of the channels of a call.

    Args:
        target: the call.
        tally: the tally of the call.
        activation_tally: the tally of the activation where its channels are judged for
            `dead`, which may be the call itself; None if there is no such activation, or
            if it has not run.
    """
    ceiling = None
    if activation_tally is not None:
        sums = activation_tally.sums
        # a channel with NaN or infinite values is never dead
        ceiling = np.where(sums[:, NONFINITE] > 0, np.inf, sums[:, HIGH])
    # without bounds the column AT_BOUND is NaN, which is no share of anything
    saturated = None
    if target.activation is not None and target.activation.bounds:
        saturated = tally.sums[:, AT_BOUND] / tally.values
    return Evidence(
        count=tally.sums[:, COUNT],
        low=tally.sums[:, LOW],
        high=tally.sums[:, HIGH],
        nonfinite=tally.sums[:, NONFINITE],
        saturated=saturated,
        ceiling=ceiling,
        correlation=tally.correlation(),
    )


def _zero_share(tally: Tally) -> float:
    """The average percentage of zeros (APoZ) of an activation, as a share 0..1: H. Hu, R.
    Peng, Y.-W. Tai, C.-K. Tang, "Network Trimming", arXiv 1607.03250, equation 1, averaged
    over the channels; 0 without channels."""
    zero_shares = tally.sums[:, ZEROS] / tally.values
    return float(zero_shares.mean()) if len(zero_shares) else 0.0


def health_check(
    model: LoadedModel,
    samples: Sequence[Sample],
    layers: Sequence[Layer],
    inputs: InputOptions,
    blank: Sequence[Any],
) -> Callable[[LoadedModel, Folder], Mapping[str, Any]]:
    """Prepare an audit that is repeated while a model is trained.

    Args:
        model: the model before training. Each audit gets a model of the same structure.
        samples: the images of each audit.
        layers: the layers to audit; functions among them are left out.
        inputs: how images become the model's inputs.
        blank: arguments of the model, whose values do not matter. A forward pass on them,
            made at once, decides at which activation each layer is judged.

    Returns:
        A function that takes a model and a folder, audits the model, writes audit.json
        into the folder, and returns the content of audit.json.

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
    # only once: training changes the weights, but not the structure
    plan = plan_audit(model, options.layers, blank)

    def check(model: LoadedModel, folder: Folder) -> Mapping[str, Any]:
        """Audit the model with the weights that it has now."""
        study = Study(model, samples, options)
        document = _judged(study, plan, _count(study, plan, options), options)
        output.write_document(folder, document)
        return document

    return check
