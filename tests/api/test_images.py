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
from torch import nn

import featviz as fv
from featviz.errors import FeatvizError
from featviz.images import arrays

from .drawn import NAN, drawn


def _in_memory(pixels: np.ndarray) -> dict[str, Any]:
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    return {
        "PIL": Image.fromarray(pixels),
        "big-endian": (pixels / 255).astype(">f4"),
        "batch of one": tensor[None],
        "with a gradient": (tensor / 255).requires_grad_(),
        "strided": pixels[::-1, ::-1][::-1, ::-1],
    }


@pytest.mark.parametrize("image_type", list(_in_memory(np.zeros((2, 2, 3), np.uint8))))
def test_an_image_in_memory_is_drawn_as_its_file(
    image_type: str, pixels: np.ndarray, picture: Path, tiny: nn.Module, tmp_path: Path
) -> None:
    """The same pixels give the same feature maps, under a name of their own."""
    (memory,) = drawn(
        tiny, _in_memory(pixels)[image_type], tmp_path / "memory", tensors="npy"
    )
    (file,) = drawn(tiny, picture, tmp_path / "file", tensors="npy")
    assert (memory.name, file.name) == ("image-0.png", "picture.png")
    for name in (
        "input.png",
        memory.captures[0].row.tensor,
        memory.captures[0].row.file,
    ):
        memory_bytes = (tmp_path / "memory" / memory.folder / name).read_bytes()
        assert memory_bytes == (tmp_path / "file" / file.folder / name).read_bytes()
    manifest = json.loads(
        (tmp_path / "memory" / memory.folder / "manifest.json").read_text()
    )
    assert manifest["image"]["path"] == "image-0.png"
    assert len(manifest["image"]["sha256"]) == 64
    assert "featviz-" not in (tmp_path / "memory" / "run.json").read_text()


def test_paths_and_images_mix(
    pixels: np.ndarray, picture: Path, tiny: nn.Module, tmp_path: Path
) -> None:
    """A list holds any of them, in order; a batch is as many images as it has."""
    batch = torch.rand(2, 3, 5, 6)
    images = [Image.fromarray(pixels), picture, str(picture.parent), batch, pixels]
    found = drawn(tiny, images, tmp_path / "out")
    names = ["image-0.png", "picture.png", "image-1.png", "image-2.png", "image-3.png"]
    assert [image.name for image in found] == names


def test_images_in_memory_resume(
    pixels: np.ndarray, tiny: nn.Module, tmp_path: Path
) -> None:
    """The same pixels are the same image; others are drawn again. Any sequence holds
    them."""
    out = tmp_path / "out"
    drawn(tiny, deque([pixels, pixels]), out)
    again = drawn(tiny, [pixels, 255 - pixels], out, resume=True)
    assert [image.kept for image in again] == [True, False]


@pytest.mark.parametrize("mode", ["1", "LA", "P", "CMYK", "I;16"])
def test_pil_images_of_every_mode(mode: str, tmp_path: Path) -> None:
    """Nothing of an image is lost on its way but what conversion to RGB takes."""
    pixels = np.arange(48, dtype=np.uint8).reshape(6, 8)
    grey = Image.fromarray(pixels)
    image = (
        Image.fromarray(pixels.astype(np.uint16))
        if mode == "I;16"
        else grey.convert(mode)
    )
    (path,) = arrays.to_files([image], tmp_path)
    with Image.open(path) as found:
        kept = image.convert("RGB") if mode in ("CMYK", "HSV") else image
        assert found.mode == kept.mode
        assert np.array_equal(np.asarray(found), np.asarray(kept))


def test_the_exif_of_an_opened_photograph_is_kept(tmp_path: Path) -> None:
    """A photograph that lies on its side is turned, as its file would be."""
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (8, 4)).save(tmp_path / "photo.jpg", exif=exif)
    with Image.open(tmp_path / "photo.jpg") as photo:
        (path,) = arrays.to_files([photo], tmp_path)
    with Image.open(path) as found:
        assert found.size == (8, 4)
        assert found.getexif()[274] == 6


def test_grey_and_bool_tensors() -> None:
    """[H, W], one channel, bool and half precision are images, too."""
    values = torch.linspace(0, 1, 12).reshape(3, 4)
    expected = (values * 255).round().to(torch.uint8).numpy()
    for tensor in (values, values[None], values[None, None]):
        (image,) = arrays.to_images(tensor)
        assert image.mode == "L"
        assert np.array_equal(np.asarray(image), expected)
    (image,) = arrays.to_images(values > 0.5)
    assert np.array_equal(np.asarray(image), (values > 0.5).numpy() * np.uint8(255))
    (image,) = arrays.to_images(values.half())
    assert np.abs(np.asarray(image).astype(int) - expected).max() <= 1


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
    """One line says what it is and what an image would be."""
    with pytest.raises(FeatvizError, match=message) as caught:
        fv.run(tiny, image, "Conv2d", tmp_path / "out")
    assert caught.value.hint
    assert not (tmp_path / "out").exists()
