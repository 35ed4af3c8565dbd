"""The one loop over images: each is read ahead, shown to the model, and yielded.

`run`, `cam`, `audit`, `exemplars` and the drawing of trainings differ in the function
`show` that they bring: it runs the model, whose hooks hand each tensor to a drawer, a
counter or a top list."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from threading import Event
from typing import Any, Generic, TypeAlias, TypeVar

from featviz.errors import (
    FeatvizError,
    ForwardError,
    ImageError,
    StoreError,
    UsageError,
)
from featviz.records import Sample
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


ShowImages: TypeAlias = Callable[[Sequence[ImageJob[Input, T]]], T]
"""Runs the model on images whose inputs have the same shapes."""
EarlierResult: TypeAlias = Callable[[Sample], ImageResult | None]
"""What an earlier run made of a sample, if that is still good."""


def visit(
    samples: Sequence[Sample],
    read: Callable[[Sample], Input],
    show: ShowImages[Input, T],
    *,
    numbers: Sequence[int] | None = None,
    kept: EarlierResult | None = None,
    batch_size: int = 1,
    stop: Event | None = None,
) -> Generator[ImageJob[Input, T], None, None]:
    """Show each image to the model and yield what became of it, in order.

    Args:
        read: decodes and prepares a sample, in a thread that is ahead of the model.
        show: runs the model on an image, or on neighbours whose inputs have the same
            shapes. Its ForwardError or UsageError is the image's own: of several, each
            is shown again alone.
        numbers: indices of the samples that are shown, in this order; None shows all.
        kept: what an earlier run made of a sample, if that is still good; by the
            reading thread.
        batch_size: how many neighbours are shown together at most.
        stop: ends the loop before the next image.
    """
    jobs = read_jobs(samples, read, numbers, batch_size, kept)
    batches: Iterator[list[ImageJob[Input, T]]] = ([job] for job in jobs)
    if batch_size > 1:
        batches = in_batches(jobs, batch_size)
    with closing(jobs):
        for batch in batches:
            if stop is not None and stop.is_set():
                return
            _show_together(batch, show)
            yield from batch


def _show_together(
    jobs: Sequence[ImageJob[Input, T]],
    show: ShowImages[Input, T],
) -> None:
    """Show the images that could be read to the model in one pass, and give each job the
    result, which they share, or the error. Where a pass of several images fails, each
    is shown once more alone, since nothing else tells which of them is at fault."""
    readable = [job for job in jobs if job.input is not None]
    if not readable:
        return
    try:
        result = show(readable)
    except (ForwardError, UsageError) as error:
        if len(readable) > 1:
            for job in readable:
                _show_together([job], show)
            return
        log.debug("%s failed", readable[0].sample.name, exc_info=error)
        readable[0].error = error
        return
    for job in readable:
        job.result = result


def read_jobs(
    samples: Sequence[Sample],
    read: Callable[[Sample], Input],
    numbers: Sequence[int] | None,
    ahead: int,
    kept: EarlierResult | None = None,
) -> Generator[ImageJob[Input, Any], None, None]:
    """Read images in threads, ahead of the caller, and yield them in order. To close it
    waits for what is being read, and drops the rest.

    Args:
        numbers: indices of the samples that are read, in this order; None reads all of
            them.
        ahead: how many images are read while the caller has one; more from a store.
        kept: as in `visit`.
    """

    def read_job(number: int) -> ImageJob[Input, Any]:
        """A sample that was read, or is kept from an earlier run, or failed."""
        job = ImageJob[Input, Any](number, samples[number])
        try:
            # here, beside the model: the checksum of the file takes as long as reading it
            if kept is not None:
                job.kept = kept(job.sample)
            if job.kept is None:
                job.input = read(job.sample)
        except (ImageError, StoreError) as error:
            log.debug("%s failed", job.sample.name, exc_info=error)
            job.error = error
        return job

    numbers = range(len(samples)) if numbers is None else numbers
    # There is no model to read one image beside, and the thread would cost a worker
    # process, which gets one at a time, a tenth of resnet18's time for an image.
    if len(numbers) == 1:
        yield from map(read_job, numbers)
        return
    # a store answers after a tenth of a second, and many requests at once
    is_remote = bool(samples) and samples[0].is_remote
    readers = READERS_OF_STORES if is_remote else 1
    pool = ThreadPoolExecutor(readers, "featviz-reader")
    waiting = deque[Future[ImageJob[Input, Any]]]()
    try:
        for number in numbers:
            waiting.append(pool.submit(read_job, number))
            if len(waiting) > max(ahead, readers):
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_batches(
    jobs: Iterable[ImageJob[Any, Any]], batch_size: int
) -> Iterator[list[ImageJob[Any, Any]]]:
    """Put neighbours whose inputs have the same shapes together.

    Args:
        jobs: the `args` of their inputs are tensors; inputs without `args` fit together.
        batch_size: inputs in a batch at most. Jobs without an input do not count: images
            that cannot be read, and those that are kept from an earlier run.
    """
    batch: list[ImageJob[Any, Any]] = []
    shapes: list[Any] = []  # of the inputs in the batch, all equal
    for job in jobs:
        # a job without an input goes along, so that all come in their order
        if job.input is not None:
            shape = [arg.shape for arg in getattr(job.input, "args", ())]
            if shapes and shape != shapes[0]:
                yield batch
                batch = []
                shapes = []
            shapes.append(shape)
        batch.append(job)
        if len(shapes) == batch_size:
            yield batch
            batch = []
            shapes = []
    if batch:
        yield batch
