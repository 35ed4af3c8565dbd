"""Interventions: changes to a layer's output before it is captured.

Reading them needs no torch: what cannot be read is refused before torch is imported.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from featviz.errors import UsageError
from featviz.text import quoted, read_ranges

if TYPE_CHECKING:
    from torch import Generator, Tensor

_CHANNELS = r"(?P<channels>\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"

_FORMS = {
    "ablate": (_CHANNELS, "'layer3.*.relu:5,17' or 'conv1:0-3'"),
    "channel": (rf"channels?{_CHANNELS}\*(?P<numbers>{_NUMBER})", "'conv1:channel 3*2.0'"),
    "clamp": (rf"clamp=(?P<numbers>{_NUMBER},{_NUMBER})", "'relu:clamp=0,6'"),
    "noise": (rf"noise=(?!-)(?P<numbers>{_NUMBER})", "'conv1:noise=0.1'"),
    "grad": (rf"grad\*(?P<numbers>{_NUMBER})", "'layer4:grad*0.5'"),
}
"""The text behind the selectors, without spaces, and an example, by the kind of change. `--ablate`
takes the first, `--edit` the others."""


@dataclass(frozen=True)
class Intervention:
    """A change as it was asked for."""

    option: str
    """For messages: `ablate='conv1:5'`."""
    kind: str
    """A key of _FORMS."""
    selectors: str
    channels: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()


def parse(option: str, text: str) -> Intervention:
    """Read `SELECTORS:5,17` of `ablate`, or `SELECTORS:WHAT` of `edit`: `channel 5,17*2`,
    `clamp=0,6`, `noise=0.1` or `grad*0.5`.
    """
    selectors, _, what = text.rpartition(":")
    named, what = f"{option}={quoted(text)!r}", re.sub(r"\s", "", what)
    forms = {
        kind: form for kind, form in _FORMS.items() if (kind == "ablate") == (option == "ablate")
    }
    wrong = UsageError(
        f"{named} cannot be read",
        f"for example {', '.join(example for _, example in forms.values())}",
    )
    for kind, (form, _) in forms.items():
        if selectors.strip() and (found := re.fullmatch(form, what, re.ASCII | re.IGNORECASE)):
            parts = found.groupdict()
            try:
                channels = tuple(read_ranges(parts["channels"])) if parts.get("channels") else ()
            except ValueError:
                raise wrong from None
            numbers = tuple(map(float, parts["numbers"].split(","))) if "numbers" in parts else ()
            if kind == "clamp" and numbers[0] > numbers[1]:
                words = f"{named}: {numbers[0]:g} is above {numbers[1]:g}"
                raise UsageError(words, "clamp=LOW,HIGH")
            return Intervention(named, kind, selectors, channels, numbers)
    raise wrong


parse_ablate, parse_edit = partial(parse, "ablate"), partial(parse, "edit")


def apply(
    changes: Sequence[Intervention],
    layer: str,
    output: Any,
    axis_of: Callable[[Tensor, str], int],
    noise: Generator,
) -> Any:
    """Make these changes to a layer's output, in their order; `axis_of` says for an option which
    axis of a tensor counts channels. UsageError where there are not as many."""
    import torch
    from torch import Tensor

    for change in changes:
        asked = f"{change.option}: {layer}"
        if not isinstance(output, Tensor):
            raise UsageError(f"{asked} gives a {type(output).__name__}, not a tensor")
        if output.is_quantized:
            raise UsageError(f"{asked} gives a quantized tensor")
        axis = axis_of(output, change.option) if change.channels else -1
        last = output.shape[axis] - 1 if change.channels else 0
        if wrong := [channel for channel in change.channels if channel > last]:
            named = ", ".join(map(str, wrong[:3])) + (", ..." if wrong[3:] else "")
            raise UsageError(f"{asked} has channels 0 to {last}, not {named}")
        if change.kind == "clamp":
            output = output.clamp(*change.numbers)
        elif change.kind == "noise":
            drawn = torch.randn(output.shape, generator=noise)
            output = output + change.numbers[0] * drawn.to(output)
        elif change.kind == "grad" and output.requires_grad:
            output, factor = output.clone(), change.numbers[0]
            output.register_hook(partial(operator.mul, factor))
        elif change.channels:
            places = torch.tensor(change.channels, device=output.device)
            if change.kind == "ablate":  # zero, also where the channel held NaN
                output = output.index_fill(axis, places, 0)
            else:
                shape = [1] * output.ndim
                shape[axis] = -1
                ones = output.new_ones(output.shape[axis])
                output = output * ones.index_fill(0, places, change.numbers[0]).view(shape)
    return output
