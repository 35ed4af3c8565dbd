"""The result of a comparison: passive data, and how it is summed up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from featviz.diff.pairing import OnlyIn
from featviz.errors import CHECK_FAILED
from featviz.files.urls import Url
from featviz.records import DifferenceMap, Place

TENSORS, PIXELS, STATISTICS = "tensors", "statistics and pixels", "statistics"
"""What two tensors were compared by."""

_MOST_CHANGED = 5
"""Channels of a layer that a summary names."""


@dataclass(frozen=True)
class DiffThresholds:
    """What counts as a difference."""

    tolerance: float = 1e-4
    """How far a value may change, in the terms of `compare.compare`. Threads and oneDNN moved
    values by up to 3e-6 (ten of torchvision's models on two cores)."""
    max_diff_ratio: float = 0.0
    """Share of the channels of all layers and images that may differ, 0..1."""
    ignore_added: bool = False
    """Whether images and layers that only NEW has count as no difference."""


@dataclass(frozen=True)
class Change:
    """How far apart two tensors are, in each channel; all arrays are [channels]."""

    absolute: np.ndarray
    """Largest absolute difference where both values are finite."""
    relative: np.ndarray
    """Largest |new - base| / (max(|new|, |base|) + scale), 0..1: see `compare.compare`."""
    cosine: np.ndarray
    """Cosine similarity over the values that are finite on both sides, -1..1; 1 where both are
    zero; NaN where only statistics are known, or where a channel is a single number."""
    unlike: np.ndarray
    """Values that are NaN or infinite on one side, and something else on the other."""
    products: np.ndarray
    """[channels, 3]: base · new, base · base and new · new over the values that are finite on both
    sides, in one unit for all channels; NaN where only statistics are known."""

    @property
    def layer_cosine(self) -> float:
        """Cosine similarity over all channels together, because a single channel that is zero on
        one side says little of a layer. 1 where both sides are zero, NaN where only statistics are
        known."""
        known = self.products[~np.isnan(self.products).any(1)]
        if not len(known):
            return math.nan
        dot, base, new = map(float, known.sum(0))
        if base == 0 or new == 0:
            return 1.0 if base == new else 0.0
        return min(1.0, max(-1.0, dot / (math.sqrt(base) * math.sqrt(new))))

    def differs(self, tolerance: float) -> np.ndarray:
        """Which channels, bool, have a value beyond the tolerance, or one that is finite on one
        side only."""
        differing: np.ndarray = (self.relative > tolerance) | (self.unlike > 0)
        return differing

    def worst_first(self, among: np.ndarray) -> list[int]:
        """The channels of a mask [channels], the most changed first."""
        order = np.lexsort((-self.relative, -self.unlike))
        return [int(i) for i in order if among[i]]


@dataclass(frozen=True)
class Finding:
    """One tensor of one image, compared."""

    image: str
    place: Place
    type: str
    index: int
    by: str
    """`TENSORS`, `PIXELS` or `STATISTICS`."""
    change: Change
    differs: np.ndarray
    """Which channels differ, bool [channels]."""
    reason: str | None = None
    """Why the tensor could not be compared, as another shape; all its channels differ then."""

    @property
    def severity(self) -> tuple[float, float]:
        """The largest difference and the share of channels that differ; the larger, the worse."""
        worst = (
            1.0 if self.reason or self.change.unlike.any() else float(self.change.relative.max())
        )
        return worst, float(self.differs.mean())


@dataclass(frozen=True)
class LayerFindings:
    """One place of the model, over all images."""

    findings: tuple[Finding, ...]

    @property
    def place(self) -> Place:
        """Where in the model the tensors were met."""
        return self.findings[0].place

    @property
    def type(self) -> str:
        """Class name of the layer."""
        return self.findings[0].type

    @property
    def label(self) -> str:
        """`layer1.0.conv1`; the class name for the model itself."""
        return self.place.layer or self.type

    @property
    def differing(self) -> tuple[Finding, ...]:
        """The findings of the images in which the layer differs."""
        return tuple(finding for finding in self.findings if finding.differs.any())

    @property
    def worst(self) -> Finding:
        """The finding of the image in which the layer differs most; of equals the first."""
        return max(self.findings, key=lambda finding: finding.severity)

    @property
    def reason(self) -> str | None:
        """Why the layer could not be compared, in the first image where it could not."""
        return next((one.reason for one in self.findings if one.reason), None)

    @property
    def channels(self) -> tuple[int, int]:
        """How many channels differ in some image, and how many there are."""
        differing = np.zeros(max(len(one.differs) for one in self.findings), bool)
        for one in self.findings:
            differing[: len(one.differs)] |= one.differs
        return int(differing.sum()), len(differing)

    @property
    def channel_images(self) -> tuple[int, int]:
        """The same, with each channel counted in each image."""
        return (
            sum(int(one.differs.sum()) for one in self.findings),
            sum(len(one.differs) for one in self.findings),
        )

    @property
    def differs(self) -> np.ndarray:
        """Which channels, bool, differ in some image, of those that all images have."""
        count = min(len(one.differs) for one in self.findings)
        differing: np.ndarray = np.any([one.differs[:count] for one in self.findings], axis=0)
        return differing

    def over_images(self) -> Change:
        """The worst change of each channel over the images that could be compared, of the channels
        that all of these have; may be empty."""
        changes = [one.change for one in self.findings if one.reason is None]
        count = min((len(change.relative) for change in changes), default=0)

        def by_image(name: str) -> list[np.ndarray]:
            return [getattr(change, name)[:count] for change in changes] or [np.zeros(0)]

        largest = {name: np.max(by_image(name), 0) for name in ("absolute", "relative", "unlike")}
        smallest = np.fmin.reduce(by_image("cosine"), 0)
        return Change(**largest, cosine=smallest, products=np.full((count, 3), np.nan))

    @property
    def cosine(self) -> float:
        """The smallest `Change.layer_cosine` over the images in which the layer differs; NaN where
        only statistics are known."""
        cosines = [one.change.layer_cosine for one in self.differing if one.reason is None]
        return float(np.fmin.reduce(cosines, initial=np.nan))

    def most_changed(self) -> list[int]:
        """The channels that differ, the most changed first."""
        if self.reason is not None:
            return []
        return self.over_images().worst_first(self.differs)[:_MOST_CHANGED]


@dataclass(frozen=True)
class DiffResult:
    """The result of comparing two runs."""

    base: Path | Url
    new: Path | Url
    asked: DiffThresholds
    images: tuple[str, ...]
    layers: tuple[LayerFindings, ...]
    """The layers that both runs have, in the order in which the model came to them."""
    only_in_base: OnlyIn
    only_in_new: OnlyIn
    incomplete: Mapping[str, Sequence[str]]
    """Names of images that are left out as incomplete, under `base` and `new`."""
    maps: tuple[DifferenceMap, ...] = field(default=())

    @property
    def differing(self) -> tuple[LayerFindings, ...]:
        """The layers that differ."""
        return tuple(layer for layer in self.layers if layer.differing)

    @property
    def first(self) -> LayerFindings | None:
        """The first layer that diverges."""
        return next(iter(self.differing), None)

    @property
    def channels(self) -> tuple[int, int]:
        """How many channels of all layers differ in some image, and how many there are."""
        return _summed(layer.channels for layer in self.layers)

    @property
    def channel_images(self) -> tuple[int, int]:
        """The same, with each channel counted in each image."""
        return _summed(layer.channel_images for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Share of channels that differ, each counted in each image."""
        differing, total = self.channel_images
        return differing / total if total else 0.0

    @property
    def within(self) -> bool:
        """Whether no more channels differ than the thresholds allow."""
        return self.ratio <= self.asked.max_diff_ratio

    @property
    def equal(self) -> bool:
        """Whether the runs are equal, as far as the thresholds ask."""
        added = self.only_in_new and not self.asked.ignore_added
        return self.within and not self.only_in_base and not added

    @property
    def exit_code(self) -> int:
        """0, or 4 where the runs differ."""
        return 0 if self.equal else CHECK_FAILED


def _summed(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    pairs = list(counts)
    return sum(differing for differing, _ in pairs), sum(total for _, total in pairs)
