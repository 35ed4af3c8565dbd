"""The statistics and the findings of a tensor's channels over all images of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from featviz.records import BACKWARD, RECTIFIERS, Floats
from featviz.report.descriptions import channel_list, number, percent
from featviz.report.figures import Group, ReportPage
from featviz.rundir.schema import Capture
from featviz.text import counted

ChannelFindings = Mapping[str, Sequence[int]]
"""Channels by finding; a finding that no channel has is left out."""

EXPLANATIONS = {
    "all zero": "zero at every pixel; dead if it is so in many images after a ReLU",
    "ablated": "set to zero by --ablate or --edit, here or in the layer before",
    "constant": "one non-zero value at every pixel",
    "NaN or infinite": "at least one value is NaN or infinite",
}

IMAGES, LOW, HIGH, MEANS, ZEROS, NONFINITE, ALL_ZERO = range(7)
"""The columns of `ChannelTotals.table`."""
_EMPTY = (0, np.nan, np.nan, 0, 0, 0, True)
"""The row of a channel before the first image."""


class ChannelTotals:
    """Totals of the channels of one tensor over the images that were added."""

    def __init__(self) -> None:
        """Begin without an image."""
        self.images = 0
        self.table = np.zeros((0, len(_EMPTY)))
        """float64 [channels, 7]. IMAGES: in how many images the channel exists. LOW, HIGH:
        its smallest and largest finite value, NaN if no value is finite. MEANS, ZEROS,
        NONFINITE: the sums over these images of its mean, its share of zeros and its
        number of NaN and infinite values. ALL_ZERO: 1 if it is all zero in each of these
        images, else 0."""
        self.is_activation = False
        """Whether an all-zero channel counts as dead, as behind a ReLU."""
        self.is_judged = False
        """Whether an all-zero or constant channel is a finding. It is none in a gradient,
        or if only one number of each channel was seen."""
        self._zeroed: frozenset[int] = frozenset()
        """The channels that interventions set to zero in any of the images."""

    def add(
        self, row: Capture, stats: Floats, zeroed: frozenset[int] = frozenset()
    ) -> None:
        """Add an image's statistics.

        Args:
            row: the capture of the tensor in this image.
            stats: its statistics [channels, 6], in the order of `records.STAT_COLUMNS`.
            zeroed: the channels that interventions set to zero.
        """
        # An image of another size may have more channels: then the table grows. So each
        # channel has its own number of images.
        missing = len(stats) - len(self.table)
        if missing > 0:
            self.table = np.concatenate([self.table, np.tile(_EMPTY, (missing, 1))])
        low, high, mean, _, zeros, nonfinite = stats.astype(np.float64).T
        columns = self.table[: len(stats)].T
        columns[IMAGES] += 1
        # fmin and fmax ignore NaN, which a channel without a finite value has here
        columns[LOW] = np.fmin(columns[LOW], low)
        columns[HIGH] = np.fmax(columns[HIGH], high)
        columns[MEANS] += mean
        columns[ZEROS] += zeros
        columns[NONFINITE] += nonfinite
        columns[ALL_ZERO] *= (zeros == 1) & (nonfinite == 0)
        self.images += 1
        self._zeroed |= zeroed
        self._judge(row)

    def _judge(self, row: Capture) -> None:
        """Set `is_judged` and `is_activation`, after an image was added.

        Args:
            row: the capture of the tensor in this image.
        """
        # a single number, seen in one image, is always constant
        has_maps = row.plan.map_size != (1, 1) and row.layout != "vector"
        self.is_judged = (self.images > 1 or has_maps) and row.kind not in BACKWARD
        # A model may have its own class for ReLU. So an output with zeros, and without
        # negative values, counts as an activation; but not weights of attention, which
        # come from a softmax.
        looks_rectified = (
            self.range[0] >= 0 and self.zero_share > 0 and row.layout != "attention"
        )
        self.is_activation = row.kind == "output" and (
            row.type in RECTIFIERS or looks_rectified
        )

    @property
    def _is_zeroed(self) -> np.ndarray:
        """bool [channels]: whether interventions set the channel to zero."""
        return np.isin(np.arange(len(self.table)), [*self._zeroed])

    @property
    def all_zero(self) -> np.ndarray:
        """bool [channels]: whether the channel is all zero in every image that has it,
        without an intervention."""
        return np.asarray((self.table[:, ALL_ZERO] == 1) & ~self._is_zeroed)

    @property
    def findings(self) -> ChannelFindings:
        """The channels that have each finding of EXPLANATIONS."""
        table = self.table.T
        # False for a channel without a finite value, since NaN does not equal NaN
        has_one_value = (table[LOW] == table[HIGH]) & (table[NONFINITE] == 0)
        is_other = ~self.all_zero & ~self._is_zeroed
        masks = {
            "all zero": self.all_zero & self.is_judged,
            # not only zeros: a batch norm turns the zeros of the layer before into
            # another constant
            "ablated": has_one_value & self._is_zeroed,
            "constant": has_one_value & is_other & self.is_judged,
            "NaN or infinite": table[NONFINITE] > 0,
        }
        findings = {}
        for name, mask in masks.items():
            if mask.any():
                findings[name] = np.flatnonzero(mask).tolist()
        return findings

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest value of all channels; both NaN if no value is
        finite."""
        low = self.table[:, LOW]
        high = self.table[:, HIGH]
        if not np.isfinite(low).any() or not np.isfinite(high).any():
            return np.nan, np.nan
        return float(low[np.isfinite(low)].min()), float(high[np.isfinite(high)].max())

    @property
    def nonfinite(self) -> int:
        """How many values are NaN or infinite, in all images and channels."""
        return int(self.table[:, NONFINITE].sum())

    @property
    def zero_share(self) -> float:
        """Share of zeros 0..1, over all images and channels; 0 before the first image."""
        return float(self.table[:, ZEROS].sum() / max(1, self.table[:, IMAGES].sum()))


