"""The story of `run`: from a model and images to a run directory."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, BinaryIO, Protocol

import torch

from featviz.drawing import scan, tensorboard
from featviz.drawing.kernels import post_kernels
from featviz.errors import UploadError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.images import find
from featviz.models.load import LoadedModel, ModelOptions, mistakes_first
from featviz.pipeline import dry_run, shared_basis
from featviz.pipeline.dealing import Deal, with_next
from featviz.pipeline.encoders import STEP_BACK, Background
from featviz.pipeline.limits import check_written
from featviz.pipeline.options import RunOptions
from featviz.pipeline.place import held, in_any_case, place
from featviz.pipeline.prepare import Prepared, find_images, prepare
from featviz.pipeline.processes import ALONE, World
from featviz.pipeline.resume import (
    RunDocument,
    check_destination,
    forget_gone,
    names_to_clear,
    open_store,
    open_stored,
    run_record,
)
from featviz.pipeline.session import Session
from featviz.pipeline.signals import stop_requests
from featviz.records import ImageResult, Limits, RunResult, Sample, Written
from featviz.rundir import destination
from featviz.rundir.store.objects import ObjectStore
from featviz.rundir.store.run import StoredRun
from featviz.rundir.write import RunDirectory
from featviz.text import counted, listed, quoted

log = logging.getLogger(__name__)

QUEUE_BYTES = 64 * 2**20
"""Tiles that may wait for an encoder."""

_NAMED = 5
"""Layers that gave NaN or infinite values which a warning names."""

SAVED_EVERY = 5.0
"""Seconds between two writings of run.json while a run goes on."""

Progress = Callable[[ImageResult, int], None]
"""Called with each finished image and how many there are in all."""


@dataclass(frozen=True)
class Errand:
    """A run as those know it who draw its images in other processes."""

    images: tuple[Sample, ...]
    """As they were found."""
    samples: tuple[Sample, ...]
    """As the model takes them: what is drawn."""
    options: RunOptions
    record: Mapping[str, Any]
    """What run.json says of what decides about the pictures."""
    folder: Path
    """Where relative paths begin."""


class Others(Protocol):
    """Other processes that draw the images of a run."""

    def draw(
        self, errand: Errand, report: Callable[[ImageResult], None], stopped: Callable[[], bool]
    ) -> None:
        """Draw all images, report each in their order, and stop where `stopped` says so."""


def run(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: RunOptions,
    progress: Progress = lambda image, total: None,
    stdin: BinaryIO | None = None,
    team: World = ALONE,
    others: Others | None = None,
) -> RunResult:
    """Draw the feature maps of images into a run directory.

    Args:
        progress: called with all there is to know of each image, in their order. The result has
            only their names and errors, so that it does not grow with every picture.
        stdin: where the list of images is read for the argument `-`; None takes the process's own.
        team: the processes that divide the images among them; this is one of them.
        others: who draws the images; this process by default.

    Raises:
        FeatvizError: nothing could be begun, or the run directory could not be written. What goes
            wrong with one image is in its result instead.
    """
    # numba is loaded while the model is
    Thread(target=scan.compiled, name="featviz-loops", daemon=True).start()
    with held(options, team):
        return _run(model, arguments, options, progress, stdin, team, others)


def _run(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: RunOptions,
    progress: Progress,
    stdin: BinaryIO | None,
    team: World,
    others: Others | None,
) -> RunResult:
    share = team.share(options.shard)
    images = team.at_first(partial(_find, model, arguments, options, stdin, team))
    prepared = prepare(model, images, options)
    samples = share.of(prepared.samples)
    dry_run.check_limits(prepared, len(samples))
    with place(options, team) as inside:
        prepared = replace(prepared, options=inside)
        document = RunDocument(run_record(prepared), prepared.samples)
        stored = None if inside.url is None else StoredRun(inside.out, ObjectStore(inside.url))
        team.at_first(partial(_begin, prepared, document, team, stored))
        folder = stored or RunDirectory(inside.out, inside.durable)
        deal = Deal(team, samples, "images", [sample.archive for sample in samples])
        finished = _Finished(document, progress, deal, folder if team.first else None)
        with (
            in_any_case(partial(_end, document, folder, team)),
            tensorboard.opened(options.board, options.out, options.step, inside.resume) as board,
        ):
            if board is not None and team.first:
                with in_eval_mode(prepared.model.module):
                    post_kernels(prepared.model.module, prepared.layers, board)
            if others is None:
                noted = finished.add, board, team
                session = Session(prepared, folder, document.fingerprint, *noted)
                interrupted = _visit_all(session, deal, finished)
            else:
                errand = _errand(prepared, images, document)
                interrupted = _let_draw(others, errand, finished, (folder, options.limits))
            finished.warn()
    return RunResult(
        options.target,
        tuple(finished.results),
        tuple(s.name for s in samples if team.first and s.name in document.missing),
        interrupted,
        finished.pictures,
    )


def _find(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: RunOptions,
    stdin: BinaryIO | None,
    team: World,
) -> list[Sample]:
    """Find the images, and refuse what can be known to be wrong before the model is loaded."""
    samples = find_images(arguments, options, stdin)
    names = (None,) if isinstance(model, LoadedModel) else (model.spec, model.arch, model.weights)
    option = "--out" if options.archive is None else "--archive"
    if isinstance(options.target, Path):
        inputs = [*find.files_of(samples), *destination.model_files(*names)]
        destination.check_apart(options.target, option, inputs)
    if team.begun is None:
        with mistakes_first(model):
            check_destination(model, options)
    return samples


def _begin(
    prepared: Prepared, document: RunDocument, team: World, stored: StoredRun | None
) -> None:
    options, about = prepared.options, (document.record, document.fingerprint)
    folder = open_store(options, *about) if stored is None else open_stored(stored, options, *about)
    folder.refuse_links(document.names)
    if options.resume:
        forget_gone(folder, document.names, options.prune)
    left = folder.clear_images(names_to_clear(folder, prepared.samples, options.shard))
    for way in left:
        log.warning("%s stays: it holds files that featviz did not write", quoted(way))
    document.write(folder)
    team.begin(options.out)
    shared_basis.write_bases(folder, prepared)


class _Finished:
    """The images that are finished: noted in run.json's document, and passed on to the caller."""

    def __init__(
        self,
        document: RunDocument,
        progress: Progress,
        deal: Deal[Sample],
        folder: RunDirectory | None,
    ) -> None:
        """`folder` is where run.json is written now and then; None where another process does."""
        self.document, self.progress, self.deal = document, progress, deal
        self.folder, self._due = folder, monotonic() + SAVED_EVERY
        self.results: list[ImageResult] = []
        """Only the names and errors of the images."""
        self.pictures = 0
        self._nonfinite: Counter[str] = Counter()
        """By layer: the images for which it gave NaN or infinite values."""

    def add(self, result: ImageResult) -> None:
        """Note an image whose files are written, or which has failed."""
        brief = ImageResult(result.image, result.folder, error=result.error, kept=result.kept)
        self.results.append(brief)
        self.pictures += len(result.captures)
        rows = () if result.kept else result.captures
        names = [row.layer or row.type for row in rows if row.nonfinite]
        self._nonfinite.update(dict.fromkeys(names, 1))
        self.document.add(result)
        self._save()
        self.progress(result, self.deal.expected)

    def _save(self) -> None:
        """Write run.json if it is time: who is killed leaves one that is a few seconds old. It
        takes a fiftieth of the time at most, however long it grows."""
        began = monotonic()
        if self.folder is not None and began >= self._due:
            with suppress(UploadError):  # a store that does not answer may do so at the end
                self.document.write(self.folder)
            self._due = monotonic() + max(SAVED_EVERY, 50 * (monotonic() - began))

    def warn(self) -> None:
        """Say once which layers gave values that no colour stands for."""
        layers = [f"{quoted(name)} ({counted(n, 'image')})" for name, n in self._nonfinite.items()]
        if layers:
            log.warning("NaN or infinite values, shown in magenta: %s", listed(layers, _NAMED))

    @property
    def last_failed(self) -> bool:
        """Whether the image that was finished last has failed."""
        return bool(self.results) and self.results[-1].error is not None


