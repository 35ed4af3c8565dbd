"""The network as a picture: what its layers make of an image, in the order in which they ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from markupsafe import Markup

from featviz.records import Floats, is_gradient
from featviz.report import words
from featviz.report.channels import ChannelTotals, Found
from featviz.report.legend import lowest
from featviz.report.views import Figure, Group, ImagePage
from featviz.rundir.schema import CaptureRow, Class
from featviz.text import by

STRIP = 9
"""Maps of a layer in its strip."""
_TOP = 10
"""Entries of a vector that are shown as bars."""
_FEW = 12
"""Layers of one resolution that need no finer division."""
_MOST_STAGES = 16
"""Runs of one resolution that still divide a network; more of them take turns all the time."""
_OPEN = 60
"""Layers that are unfolded when a page opens."""
_VECTORS = "Vectors"
"""The title of the stage behind the last maps."""
_DEEPEST = 4
"""Parts of a name by which layers are grouped at most."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A map, as it stands in its grid."""

    channel: int | None
    """None where all channels became one tile."""
    box: tuple[int, int, int, int]
    """Left, top, width and height in pixels of the picture."""
    size: tuple[int, int]
    """Width and height of the whole picture."""
    range: str = ""
    """The map's smallest and largest value; empty where all channels became one tile."""

    def shown(self, height: int) -> Markup:
        """Attributes of its element; a very wide or narrow map keeps a width that can be seen."""
        left, top, across, down = self.box
        width = min(max(round(height * across / down), height // 2), 3 * height)
        return Markup(
            f'width="{width}" height="{height}" viewBox="{left} {top} {across} {down}" '
            'preserveAspectRatio="xMidYMid slice"'
        )


@dataclass(frozen=True, slots=True)
class Bar:
    """A channel that is one number."""

    channel: int
    name: str
    """The class's, where it is known; else empty."""
    value: str
    start: float
    """Where the bar begins, 0..100, and how long it is."""
    length: float


@dataclass(frozen=True)
class Step:
    """A tensor on the way through the network."""

    group: Group
    tiles: tuple[Tile, ...]
    bars: tuple[Bar, ...]
    """The largest entries, where each channel is one number; then there are no tiles."""
    shape: str
    zeros: float
    """Share of zeros, 0..1."""
    range: str
    lowest: str
    """`below 0`, where the darkest values of its maps may be taken for zero and are not."""
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
    steps: tuple[Step, ...]
    open: bool
    """Whether it is unfolded when the page opens."""

    @property
    def preview(self) -> Step | None:
        """The last of its layers that has maps, which stands for it while it is folded."""
        with_maps = [step for step in self.steps if step.tiles]
        return with_maps[-1] if with_maps else None

    @property
    def backward(self) -> bool:
        """Whether its tensors are gradients."""
        return self.steps[0].backward

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
    """The stages of a network with what they make of an image.

    Args:
        stats: those of the image, by the pictures' ids.
        over: totals over all images for each of the page's groups, whose zeros, range and findings
            are then told instead of the image's own.
    """
    totals = over or [_alone(group, stats) for group in page.groups]
    steps = [
        _step(group, stats[group.figures[0].picture.id], own, page.guesses)
        for group, own in zip(page.groups, totals, strict=True)
    ]
    stages: list[Stage] = []
    shown = 0
    for number, (title, own) in enumerate(_stages(steps), 1):
        shown += len(own)
        stages.append(Stage(number, title, tuple(own), number == 1 or shown <= _OPEN))
    return stages


def _alone(group: Group, stats: Mapping[str, Floats]) -> ChannelTotals:
    figure, totals = group.figures[0], ChannelTotals()
    totals.add(figure.row, stats[figure.picture.id])
    return totals


def _step(group: Group, stats: Floats, totals: ChannelTotals, guesses: Sequence[Class]) -> Step:
    row = group.figures[0].row
    single = is_numbers(row)
    low, high = totals.range
    return Step(
        group,
        () if single else tuple(_tile(row, channel, stats) for channel in telling(row, stats)),
        tuple(bars(row, stats, guesses)) if single else (),
        _shape(row),
        totals.zero_share,
        words.span(low, high),
        "" if single else lowest(row, low),
        totals.found,
    )


def _shape(row: CaptureRow) -> str:
    if row.constant is not None:
        return f"{row.maps} × {by(row.constant[1:])}, each constant"
    if is_numbers(row):
        return f"{row.maps} values"
    size = by(row.plan.map_size)
    return f"{row.maps} × {size}" if row.side == 1 else f"{row.maps} × {row.side} × {size}"


def is_numbers(row: CaptureRow) -> bool:
    """Whether each channel is one number, which bars tell better than grey squares."""
    single = row.layout == "vector" or row.plan.map_size == (1, 1)
    return single and row.reduce is None and row.side == 1


def telling(row: CaptureRow, stats: Floats, count: int = STRIP) -> list[int | None]:
    """Drawn channels whose maps vary much and differ from one another: the one of the largest
    deviation, then always the one whose numbers are farthest from those that are taken, out of the
    half that varies most. Where none varies, those of the largest magnitude. What is not finite
    comes last."""
    if row.reduce is not None:
        return [None]
    drawn = np.asarray(row.drawn)
    own = np.nan_to_num(stats[drawn].astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    strength = own[:, 3] if own[:, 3].max() > 0 else abs(own[:, 2])
    strength[stats[drawn, 5] > 0] = -1
    order = np.argsort(-strength, kind="stable")
    half = order[: max(count, len(order) // 2)]
    vary = half[strength[half] > 0]
    apart = vary[_apart(_shape_of_values(own[vary]), count)]
    rest = half[strength[half] <= 0]
    chosen: list[int | None] = drawn[np.concatenate([apart, rest])[:count]].tolist()
    return chosen


def _shape_of_values(rows: np.ndarray) -> np.ndarray:
    """How a map's values lie, whatever their unit: [maps, 3], each column about 0..1."""
    low, high, mean, std, zeros = rows[:, :5].T
    span = np.where(high > low, high - low, 1.0)
    return np.stack([(mean - low) / span, 2 * std / span, zeros], axis=1).clip(0, 1)


def _apart(points: np.ndarray, count: int) -> list[int]:
    """The first point, then always the one that is farthest from all that are taken."""
    taken, nearest = [0] if len(points) else [], np.full(len(points), np.inf)
    for _ in range(min(count, len(points)) - 1):
        nearest = np.minimum(nearest, ((points - points[taken[-1]]) ** 2).sum(1))
        nearest[taken] = -1
        taken.append(int(nearest.argmax()))
    return taken


def tile_of(row: CaptureRow, channel: int | None) -> Tile:
    """Where the first tile of a drawn channel is."""
    slot = 0 if channel is None else row.drawn.index(channel) * row.side
    return Tile(channel, row.plan.box(slot), (row.plan.width, row.plan.height))


def _tile(row: CaptureRow, channel: int | None, stats: Floats) -> Tile:
    tile = tile_of(row, channel)
    if channel is None:
        return tile
    low, high = map(float, stats[channel, :2])
    return replace(tile, range=words.span(low, high))


def bars(row: CaptureRow, stats: Floats, guesses: Sequence[Class], count: int = _TOP) -> list[Bar]:
    """The largest entries of a vector, of a gradient those of the largest magnitude; with the names
    of classes where the vector is the model's output: its values are the scores of the
    prediction."""
    values = np.nan_to_num(stats[:, 2].astype(np.float64), posinf=np.nan, neginf=np.nan)
    values = np.where(stats[:, 5] > 0, -np.inf, values)
    order = np.where(np.isfinite(values), abs(values), -np.inf) if is_gradient(row.kind) else values
    top = np.argsort(-order, kind="stable")[:count]
    top = top[np.isfinite(values[top])]
    if not len(top):
        return []
    names = _class_names(stats, guesses)
    low, high = min(0.0, float(values[top].min())), max(0.0, float(values[top].max()))
    unit = 100 / ((high - low) or 1)
    return [
        Bar(
            int(channel),
            names.get(int(channel), ""),
            words.number(float(value)),
            round((min(value, 0) - low) * unit, 2),
            round(abs(value) * unit, 2),
        )
        for channel, value in zip(top, values[top], strict=True)
    ]


def _class_names(stats: Floats, guesses: Sequence[Class]) -> dict[int, str]:
    def is_score(guess: Class) -> bool:
        inside = guess.index < len(stats)
        return inside and bool(np.isclose(stats[guess.index, 2], guess.score, rtol=1e-4, atol=1e-5))

    if not guesses or not all(map(is_score, guesses)):
        return {}
    return {guess.index: guess.name or f"class {guess.index}" for guess in guesses}


def _stages(steps: Sequence[Step]) -> list[tuple[str, list[Step]]]:
    """Those of the forward pass, then those of the gradients, which come from the output back."""
    passes = groupby(steps, key=lambda step: step.backward)
    return [
        (f"Gradients, {title}" if backward else title, own)
        for backward, steps_of in passes
        for title, own in _stages_of_pass(list(steps_of))
    ]


def _stages_of_pass(steps: Sequence[Step]) -> list[tuple[str, list[Step]]]:
    """By resolution; by the outermost module where there is one resolution, or they take turns."""
    runs = _runs(steps, _resolutions(steps))
    several = len({title for title, _ in runs} - {_VECTORS}) > 1
    if (several and len(runs) <= _MOST_STAGES) or len(steps) <= _FEW:
        return runs
    most = min(max(_MOST_STAGES, len(steps) // 4), len(steps) // 2)
    for depth in range(1, _DEEPEST + 1):
        names = [".".join(step.group.layer.split(".")[:depth]) for step in steps]
        by_name = _runs(steps, names)
        if 2 < len(by_name) <= most:
            return by_name
    return runs


def _runs(steps: Sequence[Step], titles: Sequence[str]) -> list[tuple[str, list[Step]]]:
    pairs = groupby(zip(titles, steps, strict=True), key=lambda pair: pair[0])
    return [(title, [step for _, step in own]) for title, own in pairs]


def _resolutions(steps: Sequence[Step]) -> list[str]:
    """`28×28`. Single numbers between maps, as in squeeze-and-excitation, are of the stage in which
    they stand; those behind the last maps are a stage of their own."""
    own = [_resolution(step.figure.row) for step in steps]
    last = max((n for n, size in enumerate(own) if size), default=-1)
    here = next((size for size in own if size), "")
    found = []
    for n, size in enumerate(own):
        here = size or (_VECTORS if n > last else here)
        found.append(here)
    return found


def _resolution(row: CaptureRow) -> str:
    """`28×28`; empty for single numbers."""
    if row.constant is not None:
        return by(row.constant[1:])
    return "" if is_numbers(row) else by(row.plan.map_size)
