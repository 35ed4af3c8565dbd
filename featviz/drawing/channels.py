"""What `--channels` chooses: the channels that are named, or the first of a ranking."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from featviz.errors import LayoutError
from featviz.options.values import channel_choice
from featviz.records import Floats
from featviz.text import counted, layer_named, listed, quoted, ranges

log = logging.getLogger(__name__)


def choose_channels(
    text: str, candidates: Sequence[int], means: Floats, deviations: Floats
) -> list[int]:
    """Choose channels of a tensor.

    Args:
        text: a value of `--channels`, such as `3,12-20` or `top:8`.
        candidates: the channels to choose from, in rising order.
        means: mean of each channel of the tensor, [C]; `top` ranks by these.
        deviations: standard deviation of each channel, [C], without the border that
            padding makes; `varied` ranks by these.

    Returns:
        If the text names channels: those of them that are candidates, in the order of the
        text. For `top` and `varied`: the highest first; of equal channels the earlier one
        first, channels without a finite value last. For `first` and `spread`: in the
        order of `candidates`.

    Raises:
        LayoutError: the text names channels, and none of them is a candidate.
    """
    choice = channel_choice(text)
    if not choice.rule:
        present = set(candidates)
        chosen = [number for number in choice.numbers if number in present]
        if not chosen:
            raise LayoutError(f"has {_count_and_ranges(candidates)}, none of {text}")
        return chosen
    count = min(choice.most, len(candidates))
    if choice.rule == "first":
        return list(candidates[:count])
    if choice.rule == "spread":
        positions = np.linspace(0, len(candidates) - 1, count).round().astype(int)
        return [candidates[position] for position in np.unique(positions)]
    keys = means if choice.rule == "top" else deviations
    # numpy sorts NaN last: a channel without a finite value
    order = np.argsort(-keys[list(candidates)], kind="stable")
    return [candidates[position] for position in order[:count]]


def _count_and_ranges(channels: Collection[int]) -> str:
    """Channels as a text for people: `4 channels (0-3)`."""
    return f"{counted(len(channels), 'channel')} ({ranges(channels, 3)})"


def warn_of_missing(
    text: str | None, candidates: Mapping[str, Collection[int]]
) -> None:
    """Warn the user if a layer lacks some of the channels that are named. If it lacks all
    of them, there is no warning here: the layer is skipped, and the reason is logged.

    Args:
        text: a value of `--channels`; None names no channels.
        candidates: the channels of each layer, by the layer's label.
    """
    numbers = channel_choice(text).numbers if text is not None else ()
    lines = []
    for label, present in candidates.items():
        lacking = [number for number in numbers if number not in present]
        if lacking and len(lacking) < len(numbers):
            name = layer_named(quoted(label))
            missing = ranges(lacking, 3)
            lines.append(f"{name} has {_count_and_ranges(present)}, not {missing}")
    if lines:
        log.warning("--channels %s: %s", text, listed(lines, 3, "; "))


def count_chosen(text: str | None, channels: int) -> int:
    """How many channels a value of `--channels` chooses in a layer.

    Args:
        text: the value; None chooses all.
        channels: how many channels the layer has.
    """
    if text is None:
        return channels
    choice = channel_choice(text)
    if choice.rule:
        return min(choice.most, channels)
    return sum(number < channels for number in choice.numbers)


def farthest_first(points: Floats, count: int) -> list[int]:
    """Choose points: the first one, then each time the point farthest from all that are
    chosen.

    Args:
        points: [N, D]; may be empty.
        count: how many points are chosen, if there are so many.

    Returns:
        The indices of the points, in the order of choice.
    """
    if not len(points):
        return []
    # `nearest` has the distance of each point to the nearest chosen one. A new chosen
    # point can only lower it, so each step compares with this one alone. -1 keeps a
    # point from being chosen twice.
    chosen = [0]
    nearest = np.full(len(points), np.inf)
    while len(chosen) < min(count, len(points)):
        distance = ((points - points[chosen[-1]]) ** 2).sum(1)
        nearest = np.minimum(nearest, distance)
        nearest[chosen] = -1
        chosen.append(int(nearest.argmax()))
    return chosen
