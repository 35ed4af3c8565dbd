"""Targets of gradients: the number to differentiate, from the output of a model or a layer."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from featviz.errors import LayoutError, UsageError
from featviz.layout import to_floats
from featviz.text import is_number, listed, quoted

if TYPE_CHECKING:
    from torch import Tensor

PAIRED = ("output", "grad")
"""What is captured for pairs of an output and its gradient."""

_EXAMPLES = "for example class:281, mean, 'output[out]:mean' or layer:layer4.1:17"
_OUTPUT = re.compile(r"output((?:\[[^\]]+\])+)(?::(.+))?")
_NAMED = 8
"""Tensors of an output, or names of classes, that an error lists."""


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor; torch is there by now, but not where a target is only read."""
    from torch import Tensor

    return isinstance(value, Tensor)


@dataclass(frozen=True)
class Target:
    """A target as it was asked for."""

    text: str
    keys: tuple[str, ...] = ()
    """The way to a tensor inside the output."""
    reduction: str = "top1"
    """One of REDUCTIONS."""
    argument: str = ""
    """For the reduction `class`: an index or a name."""
    layer: str | None = None
    """A layer whose mean activation is the target, in place of the output."""
    channel: int | None = None

    def value(self, output: Any, categories: Sequence[str] = (), scores: str | None = "") -> Tensor:
        """The number to differentiate.

        Args:
            output: what the model gave; for a target with a layer, what that layer gave.
            categories: names of the classes.
            scores: where in the output the scores of classes are, as `LoadedModel.scores` says.

        Raises:
            UsageError: the output is not of the kind that this target needs.
        """
        if self.reduction in ("top1", "class") and not self.keys:
            if scores is None:
                words = f": the model is no classifier; it gives {outline(output)}"
                raise self.error(words, _instead(output))
            output = output_at(output, scores)
        return REDUCTIONS[self.reduction](self, self._tensor(output), categories)

    def title(self, output: Any, categories: Sequence[str] = (), scores: str | None = "") -> str:
        """The target for people: the class by its name, where it has one, else `class 281`; the
        text of a target that is no class of the output.

        Args: as for `value`, which accepts the output.
        """
        if self.layer is not None or self.keys or self.reduction not in ("top1", "class"):
            return self.text
        found = _classes(self, self._tensor(output_at(output, scores or "")))
        index = _index(self, found, categories)
        names = names_of(len(found), categories)
        return names[index] if names else f"class {index}"

    def error(self, words: str, hint: str | None = None) -> UsageError:
        """What is wrong with the target."""
        return UsageError(f"target {quoted(repr(self.text))}{words}", hint)

    def _tensor(self, output: Any) -> Tensor:
        tensor = output
        for key in self.keys:
            tensor = _inside(tensor, key)
        if not _is_tensor(tensor):
            if self.layer is not None:
                raise self.error(f": the layer gives {outline(output)}")
            here = "no tensor there" if self.keys else "no tensor"
            words = f": the output is {here}; the model gives {outline(output)}"
            raise self.error(words, _instead(output))
        if not tensor.is_floating_point():
            raise self.error(f": it holds {tensor.dtype}, and has no gradient")
        dense = tensor.to_dense() if str(tensor.layout).startswith("torch.sparse") else tensor
        try:
            floats = to_floats(dense)
        except LayoutError as error:
            raise self.error(f": it {error.message}") from None
        return floats if tensor.element_size() == 1 else dense  # torch sums no float8


def parse(text: str | None) -> Target:
    """Read a target; None is the most likely class.

    Raises:
        UsageError: it cannot be read.
    """
    if text is None:
        return Target("top1")
    if text.startswith("layer:"):
        name, _, channel = text.removeprefix("layer:").partition(":")
        if not name or (channel and not is_number(channel)):
            raise UsageError(
                f"target {quoted(repr(text))} cannot be read", "layer:NAME or layer:NAME:CHANNEL"
            )
        return Target(text, (), "mean", "", name, int(channel) if channel else None)
    keys: tuple[str, ...] = ()
    rest = text
    if path := _OUTPUT.fullmatch(text):
        keys = tuple(re.findall(r"\[([^\]]+)\]", path[1]))
        rest = path[2] or "mean"
    reduction, _, argument = rest.partition(":")
    wants = reduction == "class"
    if reduction not in REDUCTIONS or bool(argument) != wants or (":" in rest and not wants):
        raise UsageError(f"target {quoted(repr(text))} cannot be read", _EXAMPLES)
    return Target(text, keys, reduction, argument)


