"""From a decoded image to the model's input, and back to what the model saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from featviz.errors import ImageError
from featviz.models import pixels
from featviz.models.letterbox import LetterBox, Window
from featviz.models.resizing import HeightWidth, Padding, SizeRule
from featviz.records import INTERPOLATIONS, PRESETS, Count, OneOf, Raster, Within
from featviz.text import by

_MOST_ENLARGED = 2**25
"""Pixels that an image with fewer may be enlarged to."""

FALLBACK_SIZE = (224, 224)
"""Input size for a forward pass on zeros where the image's own size decides."""

_NEAR = 1e-3
"""How far beyond 0..1 a value may be by rounding."""
_UNIT = "values 0..1"

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
    channels: Annotated[int, Within(1, 4096, "as many as the files have")] | None = None
    """1: grey, 3: RGB; of other numbers the files must have as many."""
    exif: bool = True
    """Apply the EXIF orientation."""
    background: str = "white"
    """Colour under transparent images."""
    frames: Count = 16
    """Time steps of a clip, for models of clips."""
    inputs: Count | None = None
    """Images that the model takes at once; None asks its forward."""
    input: tuple[str, ...] = ()
    """Further arguments of forward, each as `NAME=VALUE`; see `models.arguments`."""
    transform: str | None = None
    """`file.py:fn` or `pkg.mod:fn`: a function from a PIL image, or from the array of a file that
    is no photograph, to what forward takes, instead of all resizing, cropping and normalising."""
    readers: Count | None = None
    """Threads that read images ahead; None takes one, or several for images in stores."""

    def as_record(self) -> dict[str, Any]:
        """What decides how images go in: all but the number of readers."""
        record = asdict(self)
        del record["readers"]
        return record


