"""TIFF files of any number of channels, as satellites and microscopes write them.

Pillow reads four channels of 8 bits at most. Here it reads the tags and unpacks the strips or
tiles; numpy puts them together.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from featviz.errors import ImageError

_MARKS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_HEADER = 8
_BIG_HEADER = 16

_TYPES = {
    **{(1, bits): f"u{bits // 8}" for bits in (8, 16, 32)},
    **{(2, bits): f"i{bits // 8}" for bits in (8, 16, 32)},
    **{(3, bits): f"f{bits // 8}" for bits in (16, 32, 64)},
}
"""numpy's types, by the tags SampleFormat and BitsPerSample."""
_PLAIN = 1
_UNPACKED_BY_PILLOW = (5, 8, 32773, 32946, 34925, 50000)
"""LZW, Deflate, PackBits, Deflate as it was first numbered, LZMA and Zstandard."""
_DIFFERENCES, _FLOAT_DIFFERENCES = 2, 3

MOST_CHANNELS = 4096
_MOST_PARTS = 2**20
"""Strips or tiles of a file."""


def is_tiff(data: bytes) -> bool:
    """Whether a file begins as a TIFF does."""
    return data[:4] in _MARKS


@dataclass(frozen=True)
class _Layout:
    """Where the numbers of a TIFF are."""

    height: int
    width: int
    channels: int
    dtype: np.dtype[Any]
    compression: int
    predictor: int
    planar: bool
    """Whether each channel has strips or tiles of its own."""
    part: tuple[int, int]
    """Height and width of a strip or tile."""
    parts: list[tuple[int, int]]
    """Where in the file each strip or tile is, and its bytes."""

    @property
    def depth(self) -> int:
        """Channels that lie side by side in a strip or tile."""
        return 1 if self.planar else self.channels


def read(data: bytes, most: int) -> np.ndarray:
    """The first page of a TIFF, [H, W, C], of the file's own type.

    Args:
        most: numbers that the image may have.

    Raises:
        ImageError: it is packed in a way that is not read here, or damaged.
    """
    try:
        return _assembled(data, _layout(data, most))
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, struct.error) as error:
        raise ImageError(f"is a damaged TIFF: {error or type(error).__name__}") from error
    except (OSError, SyntaxError, EOFError, RuntimeError) as error:
        raise ImageError(f"is a TIFF whose strips cannot be unpacked: {error}") from error


def _layout(data: bytes, most: int) -> _Layout:
    tags = _tags(data)
    height, width = _whole(tags[257]), _whole(tags[256])
    channels, planar = _whole(tags.get(277, 1)), tags.get(284, 1) == 2
    if channels > MOST_CHANNELS or height * width * channels > most:
        raise ValueError(f"{width}×{height} pixels of {channels} channels are too many")
    tiled = 324 in tags
    part = (_whole(tags[323]), _whole(tags[322])) if tiled else (tags.get(278, height), width)
    part = (min(_whole(part[0]), height), part[1]) if not tiled else part
    offsets, counts = (_listed(tags[tag]) for tag in ((324, 325) if tiled else (273, 279)))
    across, down = math.ceil(width / part[1]), math.ceil(height / part[0])
    expected = across * down * (channels if planar else 1)
    if len(offsets) != len(counts) or len(offsets) != expected or expected > _MOST_PARTS:
        raise ValueError(f"{len(offsets)} strips or tiles, expected {expected}")
    if part[0] * part[1] * channels > 4 * most:
        raise ValueError(f"a tile of {part[1]}×{part[0]} pixels is too large")
    return _Layout(
        height,
        width,
        channels,
        _dtype(tags, data[:1] == b"I"),
        _compression(tags.get(259, _PLAIN)),
        tags.get(317, 1),
        planar,
        part,
        list(zip(offsets, counts, strict=True)),
    )


def _tags(data: bytes) -> Any:
    """The tags of the first page, as Pillow reads them."""
    big = data[2:3] == b"+" or data[3:4] == b"+"
    directory = ImageFileDirectory_v2(data[: _BIG_HEADER if big else _HEADER])
    file = io.BytesIO(data)
    file.seek(directory.next)
    directory.load(file)
    return directory


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no size")
    return value


def _listed(value: Any) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    if not all(type(number) is int for number in values):
        raise ValueError("places of strips that are no numbers")
    return values


