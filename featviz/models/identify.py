"""Which torchvision architecture the tensors of a file belong to, by their names and shapes, from
an index of every builder (`scripts/make_architectures.py`), but for the number of classes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from featviz.errors import LoadError
from featviz.models import weights
from featviz.models.rebuild import UnbuiltModule
from featviz.models.weights import Weights
from featviz.text import quoted

INDEX = Path(__file__).with_name("architectures.json.gz")
_NEAREST, _COLUMNS = 3, ("name", "fitting", "total")
_LEAST_NEAR = 1 / 3

_AUXILIARY = {
    "aux_classifier.": "aux_loss",
    "aux1.": "aux_logits",
    "aux2.": "aux_logits",
    "AuxLogits.": "aux_logits",
}
"""Heads that only training uses, and the builders' argument that says whether they are there."""


@dataclass(frozen=True)
class Known:
    """The architectures that fit tensors: `names` entirely, `nearest` in part."""

    form: Weights
    names: tuple[str, ...] = ()
    arguments: Mapping[str, int] = field(default_factory=dict)
    """Of the builder: `num_classes`, `aux_loss` or `aux_logits`."""
    nearest: tuple[tuple[str, int, int], ...] = ()
    """Each with how many tensors fit, and how many it has."""

    @property
    def name(self) -> str | None:
        """The plainest of the architectures that fit."""
        return self.names[0] if self.names else None

    @property
    def words(self) -> str:
        """For people."""
        if not self.names:
            near = (f"{name} ({fit} of {of} tensors fit)" for name, fit, of in self.nearest)
            return f"nearest: {', '.join(near)}"
        words = f"it is {self.name}"
        if "num_classes" in self.arguments:
            words += f" with {self.arguments['num_classes']} classes"
        for argument in {"aux_loss", "aux_logits"} & self.arguments.keys():
            words += f" {'with' if self.arguments[argument] else 'without'} its auxiliary heads"
        twins = ", ".join(self.names[1:])
        return words + (f" (or {twins}, of the same shapes)" if twins else "")


def identify_file(
    path: Path, beside: str | None, key: str | None, prefix: str | None, ema: bool | None
) -> tuple[str, dict[str, Any]]:
    """What a file of weights is, in words and as a document for programs; `beside` is what a
    config.json names (`load.architecture_beside`)."""
    try:
        with weights.one_line(path):
            return _identify_file(path, beside, key, prefix, ema)
    except LoadError as error:  # identify has no --trust
        trusted = f"with `featviz run`: {error.hint}" if error.add else error.hint
        raise LoadError(error.message, trusted) from error


def _identify_file(
    path: Path, beside: str | None, key: str | None, prefix: str | None, ema: bool | None
) -> tuple[str, dict[str, Any]]:
    content = weights.read(path)
    found, module = weights.unwrap(content, key, prefix, ema, path.name)
    if isinstance(module, UnbuiltModule):
        raise module.refusal
    match = identify_forms(weights.stripped_forms(found))
    whole = None if module is None else type(module).__name__
    beside = None if whole else (beside or "").removeprefix("timm:") or None
    steps, tensors = [*match.form[1]], len(match.form[0])
    words = [*steps, f"{tensors} tensors"]
    if whole is not None:
        words.append(f"a whole model ({quoted(whole)}), which is run as it stands")
    if beside is not None:
        words.append(f"config.json beside it says {quoted(beside)}")
    if match.name is not None:
        words.append(match.words)
    elif whole is None and beside is None:  # `run` does not take it as it stands
        nothing = "no architecture of torchvision has such tensors"
        words.append(match.words if match.nearest else nothing)
        words.append("--arch names the class or the architecture")
    document = {
        "file": path.name,
        "steps": steps,
        "tensors": tensors,
        "architecture": match.name,
        "also": list(match.names[1:]),
        "num_classes": match.arguments.get("num_classes"),
        "nearest": [dict(zip(_COLUMNS, near, strict=True)) for near in match.nearest],
        "whole_model": whole,
        "beside": beside,
    }
    return f"{path.name}: {'; '.join(words)}", document


def identify_forms(forms: Iterable[Weights]) -> Known:
    """The best match among several forms of the same tensors, with and without prefixes."""
    matches = [identify(form) for form in forms]
    best = [max((fit / of for _, fit, of in known.nearest), default=0.0) for known in matches]
    whole = [known for known in matches if known.names]
    return whole[0] if whole else matches[best.index(max(best))]


def identify(form: Weights) -> Known:
    """Find the architecture of a state dict from its keys and shapes."""
    # without BatchNorm's step counter, which old checkpoints lack
    shapes = {
        key: list(tensor.shape)
        for key, tensor in form[0].items()
        if not key.endswith("num_batches_tracked")
    }
    index, names, near = _index(), [], []
    for name in sorted(index, key=lambda name: (name.startswith("quantized_"), len(name), name)):
        entry, fitting = index[name], 0
        both = shapes.keys() & entry["tensors"].keys()
        for key in both:
            shape, expected = shapes[key], entry["tensors"][key]
            free = entry["head"][key][0] if key in entry["head"] else -1
            fitting += len(shape) == len(expected) and all(
                a == b or axis == free
                for axis, (a, b) in enumerate(zip(shape, expected, strict=True))
            )
        near.append((name, fitting, len(entry["tensors"])))
        other = shapes.keys() ^ entry["tensors"].keys()
        if fitting == len(both) and all(key.startswith(tuple(_AUXILIARY)) for key in other):
            names.append(name)
    if not names:
        near.sort(key=lambda one: (-one[1] / one[2], -one[1]))
        close = [one for one in near[:_NEAREST] if one[1] >= _LEAST_NEAR * one[2]]
        return Known(form, nearest=tuple(close))
    entry, arguments = index[names[0]], {}
    for key, (axis, factor, offset) in entry["head"].items():
        if key in shapes:
            arguments["num_classes"] = int((shapes[key][axis] - offset) // factor)
            break
    for prefix, argument in _AUXILIARY.items():
        there, made = (
            any(key.startswith(prefix) for key in keys) for keys in (shapes, entry["tensors"])
        )
        if there != made:
            arguments[argument] = there
    return Known(form, tuple(names), arguments)


@cache
def _index() -> dict[str, dict[str, Any]]:
    index: dict[str, dict[str, Any]] = json.loads(gzip.decompress(INDEX.read_bytes()))
    return index
