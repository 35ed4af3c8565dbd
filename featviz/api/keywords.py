"""The keywords of the public functions, which are the options of the command line, and what a
caller has in memory: a model is borrowed and given back as it was, images become files."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Generic, TypeAlias, TypeVar, get_type_hints

import numpy as np
import torch
from msgspec import Struct, structs
from PIL import Image
from torch import Tensor, nn

from featviz.drawing.normalize import in_full
from featviz.errors import UsageError
from featviz.hooks.eval_mode import uncompiled
from featviz.images import arrays
from featviz.models.arguments import UserTransform
from featviz.models.load import LoadedModel, adopt, fed, load_model
from featviz.options import (
    InputOptions,
    ModelOptions,
    declared,
    every_option,
    nested,
    no_option,
    read,
    read_from,
)

Model: TypeAlias = str | Path | nn.Module
"""A MODEL string (`"resnet18"`, a file, `"file.py:factory"`), or a module, which is given back as
it was."""
Layers: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]]
Picture: TypeAlias = str | Path | Image.Image | np.ndarray | Tensor
Pictures: TypeAlias = Picture | Sequence[Picture] | Mapping[str, Tensor]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
T = TypeVar("T", bound=Struct)

NOT_OF_KERNELS = ("overlay", "reduce", "figure", "flat", "tensors")
NOT_OF_TENSORS = ("figure", "flat", "format", "tensors")
"""Drawing options that a function lacks."""
NOT_IN_PYTHON = ("nul_separated", "input")
"""Options that only a command line can have a use for: a mapping of tensors is an input."""


def keywords_of(*kinds: type[Struct], but: Sequence[str] = ()) -> Callable[[F], F]:
    """Give a function, in place of `**options`, the keywords that options of records and of the
    records in them are: in its signature with types and defaults, and in its documentation."""

    def decorate(function: F) -> F:
        signature, lines = inspect.signature(function), []
        records = [record for kind in kinds for record in (kind, *nested(kind).values())]
        types = {name: hint for record in records for name, hint in get_type_hints(record).items()}
        parameters = dict(signature.parameters)
        parameters.pop("options", None)
        for name, one in every_option(*kinds).items():
            if name not in (*but, *NOT_IN_PYTHON):
                lines.append(f"        {name}: {in_full(one.help)}\n".replace("\f", ""))
                about: Any = {"default": one.default, "annotation": types[name]}
                keyword = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **about)
                parameters.setdefault(name, keyword)
        function.__signature__ = signature.replace(parameters=[*parameters.values()])  # type: ignore[attr-defined]
        function.__doc__ = f"{function.__doc__}\n    Options:\n{''.join(lines)}"
        return function

    return decorate


def names_of(*kinds: type[Struct], but: Sequence[str] = ()) -> set[str]:
    """All keywords of records and of the records in them, for messages."""
    return {*every_option(*kinds), "forward_args"} - {*but, *NOT_IN_PYTHON}


class Room:
    """A temporary folder, which is removed when the last object that needs it is gone."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="featviz-"))
        self._end = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


_LOCKS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_LOOKING_UP = Lock()


@contextmanager
def alone_with(model: Any) -> Iterator[None]:
    """Let one thread at a time hook a module; copies of it have locks of their own."""
    if not isinstance(model, nn.Module):
        yield
        return
    with _LOOKING_UP:
        lock = _LOCKS.setdefault(uncompiled(model), RLock())
    with lock:
        yield


Feeding: TypeAlias = tuple[UserTransform | None, Mapping[str, Any]]
"""How the caller's own code feeds a model: its `transform`, and `forward_args`."""


def feeding_of(options: dict[str, Any]) -> Feeding:
    """Take `transform` and `forward_args` from the keywords; the name of a transform stays."""
    transform, further = options.get("transform"), options.pop("forward_args", None) or {}
    if transform is None or callable(transform):
        options.pop("transform", None)
    if not isinstance(further, Mapping):
        raise UsageError(f"forward_args is {type(further).__name__!r}", "{'t': 10}")
    return UserTransform.of(transform) if callable(transform) else None, further


