"""What the user gives forward: `--transform`, `--forward-arg` and `--input`."""

from __future__ import annotations

import ast
import copyreg
import functools
import hashlib
import inspect
import io
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from featviz.errors import FileError, ImageError, LoadError, UsageError
from featviz.files import npy, read_bytes
from featviz.models import sources
from featviz.models.preprocess import Chain, Preprocess, input_dtype
from featviz.models.weights import ADDRESS, add_values, read_tensor
from featviz.records import Raster
from featviz.text import listed, quoted

IMAGE = "image"
"""The VALUE that stands for the image itself."""

_FORMS = (
    "a number, true, false, none, zeros:1,77, ones:1,77:int64, randn:1,128, a file .npy, .npz or "
    ".pt, or image"
)
_MADE = re.compile(r"(zeros|ones|randn(?!.*:[ib])):(\d+(?:,\d+)*)(?::(float32|int64|bool))?")
_WORDS = {"true": True, "false": False, "none": None, IMAGE: IMAGE}
_DIGITS = 16
"""Digits of a sha256 that stand in words for people."""
_MOST_BYTES = 2**30
_MOST_VALUES = 2**28
_READERS: dict[str, Callable[[bytes], np.ndarray]] = {
    ".npy": npy.read_npy,
    ".npz": npy.read_npz,
    ".pt": read_tensor,
}


class Argument(NamedTuple):
    """An argument of forward."""

    name: str
    key: str | None
    """Where the argument is a dict: a key in it."""
    value: Any
    description: str
    """For the manifest; of a file its name and sha256, no folder."""


def parse(texts: Sequence[str], seed: int = 0, option: str = "forward_args") -> list[Argument]:
    """Read the values of `--forward-arg`, or of `--input`; the seed is that of random numbers."""
    arguments: list[Argument] = []
    random = torch.Generator().manual_seed(seed)
    for text in texts:
        left, equals, given = text.partition("=")
        name, dot, key = left.partition(".")
        if not equals or not name.isidentifier() or (dot and not key) or not given:
            words = f"{option} {quoted(text)} is not NAME=VALUE"
            raise UsageError(words, f"VALUE is {_FORMS}; NAME.KEY=VALUE a dict's")
        value, words = _value(f"{option} {left}", given, random)
        for other in arguments:
            if other.name == name and (not key or other.key in (None, key)):
                raise UsageError(f"{option} {left} is given twice", "give it once, or its keys")
        arguments.append(Argument(name, key or None, value, f"{left}={words}"))
    return arguments


def _value(what: str, text: str, random: torch.Generator) -> tuple[Any, str]:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()], text
    if (made := _MADE.fullmatch(text)) is not None:
        shape = [int(size) for size in made[2].split(",")]
        if (values := math.prod(shape)) > _MOST_VALUES:
            words = f"{what}={quoted(text)} has {values:,} values"
            raise UsageError(words, f"at most {_MOST_VALUES:,}")
        if made[1] == "randn":
            seed = random.initial_seed()
            return torch.randn(shape, generator=random), f"{text} (seed {seed})"
        return getattr(torch, made[1])(shape, dtype=getattr(torch, made[3] or "float32")), text
    if text.endswith(tuple(_READERS)):
        path = Path(text)
        where = f"{what}: {quoted(path.name)}"
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
        return tensor, f"{path.name} (sha256 {hashlib.sha256(data).hexdigest()[:_DIGITS]})"
    try:
        number = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        number = None
    if type(number) not in (int, float):
        raise UsageError(f"{what}={quoted(text)} is no value", f"give {_FORMS}")
    return number, text


def from_values(given: Mapping[str, Any]) -> list[Argument]:
    """Arguments that a program has at hand: tensors, arrays, numbers, whatever forward takes; a
    dict's values by their keys; `"image"` for the image itself. Their words have a digest."""
    found = []
    for name, values in given.items():
        by_key = isinstance(values, Mapping) and values
        for key, value in values.items() if by_key else [(None, values)]:
            value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            words = quoted(repr(value))
            if isinstance(value, str) and value == IMAGE:
                value = words = IMAGE
            elif isinstance(value, Tensor):
                words = f"[{','.join(map(str, value.shape))}]"
            label = f"{name}.{key}" if key else name
            plain = isinstance(value, (int, float, str, type(None))) and words == repr(value)
            plain = plain or value is IMAGE
            shown = "" if plain else f" (sha256 {digest(value)[:_DIGITS]})"
            found.append(Argument(name, key, value, f"{label}={words}{shown}"))
    return found


