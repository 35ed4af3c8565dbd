"""The keywords of the public functions, which are the options of the command line, and
what a caller has in memory: a model is borrowed and given back as it was, images become
files."""

from __future__ import annotations

import inspect
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, RLock
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, get_type_hints

import numpy as np
import torch
from msgspec import Struct, structs
from PIL import Image
from torch import Tensor, nn

from featviz.drawing.normalize import with_tables
from featviz.errors import FeatvizError, UsageError
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
from featviz.run.results import TemporaryFolder

Model: TypeAlias = str | Path | nn.Module
"""A MODEL string (`"resnet18"`, a file, `"file.py:factory"`), or a module, which is
given back as it was."""
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
"""Options that only a command line can have a use for: a mapping of tensors is an
input."""


def keywords_of(*records: type[Struct], but: Sequence[str] = ()) -> Callable[[F], F]:
    """Give a function, in place of `**options`, the keywords that options of records
    and of the records in them are: in its signature with types and defaults, and in its
    documentation.

    Args:
        but: names of options that the function lacks.
    """

    def decorate(function: F) -> F:
        """The function with another signature and documentation."""
        # editors, notebooks and Sphinx read `__signature__`, so that each option can
        # be completed and is documented, and no function repeats the list
        signature = inspect.signature(function)
        parameters = dict(signature.parameters)
        parameters.pop("options", None)
        types: dict[str, Any] = {}
        for record in records:
            for option_record in (record, *map(type, nested(record).values())):
                types |= get_type_hints(option_record)
        lines = []
        for name, option in every_option(*records).items():
            if name not in (*but, *NOT_IN_PYTHON):
                lines.append(
                    f"        {name}: {with_tables(option.help)}\n".replace("\f", "")
                )
                keyword = inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=option.default,
                    annotation=types[name],
                )
                parameters.setdefault(name, keyword)
        function.__signature__ = signature.replace(parameters=[*parameters.values()])  # type: ignore[attr-defined]
        function.__doc__ = f"{function.__doc__}\n    Options:\n{''.join(lines)}"
        return in_python()(function)

    return decorate


# An option, and a space before its value; commands that a hint shows stay as they are.
_TYPED = re.compile(
    r"`[^`]*`|\b(?:featviz [a-z]+|pip) .*"
    r"|--([a-z][a-z-]*)( (?=['\"\d]|[A-Z]{2}|none\b|(?!out$)\w+(?:[,:]\w|;|$)))?"
)


class _InKeywords(logging.Handler):
    """Names options in warnings as Python does, before a handler of the caller's logs
    them."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg = _TYPED.sub(_python_name, record.getMessage())
        record.args = ()
        # Python prints what nobody handles, and takes this for a handler
        handlers = {*_LOGGER.handlers, *logging.root.handlers} - {self}
        if not handlers and record.levelno >= logging.WARNING and logging.lastResort:
            logging.lastResort.handle(record)


_LOGGER = logging.getLogger("featviz")
_IN_KEYWORDS = _InKeywords()


@contextmanager
def in_python() -> Iterator[None]:
    """Let errors and warnings name options as Python does: `layers='Relu'` for `--layers
    'Relu'`. Decorates functions, too."""
    is_outermost = _IN_KEYWORDS not in _LOGGER.handlers
    _LOGGER.addHandler(_IN_KEYWORDS)
    try:
        yield
    except FeatvizError as error:
        error.message = _TYPED.sub(_python_name, error.message)
        error.args = (error.message,)
        if error.hint is not None:
            error.hint = _TYPED.sub(_python_name, error.hint)
            error.__notes__ = [f"hint: {error.hint}"]
        raise
    finally:
        if is_outermost:
            _LOGGER.removeHandler(_IN_KEYWORDS)


def _python_name(typed: re.Match[str]) -> str:
    """`layers=` for `--layers ` before a value, `layers` for `--layers` alone; a command
    as it is."""
    if typed[1] is None:
        return typed[0]
    return typed[1].replace("-", "_") + ("=" if typed[2] else "")


def names_of(*records: type[Struct], but: Sequence[str] = ()) -> set[str]:
    """All keywords of records and of the records in them, for messages."""
    return {*every_option(*records), "forward_args"} - {*but, *NOT_IN_PYTHON}


# Hooks of two threads on one module would take each other's tensors. The lock of a
# module goes when the module goes.
_LOCKS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_LOOKING_UP = Lock()


@contextmanager
def alone_with(model: Any) -> Iterator[None]:
    """Let one thread at a time hook a module; copies of it have locks of their own."""
    if not isinstance(model, nn.Module):
        yield
        return
    # WeakKeyDictionary.setdefault alone is not safe between threads
    with _LOOKING_UP:
        lock = _LOCKS.setdefault(uncompiled(model), RLock())
    with lock:
        yield


class Feeding(NamedTuple):
    """How the caller's own code feeds a model, and names its classes."""

    transform: UserTransform | None
    forward_args: Mapping[str, Any]
    """Further arguments of forward, by name."""
    classes: str | Path | Sequence[str] | None = None
    """The names of a module's classes, or their file."""


