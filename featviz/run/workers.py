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

import gc
import logging
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch

from featviz.errors import FeatvizError
from featviz.models.load import LoadedModel
from featviz.records import Sample
from featviz.run.encoders import usable_cores
from featviz.run.prepare import LOOPS
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

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)
)
"""Those that ask a run to end; SIGHUP comes when the terminal closes, and Windows has
none."""

log = logging.getLogger(__name__)


class WorkerDiedError(FeatvizError):
    """A worker process ended without a word: it was killed, or native code crashed."""


Work: TypeAlias = Callable[[Iterator[int]], Iterable[R]]
"""What a worker does: it takes numbers until there are no more, and yields a result for
each. It runs in the worker, where it may hold on to what it needs for all of them."""
Lost: TypeAlias = Callable[[int, WorkerDiedError], R]
"""Makes the result of a number whose worker has died twice."""


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


def worker_count(
    model: LoadedModel, samples: Sequence[Sample], jobs: int | None, backward: bool
) -> int:
    """How many worker processes divide the samples of a command; 1 where there is
    little to gain, or something that cannot be divided.

    Args:
        jobs: as the user says; None takes one for each core that this process may use.
        backward: whether each image needs gradients.
    """
    if jobs == 1 or len(samples) < FEWEST_IMAGES:
        return 1
    if model.device.type != "cpu" or not can_fork():
        return 1
    # the connections of a store have threads, which do not survive a fork
    if samples[0].is_remote:
        return 1
    if backward and not _can_go_back_in_child():
        return 1
    return jobs or usable_cores()


def _can_go_back_in_child() -> bool:
    """Whether a forked process can compute gradients. autograd starts threads at its
    first backward pass where torch knows of another device than the CPU (as it does
    once torch.export is imported), and refuses to work without them."""
    _import_loops()
    _go_back()  # now this process has the threads, if there are to be any
    process = _forked(_exit_by_going_back, ())
    process.join()
    return process.exitcode == 0  # type: ignore[no-any-return]


def _import_loops() -> None:
    """Wait for the thread of `prepare` that imports them: a process that is forked
    meanwhile would wait for it for ever."""
    import_module(LOOPS)


def _forked(target: Callable[..., None], args: tuple[Any, ...]) -> Any:
    """Start a forked process, one of multiprocessing's, that calls a function."""
    process = _FORK.Process(target=target, args=args, name="featviz-worker")
    with warnings.catch_warnings():
        # Python 3.12 warns of threads in the parent: those of torch and numba, which
        # the child does not use
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _exit_by_going_back() -> None:
    """End this process with 0 if it can compute a gradient, else with 1."""
    try:
        _go_back()
    except RuntimeError:
        os._exit(1)
    os._exit(0)


def _go_back() -> None:
    """Compute the gradient of one number."""
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


def can_fork() -> bool:
    """Whether processes can be forked safely. Not on macOS, whose own libraries break in
    a forked child; and not in a process that multiprocessing itself has started."""
    return _FORK is not None and multiprocessing.parent_process() is None


def count_fitting(count: int, bytes_each: int) -> int:
    """How many of `count` workers there is memory for, at least one.

    Args:
        bytes_each: how much memory this process took for its first image.
    """
    # The weights are shared, as long as nobody writes to their pages: what a worker
    # takes of its own is about what one image takes.
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


def reset_peak_memory() -> int:
    """Let the peak `VmHWM` of this process's memory begin anew, and return the bytes
    that it has now."""
    with suppress(OSError):  # the peak that loading the model may have raised
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    """The bytes of an entry in this process's status (`man 5 proc`): `VmRSS`, or its
    peak `VmHWM`; 0 where there is no such entry."""
    for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0


def _available_bytes() -> int:
    """Memory that can be had without swapping, within the limit of the control group."""
    # where there is no /proc/meminfo: less, since it does not count the file cache
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


