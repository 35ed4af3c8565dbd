"""The story of `run`: from a model and images to a run directory."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import BinaryIO

import torch

from featviz import images
from featviz.drawing import tensorboard
from featviz.drawing.draw import Drawer
from featviz.drawing.kernels import post_kernels
from featviz.drawing.tensorboard import Board
from featviz.errors import FeatvizError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel, ModelOptions
from featviz.pipeline import dry_run, limits, shared_basis
from featviz.pipeline.encoders import Background
from featviz.pipeline.prepare import Prepared, RunOptions, find, prepare
from featviz.pipeline.processes import ALONE, World
from featviz.pipeline.resume import Journal, check_destination, open_store, run_record
from featviz.pipeline.session import Session, Task
from featviz.pipeline.signals import stop_requests
from featviz.records import ImageResult, Limits, RunResult, Sample
from featviz.rundir import apart, write
from featviz.rundir.write import RunDirectory

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
    team: World = ALONE,
) -> RunResult:
    """Draw the feature maps of images into a run directory.

    Args:
        progress: called with all there is to know of each image, in their order. The result has
            only their names and errors, so that it does not grow with every picture.
        team: the processes that divide the images among them; this is one of them.

    Raises:
        FeatvizError: nothing could be begun, or the run directory failed. What goes wrong with
            one image is in its result instead.
    """
    share = team.share(options.shard)
    found = team.at_first(partial(_find, model, arguments, options, stdin))
    prepared = prepare(model, found, options)
    samples = share.of(prepared.samples)
    allowed = _check_limits(prepared, samples, options, team)
    with _destination(options, team) as options:
        log_book = Journal(run_record(prepared, options), prepared.samples)
        folder = team.at_first(partial(_begin, options, log_book, prepared))
        seen = _Seen(log_book, progress, len(samples))
        with (
            _in_any_case(partial(_end, log_book, folder, team)),
            tensorboard.opened(options.tensorboard, options.out) as board,
        ):
            task = _task(prepared, options, allowed, log_book.fingerprint, folder, board)
            interrupted = _visit_all(Session(task, folder, seen), samples, options, seen)
    return RunResult(
        options.archive or options.out,
        tuple(seen.results),
        tuple(sample.name for sample in samples if sample.name in log_book.missing),
        interrupted,
        seen.pictures,
    )


def _find(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: RunOptions,
    stdin: BinaryIO | None,
) -> list[Sample]:
    """The images; and what can be known to be wrong before the model is loaded, said."""
    found = find(arguments, options, stdin)
    names = (None,) if isinstance(model, LoadedModel) else (model.spec, model.arch, model.weights)
    place = (options.out, "--out") if options.archive is None else (options.archive, "--archive")
    apart.check_apart(*place, [*images.files_of(found), *apart.model_files(*names)])
    check_destination(model, options)
    return found


class _Seen:
    """Notes the images as they are finished, and passes them on."""

    def __init__(self, log_book: Journal, progress: Progress, total: int) -> None:
        self.log_book, self.progress, self.total = log_book, progress, total
        self.results: list[ImageResult] = []
        self.pictures = 0

    def __call__(self, result: ImageResult) -> None:
        brief = ImageResult(result.image, result.folder, error=result.error, kept=result.kept)
        self.results.append(brief)
        self.pictures += len(result.captures)
        self.log_book.add(result)
        self.progress(result, self.total)

    @property
    def last_failed(self) -> bool:
        """Whether the image that was finished last has failed."""
        return bool(self.results) and self.results[-1].error is not None


def _check_limits(
    prepared: Prepared, samples: Sequence[Sample], options: RunOptions, team: World
) -> Limits:
    """What this process may write; a team shares the limits as it shares the images."""
    if team.size == 1:
        dry_run.check_limits(prepared, len(samples), options)
        return options.limits
    dry_run.check_limits(prepared, len(prepared.samples), options)
    return limits.part(options.limits, len(samples), len(prepared.samples))


def _begin(options: RunOptions, log_book: Journal, prepared: Prepared) -> RunDirectory:
    folder = open_store(options, log_book.record)
    folder.refuse_links(log_book.names)
    log_book.write(folder)
    shared_basis.settle(folder, prepared, options)
    return folder


def _end(log_book: Journal, folder: RunDirectory, team: World) -> None:
    """The first process writes what became of the images of all; the others wait for it."""
    try:
        shared = team.gather(log_book.errors)
    except FeatvizError:
        if team.first:
            log_book.write(folder)
        raise
    for errors in shared:
        log_book.errors |= errors
    log_book.missing = team.at_first(partial(log_book.write, folder))


def _task(
    prepared: Prepared,
    options: RunOptions,
    allowed: Limits,
    fingerprint: str,
    folder: RunDirectory,
    board: Board | None,
) -> Task:
    if board is not None:
        post_kernels(prepared.model.module, prepared.layers, board)
    return Task(
        prepared.model,
        prepared.layers,
        prepared.plan,
        Drawer(options.draw, shared_basis.read(folder, options)),
        options.inputs,
        fingerprint,
        allowed,
        board,
        {sample.name: step for step, sample in enumerate(prepared.samples)},
    )


def _visit_all(
    session: Session, samples: Sequence[Sample], options: RunOptions, seen: _Seen
) -> bool:
    """Show the images to the model, one by one, until they end, or a signal ends them (True)."""
    module, gradients = session.task.model.module, options.passes.gradients
    with (
        in_eval_mode(module, gradients),
        _shared_cores(options.jobs) as background,
        stop_requests() as stop,
        _in_any_case(session.settle),
    ):
        for sample in samples:
            if stop.is_set() or (options.fail_fast and seen.last_failed):
                break
            if not (options.resume and session.keep(sample)):
                session.visit(sample, background)
    return stop.is_set()


@contextmanager
def _destination(options: RunOptions, team: World) -> Iterator[RunOptions]:
    """A folder of its own for a run that becomes an archive, of whatever it holds at the end."""
    if options.archive is None:
        yield options
        return
    room = team.at_first(partial(write.room_for_archive, options.archive, options.overwrite))
    inside = replace(options, out=room / write.ROOM, overwrite=False)
    try:
        with _in_any_case(partial(_pack, inside) if team.first else lambda: None):
            yield inside
    finally:
        if team.first:
            shutil.rmtree(room, ignore_errors=True)


def _pack(inside: RunOptions) -> None:
    if inside.archive is not None and (inside.out / write.RUN_FILE).is_file():
        write.pack(inside.out, inside.archive)


@contextmanager
def _in_any_case(task: Callable[[], object]) -> Iterator[None]:
    """Do something at the end; of a block that failed, what fails here is no news."""
    try:
        yield
    except BaseException:
        with suppress(FeatvizError, BrokenPipeError):
            task()
        raise
    task()


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
