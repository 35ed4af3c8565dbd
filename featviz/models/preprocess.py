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
from torchvision.transforms.v2.functional import resize_image

from featviz.errors import ImageError
from featviz.models.letterbox import LetterBox, Window
from featviz.models.resizing import HeightWidth, Padding, SizeRule
from featviz.records import INTERPOLATIONS, PRESETS, Count, OneOf, Within
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
    """Resize: the shorter side (the longer one where the model's library pads to it), or
    (height, width), in pixels."""
    crop: Size | None = None
    """Centre crop: the side, or (height, width), in pixels."""
    interpolation: Annotated[str, OneOf(INTERPOLATIONS)] | None = None
    """How resizing computes pixels, in the words of torchvision's InterpolationMode."""
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
    """Resize, centre crop, 0..1, normalise, pad: torchvision's transforms, in their order."""

    resize: Size | SizeRule | None
    crop: Size | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    channels: int = 3
    interpolation: InterpolationMode = InterpolationMode.BILINEAR
    antialias: bool = True
    """Whether resizing smooths; torchvision's video models were trained without."""
    multiple: int = 1
    """Sides are cropped to a multiple of so many pixels."""
    padding: Padding | None = None
    """The border that is added at the end."""
    bgr: bool = False
    """Channels in the order blue, green, red."""
    as_transformers: bool = False
    """Resize bytes in a tensor, where torchvision's presets resize a picture of Pillow's, and begin
    a crop at the pixel before its exact place, where they take the nearest even one."""
    floats: bool = False
    """Resize values of 0..1 where `as_transformers` resizes bytes, which it rounds."""
    frames: int | None = None
    """Time steps of a clip; None for a model of pictures."""
    inputs: int = 1
    """Images that the model takes at once, each an argument of its forward."""
    letterbox: LetterBox | None = None
    """Takes the place of resizing and cropping, for models of Ultralytics."""
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
        image = image if self.letterbox is None else self.letterbox(image)
        on_tensors = self.as_transformers or not self.antialias
        picture: Any = F.pil_to_tensor(image) if on_tensors else image
        if self.floats:
            picture = F.convert_image_dtype(picture, torch.float32)
        picture = self._resized(picture)
        crop = self._crop_of(_sides(picture))
        picture = picture if crop is None else self._cropped(picture, crop)
        values = picture if on_tensors else F.pil_to_tensor(picture)
        tensor = F.convert_image_dtype(values.flip(0) if self.bgr else values, torch.float32)
        if self.mean is not None and self.std is not None:
            tensor = F.normalize(tensor, list(self.mean), list(self.std))
        if self.padding is not None:
            tensor = pad(tensor, self.padding.border(_sides(tensor)), fill=self.padding.value)
        batch: Tensor = tensor[None]
        return batch

    def _resized(self, picture: Any) -> Any:
        """A picture, or a tensor [C, H, W], in its new size."""
        if self.resize is None:
            return picture
        size = _resized_to(self.resize, _sides(picture))
        _check_enlarged(_sides(picture), size, self.resize)
        resize = resize_image if self.as_transformers else F.resize
        return resize(picture, list(size), self.interpolation, antialias=self.antialias)

    def _cropped(self, picture: Any, crop: HeightWidth) -> Any:
        if not self.as_transformers:
            return F.center_crop(picture, list(crop))
        sides = _sides(picture)
        grown = (max(sides[0], crop[0]), max(sides[1], crop[1]))
        top, left = ((whole - side) // 2 for whole, side in zip(grown, crop, strict=True))
        return F.crop(F.center_crop(picture, list(grown)), top, left, *crop)

    def _crop_of(self, sides: HeightWidth) -> HeightWidth | None:
        if self.crop is not None:
            return (self.crop, self.crop) if isinstance(self.crop, int) else self.crop
        if self.multiple == 1:
            return None
        height, width = (max(side - side % self.multiple, self.multiple) for side in sides)
        return height, width

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
        return (tensor.flip(1) if self.bgr else tensor).clamp(0, 1)

    def window(self, size: tuple[int, int]) -> Window | None:
        """Where an image of a size (width, height) lies in the input that was padded for it; None
        where nothing is padded."""
        return None if self.letterbox is None else self.letterbox.window(size)

    @property
    def own_size(self) -> bool:
        """Whether the image decides the size of the input."""
        fixed = self.padding is not None and self.padding.size is not None
        return self.crop is None and not isinstance(self.resize, tuple) and not fixed

    def blank(self) -> list[Tensor]:
        """Zeros of the shapes that images would have; where their own size decides, those of an
        image of 224 × 224 pixels."""
        if self.transform is not None:
            mode = "L" if self.channels == 1 else "RGB"
            return [torch.zeros_like(t) for t in self.transform(Image.new(mode, FALLBACK_SIZE))]
        size = _resized_to(self.resize, FALLBACK_SIZE)
        size = self._crop_of(size) or size
        if self.letterbox is not None:
            size = (self.letterbox.size, self.letterbox.size)
        height, width = size if self.padding is None else self.padding.padded(size)
        time = [] if self.frames is None else [self.frames]
        return [torch.zeros(1, self.channels, *time, height, width)] * self.inputs

    @property
    def words(self) -> str:
        """The steps in words, for the manifest."""
        if self.transform is not None:
            return f"{'greyscale' if self.channels == 1 else 'RGB'}, {self.transform}"
        steps = ["greyscale" if self.channels == 1 else "BGR" if self.bgr else "RGB"]
        if self.letterbox is not None:
            steps.append(self.letterbox.words)
        if self.resize is not None:
            steps.append(f"resize {_resize_words(self.resize)} ({self.interpolation.value})")
        if self.crop is not None:
            steps.append(f"centre crop {_by(self.crop)}")
        elif self.multiple > 1:
            steps.append(f"centre crop to multiples of {self.multiple}")
        if self.mean is not None and self.std is not None:
            steps.append(f"normalise by mean {listed(self.mean)} and std {listed(self.std)}")
        else:
            steps.append("values 0..1")
        if self.padding is not None:
            steps.append(self.padding.words)
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


def _sides(picture: Any) -> HeightWidth:
    _, height, width = F.get_dimensions(picture)
    return height, width


def _resized_to(resize: Size | SizeRule | None, sides: HeightWidth) -> HeightWidth:
    """The (height, width) of a resized image; an int is the shorter side, the other one is rounded
    down as torchvision does."""
    if resize is None or isinstance(resize, tuple):
        return resize or sides
    if not isinstance(resize, int):
        return resize(sides)
    low, long = min(sides), int(resize * max(sides) / min(sides))
    return (resize, long) if sides[0] == low else (long, resize)


def _check_enlarged(sides: HeightWidth, size: HeightWidth, resize: Size | SizeRule) -> None:
    """Refuse an image so narrow that it would become huge: its shorter side sets the scale.

    Raises:
        ImageError: it would.
    """
    pixels = size[0] * size[1]
    if not isinstance(resize, tuple) and pixels > max(_MOST_ENLARGED, sides[0] * sides[1]):
        raise ImageError(
            f"it is {sides[1]}×{sides[0]} pixels, and would become {pixels:,} resized "
            f"{_resize_words(resize)}",
            "--size HxW brings it to a size",
        )


def _resize_words(resize: Size | SizeRule) -> str:
    """What follows "resize"."""
    if isinstance(resize, int):
        return f"shorter side to {resize}"
    return f"to {_by(resize)}" if isinstance(resize, tuple) else resize.words


def _by(size: Size) -> str:
    return by((size, size) if isinstance(size, int) else size)


def listed(values: tuple[float, ...]) -> str:
    """Numbers for people: `[0.5, 0.25]`."""
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"
