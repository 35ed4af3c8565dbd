"""Interventions: forward hooks that change a layer's output before it is captured."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from featviz.errors import UsageError
from featviz.text import read_ranges


@dataclass(frozen=True)
class Intervention:
    """A change as it was asked for."""

    kind: str
    """One of KINDS."""
    text: str
    selectors: str
    """Selectors of the layers to change."""
    channels: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()

    @property
    def option(self) -> str:
        """For messages: `--ablate 'conv1:5'`."""
        return f"--{self.kind} {self.text!r}"


def parse(kind: str, text: str) -> Intervention:
    """Read `SELECTORS:5,17`, `SELECTORS:3=2.0` or `SELECTORS:0,6`.

    Raises:
        UsageError: it cannot be read.
    """
    selectors, _, tail = text.rpartition(":")
    form = re.fullmatch(KINDS[kind].form, tail.replace(" ", ""), re.ASCII | re.IGNORECASE)
    if not selectors.strip() or form is None:
        raise _unreadable(kind, text)
    numbers = tuple(float(n) for n in (form.groupdict().get("numbers") or "").split(",") if n)
    listed = form.groupdict().get("channels")
    try:
        channels = tuple(read_ranges(listed)) if listed else ()
    except ValueError:
        raise _unreadable(kind, text) from None
    if kind == "clamp" and numbers[0] > numbers[1]:
        raise UsageError(f"--clamp {text!r}: {numbers[0]:g} is above {numbers[1]:g}", "LOW,HIGH")
    return Intervention(kind, text, selectors, channels, numbers)


def _unreadable(kind: str, text: str) -> UsageError:
    return UsageError(f"--{kind} {text!r} cannot be read", f"for example {KINDS[kind].example}")


def _ablate(change: Intervention, tensor: Tensor, axis: int, noise: Generator) -> Tensor:
    """Zero, also where the channel held NaN."""
    return tensor.index_fill(axis, _places(change, tensor), 0)


def _scale_channel(change: Intervention, tensor: Tensor, axis: int, noise: Generator) -> Tensor:
    shape = [1] * tensor.ndim
    shape[axis] = -1
    factors = tensor.new_ones(tensor.shape[axis])
    factors[_places(change, tensor)] = change.numbers[0]
    return tensor * factors.view(shape)


def _places(change: Intervention, tensor: Tensor) -> Tensor:
    return torch.tensor(change.channels, device=tensor.device)


def _noise(change: Intervention, tensor: Tensor, axis: int, noise: Generator) -> Tensor:
    """Gaussian, of the given standard deviation."""
    drawn = torch.randn(tensor.shape, generator=noise)
    return tensor + change.numbers[0] * drawn.to(tensor)


def _grad_scale(change: Intervention, tensor: Tensor, axis: int, noise: Generator) -> Tensor:
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

    form: str
    """Regular expression for the text behind the selectors."""
    example: str
    """For messages."""
    change: Callable[[Intervention, Tensor, int, Generator], Tensor]
    """Returns a changed copy of a tensor, given its channel axis and where noise is drawn from."""


_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_ONE = rf"(?P<numbers>{_NUMBER})"
_LIST = r"(?P<channels>\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)"

KINDS = {
    "ablate": InterventionKind(_LIST, "'layer3.*.relu:5,17' or 'conv1:0-3'", _ablate),
    "scale-channel": InterventionKind(f"{_LIST}={_ONE}", "'conv1:3=2.0'", _scale_channel),
    "clamp": InterventionKind(
        rf"(?P<numbers>{_NUMBER},{_NUMBER})",
        "'relu:0,6'",
        lambda change, tensor, axis, noise: tensor.clamp(*change.numbers),
    ),
    "noise": InterventionKind(f"(?!-){_ONE}", "'conv1:0.1'", _noise),
    "grad-scale": InterventionKind(_ONE, "'layer4:0.5'", _grad_scale),
}


def applied(
    changes: Sequence[Intervention],
    layer: str,
    axis_of: Callable[..., int],
    noise: Generator,
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

    def hook(module: Any, args: Any, output: Any) -> Any:
        for change in changes:
            _check_tensor(change, output, layer)
            axis = axis_of(output, what=change.option) if change.channels else -1
            _check_channels(change, output.shape[axis] if change.channels else 0, layer)
            output = KINDS[change.kind].change(change, output, axis, noise)
        return output

    return hook


def _check_tensor(change: Intervention, output: Any, layer: str) -> None:
    if not isinstance(output, Tensor):
        raise UsageError(f"{change.option}: {layer} gives a {type(output).__name__}, not a tensor")
    if output.is_quantized:
        raise UsageError(f"{change.option}: {layer} gives a quantized tensor")


def _check_channels(change: Intervention, count: int, layer: str) -> None:
    if wrong := [channel for channel in change.channels if channel >= count]:
        named = ", ".join(map(str, wrong[:3])) + (", ..." if wrong[3:] else "")
        raise UsageError(f"{change.option}: {layer} has channels 0 to {count - 1}, not {named}")
