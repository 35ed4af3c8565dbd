"""From a decoded image to the model's input, and back to what the model saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from featviz.errors import ImageError
from featviz.models.requirements import letterbox
from featviz.records import Raster
from featviz.text import by

HeightWidth = tuple[int, int]
Size = int | HeightWidth
Window = tuple[int, int, int, int]
"""Where the image lies in the input: top, left, height and width."""

FALLBACK_SIZE = (224, 224)

_UNIT = "values 0..1"
_MODES = ("RGB", "L")
_MOST_ENLARGED = 2**25
"""Pixels that an image with fewer may be enlarged to."""

_THICK = 16

_NEAR, _TINY = 1e-3, torch.finfo(torch.float32).tiny
"""How far beyond 0..1 a value may be by rounding, and the least range of values."""


@dataclass(frozen=True)
class Chain:
    """Resize, centre crop, 0..1, normalise, as torchvision does; None leaves a step out."""

    resize: Size | None = None  # the shorter side, or (height, width)
    crop: Size | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    channels: int = 3
    interpolation: str = "bilinear"
    antialias: bool = True
    """Whether resizing smooths; torchvision's video models were trained without."""
    multiple: int = 1
    bgr: bool = False
    stride: int = 0
    """Of Ultralytics' LetterBox: the longer side is resized to `resize`, rounded up to a multiple
    of it, the rest is padded with grey to one. 0: no LetterBox."""
    stretch: bool = False
    library: Callable[[Any], Tensor] | None = field(default=None, compare=False)
    """A library's own function, which does these steps, or nearly, until the user changes one."""
    library_steps: tuple[str, ...] = field(default=(), compare=False)
    library_own_size: bool = field(default=False, compare=False)

    def __call__(self, image: Image.Image | Raster) -> Tensor:
        """A picture of mode L or RGB, or numbers [C, H, W], as float32 [1, C, H, W]."""
        if self.library is not None:
            self._resized_to(image.size[::-1])  # refuses what would become too large
            return self.library(image)
        values = self._letterboxed(image) if self.stride else self._sized(image)
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
        """Each step in words."""
        steps, last = list[str](), _UNIT
        if self.mean is not None and self.std is not None:
            last = f"normalise by mean {listed(self.mean)} and std {listed(self.std)}"
        if self.library is not None:
            return (*self.library_steps, last)
        if self.stride:
            side = self._side
            size = f"to {side}×{side}" if self.stretch else f"longer side to {side}"
            steps = [f"resize {size} (bilinear, by OpenCV)"]
            if not self.stretch:
                steps.append(f"pad with 114 to multiples of {self.stride}")
        elif (to := self.resize) is not None:
            size = f"to {by(to)}" if isinstance(to, tuple) else f"shorter side to {to}"
            steps = [f"resize {size} ({self.interpolation})"]
        if (crop := self.crop) is not None:
            steps.append(f"centre crop {by((crop, crop) if isinstance(crop, int) else crop)}")
        elif self.multiple > 1:
            steps.append(f"centre crop to multiples of {self.multiple}")
        return (*steps, last)

    def _sized(self, image: Image.Image | Raster) -> Tensor:
        """The numbers [C, H, W] of an image that is resized and cropped. Pillow always smooths. A
        crop between two pixels begins at the nearest even one; around a smaller image there are
        zeros."""
        picture: Image.Image | Tensor
        if isinstance(image, Raster):
            picture = torch.from_numpy(image.values)
        else:
            picture = image if self.antialias else to_tensor(image)
        size, mode = self._resized_to(image.size[::-1]), self.interpolation
        if self.resize is not None and size != image.size[::-1]:
            if isinstance(picture, Tensor):
                smooth = self.antialias and not mode.startswith("nearest")
                floats = picture[None].float()
                resized = functional.interpolate(floats, size, mode=mode, antialias=smooth)[0]
                whole = not picture.is_floating_point()
                picture = resized.clamp(0, 255).round().to(picture.dtype) if whole else resized
            else:
                by_pillow = Image.Resampling[mode.removesuffix("-exact").upper()]
                picture = picture.resize(size[::-1], by_pillow)
        step = self.multiple
        crop = self.crop or (max(size[0] // step, 1) * step, max(size[1] // step, 1) * step)
        crop = (crop, crop) if isinstance(crop, int) else crop
        if crop != size:
            top, left = (
                -((side - given) // 2) if side > given else round((given - side) / 2)
                for given, side in zip(size, crop, strict=True)
            )
            bottom, right = top + crop[0], left + crop[1]
            if isinstance(picture, Tensor):
                around = (-left, right - size[1], -top, bottom - size[0])
                picture = functional.pad(picture, around)
            else:
                picture = picture.crop((left, top, right, bottom))
        return picture if isinstance(picture, Tensor) else to_tensor(picture)

    def _letterboxed(self, image: Image.Image | Raster) -> Tensor:
        """The bytes [C, H, W] of an image, resized and padded by Ultralytics."""
        pixels = np.atleast_3d(
            np.asarray(image) if isinstance(image, Image.Image) else image.values
        )
        if isinstance(image, Raster):
            if len(pixels) not in (1, 3) or pixels.min() < 0 or pixels.max() > 1:
                words = "numbers that are no picture are not padded as Ultralytics pads pictures"
                raise ImageError(words, "--size HxW, --preset none")
            levels = (pixels * 255 + 0.5).astype(np.uint8)
            pixels = np.ascontiguousarray(np.moveaxis(levels, 0, -1))
        pad = {"auto": not self.stretch, "scale_fill": self.stretch, "stride": self.stride}
        padded = torch.from_numpy(letterbox()(self._side, **pad)(image=pixels))
        return padded.reshape(*padded.shape[:2], -1).permute(2, 0, 1)

    @property
    def _side(self) -> int:
        assert isinstance(self.resize, int)
        return math.ceil(self.resize / self.stride) * self.stride

    @lru_cache(maxsize=64)  # noqa: B019 - of a few sizes
    def window(self, size: tuple[int, int]) -> Window:
        """Where LetterBox puts an image of a size (width, height) in the input."""
        white = self._letterboxed(Image.new("L", size, 255))[0].numpy() == 255
        rows, columns = np.flatnonzero(white.any(axis=1)), np.flatnonzero(white.any(axis=0))
        return int(rows[0]), int(columns[0]), len(rows), len(columns)

    def _resized_to(self, given: HeightWidth) -> HeightWidth:
        """The (height, width) of a resized image; the longer side is rounded down."""
        if not isinstance(self.resize, int):
            return self.resize or given
        long = int(self.resize * max(given) / min(given))
        if self.resize * long > max(_MOST_ENLARGED, self.resize**2, given[0] * given[1]):
            words = f"it is {given[1]}×{given[0]} pixels, and would become {self.resize * long:,}"
            raise ImageError(words, "--size HxW brings it to a size")
        return (self.resize, long) if given[0] == min(given) else (long, self.resize)


def to_tensor(picture: Image.Image) -> Tensor:
    """The numbers of a picture, [C, H, W] of its own type, in memory pixel by pixel."""
    values = torch.from_numpy(np.array(picture))
    return values.reshape(picture.height, picture.width, -1).permute(2, 0, 1)


def _by_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    numbers = torch.tensor(values, dtype=like.dtype, device=like.device)
    return numbers.reshape(-1, *(1,) * (like.ndim - 2))


def listed(values: Sequence[float]) -> str:
    """Numbers for people: `[0.5, 0.25]`."""
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes the model's input: by a chain, or by a function of the user's."""

    chain: Chain
    transform: Callable[[Any], list[Tensor]] | None = None
    """The user's own function from a picture or an array to all arguments of forward."""
    frames: int | None = None
    inputs: int = 1
    guessed: bool = field(default=False, compare=False)
    size_guessed: bool = field(default=False, compare=False)
    further: tuple[str, ...] = ()
    any_values: bool = field(default=False, compare=False)
    stretched: bool = field(default=False, compare=False)
    """Whether pictures go from their least value to their largest: of 12 bits in 16, say."""
    dtype: torch.dtype = field(default=torch.float32, compare=False)

    def __call__(self, images: Sequence[Image.Image | Raster]) -> list[Tensor]:
        """The model's arguments, of `dtype`: [1, C, H, W], or [1, C, T, H, W] for a clip or a
        volume."""
        if self.transform is not None:
            image = images[0]
            given = (
                image.values
                if isinstance(image, Raster)
                else image.convert(_MODES[self.chain.channels == 1])
            )
            tensors = self.transform(given)
        else:
            tensors = [self.tensor(image) for image in images]
            if self.frames is not None and tensors[0].ndim == 4:
                if len({tensor.shape for tensor in tensors}) > 1:
                    raise ImageError("the frames differ in size", "--size HxW brings them to one")
                tensors = [torch.stack(tensors, dim=2)]
        return [one.to(self.dtype) if one.is_floating_point() else one for one in tensors]

    def tensor(self, image: Image.Image | Raster) -> Tensor:
        """A picture, numbers [C, H, W] or each slice of a volume [C, D, H, W] through the chain."""
        if not isinstance(image, Raster):
            return self.chain(image.convert(_MODES[self.chain.channels == 1]))
        if self.chain.mean is not None and not self.any_values:
            low, high = float(image.values.min()), float(image.values.max())
            if not -_NEAR <= low <= high <= 1 + _NEAR:
                words = f"its values are {low:g} to {high:g} ({image.description})"
                message = f"{words}, and the model's mean and std are for 0..1"
                hint = "--preset none leaves values as they are, --mean and --std take any"
                raise ImageError(message, hint)
        if image.values.ndim == 3:
            return self.chain(image)
        slices = [Raster(values, image.description) for values in image.values.swapaxes(0, 1)]
        return torch.stack([self.chain(one) for one in slices], dim=2)

    def shown(self, args: Sequence[Tensor]) -> Tensor:
        """The `pictures` side by side: [1, C, H, W]."""
        pictures = self.pictures(args)
        height = max(picture.shape[2] for picture in pictures)
        padded = [functional.pad(p, (0, 0, 0, height - p.shape[2])) for p in pictures]
        return torch.cat(padded, dim=3)

    def pictures(self, args: Sequence[Tensor]) -> list[Tensor]:
        """The inputs before normalising, as 0..1: float32 [1, C, H, W] for each image, frame and
        slice; C is 1 or 3. Values that are no picture's go from their least to their largest."""
        undone, mean, std = [], self.chain.mean, self.chain.std
        for tensor in args[:1] if self.transform is not None else args:
            values = tensor.float()
            if values.ndim < 4 or values.shape[-2:] == (1, 1):  # no picture: rows, or one thick row
                values = values.reshape(
                    1, 1, -1, values.shape[-1] if values.ndim == 3 else values.numel()
                )
                values = values.expand(-1, -1, _THICK, -1) if values.shape[2] == 1 else values
            elif self.transform is None:
                if mean is not None and std is not None:
                    values = values * _by_channel(std, values) + _by_channel(mean, values)
                values = values.flip(1) if self.chain.bgr else values
            low, high = values.aminmax()
            # no resizing of a picture goes beyond 0..1 by half
            is_picture = self.chain.channels in (1, 3) and low >= -0.5 and high <= 1.5
            if is_picture and self.transform is None and not self.stretched:
                values = values.clamp(0, 1)
            else:
                values = values[:, : 1 if values.shape[1] < 3 else 3]
                low, high = values.aminmax()
                values = (values - low) / (high - low).clamp(min=_TINY)
            undone.append(values)
        return [p for arg in undone for p in (arg.unbind(2) if arg.ndim == 5 else (arg,))]

    def blank(self) -> list[Tensor]:
        """Zeros of the shapes that images would have, if of 224 × 224 pixels."""
        if self.transform is not None:
            return [torch.zeros_like(tensor) for tensor in self([self.empty()])]
        *shape, height, width = self.tensor(self.empty()).shape
        time = [] if self.frames is None else [self.frames]
        return [torch.zeros(*shape, *time, height, width, dtype=self.dtype)] * self.inputs

    def empty(self) -> Image.Image | Raster:
        """Black: a picture, or zeros [channels, H, W] where the images are no pictures."""
        if (numbers := getattr(self.transform, "blank", None)) is not None:
            return Raster(numbers.numpy(), "")
        if self.chain.channels in (1, 3):
            return Image.new(_MODES[self.chain.channels == 1], FALLBACK_SIZE)
        return Raster(np.zeros((self.chain.channels, *FALLBACK_SIZE), np.float32), "")

    def words_for(self, images: Sequence[Image.Image | Raster] = ()) -> str:
        """The steps in words, for images that may be numbers."""
        channels, steps = self.chain.channels, self.chain.steps
        numbers = next((image.description for image in images if isinstance(image, Raster)), "")
        kind = "greyscale" if channels == 1 else "BGR" if self.chain.bgr else "RGB"
        if channels not in (1, 3):
            shown = "the first is" if channels == 2 else "the first three are"
            kind = f"{channels} channels ({shown} shown)"
        words = [kind, *steps]
        if self.transform is not None:
            numeric = getattr(self.transform, "blank", None) is not None
            words = [*[kind] * (not numeric), str(self.transform)]
        elif numbers:
            words = [kind, numbers, *(step for step in steps if step != _UNIT)]
        elif self.frames is not None:
            words.append(f"{self.frames} frames, evenly spread")
        if self.stretched:
            words.append("shown stretched")
        if self.inputs > 1:
            words.append(f"{self.inputs} images at once")
        if self.further:
            words.append(f"with {' and '.join(self.further)}")
        return ", ".join(words)


def input_dtype(module: nn.Module) -> torch.dtype:
    """The type of a model's first parameter of half, bfloat16, single or double precision."""
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    return next((p.dtype for p in module.parameters() if p.dtype in kinds), torch.float32)
