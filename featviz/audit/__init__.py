"""The story of `audit`: models and images to findings, files and verdicts."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from featviz.audit import charts, findings, gates, model_audit
from featviz.audit.model_audit import AuditRequest, Examined, Progress
from featviz.errors import CHECK_FAILED, FileError, UsageError
from featviz.files import read_json
from featviz.images import decode, find
from featviz.models.load import LoadedModel, ModelOptions, load_model
from featviz.pipeline.prepare import grouped
from featviz.pipeline.processes import ALONE, World
from featviz.records import Sample, Verdict
from featviz.rundir import AUDIT_FILE, MODELS_FILE, destination, junit, write
from featviz.rundir.read import MOST_RECORD
from featviz.rundir.schema import check_audit
from featviz.text import is_number, quoted, safe_name

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
"""Of audit.json and models.json. 1: first release."""


@dataclass(frozen=True)
class AuditOptions:
    """Everything that `audit` can be told beside the models and the images."""

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


@dataclass(frozen=True)
class Audited:
    """What became of one model."""

    label: str
    """The model's file or name, told apart from the others'."""
    document: Mapping[str, Any]
    """The content of its audit.json."""
    verdicts: tuple[Verdict, ...]
    """Of the gates and the baseline."""


@dataclass(frozen=True)
class AuditResult:
    """What became of an audit."""

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
    progress: Progress = lambda image, error, total: None,
    stdin: BinaryIO | None = None,
    team: World = ALONE,
) -> AuditResult:
    """Audit one model, or several one after the other, on the same images.

    Of a team each process counts its share of the images; the first one judges and writes.

    Raises:
        FeatvizError: nothing could be begun, or the results could not be written. What goes wrong
            with one image is in the result instead.
    """
    asked = _checked(options)
    baseline = None if options.baseline is None else read_baseline(options.baseline)

    def begin() -> list[Sample]:
        found = find.find_samples(arguments, stdin, options.nul_separated, options.out)
        _check_apart(models, found, options)
        destination.check_free(options.out, destination.AUDIT, options.overwrite, besides)
        return found

    besides = [path for path in (options.junit, options.prune_out) if path is not None]
    samples = team.at_first(begin)
    sources: Sequence[ModelOptions | LoadedModel]
    sources = [models] if isinstance(models, LoadedModel) else _expanded(models)
    if options.prune_out is not None and len(sources) > 1:
        raise UsageError("--prune-out is for one model", f"here are {len(sources)}")
    labels = _labels(sources)
    found: list[Audited] = []
    place = (
        destination.replacing(options.out, destination.AUDIT, besides)
        if team.first
        else nullcontext()
    )
    with place as folder:
        for number, (label, source) in enumerate(zip(labels, sources, strict=True)):
            own = safe_name(f"{number:02d}_{label}") if len(sources) > 1 else ""
            model = source if isinstance(source, LoadedModel) else load_model(source, asked.inputs)
            taken = grouped(samples, model.preprocess)
            result = model_audit.examine(model, taken, asked, progress, team)
            if result is not None and folder is not None:
                _write(folder / own, result)
                found.append(Audited(label, result.document, _judge(result, asked, baseline)))
        if len(found) > 1 and folder is not None:
            _write_models(folder, found)
    if team.first:
        _write_asked(options, found)
    return AuditResult(options.out, tuple(found))


def _check_apart(
    models: Sequence[ModelOptions] | LoadedModel, found: Sequence[Sample], options: AuditOptions
) -> None:
    """Whether no file that is written is, or holds, one that is read."""
    inputs = find.files_of(found)
    for model in () if isinstance(models, LoadedModel) else _expanded(models):
        inputs += destination.model_files(model.spec, model.arch, model.weights)
    for option, path in (
        ("--out", options.out),
        ("--junit", options.junit),
        ("--prune-out", options.prune_out),
    ):
        if path is not None:
            destination.check_apart(path, option, inputs)


def read_baseline(path: Path) -> list[Mapping[str, Any]]:
    """The layers of an earlier audit.json.

    Raises:
        UsageError: no such file, or it is no audit.json of this version.
    """
    try:
        content = read_json(path, MOST_RECORD)
        check_audit(content)
        layers: list[Mapping[str, Any]] = content["layers"]
        if content["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {content['schema_version']}, not {SCHEMA_VERSION}")
        for layer in layers:
            _ = layer["label"], [len(own) for own in layer["findings"].values()]
    except (OSError, FileError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--baseline {path} is no audit.json: {quoted(str(error))}",
            "give one that featviz audit wrote",
        ) from error
    return layers


def natural_key(text: str) -> list[tuple[int, str]]:
    """Sorts epoch_2 before epoch_10."""
    return [(int(part), "") if is_number(part) else (-1, part) for part in re.split(r"(\d+)", text)]


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
    read = tuple(gates.parse(text, findings.RULES) for text in options.fail_on)
    return replace(asked, gates=read)


def _expanded(models: Sequence[ModelOptions]) -> list[ModelOptions]:
    """Globs among the models to the files they match, in natural order."""
    found: list[ModelOptions] = []
    for model in models:
        if not glob.has_magic(model.spec) or Path(model.spec).exists():
            found.append(model)
            continue
        files = sorted(glob.glob(model.spec, recursive=True), key=natural_key)
        if not files:
            raise UsageError(f"no model file matches {model.spec!r}", "check the pattern")
        found += [replace(model, spec=file) for file in files]
    return found


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
    verdicts = [gates.check(gate, layers) for gate in asked.gates]
    if baseline is not None:
        verdicts.append(gates.worse(layers, baseline))
        unknown = gates.incomparable(layers, baseline)
        if unknown:
            log.warning("the baseline lacks %d layers, %s first", len(unknown), unknown[0])
    return tuple(verdicts)


def _write(folder: Path, result: Examined) -> None:
    """audit.json, channels.npz, the chart of APoZ and the pictures of the suspects."""
    drawn = []
    for sheet, picture in result.pictures:
        name = f"suspects/{safe_name(sheet.stem)}.png"
        with write.atomic(folder / name) as file:
            picture.save(file, "png")
        drawn.append({**sheet.as_json(), "file": name})
    with write.atomic(folder / "channels.npz") as file:
        write.write_arrays(file, result.tables)
    _write_chart(folder, result.document)
    content = {"schema_version": SCHEMA_VERSION, **result.document, "drawn": drawn}
    write.write_json(folder / AUDIT_FILE, content)


def _write_chart(folder: Path, document: Mapping[str, Any]) -> None:
    """A bar for each activation that gives zeros, however many layers are judged by it."""
    by_activation = {
        row["dead_at"]: (row["label"], row["apoz"], len(row["findings"]["dead"]) / row["channels"])
        for row in reversed(document["layers"])
        if row["apoz"] is not None
    }
    if bars := list(reversed(by_activation.values())):
        title = f"Average percentage of zeros, {document['images']['seen']} images"
        with write.atomic(folder / "apoz.png") as file:
            file.write(charts.apoz_chart(bars, title))


def _write_models(folder: Path, found: Sequence[Audited]) -> None:
    """models.json and the chart over the models."""
    rows = [{"model": model.label, **model.document["total"]} for model in found]
    write.write_json(folder / MODELS_FILE, {"schema_version": SCHEMA_VERSION, "models": rows})
    shares = {
        name: [_share(row, name) for row in rows]
        for name in findings.RULES
        if name == "dead" or any(_share(row, name) for row in rows)
    }
    with write.atomic(folder / "models.png") as file:
        file.write(charts.dead_chart([model.label for model in found], shares))


def _share(total: Mapping[str, Any], name: str) -> float | None:
    """Share of the channels that are judged for a finding and have it; None where none is."""
    channels = total["judged"].get(name, 0)
    return total["findings"][name] / channels if channels else None


def _write_asked(options: AuditOptions, found: Sequence[Audited]) -> None:
    """The files that have a place of their own: prune.json and the JUnit report."""
    if options.prune_out is not None:
        write.write_json(options.prune_out, found[0].document["prune"])
    if options.junit is not None:
        report = junit.document({model.label: model.verdicts for model in found})
        with write.atomic(options.junit) as file:
            file.write(report)
