"""Pictures of kernels: pixels, orientation, order and shapes, against torch and
torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from PIL import Image
from pixels import pixels_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torchvision.utils import make_grid

from featviz.drawing import kernels as filters

from .drawn_kernels import Draw, assert_close, levels, weights


def make_grid_pixels(weight: Tensor, row: dict[str, Any], **options: Any) -> np.ndarray:
    """The picture of make_grid and save_image, uint8 [H, W, 3], laid out as a row of
    the manifest says."""
    columns = row["grid"]["nrow"]
    padding = row["grid"]["padding"]
    options = {"normalize": True, "pad_value": 1.0, **options}
    grid = make_grid(weight, nrow=columns, padding=padding, **options)
    return grid.mul(255).add(0.5).clamp(0, 255).permute(1, 2, 0).byte().numpy()


@pytest.mark.medium
def test_colour_kernels_are_make_grids(drawn: Draw) -> None:
    """Those of three inputs are RGB; all kernels share one range with zero in its
    middle."""
    pictures = drawn("colour", "--scale", 1)
    weight = weights("colour")["first"]
    largest = float(weight.abs().max())

    row = pictures.rows["first"]
    expected = make_grid_pixels(weight, row, value_range=(-largest, largest))
    assert pictures.image("first").mode == "RGB"
    assert row["grid"]["padding"] == 4
    assert row["layout"] == "rgb"
    assert row["range"] == pytest.approx([-largest, largest])
    assert_close(pictures.image("first"), expected)


NOTES = np.s_[225:240, 270:330]
"""Below the first kernel of a page, behind its number."""


@pytest.mark.medium
def test_the_page_shows_the_first_kernels_of_each_layer(drawn: Draw) -> None:
    """Eight side by side in the colours of the grids, enlarged, a row for each layer."""
    pictures = drawn("colour", "--scale", 1)
    page = pixels_of(Image.open(pictures.out / "kernels.png"))
    for number, layer in enumerate(("first", "second")):
        top = (
            103 + 154 * number
        )  # a tile has 120 pixels, and the next begins 8 behind it
        for column, expected in enumerate(pictures.tiles(layer)[:8]):
            left = 210 + 128 * column
            side = len(expected)
            centres = (np.arange(side) * 2 + 1) * 120 // (2 * side)
            tile = page[top : top + 120, left : left + 120][np.ix_(centres, centres)]
            # of grey ones the page has three equal channels
            assert_close(tile if expected.ndim == 3 else tile[..., 0], expected)
    assert (page[103:223, 210 + 128 * 8 :] == 255).all()
    assert (page[NOTES] == 255).all(), "one range for all stands beside them"


def test_each_colour_kernel_may_have_its_range(drawn: Draw) -> None:
    """With `--normalize map` a kernel's three colours share its limits; the options of
    the grid are make_grid's."""
    layout = ("--scale", 1, "--nrow", 4, "--padding", 1, "--pad-value", 0.6)
    pictures = drawn("colour", *layout, "--normalize", "map")
    row = pictures.rows["first"]
    weight = weights("colour")["first"]
    expected = make_grid_pixels(weight, row, scale_each=True, pad_value=0.6)
    assert_close(pictures.image("first"), expected)
    assert row["grid"]["nrow"] == 4
    assert row["grid"]["padding"] == 1
    page = pixels_of(Image.open(pictures.out / "kernels.png"))
    assert (page[NOTES] < 255).any(), "each kernel has its range below it"


def test_other_kernels_are_the_mean_over_inputs(drawn: Draw) -> None:
    """Those of ten inputs are grey, and make_grid's of the mean."""
    pictures = drawn("colour", "--scale", 1)
    mean = weights("colour")["second"].mean(1, keepdim=True)
    largest = float(mean.abs().max())

    row = pictures.rows["second"]
    expected = make_grid_pixels(mean, row, value_range=(-largest, largest))
    assert pictures.image("second").mode == "L"
    assert row["tiles"] == "mean over 10 inputs"
    assert_close(pictures.image("second"), expected[..., 0])


def test_three_inputs_of_a_group_are_no_colours() -> None:
    """A tile is their mean."""
    grouped = filters.read_filters(nn.Conv2d(6, 4, 3, groups=2))
    picture, tiles = filters.draw_filters(grouped, filters.DRAW)
    assert (picture.layout, tiles) == ("mean", "mean over 3 inputs")


@pytest.mark.parametrize("nrow", [3, None])
def test_columns_of_slices_are_as_many_as_the_user_says(nrow: int | None) -> None:
    """Else one for each input."""
    read = filters.read_filters(nn.Conv2d(5, 4, 3))
    options = structs.replace(filters.DRAW, nrow=nrow)
    picture, _ = filters.draw_filters(read, options, all_slices=True)
    assert picture.plan.columns == (nrow or 5)


