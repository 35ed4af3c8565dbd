"""The network as a picture: what its layers make of an image, in the order in which they ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from featviz.records import Floats, Guess, is_gradient
from featviz.report import words
from featviz.report.channels import ChannelTotals, Found
from featviz.report.views import Figure, Group, ImagePage
from featviz.rundir.schema import Capture
from featviz.text import by

STRIP = 10
"""Maps of a layer in its strip: as many as a screen shows 96 pixels wide."""
_WIDEST, _NARROWEST = 3.0, 0.5
"""Width by height of a map in a strip; of a wider or narrower one the middle is shown."""
_TOP = 10
_FEW = 12
"""Layers of one resolution that need no finer division."""
_MOST_STAGES = 16
"""Runs of one resolution that still divide a network; more of them take turns all the time."""
_OPEN = 60
"""Layers whose grids are unfolded when the page of an image opens."""
_VECTORS = "Vectors"
"""The title of the stage behind the last maps."""
_DEEPEST = 4
"""Parts of a name by which layers are grouped at most."""

Tile = tuple[int | None, tuple[int, int, int, int], str]
"""A map in its grid: its channel, None where all became one tile; left, top, width and height of
what is shown, in pixels of the picture; and the map's range in words."""
Bar = tuple[int, str, str, float, float]
"""A channel that is one number: the channel, the name of its class where that is known, its value,
where the bar begins, 0..100, and how long it is."""


@dataclass(frozen=True)
class Step:
    """A tensor on its way through the network."""

    group: Group
    tiles: Sequence[Tile]
    bars: Sequence[Bar]
    """The largest entries, where each channel is one number; then there are no tiles."""
    shape: str
    zeros: float
    range: str
    found: Found

    @property
    def figure(self) -> Figure:
        """Its grid in this run."""
        return self.group.figures[0]

    @property
    def backward(self) -> bool:
        """Whether it is a gradient."""
        return is_gradient(self.figure.row.kind)


@dataclass(frozen=True)
class Stage:
    """Layers that follow one another and belong together."""

    number: int
    title: str
    """The resolution of its maps, or the module that its layers are in."""
    steps: Sequence[Step]
    open: bool

    @property
    def preview(self) -> Step | None:
        """The last of its layers that has maps, which stands for it while it is folded."""
        return next((step for step in reversed(self.steps) if step.tiles), None)

    @property
    def layers(self) -> int:
        """How many layers it has, whose tensors may be several."""
        return len({step.group.page for step in self.steps})

    @property
    def span(self) -> str:
        """`conv1 – layer1.0.relu`."""
        first, last = self.steps[0].group.layer, self.steps[-1].group.layer
        return first if first == last else f"{first} – {last}"


def network(
    page: ImagePage, stats: Mapping[str, Floats], over: Sequence[ChannelTotals] | None = None
) -> list[Stage]:
    """The stages of a network with what they make of an image: those of the forward pass, then
    those of the gradients, which come from the output back.

    Args:
        stats: those of the image, by the pictures' ids.
        over: totals over all images for each of the page's groups, whose zeros, range and findings
            are then told instead of the image's own.
    """
    steps = []
    for n, group in enumerate(page.groups):
        figure, totals = group.figures[0], over[n] if over else ChannelTotals()
        row, own = figure.row, stats[figure.picture.id]
        if not over:
            totals.add(row, own)
        single = is_numbers(row)
        tiles = [] if single else [_tile(row, channel, own) for channel in most_varied(row, own)]
        values = bars(row, own, page.image.manifest.prediction) if single else []
        numbers = (totals.zero_share, words.span(*totals.range), totals.found)
        steps.append(Step(group, tiles, values, _shape(row), *numbers))
    stages: list[Stage] = []
    shown = 0
    for backward, same in groupby(steps, key=lambda step: step.backward):
        part = list(same)
        titled = zip(_titles(part), part, strict=True)
        for title, pairs in groupby(titled, key=lambda pair: pair[0]):
            stage = [step for _, step in pairs]
            shown += len(stage)
            opened = not stages or shown <= _OPEN
            title = f"Gradients, {title}" if backward else title
            stages.append(Stage(len(stages) + 1, title, stage, opened))
    return stages


