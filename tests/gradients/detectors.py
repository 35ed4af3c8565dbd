"""A detector whose evidence is known, and pictures of what it detects."""

from __future__ import annotations

from typing import Any

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
        conv = nn.Conv2d(3, 2, 1, bias=False)
        conv.weight.data = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, 1.0]]).view(
            2, 3, 1, 1
        )
        self.backbone = nn.Sequential(conv, nn.AvgPool2d(CELL), nn.ReLU())

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        redness = self.backbone(x)[0, 0].flatten()
        scores, cells = redness.topk(2)
        top = cells // CELL * CELL
        left = cells % CELL * CELL
        boxes = torch.stack((left, top, left + CELL, top + CELL), dim=1).float()
        labels = torch.ones(2, dtype=torch.long)
        return [{"boxes": boxes, "labels": labels, "scores": scores}]


def squares(seed: int) -> tuple[Image.Image, list[tuple[int, int]]]:
    """Two red squares on grey, the brighter one first; their cells (x, y)."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (SIDE, SIDE), (90, 90, 90))
    draw = ImageDraw.Draw(image)
    cells = rng.choice(CELL * CELL, 2, replace=False)
    corners = []
    for cell, red in zip(cells, (250, 200), strict=True):
        x, y = int(cell) % CELL, int(cell) // CELL
        corner = (x * CELL, y * CELL, x * CELL + CELL - 1, y * CELL + CELL - 1)
        draw.rectangle(corner, fill=(red, 0, 0))
        corners.append((x, y))
    return image, corners
