"""The one loop over images: each is read ahead, shown to the model, and its result is yielded.

`run`, `cam`, `audit`, `exemplars` and the drawing of trainings differ in the function `show` that
they bring: it runs the model, whose hooks hand each tensor to a drawer, a counter or a top list.
`Study` is what `audit` and `exemplars` share, whose results speak of all images together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from featviz.errors import FeatvizError, ForwardError, ImageError, StoreError, UsageError
from featviz.files.urls import Remote
from featviz.hooks.capture import forward
from featviz.images.decode import check_background
from featviz.models.load import LoadedModel, load_model
from featviz.models.requirements import versions
from featviz.options import InputOptions, ModelOptions
from featviz.records import Sample
from featviz.records.commands import AuditOptions, ExemplarOptions
from featviz.run.encoders import read_ahead
from featviz.run.prepare import ModelInput, files_read, fitted, grouped, read_input, samples_of
from featviz.rundir.place import (
    FileKind,
    check_apart,
    check_file,
    check_free,
    replacing,
)

Image = TypeVar("Image")
"""What is read of an image: as the model takes it."""
T = TypeVar("T")

READERS_OF_STORES = 8
"""Threads that read images of a store."""

log = logging.getLogger(__name__)


@dataclass
class Visit(Generic[Image, T]):
    """An image on its way through the model."""

    number: int
    sample: Sample
    image: Image | None = None
    """What was read of it; None where it cannot be read."""
    result: T | None = None
    """What `show` returned for it, and for those that went through the model with it."""
    error: FeatvizError | None = None


def visit(
    samples: Sequence[Sample],
    read: Callable[[Sample], Image],
    show: Callable[[Sequence[Visit[Image, T]]], T],
    *,
    batch_size: int = 1,
    stop: Event | None = None,
) -> Generator[Visit[Image, T], None, None]:
    """Show each image to the model and yield what became of it, in order.

    Args:
        read: decodes and prepares a sample, in a thread that is ahead of the model.
        show: runs the model on an image, or on neighbours whose inputs have the same shapes.
        batch_size: how many images go through the model together at most.
        stop: ends the loop before the next image.

    Raises:
        FeatvizError: what `show` raises, but for a ForwardError or a UsageError, which is the
            image's own: where several were shown together, each is shown again alone.
    """
    for batch in _neighbours(samples, None, read, batch_size, stop):
        yield from _shown(batch, show)


def _shown(
    batch: Sequence[Visit[Image, T]], show: Callable[[Sequence[Visit[Image, T]]], T]
) -> Iterator[Visit[Image, T]]:
    """Show a batch to the model; where that fails, its images one by one, to find the guilty."""
    images = [one for one in batch if one.error is None]
    try:
        result = show(images) if images else None
    except (ForwardError, UsageError) as error:
        if len(images) > 1:
            for one in batch:
                yield from _shown([one], show)
            return
        log.debug("%s failed", images[0].sample.name, exc_info=error)
        images[0].error = error
    else:
        for one in images:
            one.result = result
    yield from batch


def _neighbours(
    samples: Sequence[Sample],
    numbers: Iterable[int] | None,
    read: Callable[[Sample], Image],
    size: int,
    stop: Event | None = None,
) -> Iterator[list[Visit[Image, Any]]]:
    """Read all samples, or those of these numbers, ahead of the caller. Those whose inputs have
    the same shapes go together, `size` neighbours at most, and unreadable ones between them."""
    far = any(isinstance(path, Remote) for sample in samples[:1] for path in sample.paths)
    readers = READERS_OF_STORES if far else 1
    batch: list[Visit[Image, Any]] = []
    shapes: list[Any] = []
    order = range(len(samples)) if numbers is None else numbers
    with read_ahead(order, lambda at: read(samples[at]), readers, max(size, readers)) as ahead:
        for number, load in ahead:
            if stop is not None and stop.is_set():
                return
            one: Visit[Image, Any] = Visit(number, samples[number])
            try:
                one.image = load()
            except (ImageError, StoreError) as error:
                log.debug("%s failed", one.sample.name, exc_info=error)
                one.error = error
            else:
                shape = [arg.shape for arg in getattr(one.image, "args", ())]
                if shapes and (len(shapes) == size or shape != shapes[0]):
                    yield batch
                    batch, shapes = [], []
                shapes.append(shape)
            batch.append(one)
            if size == 1:
                yield batch
                batch, shapes = [], []
    if batch:
        yield batch


# Images for results that speak of all of them

BatchProgress = Callable[[str, FeatvizError | None, int], None]
"""Called with each image's name, what went wrong with it, and how many there are in all."""


