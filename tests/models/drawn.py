"""What a run wrote of an image, read back; for tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiles import manifest
from torch import Tensor


@dataclass(frozen=True)
class DrawnImage:
    """An image folder, with raw tensors (`--tensors npy`) where a test asks for them."""

    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return manifest(self.folder)

    @cached_property
    def rows(self) -> dict[str, dict[str, Any]]:
        """Of each layer the row of its last capture."""
        return {row["layer"]: row for row in self.manifest["captures"]}

    def tensor(self, layer: str) -> Tensor:
        return torch.from_numpy(np.load(self.folder / self.rows[layer]["tensor"]))

    def grid(self, layer: str) -> np.ndarray:
        """Grey levels of a picture, int64 [H, W]."""
        picture = Image.open(self.folder / self.rows[layer]["file"])
        return np.asarray(picture.convert("L")).astype(int)

    def input(self) -> np.ndarray:
        """input.png, int64 [H, W] or [H, W, 3]."""
        return np.asarray(Image.open(self.folder / "input.png")).astype(int)
