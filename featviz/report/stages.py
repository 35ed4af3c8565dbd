"""The picture of a network on a page: maps of its layers for an image, in the order in
which the layers ran.

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
from featviz.report.descriptions import number, reduction, span
from featviz.report.figures import Figure, Group, ReportPage
from featviz.report.totals import ChannelFindings, ChannelTotals
from featviz.rundir.schema import Capture
from featviz.text import by, counted

STRIP = 10
"""The most maps in the strip of a layer: a screen has room for ten of 96 pixels."""
_WIDEST = 3.0
_NARROWEST = 0.5
"""The largest and the smallest ratio of width to height of a map in a strip. Other maps
are squeezed by a class of CSS, which has the same two numbers."""
_BARS = 10
"""The most bars of a tensor of single numbers."""
_FEW = 12
"""A network of at most this many steps is always divided by resolution, even if all its
maps have one resolution."""
_MAX_STAGES = 16
"""The most stages into which resolutions may divide a network. More of them mean that the
resolution goes up and down."""
_OPEN = 60
"""The most steps whose grids are unfolded when the page of an image opens."""
_PREVIEWS = 5
"""About how many strips all folded stages of one direction show in sum; each stage shows
at least one."""
_VECTORS = "Vectors"
"""The title of the stage behind the last maps."""


class MapTile(NamedTuple):
    """A tile of a grid that is shown in a strip."""

    channel: int | None
    """The channel of the map; None for the one tile of all channels."""
    box: tuple[int, int, int, int]
    """Left, top, width and height in pixels of the picture."""
    shape: str
    """The class of CSS that squeezes the tile, `wide` or `tall`; empty for none."""
    range: str
    """The smallest and the largest value of the channel, as text; empty for the one tile
    of all channels."""


class Bar(NamedTuple):
    """A channel that is a single number."""

    channel: int
    name: str
    """The number of the channel; in the model's output the class that it stands for."""
    value: str
    start: float
    """Where the bar begins, in percent of the width of the axis."""
    length: float
    """The length of the bar, in percent of the width of the axis."""


@dataclass(frozen=True)
class NetworkStep:
    """A tensor of the network, with some of its maps as tiles. If its channels are single
    numbers, it has bars of the largest ones instead."""

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
    """The smallest and the largest value, as text."""
    tiles: list[MapTile]
    bars: list[Bar]


@dataclass(frozen=True)
class NetworkStage:
    """Successive steps under one title: a resolution or a module."""

    number: int
    """The number of the stage on the page, from 1."""
    title: str
    steps: list[NetworkStep]
    is_open: bool
    """Whether the stage is unfolded when the page opens."""
    previews: list[NetworkStep]
    """The steps that are shown while the stage is folded: evenly spread ones of those
    with maps, always the last of these; empty if no step has maps."""

    @property
    def is_reduced(self) -> bool:
        """Whether each step is one map of all channels."""
        return _are_reduced(self.steps)

    @property
    def layer_count(self) -> int:
        """How many layers the stage has; a layer may have several steps."""
        return len({step.group.page for step in self.steps})

    @property
    def span(self) -> str:
        """The first and the last step: `conv1 to relu.call1`."""
        first = self.steps[0].group.name
        last = self.steps[-1].group.name
        return first if first == last else f"{first} to {last}"


