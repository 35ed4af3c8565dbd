"""Hostile images, archives of images, and folders of them."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from hostile_harness import TITLE, Attack, Sandbox
from isal import igzip, isal_zlib
from PIL import Image
from torch import nn


def png(size: tuple[int, int] = (24, 20)) -> bytes:
    return encoded("PNG", size)


def encoded(kind: str, size: tuple[int, int] = (24, 20), **options: Any) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, kind, **options)
    return file.getvalue()


def saved_bytes(content: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def giant_png() -> bytes:
    """A PNG whose header says 60,000 by 60,000."""
    head = b"IHDR" + struct.pack(">II", 60_000, 60_000) + png()[24:29]
    return png()[:12] + head + struct.pack(">I", zlib.crc32(head)) + png()[33:]


EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(featviz_hostile) (w)"
    b" file\nshowpage\n"
)
LOOKS: dict[str, tuple[bytes, str]] = {
    "EPS": (EPS, "featviz reads: it looks like PostScript"),
    "PDF": (b"%PDF-1.7\n", "featviz reads: it looks like PDF"),
    "SVG": (
        b"<svg xmlns='http://x'><image href='file:///etc/passwd'/></svg>",
        ".* like SVG or",
    ),
    "XML": (
        b"\xef\xbb\xbf<?xml version='1.0'?><!DOCTYPE x [<!ENTITY a 'b'>]>",
        ".* like SVG or",
    ),
    "FITS": (b"SIMPLE  =                    T", "Pillow can read"),
    "HEIC": (b"\0\0\0\x18ftypheic" + bytes(60), "featviz reads: it looks like HEIC"),
    "script": (b"#!/bin/sh\ntouch owned\n", "Pillow can read"),
    "zip": (b"PK\3\4" + bytes(60), "featviz reads: it looks like a zip file"),
}
"""Contents of files under the name of a PNG, and how the message goes on."""
ON_IMAGE = [
    "run {given}/net.pth {given}/photo.png --out out{n}",
    "audit {given}/net.pth {given}/photo.png --out out{n}",
    "run {given}/net.pth {given}/photo.png --dry-run",
]


def net(box: Sandbox) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    torch.save(model.eval(), box.given / "net.pth")


def tarred(*members: tuple[str, bytes], mode: str = "w", **fields: Any) -> bytes:
    """A tar of these files; `fields` are set on the last one's header."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=tarfile.GNU_FORMAT) as archive:  # type: ignore[call-overload]
        for number, (name, data) in enumerate(members, 1):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if number == len(members):
                for field, value in fields.items():
                    setattr(info, field, value)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def zipped(*members: tuple[str, bytes], packed: bool = True) -> bytes:
    """A zip of these files, of which two may have one name; ISA-L packs bombs in no
    time."""
    file = io.BytesIO()
    compression = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with (
        warnings.catch_warnings(),
        mock.patch.object(zipfile, "zlib", isal_zlib),
        zipfile.ZipFile(file, "w", compression) as archive,
    ):
        warnings.simplefilter("ignore")
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return file.getvalue()


ODD_MEMBERS = [
    "run.json/b.png",
    "RUN.JSON/b.png",
    "manifest.json/b.png",
    "stats.npz",
    "manifest.json",
    "run.json",
    "audit.json/x.png",
    "../../up.png",
    "/etc/x.png",
    "..",
    ".hidden.png",
    ".a.png.0123456789abcdef.part/x.png",
    "a/" * 60 + "x.png",
    "con/x.png",
    "a\nb.png",
    "d" * 250 + "/" + "e" * 250 + ".png",
    "<script>.png",
]
"""Names of members which take no place of ours."""
WORSE_MEMBERS = [
    "a.png/001_0/output.png",
    "a.png/stats.npz",
    "..\\..\\evil.png",
    f"a{TITLE}.png",
    "a" * 5000 + ".png",
    "b/" * 500 + "b.png",
    "a\u202egnp.png",
    "a\udcff.png",
]
"""Names of members beside one that is called a.png: of its files, too long, of no
UTF-8."""


def _sized(size: bytes) -> bytes:
    return tarred(("a.png", png()))[:124] + size + tarred(("a.png", png()))[136:]


LINK = {"type": tarfile.SYMTYPE, "linkname": "../secret/id_secret.png"}


