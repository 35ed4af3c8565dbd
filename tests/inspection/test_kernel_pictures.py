"""Pictures of kernels: pixels, orientation, order and shapes, against torch and torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import DeformConv2d
from torchvision.utils import make_grid

from featviz.drawing import filters
from featviz.drawing.kernels import AUTO_PIXELS
from featviz.records.options import PAD_GREY
from featviz.rundir.read import read_json

from .drawn_kernels import NETS, Drawn, Run, close, levels, weights


@pytest.mark.parametrize("options", [(), ("--nrow", 4, "--padding", 1, "--pad-value", 0.6)])
def test_colour_kernels_are_make_grids(options: Any, drawn: Any) -> None:
    """Three inputs: RGB, one symmetric range for the layer; equal to make_grid and save_image."""
    found = drawn("colour", "--scale", 1, *options)
    row, weight = found.rows["first"], weights("colour")["first"]
    most = float(weight.abs().max())
    grid = row["grid"]
    expected = make_grid(
        weight,
        nrow=grid["nrow"],
        padding=grid["padding"],
        pad_value=0.6 if options else PAD_GREY,
        normalize=True,
        value_range=(-most, most),
    )
    image = found.image("first")
    assert image.mode == "RGB" and row["layout"] == "rgb"
    assert close(np.asarray(image), to_bytes(expected))
    assert row["range"] == pytest.approx([-most, most])
    assert not options or (grid["nrow"], grid["padding"]) == (4, 1)


def to_bytes(picture: torch.Tensor) -> np.ndarray:
    """save_image's rounding, [3, H, W] to [H, W, 3]."""
    return picture.mul(255).add(0.5).clamp(0, 255).permute(1, 2, 0).byte().numpy()


@pytest.mark.parametrize("mode", ["map", "layer", "range:-0.1,0.2", "none"])
def test_colour_kernels_under_other_scales(mode: str, drawn: Any) -> None:
    """A kernel's three colours share its limits, as make_grid's scale_each does it."""
    weight = weights("colour")["first"]
    limits: dict[str, Any] = {
        "map": {"normalize": True, "scale_each": True},
        "layer": {"normalize": True},
        "range:-0.1,0.2": {"normalize": True, "value_range": (-0.1, 0.2)},
        "none": {},
    }
    found = drawn("colour", "--scale", 1, "--normalize", mode)
    nrow = found.rows["first"]["grid"]["nrow"]
    expected = make_grid(weight, nrow=nrow, pad_value=PAD_GREY, **limits[mode])
    assert close(np.asarray(found.image("first")), to_bytes(expected))


def test_other_kernels_are_the_mean_over_inputs(drawn: Any) -> None:
    """Ten inputs: grey, the mean; equal to make_grid of it."""
    found = drawn("colour", "--scale", 1)
    mean = weights("colour")["second"].mean(1, keepdim=True)
    most, row = float(mean.abs().max()), found.rows["second"]
    told: dict[str, Any] = {"nrow": row["grid"]["nrow"], "pad_value": PAD_GREY}
    expected = make_grid(mean, **told, normalize=True, value_range=(-most, most))
    assert found.image("second").mode == "L" and row["tiles"] == "mean over 10 inputs"
    assert close(np.asarray(found.image("second")), to_bytes(expected)[..., 0])


def test_all_slices_have_a_row_for_each_output(drawn: Any) -> None:
    """Tile (o, i) is weight[o, i]: rows are outputs, columns inputs, colour kernels included."""
    found = drawn("colour", "--scale", 1, "--all-slices")
    for layer, weight in weights("colour").items():
        outputs, inputs = weight.shape[:2]
        assert found.rows[layer]["grid"]["nrow"] == found.rows[layer]["slices"] == inputs
        assert close(found.tiles(layer), levels(weight.flatten(0, 1)))
        assert found.image(layer).height == outputs * (weight.shape[2] + 2) + 2


