"""Counting: the outputs of watched calls, image after image, into running statistics."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featviz.audit.measuring import Measured, measure
from featviz.audit.plan import Spot
from featviz.audit.running_stats import ChannelStats, Covariance, TopImages
from featviz.errors import FeatvizError, ForwardError, ImageError, LayoutError
from featviz.hooks.forward import forward
from featviz.models.load import LoadedModel
from featviz.models.preprocess import InputOptions
from featviz.pipeline.encoders import ReadAhead
from featviz.pipeline.prepare import read_input
from featviz.records import Call, Integers, Sample

Failed = Callable[[int, FeatvizError], None]
"""Called with the number of an image that failed."""


@dataclass(frozen=True)
class Batch:
    """Images of one input shape."""

    images: tuple[int, ...]
    """Their numbers among the samples."""
    inputs: list[Tensor]
    """The arguments of the model, each [B, C, H, W] (or [B, C, T, H, W]), on the CPU."""


@dataclass
class Tally:
    """The statistics of one watched call so far."""

    stats: ChannelStats
    top: TopImages
    covariance: Covariance | None = None

    @classmethod
    def before(cls, part: Measured) -> Tally:
        """Nothing yet, for a call that gives such numbers."""
        stats = ChannelStats.nothing(part.channels, part.saturated is not None)
        return cls(stats, TopImages.nothing(part.channels))

    def add(self, part: Measured) -> None:
        """Add one batch."""
        self.stats.add(part.stats, part.positions, part.saturated)
        self.top.add(part.images, part.stats)
        if part.covariance is not None:
            before = self.covariance
            self.covariance = before.merge(part.covariance) if before else part.covariance

    @property
    def channels(self) -> int:
        """How many channels the call's output has."""
        return len(self.stats.count)

    def merge(self, other: Tally) -> Tally:
        """The statistics of both, which saw different images."""
        covariance = None
        if self.covariance is not None and other.covariance is not None:
            covariance = self.covariance.merge(other.covariance)
        return Tally(self.stats.merge(other.stats), self.top.merge(other.top), covariance)


@dataclass
class Census:
    """Statistics of every spot over all images; of an image that failed, nothing stays."""

    spots: Mapping[Call, Spot]
    correlate: frozenset[Call] = frozenset()
    """Calls whose covariance is streamed, too."""
    known: Container[Call] = frozenset()
    """All calls of the trace."""
    tallies: dict[Call, Tally] = field(default_factory=dict)
    faults: dict[Call, str] = field(default_factory=dict)
    """Calls that gave something that cannot be counted, with the reason."""
    unforeseen: set[str] = field(default_factory=set)
    """Calls of watched layers that the trace had not."""
    fault: Exception | None = None
    """A bug of ours, to tell it from a fault of the model."""
    _batch: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    _measured: list[tuple[Call, Measured]] = field(default_factory=list)
    """Of the batch that is in the model."""

    def begin(self, images: tuple[int, ...]) -> None:
        """The next tensors come from these images."""
        self._batch, self._measured = np.array(images), []

    def commit(self) -> None:
        """The model is through with them: count what they gave."""
        for call, part in self._measured:
            tally = self.tallies.get(call)
            if tally is None:
                tally = self.tallies[call] = Tally.before(part)
            if self._fits(call, tally.channels, part.channels):
                tally.add(part)
        self._measured = []

    def absorb(self, other: Census) -> None:
        """Add what another process has counted, of other images."""
        for call, tally in other.tallies.items():
            before = self.tallies.get(call)
            if before is None:
                self.tallies[call] = tally
            elif self._fits(call, before.channels, tally.channels):
                self.tallies[call] = before.merge(tally)
        self.faults = {**other.faults, **self.faults}
        self.unforeseen |= other.unforeseen

    def take(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """The sink of the hooks: measure the tensor now, count it when the image is through."""
        if call not in self.spots:
            if call not in self.known:
                self.unforeseen.add(call.label)
            return
        try:
            part = measure(self._batch, out, self.spots[call], call in self.correlate)
            self._measured.append((call, part))
        except LayoutError as error:
            self.faults.setdefault(call, error.message)
        except Exception as error:
            self.fault = error
            raise

    def _fits(self, call: Call, before: int, now: int) -> bool:
        """Whether there are as many channels as before; else the call is at fault."""
        if before != now:
            self.faults[call] = f"has {before} channels, then {now}"
        return before == now


def batches(
    samples: Sequence[Sample],
    model: LoadedModel,
    inputs: InputOptions,
    size: int,
    failed: Failed,
    numbers: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Decode and prepare images; neighbours of the same input shape go together, `size` at most.

    A thread reads the next `size` images while the caller is busy with those that it got.

    Args:
        numbers: of the samples to take; all by default.
    """
    order = range(len(samples)) if numbers is None else numbers
    waiting: list[tuple[int, list[Tensor]]] = []

    def read(number: int) -> list[Tensor]:
        return read_input(samples[number], model.preprocess, inputs)[1]

    with ReadAhead(read) as ahead:
        for number in order[:size]:
            ahead.begin(number)
        for number, later in zip_longest(order, order[size:]):
            if later is not None:
                ahead.begin(later)
            try:
                args = ahead.take(number)
            except ImageError as error:
                failed(number, error)
                continue
            if waiting and (len(waiting) == size or _shapes(waiting[0][1]) != _shapes(args)):
                yield _together(waiting)
                waiting = []
            waiting.append((number, args))
        if waiting:
            yield _together(waiting)


def run_batch(
    model: LoadedModel, batch: Batch, census: Census, failed: Failed, seen: Callable[[int], None]
) -> None:
    """Show a batch to the model; where that fails, its images one by one, to find the guilty."""
    census.begin(batch.images)
    try:
        forward(model.module, [arg.to(model.device) for arg in batch.inputs])
    except ForwardError as error:
        if census.fault is not None:
            raise census.fault from None
        if len(batch.images) == 1:
            failed(batch.images[0], error)
        for at, number in enumerate(batch.images):
            if len(batch.images) > 1:
                alone = [arg[at : at + 1] for arg in batch.inputs]
                run_batch(model, Batch((number,), alone), census, failed, seen)
    else:
        census.commit()
        for number in batch.images:
            seen(number)


def _shapes(args: Sequence[Tensor]) -> list[torch.Size]:
    return [arg.shape for arg in args]


def _together(samples: Sequence[tuple[int, list[Tensor]]]) -> Batch:
    if len(samples) == 1:  # a copy of an input takes as long as some layers
        return Batch((samples[0][0],), samples[0][1])
    inputs = [torch.cat(args) for args in zip(*(args for _, args in samples), strict=True)]
    return Batch(tuple(number for number, _ in samples), inputs)
