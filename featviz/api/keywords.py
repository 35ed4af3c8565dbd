"""The arguments of the public functions. Keywords are the options of the command line. A
module is borrowed, and left as it was. Images in memory are written into files."""

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
    declared_options,
    every_option,
    nested_records,
    no_option,
    read,
    read_from,
)
from featviz.run.results import TemporaryFolder

Model: TypeAlias = str | Path | nn.Module
"""A MODEL string (`"resnet18"`, a file, `"file.py:factory"`), or a module, which is left as
it was."""
Layers: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]]
Picture: TypeAlias = str | Path | Image.Image | np.ndarray | Tensor
Pictures: TypeAlias = Picture | Sequence[Picture] | Mapping[str, Tensor]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
T = TypeVar("T", bound=Struct)

NOT_OF_KERNELS = ("overlay", "reduce", "figure", "flat", "tensors")
NOT_OF_TENSORS = ("figure", "flat", "format", "tensors")
"""Drawing options that `kernels` does not have, and those that `grid` does not have."""
NOT_IN_PYTHON = ("nul_separated", "input")
"""Options that only the command line has. In Python, a list of paths is a list, and a
mapping of tensors replaces `--input`."""


def keywords_of(*records: type[Struct], but: Sequence[str] = ()) -> Callable[[F], F]:
    """Make a decorator for functions with `**options`. In the signature it replaces
    `**options` by a keyword for each option, with type and default, and it adds the options
    to the docstring. Errors of the function name options as Python does.

    Args:
        *records: the options are the fields of these records, and of the records in them.
        but: names of options that the function does not have.
    """

    def decorate(function: F) -> F:
        """Change the function's signature and docstring, and return it wrapped."""
        # editors, notebooks and Sphinx read `__signature__`
        signature = inspect.signature(function)
        parameters = dict(signature.parameters)
        parameters.pop("options", None)
        types: dict[str, Any] = {}
        for record in records:
            for option_record in (record, *map(type, nested_records(record).values())):
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


# Matches an option, with the space behind it if a value follows; or a whole command in a
# hint, in which nothing is replaced.
_TYPED = re.compile(
    r"`[^`]*`|\b(?:featviz [a-z]+|pip) .*"
    r"|--([a-z][a-z-]*)( (?=['\"\d]|[A-Z]{2}|none\b|(?!out$)\w+(?:[,:]\w|;|$)))?"
)


class _PythonNames(logging.Handler):
    """Changes the messages of the log, so that they name options as Python does, before
    handlers of the caller get them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Change a record in place. If no other handler gets a warning, print it."""
        record.msg = _TYPED.sub(_python_name, record.getMessage())
        record.args = ()
        # without this handler, Python would print a warning that no handler gets
        handlers = {*_LOGGER.handlers, *logging.root.handlers} - {self}
        if not handlers and record.levelno >= logging.WARNING and logging.lastResort:
            logging.lastResort.handle(record)


_LOGGER = logging.getLogger("featviz")
_PYTHON_NAMES = _PythonNames()


@contextmanager
def in_python() -> Iterator[None]:
    """In this block, let errors and warnings name options as Python does: `layers='Relu'`
    for `--layers 'Relu'`. Also a decorator, `@in_python()`."""
    is_outermost = _PYTHON_NAMES not in _LOGGER.handlers
    _LOGGER.addHandler(_PYTHON_NAMES)
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
            _LOGGER.removeHandler(_PYTHON_NAMES)


def _python_name(typed: re.Match[str]) -> str:
    """The text that replaces a match of `_TYPED`: `layers=` for `--layers ` before a value,
    `layers` for `--layers` without one. A command stays as it is."""
    if typed[1] is None:
        return typed[0]
    return typed[1].replace("-", "_") + ("=" if typed[2] else "")


def names_of(*records: type[Struct], but: Sequence[str] = ()) -> set[str]:
    """The names of all keywords of a function: the options of some records, and
    `forward_args`.

    Args:
        *records: as in `keywords_of`.
        but: names that are left out.
    """
    return {*every_option(*records), "forward_args"} - {*but, *NOT_IN_PYTHON}


# A lock for each module, since hooks of two threads on one module would take each other's
# tensors. A lock is removed with its module.
_LOCKS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_LOOKING_UP = Lock()


