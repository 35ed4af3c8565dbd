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
        candidates: the channels that there are to choose from, in rising order.
        means: of each channel of the tensor, [C]; by these `top` ranks.
        deviations: of each channel, [C], without the border that padding makes; by
            these `varied` ranks.

    Returns:
        Channels that are named, in the order of the text and without those that are not
        candidates; those of a ranking, the largest first; others in the order of
        `candidates`. Of equal ones the earlier comes first; those without a finite value
        come last.

    Raises:
        LayoutError: none of the channels that are named is there.
    """
    choice = channel_choice(text)
    if not choice.rule:
        present = set(candidates)
        chosen = [number for number in choice.numbers if number in present]
        if not chosen:
            raise LayoutError(f"has {_described(candidates)}, none of {text}")
        return chosen
    count = min(choice.most, len(candidates))
    if choice.rule == "first":
        return list(candidates[:count])
    if choice.rule == "spread":
        positions = np.linspace(0, len(candidates) - 1, count).round().astype(int)
        return [candidates[position] for position in np.unique(positions)]
    keys = means if choice.rule == "top" else deviations
    # a channel of NaN says nothing, and numpy sorts it last
    order = np.argsort(-keys[list(candidates)], kind="stable")
    return [candidates[position] for position in order[:count]]


def _described(channels: Collection[int]) -> str:
    """Channels for people: `4 channels (0-3)`."""
    return f"{counted(len(channels), 'channel')} ({ranges(channels, 3)})"


def warn_of_lacking(
    text: str | None, candidates: Mapping[str, Collection[int]]
) -> None:
    """Warn of channels that are named, and that a layer lacks. A layer that lacks all of
    them is not warned of: it is skipped, with a reason of its own.

    Args:
        text: a value of `--channels`; None names none.
        candidates: the channels that there are to choose from, by the layer's label.
    """
    numbers = channel_choice(text).numbers if text is not None else ()
    lines = []
    for label, present in candidates.items():
        lacking = [number for number in numbers if number not in present]
        if lacking and len(lacking) < len(numbers):
            name = layer_named(quoted(label))
            missing = ranges(lacking, 3)
            lines.append(f"{name} has {_described(present)}, not {missing}")
    if lines:
        log.warning("--channels %s: %s", text, listed(lines, 3, "; "))


def count_chosen(text: str | None, channels: int) -> int:
    """How many of `channels` channels, from 0 on, a value of `--channels` chooses; None
    chooses all."""
    if text is None:
        return channels
    choice = channel_choice(text)
    if choice.rule:
        return min(choice.most, channels)
    return sum(number < channels for number in choice.numbers)


def farthest_first(points: Floats, count: int) -> list[int]:
    """The first point, then always the one farthest from those that are chosen.

    Args:
        points: [N, D]; may be empty.

    Returns:
        At most `count` indices.
    """
    if not len(points):
        return []
    # The distance of each point to the nearest that is chosen: a new one can only lower
    # it, so that a step takes one comparison a point. -1 keeps a point from being chosen
    # twice, where points are equal.
    chosen = [0]
    nearest = np.full(len(points), np.inf)
    while len(chosen) < min(count, len(points)):
        distance = ((points - points[chosen[-1]]) ** 2).sum(1)
        nearest = np.minimum(nearest, distance)
        nearest[chosen] = -1
        chosen.append(int(nearest.argmax()))
    return chosen
