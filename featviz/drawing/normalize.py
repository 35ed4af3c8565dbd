"""The scales of `--normalize`: which values of a feature map are drawn darkest and
brightest."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from featviz.errors import UsageError
from featviz.layout.layouts import CHOICES
from featviz.models.sources import WEIGHTS_HELP
from featviz.records import KINDS, SIGNED


@dataclass(frozen=True)
class ScaleMode:
    """One mode of `--normalize`."""

    spelling: str
    """`map`, `range:LO,HI`."""
    words: str
    legend: tuple[tuple[int, str], ...]
    """Grey levels 0..255, and what they stand for."""
    over: tuple[tuple[int, str], ...] | None = None
    """The legend of maps that lie over the input, where it is another one."""
    example: str = ""
    within: tuple[float, float] = (-math.inf, math.inf)
    shared: bool = True
    """Whether all maps of a layer have the same limits."""
    clips: bool = True
    """Whether values may lie outside the limits."""
    fixed: bool = False
    """Whether the limits are the same for all layers and images."""


MODES = {
    mode.spelling.partition(":")[0]: mode
    for mode in (
        ScaleMode(
            "map",
            "each map from its smallest to its largest value",
            ((0, "crossed out: zero everywhere"), (128, "one line across: constant")),
            over=(
                (0, "over the input: min of each map"),
                (255, "over the input: max of each map"),
            ),
            shared=False,
            clips=False,
        ),
        ScaleMode(
            "layer",
            "all maps of a layer from their smallest to their largest value",
            ((0, "one scale for all maps of an image: min"), (255, "max")),
            clips=False,
        ),
        ScaleMode(
            "none",
            "values are taken as 0..1",
            ((0, "0 or less"), (255, "1 or more")),
            fixed=True,
        ),
        ScaleMode(
            "range:LO,HI",
            "from LO to HI",
            ((0, "the lower limit or less"), (255, "the upper limit or more")),
            example="range:0,6",
            fixed=True,
        ),
        ScaleMode(
            "symmetric",
            "zero in the middle",
            ((0, "most negative"), (128, "zero"), (255, "most positive")),
        ),
        ScaleMode(
            "percentile:LO,HI",
            "from one percentile of a layer's values to another",
            (
                (0, "the lower percentile or less"),
                (255, "the upper percentile or more"),
            ),
            example="percentile:1,99",
            within=(0, 100),
        ),
        ScaleMode(
            "symmetric-percentile:P",
            "zero in the middle, the ends at a percentile of the absolute values but"
            " zeros",
            (
                (0, "most negative, from the percentile on"),
                (128, "zero"),
                (255, "most positive, from the percentile on"),
            ),
            example="symmetric-percentile:99",
            within=(0, 100),
        ),
    )
}
"""All scales, whose arithmetic is `values.limits`; legends, help texts and messages
read this."""


class Scale(NamedTuple):
    """A mode with its numbers."""

    mode: str
    """A name of MODES."""
    numbers: tuple[float, ...] = ()
    """Of `range:0,6` (0, 6), of `percentile:1,99` (1, 99)."""


def parse_scale(text: str, kind: str = "output", reduce: str | None = None) -> Scale:
    """Read `map`, `range:LO,HI` or another mode's spelling. `auto` is `map`, and for
    gradients and reductions whose values have a sign a scale with zero in the middle.

    Args:
        kind: of the capture, for `auto`.
        reduce: how channels become one, for `auto`.
    """
    if text == "auto":
        text = _auto(kind, reduce)
    name, _, tail = text.partition(":")
    mode = MODES.get(name)
    if mode is None or bool(tail) != (":" in mode.spelling):
        spellings = ", ".join(["auto", *(mode.spelling for mode in MODES.values())])
        raise UsageError(
            f"--normalize {text!r} is no normalization mode", f"give one of {spellings}"
        )
    if not tail:
        return Scale(name)
    count = len(mode.spelling.split(","))
    numbers: tuple[float, ...] = ()
    with suppress(ValueError):
        numbers = tuple(map(float, tail.split(",")))
    low, high = mode.within
    inside = all(math.isfinite(number) and low <= number <= high for number in numbers)
    if len(numbers) != count or not inside or sorted(set(numbers)) != list(numbers):
        rising = " with LO below HI" if count > 1 else ""
        bounds = f" from {low:g} to {high:g}" if math.isfinite(high) else ""
        message = f"--normalize {text!r}: expected {mode.spelling}{rising}{bounds}"
        raise UsageError(message, f"for example {mode.example}")
    return Scale(name, numbers)


def _auto(kind: str, reduce: str | None) -> str:
    """The spelling that `auto` stands for."""
    if reduce in SIGNED:
        return "symmetric"
    if kind in KINDS and KINDS[kind].normalize != "auto":
        return str(KINDS[kind].normalize)
    return "map"


def in_full(text: str) -> str:
    """A help text of `featviz.options`, with the tables that stand above it in the
    house."""
    tables = {
        "{MODES}": "; ".join(
            f"{mode.spelling}: {mode.words}" for mode in MODES.values()
        ),
        "{LAYOUTS}": ", ".join(f"{layout.name} {layout.shape}" for layout in CHOICES),
        "{WEIGHTS}": WEIGHTS_HELP,
    }
    for mark, table in tables.items():
        text = text.replace(mark, table)
    return text
