"""Links and guessed names in the way of what is written, which nothing is written
through."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import Run
from runs import complete, make_photos, refused, run_json, snapshot

from featviz.errors import StoreError
from featviz.rundir import folder
from featviz.rundir.folder import Folder, hides
from featviz.rundir.place import write_file


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("00.png", "folder"),
        pytest.param("00.png/001_0", "dead", marks=pytest.mark.slow),
    ],
)
def test_resume_does_not_write_through_a_linked_folder(
    place: str, kind: str, draw: Run, ran: Path, tmp_path: Path
) -> None:
    """An image's folder that leads elsewhere fails the image, as does a layer's in it."""
    elsewhere = tmp_path / "elsewhere"
    if kind == "folder":
        elsewhere.mkdir()
        (elsewhere / "manifest.json").write_text("mine")
        (elsewhere / "output.png").write_text("mine")
    (ran / "00.png" / "manifest.json").unlink()
    shutil.rmtree(ran / place)
    (ran / place).symlink_to(elsewhere)
    before = snapshot(elsewhere) if elsewhere.is_dir() else kind
    done = draw(ran, "--resume")
    linked = "is a symbolic link, and nothing is written through one"
    refused(
        done,
        3,
        linked if place == "00.png" else "00.png holds files that featviz did not",
    )
    assert (snapshot(elsewhere) if elsewhere.is_dir() else kind) == before
    assert (ran / place).is_symlink() and elsewhere.exists() == (kind != "dead")


def test_a_board_behind_a_link_in_the_run(draw: Run, ran: Path, tmp_path: Path) -> None:
    """--tensorboard inside --out goes through no link either."""
    (tmp_path / "away").mkdir()
    (ran / "board").symlink_to(tmp_path / "away")
    refused(
        draw(ran, "--resume", "--tensorboard", ran / "board" / "x"),
        1,
        "board is a symbolic link",
    )
    assert snapshot(tmp_path / "away") == {}


def test_a_link_in_the_place_of_a_file_is_replaced_not_followed(tmp_path: Path) -> None:
    """What is written takes the link's place; its target stays."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "f").symlink_to(tmp_path / "victim")
    with write_file(tmp_path / "f") as file:
        file.write(b"new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "f").read_bytes() == b"new" and not (tmp_path / "f").is_symlink()


def test_parts_have_names_that_nobody_can_guess(tmp_path: Path) -> None:
    """16 hex digits, new each time; the file is made by this process, or not at all."""
    names, mask = set(), os.umask(0)
    os.umask(mask)
    for _ in range(3):
        with write_file(tmp_path / "x.png") as file:
            (part,) = (path.name for path in tmp_path.iterdir() if path.name != "x.png")
            names.add(part)
            file.write(b"")
    assert len(names) == 3 and all(hides(name, "x.png") for name in names)
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
    assert victim.read_text() == "mine" and (tmp_path / ".guessed").is_symlink()


@pytest.mark.parametrize("way", ["../x", "a/../../x"])
def test_nothing_is_written_outside_the_folder(way: str, tmp_path: Path) -> None:
    """A path that climbs out is refused."""
    (tmp_path / "out").mkdir()
    outside = pytest.raises(StoreError, match="cannot be written")
    with outside, Folder.open(tmp_path / "out").write(way):
        pytest.fail("there is nothing to write to")
    assert snapshot(tmp_path) == {"out": "empty folder"}


def test_resume_removes_nothing_of_others(draw: Run, photos: Path, ran: Path) -> None:
    """A run.json that names a folder of the user's as an image that is missing: the
    image fails, the others go on, and the folder stays as it is."""
    record = run_json(ran)
    make_photos(photos / "src", 1)
    record["images"]["missing"] = ["src/00.png"]
    (ran / "run.json").write_text(json.dumps(record))
    (ran / "src" / "00.png" / "004_left").mkdir(parents=True)
    (ran / "src" / "00.png" / "004_left" / "output.png").write_text("left")
    (ran / "src" / "00.png" / "main.py").write_text("mine")
    (ran / "src" / "other.py").write_text("mine")
    done = draw(ran, "--resume")
    assert (
        done.code == 3
        and "src/00.png holds files that featviz did not write" in done.err
    )
    assert (ran / "src" / "00.png" / "main.py").read_text() == "mine"
    assert (ran / "src" / "other.py").read_text() == "mine"
    assert (ran / "src" / "00.png" / "004_left" / "output.png").read_text() == "left"
    assert complete(ran) == ["00.png", "01.png"]
