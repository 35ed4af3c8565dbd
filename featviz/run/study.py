"""A study shows images to a model for one result over all images: `audit` and
`exemplars`."""

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
"""Called with the name of each image, its error or None, and the number of all images."""


class Batch(NamedTuple):
    """Images that go through the model in one pass."""

    images: tuple[int, ...]
    """The indices of the images among the samples."""
    inputs: list[Tensor]
    """The arguments of the model, each [B, C, H, W] (or [B, C, T, H, W]), on the CPU.
    """

    @classmethod
    def of(cls, jobs: Sequence[ImageJob[ModelInput, None]]) -> Batch:
        """Put the images that could be read into one batch."""
        readable = [job for job in jobs if job.input is not None]
        numbers = tuple(job.number for job in readable)
        args = [job.input.args for job in readable if job.input is not None]
        if len(args) == 1:  # torch.cat would copy, which takes as long as some layers
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
    """The hidden folder to write into; it is renamed to `--out` at the end."""
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
    """Find the images, load the model, and make a hidden folder, which is renamed to
    `--out` if the block succeeds.

    Args:
        images: files, folders, archives, URLs or globs, as on the command line.
        record_name: the file that is the result's record.
        files: further files outside of the folder, which options such as `--junit` name.

    Raises:
        UsageError: no image is found, or an output would replace an input.
        StoreError: the folder or a file may not be written, or another process writes it.
        LoadError: the model cannot be loaded.
    """
    # loading the model takes seconds, so all that can be refused without it comes first
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
    """Collects values from the tensors that hooks of a study take."""

    @property
    def is_large(self) -> bool:
        """Whether the values of an image are too large to be sent from a worker process
        to its parent."""

    @property
    def fault(self) -> Exception | None:
        """An exception that the collector raised in a hook, if any. It is a bug in the
        collector, not a failure of the model."""

    def begin_batch(self, batch: Batch) -> None:
        """Prepare for a batch, before the model runs. Values of the batch before are
        dropped: if that batch failed, its images are shown once more."""

    def taken_of_batch(self) -> Any:
        """The values of the batch, which can be pickled."""

    def add_batch(self, taken: Any) -> None:
        """Add the values of a batch, which may come from another process, to the
        result."""


class ShownImage(NamedTuple):
    """An image that was shown to the model, or could not be shown."""

    number: int
    """The index of the image among the samples."""
    error: FeatvizError | None = None
    """Why the image could not be shown."""
    taken: Any = None
    """The values that a collector took in a worker process; None once they were added."""


@dataclass
class Study:
    """Shows images to a model, for one result over all images."""

    model: LoadedModel
    samples: Sequence[Sample]
    options: AuditOptions | ExemplarOptions
    progress: BatchProgress = lambda image, error, total: None
    seen: list[int] = field(default_factory=list)
    """The numbers of the samples that the model has seen, from 0."""
    errors: dict[int, FeatvizError] = field(default_factory=dict)
    """Why images could not be shown, by their numbers."""

    def show(self, collector: Collector) -> None:
        """Show all images to the model, whose hooks fill the collector; in this process,
        or in worker processes. The values are added in this process in the order of the
        images, so the result does not depend on the number of processes.

        Raises:
            FeatvizError: no image could be shown.
        """
        count = 1
        # torch itself divides a pass of several images among the cores
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
        # without any image there is no result
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
            """Show a batch, and add its values."""
            collector.add_batch(self._take(jobs, collector))

        size = self.options.batch_size
        for job in visit(self.samples, self._read, show, batch_size=size):
            yield ShownImage(job.number, job.error)

    def _shown_side_by_side(
        self, collector: Collector, count: int
    ) -> Iterator[ShownImage]:
        """Show the first image in this process, and all others in worker processes. Their
        values are added to the collector of this process.

        Args:
            count: the most workers; there are fewer if the memory is not enough.
        """

        def show(jobs: Sequence[ImageJob[ModelInput, Any]]) -> Any:
            """Show a batch, and return its values."""
            return self._take(jobs, collector)

        def work(numbers: Iterable[int]) -> Iterator[ShownImage]:
            """Show the samples with these numbers. This runs in a worker process, so its
            changes of the collector do not reach the parent."""
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
        """Show a batch, and return the values that the collector took.

        Raises:
            ForwardError: the model fails.
            Exception: the `fault` of the collector.
        """
        batch = Batch.of(jobs)
        collector.begin_batch(batch)
        try:
            forward(
                self.model.module, [arg.to(self.model.device) for arg in batch.inputs]
            )
        except ForwardError:
            # an exception in a hook of the collector looks like a failure of the model
            if collector.fault is not None:
                raise collector.fault from None
            raise
        return collector.taken_of_batch()

    def _read(self, sample: Sample) -> ModelInput:
        """Read a sample as the model takes it."""
        return read_input(sample, self.model.preprocess, self.options.inputs)

    def batches(self, numbers: Sequence[int]) -> Iterator[Batch]:
        """Read the samples with these numbers once more, in batches."""
        size = self.options.batch_size
        return batches(
            self.samples, self.model, self.options.inputs, size, self._failed, numbers
        )

    def _failed(self, number: int, error: FeatvizError) -> None:
        """Note that a sample could not be shown, and call `progress`.

        Args:
            number: the index of the sample.
        """
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
        """The entries of a record on the versions, the device, the model and its
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
    """Read images in batches of successive images with the same input shape.

    Args:
        size: the most images in a batch.
        failed: called with the number and the error of each image that cannot be read.
        numbers: the indices of the samples to read, in this order.
    """

    def read(sample: Sample) -> ModelInput:
        """Read a sample as the model takes it."""
        return read_input(sample, model.preprocess, inputs)

    for jobs in in_batches(read_jobs(samples, read, numbers, size), size):
        for job in jobs:
            if job.error is not None:
                failed(job.number, job.error)
        batch = Batch.of(jobs)
        if batch.images:
            yield batch
