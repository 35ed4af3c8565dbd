"""What is known of the channels of a tensor over all images of a run: their numbers,
and what was found of them."""

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
        """[channels, 7]: in how many images there is the channel; its smallest and
        largest finite value, NaN where there is none; sums over these images of its
        mean, share of zeros and number of non-finite values; and 1 where it is all zero
        in each of them."""
        self.is_activation = False
        """Whether channels that are all zero are dead, as behind a ReLU."""
        self.is_judged = False
        """Whether a channel of one value can be a finding: not in a gradient, and not
        where only one number of each channel was seen."""
        self._zeroed: frozenset[int] = frozenset()

    def add(
        self, row: Capture, stats: Floats, zeroed: frozenset[int] = frozenset()
    ) -> None:
        """Add an image's statistics.

        Args:
            row: the tensor in this image.
            stats: [channels, 6] in the order of `records.STAT_COLUMNS`.
            zeroed: channels that interventions set to zero.
        """
        # An image of another size may have more channels. So the table grows, and counts
        # the images of each channel by itself.
        missing = len(stats) - len(self.table)
        if missing > 0:
            self.table = np.concatenate([self.table, np.tile(_EMPTY, (missing, 1))])
        low, high, mean, _, zeros, nonfinite = stats.astype(np.float64).T
        columns = self.table[: len(stats)].T
        columns[IMAGES] += 1
        # fmin and fmax pass over NaN, which stands for an image without a finite value
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
            row: the tensor in that image.
        """
        # one number in one image is constant, and says nothing
        has_maps = row.plan.map_size != (1, 1) and row.layout != "vector"
        self.is_judged = (self.images > 1 or has_maps) and row.kind not in BACKWARD
        # A model may have a class of its own for ReLU. An output with zeros and nothing
        # below is taken for one, but for weights of attention, which a softmax makes so.
        looks_rectified = (
            self.range[0] >= 0 and self.zero_share > 0 and row.layout != "attention"
        )
        self.is_activation = row.kind == "output" and (
            row.type in RECTIFIERS or looks_rectified
        )

    @property
    def _is_zeroed(self) -> np.ndarray:
        """bool [channels]: interventions set it to zero."""
        return np.isin(np.arange(len(self.table)), [*self._zeroed])

    @property
    def all_zero(self) -> np.ndarray:
        """bool [channels]: it is all zero in every image that has it, and not because of
        an intervention."""
        return np.asarray((self.table[:, ALL_ZERO] == 1) & ~self._is_zeroed)

    @property
    def findings(self) -> ChannelFindings:
        """The channels of each of the findings in EXPLANATIONS."""
        table = self.table.T
        # false for a channel without a finite value: NaN equals nothing
        has_one_value = (table[LOW] == table[HIGH]) & (table[NONFINITE] == 0)
        is_other = ~self.all_zero & ~self._is_zeroed
        masks = {
            "all zero": self.all_zero & self.is_judged,
            # a batch normalisation makes another constant of zeros
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
        """Smallest and largest value of all channels; NaN where none is finite."""
        low = self.table[:, LOW]
        high = self.table[:, HIGH]
        if not np.isfinite(low).any() or not np.isfinite(high).any():
            return np.nan, np.nan
        return float(low[np.isfinite(low)].min()), float(high[np.isfinite(high)].max())

    @property
    def nonfinite(self) -> int:
        """Values of all images and channels that are NaN or infinite."""
        return int(self.table[:, NONFINITE].sum())

    @property
    def zero_share(self) -> float:
        """Share of zeros 0..1, over all images and channels; 0 before the first image."""
        return float(self.table[:, ZEROS].sum() / max(1, self.table[:, IMAGES].sum()))


class ChannelRow(NamedTuple):
    """A channel in the table of a layer's page."""

    channel: int
    numbers: tuple[str, ...]
    """Its min, max, mean and share of zeros over the images, as text."""
    findings: str
    """Of the run and of the audit, with commas."""


def channel_rows(
    totals: ChannelTotals, audited: ChannelFindings
) -> Iterator[ChannelRow]:
    """The rows of all channels of a tensor.

    Args:
        totals: over all images of the run.
        audited: findings of an audit for the same layer; empty without an audit.
            Channels that the totals do not have are left out.
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
        pages: of all layers.
        totals_of: gives the totals of a tensor over all images.
    """
    # Where ReLUs were drawn they alone count: a layer behind one has the same dead
    # channels, and other layers are hardly ever exactly 0.
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
    """A finding of a layer, short."""

    text: str
    """`5 all zero`."""
    channels: str
    """Which they are: `0–3, 17`."""


def badges(findings: ChannelFindings) -> list[Badge]:
    """A badge for each finding."""
    return [
        Badge(f"{len(channels)} {name}", channel_list(channels))
        for name, channels in findings.items()
    ]
