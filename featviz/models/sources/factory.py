"""`pkg.mod:factory` and `file.py:factory`: the user's own code that makes a model."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from featviz.errors import LoadError, UsageError
from featviz.files import real

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


@contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """Let modules of the user's be imported: from the current folder first, as with `python -m`,
    and from `folders` where nothing installed has the name.

    What was imported may import more when it runs, so the folders stay on sys.path; where the
    import fails, sys.path is as it was.
    """
    before = list(sys.path)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    sys.path.extend(name for name in (str(real(f)) for f in folders) if name not in sys.path)
    try:
        yield
    except BaseException:
        sys.path[:] = before
        raise


def where_looked(module: str, *folders: Path) -> str:
    """A hint for a module that `importable` did not find."""
    places = ", ".join(dict.fromkeys(str(real(f)) for f in (Path.cwd(), *folders)))
    return (
        f"{module!r} was looked for in {places} and among installed packages; "
        f"PYTHONPATH=FOLDER adds the folder that has it"
    )


def _import_module(name: str) -> ModuleType:
    with importable():
        return importlib.import_module(name)


def _import(where: str, spec: str) -> ModuleType:
    load: Callable[[str], ModuleType] = _from_path if where.endswith(".py") else _import_module
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
    """Run a file as a module of its own; two files of one name are two modules."""
    path = Path(where)
    if not path.is_file():
        raise FeatvizImportError(where)
    place = hashlib.sha256(os.fsencode(real(path))).hexdigest()[:12]
    name = f"featviz_user_{path.stem}_{place}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    known, before = sys.modules.get(name), list(sys.path)
    sys.modules[name] = module
    sys.path.insert(0, str(real(path.parent)))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.path[:] = before
        del sys.modules[name]
        if known is not None:
            sys.modules[name] = known
        raise
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
