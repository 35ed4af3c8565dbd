"""A small model with functions in its forward, and what is captured of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import featviz as fv
from featviz.hooks.eval_mode import in_eval_mode

AS_IS: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3}

Maps = dict[str, list[Tensor]]
"""Tensors of each layer, in the order of its calls."""


def grab(model: nn.Module, layers: str, *args: Tensor) -> Maps:
    with in_eval_mode(model), fv.capture(model, layers) as maps:
        model(*args)
    return dict(maps)


def call_counts(maps: Maps) -> dict[str, int]:
    return {name: len(calls) for name, calls in maps.items()}


def assert_equal(got: Maps, expected: Maps) -> None:
    """The same layers, each with the same tensors, call by call."""
    assert call_counts(got) == call_counts(expected)
    for name, tensors in expected.items():
        torch.testing.assert_close(got[name], tensors, rtol=0, atol=0, msg=name)


class Unit(nn.Module):
    """Adds in place, then overwrites the sum: what resnet's blocks do."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        out += x
        return self.relu(out)


class Net(nn.Module):
    """Two units, and functions of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Unit(), Unit())
        self.layer2 = nn.Sequential(Unit())

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.layer1(x) - 1)
        x = F.interpolate(x, scale_factor=2)
        x = torch.cat([self.layer2(x), torch.relu(-x)], dim=1)
        return x.relu_()


LINE = ["--mean", "0,0,0", "--std", "1,1,1", "--size", "12x16", "--scale", "1"]
SUMS = ["layer1.0/fn:add", "layer1.1/fn:add", "layer2.0/fn:add"]
