"""One writer at a time below a URL, as far as the store can tell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import pytest
from conftest import Outcome
from runs import refused, tree
from stores import URL, put, stored

from featviz.files.urls import Url
from featviz.rundir import LOCK_FILE
from featviz.rundir.store import lock, objects
from featviz.rundir.store.objects import ObjectStore

Run = Callable[..., Outcome]


def test_a_second_run_is_refused_and_told_who_holds_it(featviz: Run, words: list[object]) -> None:
    """Host, process and start, and what to do if it was killed; the lock stays the first one's."""
    with lock.held(ObjectStore(Url.of_run(URL)), 0):
        before = stored()
        done = featviz(*words, "--out", URL)
        refused(done, 1, f"{URL} is being written by process {os.getpid()} on ", " since 20")
        assert f"remove {URL}/{LOCK_FILE}" in done.err and stored() == before
    assert stored() == {}


@pytest.mark.slow
def test_wait_goes_on_when_the_other_one_is_done(
    featviz: Run, words: list[object], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says for whom it waits."""
    monkeypatch.setattr(lock, "_POLL", 0.01)
    holding = lock.held(ObjectStore(Url.of_run(URL)), 0)
    holding.__enter__()

    def let_go() -> None:
        sleep(0.5)
        holding.__exit__(None, None, None)

    thread = Thread(target=let_go)
    thread.start()
    done = featviz(*words, "--out", URL, "--wait", "60")
    thread.join()
    assert done.code == 0 and "; waiting" in done.err
    assert stored() == tree(local)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not name their start")
def test_the_lock_of_a_process_that_is_gone_is_taken_over(
    featviz: Run, words: list[object], local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it ran on this machine, since only there it can be known; else the user must say so."""
    monkeypatch.setattr(lock, "user_cache_path", lambda name: tmp_path / "cache")
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    who = f"process {int(ended.stdout)} on here since 2020-01-01 00:00:00 UTC"
    put(LOCK_FILE, f"{who}\n0123456789abcdef 00\n".encode())
    refused(featviz(*words, "--out", URL), 1, who)
    assert LOCK_FILE in stored()
    put(LOCK_FILE, f"{who}\n{lock._whereabouts()} 00\n".encode())
    done = featviz(*words, "--out", URL)
    assert done.code == 0 and f"{who} has ended without removing its lock" in done.err
    assert stored() == tree(local)


def test_a_lock_that_is_gone_when_it_is_looked_at_is_taken(
    featviz: Run, words: list[object], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ended between the two: nobody is named as the holder of nothing."""
    create, tries = ObjectStore.create, iter([False, False])
    monkeypatch.setattr(ObjectStore, "create", lambda *about: next(tries, True) and create(*about))
    assert featviz(*words, "--out", URL).code == 0
    assert stored() == tree(local) and list(tries) == []


@pytest.mark.parametrize(
    "words_of_lock", [b"", b"\xff\x00\x1b]0;x\x07\n", b"process 1 on \n" * 9999]
)
def test_a_lock_of_nonsense_is_a_lock(
    words_of_lock: bytes, featviz: Run, words: list[object]
) -> None:
    """What it says is shown on one line, without control characters."""
    put(LOCK_FILE, words_of_lock)
    done = featviz(*words, "--out", URL)
    refused(done, 1, f"{URL} is being written by ")
    assert done.err.replace("\n", "").isprintable() and len(done.err) < 1000


def test_a_store_without_conditions_says_so(
    featviz: Run, words: list[object], memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kind that has none, that ignores the condition, or that refuses it: the run goes on."""
    real = type(memory).pipe_file

    def ignoring(self: Any, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        real(self, path, value)

    def unable(self: Any, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        if mode == "create":
            raise OSError(38, "A header you provided implies functionality that is not implemented")
        real(self, path, value)

    for count, (place, name, value) in enumerate(
        [
            (objects, "_CONDITIONAL", set()),
            (type(memory), "pipe_file", ignoring),
            (type(memory), "pipe_file", unable),
        ]
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, value)
            done = featviz(*words, "--out", f"{URL}{count}")
        assert done.code == 0 and "nothing keeps away a second run" in done.err, count
        assert LOCK_FILE not in stored(f"{URL}{count}")
    assert "nothing keeps away" not in featviz(*words, "--out", URL).err
