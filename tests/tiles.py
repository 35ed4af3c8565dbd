"""Reading pictures back, tile by tile, and what torchvision's scaling would make of the
maps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pixels import pixels_of
from torch import Tensor


def manifest(folder: Path) -> dict[str, Any]:
    """What manifest.json says of an image."""
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
    return content


def rows(folder: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """The captures of an image by (layer, call, key)."""
    captures = manifest(folder)["captures"]
    by_site = {(row["layer"], row["call"], row["key"]): row for row in captures}
    assert len(by_site) == len(captures)
    return by_site


def assert_row(row: dict[str, Any], **fields: object) -> None:
    """These fields of a manifest's row have these values."""
    assert {name: row[name] for name in fields} == fields


def tiles(folder: Path, row: dict[str, Any]) -> np.ndarray:
    """The tiles of a picture in their order, uint8 [n, h, w], as large as the maps
    were."""
    pixels = pixels_of(folder / row["file"])
    grid = row["grid"]
    padding = grid["padding"]
    down, across = np.broadcast_to(grid["scale"], 2)
    drawn_tiles = cells(pixels, grid)[:, padding::down, padding::across]
    slices = row.get("slices", [1])[0]
    count = len(row.get("channels") or range(row["maps"])) * slices
    assert count <= len(drawn_tiles) < count + grid["nrow"]
    return drawn_tiles[:count]


def cells(pixels: np.ndarray, grid: dict[str, Any]) -> np.ndarray:
    """Each tile with the padding above and before it, [n, padding + h, padding + w]."""
    padding = grid["padding"]
    height, width = (padding + size for size in grid["tile"])
    columns = grid["nrow"]
    # what is left over is the padding behind the last tiles
    inside = pixels[: -padding or None, : -padding or None]
    lines = inside.shape[0] // height
    assert inside.shape == (lines * height, columns * width)
    in_lines = inside.reshape(lines, height, columns, width)
    return in_lines.swapaxes(1, 2).reshape(-1, height, width)


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
