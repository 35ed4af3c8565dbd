"""Images on their way through a model for `audit` and `exemplars`, whose results speak of all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
from featviz.run.prepare import ModelInput, files_read, find_images, fitted, grouped, read_input
from featviz.run.visit import ImageJob, read_batches, visit
from featviz.rundir.folder import Folder
from featviz.rundir.place import FileKind, check_apart, check_file, replacing

BatchProgress = Callable[[str, FeatvizError | None, int], None]
"""Called with each image's name, what went wrong with it, and how many there are in all."""


class Batch(NamedTuple):
    """Images of one input shape."""

    images: tuple[int, ...]
    inputs: list[Tensor]
    """The arguments of the model, each [B, C, H, W] (or [B, C, T, H, W]), on the CPU."""

    @classmethod
    def of(cls, jobs: Sequence[ImageJob[ModelInput, None]]) -> Batch:
        """The images that could be read, together."""
        readable = [job for job in jobs if job.input is not None]
        numbers = tuple(job.number for job in readable)
        args = [job.input.args for job in readable if job.input is not None]
        if len(args) == 1:  # a copy of an input takes as long as some layers
            return cls(numbers, args[0])
        return cls(numbers, [torch.cat(tensors) for tensors in zip(*args, strict=True)])


@contextmanager
def begun(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: AuditOptions | ExemplarOptions,
    kind: str,
    files: Collection[tuple[str, Path, FileKind]] = (),
) -> Iterator[tuple[Folder, LoadedModel, list[Sample]]]:
    """A folder to write into, which takes the place of `--out` if the block succeeds; the model and
    the images. Whatever would be written over, `files` outside of the folder (option, place, kind)
    among it, is looked at before the model is loaded."""
    samples = find_images(arguments, options)
    inputs = files_read(model, samples)
    check_apart(options.out, "--out", inputs)
    for option, path, what in files:
        check_apart(path, option, inputs)
        check_file(path, what, option, options.overwrite)
    with replacing(options.out, kind, options.overwrite) as folder:
        loaded = fitted(load_model(model, options.inputs), samples)
        yield folder, loaded, grouped(samples, loaded.preprocess, options.inputs.frames)


@dataclass
class Study:
    """Images on their way through a model, for a result that speaks of all of them together."""

    model: LoadedModel
    samples: Sequence[Sample]
    options: AuditOptions | ExemplarOptions
    progress: BatchProgress = lambda image, error, total: None
    seen: list[int] = field(default_factory=list)
    errors: dict[int, FeatvizError] = field(default_factory=dict)

    def show(self, collector: Any) -> None:
        """Show all images to the model, whose hooks fill a collector: `begin(batch)` says whose
        tensors come next, and forgets what was not committed; `commit()` that the model is through
        with them; `fault` is a bug of ours, to tell it from one of the model."""

        def show(jobs: Sequence[ImageJob[ModelInput, None]]) -> None:
            batch = Batch.of(jobs)
            collector.begin(batch)
            try:
                forward(self.model.module, [arg.to(self.model.device) for arg in batch.inputs])
            except ForwardError:
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
        if not self.seen and self.errors:
            first = min(self.errors)
            message = f"no image of {len(self.samples)} went through: {self.errors[first].message}"
            raise FeatvizError(message, self.errors[first].hint)

    def batches(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """The images of these numbers once more."""
        size = self.options.batch_size
        return batches(self.samples, self.model, self.options.inputs, size, self._failed, numbers)

    def _failed(self, number: int, error: FeatvizError) -> None:
        self.errors[number] = error
        self.progress(self.samples[number].name, error, len(self.samples))

    @property
    def failures(self) -> list[tuple[str, int, str]]:
        """Name, number and error of each image that did not go through."""
        named = sorted(self.errors.items())
        return [(self.samples[number].name, number, error.message) for number, error in named]

    @property
    def about(self) -> dict[str, Any]:
        """What a record says of the versions, the device, the model and its preprocessing."""
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
    """All images, or those of these numbers, as the model takes them, `size` of them together;
    `failed` is called with the number and the error of each that cannot be read."""

    def read(sample: Sample) -> ModelInput:
        return read_input(sample, model.preprocess, inputs)

    for jobs in read_batches(samples, read, size, numbers):
        for job in jobs:
            if job.error is not None:
                failed(job.number, job.error)
        batch = Batch.of(jobs)
        if batch.images:
            yield batch
