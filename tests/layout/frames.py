"""Frames that show their numbers: clips as folders and as animations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

AS_IS: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


def still(number: int, height: int = 6, width: int = 8) -> Image.Image:
    """A frame that shows its number: red is ten times it, green counts columns."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = 10 * number
    pixels[..., 1] = np.arange(width) * 20
    return Image.fromarray(pixels)


def numbers(pictures: Sequence[Image.Image]) -> list[int]:
    """The frames' own numbers back."""
    return [round(np.asarray(p.convert("RGB"))[..., 0].mean() / 10) for p in pictures]


def folder_of(path: Path, count: int, **size: int) -> Path:
    path.mkdir(parents=True)
    for number in range(count):
        still(number, **size).save(path / f"frame{number}.png")
    return path


def animation(path: Path, count: int) -> Path:
    options: dict[str, Any] = {"lossless": True} if path.suffix == ".webp" else {}
    first, *rest = (still(number) for number in range(count))
    first.save(path, save_all=True, append_images=rest, duration=40, **options)
    return path
