"""What a comparison of two runs found: what `diff` hands to whoever shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from featviz.records.layers import Place
from featviz.records.results import GridPlan

if TYPE_CHECKING:  # as in results.py
    import numpy as np


@dataclass(frozen=True)
class DifferenceMap:
    """A picture of signed differences."""

    file: str
    """Relative to the folder of the maps."""
    image: str
    label: str
    stem: str
    channels: tuple[int, ...]
    """The drawn channels in tile order: the most changed first."""
    source: str
    """`kept tensors` or `pixels`."""
    limit: float
    """The relative difference at the ends of the colours."""
    plan: GridPlan
    slices: int
    """Maps side by side of one channel."""


@dataclass(frozen=True)
class ComparedLayer:
    """One place of the model in both runs."""

    place: Place
    label: str
    type: str
    differing: int
    """Channels that differ in some image, and how many there are."""
    total: int
    severity: float
    """The largest relative difference, 0..1; 1 where shapes or finite values differ."""
    words: Sequence[tuple[str, str]]
    """Terms and their values."""
    image: str
    """The image in which it differs most."""
    change: np.ndarray
    """[channels]: the largest relative difference of each in that image, 0..1."""
    difference: DifferenceMap | None


@dataclass(frozen=True)
class Comparison:
    """Two runs."""

    equal: bool
    words: str
    """The verdict in a line."""
    layers: Sequence[ComparedLayer]
    """Those of both runs, in the order in which the model came to them."""
    lists: Mapping[str, Sequence[str]]
    """What only one run has, or has in part, under titles."""

    @property
    def first(self) -> ComparedLayer | None:
        """The first layer that diverges."""
        return next((layer for layer in self.layers if layer.differing), None)
