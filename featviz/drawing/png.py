"""A PNG encoder for pictures that arrive piece by piece: 8-bit grey, palette or RGB.

Rows are filtered by sub or up, the better of them for each, and deflated by a compiled loop, which
codes bytes by how often they occur, and runs of zeros (`compiled_deflate`); without numba by ISA-L
(package `isal`) at level 1. Measured on feature maps of resnet18, resnet50 and vgg16
(`benchmarks/encode.py`): ISA-L takes 2.5 to 3 times as long, for as many bytes at scale 1 and 1 to
6 % more where maps are enlarged; zlib's level 6 35 times as long for 0.5 % fewer. Of resnet50's
maps at scale 1 the choice of filters saves 2 % of the bytes of sub alone; paeth as a third would
save 3 % more, for a pass over each row that is several times as long. Levels 2 and 3 of ISA-L take
longer for the same bytes.
The format is the PNG specification's, third edition (https://www.w3.org/TR/png-3/).
"""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
from isal import isal_zlib

from featviz.drawing import scan
from featviz.records import Bytes

log = logging.getLogger(__name__)

LEVEL = 1
MAX_PIXELS = 178_956_970
"""Pillow refuses to open larger pictures without a word from the user."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB, _PALETTE = 0, 2, 3
_ZLIB = b"\x78\x01"
"""The head of a stream: deflate, a window of 32 KiB, the fastest of levels."""
_BLOCK = 2**20
"""Bytes that share their codes at most."""
_LAST = 0b011
"""The first bits of ten that are a last block without data, by RFC 1951's own codes."""
SUB, UP = 1, 2
"""The numbers of the filters."""


def warn_of_size(what: str, pixels: int) -> None:
    """Say so where a picture has more pixels than Pillow opens."""
    if pixels > MAX_PIXELS:
        log.warning(
            "%s makes a picture of %d megapixels, more than Pillow opens; --max-maps, --scale 1",
            what,
            pixels // 1_000_000,
        )


def write_png(
    file: BinaryIO,
    size: tuple[int, int],
    pieces: Iterable[Bytes],
    *,
    colors: bytes | None = None,
    text: Mapping[str, str] | None = None,
) -> None:
    """Write a PNG.

    Args:
        size: height and width in pixels.
        pieces: uint8 [rows, width], or [rows, 3 · width] for RGB, from top to bottom; each is done
            with before the next one is asked for.
        colors: RGB triples of a palette; without one an index is its grey.
        text: keywords (at most 79 Latin-1 characters) and texts.
    """
    iterator = iter(pieces)
    first = next(iterator)
    depth = first.shape[1] // size[1]
    rows = filtered(chain([first], iterator), depth)
    write_filtered(file, size, depth, rows, colors=colors, text=text)


def write_filtered(
    file: BinaryIO,
    size: tuple[int, int],
    depth: int,
    pieces: Iterable[Bytes],
    *,
    colors: bytes | None = None,
    text: Mapping[str, str] | None = None,
) -> None:
    """Write a PNG of rows that are filtered already.

    Args:
        size: height and width in pixels.
        depth: bytes of a pixel, 1 or 3.
        pieces: uint8 [rows, 1 + depth · width] as of `filtered`; each is done with before the next
            one is asked for.
        colors: RGB triples of a palette; without one an index is its grey.
        text: keywords (at most 79 Latin-1 characters) and texts.
    """
    head, data = _head(size, depth, colors, tuple((text or {}).items())), b""
    stream = Stream()
    for rows in pieces:
        if data:
            file.write(b"".join((head, *_chunk(b"IDAT", data))))
            head = b""
        data = stream.deflated(rows.reshape(-1))
    file.write(b"".join((head, *_chunk(b"IDAT", data, stream.end()), *_chunk(b"IEND"))))


