"""Images shown to a model for `audit` and `exemplars`, whose results are of all images
together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, Protocol

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
    choose_preprocessing,
    files_read,
    find_images,
    group_samples,
    read_input,
)
from featviz.run.visit import ImageJob, in_batches, read_jobs, visit
from featviz.run.workers import side_by_side, worker_count
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
def begin_study(
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
        loaded = choose_preprocessing(load_model(model, options.inputs), samples)
        frames = options.inputs.frames
        yield StudyInputs(
            folder, loaded, group_samples(samples, loaded.preprocess, frames)
        )


class Collector(Protocol):
    """What a study makes of the tensors that its hooks take."""

    @property
    def is_large(self) -> bool:
        """Whether what it takes of an image is too large to be sent from a worker
        process."""

    @property
    def fault(self) -> Exception | None:
        """An exception of its own inside a hook, which is not a failure of the model."""

    def begin_batch(self, batch: Batch) -> None:
        """Hear that the model is about to run, and forget what was taken before: a batch
        that failed is shown again image by image."""

    def taken_of_batch(self) -> Any:
        """What the hooks took of the batch, which can be pickled."""

    def add_batch(self, taken: Any) -> None:
        """Add what was taken of a batch, maybe in another process."""


class ShownImage(NamedTuple):
    """What became of an image that was shown to the model."""

    number: int
    """Its index among the samples."""
    error: FeatvizError | None = None
    taken: Any = None
    """What the collector took of it in a worker process."""


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
    """Why images could not be shown, by their numbers."""

    def show(self, collector: Collector) -> None:
        """Show all images to the model, whose hooks fill a collector: in this process, or
        side by side in worker processes. What is taken of each is added here, in the
        order of the images, so that it does not matter which process took it.

        Raises:
            FeatvizError: no image could be shown.
        """
        count = 1
        # a batch is one pass of the model, which divides it among the cores by itself
        if self.options.batch_size == 1 and not collector.is_large:
            count = worker_count(self.model, self.samples, None, backward=False)
        if count == 1:
            shown_images = self._shown_here(collector)
        else:
            shown_images = self._shown_side_by_side(collector, count)
        for image in shown_images:
            if image.error is not None:
                self._failed(image.number, image.error)
                continue
            self.seen.append(image.number)
            name = self.samples[image.number].name
            self.progress(name, None, len(self.samples))
        # a result of no image would be one about nothing
        if not self.seen and self.errors:
            first = min(self.errors)
            raise FeatvizError(
                f"no image of {len(self.samples)} went through:"
                f" {self.errors[first].message}",
                self.errors[first].hint,
            )

    def _shown_here(self, collector: Collector) -> Iterator[ShownImage]:
        """Show all images in this process, in batches."""

        def show(jobs: Sequence[ImageJob[ModelInput, None]]) -> None:
            collector.add_batch(self._take(jobs, collector))

        size = self.options.batch_size
        for job in visit(self.samples, self._read, show, batch_size=size):
            yield ShownImage(job.number, job.error)

    def _shown_side_by_side(
        self, collector: Collector, count: int
    ) -> Iterator[ShownImage]:
        """Show the first image in this process, and the others in worker processes; the
        collector of this process gets what each of them took.

        Args:
            count: of workers, as far as there is memory for them.
        """

        def show(jobs: Sequence[ImageJob[ModelInput, Any]]) -> Any:
            return self._take(jobs, collector)

        def work(numbers: Iterable[int]) -> Iterator[ShownImage]:
            """Show the samples of these numbers, in a forked child: what it changes of
            the collector the parent does not see."""
            for number in numbers:
                for job in visit(self.samples, self._read, show, numbers=[number]):
                    yield ShownImage(number, job.error, job.result)

        results = side_by_side(
            work([0]), len(self.samples), work, count, Event(), ShownImage
        )
        for image in results:
            if image.error is None:
                collector.add_batch(image.taken)
            yield image._replace(taken=None)

    def _take(
        self, jobs: Sequence[ImageJob[ModelInput, Any]], collector: Collector
    ) -> Any:
        """Show a batch, and return what a collector took of it; ForwardError where the
        model fails."""
        batch = Batch.of(jobs)
        collector.begin_batch(batch)
        try:
            forward(
                self.model.module, [arg.to(self.model.device) for arg in batch.inputs]
            )
        except ForwardError:
            # what the collector's hooks raise looks like a failure of the model
            if collector.fault is not None:
                raise collector.fault from None
            raise
        return collector.taken_of_batch()

    def _read(self, sample: Sample) -> ModelInput:
        return read_input(sample, self.model.preprocess, self.options.inputs)

    def batches(self, numbers: Sequence[int]) -> Iterator[Batch]:
        """The images of these numbers once more."""
        size = self.options.batch_size
        return batches(
            self.samples, self.model, self.options.inputs, size, self._failed, numbers
        )

    def _failed(self, number: int, error: FeatvizError) -> None:
        """Note and report that the sample of this number could not be shown."""
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
    numbers: Sequence[int],
) -> Iterator[Batch]:
    """Images as the model takes them.

    Args:
        size: of a batch; only images of one input shape are together.
        failed: called with the number and the error of each image that cannot be read.
        numbers: of the samples that are taken, from 0.
    """

    def read(sample: Sample) -> ModelInput:
        return read_input(sample, model.preprocess, inputs)

    for jobs in in_batches(read_jobs(samples, read, numbers, size), size):
        for job in jobs:
            if job.error is not None:
                failed(job.number, job.error)
        batch = Batch.of(jobs)
        if batch.images:
            yield batch
