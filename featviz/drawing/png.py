"""A PNG encoder for pictures that arrive piece by piece: 8-bit grey, palette or RGB.

Deflate is ISA-L's (package `isal`) at level 1 behind the filters sub and up, the better of them for
each row. Measured on feature maps of resnet18, resnet50 and vgg16 (`benchmarks/encode.py`): 11 to
17 times as fast as zlib's level 6 and within 3 % of its size. Of resnet50's maps at scale 1 the
choice saves 2 % of the bytes of sub alone; paeth as a third would save 3 % more, for a pass over
each row that is several times as long. Levels 2 and 3 take longer for the same bytes.
The format is the PNG specification's, third edition (https://www.w3.org/TR/png-3/).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import BinaryIO

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
    held = _head(size, depth, colors, tuple((text or {}).items()))
    deflate = isal_zlib.compressobj(LEVEL)
    for rows in pieces:
        if data := deflate.compress(rows.reshape(-1).data):
            file.write(b"".join((held, *_chunk(b"IDAT", data))))
            held = b""
    file.write(b"".join((held, *_chunk(b"IDAT", deflate.flush()), *_chunk(b"IEND", b""))))


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


def _chunk(kind: bytes, data: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """A chunk's parts: its length, its kind, what it holds, and the checksum of both."""
    checksum = isal_zlib.crc32(data, isal_zlib.crc32(kind))
    return struct.pack(">I", len(data)), kind, data, struct.pack(">I", checksum)
