"""The story of `run`: from a model and images to a run directory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import BinaryIO

from msgspec import structs

from featviz.drawing import tensorboard
from featviz.drawing.kernels import post_kernels
from featviz.drawing.tensorboard import Board
from featviz.drawing.values import compiled
from featviz.errors import FeatvizError, UploadError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.images import find
from featviz.layout.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.options import ModelOptions, RunOptions
from featviz.pipeline import dry_run
from featviz.pipeline.options import board_of
from featviz.pipeline.place import held, place, together
from featviz.pipeline.prepare import Prepared, find_images, prepare
from featviz.pipeline.resume import (
    RunDocument,
    check_destination,
    name_gone,
    names_to_clear,
    open_store,
    open_stored,
    run_record,
)
from featviz.pipeline.signals import stop_requests
from featviz.pipeline.visit import Visit, visit_all
from featviz.records import ImageResult, RunResult, Sample, Shard
from featviz.rundir import destination
from featviz.rundir.store import StoredRun
from featviz.rundir.write import RunDirectory
from featviz.text import counted, listed, quoted

log = logging.getLogger(__name__)

_NAMED = 5
"""Layers that gave NaN or infinite values which a warning names."""

SAVED_EVERY = 5.0
"""Seconds between two writings of run.json while a run goes on."""

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

    Args:
        progress: called with all there is to know of each image, in their order. The result has
            only their names and errors, so that it does not grow with every picture.
        stdin: where the list of images is read for the argument `-`; None takes the process's own.

    Raises:
        FeatvizError: nothing could be begun, or the run directory could not be written. What goes
            wrong with one image is in its result instead.
    """
    # numba is loaded while the model is
    Thread(target=compiled, name="featviz-loops", daemon=True).start()
    with held(options):
        prepared = prepare(model, _find(model, arguments, options, stdin), options)
        samples = (options.shard or Shard()).of(prepared.samples)
        dry_run.check_limits(prepared, len(samples))
        with place(options) as inside:
            return _draw(replace(prepared, options=inside), samples, options, progress)


def _find(
    model: ModelOptions | LoadedModel,
    arguments: Sequence[str],
    options: RunOptions,
    stdin: BinaryIO | None,
) -> list[Sample]:
    """Find the images, and refuse what can be known to be wrong before the model is loaded."""
    samples = find_images(arguments, options, stdin)
    names = (None,) if isinstance(model, LoadedModel) else (model.spec, model.arch, model.weights)
    if isinstance(options.target, Path):
        inputs = [*find.files_of(samples), *destination.model_files(*names)]
        destination.check_apart(options.target, "--out", inputs)
    check_destination(model, options)
    return samples


def _draw(
    prepared: Prepared, samples: Sequence[Sample], given: RunOptions, progress: Progress
) -> RunResult:
    """Draw these images, which are all or a shard's, into the place that the options name.

    Args:
        given: the options as the user gave them: the board's folder has the name of the run, not
            that of the hidden folder beside it.
    """
    options, summary = prepared.options, Summary()
    document = RunDocument(run_record(prepared), prepared.samples)
    folder = _begin(prepared, document, samples)
    save_next = monotonic() + SAVED_EVERY
    with (
        _ended(document, folder, options),
        tensorboard.opened(board_of(given), given.out) as board,
        stop_requests() as stop,
    ):
        if board is not None and not options.resume and (options.shard or Shard()).index == 0:
            with in_eval_mode(prepared.model.module):
                post_kernels(prepared.model.module, prepared.layers, board)
        visit = Visit(prepared, folder, document.fingerprint, board)
        with closing(visit_all(visit, samples, stop)) as results:
            for result in results:
                summary.add(result)
                document.errors[result.image] = result.error
                if options.shard is None and (now := monotonic()) >= save_next:
                    with suppress(UploadError):  # the store may answer again at the end
                        document.write(folder)
                    # a fiftieth of the time at most, however long run.json grows
                    save_next = monotonic() + max(SAVED_EVERY, 50 * (monotonic() - now))
                progress(result, len(samples))
        summary.warn()
    return RunResult(
        given.target,
        tuple(summary.images),
        tuple(sample.name for sample in samples if sample.name in document.missing),
        stop.is_set(),
        summary.pictures,
        not document.missing,
        document.failed,
    )


def _begin(prepared: Prepared, document: RunDocument, samples: Sequence[Sample]) -> RunDirectory:
    """Open the place of the run; `samples` are those of this process."""
    options, about = prepared.options, (document.record, document.fingerprint)
    with together(options):
        if options.url is None:
            folder = open_store(options, *about, samples)
        else:
            folder = open_stored(StoredRun(options.out, options.url), options, *about, samples)
        folder.refuse_links(document.names)
        if options.resume:
            name_gone(folder, document.names)
        folder.clear_images(names_to_clear(folder, prepared.samples, options.shard))
        document.write(folder)
    return folder


@contextmanager
def _ended(document: RunDocument, folder: RunDirectory, options: RunOptions) -> Iterator[None]:
    """Write run.json at the end of the block, also where it fails: then errors of that are left
    out. The last of several shards knows what became of all images, by the manifests and by what
    the others have written into run.json."""

    def write() -> None:
        with together(options):
            if options.shard is not None:
                folder.refresh()
            document.missing = document.write(folder)

    try:
        yield
    except BaseException:
        with suppress(FeatvizError):
            write()
        raise
    write()


@dataclass
class Summary:
    """What became of the images so far."""

    images: list[ImageResult] = field(default_factory=list)
    """Only their names and errors."""
    pictures: int = 0
    nonfinite: Counter[str] = field(default_factory=Counter)
    """By layer: the images for which it gave NaN or infinite values."""

    def add(self, result: ImageResult) -> None:
        """Note an image that is done."""
        self.images.append(
            ImageResult(result.image, result.folder, error=result.error, kept=result.kept)
        )
        self.pictures += len(result.captures)
        rows = () if result.kept else result.captures
        names = [row.layer or row.type for row in rows if row.nonfinite]
        self.nonfinite.update(dict.fromkeys(names, 1))

    def warn(self) -> None:
        """Say once which layers gave values that no colour stands for."""
        layers = [f"{quoted(name)} ({counted(n, 'image')})" for name, n in self.nonfinite.items()]
        if layers:
            log.warning("NaN or infinite values, shown in magenta: %s", listed(layers, _NAMED))


class SeriesDrawer:
    """Draws the same images by the same model, whose weights change."""

    def __init__(self, model: LoadedModel, images: Sequence[str], options: RunOptions) -> None:
        """Find the images, and choose the layers by a forward pass on zeros.

        Raises:
            FeatvizError: a bad option, the images do not fit the model, or no layer is chosen.
        """
        self.prepared = prepare(model, find_images(images, options), options)
        self._books: dict[tuple[int, ...], HintBook] = {}

    def draw(self, model: LoadedModel, folder: Path, board: Board | None) -> list[ImageResult]:
        """Draw all images into a folder, which is empty and becomes a run directory.

        Args:
            model: the same as before, with new weights, maybe on another device.
            board: what TensorBoard is to show of this step.

        Raises:
            StoreError: it cannot be written. What goes wrong with one image is in its result.
        """
        options = structs.replace(self.prepared.options, out=folder)
        prepared = replace(self.prepared, model=model, options=options)
        document, store = RunDocument(run_record(prepared), prepared.samples), RunDirectory(folder)
        visit = Visit(prepared, store, document.fingerprint, board, self._books)
        results = list(visit_all(visit, prepared.samples, Event()))
        document.errors = {result.image: result.error for result in results}
        document.write(store)
        return results
