"""Frames that show their numbers: clips as folders and as animations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

AS_IS: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
"""Preprocessing that leaves the values as they are."""


def still(number: int, height: int = 6, width: int = 8) -> Image.Image:
    """A frame that shows its number: red is ten times it, green counts columns."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = 10 * number
    pixels[..., 1] = np.arange(width) * 20
    return Image.fromarray(pixels)


def numbers(pictures: Sequence[Image.Image]) -> list[int]:
    """The numbers that frames show."""
    reds = [np.asarray(picture.convert("RGB"))[..., 0] for picture in pictures]
    return [round(red.mean() / 10) for red in reds]


def folder_of(path: Path, count: int, name: str = "frame") -> Path:
    """A folder of stills."""
    path.mkdir(parents=True)
    for number in range(count):
        still(number).save(path / f"{name}{number}.png")
    return path


def animation(path: Path, count: int) -> Path:
    """A file of frames."""
    first, *later = map(still, range(count))
    first.save(path, save_all=True, append_images=later, duration=40)
    return path
