"""Any number of images through a model, batch by batch; images are read ahead by threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from featviz.errors import FeatvizError, ForwardError, ImageError
from featviz.hooks.forward import forward
from featviz.models.load import LoadedModel
from featviz.options import InputOptions
from featviz.pipeline.encoders import read_ahead
from featviz.pipeline.prepare import read_input, readers_for
from featviz.records import Sample

Failed = Callable[[int, FeatvizError], None]
"""Called with the number of an image that failed."""
BatchProgress = Callable[[str, FeatvizError | None, int], None]
"""Called with each image's name, what went wrong with it, and how many there are in all."""


@dataclass(frozen=True)
class Batch:
    """Images of one input shape."""

    images: tuple[int, ...]
    inputs: list[Tensor]
    """The arguments of the model, each [B, C, H, W] (or [B, C, T, H, W]), on the CPU."""


class Collector(Protocol):
    """What hooks fill while images go through a model; of an image that fails, nothing stays."""

    @property
    def fault(self) -> Exception | None:
        """A bug of ours, to tell it from a fault of the model."""

    def begin(self, batch: Batch) -> None:
        """The next tensors come from these images; what was not committed is forgotten."""

    def commit(self) -> None:
        """The model is through with them: keep what it gave."""


def batches(
    samples: Sequence[Sample],
    model: LoadedModel,
    inputs: InputOptions,
    size: int,
    failed: Failed,
    numbers: Iterable[int] | None = None,
) -> Iterator[Batch]:
    """Decode and prepare images, ahead of the caller; neighbours of the same input shape go
    together, `size` at most. `numbers` are those of the samples to take, all by default."""
    order = range(len(samples)) if numbers is None else numbers
    waiting: list[tuple[int, list[Tensor]]] = []

    def read(number: int) -> list[Tensor]:
        return read_input(samples[number], model.preprocess, inputs).args

    readers = readers_for(samples)
    with read_ahead(order, read, readers, max(size, readers)) as ahead:
        for number, load in ahead:
            try:
                args = load()
            except ImageError as error:
                failed(number, error)
                continue
            if waiting and (
                len(waiting) == size or [a.shape for a in waiting[0][1]] != [a.shape for a in args]
            ):
                yield _together(waiting)
                waiting = []
            waiting.append((number, args))
        if waiting:
            yield _together(waiting)


def run_batch(
    model: LoadedModel,
    batch: Batch,
    collector: Collector,
    failed: Failed,
    seen: Callable[[int], None],
) -> None:
    """Show a batch to the model; where that fails, its images one by one, to find the guilty."""
    try:
        collector.begin(batch)
        forward(model.module, [arg.to(model.device) for arg in batch.inputs])
    except ForwardError as error:
        if collector.fault is not None:
            raise collector.fault from None
        if len(batch.images) == 1:
            failed(batch.images[0], error)
            return
        for at, number in enumerate(batch.images):
            alone = Batch((number,), [arg[at : at + 1] for arg in batch.inputs])
            run_batch(model, alone, collector, failed, seen)
    else:
        collector.commit()
        for number in batch.images:
            seen(number)


def _together(samples: Sequence[tuple[int, list[Tensor]]]) -> Batch:
    if len(samples) == 1:  # a copy of an input takes as long as some layers
        return Batch((samples[0][0],), samples[0][1])
    inputs = [torch.cat(args) for args in zip(*(args for _, args in samples), strict=True)]
    return Batch(tuple(number for number, _ in samples), inputs)
