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
from conftest import Run
from networks import Net
from PIL import Image
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from featviz.drawing import colormap
from featviz.errors import FeatvizError, ForwardError, ImageError
from featviz.inspection.look import (
    ALIKE,
    MOST_STAGES,
    LookResult,
    ShownLayer,
    look,
    page_row,
    ranked,
    unlike,
)
from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.options.commands import LookOptions

PLAIN = InputOptions(preset="none", input_channels=1)


@pytest.fixture
def see(tmp_path: Path) -> Callable[..., LookResult]:
    """Look at an image, or an array that is saved as one, with a module."""

    def invoke(module: nn.Module, image: Any, **options: Any) -> LookResult:
        if isinstance(image, np.ndarray):
            np.save(tmp_path / "image.npy", image.astype(np.float32))
            image = tmp_path / "image.npy"
        given = {
            "out": tmp_path / "page.png",
            "inputs": PLAIN,
            "cmap": "grey",
            **options,
        }
        model = adopt(module.eval(), given["inputs"])
        return look(model, [str(image)], LookOptions(**given))

    return invoke


class Fixed(nn.Module):
    """Gives the same maps for every image."""

    def __init__(self, maps: Any) -> None:
        super().__init__()
        self.maps = maps

    def forward(self, x: Tensor) -> Any:
        return self.maps


def fixed(*maps: Any) -> nn.Sequential:
    return nn.Sequential(*map(Fixed, maps))


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape)


def test_tiles_are_those_of_run(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path
) -> None:
    """With the same colormap the same pixels as in the grids of `run`, of each layer."""
    from featviz.options import ModelOptions

    inputs = InputOptions(size=16, crop=16)
    chosen = {"layers": "Conv2d,ReLU", "inputs": inputs, "out": tmp_path / "page.png"}
    result = look(ModelOptions(str(tiny_file)), [str(picture)], LookOptions(**chosen))
    options = (
        "--layers",
        "Conv2d,ReLU",
        "--size",
        16,
        "--crop",
        16,
        "--cmap",
        "viridis",
    )
    shape = ("--nrow", 1, "--padding", 0, "--scale", 1)
    assert (
        featviz(
            "run", tiny_file, picture, "--out", tmp_path / "run", *options, *shape
        ).code
        == 0
    )
    assert [row.layer for row in result.layers] == ["0", "1"]
    for row in result.layers:
        (file,) = (tmp_path / "run" / "picture.png").glob(f"*_{row.layer}/output.png")
        grid = np.asarray(Image.open(file).convert("RGB")).reshape(4, 16, 16, 3)
        for channel, tile in zip(row.channels, row.tiles, strict=True):
            assert (tile == grid[channel]).all()


def test_the_order_is_numpys(see: Callable[..., LookResult]) -> None:
    """The largest deviation comes first, wherever the values lie."""
    maps = noise(1, 12, 8, 8) * np.arange(12, 0, -1)[:, None, None]
    maps = maps[:, np.random.default_rng(1).permutation(12)].astype(np.float32)
    # not the order of the largest
    maps += np.arange(12, dtype=np.float32)[:, None, None] * 50
    result = see(fixed(torch.from_numpy(maps)), noise(1, 8, 8), layers="Fixed", maps=5)
    expected = np.argsort(-np.std(maps[0].reshape(12, -1), axis=1), kind="stable")[:5]
    assert list(result.layers[0].channels) == expected.tolist()
    low, high = np.array(result.layers[0].ranges).T
    assert np.allclose(low, maps[0, expected].min((1, 2)), rtol=1e-6)
    assert np.allclose(high, maps[0, expected].max((1, 2)), rtol=1e-6)


def test_constant_maps_and_those_without_values_come_last() -> None:
    """Flat ones are left out beside others, and stay where all are; NaN ranks behind
    numbers."""
    stats = np.zeros((4, 6), np.float32)
    stats[:, 0], stats[:, 1], stats[:, 2], stats[:, 3] = (
        0,
        [1, 0, 5, np.nan],
        1,
        [2, 9, 3, np.nan],
    )
    stats[1, [0, 1, 3]] = 9, 9, 0
    stats[3, [0, 5]] = np.nan, 64
    assert ranked(stats, stats[:, 3]) == [2, 0, 3]
    stats[:, 2] = [1, 2, 5, 4]
    constant = stats[[1, 1]] * [[1], [2]]
    assert ranked(constant, constant[:, 3]) == [1, 0]


