"""What stands in the place of a result, and what each command does with it that writes
a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import refused, snapshot, tree

from featviz.errors import StoreError, UsageError
from featviz.rundir import LOCK_FILE, RUN_FILE
from featviz.rundir.folder import OLD, hidden_name
from featviz.rundir.locks import held
from featviz.rundir.place import check_apart, model_files, replacing, write_file

RECORDS = {"run": "run.json", "audit": "audit.json", "report": "report.json"}
"""The record in the folder of commands of each kind: the others do as these."""
ALWAYS = ("report",)
"""Commands that replace an earlier result of their own without --overwrite."""


@pytest.fixture(
    params=[
        "run",
        pytest.param("audit", marks=pytest.mark.slow),
        pytest.param("report", marks=pytest.mark.slow),
    ]
)
def command(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def record(command: str) -> str:
    """The name of the command's record."""
    return RECORDS[command]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "result"


@pytest.fixture
def write(
    request: pytest.FixtureRequest,
    command: str,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    out: Path,
) -> Run:
    """The command into `out`, with more options."""
    arguments: list[object] = [tiny_file, photos, "--size", "16"]
    if command == "report":
        arguments = [request.getfixturevalue("ran")]
    return lambda *more: featviz(command, *arguments, "--out", out, *more)


@pytest.fixture
def replace(command: str, write: Run) -> Run:
    """The command into `out`, with what makes it replace an earlier result."""
    if command in ALWAYS:
        return write
    return lambda: write("--overwrite")


@pytest.fixture
def earlier(command: str, write: Run, out: Path, drawn_once: Path) -> dict[str, bytes]:
    """The files of a result that is there; made once."""
    kept = drawn_once / f"result-of-{command}"
    if not kept.exists():
        assert write().code == 0
        shutil.copytree(out, kept)
        shutil.rmtree(out)
    return tree(shutil.copytree(kept, out))


Place = Callable[[Path, Path], object]
"""Puts something under the name of a record; knows a folder with a real one."""

