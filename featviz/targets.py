"""What gradients are the gradients of: one number, made of a model's output or of a layer's."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featviz.errors import UsageError

_EXAMPLES = "for example top1, class:281, mean, 'output[out]:mean' or layer:layer4.1:17"
_OUTPUT = re.compile(r"output((?:\[[^\]]+\])+)(?::(.+))?")


@dataclass(frozen=True)
class Target:
    """A target as it was asked for."""

    text: str
    keys: tuple[str, ...] = ()
    """The way to a tensor inside the output."""
    reduction: str = "top1"
    """One of REDUCTIONS."""
    argument: str = ""
    """Of `class:`: an index or a name."""
    layer: str | None = None
    """A layer whose mean activation is the target, in place of the output."""
    channel: int | None = None

    def value(self, output: Any, categories: Sequence[str] | None = None) -> Tensor:
        """The number to differentiate.

        Args:
            output: what the model gave; for a target with a layer, what that layer gave.

        Raises:
            UsageError: the output is not of the kind that this target needs.
        """
        tensor = self._tensor(output)
        return REDUCTIONS[self.reduction](self, tensor, categories)

    def _tensor(self, output: Any) -> Tensor:
        found = output
        for key in self.keys:
            found = _inside(found, key)
        if isinstance(found, Tensor) and found.is_floating_point():
            return found
        raise UsageError(
            f"--target {self.text}: the output has no tensor there; it is {outline(output)}",
            "name one: --target 'output[KEY]:mean'",
        )


def parse(text: str | None) -> Target:
    """Read a target; None is the most likely class.

    Raises:
        UsageError: it cannot be read.
    """
    if text is None:
        return Target("top1")
    if text.startswith("layer:"):
        return _layer_target(text)
    keys: tuple[str, ...] = ()
    rest = text
    if found := _OUTPUT.fullmatch(text):
        keys = tuple(re.findall(r"\[([^\]]+)\]", found[1]))
        rest = found[2] or "mean"
    reduction, colon, argument = rest.partition(":")
    if (
        reduction not in REDUCTIONS
        or bool(argument) != (reduction == "class")
        or (colon and not argument)
    ):
        raise UsageError(f"--target {text!r} cannot be read", _EXAMPLES)
    return Target(text, keys, reduction, argument)


def _layer_target(text: str) -> Target:
    name, _, channel = text.removeprefix("layer:").partition(":")
    if not name or (channel and not channel.isdigit()):
        raise UsageError(f"--target {text!r} cannot be read", "layer:NAME or layer:NAME:CHANNEL")
    return Target(text, (), "mean", "", name, int(channel) if channel else None)


def outline(output: Any) -> str:
    """What a model gives, in words: `a dict of out [1, 21, 64, 64], aux [1, 21, 64, 64]`."""
    if isinstance(output, Tensor):
        return f"a tensor {list(output.shape)}"
    items: list[tuple[Any, Any]] = []
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, (tuple, list)):
        items = list(enumerate(output))
    kind = type(output).__name__
    inside = [f"{k} {list(v.shape) if isinstance(v, Tensor) else outline(v)}" for k, v in items]
    return f"a {kind} of {', '.join(inside)}" if inside else f"a {kind}"


def _inside(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return next((item for name, item in value.items() if str(name) == key), None)
    if isinstance(value, (tuple, list)) and key.lstrip("-").isdigit():
        return value[int(key)] if -len(value) <= int(key) < len(value) else None
    return getattr(value, key, None)


def _classes(target: Target, tensor: Tensor) -> Tensor:
    """The scores [K] of an output [1, K]."""
    if tensor.ndim != 2 or tensor.shape[0] != 1:
        raise UsageError(
            f"--target {target.text} needs scores of classes [1, K], and the output is "
            f"{outline(tensor)}",
            _EXAMPLES,
        )
    return tensor[0]


def _top1(target: Target, tensor: Tensor, categories: Sequence[str] | None) -> Tensor:
    return _classes(target, tensor).max()


def _class(target: Target, tensor: Tensor, categories: Sequence[str] | None) -> Tensor:
    scores = _classes(target, tensor)
    return scores[_index(target, len(scores), categories)]


def _index(target: Target, count: int, categories: Sequence[str] | None) -> int:
    if target.argument.isdigit():
        if int(target.argument) < count:
            return int(target.argument)
        raise UsageError(f"--target {target.text}: there are {count} classes", "0 is the first")
    lower = [name.lower() for name in categories or ()]
    if target.argument.lower() in lower:
        return lower.index(target.argument.lower())
    close = difflib.get_close_matches(target.argument.lower(), lower, 3)
    names = f"did you mean {', '.join(close)}?" if close else "give its number"
    raise UsageError(
        f"--target {target.text}: the weights name no such class",
        names if categories else "these weights have no names of classes; give its number",
    )


def _sum(target: Target, tensor: Tensor, categories: Sequence[str] | None) -> Tensor:
    return tensor.sum()


def _mean(target: Target, tensor: Tensor, categories: Sequence[str] | None) -> Tensor:
    return tensor.mean()


def _norm(target: Target, tensor: Tensor, categories: Sequence[str] | None) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(tensor)
    return length


REDUCTIONS: dict[str, Callable[[Target, Tensor, Sequence[str] | None], Tensor]] = {
    "top1": _top1,
    "class": _class,
    "sum": _sum,
    "mean": _mean,
    "norm": _norm,
}
