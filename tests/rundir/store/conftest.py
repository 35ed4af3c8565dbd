"""An empty `memory://`, and a run of four images."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from conftest import Run
from runs import SMALL, make_photos


@pytest.fixture(autouse=True)
def memory() -> Iterator[Any]:
    """An empty store."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 4)


@pytest.fixture
def run(tiny_file: Path, photos: Path) -> list[object]:
    """A run of four images, without --out."""
    return ["run", tiny_file, photos, *SMALL]


@pytest.fixture
def local(featviz: Run, run: list[object], tmp_path: Path, drawn_once: Path) -> Path:
    """The same run in a folder, drawn once."""
    kept = drawn_once / "maps"
    if not kept.exists():
        assert featviz(*run, "--out", kept).code == 0
    return shutil.copytree(kept, tmp_path / "local" / "maps")
