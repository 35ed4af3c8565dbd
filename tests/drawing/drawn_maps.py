"""Maps of noise, and what was drawn of them, tile by tile."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featviz.records import CaptureSite, GridPlan, Layer

SITE = CaptureSite(Layer(1, "conv", "Conv2d"), "output", 0, "")
NAN = float("nan")


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tiles_of(picture: np.ndarray, plan: GridPlan) -> list[np.ndarray]:
    """The tiles of a picture, cut out by the geometry alone."""
    (height, width), padding = plan.tile, plan.padding
    corners = [divmod(i, plan.columns) for i in range(plan.maps)]
    tops = [
        (padding + y * (height + padding), padding + x * (width + padding))
        for y, x in corners
    ]
    return [picture[top : top + height, left : left + width] for top, left in tops]


def chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and content of each chunk of a PNG; every checksum must be right."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at = 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        chunk_type = data[at + 4 : at + 8]
        content = data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length) == (
            zlib.crc32(chunk_type + content),
        )
        yield chunk_type, content
        at += 12 + length


def captured(out: Path, image: str, layer: str) -> dict[str, Any]:
    """The row of a layer in an image's manifest."""
    manifest = json.loads((out / image / "manifest.json").read_text())
    (row,) = [
        row for row in manifest["captures"] if row["layer"] == layer and not row["key"]
    ]
    return dict(row)


def files(root: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()
    }
