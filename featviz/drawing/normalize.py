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
from featviz.records import CLASS_MAPS, KINDS, SIGNED
from featviz.text import did_you_mean


@dataclass(frozen=True)
class ScaleMode:
    """One mode of `--normalize`."""

    spelling: str
    """How a user types it: `map`, `range:LO,HI`."""
    description: str
    """Text for help."""
    marks: tuple[tuple[int, str], ...] = ()
    """Entries of a picture's legend: grey levels 0..255, and what maps or values of this
    grey are."""
    example: str = ""
    """For the hint of an error; empty for a mode without numbers."""
    within: tuple[float, float] = (-math.inf, math.inf)
    """The smallest and the largest number that the mode takes."""
    shared: bool = True
    """Whether all maps of a layer have the same limits in one image."""
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
            marks=(
                (0, "crossed out: zero everywhere"),
                (128, "one line across: constant"),
            ),
            shared=False,
            clips=False,
        ),
        ScaleMode(
            "layer",
            "all maps of a layer from their smallest to their largest value",
            clips=False,
        ),
        ScaleMode(
            "positive",
            "all maps of a layer from zero to their largest value",
            ((0, "zero or less"), (255, "max")),
        ),
        ScaleMode(
            "none",
            "values are taken as 0..1",
            fixed=True,
        ),
        ScaleMode(
            "range:LO,HI",
            "from LO to HI",
            example="range:0,6",
            fixed=True,
        ),
        ScaleMode(
            "symmetric",
            "zero in the middle",
        ),
        ScaleMode(
            "percentile:LO,HI",
            "from one percentile of a layer's values to another",
            example="percentile:1,99",
            within=(0, 100),
        ),
        ScaleMode(
            "symmetric-percentile:P",
            "zero in the middle, the ends at a percentile of the absolute values but"
            " zeros",
            example="symmetric-percentile:99",
            within=(0, 100),
        ),
    )
}
"""All modes, by name. `values.limits` has their arithmetic; legends, help texts and
messages read this table."""


class Scale(NamedTuple):
    """A mode with its numbers."""

    mode: str
    """A name of MODES."""
    numbers: tuple[float, ...] = ()
    """(0, 6) for `range:0,6`, (1, 99) for `percentile:1,99`."""


def parse_scale(text: str, kind: str = "output", reduce: str | None = None) -> Scale:
    """Read a value of `--normalize`.

    Args:
        text: a mode with its numbers, such as `map` or `range:0,6`; or `auto`. `auto`
            puts zero in the middle for gradients and for reductions whose values have a
            sign; it is `positive` for other class activation maps, and else `map`.
        kind: kind of the capture; or `saliency` or `kernel`. Only `auto` depends on it.
        reduce: how all channels become one map; None if they do not. Only `auto` depends
            on it.

    Raises:
        UsageError: there is no such mode; or its numbers are not finite, do not rise, or
            lie outside its bounds.
    """
    if text == "auto":
        text = _auto(kind, reduce)
    # a colon stands in a mode with numbers, and in no other
    name, _, tail = text.partition(":")
    mode = MODES.get(name)
    if mode is None or bool(tail) != (":" in mode.spelling):
        spellings = ["auto", *(mode.spelling for mode in MODES.values())]
        raise UsageError(
            f"--normalize {text!r} is no normalization mode",
            did_you_mean(text, spellings, f"give one of {', '.join(spellings)}"),
        )
    # a text that is not numbers leaves (), which `_are_limits` refuses
    numbers: tuple[float, ...] = ()
    with suppress(ValueError):
        numbers = tuple(map(float, tail.split(",")))
    if tail and not _are_limits(numbers, mode):
        expected = mode.spelling
        if len(mode.spelling.split(",")) > 1:
            expected += " with LO below HI"
        low, high = mode.within
        # percentiles have bounds, values have none
        if math.isfinite(high):
            expected += f" from {low:g} to {high:g}"
        message = f"--normalize {text!r}: expected {expected}"
        raise UsageError(message, f"for example {mode.example}")
    return Scale(name, numbers)


def _are_limits(numbers: tuple[float, ...], mode: ScaleMode) -> bool:
    """Whether a mode takes these numbers: there are as many as its spelling has, they are
    finite, rise, and lie within its bounds."""
    low, high = mode.within
    are_within = all(low <= x <= high and math.isfinite(x) for x in numbers)
    # equal ends would make all values one level
    is_rising = sorted(set(numbers)) == list(numbers)
    are_as_many = len(numbers) == len(mode.spelling.split(","))
    return are_within and is_rising and are_as_many


def _auto(kind: str, reduce: str | None) -> str:
    """The spelling for which `auto` stands. The arguments are those of `parse_scale`."""
    if reduce in SIGNED:
        return "symmetric"
    # zero, no evidence, is the dark end of a class activation map
    if reduce in CLASS_MAPS:
        return "positive"
    # saliency and kernels are not kinds of CaptureKind
    if kind in KINDS and KINDS[kind].normalize != "auto":
        return str(KINDS[kind].normalize)
    return "map"


def with_tables(text: str) -> str:
    """Replace `{MODES}`, `{LAYOUTS}` and `{WEIGHTS}` in a help text of `featviz.options` by
    the names in these tables, which the folder `options` may not import."""
    modes = [f"{mode.spelling}: {mode.description}" for mode in MODES.values()]
    layouts = [f"{layout.name} {layout.shape}" for layout in CHOICES]
    text = text.replace("{MODES}", "; ".join(modes))
    text = text.replace("{LAYOUTS}", ", ".join(layouts))
    return text.replace("{WEIGHTS}", WEIGHTS_HELP)
