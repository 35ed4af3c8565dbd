"""`--input NAME=VALUE`: further arguments of a model's forward, beside the image."""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from featviz.errors import FileError, UsageError
from featviz.files import npy, read_bytes
from featviz.models import digests
from featviz.models.digests import SHOWN_DIGITS
from featviz.models.files.tensors import read_tensor
from featviz.text import listed, quoted

IMAGE = "image"
"""The VALUE that stands for the image itself."""

FORMS = (
    "a number, true, false, none, zeros:1,77, ones:1,77:int64, a file .npy, .npz or .pt, or image"
)

_MADE = re.compile(r"(zeros|ones):(\d+(?:,\d+)*)(?::(\w+))?")
_TYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
_WORDS = {"true": True, "false": False, "none": None}
_MOST_VALUES = 2**28
_MOST_BYTES = 2**30
_SUFFIXES = (".npy", ".npz", ".pt")


@dataclass(frozen=True)
class Argument:
    """One value of `--input`."""

    name: str
    """The parameter of forward."""
    key: str | None
    """Where the parameter is a dict: the key in it."""
    value: Any
    """A tensor, a number, None, or IMAGE."""
    words: str
    """For the manifest; of a file its name and sha256, no folder."""


def parse(texts: Sequence[str]) -> list[Argument]:
    """Read the values of `--input`.

    Raises:
        UsageError: a text is not NAME=VALUE, a value is none, or two of them have one name.
    """
    arguments = [_parsed(text) for text in texts]
    seen: set[tuple[str, str | None]] = set()
    for one in arguments:
        wholes = (
            {(one.name, None)} if one.key else {place for place in seen if place[0] == one.name}
        )
        if (one.name, one.key) in seen or wholes & seen:
            raise UsageError(f"--input {one.name} is given twice", "give it once, or its keys")
        seen.add((one.name, one.key))
    return arguments


def from_values(given: Mapping[str, Any]) -> list[Argument]:
    """Arguments that a program has at hand: tensors, arrays, numbers, whatever forward takes; a
    dict's values by their keys; `"image"` for the image itself.

    Raises:
        UsageError: a name is no name of an argument.
    """
    wrong = [name for name in given if not isinstance(name, str) or not name.isidentifier()]
    if wrong:
        raise UsageError(f"--input {quoted(repr(wrong[0]))} is no name", "{'t': 10}")
    return [
        Argument(name, key, *_from_memory(f"{name}.{key}" if key else name, value))
        for name, values in given.items()
        for key, value in _by_keys(values)
    ]


def _by_keys(values: Any) -> Iterable[tuple[str | None, Any]]:
    """A dict's values by their keys; an empty one is a value, as all others are."""
    return values.items() if isinstance(values, Mapping) and values else [(None, values)]


def _from_memory(label: str, value: Any) -> tuple[Any, str]:
    """The value as `bind` takes it, and its words for the manifest."""
    if isinstance(value, str) and value == IMAGE:
        return IMAGE, f"{label}={IMAGE}"
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor):
        return value, f"{label}={_words(value)}"
    sizes = ",".join(map(str, value.shape))
    return value, f"{label}=[{sizes}] (sha256 {digests.of_tensor(value)[:SHOWN_DIGITS]})"


def _words(value: Any) -> str:
    """A value for the manifest, with a digest where its words do not say all of it."""
    said, full = repr(value), digests.in_full(value)
    if said == full == quoted(full):
        return said
    return f"{quoted(said)} (sha256 {digests.of_text(full)[:SHOWN_DIGITS]})"


def names(texts: Sequence[str]) -> set[str]:
    """The parameters of forward that `--input` gives; those that get the image not among them."""
    return {one.name for one in parse(texts) if one.value is not IMAGE}


def _parsed(text: str) -> Argument:
    left, equals, given = text.partition("=")
    name, dot, key = left.partition(".")
    if not equals or not name.isidentifier() or (dot and not key) or not given:
        raise UsageError(
            f"--input {quoted(text)} is not NAME=VALUE",
            f"VALUE is {FORMS}; NAME.KEY=VALUE a dict's",
        )
    value, words = _value(left, given)
    return Argument(name, key or None, value, f"{left}={words}")


