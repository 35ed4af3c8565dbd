"""Encoders make and write the files of an image, while the model runs on the next image.

`Background` has threads, and a queue that is bounded in bytes. It serves runs that are
not divided among worker processes (`run/workers.py`): those of a few images, on a GPU, or
with TensorBoard. A worker process does everything in its one thread (`InRows`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

QUEUE_BYTES = 64 * 2**20  # the most bytes of tiles that wait for an encoder
ROW_BYTES = 8 * 2**20  # the most bytes of tiles that a worker process gathers


class Background:
    """Runs tasks in threads. Unfinished tasks hold no more than `max_bytes`: without this
    bound, a model that is faster than the encoders would fill the memory with tiles."""

    def __init__(self, threads: int, max_bytes: int) -> None:
        """Make the object; threads start with the first tasks. `encoder_threads` ends
        them."""
        self.pool = ThreadPoolExecutor(threads, "featviz-writer")
        self.max_bytes = max_bytes
        self._sizes: dict[Future[Any], int] = {}
        """The bytes of each unfinished task; `submit` removes finished ones."""
        self._bytes = 0  # the sum of `_sizes`

    def submit(self, size: int, work: Callable[[], T]) -> Future[T]:
        """Give a task to the threads, which start tasks in the order of submission. Waits
        until there is room for the task. Only one thread may call this at a time.

        Args:
            size: the bytes that the task holds until it is done. A task with more than
                `max_bytes` waits until all others are done.
            work: the task.
        """
        limit = max(self.max_bytes, size)
        while self._bytes + size > limit:
            # done, failed or cancelled
            ended = [future for future in self._sizes if future.done()]
            if not ended:
                wait(self._sizes, return_when=FIRST_COMPLETED)
            for future in ended:
                self._bytes -= self._sizes.pop(future)
        task = self.pool.submit(work)
        self._sizes[task] = size
        self._bytes += size
        return task


class InRows:
    """The encoder of a worker process. It runs tasks in the only thread of the process: a
    second thread would wait for Python's lock.

    Tasks are gathered, and then run in a row. If each ran between two layers of the
    model, its code and data would not be in the caches of the core; in a row, an image of
    resnet18 takes a tenth less time."""

    def __init__(self, max_bytes: int = ROW_BYTES) -> None:
        """Begin without any task."""
        self.max_bytes = max_bytes
        self._bytes = 0  # the bytes of the tasks that wait
        self._tasks: list[Callable[[], None]] = []

    def submit(self, size: int, work: Callable[[], T]) -> Future[T]:
        """Add a task. It runs when `run` is called, or when the tasks hold more than
        `max_bytes`.

        Args:
            size: the bytes that the task holds until it is done.
            work: the task.
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
    """Run `work`, and put its result or its exception into `future`. Nothing is run if
    `future` was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


Encoders: TypeAlias = Background | InRows


def usable_cores() -> int:
    """How many cores this process may use, by its affinity and the quota of its control
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
def encoder_threads(
    threads: int | None = None, max_bytes: int = QUEUE_BYTES
) -> Iterator[Background]:
    """Give the block encoders in threads. Leaving the block waits for all tasks, also
    after an exception.

    Args:
        threads: the number of threads; None takes a quarter of the cores, at least two.
        max_bytes: the most bytes that all unfinished tasks hold.
    """
    background = Background(threads or max(2, usable_cores() // 4), max_bytes)
    try:
        yield background
    finally:
        background.pool.shutdown(wait=True)
