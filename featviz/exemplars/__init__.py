"""The story of `exemplars`: from a model and images to the images that excite each channel most."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from torch import Tensor

from featviz.errors import FeatvizError, UsageError
from featviz.exemplars.collecting import (
    ExemplarCollector,
    ExemplarPlan,
    ExemplarSource,
    plan_targets,
)
from featviz.exemplars.options import ExemplarOptions
from featviz.exemplars.output import sheet_way, write_record
from featviz.exemplars.pictures import Cutter, ExemplarGroup
from featviz.exemplars.receptive import ReceptiveFields
from featviz.exemplars.top import Top, best_of
from featviz.files.stores import Remote
from featviz.hooks.capture import hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.images import find
from featviz.models.load import LoadedModel, ModelOptions, load_model
from featviz.models.requirements import versions
from featviz.pipeline.batches import BatchProgress, batches, run_batch
from featviz.pipeline.dealing import Deal
from featviz.pipeline.dry_pass import choose_layers
from featviz.pipeline.prepare import blank_input, grouped, warn_of_guess
from featviz.pipeline.processes import ALONE, World
from featviz.records import Layer, Sample, Shard, Site, TextTable
from featviz.rundir import destination
from featviz.rundir.exemplars import (
    SCHEMA_VERSION,
    ExemplarChannel,
    ExemplarLayer,
    ExemplarRecord,
    FailedImage,
    FieldOfView,
    ImagesSeen,
    LeftOut,
)
from featviz.text import by, listed

log = logging.getLogger(__name__)

_NAMED = 3
"""Layers that a warning names; exemplars.json has them all."""

Tops = dict[tuple[Site, str | None], Top]


@dataclass(frozen=True)
class ExemplarResult:
    """What was found."""

    out: Path
    record: ExemplarRecord

    @property
    def exit_code(self) -> int:
        """0 all images went through, 3 some failed."""
        return 3 if self.record.images.failures else 0

    @property
    def table(self) -> TextTable:
        """For people: a row for each sheet."""
        layers = self.record.layers
        per_class = any(row.class_name is not None for row in layers)
        headings = ["layer", "type", "channels", "sees", "known", "sheet"]
        rows = [
            [*_cells(row), row.sheet, *([row.class_name or ""] if per_class else [])]
            for row in layers
        ]
        numbers = ("channels", "sees")
        return TextTable([*headings, *(["class"] if per_class else [])], numbers, rows)


def _cells(row: ExemplarLayer) -> list[str]:
    label = row.layer + (f".call{row.call}" if row.call else "")
    label += f".{row.key}" if row.key else ""
    view = row.receptive_field
    return [label or row.type, row.type, str(len(row.channels)), by(view.size), view.how]


def find_exemplars(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: ExemplarOptions,
    progress: BatchProgress = lambda image, error, total: None,
    stdin: BinaryIO | None = None,
    team: World = ALONE,
) -> ExemplarResult | None:
    """Find the images, and the places in them, that excite each channel of some layers most.

    Among several processes each one looks at its share of the images; the first draws and writes,
    and the others return None.

    Args:
        progress: called with each image.
        stdin: where the list of images is read for the argument `-`; None takes the process's own.
        team: the processes that divide the images among them; this is one of them.

    Raises:
        FeatvizError: nothing could be begun, not one image went through, or the results could not
            be written. What goes wrong with one image is in the result instead.
    """
    options.check()
    share = team.share(options.shard)
    found = team.at_first(partial(_find, model, arguments, options, stdin))
    place = destination.replacing(options.out, destination.EXEMPLARS)
    with place if team.first else nullcontext() as folder:
        loaded = load_model(model, options.inputs) if isinstance(model, ModelOptions) else model
        warn_of_guess(loaded.preprocess)
        samples = grouped(found, loaded.preprocess)
        blank = blank_input(loaded, samples, options.inputs)
        layers = choose_layers(loaded, options.layers, blank)
        plan = plan_targets(loaded, layers, blank)
        _check_plan(plan, layers)
        visit = _Visit(loaded, samples, options, progress)
        numbers = share.numbers(samples)
        archives = [samples[number].archive for number in numbers]
        visit.look(plan, layers, Deal(team, numbers, "images", archives))
        visit.join(team)
        visit.check_seen()
        if folder is None:
            return None
        record = _write(folder, visit, plan, blank)
    return ExemplarResult(options.out, record)


def _find(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: ExemplarOptions,
    stdin: BinaryIO | None,
) -> list[Sample]:
    """Find the images, and refuse to write over them, the model, or what something else made."""
    samples = find.find_samples(arguments, stdin, options.nul_separated, options.out)
    names = () if isinstance(model, LoadedModel) else (model.spec, model.arch, model.weights)
    inputs = [*find.files_of(samples), *destination.model_files(*names)]
    destination.check_apart(options.out, "--out", inputs)
    destination.check_free(options.out, destination.EXEMPLARS, options.overwrite)
    return samples


def _check_plan(plan: ExemplarPlan, layers: Sequence[Layer]) -> None:
    """Whether there is anything to look at.

    Raises:
        UsageError: no layer gives channels.
    """
    if not plan.targets:
        reasons = [f"{layer} {reason}" for layer, reason in plan.skipped.items()]
        reasons += [f"{layer} never ran" for layer in plan.never_ran]
        raise UsageError(
            f"none of the {len(layers)} selected layers gives a tensor with channels",
            listed(reasons, _NAMED, "; "),
        )


@dataclass
class _Visit:
    """The images on their way through the model."""

    model: LoadedModel
    samples: Sequence[Sample]
    options: ExemplarOptions
    progress: BatchProgress
    tops: Tops = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seen: int = 0
    failures: dict[int, FeatvizError] = field(default_factory=dict)

    def look(self, plan: ExemplarPlan, layers: Sequence[Layer], numbers: Iterable[int]) -> None:
        """Stream these images through the model."""
        choice, inputs = self.options.choice, self.options.inputs
        classes = [class_of(sample) if choice.per_class else None for sample in self.samples]
        collector = ExemplarCollector(self.model, plan, classes, choice.by, choice.top)
        size = self.options.batch_size
        module = self.model.module
        with in_eval_mode(module), hooked(module, layers, collector.take) as recorder:
            collector.recorder = recorder
            for batch in batches(self.samples, self.model, inputs, size, self._failed, numbers):
                run_batch(self.model, batch, collector, self._failed, self._passed)
        self.tops, self.skipped = collector.tops, {**plan.skipped, **collector.skipped}

    def join(self, team: World) -> None:
        """What all processes have found, so that all agree."""
        parts = team.gather((self.tops, self.skipped, self.seen, self.failures))
        self.tops = {key: best_of([tops[key] for tops, *_ in parts]) for key in self.tops}
        self.skipped = {k: v for _, skipped, *_ in reversed(parts) for k, v in skipped.items()}
        self.seen = sum(seen for *_, seen, _ in parts)
        self.failures = {k: v for *_, failures in parts for k, v in failures.items()}

    def check_seen(self) -> None:
        """Whether there is anything to show.

        Raises:
            FeatvizError: not one image went through.
        """
        if not self.seen and self.failures:
            first = next(iter(self.failures.values()))
            words = f"no image of {len(self.samples)} went through: {first.message}"
            raise FeatvizError(words, first.hint)

    def as_json(self) -> ImagesSeen:
        """`images` of exemplars.json."""
        failures = [
            FailedImage(self.samples[number].name, number, error.message)
            for number, error in sorted(self.failures.items())
        ]
        return ImagesSeen(len(self.samples), self.seen, failures)

    def _failed(self, number: int, error: FeatvizError) -> None:
        log.debug("%s failed", self.samples[number].name, exc_info=error)
        self.failures[number] = error
        self.progress(self.samples[number].name, error, len(self.samples))

    def _passed(self, number: int) -> None:
        self.seen += 1
        self.progress(self.samples[number].name, None, len(self.samples))


def class_of(sample: Sample) -> str:
    """The class of an image: the name of the folder that holds it; of a clip, which is a folder of
    frames, of the folder around that."""
    path = sample.path
    folder = (PurePosixPath(path.place) if isinstance(path, Remote) else path.absolute()).parent
    return (folder.parent if len(sample.paths) > 1 else folder).name


def _write(
    folder: Path, visit: _Visit, plan: ExemplarPlan, blank: Sequence[Tensor]
) -> ExemplarRecord:
    """The pictures and exemplars.json."""
    model, options = visit.model, visit.options
    fields = ReceptiveFields(model, list(plan.targets.values()), blank)
    groups = _groups(visit.tops, plan, fields)
    kept = {tuple(blank[0].shape): fields}
    cutter = Cutter(model, visit.samples, options.inputs, groups, kept)
    rows = cutter.draw(folder, options.choice.by, visit.seen)
    record = ExemplarRecord(
        SCHEMA_VERSION,
        **_about(model),
        options=options.as_json(),
        shard=_shard(options.shard),
        images=visit.as_json(),
        skipped=[LeftOut(layer, reason) for layer, reason in sorted(visit.skipped.items())],
        never_ran=list(plan.never_ran),
        layers=rows,
    )
    write_record(folder, record)
    return record


def _groups(tops: Tops, plan: ExemplarPlan, fields: ReceptiveFields) -> list[ExemplarGroup]:
    """The layers in the order in which they ran, for each its classes."""
    classes = sorted({name for _, name in tops}, key=str)
    groups = []
    for target in plan.targets.values():
        view = FieldOfView(fields.how(target), list(fields.size(target)))
        for number, name in enumerate(classes):
            row = _row(target, name, view)
            row = ExemplarLayer(**{**vars(row), "sheet": sheet_way(row, number)})
            groups.append(ExemplarGroup(target, tops[target.site, name], row))
    return groups


def _row(target: ExemplarSource, class_name: str | None, view: FieldOfView) -> ExemplarLayer:
    site = target.site
    place = (site.layer.name, site.layer.type, site.layer.index, site.call, site.key)
    channels = [ExemplarChannel(channel, None, []) for channel in range(target.channels)]
    return ExemplarLayer(*place, class_name, list(target.shape), target.layout, view, "", channels)


def _about(model: LoadedModel) -> Mapping[str, Any]:
    """The model and the versions, without time and place."""
    return {
        **versions(),
        "device": model.device.type,
        "model": dict(model.source),
        "preprocessing": model.preprocess.words,
    }


def _shard(shard: Shard | None) -> list[int] | None:
    return None if shard is None else [shard.index + 1, shard.count]
