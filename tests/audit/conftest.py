"""Pictures for audits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """Six pictures of independent random colours, 10 × 12."""
    folder = tmp_path / "noise"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for index in range(6):
        pixels = generator.integers(1, 256, (12, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder
