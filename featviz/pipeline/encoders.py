"""What goes on beside the model: encoders behind a queue that is bounded in bytes, and a reader of
what is needed next."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, get_native_id
from types import TracebackType
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


STEP_BACK = sys.platform == "linux"
"""Whether threads have a niceness of their own; elsewhere it would be the whole process."""

NICENESS = 10
"""How far the threads step back (Linux's scale of 0 to 19): torch's are to find every core free. At
19 vgg16 takes 5 to 10 % less, but beside two busy programs a run takes twice as long."""


@dataclass(frozen=True)
class _Task:
    work: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        """Do it, unless it was cancelled. It ends even where a caller who helps is interrupted."""
        try:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(self.work())
        except BaseException as error:
            if not self.future.done():
                self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise


class Background:
    """Runs tasks in threads that step back before all others (on Linux). Whoever has to wait for
    them runs those that have not begun: so they are done even where other programs take the cores,
    and no more than `max_bytes` are on their way.

    Leaving the `with` block waits for all tasks; after an exception, those not begun are dropped.
    """

    def __init__(self, workers: int, max_bytes: int) -> None:
        """Begin without any thread."""
        self.max_bytes = max_bytes
        self._pool = ThreadPoolExecutor(workers, "featviz-writer", initializer=_step_back)
        self._room = Condition()
        self._waiting: deque[_Task] = deque()
        self._held = 0

    def submit(self, size: int, work: Callable[[], T]) -> Future[T]:
        """Run `work`, which holds `size` bytes; one larger than the bound goes alone. While there
        is no room, this runs other tasks."""
        while not self._take(size):
            if not self._help():
                with self._room:
                    self._room.wait_for(lambda: self._fits(size))
        future: Future[T] = Future()
        future.add_done_callback(lambda _: self._give_back(size))
        self._waiting.append(_Task(work, future))
        self._pool.submit(self._help)
        return future

    def result(self, future: Future[T]) -> T:
        """What a task gave, or the exception that it raised; runs other tasks until it is done."""
        while not future.done() and self._help():
            pass
        return future.result()

    def _help(self) -> bool:
        """Run the task that has waited longest; whether there was one."""
        try:
            task = self._waiting.popleft()
        except IndexError:
            return False
        task.run()
        return True

    def _fits(self, size: int) -> bool:
        return not self._held or self._held + size <= self.max_bytes

    def _take(self, size: int) -> bool:
        with self._room:
            fits = self._fits(size)
            self._held += size if fits else 0
            return fits

    def _give_back(self, size: int) -> None:
        with self._room:
            self._held -= size
            self._room.notify_all()

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for task in tuple(self._waiting):
                task.future.cancel()
        while self._help():
            pass
        self._pool.shutdown(wait=True)


class ReadAhead(Generic[K, T]):
    """Reads in threads what is needed next, while the caller is busy.

    Leaving the `with` block waits for what is being read, and drops the rest.
    """

    def __init__(self, read: Callable[[K], T], readers: int = 1) -> None:
        """Begin without any thread.

        Args:
            read: is asked for each key, by several threads at once if there are several readers.
        """
        self._read = read
        self._pool = ThreadPoolExecutor(readers, "featviz-reader")
        self._begun: dict[K, Future[T]] = {}

    def begin(self, key: K) -> None:
        """Read this after all that was begun before, unless it was."""
        if key not in self._begun:
            self._begun[key] = self._pool.submit(self._read, key)

    def take(self, key: K) -> T:
        """What was read, or what `read` raised; what was not begun is read now."""
        begun = self._begun.pop(key, None)
        return self._read(key) if begun is None else begun.result()

    def __enter__(self) -> ReadAhead[K, T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _step_back() -> None:
    if STEP_BACK:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), NICENESS)
