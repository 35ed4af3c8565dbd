"""A detector whose evidence is known, and pictures of what it detects."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from networks import Net
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional

SIDE = 64
CELL = 8
PLAIN: dict[str, Any] = {"preset": "none", "size": SIDE}


class RedDetector(nn.Module):
    """Finds red squares: the two cells of 8×8 pixels that are reddest are boxes of
    class 1."""

    def __init__(self) -> None:
        super().__init__()
        redness = torch.tensor([1.0, -1.0, -1.0])
        conv = nn.Conv2d(3, 2, 1, bias=False)
        conv.weight.data = torch.stack([redness, -redness])[..., None, None]
        self.backbone: Any = nn.Sequential(conv, nn.AvgPool2d(CELL), nn.ReLU())

    def redness(self, x: Tensor) -> Tensor:
        """Of each cell, in the first channel [1, 2, h, w]."""
        maps: Tensor = self.backbone(x)
        return maps

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        scores, cells = self.redness(x)[0, 0].flatten().topk(2)
        top = cells // CELL * CELL
        left = cells % CELL * CELL
        boxes = torch.stack((left, top, left + CELL, top + CELL), dim=1).float()
        labels = torch.ones(2, dtype=torch.long)
        return [{"boxes": boxes, "labels": labels, "scores": scores}]


class Pyramid(RedDetector):
    """Its backbone gives two levels; what is red all around speaks against a box."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Net(_levels, fine=self.backbone)

    def redness(self, x: Tensor) -> Tensor:
        maps = self.backbone(x)
        return maps["fine"] - functional.interpolate(maps["coarse"], scale_factor=2) / 4


def _levels(self: nn.Module, x: Tensor) -> dict[str, Tensor]:
    fine = self.fine(x)
    return {"fine": fine, "coarse": functional.avg_pool2d(fine, 2)}


class Square(NamedTuple):
    """A red square, in pixels."""

    x: int
    """Of its first column."""
    y: int
    """Of its first row."""

    def box(self, offset: int = 0, scale: int = 1) -> tuple[int, ...]:
        """Left, top, right and bottom in a picture that is enlarged, and then moved to
        the right."""
        corners = (self.x, self.y, self.x + CELL, self.y + CELL)
        x0, y0, x1, y1 = (scale * corner for corner in corners)
        return (x0 + offset, y0, x1 + offset, y1)


def squares(seed: int) -> tuple[Image.Image, list[Square]]:
    """A grey picture with two red squares, the brighter one first."""
    image = Image.new("RGB", (SIDE, SIDE), (90, 90, 90))
    draw = ImageDraw.Draw(image)
    cells = np.random.default_rng(seed).choice(CELL * CELL, 2, replace=False)
    drawn = []
    for cell, red in zip(cells.tolist(), (250, 200), strict=True):
        x = cell % CELL * CELL
        y = cell // CELL * CELL
        draw.rectangle((x, y, x + CELL - 1, y + CELL - 1), (red, 0, 0))
        drawn.append(Square(x=x, y=y))
    return image, drawn
