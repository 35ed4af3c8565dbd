"""`look`: which maps a page shows, of which pixels, and what it says, against numpy and
torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from borrowed import assert_same, state_of
from networks import Net
from PIL import Image
from pixels import assert_same_pixels
from torch import Tensor, nn
from torchvision.models import VisionTransformer

import featviz as fv
from featviz.drawing import colormap
from featviz.errors import FeatvizError, ForwardError, ImageError
from featviz.inspection.look import (
    ALIKE,
    MOST_STAGES,
    LookResult,
    ShownLayer,
    choose_unlike,
    look,
    page_row,
    rank_channels,
    spread_stages,
)
from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.options.commands import LookOptions
from featviz.records import Layer

PLAIN = InputOptions(preset="none", input_channels=1)


See = Callable[..., LookResult]
"""Looks at an array with a module: the fixture `see`."""


@pytest.fixture
def see(tmp_path: Path) -> See:
    """Look at an array, which is saved as an image."""
    path = tmp_path / "image.npy"
    page = tmp_path / "page.png"

    def invoke(
        module: nn.Module,
        image: np.ndarray,
        layers: str | None = "Fixed",
        inputs: InputOptions = PLAIN,
        **options: Any,
    ) -> LookResult:
        np.save(path, image.astype(np.float32))
        model = adopt(module.eval(), inputs)
        options = {"out": page, "inputs": inputs, "cmap": "grey", **options}
        return look(model, [str(path)], LookOptions(layers=layers, **options))

    return invoke


class Fixed(nn.Module):
    """Gives the same maps for every image."""

    def __init__(self, maps: Any) -> None:
        super().__init__()
        self.maps = maps

    def forward(self, x: Tensor) -> Any:
        return self.maps


def fixed(maps: Any) -> nn.Sequential:
    """A network of such a layer."""
    return nn.Sequential(Fixed(maps))


def noise(*shape: int) -> np.ndarray:
    """An image of this shape in 0..1."""
    return np.random.default_rng(0).random(shape)


@pytest.mark.medium
def test_tiles_are_scaled_without_their_borders(
    tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """Each map runs from its least to its greatest value inside the pixels that padding
    reaches; values of these beyond are clipped."""
    options = {"size": 16, "crop": 16}
    page = fv.look(tiny, picture, "Conv2d,ReLU", cmap="grey", **options)
    out = tmp_path / "run"
    run = fv.run(tiny, picture, "Conv2d,ReLU", out, tensors=True, **options)

    assert [row.layer for row in page.layers] == ["0", "1"]
    for row, capture in zip(page.layers, run.captures, strict=True):
        maps = capture.tensor[0].double().numpy()[list(row.channels)]
        inner = maps[:, 1:-1, 1:-1]
        low = inner.min((1, 2), keepdims=True)
        high = inner.max((1, 2), keepdims=True)
        levels = np.rint(255 * ((maps - low) / (high - low)).clip(0, 1))
        assert ((maps < low) | (maps > high)).any()
        assert np.abs(np.array(row.tiles)[..., 0] - levels).max() <= 1
        ends = np.stack([low.ravel(), high.ravel()], axis=1)
        assert np.array(row.ranges) == pytest.approx(ends)


@pytest.mark.medium
def test_a_map_that_is_flat_inside_is_constant(see: See) -> None:
    """What rounding makes of one value is no picture, whatever the frame around it."""
    maps = torch.ones(1, 2, 9, 9)
    maps[:, :, 0] = 2.0
    maps[0, 0, 4, 4] += 1e-7
    (row,) = see(fixed(maps), noise(1, 8, 8)).layers
    assert {*np.unique(row.tiles)} == {128}


@pytest.mark.medium
def test_the_order_is_numpys(see: See) -> None:
    """The largest deviation comes first, wherever the values lie."""
    rng = np.random.default_rng(1)
    deviations = rng.permutation(np.arange(1.0, 13))
    # the order is not that of the largest values
    means = np.arange(12) * 50
    maps = noise(12, 8, 8) * deviations[:, None, None] + means[:, None, None]
    maps = maps.astype(np.float32)

    (row,) = see(fixed(torch.from_numpy(maps[None])), noise(1, 8, 8), maps=5).layers

    expected = np.argsort(-maps.std((1, 2)))[:5]
    assert list(row.channels) == expected.tolist()
    lows, highs = np.transpose(row.ranges)
    inner = maps[expected, 1:-1, 1:-1]
    assert lows == pytest.approx(inner.min((1, 2)))
    assert highs == pytest.approx(inner.max((1, 2)))


def statistics(low: float, high: float, std: float, nonfinite: int = 0) -> list[float]:
    """A channel's row of statistics."""
    return [low, high, 1, std, 0, nonfinite]


