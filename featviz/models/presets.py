"""Which preprocessing a model wants: torchvision's presets, timm's configuration, or a guess."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from featviz.errors import UsageError
from featviz.models import arguments, letterbox
from featviz.models.preprocess import FALLBACK_SIZE, InputOptions, Preprocess, Size, listed
from featviz.records import PRESETS
from featviz.text import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FixedInput:
    """The input that a model takes and no other; None where it takes any."""

    channels: int | None
    size: tuple[int, int] | None
    """(height, width) in pixels."""


def choose_preprocess(
    module: nn.Module, entry: Any, options: InputOptions, fixed: FixedInput | None = None
) -> Preprocess:
    """The preset that the user names, else the weights' own transforms, else what fits the first
    convolution; then the user's other wishes.

    Args:
        entry: torchvision's weights entry, or the Preprocess itself, or None where none is known.
        fixed: what the model takes, where it takes nothing else.

    Raises:
        UsageError: mean and std or the preset do not fit.
    """
    fixed = fixed or FixedInput(None, None)
    if isinstance(entry, Preprocess):
        base: Preprocess | None = entry
        expected = entry.channels
    else:
        base = _from_entry(entry) if entry is not None else None
        base = _at_own_size(base, module) if base is not None else _of_kind(module)
        expected = fixed.channels or first_channels(module)
    channels = options.channels or expected
    if options.preset is not None:
        base = _at_own_size(_named(options.preset, channels, fixed.size), module)
        if (side := PRESETS[options.preset].letterbox) is not None:
            letterbox.require_opencv()
            base = replace(base, letterbox=letterbox.for_module(module, side, fixed.size))
    elif base is None or base.channels != channels:
        base = _by_channels(channels, options, fixed.size)
    first = _first_convolution(module)
    said = options.size is not None or options.crop is not None or base.letterbox is not None
    return replace(
        _checked(_overridden(base, options)),
        size_guessed=not said and (base.guessed or base.own_size),
        any_values=options.mean is not None or options.std is not None,
        frames=options.frames if isinstance(first, nn.Conv3d) else None,
        inputs=options.inputs or required_arguments(module, arguments.names(options.input)),
    )


def _at_own_size(base: Preprocess, module: nn.Module) -> Preprocess:
    """A vision transformer takes one size, which need not be that of the weights' entry."""
    size = getattr(module, "image_size", None)
    if isinstance(size, int) and isinstance(base.crop, int) and base.crop != size:
        return replace(base, resize=size, crop=size)
    return base


def required_arguments(module: nn.Module, given: Collection[str] = ()) -> int:
    """How many arguments the module's forward cannot do without, beside those that are given; at
    least 1."""
    parameters = inspect.signature(module.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        p
        for p in parameters
        if p.kind in positional and p.default is p.empty and p.name not in given
    ]
    return max(1, len(needed))


def from_timm(config: Mapping[str, Any]) -> Preprocess:
    """timm's evaluation transform, from what `timm.data.resolve_model_data_config` gives.

    The same steps as `timm.data.create_transform(**config)` takes (timm 1.0,
    `transforms_imagenet_eval`), pixel for pixel, but for `crop_mode` `border` and `center` with an
    input that is not square: there the whole image is squashed to the input, with a warning.

    """
    channels, height, width = config["input_size"]
    statistics = {name: tuple(float(value) for value in config[name]) for name in ("mean", "std")}
    if len(statistics["mean"]) != channels:
        statistics = {
            name: (sum(values) / len(values),) * channels for name, values in statistics.items()
        }
    tall, wide = (math.floor(side / config["crop_pct"]) for side in (height, width))
    crop: Size | None = height if height == width else (height, width)
    resize: Size = (tall, wide)
    if config["crop_mode"] == "center" and height == width:
        resize = tall
    elif config["crop_mode"] != "squash":
        log.warning("timm's crop mode %s is drawn as squash", config["crop_mode"])
        resize, crop = (height, width), None
    mean, std, mode = statistics["mean"], statistics["std"], config["interpolation"]
    return Preprocess(resize, crop, mean, std, channels, mode)


def from_ultralytics(module: nn.Module, trained: Any = None) -> Preprocess | None:
    """How Ultralytics' predictors prepare images for their models; None for any other model.

    Args:
        trained: `train_args` of the checkpoint.
    """
    how = letterbox.of_model(module, trained)
    if how is None:
        return None
    channels = first_channels(module)
    if isinstance(how, int):
        return Preprocess(how, how, None, None, channels)
    return Preprocess(None, None, None, None, channels, letterbox=how)


_MOST_CHANNELS = 512
"""Input channels that are believed of a convolution: an input of so many is made to try it."""


def first_channels(module: nn.Module) -> int:
    """Input channels of the first convolution; 3 where there is none."""
    first = _first_convolution(module)
    channels = getattr(first, "in_channels", 0)  # 0 in a lazy one; a file can say anything
    return channels if type(channels) is int and 0 < channels <= _MOST_CHANNELS else 3


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def _first_convolution(module: nn.Module) -> Convolution | None:
    return next((part for part in module.modules() if isinstance(part, Convolution)), None)


