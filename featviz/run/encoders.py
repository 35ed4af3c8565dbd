"""Encoders: what is left to do for the files of an image, while the model is at the next
one.

Threads behind a queue that is bounded in bytes (`Background`) serve what no worker
processes divide (`run/workers.py`): a few images, a GPU, TensorBoard. A worker process
does everything in one thread (`InRows`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

QUEUE_BYTES = 64 * 2**20  # tiles that may wait for an encoder
ROW_BYTES = 8 * 2**20  # tiles that a worker process gathers


class Background:
    """Runs tasks in threads. No more than `max_bytes` are on their way: a model that is
    faster than its encoders would fill the memory with tiles."""

    def __init__(self, threads: int, max_bytes: int) -> None:
        """Begin without any thread; `encoder_threads` also ends them."""
        self.pool = ThreadPoolExecutor(threads, "featviz-writer")
        self.max_bytes = max_bytes
        self._sizes: dict[Future[Any], int] = {}
        """Bytes of the tasks that were not found done yet."""
        self._bytes = 0  # their sum

    def submit(self, size: int, work: Callable[[], T]) -> Future[T]:
        """Run a task in a thread, after those that were submitted before it. Tasks come
        from one thread at a time.

        Args:
            size: bytes that the task holds until it is done. This waits until there is
                room for them; a task larger than the bound goes alone.
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
def encoder_threads(
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
