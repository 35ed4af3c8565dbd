"""Worker threads behind a queue that is bounded in bytes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import closing
from functools import partial
from threading import get_native_id

import pytest

from featviz.run.encoders import NICENESS, Background, read_ahead, shared_cores

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
    while not busy.running():
        time.sleep(0.001)
    return busy


def started(action: Callable[[], object]) -> threading.Event:
    """Run something in a thread; the event is set when it is done."""
    done = threading.Event()
    threading.Thread(target=lambda: (action(), done.set()), daemon=True).start()
    return done


def test_all_tasks_are_run_before_the_block_ends() -> None:
    """Leaving the block waits for every task, whatever its size, also after an
    exception."""
    ran: list[int] = []
    with pytest.raises(KeyError, match="stop"), shared_cores(2, 100) as background:
        for i in range(50):
            background.submit(i, partial(ran.append, i))
        raise KeyError("stop")
    assert sorted(ran) == list(range(50))


def test_submit_works_where_there_is_no_room(gate: threading.Event) -> None:
    """What would exceed the bound takes the place of tasks that the caller runs
    himself, the one that has waited longest first; those under way he waits for."""
    ran: list[tuple[int, bool]] = []

    def note(number: int) -> None:
        ran.append((number, threading.current_thread() is threading.main_thread()))

    with shared_cores(1, 10) as background:
        kept_busy(background, gate, 4)
        for number in (1, 2):
            background.submit(3, partial(note, number))
        assert ran == []
        background.submit(3, partial(note, 3))
        assert ran == [(1, True)]
        threading.Timer(SOON, gate.set).start()
        start = time.monotonic()
        background.submit(9, partial(note, 4))
        assert ran[:3] == [(1, True), (2, True), (3, True)]
        assert time.monotonic() - start > SOON / 2
    assert [number for number, _ in ran] == [1, 2, 3, 4]


def test_whoever_waits_for_a_task_works(gate: threading.Event) -> None:
    """A result is there although no thread takes the tasks before it, and in their
    order."""
    ran: list[int] = []

    def slow(number: int) -> int:
        ran.append(number)
        return number * 10

    with shared_cores(1, 100) as background:
        busy = kept_busy(background, gate)
        futures = [background.submit(1, partial(slow, number)) for number in range(4)]
        assert background.result(futures[2]) == 20
        assert ran == [0, 1, 2]
        failing = background.submit(1, lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            background.result(failing)
        assert ran == [0, 1, 2, 3]
        assert not busy.done()
        gate.set()
        assert background.result(busy) is True


def test_an_interrupted_helper_leaves_no_task_without_an_end(
    gate: threading.Event,
) -> None:
    """Ctrl-C in a task that the caller runs himself ends the caller, and the task has
    failed."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    sharing = shared_cores(1, 100)
    with pytest.raises(KeyboardInterrupt), sharing as background:
        busy = kept_busy(background, gate)
        futures = [background.submit(1, work) for work in (interrupted, lambda: None)]
        threading.Timer(SOON, gate.set).start()
        background.result(futures[1])
    assert isinstance(futures[0].exception(LONG), CancelledError)
    assert futures[1].done()
    assert busy.result()


def test_task_larger_than_the_bound_goes_alone(gate: threading.Event) -> None:
    """An oversize task is taken when nothing else is under way, and nothing beside it."""
    with shared_cores(4, 10) as background:
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


@pytest.mark.skipif(
    sys.platform != "linux", reason="threads have a niceness of their own on Linux"
)
def test_threads_step_back_and_no_others() -> None:
    """The encoders let torch's threads go first, and readers and whoever waits do not;
    a program that was started with a niceness of its own (`nice`) adds to it, up to
    Linux's 19."""
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    with shared_cores(1, 10) as background:
        theirs = background.submit(
            1, lambda: os.getpriority(os.PRIO_PROCESS, get_native_id())
        )
        while not theirs.done():
            time.sleep(0.001)
    assert theirs.result() == min(mine + NICENESS, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_each_is_read_once_beside_the_caller() -> None:
    """In their order, one ahead; what could not be read says so where it is asked for."""
    read: list[tuple[int, bool]] = []
    seen: list[int | None] = []

    def noted(key: int) -> int:
        read.append((key, threading.current_thread() is threading.main_thread()))
        if key == 2:
            raise KeyError(key)
        return key * 10

    with closing(read_ahead([3, 2, 1], noted)) as reader:
        for key, load in reader:
            try:
                seen.append(load())
            except KeyError:
                seen.append(None)
            while len(read) < min(len(seen) + 1, 3):
                time.sleep(0.001)
            assert len(read) == min(len(seen) + 1, 3), key
    assert seen == [30, None, 10]
    assert read == [(3, False), (2, False), (1, False)]


def test_what_nobody_takes_is_not_read_after_the_block(gate: threading.Event) -> None:
    """Leaving waits for what is being read, and no thread stays."""
    read: list[int] = []
    with closing(
        read_ahead(range(5), lambda key: (gate.wait(LONG), read.append(key)), ahead=4)
    ) as each:
        next(each)
        threading.Timer(SOON, gate.set).start()
    assert read == [0]
    assert not [t for t in threading.enumerate() if t.name.startswith("featviz-reader")]
