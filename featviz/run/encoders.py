"""What goes on beside the model: encoders behind a queue that is bounded in bytes, and
readers of what is needed next."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition
from typing import Any, NamedTuple, TypeVar

import torch

K = TypeVar("K")
T = TypeVar("T")

QUEUE_BYTES = 64 * 2**20  # tiles that may wait for an encoder
STEP_BACK = sys.platform == "linux" and hasattr(os, "nice")
"""Whether threads have a niceness of their own; elsewhere it would be the whole
process."""

NICENESS = 10
"""How far the threads step back (Linux's scale of 0 to 19): torch's are to find every
core free. At 19 vgg16 takes 5 to 10 % less, but beside two busy programs a run takes
twice as long."""


class Task(NamedTuple):
    """What waits for a thread."""

    size: int
    """Bytes that it holds until it is done."""
    work: Callable[[], Any]
    future: Future[Any]


class Background:
    """Runs tasks in threads that step back before all others (on Linux). Whoever has to
    wait for them runs those that have not begun: so they are done even where other
    programs take the cores, and no more than `max_bytes` are on their way.
    `shared_cores` makes one.

    A plain ThreadPoolExecutor would do neither: a task that waits in its queue can be
    cancelled, but not taken over by the thread that needs its result."""

    def __init__(self, workers: int, max_bytes: int) -> None:
        """Begin without any thread."""
        self.max_bytes = max_bytes
        step_back: Any = (
            {"initializer": os.nice, "initargs": (NICENESS,)} if STEP_BACK else {}
        )
        self.pool = ThreadPoolExecutor(workers, "featviz-writer", **step_back)
        self._done = Condition()  # notified when a task is done, and its bytes are free
        self._waiting: deque[Task] = deque()
        self._bytes = 0  # of tasks that wait or run

    def submit(self, size: int, work: Callable[[], T]) -> Future[T]:
        """Run `work`, which holds `size` bytes; one larger than the bound goes alone.
        While there is no room, this runs other tasks."""
        limit = max(self.max_bytes, size)
        while True:
            with self._done:
                if self._bytes + size <= limit:
                    self._bytes += size
                    break
            if not self.help():  # all tasks are running
                with self._done:
                    self._done.wait_for(lambda: self._bytes + size <= limit)
        future: Future[T] = Future()
        self._waiting.append(Task(size, work, future))
        self.pool.submit(self.help)
        return future

    def result(self, future: Future[T]) -> T:
        """What a task returned, or the exception that it raised; runs other tasks until
        it is done."""
        while not future.done() and self.help():
            pass
        return future.result()

    def help(self) -> bool:
        """Run the task that has waited longest, unless it was cancelled; whether there
        was one. It ends even where a caller who helps is interrupted."""
        try:
            task = self._waiting.popleft()
        except IndexError:
            return False
        future = task.future
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(task.work())
        except Exception as error:
            future.set_exception(error)
        except BaseException:
            # Ctrl-C, which is the helping thread's: it ends, and the task has not
            # failed by itself
            if not future.done():
                future.set_exception(CancelledError())
            raise
        finally:
            with self._done:
                self._bytes -= task.size
                self._done.notify_all()
        return True


def usable_cores() -> int:
    """The cores that this process may use: its affinity, and the quota of its control
    group."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    # "200000 100000": 200 ms of processor time in each period of 100 ms are two cores
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


class AtOnce:
    """The encoder of a worker process: each task runs where it is submitted, since a
    second thread would only wait for Python's lock."""

    def submit(self, size: int, work: Callable[[], T]) -> Future[T]:
        """Run `work`, and keep what it returned or raised; `size` does not matter."""
        future: Future[T] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    def result(self, future: Future[T]) -> T:
        """What a task returned, or the exception that it raised."""
        return future.result()


@contextmanager
def shared_cores(
    threads: int | None = None, max_bytes: int = QUEUE_BYTES
) -> Iterator[Background]:
    """Encoders beside the model: `threads`, or a quarter of the cores, at least two.
    Leaving the block waits for all tasks, also after an exception.

    Where threads can step back (Linux) torch gets all cores, and the encoders what it
    leaves. Else it leaves them a quarter of the cores for as long as this lasts: each
    of its operations waits for the slowest of its threads. A run never decides by what
    it measures, and so gives the same values each time."""
    cores = usable_cores()
    quarter = max(1, cores // 4)
    before = torch.get_num_threads()
    available = cores if STEP_BACK else cores - quarter
    torch.set_num_threads(max(1, min(before, available)))
    background = Background(threads or max(2, quarter), max_bytes)
    try:
        yield background
    finally:
        try:
            while background.help():
                pass
        finally:
            background.pool.shutdown(wait=True)
            torch.set_num_threads(before)


def read_ahead(
    items: Iterable[K], read: Callable[[K], T], readers: int = 1, ahead: int = 1
) -> Generator[tuple[K, Callable[[], T]], None, None]:
    """Each item, with a function that gives what was read of it or raises what `read`
    raised: `readers` threads read it, and the next `ahead` items while the caller is
    busy.

    Closing it waits for what is being read, and drops the rest.
    """
    pool = ThreadPoolExecutor(readers, "featviz-reader")
    waiting = deque[tuple[K, Future[T]]]()
    try:
        for item in items:
            waiting.append((item, pool.submit(read, item)))
            if len(waiting) > ahead:
                first, future = waiting.popleft()
                yield first, future.result
        for first, future in waiting:
            yield first, future.result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