def _titles(steps: Sequence[Step]) -> list[str]:
    """The stage of each step: its resolution, `28×28`; or the outermost module, where there is one
    resolution, or they take turns. Single numbers between maps, as in squeeze-and-excitation, are
    of the stage in which they stand; those behind the last maps are a stage of their own."""
    own = []
    for row in (step.figure.row for step in steps):
        size = "" if is_numbers(row) else by(row.plan.map_size)
        own.append(size if row.constant is None else by(row.constant[1:]))
    last = max((n for n, size in enumerate(own) if size), default=-1)
    here = next((size for size in own if size), "")
    sizes = []
    for n, size in enumerate(own):
        here = size or (_VECTORS if n > last else here)
        sizes.append(here)
    several = len({*sizes} - {_VECTORS}) > 1
    if (several and len([*groupby(sizes)]) <= _MOST_STAGES) or len(steps) <= _FEW:
        return sizes
    most = min(max(_MOST_STAGES, len(steps) // 4), len(steps) // 2)
    for depth in range(1, _DEEPEST + 1):
        names = [".".join(step.group.layer.split(".")[:depth]) for step in steps]
        if 2 < len([*groupby(names)]) <= most:
            return names
    return sizes


def _shape(row: Capture) -> str:
    size = by(row.plan.map_size)
    if row.constant is not None:
        return f"{row.maps} × {by(row.constant[1:])}, each constant"
    if is_numbers(row):
        return f"{row.maps} values"
    return f"{row.maps} × {size}" if row.side == 1 else f"{row.maps} × {row.side} × {size}"


def is_numbers(row: Capture) -> bool:
    """Whether each channel is one number, which bars tell better than grey squares."""
    single = row.layout == "vector" or row.plan.map_size == (1, 1)
    return single and row.reduce is None and row.side == 1


def most_varied(row: Capture, stats: Floats, count: int = STRIP) -> list[int | None]:
    """Drawn channels whose maps vary much and differ from one another: the one of the largest
    deviation, then always the one whose numbers are farthest from those that are taken, out of the
    half that varies most. Where none varies, those of the largest magnitude. What is not finite
    comes last."""
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
    across = min(width, max(1, round(height * _WIDEST)))
    down = min(height, max(1, round(width / _NARROWEST)))
    box = (left + (width - across) // 2, top + (height - down) // 2, across, down)
    return channel, box, "" if channel is None else words.span(*map(float, stats[channel, :2]))


def bars(row: Capture, stats: Floats, guesses: Sequence[Guess], count: int = _TOP) -> list[Bar]:
    """The largest entries of a vector, of a gradient those of the largest magnitude; with the names
    of classes where the vector is the model's output."""
    values = np.nan_to_num(stats[:, 2].astype(np.float64), posinf=np.nan, neginf=np.nan)
    values = np.where(stats[:, 5] > 0, -np.inf, values)
    order = np.where(np.isfinite(values), abs(values), -np.inf) if is_gradient(row.kind) else values
    top = np.argsort(-order, kind="stable")[:count]
    top = top[np.isfinite(values[top])]
    if not len(top):
        return []
    scored = [  # the values of the model's output are the scores of the prediction
        one.index < len(stats)
        and bool(np.isclose(stats[one.index, 2], one.score, rtol=1e-4, atol=1e-5))
        for one in guesses
    ]
    names = {one.index: one.title for one in guesses} if all(scored) else {}
    low, high = min(0.0, float(values[top].min())), max(0.0, float(values[top].max()))
    unit = 100 / ((high - low) or 1)
    return [
        (
            int(channel),
            names.get(int(channel), ""),
            words.number(float(value)),
            round((min(value, 0) - low) * unit, 2),
            round(abs(value) * unit, 2),
        )
        for channel, value in zip(top, values[top], strict=True)
    ]
