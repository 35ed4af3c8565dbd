"""`pkg.mod:factory` and `file.py:factory`: the user's own code that makes a model."""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from featviz.errors import LoadError, UsageError
from featviz.files.missing import misspelt
from featviz.models import digests
from featviz.models.code import HPARAMS, from_file, hparams_of, importable
from featviz.models.files import checkpoint
from featviz.models.sources import FACTORY_FORM, Loaded, source_of
from featviz.models.weights import put_weights, read_weights
from featviz.options import ModelOptions
from featviz.text import listed, quoted

log = logging.getLogger(__name__)


def load_factory(options: ModelOptions) -> Loaded:
    """Call the factory; give the model the weights of a file, if one is named.

    Raises:
        UsageError: no such file, module or attribute.
        LoadError: the code raised, or gave no nn.Module, or the weights do not fit.
    """
    path = _weights_file(options)
    hparams: dict[str, Any] = {}
    if options.hparams and path is None:
        message = "--model-arg @hparams needs a Lightning checkpoint"
        raise UsageError(message, "--weights FILE names it")
    if options.hparams and path is not None:
        hparams = _read_hparams(checkpoint.read(path, options.trust), path.name)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        module = build(options.spec, options.model_args, hparams)
    record: Mapping[str, Any] = {"seed": options.seed}
    if path is not None:
        record = put_weights(module, read_weights(path, options), path, options)
    if hparams:
        words = {name: quoted(repr(value)) for name, value in hparams.items()}
        record = {**record, "hyper_parameters": words}
    name = source_of(options.spec).name
    assert name is not None
    source = {"kind": "factory", "name": name(options.spec), **record}
    if (code := code_digest(options.spec)) is not None:
        source["code_sha256"] = code
    return Loaded(module, None, {**source, "parameters": digests.of_module(module)})


def check_factory(options: ModelOptions) -> None:
    """Refuse a file that is not there.

    Raises:
        UsageError: names what there is.
    """
    _weights_file(options)
    _check_file(options.spec.rpartition(":")[0], options.spec)


def build(
    spec: str, arguments: Mapping[str, Any], hparams: Mapping[str, Any] | None = None
) -> nn.Module:
    """Call the factory (a function or an nn.Module class), or take the module it names.

    Args:
        hparams: further arguments, of which those are passed that the factory takes.

    Raises:
        UsageError: no such file, module or attribute.
        LoadError: the code raised, or gave no nn.Module.
    """
    named = target(spec)
    if isinstance(named, nn.Module):
        return named
    if not callable(named):
        raise LoadError(
            f"{spec} is a {type(named).__name__}, not a factory", "name a function or a class"
        )
    given = _given(named, spec.rpartition(":")[2], arguments, hparams or {})
    try:
        module = named(**given)
    except Exception as error:
        raise _raised(f"{spec} raised", error) from error
    if not isinstance(module, nn.Module):
        raise LoadError(
            f"{spec} gave a {type(module).__name__}, not an nn.Module", "return the model"
        )
    return module


def _given(
    named: Callable[..., Any], name: str, arguments: Mapping[str, Any], hparams: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that a function or class gets: all of the user's, and of the hyper_parameters
    those that it takes, as Lightning itself chooses them."""
    try:
        parameters = inspect.signature(named).parameters
    except (TypeError, ValueError):  # one that does not tell
        return {**hparams, **arguments}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {**hparams, **arguments}
    if wrong := [argument for argument in arguments if argument not in parameters]:
        close = difflib.get_close_matches(wrong[0], parameters, 1)
        raise UsageError(
            f"--model-arg {quoted(wrong[0])}: {name} takes no such argument",
            f"did you mean {close[0]}?" if close else f"it takes {', '.join(parameters) or 'none'}",
        )
    if others := [quoted(argument) for argument in hparams if argument not in parameters]:
        log.info("hyper_parameters that the model does not take: %s", listed(others, 8))
    return {**{n: value for n, value in hparams.items() if n in parameters}, **arguments}


def _read_hparams(content: Any, file: str) -> dict[str, Any]:
    """The hyper_parameters of a Lightning checkpoint by name; under one name, where the class takes
    all of them as one argument."""
    named = {str(name): value for name, value in hparams_of(content).items()}
    if not named:
        raise LoadError(
            f"--model-arg @hparams: {file} has no {HPARAMS}",
            "give the arguments: --model-arg NAME=VALUE, repeatable",
        )
    name = content.get("hparams_name")
    return {name: named} if isinstance(name, str) and name not in ("", "kwargs") else named


def _weights_file(options: ModelOptions) -> Path | None:
    if options.weights in (None, "none"):
        return None
    path = Path(str(options.weights))
    if not path.is_file():
        raise UsageError(f"no weights file {options.weights!r}", "a factory takes a file, or none")
    return path


def target(spec: str) -> Any:
    """What `pkg.mod:name` or `file.py:name` names, imported.

    Raises:
        UsageError: no such file, module or attribute.
        LoadError: the code raised.
    """
    match = FACTORY_FORM.fullmatch(spec)
    assert match is not None
    found: Any = _import(match["where"], spec)
    there = [n for n, v in vars(found).items() if not n.startswith("_") and callable(v)]
    for part in match["attribute"].split("."):
        if not hasattr(found, part):
            names = ", ".join(map(quoted, there)) or "nothing"
            raise UsageError(f"{spec!r}: there is no {match['attribute']!r}", f"there is {names}")
        found = getattr(found, part)
    return found


def code_digest(spec: str) -> str | None:
    """sha256 of the file of `pkg.mod:name` or `file.py:name`, which was imported; None for a module
    without one. Files that it imports itself are no part of it."""
    where = spec.rpartition(":")[0]
    name = where if where.endswith(".py") else getattr(sys.modules.get(where), "__file__", None)
    if name is None or not Path(name).is_file():
        return None
    digest: str = checkpoint.record(Path(name))["sha256"]
    return digest


def _check_file(where: str, spec: str) -> None:
    if not where.endswith(".py") or Path(where).is_file():
        return
    message, near = f"no file {where!r} for {spec!r}", misspelt(Path(where))
    if near is None or near.suffix != ".py":
        raise UsageError(message, "check the path")
    meant = f"{near}{spec.removeprefix(where)}"
    raise UsageError(message, f"did you mean {quoted(meant)}?", replace=(spec, meant))


def _import(where: str, spec: str) -> ModuleType:
    _check_file(where, spec)
    try:
        if where.endswith(".py"):
            return from_file(Path(where))
        with importable():
            return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and where.split(".")[0] == missing.split(".")[0]:
            raise UsageError(
                f"no module {where!r} for {spec!r}",
                "run where it can be imported, or name the .py file",
            ) from error
        raise _raised(f"importing {where} failed:", error) from error


def _raised(what: str, error: BaseException) -> LoadError:
    return LoadError(f"{what} {type(error).__name__}: {error}", "-v shows the traceback")