def names_of(count: int, categories: Sequence[str] | None) -> Sequence[str]:
    """The names of the classes of an output [1, count].

    Empty where there are more or fewer names: a torchvision architecture with a head of another
    size was trained on other classes than those the names are of.
    """
    return categories if categories and len(categories) == count else ()


def outline(output: Any) -> str:
    """A model's output in words: `output[out] [1, 21, 64, 64], output[aux] [1, 21, 64, 64]`."""
    if _is_tensor(output):
        return f"a tensor {_shape(output)}"
    parts = [f"{path} {_shape(tensor)}" for path, tensor in _paths(output)]
    return listed(parts, _NAMED) or f"a {type(output).__name__} without tensors"


def _shape(tensor: Tensor) -> str:
    return "nested" if tensor.is_nested else str(list(tensor.shape))


def _instead(output: Any) -> str | None:
    if _is_tensor(output):
        return "it is one tensor: top1, class:N, sum, mean or norm"
    paths = [path for path, tensor in _paths(output) if tensor.is_floating_point()]
    return f"name one: --target '{paths[0]}:mean'" if paths else None


def _paths(value: Any, path: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output, with the way to it as `output[KEY][KEY]`."""
    items: Sequence[tuple[Any, Any]] = ()
    if _is_tensor(value):
        yield path, value
    elif isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (tuple, list)):
        items = list(enumerate(value))
    elif dataclasses.is_dataclass(value):
        items = list(vars(value).items())
    for key, item in items:
        yield from _paths(item, f"{path}[{key}]")


def output_at(output: Any, key: str) -> Any:
    """What stands at a key of an output; the output itself for an empty key."""
    return _inside(output, key) if key else output


def _inside(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return next((item for name, item in value.items() if str(name) == key), None)
    if isinstance(value, (tuple, list)) and is_number(key.removeprefix("-")):
        return value[int(key)] if -len(value) <= int(key) < len(value) else None
    return None if _is_tensor(value) else getattr(value, key, None)


def _classes(target: Target, tensor: Tensor) -> Tensor:
    """The scores [K] of an output [1, K]."""
    if tensor.ndim != 2 or tensor.shape[0] != 1 or tensor.shape[1] == 0:
        words = f" needs scores of classes [1, K], and there is {outline(tensor)}"
        raise target.error(words, _EXAMPLES)
    return tensor[0]


def _score(target: Target, tensor: Tensor, categories: Sequence[str]) -> Tensor:
    scores = _classes(target, tensor)
    return scores[_index(target, scores, categories)]


def _index(target: Target, scores: Tensor, categories: Sequence[str]) -> int:
    """The target's class, or the likeliest one."""
    if target.reduction == "top1":
        return int(scores.argmax())
    count = len(scores)
    if target.argument.isdecimal():
        if is_number(target.argument) and int(target.argument) < count:
            return int(target.argument)
        raise target.error(f": there are {count} classes, 0 to {count - 1}")
    there = names_of(count, categories)
    names = [name.lower() for name in there]
    if target.argument.lower() in names:
        return names.index(target.argument.lower())
    close = difflib.get_close_matches(target.argument.lower(), names, 3)
    if close:
        hint = f"did you mean {', '.join(close)}?"
    elif names:
        hint = f"the classes are {listed(there, _NAMED)}; a number is one, too"
    else:
        hint = "these weights have no names; give its number"
    raise target.error(": no class has this name", hint)


REDUCTIONS: dict[str, Callable[[Target, Tensor, Sequence[str]], Tensor]] = {
    "top1": _score,
    "class": _score,
    "sum": lambda target, tensor, categories: tensor.sum(),
    "mean": lambda target, tensor, categories: tensor.mean(),
    "norm": lambda target, tensor, categories: tensor.norm(),
}
