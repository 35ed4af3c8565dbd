"""The story of `audit`: models and images to findings, files and verdicts."""

from __future__ import annotations

import glob
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from featviz.audit import judging, model_audit, output
from featviz.audit.model_audit import AuditRequest, Examined
from featviz.audit.output import SCHEMA_VERSION
from featviz.errors import CHECK_FAILED, UsageError
from featviz.images import decode, find
from featviz.images.group import natural_key
from featviz.models.load import LoadedModel, ModelOptions, load_model, mistakes_first
from featviz.pipeline.batches import BatchProgress
from featviz.pipeline.prepare import grouped, warn_of_guess
from featviz.pipeline.processes import ALONE, World
from featviz.records import Sample, Verdict, gates
from featviz.rundir import destination, junit, write
from featviz.text import safe_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuditOptions:
    """The options of `audit`, beside the models and the images."""

    asked: AuditRequest = field(default_factory=AuditRequest)
    out: Path = Path("featviz-audit")
    overwrite: bool = False
    nul_separated: bool = False
    """`-` reads NUL-separated paths."""
    fail_on: tuple[str, ...] = ()
    """Gates as they are written."""
    baseline: Path | None = None
    """An audit.json than which nothing may be worse."""
    junit: Path | None = None
    prune_out: Path | None = None

    @property
    def besides(self) -> list[Path]:
        """Files that are written outside of `out`, or may be."""
        return [path for path in (self.junit, self.prune_out) if path is not None]


@dataclass(frozen=True)
class Audited:
    """The audit of one model."""

    label: str
    """The model's file or name, told apart from the others'."""
    document: Mapping[str, Any]
    """The content of its audit.json."""
    verdicts: tuple[Verdict, ...]
    """Whether the gates and the baseline held."""


@dataclass(frozen=True)
class AuditResult:
    """The audits of all models."""

    out: Path
    models: tuple[Audited, ...]

    @property
    def exit_code(self) -> int:
        """0 all held, 3 some images failed, 4 a gate is broken or something got worse."""
        if any(not verdict.held for model in self.models for verdict in model.verdicts):
            return CHECK_FAILED
        return 3 if any(model.document["images"]["failures"] for model in self.models) else 0

    def as_json(self) -> Mapping[str, Any]:
        """One model's document, or those of several by their labels."""
        if len(self.models) == 1:
            return {"schema_version": SCHEMA_VERSION, **self.models[0].document}
        return {
            "schema_version": SCHEMA_VERSION,
            "models": {model.label: model.document for model in self.models},
        }


def audit(
    models: Sequence[ModelOptions] | LoadedModel,
    arguments: Sequence[str],
    options: AuditOptions,
    progress: BatchProgress = lambda image, error, total: None,
    stdin: BinaryIO | None = None,
    team: World = ALONE,
) -> AuditResult:
    """Audit one model, or several one after the other, on the same images.

    Several processes divide the images among them; the first judges and writes.

    Raises:
        FeatvizError: nothing could be begun, or the results could not be written. What goes wrong
            with one image is in the result instead.
    """
    asked = _checked(options)
    baseline = None if options.baseline is None else output.read_baseline(options.baseline)
    samples = team.at_first(lambda: _samples(models, arguments, stdin, options))
    sources: Sequence[ModelOptions | LoadedModel]
    sources = [models] if isinstance(models, LoadedModel) else _expanded(models)
    if options.prune_out is not None and len(sources) > 1:
        raise UsageError("--prune-out is for one model", f"here are {len(sources)}")
    audited: list[Audited] = []
    warned = False
    place = (
        destination.replacing(options.out, destination.AUDIT, options.besides)
        if team.first
        else nullcontext()
    )
    with place as folder:
        for number, (label, source) in enumerate(zip(_labels(sources), sources, strict=True)):
            model = source if isinstance(source, LoadedModel) else load_model(source, asked.inputs)
            if not warned:
                warn_of_guess(model.preprocess)
                warned = model.preprocess.guessed
            shown = grouped(samples, model.preprocess)
            result = model_audit.examine(
                model, shown, asked, progress, team.within(f"model{number}")
            )
            if result is not None and folder is not None:
                inside = safe_name(f"{number:02d}_{label}") if len(sources) > 1 else ""
                output.write_model(folder / inside, result)
                audited.append(Audited(label, result.document, _judge(result, asked, baseline)))
        if len(audited) > 1 and folder is not None:
            output.write_models(folder, {model.label: model.document for model in audited})
    if team.first and options.prune_out is not None:
        write.write_json(options.prune_out, audited[0].document["prune"])
    if team.first and options.junit is not None:
        report = junit.document({model.label: model.verdicts for model in audited})
        with write.atomic(options.junit) as file:
            file.write(report)
    return AuditResult(options.out, tuple(audited))