def _value(name: str, text: str) -> tuple[Any, str]:
    """What a VALUE stands for, and its words for the manifest."""
    if text == IMAGE:
        return IMAGE, text
    if (made := _MADE.fullmatch(text)) is not None:
        return _made(name, text, *made.groups()), text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()], text
    if text.endswith(_SUFFIXES):
        return _from_file(name, Path(text))
    try:
        number = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        number = None
    if type(number) not in (int, float):
        raise UsageError(f"--input {name}={quoted(text)} is no value", f"give {FORMS}")
    return number, text


def _made(name: str, text: str, kind: str, sizes: str, dtype: str | None) -> Tensor:
    shape = [int(size) for size in sizes.split(",")]
    if dtype is not None and dtype not in _TYPES:
        raise UsageError(
            f"--input {name}={quoted(text)}: there is no type {quoted(dtype)}", ", ".join(_TYPES)
        )
    if math.prod(shape) > _MOST_VALUES:
        raise UsageError(
            f"--input {name}={quoted(text)} has {math.prod(shape):,} values",
            f"at most {_MOST_VALUES:,}",
        )
    make = torch.zeros if kind == "zeros" else torch.ones
    return make(shape, dtype=_TYPES[dtype or "float32"])


def _from_file(name: str, path: Path) -> tuple[Tensor, str]:
    where = f"--input {name}: {quoted(path.name)}"
    try:
        data = read_bytes(path, _MOST_BYTES)
        array = _READERS[path.suffix](data)
        tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    except FileNotFoundError:
        raise UsageError(f"{where} is no file", "check the path") from None
    except FileError as error:
        raise UsageError(f"{where} {error.message}", error.hint) from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{where} cannot be read: {error}", "np.save of an array") from error
    return tensor, f"{path.name} (sha256 {hashlib.sha256(data).hexdigest()[:SHOWN_DIGITS]})"


def _from_npz(data: bytes) -> np.ndarray:
    remedy = "np.save('array.npy', np.load(FILE)[NAME])"
    array: np.ndarray = npy.only(npy.read_npz(data, _MOST_BYTES), "arrays", remedy)
    return array


_READERS: dict[str, Callable[[bytes], np.ndarray]] = {
    ".npy": npy.read_npy,
    ".npz": _from_npz,
    ".pt": read_tensor,
}


def bind(
    module: nn.Module, arguments: Sequence[Argument], taken: Sequence[str], device: torch.device
) -> RemovableHandle:
    """Let every call of a module get these arguments beside its images, by a hook of its own,
    which is returned.

    Args:
        taken: names that the user's transform gives.

    Raises:
        UsageError: forward has no such parameter, or it gets it already.
    """
    parameters = inspect.signature(module.forward).parameters
    known = [
        name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for one in arguments:
        if one.name not in known and not open_ended:
            raise UsageError(
                f"--input {one.name}: forward of {type(module).__name__} takes "
                f"{listed(list(map(quoted, known)), 12) or 'nothing'}",
                "one of these",
            )
        if one.name in taken or (taken and one.value is IMAGE):
            raise UsageError(
                f"--input {one.name}: --transform gives {listed(list(taken), 12)}", "one of the two"
            )
    ready = [
        (one, one.value.to(device) if isinstance(one.value, Tensor) else one.value)
        for one in arguments
    ]
    return module.register_forward_pre_hook(_hook(ready, known), with_kwargs=True)


def _hook(
    given: Sequence[tuple[Argument, Any]], known: Sequence[str]
) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    names = {one.name for one, _ in given}
    free = [name for name in known if name not in names]
    placed = any(value is IMAGE for _, value in given)

    def hook(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        further: dict[str, Any] = {}
        for one, value in given:
            fitted = args[0] if value is IMAGE else _fitted(value, args)
            if one.key is None:
                further[one.name] = fitted
            else:
                further.setdefault(one.name, {})[one.key] = fitted
        if placed:
            return (), {**kwargs, **further}
        if free[: len(args)] == list(known[: len(args)]):
            return args, {**kwargs, **further}
        return (), {**kwargs, **dict(zip(free, args, strict=False)), **further}

    return hook


def _fitted(value: Any, args: Sequence[Any]) -> Any:
    """A value for one call alone, as the model may change it: a copy of a list or dict, and of a
    tensor, which is repeated for each image of a batch."""
    if isinstance(value, list | dict):
        return value.copy()
    if not isinstance(value, Tensor):
        return value
    count = len(args[0]) if args else 1
    if count > 1 and value.ndim and len(value) == 1:
        return value.repeat_interleave(count, 0)
    return value.clone()
