"""The keywords of the public functions, which are the options of the command line, and what a
caller has in memory: a model is lent and given back as it was, images become files."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, get_type_hints

import numpy as np
import torch
from msgspec import Struct
from PIL import Image
from torch import Tensor, nn

from featviz.drawing.normalize import in_full
from featviz.errors import UsageError
from featviz.images import memory
from featviz.models.arguments import UserTransform
from featviz.models.load import LoadedModel, adopt, fed, load_model
from featviz.options import (
    HPARAMS,
    InputOptions,
    ModelOptions,
    declared,
    every_option,
    nested,
    no_option,
    read,
    read_from,
    take,
)

Model: TypeAlias = str | Path | nn.Module
"""A MODEL string (`"resnet18"`, a file, `"file.py:factory"`), or a module, which is given back as
it was."""

Layers: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""Selectors as text, classes of modules, or a list of these."""

Picture: TypeAlias = str | Path | Image.Image | np.ndarray | Tensor
"""A path, or an image in memory."""

Pictures: TypeAlias = Picture | list[Picture] | tuple[Picture, ...]
"""Paths and images in memory, one or several."""

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", ModelOptions, LoadedModel, ModelOptions | LoadedModel)
R = TypeVar("R")
T = TypeVar("T", bound=Struct)

NOT_OF_KERNELS = ("overlay", "reduce", "figure", "flat", "tensors")
NOT_OF_TENSORS = ("figure", "flat", "format", "tensors")
"""Drawing options that a function lacks."""

NOT_IN_PYTHON = ("nul_separated",)
"""Options that only a command line can have a use for."""


def keywords_of(*kinds: type[Struct], but: Sequence[str] = ()) -> Callable[[F], F]:
    """Give a function, in place of `**options`, the keywords that options of records and of the
    records in them are: in its signature with types and defaults, and in its documentation."""

    def decorate(function: F) -> F:
        signature, left_out = inspect.signature(function), (*but, *NOT_IN_PYTHON)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = {n: one for kind in kinds for n, one in every_option(kind).items()}
        records = [record for kind in kinds for record in (kind, *nested(kind).values())]
        types = {name: hint for record in records for name, hint in get_type_hints(record).items()}
        further, lines = [], []
        for name, one in options.items():
            if name not in left_out:
                lines.append(f"        {name}: {in_full(one.words)}\n".replace("\f", ""))
            if name not in (*left_out, *signature.parameters):
                about: Any = {"default": one.default, "annotation": types[name]}
                further.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **about))
        function.__signature__ = signature.replace(parameters=[*own, *further])  # type: ignore[attr-defined]
        function.__doc__ = f"{function.__doc__}\n    Options:\n{''.join(lines)}"
        return function

    return decorate


def names_of(*kinds: type[Struct], but: Sequence[str] = ()) -> set[str]:
    """All keywords of records and of the records in them, for messages."""
    names = {name for kind in kinds for name in every_option(kind)} | {"forward_args"}
    return names - {*but, *NOT_IN_PYTHON}


class Room:
    """A temporary folder, which is removed when the last object that needs it is gone."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="featviz-"))
        self._end = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True)
class Feeding:
    """How the caller's own code feeds a model."""

    transform: UserTransform | None = None
    further: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def taken(cls, options: dict[str, Any]) -> Feeding:
        """Take `transform` and `forward_args` from the keywords; the name of a transform stays."""
        transform, further = options.get("transform"), options.pop("forward_args", None) or {}
        if transform is None or callable(transform):
            options.pop("transform", None)
        if not isinstance(further, Mapping):
            raise UsageError(f"forward_args is {type(further).__name__!r}", "{'t': 10}")
        return cls(UserTransform.of(transform) if callable(transform) else None, further)

    @contextmanager
    def lent(self, model: M, inputs: InputOptions) -> Iterator[M | LoadedModel]:
        """The model, fed in this way for a while."""
        if self == Feeding():
            yield model
            return
        with fed(load_model(model, inputs), inputs, self.transform, self.further) as loaded:
            yield loaded


