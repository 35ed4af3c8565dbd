"""Reaching into a model: forward hooks that change what a layer gives, before it is captured."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featviz.errors import UsageError

Change = Callable[[Tensor, int], Tensor]
"""Takes a layer's output and its channel axis, and returns what the layer gives instead."""


@dataclass(frozen=True)
class Intervention:
    """A change as it was asked for."""

    kind: str
    """One of KINDS."""
    text: str
    selectors: str
    """Which layers."""
    channels: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()

    def apply(self, tensor: Tensor, axis: int, seed: int) -> Tensor:
        """What the layer gives instead; the tensor itself is left as it is.

        Raises:
            UsageError: the layer has no such channel.
        """
        count = tensor.shape[axis]
        if wrong := [c for c in self.channels if c >= count]:
            raise UsageError(
                f"--{self.kind} {self.text!r}: the layer has channels 0 to {count - 1}, "
                f"not {', '.join(map(str, wrong))}"
            )
        return KINDS[self.kind](self, tensor, axis, seed)


def parse(kind: str, text: str) -> Intervention:
    """Read `SELECTORS:5,17`, `SELECTORS:3=2.0` or `SELECTORS:0,6`.

    Raises:
        UsageError: it cannot be read.
    """
    selectors, _, tail = text.rpartition(":")
    found = _FORMS[kind].fullmatch(tail.replace(" ", ""))
    if not selectors or found is None:
        raise UsageError(f"--{kind} {text!r} cannot be read", f"for example {_EXAMPLES[kind]}")
    channels = _channels(found.groupdict().get("channels") or "")
    numbers = tuple(float(n) for n in (found.groupdict().get("numbers") or "").split(",") if n)
    if kind == "clamp" and numbers[0] > numbers[1]:
        raise UsageError(f"--clamp {text!r}: {numbers[0]:g} is above {numbers[1]:g}", "LOW,HIGH")
    return Intervention(kind, text, selectors, channels, numbers)


_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_LIST = r"(?P<channels>\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)"
_FORMS = {
    "ablate": re.compile(_LIST),
    "scale-channel": re.compile(rf"{_LIST}=(?P<numbers>{_NUMBER})"),
    "clamp": re.compile(rf"(?P<numbers>{_NUMBER},{_NUMBER})"),
    "noise": re.compile(rf"(?P<numbers>{_NUMBER})"),
    "grad-scale": re.compile(rf"(?P<numbers>{_NUMBER})"),
}
_EXAMPLES = {
    "ablate": "'layer3.*.relu:5,17' or 'conv1:0-3'",
    "scale-channel": "'conv1:3=2.0'",
    "clamp": "'relu:0,6'",
    "noise": "'conv1:0.1'",
    "grad-scale": "'layer4:0.5'",
}


def _channels(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(found))


def _ablate(change: Intervention, tensor: Tensor, axis: int, seed: int) -> Tensor:
    return tensor * _mask(change, tensor, axis, 0.0)


def _scale_channel(change: Intervention, tensor: Tensor, axis: int, seed: int) -> Tensor:
    return tensor * _mask(change, tensor, axis, change.numbers[0])


def _mask(change: Intervention, tensor: Tensor, axis: int, value: float) -> Tensor:
    factors = tensor.new_ones(tensor.shape[axis])
    factors[list(change.channels)] = value
    shape = [1] * tensor.ndim
    shape[axis] = -1
    return factors.view(shape)


def _clamp(change: Intervention, tensor: Tensor, axis: int, seed: int) -> Tensor:
    return tensor.clamp(*change.numbers)


def _noise(change: Intervention, tensor: Tensor, axis: int, seed: int) -> Tensor:
    """Gaussian, of the given standard deviation; the same for each image."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tensor.shape, generator=generator)
    return tensor + change.numbers[0] * drawn.to(tensor)


def _grad_scale(change: Intervention, tensor: Tensor, axis: int, seed: int) -> Tensor:
    """The value stays; the gradient at it is multiplied."""
    if tensor.requires_grad:
        factor = change.numbers[0]
        tensor.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return tensor


KINDS: dict[str, Callable[[Intervention, Tensor, int, int], Tensor]] = {
    "ablate": _ablate,
    "scale-channel": _scale_channel,
    "clamp": _clamp,
    "noise": _noise,
    "grad-scale": _grad_scale,
}


def applied(changes: Sequence[Intervention], axis_of: Callable[[Tensor], int], seed: int) -> Any:
    """A forward hook that makes these changes to a layer's tensor, in their order.

    Raises:
        UsageError: (when it runs) the layer gives no tensor of channels.
    """

    def hook(module: Any, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            raise UsageError(
                f"--{changes[0].kind} {changes[0].text!r}: the layer gives a "
                f"{type(output).__name__}, not a tensor"
            )
        for change in changes:
            axis = axis_of(output) if change.channels else -1
            output = change.apply(output, axis, seed)
        return output

    return hook
