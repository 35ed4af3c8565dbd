"""Pictures to run on, and run directories to compare: for the tests of whole runs."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Callable
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
    for index in range(count):
        pixels = np.random.default_rng(index).integers(0, 256, (*size[::-1], 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:02d}.png")
    return folder


def fill_disk(monkeypatch: pytest.MonkeyPatch, full: Callable[[Path], bool]) -> None:
    """Leave no space for the files of which `full` says so: each fails when it is complete and
    would be given its name."""
    real = os.replace

    def replace(source: str, target: str, **folders: int | None) -> None:
        folder = folders.get("dst_dir_fd")
        path = Path(target if folder is None else f"/proc/self/fd/{folder}/{target}")
        if full(path.parent.resolve() / path.name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(source, target, **folders)

    monkeypatch.setattr(os, "replace", replace)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def packed_tree(archive: Path) -> dict[str, bytes]:
    """Every file of a zip file, with its bytes."""
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def run_json(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "run.json").read_text())
    return content


def complete(out: Path) -> list[str]:
    """Names of the images that have a manifest."""
    return sorted(p.parent.relative_to(out).as_posix() for p in out.rglob("manifest.json"))


def check_whole(out: Path) -> None:
    """No half file has a final name, and what is complete has all its pictures."""
    for path in out.rglob("*"):
        if path.name.startswith("."):
            continue
        if path.suffix == ".png" and path.is_file():
            with Image.open(path) as image:
                image.load()
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".npz":
            with np.load(path) as arrays:
                assert all(arrays[key].shape[1] == 6 for key in arrays)
    for path in out.rglob("manifest.json"):
        manifest = json.loads(path.read_text())
        files = [row["file"] for row in manifest["captures"]]
        missing = [f for f in [*files, "input.png", "stats.npz"] if not (path.parent / f).is_file()]
        assert files and not missing, (path, missing)


def snapshot(folder: Path) -> dict[str, object]:
    """Every file below a folder with its bytes, every link with its target, every empty folder."""
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


def refused(done: Outcome, code: int, *words: str) -> None:
    """One line of error that holds these words, and no traceback."""
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.code == code and len(lines) == 1, done
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err, (word, done.err)
