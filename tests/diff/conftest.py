"""Pictures, and runs of a changed network on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

from .changed_network import CLI, SMALL, Run, saved


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with two pictures, 48 × 40."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed, name in enumerate(("a.png", "b.png")):
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 48, 3), np.uint8)
        Image.fromarray(pixels).resize((48, 40)).save(folder / name)
    return folder


@pytest.fixture
def run(featviz: CLI, photos: Path, tmp_path: Path) -> Run:
    """Run a changed network on the pictures; gives the run directory."""

    def make(
        name: str,
        *options: object,
        change: Callable[[nn.Sequential], None] = lambda model: None,
        images: Path = photos,
    ) -> Path:
        model = saved(tmp_path / "model.pth", change)
        out = tmp_path / name
        done = featviz("run", model, images, *SMALL, "--out", out, "-q", *options)
        assert done.code == 0, done.err
        return out

    return make
