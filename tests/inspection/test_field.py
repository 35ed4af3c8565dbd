"""`featviz field`: fields against autograd, and networks whose fields are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from borrowed import assert_same, state_of
from conftest import DIGITS, DIGITS_MODEL, Run
from PIL import Image
from torch import Tensor, nn

import featviz as fv
from featviz.errors import FeatvizError, UsageError
from featviz.inspection.field import square_side
from featviz.layout.tracing.fields import PixelBox

FIVE = DIGITS / "00-5.png"
SEVEN = DIGITS / "05-7.png"


class Strided(nn.Module):
    """Two convolutions around a ReLU that overwrites what the first has returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(6, 5, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.relu(self.first(x)))


class Tokens(nn.Module):
    """Patches of 4×4 pixels as tokens behind a class token, each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.norm(torch.cat([self.cls_token, tokens], dim=1))


def ones(*sizes: int) -> nn.Sequential:
    """Convolutions of one channel whose weights are all 1, with so large kernels."""
    layers = []
    for size in sizes:
        layer = nn.Conv2d(1, 1, size, padding=size // 2, bias=False)
        nn.init.ones_(layer.weight)
        layers.append(layer)
    return nn.Sequential(*layers)


def test_a_field_is_the_mean_absolute_gradient_of_the_middle_unit() -> None:
    """By torch.autograd.grad, summed over the colours, over the layers' values before a
    ReLU in place."""
    net = Strided()
    images = torch.rand(3, 3, 20, 24)
    before = state_of(net)

    found = fv.field(net, list(images), "Conv2d", preset="none")

    assert_same(before, state_of(net))
    assert [layer.layer for layer in found.layers] == ["first", "second"]
    for layer, channels in zip(found.layers, (net.first, net), strict=True):
        total = np.zeros((20, 24))
        for image in images:
            # pixels go through files of 8 bits
            args = (image * 255).round().div(255)[None].requires_grad_()
            unit = channels(args)[0, :, 5, 6].sum()
            (gradient,) = torch.autograd.grad(unit, args)
            total += gradient.abs().sum((0, 1)).double().numpy()
        assert layer.unit == (5, 6)
        assert layer.map_size == (10, 12)
        np.testing.assert_allclose(layer.tensor.numpy(), total / 3, rtol=1e-4)


def test_the_field_of_stacked_kernels_of_ones_is_their_convolution() -> None:
    """Known by theory: it holds shares in known squares, inside the theoretical one."""
    found = fv.field(ones(5, 3), torch.rand(1, 21, 21), "Conv2d", preset="none")

    first, second = found.layers
    assert first.sides == {0.2: 3, 0.3: 3, 0.5: 4, 0.99: 5}
    assert first.theoretical == PixelBox(8, 8, 13, 13)
    across = np.convolve(np.ones(5), np.ones(3))
    expected = np.zeros((21, 21))
    expected[7:14, 7:14] = np.outer(across, across)
    np.testing.assert_allclose(second.values, expected)
    assert second.theoretical == PixelBox(7, 7, 14, 14)
    assert second.sides[0.99] == 7


def test_a_token_that_sees_its_patch_alone_has_a_field_of_one_patch() -> None:
    """The grid is found behind the class token; the sum of a LayerNorm without weights
    would have no gradient, so these are not ones."""
    net = Tokens()
    nn.init.normal_(net.norm.weight)
    found = fv.field(net, torch.rand(3, 16, 24), "patches,norm", preset="none")
    for layer in found.layers:
        assert layer.map_size == (4, 6)
        assert layer.unit == (2, 3)
        rows, columns = np.nonzero(layer.values)
        assert (rows.min(), rows.max()) == (8, 11)
        assert (columns.min(), columns.max()) == (12, 15)
        assert layer.theoretical == PixelBox(12, 8, 16, 12)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.99, 1.0])
def test_the_smallest_square_is_that_of_all_squares(share: float) -> None:
    """Against each square in turn; squares larger than the picture are cut."""
    values = np.random.default_rng(1).random((7, 10)) ** 4
    for side in range(1, 11):
        sums = []
        for top in range(max(1, 7 - side + 1)):
            for left in range(10 - side + 1):
                sums.append(values[top : top + side, left : left + side].sum())
        if max(sums) >= share * values.sum() * (1 - 1e-12):
            break
    assert square_side(values, share) == side


def test_the_command_writes_a_picture_and_json(featviz: Run) -> None:
    """Of two models in one picture; the line of a layer has the sides."""
    done = featviz("field", DIGITS_MODEL, FIVE, SEVEN, "--layers", "Conv2d", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["file"] == "field-digits_cnn.png"
    assert document["images"] == 2
    rows = document["layers"]
    assert rows[0]["layer"] == "0"
    assert rows[0]["theoretical"] == {"left": 13, "top": 13, "right": 16, "bottom": 16}
    assert rows[0]["sides"]["99"] == 3
    assert "digits_cnn.pth 0: 20 % 2, 30 % 2, 50 % 2, 99 % 3 px\n" in done.err
    with Image.open("field-digits_cnn.png") as picture:
        assert picture.info["Software"] == "featviz field"
        alone = picture.size

    arguments = ("--also", DIGITS_MODEL, "--out", "two.png")
    done = featviz("field", DIGITS_MODEL, FIVE, "--layers", "Conv2d", *arguments)
    assert done.code == 0, done.err
    with Image.open("two.png") as picture:
        assert picture.height > alone[1]


def test_images_of_another_size_and_broken_ones_are_named(
    featviz: Run, tmp_path: Path
) -> None:
    """The others are measured; exit code 3."""
    Image.new("L", (30, 20)).save("wide.png")
    Path("broken.png").write_bytes(b"no picture")
    done = featviz("field", DIGITS_MODEL, FIVE, "wide.png", "broken.png")
    assert done.code == 3
    assert (
        "error: wide.png: its input is 30×20, and that of the first image 28×28\n"
        in (done.err)
    )
    assert "error: broken.png" in done.err


def test_what_has_no_field_is_named_with_the_reason() -> None:
    """A vector, a layer that is cut off, and a model that takes no image."""
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(UsageError, match="2 has no places of the image"):
        fv.field(net, torch.rand(3, 8, 8), "Flatten", preset="none")
    with pytest.raises(FeatvizError, match="has no height and width"):
        fv.field(nn.Sequential(nn.Linear(4, 2)), {"input": torch.rand(1, 4)}, "Linear")


def test_functions_have_fields_too() -> None:
    """Of each call, by its number."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.conv(torch.sigmoid(self.conv(x))))

    found = fv.field(Twice(), torch.rand(3, 12, 12), "fn:sigmoid", preset="none")
    assert [(layer.call, layer.theoretical) for layer in found.layers] == [
        (0, PixelBox(5, 5, 8, 8)),
        (1, PixelBox(4, 4, 9, 9)),
    ]