def digest(value: Any) -> str:
    """sha256 of a value: of a tensor its values; of a function its bytecode with default and bound
    values, but not what it calls; of all else what pickle makes of it, or else its `repr`."""
    sha256 = hashlib.sha256()
    if isinstance(value, Tensor):
        add_values(value, sha256)
        return sha256.hexdigest()
    pickled = io.BytesIO()
    pickler = pickle.Pickler(pickled)
    pickler.fast = True  # whether equal parts are the same object makes no difference
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        Tensor: lambda tensor: (str, (f"{tensor.dtype} {list(tensor.shape)} {digest(tensor)}",)),
    }
    try:
        pickler.dump(_told(value))
        sha256.update(pickled.getvalue())
    except Exception:  # it cannot be pickled, or holds itself
        sha256.update(ADDRESS.sub("0x", repr(value)).encode("utf-8", "backslashreplace"))
    return sha256.hexdigest()


def _told(value: Any) -> Any:
    """What can be called, as plain values that say what it does; a class counts by its name."""
    if isinstance(value, functools.partial):
        return _told(value.func), value.args, value.keywords
    if isinstance(value, MethodType):
        return _told(value.__func__), getattr(value.__self__, "__dict__", None)
    if isinstance(value, FunctionType):
        held = [_told(cell.cell_contents) for cell in value.__closure__ or ()]
        return _told(value.__code__), value.__defaults__, value.__kwdefaults__, held
    if isinstance(value, CodeType):
        consts = [sorted(map(repr, c)) if isinstance(c, frozenset) else c for c in value.co_consts]
        return value.co_code, value.co_names, [*map(_told, consts)]
    call = inspect.getattr_static(type(value), "__call__", None)
    return (_told(call), vars(value)) if isinstance(call, FunctionType) else value


