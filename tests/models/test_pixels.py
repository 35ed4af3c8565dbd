"""From a picture to numbers without torchvision: what torchvision's own functions give, bit for
bit; where its two versions differ in rounding, what the older gives, which its presets use."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as older
from torchvision.transforms.v2 import functional as oracle

from featviz.models import pixels
from featviz.models.resizing import HeightWidth
from featviz.records import INTERPOLATIONS

MODES = ("L", "RGB", "RGBA", "I;16", "F")
SIZES = [(40, 60), (61, 83), (7, 200), (37, 53), (1, 1)]
"""Smaller and larger than the picture, odd, in other proportions, and as it is."""


def picture(mode: str) -> Image.Image:
    """Noise of 53 × 37 pixels over the whole range of a mode."""
    draw = np.random.default_rng(3)
    if mode == "I;16":
        return Image.fromarray(draw.integers(0, 2**16, (37, 53), np.uint16))
    if mode == "F":
        return Image.fromarray(draw.normal(size=(37, 53)).astype(np.float32))
    noise = draw.integers(0, 256, (37, 53, 4), np.uint8)
    return Image.fromarray(noise, "RGBA").convert(mode)


def same(one: Tensor, other: Tensor) -> bool:
    """Of one type, value by value, and in one order in memory, which decides how torch adds up."""
    return one.dtype == other.dtype and torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.parametrize("name", INTERPOLATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_pictures_are_resized_as_by_torchvision(mode: str, size: HeightWidth, name: str) -> None:
    """Pillow resizes for both."""
    given = picture(mode)
    expected = oracle.resize(given, list(size), InterpolationMode(name))
    got = pixels.resized(given, size, name, True)
    assert got.mode == mode and got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("name", [name for name in INTERPOLATIONS if name != "lanczos"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shape", [(3, 37, 53), (2, 4, 37, 53)], ids=str)
def test_tensors_are_resized_as_by_torchvision(
    shape: tuple[int, ...], size: HeightWidth, name: str, smooth: bool
) -> None:
    """Floats as both versions resize them, and bytes as the older does: as floats, rounded."""
    values, mode = torch.randn(shape), InterpolationMode(name)
    expected = oracle.resize_image(values, list(size), mode, antialias=smooth)
    assert torch.equal(pixels.resized(values, size, name, smooth), expected)
    numbers = torch.randint(0, 256, shape, dtype=torch.uint8)
    by_older = older.resize(numbers, list(size), mode, antialias=smooth)
    assert torch.equal(pixels.resized(numbers, size, name, smooth), by_older)


def test_lanczos_takes_tensors_too() -> None:
    """Within rounding it is what Pillow makes of the same floats."""
    given = picture("F")
    values = torch.from_numpy(np.array(given))[None]
    got = pixels.resized(values, (20, 30), "lanczos", True)[0]
    expected = np.array(given.resize((30, 20), Image.Resampling.LANCZOS))
    assert np.allclose(got.numpy(), expected, atol=1e-4)


CROPS = [(20, 30), (21, 31), (37, 53), (60, 20), (20, 90), (61, 88), (1, 1)]
"""Inside, at half pixels, the whole, and larger than the picture on one side or both."""


@pytest.mark.parametrize("size", CROPS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_crops_are_torchvisions(mode: str, size: HeightWidth) -> None:
    """The same pixels, and zeros around a picture that is smaller than the crop, for pictures and
    for tensors."""
    given = picture(mode)
    top, left = map(pixels.centre, pixels.sides(given), size)
    cropped = pixels.cropped(given, top, left, size)
    assert cropped.mode == mode and pixels.sides(cropped) == size
    assert cropped.tobytes() == oracle.center_crop(given, list(size)).tobytes()
    values = oracle.pil_to_tensor(given)
    expected = oracle.center_crop(values, list(size))
    assert torch.equal(pixels.cropped(values, top, left, size), expected)


@pytest.mark.parametrize("mode", MODES)
def test_numbers_are_torchvisions(mode: str) -> None:
    """The numbers of a picture, then 0..1, then normalised: type, values and order in memory."""
    given = picture(mode)
    values, expected = pixels.to_tensor(given), oracle.pil_to_tensor(given)
    assert same(values, expected)
    expected = older.convert_image_dtype(expected, torch.float32)
    assert same(pixels.to_floats(values), expected)
    mean, std = [0.1, 0.485, 0.9, 0.3][: len(values)], [0.229, 3.0, 1e-3, 0.5][: len(values)]
    normal = pixels.normalised(expected, mean, std)
    assert same(normal, oracle.normalize(expected, mean, std))
    padded = pixels.padded(normal, (1, 2, 0, 5), 0.25)
    assert torch.equal(padded, oracle.pad(normal, [1, 2, 0, 5], fill=0.25))


def test_palettes_are_told_by_their_numbers() -> None:
    """A picture with a palette has one channel, whose numbers are those of its colours."""
    given = picture("RGB").quantize(16)
    assert same(pixels.to_tensor(given), oracle.pil_to_tensor(given))
    resized = pixels.resized(given, (20, 30), "nearest", True)
    assert resized.tobytes() == oracle.resize(given, [20, 30], 0).tobytes()
