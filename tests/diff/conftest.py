"""Pictures, and runs of a changed network on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

from .changed_network import CLI, SMALL, Run, saved, unchanged


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
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[object, Path]]:
    """Runs that a test has made, for the next one that asks for the same."""
    yield {None: tmp_path_factory.mktemp("runs")}


@pytest.fixture
def run(featviz: CLI, photos: Path, tmp_path: Path, runs: dict[object, Path]) -> Run:
    """Run a changed network on the pictures; gives a run directory of the test's own."""

    def make(
        name: str,
        *options: object,
        change: Callable[[nn.Sequential], None] = unchanged,
        images: Path = photos,
    ) -> Path:
        model = saved(tmp_path / "model.pth", change)
        files = sorted(images.iterdir()) if images.is_dir() else [images]
        shown = tuple((path.name, path.read_bytes()) for path in files)
        key = name, options, change, shown
        if key not in runs:
            runs[key] = runs[None] / str(len(runs)) / name
            done = featviz(
                "run", model, images, *SMALL, "--out", runs[key], "-q", *options
            )
            assert done.code == 0, done.err
        return shutil.copytree(runs[key], tmp_path / name)

    return make
