"""From a decoded image to the model's input, and back to what the model saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F
from torchvision.transforms.functional import pad

from featviz.errors import ImageError
from featviz.records import PRESETS, Count, OneOf, Within
from featviz.text import by

_MOST_ENLARGED = 2**25
"""Pixels that an image with fewer may be enlarged to."""

FALLBACK_SIZE = (224, 224)
"""Input size for a forward pass on zeros where the image's own size decides."""

Size = int | tuple[int, int]


@dataclass(frozen=True)
class InputOptions:
    """The user's choices for the model's input; None leaves a choice to the model."""

    preset: Annotated[str, OneOf(tuple(PRESETS))] | None = None
    """The steps of one of PRESETS; the choices below change them."""
    size: Size | None = None
    """Resize: the shorter side, or (height, width), in pixels."""
    crop: Size | None = None
    """Centre crop: the side, or (height, width), in pixels."""
    mean: tuple[float, ...] | None = None
    """Subtracted from each channel of the 0..1 image."""
    std: tuple[float, ...] | None = None
    """Divides each channel."""
    channels: Annotated[int, Within(among=(1, 3), hint="1 is grey, 3 RGB")] | None = None
    """1: grey, 3: RGB."""
    exif: bool = True
    """Apply the EXIF orientation."""
    background: str = "white"
    """Colour under transparent images."""
    frames: Count = 16
    """Time steps of a clip, for models of clips."""
    inputs: Count | None = None
    """Images that the model takes at once; None asks its forward."""
    transform: str | None = None
    """`file.py:fn` or `pkg.mod:fn`: a function from a PIL image to what forward takes, instead of
    all resizing, cropping and normalising."""


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
    """Whether resizing smooths; torchvision's video models were trained without."""
    multiple: int = 1
    """Sides are cropped to a multiple of so many pixels."""
    frames: int | None = None
    """Time steps of a clip; None for a model of pictures."""
    inputs: int = 1
    """Images that the model takes at once, each an argument of its forward."""
    guessed: bool = field(default=False, compare=False)
    """Whether neither the model nor the user says how images go in."""
    transform: Callable[[Image.Image], list[Tensor]] | None = None
    """The user's own way from an image to the model's arguments, the first of them [1, C, H, W], in
    place of the steps above."""

    def __call__(self, images: Sequence[Image.Image]) -> list[Tensor]:
        """The model's arguments: [1, C, H, W] for each image, or [1, C, T, H, W] for a clip.

        Raises:
            ImageError: the frames of a clip differ in size, or the user's transform fails.
        """
        if self.transform is not None:
            return self.transform(images[0].convert("L" if self.channels == 1 else "RGB"))
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
            _check_enlarged(image.size, size)
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
        """The inputs before normalising, clipped to 0..1: [1, C, H, W] for each image and frame."""
        if self.transform is not None:
            return [_visible(args[0])]
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
        if self.transform is not None:
            mode = "L" if self.channels == 1 else "RGB"
            return [torch.zeros_like(t) for t in self.transform(Image.new(mode, FALLBACK_SIZE))]
        size = self.crop or self.resize or FALLBACK_SIZE
        height, width = (size, size) if isinstance(size, int) else size
        time = [] if self.frames is None else [self.frames]
        return [torch.zeros(1, self.channels, *time, height, width)] * self.inputs

    @property
    def words(self) -> str:
        """The steps in words, for the manifest."""
        if self.transform is not None:
            return f"{'greyscale' if self.channels == 1 else 'RGB'}, {self.transform}"
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
            steps.append(f"normalise by mean {listed(self.mean)} and std {listed(self.std)}")
        else:
            steps.append("values 0..1")
        if self.frames is not None:
            steps.append(f"{self.frames} frames, evenly spread")
        if self.inputs > 1:
            steps.append(f"{self.inputs} images at once")
        return ", ".join(steps)


def _visible(tensor: Tensor) -> Tensor:
    """An input of unknown scale as a picture: its range as 0..1, and of channels that are neither
    grey nor RGB the first."""
    picture = (tensor if tensor.shape[1] in (1, 3) else tensor[:, :1]).float()
    low, high = picture.aminmax()
    return (picture - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)


def _check_enlarged(shape: tuple[int, int], size: Sequence[int]) -> None:
    """Refuse an image so narrow that it would become huge: its shorter side sets the scale.

    Raises:
        ImageError: it would.
    """
    if len(size) == 1:
        pixels = size[0] ** 2 * max(shape) // min(shape)
        if pixels > max(_MOST_ENLARGED, shape[0] * shape[1]):
            raise ImageError(
                f"it is {shape[0]}×{shape[1]} pixels, and would become {pixels:,} with a shorter "
                f"side of {size[0]}",
                "--size HxW brings it to a size",
            )


def _by(size: Size) -> str:
    return by((size, size) if isinstance(size, int) else size)


def listed(values: tuple[float, ...]) -> str:
    """Numbers for people: `[0.5, 0.25]`."""
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"
