"""Images from tar and zip files, and runs that become one file."""

from __future__ import annotations

import bz2
import io
import json
import lzma
import os
import shutil
import signal
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import Outcome
from runs import SMALL, complete, make_photos, packed_tree, tree

from featviz.errors import ImageError, StoreError, UsageError
from featviz.images import archives, decode, find
from featviz.pipeline import session
from featviz.rundir.write import ImageFolder

Run = Callable[..., Outcome]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos" / "a", 3)
    make_photos(tmp_path / "photos" / "b" / "c", 2)
    return tmp_path / "photos"


def packed(photos: Path, name: str) -> Path:
    """The content of the folder in an archive beside it, with the kind that the name says."""
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


KINDS = ["p.tar", "p.tar.gz", "p.tgz", "p.tar.bz2", "p.tar.xz", "p.zip", "P.ZIP"]


@pytest.mark.parametrize("name", KINDS)
def test_an_archive_gives_what_its_folder_gives(
    name: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """The same tree, byte for byte."""
    base = ["run", tiny_file, *SMALL, "--out"]
    archive = packed(photos, name)
    assert featviz(*base, tmp_path / "unpacked", photos).code == 0
    assert featviz(*base, tmp_path / "packed", archive).code == 0
    unpacked, found = tree(tmp_path / "unpacked"), tree(tmp_path / "packed")
    runs = [json.loads(files.pop("run.json")) for files in (unpacked, found)]
    assert found == unpacked and len(complete(tmp_path / "packed")) == 5
    assert sorted(runs[0]["images"].pop("complete")) == sorted(runs[1]["images"].pop("complete"))
    assert runs[0] == runs[1]


def names(*arguments: object, stdin: bytes | None = None) -> list[str]:
    listed = None if stdin is None else io.BytesIO(stdin)
    return [sample.name for sample in find.find_samples([str(a) for a in arguments], listed)]


@pytest.mark.parametrize("name", ["p.tar", "p.zip"])
def test_one_image_of_an_archive(name: str, photos: Path) -> None:
    """`photos.tar::a/01.png`, in whatever spelling, is that file; named twice it is one image."""
    archive = packed(photos, name)
    spellings = [f"{archive}::{inside}" for inside in ("a/01.png", "./a/01.png", "/a//01.png")]
    (sample,) = find.find_samples(spellings)
    assert sample.name == "a/01.png"
    assert decode.digest(sample) == decode.digest(
        find.find_samples([str(photos / "a" / "01.png")])[0]
    )
    assert names(archive, spellings[0]) == names(archive)


def test_a_member_that_is_not_there_is_a_usage_error(photos: Path) -> None:
    """So is an archive that is not there."""
    archive = packed(photos, "p.tar")
    with pytest.raises(UsageError, match=r"no image '.*p\.tar::a/x\.png': nothing in the archive"):
        names(f"{archive}::a/x.png")
    with pytest.raises(UsageError, match=r"no archive '.*q\.tar' for '.*q\.tar::a\.png'"):
        names(f"{archive.parent}/q.tar::a.png")


def test_members_may_come_in_a_list(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stdin members stand beside files; one that is not there fails alone."""
    archive = packed(photos, "p.tar.gz")
    listed = f"{archive}::b/c/01.png\n{photos}/a/02.png\n{archive}::nothing.png\n"
    assert names("-", stdin=listed.encode()) == ["01.png", "02.png", "nothing.png"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(listed.encode())))
    done = featviz("run", tiny_file, "-", *SMALL, "--out", tmp_path / "out")
    assert done.code == 3 and "error: nothing.png is no file" in done.err
    assert complete(tmp_path / "out") == ["01.png", "02.png"]


@pytest.mark.parametrize(
    ("name", "module", "factory"),
    [("p.tar.xz", lzma, "LZMADecompressor"), ("p.tar.bz2", bz2, "BZ2Decompressor")],
)
def test_a_compressed_tar_is_not_unpacked_from_its_start_for_each_image(
    name: str, module: ModuleType, factory: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of the members, then one more pass for all of them, even if each is read twice."""
    make_photos(photos / "many", 40, (64, 64))
    starts: list[object] = []
    real = getattr(module, factory)

    def started(*arguments: object, **named: object) -> object:
        starts.append(real(*arguments, **named))
        return starts[-1]

    archive = packed(photos, name)
    monkeypatch.setattr(module, factory, started)
    samples = find.find_samples([str(archive)])
    listed = len(starts)
    for sample in samples:
        decode.digest(sample)
        decode.decode(sample)
    assert len(samples) == 45 and listed >= 1 and len(starts) == listed + 1


def make_tar(path: Path, members: dict[str, bytes | str]) -> Path:
    """A tar of such members, in order; a str is the target of a symbolic link."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name.rstrip("!"))
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def test_hostile_names_stay_inside_the_run(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """`..`, absolute names and backslashes become names of folders inside the run directory."""
    png = [(photos / "a" / f"0{i}.png").read_bytes() for i in range(3)]
    archive = make_tar(
        tmp_path / "x.tar",
        {"../../up.png": png[0], "/etc/absolute.png": png[1], "a\\..\\b.png": png[2]},
    )
    assert names(archive) == ["up.png", "etc/absolute.png", "a/b.png"]
    inside = tmp_path / "deep" / "deep" / "deep"
    before = tree(tmp_path)
    assert featviz("run", tiny_file, archive, *SMALL, "--out", inside).code == 0
    assert complete(inside) == ["a/b.png", "etc/absolute.png", "up.png"]
    assert {
        p: b for p, b in tree(tmp_path).items() if not p.startswith("deep/deep/deep/")
    } == before


def test_names_that_become_alike_are_told_apart(photos: Path, tmp_path: Path) -> None:
    """`../a.png` beside `a.png`; `a.png` in two archives; nothing is lost."""
    content = (photos / "a" / "00.png").read_bytes()
    one = make_tar(tmp_path / "one.tar", {"../a.png": content, "a.png": content})
    two = make_tar(tmp_path / "two.tar", {"a.png": content})
    assert len(set(names(one))) == 2 and all(".." not in name for name in names(one))
    assert names(f"{one}::a.png", two) == ["one.tar/a.png", "two.tar/a.png"]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_of_two_members_with_one_name_the_later_counts(
    kind: str, photos: Path, tmp_path: Path
) -> None:
    """As when the archive is unpacked."""
    old, new = ((photos / "a" / f"0{i}.png").read_bytes() for i in (0, 1))
    path = tmp_path / f"x.{kind}"
    if kind == "tar":
        make_tar(path, {"a.png": old, "b.png": old, "a.png!": new})
    else:
        with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
            for name, content in (("a.png", old), ("b.png", old), ("a.png", new)):
                archive.writestr(name, content)
    assert sorted(names(path)) == ["a.png", "b.png"]
    assert archives.read(Path(f"{path}::a.png")) == new


def test_links_are_left_out_aloud(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """A link could lead anywhere, or to itself: none is followed, and stderr says how many."""
    content = (photos / "a" / "00.png").read_bytes()
    path = make_tar(
        tmp_path / "x.tar", {"a.png": content, "b.png": "/etc/passwd", "c.png": "c.png"}
    )
    done = featviz("run", tiny_file, path, *SMALL, "--out", tmp_path / "out")
    assert done.code == 0 and "x.tar: 2 links are left out" in done.err
    assert complete(tmp_path / "out") == ["a.png"]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_hidden_files_are_no_images(kind: str, photos: Path, tmp_path: Path) -> None:
    """As in folders; nor is what macOS adds; but what is named is taken."""
    for name in ("__MACOSX/a/._00.png", ".hidden.png", ".cache/x.png", "notes.txt"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes((photos / "a" / "00.png").read_bytes())
    path = packed(photos, f"x.{kind}")
    assert sorted(names(path)) == ["a/00.png", "a/01.png", "a/02.png", "b/c/00.png", "b/c/01.png"]
    assert names(f"{path}::.hidden.png") == [".hidden.png"]
    assert names(f"{path}::notes.txt") == ["notes.txt"]


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_a_bomb_fails_alone(
    kind: str,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What would unpack to more than any image is not unpacked."""
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 10**6)
    (photos / "a" / "bomb.png").write_bytes(bytes(10**6 + 1))
    path = packed(photos, f"x.{kind}")
    assert path.stat().st_size < 20_000
    done = featviz("run", tiny_file, path, *SMALL, "--out", tmp_path / "out")
    assert done.code == 3 and len(complete(tmp_path / "out")) == 5
    assert "a/bomb.png cannot be read: it unpacks to 1000001 bytes, more than" in done.err


def test_an_encrypted_zip_says_so(photos: Path, tmp_path: Path) -> None:
    """Each of its images fails with the reason."""
    path = packed(photos, "x.zip")
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = content.find(signature)
        while at >= 0:
            content[at + offset] |= 1
            at = content.find(signature, at + 1)
    path.write_bytes(content)
    with pytest.raises(ImageError, match=r"a/00.png cannot be read: .*encrypted"):
        decode.decode(find.find_samples([str(path)])[0])


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _spoilt(content: bytes) -> bytes:
    half = len(content) // 2 // 512 * 512
    return content[:half] + b"\xa5" * 2000 + content[half + 2000 :]


@pytest.mark.parametrize("damage", [_cut, _spoilt, lambda content: b"no archive"])
@pytest.mark.parametrize("name", KINDS[:-1])
def test_a_damaged_archive_loses_nothing_silently(
    name: str, damage: Callable[[bytes], bytes], photos: Path
) -> None:
    """Refused in one line, or the images that cannot be read are errors; never fewer images."""
    path = packed(photos, name)
    path.write_bytes(damage(path.read_bytes()))
    try:
        samples = find.find_samples([str(path)])
    except UsageError as error:
        assert str(path) in error.message and error.hint == "is it whole?"
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


def test_a_tar_with_a_spoilt_header_in_its_midst(photos: Path, tmp_path: Path) -> None:
    """tarfile takes it for the end; featviz does not."""
    content = (photos / "a" / "00.png").read_bytes()
    path = make_tar(tmp_path / "x.tar", {"a.png": content, "b.png": content})
    data = bytearray(path.read_bytes())
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
    assert len(names(path)) == 5
    shutil.rmtree(photos / "a")
    packed(photos, "p.tar")
    assert names(path) == ["b/c/00.png", "b/c/01.png"]


def test_a_file_with_colons_is_a_file(photos: Path) -> None:
    """Two colons lead into archives only."""
    shutil.copy(photos / "a" / "00.png", photos / "x::y.png")
    assert "x::y.png" in names(photos)
    assert decode.digest(find.find_samples([str(photos / "x::y.png")])[0])


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_without_images(kind: str, tmp_path: Path) -> None:
    """A usage error that says what is there instead."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    with pytest.raises(UsageError, match="no images in archive") as caught:
        names(packed(tmp_path / "texts", f"x.{kind}"))
    assert caught.value.hint == "it has 1 other files"


# --archive


def test_the_run_as_one_file(featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path) -> None:
    """It holds the tree that --out would hold; the same command gives the same bytes."""
    base = ["run", tiny_file, photos, *SMALL]
    assert featviz(*base, "--out", tmp_path / "out").code == 0
    for name in ("one.zip", "new/two.zip"):
        assert featviz(*base, "--archive", tmp_path / name).code == 0
    assert packed_tree(tmp_path / "one.zip") == tree(tmp_path / "out")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "new" / "two.zip").read_bytes()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["two.zip"]
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.testzip() is None


def test_an_archive_is_replaced_only_if_told(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """What stands there stays, and the message names --overwrite."""
    base = ["run", tiny_file, photos / "a", *SMALL, "--archive", tmp_path / "x.zip"]
    assert featviz(*base).code == 0
    before = (tmp_path / "x.zip").read_bytes()
    done = featviz(*base)
    assert done.code == 1 and "--overwrite replaces a run in a zip file" in done.err
    assert featviz(*base, "--cmap", "viridis", "--overwrite").code == 0
    assert len(packed_tree(tmp_path / "x.zip")) > 3
    assert (tmp_path / "x.zip").read_bytes() != before


def test_an_archive_that_is_no_run_is_never_replaced(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Neither a file of another kind nor somebody's zip file, whatever is told."""
    packed(photos, "photos.zip")
    (tmp_path / "notes.zip").write_text("mine")
    before = tree(tmp_path)
    for name in ("photos.zip", "notes.zip"):
        base = ["run", tiny_file, photos / "a", *SMALL, "--archive", tmp_path / name]
        done = featviz(*base, "--overwrite")
        assert done.code == 1 and "exists and holds no run of featviz" in done.err
    assert tree(tmp_path) == before


def test_an_archive_of_a_run_with_failures(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Exit code 3, and the archive holds what is complete, and run.json with the failure."""
    (photos / "a" / "01.png").write_bytes(b"no picture")
    done = featviz("run", tiny_file, photos, *SMALL, "--archive", tmp_path / "x.zip")
    files = packed_tree(tmp_path / "x.zip")
    assert done.code == 3
    assert [row["image"] for row in json.loads(files["run.json"])["failures"]] == ["a/01.png"]
    assert len([name for name in files if name.endswith("manifest.json")]) == 4


@pytest.mark.parametrize("presses", [1, 2])
def test_an_archive_of_a_run_that_is_stopped(
    presses: int,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 130; what is complete is in the archive, and nothing is left beside it."""
    real = session.run_image

    def stopping(prepared: object, writer: Any, *more: Any) -> object:
        if writer.sample.name == "a/02.png":
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGTERM)
        return real(prepared, writer, *more)

    monkeypatch.setattr(session, "run_image", stopping)
    done = featviz("run", tiny_file, photos, *SMALL, "--archive", tmp_path / "new" / "x.zip")
    run = json.loads(packed_tree(tmp_path / "new" / "x.zip")["run.json"])
    assert done.code == 130
    assert run["images"]["complete"] == ["a/00.png", "a/01.png", "a/02.png"][: 4 - presses]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.zip"]


def test_an_archive_of_a_run_that_fails(
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is the run's, and what was complete before it is in the archive."""
    finish = ImageFolder.finish

    def full(self: ImageFolder, *more: object) -> None:
        if self.name == "a/01.png":
            raise StoreError("stats.npz cannot be written: No space left on device")
        finish(self, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(ImageFolder, "finish", full)
    done = featviz("run", tiny_file, photos, *SMALL, "--archive", tmp_path / "x.zip")
    run = json.loads(packed_tree(tmp_path / "x.zip")["run.json"])
    assert done.code == 1 and "No space left" in done.err
    assert run["images"]["complete"] == ["a/00.png"]
    assert run["images"]["missing"] == ["a/01.png", "a/02.png", "b/c/00.png", "b/c/01.png"]


def test_what_a_killed_run_left_of_an_archive_is_cleared(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Its hidden folder goes if it holds a run; what else lies in one of such a name stays."""
    base = ["run", tiny_file, photos, *SMALL]
    left = tmp_path / "new" / ".x.zip.0123456789abcdef.part" / "run"
    assert featviz(*base, "--out", left).code == 0
    (left / "a" / "01.png" / "manifest.json").unlink()
    stray = tmp_path / "new" / ".x.zip.0123456789abcdee.part" / "run" / "stray.txt"
    stray.parent.mkdir(parents=True)
    stray.write_text("mine")
    assert featviz(*base, "--archive", tmp_path / "new/x.zip").code == 0
    assert "stray.txt" not in packed_tree(tmp_path / "new" / "x.zip")
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == [stray.parent.parent.name, "x.zip"] and stray.read_text() == "mine"