@dataclass(frozen=True)
class Preprocess:
    """Resize, centre crop, 0..1, normalise, pad: torchvision's transforms, in their order."""

    resize: Size | SizeRule | None
    crop: Size | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    channels: int = 3
    interpolation: str = "bilinear"
    """How resizing computes pixels: one of `records.INTERPOLATIONS`."""
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
    size_guessed: bool = field(default=False, compare=False)
    """Whether neither the model nor the user says how large its input is, so that the size of
    `blank` is a guess."""
    further: tuple[str, ...] = ()
    """The arguments of forward that are no images, in words: `t=10`."""
    any_values: bool = field(default=False, compare=False)
    """Whether mean and std are the user's own, for values of any range."""
    transform: Callable[[Any], list[Tensor]] | None = None
    """The user's own way from an image to the model's arguments, the first of them [1, C, H, W], in
    place of the steps above."""

    def __call__(self, images: Sequence[Image.Image | Raster]) -> list[Tensor]:
        """The model's arguments: [1, C, H, W] for each image, or [1, C, T, H, W] for a clip or a
        volume.

        Raises:
            ImageError: the frames of a clip differ in size, the user's transform fails, or values
                are not 0..1 where the model's mean and std are for these.
        """
        if self.transform is not None:
            image = images[0]
            return self.transform(
                image.values if isinstance(image, Raster) else image.convert(self.mode)
            )
        tensors = [
            self._of_numbers(image) if isinstance(image, Raster) else self.tensor(image)
            for image in images
        ]
        if self.frames is None or tensors[0].ndim == 5:
            return tensors
        if len({tensor.shape for tensor in tensors}) > 1:
            raise ImageError("the frames differ in size", "--size HxW brings them to one")
        return [torch.stack(tensors, dim=2)]

    @property
    def mode(self) -> str:
        """The mode of Pillow's pictures before they become numbers."""
        return "L" if self.channels == 1 else "RGB"

    def tensor(self, image: Image.Image) -> Tensor:
        """Turn an image of mode L or RGB into float32 [1, channels, H, W]."""
        image = image.convert(self.mode)
        image = image if self.letterbox is None else self.letterbox(image)
        on_tensors = self.as_transformers or not self.antialias
        picture: Any = pixels.to_tensor(image) if on_tensors else image
        if self.floats:
            picture = pixels.to_floats(picture)
        picture = self._sized(picture)
        values = picture if on_tensors else pixels.to_tensor(picture)
        return self._normalised(pixels.to_floats(values))[None]

    def _of_numbers(self, image: Raster) -> Tensor:
        """Numbers [C, H, W] or [C, D, H, W] as float32 [1, C, H, W] or [1, C, D, H, W]: each slice
        of a volume goes through the same steps as a picture.

        Raises:
            ImageError: the steps are for pictures.
        """
        low, high = float(image.values.min()), float(image.values.max())
        if self.letterbox is not None:
            if image.values.ndim != 3 or len(image.values) not in (1, 3) or low < 0 or high > 1:
                raise ImageError(
                    "numbers that are no picture are not padded as Ultralytics pads pictures",
                    "--size HxW, --preset none",
                )
            levels = (image.values * 255 + 0.5).astype(np.uint8)  # the bits that it has for all
            picture = levels[0] if len(levels) == 1 else np.moveaxis(levels, 0, -1)
            return self.tensor(Image.fromarray(np.ascontiguousarray(picture)))
        if (
            self.mean is not None
            and not self.any_values
            and not (-_NEAR <= low <= high <= 1 + _NEAR)
        ):
            raise ImageError(
                f"its values are {low:g} to {high:g} ({image.words}), and the model's mean and "
                "std are for 0..1",
                "--preset none leaves values as they are; --mean and --std of your own take any",
            )
        values = torch.from_numpy(image.values)
        slices = values.movedim(1, 0) if values.ndim == 4 else values[None]  # [D, C, H, W]
        tensor = self._normalised(self._sized(slices))
        return tensor.movedim(0, 1)[None].contiguous() if values.ndim == 4 else tensor

    def _sized(self, picture: Any) -> Any:
        """A picture, or a tensor [..., C, H, W], resized and cropped."""
        picture = self._resized(picture)
        crop = self._crop_of(pixels.sides(picture))
        return picture if crop is None else self._cropped(picture, crop)

    def _normalised(self, values: Tensor) -> Tensor:
        """Values [..., C, H, W] of 0..1 as the model takes them."""
        tensor = values.flip(-3) if self.bgr else values
        if self.mean is not None and self.std is not None:
            tensor = pixels.normalised(tensor, self.mean, self.std)
        if self.padding is not None:
            border = self.padding.border(pixels.sides(tensor))
            tensor = pixels.padded(tensor, border, self.padding.value)
        return tensor

    def _resized(self, picture: Any) -> Any:
        """A picture, or a tensor [..., C, H, W], in its new size."""
        if self.resize is None:
            return picture
        size = _resized_to(self.resize, pixels.sides(picture))
        _check_enlarged(pixels.sides(picture), size, self.resize)
        resized = pixels.resized_as_transformers if self.as_transformers else pixels.resized
        return resized(picture, size, self.interpolation, self.antialias)

    def _cropped(self, picture: Any, crop: HeightWidth) -> Any:
        begin = pixels.centre_as_transformers if self.as_transformers else pixels.centre
        top, left = map(begin, pixels.sides(picture), crop)
        return pixels.cropped(picture, top, left, crop)

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
        padded = [pixels.padded(p, (0, 0, 0, height - p.shape[2])) for p in pictures]
        return torch.cat(padded, dim=3)

    def pictures(self, args: Sequence[Tensor]) -> list[Tensor]:
        """The inputs before normalising, as 0..1: [1, C, H, W] for each image, frame and slice. C
        is 1 or 3: of more than three channels the first three are red, green and blue, of two the
        first is grey. Values that are no picture's are shown from their least to their largest."""
        undone = [_visible(args[0])] if self.transform else [self._undo(arg) for arg in args]
        return [p for arg in undone for p in (arg.unbind(2) if arg.ndim == 5 else (arg,))]

    def _undo(self, tensor: Tensor) -> Tensor:
        """An input [1, C, H, W] or [1, C, T, H, W] as values of 0..1."""
        if self.mean is not None and self.std is not None:
            mean, std = (
                torch.tensor(v, device=tensor.device).reshape(-1, *(1,) * (tensor.ndim - 2))
                for v in (self.mean, self.std)
            )
            tensor = tensor * std + mean
        tensor = tensor.flip(1) if self.bgr else tensor
        if self.channels not in (1, 3) or _is_no_picture(tensor):
            return _visible(tensor)
        return tensor.clamp(0, 1)

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
            return [torch.zeros_like(t) for t in self.transform(self.empty())]
        size = _resized_to(self.resize, FALLBACK_SIZE)
        size = self._crop_of(size) or size
        if self.letterbox is not None:
            size = (self.letterbox.size, self.letterbox.size)
        height, width = size if self.padding is None else self.padding.padded(size)
        time = [] if self.frames is None else [self.frames]
        return [torch.zeros(1, self.channels, *time, height, width)] * self.inputs

    def empty(self) -> Any:
        """Black, for trying the user's function: a picture, or an array [channels, H, W] where the
        images are no pictures."""
        if self.channels in (1, 3):
            return Image.new(self.mode, FALLBACK_SIZE)
        return np.zeros((self.channels, *FALLBACK_SIZE), np.float32)

    def words_for(self, numbers: str) -> str:
        """The steps in words for an image whose `numbers` became values in this way."""
        if not numbers or self.transform is not None:
            return self.words
        kind, *steps = self.words.split(", ")
        of_pictures = (_UNIT, *_clip_words(self.frames).split(", "))
        return ", ".join([kind, numbers, *(step for step in steps if step not in of_pictures)])

    @property
    def words(self) -> str:
        """The steps in words, for the manifest."""
        kind = "BGR" if self.bgr else _kind_words(self.channels)
        beside = [f"with {' and '.join(self.further)}"] if self.further else []
        if self.transform is not None:
            return ", ".join([kind, str(self.transform), *beside])
        steps = [kind]
        if self.letterbox is not None:
            steps.append(self.letterbox.words)
        if self.resize is not None:
            steps.append(f"resize {_resize_words(self.resize)} ({self.interpolation})")
        if self.crop is not None:
            steps.append(f"centre crop {_by(self.crop)}")
        elif self.multiple > 1:
            steps.append(f"centre crop to multiples of {self.multiple}")
        if self.mean is not None and self.std is not None:
            steps.append(f"normalise by mean {listed(self.mean)} and std {listed(self.std)}")
        else:
            steps.append(_UNIT)
        if self.padding is not None:
            steps.append(self.padding.words)
        if self.frames is not None:
            steps.append(_clip_words(self.frames))
        if self.inputs > 1:
            steps.append(f"{self.inputs} images at once")
        return ", ".join(steps + beside)


def _is_no_picture(tensor: Tensor) -> bool:
    """Whether values are far outside of 0..1: no resizing of a picture goes beyond by half."""
    low, high = tensor.aminmax()
    return bool(low < -0.5 or high > 1.5)


def _visible(tensor: Tensor) -> Tensor:
    """An input of unknown scale as a picture: its range as 0..1; of more than three channels the
    first three, of two the first."""
    picture = tensor[:, : 1 if tensor.shape[1] < 3 else 3].float()
    low, high = picture.aminmax()
    return (picture - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)


def _kind_words(channels: int) -> str:
    """What images of so many channels are called, and which of them `input.png` shows."""
    if channels in (1, 3):
        return "greyscale" if channels == 1 else "RGB"
    shown = "the first is" if channels == 2 else "the first three are"
    return f"{channels} channels ({shown} shown)"


def _clip_words(frames: int | None) -> str:
    return f"{frames} frames, evenly spread"


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
