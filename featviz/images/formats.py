"""The formats of image files that are read: none that starts a program or is one."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from featviz.files import npy
from featviz.images import arrays


@dataclass(frozen=True)
class ImageFormat:
    """A format of image files that is read."""

    name: str
    """Pillow's name where Pillow reads it."""
    suffixes: tuple[str, ...] = ()
    """By which folders and archives are searched; without any it is read where a file is named."""
    common: bool = False
    """Whether Pillow knows it without importing all of its plugins."""
    pillow: bool = True
    is_mine: Callable[[bytes], bool] | None = None
    """Knows a file of the format that may hold any number of channels."""
    read: Callable[[bytes], np.ndarray] | None = None
    """Reads such a file as an array; None where only torch can, whose reader the caller has."""


def _is_zip_with(suffix: str, data: bytes) -> bool:
    """Whether a file is a zip in which a name ends so."""
    if not data.startswith(b"PK\3\4"):
        return False
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return any(name.endswith(suffix) for name in archive.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        return False


def _is_torch(data: bytes) -> bool:
    """Whether a file is one of torch.save, as it is written now or was before torch 1.6."""
    old = data.startswith(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    return old or _is_zip_with("data.pkl", data)


IMAGE_FORMATS = (
    ImageFormat("PNG", (".png",), common=True),
    ImageFormat("JPEG", (".jpg", ".jpeg", ".jfif"), common=True),
    ImageFormat("GIF", (".gif",), common=True),
    ImageFormat("BMP", (".bmp",), common=True),
    ImageFormat("PPM", (".ppm", ".pgm", ".pbm", ".pnm"), common=True),
    ImageFormat("DIB"),
    ImageFormat("TIFF", (".tif", ".tiff"), is_mine=arrays.is_tiff, read=arrays.read_tiff),
    ImageFormat("WEBP", (".webp",)),
    ImageFormat("JPEG2000", (".jp2",)),
    ImageFormat("AVIF", (".avif",)),
    ImageFormat("ICO"),
    ImageFormat("PCX"),
    ImageFormat("QOI"),
    ImageFormat("SGI"),
    ImageFormat("TGA", (".tga",)),
    ImageFormat("NPY", pillow=False, is_mine=lambda d: d.startswith(npy.MAGIC), read=npy.read_npy),
    ImageFormat("NPZ", pillow=False, is_mine=partial(_is_zip_with, ".npy"), read=npy.read_npz),
    ImageFormat("PT", pillow=False, is_mine=_is_torch),
)
"""In the order in which they are tried: TGA has no mark by which it is known, and comes last of
Pillow's. Arrays may hold anything, and are read where they are named, not found in folders. Of
Pillow's formats that are not here EPS starts Ghostscript, and the rest are of fonts, films, screens
and telescopes."""

SUFFIXES = frozenset(suffix for known in IMAGE_FORMATS for suffix in known.suffixes)
"""File names, in lower case, that count as images in a folder or an archive."""

EXPECTED = (
    f"give an image ({', '.join(one.name for one in IMAGE_FORMATS if one.suffixes)}) or an array "
    f"({', '.join(f'.{one.name.lower()}' for one in IMAGE_FORMATS if not one.pillow)}); "
    "--forward-arg passes other arguments of the model"
)
"""What a file that is no image should have been."""

_LOOKS = {
    b"%!PS": "PostScript",
    b"%PDF": "PDF",
    b"<svg": "SVG",
    b"<?xml": "XML or SVG",
    b"<!DOCTYPE": "HTML or SVG",
    b"<html": "HTML",
    b"8BPS": "Photoshop",
    b"PK\3\4": "a zip file",
}


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image in one of IMAGE_FORMATS; its pixels are read later.

    Raises:
        UnidentifiedImageError: the file is no such image; the message says what it looks like.
        OSError: or whatever else Pillow raises on broken files.
    """
    head = file.read(64)
    file.seek(0)
    common, others = (
        [one.name for one in IMAGE_FORMATS if one.pillow and one.common == first]
        for first in (True, False)
    )
    try:
        try:
            return Image.open(file, formats=common)
        except UnidentifiedImageError:
            Image.init()  # imports all of Pillow's plugins; it may have been built without some
            return Image.open(file, formats=[name for name in others if name in Image.OPEN])
    except UnidentifiedImageError:
        looks = _looks_like(head)
        words = f"that featviz reads: it looks like {looks}" if looks else "that Pillow can read"
        raise UnidentifiedImageError(f"is no image {words}" if head else "is empty") from None


def of_channels(data: bytes) -> ImageFormat | None:
    """The format of a file that may hold any number of channels; None for any other file."""
    return next((one for one in IMAGE_FORMATS if one.is_mine and one.is_mine(data)), None)


def _looks_like(head: bytes) -> str | None:
    """What a file that is none of IMAGE_FORMATS looks like, by its first bytes."""
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"msf1"):
        return "HEIC, which has to be converted"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    known = next((words for mark, words in _LOOKS.items() if start.startswith(mark)), None)
    text = head.decode("utf-8", "ignore")
    whole = len(head) - len(text.encode()) < 4  # the last letter may be cut
    plain = whole and text and all(c.isprintable() or c in "\t\r\n\ufeff" for c in text)
    return known or ("text" if plain else None)
