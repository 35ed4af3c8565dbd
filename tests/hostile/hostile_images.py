"""Hostile images and archives of images."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from bombs import gzipped, packing_quickly, zeros_in_zlib
from hostile_harness import TITLE, Attack, Sandbox
from PIL import Image
from torch import nn


def png(size: tuple[int, int] = (24, 20)) -> bytes:
    """An honest picture."""
    return encoded("PNG", size)


def encoded(kind: str, size: tuple[int, int] = (24, 20), **options: Any) -> bytes:
    """A picture in a format of Pillow's."""
    file = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, kind, **options)
    return file.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(*chunks: tuple[bytes, bytes], width: int = 24, height: int = 20) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = [(b"IHDR", head), *chunks, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*own) for own in body)


def giant_png() -> bytes:
    """A header of 60,000 by 60,000 pixels, and few bytes."""
    return _png((b"IDAT", zlib.compress(bytes(1000))), width=60_000, height=60_000)


def text_bomb_png() -> bytes:
    """A compressed text of a gigabyte."""
    text = zeros_in_zlib(1000 * 2**20)
    pixels = zlib.compress(b"".join(b"\0" + bytes(24) for _ in range(20)))
    return _png((b"zTXt", b"featviz\0\0" + text), (b"IDAT", pixels))


def _tiff_loop() -> bytes:
    """Directories of a TIFF that follow each other for ever."""
    entry = struct.pack("<HHII", 256, 4, 1, 24)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 1) + entry + struct.pack("<I", 8)


def _tiff_huge() -> bytes:
    tags = [(256, 60_000), (257, 60_000), (258, 8), (259, 1), (262, 1), (273, 8), (279, 2**31)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4)


EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 20\n%%EndComments\n"
    b"(featviz_hostile) (w) file closefile\nshowpage\n%%EOF\n"
)
IMAGES: dict[str, Callable[[], bytes]] = {
    "PostScript under the name of a PNG": lambda: EPS,
    "a PDF": lambda: encoded("PDF"),
    "a stub of WMF": lambda: (
        b"\xd7\xcd\xc6\x9a\0\0" + struct.pack("<hhhhH", 0, 0, 24, 20, 72) + bytes(30)
    ),
    "a stub of GRIB": lambda: b"GRIB" + bytes(3) + b"\1" + bytes(50),
    "a stub of HDF5": lambda: b"\x89HDF\r\n\x1a\n" + bytes(50),
    "a FITS": lambda: b"SIMPLE  =                    T" + b" " * 50 + b"END" + b" " * 2800,
    "XBM source": lambda: b"#define x_width 24\n#define x_height 20\nstatic char x[] = {\n0x00};",
    "XPM source": lambda: b'/* XPM */\nstatic char *x[] = {\n"9999999 9999999 1 1",\n"a c red",',
    "SVG that names a file": lambda: (
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    ),
    "a PPM of 10**9 columns": lambda: b"P6 1000000000 1000000000 255\n" + bytes(100),
    "a PPM of a million digits": lambda: b"P6 " + b"9" * 10**6 + b" 1 255\n",
    "a PNG of 60,000 by 60,000": giant_png,
    "a PNG with a gigabyte of text": text_bomb_png,
    "a PNG of 1 by 30,000": lambda: encoded("PNG", (1, 30_000)),
    "an animated PNG that says 2**31 - 1 frames": lambda: _png(
        (b"acTL", struct.pack(">II", 2**31 - 1, 0)),
        (b"fcTL", struct.pack(">IIIIIHHBB", 0, 24, 20, 0, 0, 1, 1, 0, 0)),
        (b"IDAT", zlib.compress(bytes(20 * 73))),
    ),
    "a PNG of no size": lambda: _png((b"IDAT", zlib.compress(b"")), width=0, height=0),
    "a PNG with a broken checksum": lambda: png()[:40] + b"\0\0\0\0" + png()[44:],
    "a PNG of 60,000 chunks": lambda: _png(*[(b"abCd", b"")] * 60_000),
    "a PNG with a chunk of 2 GB": lambda: png()[:33] + b"\x7f\xff\xff\xffIDAT" + bytes(50),
    "a PNG with an ICC bomb": lambda: _png((b"iCCP", b"x\0\0" + zlib.compress(bytes(200_000_000)))),
    "half of a JPEG": lambda: encoded("JPEG")[:300],
    "a JPEG of 65,500 by 65,500": lambda: encoded("JPEG").replace(
        b"\xff\xc0\x00\x11\x08\x00\x14\x00\x18", b"\xff\xc0\x00\x11\x08\xff\xdc\xff\xdc"
    ),
    "a JPEG with broken EXIF": lambda: encoded("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff"),
    "a GIF of no frames": lambda: b"GIF89a\xff\xff\xff\xff\0\0\0;",
    "a GIF that ends early": lambda: encoded("GIF")[:60],
    "a TIFF whose directories go in a circle": _tiff_loop,
    "a TIFF of 60,000 by 60,000": _tiff_huge,
    "a BMP of a negative size": lambda: (
        encoded("BMP")[:18] + struct.pack("<ii", -24, -(2**31)) + encoded("BMP")[26:]
    ),
    "a WebP that lies about its length": lambda: (
        b"RIFF\xff\xff\xff\xffWEBPVP8 \xff\xff\xff\xff" + bytes(50)
    ),
    "an ICO of ICOs": lambda: b"\0\0\1\0\xff\xff" + bytes(40),
    "a PSD of 60,000 by 60,000": lambda: (
        b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 60_000, 60_000, 8, 3)
    ),
    "nothing": lambda: b"",
    "zeros": lambda: bytes(10_000),
    "markup": lambda: b"<html><script>x</script></html>",
}

