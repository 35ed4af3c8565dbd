"""TIFF files that Pillow reads in part or not at all, through tifffile: many channels, and colour
of 16 bits or of floats, as satellites and microscopes write them."""

from __future__ import annotations

import io
import logging
import zlib
from typing import Any

import numpy as np
from PIL import Image

from featviz.errors import ImageError

_BITS, _CHANNELS = 258, 277
"""Numbers of tags."""

_PLAIN, _DEFLATE, _LZW_AND_PACKBITS = (1,), (8, 32946), (5, 32773)
"""Numbers of the ways in which strips are packed that are read here."""

_MOST_PACKED = 4096
"""Bytes that a byte of LZW or PackBits may become."""

_MOST_CHANNELS = 4096
_INSTALL = "pip install 'featviz[tiff]'"


def is_tiff(data: bytes) -> bool:
    """Whether a file begins as a TIFF does."""
    return data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def is_whole(image: Image.Image) -> bool:
    """Whether Pillow has all channels and bits of an image; of colour it keeps four channels of 8
    bits at most, and says nothing of the others."""
    tags = getattr(image, "tag_v2", {})
    bands = len(image.getbands())
    return bool(tags.get(_CHANNELS, bands) == bands and max(tags.get(_BITS, (8,))) <= 8)


def read(data: bytes, most: int) -> np.ndarray:
    """The first page of a TIFF, [H, W, C], of the file's own type.

    Args:
        most: numbers that the image may have.

    Raises:
        ImageError: it is packed in a way that is not read here, or damaged, or the package tifffile
            is not installed.
    """
    try:
        import tifffile
    except ImportError as error:
        words = "is a TIFF of more channels or bits than Pillow reads"
        raise ImageError(words, _INSTALL) from error
    log = logging.getLogger("tifffile")
    log.disabled = True  # it reports what is raised as well
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            page = file.pages.first
            _check(page, data, most)
            image: np.ndarray = page.asarray(maxworkers=1)
            return np.moveaxis(image, 0, -1) if page.axes == "SYX" else np.atleast_3d(image)
    except ImageError:
        raise
    except Exception as error:  # the file decides what is raised
        line = (str(error) or type(error).__name__).splitlines()[0]
        hint = _INSTALL if "imagecodecs" in line else None
        raise ImageError(f"is a TIFF that cannot be read: {line}", hint) from error
    finally:
        log.disabled = False


def _check(page: Any, data: bytes, most: int) -> None:
    """Refuse what is no picture, too large, or packed in another way, before memory is taken."""
    if page.dtype is None or page.axes not in ("YX", "YXS", "SYX"):
        words = f"is a TIFF of {page.bitspersample} bits a channel, which is not read"
        raise ImageError(words, "8, 16 or 32 bits, the same for all channels")
    rows, across = page.tilelength or page.rowsperstrip, page.tilewidth or page.imagewidth
    part = across * (rows if page.is_tiled else min(rows, page.imagelength))
    part *= page.samplesperpixel if page.planarconfig == 1 else 1  # channels side by side
    if page.samplesperpixel > _MOST_CHANNELS or page.size > most or part > 4 * most:
        size = f"{page.imagewidth}×{page.imagelength}"
        raise ImageError(f"has {size} pixels of {page.samplesperpixel} channels: too many")
    if page.compression not in (*_PLAIN, *_DEFLATE, *_LZW_AND_PACKBITS):
        words = f"is a TIFF packed by method {int(page.compression)}, which is not read"
        raise ImageError(words, "save it without compression, or packed by Deflate")
    room = 0
    for start, count in zip(page.dataoffsets, page.databytecounts, strict=True):
        strip = data[start : start + count]
        if page.compression in _DEFLATE:  # tifffile would unpack any number of bytes
            whole = part * page.dtype.itemsize
            unpacked = len(zlib.decompressobj().decompress(strip, whole + 1))
            if unpacked > whole:
                raise ImageError("is a TIFF with a strip of more bytes than it has pixels")
            room += unpacked
        else:
            room += len(strip) * (1 if page.compression in _PLAIN else _MOST_PACKED)
    if room < page.nbytes:
        raise ImageError(f"is a TIFF whose strips lack some of its {page.nbytes:,} bytes")
