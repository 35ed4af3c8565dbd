"""One writer at a time: what a second command on the same folder says and does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from filelock import FileLock
from runs import refused

from featviz.errors import StoreError
from featviz.records import Shard
from featviz.rundir import LOCK_FILE, locks
from featviz.rundir.locks import held


def test_a_second_one_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    """Host, process and start; nothing waits."""
    message = rf"being written by process {os.getpid()} on .+ since 20"
    refusal = pytest.raises(StoreError, match=message)
    with held(tmp_path / "out"), refusal, held(tmp_path / "out"):
        pytest.fail("two hold one folder")


def test_a_lock_may_not_say_who_holds_it(tmp_path: Path) -> None:
    """On a full disk it is empty."""
    refusal = pytest.raises(StoreError, match="being written by another process")
    with FileLock(tmp_path / LOCK_FILE), refusal, held(tmp_path):
        pytest.fail("two hold one folder")


def test_no_shard_begins_beside_a_whole_run(tmp_path: Path) -> None:
    """It would draw images of that run once more; afterwards it may."""
    out = tmp_path / "out"
    refusal = pytest.raises(StoreError, match="being written by process")
    with held(out), refusal, held(out, Shard(0, 2)):
        pytest.fail("two draw one image")
    with held(out, Shard(0, 2)):
        assert [path.name for path in out.iterdir()] == [".featviz.1-of-2.lock"]


@pytest.mark.parametrize("other", [None, Shard(0, 3), Shard(1, 3), Shard(0, 2)])
def test_beside_a_shard_only_others_of_its_division_write(
    other: Shard | None, tmp_path: Path
) -> None:
    """Parts of another division would draw images of this shard once more."""
    out = tmp_path / "out"
    with held(out, Shard(0, 2)):
        with held(out, Shard(1, 2)):
            locks_held = sorted(path.name for path in out.iterdir())
        assert locks_held == [".featviz.1-of-2.lock", ".featviz.2-of-2.lock"]
        refusal = pytest.raises(StoreError, match="being written by process")
        with refusal, held(out, other):
            pytest.fail("two draw one image")


def test_nothing_is_left_of_a_lock(tmp_path: Path) -> None:
    """A folder that was made for it goes again; one that was there, or has come to hold
    something, stays without the lock."""
    with held(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with held(tmp_path / "there"), held(tmp_path / "full"):
        (tmp_path / "full" / "x").write_text("x")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["full", "there", "x"]


def test_a_lock_that_another_has_made_since_stays(tmp_path: Path) -> None:
    """The folder was moved away and made anew by another process, whose lock is in it."""
    out = tmp_path / "out"
    with held(out):
        out.rename(tmp_path / "moved")
        out.mkdir()
        (out / LOCK_FILE).write_text("process 1 on elsewhere")
    assert (out / LOCK_FILE).read_text() == "process 1 on elsewhere"


def test_a_folder_that_vanishes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that made it removes it between our look and our lock; it goes at the
    end."""
    out = tmp_path / "a" / "out"
    tries = []

    class Late(FileLock):
        """Comes too late the first time."""

        def acquire(self, *arguments: Any, **options: Any) -> Any:
            tries.append(out.exists())
            if len(tries) == 1:
                out.rmdir()
                out.parent.rmdir()
                raise FileNotFoundError(2, "No such file or directory", self.lock_file)
            return super().acquire(*arguments, **options)

    monkeypatch.setattr(locks, "FileLock", Late)
    with held(out):
        assert (out / LOCK_FILE).is_file()
        assert tries == [True, True]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_the_place_of_the_lock_is_refused(
    link: Callable[[Path, Path], object], draw: Run, ran: Path, tmp_path: Path
) -> None:
    """Whatever kind of link: somebody else's folder cannot have a file elsewhere
    emptied."""
    (tmp_path / "precious").write_text("precious")
    link(tmp_path / "precious", ran / LOCK_FILE)
    no_lock = "is no lock of featviz: it is a link, or no regular file"
    refused(draw(ran, "--resume"), 1, f"{ran / LOCK_FILE} {no_lock}")
    assert (tmp_path / "precious").read_text() == "precious"
    assert os.path.lexists(ran / LOCK_FILE)


def test_a_link_that_takes_the_place_of_the_lock_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the lock."""
    precious = tmp_path / "precious"
    out = tmp_path / "out"
    precious.write_text("precious")

    class Late(FileLock):
        """A hard link comes before the lock is taken."""

        def acquire(self, *arguments: Any, **options: Any) -> Any:
            os.link(precious, out / LOCK_FILE)
            return super().acquire(*arguments, **options)

    monkeypatch.setattr(locks, "FileLock", Late)
    with pytest.raises(StoreError, match="is no lock of featviz"), held(out):
        pytest.fail("it is held")
    assert precious.read_text() == "precious"


def test_what_a_lock_file_says_is_shown_tame(tmp_path: Path) -> None:
    """It may come from somebody else: one printable line of bounded length."""
    text = b"\x1b]0;title\x07\n" + b"x" * 3000 + b"\xff"
    with held(tmp_path / "out"):
        (tmp_path / "out" / LOCK_FILE).write_bytes(text)
        with pytest.raises(StoreError) as raised, held(tmp_path / "out"):
            pass
    message = raised.value.message
    assert message.isprintable()
    assert r"\x1b]0;title" in message
    assert len(message) < 400 + len(str(tmp_path))