STRANGERS: dict[str, Place] = {
    "empty": lambda path, ours: path.write_text("{}"),
    "list": lambda path, ours: path.write_text("[]"),
    # npm writes an audit.json, too
    "npm": lambda path, ours: path.write_text('{"schema_version": 1, "base": "a"}'),
    "link": lambda path, ours: path.symlink_to(ours / path.name),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_record_of_another_program_makes_no_folder_ours(
    stranger: str,
    record: str,
    earlier: dict[str, bytes],
    replace: Run,
    out: Path,
    tmp_path: Path,
) -> None:
    """Nothing of the folder goes; the message says that the record is none."""
    ours = out.rename(tmp_path / "ours")
    out.mkdir()
    (out / "note.txt").write_text("mine")
    STRANGERS[stranger](out / record, ours)
    before = snapshot(tmp_path)
    noun = record.removesuffix(".json")
    message = f"is not empty and holds no {noun} of featviz: its {record} is none"
    refused(replace(), 1, message, "--out")
    assert snapshot(tmp_path) == before


def test_a_folder_of_others_stays(record: str, replace: Run, out: Path) -> None:
    """One without a record is refused."""
    out.mkdir()
    (out / "note.txt").write_text("mine")
    noun = record.removesuffix(".json")
    refused(replace(), 1, f"is not empty and holds no {noun} of featviz", "--out")
    assert snapshot(out) == {"note.txt": b"mine"}


@pytest.mark.medium
def test_an_empty_folder_is_taken(write: Run, record: str, out: Path) -> None:
    """Nothing is lost with it."""
    out.mkdir()
    assert write().code == 0
    assert (out / record).is_file()


@pytest.mark.medium
def test_an_earlier_result_is_replaced_on_demand(
    command: str,
    earlier: dict[str, bytes],
    write: Run,
    replace: Run,
    out: Path,
    tmp_path: Path,
) -> None:
    """The same command gives the same files, and leaves nothing beside them."""
    around = sorted(tmp_path.iterdir())
    if command not in ALWAYS:
        refused(write(), 1, "--overwrite replaces it")
    assert replace().code == 0
    assert tree(out) == earlier
    assert sorted(tmp_path.iterdir()) == around


def test_a_file_of_others_keeps_an_earlier_result(
    earlier: dict[str, bytes], replace: Run, out: Path
) -> None:
    """It is named, and all stays."""
    (out / "note.txt").write_text("mine")
    refused(replace(), 1, "holds files that featviz did not write: note.txt")
    assert tree(out) == {**earlier, "note.txt": b"mine"}


@pytest.mark.parametrize(
    "command", ["run", pytest.param("report", marks=pytest.mark.slow)]
)
def test_a_link_keeps_an_earlier_result(
    earlier: dict[str, bytes], record: str, replace: Run, out: Path, tmp_path: Path
) -> None:
    """A file of the result that has become a link is not ours any more."""
    name = sorted(earlier.keys() - {record})[-1]
    (out / name).rename(tmp_path / "saved")
    (out / name).symlink_to(tmp_path / "saved")
    before = snapshot(tmp_path)
    refused(replace(), 1, "featviz did not write: ", Path(name).name)
    assert snapshot(tmp_path) == before


@pytest.mark.medium
def test_what_killed_commands_have_left_goes(
    earlier: dict[str, bytes], replace: Run, out: Path, tmp_path: Path
) -> None:
    """An earlier result that was moved aside, a half result, and a lock of a process
    that is gone."""
    old = shutil.copytree(out, tmp_path / hidden_name("result", OLD))
    half = tmp_path / hidden_name("result")
    (half / "maps").mkdir(parents=True)
    (half / "maps" / "note.txt").write_text("left")
    lock = "process 1 on elsewhere since 2020-01-01 00:00:00 UTC\n"
    (out / LOCK_FILE).write_text(lock)
    assert replace().code == 0
    assert tree(out) == earlier
    assert not old.exists()
    assert not half.exists()


@pytest.mark.medium
def test_what_looks_left_and_is_not_ours_stays(
    earlier: dict[str, bytes], replace: Run, out: Path, tmp_path: Path
) -> None:
    """Files of others in an earlier result that was moved aside, and folders of other
    names."""
    with_note = shutil.copytree(out, tmp_path / hidden_name("result", OLD))
    (with_note / "note.txt").write_text("mine")
    other_name = shutil.copytree(out, tmp_path / hidden_name("other", OLD))
    no_ending = hidden_name("result", OLD).removesuffix(OLD)
    odd_name = shutil.copytree(out, tmp_path / no_ending)
    assert replace().code == 0
    assert tree(with_note) == {"note.txt": b"mine"}
    assert tree(other_name) == tree(odd_name) == earlier


@pytest.mark.medium
@pytest.mark.parametrize("command", ["audit"])
def test_the_only_copy_of_an_earlier_result_stays(
    earlier: dict[str, bytes], replace: Run, out: Path, tmp_path: Path
) -> None:
    """A killed command has moved it aside, and somebody has made an empty folder in its
    place."""
    old = out.rename(tmp_path / hidden_name("result", OLD))
    out.mkdir()
    assert replace().code == 0
    assert tree(old) == tree(out) == earlier


@pytest.mark.medium
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


@pytest.fixture
def kill_in_removal(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing more is removed after five files, as if the process were killed then."""
    real = os.unlink
    removed: list[object] = []

    def unlink(path: Any, **options: Any) -> None:
        if "part" not in str(path):
            if len(removed) == 5:
                raise Killed
            removed.append(path)
        real(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink)
        yield patched


def hidden(folder: Path) -> list[Path]:
    """Hidden files and folders beside a result."""
    return list(folder.glob(".*"))


@pytest.mark.medium
def test_the_run_that_was_replaced_is_removed_by_the_next_one(
    draw: Run, ran: Path, kill_in_removal: pytest.MonkeyPatch
) -> None:
    """--overwrite is killed while it removes the earlier run: the new one is there and
    complete, and the next --overwrite finds the rest of the old one by its run.json,
    which goes last."""
    before = tree(ran)
    with pytest.raises(Killed):
        draw(ran, "--overwrite")
    kill_in_removal.undo()
    (old,) = hidden(ran.parent)
    assert old.name.endswith(OLD)
    assert (old / RUN_FILE).is_file()
    assert not (old / LOCK_FILE).exists()  # it would be nobody's alone
    assert tree(ran) == before
    assert draw(ran, "--overwrite").code == 0
    assert tree(ran) == before
    assert hidden(ran.parent) == []


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


@pytest.mark.parametrize("path", ["photos/cat.jpg", "linked.jpg", "album/cat.jpg"])
def test_an_input_inside_is_in_the_way(album: Path, path: str) -> None:
    """By its own path, by a link to it, and through a folder that is a link."""
    inputs = [album.parent / "other.jpg", album.parent / path]
    with pytest.raises(UsageError, match=r"holds the input|is the input"):
        check_apart(album, "--out", inputs)
    check_apart(album.parent / "out", "--out", inputs)


def test_the_place_of_a_link_is_in_the_way(album: Path) -> None:
    """A link that leads elsewhere would be written over."""
    (album / "dog.jpg").symlink_to(album.parent / "elsewhere.jpg")
    with pytest.raises(UsageError, match="holds the input"):
        check_apart(album, "--out", [album / "dog.jpg"])


def test_the_files_of_models_are_inputs(album: Path) -> None:
    """A file, one with a factory behind a colon, and a folder behind `hf:`; a folder
    without a model is none."""
    (album / "config.json").write_text("{}")
    file = album / "cat.jpg"
    models = (str(file), f"{file}:make", f"hf:{album}", str(album.parent), None)
    assert model_files(*models) == [file, file, album]


def test_the_folder_above_is_an_input_by_two_dots(album: Path) -> None:
    """It is in the way of itself and of what holds it, and not of a folder in it."""
    above = album / ".."
    with pytest.raises(UsageError, match="is the input"):
        check_apart(album.parent, "--out", [above])
    with pytest.raises(UsageError, match="holds the input"):
        check_apart(album.parent.parent, "--out", [above])
    check_apart(album, "--out", [above])


def test_an_input_in_a_folder_of_a_longer_name_is_not_in_the_way(album: Path) -> None:
    """`maps-raw` is beside `maps`, and not in it."""
    check_apart(album, "--out", [album.with_name(f"{album.name}-raw") / "cat.jpg"])


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
@pytest.mark.parametrize(
    "result",
    [
        lambda: replacing(Path("/proc/maps/a"), RUN_FILE),
        lambda: write_file(Path("/proc/map.png")),
    ],
    ids=["folder", "file"],
)
def test_a_place_where_nothing_can_be_made(
    result: Callable[[], AbstractContextManager[Any]],
) -> None:
    """The message says so, where the system says that there is no such file."""
    message = r"^/proc/map.* cannot be written: no file or folder can be made there\n"
    with pytest.raises(StoreError, match=message), result():
        pass
