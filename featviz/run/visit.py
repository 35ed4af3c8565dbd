"""The loop over images: each image is read, shown to the model, and yielded. A thread
reads the next images while the model runs.

`run`, `cam`, `audit`, `exemplars` and the drawing of trainings share this loop. Each has
its own function `show`, which runs the model; hooks of the model then draw its tensors,
or count in them."""

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

Input = TypeVar("Input")  # an image as the model takes it
T = TypeVar("T")  # what `show` returns

READERS_OF_STORES = 8  # threads that read images from a store

log = logging.getLogger(__name__)


@dataclass
class ImageJob(Generic[Input, T]):
    """An image on its way through the model."""

    number: int
    """The index of the image among the samples."""
    sample: Sample
    input: Input | None = None
    """The image as the model takes it; None for an image with `kept` or `error`."""
    result: T | None = None
    """What `show` returned for the batch of this image; None before that."""
    kept: ImageResult | None = None
    """The result of an earlier run, if it is still good: then the image is neither read
    nor shown."""
    error: FeatvizError | None = None
    """Why the image could not be read, or not be shown."""


ShowImages: TypeAlias = Callable[[Sequence[ImageJob[Input, T]]], T]
"""Runs the model on images whose inputs have the same shapes."""
EarlierResult: TypeAlias = Callable[[Sample], ImageResult | None]
"""Returns the result of an earlier run for a sample, if it is still good, else None."""


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
    """Show each image to the model, and yield its job, in order.

    Args:
        read: decodes and prepares a sample. A thread calls it while the model runs.
        show: runs the model on a batch of images whose inputs have the same shapes. If it
            raises a ForwardError or UsageError for several images, each of them is shown
            once more in a batch of its own; for one image, the job gets the error.
        numbers: the indices of the samples to show, in this order; None shows all.
        kept: looks for the result of an earlier run; None shows all images. The reading
            thread calls it.
        batch_size: the most images in a batch.
        stop: if it is set, the loop ends before the next batch.
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
    """Show a batch of images to the model in one pass. Jobs without an input are left as
    they are; all others get the result of the pass. If a pass of several images fails,
    each image is shown once more in a pass of its own, to find the one that fails; that
    job gets the error."""
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
    """Read images in threads, before the caller asks for them, and yield their jobs in
    order. Closing the generator waits for the images that are being read, and drops the
    rest.

    Args:
        read: decodes and prepares a sample.
        numbers: the indices of the samples to read, in this order; None reads all.
        ahead: how many images are read before the caller asks for them; at least one, or
            READERS_OF_STORES from a store.
        kept: as for `visit`.
    """

    def read_job(number: int) -> ImageJob[Input, Any]:
        """Make the job of a sample: with the result of an earlier run, else with the
        input, else with the error."""
        job = ImageJob[Input, Any](number, samples[number])
        try:
            # In this thread, since `kept` makes the checksum of the file, which takes as
            # long as reading it.
            if kept is not None:
                job.kept = kept(job.sample)
            if job.kept is None:
                job.input = read(job.sample)
        except (ImageError, StoreError) as error:
            log.debug("%s failed", job.sample.name, exc_info=error)
            job.error = error
        return job

    numbers = range(len(samples)) if numbers is None else numbers
    # For one image a thread gains nothing, since no model runs meanwhile. A worker
    # process reads one image at a time: a thread for each would cost it a tenth of the
    # time of resnet18.
    if len(numbers) == 1:
        yield from map(read_job, numbers)
        return
    # a store takes a tenth of a second to answer, but answers many requests in parallel
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
    """Divide jobs into batches of successive images whose inputs have the same shapes.

    Args:
        jobs: the jobs of the images, in order. The `args` of an input are tensors; inputs
            without `args` fit into any batch.
        batch_size: the most inputs in a batch. Jobs without an input (images that cannot
            be read, or are kept from an earlier run) do not count.
    """
    batch: list[ImageJob[Any, Any]] = []
    shapes: list[Any] = []  # the shapes of the inputs in the batch, all equal
    for job in jobs:
        # jobs without an input stay in the batch, so that the order of the jobs is kept
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