def _dtype(tags: Any, little: bool) -> np.dtype[Any]:
    bits, kinds = set(_listed(tags.get(258, (1,)))), set(_listed(tags.get(339, (1,))))
    name = _TYPES.get((kinds.pop(), next(iter(bits)))) if len(bits) == len(kinds) == 1 else None
    if name is None:
        raise ImageError(
            f"is a TIFF of {'/'.join(map(str, sorted(bits)))} bits a channel, which is not read",
            "8, 16 or 32 bits, the same for all channels",
        )
    return np.dtype(f"{'<' if little else '>'}{name}")


def _compression(number: Any) -> int:
    if number != _PLAIN and number not in _UNPACKED_BY_PILLOW:
        raise ImageError(
            f"is a TIFF packed by method {number}, which is not read for these channels",
            "save it without compression, or packed by Deflate",
        )
    return int(number)


def _assembled(data: bytes, layout: _Layout) -> np.ndarray:
    high, wide = layout.part
    across, down = math.ceil(layout.width / wide), math.ceil(layout.height / high)
    image = np.zeros((layout.height, layout.width, layout.channels), layout.dtype.newbyteorder("="))
    for number, values in enumerate(_parts(data, layout, across * down)):
        channel, place = divmod(number, across * down)
        top, left = place // across * high, place % across * wide
        room = image[top : top + high, left : left + wide]
        room = room[..., channel : channel + 1] if layout.planar else room
        room[...] = values[: room.shape[0], : room.shape[1]]
    return image


def _parts(data: bytes, layout: _Layout, each: int) -> Iterator[np.ndarray]:
    """Each strip or tile, [h, w, depth]; the last strip may be lower than the others."""
    high, wide = layout.part
    for number, (offset, count) in enumerate(layout.parts):
        rows = high
        if wide == layout.width and each > 0:  # strips, or tiles as wide as the image
            rows = min(high, layout.height - number % each * high)
        shape = rows, wide, layout.depth
        packed = data[offset : offset + count] if min(offset, count) >= 0 else b""
        values = _unpacked(packed, layout, shape)
        yield _undone(values, layout)


def _unpacked(packed: bytes, layout: _Layout, shape: tuple[int, int, int]) -> np.ndarray:
    size = math.prod(shape) * layout.dtype.itemsize
    if layout.compression != _PLAIN:
        packed = _by_pillow(packed, layout, shape[0], size // shape[0])
    if len(packed) < size:
        raise ValueError(f"a strip has {len(packed):,} bytes, expected {size:,}")
    if layout.predictor == _FLOAT_DIFFERENCES:
        return _floats(packed[:size], layout, shape)
    return np.frombuffer(packed, layout.dtype, math.prod(shape)).reshape(shape)


def _by_pillow(packed: bytes, layout: _Layout, rows: int, row: int) -> bytes:
    """Unpack a strip as Pillow does: as the only one of a grey image of 8 bits, whose pixels are
    its bytes."""
    tags = [
        (256, row),
        (257, rows),
        (258, 8),
        (259, layout.compression),
        (262, 1),
        (273, 8 + 2 + 9 * 12 + 4),
        (277, 1),
        (278, rows),
        (279, len(packed)),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    file = b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + b"\0" * 4 + packed
    with Image.open(io.BytesIO(file), formats=["TIFF"]) as strip:
        return strip.tobytes()


def _undone(values: np.ndarray, layout: _Layout) -> np.ndarray:
    """The numbers behind the differences of neighbours that some writers store."""
    if layout.predictor != _DIFFERENCES:
        return values
    native = values.astype(layout.dtype.newbyteorder("="))
    return np.cumsum(native, axis=1, dtype=native.dtype)


def _floats(packed: bytes, layout: _Layout, shape: tuple[int, int, int]) -> np.ndarray:
    """Adobe's differences of floats: of each row first all highest bytes, then the next ones."""
    rows, wide, depth = shape
    size = layout.dtype.itemsize
    data = np.frombuffer(packed, np.uint8).reshape(rows, wide * size, depth)
    summed = np.cumsum(data, axis=1, dtype=np.uint8).reshape(rows, size, wide * depth)
    joined = np.ascontiguousarray(summed.swapaxes(1, 2))
    return joined.view(f">f{size}").reshape(shape)
