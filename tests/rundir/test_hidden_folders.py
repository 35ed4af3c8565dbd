"""An image's hidden folder: what stands in its way, what goes wrong with it, and what
is left."""

from __future__ import annotations

import errno
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from runs import snapshot, tree

from featviz.errors import StoreError
from featviz.rundir.folder import Folder, hidden_name, hides
from featviz.rundir.write import ImageFolder, RunDirectory

FILES = ("input.png", "001_conv/output.png", "002_relu/output.png")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(Folder.open(tmp_path / "out"))


def filled(
    run: RunDirectory, name: str = "a/cat.jpg", text: str = "new"
) -> ImageFolder:
    """An image's folder with three files."""
    folder = run.new_image(name)
    for file in FILES:
        with folder.writing(file) as opened:
            opened.write(text.encode())
    return folder


def finish(folder: ImageFolder) -> None:
    folder.finish({"image": {"path": folder.name}, "captures": []}, {})


def visible(root: Path) -> list[str]:
    """All files and links, by their paths."""
    return [
        name for name, content in snapshot(root).items() if content != "empty folder"
    ]


COMPLETE = sorted(
    f"a/cat.jpg/{name}" for name in (*FILES, "stats.npz", "manifest.json")
)
NAME = r"a/cat\.jpg"


def test_nothing_has_its_final_name_before_the_manifest(run: RunDirectory) -> None:
    """Until it is finished there is one hidden folder; then all files, and no other
    one."""
    folder = filled(run)
    (hidden,) = (run.root / "a").iterdir()
    assert hides(hidden.name, "cat.jpg")
    finish(folder)
    assert visible(run.root) == COMPLETE


def test_an_empty_folder_in_its_place_is_taken(run: RunDirectory) -> None:
    """Nothing is lost with it."""
    (run.root / "a" / "cat.jpg").mkdir(parents=True)
    finish(filled(run))
    assert visible(run.root) == COMPLETE


def test_files_of_others_in_its_place_stay(run: RunDirectory) -> None:
    """The folder is left as it is, and the image is not there."""
    (run.root / "a" / "cat.jpg").mkdir(parents=True)
    (run.root / "a" / "cat.jpg" / "notes.txt").write_text("mine")
    folder = filled(run)
    with pytest.raises(StoreError, match=f"{NAME} holds files that featviz did not"):
        finish(folder)
    folder.discard()
    assert visible(run.root) == ["a/cat.jpg/notes.txt"]


def test_a_link_in_its_place_stays(run: RunDirectory, tmp_path: Path) -> None:
    """Put there after the run has begun: one error that names it, and what it leads to
    stays as it is; of the image nothing is left."""
    (tmp_path / "elsewhere").mkdir()
    folder = filled(run)
    (run.root / "a" / "cat.jpg").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=f"{NAME} cannot be written: "):
        finish(folder)
    folder.discard()
    assert visible(run.root) == ["a/cat.jpg"]
    assert snapshot(tmp_path / "elsewhere") == {}


def test_a_parent_that_becomes_a_link(run: RunDirectory, tmp_path: Path) -> None:
    """Nothing is written, moved or removed behind it."""
    away = tmp_path / "away"
    (away / "cat.jpg").mkdir(parents=True)
    (away / "cat.jpg" / "input.png").write_text("mine")
    before = snapshot(away)
    folder = filled(run)
    (run.root / "a").rename(tmp_path / "moved")
    (run.root / "a").symlink_to(away)
    for step in (lambda: finish(folder), folder.discard, lambda: filled(run)):
        with pytest.raises(StoreError, match=r"out/a is a symbolic link|No such file"):
            step()
    assert snapshot(away) == before
    assert (run.root / "a").is_symlink()


def test_an_error_while_it_is_moved(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no image then; the error has the system's reason."""
    folder = filled(run)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StoreError, match=f"{NAME} cannot be written: No space left"):
        finish(folder)
    assert not run.is_complete("a/cat.jpg")
    folder.discard()
    assert list(run.root.iterdir()) == []


