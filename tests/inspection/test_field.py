"""`featviz field`: fields against autograd, and networks whose fields are known."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from borrowed import assert_same, state_of
from conftest import DIGITS, DIGITS_MODEL, Run
from networks import Net
from PIL import Image
from torch import Tensor, nn

import featviz as fv
from featviz.drawing import colormap
from featviz.errors import FeatvizError, UsageError
from featviz.inspection.field import square_side
from featviz.inspection.field_picture import FieldTile, draw_field, draw_fields
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


def gradient_of_unit(layers: nn.Module, image: Tensor) -> np.ndarray:
    """The gradient of the sum of all channels at row 5, column 6, summed over the
    colours: float64 [H, W]."""
    # pixels go through files of 8 bits
    pixels = (image * 255).round().div(255)[None].requires_grad_()
    unit = layers(pixels)[0, :, 5, 6].sum()
    (gradient,) = torch.autograd.grad(unit, pixels)
    return gradient.abs().sum((0, 1)).double().numpy()


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
    """torch.autograd.grad gives the same of each layer's values before a ReLU in place,
    and the model is as it was."""
    net = Strided()
    images = torch.rand(3, 3, 20, 24)
    before = state_of(net)

    result = fv.field(net, list(images), "Conv2d", preset="none")

    assert_same(before, state_of(net))
    assert [layer.layer for layer in result.layers] == ["first", "second"]
    for layer, layers in zip(result.layers, (net.first, net), strict=True):
        gradients = [gradient_of_unit(layers, image) for image in images]
        assert layer.unit == (5, 6)
        assert layer.map_size == (10, 12)
        np.testing.assert_allclose(layer.tensor, np.mean(gradients, 0), rtol=1e-4)


def test_the_field_of_stacked_kernels_of_ones_is_their_convolution() -> None:
    """It holds known shares in known squares, inside the theoretical one."""
    net = ones(5, 3)
    result = fv.field(net, torch.rand(1, 21, 21), "Conv2d", preset="none")

    first, second = result.layers
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
    result = fv.field(net, torch.rand(3, 16, 24), "patches,norm", preset="none")
    for layer in result.layers:
        assert layer.map_size == (4, 6)
        assert layer.unit == (2, 3)
        rows, columns = np.nonzero(layer.values)
        assert (rows.min(), rows.max()) == (8, 11)
        assert (columns.min(), columns.max()) == (12, 15)
        assert layer.theoretical == PixelBox(12, 8, 16, 12)


def largest_sum(values: np.ndarray, size: int) -> float:
    """The largest sum of a square of this size, which is cut at the picture's height."""
    height = min(size, len(values))
    windows = np.lib.stride_tricks.sliding_window_view(values, (height, size))
    return float(windows.sum((2, 3)).max())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.99, 1.0])
def test_the_smallest_square_is_that_of_all_squares(share: float) -> None:
    """No smaller one of all holds the share; squares larger than the picture are cut."""
    values = np.random.default_rng(1).random((7, 10)) ** 4
    enough = share * values.sum() * (1 - 1e-12)
    sizes = [size for size in range(1, 11) if largest_sum(values, size) >= enough]
    assert square_side(values, share) == sizes[0]


def test_a_field_is_drawn_in_four_decades() -> None:
    """The logarithm of the share of the largest value; what is less is dark."""
    values = np.array([[2.0, 0.02], [2e-4, 0.0]])
    pixels = draw_field(values, None, "grey")
    assert pixels[::110, ::110, 0].tolist() == [[255, 128], [0, 0]]


@pytest.mark.medium
def test_the_command_prints_a_table(featviz: Run) -> None:
    """It has the sides of the squares, and what the unit can see."""
    command = ("field", DIGITS_MODEL, FIVE, SEVEN, "--layers", "Conv2d")
    table = featviz(*command).out.splitlines()
    headings, row, *_ = (" ".join(line.split()) for line in table)
    assert headings == "model layer 20 % 30 % 50 % 99 % theoretical"
    assert row == "digits_cnn.pth 0 2 2 2 3 3×3"


