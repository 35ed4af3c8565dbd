"""A model in which every finding is planted, with its ReLU6 used in four ways; for
tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FIRST = {
    "dead": [0],
    "constant": [1],
    "saturated": [4],
    "nonfinite": [5],
    "redundant": [2, 3],
}
"""Findings of the first activation, for images of independent random colours."""
SECOND = {
    "dead": [6],
    "constant": [0, 1],
    "saturated": [4],
    "nonfinite": [5],
    "redundant": [2, 3],
}
"""Of the second."""


class Planted(nn.Module):
    """Convolution, normalisation, ReLU6, depthwise convolution, ReLU6, linear: 8
    channels."""

    def __init__(self, way: str = "modules") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 1)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 1, groups=1 if way == "one group" else 8)
        self.head = nn.Linear(8, 4)
        self.way = way
        if not way.startswith("functional"):
            self.act = nn.ReLU6(inplace=way == "in place")
        if way == "modules":
            self.act2 = nn.ReLU6()
        self.plant()

    @torch.no_grad()
    def plant(self) -> None:
        """Fill the weights so that each channel has its finding, or none."""
        torch.manual_seed(3)
        red, green, blue = torch.eye(3)
        nothing = torch.zeros(3)
        weights = [nothing, nothing, red, 2 * red, blue, red, green, blue]
        self.conv1.weight.copy_(torch.stack(weights)[:, :, None, None])
        self.conv1.weight[5, 0] = torch.nan
        self.conv1.bias.copy_(torch.tensor([-1.0, 0.5, 0, 0, 100, 0, 0, 0.1]))
        self.conv2.weight.fill_(1)
        self.conv2.weight[6] = -1
        self.conv2.bias.zero_()
        self.conv2.bias[0] = 1

    def activated(self, x: Tensor) -> Tensor:
        if self.way.startswith("functional"):
            return F.relu6(x, inplace=self.way == "functional in place")
        return self.act(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activated(self.bn(self.conv1(x)))
        x = self.conv2(x)
        x = self.act2(x) if self.way == "modules" else self.activated(x)
        return self.head(x.mean((2, 3)))


def make(way: str = "modules") -> nn.Module:
    """The factory for the command line."""
    return Planted(way)
