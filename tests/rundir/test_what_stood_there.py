"""What stands in the place of a result, and what each command does with it that writes
a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import SMALL, refused, snapshot, tree

from featviz.errors import UsageError
from featviz.rundir import LOCK_FILE, RUN_FILE
from featviz.rundir.folder import OLD, hidden_name
from featviz.rundir.locks import held
from featviz.rundir.place import check_apart

MARKS = {"run": "run.json", "audit": "audit.json", "report": "report.json"}
"""The record in the folder of commands of each kind: the others do as these."""
ALWAYS = ("report",)
"""Commands that replace an earlier result of their own without --overwrite."""


@pytest.fixture(
    params=[
        "run",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("audit", "report")),
    ]
)
def command(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "result"


@pytest.fixture
def write(
    draw: Run,
    command: str,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    tmp_path: Path,
    out: Path,
) -> Run:
    """The command into `out`, with more options."""
    ran = tmp_path / "ran"
    if command == "report":
        assert draw(ran).code == 0
    base = {
        "run": ["run", tiny_file, photos, *SMALL],
        "audit": ["audit", tiny_file, photos, "--size", "16"],
        "report": ["report", ran],
    }[command]
    return lambda *more: featviz(*base, "--out", out, *more)


def test_what_featviz_did_not_write_stays(
    command: str, write: Run, out: Path, tmp_path: Path
) -> None:
    """Files of others, a record of another program (npm writes an audit.json, too), a
    link to a record of ours: nothing of the folder goes. An empty folder is taken."""
    mark, over = MARKS[command], () if command in ALWAYS else ("--overwrite",)
    out.mkdir()
    assert write().code == 0
    out.rename(tmp_path / "elsewhere")
    out.mkdir()
    (out / "note.txt").write_text("mine")
    for content in (None, "{}", "[]", '{"schema_version": 1, "base": "a"}', "link"):
        if content == "link":
            (out / mark).unlink()
            (out / mark).symlink_to(tmp_path / "elsewhere" / mark)
        elif content is not None:
            (out / mark).write_text(content)
        before = snapshot(tmp_path)
        noun = MARKS[command].removesuffix(".json")
        words = f"is not empty and holds no {noun} of featviz"
        refused(
            write(*over),
            1,
            words + (f": its {mark} is none" if content else ""),
            "--out",
        )
        assert snapshot(tmp_path) == before


def test_an_earlier_result(command: str, write: Run, out: Path, tmp_path: Path) -> None:
    """It is replaced on demand, unless something in it is not ours; what killed
    commands have left beside it goes, but for what is not ours in what once stood
    there, and for other names."""
    over = () if command in ALWAYS else ("--overwrite",)
    assert write().code == 0
    whole, around = tree(out), sorted(tmp_path.iterdir())
    if over:
        refused(write(), 1, "--overwrite replaces it")
    assert write(*over).code == 0
    assert tree(out) == whole and sorted(tmp_path.iterdir()) == around

    (out / "note.txt").write_text("mine")
    before = snapshot(tmp_path)
    refused(write(*over), 1, "holds files that featviz did not write: note.txt")
    assert snapshot(tmp_path) == before
    (out / "note.txt").unlink()

    for file in sorted(
        p for p in out.rglob("*") if p.is_file() and p.name != MARKS[command]
    )[-1:]:
        file.rename(tmp_path / "saved")
        file.symlink_to(tmp_path / "saved")
        before = snapshot(tmp_path)
        refused(write(*over), 1, "featviz did not write: ", file.name)
        assert snapshot(tmp_path) == before
        (tmp_path / "saved").replace(file)

    names = [hidden_name(name, OLD) for name in ("result", "result", "other")]
    names.append(names[0].removesuffix(OLD))
    ours, noted, other, odd = (shutil.copytree(out, tmp_path / name) for name in names)
    (noted / "note.txt").write_text("mine")
    part = tmp_path / hidden_name("result")
    (part / "half").mkdir(parents=True)
    (part / "half" / "note.txt").write_text("left")
    (out / LOCK_FILE).write_text(
        "process 1 on elsewhere since 2020-01-01 00:00:00 UTC\n"
    )
    assert write(*over).code == 0
    assert tree(out) == whole
    assert not ours.exists() and not part.exists()
    assert tree(other) == tree(odd) == whole and tree(noted) == {"note.txt": b"mine"}


@pytest.mark.parametrize("command", ["run"])
def test_a_folder_that_another_process_writes(
    write: Run, out: Path, tmp_path: Path
) -> None:
    """Exit code 1 and one line; what is there stays, the lock of the other one too."""
    with held(out):
        before = sorted(tmp_path.rglob("*"))
        refused(write(), 1, f"is being written by process {os.getpid()} on ")
        assert sorted(tmp_path.rglob("*")) == before
    assert write().code == 0


# What killed commands have left


class Killed(BaseException):
    """What no code of ours catches and goes on."""


def kill_after(monkeypatch: pytest.MonkeyPatch, count: int) -> Callable[[], None]:
    """Nothing more is removed after so many files, as if the process were killed then;
    gives the way to end that."""
    real, left = os.unlink, iter(range(count))

    def unlink(path: Any, **more: Any) -> None:
        if "part" not in str(path) and next(left, None) is None:
            raise Killed
        real(path, **more)

    monkeypatch.setattr(os, "unlink", unlink)
    return lambda: monkeypatch.setattr(os, "unlink", real)


def test_the_run_whose_place_was_taken_is_removed_by_the_next_one(
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    ran: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--overwrite is killed while it removes the earlier run: the new one is there and
    whole, and the next --overwrite finds the rest of the old one by its run.json, which
    goes last."""

    def hidden() -> list[str]:
        return [path.name for path in ran.parent.iterdir() if path.name.startswith(".")]

    whole, base = (
        tree(ran),
        ["run", tiny_file, photos, *SMALL, "--out", ran, "--overwrite"],
    )
    undo = kill_after(monkeypatch, 5)
    with pytest.raises(Killed):
        featviz(*base)
    undo()
    (old,) = hidden()
    assert old.endswith(".old") and (ran.parent / old / RUN_FILE).is_file()
    assert not (ran.parent / old / LOCK_FILE).exists()  # it would be nobody's alone
    assert tree(ran) == whole
    assert featviz(*base).code == 0
    assert tree(ran) == whole and hidden() == []


