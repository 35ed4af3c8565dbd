"""The one loop over images: each is read ahead, shown to the model, and yielded.

`run`, `cam`, `audit`, `exemplars` and the drawing of trainings differ in the function
`show` that they bring: it runs the model, whose hooks hand each tensor to a drawer, a
counter or a top list."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Event
from typing import Any, Generic, TypeVar

from featviz.errors import (
    FeatvizError,
    ForwardError,
    ImageError,
    StoreError,
    UsageError,
)
from featviz.files.urls import Url
from featviz.records import Sample
from featviz.run.encoders import read_ahead
from featviz.run.results import ImageResult

Input = TypeVar("Input")  # what is read of an image, as the model takes it
T = TypeVar("T")

READERS_OF_STORES = 8  # threads that read images of a store

log = logging.getLogger(__name__)


@dataclass
class ImageJob(Generic[Input, T]):
    """An image on its way through the model."""

    number: int
    """Its index among the samples."""
    sample: Sample
    input: Input | None = None
    """None where it cannot be read, or need not be."""
    result: T | None = None
    """What `show` returned for it, and for those that went through the model with it.
    """
    kept: ImageResult | None = None
    """What an earlier run made of it: then it is neither read nor shown."""
    error: FeatvizError | None = None


def visit(
    samples: Sequence[Sample],
    read: Callable[[Sample], Input],
    show: Callable[[Sequence[ImageJob[Input, T]]], T],
    *,
    kept: Callable[[Sample], ImageResult | None] | None = None,
    batch_size: int = 1,
    stop: Event | None = None,
) -> Generator[ImageJob[Input, T], None, None]:
    """Show each image to the model and yield what became of it, in order.

    Args:
        read: decodes and prepares a sample, in a thread that is ahead of the model.
        show: runs the model on an image, or on neighbours whose inputs have the same
            shapes. Its ForwardError or UsageError is the image's own: of several, each
            is shown again alone.
        kept: what an earlier run made of a sample, if that is still good; by the
            reading thread.
        stop: ends the loop before the next image.
    """
    for batch in read_batches(samples, read, batch_size, kept=kept, stop=stop):
        waiting = [batch]
        while waiting:
            jobs = waiting.pop(0)
            readable = [job for job in jobs if job.input is not None]
            if readable:
                try:
                    result = show(readable)
                except (ForwardError, UsageError) as error:
                    if len(readable) > 1:
                        waiting = [[job] for job in jobs]
                        continue
                    log.debug("%s failed", readable[0].sample.name, exc_info=error)
                    readable[0].error = error
                else:
                    for job in readable:
                        job.result = result
            yield from jobs


def read_batches(
    samples: Sequence[Sample],
    read: Callable[[Sample], Input],
    batch_size: int,
    numbers: Iterable[int] | None = None,
    *,
    kept: Callable[[Sample], ImageResult | None] | None = None,
    stop: Event | None = None,
) -> Iterator[list[ImageJob[Input, Any]]]:
    """Read images ahead of the caller, and put neighbours with inputs of the same
    shapes together.

    Args:
        batch_size: inputs in a batch at most; unreadable images between them do not
            count.
        numbers: indices of the samples that are read, in this order; None reads all of
            them.
    """

    def read_job(number: int) -> ImageJob[Input, Any]:
        job = ImageJob[Input, Any](number, samples[number])
        try:
            if kept is not None:
                job.kept = kept(job.sample)
            if job.kept is None:
                job.input = read(job.sample)
        except (ImageError, StoreError) as error:
            log.debug("%s failed", job.sample.name, exc_info=error)
            job.error = error
        return job

    is_remote = any(
        isinstance(path, Url) for sample in samples[:1] for path in sample.paths
    )
    readers = READERS_OF_STORES if is_remote else 1
    numbers = range(len(samples)) if numbers is None else numbers
    batch: list[ImageJob[Input, Any]] = []
    shapes: list[Any] = []  # of the inputs in the batch, all equal
    with closing(
        read_ahead(numbers, read_job, readers, max(batch_size, readers))
    ) as ahead:
        for _, load in ahead:
            if stop is not None and stop.is_set():
                return
            job = load()
            if job.input is not None:
                shape = [arg.shape for arg in getattr(job.input, "args", ())]
                if shapes and shape != shapes[0]:
                    yield batch
                    batch = []
                    shapes = []
                shapes.append(shape)
            batch.append(job)
            # a batch of one is not held back for the image after it, which may be
            # unreadable
            if batch_size == 1 or len(shapes) == batch_size:
                yield batch
                batch = []
                shapes = []
    if batch:
        yield batch
