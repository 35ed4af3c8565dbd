"""The story of `identify`: which torchvision architecture the tensors of a file belong to, by
their names and shapes.

The index that ships with featviz (`scripts/make_architectures.py` writes it) holds every builder of
torchvision; the head is left out of the comparison, and the number of classes is read from it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import isqrt
from pathlib import Path
from typing import Any

from featviz.errors import LoadError
from featviz.models.files import checkpoint
from featviz.models.files.state_dict import Unwrapped, stripped_forms, unwrap
from featviz.models.huggingface import architecture_beside
from featviz.models.zoo import timm_name_beside
from featviz.text import quoted

INDEX = Path(__file__).with_name("architectures.json.gz")
_NEAREST = 3
_LEAST_NEAR = 1 / 3
"""Share of an architecture's tensors that must fit for it to be named a neighbour."""

_AUXILIARY = {
    "aux_classifier.": "aux_loss",
    "aux1.": "aux_logits",
    "aux2.": "aux_logits",
    "AuxLogits.": "aux_logits",
}
"""Heads that only training uses, and the builders' argument that says whether they are there."""

_POSITIONS = "encoder.pos_embedding"
"""torchvision's vision transformers: [1, tokens, channels], by the size of the input."""

_HEADS = {"aux_loss": "its auxiliary head", "aux_logits": "its auxiliary heads"}
"""The arguments above, in words."""

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Near:
    """An architecture, and how many of its tensors the file has in the right shape."""

    name: str
    fitting: int
    total: int

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.name} ({self.fitting} of {self.total} tensors fit)"


@dataclass(frozen=True)
class Known:
    """The architectures that fit tensors: those of `names` entirely (twins have the same shapes),
    those of `nearest` in part."""

    form: Unwrapped
    """The tensors as they fit, with what was done to their names."""
    names: tuple[str, ...]
    num_classes: int | None
    nearest: tuple[Near, ...]
    image_size: int | None = None
    """Pixels of a side of a vision transformer's input, from its table of positions."""
    auxiliary: Mapping[str, bool] = field(default_factory=dict)
    """`aux_loss` or `aux_logits`, where the file differs from what the builder makes unasked."""

    @property
    def arguments(self) -> dict[str, int]:
        """Keyword arguments of the builder, where they differ from its defaults."""
        values = {"num_classes": self.num_classes, "image_size": self.image_size, **self.auxiliary}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def name(self) -> str | None:
        """The plainest of the architectures that fit."""
        return self.names[0] if self.names else None

    @property
    def best(self) -> float:
        """Share of the nearest architecture's tensors that fit."""
        return self.nearest[0].fitting / self.nearest[0].total if self.nearest else 0.0

    @property
    def words(self) -> str:
        """For people."""
        if not self.names:
            return f"nearest: {', '.join(near.words for near in self.nearest) or 'nothing'}"
        classes = "" if self.num_classes is None else f" with {self.num_classes} classes"
        heads = "".join(
            f" {'with' if there else 'without'} {_HEADS[name]}"
            for name, there in self.auxiliary.items()
        )
        twins = f" (or {', '.join(self.names[1:])}, of the same shapes)" if self.names[1:] else ""
        return f"it is {self.name}{classes}{heads}{twins}"


@dataclass(frozen=True)
class Identification:
    """A file of weights, and the architecture that its tensors belong to."""

    file: str
    match: Known
    whole: str | None = None
    """The class of the whole model that the file holds; None where it holds weights."""
    beside: str | None = None
    """What a config.json beside weights says that they belong to."""

    @property
    def known(self) -> bool:
        """Whether `run` takes the file as it stands: an architecture fits entirely, a config.json
        names one, or it is a whole model."""
        return self.whole is not None or self.beside is not None or self.match.name is not None

    @property
    def words(self) -> str:
        """For people."""
        steps = [*self.match.form.steps, f"{len(self.match.form.tensors)} tensors"]
        if self.whole is not None:
            steps.append(f"a whole model ({quoted(self.whole)}), which is run as it stands")
        if self.beside is not None:
            steps.append(f"config.json beside it says {quoted(self.beside)}")
        if self.match.name is not None or (self.match.nearest and not self.known):
            steps.append(self.match.words)
        elif not self.known:
            steps.append("no architecture of torchvision has such tensors")
        if not self.known:
            steps.append("--arch names the class or the architecture")
        return f"{self.file}: {'; '.join(steps)}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        match = self.match
        return {
            "file": self.file,
            "steps": list(match.form.steps),
            "tensors": len(match.form.tensors),
            "architecture": match.name,
            "also": list(match.names[1:]),
            "num_classes": match.num_classes,
            "nearest": [vars(near) for near in match.nearest],
            "whole_model": self.whole,
            "beside": self.beside,
        }


