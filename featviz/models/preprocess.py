"""From a decoded image to the model's input, and back to what the model saw."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F
from torchvision.transforms.functional import pad

from featviz.errors import ImageError, UsageError

log = logging.getLogger(__name__)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_FALLBACK_SIZE = (224, 224)
"""Input size for a forward pass on zeros where the image's own size decides."""

Size = int | tuple[int, int]


@dataclass(frozen=True)
class InputOptions:
    """What the user says of the input; None leaves it to the model."""

    size: Size | None = None
    """Resize: the shorter side, or (height, width), in pixels."""
    crop: Size | None = None
    """Centre crop: the side, or (height, width), in pixels."""
    mean: tuple[float, ...] | None = None
    """Subtracted from each channel of the 0..1 image."""
    std: tuple[float, ...] | None = None
    """Divides each channel."""
    channels: int | None = None
    """1: grey, 3: RGB."""
    exif: bool = True
    """Apply the EXIF orientation."""
    background: str = "white"
    """Colour under transparent images."""
    frames: int = 16
    """Time steps of a clip, for models of clips."""
    inputs: int | None = None
    """Images that the model takes at once; None asks its forward."""


@dataclass(frozen=True)
class Preprocess:
    """Resize, centre crop, 0..1, normalise: torchvision's transforms, in their order."""

    resize: Size | None
    crop: Size | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    channels: int = 3
    interpolation: InterpolationMode = InterpolationMode.BILINEAR
    antialias: bool = True
    """Off for torchvision's video models, which were trained without."""
    multiple: int = 1
    """Sides are cropped to a multiple of so many pixels."""
    frames: int | None = None
    """Time steps of a clip; None for a model of pictures."""
    inputs: int = 1
    """Images that the model takes at once, each an argument of its forward."""

    def __call__(self, images: Sequence[Image.Image]) -> list[Tensor]:
        """The model's arguments: [1, C, H, W] for each image, or [1, C, T, H, W] for a clip.

        Raises:
            ImageError: the frames of a clip differ in size.
        """
        tensors = [self.tensor(image) for image in images]
        if self.frames is None:
            return tensors
        if len({tensor.shape for tensor in tensors}) > 1:
            raise ImageError("the frames differ in size", "--size HxW brings them to one")
        return [torch.stack(tensors, dim=2)]

    def tensor(self, image: Image.Image) -> Tensor:
        """Turn an image of mode L or RGB into float32 [1, channels, H, W]."""
        image = image.convert("L" if self.channels == 1 else "RGB")
        picture: Any = image if self.antialias else F.pil_to_tensor(image)
        if self.resize is not None:
            size = [self.resize] if isinstance(self.resize, int) else list(self.resize)
            picture = F.resize(picture, size, self.interpolation, antialias=self.antialias)
        crop = self._crop_of(F.get_dimensions(picture)[1:])
        picture = picture if crop is None else F.center_crop(picture, crop)
        values = F.pil_to_tensor(picture) if self.antialias else picture
        tensor = F.convert_image_dtype(values, torch.float32)
        if self.mean is not None and self.std is not None:
            tensor = F.normalize(tensor, list(self.mean), list(self.std))
        batch: Tensor = tensor[None]
        return batch

    def _crop_of(self, sides: Sequence[int]) -> list[int] | None:
        if self.crop is not None:
            return [self.crop] * 2 if isinstance(self.crop, int) else list(self.crop)
        if self.multiple == 1:
            return None
        return [max(side - side % self.multiple, self.multiple) for side in sides]

    def shown(self, args: Sequence[Tensor]) -> Tensor:
        """The inputs before normalising, clipped to 0..1: [1, C, H, W], frames and several images
        side by side."""
        pictures = self.pictures(args)
        height = max(picture.shape[2] for picture in pictures)
        padded = [pad(p, [0, 0, 0, height - p.shape[2]]) for p in pictures]
        return torch.cat(padded, dim=3)

    def pictures(self, args: Sequence[Tensor]) -> list[Tensor]:
        """The same, each image and each frame by itself."""
        pictures = [p for arg in args for p in (arg.unbind(2) if arg.ndim == 5 else (arg,))]
        return [self._undo(picture) for picture in pictures]

    def _undo(self, tensor: Tensor) -> Tensor:
        if self.mean is not None and self.std is not None:
            mean, std = (
                torch.tensor(v, device=tensor.device)[:, None, None] for v in (self.mean, self.std)
            )
            tensor = tensor * std + mean
        return tensor.clamp(0, 1)

    @property
    def own_size(self) -> bool:
        """Whether the image decides the size of the input."""
        return self.crop is None and not isinstance(self.resize, tuple)

    def blank(self) -> list[Tensor]:
        """Zeros of the shapes that images would have; where their own size decides, 224 × 224."""
        size = self.crop or self.resize or _FALLBACK_SIZE
        height, width = (size, size) if isinstance(size, int) else size
        time = [] if self.frames is None else [self.frames]
        return [torch.zeros(1, self.channels, *time, height, width)] * self.inputs

    @property
    def words(self) -> str:
        """What is done, in words, for the manifest."""
        steps = ["greyscale" if self.channels == 1 else "RGB"]
        if isinstance(self.resize, int):
            steps.append(f"resize shorter side to {self.resize} ({self.interpolation.value})")
        elif self.resize is not None:
            steps.append(f"resize to {_by(self.resize)} ({self.interpolation.value})")
        if self.crop is not None:
            steps.append(f"centre crop {_by(self.crop)}")
        elif self.multiple > 1:
            steps.append(f"centre crop to multiples of {self.multiple}")
        if self.mean is not None and self.std is not None:
            steps.append(f"normalise by mean {_list(self.mean)} and std {_list(self.std)}")
        else:
            steps.append("values 0..1")
        if self.frames is not None:
            steps.append(f"{self.frames} frames, evenly spread")
        if self.inputs > 1:
            steps.append(f"{self.inputs} images at once")
        return ", ".join(steps)


