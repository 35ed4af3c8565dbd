"""Models of known kernels, and what `featviz kernels` drew of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import Outcome
from PIL import Image
from pixels import Picture, pixels_of
from torchvision.utils import make_grid

from featviz.rundir.schema import read_json

NETS = """
import torch
from torch import nn

class Named(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x

class Called(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
    def forward(self, x):
        return torch.relu(self.conv(x))

def colour():
    return Named(first=nn.Conv2d(3, 10, 5), act=nn.ReLU(), second=nn.Conv2d(10, 6, 3))

def shapes():
    return Named(
        line=nn.Conv1d(2, 5, 7), volume=nn.Conv3d(2, 6, (4, 3, 5)), film=nn.Conv3d(3, 4, (2, 3, 3)),
        up=nn.ConvTranspose2d(4, 6, 3, groups=2), depth=nn.Conv2d(8, 8, 3, groups=8),
        groups=nn.Conv2d(8, 4, 3, groups=2), point=nn.Conv2d(5, 7, 1),
    )

def lazy():
    return Named(first=nn.Conv2d(3, 2, 3), later=nn.LazyConv2d(4, 3), norm=nn.LazyBatchNorm2d())

def only_lazy():
    return nn.Sequential(nn.LazyConv2d(4, 3))

def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))

def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 4, 3)))

def spoilt():
    model = colour()
    with torch.no_grad():
        model.first.weight[2, 1, 0, 3] = float("nan")
        model.second.weight[1, 4, 2, 0] = float("inf")
    return model

def zero():
    model = colour()
    with torch.no_grad():
        model.first.weight[3] = 0
    return model
"""


class Drawn:
    """What one command drew."""

    def __init__(self, out: Path, done: Outcome) -> None:
        self.out = out
        self.done = done
        self.manifest = read_json(out / "manifest.json")
        self.rows = {row["layer"]: row for row in self.manifest["captures"]}

    def image(self, layer: str) -> Image.Image:
        """Its picture."""
        return Image.open(self.out / self.rows[layer]["file"])

    def tiles(self, layer: str) -> np.ndarray:
        """[tiles, h, w(, 3)], taken out of the picture by the manifest's geometry,
        enlarged."""
        row = self.rows[layer]
        height, width = row["grid"]["tile"]
        padding = row["grid"]["padding"]
        pixels = pixels_of(self.image(layer))
        tiles = []
        for index in range(
            len(row.get("channels", range(row["maps"]))) * row["slices"]
        ):
            line, column = divmod(index, row["grid"]["nrow"])
            top = padding + line * (height + padding)
            start = padding + column * (width + padding)
            tiles.append(pixels[top : top + height, start : start + width])
        return np.stack(tiles)


Draw = Callable[..., Drawn]
"""Draws the kernels of one of NETS with these options: the fixture `drawn`."""


def weights(net: str) -> dict[str, torch.Tensor]:
    """The weights that the command draws, built independently of it."""
    scope: dict[str, Any] = {}
    exec(NETS, scope)
    torch.manual_seed(0)
    return {
        name: module.weight.detach()
        for name, module in scope[net]().named_modules()
        if hasattr(module, "weight")
    }


def levels(maps: torch.Tensor) -> np.ndarray:
    """Symmetric grey levels of maps [N, H, W], by make_grid without any grid."""
    largest = float(maps.abs().max())
    limits = (-largest, largest)
    flat = make_grid(maps.reshape(1, 1, -1, 1), normalize=True, value_range=limits)
    return flat[0].mul(255).add(0.5).clamp(0, 255).byte().reshape(maps.shape).numpy()


def assert_close(drawn: Picture, expected: np.ndarray) -> None:
    """Within one level, and there is something to compare."""
    levels_drawn = pixels_of(drawn).astype(int)
    assert levels_drawn.shape == expected.shape
    assert levels_drawn.size
    assert abs(levels_drawn - expected).max() <= 1