def network(
    page: ReportPage,
    stats: Mapping[str, Floats],
    over: Sequence[ChannelTotals] | None = None,
) -> list[NetworkStage]:
    """The stages of a network: those of the forward pass, then those of the gradients,
    from the output to the input.

    Args:
        page: the page of the image whose maps are shown.
        stats: the statistics of the image, [channels, 6] by id of the picture.
        over: for each of `page.groups` the totals over all images, from which zeros,
            range and findings are taken; None takes them from this image.
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
        # a network with few stages, such as a transformer, shows several strips of each
        previews = max(1, _PREVIEWS // max(1, with_maps))
        for title, stage_steps in grouped:
            stages.append(_stage(stages, stage_steps, title, is_backward, previews))
    return stages


def _step(
    group: Group, stats: Floats, totals: ChannelTotals, prediction: Sequence[ClassScore]
) -> NetworkStep:
    """The step of a tensor.

    Args:
        group: the figures of the tensor for one image; the first one is shown.
        stats: the statistics [channels, 6] of the tensor for this image.
        totals: the totals that give findings, zeros and range.
        prediction: the prediction for this image, the likeliest class first; may be
            empty.
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
    # Maps of one value each, as behind a global pooling, are drawn as stripes. They get
    # the resolution of the maps, not of the stripes.
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
    """Make the next stage.

    Args:
        before: all stages before this one.
        steps: the steps of this stage, at least one.
        title: the resolution or the module of the stage.
        is_backward: whether the steps are gradients.
        previews: the most previews of the stage.
    """
    # stages are open up to _OPEN steps in sum; the first one is always open
    count = sum(len(stage.steps) for stage in before) + len(steps)
    with_maps = [step for step in steps if step.tiles]
    # at most half of the steps, so that an unfolded stage shows more than a folded one
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
    """The title of the stage of each step; successive steps with one title are a stage.
    Titles are resolutions, `28×28`. But if a large network has only one resolution, or
    resolutions that go up and down, titles are the modules that contain the steps, if
    modules of some depth make a fair number of stages. Steps of one map each have one
    title, `Grad-CAM`.

    Args:
        steps: all steps of the forward pass, or all gradients, in the order in which they
            ran.
    """
    # one map of a layer is small enough to stand beside those of all others
    if _are_reduced(steps):
        title = reduction(steps[0].figure.row)
        return [title[0].upper() + title[1:]] * len(steps)
    # A convolutional network has few resolutions. A transformer has only one, and in a
    # U-Net or a feature pyramid they go up and down.
    sizes = _resolutions(steps)
    has_several = len({*sizes} - {_VECTORS}) > 1
    if len(steps) <= _FEW or (has_several and _runs(sizes) <= _MAX_STAGES):
        return sizes
    # A stage must have at least two steps on average; in a deep network, four.
    max_stages = min(max(_MAX_STAGES, len(steps) // 4), len(steps) // 2)
    # `blocks` is one module for all of a transformer, `blocks.3` is a stage
    for depth in range(1, 5):
        modules = [".".join(step.group.layer.split(".")[:depth]) for step in steps]
        if 2 < _runs(modules) <= max_stages:
            return modules
    return sizes


def _are_reduced(steps: Sequence[NetworkStep]) -> bool:
    """Whether each step is one map of all channels, as --reduce makes it."""
    return all(step.figure.row.reduce is not None for step in steps)


def _runs(titles: Sequence[str]) -> int:
    """How many stages these titles make: successive equal titles count once."""
    return len([*groupby(titles)])


def _resolutions(steps: Sequence[NetworkStep]) -> list[str]:
    """The resolution of each step, `28×28`. A step of single numbers gets the resolution of
    the maps before it; before the first maps, that of the first maps; behind the last
    maps, `Vectors`."""
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
    """Whether each channel of a tensor is a single number: a page shows these as bars."""
    is_single = row.layout == "vector" or row.plan.map_size == (1, 1)
    return is_single and row.reduce is None and row.slice_count == 1


def most_varied(row: Capture, stats: Floats, count: int = STRIP) -> list[int | None]:
    """Choose drawn channels whose maps vary much and differ from one another.

    The channels are chosen from the half with the largest standard deviations. The first
    one has the largest; each next one differs most from the channels chosen before. If no
    finite map varies, absolute means take the place of the deviations. Maps with NaN or
    infinite values come last.

    Args:
        row: the capture, which says which channels are drawn.
        stats: the statistics [channels, 6] of all channels.
        count: how many channels are chosen at most.

    Returns:
        The chosen channels, in this order; `[None]` if all channels are one tile.
    """
    if row.reduce is not None:
        return [None]
    drawn = np.asarray(row.drawn)
    numbers = np.nan_to_num(
        stats[drawn].astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0
    )
    low, high, mean, std, zeros = numbers[:, :5].T
    # Two maps differ by their means and deviations, as shares of the range, and by their
    # shares of zeros. A deviation is at most half the range, so it is doubled.
    width = np.where(high > low, high - low, 1.0)
    points = np.stack([(mean - low) / width, 2 * std / width, zeros], axis=1).clip(0, 1)
    # Maps with NaN or infinite values have no deviation. Constant maps differ only in
    # their means.
    is_finite = stats[drawn, 5] == 0
    strength = std.copy() if std[is_finite].any() else abs(mean)
    strength[~is_finite] = -1
    order = np.argsort(-strength, kind="stable")
    # Only the half that varies most, or `count` channels if these are more: the channel
    # that differs most from the chosen ones may vary hardly at all.
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
        channel: the channel; None for the one tile of all channels.
        stats: the statistics [channels, 6] of all channels.
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
    """The bars of a tensor whose channels are single numbers: those of the largest
    numbers, or of the largest magnitudes of a gradient. NaN and infinite values are left
    out.

    Args:
        row: the capture of the tensor.
        stats: its statistics [channels, 6].
        prediction: the prediction for the image. If the tensor is the model's output, the
            bars of these classes have their names.
    """
    # column 2 is the mean, which for a single number is the number itself
    values = stats[:, 2].astype(np.float64)
    values[stats[:, 5] > 0] = np.nan
    # NaN is sorted to the end, and left out
    order = np.argsort(-abs(values) if row.kind in BACKWARD else -values, kind="stable")
    top = order[np.isfinite(values[order])][:_BARS]
    class_names = _class_names(stats, prediction)
    unnamed = "class " if class_names else ""
    # bars begin at zero, so the axis always contains zero
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
    """The names of the predicted classes by channel, if a tensor is the model's output;
    else empty."""
    # No record says which tensor is the output. It is the one that has the scores of the
    # prediction in the channels of their classes.
    for guess in prediction:
        if guess.index >= len(stats):
            return {}
        if not np.isclose(stats[guess.index, 2], guess.score, rtol=1e-4, atol=1e-5):
            return {}
    return {guess.index: guess.title for guess in prediction}
