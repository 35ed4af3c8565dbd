"""Draws several images at the same time, in worker processes, each with a copy of the
model and one torch thread.

Threads would not help: the model, the encoders and the reader of one process share
Python's global lock, and use little more than one core. A worker process is forked when
the model is loaded and the first image is drawn, which takes 25 ms. It inherits the
weights, the compiled loops, and the layouts of the layers that the first image settled.

    parent   number of an image ──► worker: read, run the model, draw, write the image's folder
             its result, in order ◄── a small record

A forked child must not start a second thread of OpenMP, whose threads did not survive
the fork. So it has one torch thread, as the workers of torch's DataLoader do. This also
makes the bytes of a run independent of the number of workers."""

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
"""A run of fewer images is drawn by one process: a fork, and the pages of memory that it
copies, cost as much time as half an image."""
SPARE_BYTES = 256 * 2**20
"""How much of the free memory is left to other programs."""

_FORK: Any = None
if sys.platform == "linux" and hasattr(os, "fork"):
    _FORK = multiprocessing.get_context("fork")

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)
)
"""The signals that ask a run to end. SIGHUP comes when the terminal closes; Windows does
not have it."""

log = logging.getLogger(__name__)


class WorkerDiedError(FeatvizError):
    """A worker process ended without an answer: it was killed, or native code crashed."""


Work: TypeAlias = Callable[[Iterator[int]], Iterable[R]]
"""Runs in a worker: takes the numbers of images until there are no more, and yields a
result for each."""
Lost: TypeAlias = Callable[[int, WorkerDiedError], R]
"""Makes the result of an image, by its number, at which two workers have died."""


@dataclass
class Answer(Generic[R]):
    """The answer of a worker for one image: a result or an error."""

    number: int
    """The number of the image."""
    result: R | None = None
    error: BaseException | None = None
    """The exception that ended the worker; it also ends the run."""
    records: list[logging.LogRecord] = field(default_factory=list)
    """The log records of the image, which the parent prints."""


@dataclass
class _Worker:
    """A running worker process, as the parent knows it."""

    process: Any
    """A process of multiprocessing's fork context."""
    connection: Connection
    number: int
    """The number of the image that the worker is drawing."""


