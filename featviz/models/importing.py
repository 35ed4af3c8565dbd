"""Imports of the user's modules, which factories and pickled models name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
from PIL import Image

from featviz.files import real


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
