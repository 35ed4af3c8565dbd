"""A file of models, a folder of pictures, and a place for runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from .outcomes import NETS


@pytest.fixture
def nets(tmp_path: Path) -> str:
    """A file of factories; NETS:name."""
    path = tmp_path / "user_nets.py"
    path.write_text(NETS)
    return str(path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The run directory."""
    return tmp_path / "out"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pictures, of which the second in order cannot be read."""
    path = tmp_path / "folder"
    path.mkdir()
    Image.linear_gradient("L").resize((9, 8)).save(path / "a.png")
    Image.linear_gradient("L").resize((13, 8)).save(path / "c.png")
    Image.effect_noise((64, 64), 50).save(path / "b.png")
    data = (path / "b.png").read_bytes()
    (path / "b.png").write_bytes(data[: len(data) // 2])
    return path