class ChannelRow(NamedTuple):
    """A channel in the table of a layer's page."""

    channel: int
    numbers: tuple[str, ...]
    """The min, max, mean and share of zeros of the channel over all images, as text."""
    findings: str
    """The findings of the run and of the audit, separated by commas."""


def channel_rows(
    totals: ChannelTotals, audited: ChannelFindings
) -> Iterator[ChannelRow]:
    """The rows of all channels of a tensor.

    Args:
        totals: the totals over all images of the run.
        audited: the findings of an audit for the same layer; empty without an audit.
            Channels that the run does not have are left out.
    """
    findings_of = defaultdict(list)
    of_audit = {f"{name} (audit)": channels for name, channels in audited.items()}
    for name, channels in {**totals.findings, **of_audit}.items():
        for channel in channels:
            findings_of[channel].append(name)
    for channel, columns in enumerate(totals.table.tolist()):
        images = max(columns[IMAGES], 1)
        numbers = (
            number(columns[LOW]),
            number(columns[HIGH]),
            number(columns[MEANS] / images),
            percent(columns[ZEROS] / images),
        )
        yield ChannelRow(channel, numbers, ", ".join(findings_of[channel]))


def dead_summary(
    pages: Sequence[ReportPage], totals_of: Callable[[Group], ChannelTotals]
) -> str:
    """How many channels are dead, `7 in 2 layers`, or why that is not known.

    Args:
        pages: the pages of all layers.
        totals_of: returns the totals of a tensor over all images.
    """
    # If ReLUs were drawn, only these count: a layer behind a ReLU would count the same
    # dead channels again.
    rectifiers = [page for page in pages if page.type in RECTIFIERS]
    activations = 0
    judged = 0
    dead_of_layers = []
    for page in rectifiers or pages:
        dead = 0
        for totals in map(totals_of, page.groups):
            if totals.is_activation:
                activations += 1
                judged += totals.is_judged
                dead += len(totals.findings.get("all zero", ()))
        if dead:
            dead_of_layers.append(dead)
    if not activations:
        return (
            "unknown: no ReLU was drawn (if there is one, add ReLU to --layers, or give"
            " --audit; GELU and SiLU are never zero everywhere)"
        )
    if not judged:
        return (
            "unknown: only one value of each channel was seen (run more images, or give"
            " --audit)"
        )
    if dead_of_layers:
        return f"{sum(dead_of_layers):,} in {counted(len(dead_of_layers), 'layer')}"
    drawn = f"{judged} activations" if judged > 1 else "one activation"
    return f"none in the {drawn} drawn"


class Badge(NamedTuple):
    """A finding of a layer in short."""

    text: str
    """The number of channels, and the finding: `5 all zero`."""
    channels: str
    """These channels: `0–3, 17`."""


def badges(findings: ChannelFindings) -> list[Badge]:
    """A badge for each finding."""
    return [
        Badge(f"{len(channels)} {name}", channel_list(channels))
        for name, channels in findings.items()
    ]
