"""The arguments of the public functions: keywords are the options of the command line, a
module is borrowed and given back as it was, and images in memory become files."""

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
"""Drawing options that `kernels` lacks, and those that `grid` lacks."""
NOT_IN_PYTHON = ("nul_separated", "input")
"""Options of the command line alone: in Python a list of paths is a list, and a mapping of
tensors takes the place of `--input`."""


def keywords_of(*records: type[Struct], but: Sequence[str] = ()) -> Callable[[F], F]:
    """Make a decorator that replaces `**options` in a function's signature by one keyword
    for each option, with its type and default, and documents these. Errors of the function
    name options as Python does.

    Args:
        *records: the options are the fields of these records and of those nested in them.
        but: names of options that the function lacks.
    """

    def decorate(function: F) -> F:
        """Changes the function's signature and documentation; returns it wrapped."""
        # editors, notebooks and Sphinx read `__signature__`
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


# An option, with the space behind it if a value follows; or a whole command of a hint,
# which stays as it is.
_TYPED = re.compile(
    r"`[^`]*`|\b(?:featviz [a-z]+|pip) .*"
    r"|--([a-z][a-z-]*)( (?=['\"\d]|[A-Z]{2}|none\b|(?!out$)\w+(?:[,:]\w|;|$)))?"
)


class _InKeywords(logging.Handler):
    """Changes records of the log to name options as Python does, before handlers of the
    caller get them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Change a record in place; print a warning that nobody else handles."""
        record.msg = _TYPED.sub(_python_name, record.getMessage())
        record.args = ()
        # Python prints warnings that have no handler, but this is one
        handlers = {*_LOGGER.handlers, *logging.root.handlers} - {self}
        if not handlers and record.levelno >= logging.WARNING and logging.lastResort:
            logging.lastResort.handle(record)


_LOGGER = logging.getLogger("featviz")
_IN_KEYWORDS = _InKeywords()


@contextmanager
def in_python() -> Iterator[None]:
    """Let errors and warnings of the block name options as Python does: `layers='Relu'`
    for `--layers 'Relu'`. As `@in_python()` it decorates a function."""
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
    """What replaces a match of `_TYPED`: `layers=` for `--layers ` before a value, `layers`
    for `--layers` alone; a command stays as it is."""
    if typed[1] is None:
        return typed[0]
    return typed[1].replace("-", "_") + ("=" if typed[2] else "")


def names_of(*records: type[Struct], but: Sequence[str] = ()) -> set[str]:
    """The names of all keywords that are options of some records, and `forward_args`.

    Args:
        *records: as of `keywords_of`.
        but: names that are left out.
    """
    return {*every_option(*records), "forward_args"} - {*but, *NOT_IN_PYTHON}


# Hooks of two threads on one module would take each other's tensors. A lock is dropped
# together with its module.
_LOCKS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_LOOKING_UP = Lock()


@contextmanager
def alone_with(model: Any) -> Iterator[None]:
    """Keep a module for this thread during the block; other threads wait. A copy of the
    module has a lock of its own.

    Args:
        model: a module; anything else is not locked.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    # WeakKeyDictionary.setdefault alone is not safe between threads
    with _LOOKING_UP:
        lock = _LOCKS.setdefault(uncompiled(model), RLock())
    with lock:
        yield


class Feeding(NamedTuple):
    """What the caller adds to a model: preprocessing, arguments, and names of classes."""

    transform: UserTransform | None
    """A function in place of the model's own preprocessing; None keeps that."""
    forward_args: Mapping[str, Any]
    """Further arguments of forward, by name."""
    classes: str | Path | Sequence[str] | None = None
    """The names of a module's classes, or their file; None where they are not given."""


