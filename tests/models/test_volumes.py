"""Volumes for 3-D networks, drawn slice by slice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from torch import nn
from torchvision.transforms import functional as F

pytestmark = pytest.mark.usefixtures("imports_undone")

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, channels=1):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv3d(channels, 3, 3, padding=1)
        self.norm = nn.InstanceNorm3d(3)
        self.down = nn.Conv3d(3, 4, 2, stride=2)
        self.up = nn.ConvTranspose3d(4, 2, 2, stride=2)
    def forward(self, x):
        return self.up(self.down(self.norm(self.conv(x)).relu()))

def four():
    return Net(4)
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "user_net.py"
    path.write_text(CODE)
    return path


def volume(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape).astype("f4") * 5 - 2


def drawn(
    featviz: Run, code: Path, array: np.ndarray, *options: str
) -> tuple[Path, dict[str, Any]]:
    """The folder of the image, and its captures by layer."""
    np.save(code.parent / "scan.npy", array)
    net = "Net" if array.ndim == 3 else "four"
    out = code.parent / "out"
    scan = code.parent / "scan.npy"
    layers = "--layers conv,norm,down,up --tensors npy"
    done = featviz(
        "run", f"{code}:{net}", scan, "--out", out, *layers.split(), *options
    )
    assert done.code == 0, done.err
    folder = out / "scan.npy"
    manifest = json.loads((folder / "manifest.json").read_text())
    return folder, {row["layer"]: row for row in manifest["captures"]} | {
        "": manifest["input"]
    }


FLAT = ("--scale", "1", "--padding", "0", "--nrow", "8")
"""A row of slices for each channel."""


@pytest.mark.parametrize("shape", [(8, 10, 12), (4, 8, 10, 12)])
def test_slices_of_every_layer_have_their_layout_and_number(
    featviz: Run, code: Path, shape: tuple[int, ...]
) -> None:
    """ncthw in the manifest, with as many slices as the layer has. A tile is a slice of
    torch's own convolution, with one scale for all slices of a channel."""
    array = volume(*shape)
    folder, rows = drawn(featviz, code, array, *FLAT)
    channels = 1 if len(shape) == 3 else 4
    assert rows[""]["shape"] == [1, channels, 8, 10, 12]
    assert "volume of 8 slices, float32 values as they are" in rows[""]["preprocessing"]
    assert "frames" not in rows[""]["preprocessing"]
    expected = {
        "conv": (3, [8, 8]),
        "norm": (3, [8, 8]),
        "down": (4, [4, 4]),
        "up": (2, [8, 8]),
    }
    found = {name: (rows[name]["maps"], rows[name]["slices"]) for name in expected}
    assert found == expected
    assert {rows[name]["layout"] for name in expected} == {"ncthw"}
    torch.manual_seed(0)
    with torch.no_grad():
        given = torch.from_numpy(array).reshape(1, channels, 8, 10, 12)
        maps = nn.Conv3d(channels, 3, 3, padding=1)(given)[0].numpy()
    np.testing.assert_allclose(
        np.load(folder / rows["conv"]["tensor"])[0], maps, atol=1e-5
    )
    picture = np.asarray(Image.open(folder / rows["conv"]["file"])).astype(int)
    for channel, values in enumerate(maps):
        low, high = values.min(), values.max()
        row = np.concatenate(list((values - low) / (high - low) * 255), axis=1)
        assert np.abs(picture[channel * 10 : channel * 10 + 10] - row).max() <= 1


def test_input_png_and_overlays_show_the_slices(featviz: Run, code: Path) -> None:
    """Side by side on one scale, from the least value of the volume to its largest;
    --overlay 0 shows each slice under its own."""
    array = volume(8, 10, 12)
    folder, rows = drawn(featviz, code, array, "--overlay", "0", *FLAT)
    expected = np.concatenate(
        list((array - array.min()) / (array.max() - array.min())), axis=1
    )
    shown = np.asarray(Image.open(folder / "input.png"))
    assert shown.shape == (10, 96) and np.abs(shown - expected * 255).max() <= 1
    picture = np.asarray(Image.open(folder / rows["conv"]["file"]).convert("L"))
    assert np.abs(picture[:10] - expected * 255).max() <= 1


def test_the_size_is_changed_slice_by_slice(featviz: Run, code: Path) -> None:
    """As torchvision resizes a batch of the slices."""
    array = volume(4, 8, 10, 12)
    folder, rows = drawn(featviz, code, array, "--capture", "input", "--size", "20x6")
    given = np.load(folder / rows["conv"]["tensor"])
    slices = torch.from_numpy(array).transpose(0, 1)
    expected = F.resize(slices, [20, 6], antialias=True).transpose(0, 1)[None]
    np.testing.assert_allclose(given, expected.numpy(), atol=1e-5)


@pytest.mark.slow
def test_a_picture_of_channels_is_no_volume(
    featviz: Run, code: Path, tmp_path: Path
) -> None:
    """RGBA for a 3-D network of four channels: one line."""
    Image.new("RGBA", (12, 10)).save(tmp_path / "rgba.png")
    done = featviz(
        "run", f"{code}:four", tmp_path / "rgba.png", "--out", tmp_path / "out"
    )
    assert done.code == 1
    assert "is a picture of shape [10, 12, 4], and the model takes volumes" in done.err
