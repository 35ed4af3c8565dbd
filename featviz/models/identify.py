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

from featviz.models.files import checkpoint
from featviz.models.files.state_dict import Unwrapped, stripped_forms, unwrap

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

_COUNTERS = "num_batches_tracked"
"""BatchNorm's step counter; old checkpoints lack it."""

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

    @property
    def known(self) -> bool:
        """Whether an architecture fits entirely."""
        return self.match.name is not None

    @property
    def words(self) -> str:
        """For people."""
        steps = [*self.match.form.steps, f"{len(self.match.form.tensors)} tensors"]
        return f"{self.file}: {'; '.join([*steps, self.match.words])}"

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
        }


def identify_file(
    path: Path, key: str | None = None, prefix: str | None = None, ema: bool | None = None
) -> Identification:
    """Identify a file of weights.

    Raises:
        LoadError: no checkpoint, or no weights in it.
    """
    content = unwrap(checkpoint.read(path), key, prefix, ema, path.name)
    return Identification(path.name, identify_forms(stripped_forms(content)))


def identify_forms(forms: Iterable[Unwrapped]) -> Known:
    """The best match among several forms of the same tensors, with and without prefixes."""
    matches = [identify(form) for form in forms]
    whole = [known for known in matches if known.names]
    return (whole or sorted(matches, key=lambda known: -known.best))[0]


def identify(form: Unwrapped) -> Known:
    """Find the architecture of a state dict from its keys and shapes."""
    shapes = {key: list(tensor.shape) for key, tensor in form.tensors.items()}
    counted = {key: shape for key, shape in shapes.items() if not key.endswith(_COUNTERS)}
    exact = [name for name, entry in _index().items() if _fits(counted, entry)]
    exact = exact or _fitting_but_heads(counted)
    exact.sort(key=_plain_first)
    if exact:
        entry = _index()[exact[0]]
        classes, size = _classes(counted, entry), _image_size(counted, entry)
        heads = _auxiliary(_heads(counted), _heads_of(exact[0]))
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
    heads = _heads(shapes)
    others = [name for name in _index() if _heads_of(name) != heads]
    return [name for name in others if _fits_without_heads(shapes, _index()[name])]


def _fits_without_heads(shapes: Shapes, entry: Mapping[str, Any]) -> bool:
    main = {key: shape for key, shape in entry["tensors"].items() if not _is_auxiliary(key)}
    rest = {key: shape for key, shape in shapes.items() if not _is_auxiliary(key)}
    return _fits(rest, {**entry, "tensors": main})


def _auxiliary(there: set[str], made: set[str]) -> dict[str, bool]:
    """Arguments of the auxiliary heads that the file has and the builder does not make, or the
    other way round; both sets are those of `_heads`."""
    return {
        argument: prefix in there
        for prefix, argument in _AUXILIARY.items()
        if (prefix in there) != (prefix in made)
    }


def _heads(keys: Iterable[str]) -> set[str]:
    """How the names of the auxiliary heads among these tensors begin."""
    among = [key for key in keys if _is_auxiliary(key)]
    return {prefix for prefix in _AUXILIARY if any(key.startswith(prefix) for key in among)}


@cache
def _heads_of(name: str) -> set[str]:
    """Those of a builder."""
    return _heads(_index()[name]["tensors"])


def _is_auxiliary(key: str) -> bool:
    return key.startswith(tuple(_AUXILIARY))


def _image_size(shapes: Shapes, entry: Mapping[str, Any]) -> int | None:
    """The side of a vision transformer's input, if it is not the builder's default."""
    if _POSITIONS not in shapes or shapes[_POSITIONS] == entry["tensors"][_POSITIONS]:
        return None
    return isqrt(shapes[_POSITIONS][1] - 1) * shapes["conv_proj.weight"][-1]


def _same_but(shape: Sequence[int], expected: Sequence[int], axis: int) -> bool:
    """Whether two shapes differ at most along an axis."""
    return len(shape) == len(expected) and all(
        a == b or i == axis for i, (a, b) in enumerate(zip(shape, expected, strict=True))
    )


def _classes(shapes: Shapes, entry: Mapping[str, Any]) -> int | None:
    for key, (axis, factor, offset) in entry["head"].items():
        if key not in shapes:
            continue
        return int((shapes[key][axis] - offset) // factor)
    return None


def _near(shapes: Shapes, name: str, entry: Mapping[str, Any]) -> Near:
    expected, head = entry["tensors"], entry["head"]
    fitting = sum(
        shapes.get(key) == shape
        or (key in head and key in shapes and _same_but(shapes[key], shape, head[key][0]))
        for key, shape in expected.items()
    )
    return Near(name, fitting, len(expected))
