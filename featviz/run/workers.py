"""Images side by side: worker processes, each with a copy of the model and one torch
thread.

Threads cannot do it: the model, the encoders and the reader of one process share
Python's global lock, so that a run uses little more than one core, whatever the machine
has. Processes share nothing but the memory that they inherit: a worker is forked (25
ms) when the model is loaded and the first image is drawn, and so has the weights, the
compiled loops and all that was found out about the model's layers.

    parent   number of an image ──► worker: read, run the model, draw, write the image's folder
             its result, in order ◄── a small record

A forked child must not start a second thread of OpenMP, whose threads did not survive
the fork; hence one torch thread, as in the workers of torch's DataLoader. It also makes
the bytes of a run independent of the number of workers."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, Generic, TypeVar, cast

import torch

from featviz.errors import FeatvizError
from featviz.text import counted

R = TypeVar("R")

FEWEST_IMAGES = 4
"""Images of a run below which one process draws them all: a fork and its copies of
pages cost about half an image."""
SPARE_BYTES = 256 * 2**20
"""Memory that is left to other programs when workers are counted."""

_FORK: Any = None
if sys.platform == "linux" and hasattr(os, "fork"):
    _FORK = multiprocessing.get_context("fork")

log = logging.getLogger(__name__)


class WorkerDiedError(FeatvizError):
    """A worker process ended without a word: it was killed, or native code crashed."""


@dataclass
class Answer(Generic[R]):
    """What a worker says of one image."""

    number: int
    """Which of the images it is."""
    result: R | None = None
    error: BaseException | None = None
    """What ended the worker; it ends the run, too."""
    records: list[logging.LogRecord] = field(default_factory=list)
    """What was logged meanwhile, which only the parent may print."""


@dataclass
class _Worker:
    """A process at work, as its parent sees it."""

    process: Any
    """A process of multiprocessing's fork context."""
    connection: Connection
    number: int
    """The image that it has."""


def can_fork() -> bool:
    """Whether processes can be forked safely: macOS's own libraries break in a forked
    child."""
    return _FORK is not None and multiprocessing.parent_process() is None


