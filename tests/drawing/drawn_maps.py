"""Maps of noise, and what was drawn of them, tile by tile."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from featviz.drawing import drawer
from featviz.drawing.picture import GridPicture, describe, to_image
from featviz.options import DrawOptions
from featviz.records import CaptureSite, GridPlan, Layer
from featviz.rundir.schema import Capture

SITE = CaptureSite(Layer(4, "layer1.0.conv1", "Conv2d"), "output", 1, "")
NAN = float("nan")


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(
    tensor: Tensor,
    capture: str = "output",
    **options: Any,
) -> GridPicture:
    """The picture of a tensor at scale 1.

    Args:
        capture: its kind.
        options: fields of DrawOptions.
    """
    draw_options = DrawOptions(**{"scale": 1, **options})
    site = SITE._replace(kind=capture)
    return drawer.draw(draw_options, site, tensor)[""]


def row_of(tensor: Tensor, **options: Any) -> Capture:
    """The manifest's row of a tensor that was drawn."""
    picture = drawn(tensor, **options)
    return describe(picture, SITE, tensor.shape, "output.png")


def colours(picture: GridPicture) -> np.ndarray:
    """The RGB pixels of a picture, int [H, W, 3]."""
    return np.asarray(to_image(picture).convert("RGB")).astype(int)


def is_magenta(pixels: np.ndarray) -> np.ndarray:
    """Which RGB pixels have the colour of values that are not finite."""
    return (pixels == (255, 0, 255)).all(-1)


def tiles_of(pixels: np.ndarray, plan: GridPlan) -> list[np.ndarray]:
    """The tiles of a picture, cut out by the geometry alone."""
    height, width = plan.tile
    tiles = []
    for number in range(plan.tile_count):
        row, column = divmod(number, plan.columns)
        top = plan.padding + row * (height + plan.padding)
        start = plan.padding + column * (width + plan.padding)
        tiles.append(pixels[top : top + height, start : start + width])
    return tiles


def drawn_tiles(tensor: Tensor, **options: Any) -> list[np.ndarray]:
    """The RGB tiles of a tensor's picture."""
    picture = drawn(tensor, **options)
    return tiles_of(colours(picture), picture.plan)


class Box(NamedTuple):
    """A rectangle of pixels."""

    left: int
    top: int
    width: int
    height: int


def box_of(pixels: np.ndarray, colour: tuple[int, int, int]) -> Box:
    """Where the pixels of a colour are, which must fill a rectangle.

    Args:
        pixels: RGB [H, W, 3].
    """
    has_colour = (pixels == colour).all(2)
    rows = np.flatnonzero(has_colour.any(1))
    columns = np.flatnonzero(has_colour.any(0))
    box = Box(
        left=int(columns[0]),
        top=int(rows[0]),
        width=int(np.ptp(columns)) + 1,
        height=int(np.ptp(rows)) + 1,
    )
    assert has_colour.sum() == box.width * box.height
    return box


class Chunk(NamedTuple):
    """A chunk of a PNG."""

    name: bytes
    content: bytes


def chunks(data: bytes) -> Iterator[Chunk]:
    """The chunks of a PNG; every checksum must be right."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    start = 8
    while start < len(data):
        (length,) = struct.unpack_from(">I", data, start)
        end = start + 8 + length
        (checksum,) = struct.unpack_from(">I", data, end)
        assert checksum == zlib.crc32(data[start + 4 : end])
        yield Chunk(data[start + 4 : start + 8], data[start + 8 : end])
        start = end + 4


def captured(out: Path, image: str, layer: str) -> dict[str, Any]:
    """The row of a layer in an image's manifest."""
    manifest = json.loads((out / image / "manifest.json").read_text())
    rows = {row["layer"]: row for row in manifest["captures"] if not row["key"]}
    return dict(rows[layer])
