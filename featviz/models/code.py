"""The user's own code: imported where MODEL, `--transform` or a trusted file names it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from featviz.errors import LoadError, UsageError
from featviz.files import misspelt, real
from featviz.text import quoted

FORM = re.compile(r"(?P<where>.+\.py|[A-Za-z_][\w.]*):(?P<attribute>[A-Za-z_][\w.]*)")
"""`pkg.mod:name` or `file.py:name`."""


def target(spec: str) -> Any:
    """What `pkg.mod:name` or `file.py:name` names, imported."""
    match = FORM.fullmatch(spec)
    assert match is not None
    found: Any = _imported(match["where"], spec)
    there = [n for n, v in vars(found).items() if not n.startswith("_") and callable(v)]
    for part in match["attribute"].split("."):
        if not hasattr(found, part):
            names = ", ".join(map(quoted, there)) or "nothing"
            raise UsageError(f"{spec!r}: there is no {match['attribute']!r}", f"there is {names}")
        found = getattr(found, part)
    return found


def digest(spec: str) -> str | None:
    """sha256 of the file of `pkg.mod:name` or `file.py:name`, which was imported; None for a module
    without one. Files that it imports itself are no part of it."""
    where = spec.rpartition(":")[0]
    name = where if where.endswith(".py") else getattr(sys.modules.get(where), "__file__", None)
    if name is None or not Path(name).is_file():
        return None
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()


def _imported(where: str, spec: str) -> ModuleType:
    path = Path(where) if where.endswith(".py") else None
    if path and not path.is_file():
        near = misspelt(path)
        meant = f"{near}{spec.removeprefix(where)}" if near and near.suffix == ".py" else None
        raise UsageError(
            f"no file {where!r} for {spec!r}",
            f"did you mean {quoted(meant)}?" if meant else "check the path",
            replace=(spec, meant) if meant else None,
        )
    try:
        if path:
            return _from_file(path)
        with importable():
            return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and where.split(".")[0] == missing.split(".")[0]:
            raise UsageError(
                f"no module {where!r} for {spec!r}",
                "run where it can be imported, or name the .py file",
            ) from error
        words = f"importing {where} failed: {type(error).__name__}: {error}"
        raise LoadError(words, "-v shows the traceback") from error


@contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """Let modules of the user's be imported: from the current folder first, as with `python -m`,
    and from `folders` where nothing installed has the name. The folders stay on sys.path for what
    is imported later, unless the import fails."""
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


def _from_file(path: Path) -> ModuleType:
    """Run a file as a module of its own; two files of one name are two modules."""
    place = hashlib.sha256(os.fsencode(real(path))).hexdigest()[:12]
    name = f"featviz_user_{path.stem}_{place}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules[name] = module
    sys.path.insert(0, str(real(path.parent)))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.path[:] = before
        del sys.modules[name]
        raise
    return module
