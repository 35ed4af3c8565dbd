"""The story of `exemplars`: from a model and images to the images that excite each channel most."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from msgspec import structs
from torch import Tensor

from featviz.errors import FeatvizError, UsageError
from featviz.exemplars.collect import (
    ExemplarCollector,
    ExemplarPlan,
    Top,
    plan_targets,
)
from featviz.exemplars.pictures import Cutter, ExemplarGroup, sheet_path
from featviz.exemplars.receptive import ReceptiveFields
from featviz.files.remote import Remote
from featviz.hooks.capture import hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.images import find
from featviz.images.decode import check_background
from featviz.models.load import LoadedModel, load_model
from featviz.models.requirements import versions
from featviz.options import ExemplarOptions, ModelOptions
from featviz.pipeline.batches import BatchProgress, batches, run_batch
from featviz.pipeline.choose import choose_layers
from featviz.pipeline.prepare import blank_input, grouped, warn_of_guess
from featviz.records import Layer, Sample, Site, TextTable
from featviz.rundir import EXEMPLARS_FILE, destination, write
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
        headings, rows = ["layer", "type", "channels", "sees", "known", "sheet"], []
        per_class = any(row.class_name is not None for row in self.record.layers)
        for row in self.record.layers:
            label = row.layer + (f".call{row.call}" if row.call else "")
            label += f".{row.key}" if row.key else ""
            view = row.receptive_field
            cells = [label or row.type, row.type, str(len(row.channels)), by(view.size), view.how]
            rows.append([*cells, row.sheet, *([row.class_name or ""] if per_class else [])])
        headings += ["class"] if per_class else []
        return TextTable(headings, ("channels", "sees"), rows)


def find_exemplars(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: ExemplarOptions,
    progress: BatchProgress = lambda image, error, total: None,
    stdin: BinaryIO | None = None,
) -> ExemplarResult:
    """Find the images, and the places in them, that excite each channel of some layers most.

    Args:
        progress: called with each image.
        stdin: where the list of images is read for the argument `-`; None takes the process's own.

    Raises:
        FeatvizError: nothing could be begun, not one image went through, or the results could not
            be written. What goes wrong with one image is in the result instead.
    """
    check_background(options.inputs.background)
    found = find.find_samples(arguments, stdin, options.nul_separated, options.out)
    names = () if isinstance(model, LoadedModel) else (model.spec, model.arch, model.weights)
    inputs = [*find.files_of(found), *destination.model_files(*names)]
    destination.check_apart(options.out, "--out", inputs)
    destination.check_free(options.out, destination.EXEMPLARS, options.overwrite)
    with destination.replacing(options.out, destination.EXEMPLARS) as folder:
        loaded = load_model(model, options.inputs) if isinstance(model, ModelOptions) else model
        warn_of_guess(loaded.preprocess)
        samples = grouped(found, loaded.preprocess)
        blank = blank_input(loaded, samples, options.inputs)
        layers = choose_layers(loaded, options.layers, blank)
        plan = plan_targets(loaded, layers, blank)
        if not plan.targets:
            reasons = [f"{layer} {reason}" for layer, reason in plan.skipped.items()]
            reasons += [f"{layer} never ran" for layer in plan.never_ran]
            raise UsageError(
                f"none of the {len(layers)} selected layers gives a tensor with channels",
                listed(reasons, _NAMED, "; "),
            )
        visit = _Visit(loaded, samples, options, progress)
        visit.look(plan, layers)
        record = _write(folder, visit, plan, blank)
    return ExemplarResult(options.out, record)


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

    def look(self, plan: ExemplarPlan, layers: Sequence[Layer]) -> None:
        """Stream the images through the model.

        Raises:
            FeatvizError: not one image went through.
        """
        choice, inputs = self.options.choice, self.options.inputs
        classes = [class_of(sample) if choice.per_class else None for sample in self.samples]
        collector = ExemplarCollector(self.model, plan, classes, choice.pick, choice.top)
        size = self.options.batch_size
        module = self.model.module
        with in_eval_mode(module), hooked(module, layers, collector.take) as recorder:
            collector.recorder = recorder
            for batch in batches(self.samples, self.model, inputs, size, self._failed):
                run_batch(self.model, batch, collector, self._failed, self._passed)
        self.tops, self.skipped = collector.tops, {**plan.skipped, **collector.skipped}
        if not self.seen and self.failures:
            first = next(iter(self.failures.values()))
            words = f"no image of {len(self.samples)} went through: {first.message}"
            raise FeatvizError(words, first.hint)

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
    model, options = visit.model, visit.options
    fields = ReceptiveFields(model, list(plan.targets.values()), blank)
    groups = []
    for target in plan.targets.values():
        site, view = target.site, FieldOfView(fields.how(target), list(fields.size(target)))
        channels = [ExemplarChannel(channel, None, []) for channel in range(target.channels)]
        place = (site.layer.name, site.layer.type, site.layer.index, site.call, site.key)
        shape, layout = list(target.shape), target.layout
        for number, name in enumerate(sorted({name for _, name in visit.tops}, key=str)):
            row = ExemplarLayer(*place, name, shape, layout, view, "", channels)
            row = replace(row, sheet=sheet_path(row, number))
            groups.append(ExemplarGroup(target, visit.tops[site, name], row))
    kept = {tuple(blank[0].shape): fields}
    cutter = Cutter(model, visit.samples, options.inputs, groups, kept)
    rows = cutter.draw(folder, options.choice.pick, visit.seen)
    failures = [
        FailedImage(visit.samples[number].name, number, error.message)
        for number, error in sorted(visit.failures.items())
    ]
    about: dict[str, Any] = {
        **versions(),
        "device": model.device.type,
        "model": dict(model.source),
        "preprocessing": model.preprocess.words,
        "options": {
            "layers": options.layers,
            "top": options.choice.top,
            "by": options.choice.pick,
            "per_class": options.choice.per_class,
            **structs.asdict(options.inputs),
        },
    }
    record = ExemplarRecord(
        SCHEMA_VERSION,
        **about,
        images=ImagesSeen(len(visit.samples), visit.seen, failures),
        skipped=[LeftOut(layer, reason) for layer, reason in sorted(visit.skipped.items())],
        never_ran=list(plan.never_ran),
        layers=rows,
    )
    write.write_json(folder / EXEMPLARS_FILE, record.as_json())  # the last file
    return record
