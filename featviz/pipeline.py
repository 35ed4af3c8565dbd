"""The story of `run`: from a model and images to a run directory."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torchvision
from torch import Tensor

from featviz import __version__, grouping, images, palette, passes, plans, scale
from featviz.background import Background
from featviz.borrowed import borrowed
from featviz.drawing import Drawer
from featviz.errors import ImageError, UsageError
from featviz.hints import HintBook, read_told
from featviz.models.load import LoadedModel, ModelOptions, load_model
from featviz.models.preprocess import InputOptions, Preprocess
from featviz.probe import choose_layers
from featviz.records import DrawOptions, ImageResult, Layer, PassOptions, RunResult, Sample
from featviz.session import Session, Task
from featviz.store import RunDirectory

log = logging.getLogger(__name__)

QUEUE_BYTES = 64 * 2**20
"""Tiles that may wait for an encoder."""


@dataclass(frozen=True)
class RunOptions:
    """Everything that `run` can be told beside the model and the images."""

    layers: str | None = None
    """Selectors; None takes one layer for each stage."""
    out: Path = Path("featviz-out")
    overwrite: bool = False
    nul_separated: bool = False
    """`-` reads NUL-separated paths."""
    draw: DrawOptions = field(default_factory=DrawOptions)
    inputs: InputOptions = field(default_factory=InputOptions)
    passes: PassOptions = field(default_factory=PassOptions)


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
    check_options(options)
    found = images.find_samples(arguments, stdin, options.nul_separated)
    loaded = load_model(model, options.inputs) if isinstance(model, ModelOptions) else model
    samples = grouped(found, loaded.preprocess)
    blank = blank_input(loaded, samples, options.inputs)
    layers = choose_layers(loaded, options.layers, blank, options.draw.tensor_layout)
    plan = plans.plan(loaded, options.passes)
    book = HintBook(loaded.module, blank[0].shape, options.draw.tensor_layout)
    passes.try_out(loaded, plan, blank, book)
    store = RunDirectory.create(options.out, options.overwrite)
    results: list[ImageResult] = []

    def report(result: ImageResult) -> None:
        results.append(result)
        progress(result, len(samples))

    def note() -> None:
        store.write_run(run_record(loaded, layers, options, results, len(samples)))

    note()
    try:
        task = Task(loaded, layers, plan, Drawer(options.draw), options.inputs)
        session = Session(task, store, report)
        gradients = options.passes.gradients
        with borrowed(loaded.module, gradients), _shared_cores() as background:
            try:
                for sample in samples:
                    session.visit(sample, background)
            except KeyboardInterrupt:
                session.settle()  # the image before this one is complete but for its manifest
                raise
            session.settle()
    finally:
        note()
    return RunResult(options.out, tuple(results))


def check_options(options: RunOptions) -> None:
    """Refuse bad values before any work.

    Raises:
        UsageError: names the option, its value and what it takes.
    """
    draw = options.draw
    for name in ("nrow", "scale", "min_tile", "max_maps", "max_slices"):
        value = getattr(draw, name)
        if value is not None and value < 1:
            raise UsageError(
                f"--{name.replace('_', '-')} {value} is below 1", "give a whole number"
            )
    if draw.padding < 0:
        raise UsageError(f"--padding {draw.padding} is below 0", "give pixels")
    if not 0 <= draw.pad_value <= 1:
        raise UsageError(f"--pad-value {draw.pad_value} is outside 0..1", "0 is black, 1 white")
    for told in draw.tensor_layout:
        read_told(told)
    palette.check_cmap(draw.cmap)
    images.check_background(options.inputs.background)
    for name in ("frames", "inputs"):
        value = getattr(options.inputs, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value} is below 1", "give a whole number")
    scale.parse_scale(draw.normalize)
    plans.check_options(options.passes)


def grouped(samples: list[Sample], preprocess: Preprocess) -> list[Sample]:
    """Samples as the model takes them: images, clips, or several images at once.

    Raises:
        UsageError: images are left over.
    """
    if preprocess.frames is not None:
        return grouping.clips(samples)
    return samples if preprocess.inputs == 1 else grouping.together(samples, preprocess.inputs)


def blank_input(
    loaded: LoadedModel, samples: Sequence[Sample], inputs: InputOptions
) -> list[Tensor]:
    """Zeros in the shapes of the first readable sample's inputs."""
    preprocess = loaded.preprocess
    for sample in samples if preprocess.own_size else ():
        try:
            picture = images.decode(sample, inputs.exif, inputs.background, preprocess.frames)
            args = preprocess(picture.images)
        except ImageError:
            continue
        return [torch.zeros_like(arg) for arg in args]
    return preprocess.blank()


@contextmanager
def _shared_cores() -> Iterator[Background]:
    """Encoders beside the model: a quarter of the cores, at least one, is theirs.

    torch gets the others for as long as this lasts: where its threads and the encoders together
    outnumber the cores, each of its operations waits for the slowest of them (measured on two
    cores with resnet50: about twice the time).
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    writers, threads = max(1, cores // 4), torch.get_num_threads()
    torch.set_num_threads(max(1, min(threads, cores - writers)))
    try:
        with Background(writers, QUEUE_BYTES) as background:
            yield background
    finally:
        torch.set_num_threads(threads)


def run_record(
    model: LoadedModel,
    layers: Sequence[Layer],
    options: RunOptions,
    results: Sequence[ImageResult],
    total: int,
) -> dict[str, Any]:
    """The content of run.json, with what is known by now; nothing of when and where."""
    return {
        "featviz": __version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "device": model.device.type,
        "model": model.source,
        "preprocessing": model.preprocess.words,
        "layers": [layer.name for layer in layers],
        "options": {
            "layers": options.layers,
            **asdict(options.draw),
            **asdict(options.inputs),
            **asdict(options.passes),
        },
        "images": {"total": total, "complete": [r.image for r in results if r.error is None]},
        "failures": [{"image": r.image, "error": r.error} for r in results if r.error],
    }