@pytest.mark.parametrize("all_slices", [False, True])
def test_few_kernels_are_large_enough_to_be_seen(all_slices: bool) -> None:
    """The longer side of their picture has 480 pixels, and one factor less would not
    reach them."""
    read = filters.read_filters(nn.Conv2d(5, 4, 3))
    picture, _ = filters.draw_filters(read, filters.DRAW, all_slices)
    plan = picture.plan
    longer = max(plan.height, plan.width)
    most_tiles = max(plan.rows, plan.columns)
    assert 480 <= longer < 480 + most_tiles * 3


@pytest.mark.parametrize("layer", ["first", "second"])
def test_all_slices_have_a_row_for_each_output(layer: str, drawn: Draw) -> None:
    """Tile (o, i) is weight[o, i]: rows are outputs, columns inputs, colour kernels
    included."""
    pictures = drawn("colour", "--scale", 1, "--all-slices")
    weight = weights("colour")[layer]
    outputs, inputs, height, _ = weight.shape
    row = pictures.rows[layer]
    assert row["grid"]["nrow"] == inputs
    assert row["slices"] == inputs
    assert_close(pictures.tiles(layer), levels(weight.flatten(0, 1)))
    assert pictures.image(layer).height == outputs * (height + 4) + 4


def test_zero_is_mid_grey(drawn: Draw) -> None:
    """A kernel of zeros among others is (128, 128, 128), crossed out in black."""
    tiles = drawn("zero", "--scale", 7).tiles("first")
    cross = (tiles[3] == 0).all(axis=-1)
    assert (tiles[3][~cross] == 128).all()
    assert 60 <= cross.sum() <= 140
    assert np.diag(cross).all()
    assert np.diag(cross[::-1]).all()
    assert not (tiles[2] == 128).all()


def answers_to_impulses(module: Any) -> Tensor:
    """What comes out around an impulse at each input, [inputs, outputs, ...], as large as
    a kernel: a convolution correlates, so its kernel comes out turned round; a
    transposed one stamps it."""
    inputs = module.in_channels
    dimensions = module.weight.ndim - 2
    impulses = torch.zeros(inputs, inputs, *[3] * dimensions)
    middle = (1,) * dimensions
    for index in range(inputs):
        impulses[index, index][middle] = 1
    with torch.no_grad():
        answers = module(impulses)
    if module.transposed:
        return answers
    return answers.flip(*range(2, answers.ndim))


IMPULSES = [
    nn.Conv2d(4, 6, 3, padding=1, bias=False),
    nn.ConvTranspose3d(4, 2, 3, padding=1, groups=2, bias=False),
]


@pytest.mark.parametrize("module", IMPULSES, ids=repr)
def test_kernels_belong_to_output_channels(module: Any) -> None:
    """An impulse at one input brings out, in output channel o, the kernel from that
    input to o, and nothing in the channels of other groups."""
    kernels = filters.read_filters(module).kernels.detach()
    answers = answers_to_impulses(module)

    inputs = module.in_channels // module.groups
    outputs = module.out_channels // module.groups
    expected = torch.zeros_like(answers)
    for group in range(module.groups):
        rows = slice(group * inputs, (group + 1) * inputs)
        columns = slice(group * outputs, (group + 1) * outputs)
        of_group = kernels[columns].transpose(0, 1)
        expected[rows, columns] = of_group.reshape(inputs, outputs, *answers.shape[2:])
    torch.testing.assert_close(answers, expected, rtol=0, atol=1e-6)


@pytest.mark.medium
def test_chosen_channels_are_whole_channels(drawn: Draw) -> None:
    """spread:3 takes channels 0, 2 and 5 of six with all their slices."""
    options = "--layers second --channels spread:3 --all-slices --scale 1"
    pictures = drawn("colour", *options.split())
    row = pictures.rows["second"]
    assert row["channels"] == [0, 2, 5]
    assert row["maps"] == 6
    shown = levels(weights("colour")["second"])[[0, 2, 5]]
    assert_close(pictures.tiles("second"), shown.reshape(30, 3, 3))


def test_the_text_of_a_picture_says_what_it_shows(drawn: Draw) -> None:
    """It names the layer, the channels and the range."""
    pictures = drawn("colour", "--layers", "second", "--channels", "spread:3")
    text = pictures.image("second").info
    assert text["Channels"] == "0,2,5"
    assert text["Maps"] == "3 of 6 (--channels)"
    assert text["Layer"] == "second (Conv2d)"
    assert text["Range"].startswith("symmetric: -")


@pytest.mark.medium
def test_time_steps_stand_side_by_side(drawn: Draw) -> None:
    """Four time steps of a channel stand in one row, in order."""
    pictures = drawn("shapes", "--scale", 1)
    row = pictures.rows["volume"]
    assert row["slices"] == 4
    assert row["grid"]["nrow"] % 4 == 0
    assert row["maps"] == 6
    means = weights("shapes")["volume"].mean(1)
    assert_close(pictures.tiles("volume"), levels(means.flatten(0, 1)))


@pytest.mark.medium
def test_time_steps_of_colour_kernels_stand_side_by_side(drawn: Draw) -> None:
    """Each is RGB."""
    pictures = drawn("shapes", "--scale", 1)
    assert pictures.image("film").mode == "RGB"
    assert pictures.rows["film"]["slices"] == 2
    film = levels(weights("shapes")["film"]).transpose(0, 2, 3, 4, 1)
    assert_close(pictures.tiles("film"), film.reshape(8, 3, 3, 3))


