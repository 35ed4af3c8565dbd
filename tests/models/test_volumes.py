"""Volumes for 3-D networks, drawn slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from torch import nn
from torchvision.transforms import functional as F

from models.drawn import DrawnImage

pytestmark = [pytest.mark.usefixtures("imports_undone"), pytest.mark.medium]

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


@pytest.fixture
def draw_scan(featviz: Run, code: Path, tmp_path: Path) -> Callable[..., DrawnImage]:
    """Draw an array by the network that takes as many channels."""

    def draw(array: np.ndarray, *options: str) -> DrawnImage:
        scan = tmp_path / "scan.npy"
        np.save(scan, array)
        net = "Net" if array.ndim == 3 else "four"
        layers = ["--layers", "conv,norm,down,up", "--tensors", "npy"]
        out = tmp_path / "out"
        done = featviz("run", f"{code}:{net}", scan, *layers, "--out", out, *options)
        assert done.code == 0, done.err
        return DrawnImage(out / "scan.npy")

    return draw


FLAT = ("--scale", "1", "--padding", "0", "--nrow", "8")
"""A row of slices for each channel."""


def strip(slices: np.ndarray) -> np.ndarray:
    """Slices [S, H, W] side by side, on one scale of 0 to 255: [H, S * W]."""
    low = slices.min()
    scaled = (slices - low) / (slices.max() - low) * 255
    return np.concatenate(list(scaled), axis=1)


def test_a_volume_is_said_to_be_one(draw_scan: Callable[..., DrawnImage]) -> None:
    """Its slices are no frames, and ncthw is the layout of every layer, with as many
    slices as it has."""
    drawn = draw_scan(volume(8, 10, 12))
    described = drawn.manifest["input"]["preprocessing"]
    assert "volume of 8 slices, float32 values as they are" in described
    assert "frames" not in described
    rows = [
        (row["layer"], row["layout"], row["maps"], row["slices"])
        for row in drawn.manifest["captures"]
    ]
    assert rows == [
        ("conv", "ncthw", 3, [8, 8]),
        ("norm", "ncthw", 3, [8, 8]),
        ("down", "ncthw", 4, [4, 4]),
        ("up", "ncthw", 2, [8, 8]),
    ]


@pytest.mark.parametrize(("shape", "channels"), [((8, 10, 12), 1), ((4, 8, 10, 12), 4)])
def test_a_tile_is_a_slice(
    shape: tuple[int, ...], channels: int, draw_scan: Callable[..., DrawnImage]
) -> None:
    """Of torch's own convolution, with one scale for all slices of a channel."""
    array = volume(*shape)
    drawn = draw_scan(array, *FLAT)
    torch.manual_seed(0)
    conv = nn.Conv3d(channels, 3, 3, padding=1)
    scan = torch.from_numpy(array).reshape(1, channels, 8, 10, 12)
    with torch.no_grad():
        expected = conv(scan)
    assert drawn.manifest["input"]["shape"] == list(scan.shape)
    torch.testing.assert_close(drawn.tensor("conv"), expected, atol=1e-5, rtol=1e-7)
    picture = np.concatenate([strip(maps) for maps in expected[0].numpy()])
    assert np.abs(drawn.grid("conv") - picture).max() <= 1


def test_input_png_and_overlays_show_the_slices(
    draw_scan: Callable[..., DrawnImage],
) -> None:
    """Side by side on one scale, from the least value of the volume to its largest;
    --overlay 0 shows each slice under its own."""
    array = volume(8, 10, 12)
    drawn = draw_scan(array, "--overlay", "0", *FLAT)
    assert drawn.input().shape == (10, 96)
    assert np.abs(drawn.input() - strip(array)).max() <= 1
    assert np.abs(drawn.grid("conv")[:10] - strip(array)).max() <= 1


def test_the_size_is_changed_slice_by_slice(
    draw_scan: Callable[..., DrawnImage],
) -> None:
    """As torchvision resizes a batch of the slices."""
    array = volume(4, 8, 10, 12)
    drawn = draw_scan(array, "--capture", "input", "--size", "20x6")
    slices = torch.from_numpy(array).transpose(0, 1)
    expected = F.resize(slices, [20, 6], antialias=True).transpose(0, 1)[None]
    torch.testing.assert_close(drawn.tensor("conv"), expected, atol=1e-5, rtol=1e-7)


def test_a_picture_of_channels_is_no_volume(
    featviz: Run, code: Path, tmp_path: Path
) -> None:
    """RGBA for a 3-D network of four channels: one line."""
    picture = tmp_path / "rgba.png"
    Image.new("RGBA", (12, 10)).save(picture)
    done = featviz("run", f"{code}:four", picture, "--out", tmp_path / "out")
    assert done.code == 1
    assert "is a picture of shape [10, 12, 4], and the model takes volumes" in done.err
