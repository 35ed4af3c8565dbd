"""What is asked of a pass: the target of gradients, a number from the output of a model or a layer;
interventions; and what the options of a pass mean together. Reading them needs no torch."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from featviz.errors import LayoutError, UsageError
from featviz.layout import to_floats
from featviz.options import DrawOptions, PassOptions
from featviz.text import is_number, listed, quoted, read_ranges

if TYPE_CHECKING:
    from torch import Generator, Tensor

_EXAMPLES = "for example class:281, mean, 'output[out]:mean' or layer:layer4.1:17"
_LAYER = re.compile(r"layer:([^:]+)(?::(\d{1,18}))?", re.ASCII)
_OUTPUT = re.compile(r"output((?:\[[^\]]+\])+)(?::(.+))?")
_REDUCTION = re.compile(r"(top1|sum|mean|norm)|class:(.+)")
_NAMED = 8
"""Tensors of an output, or names of classes, that an error lists."""


@dataclass(frozen=True)
class Target:
    """A target as it was asked for."""

    text: str
    keys: tuple[str, ...] = ()
    """The keys that lead to a tensor inside the output."""
    reduction: str = "top1"
    """top1, sum, mean or norm; or class, with an index or a name."""
    name: str = ""
    layer: str | None = None
    """A layer whose mean activation is the target, in place of the output."""
    channel: int | None = None

    def value(
        self, output: Any, categories: Sequence[str] = (), scores: str | None = ""
    ) -> tuple[Tensor, str]:
        """The number to differentiate in an output (of the target's layer, if it has one), whose
        scores of classes are where `LoadedModel.scores` says; and the target for people: a class of
        the output by its name, where it has one, else `class 281`, or as it was asked for."""
        of_class = self.reduction in ("top1", "class")
        if of_class and not self.keys:
            if scores is None:
                words = f": the model is no classifier; it gives {outline(output)}"
                raise self.error(words, _EXAMPLES)
            output = output_at(output, scores)
        tensor = self._tensor(output)
        if not of_class:
            return getattr(tensor, self.reduction)(), self.text
        if tensor.ndim != 2 or tensor.shape[0] != 1 or tensor.shape[1] == 0:
            words = f" needs scores of classes [1, K], not {list(tensor.shape)}"
            raise self.error(words, _EXAMPLES)
        names = categories if categories and len(categories) == tensor.shape[1] else ()
        index = self._class(tensor[0], names)
        title = names[index] if names else f"class {index}"
        return tensor[0, index], self.text if self.keys else title

    def error(self, words: str, hint: str | None = None) -> UsageError:
        """What is wrong with the target."""
        return UsageError(f"target {quoted(repr(self.text))}{words}", hint)

    def _tensor(self, output: Any) -> Tensor:
        from torch import Tensor

        tensor = output
        for key in self.keys:
            tensor = output_at(tensor, key)
        if not isinstance(tensor, Tensor):
            what = "layer" if self.layer is not None else "output is no tensor there; the model"
            hint = None if self.layer is not None else _EXAMPLES
            raise self.error(f": the {what} gives {outline(output)}", hint)
        if not tensor.is_floating_point():
            raise self.error(f": it holds {tensor.dtype}, and has no gradient")
        dense = tensor.to_dense() if str(tensor.layout).startswith("torch.sparse") else tensor
        try:
            floats = to_floats(dense)
        except LayoutError as error:
            raise self.error(f": it {error.message}") from None
        return floats if tensor.element_size() == 1 else dense  # torch sums no float8

    def _class(self, scores: Tensor, names: Sequence[str]) -> int:
        """The index of the target's class, or of the likeliest one."""
        count, name = len(scores), self.name.lower()
        if self.reduction == "top1":
            return int(scores.argmax())
        if name.isdecimal():
            if is_number(name) and int(name) < count:
                return int(name)
            raise self.error(f": there are {count} classes, 0 to {count - 1}")
        known = [other.lower() for other in names]
        if name in known:
            return known.index(name)
        hint = f"the classes are {listed(names, _NAMED)}; a number is one, too"
        if close := difflib.get_close_matches(name, known, 3):
            hint = f"did you mean {', '.join(close)}?"
        hint = hint if names else "these weights have no names; give its number"
        raise self.error(": no class has this name", hint)


def parse(text: str | None) -> Target:
    """Read a target; None is the most likely class."""
    if text is None:
        return Target("top1")
    if layer := _LAYER.fullmatch(text):
        channel = int(layer[2]) if layer[2] else None
        return Target(text, reduction="mean", layer=layer[1], channel=channel)
    path = _OUTPUT.fullmatch(text)
    found = _REDUCTION.fullmatch((path[2] or "mean") if path else text)
    if found is None:
        of_layer = text.startswith("layer:")
        hint = "layer:NAME or layer:NAME:CHANNEL" if of_layer else _EXAMPLES
        raise UsageError(f"target {quoted(repr(text))} cannot be read", hint)
    keys = tuple(re.findall(r"\[([^\]]+)\]", path[1])) if path else ()
    return Target(text, keys, found[1] or "class", found[2] or "")


def output_at(output: Any, key: str) -> Any:
    """What stands at a key of an output, None where nothing does; all of it for an empty key."""
    from torch import Tensor

    if not key:
        return output
    if isinstance(output, Mapping):
        return next((item for name, item in output.items() if str(name) == key), None)
    if isinstance(output, (tuple, list)) and is_number(key.removeprefix("-")):
        return output[int(key)] if -len(output) <= int(key) < len(output) else None
    return None if isinstance(output, Tensor) else getattr(output, key, None)


def outline(output: Any) -> str:
    """A model's output in words: `output[out] [1, 21, 64, 64], output[aux] [1, 21, 64, 64]`, by the
    targets that there are."""
    from torch import Tensor

    from featviz.hooks.capture import leaves

    parts = [
        f"output{f'[{key}]'.replace('.', '][') if key else ''} "
        f"{'nested' if item.is_nested else list(item.shape)}"
        for key, item in leaves(output)
        if isinstance(item, Tensor)
    ]
    return listed(parts, _NAMED) or f"a {type(output).__name__} without tensors"


# Interventions: changes to a layer's output before it is captured

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


Intervention = tuple[str, str, str, tuple[int, ...], tuple[float, ...]]
"""A change as it was asked for: the option for messages (`ablate='conv1:5'`), a key of _FORMS, the
selectors, channels and numbers."""


def parse_intervention(option: str, text: str) -> Intervention:
    """Read `SELECTORS:5,17` of `ablate`, or `SELECTORS:WHAT` of `edit`: `channel 5,17*2`,
    `clamp=0,6`, `noise=0.1` or `grad*0.5`."""
    selectors, _, what = text.rpartition(":")
    named, what = f"{option}={quoted(text)!r}", re.sub(r"\s", "", what)
    forms = {k: form for k, form in _FORMS.items() if (k == "ablate") == (option == "ablate")}
    examples = ", ".join(example for _, example in forms.values())
    wrong = UsageError(f"{named} cannot be read", f"for example {examples}")
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
            return named, kind, selectors, channels, numbers
    raise wrong


parse_ablate, parse_edit = (partial(parse_intervention, option) for option in ("ablate", "edit"))


def intervene(
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

    for option, kind, _, channels, numbers in changes:
        asked = f"{option}: {layer}"
        if not isinstance(output, Tensor):
            raise UsageError(f"{asked} gives a {type(output).__name__}, not a tensor")
        if output.is_quantized:
            raise UsageError(f"{asked} gives a quantized tensor")
        axis = axis_of(output, option) if channels else -1
        last = output.shape[axis] - 1 if channels else 0
        if wrong := [channel for channel in channels if channel > last]:
            named = ", ".join(map(str, wrong[:3])) + (", ..." if wrong[3:] else "")
            raise UsageError(f"{asked} has channels 0 to {last}, not {named}")
        if kind == "clamp":
            output = output.clamp(*numbers)
        elif kind == "noise":
            drawn = torch.randn(output.shape, generator=noise)
            output = output + numbers[0] * drawn.to(output)
        elif kind == "grad" and output.requires_grad:
            output = output.clone()
            output.register_hook(partial(operator.mul, numbers[0]))
        elif channels:
            places = torch.tensor(channels, device=output.device)
            if kind == "ablate":  # zero, also where the channel held NaN
                output = output.index_fill(axis, places, 0)
            else:
                shape = [1] * output.ndim
                shape[axis] = -1
                ones = output.new_ones(output.shape[axis])
                output = output * ones.index_fill(0, places, numbers[0]).view(shape)
    return output


# What the options of a pass mean together

PAIRED = ("output", "grad")
"""What is captured for pairs of an output and its gradient."""


def for_drawing(passes: PassOptions, draw: DrawOptions, seed: int) -> PassOptions:
    """What is captured for these pictures: a class activation map is made of an output and its
    gradient, so it captures both in place of the output."""
    if draw.weighs and passes.capture == ("output",):
        passes = structs.replace(passes, capture=PAIRED)
    return structs.replace(passes, seed=seed)


def check_options(options: PassOptions, draw: DrawOptions) -> None:
    """Refuse bad values, and those that would do nothing beside the others, before any work."""
    if draw.weighs and options.capture != PAIRED:
        words = f"reduce={draw.reduce} is made of a layer's output and its gradient, and capture"
        raise UsageError(f"{words} says {','.join(options.capture)}", "leave capture out")
    parse(options.target)
    changes = [parse_intervention(*change) for change in options.interventions]
    asked = {
        "target": options.target is not None,
        "grad_rule": options.grad_rule != "plain",
        "edit=grad": any(kind == "grad" for _, kind, *_ in changes),
    }
    for name in (name for name, given in asked.items() if given and not options.gradients):
        hint = "add --capture output,grad, or --reduce gradcam"
        raise UsageError(f"{name} does nothing without gradients", hint)