def test_the_command_prints_json(featviz: Run) -> None:
    """It has the file, the sides of the squares, and what the unit can see."""
    command = ("field", DIGITS_MODEL, FIVE, SEVEN, "--layers", "Conv2d")
    done = featviz(*command, "--overwrite", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["file"] == "field-digits_cnn.png"
    assert document["images"] == 2
    row = document["layers"][0]
    assert row["layer"] == "0"
    assert row["theoretical"] == {"left": 13, "top": 13, "right": 16, "bottom": 16}
    assert row["sides"]["99"] == 3


def bar_ends(line: np.ndarray) -> list[int]:
    """Where the first shade of blue in a line of pixels [W, 3] begins, and where each
    ends, from the left."""
    red, blue = line[:, 0].astype(int), line[:, 2].astype(int)
    ends = []
    shaded = np.flatnonzero(blue > red + 30)
    for color in np.unique(line[shaded], axis=0):
        same = (line == color).all(1).nonzero()[0]
        ends.append(int(same.max()) + 1)
    return [int(shaded.min()), *sorted(ends)]


def test_bars_are_as_long_as_the_sides_of_the_squares() -> None:
    """On one scale for all layers, from one zero; a red line stands where the
    theoretical field would end, and nowhere where it is not known."""
    values = np.ones((60, 90))
    sides = ({0.2: 10, 0.3: 21, 0.5: 40, 0.99: 72}, {0.2: 4, 0.3: 9, 0.5: 13, 0.99: 30})
    box = PixelBox(20, 10, right=76, bottom=50)
    tiles = [
        FieldTile("net", "one", values, box, sides[0]),
        FieldTile("net", "two", values, None, sides[1]),
    ]
    picture = draw_fields(tiles, 1, "grey")

    red, green, blue = (picture[..., n].astype(int) for n in range(3))
    rows = np.flatnonzero((blue > red + 30).sum(1) > 50)
    first, second = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    zero, *ends = bar_ends(picture[first[len(first) // 2]])
    scale = (ends[-1] - zero) / 72
    assert scale > 2
    np.testing.assert_allclose(ends, zero + scale * np.array([10, 21, 40, 72]), atol=1)
    of_second = bar_ends(picture[second[len(second) // 2]])
    expected = zero + scale * np.array([0, 4, 9, 13, 30])
    np.testing.assert_allclose(of_second, expected, atol=1)
    is_line = (red > 150) & (green < 60) & (blue < 60)
    columns = is_line[first[0] : first[-1] + 1].all(0).nonzero()[0]
    assert columns.mean() == pytest.approx(zero + scale * 56, abs=1.5)
    assert not is_line[second[0] : second[-1] + 1].any()


def test_headings_have_the_colours_of_the_bars() -> None:
    """Shares from left to right as bars from the innermost, darkest one."""
    sides = {0.2: 10, 0.3: 21, 0.5: 40, 0.99: 72}
    tile = FieldTile("net", "one", np.ones((60, 90)), PixelBox(0, 0, 76, 50), sides)
    picture = draw_fields([tile], 1, "grey").astype(int)
    red, blue = picture[..., 0], picture[..., 2]
    rows = np.flatnonzero((blue > red + 30).sum(1) > 50)
    middle = picture[rows[len(rows) // 2]]
    _, *ends = bar_ends(middle)
    colors = [middle[end - 3].tolist() for end in ends]

    heading = picture[rows[0] - 30 : rows[0] - 2]
    columns = []
    for color in colors:
        _, x = np.nonzero((heading == color).all(2))
        columns.append(x.min())

    assert len(columns) == 4
    assert (np.diff(columns) > 20).all()


@pytest.mark.medium
def test_two_models_are_in_one_picture(featviz: Run) -> None:
    """It is higher than that of one."""
    command = ("field", DIGITS_MODEL, FIVE, "--layers", "Conv2d", "--out")
    assert featviz(*command, "one.png").code == 0
    assert featviz(*command, "two.png", "--also", DIGITS_MODEL).code == 0
    with Image.open("one.png") as one, Image.open("two.png") as two:
        assert one.info["Software"] == "featviz field"
        assert two.height > one.height


def tile_of(model: str, theoretical: PixelBox | None) -> FieldTile:
    """A field of ones in pixels 100 to 107 of an image of 224."""
    values = np.zeros((224, 224))
    values[100:107, 100:107] = 1.0
    return FieldTile(
        model, "conv", values, theoretical, {0.2: 4, 0.3: 9, 0.5: 10, 1: 12}
    )


SEVENTH = PixelBox(100, 100, 107, 107)


@pytest.mark.parametrize(
    ("box", "corner", "size"),
    [
        (SEVENTH, (1, 1), (9, 9)),
        # no more than the image has
        (PixelBox(0, 40, 224, 44), (0, 28), (60, 224)),
        (None, None, (224, 224)),
    ],
)
def test_a_tile_shows_the_field_and_a_little_around_it(
    box: PixelBox | None, corner: tuple[int, int] | None, size: tuple[int, int]
) -> None:
    """An eighth of its longer side is left on each side, and the frame moves along."""
    tile = tile_of("net", box)
    cut = tile.cut()
    if box is None or cut.theoretical is None:
        assert cut is tile
        assert corner is None
        return
    assert cut.values.shape == size
    assert (cut.theoretical.left, cut.theoretical.top) == corner
    assert cut.theoretical.size == box.size


def test_a_small_field_fills_its_tile() -> None:
    """Seven pixels of 224 are most of the tile, not a dot."""
    picture = draw_fields([tile_of("net", SEVENTH)], 1, "magma")
    brightest = colormap.ramp("magma")[-1]
    assert (picture == brightest).all(2).sum() > (0.7 * 220) ** 2


def test_six_fields_stand_in_two_rows_of_three() -> None:
    """No row has a single one beside a white page."""
    picture = draw_fields([tile_of("net", SEVENTH)] * 6, 1, "magma")
    brightest = (picture == colormap.ramp("magma")[-1]).all(2)
    for axis, count in ((0, 3), (1, 2)):
        begins = np.diff((brightest.sum(axis) > 100).astype(int)) == 1
        assert begins.sum() == count


def test_captions_name_the_theoretical_size() -> None:
    """It is a number beside the sides, too, and behind the model where there are
    several."""
    assert tile_of("", SEVENTH).caption == "limit 7×7 pixels"
    assert tile_of("net", SEVENTH).caption == "net: limit 7×7 pixels"
    assert tile_of("net", None).caption == "net: limit unknown"
    assert tile_of("net", SEVENTH).numbers == ["4", "9", "10", "12", "7"]
    assert tile_of("net", None).numbers == ["4", "9", "10", "12", "?"]


DARK = """
from torch import nn

class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 2, 3))

    def forward(self, x):
        if x.mean() > 0.9:
            raise ValueError("glaring")
        return super().forward(x)

class Dark(Plain):
    def forward(self, x):
        if x.mean() > 0.5:
            raise ValueError("too bright")
        return super().forward(x)
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("names", "error"),
    [(("Plain", "Dark"), ": glaring"), (("Dark", "Plain"), ": too bright")],
)
def test_an_image_that_fails_in_one_model_is_not_counted(
    names: tuple[str, str], error: str, featviz: Run
) -> None:
    """Whichever model it is; where both fail, the first says why. The exit code is 3."""
    Path("net.py").write_text(DARK)
    images = []
    for level in (10, 90, 200, 240):
        images.append(f"{level}.png")
        Image.new("L", (8, 8), level).save(images[-1])
    first, second = (f"net.py:{name}" for name in names)

    done = featviz(
        "field", first, *images, "--also", second, "--preset", "none", "--json"
    )

    assert done.code == 3, done.err
    document = json.loads(done.out)
    assert document["images"] == 2
    assert sorted(document["failures"]) == ["200.png", "240.png"]
    assert document["failures"]["240.png"].endswith(error)


@pytest.mark.medium
def test_images_of_another_size_and_broken_ones_are_named(featviz: Run) -> None:
    """The others are measured, and the exit code is 3."""
    Image.new("L", (30, 20)).save("wide.png")
    Path("broken.png").write_bytes(b"no picture")
    done = featviz("field", DIGITS_MODEL, FIVE, "wide.png", "broken.png")
    assert done.code == 3
    message = "wide.png: its input is 30×20, and that of the first image 28×28"
    assert f"error: {message}\n" in done.err
    assert "error: broken.png" in done.err


def test_what_has_no_field_is_named_with_the_reason() -> None:
    """It may be a vector, or a layer of a model that takes no image."""
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(UsageError, match="layer 2 has no places of the image"):
        fv.field(net, torch.rand(3, 8, 8), "Flatten", preset="none")
    with pytest.raises(FeatvizError, match="has no height and width"):
        fv.field(nn.Sequential(nn.Linear(4, 2)), {"input": torch.rand(1, 4)}, "Linear")


CHANGES_IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "add_": lambda out, identity: out.add_(identity, alpha=2),
    "mul_": lambda out, identity: out.mul_(identity),
    "relu_": lambda out, identity: torch.relu_(out.add_(identity)),
}


@pytest.mark.parametrize("change", CHANGES_IN_PLACE)
def test_layers_behind_a_change_in_place_have_fields(change: str) -> None:
    """They are the boxes of pixels that have a gradient by autograd."""

    def block(self: nn.Module, x: Tensor) -> Tensor:
        identity = self.wide(x)
        out = self.narrow(x)
        CHANGES_IN_PLACE[change](out, identity)
        return self.last(self.next(out))

    torch.manual_seed(1)
    sizes = {"wide": 5, "narrow": 1, "next": 3, "last": 3}
    layers = {
        name: nn.Conv2d(1, 1, size, padding=size // 2) for name, size in sizes.items()
    }
    for layer in layers.values():
        # nothing is cut off by a ReLU
        nn.init.constant_(layer.weight, 0.1)
        nn.init.constant_(layer.bias, 9.0)
    net = Net(block, **layers)
    pixels = torch.rand(1, 1, 15, 17, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(pixels)[0, 0, 7, 8], pixels)
    _, _, rows, columns = gradient.nonzero().T.tolist()

    fields = fv.field(net, pixels[0].detach(), "next,last", preset="none").layers

    assert [layer.layer for layer in fields] == ["next", "last"]
    expected = PixelBox(min(columns), min(rows), max(columns) + 1, max(rows) + 1)
    assert fields[1].theoretical == expected
    assert fields[0].theoretical is not None


def test_a_layer_of_no_image_has_no_field() -> None:
    """It is named with the reason; the others have theirs, before it and behind it."""
    noise = torch.rand(1, 3, 9, 9)
    net = Net(
        lambda self, x: self.last(self.first(x) + self.apart(noise)),
        first=nn.Conv2d(3, 2, 3),
        apart=nn.Conv2d(3, 2, 3),
        last=nn.Conv2d(2, 2, 3),
    )
    result = fv.field(net, torch.rand(3, 9, 9), "Conv2d", preset="none")
    assert [layer.layer for layer in result.layers] == ["first", "last"]
    (skip,) = result.skipped
    assert skip.label == "apart"
    assert "does not depend on the input" in skip.reason


def test_a_layer_that_is_zero_in_its_middle_is_not_called_independent() -> None:
    """Behind a ReLU no gradient passes where it is zero: the reason says so."""
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU())
    nn.init.constant_(net[0].weight, -1.0)
    nn.init.zeros_(net[0].bias)
    result = fv.field(net, torch.rand(3, 9, 9), "0,1", preset="none")
    (skip,) = result.skipped
    assert skip.label == "1"
    assert "it is zero there in all images" in skip.reason


def test_functions_have_fields_too() -> None:
    """Each call has its own, by the number that its file has in a run."""
    net = Net(
        lambda self, x: torch.sigmoid(self.conv(torch.sigmoid(self.conv(x)))),
        conv=nn.Conv2d(3, 3, 3, padding=1),
    )
    result = fv.field(net, torch.rand(3, 12, 12), "fn:sigmoid", preset="none")
    fields = [(layer.call, layer.theoretical) for layer in result.layers]
    assert fields == [(0, PixelBox(5, 5, 8, 8)), (1, PixelBox(4, 4, 9, 9))]
    titles = [layer.title for layer in result.layers]
    assert titles == ["fn:sigmoid", "fn:sigmoid.call1"]


def test_a_gradient_that_is_infinite_in_one_image_is_no_field() -> None:
    """The mean would be one of the other image alone; the reason is said."""
    root = Net(lambda self, x: x.sqrt())
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), root)
    nn.init.ones_(model[0].weight)
    images = [torch.full((1, 8, 8), 0.5), torch.zeros(1, 8, 8)]
    result = fv.field(model, images, "0,1", preset="none")
    assert [layer.layer for layer in result.layers] == ["0"]
    (skip,) = result.skipped
    assert (skip.layer, skip.reason) == ("1", "has a gradient that is NaN or infinite")
