"""What gradients are taken of: one number of a model's output, or of a layer's. Reading
a target needs no torch.

    [output[KEY]...:]KIND     top1, class:281, class:tabby, mean, sum, norm, output[out]:mean
    box, box:3, box:dog       of a detector: the most confident box, one by its number or class
    pixel:120,80              of a segmentation or of depth: one pixel of the input
    keypoint:3                of heat maps: the peak of one
    layer:NAME[:CHANNEL]      the mean of a layer's output, or of one channel of it

A kind of target is one entry of `TARGETS`. The model's family (`gradients.families`)
finds the number of `box`, `pixel` and `keypoint`, and of `class` where the model is no
classifier."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from featviz.errors import UsageError
from featviz.gradients import interventions
from featviz.layout import to_floats
from featviz.options import DrawOptions, PassOptions
from featviz.text import is_number, listed

if TYPE_CHECKING:
    from torch import Tensor

    from featviz.records import Detection, Integers

_FORMS = "class:NAME, class:N, box, mean, output[KEY]:mean or layer:NAME:CHANNEL"
_LAYER = re.compile(r"layer:(?P<name>[^:]+)(?::(?P<channel>\d{1,18}))?", re.ASCII)
_OUTPUT = re.compile(r"output(?P<keys>(?:\[[^\]]+\])+)(?::(?P<kind>.+))?")
_LISTED = 8
"""Tensors of an output, or names of classes, that an error lists."""


class TargetValue(NamedTuple):
    """The number that a target means in one output."""

    number: Tensor
    """One value, which gradients are taken of."""
    title: str
    """For people: a class by its name, or `class 281` without one; other targets as the
    user typed them."""
    focus: Detection | Integers | None = None
    """The box, or the mask [h, w] of the region, that the target means; None where it
    means no part of the image."""


@dataclass(frozen=True)
class Target:
    """A target as the user asked for it."""

    text: str
    """As the user typed it."""
    kind: str
    """A key of `TARGETS`."""
    argument: str = ""
    """For `class` and `box` an index or a name; for `pixel` `X,Y`; for `keypoint` an
    index; else empty."""
    keys: tuple[str, ...] = ()
    """The keys that lead to a tensor inside the output; none for the output itself."""
    layer: str | None = None
    """The name of a layer, whose output is meant; None for the model's output."""
    channel: int | None = None
    """A channel of that layer's output; None for all of it."""
    is_default: bool = False
    """Whether the user named no target. The default of the model's family then takes the
    place of this one."""

    @property
    def is_general(self) -> bool:
        """Whether models of every family have targets of this kind."""
        return TARGETS[self.kind].value is not _only_of_families

    def value(
        self, output: Any, categories: Sequence[str] = (), scores: str | None = ""
    ) -> TargetValue:
        """The number that the target means in an output.

        Args:
            output: of the model; where the target names a layer, the output of this layer
                or its channel.
            categories: names of the model's classes, as far as they are known.
            scores: `LoadedModel.scores`: the key at which the output has scores of
                classes, empty for the output itself, None where the model is no
                classifier. It does not matter where the target has keys of its own.

        Raises:
            UsageError: the output has no such number.
        """
        target_kind = TARGETS[self.kind]
        if target_kind.of_classes and not self.keys:
            if scores is None:
                raise self.error(
                    f": the model is no classifier; it gives {outline(output)}",
                    _examples(output),
                )
            output = output_at(output, scores)
        return target_kind.value(self, self._tensor(output), categories)

    def error(self, message: str, hint: str | None = None) -> UsageError:
        """The error for this target; the message goes on behind its text."""
        return interventions.refusal("target", self.text, message, hint)

    def _tensor(self, output: Any) -> Tensor:
        """The tensor at the target's keys inside an output, as one that torch can add up:
        not sparse, and not float8.

        Raises:
            UsageError: no tensor is there, or it holds integers, which have no gradient.
        """
        from torch import Tensor

        # one key after the other: `output[out][0]`
        tensor = output
        for key in self.keys:
            tensor = output_at(tensor, key)
        if not isinstance(tensor, Tensor):
            if self.layer is not None:
                raise self.error(f": the layer gives {outline(output)}")
            raise self.error(
                f": the output is no tensor there; the model gives {outline(output)}",
                _examples(output),
            )
        if not tensor.is_floating_point():
            raise self.error(f": it holds {tensor.dtype}, and has no gradient")
        if str(tensor.layout).startswith("torch.sparse"):
            tensor = tensor.to_dense()
        if tensor.element_size() == 1:  # torch sums no float8
            return to_floats(tensor)
        return tensor


# The functions of `TargetKind.value`


def _reduction(
    target: Target, tensor: Tensor, categories: Sequence[str]
) -> TargetValue:
    """The `mean`, `sum` or `norm` of all values, by torch's method of this name."""
    return TargetValue(getattr(tensor, target.kind)(), target.text)