def fitting(count: int, bytes_each: int) -> int:
    """So many of `count` workers as there is memory for, at least one.

    Args:
        bytes_each: how much memory this process took for its first image.
    """
    free = _available_bytes() - SPARE_BYTES
    fits = max(1, free // max(1, bytes_each))
    if fits < count:
        log.info("there is memory for %s of %d", counted(fits, "worker"), count)
    return min(count, fits)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """torch with one thread, as in all workers, and then with as many as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class MemoryTaken:
    """How much more memory a block took at its peak than there was before it."""

    bytes_taken: int = 0


@contextmanager
def measured_memory() -> Iterator[MemoryTaken]:
    """Measure the memory that a block takes, which is known when it ends."""
    memory = MemoryTaken()
    before = _resident_kilobytes("VmRSS")
    with suppress(OSError):  # resets the peak, which loading the model may have raised
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    yield memory
    memory.bytes_taken = 1024 * max(0, _resident_kilobytes("VmHWM") - before)


def _resident_kilobytes(name: str) -> int:
    """A line of this process's status: `VmRSS` is its memory, `VmHWM` the most that it
    had."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


def _available_bytes() -> int:
    """Memory that can be had without swapping, within the limit of the control group."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = 1024 * int(line.split()[1])
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit = int((group / "memory.max").read_text("ascii"))
        available = min(
            available, limit - int((group / "memory.current").read_text("ascii"))
        )
    return available


def in_processes(
    numbers: Iterable[int],
    work: Callable[[Iterator[int]], Iterable[R]],
    count: int,
    stop: Event,
    lost: Callable[[int, WorkerDiedError], R],
) -> Generator[R, None, None]:
    """Let worker processes make a result of each number, and yield the results in
    order.

    Args:
        work: what a worker does: it takes numbers until there are no more, and yields a
            result for each. It runs in the worker, where it may hold on to what it
            needs for all of them.
        count: how many processes.
        stop: hands out no further numbers; those that workers have are finished.
        lost: makes a result of a number whose worker died, twice.

    Raises:
        BaseException: what `work` raised in a worker. All others have been killed then.
    """
    crew = _Crew(work, numbers, count)
    order = deque(crew.waiting)
    done: dict[int, R] = {}
    try:
        while crew.is_at_work(stop):
            for worker in crew.ready():
                answer = crew.answer_of(worker)
                if isinstance(answer, WorkerDiedError):
                    if crew.has_failed_twice(worker.number):
                        done[worker.number] = lost(worker.number, answer)
                    continue
                for record in answer.records:
                    logging.getLogger(record.name).handle(record)
                if answer.error is not None:
                    raise answer.error
                done[answer.number] = cast(R, answer.result)
            while order and order[0] in done:
                yield done.pop(order.popleft())
    except (KeyboardInterrupt, SystemExit):
        crew.kill()  # whoever asks a second time does not wait for an image
        raise
    finally:
        crew.end()
    # of a run that was stopped while an image was to be tried once more
    yield from (done[number] for number in order if number in done)


class _Crew(Generic[R]):
    """The workers of a run, and the numbers that they have and are to have."""

    def __init__(
        self,
        work: Callable[[Iterator[int]], Iterable[R]],
        numbers: Iterable[int],
        count: int,
    ) -> None:
        """Begin without any process."""
        self.work = work
        self.count = count
        self.waiting = deque(numbers)
        self.workers: list[_Worker] = []
        self.suspects = deque[int]()
        """Numbers whose worker died, to be tried once more."""
        self.tried_again = set[int]()

    def is_at_work(self, stop: Event) -> bool:
        """Start the workers that there is work for; whether there is any worker."""
        if stop.is_set():
            self.waiting.clear()
            self.suspects.clear()
        is_alone = any(worker.number in self.tried_again for worker in self.workers)
        if self.suspects:
            # alone: the memory that the image lacked may have been that of the other
            # workers
            if not self.workers:
                number = self.suspects.popleft()
                self.tried_again.add(number)
                self._start(number)
        elif not is_alone:
            while self.waiting and len(self.workers) < self.count:
                self._start(self.waiting.popleft())
        return bool(self.workers)

    def ready(self) -> list[_Worker]:
        """Wait for workers that have answered, or died."""
        connections = wait([worker.connection for worker in self.workers])
        return [worker for worker in self.workers if worker.connection in connections]

    def answer_of(self, worker: _Worker) -> Answer[R] | WorkerDiedError:
        """What a worker says. It gets the next number, or ends where there is none for
        it."""
        try:
            answer: Answer[R] = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._end(worker)
            if worker.number not in self.tried_again:
                self.suspects.append(worker.number)
            return _death(worker)
        if self.waiting and not self.suspects and worker.number not in self.tried_again:
            worker.number = self.waiting.popleft()
            worker.connection.send(worker.number)
        else:
            self._end(worker)
        return answer

    def has_failed_twice(self, number: int) -> bool:
        """Whether a number whose worker died is not to be tried again."""
        return number in self.tried_again

    def kill(self) -> None:
        """End all processes at once."""
        for worker in self.workers:
            worker.process.kill()

    def end(self) -> None:
        """Let all processes end what they do, and wait for it."""
        for worker in [*self.workers]:
            self._end(worker)

    def _start(self, number: int) -> None:
        ours, theirs = _FORK.Pipe()
        # A worker sees that its parent has died by the end of its pipe; so it may not
        # hold the parent's ends of the pipes that it inherits.
        inherited = [ours, *(worker.connection for worker in self.workers)]
        process = _FORK.Process(
            target=_run_worker,
            args=(self.work, theirs, inherited),
            name="featviz-worker",
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of threads in the parent: those of torch and numba,
            # which the worker does not use
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        ours.send(number)
        self.workers.append(_Worker(process, ours, number))

    def _end(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.connection.close()
        worker.process.join()


def _death(worker: _Worker) -> WorkerDiedError:
    """How a worker ended that said nothing."""
    code = worker.process.exitcode
    if code is not None and code < 0:
        how = f"by signal {-code} ({signal.Signals(-code).name})"
    else:
        how = f"with exit code {code}"
    hint = "SIGKILL often means that memory ran out: --jobs 1 takes less"
    return WorkerDiedError(f"its worker process ended {how}, twice", hint)


def _run_worker(
    work: Callable[[Iterator[int]], Iterable[R]],
    connection: Connection,
    inherited: Iterable[Connection],
) -> None:
    """What a worker process does until there are no more numbers, or no more parent."""
    for other in inherited:
        other.close()
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        # The parent decides what a signal means; a terminal sends it to all processes
        # alike.
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger = logging.getLogger("featviz")
    logger.handlers = [QueueHandler(records)]
    logger.propagate = False
    number = -1

    def received() -> Iterator[int]:
        nonlocal number
        with suppress(EOFError, ConnectionResetError):
            while True:
                number = connection.recv()
                yield number

    with suppress(BrokenPipeError, ConnectionResetError):
        try:
            for result in work(received()):
                connection.send(Answer(number, result, records=_drained(records)))
        except BaseException as error:
            # a bug, whose traceback pickling would lose
            if not isinstance(error, FeatvizError):
                error.add_note(traceback.format_exc())
            connection.send(Answer(number, error=error, records=_drained(records)))


def _drained(records: SimpleQueue[logging.LogRecord]) -> list[logging.LogRecord]:
    """All records of a queue, which has none then."""
    return [records.get() for _ in range(records.qsize())]
