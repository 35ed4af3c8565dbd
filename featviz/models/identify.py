"""Which torchvision architecture the tensors of a file belong to, by their names and
shapes, from an index of every builder (`scripts/make_architectures.py`), but for the
number of classes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from featviz.errors import LoadError
from featviz.models import weights
from featviz.models.rebuild import UnbuiltModule
from featviz.models.weights import Weights
from featviz.text import counted, quoted

INDEX = Path(__file__).with_name("architectures.json.gz")

_SHOWN = 3
"""How many of the nearest architectures are named."""

_MIN_SHARE = 1 / 3
"""The share of an architecture's tensors that must fit before it is called near."""

_AUXILIARY = {
    "aux_classifier.": "aux_loss",
    "aux1.": "aux_logits",
    "aux2.": "aux_logits",
    "AuxLogits.": "aux_logits",
}
"""By the beginning of the names of their tensors, heads that only training uses: the
argument of the builders that switches such a head on."""


class Near(NamedTuple):
    """An architecture, and how many of its tensors a file has."""

    name: str
    fitting: int
    """How many of its tensors the file has, with the same name and shape."""
    total: int
    """How many tensors the architecture has."""

    @property
    def share(self) -> float:
        """The share 0..1 of its tensors that fit."""
        return self.fitting / self.total


@dataclass(frozen=True)
class Match:
    """The architectures that fit a state dict."""

    state_dict: Weights
    names: tuple[str, ...] = ()
    """The architectures that fit entirely, the shortest name first."""
    arguments: Mapping[str, int] = field(default_factory=dict)
    """Arguments for the builder of the first: `num_classes`, `aux_loss` or `aux_logits`."""
    nearest: tuple[Near, ...] = ()
    """If none fits entirely, the architectures of which the most fits, the nearest first."""

    @property
    def name(self) -> str | None:
        """The first of the architectures that fit entirely; None if none does."""
        if self.names:
            return self.names[0]
        return None

    @property
    def description(self) -> str:
        """The architecture of the weights, for people: `it is resnet18 with 7 classes`, or
        the nearest ones."""
        if not self.names:
            near = [
                f"{name} ({fit} of {counted(total, 'tensor')} fit)"
                for name, fit, total in self.nearest
            ]
            if not near:
                return "no architecture of torchvision has such tensors"
            return f"nearest: {', '.join(near)}"
        text = f"it is {self.name}"
        if "num_classes" in self.arguments:
            text += f" with {counted(self.arguments['num_classes'], 'class')}"
        # the builders have two names for the same thing
        for argument in {"aux_loss", "aux_logits"} & self.arguments.keys():
            preposition = "with" if self.arguments[argument] else "without"
            text += f" {preposition} its auxiliary heads"
        if len(self.names) > 1:
            text += f" (or {', '.join(self.names[1:])}, of the same shapes)"
        return text


def identify_file(
    path: Path, arch: str | None, key: str | None, prefix: str | None, ema: bool | None
) -> tuple[str, dict[str, Any]]:
    """Say what a file of weights is.

    Args:
        path: The file.
        arch: The architecture that a config.json beside the file names, as
            `load.architecture_beside` returns it.
        key: The place of the weights in the file; see `weights.find_weights`.
        prefix: The prefix to strip from names; see `weights.find_weights`.
        ema: Whether averaged weights are taken; see `weights.find_weights`.

    Returns:
        A line for people, and a document for programs.

    Raises:
        LoadError: Where the file is not a checkpoint, needs --trust, or has no weights
            at `key`.
    """
    try:
        with weights.as_load_errors(path):
            content = weights.read(path)
            state_dict = weights.find_weights(content, key, prefix, ema, path.name)
            module = state_dict.module
            if isinstance(module, UnbuiltModule):
                raise module.refusal
            match = best_match(state_dict)
    except LoadError as error:
        # an option that the hint adds is one of `run`: `identify` has no --trust
        hint = f"with `featviz run`: {error.hint}" if error.add else error.hint
        raise LoadError(error.message, hint) from error
    class_name = None if module is None else type(module).__name__
    if class_name is not None:  # `run` takes a whole model without its config.json
        arch = None
    elif arch is not None:
        arch = arch.removeprefix("timm:")
    document = {
        "file": path.name,
        "steps": list(match.state_dict.steps),
        "tensors": len(match.state_dict.tensors),
        "architecture": match.name,
        "also": list(match.names[1:]),
        "num_classes": match.arguments.get("num_classes"),
        "nearest": [near._asdict() for near in match.nearest],
        "whole_model": class_name,
        "beside": arch,
    }
    return f"{path.name}: {'; '.join(_facts(match, class_name, arch))}", document