def identify_file(
    path: Path, key: str | None = None, prefix: str | None = None, ema: bool | None = None
) -> Identification:
    """Identify a file of weights.

    Raises:
        LoadError: no checkpoint, or no weights in it.
    """
    try:
        content = checkpoint.read(path)
    except LoadError as error:
        trusted = f"with `featviz run`: {error.hint}" if "--trust" in error.add else error.hint
        raise LoadError(error.message, trusted) from error
    weights = unwrap(content, key, prefix, ema, path.name)
    forms = stripped_forms(weights)
    match, beside = identify_forms(forms), timm_name_beside(path) or architecture_beside(path)
    if weights.module is not None:
        return Identification(path.name, match, type(weights.module).__name__)
    return Identification(path.name, match, beside=beside)


def identify_forms(forms: Iterable[Unwrapped]) -> Known:
    """The best match among several forms of the same tensors, with and without prefixes."""
    matches = [identify(form) for form in forms]
    whole = [known for known in matches if known.names]
    return (whole or sorted(matches, key=lambda known: -known.best))[0]


def identify(form: Unwrapped) -> Known:
    """Find the architecture of a state dict from its keys and shapes."""
    shapes = {key: list(tensor.shape) for key, tensor in form.tensors.items()}
    # without BatchNorm's step counter, which old checkpoints lack
    counted = {k: shape for k, shape in shapes.items() if not k.endswith("num_batches_tracked")}
    exact = [name for name, entry in _index().items() if _fits(counted, entry)]
    exact = exact or _fitting_but_heads(counted)
    exact.sort(key=_plain_first)
    if exact:
        entry = _index()[exact[0]]
        classes, size = None, None
        for key, (axis, factor, offset) in entry["head"].items():
            if key in counted and classes is None:
                classes = int((counted[key][axis] - offset) // factor)
        if counted.get(_POSITIONS) != entry["tensors"].get(_POSITIONS):  # not the default
            size = isqrt(counted[_POSITIONS][1] - 1) * counted["conv_proj.weight"][-1]
        there, made = _heads(counted), _heads(entry["tensors"])
        heads = {_AUXILIARY[prefix]: prefix in there for prefix in sorted(there ^ made)}
        return Known(form, tuple(exact), classes, (), size, heads)
    near = [_near(counted, name, entry) for name, entry in _index().items()]
    near.sort(key=lambda n: (-n.fitting / n.total, -n.fitting, _plain_first(n.name)))
    close = (n for n in near[:_NEAREST] if n.fitting >= _LEAST_NEAR * n.total)
    return Known(form, (), None, tuple(close))


def _plain_first(name: str) -> tuple[bool, int, str]:
    return name.startswith("quantized_"), len(name), name


@cache
def _index() -> dict[str, dict[str, Any]]:
    index: dict[str, dict[str, Any]] = json.loads(gzip.decompress(INDEX.read_bytes()))
    return index


def _fits(shapes: Shapes, entry: Mapping[str, Any]) -> bool:
    expected, head = entry["tensors"], entry["head"]
    if len(shapes) != len(expected) or shapes.keys() != expected.keys():
        return False
    return all(
        shape == expected[key]
        or (key in head and _same_but(shape, expected[key], head[key][0]))
        or (key == _POSITIONS and _same_but(shape, expected[key], 1))
        for key, shape in shapes.items()
    )


def _fitting_but_heads(shapes: Shapes) -> list[str]:
    """Names of the builders of which all fits but the auxiliary heads, which one of the two
    lacks."""

    def main(tensors: Shapes) -> Shapes:
        return {k: shape for k, shape in tensors.items() if not k.startswith(tuple(_AUXILIARY))}

    heads, rest = _heads(shapes), main(shapes)
    others = {n: entry for n, entry in _index().items() if _heads(entry["tensors"]) != heads}
    return [n for n, e in others.items() if _fits(rest, {**e, "tensors": main(e["tensors"])})]


def _heads(keys: Iterable[str]) -> set[str]:
    """How the names of the auxiliary heads among these tensors begin."""
    return {prefix for key in keys for prefix in _AUXILIARY if key.startswith(prefix)}


def _same_but(shape: Sequence[int], expected: Sequence[int], axis: int) -> bool:
    """Whether two shapes differ at most along an axis."""
    return len(shape) == len(expected) and all(
        a == b or i == axis for i, (a, b) in enumerate(zip(shape, expected, strict=True))
    )


def _near(shapes: Shapes, name: str, entry: Mapping[str, Any]) -> Near:
    expected, head = entry["tensors"], entry["head"]
    fitting = sum(
        shapes.get(key) == shape
        or (key in head and key in shapes and _same_but(shapes[key], shape, head[key][0]))
        for key, shape in expected.items()
    )
    return Near(name, fitting, len(expected))
