"""Images from tar and zip files."""

from __future__ import annotations

import io
import json
import lzma
import shutil
import struct
import tarfile
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from hostile_images import LOOKS, png, tarred
from PIL import Image
from runs import SMALL, complete, make_photos, tree

from featviz.errors import ImageError, UsageError
from featviz.images import decode, find
from featviz.records import Sample


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos" / "a", 3)
    make_photos(tmp_path / "photos" / "b" / "c", 2)
    return tmp_path / "photos"


def packed(photos: Path, name: str) -> Path:
    """The content of the folder in an archive beside it, with the kind that the name
    says."""
    path = photos.parent / name
    if name.lower().endswith(".zip"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for relative in tree(photos):
                archive.write(photos / relative, relative)
        return path
    mode = {"tar": "w", "gz": "w:gz", "tgz": "w:gz", "bz2": "w:bz2", "xz": "w:xz"}
    with tarfile.open(path, mode[name.rpartition(".")[2]]) as tar:  # type: ignore[call-overload]
        tar.add(photos, ".")
    return path


KINDS = ["p.tar", "p.tgz", "p.tar.bz2", "P.ZIP"]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_an_archive_gives_what_its_folder_gives(
    name: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """The same tree, byte for byte."""
    base = ["run", tiny_file, *SMALL, "--out"]
    archive = packed(photos, name)
    assert featviz(*base, tmp_path / "unpacked", photos).code == 0
    assert featviz(*base, tmp_path / "packed", archive).code == 0
    unpacked = tree(tmp_path / "unpacked")
    packed_tree = tree(tmp_path / "packed")
    runs = [json.loads(files.pop("run.json")) for files in (unpacked, packed_tree)]
    assert packed_tree == unpacked
    assert len(complete(tmp_path / "packed")) == 5
    assert sorted(runs[0]["images"].pop("complete")) == sorted(
        runs[1]["images"].pop("complete")
    )
    assert runs[0] == runs[1]


def names(*arguments: object, stdin: bytes | None = None) -> list[str]:
    listed = None if stdin is None else io.BytesIO(stdin)
    return [
        sample.name for sample in find.find_samples([str(a) for a in arguments], listed)
    ]


@pytest.mark.parametrize("name", ["p.tar", "p.zip"])
def test_one_image_of_an_archive(name: str, photos: Path) -> None:
    """`photos.tar::a/01.png`, in whatever spelling, is that file; named twice it is one
    image."""
    archive = packed(photos, name)
    spellings = [
        f"{archive}::{inside}" for inside in ("a/01.png", "./a/01.png", "/a//01.png")
    ]
    (sample,) = find.find_samples(spellings)
    assert sample.name == "a/01.png"
    assert decode.digest(sample) == decode.digest(
        find.find_samples([str(photos / "a" / "01.png")])[0]
    )
    assert names(archive, spellings[0]) == names(archive)
    with pytest.raises(
        UsageError, match=r"no image '.*p\..*::a/x\.png': nothing in the archive"
    ):
        names(f"{archive}::a/x.png")
    for plain in ("x::y.png", "x.tar::y.png"):  # no archive
        shutil.copy(photos / "a" / "00.png", photos / plain)
        assert plain in names(photos)
        assert names(photos / plain) == [plain]
        (whole,) = find.find_samples([str(photos / plain)])
        assert decode.decode(whole)[0][0].size == (18, 16)


def test_a_compressed_tar_is_not_unpacked_from_its_start_for_each_image(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of the members, then one more pass for all of them, even if each is read
    twice."""
    make_photos(photos / "many", 20, (32, 32))
    starts: list[object] = []
    real = lzma.LZMADecompressor

    def started(*arguments: object, **named: object) -> object:
        starts.append(real(*arguments, **named))
        return starts[-1]

    archive = packed(photos, "p.tar.xz")
    monkeypatch.setattr(lzma, "LZMADecompressor", started)
    samples = find.find_samples([str(archive)])
    listed = len(starts)
    for sample in samples:
        decode.digest(sample)
        decode.decode(sample)
    assert len(samples) == 25
    assert listed >= 1
    assert len(starts) == listed + 1


@pytest.mark.parametrize("archive_type", ["tar", "zip"])
def test_hidden_files_are_no_images(
    archive_type: str, photos: Path, tmp_path: Path
) -> None:
    """As in folders; nor is what macOS adds; but what is named is taken. An archive
    without any is refused."""
    for name in ("__MACOSX/a/._00.png", ".hidden.png", ".cache/x.png", "notes.txt"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes(png())
    path = packed(photos, f"x.{archive_type}")
    assert sorted(names(path)) == [
        "a/00.png",
        "a/01.png",
        "a/02.png",
        "b/c/00.png",
        "b/c/01.png",
    ]
    assert names(f"{path}::.hidden.png") == [".hidden.png"]
    assert names(f"{path}::notes.txt") == ["notes.txt"]
    shutil.rmtree(photos)
    (photos / "texts").mkdir(parents=True)
    (photos / "texts" / "a.txt").write_text("a")
    with pytest.raises(UsageError, match="no images in archive"):
        names(packed(photos, f"x.{archive_type}"))


@pytest.mark.parametrize("damage", ["cut", "spoilt", "no archive"])
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_archive_loses_nothing_silently(
    name: str, damage: str, photos: Path
) -> None:
    """Refused in one line, or the images that cannot be read are errors; never fewer
    images."""
    path = packed(photos, name)
    content = path.read_bytes()
    half = len(content) // 2 // 512 * 512
    spoilt = content[:half] + b"\xa5" * 2000 + content[half + 2000 :]
    path.write_bytes(
        {"cut": content[:half], "spoilt": spoilt}.get(damage, damage.encode())
    )
    try:
        samples = find.find_samples([str(path)])
    except UsageError as error:
        assert str(path) in error.message
        assert error.hint == "is it whole?"
        return
    assert len(samples) == 5
    readable = 0
    for sample in samples:
        try:
            decode.decode(sample)
            readable += 1
        except ImageError as error:
            assert sample.name in error.message
    assert readable < 5 or name.endswith(".tar")


def test_a_tar_with_a_spoilt_header_in_its_midst(tmp_path: Path) -> None:
    """tarfile takes it for the end; featviz does not."""
    path = tmp_path / "x.tar"
    data = bytearray(tarred(("a.png", png()), ("b.png", png())))
    second = data.index(b"b.png")
    data[second + 150] ^= 0xFF
    path.write_bytes(data)
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["a.png"]
    with pytest.raises(UsageError, match=rf"cannot be read: damaged at byte {second}"):
        names(path)


def test_an_archive_that_changes_is_read_anew(photos: Path, tmp_path: Path) -> None:
    """Nothing is kept of an archive that was replaced."""
    path = packed(photos, "p.tar")
    inside = Path(f"{path}::b/c/00.png")
    content = (photos / "a" / "02.png").read_bytes()
    assert len(names(path)) == 5
    assert decode.read(inside) != content
    (photos / "b" / "c" / "00.png").write_bytes(content)
    shutil.rmtree(photos / "a")
    packed(photos, "p.tar")
    assert names(path) == ["b/c/00.png", "b/c/01.png"]
    assert decode.read(inside) == content


def test_an_archive_is_read_by_one_thread_at_a_time(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one place at which it is read."""
    samples = find.find_samples([str(packed(photos, "p.tar"))])
    real = decode._content
    inside = []

    def watched(*given: Any) -> bytes:
        inside.append(given)
        time.sleep(0.005)
        assert inside == [given]
        return real(*inside.pop())

    monkeypatch.setattr(decode, "_content", watched)
    with ThreadPoolExecutor(4) as pool:
        assert len({*pool.map(decode.digest, samples)}) > 1


@pytest.mark.parametrize("file_type", LOOKS)
def test_a_file_that_is_no_picture_says_what_it_looks_like(
    file_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is called; no program is started to find out."""
    content, looks = LOOKS[file_type]

    def started(*arguments: object, **named: object) -> None:
        pytest.fail(f"a program was started: {arguments}")

    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.setattr("subprocess.check_call", started)
    path = tmp_path / "e.png"
    path.write_bytes(content)
    match = rf"^e\.png is no image that {looks}"
    with pytest.raises(ImageError, match=match):
        decode.decode(Sample("e.png", (path,)))


def test_every_format_on_the_list_is_read(tmp_path: Path) -> None:
    """What is written by Pillow in each of them comes back; EPS is none of them."""
    Image.init()
    names = [*decode.FORMATS]
    assert "EPS" not in names
    assert set(names) - {"AVIF"} <= Image.OPEN.keys()
    read = []
    for name in names:
        if name in Image.SAVE and name in Image.OPEN:
            path = tmp_path / f"{name}.img"
            Image.new("RGB", (16, 16), (200, 100, 50)).save(path, name)
            pixels = np.asarray(decode.decode(Sample("x", (path,)))[0][0]).astype(int)
            assert np.abs(pixels - (200, 100, 50)).max() < 12, name
            read.append(name)
    assert len(read) >= 12


def test_more_pixels_than_an_image_may_have(tmp_path: Path) -> None:
    """The line says how many there may be; only the head of the file is looked at."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 20000, 15000, 8, 2, 0, 0, 0)
    path = tmp_path / "survey.png"
    size = struct.pack(">I", 13)
    checksum = struct.pack(">I", zlib.crc32(head))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + size + head + checksum + size + b"IDAT")
    with pytest.raises(
        ImageError, match=r"survey\.png has more pixels than the 178,956,970"
    ) as e:
        decode.decode(Sample("survey.png", (path,)))
    assert e.value.hint == "cut it into parts, or make it smaller"


def test_a_file_without_end_is_no_picture(tmp_path: Path) -> None:
    """Its size is looked at before it is read; this one takes no room on the disk."""
    path = tmp_path / "huge.png"
    with path.open("wb") as file:
        file.truncate(decode.MAX_FILE_BYTES + 1)
    with pytest.raises(
        ImageError, match=r"huge\.png cannot be read: it has 1073741825 bytes"
    ):
        decode.decode(Sample("huge.png", (path,)))


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_a_zip_that_lies_about_its_sizes(method: int, tmp_path: Path) -> None:
    """A member gives no more than it says, however much its data unpacks to."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", method) as packed:
        packed.writestr("a.png", bytes(2**22))
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        at = data.index(signature) + offset
        data[at : at + 4] = (100).to_bytes(4, "little")
    path.write_bytes(data)
    (sample,) = find.find_samples([str(path)])
    with pytest.raises(ImageError, match=r"a\.png"):
        decode.decode(sample)


def test_links_and_devices_in_a_tar_are_no_images(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    """Neither followed nor made; hard links, FIFOs and devices as little as symbolic
    links, of which a warning tells the number."""
    path = tmp_path / "x.tar"
    member_types = (
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.FIFOTYPE,
        tarfile.CHRTYPE,
        tarfile.DIRTYPE,
    )
    path.write_bytes(tarred(("good.png", png())))
    with tarfile.open(path, "a") as tar:
        for number, member_type in enumerate(member_types):
            info = tarfile.TarInfo(f"{number}.png")
            info.type = member_type
            info.linkname = "/etc/passwd"
            tar.addfile(info)
    assert names(path) == ["good.png"]
    assert "x.tar: 2 links are left out" in messages.text
