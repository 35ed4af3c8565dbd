"""The formats of image files that are read: none that starts a program or is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError


@dataclass(frozen=True)
class ImageFormat:
    """A format of image files that is read."""

    pillow: str
    """Pillow's name; a Pillow that was built without the format leaves it out."""
    suffixes: tuple[str, ...] = ()
    """File names by which folders and archives are searched; a format without any is read where a
    file is named."""
    common: bool = False
    """Whether Pillow knows it without importing all of its plugins."""


IMAGE_FORMATS = (
    ImageFormat("PNG", (".png",), common=True),
    ImageFormat("JPEG", (".jpg", ".jpeg", ".jfif"), common=True),
    ImageFormat("GIF", (".gif",), common=True),
    ImageFormat("BMP", (".bmp",), common=True),
    ImageFormat("PPM", (".ppm", ".pgm", ".pbm", ".pnm"), common=True),
    ImageFormat("DIB"),
    ImageFormat("TIFF", (".tif", ".tiff")),
    ImageFormat("WEBP", (".webp",)),
    ImageFormat("JPEG2000", (".jp2",)),
    ImageFormat("AVIF", (".avif",)),
    ImageFormat("ICO"),
    ImageFormat("PCX"),
    ImageFormat("QOI"),
    ImageFormat("SGI"),
    ImageFormat("TGA", (".tga",)),
)
"""In the order in which they are tried: TGA has no mark by which it is known, and comes last. Of
Pillow's formats that are not here EPS starts Ghostscript, and the rest are of fonts, films, screens
and telescopes."""

SUFFIXES = frozenset(suffix for known in IMAGE_FORMATS for suffix in known.suffixes)
"""File names, in lower case, that count as images in a folder or an archive."""

_LOOKS = (
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "EPS"),
    (b"%PDF", "PDF"),
    (b"<svg", "SVG"),
    (b"<?xml", "XML or SVG"),
    (b"<!DOCTYPE", "HTML or SVG"),
    (b"<html", "HTML"),
    (b"\xd7\xcd\xc6\x9a", "WMF"),
    (b"8BPS", "Photoshop"),
    (b"SIMPLE  =", "FITS"),
    (b"#!", "a script"),
    (b"PK\3\4", "a zip file"),
    (b"\x1f\x8b", "gzip"),
)
_HEAD = 64
"""Bytes at the beginning by which a file is known."""


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image in one of IMAGE_FORMATS; its pixels are read later.

    Raises:
        UnidentifiedImageError: the file is no such image; the message says what it looks like.
        OSError: or whatever else Pillow raises on broken files.
    """
    head = file.read(_HEAD)
    file.seek(0)
    try:
        return _open(file)
    except UnidentifiedImageError:
        if not head:
            raise UnidentifiedImageError("is empty") from None
        looks = looks_like(head)
        if looks is None:
            raise UnidentifiedImageError("is no image that Pillow can read") from None
        raise UnidentifiedImageError(
            f"is no image that featviz reads: it looks like {looks}"
        ) from None


def _open(file: BinaryIO) -> Image.Image:
    """The common formats first: for the others Pillow imports all its plugins."""
    try:
        return Image.open(file, formats=[known.pillow for known in IMAGE_FORMATS if known.common])
    except UnidentifiedImageError:
        Image.init()
        others = [known.pillow for known in IMAGE_FORMATS if not known.common]
        return Image.open(file, formats=[name for name in others if name in Image.OPEN])


def looks_like(head: bytes) -> str | None:
    """What a file that is none of IMAGE_FORMATS looks like, by its first bytes."""
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"msf1"):
        return "HEIC, which has to be converted"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return next((words for mark, words in _LOOKS if text.startswith(mark)), None)
