"""Images of models that take several pictures of different sizes at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Run
from PIL import Image
from torch import Tensor, nn

import featviz as fv
from featviz.options import read
from featviz.options.commands import SheetOptions
from featviz.rundir.image import read_image
from featviz.rundir.read import read_run
from featviz.sheets.cells import SheetRun, read_content


class Two(nn.Module):
    """Takes two pictures of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.conv(first).mean() + self.conv(second).mean()


@pytest.mark.parametrize("heights", [(8, 14), (14, 8)])
def test_inputs_of_different_heights_are_read_back(
    featviz: Run, heights: tuple[int, int], tmp_path: Path
) -> None:
    """input.png is as high as the higher one, fits its manifest, and is one picture of a
    sheet, where the frames of a clip are several."""

    def transform(image: Image.Image) -> dict[str, Tensor]:
        sizes = {"first": (heights[0], 10), "second": (heights[1], 6)}
        return {name: torch.rand(1, 3, *size) for name, size in sizes.items()}

    out = tmp_path / "out"
    pictures = [Image.new("RGB", (10, 8))]
    (image,) = fv.run(Two(), pictures, "Conv2d", out, transform=transform).images
    assert Image.open(out / image.folder / "input.png").size == (10 + 6, 14)
    assert featviz("verify", out).code == 0
    (row, _) = read_image(out, image.folder).manifest.captures
    assert row.layer == "conv"
    sheet = read_content([SheetRun("out", read_run(out))], read(SheetOptions, {}))
    assert [seen.shape for seen in sheet.inputs[image.name]] == [(14, 16, 3)]


@pytest.mark.parametrize("channels", [1, 3])
def test_an_input_of_one_pixel_is_read_back(
    featviz: Run, channels: int, tmp_path: Path
) -> None:
    """input.png shows it larger."""
    out = tmp_path / "out"
    image = torch.rand(channels, 1, 1)
    options = {"preset": "none", "input_channels": channels}
    fv.run(nn.Sequential(nn.Conv2d(channels, 2, 1)), image, "Conv2d", out, **options)
    assert featviz("verify", out).code == 0


def test_beside_a_picture_may_be_what_is_none(featviz: Run, tmp_path: Path) -> None:
    """input.png shows the first input alone where the second has other channels."""

    def transform(image: Image.Image) -> dict[str, Tensor]:
        return {"first": torch.rand(1, 3, 8, 10), "second": torch.rand(1, 1, 14, 6)}

    class Masked(Two):
        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return self.conv(first).mean() * second.mean()

    out = tmp_path / "out"
    pictures = [Image.new("RGB", (10, 8))]
    (image,) = fv.run(Masked(), pictures, "Conv2d", out, transform=transform).images
    assert Image.open(out / image.folder / "input.png").size == (10, 8)
    assert featviz("verify", out).code == 0
