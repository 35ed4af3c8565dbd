"""Files that are no pictures, odd names in archives, and headers of tars that lie."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runs import make_photos


def photo_bytes(path: Path) -> bytes:
    """The bytes of a picture, which is written into a folder at `path`."""
    make_photos(path, 1)
    return (path / "00.png").read_bytes()


LOOKS: dict[str, tuple[bytes, str]] = {
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PostScript"),
    "EPS with a preview": (b"\xc5\xd0\xd3\xc6" + bytes(60), "EPS"),
    "PDF": (b"%PDF-1.7\n", "PDF"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
    "XML": (b"\xef\xbb\xbf<?xml version='1.0'?><!DOCTYPE x [<!ENTITY a 'b'>]>", "SVG"),
    "HTML": (b"<!DOCTYPE html><script>alert(1)</script>", "HTML"),
    "WMF": (b"\xd7\xcd\xc6\x9a" + bytes(60), "WMF"),
    "Photoshop": (b"8BPS\0\1" + bytes(60), "Photoshop"),
    "FITS": (b"SIMPLE  =                    T", "FITS"),
    "HEIC": (b"\0\0\0\x18ftypheic" + bytes(60), "HEIC"),
    "script": (b"#!/bin/sh\ntouch owned\n", "a script"),
    "zip": (b"PK\3\4" + bytes(60), "a zip file"),
}
"""Contents of files, and what the message says that each looks like."""


ODD_MEMBERS = [
    "run.json/b.png",
    "RUN.JSON/b.png",
    "manifest.json/b.png",
    "stats.npz",
    "manifest.json",
    "run.json",
    "bases.npz/x.png",
    "audit.json/x.png",
    "../../up.png",
    "/etc/x.png",
    "..",
    ".hidden.png",
    ".a.png.0123456789abcdef.part/x.png",
    "a/" * 60 + "x.png",
    "d" * 250 + "/" + "e" * 250 + ".png",
    "con/x.png",
    "a\nb.png",
    "<script>.png",
]


def fifo(path: Path) -> None:
    """A FIFO, which nobody writes to."""
    os.mkfifo(path)


def device(path: Path) -> None:
    """A link to a device that never ends."""
    path.symlink_to("/dev/zero")


def tar_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a member that says it has `size` bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def compressed_zeros(opener: Callable[..., Any], path: Path, head: bytes, size: int) -> None:
    """A compressed file: `head`, and `size` zeros."""
    with opener(path, "wb") as file:
        file.write(head)
        for _ in range(size >> 20):
            file.write(bytes(2**20))
