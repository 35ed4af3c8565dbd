"""What a comparison found: the passive data, and how it is summed up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from featviz.diff.comparing import Change
from featviz.diff.pairing import OnlyIn
from featviz.errors import CHECK_FAILED
from featviz.rundir.schema import Place

TENSORS, PIXELS, STATISTICS = "tensors", "statistics and pixels", "statistics"
"""What two tensors were compared by."""

_MOST_CHANGED = 5
"""Channels of a layer that a summary names."""


@dataclass(frozen=True)
class DiffThresholds:
    """What counts as a difference."""

    tolerance: float = 1e-4
    """See `comparing.compare`. Threads and oneDNN moved values by up to 3e-6 in the same terms
    (ten of torchvision's models on two cores)."""
    max_diff_ratio: float = 0.0
    """Share of the channels of all layers and images that may differ, 0..1."""
    ignore_added: bool = False
    """What only NEW has is no difference."""


@dataclass(frozen=True)
class Finding:
    """One tensor of one image, compared."""

    image: str
    place: Place
    type: str
    index: int
    by: str
    change: Change
    differs: np.ndarray
    """Channels, bool."""
    reason: str | None = None
    """Why it could not be compared: another shape. All its channels differ then."""

    @property
    def severity(self) -> tuple[float, float]:
        """The larger, the worse."""
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
        """Where it is."""
        return self.findings[0].place

    @property
    def type(self) -> str:
        """Class name."""
        return self.findings[0].type

    @property
    def label(self) -> str:
        """`layer1.0.conv1`; its class for the model itself."""
        return self.place.layer or self.type

    @property
    def differing(self) -> tuple[Finding, ...]:
        """The images in which it differs."""
        return tuple(finding for finding in self.findings if finding.differs.any())

    @property
    def worst(self) -> Finding:
        """The image in which it differs most; of equals the first."""
        return max(self.findings, key=lambda finding: finding.severity)

    @property
    def reason(self) -> str | None:
        """Why it could not be compared."""
        return next((one.reason for one in self.findings if one.reason), None)

    @property
    def channels(self) -> tuple[int, int]:
        """Those that differ, and all, over the images."""
        return (
            sum(int(one.differs.sum()) for one in self.findings),
            sum(len(one.differs) for one in self.findings),
        )

    @property
    def differs(self) -> np.ndarray:
        """Channels, bool, that differ in some image, of those that all images have."""
        count = min(len(one.differs) for one in self.findings)
        differing: np.ndarray = np.any([one.differs[:count] for one in self.findings], axis=0)
        return differing

    def over_images(self) -> Change:
        """The worst of each channel over the images that could be compared, of the channels that
        all of these have; may be empty."""
        changes = [one.change for one in self.findings if one.reason is None]
        count = min((len(change.relative) for change in changes), default=0)
        columns = {
            name: [getattr(change, name)[:count] for change in changes] or [np.zeros(0)]
            for name in ("absolute", "relative", "cosine", "unlike")
        }
        return Change(
            np.max(columns["absolute"], 0),
            np.max(columns["relative"], 0),
            np.fmin.reduce(columns["cosine"], 0),
            np.max(columns["unlike"], 0),
            np.full((count, 3), np.nan),
        )

    @property
    def cosine(self) -> float:
        """The smallest over the images in which it differs, each of the layer as a whole; NaN where
        it is not known."""
        own = [one.change.layer_cosine for one in self.differing if one.reason is None]
        return float(np.fmin.reduce(own, initial=np.nan))

    def most_changed(self) -> list[int]:
        """The channels that differ, the most changed first."""
        if self.reason is not None:
            return []
        return self.over_images().worst_first(self.differs)[:_MOST_CHANGED]


@dataclass(frozen=True)
class Map:
    """A picture of signed differences."""

    file: str
    """Relative to the folder of the maps."""
    image: str
    label: str
    stem: str
    channels: tuple[int, ...]
    """Drawn, in tile order: the most changed first."""
    source: str
    """`kept tensors` or `pixels`."""
    limit: float
    """The colours' ends: a difference of so much, in terms of the tolerance."""


@dataclass(frozen=True)
class DiffResult:
    """What a comparison found."""

    base: Path
    new: Path
    asked: DiffThresholds
    images: tuple[str, ...]
    layers: tuple[LayerFindings, ...]
    """All that both have, in the order in which the model came to them."""
    only_in_base: OnlyIn
    only_in_new: OnlyIn
    incomplete: Mapping[str, Sequence[str]]
    """Of BASE and NEW."""
    maps: tuple[Map, ...] = field(default=())

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
        """Those that differ, and all, over layers and images."""
        counts = [layer.channels for layer in self.layers]
        return sum(differing for differing, _ in counts), sum(total for _, total in counts)

    @property
    def ratio(self) -> float:
        """Share of channels that differ."""
        differing, total = self.channels
        return differing / total if total else 0.0

    @property
    def within(self) -> bool:
        """Whether no more channels differ than may."""
        return self.ratio <= self.asked.max_diff_ratio

    @property
    def equal(self) -> bool:
        """Whether the check holds."""
        added = self.only_in_new and not self.asked.ignore_added
        return self.within and not self.only_in_base and not added

    @property
    def exit_code(self) -> int:
        """0, or 4 where the runs differ."""
        return 0 if self.equal else CHECK_FAILED
