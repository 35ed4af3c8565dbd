"""What is known of the channels of a tensor over images: totals of their numbers, and findings. The
network as a picture: what its layers make of an image, in the order in which they ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from featviz.records import BACKWARD, RECTIFIERS, ClassScore, Floats
from featviz.report import words
from featviz.report.views import Group, ReportPage
from featviz.rundir.schema import Capture
from featviz.text import by, counted

STRIP = 10  # maps of a layer in its strip: as many as a screen shows 96 pixels wide
_WIDEST, _NARROWEST = 3.0, 0.5
"""Width by height of a map in a strip; of a wider or narrower one the middle is shown."""
_FEW, _MOST_STAGES = 12, 16
"""Layers of one resolution that need no finer division, and runs of one resolution that still
divide a network; more of them take turns all the time."""
_OPEN = 60  # layers whose grids are unfolded when the page of an image opens
_VECTORS = "Vectors"  # the title of the stage behind the last maps

Tile = tuple[int | None, tuple[int, int, int, int], str]
"""A map in its grid: its channel, None where all became one tile; left, top, width and height of
what is shown, in pixels of the picture; and the map's range in words."""
Bar = tuple[int, str, str, float, float]
"""A channel that is one number: the channel, the name of its class where that is known, its value,
where the bar begins, 0..100, and how long it is."""
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
        """Whether its zeros tell which channels are dead, as behind a ReLU."""
        self.judged = False  # whether a constant map says something of its channel

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
        self.judged = several and row.kind not in BACKWARD
        rectified = self.range[0] >= 0 and self.zero_share > 0 and row.layout != "attention"
        self.activation = row.kind == "output" and (row.type in RECTIFIERS or rectified)

    @property
    def dark(self) -> np.ndarray:
        """[channels]: all zero in every image that has it."""
        return np.asarray(self.table[:, 6] == 1)

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
    """Numbers and findings of each channel over the images in words, also findings of an audit."""
    said: defaultdict[int, list[str]] = defaultdict(list)
    of_audit = {f"{name} (audit)": channels for name, channels in audited.items()}
    for name, channels in {**totals.found, **of_audit}.items():
        for channel in channels:
            said[channel].append(name)
    for channel, (seen, low, high, mean, zeros, *_) in enumerate(totals.table.tolist()):
        count = max(seen, 1)
        numbers = (*map(words.number, (low, high, mean / count)), words.percent(zeros / count))
        yield channel, numbers, ", ".join(said[channel])


def dead(pages: Sequence[ReportPage], totals_of: Callable[[Group], ChannelTotals]) -> str:
    """How many channels are dead, `7 in 2 layers`, or why that is not known."""
    named = [page for page in pages if page.type in RECTIFIERS]
    drawn = [  # what stands behind a ReLU that is drawn has the same dead channels
        [own for group in page.groups if (own := totals_of(group)).activation]
        for page in named or pages
    ]
    judged = [own for layer in drawn for own in layer if own.judged]
    if not judged:
        few = "only one value of each channel was seen (run more images, or give --audit)"
        none = "no activation was drawn (add ReLU to --layers, or give --audit)"
        return f"unknown: {few if any(drawn) else none}"
    found = [sum(len(own.found.get("all zero", ())) for own in layer) for layer in drawn]
    if with_some := sum(map(bool, found)):
        return f"{sum(found):,} in {counted(with_some, 'layer')}"
    many = f"{len(judged)} activations" if len(judged) > 1 else "one activation"
    return f"none in the {many} drawn"


def badges(found: Found) -> list[tuple[str, str]]:
    """`5 all zero`, and which channels these are."""
    return [(f"{len(own)} {name}", words.channel_list(own)) for name, own in found.items()]


# The network


def network(
    page: ReportPage, stats: Mapping[str, Floats], over: Sequence[ChannelTotals] | None = None
) -> list[dict[str, Any]]:
    """The stages of a network with what they make of an image, by its statistics: forward, then
    the gradients from the output back. A stage are layers that belong together, with its last step
    that has maps as a preview; a step is a tensor with its `tiles` or, of single numbers, `bars`.
    Zeros, range and findings are those `over` all images, where these are given."""
    steps: list[dict[str, Any]] = []
    for n, group in enumerate(page.groups):
        figure, totals = group.figures[0], over[n] if over else ChannelTotals()
        row, own = figure.row, stats[figure.picture.id]
        if not over:
            totals.add(row, own)
        single, size = is_numbers(row), by(row.plan.map_size)
        if row.constant is not None:
            size = by(row.constant[1:])
            shape = f"{row.maps} × {size}, each constant"
        elif single:
            size, shape = "", f"{row.maps} values"
        else:
            shape = " × ".join([str(row.maps), *([str(row.side)] if row.side > 1 else []), size])
        about = {"group": group, "figure": figure, "backward": row.kind in BACKWARD}
        about |= {"size": size, "shape": shape, "found": totals.found}
        about |= {"zeros": totals.zero_share, "range": words.span(*totals.range)}
        tiles = [] if single else [_tile(row, channel, own) for channel in most_varied(row, own)]
        values = bars(row, own, page.image.manifest.prediction) if single else []
        steps.append({**about, "tiles": tiles, "bars": values})
    stages: list[dict[str, Any]] = []
    count = 0
    for backward, same in groupby(steps, key=lambda step: step["backward"]):
        part = list(same)
        titled = zip(_titles(part), part, strict=True)
        for title, pairs in groupby(titled, key=lambda pair: pair[0]):
            stage = [step for _, step in pairs]
            count += len(stage)
            first, last = stage[0]["group"].layer, stage[-1]["group"].layer
            stages.append(
                {
                    "number": len(stages) + 1,
                    "title": f"Gradients, {title}" if backward else title,
                    "steps": stage,
                    "open": not stages or count <= _OPEN,
                    "preview": next((step for step in reversed(stage) if step["tiles"]), None),
                    "layers": len({step["group"].page for step in stage}),
                    "span": first if first == last else f"{first} – {last}",
                }
            )
    return stages


