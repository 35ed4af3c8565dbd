"""Files that are no pictures, archives without end, and members that lie."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_images import LOOKS, compressed_zeros, photo_bytes, tar_header
from PIL import Image

from featviz.errors import ImageError, UsageError
from featviz.images import archives, decode, find
from featviz.records import Sample


@pytest.mark.parametrize("kind", LOOKS)
def test_a_file_that_is_no_picture_says_what_it_looks_like(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is called; no program is started to find out."""
    content, looks = LOOKS[kind]

    def started(*arguments: object, **named: object) -> None:
        pytest.fail(f"a program was started: {arguments}")

    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.setattr("subprocess.check_call", started)
    path = tmp_path / "e.png"
    path.write_bytes(content)
    match = rf"^e\.png is no image that featviz reads: it looks like .*{looks}"
    with pytest.raises(ImageError, match=match):
        decode.decode(Sample("e.png", (path,)))


def test_every_format_on_the_list_is_read(tmp_path: Path) -> None:
    """What is written by Pillow in each of them comes back; EPS is none of them."""
    from featviz.images.formats import IMAGE_FORMATS

    Image.init()
    names = [known.name for known in IMAGE_FORMATS if known.pillow]
    assert "EPS" not in names and set(names) - {"AVIF"} <= Image.OPEN.keys()
    read = []
    for name in names:
        if name in Image.SAVE and name in Image.OPEN:
            path = tmp_path / f"{name}.img"
            Image.new("RGB", (16, 16), (200, 100, 50)).save(path, name)
            pixels = np.asarray(decode.decode(Sample("x", (path,))).images[0]).astype(int)
            assert np.abs(pixels - (200, 100, 50)).max() < 12, name
            read.append(name)
    assert len(read) >= 12


def test_a_fifo_among_the_stills_of_a_clip(photos: Path) -> None:
    """It is none of the clip's frames, and nothing waits for it."""
    from featviz.images import group

    os.mkfifo(photos / "00a.png")
    (clip,) = group.clips(find.find_samples([str(photos)]))
    assert [path.name for path in clip.paths] == ["00.png", "01.png"]
    named = group.clips(find.find_samples([str(photos / "00a.png")]))
    with pytest.raises(ImageError, match=r"00a\.png is no file, but a FIFO"):
        decode.decode(named[0])


def test_more_pixels_than_an_image_may_have(tmp_path: Path) -> None:
    """The line says how many there may be; only the head of the file is looked at."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 20000, 15000, 8, 2, 0, 0, 0)
    path = tmp_path / "survey.png"
    size, checksum = struct.pack(">I", 13), struct.pack(">I", zlib.crc32(head))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + size + head + checksum + size + b"IDAT")
    with pytest.raises(ImageError, match=r"survey\.png has more pixels than the 178,956,970") as e:
        decode.decode(Sample("survey.png", (path,)))
    assert e.value.hint == "cut it into parts, or make it smaller"


def test_a_file_without_end_is_no_picture(tmp_path: Path) -> None:
    """Its size is looked at before it is read; this one takes no room on the disk."""
    path = tmp_path / "huge.png"
    with path.open("wb") as file:
        file.truncate(archives.MAX_FILE_BYTES + 1)
    with pytest.raises(ImageError, match=r"huge\.png cannot be read: it has 1073741825 bytes"):
        decode.decode(Sample("huge.png", (path,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("opener", "name"), [(gzip.open, "b.tar.gz"), (bz2.open, "b.tar.bz2")], ids=["gz", "bz2"]
)
def test_a_compressed_tar_that_never_ends(
    opener: Callable[..., Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a tar unpacks to is bounded by its own size; the listing stops there."""
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 2**23)
    path = tmp_path / name
    compressed_zeros(opener, path, tar_header("a.png", 2**34), 2**26)
    assert path.stat().st_size < 100_000
    with pytest.raises(UsageError, match=r"cannot be read: it unpacks to more than \d+ bytes"):
        find.find_samples([str(path)])


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_header_of_many_gigabytes(
    kind: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long name, or extended header, is not read into memory whatever it claims."""
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 2**23)
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 2**22)
    path = tmp_path / "x.tar.gz"
    compressed_zeros(gzip.open, path, tar_header("a.png", 2**33, kind), 2**26)
    with pytest.raises(UsageError, match=r"cannot be read: "):
        find.find_samples([str(path)])


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_header_of_a_few_megabytes(kind: bytes, tmp_path: Path) -> None:
    """A header is read at once, and its copies take several times its size: it has to be short."""
    size = archives.MAX_HEADER_BYTES + 1
    record = b"%d path=" % size
    body = record + b"a" * (size - len(record) - 1) + b"\n"
    path = tmp_path / "x.tar.gz"
    with gzip.open(path, "wb") as file:
        file.write(tar_header("a.png", size, kind) + body + bytes(-size % 512))
        file.write(tar_header("b.png", 0) + bytes(1024))
    with pytest.raises(UsageError, match=r"cannot be read: it has a header of \d+ bytes"):
        find.find_samples([str(path)])


def test_a_million_members_in_a_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted while they are listed."""
    monkeypatch.setattr(archives, "MAX_MEMBERS", 500)
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(tar_header("a.png", 0) * 5000 + bytes(1024)))
    with pytest.raises(UsageError, match=r"it has more than \d+ members, far beyond its size"):
        find.find_samples([str(path)])


@pytest.mark.slow
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_that_lies_about_its_sizes(method: int, tmp_path: Path) -> None:
    """A member gives no more than it says, however much its data unpacks to."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", method) as packed:
        packed.writestr("a.png", bytes(2**26))
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        at = data.index(signature) + offset
        data[at : at + 4] = (100).to_bytes(4, "little")
    path.write_bytes(data)
    (sample,) = find.find_samples([str(path)])
    with pytest.raises(ImageError, match=r"a\.png"):
        decode.decode(sample)


def test_links_and_devices_in_a_tar_are_no_images(tmp_path: Path) -> None:
    """Neither followed nor made; hard links, FIFOs and devices as little as symbolic links."""
    content = photo_bytes(tmp_path / "photos")
    path = tmp_path / "x.tar"
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE)
    with tarfile.open(path, "w") as tar:
        for number, kind in enumerate(kinds):
            info = tarfile.TarInfo(f"{number}.png")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        info = tarfile.TarInfo("good.png")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    assert [sample.name for sample in find.find_samples([str(path)])] == ["good.png"]