def in_one_process(model: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords with `jobs=1`, where `jobs` says nothing and an object of the caller's
    own makes the results: what it keeps (counters, lists) would be lost with a worker
    process."""
    is_callers_own = isinstance(model, nn.Module) or callable(keywords.get("transform"))
    if keywords.get("jobs") is None and is_callers_own:
        return {**keywords, "jobs": 1}
    return dict(keywords)


def read_feeding(keywords: dict[str, Any]) -> Feeding:
    """Take `transform` and `forward_args` from the keywords; the name of a transform
    stays, as an option of a MODEL string.

    Raises:
        UsageError: `forward_args` is not a mapping.
    """
    forward_args = keywords.pop("forward_args", None) or {}
    if not isinstance(forward_args, Mapping):
        raise UsageError(
            f"forward_args is {type(forward_args).__name__!r}", "{'t': 10}"
        )
    # text names a transform of torchvision, and is an option of a MODEL string
    transform = keywords.get("transform")
    if transform is None or callable(transform):
        keywords.pop("transform", None)
    return Feeding(
        UserTransform.of(transform) if callable(transform) else None, forward_args
    )


@contextmanager
def borrowed(
    model: ModelOptions | LoadedModel | nn.Module,
    inputs: InputOptions,
    feeding: Feeding,
) -> Iterator[Any]:
    """A model as the commands take it, fed in this way for a while; a module is for
    this thread alone, and given back as it was."""
    with alone_with(model.module if isinstance(model, LoadedModel) else model):
        source = (
            adopt(model, inputs, feeding.classes)
            if isinstance(model, nn.Module)
            else model
        )
        transform = feeding.transform
        if inputs.input and isinstance(model, nn.Module):
            transform = UserTransform.input(inputs.input)
        if transform is None and not feeding.forward_args:
            yield source
            return
        # hooks on the module pass the caller's transform and arguments, and are
        # removed at the end
        with fed(
            load_model(source, inputs), inputs, transform, feeding.forward_args
        ) as fed_model:
            yield fed_model


@dataclass(frozen=True)
class Request(Generic[T]):
    """What a caller asks for: a model, and the options of a command."""

    options: T
    model: ModelOptions | nn.Module
    feeding: Feeding
    temporary: TemporaryFolder | None
    """Holds the results where the caller named no folder for them."""

    def call(self, command: Callable[[Any, list[str], Any], R], images: Any) -> R:
        """The result of a command for the model, the images and the options."""
        with as_files(images) as files:
            options: Any = self.options
            # a mapping of tensors is `--input name=file` for each of them
            if isinstance(images, Mapping):
                inputs = structs.replace(options.inputs, input=tuple(files))
                options = structs.replace(options, inputs=inputs)
                files = []
            with self.borrowed(options.inputs) as source:
                return command(source, files, options)

    def borrowed(
        self, inputs: InputOptions | None = None
    ) -> AbstractContextManager[Any]:
        """The model as the commands take it."""
        inputs = inputs or self.options.inputs  # type: ignore[attr-defined]
        return borrowed(self.model, inputs, self.feeding)


def read_request(
    record: type[T],
    model: Any,
    options: Mapping[str, Any],
    layers: Any,
    *,
    but: Sequence[str] = (),
    name: str = "",
    **explicit: Any,
) -> Request[T]:
    """Read the keywords of a public function.

    Args:
        record: the options of its command.
        options, explicit: keywords by name; `explicit` are those that its signature
            lists.
        but: options of the record that the function lacks.
        name: of the result in a temporary folder, if `out` is None; empty where it has
            no `out`.

    Raises:
        UsageError: an option does not take its value, or does not exist, or `model` is
            neither a module nor a MODEL string.
    """
    keywords = {**options, **explicit, "layers": selectors(layers)}
    temporary = None
    if name and explicit["out"] is None:
        temporary = TemporaryFolder()
        keywords["out"] = temporary.path / name
    feeding = read_feeding(keywords)
    # two records share the keywords of a call: those of the model go first
    of_model = declared(ModelOptions)
    for_model = {name: keywords.pop(name) for name in of_model if name in keywords}
    asked_for = read_from(record, keywords, (*but, *NOT_IN_PYTHON))
    if keywords:
        raise no_option(keywords, names_of(record, ModelOptions, but=but))
    if isinstance(model, nn.Module):
        feeding = feeding._replace(classes=for_model.pop("classes", None))
        if for_model:
            raise UsageError(
                f"{', '.join(for_model)} is for a MODEL string, and this is a module"
            )
        check_module(model)
        return Request(asked_for, model, feeding, temporary)
    if not isinstance(model, (str, Path)):
        raise UsageError(
            f"the model is {type(model).__name__!r}, and neither a MODEL string nor a"
            " module",
            "of an exported program, torch.export.unflatten makes a module",
        )
    if not isinstance(for_model.get("classes"), (str, Path, NoneType)):
        raise UsageError("a list of classes is for a module", "classes='names.txt'")
    # options are read from text, as those of the command line
    if isinstance(for_model.get("device"), torch.device):
        for_model["device"] = str(for_model["device"])
    return Request(
        asked_for,
        read(ModelOptions, {"spec": str(model), **for_model}),
        feeding,
        temporary,
    )


def check_module(model: Any) -> None:
    """Refuse what takes no hooks."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "the model is TorchScript, which takes no hooks on its layers",
            "give the module that it was made from, or export that with torch.export"
            " (.pt2)",
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is {type(model).__name__!r}, not a module", "an nn.Module"
        )


