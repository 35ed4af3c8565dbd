"""The picture of the tests as an array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def pixels(picture: Path) -> np.ndarray:
    """The picture as an array, uint8 [20, 24, 3]."""
    return np.asarray(Image.open(picture))