def choose_preprocess(module: nn.Module, entry: Any, options: InputOptions) -> Preprocess:
    """The weights' own transforms, else what fits the first convolution; then the user's wishes.

    Raises:
        UsageError: the model takes neither one nor three channels, or mean and std do not fit.
    """
    base = _from_entry(entry) if entry is not None else None
    base = base or _of_kind(module)
    channels = options.channels or first_channels(module)
    if base is None or base.channels != channels:
        base = _by_channels(channels, options)
    first = _first_convolution(module)
    return replace(
        _checked(_overridden(base, options)),
        frames=options.frames if isinstance(first, nn.Conv3d) else None,
        inputs=options.inputs or required_arguments(module),
    )


def required_arguments(module: nn.Module) -> int:
    """How many arguments the module's forward cannot do without; at least 1."""
    parameters = inspect.signature(module.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return max(1, len(needed))


def first_channels(module: nn.Module) -> int:
    """Input channels of the first convolution; 3 where there is none."""
    first = _first_convolution(module)
    return getattr(first, "in_channels", 0) or 3  # a lazy one does not know yet


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def _first_convolution(module: nn.Module) -> Convolution | None:
    return next((part for part in module.modules() if isinstance(part, Convolution)), None)


def _of_kind(module: nn.Module) -> Preprocess | None:
    """torchvision's detectors resize and normalise by themselves, and its RAFT wants its own."""
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
        interpolation=fields["interpolation"],
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
"""By the name of torchvision's preset, or of a module that tells the model's kind."""


def _by_channels(channels: int, options: InputOptions) -> Preprocess:
    if channels == 1:
        return Preprocess(None, None, None, None, channels=1)
    if channels != 3:
        raise UsageError(
            f"the first convolution takes {channels} channels, and an image gives 1 or 3",
            "--channels 1 or --channels 3, if that is not where the image goes in",
        )
    found = Preprocess(256, 224, IMAGENET_MEAN, IMAGENET_STD)
    if None in (options.size or options.crop, options.mean, options.std):
        log.warning(
            "preprocessing is a guess, ImageNet's: %s (--size, --crop, --mean, --std change it)",
            _overridden(found, options).words,
        )
    return found


def _overridden(base: Preprocess, options: InputOptions) -> Preprocess:
    if options.size is not None:
        base = replace(base, resize=options.size, crop=None)
    if options.crop is not None:
        base = replace(base, crop=options.crop)
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
    if chosen.std is not None and 0 in chosen.std:
        raise UsageError(f"--std {_list(chosen.std)} divides by zero", "give positive numbers")
    return chosen


def _size(value: Any) -> Size | None:
    if value is None or isinstance(value, int):
        return value
    sides = tuple(int(side) for side in value)
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _by(size: Size) -> str:
    return f"{size}×{size}" if isinstance(size, int) else f"{size[0]}×{size[1]}"


def _list(values: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"