@pytest.fixture
def remove_parent(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Another process discards its failed image, and with it the folder that both are
    in, just as this one is to begin; as often as the list has numbers."""
    real = os.mkdir
    times: list[int] = []

    def mkdir(path: object, *mode: int, dir_fd: int | None = None) -> None:
        if str(path).endswith(".part") and times:
            (run.root / "a").rmdir()
            times.pop()
        real(path, *mode, dir_fd=dir_fd)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "mkdir", mkdir)
    return times


def test_a_parent_that_was_removed_meanwhile_is_made_again(
    run: RunDirectory, remove_parent: list[int]
) -> None:
    """The image is complete at the end."""
    remove_parent.append(1)
    finish(filled(run))
    assert remove_parent == []
    assert visible(run.root) == COMPLETE


def test_a_parent_that_is_removed_again_and_again(
    run: RunDirectory, remove_parent: list[int]
) -> None:
    """One error ends it."""
    remove_parent.extend(range(10))
    with pytest.raises(StoreError, match=f"{NAME} cannot be written: no file"):
        run.new_image("a/cat.jpg")
    assert remove_parent == []
    assert visible(run.root) == []


@pytest.mark.medium
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts in /proc")
def test_no_descriptor_is_left_open(run: RunDirectory) -> None:
    """However an image ends: published, published between files of others, discarded,
    refused. Nothing waits for garbage collection, which a traceback would put off."""

    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what earlier tests have left
    before = opened()
    stranger = run.root / "b" / "cat.jpg"
    for _ in range(3):
        finish(filled(run))
        run.image("a/cat.jpg").discard()
        filled(run).discard()
        stranger.parent.mkdir(exist_ok=True)
        stranger.write_text("mine")
        folder = filled(run, "b/cat.jpg")
        with pytest.raises(StoreError):
            finish(folder)
        folder.discard()
        stranger.unlink()
    assert opened() == before


def test_threads_write_into_one_hidden_folder(run: RunDirectory) -> None:
    """Eight encoders, 80 files in 8 folders that each makes if it is the first."""
    folder = run.new_image("cat.jpg")
    names = [f"{n % 8:03d}_conv/output.call{n}.png" for n in range(80)]

    def write(name: str) -> None:
        with folder.writing(name) as file:
            file.write(name.encode())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, names))
    finish(folder)
    files = tree(folder.path)
    assert len(files) == 82
    assert {name: name.encode() for name in names}.items() <= files.items()


@pytest.mark.parametrize(
    "name",
    ["層" * 84 + ".png", hidden_name("cat.jpg"), "a\nb"],
    ids=["255 bytes", "hidden folder", "newline"],
)
def test_odd_names(name: str, run: RunDirectory) -> None:
    """The hidden name fits the system too, and leads back to the image: what a killed
    run left is found by it. An image that is called as a hidden folder gets another
    folder."""
    complete = filled(run, f"sub/{name}")
    finish(complete)
    unfinished = filled(run, f"sub/{name}")
    filled(run, "sub/another")
    run.clear_images([f"sub/{name}"])
    (hidden,) = (path for path in (run.root / "sub").iterdir() if path != complete.path)
    assert hides(hidden.name, "another")
    assert (complete.path / "manifest.json").is_file()
    unfinished.discard()


def test_no_image_is_published_into_another_folder(
    run: RunDirectory, tmp_path: Path
) -> None:
    """Another folder has come to stand in the place of the run's, with the hidden
    folder in it: it does not come to hold the image."""
    folder = filled(run)
    run.root.rename(tmp_path / "moved")
    (tmp_path / "moved" / "a").rename(tmp_path / "a")
    run.root.mkdir()
    (tmp_path / "a").rename(run.root / "a")
    with pytest.raises(
        StoreError, match="was removed or renamed while the run wrote into it"
    ):
        finish(folder)
    assert not list(tmp_path.rglob("cat.jpg"))


@pytest.mark.parametrize("name", ["a", "a" * 255, "ä" * 127, "猫" * 85])
def test_a_name_of_any_length_has_a_hidden_one(name: str, tmp_path: Path) -> None:
    """Systems count bytes; of a long name it shows the beginning, and is that of no
    other."""
    with Folder.open(tmp_path) as folder, folder.write(name) as file:
        (hidden,) = (path.name for path in tmp_path.iterdir())
        file.write(b"whole")
    assert hides(hidden, name)
    assert not hides(hidden, f"{name[:-1]}b")
    assert tree(tmp_path) == {name: b"whole"}
