"""One writer at a time below a URL, as far as the store can tell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import refused, tree
from stores import URL, put, stored

from featviz.files.urls import Url
from featviz.records import Shard
from featviz.rundir import LOCK_FILE, store


def test_a_second_run_is_refused_and_told_who_holds_it(featviz: Run, words: list[object]) -> None:
    """Host, process and start, and what to do if it was killed; the lock stays the first one's."""
    with store.held(Url.of_run(URL), None):
        before = stored()
        for more in ((), ("--shard", "1/2")):
            done = featviz(*words, "--out", URL, *more)
            refused(done, 1, f"{URL} is being written by process {os.getpid()} on ", " since 20")
            assert f"remove {URL}/{LOCK_FILE}" in done.err and stored() == before
    assert stored() == {}


def test_shards_hold_a_lock_each(featviz: Run, words: list[object], local: Path) -> None:
    """Others of the same division may write beside them, and nobody else; the last one to end has
    run.json tell all."""
    with store.held(Url.of_run(URL), Shard(0, 2)):
        for more in ((), ("--shard", "1/2"), ("--shard", "1/3")):
            refused(featviz(*words, "--out", URL, *more), 1, f"remove {URL}/.featviz.1-of-2.lock")
        assert featviz(*words, "--out", URL, "--shard", "2/2").code == 0
    done = featviz(*words, "--out", URL, "--shard", "2/2")
    refused(done, 1, f"{URL} holds 2 images of shard 2/2")
    assert featviz(*words, "--out", URL, "--shard", "1/2").code == 0
    assert stored() == tree(local)


@pytest.mark.parametrize("words_of_lock", [b"", b"\xff\x00\x1b]0;x\x07\n" + b"1 on \n" * 9999])
def test_a_lock_of_nonsense_is_a_lock(
    words_of_lock: bytes, featviz: Run, words: list[object]
) -> None:
    """What it says is shown on one line, without control characters."""
    put(LOCK_FILE, words_of_lock)
    done = featviz(*words, "--out", URL)
    refused(done, 1, f"{URL} is being written by ")
    assert done.err.replace("\n", "").isprintable() and len(done.err) < 1000


@pytest.mark.parametrize("refusing", [False, True])
def test_a_store_without_conditions_is_asked_before(
    refusing: bool, featviz: Run, words: list[object], memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ignores the condition, or refuses it, has a lock all the same."""
    real = type(memory).pipe_file

    def pipe_file(self: Any, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        if refusing and mode == "create":
            raise OSError(38, "A header you provided implies functionality that is not implemented")
        real(self, path, value)

    monkeypatch.setattr(type(memory), "pipe_file", pipe_file)
    with store.held(Url.of_run(URL), None):
        refused(featviz(*words, "--out", URL), 1, "is being written by process")
    assert featviz(*words, "--out", URL).code == 0 and LOCK_FILE not in stored()
