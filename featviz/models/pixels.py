"""The steps from a picture to a model's input, as torchvision's transforms compute them.

Pillow and torch do the work, as they do for torchvision, whose import takes as long as torch's: a
model that is not torchvision's is fed without it. A picture is one of Pillow's, or a tensor
[..., C, H, W].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from featviz.models.requirements import require_torchvision
from featviz.models.resizing import HeightWidth

Picture = TypeVar("Picture", Image.Image, Tensor)


def sides(picture: Image.Image | Tensor) -> HeightWidth:
    """The (height, width) in pixels."""
    if isinstance(picture, Tensor):
        return picture.shape[-2], picture.shape[-1]
    return picture.height, picture.width


def resized(picture: Picture, size: HeightWidth, interpolation: str, smooth: bool) -> Picture:
    """A picture in another size.

    Args:
        picture: a tensor holds floats or bytes, which are rounded again.
        size: (height, width) in pixels.
        interpolation: one of `records.INTERPOLATIONS`; Pillow's `nearest` is exact.
        smooth: whether a tensor is smoothed where it shrinks; Pillow always smooths.
    """
    if sides(picture) == size:
        return picture
    if not isinstance(picture, Tensor):
        by_pillow = Image.Resampling[interpolation.removesuffix("-exact").upper()]
        return picture.resize((size[1], size[0]), by_pillow)
    of_bytes = not picture.is_floating_point()
    values = _interpolated(picture.float() if of_bytes else picture, size, interpolation, smooth)
    return values.clamp(0, 255).round().to(picture.dtype) if of_bytes else values


def _interpolated(values: Tensor, size: HeightWidth, mode: str, smooth: bool) -> Tensor:
    """Floats [..., C, H, W] in another size."""
    flat = values if values.ndim == 4 else values[None]
    if mode.startswith("nearest"):
        result = functional.interpolate(flat, size, mode=mode)
    else:
        result = functional.interpolate(flat, size, None, mode, False, antialias=smooth)
    return result.reshape(*values.shape[:-2], *size)


def resized_as_transformers(values: Tensor, size: HeightWidth, mode: str, smooth: bool) -> Tensor:
    """A tensor [..., C, H, W] in another size as the image processors of transformers compute it:
    by torchvision, which has loops of its own for bytes.

    Raises:
        UnfitError: torchvision does not fit torch.
    """
    require_torchvision()
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2.functional import resize_image

    result: Tensor = resize_image(values, list(size), InterpolationMode(mode), antialias=smooth)
    return result


def centre(whole: int, side: int) -> int:
    """Where a centre crop begins: at the nearest even pixel where its place is between two, and
    before the picture (below 0) where this is the smaller one."""
    return -((side - whole) // 2) if side > whole else round((whole - side) / 2)


def centre_as_transformers(whole: int, side: int) -> int:
    """The same, at the pixel before the place where this is between two."""
    return -((side - whole) // 2) if side > whole else (whole - side) // 2


def cropped(picture: Picture, top: int, left: int, size: HeightWidth) -> Picture:
    """The part of a picture that begins at a pixel and has a size (height, width); zeros where this
    is outside."""
    height, width = size
    if not isinstance(picture, Tensor):
        return picture.crop((left, top, left + width, top + height))
    high, wide = sides(picture)
    return functional.pad(picture, (-left, left + width - wide, -top, top + height - high))


def to_tensor(picture: Image.Image) -> Tensor:
    """The numbers of a picture, [C, H, W] of its own type, in memory pixel by pixel."""
    values = torch.from_numpy(np.array(picture))
    return values.reshape(picture.height, picture.width, -1).permute(2, 0, 1)


def to_floats(values: Tensor) -> Tensor:
    """Whole numbers as float32 of 0..1, where 1 is the most that their type holds; floats as they
    are."""
    if values.is_floating_point():
        return values.float()
    return values.float() / float(torch.iinfo(values.dtype).max)


def normalised(values: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Floats [..., C, H, W] less the mean and divided by the deviation of their channel."""
    means, stds = (torch.tensor(v, dtype=values.dtype).reshape(-1, 1, 1) for v in (mean, std))
    return (values - means) / stds


def padded(values: Tensor, border: Sequence[int], value: float = 0.0) -> Tensor:
    """A tensor [..., H, W] with a border.

    Args:
        border: pixels on the left, top, right and bottom.
    """
    left, top, right, bottom = border
    return functional.pad(values, (left, right, top, bottom), value=value)
