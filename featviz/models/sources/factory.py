"""`pkg.mod:factory` and `file.py:factory`: the user's own code that makes a model."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from featviz.errors import LoadError, UsageError
from featviz.files.missing import misspelt
from featviz.models import digests, named_code
from featviz.models.files import checkpoint
from featviz.models.importing import from_file, importable
from featviz.models.own_classes import read_hparams, taken
from featviz.models.sources import FACTORY_FORM, Loaded, ModelOptions, source_of
from featviz.models.weights import load_weights, read_file
from featviz.text import quoted


def load(options: ModelOptions) -> Loaded:
    """Call the factory; give the model the weights of a file, if one is named.

    Raises:
        UsageError: no such file, module or attribute.
        LoadError: the code raised, or gave no nn.Module, or the weights do not fit.
    """
    path = _weights_file(options)
    hparams = _hparams(path, options) if options.hparams else {}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        module = build(options.spec, options.model_args, hparams)
    record: Mapping[str, Any] = {"seed": options.seed}
    if path is not None:
        record = load_weights(module, path, options)
    if hparams:
        words = {name: quoted(repr(value)) for name, value in hparams.items()}
        record = {**record, "hyper_parameters": words}
    name = source_of(options.spec).name
    assert name is not None
    source = {"kind": "factory", "name": name(options.spec), **record}
    code = code_digest(options.spec)
    if code is not None:
        source["code_sha256"] = code
    return Loaded(module, None, {**source, "parameters": digests.of_module(module)})


def check(options: ModelOptions) -> None:
    """Refuse a file, a name or an argument that is not there; none of the code runs.

    Raises:
        UsageError: names what there is.
    """
    _weights_file(options)
    where = options.spec.rpartition(":")[0]
    if where.endswith(".py"):
        _check_file(where, options.spec)
        named_code.check(options.spec, options.model_args)


def _check_arguments(named: Any, name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse an argument that a function or class does not take."""
    try:
        parameters = inspect.signature(named).parameters
    except (TypeError, ValueError):  # one that does not tell
        return
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        named_code.check_arguments(name, arguments, [*parameters])


def _weights_file(options: ModelOptions) -> Path | None:
    if options.weights in (None, "none"):
        return None
    path = Path(str(options.weights))
    if not path.is_file():
        raise UsageError(f"no weights file {options.weights!r}", "a factory takes a file, or none")
    return path


def _hparams(path: Path | None, options: ModelOptions) -> dict[str, Any]:
    if path is None:
        raise UsageError(
            "--model-arg @hparams needs a Lightning checkpoint", "--weights FILE names it"
        )
    return read_hparams(read_file(path, options), path.name)


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
    _check_arguments(named, spec.rpartition(":")[2], arguments)
    try:
        module = named(**{**taken(named, hparams or {}), **arguments})
    except Exception as error:
        raise _raised(f"{spec} raised", error) from error
    if not isinstance(module, nn.Module):
        raise LoadError(
            f"{spec} gave a {type(module).__name__}, not an nn.Module", "return the model"
        )
    return module


def target(spec: str) -> Any:
    """What `pkg.mod:name` or `file.py:name` names, imported.

    Raises:
        UsageError: no such file, module or attribute.
        LoadError: the code raised.
    """
    match = FACTORY_FORM.fullmatch(spec)
    assert match is not None
    return _attribute(_import(match["where"], spec), match["attribute"], spec)


def code_digest(spec: str) -> str | None:
    """sha256 of the file of `pkg.mod:name` or `file.py:name`, which was imported; None for a module
    without one. Files that it imports itself are no part of it."""
    where = spec.rpartition(":")[0]
    name = where if where.endswith(".py") else getattr(sys.modules.get(where), "__file__", None)
    if name is None or not Path(name).is_file():
        return None
    digest: str = checkpoint.record(Path(name))["sha256"]
    return digest


def _import_module(name: str) -> ModuleType:
    with importable():
        return importlib.import_module(name)


def _check_file(where: str, spec: str) -> None:
    if where.endswith(".py") and not Path(where).is_file():
        raise _no_file(where, spec)


def _no_file(where: str, spec: str) -> UsageError:
    message, near = f"no file {where!r} for {spec!r}", misspelt(Path(where))
    if near is None or near.suffix != ".py":
        return UsageError(message, "check the path")
    meant = f"{near}{spec.removeprefix(where)}"
    return UsageError(message, f"did you mean {quoted(meant)}?", replace=(spec, meant))


def _import(where: str, spec: str) -> ModuleType:
    _check_file(where, spec)
    try:
        return from_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except ModuleNotFoundError as error:
        if error.name and where.split(".")[0] == error.name.split(".")[0]:
            raise UsageError(
                f"no module {where!r} for {spec!r}",
                "run where it can be imported, or name the .py file",
            ) from error
        raise _raised(f"importing {where} failed:", error) from error
    except (Exception, SystemExit) as error:
        raise _raised(f"importing {where} failed:", error) from error


def _attribute(module: ModuleType, dotted: str, spec: str) -> Any:
    target: Any = module
    for part in dotted.split("."):
        if not hasattr(target, part):
            there = [n for n, v in vars(module).items() if not n.startswith("_") and callable(v)]
            raise named_code.no_attribute(spec, dotted, there)
        target = getattr(target, part)
    return target


def _raised(what: str, error: BaseException) -> LoadError:
    return LoadError(f"{what} {type(error).__name__}: {error}", "-v shows the traceback")