@contextmanager
def alone_with(model: Any) -> Iterator[None]:
    """In this block, lock a module for this thread; other threads wait. A copy of the module
    has a lock of its own.

    Args:
        model: a module; anything else is not locked.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    # WeakKeyDictionary.setdefault is not safe between threads without a lock
    with _LOOKING_UP:
        lock = _LOCKS.setdefault(uncompiled(model), RLock())
    with lock:
        yield


class Feeding(NamedTuple):
    """What the caller gives for a model: preprocessing, arguments, and names of classes."""

    transform: UserTransform | None
    """A function that replaces the model's own preprocessing; None keeps that."""
    forward_args: Mapping[str, Any]
    """Further arguments of forward, by name."""
    classes: str | Path | Sequence[str] | None = None
    """The names of a module's classes, or the file with them; None if not given."""


def in_one_process(model: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Add `jobs=1` to keywords without `jobs`, if the model or the transform is an object of
    the caller. In a worker process, what such an object stores while it runs (counters,
    lists) would be lost. Returns new keywords."""
    is_callers_own = isinstance(model, nn.Module) or callable(keywords.get("transform"))
    if keywords.get("jobs") is None and is_callers_own:
        return {**keywords, "jobs": 1}
    return dict(keywords)


def read_feeding(keywords: dict[str, Any]) -> Feeding:
    """Read `transform` and `forward_args` from keywords, and remove them there.

    Args:
        keywords: by name, changed in place. A `transform` that is text is not removed: it is
            an option for a MODEL string.

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
    """In this block, have a model with the caller's preprocessing and arguments. A module is
    locked for this thread, and left as it was.

    Args:
        model: a module, a loaded model, or the options by which one is loaded.
        inputs: how images become inputs.
        feeding: what the caller gives; `classes` is only read for a module.

    Yields:
        The model as the functions of commands take it: a LoadedModel, or the options.
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
    """The options of the command."""
    model: ModelOptions | nn.Module
    feeding: Feeding
    temporary: TemporaryFolder | None
    """The folder of the results if the caller named none; None otherwise."""

    def call(self, command: Callable[[Any, list[str], Any], R], images: Any) -> R:
        """Call the function of a command, and return its result.

        Args:
            command: the function; it takes the model, paths of images and the options.
            images: as in `as_files`.
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
        """The model for a block; see the function `borrowed`.

        Args:
            inputs: how images become inputs; None for the `inputs` of the options.
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
        record: the class of the command's options.
        model: a module, or a MODEL string.
        options: the function's `**options`.
        layers: selectors, as in `selectors`.
        but: names of options that the function does not have.
        name: the name of the result in a temporary folder, which is made if `out` is None;
            empty for a function that needs no folder.
        **explicit: further arguments of the function that are options; with `name` also
            `out`.

    Raises:
        UsageError: an option does not take its value, or does not exist, or `model` is
            neither a module nor a MODEL string.
    """
    keywords = {**options, **explicit, "layers": selectors(layers)}
    temporary = None
    if name and explicit["out"] is None:
        temporary = TemporaryFolder()
        keywords["out"] = temporary.path / name
    # each reader removes its own keywords, and a keyword that is left is no option
    feeding = read_feeding(keywords)
    of_model = declared_options(ModelOptions)
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
        keywords: options of models, by name. A `device` may be changed in place.

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
    # options are read from text, as on the command line
    if isinstance(keywords.get("device"), torch.device):
        keywords["device"] = str(keywords["device"])
    return read(ModelOptions, {"spec": str(model), **keywords})


def check_module(model: Any) -> None:
    """Refuse a model that takes no hooks.

    Raises:
        UsageError: the model is TorchScript, or is no module.
    """
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
    """In this block, have images in memory as files. The files are removed at its end.

    Args:
        images: a path, a PIL image, an array or a tensor; a sequence of these; or a
            mapping of tensors by the names of forward's arguments.

    Yields:
        The path of each image. For a mapping, texts NAME=FILE as `--input` takes them.

    Raises:
        UsageError: `images` is empty, or holds anything else.
    """
    is_one = isinstance(images, (str, bytes)) or not isinstance(
        images, (Sequence, Mapping)
    )
    pictures = [images] if is_one else images
    if not pictures:
        raise UsageError("there are no images", "give paths or images")
    # Files, so that these images are treated as all others: manifests name them, and worker
    # processes read them.
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
    """The argument `layers` of public functions as text, as `--layers` takes it.

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