def in_one_process(model: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords with `jobs=1`, if `jobs` is not given and the model or the transform is an
    object of the caller. What such an object stores while it runs (counters, lists) would
    be lost with a worker process."""
    is_callers_own = isinstance(model, nn.Module) or callable(keywords.get("transform"))
    if keywords.get("jobs") is None and is_callers_own:
        return {**keywords, "jobs": 1}
    return dict(keywords)


def read_feeding(keywords: dict[str, Any]) -> Feeding:
    """Take `transform` and `forward_args` out of some keywords.

    Args:
        keywords: by name, changed in place. A `transform` that is text stays: it is an
            option of a MODEL string.

    Raises:
        UsageError: `forward_args` is not a mapping.
    """
    forward_args = keywords.pop("forward_args", None) or {}
    if not isinstance(forward_args, Mapping):
        raise UsageError(
            f"forward_args is {type(forward_args).__name__!r}", "{'t': 10}"
        )
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
    """Feed a model in the caller's way during the block. A module is kept for this thread,
    and given back as it was.

    Args:
        model: a module, a loaded model, or the options by which one is loaded.
        inputs: how images become inputs.
        feeding: its `classes` count for a module only.

    Yields:
        The model as the commands take it: a LoadedModel, or the options.
    """
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
        with fed(
            load_model(source, inputs), inputs, transform, feeding.forward_args
        ) as fed_model:
            yield fed_model


@dataclass(frozen=True)
class Request(Generic[T]):
    """The arguments of a public function as they were read, without the images."""

    options: T
    """Of the command."""
    model: ModelOptions | nn.Module
    feeding: Feeding
    temporary: TemporaryFolder | None
    """Holds the results where the caller named no folder for them."""

    def call(self, command: Callable[[Any, list[str], Any], R], images: Any) -> R:
        """Call a command, and return its result.

        Args:
            command: a function that takes the model, paths of images and the options.
            images: as of `as_files`.
        """
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
        """The model as the commands take it, during a block; see `borrowed`.

        Args:
            inputs: how images become inputs; None takes those of the options.
        """
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
    """Read the arguments of a public function.

    Args:
        record: the options of its command.
        model: a module, or a MODEL string.
        options: the function's `**options`.
        layers: selectors, as of `selectors`.
        but: names of options that the function lacks.
        name: what the result is called in a temporary folder, if `out` is None; empty
            where the function needs no such folder.
        **explicit: further arguments of the function that are options.

    Raises:
        UsageError: an option does not take its value, or does not exist, or `model` is
            neither a module nor a MODEL string.
    """
    keywords = {**options, **explicit, "layers": selectors(layers)}
    temporary = None
    if name and explicit["out"] is None:
        temporary = TemporaryFolder()
        keywords["out"] = temporary.path / name
    # each reader takes its own keywords out; what is left is no option
    feeding = read_feeding(keywords)
    of_model = declared(ModelOptions)
    for_model = {name: keywords.pop(name) for name in of_model if name in keywords}
    command_options = read_from(record, keywords, (*but, *NOT_IN_PYTHON))
    if keywords:
        raise no_option(keywords, names_of(record, ModelOptions, but=but))
    if not isinstance(model, nn.Module):
        model_options = _read_model_options(model, for_model)
        return Request(command_options, model_options, feeding, temporary)
    feeding = feeding._replace(classes=for_model.pop("classes", None))
    if for_model:
        raise UsageError(
            f"{', '.join(for_model)} is for a MODEL string, and this is a module"
        )
    check_module(model)
    return Request(command_options, model, feeding, temporary)


def _read_model_options(model: Any, keywords: dict[str, Any]) -> ModelOptions:
    """The options by which a model is loaded.

    Args:
        model: a MODEL string, as text or path.
        keywords: those of the options of models.

    Raises:
        UsageError: `model` is anything else, or an option does not take its value.
    """
    if not isinstance(model, (str, Path)):
        raise UsageError(
            f"the model is {type(model).__name__!r}, and neither a MODEL string nor a"
            " module",
            "of an exported program, torch.export.unflatten makes a module",
        )
    if not isinstance(keywords.get("classes"), (str, Path, NoneType)):
        raise UsageError("a list of classes is for a module", "classes='names.txt'")
    # the option is read from text, as that of the command line
    if isinstance(keywords.get("device"), torch.device):
        keywords["device"] = str(keywords["device"])
    return read(ModelOptions, {"spec": str(model), **keywords})


def check_module(model: Any) -> None:
    """Refuse what takes no hooks: TorchScript, and anything but a module; by UsageError."""
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
    """Write images in memory into files, which are removed at the end of the block.

    Args:
        images: a path, a PIL image, an array or a tensor; a sequence of these; or a
            mapping of tensors by the names of forward's arguments.

    Yields:
        Paths: those that were given, and those of the files. For a mapping, texts
        NAME=FILE as `--input` takes them.

    Raises:
        UsageError: `images` is empty, or holds anything else.
    """
    is_one = isinstance(images, (str, bytes)) or not isinstance(
        images, (Sequence, Mapping)
    )
    pictures = [images] if is_one else images
    if not pictures:
        raise UsageError("there are no images", "give paths or images")
    # as files they go the way of all others: manifests name them, worker processes read
    # them
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
    """The argument `layers` of public functions as text, as of `--layers`.

    Args:
        layers: selectors as text, a class of modules, a list of these, or None.

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
