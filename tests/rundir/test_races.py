"""What comes between two steps of a writer: a link, another writer, a kill."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run
from runs import refused, snapshot, tree

from featviz.rundir.folder import OLD, Folder, hidden_name, hides, is_hidden
from featviz.rundir.locks import locked_new
from featviz.rundir.place import DIFF, replacing
from featviz.rundir.write import write_record

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def write_result(out: Path, text: str) -> None:
    """A result with one file of this text."""
    with replacing(out, DIFF) as folder:
        with folder.write("maps/a.txt") as file:
            file.write(text.encode())
        write_record(folder, DIFF, {})


def text_of(out: Path) -> str:
    return (out / "maps" / "a.txt").read_text()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The place of a result, alone in its folder."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here" / "out"


COMMANDS: dict[str, Callable[[Path, Path], list[object]]] = {
    "report": lambda ran, tiny: ["report", ran],
    "diff": lambda ran, tiny: ["diff", ran, ran],
    "merge": lambda ran, tiny: ["merge", ran],
    "kernels": lambda ran, tiny: ["kernels", tiny],
    "audit": lambda ran, tiny: ["audit", tiny, "photos", "--layers", "ReLU"],
    "exemplars": lambda ran, tiny: ["exemplars", tiny, "photos", "--layers", "ReLU"],
}


@pytest.mark.medium
@pytest.mark.skipif(
    os.open not in os.supports_dir_fd, reason="promised with descriptors alone"
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_link_in_the_place_of_the_hidden_folder(
    command: str,
    featviz: Run,
    ran: Path,
    tiny_file: Path,
    photos: Path,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Put there as soon as the folder is made: nothing is written through it, and it
    does not come to stand under the final name."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "notes.txt").write_text("mine")
    before = snapshot(precious)
    monkeypatch.chdir(photos.parent)
    make = Folder.new

    def swapped(self: Folder, name: str) -> Folder:
        folder = make(self, name)
        if self.path == out.parent and is_hidden(name):
            folder.path.rename(tmp_path / "moved")
            folder.path.symlink_to(precious)
        return folder

    monkeypatch.setattr(Folder, "new", swapped)
    done = featviz(*COMMANDS[command](ran, tiny_file), "--out", out)
    refused(done, 1)
    reason = r"replaced .*while featviz wrote into it|renamed while"
    assert re.search(reason, done.err, re.S)
    assert snapshot(precious) == before
    assert list(out.parent.iterdir()) == []


def test_two_names_that_begin_with_the_same_200_bytes(out: Path) -> None:
    """Written at the same time, each leaves the other's hidden folder alone."""
    first = out.with_name("x" * 220 + "1")
    second = out.with_name("x" * 220 + "2")
    assert not hides(hidden_name(first.name), second.name)
    with replacing(first, DIFF) as folder:
        write_result(second, "second")
        write_result(second, "second again")
        with folder.write("maps/a.txt") as file:
            file.write(b"first")
        write_record(folder, DIFF, {})
    assert (text_of(first), text_of(second)) == ("first", "second again")
    assert sorted(out.parent.iterdir()) == [first, second]


def killed(task: Callable[[], None]) -> None:
    """Do something in a process that ends in the middle of it, as by SIGKILL."""
    pid = os.fork()
    if not pid:
        try:
            task()
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.medium
@needs_fork
def test_two_kills_lose_no_result(out: Path) -> None:
    """The first between the two renames, the second while the next result is written:
    the earlier result is under its name, and the third attempt leaves nothing beside
    it."""
    write_result(out, "earlier")
    before = tree(out)

    def between_renames() -> None:
        Folder.publish = lambda *_: os._exit(9)  # type: ignore[method-assign,assignment]
        write_result(out, "new")

    def while_writing() -> None:
        with replacing(out, DIFF):
            os._exit(9)

    killed(between_renames)
    assert not out.exists()
    killed(while_writing)
    (out / ".featviz.lock").unlink()
    assert tree(out) == before
    write_result(out, "last")
    assert text_of(out) == "last"
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("ending", [".part", OLD])
def test_what_is_left_over_stays_while_its_lock_is_held(ending: str, out: Path) -> None:
    """A process that still runs may be at work there, whatever the lock of the folder
    says."""
    write_result(out, "earlier")
    remains = Folder.open(out.parent).new(hidden_name(out.name, ending))
    with locked_new(remains, "left"):
        write_result(out, "new")
        assert remains.path.exists()
        assert text_of(out) == "new"
    write_result(out, "newer")
    assert list(out.parent.iterdir()) == [out]
    assert text_of(out) == "newer"
