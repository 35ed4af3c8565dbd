"""Imports of the user's modules, which factories and pickled models name."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image

from featviz.files import real
from featviz.models import outline

log = logging.getLogger(__name__)

SCRIPT = "__main__"
"""The module that Python calls a script in which a class was defined, whatever its file."""


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


@contextmanager
def tamed() -> Iterator[None]:
    """Let Ultralytics be imported without what its first import does beside.

    It asks whether the network is there, reports on stdout, which is for results, and puts its own
    functions in the place of `torch.save` and `PIL.Image.open`; the latter would try to install a
    package where an image is broken.
    """
    before, opens, saves = os.environ.get("YOLO_OFFLINE"), Image.open, torch.save
    os.environ["YOLO_OFFLINE"] = "true"
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        Image.open, torch.save = opens, saves
        del os.environ["YOLO_OFFLINE"]
        if before is not None:
            os.environ["YOLO_OFFLINE"] = before


def where_looked(module: str, *folders: Path) -> str:
    """A hint for a module that `importable` did not find."""
    places = ", ".join(dict.fromkeys(str(real(f)) for f in (Path.cwd(), *folders)))
    return (
        f"{module!r} was looked for in {places} and among installed packages; "
        f"PYTHONPATH=FOLDER adds the folder that has it"
    )


def from_file(path: Path) -> ModuleType:
    """Run a file as a module of its own; two files of one name are two modules.

    Raises:
        BaseException: whatever the code raises; sys.path and sys.modules are then as before.
    """
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


def from_script(name: str, *folders: Path) -> Any:
    """A class or function that was defined in a script, from the one file of code in the current
    folder or in `folders` that defines it.

    Raises:
        AttributeError: no file there defines it, or several do.
        Exception: whatever the file raises when it is imported.
    """
    places = [Path.cwd(), *folders]
    files = outline.defining(name.partition(".")[0], places)
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "no .py file"
        where = ", ".join(dict.fromkeys(str(real(folder)) for folder in places))
        raise AttributeError(
            f"{name!r} was defined in a script, and {names} in {where} "
            f"{'each define it' if files else 'defines it'}"
        )
    log.info("%s: from %s, which is imported", name, files[0].name)
    target: Any = _imported_script(files[0])
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _imported_script(path: Path) -> ModuleType:
    """The file as a module, imported once: its classes are the same for all that name them."""
    place = str(real(path))
    known = (m for n, m in sys.modules.items() if n.startswith("featviz_user_"))
    same = (m for m in known if str(real(Path(str(m.__file__)))) == place)
    return next(same, None) or from_file(path)
