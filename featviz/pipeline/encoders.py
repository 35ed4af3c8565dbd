"""What goes on beside the model: encoders behind a queue that is bounded in bytes, and a reader of
what is needed next."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Condition, get_native_id
from types import TracebackType
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


NICENESS = 10
"""How far encoders step back where torch takes all cores (Linux's scale of 0 to 19)."""


class Background:
    """Runs tasks in threads; `submit` waits while more than `max_bytes` are on their way.

    Leaving the `with` block waits for all tasks; after an exception, those not begun are dropped.
    """

    def __init__(self, workers: int, max_bytes: int, nice: bool = False) -> None:
        """Begin without any thread.

        Args:
            nice: the system lets other threads go before these, where it can.
        """
        self.max_bytes = max_bytes
        self._pool = ThreadPoolExecutor(
            workers, "featviz-writer", initializer=_step_back if nice else None
        )
        self._room = Condition()
        self._held = 0

    def submit(self, size: int, task: Callable[[], T]) -> Future[T]:
        """Run `task`, which holds `size` bytes; one larger than the bound goes alone."""
        with self._room:
            self._room.wait_for(lambda: not self._held or self._held + size <= self.max_bytes)
            self._held += size
        future = self._pool.submit(task)
        future.add_done_callback(lambda _: self._give_back(size))
        return future

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
        self._pool.shutdown(wait=True, cancel_futures=error is not None)


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
    if sys.platform == "linux":  # elsewhere it would be the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), NICENESS)
