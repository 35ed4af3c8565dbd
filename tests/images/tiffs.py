"""A writer of TIFF files of any number of channels, for tests."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np

KINDS = {"u": 1, "i": 2, "f": 3}


def tiff(
    image: np.ndarray,
    part: tuple[int, int] | None = None,
    *,
    tiled: bool = False,
    planar: bool = False,
    compression: int = 1,
    predictor: int = 1,
    order: str = "<",
    tags: dict[int, int] | None = None,
) -> bytes:
    """The bytes of a TIFF of an array [H, W, C]; `part` is the height and width of its strips or
    tiles, `tags` take the place of what would stand there."""
    height, width, channels = image.shape
    high, wide = part or (height, width)
    packed = [
        zlib.compress(block) if compression == 8 else block
        for block in _blocks(image, (high, wide), tiled, planar, predictor, order)
    ]
    entries: dict[int, list[int]] = {
        256: [width],
        257: [height],
        258: [image.dtype.itemsize * 8] * channels,
        259: [compression],
        262: [1],
        277: [channels],
        284: [2 if planar else 1],
        317: [predictor],
        339: [KINDS[image.dtype.kind]] * channels,
        **({322: [wide], 323: [high]} if tiled else {278: [high]}),
        (324 if tiled else 273): [0] * len(packed),
        (325 if tiled else 279): [len(block) for block in packed],
    }
    return _file(dict(sorted(entries.items())), packed, order, tags or {})


def _blocks(
    image: np.ndarray,
    part: tuple[int, int],
    tiled: bool,
    planar: bool,
    predictor: int,
    order: str,
) -> Iterator[bytes]:
    layers = [image[..., i : i + 1] for i in range(image.shape[2])] if planar else [image]
    for layer in layers:
        for top in range(0, image.shape[0], part[0]):
            for left in range(0, image.shape[1], part[1]):
                block = layer[top : top + part[0], left : left + part[1]]
                if tiled:
                    missing = (part[0] - block.shape[0], part[1] - block.shape[1])
                    block = np.pad(block, ((0, missing[0]), (0, missing[1]), (0, 0)))
                if predictor == 2:
                    block = np.diff(block, axis=1, prepend=block[:, :1] * 0)
                yield block.astype(block.dtype.newbyteorder(order)).tobytes()


def _file(
    entries: dict[int, list[int]], packed: list[bytes], order: str, tags: dict[int, int]
) -> bytes:
    mark = b"II*\0" if order == "<" else b"MM\0*"
    head = 8 + 2 + 12 * len(entries) + 4
    sizes = {tag: 4 * len(values) if len(values) > 1 else 0 for tag, values in entries.items()}
    place = head + sum(sizes.values())
    offsets = 324 if 324 in entries else 273
    starts = np.cumsum([place, *map(len, packed)])[:-1]
    entries[offsets] = [int(start) for start in starts]
    directory, beside, at = b"", b"", head
    for tag, values in entries.items():
        values = [tags.get(tag, value) for value in values]
        content = struct.pack(f"{order}{len(values)}I", *values)
        if sizes[tag]:
            beside += content
            content, at = struct.pack(f"{order}I", at), at + sizes[tag]
        directory += struct.pack(f"{order}HHI", tag, 4, len(values)) + content
    count = struct.pack(f"{order}IH", 8, len(entries))
    return mark + count + directory + b"\0" * 4 + beside + b"".join(packed)