def _only_of_families(
    target: Target, tensor: Tensor, categories: Sequence[str]
) -> TargetValue:
    """Refuse a target that only some families of models have, such as `box`: their
    answers have found its number before (`gradients.answers`).

    `Target.is_general` recognises these kinds of targets by this function.

    Args:
        tensor: the output, whose shape the message names.

    Raises:
        UsageError: always.
    """
    examples = f"{_prefix(target)}norm"
    if tensor.ndim == 2 and not target.keys:
        examples = f"{_class_examples(tensor.shape[1])}, {examples}"
    raise target.error(
        f": this model gives {list(tensor.shape)}, and no {target.kind}",
        f"targets here: {examples}",
    )


def _class_examples(count: int) -> str:
    """The targets of a classifier of `count` classes, for hints."""
    return f"top1, class:0 to class:{count - 1}"


def _class_score(
    target: Target, tensor: Tensor, categories: Sequence[str]
) -> TargetValue:
    """The score of the likeliest class, or of the one that the target names.

    Args:
        tensor: scores [1, K].
        categories: names of the classes; used if there are K of them.

    Raises:
        UsageError: the tensor has another shape, or there is no such class.
    """
    if tensor.ndim != 2 or tensor.shape[0] != 1 or tensor.shape[1] == 0:
        raise target.error(
            f" needs scores of classes [1, K], not {list(tensor.shape)}",
            f"targets here: {_prefix(target)}norm",
        )
    scores = tensor[0]
    names: Sequence[str] = ()
    if len(categories) == len(scores):  # else they belong to another head
        names = categories
    if target.kind == "top1":
        index = int(scores.argmax())
    else:
        examples = [_class_examples(len(scores))]
        index = class_index(target, len(scores), names, examples)
    title = f"class {index}"
    if target.keys:
        title = target.text
    elif names:
        title = names[index]
    return TargetValue(scores[index], title)


def class_index(
    target: Target, count: int, names: Sequence[str], examples: Sequence[str]
) -> int:
    """The index of the class that a target names. Digits are an index, even if a class is
    called `3`; other names count in upper or lower case.

    Args:
        target: its argument is the index or the name.
        count: how many classes there are.
        names: of the classes, as far as they are known.
        examples: targets of this output, for the hint.

    Raises:
        UsageError: there is no such class.
    """
    name = target.argument.lower()
    targets_here = f"targets here: {', '.join(examples)}"
    if name.isdecimal():
        if is_number(name) and int(name) < count:
            return int(name)
        raise target.error(
            f": there are {count} classes, 0 to {count - 1}", targets_here
        )
    lower_names = [class_name.lower() for class_name in names]
    if name in lower_names:
        return lower_names.index(name)
    if not names:
        hint = (
            "the weights name no classes: give a number, or --classes FILE with a name"
            f" on each line; {targets_here}"
        )
    else:
        hint = f"the classes are {listed(names, _LISTED)}; a number is one, too"
        # names of ImageNet are long: people remember one word of them, or misspell them
        near = [class_name for class_name in lower_names if name in class_name]
        near = near or get_close_matches(name, lower_names)
        if near:
            prefix = f"{_prefix(target)}{target.kind}:"
            texts = [shlex.quote(prefix + class_name) for class_name in near[:3]]
            hint = f"did you mean {' or '.join(texts)}?"
    raise target.error(": no class has this name", hint)


@dataclass(frozen=True)
class TargetKind:
    """A kind of target: which number of a tensor it is."""

    value: Callable[[Target, Tensor, Sequence[str]], TargetValue]
    """Takes the target, the tensor and the names of the classes. Returns the number, or
    raises UsageError."""
    of_classes: bool = False
    """Whether the tensor is that of the scores of classes, if the target names no other.
    """
    argument: str = ""
    """A regular expression for `:ARGUMENT` behind its name; empty where it takes none."""


TARGETS = {
    "top1": TargetKind(_class_score, of_classes=True),
    "class": TargetKind(_class_score, of_classes=True, argument=":.+"),
    "box": TargetKind(_only_of_families, argument="(:.+)?"),
    "pixel": TargetKind(_only_of_families, argument=r":\d{1,6},\d{1,6}"),
    "keypoint": TargetKind(_only_of_families, argument=r"(:\d{1,6})?"),
    "mean": TargetKind(_reduction),
    "sum": TargetKind(_reduction),
    "norm": TargetKind(_reduction),
}