@dataclass(frozen=True)
class Batch:
    """Images of one input shape."""

    images: tuple[int, ...]
    inputs: list[Tensor]
    """The arguments of the model, each [B, C, H, W] (or [B, C, T, H, W]), on the CPU."""

    @classmethod
    def of(cls, images: Sequence[Visit[ModelInput, None]]) -> Batch:
        """Images that were read, together."""
        args = [one.image.args for one in images if one.image is not None]
        # of one image, since a copy of an input takes as long as some layers
        inputs = args[0] if len(args) == 1 else [torch.cat(m) for m in zip(*args, strict=True)]
        return cls(tuple(one.number for one in images), inputs)


@contextmanager
def begun(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: AuditOptions | ExemplarOptions,
    kind: str,
    files: Collection[tuple[str, Path, FileKind]] = (),
) -> Iterator[tuple[Path, LoadedModel, list[Sample]]]:
    """A folder to write into, which takes the place of `--out` if the block succeeds; the model and
    the images. Whatever would be written over is looked at before the model is loaded.

    Args:
        files: option, place and kind of what is written outside of the folder.
    """
    check_background(options.inputs.background)
    samples = samples_of(arguments, options.inputs, options.nul_separated, options.out)
    inputs = files_read(model, samples)
    check_apart(options.out, "--out", inputs)
    for option, path, what in files:
        check_apart(path, option, inputs)
        check_file(path, what, option, options.overwrite)
    check_free(options.out, kind, options.overwrite)
    with replacing(options.out, kind) as folder:
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
        """Show all images to the model. That not one goes through is an error.

        Args:
            collector: what hooks fill: `begin(batch)` says whose tensors come next, and forgets
                what was not committed; `commit()` that the model is through with them; `fault` is
                a bug of ours, to tell it from one of the model.
        """

        def show(images: Sequence[Visit[ModelInput, None]]) -> None:
            batch = Batch.of(images)
            collector.begin(batch)
            try:
                forward(self.model.module, [arg.to(self.model.device) for arg in batch.inputs])
            except ForwardError:
                if collector.fault is not None:
                    raise collector.fault from None
                raise
            collector.commit()

        size = self.options.batch_size
        for seen in visit(self.samples, self._read, show, batch_size=size):
            if seen.error is not None:
                self._failed(seen.number, seen.error)
                continue
            self.seen.append(seen.number)
            self.progress(seen.sample.name, None, len(self.samples))
        if not self.seen and self.errors:
            first = next(iter(self.errors.values()))
            words = f"no image of {len(self.samples)} went through: {first.message}"
            raise FeatvizError(words, first.hint)

    def batches(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """The images of these numbers once more."""
        size = self.options.batch_size
        return batches(self.samples, self.model, self.options.inputs, size, self._failed, numbers)

    def _failed(self, number: int, error: FeatvizError) -> None:
        self.errors[number] = error
        self.progress(self.samples[number].name, error, len(self.samples))

    def _read(self, sample: Sample) -> ModelInput:
        return read_input(sample, self.model.preprocess, self.options.inputs)

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
    """All images, or those of these numbers, as the model takes them, `size` of them together.

    Args:
        failed: called with the number and the error of each that cannot be read.
    """

    def read(sample: Sample) -> ModelInput:
        return read_input(sample, model.preprocess, inputs)

    for images in _neighbours(samples, numbers, read, size):
        for one in images:
            if one.error is not None:
                failed(one.number, one.error)
        if readable := [one for one in images if one.error is None]:
            yield Batch.of(readable)
