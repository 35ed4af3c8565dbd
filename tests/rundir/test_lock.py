"""One writer at a time: what a second command on the same folder says and does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from conftest import Outcome
from filelock import FileLock
from runs import SMALL, check_whole, refused, tree

from featviz.errors import StoreError
from featviz.rundir import LOCK_FILE, lock

Run = Callable[..., Outcome]


def test_a_second_one_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    """Host, process and start; nothing waits."""
    with (
        lock.held(tmp_path / "out"),
        pytest.raises(StoreError, match=rf"being written by process {os.getpid()} on .+ since 20"),
        lock.held(tmp_path / "out"),
    ):
        pytest.fail("two hold one folder")


@pytest.mark.parametrize("command", ["run", "archive", "kernels", "merge", "audit", "report"])
def test_every_command_that_writes_a_folder_asks_for_it(
    command: str, featviz: Run, tiny_file: Path, photos: Path, ran: Path, tmp_path: Path
) -> None:
    """Exit code 1 and one line; what is there stays, the lock of the other one too."""
    busy, packed = tmp_path / "busy", tmp_path / "busy.zip"
    commands = {
        "run": ["run", tiny_file, photos, *SMALL, "--out", busy],
        "archive": ["run", tiny_file, photos, *SMALL, "--archive", packed],
        "kernels": ["kernels", tiny_file, "--out", busy],
        "merge": ["merge", ran, "--out", busy],
        "audit": ["audit", tiny_file, photos, "--out", busy],
        "report": ["report", ran, "--out", busy],
    }
    with lock.held(busy), lock.held_file(packed, None, "--archive"):
        before = sorted(tmp_path.rglob("*"))
        refused(featviz(*commands[command]), 1, f"is being written by process {os.getpid()} on ")
        assert sorted(tmp_path.rglob("*")) == before
    assert featviz(*commands[command]).code == 0


@pytest.mark.slow
def test_wait_goes_on_when_the_other_one_is_done(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """`--wait` says for whom it waits, and then draws."""
    out = tmp_path / "out"
    holding = lock.held(out)
    holding.__enter__()

    def let_go() -> None:
        time.sleep(0.5)
        holding.__exit__(None, None, None)

    thread = Thread(target=let_go)
    thread.start()
    done = featviz("run", tiny_file, photos, *SMALL, "--out", out, "--wait", "60")
    thread.join()
    assert done.code == 0 and "on " in done.err and "; waiting" in done.err
    check_whole(out)
    assert not (out / LOCK_FILE).exists()


def test_nothing_is_left_of_a_lock(tmp_path: Path) -> None:
    """A folder that was made for it goes again; one that was there, or has come to hold
    something, stays without the lock."""
    with lock.held(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with lock.held(tmp_path / "there"), lock.held(tmp_path / "full"):
        (tmp_path / "full" / "x").write_text("x")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["full", "there", "x"]


def test_a_lock_that_another_has_made_since_stays(tmp_path: Path) -> None:
    """The folder was moved away and made anew by another process, whose lock is in it."""
    out = tmp_path / "out"
    with lock.held(out):
        out.rename(tmp_path / "moved")
        out.mkdir()
        (out / LOCK_FILE).write_text("process 1 on elsewhere")
    assert (out / LOCK_FILE).read_text() == "process 1 on elsewhere"


def test_a_folder_that_vanishes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that made it removes it between our look and our lock; it goes at the end."""
    out, tries = tmp_path / "a" / "out", []

    class Late(FileLock):
        """Comes too late the first time."""

        def acquire(self, *arguments: Any, **options: Any) -> Any:
            tries.append(out.exists())
            if len(tries) == 1:
                out.rmdir()
                out.parent.rmdir()
                raise FileNotFoundError(2, "No such file or directory", self.lock_file)
            return super().acquire(*arguments, **options)

    monkeypatch.setattr(lock, "FileLock", Late)
    with lock.held(out):
        assert (out / LOCK_FILE).is_file() and tries == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_process_holds_nobody_up(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path
) -> None:
    """Its file is left, the system's lock is not; the next run takes it and removes it."""
    whole = tree(ran)
    (ran / LOCK_FILE).write_text("process 1 on elsewhere since 2020-01-01 00:00:00 UTC\n")
    assert featviz("report", ran, "--out", ran.parent / "pages").code == 0
    done = featviz("run", tiny_file, photos, *SMALL, "--out", ran, "--resume")
    assert done.code == 0 and tree(ran) == whole
    (ran / LOCK_FILE).write_text("")
    assert featviz("run", tiny_file, photos, *SMALL, "--out", ran, "--overwrite").code == 0
    assert tree(ran) == whole


def test_a_link_in_the_place_of_the_lock_is_not_followed(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Somebody else's folder cannot have a file elsewhere emptied."""
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out" / LOCK_FILE).symlink_to(tmp_path / "precious")
    done = featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "out")
    assert done.code == 1 and "Traceback" not in done.err
    assert (tmp_path / "precious").read_text() == "precious"


def test_what_a_lock_file_says_is_shown_tame(tmp_path: Path) -> None:
    """It may come from somebody else: one printable line of bounded length."""
    with lock.held(tmp_path / "out"):
        (tmp_path / "out" / LOCK_FILE).write_bytes(b"\x1b]0;title\x07\n" + b"x" * 3000 + b"\xff")
        with pytest.raises(StoreError) as raised, lock.held(tmp_path / "out"):
            pass
    message = raised.value.message
    assert message.isprintable() and r"\x1b]0;title" in message
    assert len(message) < 400 + len(str(tmp_path))