@contextmanager
def as_files(images: Any) -> Iterator[list[str]]:
    """Paths as they are, and images in memory as files, which are removed at the end; for
    a mapping of tensors, NAME=FILE texts as `--input` takes them.

    Args:
        images: a path, a PIL image, an array or a tensor; a sequence of these; or a
            mapping of tensors by the names of forward's arguments.

    Raises:
        UsageError: it is empty, or holds anything else.
    """
    is_one = isinstance(images, (str, bytes)) or not isinstance(
        images, (Sequence, Mapping)
    )
    pictures = [images] if is_one else images
    if not pictures:
        raise UsageError("there are no images", "give paths or images")
    # Files, so that images in memory go the way of all others: one reader, one name in
    # manifests, and workers in processes of their own read them, too.
    temporary = TemporaryFolder()  # removed when this generator's frame ends
    folder = temporary.path / "in-memory"
    folder.mkdir()
    if isinstance(images, Mapping):
        yield [
            f"{name}={arrays.to_npy(tensor, folder / f'{name}.npy')}"
            for name, tensor in images.items()
        ]
    else:
        yield arrays.to_files(pictures, folder)


def selectors(layers: Any) -> str | None:
    """Selectors as text.

    Raises:
        UsageError: a layer is neither a text nor a class of modules.
    """
    if layers is None:
        return None
    texts = []
    for layer in layers if isinstance(layers, (list, tuple)) else [layers]:
        if isinstance(layer, str):
            texts.append(layer)
        elif isinstance(layer, type) and issubclass(layer, nn.Module):
            texts.append(layer.__name__)
        else:
            raise UsageError(
                f"layers has a {type(layer).__name__!r}, neither text nor a class of"
                " modules",
                "for example 'Conv2d,layer1.*', torch.nn.Conv2d, or a list of these",
            )
    return ",".join(texts)
