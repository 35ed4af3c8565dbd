"""Tokens: models whose tokens say themselves where they stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from followed import followed
from networks import Net
from numpy.testing import assert_array_equal
from PIL import Image
from ramps import PATCH, Look, PositionViT, look, positions, save
from tiles import assert_drawn, assert_row, levels
from torch import Tensor, nn
from torchvision import models

from featviz import layout
from featviz.hooks.layers import list_layers
from featviz.layout.layouts import Arrangement, find_grid, map_sizes
from featviz.layout.tracing.hints import HintBook, read_hints
from featviz.records import Hints


@pytest.mark.medium
@pytest.mark.parametrize(
    ("prefixes", "size"),
    [
        pytest.param({}, (56, 56), id="none"),
        pytest.param({"cls_token": 1, "dist_token": 1}, (59, 83), id="distilled"),
        pytest.param({"cls_token": 1, "register_tokens": 4}, (59, 83), id="registers"),
    ],
)
def test_tokens_are_drawn_where_their_patches_lay(
    prefixes: dict[str, int],
    size: tuple[int, int],
    tmp_path: Path,
) -> None:
    """Channel 0 is the picture of rows, 1 of columns: no shift, no transposition; sides
    that are no multiples of a patch lose what is left over."""
    model = PositionViT(prefixes)
    seen = look(model, save(tmp_path, *size), "blocks.1", size)
    row = seen.row("blocks.1")
    height = size[0] // PATCH
    width = size[1] // PATCH
    count = sum(prefixes.values()) + height * width
    assert_row(row, layout="tokens", shape=[1, count, 3])
    assert row["grid"]["tile"] == [height, width]
    assert_drawn(seen.folder, row, positions(height, width))


MODEL = PositionViT({"cls_token": 1, "dist_token": 1, "register_tokens": 4})
SPECIAL = pytest.mark.parametrize(
    ("key", "parameter"),
    [
        ("class_token", MODEL.cls_token),
        ("distillation_token", MODEL.dist_token),
        ("register_tokens", MODEL.register_tokens),
    ],
    ids=MODEL.names,
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Look:
    """A run of a model with tokens of its own."""
    image = save(tmp_path_factory.mktemp("tokens"), 56, 80)
    return look(MODEL, image, "blocks.0", (56, 80))


@SPECIAL
def test_special_tokens_are_vectors(key: str, parameter: Tensor, seen: Look) -> None:
    """Class, distillation and register tokens stand in pictures of their own; registers
    are rows of one strip."""
    row = seen.row("blocks.0", key)
    tokens = parameter.detach()[0]
    assert row["file"].endswith(f"_blocks.0/output.{key}.png")
    assert_row(row, layout="vector", maps=3)
    extremes = torch.stack(tokens.aminmax()).tolist()
    assert row["range"] == pytest.approx(extremes)
    assert [row["min"], row["max"]] == pytest.approx(extremes)
    strip = np.asarray(Image.open(seen.folder / row["file"]))
    assert strip == pytest.approx(levels(tokens[None])[0].astype(int), abs=1)


@SPECIAL
def test_special_tokens_have_statistics(
    key: str,
    parameter: Tensor,
    seen: Look,
) -> None:
    """The statistics of special tokens are those of their own numbers."""
    tokens = parameter.detach()[0]
    extremes = torch.stack([tokens.amin(0), tokens.amax(0)], 1)
    with np.load(seen.folder / "stats.npz") as stats:
        assert np.allclose(stats[f"blocks.0|output|0|{key}"][:, :2], extremes)


def test_no_special_token_is_in_the_grid(seen: Look) -> None:
    """Special tokens are negative, and no value of the grid is."""
    keys = {key for _, _, key in seen.captures}
    assert keys == {"", "class_token", "distillation_token", "register_tokens"}
    with np.load(seen.folder / "stats.npz") as stats:
        assert stats["blocks.0|output|0|"][:, 0].min() >= 0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (281, ("tokens", 14, 20)),
        (280, ("tokens", 14, 20)),
        (196, None),
    ],
)
def test_a_224_by_320_picture_has_14_by_20_tokens(
    count: int,
    expected: tuple[str, int, int] | None,
) -> None:
    """ViT-B/16's 281 tokens are a class token and a grid of 14 × 20, not 14 × 14."""
    with torch.device("meta"):
        model = models.vit_b_16()
    hints = HintBook(model, (1, 3, 224, 320)).of_layer(list_layers(model)[5])
    assert layout.map_size([1, count, 768], hints) == expected


def test_tokens_with_channels_first(tmp_path: Path) -> None:
    """[1, D, T] gives the same pictures as [1, T, D]."""
    model = PositionViT({"cls_token": 1}, channels_first=True)
    seen = look(model, save(tmp_path, 32, 100), "blocks.0", (32, 100))
    row = seen.row("blocks.0")
    assert row["layout"] == "ncl"
    assert_drawn(seen.folder, row, positions(8, 25))
    assert seen.row("blocks.0", "class_token")["max"] < 0


