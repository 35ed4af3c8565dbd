"""Worker processes: results in order, whatever becomes of a worker, and no process left
behind."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Event

import pytest
import torch

from featviz.errors import StoreError
from featviz.run import workers
from featviz.run.workers import WorkerDiedError, in_processes

pytestmark = [
    pytest.mark.skipif(
        not workers.can_fork(), reason="workers are forked on Linux alone"
    ),
    pytest.mark.medium,
]


def squares(numbers: Iterator[int]) -> Iterable[tuple[int, int]]:
    """Each number's square, and the process that computed it; the first one takes
    longest."""
    for number in numbers:
        time.sleep(0.2 if number == 0 else 0)
        yield number**2, os.getpid()


def failed(number: int, error: WorkerDiedError) -> tuple[int, str]:
    """What stands for a number whose worker died."""
    return number, error.message


def test_results_come_in_order_from_several_processes() -> None:
    """The number that takes longest comes first all the same, and this process computes
    none."""
    results = in_processes(range(9), squares, 3, Event(), failed)
    values, processes = zip(*results, strict=True)
    assert values == (0, 1, 4, 9, 16, 25, 36, 49, 64)
    assert len(set(processes)) == 3
    assert os.getpid() not in processes
    assert multiprocessing.active_children() == []


class Ended:
    """Says so when it is collected, being in a cycle with itself."""

    def __init__(self, ended: list[int]) -> None:
        self.itself = self
        self.ended = ended

    def __del__(self) -> None:
        self.ended.append(1)


def test_a_worker_collects_nothing_of_its_parent() -> None:
    """The end of an object with threads, which a fork does not copy, would wait for
    ever."""
    ended: list[int] = []

    def collected(numbers: Iterator[int]) -> Iterable[int]:
        for _ in numbers:
            gc.collect()
            yield len(ended)

    gc.disable()
    Ended(ended)
    try:
        in_workers = set(in_processes(range(4), collected, 2, Event(), failed))
    finally:
        gc.enable()
    gc.collect()
    assert in_workers == {0}
    assert ended == [1]


def test_each_worker_has_one_torch_thread() -> None:
    """The threads of OpenMP do not survive a fork; a second one would hang."""

    def threads(numbers: Iterator[int]) -> Iterable[int]:
        for _ in numbers:
            torch.rand(512, 512) @ torch.rand(512, 512)
            yield torch.get_num_threads()

    assert set(in_processes(range(4), threads, 2, Event(), failed)) == {1}


def test_a_worker_that_dies_costs_its_number_alone(tmp_path: Path) -> None:
    """The number is tried once more, by itself; then it fails, and all others are
    there."""
    tries = tmp_path / "tries"

    def dying(numbers: Iterator[int]) -> Iterable[tuple[int, str]]:
        for number in numbers:
            if number == 2:
                with tries.open("a") as file:
                    file.write("x")
                os.kill(os.getpid(), signal.SIGKILL)
            yield number, ""

    results = dict(in_processes(range(6), dying, 2, Event(), failed))
    assert list(results) == list(range(6))
    assert "SIGKILL" in results.pop(2)
    assert set(results.values()) == {""}
    assert tries.read_text() == "xx"


def test_a_number_that_fails_once_is_done_the_second_time(tmp_path: Path) -> None:
    """Whatever took the memory at first, the result is there."""
    mark = tmp_path / "mark"

    def unlucky(numbers: Iterator[int]) -> Iterable[tuple[int, str]]:
        for number in numbers:
            if number == 1 and not mark.exists():
                mark.touch()
                os._exit(7)
            yield number, ""

    results = list(in_processes(range(4), unlucky, 2, Event(), failed))
    assert results == [(number, "") for number in range(4)]


def test_what_a_worker_raises_ends_the_run() -> None:
    """The error arrives with its message and hint, and the workers are gone."""

    def full(numbers: Iterator[int]) -> Iterable[int]:
        for number in numbers:
            if number == 3:
                raise StoreError("no space left", "make room")
            yield number

    with pytest.raises(StoreError, match="no space left") as caught:
        list(in_processes(range(100), full, 2, Event(), failed))
    assert caught.value.hint == "make room"
    assert multiprocessing.active_children() == []


def test_a_bug_in_a_worker_shows_where_it_is() -> None:
    """The traceback of the worker is a note on the error."""

    def buggy(numbers: Iterator[int]) -> Iterable[int]:
        for number in numbers:
            yield 1 // number

    with pytest.raises(ZeroDivisionError) as caught:
        list(in_processes([0], buggy, 1, Event(), failed))
    assert "yield 1 // number" in caught.value.__notes__[0]


def test_a_stopped_run_keeps_what_has_begun() -> None:
    """After `stop` no number is handed out; those at work are finished and yielded, in
    order."""
    stop = Event()
    results = []

    def slow(numbers: Iterator[int]) -> Iterable[int]:
        for number in numbers:
            time.sleep(0.05)
            yield number

    for number in in_processes(range(1000), slow, 2, stop, failed):
        results.append(number)
        stop.set()
    assert 1 <= len(results) < 20
    assert results == list(range(len(results)))


def test_a_stopped_run_tries_nothing_again(tmp_path: Path) -> None:
    """An image whose worker died meanwhile is missing, and not failed."""
    tries = tmp_path / "tries"

    def dying(numbers: Iterator[int]) -> Iterable[tuple[int, str]]:
        for number in numbers:
            if number == 1:
                tries.write_text(tries.read_text() + "x")
                os._exit(7)
            yield number, ""

    tries.touch()
    stop = Event()
    results = []
    for result in in_processes(range(4), dying, 1, stop, failed):
        results.append(result)
        stop.set()
    assert results == [(0, "")]
    assert tries.read_text() == "x"


def test_what_workers_log_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    """Progress bars and `--json` know one stream of messages, that of the parent."""

    def talking(numbers: Iterator[int]) -> Iterable[int]:
        for number in numbers:
            logging.getLogger("featviz.images").warning("number %d", number)
            yield number

    list(in_processes(range(3), talking, 2, Event(), failed))
    assert sorted(caplog.messages) == ["number 0", "number 1", "number 2"]


def test_tracebacks_of_workers_are_logged_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """-v shows why an image failed, whichever process had it."""

    def stumbling(numbers: Iterator[int]) -> Iterable[int]:
        for number in numbers:
            try:
                raise KeyError("lost")
            except KeyError:
                logging.getLogger("featviz.run").warning("it failed", exc_info=True)
            yield number

    list(in_processes(range(1), stumbling, 1, Event(), failed))
    assert "in stumbling" in caplog.text
    assert "KeyError: 'lost'" in caplog.text


def test_workers_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is memory for, but never none."""
    monkeypatch.setattr(workers, "_available_bytes", lambda: workers.SPARE_BYTES + 1000)
    assert workers.count_fitting(8, bytes_each=300) == 3
    assert workers.count_fitting(2, bytes_each=300) == 2
    assert workers.count_fitting(8, bytes_each=5000) == 1