def worker_count(
    model: LoadedModel, samples: Sequence[Sample], jobs: int | None, backward: bool
) -> int:
    """How many worker processes draw the samples of a command. 1 if there are few samples,
    or if forked processes cannot draw them.

    Args:
        jobs: the value of --jobs; None stands for one worker for each core that this
            process may use.
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
    """Whether a forked process can compute gradients; tried out with a child process. If
    torch knows another device than the CPU (as after an import of torch.export), autograd
    starts threads at its first backward pass, and then fails in a forked process, which
    has no copy of them."""
    _import_loops()
    _go_back()  # autograd starts its threads here, if at all
    process = _forked(_exit_by_going_back, ())
    process.join()
    return process.exitcode == 0  # type: ignore[no-any-return]


def _import_loops() -> None:
    """Wait until the module LOOPS is imported, which a thread of `prepare` began. A
    process that is forked before that would wait forever for the lock of the import."""
    import_module(LOOPS)


def _forked(target: Callable[..., None], args: tuple[Any, ...]) -> Any:
    """Fork a process that calls a function, and return it (a process of
    multiprocessing)."""
    process = _FORK.Process(target=target, args=args, name="featviz-worker")
    with warnings.catch_warnings():
        # Python 3.12 warns of threads in the parent. Here they are of torch and numba,
        # and the child does not use them.
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
    """Whether processes can be forked safely: on Linux, and not in a process that
    multiprocessing has started. The libraries of macOS break in a forked child."""
    return _FORK is not None and multiprocessing.parent_process() is None


def count_fitting(count: int, bytes_each: int) -> int:
    """The number of workers that the free memory is enough for: at least one, at most
    `count`.

    Args:
        count: how many workers are wanted.
        bytes_each: the memory that this process took for its first image.
    """
    # Workers share the weights with this process, as long as nobody writes into them. So
    # a worker takes about as much memory of its own as one image.
    free = _available_bytes() - SPARE_BYTES
    fits = max(1, free // max(1, bytes_each))
    if fits < count:
        log.info("there is memory for %s of %d", counted(fits, "worker"), count)
    return min(count, fits)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use one thread in the block, as in all workers, and afterwards as many
    threads as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def reset_peak_memory() -> int:
    """Reset `VmHWM`, the peak of this process's memory, to the memory that it has now, and
    return these bytes."""
    with suppress(OSError):  # then the peak stays, and fewer workers may seem to fit
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    """The bytes of an entry in this process's status (`man 5 proc`); 0 if there is no such
    entry.

    Args:
        name: `VmRSS`, the memory that the process has now, or `VmHWM`, its peak.
    """
    for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0


def _available_bytes() -> int:
    """How many bytes of memory can be had without swapping, within the limit of the
    control group."""
    # used if /proc/meminfo cannot be read; smaller, since it leaves out the file cache
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = 1024 * int(line.split()[1])
    group = Path("/sys/fs/cgroup")
    with suppress(
        OSError, ValueError
    ):  # ValueError: "max" means that there is no limit
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
    """Make the result of the first image in this process, and the results of all other
    images in worker processes. Yields the results in the order of the images.

    Args:
        first: yields the result of image 0.
        images: the number of all images.
        work, stop, lost: as for `in_processes`.
        count: the most workers; there are fewer if the memory is not enough.
    """
    with one_torch_thread():
        _import_loops()
        # The first image shows how much memory an image takes. The workers, which are
        # forked later, inherit the layouts that it settled.
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
    """Let worker processes make a result for each number, and yield the results in the
    order of the numbers.

    Args:
        numbers: the numbers of the images.
        work: runs in each worker, and makes the results.
        count: the most workers at a time.
        stop: once it is set, no further number is given to a worker; images that workers
            are drawing are finished.
        lost: makes the result of a number at which two workers have died.

    Raises:
        BaseException: an exception of `work` in a worker.
    """
    crew = _Crew(work, numbers, count, lost)
    # answers come in any order, and wait in `done` for their turn
    order = deque(crew.waiting)
    done: dict[int, R] = {}
    try:
        while crew.start_workers(stop):
            for answer in crew.answers():
                done[answer.number] = _unpacked(answer)
            while order and order[0] in done:
                yield done.pop(order.popleft())
    except (KeyboardInterrupt, SystemExit):
        crew.kill()  # after a second signal, no image is waited for
        raise
    finally:
        crew.end()
    # A stop may leave an image undone that was to be tried once more. Results behind it
    # are yielded here.
    yield from (done[number] for number in order if number in done)


def _unpacked(answer: Answer[R]) -> R:
    """Log the records of an answer, and return its result, or raise its error."""
    for record in answer.records:
        logging.getLogger(record.name).handle(record)
    if answer.error is not None:
        raise answer.error
    return cast(R, answer.result)


class _Crew(Generic[R]):
    """The workers of a run, and the numbers of the images that they are still to draw."""

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
        """Numbers at which a worker died. Each is tried once more, with no other worker
        at work."""
        self.tried_again = set[int]()
        """Numbers that are being tried, or were tried, once more."""

    def start_workers(self, stop: Event) -> bool:
        """Start as many workers as there is work for.

        Args:
            stop: if it is set, no number is given to a worker any more.

        Returns:
            Whether any worker is running.
        """
        if stop.is_set():  # running workers finish their images
            self.waiting.clear()
            self.suspects.clear()
        is_second_try = any(
            worker.number in self.tried_again for worker in self.workers
        )
        # A worker may have died since memory ran out. So its image is tried once more
        # when no other worker runs, and a second death ends only this image.
        if self.suspects:
            if not self.workers:
                number = self.suspects.popleft()
                self.tried_again.add(number)
                self._start(number)
        elif not is_second_try:
            while self.waiting and len(self.workers) < self.count:
                self._start(self.waiting.popleft())
        return bool(self.workers)

    def answers(self) -> Iterator[Answer[R]]:
        """Wait until a worker has answered or died, and yield the answers that there are.
        A worker that died for the first time at a number gives none."""
        connections = wait([worker.connection for worker in self.workers])
        for worker in [*self.workers]:  # a copy, since the loop removes workers
            if worker.connection in connections:
                answer = self._answer_of(worker)
                if answer is not None:
                    yield answer

    def _answer_of(self, worker: _Worker) -> Answer[R] | None:
        """Read the answer of a worker, and give the worker its next number, or end it.
        None if the worker died, and its number is to be tried once more."""
        is_second_try = worker.number in self.tried_again
        try:
            answer: Answer[R] = worker.connection.recv()
        except (EOFError, OSError):  # OSError: it died while it sent its answer
            self._end(worker)
            if is_second_try:
                return Answer(worker.number, self.lost(worker.number, _death(worker)))
            self.suspects.append(worker.number)
            return None
        goes_on = self.waiting and not self.suspects and not is_second_try
        # a worker that reports an error has ended by itself
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
        """Kill all workers, without waiting for their images."""
        for worker in self.workers:
            worker.process.kill()

    def end(self) -> None:
        """Let all workers finish their images, and wait for their end."""
        for worker in [*self.workers]:
            self._end(worker)

    def _start(self, number: int) -> None:
        """Fork a worker, and give it its first number."""
        ours, of_worker = _FORK.Pipe()
        # The worker closes the parent's ends of all pipes, which it inherits: only then
        # does its own pipe end when the parent dies.
        inherited = [ours, *(worker.connection for worker in self.workers)]
        process = _forked(_run_worker, (self.work, of_worker, inherited))
        of_worker.close()
        ours.send(number)
        self.workers.append(_Worker(process, ours, number))

    def _end(self, worker: _Worker) -> None:
        """Let a worker finish its image, give it no further number, and wait for its
        end."""
        self.workers.remove(worker)
        worker.connection.close()
        worker.process.join()


def _death(worker: _Worker) -> WorkerDiedError:
    """The error for an image at which two workers have died; it names the end of
    `worker`, the second one."""
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
    """The main function of a worker process. It ends when the parent closes its pipe, or
    dies.

    Args:
        work: makes the results, as for `in_processes`.
        connection: brings the numbers, and takes an Answer for each.
        inherited: the parent's ends of pipes, which the fork has copied; they are closed.
    """
    for parent_end in inherited:
        parent_end.close()
    # A terminal sends a signal to all processes. Workers ignore it: the parent decides
    # what it means, and closes their pipes to end them.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # a second thread of OpenMP would hang in a forked child
    torch.set_num_threads(1)
    # The garbage collector must not destroy objects of the parent: one with threads, such
    # as a session of ONNX Runtime, would wait forever for threads that were not copied.
    gc.freeze()
    # Only the parent prints log records: lines of several processes would be mixed up.
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger = logging.getLogger("featviz")
    logger.handlers = [_RecordQueue(records)]
    logger.propagate = False
    image = -1  # the number that was received last

    def received() -> Iterator[int]:
        """Yield numbers from the parent until it closes the pipe, or dies."""
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
            # a bug in featviz: its traceback goes into a note, since pickling drops it
            if not isinstance(error, FeatvizError):
                error.add_note(traceback.format_exc())
            connection.send(Answer(image, error=error, records=_drained(records)))


class _RecordQueue(QueueHandler):
    """Collects log records for the parent."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Make a record picklable: its traceback and its arguments become text."""
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        record.msg = record.getMessage()
        record.args = None
        return record


def _drained(records: SimpleQueue[logging.LogRecord]) -> list[logging.LogRecord]:
    """Take all records out of a queue."""
    return [records.get() for _ in range(records.qsize())]
