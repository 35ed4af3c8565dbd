"""Pictures and a network in which every number is exact, whatever goes through
together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

SIZE = (14, 12)
PLAIN = ("--size", "14x12", "--mean", "0,0,0", "--std", "1,1,1")
"""Values of pixels as they are: multiples of 1/255."""


def draw(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


@pytest.fixture(scope="session")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight pictures of noise in two folders, 14 × 12; the last two are equal to
    earlier ones, and every value is black or white, so that many places tie."""
    folder = tmp_path_factory.mktemp("noise")
    generator = np.random.default_rng(5)
    pictures = [generator.integers(0, 2, (*SIZE, 3)) * 255 for _ in range(6)]
    pictures += [pictures[0], pictures[4]]
    for number, pixels in enumerate(pictures):
        draw(folder / ("cat" if number % 3 else "dog") / f"{number:02d}.png", pixels)
    return folder


class WholeNumbers(nn.Module):
    """Whole weights, so that sums are exact in any order: a ReLU that runs twice, a
    pooling, a dead channel, and a vector at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1)
        self.conv2 = nn.Conv2d(5, 4, 3, stride=2)
        self.head = nn.Linear(4, 3)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        generator = torch.Generator().manual_seed(2)
        for module in (self.conv1, self.conv2, self.head):
            shape = module.weight.shape
            weights = torch.randint(-2, 3, shape, generator=generator)
            module.weight.data = weights.float()
            module.bias.data.zero_()
        self.conv1.weight.data[3] = -1  # dead behind the ReLU

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.conv1(x)))
        return self.head(self.relu(self.conv2(x)).amax((2, 3)))


def whole_numbers() -> nn.Module:
    return WholeNumbers().eval()


@pytest.fixture(name="net")
def net_fixture() -> nn.Module:
    return whole_numbers()