def _samples(
    models: Sequence[ModelOptions] | LoadedModel,
    arguments: Sequence[str],
    stdin: BinaryIO | None,
    options: AuditOptions,
) -> list[Sample]:
    """Find the images, and refuse to write over them, a model, or what something else made."""
    samples = find.find_samples(arguments, stdin, options.nul_separated, options.out)
    inputs = find.files_of(samples)
    named = () if isinstance(models, LoadedModel) else _expanded(models)
    for model in named:
        inputs += destination.model_files(model.spec, model.arch, model.weights)
    written = {"--out": options.out, "--junit": options.junit, "--prune-out": options.prune_out}
    for option, path in written.items():
        if path is not None:
            destination.check_apart(path, option, inputs)
    with ExitStack() as stack:
        for model in reversed(named):
            stack.enter_context(mistakes_first(model))
        destination.check_free(options.out, destination.AUDIT, options.overwrite, options.besides)
    return samples


def _checked(options: AuditOptions) -> AuditRequest:
    """Refuse bad values before any work, and read the gates."""
    asked = options.asked
    limits = asked.thresholds
    if asked.batch_size < 1:
        raise UsageError(f"--batch-size {asked.batch_size} is below 1", "give a whole number")
    if asked.max_suspects < 0:
        raise UsageError(f"--max-suspects {asked.max_suspects} is below 0", "0 draws none")
    if not limits.eps >= 0:
        raise UsageError(f"--eps {limits.eps:g} is below 0", "0 is exact")
    for name, value in (("saturated", limits.saturated_at), ("redundant", limits.redundant_at)):
        if value is not None and not 0 < value < 1:
            raise UsageError(f"--{name}-at {value:g} is not between 0 and 1", "for example 0.98")
    decode.check_background(asked.inputs.background)
    read = tuple(gates.parse(text) for text in options.fail_on)
    return replace(asked, gates=read)


def _expanded(models: Sequence[ModelOptions]) -> list[ModelOptions]:
    """The models, each glob replaced by the files that it matches, in natural order."""
    expanded: list[ModelOptions] = []
    for model in models:
        if not glob.has_magic(model.spec) or Path(model.spec).exists():
            expanded.append(model)
            continue
        files = sorted(glob.glob(model.spec, recursive=True), key=natural_key)
        if not files:
            raise UsageError(f"no model file matches {model.spec!r}", "check the pattern")
        expanded += [replace(model, spec=file) for file in files]
    return expanded


def _labels(sources: Sequence[ModelOptions | LoadedModel]) -> list[str]:
    """Names of the models; of two that are called the same, the later is numbered."""
    names = [_label(source) for source in sources]
    counts = [names[:n].count(name) for n, name in enumerate(names)]
    return [f"{name} ({n + 1})" if n else name for name, n in zip(names, counts, strict=True)]


def _label(source: ModelOptions | LoadedModel) -> str:
    if isinstance(source, LoadedModel):
        return str(source.source.get("name", type(source.module).__name__))
    return Path(source.spec).name


def _judge(
    result: Examined, asked: AuditRequest, baseline: Sequence[Mapping[str, Any]] | None
) -> tuple[Verdict, ...]:
    """Hold the gates and the baseline against a model."""
    layers = result.document["layers"]
    verdicts = [judging.check(gate, layers) for gate in asked.gates]
    if baseline is not None:
        verdicts.append(judging.worse(layers, baseline))
        unknown = judging.incomparable(layers, baseline)
        if unknown:
            log.warning("the baseline lacks %d layers, %s first", len(unknown), unknown[0])
    return tuple(verdicts)