def test_constant_maps_and_those_without_values_come_last() -> None:
    """Flat ones are left out beside others; NaN ranks behind numbers."""
    nan = np.nan
    rows = [
        statistics(0, 1, std=2),
        statistics(9, 9, std=0),
        statistics(0, 5, std=3),
        statistics(nan, nan, std=nan, nonfinite=64),
    ]
    table = np.array(rows, np.float32)
    assert rank_channels(table, table[:, 3]) == [2, 0, 3]


def test_constant_maps_stay_where_all_are() -> None:
    """The largest value comes first."""
    rows = [statistics(9, 9, std=0), statistics(18, 18, std=0)]
    table = np.array(rows, np.float32)
    table[1, 2] = 2
    assert rank_channels(table, table[:, 3]) == [1, 0]


def unlike_by_numpy(maps: np.ndarray, order: list[int]) -> list[int]:
    """The channels that correlate with none before them, in an order; no constant."""
    distinct: list[int] = []
    for channel in order:
        values = maps[channel].ravel()
        if not values.std():
            continue
        near = [np.corrcoef(values, maps[c].ravel())[0, 1] for c in distinct]
        if all(correlation < ALIKE for correlation in near):
            distinct.append(channel)
    return distinct


def test_maps_that_look_alike_are_shown_once() -> None:
    """numpy's correlation with those shown before decides, in the order; alike ones fill
    up."""
    base = np.random.default_rng(2).integers(0, 100, (3, 20, 20))
    flat = np.full((20, 20), 7)
    brighter = base[0] * 2 + 9
    stack = [base[0], brighter, base[1], base[2], base[1], flat]
    maps = np.stack(stack).astype(np.uint8)
    order = [1, 0, 5, 4, 2, 3]

    distinct = choose_unlike(maps, order, 3)

    assert distinct == unlike_by_numpy(maps, order) == [1, 4, 3]
    assert choose_unlike(maps, order, 5) == [1, 4, 3, 0, 5]


@pytest.mark.medium
def test_the_page_is_the_file(see: See) -> None:
    """The PNG on disk holds the page's pixels, which hold the input's."""
    image = noise(1, 20, 20)
    result = see(fixed(torch.rand(1, 2, 7, 7)), image)
    with Image.open(result.path) as opened:
        assert opened.mode == "RGB"
        assert opened.info["Software"] == "featviz look"
    assert_same_pixels(result.path, result.picture)
    levels = (image[0] * 255 + 0.5).astype(np.uint8)
    assert (result.shown == levels[..., None]).all()
    drawn = result.picture[100:400, 30:330]
    assert_same_pixels(drawn, result.shown.repeat(15, 0).repeat(15, 1))


@pytest.mark.medium
def test_an_output_that_is_a_picture_is_shown(see: See) -> None:
    """Three channels in 0..1 are drawn as they are, beside the input."""
    colour = torch.zeros(1, 3, 20, 20)
    colour[:, 0] = 1.0
    colour += torch.rand(1, 3, 20, 20) * 0.001
    result = see(fixed(colour), np.zeros((1, 20, 20)))
    red = (result.picture == (255, 0, 0)).all(2)
    columns = np.flatnonzero(red.any(0))
    assert red.sum() == len(columns) ** 2 == 240**2
    assert not result.prediction


@pytest.mark.parametrize(("side", "is_shown"), [(8, True), (7, False)])
def test_a_picture_has_eight_rows_and_columns_at_least(
    see: See, side: int, is_shown: bool
) -> None:
    """Smaller ones are numbers, such as the offsets of boxes."""
    red = torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1).expand(1, 3, side, side)
    result = see(fixed(red.clone()), np.zeros((1, 20, 20)))
    assert (result.picture == (255, 0, 0)).all(2).any() == is_shown


@pytest.mark.medium
@pytest.mark.parametrize(
    ("low", "high", "green"),
    [
        (0, 1, 0.25),
        (-0.04, 1.04, 0.25),
        (-0.06, 1, (0.25 + 0.06) / 1.06),
        (0, 1.06, 0.25 / 1.06),
        (-3, 2, 3.25 / 5),
    ],
)
def test_values_of_a_picture_are_stretched_where_they_leave_its_range(
    low: float, high: float, green: float, see: See
) -> None:
    """A network that denoises may miss the range by a twentieth, which is cut off."""
    colour = torch.tensor([high, 0.25, low]).reshape(1, 3, 1, 1).expand(1, 3, 20, 20)
    result = see(fixed(colour), np.zeros((1, 20, 20)))
    expected = (255, round(255 * green), 0)
    assert (result.picture == expected).all(2).sum() == 240**2


