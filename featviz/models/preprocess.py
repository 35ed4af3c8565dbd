"""From a decoded image to the model's input, and back to what the model saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from featviz.errors import ImageError
from featviz.models.requirements import import_letterbox
from featviz.records import Raster
from featviz.text import by

HeightWidth = tuple[int, int]
Size = int | HeightWidth


class Window(NamedTuple):
    """The rectangle of the image in the input, in pixels of the input."""

    top: int
    """Rows of the input above the image; negative if a crop has cut off rows of the image."""
    left: int
    height: int
    width: int


FALLBACK_SIZE = (224, 224)

_UNIT = "values 0..1"
_MODES = ("RGB", "L")
_MAX_ENLARGED = 2**25
"""The most pixels to which a smaller image may be enlarged."""

_ROW_HEIGHT = 16
"""The height in pixels of the strip that shows a vector."""

_ROUNDING = 1e-3
"""How far beyond 0..1 a value may lie and still count as 0..1."""

_TINY = torch.finfo(torch.float32).tiny
"""The least divisor when values are stretched to 0..1."""


@dataclass(frozen=True)
class Chain:
    """Resize, centre crop, scale to 0..1, normalise, in this order, as torchvision does;
    None leaves a step out."""

    resize: Size | None = None
    """The shorter side in pixels, or (height, width)."""
    crop: Size | None = None
    """The side of a square in pixels, or (height, width)."""
    mean: tuple[float, ...] | None = None
    """A number for each channel, for values 0..1; without `std` it has no effect."""
    std: tuple[float, ...] | None = None
    """A number for each channel; without `mean` it has no effect."""
    channels: int = 3
    """The channels of the model's input."""
    interpolation: str = "bilinear"
    """One of `bilinear`, `bicubic`, `nearest`, `nearest-exact`, `lanczos`."""
    antialias: bool = True
    """Whether resizing smooths; torchvision's video models were trained without smoothing."""
    multiple: int = 1
    """If `crop` is None, both sides are cropped to multiples of this."""
    bgr: bool = False
    """Whether the model takes blue first."""
    stride: int = 0
    """The stride of Ultralytics' LetterBox. The longer side is resized to `resize`, rounded
    up to a multiple of the stride; the shorter side is padded with grey to a multiple. 0 if
    there is no LetterBox."""
    stretch: bool = False
    """Whether LetterBox resizes to a square and pads nothing."""
    library: Callable[[Any], Tensor] | None = field(default=None, compare=False)
    """A library's own function, which prepares images instead of the steps above. If the
    user changes a step, the function is dropped, and the steps imitate it."""
    library_steps: tuple[str, ...] = field(default=(), compare=False)
    """The steps of `library` in words, without normalising."""
    library_own_size: bool = field(default=False, compare=False)
    """Whether the image decides the size of what `library` returns."""

    def __call__(self, image: Image.Image | Raster) -> Tensor:
        """The input that an image becomes, float32 [1, C, H, W].

        Args:
            image: A picture of mode L or RGB, or numbers [C, H, W].

        Raises:
            ImageError: Where a narrow image would become too large, LetterBox would have
                to pad an array, or the library's function fails.
        """
        if self.library is not None:
            self._resized_size(image.size[::-1])  # raises if it would become too large
            return self.library(image)
        values = self._letterbox(image) if self.stride else self._resize_and_crop(image)
        # pictures stay bytes until here: resizing them rounds as torchvision does
        values = values if values.is_floating_point() else values.float() / 255
        values = (values.flip(0) if self.bgr else values)[None]
        if self.mean is None or self.std is None:
            return values
        return (values - _by_channel(self.mean, values)) / _by_channel(self.std, values)

    @property
    def own_size(self) -> bool:
        """Whether the image decides the size of the input."""
        if self.library is not None:
            return self.library_own_size
        if self.stride:
            return not self.stretch
        return self.crop is None and not isinstance(self.resize, tuple)

    @property
    def steps(self) -> tuple[str, ...]:
        """Each step in words; the last one says what the values are."""
        steps = list(self.library_steps)
        if self.library is None:
            steps = self._steps_of_size()
        if self.mean is None or self.std is None:
            return (*steps, _UNIT)
        mean = numbers_text(self.mean)
        return (*steps, f"normalise by mean {mean} and std {numbers_text(self.std)}")

    def _steps_of_size(self) -> list[str]:
        """Resizing, padding and cropping in words."""
        steps = []
        if self.stride and self.stretch:
            steps.append(f"resize to {self._side}×{self._side} (bilinear, by OpenCV)")
        elif self.stride:
            steps.append(f"resize longer side to {self._side} (bilinear, by OpenCV)")
            steps.append(f"pad with 114 to multiples of {self.stride}")
        elif isinstance(self.resize, tuple):
            steps.append(f"resize to {by(self.resize)} ({self.interpolation})")
        elif self.resize is not None:
            steps.append(f"resize shorter side to {self.resize} ({self.interpolation})")
        # RAFT takes any size that is a multiple of 8
        if self.crop is not None:
            steps.append(f"centre crop {by(_both_sides(self.crop))}")
        elif self.multiple > 1:
            steps.append(f"centre crop to multiples of {self.multiple}")
        return steps

    def _resize_and_crop(self, image: Image.Image | Raster) -> Tensor:
        """The numbers [C, H, W] of an image after resizing and cropping; bytes 0..255 if it
        is a picture."""
        picture: Image.Image | Tensor
        if isinstance(image, Raster):
            picture = torch.from_numpy(image.values)
        elif self.antialias:
            picture = image  # Pillow always smooths
        else:
            picture = to_tensor(image)
        height_width = image.size[::-1]
        size = self._resized_size(height_width)
        if self.resize is not None and size != height_width:
            picture = self._resize(picture, size)
        crop = self._crop_size(size)
        if crop != size:
            picture = _crop_middle(picture, size, crop)
        if isinstance(picture, Tensor):
            return picture
        return to_tensor(picture)

    def _resize(
        self, picture: Image.Image | Tensor, size: HeightWidth
    ) -> Image.Image | Tensor:
        """A picture in another size; its type stays the same.

        Args:
            picture: A picture of Pillow, or a tensor [C, H, W].
            size: The new height and width in pixels.
        """
        mode = self.interpolation
        if not isinstance(picture, Tensor):
            # Pillow's nearest is what torch calls nearest-exact
            resampling = Image.Resampling[mode.removesuffix("-exact").upper()]
            return picture.resize(size[::-1], resampling)
        smooths = self.antialias and not mode.startswith("nearest")
        floats = picture[None].float()
        resized = functional.interpolate(floats, size, mode=mode, antialias=smooths)[0]
        if picture.is_floating_point():
            return resized
        return resized.clamp(0, 255).round().to(picture.dtype)

    def _crop_size(self, size: HeightWidth) -> HeightWidth:
        """The (height, width) of the crop: `crop`, or, if that is None, the largest multiples
        of `multiple` that fit into the resized image (at least one).

        Args:
            size: Height and width of the resized image.
        """
        if self.crop is not None:
            return _both_sides(self.crop)
        height, width = (
            max(pixels // self.multiple, 1) * self.multiple for pixels in size
        )
        return height, width

    def _letterbox(self, image: Image.Image | Raster) -> Tensor:
        """The bytes [C, H, W] of an image, resized and padded by Ultralytics.

        Raises:
            ImageError: Where the image is an array: OpenCV resizes bytes, and LetterBox
                pads with 114 of 255.
            FeatvizError: Where Ultralytics cannot be imported.
        """
        if isinstance(image, Raster):
            raise ImageError(
                "numbers are not padded as Ultralytics pads pictures",
                "--size HxW, --preset none",
            )
        resize = import_letterbox()(
            self._side,
            auto=not self.stretch,
            scale_fill=self.stretch,
            stride=self.stride,
        )
        padded = torch.from_numpy(resize(image=np.atleast_3d(np.asarray(image))))
        return padded.reshape(*padded.shape[:2], -1).permute(2, 0, 1)

    @property
    def _side(self) -> int:
        """The longer side of a letterboxed image in pixels: `resize`, rounded up to whole
        strides."""
        assert isinstance(self.resize, int)
        return math.ceil(self.resize / self.stride) * self.stride

    @lru_cache(maxsize=64)  # noqa: B019 - of a few sizes
    def window(self, size: tuple[int, int]) -> Window:
        """The rectangle of the input in which LetterBox puts an image.

        Args:
            size: Width and height of the image.
        """
        # LetterBox pads a white image with grey, so white shows where the image lies
        white = self._letterbox(Image.new("L", size, 255))[0].numpy() == 255
        rows = np.flatnonzero(white.any(axis=1))
        columns = np.flatnonzero(white.any(axis=0))
        return Window(int(rows[0]), int(columns[0]), len(rows), len(columns))

    def window_in_input(self, size: tuple[int, int], input_size: HeightWidth) -> Window:
        """The rectangle of an image in the input. If the image is cropped, the rectangle goes
        beyond the input's edges. For a library's own function it is the whole input.

        Args:
            size: Width and height of the image.
            input_size: Height and width of the input.
        """
        if self.stride:
            return self.window(size)
        # it is not known whether the library's function crops
        if self.library is not None:
            return Window(0, 0, *input_size)
        height, width = self._resized_size(size[::-1])
        crop = self._crop_size((height, width))
        return Window(
            -_margin(height, crop[0]), -_margin(width, crop[1]), height, width
        )

    def _resized_size(self, size: HeightWidth) -> HeightWidth:
        """The (height, width) of an image after resizing; the longer side is rounded down.

        Args:
            size: Height and width of the image.

        Raises:
            ImageError: Where a narrow image would become too large.
        """
        if not isinstance(self.resize, int):
            return self.resize or size
        height, width = size
        shorter = self.resize
        longer = int(shorter * max(size) / min(size))
        if shorter * longer > max(_MAX_ENLARGED, shorter**2, height * width):
            raise ImageError(
                f"it is {width}×{height} pixels, and would become {shorter * longer:,}",
                "--size HxW brings it to a size",
            )
        if height <= width:
            return (shorter, longer)
        return (longer, shorter)


def _both_sides(size: Size) -> HeightWidth:
    """The (height, width) of a size; a single number is both."""
    if isinstance(size, int):
        return (size, size)
    return size


def _crop_middle(
    picture: Image.Image | Tensor, size: HeightWidth, crop: HeightWidth
) -> Image.Image | Tensor:
    """The middle of a picture. If the picture is smaller than the crop, zeros are added
    around it.

    Args:
        picture: A picture of Pillow, or a tensor [C, H, W].
        size: The height and width of the picture.
        crop: The height and width of the result.
    """
    # a negative margin pads
    top = _margin(size[0], crop[0])
    left = _margin(size[1], crop[1])
    bottom = top + crop[0]
    right = left + crop[1]
    if isinstance(picture, Tensor):
        return functional.pad(picture, (-left, right - size[1], -top, bottom - size[0]))
    return picture.crop((left, top, right, bottom))


def _margin(side: int, crop: int) -> int:
    """The first pixel of a crop of `crop` pixels in the middle of a side of `side` pixels;
    negative if the side is shorter than the crop. Half a pixel is rounded as torchvision's
    center_crop does it: to the even number."""
    if crop > side:
        return -((crop - side) // 2)
    return round((side - crop) / 2)


def to_tensor(picture: Image.Image) -> Tensor:
    """The numbers of a picture, [C, H, W], in its own type. The result is a view: in memory,
    the channels of a pixel follow one another."""
    values = torch.from_numpy(np.array(picture))
    return values.reshape(picture.height, picture.width, -1).permute(2, 0, 1)


def _by_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    """A number for each channel as a tensor that broadcasts with `like`, [1, C, ...]."""
    numbers = torch.tensor(values, dtype=like.dtype, device=like.device)
    return numbers.reshape(-1, *(1,) * (like.ndim - 2))


def numbers_text(values: Sequence[float]) -> str:
    """Numbers for people: `[0.5, 0.25]`."""
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes the model's input: by a chain, or by the user's function."""

    chain: Chain
    transform: Callable[[Any], list[Tensor]] | None = None
    """A function that replaces the chain (a `UserTransform`): from a picture or an array to
    all arguments of forward. None if the chain prepares images."""
    frames: int | None = None
    """How many frames a clip has; None for a model of images."""
    frames_first: bool = False
    """Whether a clip is [1, T, C, H, W], as transformers' models of videos take it; else it
    is [1, C, T, H, W]."""
    inputs: int = 1
    """How many images one forward pass of the model takes."""
    guessed: str | None = field(default=None, compare=False)
    """The preset that was guessed; None if the model or the user says how images are
    prepared."""
    size_guessed: bool = field(default=False, compare=False)
    """Whether the input's size is a guess: neither the model nor the user says it."""
    further: tuple[str, ...] = ()
    """The arguments of forward besides images, in words."""
    any_values: bool = field(default=False, compare=False)
    """Whether an array with values beyond 0..1 may be normalised."""
    stretched: bool = field(default=False, compare=False)
    """Whether pictures of the input are stretched, so that its least value is black and its
    largest white: for 12 bits in 16, for example."""
    dtype: torch.dtype = field(default=torch.float32, compare=False)
    """The type of the model's input."""

    def __call__(self, images: Sequence[Image.Image | Raster]) -> list[Tensor]:
        """The model's arguments. An image becomes [1, C, H, W], a clip or a volume
        [1, C, T, H, W] ([1, T, C, H, W] if `frames_first`). They are cast to `dtype`, but
        integers of a transform stay integers.

        Args:
            images: One image, the frames of a clip, or one image for each input of the
                model. A transform gets only the first image.

        Raises:
            ImageError: Where an image cannot be prepared, or frames differ in size.
        """
        if self.transform is not None:
            image = images[0]
            if isinstance(image, Raster):
                tensors = self.transform(image.values)
            else:
                tensors = self.transform(self._rgb(image))
        else:
            tensors = [self.tensor(image) for image in images]
            if self.frames is not None and tensors[0].ndim == 4:
                tensors = [_stack(tensors, self.time_axis)]
        return [
            tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            for tensor in tensors
        ]

    @property
    def time_axis(self) -> int:
        """The axis of a clip that counts frames."""
        return 1 if self.frames_first else 2

    def _rgb(self, image: Image.Image) -> Image.Image:
        """A picture in RGB, or in grey if the model takes one channel."""
        return image.convert(_MODES[self.chain.channels == 1])

    def tensor(self, image: Image.Image | Raster) -> Tensor:
        """Prepare one image by the chain, as float32. A picture or an array [C, H, W] becomes
        [1, C, H, W]; a volume [C, D, H, W] becomes [1, C, D, H, W], slice by slice.

        Raises:
            ImageError: Where the chain fails; or where the chain normalises values 0..1,
                an array has others, and `any_values` is False.
        """
        if not isinstance(image, Raster):
            return self.chain(self._rgb(image))
        if self.chain.mean is not None and not self.any_values:
            low, high = float(image.values.min()), float(image.values.max())
            if low < -_ROUNDING or high > 1 + _ROUNDING:
                raise ImageError(
                    f"its values are {low:g} to {high:g} ({image.description}), and the"
                    " model's mean and std are for 0..1",
                    "--preset none leaves values as they are, --mean and --std take any",
                )
        if image.values.ndim == 3:
            return self.chain(image)
        slices = image.values.swapaxes(0, 1)
        return _stack([self.chain(replace(image, values=v)) for v in slices], 2)

    def shown(self, args: Sequence[Tensor]) -> Tensor:
        """The `pictures` side by side, [1, C, H, W]; zeros fill the space below pictures that
        are less high than the others."""
        pictures = self.pictures(args)
        # the inputs of a model may differ in height
        height = max(picture.shape[2] for picture in pictures)
        padded = [functional.pad(p, (0, 0, 0, height - p.shape[2])) for p in pictures]
        return torch.cat(padded, dim=3)

    def pictures(self, args: Sequence[Tensor]) -> list[Tensor]:
        """The inputs before normalising, in 0..1: float32 [1, C, H, W] for each image,
        frame and slice; C is 1 or 3. Values that are no picture are stretched, so that the
        least is 0 and the largest 1.

        Args:
            args: The model's arguments. Of a transform that returns tensors of several
                shapes, only the first is shown.
        """
        pictures: list[Tensor] = []
        are_alike = all(arg.shape[:-2] == args[0].shape[:-2] for arg in args)
        for arg in args if self.transform is None or are_alike else args[:1]:
            if self.frames_first:
                arg = arg.transpose(1, 2)
            values = self._shown_values(arg.float())
            pictures += values.unbind(2) if values.ndim == 5 else [values]
        return pictures

    def _shown_values(self, values: Tensor) -> Tensor:
        """One argument of the model in 0..1, with 1 or 3 channels. An argument without height
        and width is shown as rows (`_as_rows`)."""
        if values.ndim < 4 or values.shape[-2:] == (1, 1):
            values = _as_rows(values)
        elif self.transform is None:
            values = self._before_normalising(values)
        low, high = values.aminmax()
        # resizing takes a picture beyond 0..1, but by less than 0.5
        is_picture = self.chain.channels in (1, 3) and low >= -0.5 and high <= 1.5
        if is_picture and self.transform is None and not self.stretched:
            return values.clamp(0, 1)
        # of two channels the first is shown, of more than three the first three
        values = values[:, : 1 if values.shape[1] < 3 else 3]
        low, high = values.aminmax()
        return (values - low) / (high - low).clamp(min=_TINY)

    def _before_normalising(self, values: Tensor) -> Tensor:
        """The values [1, C, ...] of an input with the chain's last steps undone: in RGB, and
        not normalised."""
        chain = self.chain
        if chain.mean is not None and chain.std is not None:
            std = _by_channel(chain.std, values)
            values = values * std + _by_channel(chain.mean, values)
        return values.flip(1) if chain.bgr else values

    def blank(self) -> list[Tensor]:
        """Zeros in the shapes of the model's arguments for an image of 224 × 224 pixels."""
        if self.transform is not None:
            return [torch.zeros_like(tensor) for tensor in self([self.empty()])]
        # the chain is run on an image, since its steps decide the shape
        image = torch.zeros_like(self.tensor(self.empty()), dtype=self.dtype)
        if self.frames is not None:
            image = _stack([image] * self.frames, self.time_axis)
        return [image] * self.inputs

    def empty(self) -> Image.Image | Raster:
        """An image without content: a black picture of 224 × 224 pixels; for other channels
        than those of pictures, zeros [channels, 224, 224]; or a transform's own `blank`."""
        # an input that is not an image has the shape of its own tensors
        numbers = getattr(self.transform, "blank", None)
        if numbers is not None:
            return Raster(numbers.numpy(), "")
        if self.chain.channels in (1, 3):
            return Image.new(_MODES[self.chain.channels == 1], FALLBACK_SIZE)
        return Raster(np.zeros((self.chain.channels, *FALLBACK_SIZE), np.float32), "")

    def words_for(self, images: Sequence[Image.Image | Raster] = ()) -> str:
        """All steps in words, for the manifest.

        Args:
            images: The images that are prepared. If there is an array, the words say how it
                was read. Without images, the words are those for a picture.
        """
        steps = [self._color]
        numbers = [image.description for image in images if isinstance(image, Raster)]
        if self.transform is not None:
            if getattr(self.transform, "blank", None) is not None:
                steps = []  # the input is not an image, and has no colour
            steps.append(str(self.transform))
        elif numbers:
            steps.append(numbers[0])
            steps += [step for step in self.chain.steps if step != _UNIT]
        else:
            steps += self.chain.steps
            if self.frames is not None:
                steps.append(f"{self.frames} frames, evenly spread")
        if self.stretched:
            steps.append("shown stretched")
        if self.inputs > 1:
            steps.append(f"{self.inputs} images at once")
        if self.further:
            steps.append(f"with {' and '.join(self.further)}")
        return ", ".join(steps)

    @property
    def _color(self) -> str:
        """The channels of the input in words."""
        channels = self.chain.channels
        if channels == 1:
            return "greyscale"
        if channels == 3:
            if self.chain.bgr:
                return "BGR"
            return "RGB"
        shown = "the first is" if channels == 2 else "the first three are"
        return f"{channels} channels ({shown} shown)"


def _as_rows(values: Tensor) -> Tensor:
    """Numbers that are not a picture as rows of pixels, [1, 1, rows, F]. [1, rows, F] keeps
    its rows; numbers of any other shape become one row. A single row is repeated
    _ROW_HEIGHT times, to be visible."""
    width = values.shape[-1] if values.ndim == 3 else values.numel()
    rows = values.reshape(1, 1, -1, width)
    if rows.shape[2] == 1:
        return rows.expand(-1, -1, _ROW_HEIGHT, -1)
    return rows


_INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def input_dtype(module: nn.Module) -> torch.dtype:
    """The type of a model's first parameter that is float16, bfloat16, float32 or float64;
    float32 if there is none."""
    for parameter in module.parameters():
        if parameter.dtype in _INPUT_DTYPES:
            return parameter.dtype
    return torch.float32


def _stack(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Stack frames or slices [1, C, H, W] to a clip or a volume: [1, C, T, H, W] for axis 2,
    [1, T, C, H, W] for axis 1.

    Raises:
        ImageError: Where they differ in size.
    """
    if len({tensor.shape for tensor in tensors}) > 1:
        raise ImageError("the frames differ in size", "--size HxW brings them to one")
    return torch.stack(list(tensors), dim=axis)
