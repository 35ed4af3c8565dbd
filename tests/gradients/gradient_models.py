"""Small models that call ReLU in every way, and runs of them that keep all tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import SCENES
from oracle import Tensors, inputs, saved
from torch import Tensor, nn
from torch.nn import functional as F

import featviz as fv

ALL = "output,input,grad,grad-input"
SPHERES = SCENES / "spheres.jpg"


FOLDER = Path("out/spheres.jpg")
"""Of the image, in the test's own folder."""


def drawn(
    model: nn.Module, layers: str = "*", out: str | Path = "out", **options: Any
) -> Tensors:
    """Run with everything captured and kept; the raw tensors."""
    options = {"capture": ALL, "target": "sum", **options, **inputs(12)}
    fv.run(model, SPHERES, layers, out, tensors="npy", **options)
    return saved(Path(out) / "spheres.jpg")


class Shared(nn.Module):
    """One in-place ReLU called three times, a sum in place, a branch of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.mix = Mix()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x))
        y = self.norm(self.b(x))
        y += x
        y = self.relu(y)
        return self.relu(self.mix(y, other=x))


class Mix(nn.Module):
    """Two inputs, one by name."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x - other * 2


class Functional(nn.Module):
    """ReLU as a function: in place, as a method, in place as a method."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3)
        self.b = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x), inplace=True)
        return self.b(x).relu_() + 1


class Table(nn.Module):
    """Gives its parameter itself."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self) -> Tensor:
        return self.value
