"""Pictures of kernels: pixels, orientation, order and shapes, against torch and
torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torchvision.utils import make_grid

from featviz.drawing import kernels as filters
from featviz.options import PAD_GREY

from .drawn_kernels import close, levels, weights


def to_bytes(picture: torch.Tensor) -> np.ndarray:
    """save_image's rounding, [3, H, W] to [H, W, 3]."""
    return picture.mul(255).add(0.5).clamp(0, 255).permute(1, 2, 0).byte().numpy()


SCALES: dict[str, dict[str, Any]] = {
    "symmetric": {"normalize": True},
    "map": {"normalize": True, "scale_each": True},
}
"""What make_grid is told to do the same."""


WISHES = ("--nrow", 4, "--padding", 1, "--pad-value", 0.6)


@pytest.mark.parametrize(("mode", "options"), [("symmetric", ()), ("map", WISHES)])
def test_colour_kernels_are_make_grids(mode: str, options: Any, drawn: Any) -> None:
    """Three inputs: RGB, equal to make_grid and save_image; a kernel's three colours
    share its limits, and by default all kernels one range with zero in its middle."""
    scale = () if mode == "symmetric" else ("--normalize", mode)
    pictures = drawn("colour", "--scale", 1, *options, *scale)
    row = pictures.rows["first"]
    weight = weights("colour")["first"]
    largest = float(weight.abs().max())
    grid = row["grid"]
    image = pictures.image("first")
    limits = {"value_range": (-largest, largest)} if mode == "symmetric" else {}
    plan = {"nrow": grid["nrow"], "padding": grid["padding"]}
    pad = 0.6 if options else PAD_GREY
    expected = make_grid(weight, **plan, pad_value=pad, **SCALES[mode], **limits)
    assert image.mode == "RGB"
    assert row["layout"] == "rgb"
    assert close(np.asarray(image), to_bytes(expected))
    assert mode != "symmetric" or row["range"] == pytest.approx([-largest, largest])
    assert not options or (grid["nrow"], grid["padding"]) == (4, 1)


def test_other_kernels_are_the_mean_over_inputs(drawn: Any) -> None:
    """Ten inputs: grey, the mean; equal to make_grid of it."""
    pictures = drawn("colour", "--scale", 1)
    mean = weights("colour")["second"].mean(1, keepdim=True)
    largest = float(mean.abs().max())
    row = pictures.rows["second"]
    grid_options: dict[str, Any] = {"nrow": row["grid"]["nrow"], "pad_value": PAD_GREY}
    expected = make_grid(
        mean, **grid_options, normalize=True, value_range=(-largest, largest)
    )
    assert pictures.image("second").mode == "L"
    assert row["tiles"] == "mean over 10 inputs"
    assert close(np.asarray(pictures.image("second")), to_bytes(expected)[..., 0])


def test_all_slices_have_a_row_for_each_output(drawn: Any) -> None:
    """Tile (o, i) is weight[o, i]: rows are outputs, columns inputs, colour kernels
    included."""
    found = drawn("colour", "--scale", 1, "--all-slices")
    for layer, weight in weights("colour").items():
        outputs, inputs = weight.shape[:2]
        assert (
            found.rows[layer]["grid"]["nrow"] == found.rows[layer]["slices"] == inputs
        )
        assert close(found.tiles(layer), levels(weight.flatten(0, 1)))
        assert found.image(layer).height == outputs * (weight.shape[2] + 2) + 2


def test_zero_is_mid_grey(drawn: Any) -> None:
    """A kernel of zeros among others: (128, 128, 128), crossed out in black."""
    tiles = drawn("zero", "--scale", 7).tiles("first")
    cross = (tiles[3] == 0).all(axis=-1)
    assert (tiles[3][~cross] == 128).all()
    assert 60 <= cross.sum() <= 140
    assert np.diag(cross).all()
    assert np.diag(cross[::-1]).all()
    assert not (tiles[2] == 128).all()


IMPULSES = [
    nn.Conv2d(4, 6, 3, padding=1, bias=False),
    nn.ConvTranspose3d(4, 2, 3, padding=1, groups=2, bias=False),
]


