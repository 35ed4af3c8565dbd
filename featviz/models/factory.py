"""`pkg.mod:factory` and `file.py:factory`: the user's own code that makes a model."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from featviz.errors import LoadError, UsageError

_SPEC = re.compile(r"(?P<where>.+\.py|[A-Za-z_][\w.]*):(?P<attribute>[A-Za-z_][\w.]*)")


def is_spec(text: str) -> bool:
    """Whether a MODEL string has the form of a factory."""
    return _SPEC.fullmatch(text) is not None


def label(spec: str) -> str:
    """The factory without the folder of its file, for records."""
    where, _, attribute = spec.rpartition(":")
    return f"{Path(where).name}:{attribute}" if where.endswith(".py") else spec


def build(spec: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Call the factory (a function or an nn.Module class), or take the module it names.

    Raises:
        UsageError: no such file, module or attribute.
        LoadError: the code raised, or gave no nn.Module.
    """
    found = _SPEC.fullmatch(spec)
    assert found is not None
    target = _attribute(_import(found["where"], spec), found["attribute"], spec)
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


def import_user_module(name: str) -> ModuleType:
    """Import a module of the user's; the current folder counts, as with `python -m`."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _import(where: str, spec: str) -> ModuleType:
    load: Callable[[str], ModuleType] = _from_path if where.endswith(".py") else import_user_module
    try:
        return load(where)
    except ModuleNotFoundError as error:
        if error.name and where.split(".")[0] == error.name.split(".")[0]:
            raise UsageError(
                f"no module {where!r} for {spec!r}",
                "run where it can be imported, or name the .py file",
            ) from error
        raise _raised(f"importing {where} failed:", error) from error
    except FeatvizImportError as error:
        raise UsageError(f"no file {where!r} for {spec!r}", "check the path") from error
    except (Exception, SystemExit) as error:
        raise _raised(f"importing {where} failed:", error) from error


class FeatvizImportError(Exception):
    """There is no such file."""


def _from_path(where: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise FeatvizImportError(where)
    name = f"featviz_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


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