@pytest.mark.parametrize("channels", [15, 16])
def test_tokens_that_are_mixed_stay_where_they_are(channels: int) -> None:
    """A linear layer over tokens, as an MLP mixer has them, here of 3 by 5 patches."""
    model = Net(
        lambda self, x: self.after(self.mix(self.patches(x).flatten(2))),
        patches=nn.Conv2d(3, channels, 4, 4),
        mix=nn.Linear(15, 15),
        after=nn.Identity(),
    )
    drawn = followed(model, 12, 20)
    for layer in ("mix", "after"):
        seen = drawn[layer, ""]
        assert seen.layout == "ncl"
        assert_array_equal(seen.maps, seen.tensor[0].unflatten(1, (3, 5)))


@pytest.mark.parametrize("step", [1, -1, 4], ids=["as is", "back", "jumping"])
def test_tokens_that_are_picked_are_drawn_where_they_lay(step: int) -> None:
    """Whatever order their numbers are picked in, here of 3 by 5 patches."""
    order = torch.arange(15) * step % 15
    model = Net(
        lambda self, x: self.after(
            self.patches(x).flatten(2).transpose(1, 2)[:, order]
        ),
        patches=nn.Conv2d(3, 16, 4, 4),
        after=nn.Identity(),
    )
    seen = followed(model, 12, 20)["after", ""]
    in_place = torch.empty_like(seen.tensor)
    in_place[:, order] = seen.tensor
    assert_array_equal(seen.maps, in_place[0].T.unflatten(1, (3, 5)))


def test_heads_come_one_behind_the_other() -> None:
    """[1, heads, T, D], queries for example: the channels of head 0, then those of head
    1."""
    maps = positions(14, 20)
    heads = torch.stack([maps, maps + 1])
    queries = heads.flatten(2).transpose(1, 2)[None]
    hints = Hints(input_size=(224, 320), in_attention=True)
    drawn = layout.to_maps(queries, hints)[""]
    assert drawn.layout == "heads"
    assert_array_equal(drawn.data[:, 0], heads.flatten(0, 1))


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ([1, 256, 196], "ncl"),
        ([1, 196, 256], "tokens"),
    ],
)
def test_the_patches_grid_wins_where_both_axes_make_one(
    shape: list[int],
    name: str,
) -> None:
    """[1, 256, 196] behind patches of 16 is channels first, [1, 196, 256] is not."""
    hints = Hints(input_size=(224, 224), patch_size=(16, 16))
    assert layout.map_size(shape, hints) == (name, 14, 14)


@pytest.mark.parametrize(
    ("mixed", "is_grid"),
    [(None, True), (16, True), (17, True), (15, False), (0, False)],
)
def test_as_many_tokens_make_a_grid_as_are_mixed(
    mixed: int | None, is_grid: bool
) -> None:
    """With or without the class token before them."""
    hints = Hints(
        input_size=(32, 32), prefix_tokens=("class_token",), token_count=mixed
    )
    grid = find_grid(17, hints)
    expected = Arrangement("tokens", 4, 4, prefix=("class_token",))
    assert grid == (expected if is_grid else None)


def test_tokens_of_a_square_image_make_a_square() -> None:
    """15 by 14 tokens are no grid of 225 by 225 pixels."""
    assert find_grid(15 * 14, Hints(input_size=(225, 225))) is None
    assert find_grid(14 * 14, Hints(input_size=(225, 225))) is not None


@pytest.mark.parametrize("length", [1, 2])
def test_a_single_token_is_no_grid(length: int) -> None:
    """With a class token before it or without."""
    assert find_grid(length, Hints(input_size=(16, 16))) is None


def test_a_kernel_may_be_larger_than_its_stride() -> None:
    """AlexNet's first convolution, 11 with stride 4, makes 54 rows of 224 without
    padding and 55 of 227."""
    rows = (227 - 11) // 4 + 1
    assert rows == 227 // 4 - 1
    assert find_grid(rows * rows, Hints(input_size=(227, 227))) is not None


def test_hints_are_read_from_parameters_of_any_form() -> None:
    """Names in any case, several tokens in one parameter, and patches that are no
    squares."""
    net = nn.Sequential(nn.Conv2d(3, 8, (8, 16), stride=(8, 16)))
    net.register_parameter("CLS_Token", nn.Parameter(torch.zeros(8)))
    net.register_parameter("reg_tokens", nn.Parameter(torch.zeros(4, 8)))
    net.register_parameter("dist_token", nn.Parameter(torch.zeros(1, 1, 8)))
    hints = read_hints(net, (1, 3, 32, 32))[""]
    others = ("distillation_token", *["register_tokens"] * 4)
    assert hints.prefix_tokens == ("class_token", *others)
    assert hints.patch_size == (8, 16)


def test_a_class_token_of_the_model_stands_before_the_grid() -> None:
    """Also where the tokens with it would make another one."""
    hints = Hints(input_size=(96, 128), prefix_tokens=("class_token",))
    expected = Arrangement("tokens", 2, 4, prefix=("class_token",))
    assert find_grid(2 * 4 + 1, hints) == expected
    assert find_grid(9, Hints(input_size=(96, 128))) is not None


def test_strides_of_two_may_round_rows_up_and_columns_down() -> None:
    """A convolution pads the border, a pooling drops it: both in turn make each of
    these."""
    sizes = map_sizes((15, 13))
    assert {(8, 7), (8, 6), (7, 7), (7, 6)} <= {*sizes}
    assert (5, 5) in sizes  # a stride of three that pads
    assert (5, 4) in sizes
    assert (4, 4) in sizes
    assert (16, 13) not in sizes
