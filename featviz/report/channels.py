"""What is known of the channels of a tensor over images: totals of their numbers, and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from featviz.records import RECTIFIERS, Floats, is_gradient
from featviz.report import words
from featviz.report.views import Group, LayerPage
from featviz.rundir.schema import Capture
from featviz.text import counted

Found = Mapping[str, Sequence[int]]
"""Channels, by what was found of them; what was found of none is left out."""


EXPLANATIONS = {
    "all zero": "zero at every pixel; after an activation, such a channel is dead",
    "constant": "one non-zero value at every pixel",
    "NaN or infinite": "at least one value is NaN or infinite",
}
_EMPTY = (0, np.nan, np.nan, 0, 0, 0, True)


class ChannelTotals:
    """Totals over the images that it was given, of the channels of one tensor."""

    def __init__(self) -> None:
        self.images = 0
        self.table = np.zeros((0, len(_EMPTY)))
        """[channels, 7]: the images that have it; its smallest and largest finite value, NaN where
        there is none; sums over the images of mean, share of zeros and non-finite values; and 1
        where it is all zero in every image that has it."""
        self.activation = False
        """Whether its zeros tell which channels are dead: those of a ReLU, or of what stands behind
        one, as a block or a pooling, which has exact zeros and nothing below."""
        self.judged = False
        """Whether a constant map says something of its channel: it has several pixels, or there
        are several images, and it is no gradient."""

    def add(self, row: Capture, stats: Floats) -> None:
        """Take in an image's statistics, [maps, 6] in the order of `records.STAT_COLUMNS`."""
        if (more := len(stats) - len(self.table)) > 0:
            self.table = np.concatenate([self.table, np.tile(_EMPTY, (more, 1))])
        low, high, mean, _, zeros, nonfinite = stats.astype(np.float64).T
        own = self.table[: len(stats)].T
        own[0] += 1
        own[1], own[2] = np.fmin(own[1], low), np.fmax(own[2], high)
        own[3:6] += mean, zeros, nonfinite
        own[6] *= (zeros == 1) & (nonfinite == 0)
        self.images += 1
        several = self.images > 1 or (row.plan.map_size != (1, 1) and row.layout != "vector")
        self.judged = several and not is_gradient(row.kind)
        rectified = self.range[0] >= 0 and self.zero_share > 0 and row.layout != "attention"
        self.activation = row.kind == "output" and (row.type in RECTIFIERS or rectified)

    @property
    def dark(self) -> np.ndarray:
        """[channels]: all zero in every image that has it."""
        found: np.ndarray = self.table[:, 6] == 1
        return found

    @property
    def found(self) -> Found:
        """Channels that hold one value in all images; a constant gradient says nothing."""
        _, low, high, _, _, nonfinite, _ = self.table.T
        every = {
            "all zero": self.dark & self.judged,
            "constant": (low == high) & (nonfinite == 0) & ~self.dark & self.judged,
            "NaN or infinite": nonfinite > 0,
        }
        return {name: np.flatnonzero(of).tolist() for name, of in every.items() if of.any()}

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest value of all channels; NaN where none is finite."""
        low, high = (own[np.isfinite(own)] for own in self.table[:, 1:3].T)
        return (float(low.min()), float(high.max())) if len(low) and len(high) else (np.nan, np.nan)

    @property
    def zero_share(self) -> float:
        """Share of zeros 0..1, over all images and channels."""
        return float(self.table[:, 4].sum() / max(1, self.table[:, 0].sum()))


def channel_rows(
    totals: ChannelTotals, audited: Found
) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """Of all channels of a tensor the smallest and largest value, the mean of the images' means and
    the share of zeros, in words, and the findings; also those that an audit has of the layer."""
    said: dict[int, list[str]] = {}
    of_audit = {f"{name} (audit)": channels for name, channels in audited.items()}
    for name, channels in {**totals.found, **of_audit}.items():
        for channel in channels:
            said.setdefault(channel, []).append(name)
    for channel, (seen, low, high, mean, zeros, *_) in enumerate(totals.table.tolist()):
        count = max(seen, 1)
        numbers = (*map(words.number, (low, high, mean / count)), words.percent(zeros / count))
        yield channel, numbers, ", ".join(said.get(channel, ()))


def dead(pages: Sequence[LayerPage], totals_of: Callable[[Group], ChannelTotals]) -> str:
    """How many channels are dead: `7 in 2 layers`, `none in the 3 activations drawn`, or why that
    is not known."""
    named = [page for page in pages if page.type in RECTIFIERS]
    drawn = [  # what stands behind a ReLU that is drawn has the same dead channels
        [own for group in page.groups if (own := totals_of(group)).activation]
        for page in named or pages
    ]
    judged = [own for layer in drawn for own in layer if own.judged]
    if not any(drawn):
        return "unknown: no activation was drawn (add ReLU to --layers, or give --audit)"
    if not judged:
        return "unknown: only one value of each channel was seen (run more images, or give --audit)"
    found = [sum(len(own.found.get("all zero", ())) for own in layer) for layer in drawn]
    if with_some := sum(map(bool, found)):
        return f"{sum(found):,} in {counted(with_some, 'layer')}"
    many = f"{len(judged)} activations" if len(judged) > 1 else "one activation"
    return f"none in the {many} drawn"


def badges(found: Found) -> list[tuple[str, str]]:
    """`5 all zero`, and which channels these are."""
    return [(f"{len(own)} {name}", words.channel_list(own)) for name, own in found.items()]