def test_kernels_are_enlarged_by_a_whole_factor(drawn: Any) -> None:
    """The smallest by which the picture has 480 pixels on its longer side; each value a flat
    square."""
    small, large = drawn("colour", "--scale", 1), drawn("colour")
    factor, image = large.rows["first"]["grid"]["scale"], large.image("first")
    assert large.rows["first"]["grid"]["tile"] == [5 * factor, 5 * factor]
    columns = large.rows["first"]["grid"]["nrow"]
    assert max(image.size) >= 480 > max(image.size) - 5 * columns
    enlarged = small.tiles("first").repeat(factor, 1).repeat(factor, 2)
    assert (large.tiles("first") == enlarged).all()
    assert drawn("colour", "--scale", 3).rows["first"]["grid"]["tile"] == [15, 15]


def test_a_colormap_colours_grey_kernels_only(drawn: Any) -> None:
    """coolwarm: palette for the mean, true colours for three inputs."""
    found = drawn("colour", "--cmap", "coolwarm", "--scale", 1)
    assert (found.image("first").mode, found.image("second").mode) == ("RGB", "P")
    assert (found.tiles("first") == drawn("colour", "--scale", 1).tiles("first")).all()


def test_zero_is_mid_grey(drawn: Any) -> None:
    """A kernel of zeros among others: (128, 128, 128), crossed out in black."""
    tiles = drawn("zero", "--scale", 7).tiles("first")
    cross = (tiles[3] == 0).all(axis=-1)
    assert (tiles[3][~cross] == 128).all() and 60 <= cross.sum() <= 140
    assert np.diag(cross).all() and np.diag(cross[::-1]).all()
    assert not (tiles[2] == 128).all()


def test_webp_holds_the_same_pixels(drawn: Any) -> None:
    """Lossless webp of colour and grey kernels equals the PNG; jpg comes close."""
    png, webp = drawn("colour"), drawn("colour", "--format", "webp")
    jpg = drawn("colour", "--format", "jpg")
    for layer in ("first", "second"):
        expected = np.asarray(png.image(layer).convert("RGB")).astype(int)
        assert (np.asarray(webp.image(layer).convert("RGB")) == expected).all()
        assert jpg.rows[layer]["file"].endswith(".jpg")
        assert abs(np.asarray(jpg.image(layer).convert("RGB")) - expected).mean() < 6


def test_the_picture_has_the_kernels_orientation(drawn: Any) -> None:
    """Brightest and darkest pixel of each tile stand where the weight's extremes do."""
    found = drawn("colour", "--scale", 1, "--normalize", "map")
    mean = weights("colour")["second"].mean(1)
    for tile, kernel in zip(found.tiles("second"), mean, strict=True):
        assert tile.argmax() == kernel.argmax() and tile.argmin() == kernel.argmin()


IMPULSES = [
    nn.Conv2d(4, 6, 3, padding=1, bias=False),
    nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False),
    nn.Conv2d(6, 6, (3, 1), padding=(1, 0), groups=6, bias=False),
    nn.ConvTranspose2d(4, 6, 3, padding=1, bias=False),
    nn.ConvTranspose2d(4, 6, 3, padding=1, groups=2, bias=False),
    nn.Conv1d(2, 4, 3, padding=1, groups=2, bias=False),
    nn.ConvTranspose1d(4, 2, 3, padding=1, groups=2, bias=False),
    nn.Conv3d(2, 4, 3, padding=1, groups=2, bias=False),
    nn.ConvTranspose3d(4, 2, 3, padding=1, groups=2, bias=False),
]