TURBO = {tuple(color) for color in colormap.ramp("turbo")[[0, 97, 194]].tolist()}
"""The colours of three classes."""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("wrap", "classes", "is_drawn"),
    [
        (lambda scores: {"logits": scores}, 5, True),
        # of so many channels a smaller output is features, not classes
        pytest.param(lambda scores: scores, 40, False, marks=pytest.mark.slow),
    ],
    ids=["logits", "features"],
)
def test_scores_of_a_segmentation_are_shown_as_classes(
    wrap: Callable[[Tensor], Any], classes: int, is_drawn: bool, see: See
) -> None:
    """The likeliest class of each place has its colour, where the output is named so;
    maps of features are no picture."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (1, 10, 10), generator=generator)
    scores = nn.functional.one_hot(labels, classes).movedim(3, 1).float()

    result = see(fixed(wrap(scores)), np.zeros((1, 20, 20)))

    corner = result.picture[100:400, 350:630].reshape(-1, 3)
    colors = {tuple(color) for color in np.unique(corner, axis=0).tolist()}
    assert colors.issuperset(TURBO) is is_drawn


@pytest.mark.medium
@pytest.mark.parametrize("name", ["out", "logits"])
def test_one_channel_of_scores_is_shown_as_a_picture(name: str, see: See) -> None:
    """There is no likeliest of one class: its values are greys."""
    scores = torch.full((1, 1, 20, 20), 0.25)
    result = see(fixed({name: scores}), np.zeros((1, 20, 20)))
    assert (result.picture == 64).all(2).sum() == 240**2


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    """A transformer of 13 blocks, which has 14 stages."""
    return VisionTransformer(16, 4, 13, 2, 8, 8, num_classes=3)


SIXTEEN = InputOptions(size=16, crop=16)


def test_stages_are_spread_to_the_nearest() -> None:
    """Of thirteen, each is the nearest to a step of 4/3."""
    layers = [Layer(index, f"{index}", "ReLU") for index in range(13)]
    chosen = [layer.index for layer in spread_stages(layers)]
    assert chosen == [0, 1, 3, 4, 5, 7, 8, 9, 11, 12]
    assert spread_stages(layers[:10]) == layers[:10]


@pytest.mark.slow
def test_many_stages_are_spread(see: See, vit: nn.Module) -> None:
    """Of more than MOST_STAGES the first, the last and evenly spread ones are shown, and
    the others are named."""
    result = see(vit, np.zeros((3, 16, 16)), layers=None, inputs=SIXTEEN)
    first, *blocks = [row.layer for row in result.layers]
    numbers = [int(name.rpartition("_")[2]) for name in blocks]
    assert first == "conv_proj"
    assert len(numbers) == MOST_STAGES - 1
    assert numbers[-1] == 12
    assert set(np.diff(numbers)) <= {1, 2}
    names = [*blocks, *result.left_out]
    assert len(names) == len(set(names)) == 13


@pytest.mark.slow
def test_chosen_layers_are_all_shown(see: See, vit: nn.Module) -> None:
    """There is no bound to what --layers takes."""
    layers = "EncoderBlock,conv_proj"
    result = see(vit, np.zeros((3, 16, 16)), layers=layers, inputs=SIXTEEN)
    assert len(result.layers) == 14
    assert not result.left_out


@pytest.mark.medium
def test_a_vector_is_one_strip(see: See) -> None:
    """All its numbers stand side by side, from the least to the greatest; the largest are
    named."""
    numbers = torch.tensor([[0.0, 3.0, 1.0, 4.0]])
    (row,) = see(fixed(numbers), noise(1, 8, 8), maps=2).layers
    assert row.strip
    assert row.channels == (3, 1)
    assert row.ranges == ((0.0, 4.0),)
    assert row.tiles[0].shape == (1, 4, 3)


@pytest.mark.medium
def test_maps_of_one_number_have_one_scale(see: See) -> None:
    """The largest number comes first and is brightest; each says its own value."""
    maps = torch.tensor([0.0, 10.0, 5.0]).reshape(1, 3, 1, 1)
    (row,) = see(fixed(maps), noise(1, 8, 8)).layers
    assert not row.strip
    assert row.channels == (1, 2, 0)
    assert row.constant == 0
    assert row.tiles[0].shape == (1, 1, 3)
    assert [int(tile[0, 0, 0]) for tile in row.tiles] == [255, 128, 0]
    assert row.ranges == ((10.0, 10.0), (5.0, 5.0), (0.0, 0.0))


def test_a_layer_whose_name_is_a_number_is_called_a_layer(see: See) -> None:
    """A bare `0` would not be read as a name."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3))
    (row,) = see(net, noise(1, 8, 8), layers="0").layers
    assert page_row(row).name == "layer 0"