def _visit_all(session: Session, deal: Deal[Sample], finished: _Finished) -> bool:
    """Show the images that this process gets to the model, one by one; True if a signal ended it
    before the last."""
    options = session.prepared.options
    with (
        in_eval_mode(session.prepared.model.module, options.passes.gradients),
        shared_cores(session.prepared) as background,
        session.ahead,
        stop_requests() as stop,
        in_any_case(session.settle),
    ):
        for sample, following in with_next(deal, session.readers):
            if options.fail_fast and finished.last_failed:
                deal.end()
                break
            if stop.is_set():
                break
            if not (options.resume and session.keep(sample)):
                session.visit(sample, background, following)
    return stop.is_set()


def _errand(prepared: Prepared, images: Sequence[Sample], document: RunDocument) -> Errand:
    """Limits are counted here, over all who draw."""
    options = replace(prepared.options, limits=Limits())
    samples = prepared.samples
    return Errand(tuple(images), samples, options, document.record, Path.cwd())


def _let_draw(
    others: Others, errand: Errand, finished: _Finished, within: tuple[RunDirectory, Limits]
) -> bool:
    """Let other processes draw the images; True if a signal ended it before the last."""
    (folder, limits), written = within, Written()

    def report(result: ImageResult) -> None:
        nonlocal written
        if result.error is None and limits != Limits():
            written += folder.image(result.image).size
            check_written(limits, written, result.folder)
        finished.add(result)

    with stop_requests() as stop:
        fails = errand.options.fail_fast
        others.draw(errand, report, lambda: stop.is_set() or (fails and finished.last_failed))
    return stop.is_set()


def _end(document: RunDocument, folder: RunDirectory, team: World) -> None:
    """Write run.json in the first process, with what became of the images of all processes; the
    others wait for it. Where one has died, or a signal has ended the wait, each of those that live
    writes what is known by then."""
    team.leave(document.errors)
    try:
        shared = team.gather(document.errors)
    except BaseException:
        _write_without_the_dead(document, folder, team)
        raise
    for errors in shared:
        document.errors |= errors
    document.missing = team.at_first(partial(document.write, folder))


def _write_without_the_dead(document: RunDocument, folder: RunDirectory, team: World) -> None:
    """Write run.json until it has the notes of all who have left one: so the last file that is
    written tells all, whoever writes it."""
    known: list[dict[str, str | None]] | None = None
    while (notes := team.notes()) != known:
        known = notes
        for errors in notes:
            document.errors |= errors
        document.missing = document.write(folder)


@contextmanager
def shared_cores(prepared: Prepared) -> Iterator[Background]:
    """Encoders beside the model: `jobs` threads, or a quarter of the cores, at least two.

    Where threads can step back (Linux) torch gets all cores, and the encoders what it leaves. Else
    it leaves them a quarter of the cores for as long as this lasts: each of its operations waits
    for the slowest of its threads. A run never decides by what it measures, and so gives the same
    values each time.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    share, threads = max(1, cores // 4), torch.get_num_threads()
    torch.set_num_threads(max(1, min(threads, cores if STEP_BACK else cores - share)))
    try:
        jobs = prepared.options.jobs or max(2, share)
        with Background(jobs, QUEUE_BYTES) as background:
            yield background
    finally:
        torch.set_num_threads(threads)