@pytest.mark.parametrize("module", IMPULSES, ids=repr)
def test_kernels_belong_to_output_channels(module: Any) -> None:
    """An impulse at one input brings out, in output channel o, the kernel from that input to o.

    A convolution correlates, so its kernel comes out turned round; a transposed one stamps it.
    """
    found = filters.read_filters(module)
    spatial = module.weight.ndim - 2
    assert len(found.data) == module.out_channels
    per_group = module.in_channels // module.groups
    seen = 0
    for index in range(module.in_channels):
        impulse = torch.zeros(1, module.in_channels, *[3] * spatial)
        impulse[(0, index, *[1] * spatial)] = 1
        answer = module(impulse)[0].detach()
        if not found.transposed:
            answer = answer.flip(*range(1, spatial + 1))
        size = module.weight.shape[2:]
        answer = answer[(slice(None), *[slice((3 - k) // 2, (3 + k) // 2) for k in size])]
        group = index // per_group
        each = module.out_channels // module.groups
        for output in range(module.out_channels):
            kernel = torch.zeros(size)
            if output // each == group:
                kernel, seen = found.data[output, index % per_group].reshape(size), seen + 1
            assert torch.allclose(answer[output], kernel, atol=1e-6)
    assert seen == module.weight.shape[:2].numel()


def test_channels_are_those_of_the_feature_maps(
    drawn: Any, featviz: Run, kernel_nets: Any, tmp_path: Path, picture: Path
) -> None:
    """A kernel that alone is not zero has the place of the only map that is not crossed out."""
    found = drawn("colour", "--layers", "first", "--nrow", 4)
    (tmp_path / "alone.py").write_text(
        NETS + "\ndef alone():\n    model = colour()\n    keep = torch.zeros(10, 1, 1, 1)\n"
        "    keep[7] = 1\n    model.first.weight.data *= keep\n    model.first.bias.data *= 0\n"
        "    return model\n"
    )
    model = f"{tmp_path / 'alone.py'}:alone"
    for command in (["kernels", model], ["run", model, picture]):
        out = tmp_path / command[0]
        code = featviz(*command, "--layers", "first", "--nrow", 4, "--out", out, "--scale", 1).code
        assert code == 0
    row = read_json(tmp_path / "run/picture.png/manifest.json")["captures"][0]
    kernel = Drawn(tmp_path / "kernels", found.done)
    maps = Drawn.__new__(Drawn)
    maps.out, maps.rows = tmp_path / "run/picture.png", {"first": {**row, "slices": 1}}
    assert [i for i, tile in enumerate(maps.tiles("first")) if len(np.unique(tile)) > 2] == [7]
    assert [i for i, tile in enumerate(kernel.tiles("first")) if len(np.unique(tile)) > 2] == [7]
    assert kernel.rows["first"]["maps"] == row["maps"] == 10
    assert kernel.rows["first"]["index"] == row["index"]


def test_permuted_channels_permute_the_tiles() -> None:
    """A property: the picture of channel i does not depend on the others under one range."""
    module, order = nn.Conv2d(3, 6, 3), torch.tensor([3, 0, 5, 1, 4, 2])
    data = filters.to_tiles(filters.read_filters(module), False).data
    module.weight.data = module.weight.data[order]
    assert (filters.to_tiles(filters.read_filters(module), False).data == data[order]).all()


def test_max_maps_keeps_whole_channels(drawn: Any) -> None:
    """--pick spread: channels 0, 2 and 5 of six with all their slices; manifest and text say so."""
    found = drawn("colour", "--layers", "second", "--max-maps", 3, "--pick", "spread",
                  "--all-slices", "--scale", 1)  # fmt: skip
    row, weight = found.rows["second"], weights("colour")["second"]
    assert row["channels"] == [0, 2, 5] and row["maps"] == 6
    assert close(found.tiles("second"), levels(weight)[[0, 2, 5]].reshape(30, 3, 3))
    text = found.image("second").info
    assert text["Channels"] == "0,2,5" and text["Maps"] == "3 of 6 (--max-maps)"


def test_maps_that_are_left_out_do_not_shift_the_limits(drawn: Any) -> None:
    """--max-maps under --normalize map: the tiles kept are those of the whole picture."""
    whole = drawn("colour", "--normalize", "map", "--scale", 1)
    some = drawn("colour", "--normalize", "map", "--scale", 1, "--max-maps", 4, "--pick", "top")
    for layer, weight in weights("colour").items():
        top = sorted(weight.mean((1, 2, 3)).topk(4).indices.tolist())
        assert some.rows[layer]["channels"] == top
        assert (some.tiles(layer) == whole.tiles(layer)[top]).all()


def test_the_text_says_what_the_tiles_are(drawn: Any) -> None:
    """Layer, channel ids, range and kind of tile, as `run` writes them."""
    found = drawn("colour")
    text, most = found.image("first").info, found.rows["first"]["range"][1]
    assert text["Layer"] == "first (Conv2d)" and text["Channels"] == "0-9"
    assert text["Range"] == f"symmetric: {-most} to {most}"
    assert text["Tile"] == "RGB of three inputs" and text["Software"] == "featviz"


def test_one_dimensional_kernels_are_strips(drawn: Any) -> None:
    """Seven taps: 1 × 7, enlarged by one factor for both sides."""
    weight = weights("shapes")["line"]
    height, width = drawn("shapes").rows["line"]["grid"]["tile"]
    assert width == 7 * height > 7 * 5
    found = drawn("shapes", "--scale", 1)
    assert close(found.tiles("line"), levels(weight.mean(1))[:, None])


def test_time_steps_stand_side_by_side(drawn: Any) -> None:
    """Four time steps a channel, in order, in one row; 3-D colour kernels the same."""
    found, kernels_of = drawn("shapes", "--scale", 1), weights("shapes")
    row = found.rows["volume"]
    assert row["slices"] == 4 and row["grid"]["nrow"] % 4 == 0 and row["maps"] == 6
    assert close(found.tiles("volume"), levels(kernels_of["volume"].mean(1).flatten(0, 1)))
    assert found.image("film").mode == "RGB" and found.rows["film"]["slices"] == 2
    film = levels(kernels_of["film"]).transpose(0, 2, 3, 4, 1).reshape(8, 3, 3, 3)
    assert close(found.tiles("film"), film)


def test_all_slices_of_time_steps(drawn: Any) -> None:
    """A row for each output: inputs, and in each its time steps."""
    found = drawn("shapes", "--scale", 1, "--all-slices")
    weight = weights("shapes")["volume"]
    assert found.rows["volume"]["grid"]["nrow"] == 8
    assert close(found.tiles("volume"), levels(weight.flatten(0, 2)))


@pytest.mark.parametrize("layer", ["depth", "groups", "point"])
def test_grouped_and_pointwise_kernels(layer: str, drawn: Any) -> None:
    """A tile for each output channel: the mean over the inputs of its group."""
    found, weight = drawn("shapes", "--scale", 1), weights("shapes")[layer]
    assert close(found.tiles(layer), levels(weight.mean(1)))
    assert found.rows[layer]["groups"] == {"depth": 8, "groups": 2, "point": 1}[layer]


def test_transposed_kernels_are_drawn_by_output(drawn: Any) -> None:
    """[4, 3, 3, 3] in two groups: six tiles; 0-2 from inputs 0 and 1, 3-5 from 2 and 3."""
    found, weight = drawn("shapes", "--scale", 1), weights("shapes")["up"]
    expected = torch.cat([weight[:2].mean(0), weight[2:].mean(0)])
    assert close(found.tiles("up"), levels(expected))
    row = found.rows["up"]
    assert row["transposed"] and row["maps"] == 6 and row["shape"] == [4, 3, 3, 3]


def test_deformable_kernels_are_drawn() -> None:
    """torchvision's DeformConv2d has kernels like any convolution."""
    module = DeformConv2d(2, 4, 3)
    assert torch.equal(filters.read_filters(module).data[:, :, 0], module.weight)


def test_large_pictures_are_not_enlarged_beyond_reason(drawn: Any) -> None:
    """131,072 slices at 33 pixels would be 160 megapixels: the factor falls until they are 67."""
    found = drawn("wide", "--all-slices")
    row = found.rows["0"]
    image = found.image("0")
    assert row["grid"]["nrow"] == 256 and 1 < row["grid"]["scale"] < 11
    assert image.width * image.height <= AUTO_PIXELS
    larger = (row["grid"]["scale"] + 1) * 3 + 2
    assert (256 * larger + 2) * (512 * larger + 2) > AUTO_PIXELS
