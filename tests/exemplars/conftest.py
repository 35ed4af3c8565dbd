"""Pictures and a network in which every number is exact, whatever goes through
together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net
from PIL import Image
from torch import nn

SIZE = (14, 12)
PLAIN = ("--size", "14x12", "--mean", "0,0,0", "--std", "1,1,1")
"""Values of pixels as they are: multiples of 1/255."""


def draw(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """Eight pictures of noise in two folders, 14 × 12; the last two are equal to
    earlier ones, and every value is black or white, so that many places tie."""
    folder = tmp_path / "noise"
    generator = np.random.default_rng(5)
    pictures = [generator.integers(0, 2, (*SIZE, 3)) * 255 for _ in range(6)]
    for number, pixels in enumerate([*pictures, pictures[0], pictures[4]]):
        draw(folder / ("cat" if number % 3 else "dog") / f"{number:02d}.png", pixels)
    return folder


@pytest.fixture
def net() -> nn.Module:
    """Whole weights, so that sums are exact in any order: a ReLU that runs twice, a
    pooling, a dead channel, and a vector at the end."""
    return whole_numbers()


def whole_numbers() -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    convs = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 4, 3, stride=2)
    for module in (*convs, head := nn.Linear(4, 3)):
        weights = torch.randint(-2, 3, module.weight.shape, generator=generator)
        module.weight.data, module.bias.data = (
            weights.float(),
            torch.zeros(len(weights)),
        )
    convs[0].weight.data[3] = -1  # dead behind the ReLU

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.conv1(x)))
        return self.head(self.relu(self.conv2(x)).amax((2, 3)))

    modules = {"conv1": convs[0], "conv2": convs[1], "relu": nn.ReLU(inplace=True)}
    return Net(way, **modules, pool=nn.MaxPool2d(2), head=head).eval()


@pytest.fixture
def net_file(net: nn.Module, tmp_path: Path) -> Path:
    """The network as a factory in a file of its own."""
    path = tmp_path / "whole_numbers.py"
    path.write_text("from exemplars.conftest import whole_numbers as make\n")
    return path
