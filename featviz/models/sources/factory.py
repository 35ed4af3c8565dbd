"""`pkg.mod:factory` and `file.py:factory`: the user's own code that makes a model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from featviz.errors import LoadError, UsageError
from featviz.models.importing import from_file, importable
from featviz.models.sources import FACTORY_FORM, Loaded, ModelOptions, source_of
from featviz.models.weights import digest, load_weights


def load(options: ModelOptions) -> Loaded:
    """Call the factory; give the model the weights of a file, if one is named.

    Raises:
        UsageError: no such file, module or attribute.
        LoadError: the code raised, or gave no nn.Module, or the weights do not fit.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        module = build(options.spec, options.model_args)
    record: Mapping[str, Any] = {"seed": options.seed}
    if options.weights not in (None, "none"):
        path = Path(str(options.weights))
        if not path.is_file():
            raise UsageError(
                f"no weights file {options.weights!r}", "a factory takes a file, or none"
            )
        record = load_weights(module, path, options)
    name = source_of(options.spec).name
    assert name is not None
    source = {"kind": "factory", "name": name(options.spec), **record}
    return Loaded(module, None, {**source, "parameters": digest(module)})


def build(spec: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Call the factory (a function or an nn.Module class), or take the module it names.

    Raises:
        UsageError: no such file, module or attribute.
        LoadError: the code raised, or gave no nn.Module.
    """
    match = FACTORY_FORM.fullmatch(spec)
    assert match is not None
    target = _attribute(_import(match["where"], spec), match["attribute"], spec)
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        raise LoadError(
            f"{spec} is a {type(target).__name__}, not a factory", "name a function or a class"
        )
    try:
        module = target(**arguments)
    except Exception as error:
        raise _raised(f"{spec} raised", error) from error
    if not isinstance(module, nn.Module):
        raise LoadError(
            f"{spec} gave a {type(module).__name__}, not an nn.Module", "return the model"
        )
    return module


def _import_module(name: str) -> ModuleType:
    with importable():
        return importlib.import_module(name)


def _import(where: str, spec: str) -> ModuleType:
    if where.endswith(".py") and not Path(where).is_file():
        raise UsageError(f"no file {where!r} for {spec!r}", "check the path")
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
            names = [
                n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))
            ]
            raise UsageError(
                f"{spec!r}: there is no {dotted!r}", f"there is {', '.join(names) or 'nothing'}"
            )
        target = getattr(target, part)
    return target


def _raised(what: str, error: BaseException) -> LoadError:
    return LoadError(f"{what} {type(error).__name__}: {error}", "-v shows the traceback")