def _zeros() -> tuple[str, bytes]:
    return "a.png", bytes(90_000_000)


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "a link out of a tar": lambda: tarred(("a.png", b""), **LINK),
    "a sparse member of a tar": lambda: tarred(
        ("a.png", b""),
        type=tarfile.GNUTYPE_SPARSE,
    ),
    "10 GB in a tar that are not there": lambda: _sized(b"12000000000\0"),
    "90 MB of zeros in a tar.gz": lambda: igzip.compress(tarred(_zeros())),
    "90 MB of zeros in a zip": lambda: zipped(_zeros()),
    "two members of one name in a zip": lambda: zipped(
        ("a.png", png()),
        ("a.png", b"x"),
    ),
    "5,000 members of a zip": lambda: zipped(
        *[(f"{n}.txt", b"") for n in range(5_000)]
    ),
    "a zip of 2**32 members": lambda: b"PK\5\6" + b"\xff" * 18,
}


SUFFIXES = ("tar.gz", "zip", "tar")


def _given(file: str, data: bytes | Callable[[], bytes]) -> Callable[[Sandbox], None]:
    """A file of these bytes; of what is large they are made late."""

    def place(box: Sandbox) -> None:
        net(box)
        content = data if isinstance(data, bytes) else data()
        (box.given / file).write_bytes(content)

    return place


def _picture(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(png())


FOLDERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a FIFO among photos": ("b.png", os.mkfifo),
    "a device among photos": ("b.png", lambda path: path.symlink_to("/dev/zero")),
    "a folder that links to itself": (
        "loop",
        lambda path: path.symlink_to(path.parent),
    ),
    "a name that is no UTF-8": ("b\udcff.png", _picture),
    "a name that sets a terminal's title": (f"b{TITLE}.png", _picture),
    "a name like an option": ("--overwrite.png", _picture),
    "a folder called run.json": ("run.json/b.png", _picture),
}
"""What lies beside an honest photo, and how it is made."""


def _folder(name: str, make: Callable[[Path], object]) -> Callable[[Sandbox], None]:
    """A folder with one honest photo, and something else."""

    def place(box: Sandbox) -> None:
        net(box)
        _picture(box.given / "photos" / "a.png")
        make(box.given / "photos" / name)

    return place


ON_FOLDER = [
    "run {given}/net.pth {given}/photos --out out{n}",
    "report out0",
    "audit {given}/net.pth {given}/photos --out out{n}",
]


def _of_archives() -> Iterator[Attack]:
    """Tar and zip by turns; a zip holds no name that is not UTF-8."""
    for number, name in enumerate((*ODD_MEMBERS, *WORSE_MEMBERS)):
        members = (("a.png", png()), (name, png()))
        if number % 2 and "\udcff" not in name:
            file = "x.zip"
            data = zipped(*members)
        else:
            file = "x.tar"
            data = tarred(*members)
        lines = [
            f"run {{given}}/net.pth {{given}}/{file} --out out{{n}}",
            "report out0",
        ]
        yield Attack(
            f"archive: {file} with {ascii(name)[:50]}", _given(file, data), lines
        )
    for name, make in ARCHIVES.items():
        file = next(f"photos.{suffix}" for suffix in SUFFIXES if suffix in name)
        lines = [
            f"run {{given}}/net.pth {{given}}/{file} --out out{{n}}",
            f"audit {{given}}/net.pth {{given}}/{file}::a.png --out out{{n}}",
        ]
        yield Attack(f"archive: {name}", _given(file, make), lines)


def all_attacks() -> Iterator[Attack]:
    for name, (data, _) in LOOKS.items():
        yield Attack(f"image: {name}", _given("photo.png", data), ON_IMAGE[:1])
    giant = _given("photo.png", giant_png())
    yield Attack("image: a PNG of 60,000 by 60,000", giant, ON_IMAGE[:1])
    yield from _of_archives()
    for name, (file, make) in FOLDERS.items():
        yield Attack(f"photos: {name}", _folder(file, make), ON_FOLDER)
    photo = _given("photo.png", png())
    yield Attack("control: an honest photo", photo, ON_IMAGE, "good")
    tar = _given("photos.tar", tarred(("a.png", png()), ("b/c.png", png())))
    line = "run {given}/net.pth {given}/photos.tar --out out{n}"
    yield Attack("control: an honest tar", tar, [line], "good")
