"""Pictures whose pixels say where they stand, and transformers that pass them on as
tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from frames import AS_IS
from PIL import Image
from tiles import rows
from torch import Tensor, nn

import featviz as fv

PATCH = 4


class Block(nn.Module):
    """Holds a module and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.same(x)


class PositionViT(nn.Module):
    """Its tokens are the means of their patch in red, green and blue, behind tokens
    that are parameters and negative.

    With `channels_first`, the blocks see [1, D, T] instead of [1, T, D].
    """

    def __init__(
        self,
        prefixes: Mapping[str, int],
        channels_first: bool = False,
    ) -> None:
        """Args:
        prefixes: how many tokens a parameter of this name holds.
        """
        super().__init__()
        self.conv_proj = nn.Conv2d(3, 3, PATCH, PATCH, bias=False)
        weight = torch.eye(3)[:, :, None, None].repeat(1, 1, PATCH, PATCH) / PATCH**2
        self.conv_proj.weight = nn.Parameter(weight)
        for number, (name, count) in enumerate(prefixes.items(), 1):
            values = -number - torch.arange(count * 3.0).reshape(1, count, 3) / 100
            self.register_parameter(name, nn.Parameter(values))
        self.names = list(prefixes)
        self.channels_first = channels_first
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        prefixes = [self.get_parameter(name) for name in self.names]
        tokens = torch.cat([*prefixes, patches], dim=1)
        if self.channels_first:
            tokens = tokens.transpose(1, 2)
        return self.blocks(tokens)


def ramps(height: int, width: int, patch: int = PATCH) -> np.ndarray:
    """An RGB picture whose red counts rows of patches, green columns, blue both."""
    y, x = np.mgrid[0:height, 0:width] // patch
    return np.stack([3 * y + 1, 2 * x + 1, 5 * y + x], axis=-1).astype(np.uint8)


def positions(height: int, width: int) -> Tensor:
    """The maps [3, height, width] that the tokens of a ramps picture make."""
    return torch.from_numpy(ramps(height, width, 1)).permute(2, 0, 1) / 255


def save(folder: Path, height: int, width: int) -> Path:
    """Save a picture of ramps of this size."""
    path = folder / "ramps.png"
    Image.fromarray(ramps(height, width)).save(path)
    return path


class Look(NamedTuple):
    """The image folder of a run, and its rows."""

    folder: Path
    captures: dict[tuple[str, int, str], dict[str, Any]]
    """By layer, call and key."""

    def row(self, layer: str, key: str = "") -> dict[str, Any]:
        """Of a layer's first call."""
        return self.captures[layer, 0, key]


def look(
    model: nn.Module,
    image: Path,
    layers: str,
    size: tuple[int, int],
    **options: Any,
) -> Look:
    """Run a model on a picture as it is, and read the captures back."""
    out = image.parent / "out"
    result = fv.run(
        model,
        image,
        layers,
        out,
        overwrite=True,
        scale=1,
        size=size,
        **AS_IS,
        **options,
    )
    assert result.failures == ()
    return Look(out / image.name, rows(out / image.name))
