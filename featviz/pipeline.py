"""The story of `run`: from a model and images to a run directory."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch

from featviz import bases, boards, estimate, journal, kernels
from featviz.background import Background
from featviz.boards import Board
from featviz.borrowed import borrowed
from featviz.drawing import Drawer
from featviz.errors import StoreError
from featviz.journal import Journal
from featviz.limits import check_written
from featviz.models.load import LoadedModel, ModelOptions
from featviz.preparation import Prepared, RunOptions, prepare
from featviz.records import ImageResult, RunResult, Sample
from featviz.session import Session, Task
from featviz.stopping import stop_requests
from featviz.store import RunDirectory, pack
from featviz.workers import World, world

log = logging.getLogger(__name__)

QUEUE_BYTES = 64 * 2**20
"""Tiles that may wait for an encoder."""

Progress = Callable[[ImageResult, int], None]
"""Called with each finished image and how many there are in all."""


def run(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: RunOptions,
    progress: Progress = lambda image, total: None,
    stdin: BinaryIO | None = None,
) -> RunResult:
    """Draw the feature maps of images into a run directory.

    Raises:
        FeatvizError: nothing could be begun, or the run directory failed. What goes wrong with
            one image is in its result instead.
    """
    prepared = prepare(model, arguments, options, stdin)
    with world() as team, _destination(options) as options:
        share = options.shard or team.shard
        samples = prepared.samples[share.index :: share.count]
        estimate.check_limits(prepared, len(samples), options)
        log_book = Journal(
            journal.run_record(prepared, options), prepared.samples if team.size > 1 else samples
        )
        store = _open(team, options, log_book, prepared)
        with boards.opened(options.tensorboard) as board:
            task = _task(prepared, options, log_book, store, board)
            results, stopped = _visit_all(task, samples, options, log_book, store, progress)
        _close(team, log_book, store)
    missing = [sample.name for sample in samples if sample.name in log_book.missing]
    return RunResult(options.archive or options.out, tuple(results), tuple(missing), stopped)


def _open(team: World, options: RunOptions, log_book: Journal, prepared: Prepared) -> RunDirectory:
    """The first process makes the run directory; the others find it."""

    def begin() -> RunDirectory:
        store = journal.open_store(options, log_book.record)
        log_book.write(store)
        bases.settle(store, prepared, options)
        return store

    return team.at_first(begin) or RunDirectory(options.out)


def _close(team: World, log_book: Journal, store: RunDirectory) -> None:
    """The first process writes what became of the images of all."""
    for errors in team.gather(log_book.errors):
        log_book.errors |= errors
    if team.first:
        log_book.write(store)


def _task(
    prepared: Prepared,
    options: RunOptions,
    log_book: Journal,
    store: RunDirectory,
    board: Board | None,
) -> Task:
    if board is not None:
        kernels.post_kernels(prepared.model, prepared.layers, board)
    return Task(
        prepared.model,
        prepared.layers,
        prepared.plan,
        Drawer(options.draw, bases.read(store, options)),
        options.inputs,
        log_book.fingerprint,
        board,
        {sample.name: step for step, sample in enumerate(prepared.samples)},
    )


def _visit_all(
    task: Task,
    samples: Sequence[Sample],
    options: RunOptions,
    log_book: Journal,
    store: RunDirectory,
    progress: Progress,
) -> tuple[list[ImageResult], bool]:
    """Show the images to the model, one by one, until they end or a signal ends them."""
    results: list[ImageResult] = []

    def report(result: ImageResult) -> None:
        results.append(result)
        log_book.add(result)
        progress(result, len(samples))

    session = Session(task, store, report)
    gradients = options.passes.gradients
    try:
        with (
            borrowed(task.model.module, gradients),
            _shared_cores(options.jobs) as background,
            stop_requests() as stop,
        ):
            for sample in samples:
                if stop.is_set() or (options.fail_fast and results and results[-1].error):
                    break
                check_written(options.limits, store.written, len(results), len(samples))
                if options.resume and session.keep(sample):
                    continue
                session.visit(sample, background)
            session.settle()
    except BaseException:
        session.settle()  # the image before is complete but for its manifest
        log_book.write(store)
        raise
    return results, stop.is_set()


@contextmanager
def _destination(options: RunOptions) -> Iterator[RunOptions]:
    """A folder of its own for a run that becomes an archive."""
    if options.archive is None:
        yield options
        return
    if options.archive.exists() and not options.overwrite:
        raise StoreError(f"--archive {options.archive} exists", "--overwrite replaces it")
    with tempfile.TemporaryDirectory(
        dir=options.archive.absolute().parent, prefix=f".{options.archive.name}."
    ) as folder:
        out = Path(folder) / "run"
        yield replace(options, out=out, overwrite=False)
        pack(out, options.archive)


@contextmanager
def _shared_cores(jobs: int | None) -> Iterator[Background]:
    """Encoders beside the model: `jobs` threads, or a quarter of the cores, at least one.

    torch gets the other cores for as long as this lasts: where its threads and the encoders
    together outnumber the cores, each of its operations waits for the slowest of them (measured on
    two cores with resnet50: about twice the time).
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    share, threads = max(1, cores // 4), torch.get_num_threads()
    torch.set_num_threads(max(1, min(threads, cores - share)))
    try:
        with Background(jobs or share, QUEUE_BYTES) as background:
            yield background
    finally:
        torch.set_num_threads(threads)
