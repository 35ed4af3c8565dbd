"""Images shown to a model for `audit` and `exemplars`, whose results are of all images
together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featviz.errors import FeatvizError, ForwardError
from featviz.hooks.capture import forward
from featviz.models.load import LoadedModel, load_model
from featviz.models.requirements import versions
from featviz.options import InputOptions, ModelOptions
from featviz.options.commands import AuditOptions, ExemplarOptions
from featviz.records import Sample
from featviz.run.prepare import (
    ModelInput,
    files_read,
    find_images,
    fitted,
    grouped,
    read_input,
)
from featviz.run.visit import ImageJob, in_batches, read_jobs, visit
from featviz.rundir.folder import Folder
from featviz.rundir.place import FileKind, check_apart, check_file, replacing
from featviz.rundir.read import Failure

BatchProgress = Callable[[str, FeatvizError | None, int], None]
"""Called with each image's name, what went wrong with it, and how many there are in
all."""


class Batch(NamedTuple):
    """Images of one input shape."""

    images: tuple[int, ...]
    inputs: list[Tensor]
    """The arguments of the model, each [B, C, H, W] (or [B, C, T, H, W]), on the CPU.
    """

    @classmethod
    def of(cls, jobs: Sequence[ImageJob[ModelInput, None]]) -> Batch:
        """The images that could be read, together."""
        readable = [job for job in jobs if job.input is not None]
        numbers = tuple(job.number for job in readable)
        args = [job.input.args for job in readable if job.input is not None]
        if len(args) == 1:  # a copy of an input takes as long as some layers
            return cls(numbers, args[0])
        return cls(numbers, [torch.cat(tensors) for tensors in zip(*args, strict=True)])


class StudyFile(NamedTuple):
    """A file that a study writes outside of its folder."""

    option: str
    """The option that names it: `--junit`."""
    path: Path
    kind: FileKind


class StudyInputs(NamedTuple):
    """What a study begins with."""

    folder: Folder
    """To write into; it takes the place of `--out` at the end."""
    model: LoadedModel
    samples: list[Sample]


@contextmanager
def begun(
    model: ModelOptions | LoadedModel,
    images: Sequence[str],
    options: AuditOptions | ExemplarOptions,
    record_name: str,
    files: Sequence[StudyFile] = (),
) -> Iterator[StudyInputs]:
    """Find the images, load the model, and open a folder that takes the place of
    `--out` if the block succeeds. What cannot be written is refused before the model is
    loaded.

    Args:
        images: files, folders, archives, URLs or globs, as on the command line.
        record_name: the file that is the result's record.
        files: further files that options such as `--junit` name, outside of the folder.

    Raises:
        UsageError: no image is found, or something may not be written where it is to be.
        StoreError: the folder cannot be written, or another process writes it.
        LoadError: the model cannot be loaded.
    """
    # what can be refused without the model comes first: loading takes seconds
    samples = find_images(images, options)
    inputs = files_read(model, samples)
    check_apart(options.out, "--out", inputs)
    for file in files:
        check_apart(file.path, file.option, inputs)
        check_file(file.path, file.kind, file.option, options.overwrite)
    with replacing(options.out, record_name, options.overwrite) as folder:
        loaded = fitted(load_model(model, options.inputs), samples)
        frames = options.inputs.frames
        yield StudyInputs(folder, loaded, grouped(samples, loaded.preprocess, frames))


@dataclass
class Study:
    """Images shown to a model, for one result of all of them."""

    model: LoadedModel
    samples: Sequence[Sample]
    options: AuditOptions | ExemplarOptions
    progress: BatchProgress = lambda image, error, total: None
    seen: list[int] = field(default_factory=list)
    """The numbers of the samples that the model has seen, from 0."""
    errors: dict[int, FeatvizError] = field(default_factory=dict)
    """Of those that could not be shown, by their numbers."""

    def show(self, collector: Any) -> None:
        """Show all images to the model, whose hooks fill a collector.

        Args:
            collector: its `begin(batch)` is called before the model runs, and forgets
                what was not committed: a batch that failed is shown again image by
                image. `commit()` is called after it. `fault` is an exception of the
                collector itself, which is not a failure of the model.

        Raises:
            FeatvizError: no image could be shown.
        """

        def show(jobs: Sequence[ImageJob[ModelInput, None]]) -> None:
            """Show a batch; ForwardError where the model fails."""
            batch = Batch.of(jobs)
            collector.begin(batch)
            try:
                forward(
                    self.model.module,
                    [arg.to(self.model.device) for arg in batch.inputs],
                )
            except ForwardError:
                # what the collector's hooks raise looks like a failure of the model
                if collector.fault is not None:
                    raise collector.fault from None
                raise
            collector.commit()

        def read(sample: Sample) -> ModelInput:
            return read_input(sample, self.model.preprocess, self.options.inputs)

        for job in visit(self.samples, read, show, batch_size=self.options.batch_size):
            if job.error is not None:
                self._failed(job.number, job.error)
                continue
            self.seen.append(job.number)
            self.progress(job.sample.name, None, len(self.samples))
        # a result of no image would be one about nothing
        if not self.seen and self.errors:
            first = min(self.errors)
            message = (
                f"no image of {len(self.samples)} went through:"
                f" {self.errors[first].message}"
            )
            raise FeatvizError(message, self.errors[first].hint)

    def batches(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """The images of these numbers once more."""
        size = self.options.batch_size
        return batches(
            self.samples, self.model, self.options.inputs, size, self._failed, numbers
        )

    def _failed(self, number: int, error: FeatvizError) -> None:
        self.errors[number] = error
        self.progress(self.samples[number].name, error, len(self.samples))

    @property
    def failures(self) -> list[Failure]:
        """The images that could not be shown, in their order."""
        return [
            Failure(self.samples[number].name, error.message, number)
            for number, error in sorted(self.errors.items())
        ]

    @property
    def about(self) -> dict[str, Any]:
        """What a record says of the versions, the device, the model and its
        preprocessing."""
        return {
            **versions(),
            "device": self.model.device.type,
            "model": dict(self.model.source),
            "preprocessing": self.model.preprocess.words_for(),
        }


def batches(
    samples: Sequence[Sample],
    model: LoadedModel,
    inputs: InputOptions,
    size: int,
    failed: Callable[[int, FeatvizError], None],
    numbers: Iterable[int] | None = None,
) -> Iterator[Batch]:
    """Images as the model takes them.

    Args:
        size: of a batch; only images of one input shape are together.
        failed: called with the number and the error of each image that cannot be read.
        numbers: of the samples, from 0; None takes all.
    """

    def read(sample: Sample) -> ModelInput:
        return read_input(sample, model.preprocess, inputs)

    for jobs in in_batches(read_jobs(samples, read, numbers, ahead=size), size):
        for job in jobs:
            if job.error is not None:
                failed(job.number, job.error)
        batch = Batch.of(jobs)
        if batch.images:
            yield batch
