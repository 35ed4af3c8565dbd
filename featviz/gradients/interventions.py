"""Interventions: forward hooks that change a layer's output before it is captured.

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


@dataclass(frozen=True)
class Intervention:
    """A change as it was asked for."""

    option: str
    """For messages: `ablate='conv1:5'`."""
    kind: str
    """One of KINDS."""
    selectors: str
    channels: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()


def parse(option: str, text: str) -> Intervention:
    """Read `SELECTORS:5,17` of `ablate`, or `SELECTORS:WHAT` of `edit`: `channel 5,17*2`,
    `clamp=0,6`, `noise=0.1` or `grad*0.5`.

    Raises:
        UsageError: it cannot be read.
    """
    selectors, _, what = text.rpartition(":")
    named = f"{option}={quoted(text)!r}"
    kinds = [name for name in KINDS if (name == "ablate") == (option == "ablate")]
    forms = {kind: KINDS[kind].form.fullmatch(re.sub(r"\s", "", what)) for kind in kinds}
    kind, form = next((pair for pair in forms.items() if pair[1]), ("", None))
    examples = ", ".join(KINDS[kind].example for kind in kinds)
    wrong = UsageError(f"{named} cannot be read", f"for example {examples}")
    if not selectors.strip() or form is None:
        raise wrong
    parts = form.groupdict()
    try:
        channels = tuple(read_ranges(parts["channels"])) if parts.get("channels") else ()
    except ValueError:
        raise wrong from None
    numbers = tuple(map(float, parts["numbers"].split(","))) if parts.get("numbers") else ()
    if kind == "clamp" and numbers[0] > numbers[1]:
        raise UsageError(f"{named}: {numbers[0]:g} is above {numbers[1]:g}", "clamp=LOW,HIGH")
    return Intervention(named, kind, selectors, channels, numbers)


parse_ablate, parse_edit = partial(parse, "ablate"), partial(parse, "edit")


def _ablate(change: Intervention, tensor: Tensor, axis: int, noise: Generator) -> Tensor:
    """Zero, also where the channel held NaN."""
    return tensor.index_fill(axis, _places(change, tensor), 0)


def _multiply(change: Intervention, tensor: Tensor, axis: int, noise: Generator) -> Tensor:
    shape = [1] * tensor.ndim
    shape[axis] = -1
    factors = tensor.new_ones(tensor.shape[axis])
    factors[_places(change, tensor)] = change.numbers[0]
    return tensor * factors.view(shape)


def _places(change: Intervention, tensor: Tensor) -> Tensor:
    import torch

    return torch.tensor(change.channels, device=tensor.device)


def _noise(change: Intervention, tensor: Tensor, axis: int, noise: Generator) -> Tensor:
    """Gaussian, of the given standard deviation."""
    import torch

    drawn = torch.randn(tensor.shape, generator=noise)
    return tensor + change.numbers[0] * drawn.to(tensor)


def _scale_gradient(change: Intervention, tensor: Tensor, axis: int, noise: Generator) -> Tensor:
    """The value stays, in a tensor of its own; the gradient at it is multiplied."""
    if not tensor.requires_grad:
        return tensor
    copy = tensor.clone()
    factor = change.numbers[0]
    copy.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return copy


@dataclass(frozen=True)
class InterventionKind:
    """One kind of change to the outputs of layers."""

    form: re.Pattern[str]
    """The text behind the selectors, without spaces."""
    example: str
    change: Callable[[Intervention, Tensor, int, Generator], Tensor]
    """Returns a changed copy of a tensor, given its channel axis and where noise is drawn from."""


def _form(text: str) -> re.Pattern[str]:
    """A pattern with the forms of a NUMBER and of CHANNELS put in."""
    number = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
    channels = r"(?P<channels>\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)"
    text = text.replace("NUMBER", number).replace("CHANNELS", channels)
    return re.compile(text, re.ASCII | re.IGNORECASE)


KINDS = {
    "ablate": InterventionKind(_form("CHANNELS"), "'layer3.*.relu:5,17' or 'conv1:0-3'", _ablate),
    "channel": InterventionKind(
        _form(r"channels?CHANNELS\*(?P<numbers>NUMBER)"), "'conv1:channel 3*2.0'", _multiply
    ),
    "clamp": InterventionKind(
        _form("clamp=(?P<numbers>NUMBER,NUMBER)"),
        "'relu:clamp=0,6'",
        lambda change, tensor, axis, noise: tensor.clamp(*change.numbers),
    ),
    "noise": InterventionKind(_form("noise=(?!-)(?P<numbers>NUMBER)"), "'conv1:noise=0.1'", _noise),
    "grad": InterventionKind(
        _form(r"grad\*(?P<numbers>NUMBER)"), "'layer4:grad*0.5'", _scale_gradient
    ),
}


def applied(
    changes: Sequence[Intervention], layer: str, axis_of: Callable[..., int], noise: Generator
) -> Any:
    """A forward hook that makes these changes to a layer's tensor, in their order.

    Args:
        layer: its name, for messages.
        axis_of: which axis of a tensor counts channels; takes the tensor and `what`, the option
            that asks.
        noise: where noise is drawn from, in the order in which layers run.

    Raises:
        UsageError: (when it runs) the layer gives no tensor of channels, or not as many.
    """
    from torch import Tensor

    def hook(module: Any, args: Any, output: Any) -> Any:
        for change in changes:
            asked = f"{change.option}: {layer}"
            if not isinstance(output, Tensor):
                raise UsageError(f"{asked} gives a {type(output).__name__}, not a tensor")
            if output.is_quantized:
                raise UsageError(f"{asked} gives a quantized tensor")
            axis = axis_of(output, what=change.option) if change.channels else -1
            last = output.shape[axis] - 1 if change.channels else 0
            if wrong := [channel for channel in change.channels if channel > last]:
                named = ", ".join(map(str, wrong[:3])) + (", ..." if wrong[3:] else "")
                raise UsageError(f"{asked} has channels 0 to {last}, not {named}")
            output = KINDS[change.kind].change(change, output, axis, noise)
        return output

    return hook