@pytest.mark.medium
def test_all_slices_of_a_volume(drawn: Draw) -> None:
    """An output has a row: its inputs, and in each its time steps."""
    pictures = drawn("shapes", "--scale", 1, "--all-slices")
    assert pictures.rows["volume"]["grid"]["nrow"] == 8
    weight = weights("shapes")["volume"]
    assert_close(pictures.tiles("volume"), levels(weight.flatten(0, 2)))


def test_kernels_of_one_dimension_are_strips(drawn: Draw) -> None:
    """Seven numbers are seven times as wide as high, and high enough to be seen."""
    height, width = drawn("shapes").rows["line"]["grid"]["tile"]
    assert width == 7 * height > 7 * 5


def mean_over_inputs(layer: str) -> Tensor:
    """The mean of a layer's kernels over the inputs of their group; a transposed
    convolution has its weight by inputs: outputs 0 to 2 are of inputs 0 and 1."""
    weight = weights("shapes")[layer]
    if layer == "up":
        return torch.cat([weight[:2].mean(0), weight[2:].mean(0)])
    if layer == "line":
        return weight.mean(1)[:, None]
    return weight.mean(1)


@pytest.mark.parametrize(
    ("layer", "groups"),
    [("line", 1), ("groups", 2), ("up", 2)],
)
def test_a_tile_is_the_mean_over_the_inputs_of_its_group(
    layer: str, groups: int, drawn: Draw
) -> None:
    """Those of one-dimensional and transposed convolutions are, too."""
    pictures = drawn("shapes", "--scale", 1)
    assert_close(pictures.tiles(layer), levels(mean_over_inputs(layer)))
    assert pictures.rows[layer]["groups"] == groups


def test_the_manifest_says_what_is_transposed(drawn: Draw) -> None:
    """A row has the weight's shape, and as many maps as the layer has outputs."""
    row = drawn("shapes").rows["up"]
    assert row["transposed"]
    assert row["maps"] == 6
    assert row["shape"] == [4, 3, 3, 3]


def seen_by_forward(module: nn.Module) -> Tensor:
    """The weight that a forward pass uses, by its answers to impulses."""
    module.eval()
    inputs = torch.eye(18).reshape(18, 2, 3, 3)
    with torch.no_grad():
        return module(inputs)[:, :, 0, 0].T.reshape(-1, 2, 3, 3)


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.spectral_norm,
        lambda module: prune.random_unstructured(module, "weight", 0.5),
    ],
    ids=["spectral_norm", "pruned"],
)
def test_kernels_are_the_effective_ones(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Normalised or pruned weights are read as a forward pass would use them, also just
    after loading."""
    module = wrap(nn.Conv2d(2, 4, 3, bias=False))
    trained = wrap(nn.Conv2d(2, 4, 3, bias=False))
    module.load_state_dict(trained.state_dict())
    with torch.no_grad():
        kernels = filters.read_filters(module.eval()).kernels[:, :, 0]
    for expected in (module, trained):
        torch.testing.assert_close(
            kernels, seen_by_forward(expected), rtol=0, atol=1e-6
        )


MAGENTA = (255, 0, 255)


def test_a_value_that_is_not_finite_is_magenta(drawn: Draw) -> None:
    """One NaN in a colour kernel is one pixel; the rest is drawn as ever."""
    pictures = drawn("spoilt", "--scale", 1)
    clean = drawn("colour", "--scale", 1).tiles("first")
    tiles = pictures.tiles("first")
    is_magenta = (tiles == MAGENTA).all(-1)
    assert np.argwhere(is_magenta).tolist() == [[2, 0, 3]]
    assert_close(tiles[~is_magenta], clean[~is_magenta])
    assert pictures.rows["first"]["nonfinite"] == 1
    assert "first holds 1 NaN or infinite weights" in pictures.done.err


def test_an_infinity_in_a_grey_kernel_is_magenta(drawn: Draw) -> None:
    """It is one pixel, too."""
    pictures = drawn("spoilt", "--scale", 1)
    pixels = pixels_of(pictures.image("second").convert("RGB"))
    assert (pixels == MAGENTA).all(-1).sum() == 1
    assert pictures.rows["second"]["nonfinite"] == 1


@pytest.mark.parametrize("layer", ["first", "second"])
def test_statistics_are_the_weights(layer: str, drawn: Draw) -> None:
    """stats.npz has them per output channel over all inputs, and the manifest over all
    weights."""
    pictures = drawn("colour")
    weight = weights("colour")[layer].flatten(1).double().numpy()
    with np.load(pictures.out / "stats.npz") as arrays:
        table = arrays[f"{layer}|kernel|0|"]
    for column, name in enumerate(("min", "max", "mean", "std")):
        statistic = getattr(weight, name)
        assert table[:, column] == pytest.approx(statistic(axis=1), abs=1e-6)
        assert pictures.rows[layer][name] == pytest.approx(statistic(), abs=1e-6)
