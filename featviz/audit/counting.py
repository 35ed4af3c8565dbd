"""Counting: the outputs of watched calls, image after image, into running statistics."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from featviz.audit.measuring import Measured, measure
from featviz.audit.plan import Spot
from featviz.audit.running_stats import ChannelStats, Covariance, TopImages
from featviz.errors import LayoutError
from featviz.pipeline.batches import Batch
from featviz.records import Call, Integers


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

    def begin(self, batch: Batch) -> None:
        """The next tensors come from these images."""
        self._batch, self._measured = np.array(batch.images), []

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
