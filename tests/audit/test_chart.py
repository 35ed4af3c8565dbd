"""The chart of zeros, read back from its pixels."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from featviz.audit import output

BLUE, RED, INCH = (107, 140, 174), (192, 57, 43), 100


def _pixels(layers: list[tuple[str, float, float]]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(output.apoz_chart(layers, "title"))).convert("RGB"))


def _longest(pixels: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    """How many pixels of each row have the colour."""
    return np.asarray((pixels == color).all(2).sum(1))


def test_bars_are_as_long_as_the_shares() -> None:
    """Of five inches the share of zeros is blue, but for the share of dead channels, in red."""
    pixels = _pixels([("a", 0.5, 0.1), ("b", 0.0, 0.0), ("c", 0.9, 0.3)])
    red, blue = _longest(pixels, RED), _longest(pixels, BLUE)
    bars = [red[35 + 12 + 24 * row] for row in range(3)]
    assert bars == pytest.approx([0.1 * 5 * INCH, 0, 0.3 * 5 * INCH], abs=3)
    rest = [blue[35 + 12 + 24 * row] for row in range(3)]
    assert rest == pytest.approx([0.4 * 5 * INCH, 0, 0.6 * 5 * INCH], abs=3)


def test_the_names_stand_beside_the_bars_whole() -> None:
    """A long name makes the picture wider, up to 60 characters; `$` begins no formula."""
    short, long = _pixels([("a$b$", 1, 0)]), _pixels([("m" * 30, 1, 0)])
    assert long.shape[1] > short.shape[1] and long.shape[0] == short.shape[0]
    assert _pixels([("x" * 60, 1, 0)]).shape[1] + 10 > _pixels([("x" * 5000, 1, 0)]).shape[1]
    left = (_pixels([("features.10.conv.1.0.relu6", 1, 0)])[45:55] < 128).any(2).any(0)
    assert not left[:10].any() and left[10:200].any()
