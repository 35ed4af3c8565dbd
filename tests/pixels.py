"""Pictures as arrays, and whether two of them show the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

Picture = Path | Image.Image | np.ndarray
"""A file, a picture or its values."""


def pixels_of(picture: Picture) -> np.ndarray:
    """The values of a picture, uint8 [H, W] or [H, W, C]."""
    if not isinstance(picture, Path):
        return np.asarray(picture)
    with Image.open(picture) as opened:
        return np.asarray(opened)


def assert_same_pixels(picture: Picture, expected: Picture) -> None:
    """Shape, type and every value are equal."""
    np.testing.assert_array_equal(pixels_of(picture), pixels_of(expected), strict=True)