def test_maps_that_look_alike_are_shown_once() -> None:
    """By numpy's correlation with those shown before, in the order; alike ones fill up."""
    rng = np.random.default_rng(2)
    base = rng.integers(0, 100, (3, 20, 20))
    maps = np.stack(
        [base[0], base[0] * 2 + 9, base[1], base[2], base[1], 0 * base[0] + 7]
    )
    maps = maps.astype(np.uint8)
    order = [1, 0, 5, 4, 2, 3]
    distinct: list[int] = []
    for channel in order:
        if maps[channel].std():
            near = [
                np.corrcoef(maps[channel].ravel(), maps[t].ravel())[0, 1]
                for t in distinct
            ]
            distinct += [channel] if all(value < ALIKE for value in near) else []
    assert distinct == [1, 4, 3] == unlike(maps, order, 3)
    assert unlike(maps, order, 5) == [1, 4, 3, 0, 5]


def test_the_page_is_the_file(see: Callable[..., LookResult], tmp_path: Path) -> None:
    """The PNG on disk holds the page's pixels, which hold the input's."""
    image = noise(1, 20, 20)
    result = see(fixed(torch.rand(1, 2, 7, 7)), image, layers="Fixed")
    with Image.open(result.path) as opened:
        assert opened.mode == "RGB"
        assert opened.info["Software"] == "featviz look"
        assert (np.asarray(opened) == result.picture).all()
    values = (image[0] * 255 + 0.5).astype(np.uint8)
    assert (result.shown == values[..., None]).all()
    size = 300
    seen = result.picture[100 : 100 + size, 30 : 30 + size]
    assert (seen == result.shown.repeat(15, 0).repeat(15, 1)).all()


def test_an_output_that_is_a_picture_is_shown(see: Callable[..., LookResult]) -> None:
    """Of three channels in 0..1, as it is, beside the input."""
    colour = torch.zeros(1, 3, 20, 20)
    colour[:, 0] = 1.0
    result = see(
        fixed(colour + torch.rand(1, 3, 20, 20) * 0.001),
        np.zeros((1, 20, 20)),
        layers="Fixed",
    )
    red = (result.picture == (255, 0, 0)).all(2)
    columns = np.flatnonzero(red.any(0))
    assert red.sum() == len(columns) ** 2 == 240**2
    assert not result.prediction


@pytest.mark.parametrize(
    ("key", "drawn"),
    [("logits", True), pytest.param("", False, marks=pytest.mark.slow)],
)
def test_scores_of_a_segmentation_are_shown_as_classes(
    key: str, drawn: bool, see: Callable[..., LookResult]
) -> None:
    """The likeliest class of each place, one colour each, where the output is named so
    or has the input's size; maps of features are no picture."""
    classes = torch.randint(
        0, 3, (1, 10, 10), generator=torch.Generator().manual_seed(0)
    )
    # of so many channels a smaller output is features, not classes
    count = 5 if key else 40
    scores = nn.functional.one_hot(classes, count).movedim(3, 1).float()
    net = Fixed({key: scores} if key else scores)
    result = see(nn.Sequential(net), np.zeros((1, 20, 20)), layers="Fixed")
    corner = result.picture[100:400, 350:630].reshape(-1, 3)
    colours = {tuple(c) for c in colormap.ramp("turbo")[[0, 97, 194]].tolist()}
    assert (colours <= {tuple(c) for c in np.unique(corner, axis=0).tolist()}) is drawn


@pytest.mark.slow
def test_many_stages_are_spread(see: Callable[..., LookResult]) -> None:
    """Of more than MOST_STAGES the first, the last and evenly spread ones; --layers
    takes all."""
    torch.manual_seed(0)
    vit = VisionTransformer(16, 4, 13, 2, 8, 8, num_classes=3)
    options = {"inputs": InputOptions(size=16, crop=16)}
    result = see(vit, np.zeros((3, 16, 16)), **options)
    names = [row.layer for row in result.layers]
    assert len(names) == MOST_STAGES
    assert len(result.left_out) == 14 - MOST_STAGES
    assert (names[0], names[-1]) == ("conv_proj", "encoder.layers.encoder_layer_12")
    numbers = [int(name.rpartition("_")[2]) for name in names[1:]]
    assert set(np.diff(numbers)) <= {1, 2}
    assert not set(names) & set(result.left_out)
    every = see(vit, np.zeros((3, 16, 16)), layers="EncoderBlock,conv_proj", **options)
    assert len(every.layers) == 14
    assert not every.left_out


def test_a_vector_is_one_strip(see: Callable[..., LookResult]) -> None:
    """All its numbers side by side, from the least to the greatest; the largest are
    named."""
    numbers = torch.tensor([[0.0, 3.0, 1.0, 4.0]])
    (row,) = see(fixed(numbers), noise(1, 8, 8), layers="Fixed", maps=2).layers
    assert row.strip
    assert row.channels == (3, 1)
    assert row.ranges == ((0.0, 4.0),)
    assert row.tiles[0].shape == (1, 4, 3)