def side_by_side(
    first: Iterable[R],
    images: int,
    work: Work[R],
    count: int,
    stop: Event,
    lost: Lost[R],
) -> Generator[R, None, None]:
    """Make the result of the first image in this process, and those of the others in
    worker processes; yield them in order.

    Args:
        first: makes the result of image 0 as it is iterated over.
        images: how many there are.
        work, stop, lost: see `in_processes`.
        count: of workers, as far as there is memory for them.
    """
    with one_torch_thread():
        _import_loops()
        # The first image shows how much memory one takes, and leaves workers what it
        # found out.
        memory_before = reset_peak_memory()
        yield from first
        bytes_each = _status_bytes("VmHWM") - memory_before
        count = count_fitting(min(count, images - 1), bytes_each)
        rest = range(1, images)
        with closing(in_processes(rest, work, count, stop, lost)) as results:
            yield from results


def in_processes(
    numbers: Iterable[int],
    work: Work[R],
    count: int,
    stop: Event,
    lost: Lost[R],
) -> Generator[R, None, None]:
    """Let worker processes make a result of each number, and yield the results in
    order.

    Args:
        work: what a worker does.
        count: how many processes.
        stop: hands out no further numbers; those that workers have are finished.
        lost: makes the result of a number whose worker has died twice.

    Raises:
        BaseException: what `work` raised in a worker. All others have been killed then.
    """
    crew = _Crew(work, numbers, count, lost)
    # results come as workers end, and are yielded as numbers were given
    order = deque(crew.waiting)
    done: dict[int, R] = {}
    try:
        while crew.start_workers(stop):
            for answer in crew.answers():
                done[answer.number] = _unpacked(answer)
            while order and order[0] in done:
                yield done.pop(order.popleft())
    except (KeyboardInterrupt, SystemExit):
        crew.kill()  # whoever asks a second time does not wait for an image
        raise
    finally:
        crew.end()
    # what stands behind an image that was to be tried once more when the run was stopped
    yield from (done[number] for number in order if number in done)


def _unpacked(answer: Answer[R]) -> R:
    """Print what a worker has logged, and return its result or raise its error."""
    for record in answer.records:
        logging.getLogger(record.name).handle(record)
    if answer.error is not None:
        raise answer.error
    return cast(R, answer.result)


class _Crew(Generic[R]):
    """The workers of a run, and the numbers that they have and are to have."""

    def __init__(
        self,
        work: Work[R],
        numbers: Iterable[int],
        count: int,
        lost: Lost[R],
    ) -> None:
        """Begin without any process; the arguments are those of `in_processes`."""
        self.work = work
        self.count = count
        self.lost = lost
        self.waiting = deque(numbers)
        self.workers: list[_Worker] = []
        self.suspects = deque[int]()
        """Numbers whose worker died, to be tried once more."""
        self.tried_again = set[int]()

    def start_workers(self, stop: Event) -> bool:
        """Start as many workers as there is work for, and return whether any is running.

        Args:
            stop: where it is set, no number is given out any more.
        """
        if stop.is_set():  # the workers end what they have
            self.waiting.clear()
            self.suspects.clear()
        is_alone = any(worker.number in self.tried_again for worker in self.workers)
        # One image that needs too much memory must not end all others with it.
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

    def answers(self) -> Iterator[Answer[R]]:
        """Wait for workers that have answered, or died, and yield their answers."""
        connections = wait([worker.connection for worker in self.workers])
        for worker in [*self.workers]:  # a copy, of which some are removed meanwhile
            if worker.connection in connections:
                answer = self._answer_of(worker)
                if answer is not None:
                    yield answer

    def _answer_of(self, worker: _Worker) -> Answer[R] | None:
        """Read the answer of a worker, and give it the next number; where it gets none, it
        ends. None where the worker died, and its number will be tried once more."""
        is_second_try = worker.number in self.tried_again
        try:
            answer: Answer[R] = worker.connection.recv()
        except (EOFError, OSError):  # an end in the midst of a message is an OSError
            self._end(worker)
            if is_second_try:
                return Answer(worker.number, self.lost(worker.number, _death(worker)))
            self.suspects.append(worker.number)
            return None
        goes_on = self.waiting and not self.suspects and not is_second_try
        # a worker that reports an error has ended, and takes no further number
        if answer.error is not None or not goes_on:
            self._end(worker)
            return answer
        try:
            worker.connection.send(self.waiting[0])
        except (BrokenPipeError, ConnectionResetError):  # it was killed meanwhile
            self._end(worker)
        else:
            worker.number = self.waiting.popleft()
        return answer

    def kill(self) -> None:
        """End all processes at once."""
        for worker in self.workers:
            worker.process.kill()

    def end(self) -> None:
        """Let all processes end what they do, and wait for it."""
        for worker in [*self.workers]:
            self._end(worker)

    def _start(self, number: int) -> None:
        """Fork a worker, and give it its first number."""
        ours, of_worker = _FORK.Pipe()
        # A worker sees that its parent has died by the end of its pipe; so it may not
        # hold the parent's ends of the pipes that it inherits.
        inherited = [ours, *(worker.connection for worker in self.workers)]
        process = _forked(_run_worker, (self.work, of_worker, inherited))
        of_worker.close()
        ours.send(number)
        self.workers.append(_Worker(process, ours, number))

    def _end(self, worker: _Worker) -> None:
        """Let a worker end what it does, and wait for it: no number comes any more."""
        self.workers.remove(worker)
        worker.connection.close()
        worker.process.join()