def feed(
    module: nn.Module,
    preprocess: Preprocess,
    transform: UserTransform | None,
    given: Sequence[Argument],
    device: torch.device,
) -> tuple[Preprocess, list[RemovableHandle]]:
    """Let every call of a module get these arguments beside its images, and the outputs of a
    transform that is new to it by their names: by hooks, which are returned, too."""
    own: Any = preprocess.transform
    taken, hooks = getattr(own, "names", ()), list[RemovableHandle]()
    if given:
        known = _parameters(module, [argument.name for argument in given], "forward_args")
        placed = []
        for argument in given:
            if argument.name in taken or (taken and argument.value is IMAGE):
                giver = "--transform" if own.blank is None else "--input"
                message = f"forward_args {argument.name}: {giver} gives {listed(list(taken), 12)}"
                raise UsageError(message, "one of the two")
            if isinstance(argument.value, Tensor):
                argument = argument._replace(value=argument.value.to(device))
            placed.append(argument)
        hooks.append(module.register_forward_pre_hook(_adding(placed, known), with_kwargs=True))
    if transform is not None and transform.blank is not None:
        _parameters(module, transform.names, "input")
    if transform is not None and taken:

        def by_name(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return (), {**kwargs, **dict(zip(taken, args, strict=True))}

        named = module.register_forward_pre_hook(by_name, prepend=True, with_kwargs=True)
        hooks.append(named)
    further = tuple(argument.description for argument in given) or preprocess.further
    return replace(preprocess, further=further, dtype=input_dtype(module)), hooks


def _adding(
    given: Sequence[Argument], known: Sequence[str]
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A hook that adds arguments to a call of forward, whose names are `known`."""
    names = {argument.name for argument in given}
    free = [name for name in known if name not in names]
    placed = any(argument.value is IMAGE for argument in given)

    def add(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        further: dict[str, Any] = {}
        for name, key, value, _ in given:
            # for this call alone, as the model may change it
            fitted = args[0] if value is IMAGE else value
            if isinstance(value, list | dict):
                fitted = value.copy()
            elif isinstance(value, Tensor):
                count = len(args[0]) if args and value.ndim and len(value) == 1 else 1
                fitted = value.repeat_interleave(count, 0) if count > 1 else value.clone()
            if key is None:
                further[name] = fitted
            else:
                further.setdefault(name, {})[key] = fitted
        if placed:
            return (), {**kwargs, **further}
        if free[: len(args)] == known[: len(args)]:
            return args, {**kwargs, **further}
        return (), {**kwargs, **dict(zip(free, args, strict=False)), **further}

    return add


def _parameters(module: nn.Module, names: Sequence[str], option: str) -> list[str]:
    """The names that a module's forward knows; UsageError where it takes none of one of `names`."""
    parameters = inspect.signature(module.forward).parameters
    known = [
        name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in names if not open_ended else ():
        if name not in known:
            takes = listed(list(map(quoted, known)), 12) or "nothing"
            words = f"forward of {type(module).__name__} takes {takes}"
            raise UsageError(f"{option} {name}: {words}", "one of these")
    return known


@dataclass(frozen=True)
class UserTransform:
    """A function in place of the model's own preprocessing: the user's, from a PIL image of mode L
    or RGB or from an array; or one that hands on what is no image."""

    text: str
    words: str
    """For the manifest."""
    function: Callable[[Any], Any] = field(repr=False)
    names: tuple[str, ...] = ()
    """Where the function gives a dict: the arguments of forward, the image first."""
    blank: Tensor | None = None
    """Where the input is no image: zeros [N] or [1, N], shown as the input's pixels are."""

    @classmethod
    def of(cls, function: Callable[[Any], Any]) -> UserTransform:
        """A function that a program has at hand."""
        name = getattr(function, "__qualname__", type(function).__name__)
        return cls(name, f"transform {name} (sha256 {digest(function)[:_DIGITS]})", function)

    @classmethod
    def named(cls, text: str) -> UserTransform:
        """The function that `--transform` names."""
        if sources.CODE_REFERENCE.fullmatch(text) is None:
            raise UsageError(f"--transform {text!r} names no function", "file.py:fn or pkg.mod:fn")
        function = sources.target(text)
        if not callable(function):
            kind = type(function).__name__
            raise UsageError(f"--transform {text!r} is a {kind}", "name a function")
        found = sources.code_digest(text)
        told = f" (sha256 {found[:_DIGITS]})" if found else ""
        return cls(text, f"transform {text.rpartition('/')[2]}{told}", function)

    @classmethod
    def input(cls, texts: Sequence[str], seed: int = 0) -> UserTransform:
        """The tensors of `--input` in place of an image; floats [N] become [1, N]."""
        tensors, given = list[Tensor](), parse(texts, seed, "input")
        for _, key, value, words in given:
            if not isinstance(value, Tensor) or key or not value.numel():
                raise UsageError(f"input {words} is no tensor", "--forward-arg passes others")
            is_vector = value.is_floating_point() and value.ndim == 1 < len(value)
            tensors.append(value[None] if is_vector else value)
        descriptions = " and ".join(argument.description for argument in given)
        words = f"{descriptions} in place of an image"
        names = tuple(argument.name for argument in given)
        blank = torch.zeros(1, tensors[0].numel())
        return cls("", words, lambda _: [tensor.clone() for tensor in tensors], names, blank)

    @classmethod
    def vector(cls, count: int) -> UserTransform:
        """A vector of numbers from a file."""

        def numbers(values: Any) -> list[Tensor]:
            if not isinstance(values, np.ndarray) or values.size != count:
                raise ImageError(f"is no vector of {count} numbers, as the first input")
            return [torch.from_numpy(values.reshape(1, -1).astype(np.float32))]

        return cls("", f"vector of {count} numbers", numbers, blank=torch.zeros(count))

    def preprocess(self, channels: int) -> Preprocess:
        """The preprocessing that the function does, whatever the model's own would be."""
        found = Preprocess(Chain(channels=channels), self)
        if self.blank is not None:
            return found
        black = found.empty()
        try:
            outputs = self.outputs(black.values if isinstance(black, Raster) else black)
        except ImageError as error:
            words = f"--transform: {error.message}, for an empty image"
            raise LoadError(words, error.hint) from error
        return replace(found, transform=replace(self, names=tuple(filter(None, outputs))))

    def __str__(self) -> str:
        return self.words

    def __call__(self, image: Any) -> list[Tensor]:
        """The model's arguments, the image first: [1, C, H, W]."""
        if self.blank is not None:
            return self.function(image)  # type: ignore[no-any-return]
        outputs, names = self.outputs(image), self.names or ("",)
        if set(outputs) != set(names):
            raise ImageError(f"{self.text} gave another kind of output than for an empty image")
        return [outputs[name] for name in names]

    def outputs(self, image: Image.Image | np.ndarray) -> dict[str, Tensor]:
        """The output of the function by names, the image first; a tensor has the empty name."""
        try:
            given = self.function(image)
        except Exception as error:  # the user's own code
            words = f"{type(error).__name__}: {quoted(str(error))}"
            raise ImageError(f"{self.text} raised {words}", "-v shows the traceback") from error
        kind = f"a {type(given).__name__}"
        if isinstance(given, Tensor):
            if given.ndim in (3, 4) and given.numel():
                return {"": given[None] if given.ndim == 3 else given}
            kind = f"a tensor {list(given.shape)}"
        elif isinstance(given, Mapping):
            tensors = all(isinstance(value, Tensor) for value in given.values())
            dimensions = {name: given[name].ndim for name in given} if tensors else {}
            images = [name for name, count in dimensions.items() if count in (4, 5)]
            images = images or [name for name, count in dimensions.items() if count == 2]
            if images:
                first = [*images, *(name for name in given if name not in images)]
                return {str(name): given[name] for name in first}
            kind = f"a dict of {quoted(', '.join(map(str, given))) or 'nothing'}"
        raise ImageError(
            f"{self.text} gave {kind}, expected a tensor [C, H, W] or [1, C, H, W], or a dict of "
            "tensors by the names of forward's arguments, one of them [1, C, H, W] or [1, F]"
        )
