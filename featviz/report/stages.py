"""The network as a picture: what its layers make of an image, in the order in which
they ran.

stage 56×56     [previews: maps of its last layer]     <- folded
  step conv1      [map] [map] [map] ...                <- a tensor
  step relu       [map] [map] [map] ...
stage 28×28     ...
stage Vectors   bars of the largest numbers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from featviz.drawing.channels import farthest_first
from featviz.records import BACKWARD, ClassScore, Floats
from featviz.report.descriptions import number, span
from featviz.report.figures import Figure, Group, ReportPage
from featviz.report.totals import ChannelFindings, ChannelTotals
from featviz.rundir.schema import Capture
from featviz.text import by, counted

STRIP = 10
"""Maps of a layer in its strip: as many as a screen shows 96 pixels wide."""
_WIDEST = 3.0
_NARROWEST = 0.5
"""Width by height of a map in a strip. A wider or narrower one is squeezed by a class of
CSS, in which these numbers stand, too."""
_BARS = 10
"""Bars of a tensor of single numbers."""
_FEW = 12
"""Steps up to which resolutions divide a network, even if it has one alone."""
_MAX_STAGES = 16
"""Stages up to which resolutions divide a network. With more of them they take turns."""
_OPEN = 60
"""Steps whose grids are unfolded when the page of an image opens."""
_PREVIEWS = 5
"""Strips of maps that folded stages show together; if there are more stages, one each."""
_VECTORS = "Vectors"
"""The title of the stage behind the last maps."""


class MapTile(NamedTuple):
    """A map in its grid."""

    channel: int | None
    """None where all channels became one tile."""
    box: tuple[int, int, int, int]
    """Left, top, width and height in pixels of the picture."""
    shape: str
    """`wide` or `tall` where it is squeezed: a class of CSS."""
    range: str


class Bar(NamedTuple):
    """A channel that is a single number."""

    channel: int
    name: str
    """The number of the channel; in the model's output the class that it stands for."""
    value: str
    start: float
    """Where the bar begins, 0..100, as a share of the width for it."""
    length: float
    """Of the bar, 0..100."""


@dataclass(frozen=True)
class NetworkStep:
    """A tensor of the network: some of its maps as tiles, or its largest numbers as bars
    where its channels are single numbers."""

    group: Group
    figure: Figure
    is_backward: bool
    size: str
    """`28×28`; empty for single numbers."""
    shape: str
    """`64 × 28×28`; with slices `64 × 8 × 28×28`; `1,000 values`."""
    findings: ChannelFindings
    zeros: float
    """Share of zeros, 0..1."""
    range: str
    tiles: list[MapTile]
    bars: list[Bar]


@dataclass(frozen=True)
class NetworkStage:
    """Layers that belong together."""

    number: int
    title: str
    steps: list[NetworkStep]
    is_open: bool
    previews: list[NetworkStep]
    """Steps that have maps, evenly spread, and the last of these; none if there are none.
    """

    @property
    def layer_count(self) -> int:
        """How many layers it has; a layer may have several tensors."""
        return len({step.group.page for step in self.steps})

    @property
    def span(self) -> str:
        """`conv1 to relu.call1`."""
        first = self.steps[0].group.name
        last = self.steps[-1].group.name
        return first if first == last else f"{first} to {last}"