def _of_kind(module: nn.Module) -> Preprocess | None:
    """torchvision's detectors resize and normalise by themselves, its RAFT wants its own, and
    Ultralytics pads."""
    if (prepared := from_ultralytics(module)) is not None:
        return prepared
    kinds = {type(part).__name__ for part in module.modules()}
    name = next((name for name in _PRESETS if name in kinds), None)
    return None if name is None else _PRESETS[name]({})


def _from_entry(entry: Any) -> Preprocess | None:
    """Read one of torchvision's presets."""
    preset = entry.transforms()
    read = _PRESETS.get(type(preset).__name__)
    return None if read is None else read(vars(preset))


def _standard(fields: Mapping[str, Any]) -> Preprocess:
    return Preprocess(
        resize=_size(fields["resize_size"]),
        crop=_size(fields.get("crop_size")),
        mean=tuple(fields["mean"]),
        std=tuple(fields["std"]),
        interpolation=fields["interpolation"].value,
    )


def _video(fields: Mapping[str, Any]) -> Preprocess:
    return replace(_standard(fields), antialias=False)


def _detection(fields: Mapping[str, Any]) -> Preprocess:
    return Preprocess(None, None, None, None)


def _optical_flow(fields: Mapping[str, Any]) -> Preprocess:
    """Values to -1..1; RAFT takes sides that are multiples of 8."""
    return Preprocess(None, None, (0.5,) * 3, (0.5,) * 3, multiple=8)


_PRESETS: dict[str, Callable[[Mapping[str, Any]], Preprocess]] = {
    "ImageClassification": _standard,
    "SemanticSegmentation": _standard,
    "VideoClassification": _video,
    "ObjectDetection": _detection,
    "GeneralizedRCNNTransform": _detection,
    "OpticalFlow": _optical_flow,
    "RAFT": _optical_flow,
}
"""Readers of torchvision's presets, by the preset's name or by the name of a module class that only
models with this preset have."""


def _by_channels(
    channels: int, options: InputOptions, size: tuple[int, int] | None = None
) -> Preprocess:
    if channels != 3:
        return Preprocess(size, None, None, None, channels)
    given = None not in (options.size or options.crop, options.mean, options.std)
    return replace(_named("imagenet", channels, size), guessed=not given)


def _named(name: str, channels: int, size: tuple[int, int] | None = None) -> Preprocess:
    """A preset, for models that take `channels`; of those that take one size alone, in that size.

    Raises:
        UsageError: the preset is for RGB.
    """
    preset = PRESETS[name]
    if channels != 3 and preset.mean is not None:
        raise UsageError(
            f"--preset {name} is for RGB, and the model takes {counted(channels, 'channel')}",
            "--preset none, with --size, --mean and --std; --channels 3 if the model takes RGB",
        )
    resize: Size | None = preset.resize
    crop: Size | None = preset.crop
    if preset.letterbox is not None:
        resize, crop = None, None
    elif size is not None:
        as_it_is = resize is None and crop is None
        resize, crop = (size, None) if as_it_is else _resize_and_crop(size)
    return Preprocess(resize, crop, preset.mean, preset.std, channels, preset.interpolation)


def _resize_and_crop(size: tuple[int, int] | None) -> tuple[Size, Size | None]:
    """ImageNet's 256 and 224, or in this proportion to a square; other shapes are not cropped."""
    height, width = size or FALLBACK_SIZE
    return (round(height * 256 / 224), height) if height == width else ((height, width), None)


def _overridden(base: Preprocess, options: InputOptions) -> Preprocess:
    if base.letterbox is not None and (isinstance(options.size, tuple) or options.crop is not None):
        base = replace(base, letterbox=None)
    if base.letterbox is not None and isinstance(options.size, int):
        base = replace(base, letterbox=base.letterbox.resized(options.size))
    elif options.size is not None:
        base = replace(base, resize=options.size, crop=None, padding=None)
    if options.crop is not None:
        base = replace(base, crop=options.crop)
    if options.interpolation is not None:
        base = replace(base, interpolation=options.interpolation)
    if options.mean is not None:
        base = replace(
            base, mean=options.mean, std=options.std or base.std or (1.0,) * base.channels
        )
    if options.std is not None:
        base = replace(base, std=options.std, mean=base.mean or (0.0,) * base.channels)
    return base


def _checked(chosen: Preprocess) -> Preprocess:
    for name, values in (("--mean", chosen.mean), ("--std", chosen.std)):
        if values is not None and len(values) != chosen.channels:
            raise UsageError(
                f"{name} has {len(values)} numbers for {chosen.channels} channels",
                f"give {chosen.channels}, separated by commas",
            )
    if chosen.interpolation == "lanczos" and not chosen.antialias:
        raise UsageError(
            "--interpolation lanczos smooths, and this model was trained without", "bicubic"
        )
    if chosen.std is not None and 0 in chosen.std:
        raise UsageError(f"--std {listed(chosen.std)} divides by zero", "give positive numbers")
    return chosen


def _size(value: Any) -> Size | None:
    if value is None or isinstance(value, int):
        return value
    sides = tuple(int(side) for side in value)
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])
