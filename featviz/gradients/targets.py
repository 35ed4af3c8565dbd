"""What gradients are taken of: one number of a model's output, or of a layer's. Reading
a target needs no torch.

    [output[KEY]...:]KIND     top1, class:281, class:tabby, mean, sum, norm, output[out]:mean
    box, box:3, box:dog       of a detector: the most confident box, one by its number or class
    pixel:120,80              of a segmentation or of depth: one pixel of the input
    keypoint:3                of heat maps: the peak of one
    layer:NAME[:CHANNEL]      the mean of a layer's output, or of one channel of it

A kind of target is one entry of `TARGETS`. The model's family (`gradients.families`)
finds the number of `box`, `pixel` and `keypoint`, and if the model is no classifier, that of
`class`, too."""

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
"""An error lists at most this many tensors of an output, or names of classes."""


class TargetValue(NamedTuple):
    """The number that a target means in one output."""

    number: Tensor
    """One value, which gradients are taken of."""
    title: str
    """For people: a class by its name, or `class 281` if the name is not known; another
    target as the user typed it."""
    focus: Detection | Integers | None = None
    """The box, or the mask [h, w] of the region, that the target means; None if it means no
    part of the image."""


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
    """The keys that lead to a tensor inside the output; empty for the output itself."""
    layer: str | None = None
    """The name of the layer whose output is meant; None for the model's output."""
    channel: int | None = None
    """A channel of that layer's output; None for all channels."""
    is_default: bool = False
    """Whether the user named no target. If so, the default of the model's family replaces
    this target."""

    @property
    def is_general(self) -> bool:
        """Whether models of every family have targets of this kind."""
        return TARGETS[self.kind].value is not _only_of_families

    def value(
        self, output: Any, categories: Sequence[str] = (), scores: str | None = ""
    ) -> TargetValue:
        """The number that the target means in an output.

        Args:
            output: the output of the model; or of the target's layer or channel, if the
                target names one.
            categories: names of the model's classes; empty if they are not known.
            scores: `LoadedModel.scores`: the key at which the output has scores of
                classes; empty for the output itself, None if the model is no classifier.
                Not used if the target has keys of its own.

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
        """The error for this target; `message` is the end of a sentence that begins with the
        target."""
        return interventions.refusal("target", self.text, message, hint)

    def _tensor(self, output: Any) -> Tensor:
        """The tensor at the target's keys inside an output. A sparse tensor is made dense,
        and a float8 one is made float32, since torch cannot add up either.

        Raises:
            UsageError: there is no tensor at the keys, or it holds integers, which have no
                gradient.
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
    """The `mean`, `sum` or `norm` of all values, by the method of Tensor with this name."""
    return TargetValue(getattr(tensor, target.kind)(), target.text)


def _only_of_families(
    target: Target, tensor: Tensor, categories: Sequence[str]
) -> TargetValue:
    """Refuse a target that only some families of models have, such as `box`. For a model of
    such a family, its answer (`gradients.answers`) has found the number already.

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
    """The score of the likeliest class, or of the class that the target names.

    Args:
        tensor: scores [1, K].
        categories: names of the classes; ignored unless there are K of them.

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
    # another number of names belongs to another head of the model
    if len(categories) == len(scores):
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
    called `3`. In names, upper and lower case are the same.

    Args:
        target: its argument is the index or the name.
        count: how many classes there are.
        names: names of the classes; empty if they are not known.
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
        # people remember one word of a long name of ImageNet, or misspell the name
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
    """Whether the number is a score of a class. If so, a target without keys means the
    tensor of scores."""
    argument: str = ""
    """A regular expression for `:ARGUMENT` behind its name; empty if it takes none."""


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
        text: a value of `--target`; None for the default of the model's family, or for the
            likeliest class of a classifier.

    Raises:
        UsageError: the text is not a target.
    """
    if text is None:
        return Target("top1", kind="top1", is_default=True)
    # the name of a layer may have any character but a colon
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
    a tuple or list, or an attribute of another object; None if there is no such part.

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
    """The keys of a target as they are typed before its kind, `output[out]:`; empty for a
    target without keys."""
    if not target.keys:
        return ""
    return f"output[{']['.join(target.keys)}]:"


def _examples(output: Any) -> str:
    """A hint with targets that fit an output of any type."""
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


# The options of a pass

PAIRED = ("output", "grad")
"""The capture kinds for pairs of an output and its gradient."""


def for_drawing(passes: PassOptions, draw: DrawOptions, seed: int) -> PassOptions:
    """The options of a pass, with gradients added to its captures if a class activation map
    is drawn, which needs them.

    Args:
        passes: as the user gave them.
        draw: as the user gave them.
        seed: the seed for the noise of interventions.
    """
    if draw.weighs and passes.capture == ("output",):
        passes = structs.replace(passes, capture=PAIRED)
    return structs.replace(passes, seed=seed)


def check_options(options: PassOptions, draw: DrawOptions) -> None:
    """Refuse options that contradict each other or would do nothing, before any work.

    Args:
        options: the result of `for_drawing`.
        draw: how the captures are drawn.

    Raises:
        UsageError: there are such options, or a target or a change cannot be read.
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
