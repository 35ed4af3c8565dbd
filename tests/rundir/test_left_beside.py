"""Hidden folders beside a result, of processes that were killed while they put it in its place or
removed what had been there: the next command on the same place removes them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from runs import SMALL, tree

from featviz.rundir import LOCK_FILE, RUN_FILE, archive

Run = Callable[..., Outcome]


class Killed(BaseException):
    """What no code of ours catches and goes on."""


def kill_after(monkeypatch: pytest.MonkeyPatch, count: int) -> Callable[[], None]:
    """Nothing more is removed after so many files, as if the process were killed then; gives the
    way to end that."""
    real, left = os.unlink, iter(range(count))

    def unlink(path: Any, **more: Any) -> None:
        if "part" not in str(path) and next(left, None) is None:
            raise Killed
        real(path, **more)

    monkeypatch.setattr(os, "unlink", unlink)
    return lambda: monkeypatch.setattr(os, "unlink", real)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_run_whose_place_was_taken_is_removed_by_the_next_one(
    count: int,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    ran: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--overwrite is killed while it removes the earlier run: the new one is there and whole, and
    the next --overwrite finds the rest of the old one by its run.json, which goes last."""
    whole, base = tree(ran), ["run", tiny_file, photos, *SMALL, "--out", ran, "--overwrite"]
    undo = kill_after(monkeypatch, count)
    with pytest.raises(Killed):
        featviz(*base)
    undo()
    (old,) = hidden(ran.parent)
    assert old.endswith(".old") and (ran.parent / old / RUN_FILE).is_file()
    assert count == 0 or not (ran.parent / old / LOCK_FILE).exists()  # it would be nobody's alone
    assert tree(ran) == whole
    assert featviz(*base).code == 0
    assert tree(ran) == whole and hidden(ran.parent) == []


def test_files_of_others_in_a_folder_that_was_left_stay(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path
) -> None:
    """A hidden name like ours is no reason to remove what featviz did not write."""
    old = ran.parent / f".{ran.name}.{'0' * 16}.old"
    shutil.copytree(ran, old)
    (old / "notes.txt").write_text("mine")
    before = tree(old)
    base = ["run", tiny_file, photos, *SMALL, "--out", ran, "--overwrite"]
    assert featviz(*base).code == 0 and tree(old) == before
    other = ran.parent / f".other.{'0' * 16}.old"
    shutil.copytree(ran, other)
    assert featviz(*base).code == 0 and tree(other) == tree(ran)


@pytest.mark.parametrize("count", [0, 3, 8])
def test_the_folder_of_an_archive_is_known_until_it_is_gone(
    count: int, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed while it removes the folder that it has packed: the next --archive
    removes the rest."""
    target = tmp_path / "x.zip"
    room = archive.room_for_archive(target, False)
    shutil.copytree(ran, room / archive.ROOM)
    undo = kill_after(monkeypatch, count)
    with pytest.raises(Killed):
        archive.clear_room(room)
    undo()
    assert (room / archive.ROOM / RUN_FILE).is_file()
    new = archive.room_for_archive(target, False)
    assert not room.exists() and new.is_dir()


@pytest.mark.parametrize(("content", "goes"), [(b"", True), (b"PK\3\4...", True), (b"mine", False)])
def test_the_beginning_of_an_archive_is_removed(content: bytes, goes: bool, tmp_path: Path) -> None:
    """What SIGKILL left of a zip file that was being packed; a file of somebody else stays, and so
    do links and what was to be another archive."""
    part, other = (tmp_path / f".{name}.{'0' * 16}.part" for name in ("x.zip", "y.zip"))
    link = tmp_path / f".x.zip.{'1' * 16}.part"
    part.write_bytes(content)
    other.write_bytes(b"")
    link.symlink_to(other)
    archive.room_for_archive(tmp_path / "x.zip", False)
    assert part.exists() != goes and other.exists() and link.is_symlink()


def test_a_resumed_archive_leaves_no_beginning_of_itself(ran: Path, tmp_path: Path) -> None:
    """Killed while it packed: --resume goes on with the folder, and the begun zip file goes."""
    target, part = tmp_path / "x.zip", tmp_path / f".x.zip.{'0' * 16}.part"
    room = archive.room_for_archive(target, False)
    shutil.copytree(ran, room / archive.ROOM)
    part.write_bytes(b"")
    assert archive.room_for_archive(target, False, resume=True) == room
    assert not part.exists() and (room / archive.ROOM / RUN_FILE).is_file()


def test_an_empty_folder_that_was_left_goes(tmp_path: Path) -> None:
    """Killed between the last file and the folders."""
    left = tmp_path / f".x.zip.{'0' * 16}.part"
    (left / archive.ROOM).mkdir(parents=True)
    room = archive.room_for_archive(tmp_path / "x.zip", False, resume=True)
    assert not left.exists() and room.is_dir()


def test_a_report_removes_what_its_forerunner_has_left(featviz: Run, ran: Path) -> None:
    """The pages that a killed `report` had moved aside go with the next one; those of a run that
    were moved aside in the same place stay."""
    pages = ran.parent / "pages"
    assert featviz("report", ran, "--out", pages).code == 0
    ours, others = (pages.with_name(f".pages.{n * 16}.old") for n in "01")
    shutil.copytree(pages, ours)
    shutil.copytree(ran, others)
    assert featviz("report", ran, "--out", pages).code == 0
    assert not ours.exists() and tree(others) == tree(ran)