class Stream:
    """Bytes deflated piece by piece, a zlib stream (https://www.rfc-editor.org/rfc/rfc1950)."""

    def __init__(self) -> None:
        """Begin without any byte."""
        self._loops = scan.compiled() if sys.byteorder == "little" else None
        self._isal: Any = None if self._loops else isal_zlib.compressobj(LEVEL)
        self._head, self._sum = _ZLIB, 1
        self._left = np.zeros(2, np.uint64)
        self._out = np.empty(0, np.uint8)

    def deflated(self, data: Bytes) -> bytes:
        """What this piece adds to the stream.

        Args:
            data: uint8 [N].
        """
        if self._loops is None:
            return bytes(self._isal.compress(data.data))
        self._sum = isal_zlib.adler32(data.data, self._sum)
        parts, self._head = [self._head], b""
        data = np.require(data, requirements="W")  # which the loop asks for
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK]
            if len(self._out) < 2 * len(block) + 256:
                self._out = np.empty(2 * len(block) + 256, np.uint8)
            size = self._loops.deflate(block, self._left, self._out)
            parts.append(self._out[:size].tobytes())
        return b"".join(parts)

    def end(self) -> bytes:
        """What ends the stream: what is left of a byte, a block without data that is the last one,
        and the checksum."""
        if self._loops is None:
            return bytes(self._isal.flush())
        held, bits = map(int, self._left)
        last = (held | _LAST << bits).to_bytes((bits + 17) // 8, "little")
        return self._head + last + self._sum.to_bytes(4, "big")


@lru_cache(1024)
def _head(
    size: tuple[int, int], depth: int, colors: bytes | None, text: tuple[tuple[str, str], ...]
) -> bytes:
    """All that stands before the pixels, which is the same for a layer's picture of each image."""
    color_type = _PALETTE if colors is not None else _GREY if depth == 1 else _RGB
    form = struct.pack(">IIBBBBB", size[1], size[0], 8, color_type, 0, 0, 0)
    chunks = [_chunk(b"IHDR", form), *(_chunk(*_text(*words)) for words in text)]
    if color_type == _PALETTE:
        chunks.append(_chunk(b"PLTE", colors or b""))
    return b"".join((_SIGNATURE, *chain.from_iterable(chunks)))


def filtered(pieces: Iterable[Bytes], depth: int) -> Iterator[Bytes]:
    """Pieces as PNG has them, each row behind the number of its filter; each is overwritten by the
    next one."""
    before = np.empty(0, np.uint8)
    buffer = np.empty(0, np.uint8)
    for piece in pieces:
        height, width = piece.shape
        if len(buffer) < height * (1 + width):
            buffer = np.empty(height * (1 + width), np.uint8)
        rows = buffer[: height * (1 + width)].reshape(height, 1 + width)
        filter_rows(piece, before, depth, rows)
        yield rows
        before = piece[-1].copy()


def filter_rows(piece: Bytes, before: Bytes, depth: int, filtered: Bytes) -> None:
    """Filter each row by `up` or `sub`, what is left of each byte beside the one above or the pixel
    before, whichever gives the smaller sum of differences, as the PNG specification recommends
    under "filter selection"; of equals `sub`, but `up` for a row that equals the one above.

    Args:
        piece: uint8 [rows, width].
        before: the row above the first, uint8 [width]; of the first of all, empty.
        depth: bytes of a pixel.
        filtered: uint8 [rows, 1 + width], which is filled.
    """
    loops = scan.compiled()
    if loops is not None:
        loops.filter_rows(np.require(piece, requirements=["C", "W"]), before, depth, filtered)
        return
    sub, above = piece.copy(), np.zeros_like(piece)
    sub[:, depth:] -= piece[:, :-depth]
    above[1:], above[0] = piece[:-1], before if len(before) else 0
    up = piece - above
    by_sub, by_up = (np.abs(rows.view(np.int8).astype(np.int32)).sum(1) for rows in (sub, up))
    chosen = (by_up < by_sub) | (by_up == 0)
    chosen[0] &= len(before) > 0
    filtered[:, 0] = np.where(chosen, UP, SUB)
    filtered[:, 1:] = np.where(chosen[:, None], up, sub)


def _text(keyword: str, value: str) -> tuple[bytes, bytes]:
    """A tEXt chunk, or iTXt where Latin-1 cannot hold the text."""
    key = keyword.encode("latin-1") + b"\0"
    try:
        return b"tEXt", key + value.encode("latin-1")
    except UnicodeEncodeError:
        return b"iTXt", key + b"\0\0\0\0" + value.encode("utf-8", "replace")


def _chunk(kind: bytes, *data: bytes) -> tuple[bytes, ...]:
    """A chunk's parts: its length, its kind, what it holds, and the checksum of both."""
    checksum = 0
    for part in (kind, *data):
        checksum = isal_zlib.crc32(part, checksum)
    size = sum(map(len, data))
    return struct.pack(">I", size), kind, *data, struct.pack(">I", checksum)
