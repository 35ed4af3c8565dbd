"""The formats of pictures that are read: none that starts a program or is one."""

from __future__ import annotations

from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

_COMMON = ("PNG", "JPEG", "GIF", "BMP", "PPM")
_OTHER = ("DIB", "TIFF", "WEBP", "JPEG2000", "AVIF", "ICO", "PCX", "QOI", "SGI", "TGA")
FORMATS = _COMMON + _OTHER
"""Pillow's names, as far as this Pillow has them. Of those that are not here EPS starts
Ghostscript, and the rest are of fonts, films, screens and telescopes. TGA has no mark by which it
is known, and comes last."""

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
    """Open a picture of one of FORMATS; its pixels are read later.

    Raises:
        UnidentifiedImageError: it is none, in words that say what it looks like.
        OSError: or whatever else Pillow raises on broken files.
    """
    head = file.read(_HEAD)
    file.seek(0)
    try:
        return _open(file)
    except UnidentifiedImageError:
        looks = looks_like(head)
        if looks is None:
            raise UnidentifiedImageError("is no image that Pillow can read") from None
        raise UnidentifiedImageError(
            f"is no image that featviz reads: it looks like {looks}"
        ) from None


def _open(file: BinaryIO) -> Image.Image:
    """The common ones first: for the others Pillow imports all its plugins."""
    try:
        return Image.open(file, formats=_COMMON)
    except UnidentifiedImageError:
        Image.init()
        return Image.open(file, formats=[name for name in _OTHER if name in Image.OPEN])


def looks_like(head: bytes) -> str | None:
    """What a file that is none of FORMATS looks like, by its first bytes."""
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"msf1"):
        return "HEIC, which has to be converted"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return next((words for mark, words in _LOOKS if text.startswith(mark)), None)
