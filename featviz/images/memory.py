"""Images that a program holds in memory: as Pillow sees them, and as files for a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from featviz.errors import UsageError

_KEPT = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F"})
"""Modes that a PNG or TIFF keeps."""
_WITH_ALPHA = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}
_VALUES = "uint8, or floats in 0..1"


def to_images(value: Any, name: str = "image") -> list[Image.Image]:
    """The images that a value is; UsageError, which calls it `name`, where it is none.

    Args:
        value: a PIL image; a tensor [H, W], [C, H, W] or [N, C, H, W]; an array [H, W], [H, W, C]
            or [N, H, W, C]. C is 1, 3 or 4 (grey, RGB, RGBA). Values are uint8, bool or floats in
            0..1, as for `torchvision.transforms.functional.to_pil_image`; grey arrays also uint16.
    """
    if isinstance(value, Image.Image):
        return [value]
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested or value.is_meta:
            raise UsageError(f"{name} is no dense tensor with values", _VALUES)
        if value.is_quantized or value.is_complex():
            raise UsageError(
                f"{name} holds {value.dtype}, which are no values of an image", _VALUES
            )
        dense = value.detach().cpu()
        dense = dense.float() if dense.dtype.is_floating_point else dense
        dense = dense.movedim(-3, -1) if dense.ndim > 2 else dense
        value = np.asarray(dense.resolve_neg().numpy())
    if not isinstance(value, np.ndarray):
        raise UsageError(
            f"{name} is of type {type(value).__name__!r}, which is no image",
            "give a path, a PIL image, an array [H, W, C] or a tensor [C, H, W]",
        )
    levels = _levels(value, name)
    levels = levels if levels.ndim == 4 else levels[None]
    if levels.ndim == 4 and levels.shape[-1] == 1:
        levels = levels[..., 0]
    return [Image.fromarray(np.ascontiguousarray(one)) for one in levels]


def to_files(images: Iterable[Any], folder: Path) -> list[str]:
    """Paths as they are; images in memory as files `image-0.png`, ... of a folder, without loss."""
    files: list[str] = []
    count = 0
    for number, value in enumerate(images):
        if isinstance(value, (str, PurePath)):
            files.append(str(value))
            continue
        is_array = isinstance(value, (Tensor, np.ndarray))
        if is_array and tuple(value.shape[:-1]) in ((), (1,)) and value.ndim:  # a vector
            files.append(to_npy(value, folder / f"image-{count}.npy"))
            count += 1
            continue
        for image in to_images(value, f"image {number}"):
            is_tiff = image.mode in ("I", "F")
            path = folder / f"image-{count}{'.tiff' if is_tiff else '.png'}"
            options: dict[str, Any] = {} if is_tiff else {"compress_level": 1}
            try:
                if not image.width * image.height:
                    raise ValueError("it has no pixels")
                if exif := image.getexif():
                    options["exif"] = exif
                if image.mode not in _KEPT:
                    image = image.convert(_WITH_ALPHA.get(image.mode, "RGB"))
                image.save(path, **options)
            except (OSError, ValueError, SyntaxError) as error:
                words = f"image {number} cannot be read: {error}"
                raise UsageError(words, "is its file whole and open?") from error
            files.append(str(path))
            count += 1
    return files


def to_npy(value: Any, path: Path) -> str:
    """The path of a tensor or an array, as a file of numbers."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).resolve_neg().numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        words = f"{path.stem} is a {type(value).__name__} and no tensor of numbers"
        raise UsageError(words, "torch.randn(1, 128)")
    np.save(path, value)
    return str(path)


def _levels(array: np.ndarray, name: str) -> np.ndarray:
    """An array [H, W], [H, W, C] or [N, H, W, C] as integers that Pillow takes."""
    shape, dtype = array.shape, array.dtype
    if not array.size or len(shape) not in (2, 3, 4) or (shape[2:] and shape[-1] not in (1, 3, 4)):
        raise UsageError(
            f"{name} of height, width and channels {list(shape)} is no image",
            "an array is [H, W] or [H, W, C], a tensor [H, W] or [C, H, W]; C is 1, 3 or 4",
        )
    if dtype == np.uint8 or (dtype == np.uint16 and shape[2:] in ((), (1,))):
        return array
    if dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if not np.issubdtype(dtype, np.floating):
        raise UsageError(f"{name} holds {dtype}, which are no values of an image", _VALUES)
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):
        raise UsageError(
            f"{name} has values from {low:g} to {high:g}, and floats of an image are 0..1",
            "give it before it is normalised; --mean and --std of the run do that",
        )
    return np.asarray((array.astype(np.float32) * 255).round().astype(np.uint8))