@pytest.mark.parametrize("module", IMPULSES, ids=repr)
def test_kernels_belong_to_output_channels(module: Any) -> None:
    """An impulse at one input brings out, in output channel o, the kernel from that
    input to o.

    A convolution correlates, so its kernel comes out turned round; a transposed one
    stamps it."""
    read_kernels = filters.read_filters(module)
    spatial = module.weight.ndim - 2
    assert len(read_kernels[0]) == module.out_channels
    per_group = module.in_channels // module.groups
    seen = 0
    for index in range(module.in_channels):
        impulse = torch.zeros(1, module.in_channels, *[3] * spatial)
        impulse[(0, index, *[1] * spatial)] = 1
        answer = module(impulse)[0].detach()
        if not read_kernels[3]:
            answer = answer.flip(*range(1, spatial + 1))
        size = module.weight.shape[2:]
        answer = answer[
            (slice(None), *[slice((3 - k) // 2, (3 + k) // 2) for k in size])
        ]
        group = index // per_group
        group_size = module.out_channels // module.groups
        for output in range(module.out_channels):
            kernel = torch.zeros(size)
            if output // group_size == group:
                kernel = read_kernels[0][output, index % per_group].reshape(size)
                seen = seen + 1
            assert torch.allclose(answer[output], kernel, atol=1e-6)
    assert seen == module.weight.shape[:2].numel()


def test_chosen_channels_are_whole_channels(drawn: Any) -> None:
    """spread:3 takes channels 0, 2 and 5 of six with all their slices; manifest and
    text say so."""
    options = "--layers second --channels spread:3 --all-slices --scale 1"
    pictures = drawn("colour", *options.split())
    row = pictures.rows["second"]
    assert row["channels"] == [0, 2, 5]
    assert row["maps"] == 6
    shown = levels(weights("colour")["second"])[[0, 2, 5]]
    assert close(pictures.tiles("second"), shown.reshape(30, 3, 3))
    text = pictures.image("second").info
    assert text["Channels"] == "0,2,5"
    assert text["Maps"] == "3 of 6 (--channels)"
    assert text["Layer"] == "second (Conv2d)"
    assert text["Range"].startswith("symmetric: -")


def test_time_steps_stand_side_by_side(drawn: Any) -> None:
    """Four time steps a channel, in order, in one row; 3-D colour kernels the same.
    With all slices an output has a row: its inputs, and in each its time steps."""
    pictures = drawn("shapes", "--scale", 1)
    kernels_of = weights("shapes")
    row = pictures.rows["volume"]
    assert row["slices"] == 4
    assert row["grid"]["nrow"] % 4 == 0
    assert row["maps"] == 6
    assert close(
        pictures.tiles("volume"), levels(kernels_of["volume"].mean(1).flatten(0, 1))
    )
    assert pictures.image("film").mode == "RGB"
    assert pictures.rows["film"]["slices"] == 2
    film = levels(kernels_of["film"]).transpose(0, 2, 3, 4, 1).reshape(8, 3, 3, 3)
    assert close(pictures.tiles("film"), film)
    every = drawn("shapes", "--scale", 1, "--all-slices")
    assert every.rows["volume"]["grid"]["nrow"] == 8
    assert close(every.tiles("volume"), levels(kernels_of["volume"].flatten(0, 2)))


@pytest.mark.parametrize("layer", ["line", "groups", "up"])
def test_a_tile_is_the_mean_over_the_inputs_of_its_group(
    layer: str, drawn: Any
) -> None:
    """One-dimensional kernels are strips; transposed ones, [4, 3, 3, 3] in two groups,
    are drawn by output: tiles 0-2 from inputs 0 and 1, 3-5 from 2 and 3."""
    pictures = drawn("shapes", "--scale", 1)
    weight = weights("shapes")[layer]
    row = pictures.rows[layer]
    means = weight.mean(1)
    if layer == "line":
        height, width = drawn("shapes").rows["line"]["grid"]["tile"]
        assert width == 7 * height > 7 * 5
    if layer == "up":
        means = torch.cat([weight[:2].mean(0), weight[2:].mean(0)])
        assert row["transposed"]
        assert row["maps"] == 6
        assert row["shape"] == [4, 3, 3, 3]
    expected = levels(means)[:, None] if layer == "line" else levels(means)
    assert close(pictures.tiles(layer), expected)
    groups = {"line": 1, "groups": 2, "up": 2}
    assert row["groups"] == groups[layer]


def effective(module: nn.Module) -> torch.Tensor:
    return filters.read_filters(module.eval())[0][:, :, 0]


def seen_by_forward(module: nn.Module) -> torch.Tensor:
    """The weight that a forward pass uses, found by its answer to impulses."""
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
    """Normalised or pruned weights as a forward pass would use them, also just after
    loading."""
    module, other = (wrap(nn.Conv2d(2, 4, 3, bias=False)) for _ in range(2))
    module.load_state_dict(other.state_dict())
    with torch.no_grad():
        found = effective(module)
    assert torch.allclose(found, seen_by_forward(module), atol=1e-6)
    assert torch.allclose(found, seen_by_forward(other), atol=1e-6)


def test_values_that_are_not_finite_are_magenta(drawn: Any) -> None:
    """One NaN in a colour kernel and one infinity in a grey one; the rest is drawn as
    ever."""
    pictures = drawn("spoilt", "--scale", 1)
    clean = drawn("colour", "--scale", 1).tiles("first")
    first = pictures.tiles("first")
    magenta = (255, 0, 255)
    where = (first == magenta).all(-1)
    assert np.argwhere(where).tolist() == [[2, 0, 3]]
    assert close(first[~where], clean[~where])
    second = np.asarray(pictures.image("second").convert("RGB"))
    assert (second == magenta).all(-1).sum() == 1
    assert [pictures.rows[n]["nonfinite"] for n in ("first", "second")] == [1, 1]
    assert "first holds 1 NaN or infinite weights" in pictures.done.err


def test_statistics_are_the_weights(drawn: Any) -> None:
    """stats.npz, per output channel over all inputs, and the manifest's overall ones."""
    pictures = drawn("colour")
    with np.load(pictures.out / "stats.npz") as arrays:
        for layer, weight in weights("colour").items():
            values = weight.flatten(1).numpy().astype(np.float64)
            expected = [values.min(1), values.max(1), values.mean(1), values.std(1)]
            table = arrays[f"{layer}|kernel|0|"]
            assert np.allclose(table[:, :4], np.stack(expected, 1), atol=1e-6)
            row = pictures.rows[layer]
            assert [row["min"], row["max"], row["mean"], row["std"]] == pytest.approx(
                [values.min(), values.max(), values.mean(), values.std()], abs=1e-6
            )