@dataclass(frozen=True)
class Order(Generic[T]):
    """What a caller asks for: a model, and the options of a command."""

    options: T
    model: Any
    for_model: Mapping[str, Any]
    """The keywords of a MODEL string."""
    feeding: Feeding
    room: Room | None
    """Holds the results where the caller named no place for them."""

    def given_to(self, story: Callable[..., R], images: Any) -> R:
        """What a command makes of the model, the images and the options."""
        with as_files(images) as files, self.lent() as source:
            return story(source, files, self.options)

    @contextmanager
    def lent(self, inputs: InputOptions | None = None) -> Iterator[ModelOptions | LoadedModel]:
        """The model as the commands take it; it is given back as it was."""
        inputs = inputs or self.options.inputs  # type: ignore[attr-defined]
        with self.feeding.lent(_source_of(self.model, self.for_model, inputs), inputs) as source:
            yield source


def ordered(
    kind: type[T],
    model: Any,
    options: Mapping[str, Any],
    layers: Any,
    but: Sequence[str] = (),
    place: str = "",
    **own: Any,
) -> Order[T]:
    """Read the keywords of a public function.

    Args:
        kind: the record of its options.
        but: names of options that it lacks.
        place: where results are in a temporary folder, if the option `out` is None.
        own: options that it takes in another way.
    """
    given = {**options, **own, "layers": selectors(layers)}
    room = Room() if place and own["out"] is None else None
    given |= {"out": room.path / place} if room else {}
    feeding = Feeding.taken(given)
    for_model = take(ModelOptions, given)
    if "model_args" in for_model:
        arguments = dict(declared(ModelOptions)["model_args"].value(for_model["model_args"]))
        for_model |= {"hparams": True} if arguments.pop(HPARAMS, None) else {}
        for_model["model_args"] = arguments
    for_model |= {"hparams": given.pop("hparams")} if "hparams" in given else {}
    asked = read_from(kind, given, (*but, *NOT_IN_PYTHON))
    if given:
        raise no_option(given, names_of(kind, ModelOptions, but=but))
    return Order(asked, model, for_model, feeding, room)


def _source_of(
    model: Any, for_model: Mapping[str, Any], inputs: InputOptions
) -> ModelOptions | LoadedModel:
    if isinstance(model, nn.Module):
        if for_model:
            raise UsageError(f"{', '.join(for_model)} is for a MODEL string, and this is a module")
        check_module(model)
        return adopt(model, inputs)
    if not isinstance(model, (str, Path)):
        raise UsageError(
            f"the model is {type(model).__name__!r}, and neither a MODEL string nor a module",
            "of an exported program, torch.export.unflatten makes a module",
        )
    options = dict(for_model)
    if isinstance(options.get("device"), torch.device):
        options["device"] = str(options["device"])
    return read(ModelOptions, {"spec": str(model), **options})


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
    """Paths as they are, and images in memory as files for a while."""
    if not (pictures := _several(images)):
        raise UsageError("there are no images", "give paths or images")
    room = Room()
    inside = room.path / "in-memory"
    inside.mkdir()
    yield memory.to_files(pictures, inside)


def selectors(layers: Any) -> str | None:
    """Selectors as text."""
    if layers is None:
        return None
    texts = []
    for layer in _several(layers):
        if not isinstance(layer, str) and not (
            isinstance(layer, type) and issubclass(layer, nn.Module)
        ):
            raise UsageError(
                f"layers has a {type(layer).__name__!r}, which is neither text nor a class of "
                "modules",
                "for example 'Conv2d,layer1.*', torch.nn.Conv2d, or a list of these",
            )
        texts.append(layer if isinstance(layer, str) else layer.__name__)
    return ",".join(texts)


def _several(values: Any) -> Sequence[Any]:
    return values if isinstance(values, (list, tuple)) else [values]