@pytest.mark.medium
def test_of_a_volume_the_middle_is_shown(see: See) -> None:
    """It is one slice of each map and of the input; the scale is that of all slices."""
    net = nn.Sequential(nn.Conv3d(1, 1, 1, bias=False))
    nn.init.ones_(net[0].weight)
    volume = noise(1, 7, 12, 12).astype(np.float32)
    result = see(net, volume, layers="Conv3d")
    (row,) = result.layers
    assert row.slice == (3, 7)
    assert row.shape == (1, 1, 7, 12, 12)
    middle = volume[0, 3]
    low = volume.min()
    high = volume.max()
    expected = np.round((middle - low) / (high - low) * 255)
    assert np.abs(row.tiles[0][..., 0] - expected).max() <= 1
    assert (result.shown[..., 0] == (middle * 255 + 0.5).astype(np.uint8)).all()


@pytest.mark.medium
def test_of_several_calls_the_first_maps_are_shown(
    see: See,
) -> None:
    """A layer has one row: the first maps that it gives, before mere numbers; calls are
    counted."""
    layer = Fixed((torch.rand(1, 5), torch.rand(1, 2, 8, 8)))
    twice = Net(lambda self, x: (self.layer(x), self.layer(x))[1], layer=layer)
    (row,) = see(twice, noise(1, 8, 8), layers="layer").layers
    assert row.key == "1"
    assert row.shape == (1, 2, 8, 8)
    assert row.calls == 2


@pytest.mark.medium
@pytest.mark.parametrize(("size", "call"), [(8, 1), (5, 0)])
def test_of_a_shared_activation_the_last_call_is_shown(
    size: int, call: int, see: See
) -> None:
    """The ReLU that a block runs twice gives the block's output at the end; of levels
    that get smaller, the first is shown."""
    twice = Net(
        lambda self, x: self.relu(self.relu(x)[..., :size, :size] + 2), relu=nn.ReLU()
    )
    (row,) = see(twice, noise(1, 8, 8), layers="ReLU").layers
    assert row.call == call
    assert row.shape[2:] == (8, 8)
    assert (row.ranges[0][0] > 1.5) is bool(call)
    assert page_row(row).name == ("relu.call1" if call else "relu")
    assert f"{'one' if call else 'first'} of 2 calls" in page_row(row).lines