def test_maps_of_one_number_have_one_scale(see: Callable[..., LookResult]) -> None:
    """The largest number comes first and is brightest; each says its own value."""
    maps = torch.tensor([0.0, 10.0, 5.0]).reshape(1, 3, 1, 1)
    (row,) = see(fixed(maps), noise(1, 8, 8), layers="Fixed").layers
    assert not row.strip
    assert row.channels == (1, 2, 0)
    assert row.constant == 0
    assert row.tiles[0].shape == (1, 1, 3)
    assert [int(tile[0, 0, 0]) for tile in row.tiles] == [255, 128, 0]
    assert row.ranges == ((10.0, 10.0), (5.0, 5.0), (0.0, 0.0))


def test_of_a_volume_the_middle_is_shown(see: Callable[..., LookResult]) -> None:
    """One slice of each map and of the input; the scale is that of all slices."""
    net = nn.Sequential(nn.Conv3d(1, 1, 1, bias=False))
    nn.init.ones_(net[0].weight)
    volume = noise(1, 7, 12, 12).astype(np.float32)
    result = see(net, volume, layers="Conv3d")
    (row,) = result.layers
    assert row.slice == (3, 7)
    assert row.shape == (1, 1, 7, 12, 12)
    low = volume.min()
    high = volume.max()
    expected = np.round((volume[0, 3] - low) / (high - low) * 255)
    assert np.abs(row.tiles[0][..., 0] - expected).max() <= 1
    assert (result.shown[..., 0] == (volume[0, 3] * 255 + 0.5).astype(np.uint8)).all()


def test_of_several_calls_the_first_maps_are_shown(
    see: Callable[..., LookResult],
) -> None:
    """A layer has one row: the first maps that it gives, before mere numbers; calls are
    counted."""
    layer = Fixed((torch.rand(1, 5), torch.rand(1, 2, 8, 8)))
    twice = Net(lambda self, x: (self.layer(x), self.layer(x))[1], layer=layer)
    (row,) = see(twice, noise(1, 8, 8), layers="layer").layers
    assert (row.key, row.shape, row.calls) == ("1", (1, 2, 8, 8), 2)


def test_nan_is_magenta_and_warned_of(
    see: Callable[..., LookResult], messages: pytest.LogCaptureFixture
) -> None:
    """The pixel is magenta, and the others have their scale."""
    maps = torch.rand(1, 1, 6, 6)
    maps[0, 0, 2, 3] = torch.nan
    (row,) = see(fixed(maps), noise(1, 6, 6), layers="Fixed").layers
    assert row.tiles[0][2, 3].tolist() == [255, 0, 255]
    assert row.nonfinite == 1
    assert "0 holds 1 NaN or infinite values, shown in magenta" in messages.text


def test_the_model_is_given_back_as_it_was(
    tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """Flags, buffers, hooks and random numbers, after a failure; nothing is written."""
    tiny.train().append(Fixed(None)).append(nn.ReLU())
    before = state_of(tiny)
    model = adopt(tiny, InputOptions(size=16))
    options = LookOptions("Conv2d", tmp_path / "x.png")
    with pytest.raises(ForwardError, match="the model failed in 6"):
        look(model, [str(picture)], options)
    assert_same(before, state_of(tiny))
    assert not (tmp_path / "x.png").exists()


def test_nothing_is_written_where_nothing_can_be_drawn(
    see: Callable[..., LookResult], tmp_path: Path
) -> None:
    """The reason is named, and there is no file."""
    with pytest.raises(
        FeatvizError, match=r"no picture was drawn; skipped: 0 \(.*sparse"
    ):
        see(fixed(torch.rand(1, 2, 4, 4).to_sparse()), noise(1, 4, 4), layers="Fixed")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ImageError):
        see(fixed(torch.rand(1, 2, 4, 4)), tmp_path / "broken.png", layers="Fixed")
    assert not (tmp_path / "page.png").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("low", "high", "note"),
    [
        (-5.4e-7, 2.3e-4, "-5.4e-7 … 2.3e-4"),
        (0.013, 0.0134, "≈0.013"),
        (0.002, 0.0025, "2e-3 … 2.5e-3"),
        (None, 1.0, ""),
    ],
)
def test_ranges_are_told_in_few_letters(low: Any, high: Any, note: str) -> None:
    """Two digits; powers of ten below 0.01."""
    layer = ShownLayer(
        layer="x",
        type="Conv2d",
        index=0,
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