# Places apart from inputs, and whose folder it is


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """A folder with a file, a link to it from elsewhere, and a link to the folder."""
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"")
    (tmp_path / "linked.jpg").symlink_to(folder / "cat.jpg")
    (tmp_path / "album").symlink_to(folder)
    return folder


@pytest.mark.parametrize("way", ["photos/cat.jpg", "linked.jpg", "album/cat.jpg"])
def test_an_input_inside_is_in_the_way(album: Path, way: str) -> None:
    """By its own path, by a link to it, and through a folder that is a link."""
    inputs = [album.parent / "other.jpg", album.parent / way]
    with pytest.raises(UsageError, match=r"holds the input|is the input"):
        check_apart(album, "--out", inputs)
    check_apart(album.parent / "out", "--out", inputs)


def test_the_place_of_a_link_is_in_the_way(album: Path) -> None:
    """A link that leads elsewhere would be written over."""
    (album / "dog.jpg").symlink_to(album.parent / "elsewhere.jpg")
    with pytest.raises(UsageError, match="holds the input"):
        check_apart(album, "--out", [album / "dog.jpg"])


def test_an_input_in_a_folder_of_a_longer_name_is_not_in_the_way(album: Path) -> None:
    """`maps-raw` is beside `maps`, and not in it."""
    check_apart(album, "--out", [album.with_name(f"{album.name}-raw") / "cat.jpg"])
