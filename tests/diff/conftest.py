"""Pictures, and runs of a changed network on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

from .changed_network import (
    CLI,
    KEPT,
    SMALL,
    Pair,
    Run,
    one_weight,
    saved,
    unchanged,
)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with two pictures, 48 × 40."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed, name in enumerate(("a.png", "b.png")):
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 48, 3), np.uint8)
        Image.fromarray(pixels).resize((48, 40)).save(folder / name)
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunCache:
    """Runs that a test has made, for the next one that asks for the same."""
    return RunCache(tmp_path_factory.mktemp("runs"))


class RunCache:
    """Run directories by all that makes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[object, Path] = {}

    def get(self, key: object, draw: Callable[[Path], None]) -> Path:
        """The run of this key, which is drawn where there is none."""
        if key not in self.runs:
            out = self.folder / str(len(self.runs))
            draw(out)
            self.runs[key] = out
        return self.runs[key]


@pytest.fixture
def pair(run: Run) -> Pair:
    """Two runs with tensors, before and after one weight has changed."""
    return run("base", *KEPT), run("new", *KEPT, change=one_weight)


@pytest.fixture
def run(featviz: CLI, photos: Path, tmp_path: Path, runs: RunCache) -> Run:
    """Run a changed network on the pictures; gives a run directory of the test's own."""

    def make(
        name: str,
        *options: object,
        change: Callable[[nn.Sequential], None] = unchanged,
        images: Path = photos,
    ) -> Path:
        def draw(out: Path) -> None:
            model = saved(tmp_path / "model.pth", change)
            done = featviz("run", model, images, *SMALL, "--out", out, "-q", *options)
            assert done.code == 0, done.err

        files = sorted(images.iterdir()) if images.is_dir() else [images]
        contents = tuple((path.name, path.read_bytes()) for path in files)
        cached = runs.get((options, change, contents), draw)
        return shutil.copytree(cached, tmp_path / name)

    return make
