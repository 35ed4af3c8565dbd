"""Worker threads behind a queue that is bounded in bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from featviz.errors import ImageError
from featviz.records import Sample
from featviz.run.encoders import (
    Background,
    InRows,
    encoder_threads,
    usable_cores,
)
from featviz.run.visit import read_jobs

SOON = 0.15
"""Seconds after which something that was to happen at once is taken not to."""
LONG = 5.0
"""Seconds after which a test gives up."""


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Tasks wait at it; it opens at the latest when the test ends."""
    event = threading.Event()
    yield event
    event.set()


def kept_busy(
    background: Background, gate: threading.Event, size: int = 1
) -> Future[bool]:
    """A task that has its only thread, and waits at the gate."""
    busy = background.submit(size, lambda: gate.wait(LONG))
    wait_until(busy.running)
    return busy


def started(action: Callable[[], object]) -> threading.Event:
    """Run something in a thread; the event is set when it is done."""
    done = threading.Event()

    def run() -> None:
        action()
        done.set()

    threading.Thread(target=run, daemon=True).start()
    return done


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 4),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("900000 100000", 4),
    ],
)
def test_a_control_group_may_allow_less_than_the_cores(
    quota: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time of a processor in each period of time; never more than there are."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: quota)
    assert usable_cores() == cores


def test_all_tasks_are_run_before_the_block_ends() -> None:
    """Leaving the block waits for every task, whatever its size, also after an
    exception."""
    ran: list[int] = []
    with pytest.raises(KeyError, match="stop"), encoder_threads(2, 100) as background:
        for i in range(50):
            background.submit(i, partial(ran.append, i))
        raise KeyError("stop")
    assert sorted(ran) == list(range(50))


@pytest.mark.medium
def test_submit_waits_where_there_is_no_room(gate: threading.Event) -> None:
    """What would exceed the bound waits until tasks under way are done; then it runs
    after those that were submitted before it."""
    ran: list[int] = []
    with encoder_threads(1, 10) as background:
        kept_busy(background, gate, 4)
        background.submit(6, partial(ran.append, 1))
        third = started(lambda: background.submit(3, partial(ran.append, 2)))
        assert not third.wait(SOON)
        assert ran == []
        gate.set()
        assert third.wait(LONG)
    assert ran == [1, 2]


def test_a_cancelled_task_frees_its_bytes(gate: threading.Event) -> None:
    """The files of an image that is given up are not written, and hold no room."""
    with encoder_threads(1, 10) as background:
        kept_busy(background, gate, 4)
        cancelled = background.submit(6, lambda: None)
        assert cancelled.cancel()
        assert started(lambda: background.submit(6, lambda: None)).wait(LONG)
        gate.set()


def test_what_a_task_raises_is_raised_where_its_result_is_asked_for() -> None:
    """And not where it is submitted."""
    with encoder_threads(1, 10) as background:
        failing = background.submit(1, lambda: 1 // 0)
        fine = background.submit(1, lambda: 1)
        with pytest.raises(ZeroDivisionError):
            failing.result()
        assert fine.result() == 1


def test_tasks_in_rows_wait_until_they_hold_too_much() -> None:
    """Then all of them run, in their order, those of equal size as well; or when they
    are told to."""
    ran: list[int] = []
    encoders = InRows(max_bytes=10)
    encoders.submit(4, partial(ran.append, 1))
    encoders.submit(6, partial(ran.append, 2))
    assert ran == []
    encoders.submit(1, partial(ran.append, 3))
    assert ran == [1, 2, 3]
    encoders.submit(10, partial(ran.append, 4))
    assert ran == [1, 2, 3]
    encoders.run()
    assert ran == [1, 2, 3, 4]


def test_a_task_in_a_row_that_fails_stops_none_behind_it() -> None:
    """What it raises is raised where its result is asked for."""
    encoders = InRows()
    failing = encoders.submit(1, lambda: 1 // 0)
    fine = encoders.submit(1, lambda: 1)
    encoders.run()
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert fine.result() == 1


def test_a_task_in_a_row_that_was_cancelled_is_not_run() -> None:
    """It would write into the folder of an image that was given up."""
    ran: list[int] = []
    encoders = InRows()
    cancelled = encoders.submit(1, partial(ran.append, 1))
    assert cancelled.cancel()
    encoders.run()
    assert ran == []


@pytest.mark.medium
def test_task_larger_than_the_bound_goes_alone(gate: threading.Event) -> None:
    """An oversize task is taken when nothing else is under way, and nothing beside it."""
    with encoder_threads(4, 10) as background:
        background.submit(1, lambda: gate.wait(LONG))
        second = threading.Event()
        big = started(lambda: background.submit(99, lambda: second.wait(LONG)))
        assert not big.wait(SOON)
        gate.set()
        assert big.wait(LONG)
        small = started(lambda: background.submit(1, lambda: None))
        assert not small.wait(SOON)
        second.set()
        assert small.wait(LONG)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what threads are to do soon."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def samples_of(*names: object) -> list[Sample]:
    """Images without files."""
    return [Sample(str(name), ()) for name in names]


def test_each_is_read_once_beside_the_caller() -> None:
    """In their order, one ahead of the caller."""
    read: list[tuple[str, bool]] = []

    def twice(sample: Sample) -> str:
        is_main = threading.current_thread() is threading.main_thread()
        read.append((sample.name, is_main))
        return sample.name * 2

    inputs = []
    with closing(read_jobs(samples_of("c", "b", "a"), twice, None, 1)) as jobs:
        for job in jobs:
            inputs.append(job.input)
            ahead = min(len(inputs) + 1, 3)
            wait_until(lambda ahead=ahead: len(read) >= ahead)
            assert len(read) == ahead
    assert inputs == ["cc", "bb", "aa"]
    assert read == [("c", False), ("b", False), ("a", False)]


def test_one_image_is_read_by_the_caller_itself() -> None:
    """A thread would cost a worker process, which gets one at a time."""
    jobs = read_jobs(samples_of(1, 2), lambda _: threading.current_thread(), [1], 1)
    (job,) = jobs
    assert job.number == 1
    assert job.input is threading.main_thread()


def test_what_could_not_be_read_says_so() -> None:
    """The others are read all the same."""

    def share(sample: Sample) -> int:
        if sample.name == "0":
            raise ImageError("0 is damaged")
        return 10 // int(sample.name)

    first, second, third = read_jobs(samples_of(2, 0, 1), share, None, 1)
    assert first.input == 5
    assert second.input is None
    assert isinstance(second.error, ImageError)
    assert third.input == 10


@pytest.mark.medium
def test_what_nobody_takes_is_not_read_after_the_block(gate: threading.Event) -> None:
    """Leaving waits for what is being read, and no thread stays."""
    read: list[str] = []
    begun = threading.Event()

    def wait(sample: Sample) -> None:
        if sample.name != "0":
            begun.set()
            gate.wait(LONG)
        read.append(sample.name)

    with closing(read_jobs(samples_of(*range(5)), wait, None, 4)) as jobs:
        next(jobs)
        assert begun.wait(LONG)
        threading.Timer(SOON, gate.set).start()
    assert read == ["0", "1"]
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("featviz-reader") for name in names)
