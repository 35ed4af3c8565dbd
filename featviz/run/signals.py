"""SIGINT, SIGTERM and SIGHUP: the first ends the run after the current image, the second one at
once."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, current_thread, main_thread
from types import FrameType

log = logging.getLogger(__name__)

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""SIGHUP comes when the terminal closes; Windows has none."""


@contextmanager
def stop_requests() -> Iterator[Event]:
    """An event that the first of these signals sets, while the block runs.

    The same signal once more raises KeyboardInterrupt (torchrun and schedulers follow one signal
    with another). Only the main thread can take signals; in any other the event is never set. What
    whoever started this process has ignored (`nohup`, or a shell's `&`) stays so.
    """
    event = Event()
    seen: set[int] = set()

    def stop(number: int, frame: FrameType | None) -> None:
        if number in seen:
            raise KeyboardInterrupt
        seen.add(number)
        event.set()
        log.warning("stopping after this image; once more to stop at once")

    if current_thread() is not main_thread():
        yield event
        return
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
