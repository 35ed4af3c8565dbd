"""Reading pictures back, tile by tile, and what torchvision's scaling would make of the
maps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def manifest(folder: Path) -> dict[str, Any]:
    """What manifest.json says of an image."""
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
    return content


def rows(folder: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """The captures of an image by (layer, call, key)."""
    found = manifest(folder)["captures"]
    by_site = {(row["layer"], row["call"], row["key"]): row for row in found}
    assert len(by_site) == len(found)
    return by_site


def assert_row(row: dict[str, Any], **fields: object) -> None:
    """These fields of a manifest's row have these values."""
    assert {name: row[name] for name in fields} == fields


def tiles(folder: Path, row: dict[str, Any]) -> np.ndarray:
    """The tiles of a picture in their order, uint8 [n, h, w], as large as the maps
    were."""
    pixels = np.asarray(Image.open(folder / row["file"]))
    assert pixels.ndim == 2
    grid = row["grid"]
    (height, width), padding = grid["tile"], grid["padding"]
    down, across = (
        grid["scale"] if isinstance(grid["scale"], list) else [grid["scale"]] * 2
    )
    drawn_tiles = [
        pixels[y : y + height : down, x : x + width : across]
        for y in range(padding, pixels.shape[0] - height + 1, height + padding)
        for x in range(padding, pixels.shape[1] - width + 1, width + padding)
    ]
    assert pixels.shape[1] == grid["nrow"] * (width + padding) + padding
    slices = row.get("slices", [1])[0]
    count = len(row.get("channels") or range(row["maps"])) * slices
    assert count <= len(drawn_tiles) < count + grid["nrow"]
    return np.stack(drawn_tiles[:count])


def levels(maps: Tensor) -> np.ndarray:
    """Grey levels of maps [C, ...]: each channel between its own minimum and maximum."""
    flat = maps.detach().double().flatten(1)
    low = flat.amin(1, keepdim=True)
    high = flat.amax(1, keepdim=True)
    assert bool((high > low).all()), "a constant channel has no levels to compare"
    scaled = ((flat - low) / (high - low) * 255 + 0.5).floor().reshape(maps.shape)
    return scaled.to(torch.uint8).numpy()


def assert_drawn(folder: Path, row: dict[str, Any], maps: Tensor) -> None:
    """The picture shows these maps [C, H, W] (or [C, S, H, W]), tile by tile in this
    order."""
    got = tiles(folder, row).astype(int)
    want = levels(maps).astype(int)
    want = want.reshape(-1, *want.shape[-2:])
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1


def raw(folder: Path, row: dict[str, Any]) -> Tensor:
    """The tensor that --tensors npy kept."""
    return torch.from_numpy(np.load(folder / row["tensor"]))
