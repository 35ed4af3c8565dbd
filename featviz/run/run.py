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
from featviz.drawing.channels import warn_of_missing
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

_NAMED = 5  # how many layers with NaN or infinite values a warning names
SAVED_EVERY = 5.0  # at least this many seconds lie between two writings of run.json
_SHARE_OF_SAVING = 0.02  # at most this share of the time goes into writing run.json
Progress = Callable[[ImageResult, int], None]
"""Called with each finished image, and with the number of all images."""


def run(
    model: ModelOptions | LoadedModel,
    images: Sequence[str],
    options: RunOptions,
    progress: Progress,
) -> RunResult:
    """Draw the feature maps of images into a run directory.

    Args:
        model: the options that name a model, or a loaded model.
        images: files, folders, archives, URLs or globs, as on the command line.
        progress: called with the full result of each image. The results that are
            returned lack the rows of their pictures, which would fill the memory.

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
            # Write run.json, which names the complete images. An error of this is
            # dropped, since the first error matters more.
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
    """Draw images, and write run.json now and then. Warns of NaN and infinite values, and
    of chosen channels that a layer does not have.

    Args:
        samples: the images of this shard.
        document: gets the error of each image, or None for an image without one.
        stop: ends the loop after the current image.

    Returns:
        The results of the images, without the rows of their pictures.
    """
    images = []
    # by label of the layer: the number of images with NaN or infinite values
    images_by_layer: Counter[str] = Counter()
    chosen_channels = drawing.prepared.options.draw.channels
    channels: dict[str, range] = {}  # all channels of a layer, by its label
    save_at = monotonic() + SAVED_EVERY
    with closing(draw_images(drawing, samples, stop)) as results:
        for result in results:
            document.errors[result.name] = result.error
            if not result.kept:
                # a layer may have several rows; the dict counts it once
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
    warn_of_missing(chosen_channels, channels)
    _warn_of_nonfinite(images_by_layer)
    return images


def _warn_of_nonfinite(images_by_layer: Mapping[str, int]) -> None:
    """Warn of layers with NaN or infinite values.

    Args:
        images_by_layer: in how many images a layer has such values, by its label.
    """
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
    """Open TensorBoard's events of this run, and write the kernels of its layers into
    them. None if the user wants no events."""
    options = prepared.options
    if options.tensorboard is None:
        yield None
        return
    folder = tensorboard.run_folder(options.tensorboard, options.folder)
    with tensorboard.open_board(folder, options.folder) as board:
        # kernels are the same for all images, so only the first shard writes them
        is_first = options.shard is None or options.shard.index == 0
        if board is not None and is_first and not options.resume:
            with in_eval_mode(prepared.model.module):
                post_kernels(prepared.model.module, prepared.layers, board)
        yield board


def draw_into(
    folder: Folder, prepared: Prepared, board: Board | None
) -> list[ImageResult]:
    """Draw all images of a run in this process.

    Args:
        folder: an empty folder, which becomes the run directory.
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
    """Give the block an event that SIGINT, SIGTERM or SIGHUP sets. A second signal with
    the same number raises KeyboardInterrupt; with another number it does nothing, since
    torchrun and schedulers send several. Signals that this process was started to ignore
    (`nohup`, or a shell's `&`) stay ignored. In another than the main thread, nothing
    sets the event."""
    event = Event()
    seen = set()

    def stop(number: int, frame: FrameType | None) -> None:
        """Handle a signal: set the event, or raise KeyboardInterrupt."""
        if number in seen:
            raise KeyboardInterrupt
        seen.add(number)
        event.set()
        log.warning("stopping after this image; once more to stop at once")

    # Python allows handlers of signals only in the main thread
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
