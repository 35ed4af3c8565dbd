"""Runs through the Python API on pictures as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import featviz as fv
from featviz.run.results import ImageResult

AS_IT_IS = {"size": (20, 24), "mean": (0, 0, 0), "std": (1, 1, 1)}
NAN = float("nan")


def drawn(
    model: nn.Module, images: Any, out: Path, layers: Any = "Conv2d", **more: Any
) -> Any:
    """A run's images."""
    found = fv.run(model, images, layers, out, **{**AS_IT_IS, **more}).images
    assert all(
        isinstance(image, ImageResult) and image.error is None for image in found
    )
    return found
