"""Pictures to run on, and run directories to compare: for the tests of whole runs."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

if TYPE_CHECKING:
    from conftest import Outcome

SMALL = ("--layers", "Conv2d,ReLU", "--size", "16")
"""Options that make short work of the tiny model."""


def make_photos(folder: Path, count: int, size: tuple[int, int] = (18, 16)) -> Path:
    """`00.png`, `01.png`, ... in a folder, no two alike."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = (*size[::-1], 3)
    for index in range(count):
        pixels = np.random.default_rng(index).integers(0, 256, shape, np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:02d}.png")
    return folder


def fill_disk(monkeypatch: pytest.MonkeyPatch, full: Callable[[Path], bool]) -> None:
    """Leave no space for the files of which `full` says so, by the paths that they are
    to have: each fails when it would be made."""
    real = os.open

    def opened(path: Any, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            target = Path(path if dir_fd is None else f"/proc/self/fd/{dir_fd}/{path}")
            target = target.parent.resolve() / target.name
            names = [
                re.sub(r"^\.(.+)\.[0-9a-f]{16}\.[0-9a-f]{16}\.part$", r"\1", name)
                for name in target.parts
            ]
            if full(Path(*names)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, flags, *mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", opened)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run_json(out: Path) -> dict[str, Any]:
    """The record of a run directory."""
    content: dict[str, Any] = json.loads((out / "run.json").read_text())
    return content


def complete(out: Path) -> list[str]:
    """Names of the images that have a manifest, in a folder that is not hidden itself."""
    folders = [path.parent for path in out.rglob("manifest.json")]
    visible = [folder for folder in folders if folder.name[0] != "."]
    return sorted(folder.relative_to(out).as_posix() for folder in visible)


def wait_for(count: int, out: Path) -> None:
    """Wait until so many images are complete."""
    deadline = time.monotonic() + 60
    finished = 0
    while finished < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        # a folder got its final name while it was listed
        with suppress(FileNotFoundError):
            finished = len(complete(out))


def check_readable(path: Path) -> None:
    """A file has what its suffix says."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            image.load()
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".npz":
        with np.load(path) as arrays:
            # statistics [maps, 6], and deviations without the border [maps]
            assert all(array.shape[1:] in ((6,), ()) for array in arrays.values())


def check_whole(out: Path) -> None:
    """No half file has a final name, and what is complete has all its pictures."""
    for path in out.rglob("*"):
        if path.is_file() and "/." not in f"/{path.relative_to(out)}":
            check_readable(path)
    for name in complete(out):
        check_complete(out / name)


def check_complete(folder: Path) -> None:
    """An image has the pictures that its manifest lists, and some."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = [row["file"] for row in manifest["captures"]]
    assert files
    for file in (*files, "input.png", "stats.npz"):
        assert (folder / file).is_file()


def snapshot(folder: Path) -> dict[str, object]:
    """Every file below a folder with its bytes, every link with its target, every empty
    folder."""
    contents: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            contents[name] = ("link", str(path.readlink()))
        elif path.is_file():
            contents[name] = path.read_bytes()
        elif path.is_dir() and not any(path.iterdir()):
            contents[name] = "empty folder"
    return contents


def refused(done: Outcome, code: int, *texts: str) -> None:
    """There is one line of error, these texts, and no traceback."""
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.code == code, done
    assert len(lines) == 1, done
    assert "Traceback" not in done.err
    for text in texts:
        assert text in done.err, (text, done.err)
