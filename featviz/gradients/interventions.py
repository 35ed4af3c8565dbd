"""Interventions: changes to a layer's output before it is captured.

Reading them needs no torch: what cannot be read is refused before torch is imported.
"""

from __future__ import annotations

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
        output = _changed(change, output, axis, noise)
    return output


def _changed(change: Intervention, tensor: Tensor, axis: int, noise: Generator) -> Tensor:
    """A changed copy of a tensor; of one without a gradient that is to be scaled, itself."""
    import torch

    if change.kind == "clamp":
        return tensor.clamp(*change.numbers)
    if change.kind == "noise":
        drawn = torch.randn(tensor.shape, generator=noise)
        return tensor + change.numbers[0] * drawn.to(tensor)
    if change.kind == "grad":
        if not tensor.requires_grad:
            return tensor
        copy, factor = tensor.clone(), change.numbers[0]
        copy.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
        return copy
    places = torch.tensor(change.channels, device=tensor.device)
    if change.kind == "ablate":  # zero, also where the channel held NaN
        return tensor.index_fill(axis, places, 0)
    shape = [1] * tensor.ndim
    shape[axis] = -1
    factors = tensor.new_ones(tensor.shape[axis]).index_fill(0, places, change.numbers[0])
    return tensor * factors.view(shape)