def network(
    page: ReportPage,
    stats: Mapping[str, Floats],
    over: Sequence[ChannelTotals] | None = None,
) -> list[NetworkStage]:
    """The stages of a network: forward, then the gradients from the output back.

    Args:
        page: of an image, whose maps are shown.
        stats: statistics of the image, [channels, 6] by id of the picture.
        over: totals for each of `page.groups` over all images, for zeros, range and
            findings; None for those of this image alone.
    """
    steps = []
    for n, group in enumerate(page.groups):
        figure = group.figures[0]
        image_stats = stats[figure.picture.id]
        if over is None:
            totals = ChannelTotals()
            totals.add(figure.row, image_stats, group.zeroed)
        else:
            totals = over[n]
        steps.append(_step(group, image_stats, totals, page.image.manifest.prediction))
    stages: list[NetworkStage] = []
    for is_backward, direction in groupby(steps, key=lambda step: step.is_backward):
        direction_steps = list(direction)
        titled = zip(_titles(direction_steps), direction_steps, strict=True)
        grouped = [
            (title, [step for _, step in titled_steps])
            for title, titled_steps in groupby(titled, key=itemgetter(0))
        ]
        with_maps = sum(any(step.tiles for step in steps) for _, steps in grouped)
        # of a transformer, whose blocks are one stage, one layer would be shown
        previews = max(1, _PREVIEWS // max(1, with_maps))
        for title, stage_steps in grouped:
            stages.append(_stage(stages, stage_steps, title, is_backward, previews))
    return stages


def _step(
    group: Group, stats: Floats, totals: ChannelTotals, prediction: Sequence[ClassScore]
) -> NetworkStep:
    """A tensor of the network.

    Args:
        group: of the image; its first figure, that of this run, is shown.
        stats: [channels, 6] of this image.
        totals: for findings, zeros and range.
        prediction: of this image, the likeliest class first; may be empty.
    """
    figure = group.figures[0]
    row = figure.row
    tiles = []
    bars = []
    size = by(row.plan.map_size)
    if is_numbers(row):
        bars = largest_bars(row, stats, prediction)
        size = ""
        shape = counted(row.maps, "value")
    else:
        tiles = [_map_tile(row, channel, stats) for channel in most_varied(row, stats)]
        slices = [str(row.slice_count)] if row.slice_count > 1 else []
        shape = " × ".join([str(row.maps), *slices, size])
    # maps of one value each, as behind a global pooling, are drawn as stripes; they
    # belong to the stage of the resolution that they stand for
    if row.constant is not None:
        size = by(row.constant[1:])
        shape = f"{row.maps} × {size}, each constant"
    return NetworkStep(
        group=group,
        figure=figure,
        is_backward=row.kind in BACKWARD,
        size=size,
        shape=shape,
        findings=totals.findings,
        zeros=totals.zero_share,
        range=span(*totals.range),
        tiles=tiles,
        bars=bars,
    )


def _stage(
    before: Sequence[NetworkStage],
    steps: list[NetworkStep],
    title: str,
    is_backward: bool,
    previews: int,
) -> NetworkStage:
    """The next stage.

    Args:
        before: the stages before it.
        steps: of this one, at least one.
        title: its resolution or its module.
        is_backward: whether its steps are of gradients.
        previews: of its steps, at most.
    """
    # A stage is folded or open as a whole; the first is open even if it is a large one.
    count = sum(len(stage.steps) for stage in before) + len(steps)
    with_maps = [step for step in steps if step.tiles]
    # not all of them: to unfold a stage is to see more
    shown = min(previews, max(1, len(with_maps) // 2), len(with_maps))
    ends = [number * len(with_maps) // shown for number in range(1, shown + 1)]
    return NetworkStage(
        number=len(before) + 1,
        title=f"Gradients, {title}" if is_backward else title,
        steps=steps,
        is_open=not before or count <= _OPEN,
        previews=[with_maps[end - 1] for end in ends],
    )


def _titles(steps: Sequence[NetworkStep]) -> list[str]:
    """The title of the stage of each step; steps in a row with one title are a stage. It is
    the step's resolution, `28×28`. Where all steps have one resolution, or resolutions
    take turns, it is a module that contains the step, if some depth of modules divides
    the network well.

    Args:
        steps: all forward or all backward, in the order in which they ran.
    """
    # The stages of a convolutional network are its resolutions. A transformer has one,
    # and a U-Net or a feature pyramid goes back and forth.
    sizes = _resolutions(steps)
    has_several = len({*sizes} - {_VECTORS}) > 1
    if len(steps) <= _FEW or (has_several and _runs(sizes) <= _MAX_STAGES):
        return sizes
    # On average a stage is to have at least two steps, in a deep network four.
    max_stages = min(max(_MAX_STAGES, len(steps) // 4), len(steps) // 2)
    # `blocks` is one module for all of a transformer, `blocks.3` is a stage
    for depth in range(1, 5):
        modules = [".".join(step.group.layer.split(".")[:depth]) for step in steps]
        if 2 < _runs(modules) <= max_stages:
            return modules
    return sizes


def _runs(titles: Sequence[str]) -> int:
    """How many stages these titles make: each run of equal ones counts once."""
    return len([*groupby(titles)])


def _resolutions(steps: Sequence[NetworkStep]) -> list[str]:
    """The resolution of each step, `28×28`. Single numbers have that of the maps before
    them, at the beginning of the first maps; behind the last maps it is `Vectors`."""
    with_size = [n for n, step in enumerate(steps) if step.size]
    last = with_size[-1] if with_size else -1
    current = steps[with_size[0]].size if with_size else ""
    sizes = []
    for n, step in enumerate(steps):
        if step.size:
            current = step.size
        elif n > last:
            current = _VECTORS
        sizes.append(current)
    return sizes


def is_numbers(row: Capture) -> bool:
    """Whether each channel is a single number, which a bar shows better than a grey
    square."""
    is_single = row.layout == "vector" or row.plan.map_size == (1, 1)
    return is_single and row.reduce is None and row.slice_count == 1


def most_varied(row: Capture, stats: Floats, count: int = STRIP) -> list[int | None]:
    """Choose drawn channels whose maps vary much and differ from one another.

    Out of the half with the largest standard deviations, the first is the one with the
    largest; then follows always the one that differs most from those that are chosen.
    Where no finite map varies, it is the absolute means that count. Maps with values that
    are not finite come last.

    Args:
        row: which channels are drawn.
        stats: [channels, 6] of all channels.
        count: how many are chosen at most.

    Returns:
        Channels, the most telling first; `[None]` where all of them are one tile.
    """
    if row.reduce is not None:
        return [None]
    drawn = np.asarray(row.drawn)
    numbers = np.nan_to_num(
        stats[drawn].astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0
    )
    low, high, mean, std, zeros = numbers[:, :5].T
    # Maps are alike if their mean and deviation, as shares of the range, and their shares
    # of zeros are. A deviation is half the range at most, so it counts twice.
    width = np.where(high > low, high - low, 1.0)
    points = np.stack([(mean - low) / width, 2 * std / width, zeros], axis=1).clip(0, 1)
    # What is not finite has no deviation to compare. Without any variation the scale of
    # the maps is all that tells them apart.
    is_finite = stats[drawn, 5] == 0
    strength = std.copy() if std[is_finite].any() else abs(mean)
    strength[~is_finite] = -1
    order = np.argsort(-strength, kind="stable")
    # The half that varies most, or more to have `count` of them. The one that differs most
    # of all channels may vary hardly at all.
    candidates = order[: max(count, len(order) // 2)]
    comparable = candidates[strength[candidates] > 0]
    chosen = comparable[farthest_first(points[comparable], count)]
    last_resort = candidates[strength[candidates] <= 0]
    order = np.concatenate([chosen, last_resort])
    channels: list[int | None] = drawn[order[:count]].tolist()
    return channels


def _map_tile(row: Capture, channel: int | None, stats: Floats) -> MapTile:
    """The first tile of a drawn channel.

    Args:
        channel: None for the one tile of all channels.
        stats: [channels, 6] of all channels.
    """
    slot = 0 if channel is None else row.drawn.index(channel) * row.slice_count
    box = row.plan.box(slot)
    _, _, width, height = box
    shape = ""
    if width > height * _WIDEST:
        shape = "wide"
    elif width < height * _NARROWEST:
        shape = "tall"
    range = ""
    if channel is not None:
        range = span(float(stats[channel, 0]), float(stats[channel, 1]))
    return MapTile(channel, box, shape, range)


def largest_bars(
    row: Capture, stats: Floats, prediction: Sequence[ClassScore]
) -> list[Bar]:
    """The largest numbers of a tensor whose channels are single numbers; of a gradient
    the largest magnitudes. Numbers that are not finite are left out.

    Args:
        row: the tensor.
        stats: [channels, 6] of it.
        prediction: of the image; where the tensor is the model's output, its bars have
            the names of these classes.
    """
    # the mean of a single number is that number
    values = stats[:, 2].astype(np.float64)
    values[stats[:, 5] > 0] = np.nan
    # NaN is sorted to the end, and left out
    order = np.argsort(-abs(values) if row.kind in BACKWARD else -values, kind="stable")
    top = order[np.isfinite(values[order])][:_BARS]
    class_names = _class_names(stats, prediction)
    unnamed = "class " if class_names else ""
    # bars begin at zero, which always lies between the ends of their axis
    low = float(values[top].min(initial=0.0))
    high = float(values[top].max(initial=0.0))
    unit = 100 / ((high - low) or 1)
    bars = []
    for channel, value in zip(top.tolist(), values[top].tolist(), strict=True):
        bars.append(
            Bar(
                channel=channel,
                name=class_names.get(channel, f"{unnamed}{channel}"),
                value=number(value),
                start=round((min(value, 0) - low) * unit, 2),
                length=round(abs(value) * unit, 2),
            )
        )
    return bars


def _class_names(stats: Floats, prediction: Sequence[ClassScore]) -> dict[int, str]:
    """The names of classes by channel, if a tensor is the model's output; else empty."""
    # No record says which tensor is the output. One that has all scores of the prediction
    # at their places can be no other.
    for guess in prediction:
        if guess.index >= len(stats):
            return {}
        if not np.isclose(stats[guess.index, 2], guess.score, rtol=1e-4, atol=1e-5):
            return {}
    return {guess.index: guess.title for guess in prediction}
