"""What `run` and `--dry-run` do before any image goes through the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from featviz import images
from featviz.drawing import colormap, normalize, tensorboard
from featviz.drawing.picture import check_format
from featviz.errors import ImageError, UsageError
from featviz.gradients import forward_backward as passes
from featviz.gradients import options as plans
from featviz.gradients.options import PassPlan
from featviz.images import group
from featviz.layout.overrides import HintBook, read_told
from featviz.models.load import LoadedModel, ModelOptions, load_model
from featviz.models.preprocess import InputOptions, Preprocess
from featviz.pipeline.dry_pass import choose_layers
from featviz.records import Count, DrawOptions, Layer, Limits, PassOptions, Sample, Shard
from featviz.records.checking import check


@dataclass(frozen=True)
class RunOptions:
    """Everything that `run` can be told beside the model and the images."""

    layers: str | None = None
    """Selectors; None takes one layer for each stage."""
    out: Path = Path("featviz-out")
    overwrite: bool = False
    resume: bool = False
    """Go on with the run that `out` holds."""
    archive: Path | None = None
    """Pack the run into this zip file, and leave no folder."""
    nul_separated: bool = False
    """`-` reads NUL-separated paths."""
    fail_fast: bool = False
    """Stop at the first image that fails."""
    jobs: Count | None = None
    """Encoder threads; None takes a quarter of the cores."""
    tensorboard: Path | None = None
    """Folder for TensorBoard's events."""
    limits: Limits = field(default_factory=Limits)
    shard: Shard | None = None
    """The share of the images that is done; None is all, or torchrun's."""
    draw: DrawOptions = field(default_factory=DrawOptions)
    inputs: InputOptions = field(default_factory=InputOptions)
    passes: PassOptions = field(default_factory=PassOptions)


@dataclass(frozen=True)
class Prepared:
    """All that is known before the first image."""

    model: LoadedModel
    samples: tuple[Sample, ...]
    """Of all shards."""
    blank: list[Tensor]
    """Zeros in the shapes of the model's inputs."""
    layers: list[Layer]
    plan: PassPlan


def prepare(
    model: ModelOptions | LoadedModel, found: Sequence[Sample], options: RunOptions
) -> Prepared:
    """Load the model, group the images that were found as it takes them, choose the layers.

    Raises:
        FeatvizError: something of this cannot be had; nothing was written.
    """
    loaded = load_model(model, options.inputs) if isinstance(model, ModelOptions) else model
    samples = grouped(found, loaded.preprocess)
    blank = blank_input(loaded, samples, options.inputs)
    layers = choose_layers(loaded, options.layers, blank, options.draw.tensor_layout)
    plan = plans.plan(loaded, options.passes)
    book = HintBook(loaded.module, blank[0].shape, options.draw.tensor_layout)
    passes.try_out(loaded, plan, blank, book)
    return Prepared(loaded, tuple(samples), blank, layers, plan)


def find(
    arguments: Sequence[str], options: RunOptions, stdin: BinaryIO | None = None
) -> list[Sample]:
    """Check the options and find the images.

    Raises:
        UsageError: a bad option, or no images.
    """
    check_options(options)
    return images.find_samples(arguments, stdin, options.nul_separated, options.out)


def check_options(options: RunOptions) -> None:
    """Refuse bad values before any work.

    Raises:
        UsageError: names the option, its value and what it takes.
    """
    check(options)
    _check_drawing(options.draw)
    images.check_background(options.inputs.background)
    plans.check_options(options.passes)
    if options.tensorboard is not None:
        tensorboard.require()
    if options.resume and (options.overwrite or options.archive):
        other = "--overwrite" if options.overwrite else "--archive"
        raise UsageError(f"--resume and {other} exclude each other", "give one of them")


def _check_drawing(draw: DrawOptions) -> None:
    for told in draw.tensor_layout:
        read_told(told)
    colormap.check_cmap(draw.cmap)
    normalize.parse_scale(draw.normalize)
    check_format(draw.format)
    _check_views(draw)


def _check_views(draw: DrawOptions) -> None:
    """A threshold that is none, and options that do not go together."""
    if draw.collapse is not None and not 0 < draw.collapse <= 1:
        raise UsageError(
            f"--collapse {draw.collapse:g} is no correlation above 0", "0.98, or 1 for equal maps"
        )
    needless = _needless(draw)
    if needless:
        raise UsageError(*needless[0])


def _needless(draw: DrawOptions) -> list[tuple[str, str]]:
    """What would do nothing, and why."""
    alone = [("--order", draw.order != "index"), ("--collapse", draw.collapse is not None)]
    alone += [("--labels", draw.labels), ("--max-maps", draw.max_maps is not None)]
    own = [("--normalize", draw.normalize != "auto"), ("--cmap", draw.cmap != "auto")]
    pca, none = draw.reduce == "pca", draw.reduce is None
    found = [
        (f"{name} and --reduce exclude each other", "--reduce leaves one tile of all channels")
        for name, given in alone
        if given and not none
    ]
    found += [
        (f"{name} and --reduce pca exclude each other", "three components are three colours")
        for name, given in own
        if given and pca
    ]
    if draw.shared_basis and not pca:
        found.append(("--shared-basis is for --reduce pca", "add it, or leave this out"))
    if draw.first is not None and not draw.figure:
        found.append(("--first is for --figure", "--max-maps limits the maps of the grids"))
    return found


def grouped(samples: Sequence[Sample], preprocess: Preprocess) -> list[Sample]:
    """Samples as the model takes them: images, clips, or several images at once.

    Raises:
        UsageError: images are left over.
    """
    if preprocess.frames is not None:
        samples = group.clips(samples)
    elif preprocess.inputs > 1:
        samples = group.together(samples, preprocess.inputs)
    return group.unnested(samples)


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
