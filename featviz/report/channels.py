"""What is known of the channels of a tensor over images: totals of their numbers, and findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from featviz.records import RECTIFIERS, Floats, is_gradient
from featviz.report import words
from featviz.report.views import Group, LayerPage
from featviz.rundir.schema import Capture
from featviz.text import counted

Found = Mapping[str, Sequence[int]]
"""Channels, by what was found of them; what was found of none is left out."""


EXPLANATIONS = {
    "all zero": "zero at every place; behind an activation such a channel is dead",
    "constant": "one value at every place, and it is not zero",
    "NaN or infinite": "somewhere a value is no number",
}
"""What each finding means."""
_OR_AUDIT = "or give --audit)"
_EMPTY = {
    "seen": 0, "low": np.nan, "high": np.nan, "mean": 0, "zeros": 0, "nonfinite": 0, "dark": True
}  # fmt: skip
"""The totals of a channel that no image has."""


class ChannelTotals:
    """Totals over the images that it was given, of the channels of one tensor."""

    def __init__(self) -> None:
        self.images = 0
        self.seen = np.zeros(0, np.int64)
        """[channels]: the images that have the channel."""
        self.low, self.high = np.zeros(0), np.zeros(0)
        """[channels]: smallest and largest finite value; NaN where there is none."""
        self.mean, self.zeros, self.nonfinite = np.zeros(0), np.zeros(0), np.zeros(0)
        """[channels]: sums over the images of mean, share of zeros and non-finite values."""
        self.dark = np.zeros(0, bool)
        """[channels]: all zero in every image that has it."""
        self.activation = False
        """Whether its zeros tell which channels are dead: those of a ReLU, or of what stands behind
        one, as a block or a pooling, which has exact zeros and nothing below."""
        self.judged = False
        """Whether a constant map says something of its channel: it has several pixels, or there
        are several images, and it is no gradient."""

    def add(self, row: Capture, stats: Floats) -> None:
        """Take in an image's statistics, [maps, 6] in the order of `records.STAT_COLUMNS`."""
        if (more := len(stats) - len(self.seen)) > 0:
            for name, start in _EMPTY.items():
                own = getattr(self, name)
                setattr(self, name, np.concatenate([own, np.full(more, start, own.dtype)]))
        at = slice(0, len(stats))
        values = stats.astype(np.float64).T
        self.images += 1
        self.seen[at] += 1
        self.low[at] = np.fmin(self.low[at], values[0])
        self.high[at] = np.fmax(self.high[at], values[1])
        for total, column in ((self.mean, 2), (self.zeros, 4), (self.nonfinite, 5)):
            total[at] += values[column]
        self.dark[at] &= (values[4] == 1) & (values[5] == 0)
        several = self.images > 1 or (row.plan.map_size != (1, 1) and row.layout != "vector")
        self.judged = several and not is_gradient(row.kind)
        rectified = self.range[0] >= 0 and bool(self.zeros.any()) and row.layout != "attention"
        self.activation = row.kind == "output" and (row.type in RECTIFIERS or rectified)

    @property
    def found(self) -> Found:
        """Channels that hold one value in all images; a constant gradient says nothing."""
        constant = (self.low == self.high) & (self.nonfinite == 0) & ~self.dark
        every = {
            "all zero": self.dark & self.judged,
            "constant": constant & self.judged,
            "NaN or infinite": self.nonfinite > 0,
        }
        return {name: np.flatnonzero(of).tolist() for name, of in every.items() if of.any()}

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest value of all channels; NaN where none is finite."""
        low, high = (own[np.isfinite(own)] for own in (self.low, self.high))
        return (float(low.min()), float(high.max())) if len(low) and len(high) else (np.nan, np.nan)

    @property
    def zero_share(self) -> float:
        """Share of zeros 0..1, over all images and channels."""
        return float(self.zeros.sum() / max(1, self.seen.sum()))


def channel_rows(
    totals: ChannelTotals, audited: Found
) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """Of all channels of a tensor the smallest and largest value, the mean of the images' means and
    the share of zeros, in words, and the findings.

    Args:
        audited: what an audit found of the layer.
    """
    said: dict[int, list[str]] = {}
    of_audit = {f"{name} (audit)": channels for name, channels in audited.items()}
    for name, channels in {**totals.found, **of_audit}.items():
        for channel in channels:
            said.setdefault(channel, []).append(name)
    seen = np.maximum(totals.seen, 1)
    columns = (totals.low, totals.high, totals.mean / seen, totals.zeros / seen)
    for channel, keys in enumerate(zip(*(own.tolist() for own in columns), strict=True)):
        numbers = (*map(words.number, keys[:3]), words.percent(keys[3]))
        yield channel, numbers, ", ".join(said.get(channel, ()))


class RunTotals:
    """The totals of all tensors of this run, collected image by image."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], ChannelTotals] = {}

    def add(self, groups: Sequence[Group], stats: Mapping[str, Floats]) -> None:
        """Take an image in: its tensors, and their statistics by the pictures' ids."""
        for group in groups:
            figure = group.figures[0]
            totals = self._of.setdefault((group.page, group.stem), ChannelTotals())
            totals.add(figure.row, stats[figure.picture.id])

    def of(self, group: Group) -> ChannelTotals:
        """Those of a tensor."""
        return self._of[group.page, group.stem]

    def dead(self, pages: Sequence[LayerPage]) -> str:
        """How many channels are dead: `7 in 2 layers`, `none in the 3 activations drawn`, or why
        that is not known."""
        named = [page for page in pages if page.type in RECTIFIERS]
        drawn = [  # what stands behind a ReLU that is drawn has the same dead channels
            [own for group in page.groups if (own := self.of(group)).activation]
            for page in named or pages
        ]
        if not any(drawn):
            return f"not known: no activation was drawn (run with ReLU among --layers, {_OR_AUDIT}"
        judged = [own for layer in drawn for own in layer if own.judged]
        if not judged:
            return f"not known: one value of each channel was seen (run more images, {_OR_AUDIT}"
        found = [sum(len(own.found.get("all zero", ())) for own in layer) for layer in drawn]
        if with_some := sum(map(bool, found)):
            return f"{sum(found):,} in {counted(with_some, 'layer')}"
        many = f"{len(judged)} activations" if len(judged) > 1 else "one activation"
        return f"none in the {many} drawn"

    def dark_count(self, page: LayerPage) -> int:
        """How many channels of a layer are zero in every image, all its tensors together."""
        return sum(int(self.of(group).dark.sum()) for group in page.groups)


def badges(found: Found) -> list[tuple[str, str]]:
    """`5 all zero`, and which channels these are."""
    return [(f"{len(own)} {name}", words.channel_list(own)) for name, own in found.items()]
