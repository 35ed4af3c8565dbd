"""Which torchvision architecture the tensors of a file belong to, by their names and
shapes, from an index of every builder (`scripts/make_architectures.py`), but for the
number of classes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from featviz.errors import LoadError
from featviz.models import weights
from featviz.models.rebuild import UnbuiltModule
from featviz.models.weights import Weights
from featviz.text import quoted

INDEX = Path(__file__).with_name("architectures.json.gz")

_SHOWN = 3
"""How many of the nearest architectures are named."""

_MIN_SHARE = 1 / 3
"""Share of its tensors that must fit before an architecture is called near."""

_AUXILIARY = {
    "aux_classifier.": "aux_loss",
    "aux1.": "aux_logits",
    "aux2.": "aux_logits",
    "AuxLogits.": "aux_logits",
}
"""Heads that only training uses, and the builders' argument that says whether they are
there."""


class Near(NamedTuple):
    """An architecture of which some tensors fit."""

    name: str
    fitting: int
    """How many of its tensors a file has, in the same shape."""
    total: int
    """How many tensors it has."""

    @property
    def share(self) -> float:
        """The share 0..1 of its tensors that fit."""
        return self.fitting / self.total


@dataclass(frozen=True)
class Match:
    """The architectures that fit a state dict: `names` entirely, `nearest` in part."""

    state_dict: Weights
    names: tuple[str, ...] = ()
    arguments: Mapping[str, int] = field(default_factory=dict)
    """Of the builder: `num_classes`, `aux_loss` or `aux_logits`."""
    nearest: tuple[Near, ...] = ()

    @property
    def name(self) -> str | None:
        """The plainest of the architectures that fit."""
        return self.names[0] if self.names else None

    @property
    def description(self) -> str:
        """For people."""
        if not self.names and not self.nearest:
            return "no architecture of torchvision has such tensors"
        if not self.names:
            near = (
                f"{name} ({fit} of {total} tensors fit)"
                for name, fit, total in self.nearest
            )
            return f"nearest: {', '.join(near)}"
        text = f"it is {self.name}"
        if "num_classes" in self.arguments:
            text += f" with {self.arguments['num_classes']} classes"
        for argument in {"aux_loss", "aux_logits"} & self.arguments.keys():
            text += (
                f" {'with' if self.arguments[argument] else 'without'} its auxiliary"
                " heads"
            )
        if len(self.names) > 1:
            text += f" (or {', '.join(self.names[1:])}, of the same shapes)"
        return text


def identify_file(
    path: Path, arch: str | None, key: str | None, prefix: str | None, ema: bool | None
) -> tuple[str, dict[str, Any]]:
    """Say what a file of weights is.

    Args:
        path: The file.
        arch: What a config.json beside it names (`load.architecture_beside`).
        key: Where its weights are, `prefix`: what is stripped from their names, and
            `ema`: whether they are averaged ones, as `weights.unwrap` takes them.

    Returns:
        A line for people, and a document for programs.

    Raises:
        LoadError: Where the file is no checkpoint, or needs trust.
    """
    try:
        with weights.one_line(path):
            return _identify_file(path, arch, key, prefix, ema)
    except LoadError as error:  # identify has no --trust
        hint = f"with `featviz run`: {error.hint}" if error.add else error.hint
        raise LoadError(error.message, hint) from error


def _identify_file(
    path: Path, arch: str | None, key: str | None, prefix: str | None, ema: bool | None
) -> tuple[str, dict[str, Any]]:
    state_dict, module = weights.unwrap(weights.read(path), key, prefix, ema, path.name)
    if isinstance(module, UnbuiltModule):
        raise module.refusal
    match = identify_variants(weights.stripped_variants(state_dict))
    tensors = match.state_dict.tensors
    steps = match.state_dict.steps
    facts = [*steps, f"{len(tensors)} tensors"]
    class_name = None
    if module is not None:  # `run` does not look at a config.json then
        class_name = type(module).__name__
        arch = None
        facts.append(f"a whole model ({quoted(class_name)}), which is run as it stands")
    elif arch is not None:
        arch = arch.removeprefix("timm:")
        facts.append(f"config.json beside it says {quoted(arch)}")
    if match.name is not None:
        facts.append(match.description)
    elif class_name is None and arch is None:  # `run` does not take it as it stands
        facts.append(match.description)
        facts.append("--arch names the class or the architecture")
    document = {
        "file": path.name,
        "steps": list(steps),
        "tensors": len(tensors),
        "architecture": match.name,
        "also": list(match.names[1:]),
        "num_classes": match.arguments.get("num_classes"),
        "nearest": [near._asdict() for near in match.nearest],
        "whole_model": class_name,
        "beside": arch,
    }
    return f"{path.name}: {'; '.join(facts)}", document


def identify_variants(state_dicts: Iterable[Weights]) -> Match:
    """The best match among variants of the same tensors, with and without prefixes."""
    matches = [identify(state_dict) for state_dict in state_dicts]
    for match in matches:
        if match.names:
            return match
    # of equals the first, whose names were changed least
    return max(
        matches, key=lambda match: match.nearest[0].share if match.nearest else 0.0
    )


def identify(state_dict: Weights) -> Match:
    """Find the architecture of a state dict from its keys and shapes.

    An architecture fits entirely where all tensors that both have agree in their
    shapes, but for the number of classes, and those that one of them lacks are of
    auxiliary heads."""
    shapes = {
        key: list(tensor.shape)
        for key, tensor in state_dict.tensors.items()
        # BatchNorm's step counter, which old checkpoints lack
        if not key.endswith("num_batches_tracked")
    }
    index = _index()
    names = []
    candidates = []
    # the plainest first: `resnet50` before `quantized_resnet50`, whose tensors are the
    # same
    for name in sorted(
        index, key=lambda name: (name.startswith("quantized_"), len(name), name)
    ):
        head = index[name]["head"]
        expected = index[name]["tensors"]
        common = shapes.keys() & expected.keys()
        fitting = sum(
            _fits(shapes[key], expected[key], head.get(key)) for key in common
        )
        candidates.append(Near(name, fitting, len(expected)))
        differing = shapes.keys() ^ expected.keys()
        if fitting == len(common) and all(
            key.startswith(tuple(_AUXILIARY)) for key in differing
        ):
            names.append(name)
    if names:
        return Match(state_dict, tuple(names), _arguments(shapes, index[names[0]]))
    candidates.sort(key=lambda near: (near.share, near.fitting), reverse=True)
    nearest = [near for near in candidates[:_SHOWN] if near.share >= _MIN_SHARE]
    return Match(state_dict, nearest=tuple(nearest))


def _fits(
    shape: Sequence[int], expected: Sequence[int], head: Sequence[int] | None
) -> bool:
    """Whether a tensor has the shape that an architecture expects; along the first of
    the three numbers in `head` (`_arguments`), if it is a layer's that gives classes,
    any size."""
    if len(shape) != len(expected):
        return False
    differing = [axis for axis, size in enumerate(shape) if size != expected[axis]]
    return not differing or (head is not None and differing == [head[0]])


def _arguments(
    shapes: Mapping[str, Sequence[int]], entry: Mapping[str, Any]
) -> dict[str, int]:
    """The arguments of a builder that make tensors of these shapes.

    Args:
        shapes: Of the tensors of a file.
        entry: The builder's in the index: `tensors`, shapes by names, and `head`: for
            each tensor whose size follows from the number of classes, the axis, and the
            factor and the offset of size = factor * num_classes + offset.
    """
    arguments = {}
    for key, (axis, factor, offset) in entry["head"].items():
        if key in shapes:
            # all tensors of a head say the same
            arguments["num_classes"] = int((shapes[key][axis] - offset) // factor)
            break
    for prefix, argument in _AUXILIARY.items():
        in_file = any(key.startswith(prefix) for key in shapes)
        in_builder = any(key.startswith(prefix) for key in entry["tensors"])
        if in_file != in_builder:
            arguments[argument] = in_file
    return arguments


@cache
def _index() -> dict[str, dict[str, Any]]:
    index: dict[str, dict[str, Any]] = json.loads(gzip.decompress(INDEX.read_bytes()))
    return index
