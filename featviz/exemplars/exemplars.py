"""The story of `exemplars`: from a model and images to the images that excite each channel most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from msgspec import structs

from featviz.errors import UsageError
from featviz.exemplars.collect import ExemplarCollector, plan_targets
from featviz.exemplars.pictures import Cutter, sheet_path
from featviz.exemplars.receptive import ReceptiveFields
from featviz.files.urls import Remote
from featviz.hooks.capture import hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel
from featviz.options import ExemplarOptions, ModelOptions
from featviz.records import Sample, TextTable
from featviz.run.batches import BatchProgress, Study, begun
from featviz.run.choose import choose_layers
from featviz.run.prepare import blank_input
from featviz.rundir import EXEMPLARS_FILE, write
from featviz.rundir.place import EXEMPLARS
from featviz.rundir.schema import Failure, Seen
from featviz.rundir.studies import (
    SCHEMA_VERSION,
    ExemplarChannel,
    ExemplarLayer,
    ExemplarRecord,
    FieldOfView,
)
from featviz.text import by, listed


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
) -> ExemplarResult:
    """Find the images, and the places in them, that excite each channel of some layers most."""
    with begun(model, arguments, options, EXEMPLARS) as (folder, loaded, samples):
        blank, _ = blank_input(loaded, samples, options.inputs)
        layers = choose_layers(loaded, options.layers, blank)
        plan = plan_targets(loaded, layers, blank)
        if not plan.targets:
            reasons = [f"{layer} {reason}" for layer, reason in plan.skipped.items()]
            reasons += [f"{layer} never ran" for layer in plan.never_ran]
            raise UsageError(
                f"none of the {len(layers)} selected layers gives a tensor with channels",
                listed(reasons, 3, "; "),
            )
        study = Study(loaded, samples, options, progress)
        classes = [class_of(sample) if options.per_class else None for sample in samples]
        collector = ExemplarCollector(loaded, plan, classes, options.pick, options.top)
        module = loaded.module
        with in_eval_mode(module), hooked(module, layers, collector.take) as recorder:
            collector.recorder = recorder
            study.show(collector)
        targets = list(plan.targets.values())
        fields = ReceptiveFields(study.model, targets, blank)
        kept = {tuple(blank[0].shape): fields}
        cutter = Cutter(study.model, study.samples, options.inputs, targets, kept)
        rows = []
        for target in targets:
            site, view = target.site, FieldOfView(fields.how(target), list(fields.size(target)))
            channels = [ExemplarChannel(channel, None, []) for channel in range(target.channels)]
            place = (site.layer.name, site.layer.type, site.layer.index, site.call, site.key)
            shape, layout = list(target.shape), target.layout
            for number, name in enumerate(sorted({name for _, name in collector.tops}, key=str)):
                row = ExemplarLayer(*place, name, shape, layout, view, "", channels)
                row = replace(row, sheet=sheet_path(row, number))
                top = collector.tops[site, name]
                rows.append(cutter.draw(target, top, row, options.pick, len(study.seen), folder))
        skipped = {**plan.skipped, **collector.skipped}
        failures = [Failure(name, error, number) for name, number, error in study.failures]
        record = ExemplarRecord(
            SCHEMA_VERSION,
            **study.about,
            options={
                "layers": options.layers,
                "top": options.top,
                "by": options.pick,
                "per_class": options.per_class,
                **structs.asdict(options.inputs),
            },
            images=Seen(len(study.seen), len(study.samples), failures),
            skipped=[
                {"layer": layer, "reason": reason} for layer, reason in sorted(skipped.items())
            ],
            never_ran=list(plan.never_ran),
            layers=rows,
        )
        write.write_record(folder, EXEMPLARS_FILE, record.as_json())
    return ExemplarResult(options.out, record)


def class_of(sample: Sample) -> str:
    """The class of an image: the name of its folder; of a clip, which is a folder of frames, of the
    folder around that."""
    path = sample.path
    folder = (PurePosixPath(path.place) if isinstance(path, Remote) else path.absolute()).parent
    return (folder.parent if len(sample.paths) > 1 else folder).name
