"""From a decoded image to the model's input, and back to what the model saw."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from featviz.errors import UsageError

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


@dataclass(frozen=True)
class Preprocess:
    """Resize, centre crop, 0..1, normalise: torchvision's transforms, in their order."""

    resize: Size | None
    crop: Size | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    channels: int = 3
    interpolation: InterpolationMode = InterpolationMode.BILINEAR

    def __call__(self, image: Image.Image) -> Tensor:
        """Turn an image of mode L or RGB into the model's input, float32 [1, channels, H, W]."""
        image = image.convert("L" if self.channels == 1 else "RGB")
        if self.resize is not None:
            size = [self.resize] if isinstance(self.resize, int) else list(self.resize)
            image = F.resize(image, size, interpolation=self.interpolation, antialias=True)
        if self.crop is not None:
            size = [self.crop] * 2 if isinstance(self.crop, int) else list(self.crop)
            image = F.center_crop(image, size)
        tensor = F.convert_image_dtype(F.pil_to_tensor(image), torch.float32)
        if self.mean is not None and self.std is not None:
            tensor = F.normalize(tensor, list(self.mean), list(self.std))
        batch: Tensor = tensor[None]
        return batch

    def undo(self, tensor: Tensor) -> Tensor:
        """The input [1, C, H, W] as it was before normalising, clipped to 0..1."""
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

    def blank(self) -> Tensor:
        """Zeros of the shape that an image would have; where its own size decides, 224 × 224."""
        size = self.crop or self.resize or _FALLBACK_SIZE
        height, width = (size, size) if isinstance(size, int) else size
        return torch.zeros(1, self.channels, height, width)

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
        if self.mean is not None and self.std is not None:
            steps.append(f"normalise by mean {_list(self.mean)} and std {_list(self.std)}")
        else:
            steps.append("values 0..1")
        return ", ".join(steps)


@dataclass(frozen=True)
class FixedInput:
    """What a model leaves no choice in; None leaves it free."""

    channels: int | None
    size: tuple[int, int] | None
    """(height, width) in pixels."""


def choose_preprocess(
    module: nn.Module, entry: Any, options: InputOptions, fixed: FixedInput | None = None
) -> Preprocess:
    """The weights' own transforms, else what fits the first convolution; then the user's wishes.

    Args:
        entry: torchvision's weights entry, or the Preprocess itself, or None where none is known.
        fixed: what the model takes, where it takes nothing else.

    Raises:
        UsageError: the model takes neither one nor three channels, or mean and std do not fit.
    """
    fixed = fixed or FixedInput(None, None)
    if isinstance(entry, Preprocess):
        base: Preprocess | None = entry
        own = entry.channels
    else:
        base = _from_entry(entry) if entry is not None else None
        own = fixed.channels or first_channels(module)
    channels = options.channels or own
    if base is None or base.channels != channels:
        base = _by_channels(channels, options, fixed.size)
    return _checked(_overridden(base, options))


def from_timm(config: Mapping[str, Any]) -> Preprocess:
    """timm's evaluation transform, from what `timm.data.resolve_model_data_config` gives.

    The same steps as `timm.data.create_transform(**config)` takes (timm 1.0,
    `transforms_imagenet_eval`), pixel for pixel, but for `crop_mode` `border` and `center` with an
    input that is not square: there the whole image is squashed to the input, with a warning.

    Raises:
        UsageError: the model takes neither one nor three channels.
    """
    channels, height, width = config["input_size"]
    if channels not in (1, 3):
        raise UsageError(
            f"the model takes {channels} channels, and an image gives 1 or 3",
            "--model-arg in_chans=1 or in_chans=3",
        )
    own = {name: tuple(float(value) for value in config[name]) for name in ("mean", "std")}
    if len(own["mean"]) != channels:
        own = {name: (sum(values) / len(values),) * channels for name, values in own.items()}
    tall, wide = (math.floor(side / config["crop_pct"]) for side in (height, width))
    crop: Size | None = height if height == width else (height, width)
    resize: Size = (tall, wide)
    if config["crop_mode"] == "center" and height == width:
        resize = tall
    elif config["crop_mode"] != "squash":
        log.warning("timm's crop mode %s is drawn as squash", config["crop_mode"])
        resize, crop = (height, width), None
    mode = InterpolationMode(config["interpolation"])
    return Preprocess(resize, crop, own["mean"], own["std"], channels, mode)


def first_channels(module: nn.Module) -> int:
    """Input channels of the first convolution; 3 where there is none."""
    for part in module.modules():
        if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return part.in_channels
    return 3


def _from_entry(entry: Any) -> Preprocess | None:
    """Read torchvision's ImageClassification and SemanticSegmentation presets."""
    preset = entry.transforms()
    fields: Mapping[str, Any] = vars(preset)
    if "mean" not in fields or "resize_size" not in fields:
        return None
    return Preprocess(
        resize=_size(fields["resize_size"]),
        crop=_size(fields.get("crop_size")),
        mean=tuple(fields["mean"]),
        std=tuple(fields["std"]),
        interpolation=fields["interpolation"],
    )


def _by_channels(
    channels: int, options: InputOptions, size: tuple[int, int] | None = None
) -> Preprocess:
    if channels == 1:
        return Preprocess(size, None, None, None, channels=1)
    if channels != 3:
        raise UsageError(
            f"the first convolution takes {channels} channels, and an image gives 1 or 3",
            "--channels 1 or --channels 3, if that is not where the image goes in",
        )
    found = Preprocess(*_resize_and_crop(size), IMAGENET_MEAN, IMAGENET_STD)
    if None in (options.size or options.crop, options.mean, options.std):
        log.warning(
            "preprocessing is a guess, ImageNet's: %s (--size, --crop, --mean, --std change it)",
            _overridden(found, options).words,
        )
    return found


def _resize_and_crop(size: tuple[int, int] | None) -> tuple[Size, Size | None]:
    """ImageNet's 256 and 224, or in this proportion to a square; other shapes are not cropped."""
    height, width = size or _FALLBACK_SIZE
    return (round(height * 256 / 224), height) if height == width else ((height, width), None)


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
