"""Images of the Python API: files and images in memory, mixed."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pixels import assert_same_pixels
from runs import tree
from torch import nn

import featviz as fv
from featviz.errors import FeatvizError
from featviz.images import arrays

from .drawn import NAN, drawn


def in_memory(pixels: np.ndarray) -> dict[str, Any]:
    """The picture in the types that images have in memory."""
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    return {
        "PIL": Image.fromarray(pixels),
        "big-endian": (pixels / 255).astype(">f4"),
        "batch of one": tensor[None],
        "with a gradient": (tensor / 255).requires_grad_(),
        "strided": pixels[::-1, ::-1][::-1, ::-1],
    }


@pytest.mark.medium
@pytest.mark.parametrize("image_type", list(in_memory(np.zeros((2, 2, 3), np.uint8))))
def test_an_image_in_memory_is_drawn_as_its_file(
    image_type: str, pixels: np.ndarray, picture: Path, tiny: nn.Module, tmp_path: Path
) -> None:
    """The same pixels give the same feature maps, under a name of their own."""
    image = in_memory(pixels)[image_type]
    drawn(tiny, image, tmp_path / "memory", tensors="npy")
    drawn(tiny, picture, tmp_path / "file", tensors="npy")

    of_memory = tree(tmp_path / "memory" / "image-0.png")
    of_file = tree(tmp_path / "file" / "picture.png")
    manifest = json.loads(of_memory.pop("manifest.json"))
    del of_file["manifest.json"]
    assert of_memory == of_file
    assert manifest["image"]["path"] == "image-0.png"
    assert len(manifest["image"]["sha256"]) == 64
    assert "featviz-" not in (tmp_path / "memory" / "run.json").read_text()


@pytest.mark.medium
def test_paths_and_images_mix(
    pixels: np.ndarray, picture: Path, tiny: nn.Module, tmp_path: Path
) -> None:
    """A list holds any of them, in order; a batch is as many images as it has."""
    batch = torch.rand(2, 3, 5, 6)
    images = [Image.fromarray(pixels), picture, str(picture.parent), batch, pixels]
    drawn_images = drawn(tiny, images, tmp_path / "out")
    names = ["image-0.png", "picture.png", "image-1.png", "image-2.png", "image-3.png"]
    assert [image.name for image in drawn_images] == names


@pytest.mark.medium
def test_images_in_memory_resume(
    pixels: np.ndarray, tiny: nn.Module, tmp_path: Path
) -> None:
    """The same pixels are the same image; others are drawn again. Any sequence holds
    them."""
    out = tmp_path / "out"
    drawn(tiny, deque([pixels, pixels]), out)
    again = drawn(tiny, [pixels, 255 - pixels], out, resume=True)
    assert [image.kept for image in again] == [True, False]


GREYS = np.arange(48, dtype=np.uint8).reshape(6, 8)


@pytest.mark.parametrize(
    ("image", "mode"),
    [
        *((Image.fromarray(GREYS).convert(mode), mode) for mode in ("1", "LA", "P")),
        (Image.fromarray(GREYS.astype(np.uint16)), "I;16"),
        (Image.fromarray(GREYS).convert("CMYK"), "RGB"),
    ],
    ids=["1", "LA", "P", "I;16", "CMYK"],
)
def test_pil_images_of_every_mode(
    image: Image.Image, mode: str, tmp_path: Path
) -> None:
    """Nothing of an image is lost on its way but what conversion to RGB takes."""
    (path,) = arrays.to_files([image], tmp_path)
    with Image.open(path) as opened:
        assert opened.mode == mode
        assert_same_pixels(opened, image.convert(mode))


def test_the_exif_of_an_opened_photograph_is_kept(tmp_path: Path) -> None:
    """A photograph that lies on its side is turned, as its file would be."""
    file = tmp_path / "photo.jpg"
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (8, 4)).save(file, exif=exif)
    with Image.open(file) as photo:
        (path,) = arrays.to_files([photo], tmp_path)
    with Image.open(path) as opened:
        assert opened.size == (8, 4)
        assert opened.getexif()[274] == 6


RAMP = torch.linspace(0, 1, 12).reshape(3, 4)


@pytest.mark.parametrize(
    ("tensor", "tolerance"),
    [
        (RAMP, 0),
        (RAMP[None], 0),
        (RAMP[None, None], 0),
        (RAMP.half(), 1),
        (RAMP.to(torch.bfloat16), 1),
        (torch._neg_view(-RAMP), 0),
    ],
)
def test_grey_tensors(tensor: torch.Tensor, tolerance: int) -> None:
    """[H, W], one channel and half precision are images, too."""
    (image,) = arrays.to_images(tensor)
    assert image.mode == "L"
    expected = (RAMP * 255).round().numpy()
    assert np.abs(np.asarray(image) - expected).max() <= tolerance


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 1), (1, 3, 4, 1)])
def test_grey_of_sixteen_bits(shape: tuple[int, ...]) -> None:
    """It is kept as it is, with or without an axis of channels."""
    values = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    for array in (values.reshape(shape), torch.from_numpy(values)[None]):
        (image,) = arrays.to_images(array)
        assert_same_pixels(image, values)


def test_bool_tensors() -> None:
    """True is white."""
    (image,) = arrays.to_images(RAMP > 0.5)
    assert_same_pixels(image, (RAMP > 0.5).numpy() * np.uint8(255))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            torch.rand(3, 4, 4) - 0.5,
            "image 0 has values from -0.* floats of an image are 0..1",
        ),
        (torch.full((3, 4, 4), NAN), "image 0 has values from nan to nan"),
        (torch.zeros(3, 4, 4, dtype=torch.complex64), "image 0 holds complex64"),
        (torch.rand(3, 4, 4).to_sparse(), "image 0 is no dense tensor"),
        (torch.zeros(3, 0, 5), r"channels \[0, 5, 3\] is no image"),
        (np.zeros((3, 20, 24), np.uint8), r"channels \[3, 20, 24\] is no image"),
        (Image.new("RGB", (0, 0)), "it has no pixels"),
        (b"abc", "image 0 is of type 'bytes'"),
        ([], "there are no images"),
    ],
)
def test_what_is_no_image(
    image: Any, message: str, tiny: nn.Module, tmp_path: Path
) -> None:
    """The line says what it is, and the hint what an image would be."""
    with pytest.raises(FeatvizError, match=message) as caught:
        fv.run(tiny, image, "Conv2d", tmp_path / "out")
    assert caught.value.hint
    assert not (tmp_path / "out").exists()
