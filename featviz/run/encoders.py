"""What goes on beside the model: encoders behind a queue that is bounded in bytes, and
readers of what is needed next.

These threads serve what no worker processes divide (`run/workers.py`): a few images, a
GPU, TensorBoard. In a worker process everything is done in one thread (`InRows`)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Condition
from typing import TypeAlias, TypeVar

K = TypeVar("K")
T = TypeVar("T")

QUEUE_BYTES = 64 * 2**20  # tiles that may wait for an encoder
ROW_BYTES = 8 * 2**20  # tiles that a worker process gathers


class Background:
    """Runs tasks in threads. No more than `max_bytes` are on their way: a model that is
    faster than its encoders would fill the memory with tiles."""

    def __init__(self, threads: int, max_bytes: int) -> None:
        """Begin without any thread; `shared_cores` also ends them."""
        self.pool = ThreadPoolExecutor(threads, "featviz-writer")
        self.max_bytes = max_bytes
        self._bytes = 0  # of tasks that wait or run
        self._freed = Condition()

    def submit(self, size: int, work: Callable[[], T]) -> Future[T]:
        """Run a task in a thread, after those that were submitted before it.

        Args:
            size: bytes that the task holds until it is done. This waits until there is
                room for them; a task larger than the bound goes alone.
        """
        limit = max(self.max_bytes, size)
        with self._freed:
            self._freed.wait_for(lambda: self._bytes + size <= limit)
            self._bytes += size
        future = self.pool.submit(work)
        # also called for a task that is cancelled
        future.add_done_callback(lambda _: self._free(size))
        return future

    def _free(self, size: int) -> None:
        """Give the bytes of a task back, which is done, has failed or was cancelled."""
        with self._freed:
            self._bytes -= size
            self._freed.notify_all()


class InRows:
    """The encoder of a worker process, which runs tasks in its only thread: a second one
    would wait for Python's lock.

    Tasks are gathered, and then run in a row. A task between two layers of the model
    would find its code and its data in none of the core's caches; in a row, an image of
    resnet18 takes a tenth less of a core."""

    def __init__(self, max_bytes: int = ROW_BYTES) -> None:
        """Begin without any task."""
        self.max_bytes = max_bytes
        self._bytes = 0  # of tasks that wait
        self._tasks: list[Callable[[], None]] = []

    def submit(self, size: int, work: Callable[[], T]) -> Future[T]:
        """Run a task when `run` is called, or as soon as tasks hold too much.

        Args:
            size: bytes that the task holds until it is done.
        """
        future: Future[T] = Future()
        self._tasks.append(partial(_complete, future, work))
        self._bytes += size
        if self._bytes > self.max_bytes:
            self.run()
        return future

    def run(self) -> None:
        """Run all tasks that wait, in the order in which they were submitted."""
        tasks = self._tasks
        self._tasks = []
        self._bytes = 0
        for task in tasks:
            task()


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work`, and keep what it returned or raised, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


Encoders: TypeAlias = Background | InRows


def usable_cores() -> int:
    """The cores that this process may use: its affinity, and the quota of its control
    group."""
    if not hasattr(os, "sched_getaffinity"):  # macOS and Windows
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    # "200000 100000": 200 ms of processor time in each period of 100 ms are two cores
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


@contextmanager
def shared_cores(
    threads: int | None = None, max_bytes: int = QUEUE_BYTES
) -> Iterator[Background]:
    """Encoders beside the model. Leaving the block waits for all tasks, also after an
    exception.

    Args:
        threads: how many; None takes a quarter of the cores, at least two.
        max_bytes: that tasks may hold together.
    """
    background = Background(threads or max(2, usable_cores() // 4), max_bytes)
    try:
        yield background
    finally:
        background.pool.shutdown(wait=True)


def read_ahead(
    items: Iterable[K], read: Callable[[K], T], readers: int = 1, ahead: int = 1
) -> Generator[Future[T], None, None]:
    """What is read of each item, in their order. Threads read while the caller is busy.

    Closing it waits for what is being read, and drops the rest.

    Args:
        read: what it raises, the future raises where its result is asked for.
        readers: how many threads.
        ahead: how many items behind the one that the caller has are being read.
    """
    pool = ThreadPoolExecutor(readers, "featviz-reader")
    waiting = deque[Future[T]]()
    try:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) > ahead:
                yield waiting.popleft()
        yield from waiting
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
