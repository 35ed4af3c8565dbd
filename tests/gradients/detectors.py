"""A detector whose evidence is known, and pictures of what it detects."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

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
        self.backbone = nn.Sequential(conv, nn.AvgPool2d(CELL), nn.ReLU())

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        redness = self.backbone(x)[0, 0].flatten()
        scores, cells = redness.topk(2)
        top = cells // CELL * CELL
        left = cells % CELL * CELL
        boxes = torch.stack((left, top, left + CELL, top + CELL), dim=1).float()
        labels = torch.ones(2, dtype=torch.long)
        return [{"boxes": boxes, "labels": labels, "scores": scores}]


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
