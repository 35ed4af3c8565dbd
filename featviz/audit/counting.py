"""Counting: the outputs of watched calls, image after image, into running statistics."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from featviz.audit.measuring import Measured, measure
from featviz.audit.plan import Spot
from featviz.audit.running_stats import ChannelStats, Covariance, TopImages
from featviz.drawing import stats
from featviz.errors import LayoutError
from featviz.pipeline.batches import Batch
from featviz.records import Call

_WAITING_BYTES = 2**21
"""Numbers of single images that are kept before they are merged, since merging takes as long for
many images as for one."""


@dataclass
class Tally:
    """The statistics of one watched call so far."""

    stats: ChannelStats
    top: TopImages
    covariance: Covariance | None = None

    @classmethod
    def of(cls, parts: Sequence[Measured]) -> Tally:
        """The statistics of batches whose outputs have equally many channels."""
        images = np.concatenate([part.images for part in parts])
        numbers = np.concatenate([part.stats for part in parts])
        positions = np.repeat([part.positions for part in parts], [len(p.images) for p in parts])
        at_bound = [part.saturated for part in parts if part.saturated is not None]
        saturated = np.concatenate(at_bound) if at_bound else None
        covariances = [part.covariance for part in parts if part.covariance is not None]
        maxima = np.where(numbers[..., stats.NONFINITE] > 0, np.inf, numbers[..., stats.MAX])
        return cls(
            ChannelStats.of_maps(numbers, positions[:, None], saturated),
            TopImages.of_batch(images, maxima),
            reduce(Covariance.merge, covariances) if covariances else None,
        )

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
    _batch: tuple[int, ...] = ()
    _measured: list[tuple[Call, Measured]] = field(default_factory=list)
    """Not yet added to the tallies."""
    _sure: int = 0
    """How many of them are of images that went through."""
    _bytes: int = 0
    """Their size."""

    def begin(self, batch: Batch) -> None:
        """The next tensors come from these images."""
        self._batch = batch.images
        del self._measured[self._sure :]

    def commit(self) -> None:
        """The model is through with them: count what they gave."""
        self._bytes += sum(part.nbytes for _, part in self._measured[self._sure :])
        self._sure = len(self._measured)
        if self._bytes > _WAITING_BYTES:
            self.settle()

    def settle(self) -> None:
        """Add to the tallies what still waits."""
        by_call: dict[Call, list[Measured]] = {}
        for call, part in self._measured[: self._sure]:
            by_call.setdefault(call, []).append(part)
        for call, parts in by_call.items():
            for _, alike in groupby(parts, attrgetter("channels")):
                self._add(call, Tally.of(list(alike)))
        self._measured, self._sure, self._bytes = [], 0, 0

    def absorb(self, other: Census) -> None:
        """Add what another process has counted, of other images."""
        for call, tally in other.tallies.items():
            self._add(call, tally)
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

    def _add(self, call: Call, tally: Tally) -> None:
        before = self.tallies.get(call)
        if before is None:
            self.tallies[call] = tally
        elif before.channels != tally.channels:
            self.faults[call] = f"has {before.channels} channels, then {tally.channels}"
        else:
            self.tallies[call] = before.merge(tally)