def _facts(match: Match, class_name: str | None, arch: str | None) -> list[str]:
    """What is known of a file, for people.

    Args:
        match: The architectures that fit its tensors.
        class_name: The class of the whole model in the file; None if it holds only tensors.
        arch: The architecture that a config.json beside the file names, if there is one.
    """
    facts = [*match.state_dict.steps, counted(len(match.state_dict.tensors), "tensor")]
    if class_name is not None:
        facts.append(f"a whole model ({quoted(class_name)}), which is run as it stands")
    if arch is not None:
        facts.append(f"config.json beside it says {quoted(arch)}")
    if match.name is not None:
        facts.append(match.description)
    elif class_name is None and arch is None:  # `run` needs --arch for such a file
        facts.append(match.description)
        facts.append("--arch names the class or the architecture")
    return facts


def best_match(state_dict: Weights) -> Match:
    """Find the architecture of weights whose names may have prefixes. Of their
    `weights.stripped_variants`, the first that fits an architecture entirely is matched;
    if there is none, the one that fits most of an architecture."""
    matches = [identify(variant) for variant in weights.stripped_variants(state_dict)]
    for match in matches:
        if match.names:
            return match
    # of equal shares `max` takes the first, whose names were changed least
    return max(
        matches, key=lambda match: match.nearest[0].share if match.nearest else 0
    )


def identify(state_dict: Weights) -> Match:
    """Find the architecture of a state dict from its keys and shapes.

    An architecture fits entirely if two things hold. All tensors that it has in common with
    the state dict have the same shapes, except for the number of classes. All tensors that
    only one of the two has belong to auxiliary heads."""
    shapes = {
        key: list(tensor.shape)
        for key, tensor in state_dict.tensors.items()
        # old checkpoints lack BatchNorm's step counter
        if not key.endswith("num_batches_tracked")
    }
    index = _index()
    names = []
    candidates = []
    # the shortest first: `resnet50` before `quantized_resnet50`, whose tensors are the
    # same
    for name in sorted(index, key=lambda name: (len(name), name)):
        expected = index[name]["tensors"]
        common = shapes.keys() & expected.keys()
        fitting = _count_fitting(shapes, index[name])
        candidates.append(Near(name, fitting, len(expected)))
        differing = shapes.keys() ^ expected.keys()
        are_auxiliary = all(key.startswith(tuple(_AUXILIARY)) for key in differing)
        if fitting == len(common) and are_auxiliary:
            names.append(name)
    if names:
        return Match(
            state_dict, tuple(names), _builder_arguments(shapes, index[names[0]])
        )
    candidates.sort(key=lambda near: near.share, reverse=True)
    nearest = [near for near in candidates[:_SHOWN] if near.share >= _MIN_SHARE]
    return Match(state_dict, nearest=tuple(nearest))


def _count_fitting(
    shapes: Mapping[str, Sequence[int]], entry: Mapping[str, Any]
) -> int:
    """How many tensors of a file have the name and shape that an architecture expects.

    Args:
        shapes: The shapes of the file's tensors, by name.
        entry: The architecture's entry in the index (see `_builder_arguments`).
    """
    head = entry["head"]
    return sum(
        key in shapes and _fits(shapes[key], expected, head.get(key))
        for key, expected in entry["tensors"].items()
    )


def _fits(
    shape: Sequence[int], expected: Sequence[int], head: Sequence[int] | None
) -> bool:
    """Whether a tensor has the shape that an architecture expects.

    Args:
        shape: The shape of the tensor.
        expected: The shape in the architecture.
        head: For a tensor with a size that follows from the number of classes, the axis of
            that size, along which any size fits, and a factor. None for other tensors.
    """
    if len(shape) != len(expected):
        return False
    # a head with another number of classes differs only along this axis
    differing = [axis for axis, size in enumerate(shape) if size != expected[axis]]
    return not differing or (head is not None and differing == [head[0]])


def _builder_arguments(
    shapes: Mapping[str, Sequence[int]], entry: Mapping[str, Any]
) -> dict[str, int]:
    """The arguments of a builder that make tensors of these shapes.

    Args:
        shapes: The shapes of a file's tensors, by name.
        entry: The builder's entry in the index. `tensors` has the shapes of its tensors,
            by name. `head` has, by name, the tensors with a size that follows from the
            number of classes: the axis of that size, and the factor in
            size = factor * num_classes.
    """
    arguments = {}
    for key, (axis, factor) in entry["head"].items():
        if key in shapes:
            # all tensors of a head say the same
            arguments["num_classes"] = int(shapes[key][axis] // factor)
            break
    for prefix, argument in _AUXILIARY.items():
        in_file = any(key.startswith(prefix) for key in shapes)
        in_builder = any(key.startswith(prefix) for key in entry["tensors"])
        if in_file != in_builder:
            arguments[argument] = in_file
    return arguments


@cache
def _index() -> dict[str, dict[str, Any]]:
    """`tensors` and `head` of every builder (see `_builder_arguments`), by its name."""
    index: dict[str, dict[str, Any]] = json.loads(gzip.decompress(INDEX.read_bytes()))
    return index