@contextmanager
def lent(
    model: ModelOptions | LoadedModel | nn.Module, inputs: InputOptions, feeding: Feeding
) -> Iterator[Any]:
    """A model as the commands take it, fed in this way for a while; a module is for this thread
    alone, and given back as it was."""
    with alone_with(model.module if isinstance(model, LoadedModel) else model):
        source = adopt(model, inputs) if isinstance(model, nn.Module) else model
        transform = feeding[0]
        if inputs.input and isinstance(model, nn.Module):
            transform = UserTransform.input(inputs.input)
        if transform is None and not feeding[1]:
            yield source
            return
        with fed(load_model(source, inputs), inputs, transform, feeding[1]) as fed_model:
            yield fed_model


@dataclass(frozen=True)
class Order(Generic[T]):
    """What a caller asks for: a model, and the options of a command."""

    options: T
    model: ModelOptions | nn.Module
    feeding: Feeding
    room: Room | None
    """Holds the results where the caller named no place for them."""

    def given_to(self, story: Callable[..., R], images: Any) -> R:
        """The result of a command for the model, the images and the options."""
        with as_files(images) as files:
            options: Any = self.options
            if isinstance(images, Mapping):
                inputs = structs.replace(options.inputs, input=tuple(files))
                files, options = [], structs.replace(options, inputs=inputs)
            with self.lent(options.inputs) as source:
                return story(source, files, options)

    def lent(self, inputs: InputOptions | None = None) -> AbstractContextManager[Any]:
        """The model as the commands take it."""
        return lent(self.model, inputs or self.options.inputs, self.feeding)  # type: ignore[attr-defined]


def ordered(
    kind: type[T],
    model: Any,
    options: Mapping[str, Any],
    layers: Any,
    but: Sequence[str] = (),
    place: str = "",
    **own: Any,
) -> Order[T]:
    """Read the keywords of a public function: options of a record, but for some, and those that it
    takes in another way. Results are at `place` in a temporary folder, if `out` is None."""
    given = {**options, **own, "layers": selectors(layers)}
    room = Room() if place and own["out"] is None else None
    given |= {"out": room.path / place} if room else {}
    feeding = feeding_of(given)
    for_model = {name: given.pop(name) for name in declared(ModelOptions) if name in given}
    asked = read_from(kind, given, (*but, *NOT_IN_PYTHON))
    if given:
        raise no_option(given, names_of(kind, ModelOptions, but=but))
    if isinstance(model, nn.Module):
        if for_model:
            raise UsageError(f"{', '.join(for_model)} is for a MODEL string, and this is a module")
        check_module(model)
        return Order(asked, model, feeding, room)
    if not isinstance(model, (str, Path)):
        raise UsageError(
            f"the model is {type(model).__name__!r}, and neither a MODEL string nor a module",
            "of an exported program, torch.export.unflatten makes a module",
        )
    if isinstance(for_model.get("device"), torch.device):
        for_model["device"] = str(for_model["device"])
    return Order(asked, read(ModelOptions, {"spec": str(model), **for_model}), feeding, room)


def check_module(model: Any) -> None:
    """Refuse what takes no hooks."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "the model is TorchScript, which takes no hooks on its layers",
            "give the module that it was made from, or export that with torch.export (.pt2)",
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is {type(model).__name__!r}, not a module", "an nn.Module")


@contextmanager
def as_files(images: Any) -> Iterator[list[str]]:
    """Paths as they are, and images in memory as files for a while; of a mapping of tensors the
    values of `--input`."""
    named = images if isinstance(images, Mapping) else {}
    several = isinstance(images, (Sequence, Mapping)) and not isinstance(images, (str, bytes))
    pictures = images if several else [images]
    if not pictures:
        raise UsageError("there are no images", "give paths or images")
    room = Room()
    inside = room.path / "in-memory"
    inside.mkdir()
    values = [f"{name}={arrays.to_npy(one, inside / f'{name}.npy')}" for name, one in named.items()]
    yield values or arrays.to_files(pictures, inside)


def selectors(layers: Any) -> str | None:
    """Selectors as text."""
    if layers is None:
        return None
    texts = []
    for layer in layers if isinstance(layers, (list, tuple)) else [layers]:
        if not isinstance(layer, str) and not (
            isinstance(layer, type) and issubclass(layer, nn.Module)
        ):
            raise UsageError(
                f"layers has a {type(layer).__name__!r}, neither text nor a class of modules",
                "for example 'Conv2d,layer1.*', torch.nn.Conv2d, or a list of these",
            )
        texts.append(layer if isinstance(layer, str) else layer.__name__)
    return ",".join(texts)
