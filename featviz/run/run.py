"""The story of `run`: from a model and images to a run directory."""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from threading import Event, current_thread, main_thread
from time import monotonic
from types import FrameType

from featviz.drawing import tensorboard
from featviz.drawing.channels import warn_of_lacking
from featviz.drawing.kernels import post_kernels
from featviz.drawing.tensorboard import Board
from featviz.errors import FeatvizError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel
from featviz.options import ModelOptions, RunOptions
from featviz.records import Outcome, Sample, Shard
from featviz.run.draw import Drawing, draw_all, draw_images
from featviz.run.prepare import Prepared, files_read, find_images, prepare
from featviz.run.results import ImageResult, RunResult
from featviz.run.resume import (
    RunDocument,
    alone_among_shards,
    locked_destination,
    open_run,
    run_record,
)
from featviz.run.workers import SIGNALS
from featviz.rundir.folder import Folder
from featviz.rundir.place import check_apart
from featviz.rundir.write import RunDirectory
from featviz.text import counted, layer_named, listed, quoted

log = logging.getLogger(__name__)

_NAMED = 5  # layers that gave NaN or infinite values which a warning names
SAVED_EVERY = 5.0  # seconds between two writings of run.json while a run goes on
_SHARE_OF_SAVING = 0.02  # of the time that may go into it, however long run.json grows
Progress = Callable[[ImageResult, int], None]
"""Called with each finished image and how many there are in all."""


def run(
    model: ModelOptions | LoadedModel,
    images: Sequence[str],
    options: RunOptions,
    progress: Progress,
) -> RunResult:
    """Draw the feature maps of images into a run directory.

    Args:
        model: as the user named it, or loaded already.
        images: files, folders, archives, URLs or globs, as on the command line.
        progress: called with all there is to know of each image. The result has only
            names and errors, so that it does not grow with every picture.

    Raises:
        FeatvizError: nothing could be begun, or the run directory could not be written.
    """
    # what can be refused before the lock and the model is refused here
    samples = find_images(images, options)
    check_apart(options.folder, "--out", files_read(model, samples))
    with locked_destination(options) as root:
        prepared = prepare(model, samples, options)
        samples_of_shard = (options.shard or Shard()).of(prepared.samples)
        document = RunDocument(run_record(prepared), prepared.samples)
        run_directory = open_run(root, prepared, document, samples_of_shard)
        try:
            with _board(prepared) as board, stop_requests() as stop:
                drawing = Drawing(prepared, run_directory, document.fingerprint, board)
                results = _draw(drawing, samples_of_shard, document, progress, stop)
        except BaseException:
            # run.json names what is complete; what is raised matters more than a fault
            # of this
            with suppress(FeatvizError, BrokenPipeError), alone_among_shards(options):
                document.write(run_directory)
            raise
        with alone_among_shards(options):
            missing = set(document.write(run_directory))
    missing_of_shard = [s.name for s in samples_of_shard if s.name in missing]
    return RunResult(
        options.folder,
        images=tuple(results),
        missing=tuple(missing_of_shard),
        interrupted=stop.is_set(),
        pictures=sum(image.pictures for image in results),
        whole=not missing,
        all_failures=document.failed,
        names=tuple(document.names),
    )


def _draw(
    drawing: Drawing,
    samples: Sequence[Sample],
    document: RunDocument,
    progress: Progress,
    stop: Event,
) -> list[ImageResult]:
    """Draw images and save run.json now and then; what became of each, without rows.
    Warns of values that are not finite, and of channels that layers lack.

    Args:
        samples: those of this shard.
        document: learns of each image.
        stop: ends it after the image under way.
    """
    images = []
    images_by_layer: Counter[str] = Counter()  # with NaN or infinite values
    chosen_channels = drawing.prepared.options.draw.channels
    channels: dict[str, range] = {}  # that there are, by the layer's label
    save_at = monotonic() + SAVED_EVERY
    with closing(draw_images(drawing, samples, stop)) as results:
        for result in results:
            document.errors[result.name] = result.error
            if not result.kept:
                # in the order of the model, each layer once
                images_by_layer.update(
                    {row.label: 1 for row in result.rows if row.nonfinite}
                )
                if chosen_channels is not None:
                    channels |= {row.label: range(row.maps) for row in result.rows}
            # of 10,000 images, rows would fill the memory; the manifests have them
            images.append(
                replace(result, rows=(), skipped=(), never_ran=(), outcome=Outcome())
            )
            # the last of several shards to end writes run.json for all of them
            is_shard = drawing.prepared.options.shard is not None
            began = monotonic()
            if began >= save_at and not is_shard:
                document.write(drawing.run_directory)
                seconds = monotonic() - began
                save_at = monotonic() + max(SAVED_EVERY, seconds / _SHARE_OF_SAVING)
            progress(result, len(samples))
    warn_of_lacking(chosen_channels, channels)
    _warn_of_nonfinite(images_by_layer)
    return images


def _warn_of_nonfinite(images_by_layer: Mapping[str, int]) -> None:
    """Name the layers with NaN or infinite values, and in how many images."""
    layers = [
        f"{layer_named(quoted(name))} ({counted(count, 'image')})"
        for name, count in images_by_layer.items()
    ]
    if layers:
        log.warning(
            "NaN or infinite values, shown in magenta: %s", listed(layers, _NAMED)
        )


@contextmanager
def _board(prepared: Prepared) -> Iterator[Board | None]:
    """TensorBoard's events of this run, in a folder of its own, with the kernels of its
    layers; None where the user wants none."""
    options = prepared.options
    if options.tensorboard is None:
        yield None
        return
    folder = tensorboard.run_folder(options.tensorboard, options.folder)
    with tensorboard.opened(folder, options.folder) as board:
        # kernels are the same for all images: once a run, by its first shard
        is_first = options.shard is None or options.shard.index == 0
        if board is not None and is_first and not options.resume:
            with in_eval_mode(prepared.model.module):
                post_kernels(prepared.model.module, prepared.layers, board)
        yield board


def draw_into(
    folder: Folder, prepared: Prepared, board: Board | None
) -> list[ImageResult]:
    """Draw all images of a run, in this process, into a folder, which is empty and
    becomes a run directory.

    Args:
        board: TensorBoard's events; None writes none.
    """
    document = RunDocument(run_record(prepared), prepared.samples)
    run_directory = RunDirectory(folder)
    drawing = Drawing(prepared, run_directory, document.fingerprint, board)
    results = list(draw_all(drawing, prepared.samples, Event()))
    document.errors = {result.name: result.error for result in results}
    document.write(run_directory)
    return results


@contextmanager
def stop_requests() -> Iterator[Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; the same signal once more
    raises KeyboardInterrupt (torchrun and schedulers send several). A signal stays
    ignored where whoever started this process has ignored it (`nohup`, or a shell's
    `&`). Outside of the main thread nothing sets the event."""
    event = Event()
    seen = set()

    def stop(number: int, frame: FrameType | None) -> None:
        if number in seen:
            raise KeyboardInterrupt
        seen.add(number)
        event.set()
        log.warning("stopping after this image; once more to stop at once")

    # Python sets handlers in its main thread alone
    if current_thread() is not main_thread():
        yield event
        return
    not_ignored = [
        number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, stop) for number in not_ignored}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
