"""The one loop over images: each is read ahead, shown to the model, and its result is yielded.

`run`, `cam`, `audit`, `exemplars` and the drawing of trainings differ in the function `show` that
they bring: it runs the model, whose hooks hand each tensor to a drawer, a counter or a top list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Event
from typing import Any, Generic, TypeVar

from featviz.errors import FeatvizError, ForwardError, ImageError, StoreError, UsageError
from featviz.files.urls import Url
from featviz.records import Sample
from featviz.run.encoders import read_ahead

Image = TypeVar("Image")  # what is read of an image: as the model takes it
T = TypeVar("T")

READERS_OF_STORES = 8  # threads that read images of a store

log = logging.getLogger(__name__)


@dataclass
class Visit(Generic[Image, T]):
    """An image on its way through the model."""

    number: int
    sample: Sample
    image: Image | None = None  # what was read of it; None where it cannot be read
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
        show: runs the model on an image, or on neighbours whose inputs have the same shapes. Its
            ForwardError or UsageError is the image's own: of several, each is shown again alone.
        stop: ends the loop before the next image.
    """
    for batch in neighbours(samples, read, batch_size, stop=stop):
        waiting = [batch]
        while waiting:
            seen = waiting.pop(0)
            images = [one for one in seen if one.error is None]
            try:
                result = show(images) if images else None
            except (ForwardError, UsageError) as error:
                if len(images) > 1:
                    waiting = [[one] for one in seen]
                    continue
                log.debug("%s failed", images[0].sample.name, exc_info=error)
                images[0].error = error
            else:
                for one in images:
                    one.result = result
            yield from seen


def neighbours(
    samples: Sequence[Sample],
    read: Callable[[Sample], Image],
    size: int,
    numbers: Iterable[int] | None = None,
    stop: Event | None = None,
) -> Iterator[list[Visit[Image, Any]]]:
    """Read all samples, or those of these numbers, ahead of the caller. Those whose inputs have
    the same shapes go together, `size` neighbours at most, and unreadable ones between them."""
    far = any(isinstance(path, Url) for sample in samples[:1] for path in sample.paths)
    readers = READERS_OF_STORES if far else 1
    batch: list[Visit[Image, Any]] = []
    shapes: list[Any] = []
    order = range(len(samples)) if numbers is None else numbers
    reading = read_ahead(order, lambda at: read(samples[at]), readers, max(size, readers))
    with closing(reading) as ahead:
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
                if shapes and shape != shapes[0]:
                    yield batch
                    batch, shapes = [], []
                shapes.append(shape)
            batch.append(one)
            if size in (1, len(shapes)):
                yield batch
                batch, shapes = [], []
    if batch:
        yield batch
