"""Links and guessed names in the way of what is written, which nothing is written
through."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import Run
from runs import complete, make_photos, refused, run_json, snapshot, tree

from featviz.errors import StoreError
from featviz.rundir import folder
from featviz.rundir.folder import Folder, hides
from featviz.rundir.place import write_file

LINKED = "is a symbolic link, and nothing is written through one"


@pytest.mark.medium
def test_resume_does_not_write_through_the_folder_of_an_image(
    draw: Run, ran: Path, tmp_path: Path
) -> None:
    """One that leads elsewhere fails the image."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "manifest.json").write_text("mine")
    (elsewhere / "output.png").write_text("mine")
    shutil.rmtree(ran / "00.png")
    (ran / "00.png").symlink_to(elsewhere)
    before = snapshot(tmp_path)
    refused(draw(ran, "--resume"), 3, LINKED)
    assert snapshot(elsewhere) == {"manifest.json": b"mine", "output.png": b"mine"}
    assert snapshot(tmp_path)["out/00.png"] == before["out/00.png"]


@pytest.mark.slow
def test_resume_does_not_write_through_the_folder_of_a_layer(
    draw: Run, ran: Path, tmp_path: Path
) -> None:
    """A link that leads nowhere fails the image, and still does so afterwards."""
    (ran / "00.png" / "manifest.json").unlink()
    shutil.rmtree(ran / "00.png" / "001_0")
    (ran / "00.png" / "001_0").symlink_to(tmp_path / "nowhere")
    refused(draw(ran, "--resume"), 3, "00.png holds files that featviz did not")
    assert (ran / "00.png" / "001_0").is_symlink()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.medium
def test_a_board_behind_a_link_in_the_run(draw: Run, ran: Path, tmp_path: Path) -> None:
    """--tensorboard inside --out goes through no link either."""
    (tmp_path / "away").mkdir()
    (ran / "board").symlink_to(tmp_path / "away")
    done = draw(ran, "--resume", "--tensorboard", ran / "board" / "x")
    refused(done, 1, "board is a symbolic link")
    assert snapshot(tmp_path / "away") == {}


def test_a_link_in_the_place_of_a_file_is_replaced_not_followed(tmp_path: Path) -> None:
    """What is written takes the link's place; its target stays."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "f").symlink_to(tmp_path / "victim")
    with write_file(tmp_path / "f") as file:
        file.write(b"new")
    assert snapshot(tmp_path) == {"f": b"new", "victim": b"mine"}


def test_parts_have_names_that_nobody_can_guess(tmp_path: Path) -> None:
    """They are new each time."""
    path = tmp_path / "x.png"
    names = set()
    for _ in range(3):
        with write_file(path):
            (part,) = tmp_path.glob(".*")
            assert hides(part.name, "x.png")
            names.add(part.name)
    assert len(names) == 3


def test_a_file_has_the_rights_of_the_user(tmp_path: Path) -> None:
    """Those of its part, which nobody else may read, are not left to it."""
    mask = os.umask(0)
    os.umask(mask)
    with write_file(tmp_path / "x.png"):
        pass
    assert (tmp_path / "x.png").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_part_that_is_there_already_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if somebody did guess: a link, a file or a folder of that name is refused."""
    monkeypatch.setattr(folder, "hidden_name", lambda name: ".guessed")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".guessed").symlink_to(victim)
    exists = pytest.raises(StoreError, match="f cannot be written: File exists")
    with exists, write_file(tmp_path / "f") as file:
        file.write(b"new")
    assert victim.read_text() == "mine"
    assert (tmp_path / ".guessed").is_symlink()


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/a/x", "//a/x"])
def test_nothing_is_written_outside_the_folder(path: str, tmp_path: Path) -> None:
    """A path that climbs out, or is absolute, is refused."""
    (tmp_path / "out").mkdir()
    outside = pytest.raises(StoreError, match="it lies outside")
    with outside, Folder.open(tmp_path / "out").write(path):
        pytest.fail("there is nothing to write to")
    assert snapshot(tmp_path) == {"out": "empty folder"}


@pytest.mark.medium
def test_resume_removes_nothing_of_others(draw: Run, photos: Path, ran: Path) -> None:
    """A run.json that names a folder of the user's as an image that is missing: the
    image fails, the others go on, and the folder stays as it is."""
    make_photos(photos / "src", 1)
    record = run_json(ran)
    record["images"]["missing"] = ["src/00.png"]
    (ran / "run.json").write_text(json.dumps(record))
    files = {
        "00.png/004_left/output.png": b"left",
        "00.png/main.py": b"mine",
        "other.py": b"mine",
    }
    for name, data in files.items():
        path = ran / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    done = draw(ran, "--resume")
    refused(done, 3, "src/00.png holds files that featviz did not write")
    assert tree(ran / "src") == files
    assert complete(ran) == ["00.png", "01.png"]