ON_IMAGE = [
    "run {given}/net.pth {given}/photo.png --out out{n}",
    "audit {given}/net.pth {given}/photo.png --out out{n}",
    "run {given}/net.pth {given}/photo.png --dry-run",
]


def net(box: Sandbox) -> None:
    """A model to draw with."""
    torch.save(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval(), box.given / "net.pth"
    )


def _image(make: Callable[[], bytes]) -> Callable[[Sandbox], None]:
    def place(box: Sandbox) -> None:
        net(box)
        (box.given / "photo.png").write_bytes(make())

    return place


def tarred(*members: tuple[str, bytes], mode: str = "w", **fields: Any) -> bytes:
    """A tar of these files; `fields` are set on the last one's header."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=tarfile.GNU_FORMAT) as archive:  # type: ignore[call-overload]
        for number, (name, data) in enumerate(members):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if number == len(members) - 1:
                for field, value in fields.items():
                    setattr(info, field, value)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def zipped(*members: tuple[str, bytes]) -> bytes:
    """A zip of these files."""
    file = io.BytesIO()
    packed = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED)
    with warnings.catch_warnings(), packing_quickly(), packed as archive:
        warnings.simplefilter("ignore")
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return file.getvalue()


NAMES = {
    "run.json": "run.json/b.png",
    "a manifest": "a.png/manifest.json/b.png",
    "stats": "a.png/stats.npz",
    "a layer's picture": "a.png/001_0/output.png",
    "a way out": "../../../../evil.png",
    "an absolute path": "/evil.png",
    "a drive": "C:\\evil.png",
    "a way out with backslashes": "..\\..\\evil.png",
    "a title of a terminal": f"a{TITLE}.png",
    "two lines": "a\nerror: b.png",
    "a reserved name": "con.png",
    "an empty part": "a//b.png",
    "dots": ".../...png",
    "a name of 5,000 characters": "a" * 5000 + ".png",
    "a name of 500 folders": "a/" * 500 + "b.png",
    "a lone right-to-left mark": "a\u202egnp.png",
    "no UTF-8": "a\udcff.png",
}
"""Names of members."""


def _member_names() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    for words, name in NAMES.items():
        own = name.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
        yield (
            f"a tar with {words}",
            "photos.tar",
            lambda n=own: tarred(("a.png", png()), (n, png())),
        )
        if "\udcff" not in name:
            yield (
                f"a zip with {words}",
                "photos.zip",
                lambda n=own: zipped(("a.png", png()), (n, png())),
            )


ARCHIVES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a link out of a tar": (
        "photos.tar",
        lambda: tarred(("a.png", b""), type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    ),
    "a hard link out of a tar": (
        "photos.tar",
        lambda: tarred(("a.png", b""), type=tarfile.LNKTYPE, linkname="../secret/id_secret.png"),
    ),
    "a device in a tar": ("photos.tar", lambda: tarred(("a.png", b""), type=tarfile.CHRTYPE)),
    "a FIFO in a tar": ("photos.tar", lambda: tarred(("a.png", b""), type=tarfile.FIFOTYPE)),
    "a member of 10 GB that is not there": (
        "photos.tar",
        lambda: tarred(("a.png", png()))[:124] + b"12000000000\0" + tarred(("a.png", png()))[136:],
    ),
    "a member of a negative size": (
        "photos.tar",
        lambda: tarred(("a.png", png()))[:124] + b"\xff" * 12 + tarred(("a.png", png()))[136:],
    ),
    "300 MB of zeros in a tar.gz": (
        "photos.tar.gz",
        lambda: gzipped(tarred(("a.png", bytes(300_000_000)))),
    ),
    "300 MB of zeros in a zip": ("photos.zip", lambda: zipped(("a.png", bytes(300_000_000)))),
    "half of a tar.gz": ("photos.tar.gz", lambda: tarred(("a.png", png()), mode="w:gz")[:500]),
    "two members of one name": ("photos.zip", lambda: zipped(("a.png", png()), ("a.png", b"x"))),
    "members that differ by case": (
        "photos.zip",
        lambda: zipped(("a.png", png()), ("A.png", png())),
    ),
    "20,000 members": ("photos.zip", lambda: zipped(*((f"{n}.txt", b"") for n in range(20_000)))),
    "an archive in an archive": ("photos.zip", lambda: zipped(("b.zip", zipped(("a.png", png()))))),
    "no archive": ("photos.tar", lambda: b"no archive"),
    "nothing": ("photos.zip", lambda: b""),
    "a zip of 2**32 members": ("photos.zip", lambda: b"PK\5\6" + b"\xff" * 18),
    "a PAX header of 100 MB": (
        "photos.tar",
        lambda: tarred(("././@PaxHeader", b"30 path=x\n" * 10), type=b"x"),
    ),
    "a sparse member": ("photos.tar", lambda: tarred(("a.png", b""), type=tarfile.GNUTYPE_SPARSE)),
}


def _archive(file: str, make: Callable[[], bytes]) -> Callable[[Sandbox], None]:
    def place(box: Sandbox) -> None:
        net(box)
        (box.given / file).write_bytes(make())

    return place


def _folder(make: Callable[[Sandbox], object]) -> Callable[[Sandbox], None]:
    """A folder with one honest photo, and something else."""

    def place(box: Sandbox) -> None:
        net(box)
        (box.given / "photos").mkdir()
        (box.given / "photos" / "a.png").write_bytes(png())
        make(box)

    return place


def _named(name: bytes) -> Callable[[Sandbox], None]:
    def make(box: Sandbox) -> None:
        path = os.path.join(os.fsencode(box.given), b"photos", name)  # noqa: PTH118
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(png())

    return _folder(make)


FOLDERS: dict[str, Callable[[Sandbox], None]] = {
    "a FIFO among photos": _folder(lambda b: os.mkfifo(b.given / "photos" / "b.png")),
    "a device among photos": _folder(
        lambda b: (b.given / "photos" / "b.png").symlink_to("/dev/zero")
    ),
    "a folder called like a photo": _folder(lambda b: (b.given / "photos" / "b.png").mkdir()),
    "a link that leads nowhere": _folder(
        lambda b: (b.given / "photos" / "b.png").symlink_to("nowhere")
    ),
    "a link to itself": _folder(lambda b: (b.given / "photos" / "b.png").symlink_to("b.png")),
    "a folder that links to itself": _folder(
        lambda b: (b.given / "photos" / "loop").symlink_to(b.given / "photos")
    ),
    "a FIFO called like a tar": _folder(lambda b: os.mkfifo(b.given / "photos" / "x.tar")),
    "a name that is no UTF-8": _named(b"b\xff.png"),
    "a name that sets a terminal's title": _named(f"b{TITLE}.png".encode()),
    "a name of two lines": _named(b"b\nerror: x.png"),
    "a name of a number that is none": _named("2²3.png".encode()),
    "a name like an option": _named(b"--overwrite.png"),
    "a folder called run.json": _named(b"run.json/b.png"),
    "a photo called manifest.json.png": _named(b"manifest.json/b.png"),
    "a folder called .git": _named(b".git/b.png"),
}
ON_FOLDER = [
    "run {given}/net.pth {given}/photos --out out{n}",
    "report out0",
    "audit {given}/net.pth {given}/photos --out out{n}",
    "run {given}/clip.pth {given}/photos --frames 2 --out out{n}",
]


def _clip(first: Callable[[Sandbox], None]) -> Callable[[Sandbox], None]:
    def place(box: Sandbox) -> None:
        first(box)
        torch.save(nn.Sequential(nn.Conv3d(3, 2, 1)).eval(), box.given / "clip.pth")

    return place


def all_attacks() -> Iterator[Attack]:
    """All of this file."""
    for name, make in IMAGES.items():
        yield Attack(f"image: {name}", _image(make), ON_IMAGE)
    for name, file, make in _member_names():
        lines = [f"run {{given}}/net.pth {{given}}/{file} --out out{{n}}", "report out0"]
        yield Attack(f"archive: {name}", _archive(file, make), lines)
    for name, (file, make) in ARCHIVES.items():
        lines = [
            f"run {{given}}/net.pth {{given}}/{file} --out out{{n}}",
            f"run {{given}}/net.pth {{given}}/{file}::a.png --out out{{n}}",
            f"audit {{given}}/net.pth {{given}}/{file} --out out{{n}}",
        ]
        yield Attack(f"archive: {name}", _archive(file, make), lines)
    for name, place in FOLDERS.items():
        yield Attack(f"photos: {name}", _clip(place), ON_FOLDER)
    yield Attack("control: an honest photo", _image(png), ON_IMAGE, "good")
    tar = _archive("photos.tar", lambda: tarred(("a.png", png()), ("b/c.png", png())))
    line = "run {given}/net.pth {given}/photos.tar --out out{n}"
    yield Attack("control: an honest tar", tar, [line], "good")
