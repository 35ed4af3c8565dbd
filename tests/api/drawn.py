"""Runs through the Python API on pictures as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import featviz as fv

AS_IT_IS = {"size": (20, 24), "mean": (0, 0, 0), "std": (1, 1, 1)}
NAN = float("nan")


def drawn(
    model: nn.Module, images: Any, out: Path, layers: Any = "Conv2d", **options: Any
) -> Any:
    """The images of a run, none of which has failed."""
    result = fv.run(model, images, layers, out, **{**AS_IT_IS, **options})
    assert not result.failures
    return result.images