def parse(text: str | None) -> Target:
    """Read a target.

    Args:
        text: a value of `--target`; None is the default of the model's family, or the
            likeliest class of a classifier.

    Raises:
        UsageError: the text is not a target.
    """
    if text is None:
        return Target("top1", kind="top1", is_default=True)
    # names of layers may hold anything but a colon
    layer = _LAYER.fullmatch(text)
    if layer is not None:
        channel = None
        if layer["channel"]:
            channel = int(layer["channel"])
        return Target(text, kind="mean", layer=layer["name"], channel=channel)
    keys = []
    kind_and_argument = text
    output = _OUTPUT.fullmatch(text)
    if output is not None:
        keys = re.findall(r"\[([^\]]+)\]", output["keys"])
        kind_and_argument = output["kind"] or "mean"
    name, _, argument = kind_and_argument.partition(":")
    target_kind = TARGETS.get(name)
    if target_kind is not None:
        behind_name = kind_and_argument.removeprefix(name)
        if re.fullmatch(target_kind.argument, behind_name, re.ASCII):
            return Target(text, name, argument, tuple(keys))
    hint = _FORMS
    if text.startswith("layer:"):
        hint = "layer:NAME or layer:NAME:CHANNEL"
    elif re.fullmatch(r"\w[\w -]*", text) and text not in (*TARGETS, "output", "layer"):
        # the model is not loaded yet, so its classes are not known
        as_class = shlex.quote(f"class:{text}")
        hint = f"a class of this name is written {as_class}; other targets: {_FORMS}"
    raise interventions.refusal("target", text, " cannot be read", hint)


# What models return


def output_at(output: Any, key: str) -> Any:
    """A part of a model's output: the value at a key of a mapping, the item at an index of
    a tuple or list, or an attribute of another object. None where there is none.

    Args:
        key: as text, also for an index; empty for the output itself.
    """
    from torch import Tensor

    if not key:
        return output
    if isinstance(output, Mapping):
        return {str(name): item for name, item in output.items()}.get(key)
    if isinstance(output, (tuple, list)) and is_number(key.removeprefix("-")):
        index = int(key)
        if -len(output) <= index < len(output):
            return output[index]
        return None
    if isinstance(output, Tensor):  # `T` or `shape` are not keys
        return None
    return getattr(output, key, None)


def _prefix(target: Target) -> str:
    """The keys of a target as one types them before its kind, `output[out]:`; empty for a
    target without keys."""
    if not target.keys:
        return ""
    return f"output[{']['.join(target.keys)}]:"


def _examples(output: Any) -> str:
    """A hint with targets that an output of any model has."""
    first = outline(output).partition(" ")[0]
    if first == "output":
        return "targets here: norm"
    if first.startswith("output"):
        return f"targets here: '{first}:norm'"
    return _FORMS


def outline(output: Any) -> str:
    """The tensors of a model's output with their shapes, as targets name them: `output[out]
    [1, 21, 64, 64], output[aux] [1, 21, 64, 64]`."""
    from torch import Tensor

    from featviz.hooks.capture import leaves

    tensors = []
    for key, item in leaves(output):
        if isinstance(item, Tensor):
            path = f"[{key.replace('.', '][')}]" if key else ""
            shape = "nested" if item.is_nested else str(list(item.shape))
            tensors.append(f"output{path} {shape}")
    return listed(tensors, _LISTED) or f"a {type(output).__name__} without tensors"


# The options of a pass together

PAIRED = ("output", "grad")
"""The capture kinds for pairs of an output and its gradient."""


def for_drawing(passes: PassOptions, draw: DrawOptions, seed: int) -> PassOptions:
    """The options of a pass, completed for what is drawn: a class activation map captures
    gradients besides outputs.

    Args:
        passes: as the user gave them.
        draw: as the user gave them.
        seed: of the noise of interventions.
    """
    if draw.weighs and passes.capture == ("output",):
        passes = structs.replace(passes, capture=PAIRED)
    return structs.replace(passes, seed=seed)


def check_options(options: PassOptions, draw: DrawOptions) -> None:
    """Refuse options that contradict each other or would do nothing, before any work.

    Args:
        options: after `for_drawing`.
        draw: what is drawn of the captures.

    Raises:
        UsageError: with the options; also where a target or a change cannot be read.
    """
    made_of = ""
    if draw.weighs and options.capture != PAIRED:
        made_of = "a layer's output and its gradient"
    elif draw.attends and options.capture != ("output",):
        made_of = "attention weights"
    if made_of:
        raise UsageError(
            f"reduce={draw.reduce} is made of {made_of}, not of"
            f" capture={','.join(options.capture)}",
            "leave --capture out",
            options=("reduce", "capture"),
        )
    parse(options.target)
    changes = [interventions.parse(*change) for change in options.interventions]
    # an option that does nothing is a mistake of the user
    of_gradients = {
        "target": options.target is not None,
        "grad_rule": options.grad_rule != "plain",
        "edit grad": any(change.operation == "grad" for change in changes),
    }
    for name, is_set in of_gradients.items():
        if is_set and not options.gradients:
            raise UsageError(
                f"{name} does nothing without gradients",
                "add --capture output,grad, or --reduce gradcam",
                options=(name.split()[0],),
            )