def test_an_activation_that_ends_every_stage_has_a_row_for_each(see: See) -> None:
    """The one ReLU of a network shows its last call at each resolution, up to the
    deepest, where no layers are named."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.relu(self.relu(self.conv(x)) + 1)
        x = self.relu(self.deeper(self.pool(x)))
        x = self.relu(self.deepest(self.pool(x)))
        return self.last(self.relu(self.pool(x)))

    net = Net(
        forward,
        conv=nn.Conv2d(1, 2, 3, padding=1),
        deeper=nn.Conv2d(2, 3, 3, padding=1),
        deepest=nn.Conv2d(3, 4, 3, padding=1),
        last=nn.Conv2d(4, 5, 1),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(2),
    )
    result = see(net, noise(1, 16, 16), layers=None)
    rows = [(page_row(row).name, row.shape) for row in result.layers]
    assert rows == [
        ("conv", (1, 2, 16, 16)),
        ("relu.call1", (1, 2, 16, 16)),
        ("relu.call2", (1, 3, 8, 8)),
        ("relu.call3", (1, 4, 4, 4)),
        ("last", (1, 5, 2, 2)),  # which ends its stage, not the ReLU before it
    ]
    assert result.layers[1].ranges[0][0] >= 1


@pytest.mark.medium
def test_nan_is_magenta_and_warned_of(
    see: See, messages: pytest.LogCaptureFixture
) -> None:
    """The pixel is magenta, and the others have their scale."""
    maps = torch.rand(1, 1, 6, 6)
    maps[0, 0, 2, 3] = torch.nan
    (row,) = see(fixed(maps), noise(1, 6, 6)).layers
    assert row.tiles[0][2, 3].tolist() == [255, 0, 255]
    assert row.nonfinite == 1
    assert "layer 0 holds 1 NaN or infinite values, shown in magenta" in messages.text


def test_the_model_is_given_back_as_it_was(
    tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """Flags, buffers, hooks and random numbers are, after a failure; nothing is
    written."""
    tiny.train().append(Fixed(None)).append(nn.ReLU())
    before = state_of(tiny)
    page = tmp_path / "page.png"
    with pytest.raises(ForwardError, match="the model failed in 6"):
        fv.look(tiny, picture, "Conv2d", page, size=16)
    assert_same(before, state_of(tiny))
    assert not page.exists()


def test_nothing_is_written_where_nothing_can_be_drawn(
    see: See, tmp_path: Path
) -> None:
    """The reason is named, and there is no file."""
    sparse = torch.rand(1, 2, 4, 4).to_sparse()
    message = r"no picture was drawn; skipped: layer 0 \(.*sparse"
    with pytest.raises(FeatvizError, match=message):
        see(fixed(sparse), noise(1, 4, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["image.npy"]


def test_nothing_is_written_for_a_broken_image(tiny: nn.Module, tmp_path: Path) -> None:
    """The error is that of the image."""
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ImageError):
        fv.look(tiny, broken, out=tmp_path / "page.png")
    assert list(tmp_path.iterdir()) == [broken]


@pytest.mark.parametrize(
    ("low", "high", "note"),
    [
        (-5.4e-7, 2.3e-4, "-5.4e-7 … 2.3e-4"),
        (0.013, 0.0134, "≈0.013"),
        (0.002, 0.0025, "2e-3 … 2.5e-3"),
        (0.0099, 0.01, "9.9e-3 … 0.01"),
        (-9.4, 10.4, "-9.4 … 10"),
        (0.0, 99999.0, "0 … 99999"),
        (-123456.0, 350.4, "-1.2e5 … 350"),
        (None, 1.0, ""),
    ],
)
def test_ranges_have_few_letters(low: Any, high: Any, note: str) -> None:
    """They have two digits, and powers of ten below 0.01."""
    layer = ShownLayer(
        layer="x",
        type="Conv2d",
        index=0,
        call=0,
        calls=1,
        key="",
        shape=(1, 1, 2, 2),
        layout="nchw",
        maps=1,
        constant=0,
        nonfinite=0,
        slice=None,
        channels=(118,),
        ranges=((low, high),),
        strip=False,
        tiles=[np.zeros((2, 2, 3), np.uint8)],
    )
    (tile,) = page_row(layer).tiles
    assert tile.note == note


def test_chosen_maps_of_zeros_are_crossed_out(see: See) -> None:
    """As in grids; of another constant a stroke rises, and other maps stay."""
    maps = torch.rand(1, 3, 8, 8)
    maps[0, 1] = 0
    maps[0, 2] = 5

    zeros, fives, varied = (
        see(fixed(maps), noise(8, 8), channels="1,2,0").layers[0].tiles
    )

    rising = np.eye(8, dtype=bool)[::-1]
    for tile, drawn in ((zeros, rising | rising[::-1]), (fives, rising)):
        ground = tile[0, 3]
        assert np.array_equal((tile != ground).any(2), drawn)
    alike = np.corrcoef(varied[:, :, 0].ravel(), maps[0, 0].numpy().ravel())
    assert alike[0, 1] > 0.95


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ([0.0], ["1 of 2 all zero: 0"]),
        ([5.0], ["1 of 2 constant"]),
        ([5.0, 0.0], ["2 of 3 constant, zero: 1"]),
        ([0.0] * 5 + [5.0, 0.0], ["7 of 8 constant, zero:", "0-4, 6"]),
    ],
)
def test_maps_of_zeros_are_told_from_constant_ones(
    values: list[float], lines: list[str]
) -> None:
    """The row of a layer counts both, and names the channels that are zero."""
    conv = nn.Conv2d(1, len(values) + 1, 1)
    with torch.no_grad():
        conv.weight[:] = 0
        conv.weight[-1] = 1
        conv.bias[:] = torch.tensor([*values, 0.0])
    image = torch.linspace(0, 1, 64).view(1, 8, 8)

    result = fv.look(nn.Sequential(conv), image, "0", size=8, input_channels=1)

    assert page_row(result.layers[0]).lines[-len(lines) :] == lines
