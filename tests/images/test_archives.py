"""Images from tar and zip files."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from hostile_images import LOOKS, png, tarred, zipped
from PIL import Image
from runs import SMALL, make_photos, tree

from featviz.errors import ImageError, UsageError
from featviz.images import decode, find
from featviz.records import Sample


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five pictures in two folders."""
    make_photos(tmp_path / "photos" / "a", 3)
    make_photos(tmp_path / "photos" / "b" / "c", 2)
    return tmp_path / "photos"


ARCHIVE_TYPES = {
    "tar": "tar",
    "tgz": "gztar",
    "bz2": "bztar",
    "xz": "xztar",
    "zip": "zip",
}


def packed(photos: Path, name: str) -> Path:
    """The content of the folder in an archive beside it, of the type that the name
    says."""
    path = photos.parent / name
    suffix = name.rpartition(".")[2].lower()
    archive_type = ARCHIVE_TYPES[suffix]
    written = Path(
        shutil.make_archive(str(photos.parent / "made"), archive_type, photos)
    )
    return written.rename(path)


NAMES = ["p.tar", "p.tgz", "p.tar.bz2", "P.ZIP"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p.tar.bz2", "P.ZIP"])
def test_an_archive_gives_what_its_folder_gives(
    name: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """The same images, byte for byte, and the same record but for their order."""
    command = ["run", tiny_file, *SMALL, "--out"]
    trees = []
    records = []
    for images in (photos, packed(photos, name)):
        out = tmp_path / f"of-{images.name}"
        assert featviz(*command, out, images).code == 0
        trees.append(tree(out))
        record = json.loads(trees[-1].pop("run.json"))
        record["images"]["complete"].sort()
        records.append(record)
    assert trees[0] == trees[1]
    assert records[0] == records[1]
    assert len(records[0]["images"]["complete"]) == 5


def samples_of(*arguments: object) -> list[Sample]:
    """What the arguments stand for."""
    return find.find_samples([str(argument) for argument in arguments])


def names(*arguments: object) -> list[str]:
    """The names of the images that they stand for."""
    return [sample.name for sample in samples_of(*arguments)]


SPELLINGS = ("a/01.png", "./a/01.png", "/a//01.png")


@pytest.mark.parametrize("name", NAMES)
def test_one_image_of_an_archive(name: str, photos: Path) -> None:
    """`photos.tar::a/01.png`, in whatever spelling, is that file; named twice it is one
    image."""
    archive = packed(photos, name)
    spellings = [f"{archive}::{inside}" for inside in SPELLINGS]
    (sample,) = samples_of(*spellings)
    (of_folder,) = samples_of(photos / "a" / "01.png")
    assert sample.name == "a/01.png"
    assert decode.digest(sample) == decode.digest(of_folder)
    assert names(archive, spellings[0]) == names(archive)


@pytest.mark.medium
def test_an_image_that_is_not_in_its_archive(photos: Path) -> None:
    """The line has the name and says where it is not."""
    archive = packed(photos, "p.zip")
    message = r"no image '.*p\.zip::a/x\.png': nothing in the archive"
    with pytest.raises(UsageError, match=message):
        names(f"{archive}::a/x.png")


@pytest.mark.parametrize("name", ["x::y.png", "x.tar::y.png"])
def test_a_file_with_colons_in_its_name_is_no_archive(name: str, photos: Path) -> None:
    """It is an image, in its folder and by its name."""
    shutil.copy(photos / "a" / "00.png", photos / name)
    assert name in names(photos)
    (sample,) = samples_of(photos / name)
    assert sample.name == name
    assert decode.decode(sample)[0][0].size == (18, 16)


@pytest.mark.medium
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
    samples = samples_of(archive)
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
    """As in folders they are left out, and so is what macOS adds; but what is named is
    taken."""
    for name in ("__MACOSX/a/._00.png", ".hidden.png", ".cache/x.png", "notes.txt"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes(png())
    path = packed(photos, f"x.{archive_type}")
    of_a = ["a/00.png", "a/01.png", "a/02.png"]
    assert sorted(names(path)) == [*of_a, "b/c/00.png", "b/c/01.png"]
    assert names(f"{path}::.hidden.png") == [".hidden.png"]
    assert names(f"{path}::notes.txt") == ["notes.txt"]


@pytest.mark.parametrize("archive_type", ["tar", "zip"])
def test_an_archive_without_images_is_refused(
    archive_type: str, tmp_path: Path
) -> None:
    """The line names it."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("a")
    path = packed(texts, f"x.{archive_type}")
    with pytest.raises(UsageError, match=rf"no images in archive '.*x\.{archive_type}"):
        names(path)


def damaged(content: bytes, damage: str) -> bytes:
    """An archive that was cut off or overwritten in its midst, or something else."""
    half = len(content) // 2 // 512 * 512
    if damage == "cut":
        return content[:half]
    if damage == "spoilt":
        return content[:half] + b"\xa5" * 2000 + content[half + 2000 :]
    return b"no archive"


def is_readable(sample: Sample) -> bool:
    """Whether an image can be decoded; else the error names it."""
    try:
        decode.decode(sample)
    except ImageError as error:
        assert sample.name in error.message
        return False
    return True


@pytest.mark.parametrize("damage", ["cut", "spoilt", "no archive"])
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_archive_loses_nothing_silently(
    name: str, damage: str, photos: Path
) -> None:
    """It is refused in one line, or the images that cannot be read are errors; never are
    there fewer images."""
    path = packed(photos, name)
    path.write_bytes(damaged(path.read_bytes(), damage))
    try:
        samples = samples_of(path)
    except UsageError as error:
        assert str(path) in error.message
        assert error.hint == "is it whole?"
        return
    assert len(samples) == 5
    readable = sum(map(is_readable, samples))
    # a picture in a plain tar has no checksum of its own
    assert readable < 5 or name == "p.tar"


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


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_an_archive_that_is_written_over_is_read_anew(
    pack: Callable[..., bytes], tmp_path: Path
) -> None:
    """Also where the file is the same one, and as large as before."""
    path = tmp_path / f"p.{'tar' if pack is tarred else 'zip'}"
    inside = Path(f"{path}::a.png")
    for second, member in enumerate((b"before", b"behind")):
        path.write_bytes(pack(("a.png", member)))
        os.utime(path, (second, second))
        assert names(path) == ["a.png"]
        assert decode.read(inside) == member


@pytest.mark.medium
@pytest.mark.parametrize(
    ("change", "count", "second"),
    [
        pytest.param("replaced", 1, 9, id="another file"),
        pytest.param("written", 40, 9, id="another size"),
        pytest.param("written", 1, 10, id="another time"),
    ],
)
def test_one_difference_is_enough_to_read_an_archive_anew(
    change: str, count: int, second: int, tmp_path: Path
) -> None:
    """Of the file, its size and its time."""
    path = tmp_path / "a.zip"
    path.write_bytes(zipped(("a.png", b"1")))
    os.utime(path, (9, 9))
    assert decode.members(path) == ["a.png"]
    names = [f"{number:05}" for number in range(count)]
    target = tmp_path / "b.zip" if change == "replaced" else path
    target.write_bytes(zipped(*[(name, b"2") for name in names]))
    os.utime(target, (second, second))
    target.replace(path)
    assert decode.members(path) == names


def test_an_archive_is_read_by_one_thread_at_a_time(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has one position."""
    samples = samples_of(packed(photos, "p.tar"))
    real = tarfile.TarFile.extractfile
    reading: list[str] = []

    def extract(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Any:
        reading.append(member.name)
        time.sleep(0.005)
        assert reading == [member.name]
        reading.clear()
        return real(tar, member)

    monkeypatch.setattr(tarfile.TarFile, "extractfile", extract)
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
    formats = decode.FORMATS.keys()
    assert "EPS" not in formats
    assert formats - {"AVIF"} <= Image.OPEN.keys()
    written = formats & Image.SAVE.keys() & Image.OPEN.keys()
    assert len(written) >= 12
    color = (200, 100, 50)
    for name in written:
        path = tmp_path / f"{name}.img"
        Image.new("RGB", (16, 16), color).save(path, name)
        (picture,) = decode.decode(Sample("x", (path,)))[0]
        assert np.abs(np.asarray(picture).astype(int) - color).max() < 12, name


def test_more_pixels_than_an_image_may_have(tmp_path: Path) -> None:
    """The line says how many there may be; only the head of the file is looked at."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 20000, 15000, 8, 2, 0, 0, 0)
    path = tmp_path / "survey.png"
    size = struct.pack(">I", 13)
    checksum = struct.pack(">I", zlib.crc32(head))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + size + head + checksum + size + b"IDAT")
    message = r"survey\.png has more pixels than the 178,956,970"
    with pytest.raises(ImageError, match=message) as caught:
        decode.decode(Sample("survey.png", (path,)))
    assert caught.value.hint == "cut it into parts, or make it smaller"


def test_a_file_without_end_is_no_picture(tmp_path: Path) -> None:
    """Its size is looked at before it is read; this one takes no room on the disk."""
    path = tmp_path / "huge.png"
    with path.open("wb") as file:
        file.truncate(decode.MAX_FILE_BYTES + 1)
    message = r"huge\.png cannot be read: it has 1073741825 bytes"
    with pytest.raises(ImageError, match=message):
        decode.decode(Sample("huge.png", (path,)))


@pytest.mark.medium
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
    (sample,) = samples_of(path)
    with pytest.raises(ImageError, match=r"a\.png"):
        decode.decode(sample)


def test_links_and_devices_in_a_tar_are_no_images(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    """They are neither followed nor made; a warning tells the number of links."""
    path = tmp_path / "x.tar"
    links = (tarfile.SYMTYPE, tarfile.LNKTYPE)
    member_types = (*links, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE)
    path.write_bytes(tarred(("good.png", png())))
    with tarfile.open(path, "a") as tar:
        for number, member_type in enumerate(member_types):
            info = tarfile.TarInfo(f"{number}.png")
            info.type = member_type
            info.linkname = "/etc/passwd"
            tar.addfile(info)
    assert names(path) == ["good.png"]
    assert "x.tar: 2 links are left out" in messages.text
