"""Worker threads behind a queue that is bounded in bytes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Background:
    """Runs tasks in threads; `submit` waits while more than `max_bytes` are on their way.

    Leaving the `with` block waits for all tasks; after an exception, those not begun are dropped.
    """

    def __init__(self, workers: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="featviz-writer")
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