def _titles(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """The stage of each step: its resolution, `28×28`; or the outermost module, where there is one
    resolution, or they take turns. Single numbers between maps belong to their stage, behind them
    they are a stage of their own."""
    last = max((n for n, step in enumerate(steps) if step["size"]), default=-1)
    here, sizes = next((step["size"] for step in steps if step["size"]), ""), list[str]()
    for n, step in enumerate(steps):
        here = step["size"] or (_VECTORS if n > last else here)
        sizes.append(here)
    several = len({*sizes} - {_VECTORS}) > 1
    if (several and len([*groupby(sizes)]) <= _MOST_STAGES) or len(steps) <= _FEW:
        return sizes
    most = min(max(_MOST_STAGES, len(steps) // 4), len(steps) // 2)
    for depth in range(1, 5):
        names = [".".join(step["group"].layer.split(".")[:depth]) for step in steps]
        if 2 < len([*groupby(names)]) <= most:
            return names
    return sizes


def is_numbers(row: Capture) -> bool:
    """Whether each channel is one number, which bars tell better than grey squares."""
    single = row.layout == "vector" or row.plan.map_size == (1, 1)
    return single and row.reduce is None and row.side == 1


def most_varied(row: Capture, stats: Floats, count: int = STRIP) -> list[int | None]:
    """Drawn channels whose maps vary much and differ from one another: the one of the largest
    deviation, then always the one farthest from those that are taken, out of the half that varies
    most. Where none varies, those of the largest magnitude; what is not finite comes last."""
    if row.reduce is not None:
        return [None]
    drawn = np.asarray(row.drawn)
    own = np.nan_to_num(stats[drawn].astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high, mean, std, zeros = own[:, :5].T
    span = np.where(high > low, high - low, 1.0)
    points = np.stack([(mean - low) / span, 2 * std / span, zeros], axis=1).clip(0, 1)
    strength = own[:, 3] if own[:, 3].max() > 0 else abs(own[:, 2])
    strength[stats[drawn, 5] > 0] = -1
    order = np.argsort(-strength, kind="stable")
    half = order[: max(count, len(order) // 2)]
    vary = half[strength[half] > 0]
    points = points[vary]
    taken, nearest = [0] if len(vary) else [], np.full(len(vary), np.inf)
    for _ in range(min(count, len(vary)) - 1):
        nearest = np.minimum(nearest, ((points - points[taken[-1]]) ** 2).sum(1))
        nearest[taken] = -1
        taken.append(int(nearest.argmax()))
    rest = half[strength[half] <= 0]
    chosen: list[int | None] = drawn[np.concatenate([vary[taken], rest])[:count]].tolist()
    return chosen


def _tile(row: Capture, channel: int | None, stats: Floats) -> Tile:
    """Where the first tile of a drawn channel is."""
    slot = 0 if channel is None else row.drawn.index(channel) * row.side
    left, top, width, height = row.plan.box(slot)
    across, down = min(width, round(height * _WIDEST)), min(height, round(width / _NARROWEST))
    box = (left + (width - across) // 2, top + (height - down) // 2, across, down)
    return channel, box, "" if channel is None else words.span(*map(float, stats[channel, :2]))


def bars(row: Capture, stats: Floats, guesses: Sequence[ClassScore], count: int = 10) -> list[Bar]:
    """The largest entries of a vector, in magnitude of a gradient; with classes of the output."""
    values = np.nan_to_num(stats[:, 2].astype(np.float64), posinf=np.nan, neginf=np.nan)
    values = np.where(stats[:, 5] > 0, -np.inf, values)
    order = np.where(np.isfinite(values), abs(values), -np.inf) if row.kind in BACKWARD else values
    top = np.argsort(-order, kind="stable")[:count]
    top = top[np.isfinite(values[top])]
    scored = [  # the values of the model's output are the scores of the prediction
        one.index < len(stats)
        and bool(np.isclose(stats[one.index, 2], one.score, rtol=1e-4, atol=1e-5))
        for one in guesses
    ]
    names = {one.index: one.title for one in guesses} if all(scored) else {}
    low, high = (float(end(values[top], initial=0.0)) for end in (np.min, np.max))
    unit = 100 / ((high - low) or 1)
    found = []
    for channel, value in zip(top.tolist(), values[top].tolist(), strict=True):
        begin, length = round((min(value, 0) - low) * unit, 2), round(abs(value) * unit, 2)
        found.append((channel, names.get(channel, ""), words.number(value), begin, length))
    return found
