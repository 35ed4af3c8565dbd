"""What `run` and `--dry-run` do before any image goes through the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from featviz.drawing import levels
from featviz.errors import ImageError
from featviz.files.stores import Remote
from featviz.gradients import forward_backward
from featviz.gradients import options as gradients
from featviz.gradients.options import PassPlan
from featviz.images import decode, find, group
from featviz.images.arrays import Wanted
from featviz.images.decode import DecodedImage
from featviz.layout.overrides import HintBook
from featviz.models.files.tensors import read_tensor
from featviz.models.load import LoadedModel, ModelOptions, load_model
from featviz.models.preprocess import InputOptions, Preprocess
from featviz.pipeline.dry_pass import choose_layers
from featviz.pipeline.options import RunOptions, check_options
from featviz.records import PRESETS, Bytes, Layer, Sample

log = logging.getLogger(__name__)

READERS_OF_STORES = 8
"""Threads that read images of a store, unless the user says otherwise."""


@dataclass(frozen=True)
class Prepared:
    """All that is known of a run before the first image."""

    options: RunOptions
    model: LoadedModel
    samples: tuple[Sample, ...]
    """The images of all shards."""
    blank: list[Tensor]
    """Zeros in the shapes of the model's inputs."""
    shown: tuple[int, int]
    """Height and width in pixels of the image in the first input, without padding."""
    layers: list[Layer]
    plan: PassPlan

    def hint_book(self, args: Sequence[Tensor]) -> HintBook:
        """Hints on the layout of each layer's tensors when the model gets these inputs."""
        return HintBook(self.model.module, args[0].shape, self.options.draw.tensor_layout)


def prepare(
    model: ModelOptions | LoadedModel, images: Sequence[Sample], options: RunOptions
) -> Prepared:
    """Load the model, group the images that were found as it takes them, choose the layers.

    Raises:
        FeatvizError: the model cannot be loaded or run, the images do not fit it, or no layer is
            chosen; nothing was written.
    """
    loaded = load_model(model, options.inputs) if isinstance(model, ModelOptions) else model
    warn_of_guess(loaded.preprocess)
    samples = grouped(images, loaded.preprocess)
    blank, shown = _first_input(loaded, samples, options.inputs)
    layers = choose_layers(loaded, options.layers, blank, options.draw.tensor_layout)
    plan = gradients.plan(loaded, options.passes)
    prepared = Prepared(options, loaded, tuple(samples), blank, shown, layers, plan)
    forward_backward.try_out(loaded, plan, blank, prepared.hint_book(blank))
    return prepared


def warn_of_guess(preprocess: Preprocess) -> None:
    """Say that neither the model nor the user says how images go in."""
    if preprocess.guessed:
        log.warning(
            "preprocessing is a guess, --preset imagenet (others: %s; --size, --crop, --mean and "
            "--std change it)",
            ", ".join(name for name in PRESETS if name != "imagenet"),
        )


def find_images(
    arguments: Sequence[str], options: RunOptions, stdin: BinaryIO | None = None
) -> list[Sample]:
    """Check the options and find the images.

    Raises:
        UsageError: a bad option, or no images.
    """
    check_options(options)
    outside = options.out if options.url is None else None
    return find.find_samples(arguments, stdin, options.nul_separated, outside)


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


def read_input(
    sample: Sample, preprocess: Preprocess, inputs: InputOptions
) -> tuple[DecodedImage, list[Tensor]]:
    """Decode a sample and preprocess it: the picture, and the arguments of the model's forward.

    Raises:
        ImageError: a file cannot be read, or the frames of a clip differ in size.
    """
    raw = preprocess.transform is not None
    wanted = Wanted(preprocess.channels, preprocess.frames is not None, raw)
    picture = decode.decode(
        sample, inputs.exif, inputs.background, preprocess.frames, wanted, read_tensor
    )
    return picture, preprocess(picture.images)


def shown_of(preprocess: Preprocess, args: Sequence[Tensor]) -> Bytes:
    """What the model saw, uint8 [H, W, C]: frames and several images side by side."""
    return levels.pixels(preprocess.shown(args)[0])


def ground_of(preprocess: Preprocess, args: Sequence[Tensor]) -> list[Bytes]:
    """What maps may lie over, uint8 [H, W, 3] each: the first picture that the model saw, or the
    frames of a clip."""
    pictures = preprocess.pictures(args)
    ground = pictures if preprocess.frames else pictures[:1]
    return [_in_colour(levels.pixels(picture[0])) for picture in ground]


def _in_colour(pixels: Bytes) -> Bytes:
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels


def readers_for(samples: Sequence[Sample], inputs: InputOptions) -> int:
    """Threads that read images ahead: the user's number, else more than one where a store has to
    be waited for."""
    far = any(isinstance(path, Remote) for sample in samples[:1] for path in sample.paths)
    return inputs.readers or (READERS_OF_STORES if far else 1)


def blank_input(
    loaded: LoadedModel, samples: Sequence[Sample], inputs: InputOptions
) -> list[Tensor]:
    """Zeros in the shapes of the first readable sample's inputs."""
    return _first_input(loaded, samples, inputs)[0]


def _first_input(
    loaded: LoadedModel, samples: Sequence[Sample], inputs: InputOptions
) -> tuple[list[Tensor], tuple[int, int]]:
    """Zeros in the shapes of the first readable sample's inputs, and the height and width that the
    image has in them."""
    preprocess = loaded.preprocess
    for sample in samples if preprocess.own_size or preprocess.frames is not None else ():
        try:
            picture, args = read_input(sample, preprocess, inputs)
        except ImageError:
            continue
        window = preprocess.window(picture.size)
        return [torch.zeros_like(arg) for arg in args], _shown(args) if not window else window[2:]
    blank = preprocess.blank()
    return blank, _shown(blank)


def _shown(args: Sequence[Tensor]) -> tuple[int, int]:
    return args[0].shape[-2], args[0].shape[-1]