def _death(worker: _Worker) -> WorkerDiedError:
    """How a worker ended that said nothing."""
    # multiprocessing gives the number of a signal as a negative exit code
    code = worker.process.exitcode
    if code is not None and code < 0:
        how = f"by signal {-code} ({signal.Signals(-code).name})"
    else:
        how = f"with exit code {code}"
    hint = "SIGKILL often means that memory ran out: --jobs 1 takes less"
    return WorkerDiedError(f"its worker process ended {how}, twice", hint)


def _run_worker(
    work: Work[R],
    connection: Connection,
    inherited: Iterable[Connection],
) -> None:
    """What a worker process does until there are no more numbers, or no more parent.

    Args:
        work: see `in_processes`.
        connection: by which numbers come, and an Answer goes back for each.
        inherited: the parent's ends of pipes, which the fork has copied.
    """
    for parent_end in inherited:
        parent_end.close()
    # A worker ends by its pipe, also where the parent was killed and could say nothing.
    for number in SIGNALS:
        # The parent decides what a signal means; a terminal sends it to all processes
        # alike.
        signal.signal(number, signal.SIG_IGN)
    # a second thread of OpenMP would hang in a forked child
    torch.set_num_threads(1)
    # Nor may the collector end what the parent left: an object whose threads were not
    # copied, such as a session of ONNX Runtime, would wait for them for ever.
    gc.freeze()
    # a log line of several processes would be torn
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger = logging.getLogger("featviz")
    logger.handlers = [_RecordQueue(records)]
    logger.propagate = False
    image = -1  # the number that was received last

    def received() -> Iterator[int]:
        """Numbers, until the parent closes its end, or dies."""
        nonlocal image
        with suppress(EOFError, ConnectionResetError):
            while True:
                image = connection.recv()
                yield image

    with suppress(BrokenPipeError, ConnectionResetError):  # the parent has died
        try:
            for result in work(received()):
                connection.send(Answer(image, result, records=_drained(records)))
        except BaseException as error:
            # a bug, whose traceback pickling would lose
            if not isinstance(error, FeatvizError):
                error.add_note(traceback.format_exc())
            connection.send(Answer(image, error=error, records=_drained(records)))


class _RecordQueue(QueueHandler):
    """Keeps records for the parent, and tracebacks beside their messages."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Make a record that can be pickled, which a traceback cannot."""
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        record.msg = record.getMessage()
        record.args = None
        return record


def _drained(records: SimpleQueue[logging.LogRecord]) -> list[logging.LogRecord]:
    """All records of a queue, which has none then."""
    return [records.get() for _ in range(records.qsize())]
