"""A file of models, a folder of pictures, and a place for runs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from .outcomes import NETS


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of factories; NETS:name."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "user_nets.py"
    path.write_text(NETS)
    return str(path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pictures, of which the second in order cannot be read."""
    path = tmp_path / "folder"
    path.mkdir()
    for name, size in (("a.png", (9, 8)), ("c.png", (13, 8))):
        Image.fromarray(
            np.arange(size[0] * size[1], dtype=np.uint8).reshape(size[::-1])
        ).save(path / name)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    Image.fromarray(noise).save(path / "b.png")
    data = (path / "b.png").read_bytes()
    (path / "b.png").write_bytes(data[: len(data) // 2])
    return path
