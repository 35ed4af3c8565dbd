"""`featviz kernels`: pixels, orientation and channel order against torch and torchvision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DIGITS_MODEL, Outcome
from PIL import Image
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torchvision import models
from torchvision.ops import DeformConv2d
from torchvision.utils import make_grid

from featviz.drawing import filters
from featviz.drawing.kernels import AUTO_PIXELS
from featviz.errors import LayoutError
from featviz.inspection import kernels
from featviz.models.load import ModelOptions
from featviz.records import DrawOptions
from featviz.rundir import write
from featviz.rundir.read import read_json

Run = Callable[..., Outcome]

NETS = """
import torch
from torch import nn

class Named(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x

def colour():
    return Named(first=nn.Conv2d(3, 10, 5), act=nn.ReLU(), second=nn.Conv2d(10, 6, 3))

def shapes():
    return Named(
        line=nn.Conv1d(2, 5, 7), volume=nn.Conv3d(2, 6, (4, 3, 5)), film=nn.Conv3d(3, 4, (2, 3, 3)),
        up=nn.ConvTranspose2d(4, 6, 3, groups=2), depth=nn.Conv2d(8, 8, 3, groups=8),
        groups=nn.Conv2d(8, 4, 3, groups=2), point=nn.Conv2d(5, 7, 1),
    )

def four():
    return nn.Sequential(nn.Conv2d(4, 2, 3))

def lazy():
    return Named(first=nn.Conv2d(3, 2, 3), later=nn.LazyConv2d(4, 3), norm=nn.LazyBatchNorm2d())

def only_lazy():
    return nn.Sequential(nn.LazyConv2d(4, 3))

def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))

def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 4, 3)))

def half():
    return nn.Sequential(nn.Conv2d(3, 4, 3).half(), nn.Conv2d(4, 4, 3).bfloat16())

def spoilt():
    model = colour()
    with torch.no_grad():
        model.first.weight[2, 1, 0, 3] = float("nan")
        model.second.weight[1, 4, 2, 0] = float("inf")
    return model

def zero():
    model = colour()
    with torch.no_grad():
        model.first.weight[3] = 0
    return model

def wide():
    return nn.Sequential(nn.Conv2d(256, 512, 3))
"""


@pytest.fixture
def nets(tmp_path: Path) -> Callable[[str], str]:
    """The MODEL string of one of NETS."""
    path = tmp_path / "kernel_nets.py"
    path.write_text(NETS)
    return lambda name: f"{path}:{name}"


@pytest.fixture
def drawn(featviz: Run, tmp_path: Path, nets: Any) -> Callable[..., Drawn]:
    """Run the command on one of NETS."""
    counter = iter(range(100))

    def invoke(name: str, *arguments: object) -> Drawn:
        out = tmp_path / f"kernels{next(counter)}"
        done = featviz("kernels", nets(name), "--out", out, *arguments)
        assert done.code == 0, done.err
        return Drawn(out, done)

    return invoke


class Drawn:
    """What one command drew."""

    def __init__(self, out: Path, done: Outcome) -> None:
        self.out, self.done = out, done
        self.manifest = read_json(out / "manifest.json")
        self.rows = {row["layer"]: row for row in self.manifest["captures"]}

    def image(self, layer: str) -> Image.Image:
        """Its picture."""
        return Image.open(self.out / self.rows[layer]["file"])

    def tiles(self, layer: str) -> np.ndarray:
        """[tiles, h, w(, 3)], taken out of the picture by the manifest's geometry, enlarged."""
        row, image = self.rows[layer], np.asarray(self.image(layer))
        (height, width), padding = row["grid"]["tile"], row["grid"]["padding"]
        columns = row["grid"]["nrow"]
        count = len(row.get("channels", range(row["maps"]))) * row["slices"]
        found = []
        for i in range(count):
            top = padding + i // columns * (height + padding)
            left = padding + i % columns * (width + padding)
            found.append(image[top : top + height, left : left + width])
        return np.stack(found)


def weights(net: str) -> dict[str, torch.Tensor]:
    """The weights that the command draws, built independently of it."""
    scope: dict[str, Any] = {}
    exec(NETS, scope)
    torch.manual_seed(0)
    return {
        name: module.weight.detach()
        for name, module in scope[net]().named_modules()
        if hasattr(module, "weight")
    }


def levels(maps: torch.Tensor) -> np.ndarray:
    """Symmetric grey levels of maps [N, H, W], by make_grid without any grid."""
    most = float(maps.abs().max())
    flat = make_grid(maps.reshape(1, 1, -1, 1), normalize=True, value_range=(-most, most))
    return flat[0].mul(255).add(0.5).clamp(0, 255).byte().reshape(maps.shape).numpy()


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    """Within one level, and there is something to compare."""
    assert found.shape == expected.shape and found.size
    return bool((abs(found.astype(int) - expected.astype(int)) <= 1).all())


# Against make_grid --------------------------------------------------------------------------


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
        pad_value=0.6 if options else 0.0,
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
    expected = make_grid(weight, nrow=found.rows["first"]["grid"]["nrow"], **limits[mode])
    assert close(np.asarray(found.image("first")), to_bytes(expected))


def test_other_kernels_are_the_mean_over_inputs(drawn: Any) -> None:
    """Ten inputs: grey, the mean; equal to make_grid of it."""
    found = drawn("colour", "--scale", 1)
    mean = weights("colour")["second"].mean(1, keepdim=True)
    most, row = float(mean.abs().max()), found.rows["second"]
    expected = make_grid(mean, nrow=row["grid"]["nrow"], normalize=True, value_range=(-most, most))
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
    """By default 5 × 5 pixels become 35 × 35; each value a flat square."""
    small, large = drawn("colour", "--scale", 1), drawn("colour")
    assert large.rows["first"]["grid"]["tile"] == [35, 35]
    enlarged = large.tiles("first")
    assert (enlarged[:, 3::7, 3::7] == small.tiles("first")).all()
    assert (enlarged == small.tiles("first").repeat(7, 1).repeat(7, 2)).all()


def test_a_colormap_colours_grey_kernels_only(drawn: Any) -> None:
    """coolwarm: palette for the mean, true colours for three inputs."""
    found = drawn("colour", "--cmap", "coolwarm", "--scale", 1)
    assert (found.image("first").mode, found.image("second").mode) == ("RGB", "P")
    assert (found.tiles("first") == drawn("colour", "--scale", 1).tiles("first")).all()


def test_zero_is_mid_grey(drawn: Any) -> None:
    """A kernel of zeros among others: (128, 128, 128), crossed out in black."""
    tiles = drawn("zero").tiles("first")
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


# Orientation and channels -------------------------------------------------------------------


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
    drawn: Any, featviz: Run, nets: Any, tmp_path: Path, picture: Path
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


# Shapes -------------------------------------------------------------------------------------


def test_one_dimensional_kernels_are_strips(drawn: Any) -> None:
    """Seven taps: 1 × 7, enlarged to 5 × 35."""
    weight = weights("shapes")["line"]
    assert drawn("shapes").rows["line"]["grid"]["tile"] == [5, 35]
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


# Which weights ------------------------------------------------------------------------------


def effective(module: nn.Module) -> torch.Tensor:
    return filters.read_filters(module.eval()).data[:, :, 0]


def seen_by_forward(module: nn.Module) -> torch.Tensor:
    """The weight that a forward pass uses, found by its answer to impulses."""
    module.eval()
    inputs = torch.eye(18).reshape(18, 2, 3, 3)
    with torch.no_grad():
        return module(inputs)[:, :, 0, 0].T.reshape(-1, 2, 3, 3)


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        pytest.param(weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
        spectral_norm,
        lambda module: prune.random_unstructured(module, "weight", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "old weight_norm", "old spectral_norm", "pruned"],
)
def test_kernels_are_the_effective_ones(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Normalised or pruned weights as a forward pass would use them, also just after loading."""
    module, other = (wrap(nn.Conv2d(2, 4, 3, bias=False)) for _ in range(2))
    module.load_state_dict(other.state_dict())
    with torch.no_grad():
        found = effective(module)
    assert torch.allclose(found, seen_by_forward(module), atol=1e-6)
    assert torch.allclose(found, seen_by_forward(other), atol=1e-6)


def test_reading_a_model_in_training_mode_changes_nothing(drawn: Any) -> None:
    """Spectral norm iterates at each reading in training mode; kernels are those of eval mode."""
    scope: dict[str, Any] = {}
    exec(NETS, scope)
    torch.manual_seed(0)
    weight = scope["spectral"]().eval()[0].weight.detach()
    row = drawn("spectral").rows["0"]
    assert (row["min"], row["max"]) == (float(weight.min()), float(weight.max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_kernels_of_any_precision(dtype: torch.dtype) -> None:
    """Half, bfloat16 and double are drawn as float32."""
    module = nn.Conv2d(3, 4, 3).to(dtype)
    assert torch.equal(filters.read_filters(module).data[:, :, 0], module.weight.float())


def test_half_precision_models_are_drawn(drawn: Any) -> None:
    """Both layers, one in half and one in bfloat16."""
    found = drawn("half")
    assert set(found.rows) == {"0", "1"} and all(np.ptp(found.tiles(n)) > 100 for n in "01")


def test_values_that_are_not_finite_are_magenta(drawn: Any) -> None:
    """One NaN in a colour kernel and one infinity in a grey one; the rest is drawn as ever."""
    found = drawn("spoilt", "--scale", 1)
    clean = drawn("colour", "--scale", 1).tiles("first")
    first, magenta = found.tiles("first"), (255, 0, 255)
    where = (first == magenta).all(-1)
    assert np.argwhere(where).tolist() == [[2, 0, 3]]
    assert close(first[~where], clean[~where])
    second = np.asarray(found.image("second").convert("RGB"))
    assert (second == magenta).all(-1).sum() == 1
    assert [found.rows[n]["nonfinite"] for n in ("first", "second")] == [1, 1]
    assert "first holds 1 NaN or infinite weights" in found.done.err


def test_statistics_are_the_weights(drawn: Any) -> None:
    """stats.npz, per output channel over all inputs, and the manifest's overall ones."""
    found = drawn("colour")
    with np.load(found.out / "stats.npz") as arrays:
        for layer, weight in weights("colour").items():
            values = weight.flatten(1).numpy().astype(np.float64)
            expected = [values.min(1), values.max(1), values.mean(1), values.std(1)]
            table = arrays[f"{layer}|kernel|0|"]
            assert np.allclose(table[:, :4], np.stack(expected, 1), atol=1e-6)
            row = found.rows[layer]
            assert [row["min"], row["max"], row["mean"], row["std"]] == pytest.approx(
                [values.min(), values.max(), values.mean(), values.std()], abs=1e-6
            )


# What is skipped, refused and written -------------------------------------------------------


def test_lazy_convolutions_are_named(drawn: Any) -> None:
    """One that saw no input is skipped with the reason; the other is drawn."""
    found = drawn("lazy")
    assert list(found.rows) == ["first"]
    (skip,) = found.manifest["skipped"]
    assert (skip["layer"], skip["kind"]) == ("later", "kernel")
    assert skip["reason"] == "its weight has no size yet: the LazyConv2d saw no input"
    assert "skipped: later: its weight has no size yet" in found.done.err


def test_selected_layers_without_kernels_are_named(drawn: Any) -> None:
    """ReLU has none; the convolution beside it is drawn."""
    found = drawn("colour", "--layers", "first,ReLU")
    assert list(found.rows) == ["first"]
    assert found.manifest["skipped"][0]["reason"] == "ReLU has no convolution kernels"


def test_a_weight_of_complex_numbers_is_refused() -> None:
    """There is no grey for them."""
    with pytest.raises(LayoutError, match="complex numbers"):
        filters.read_filters(nn.Conv2d(3, 4, 3, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("net", "arguments", "message"),
    [
        ("dense", (), "the model has no convolutions"),
        ("only_lazy", (), "none of 1 layers has kernels to draw: 0: its weight has no size"),
        ("colour", ("--layers", "ReLU"), "none of 1 layers has kernels to draw: act: ReLU has no"),
        ("colour", ("--layers", "Conv5d"), "no layer matches --layers 'Conv5d'"),
        ("colour", ("--nrow", "0"), "--nrow 0 is below 1"),
        ("colour", ("--normalize", "hue"), "--normalize 'hue' is no normalization mode"),
        ("colour", ("--cmap", "grene"), "--cmap 'grene' is no colormap"),
    ],
)
def test_nothing_to_draw_is_a_usage_error(
    net: str, arguments: Any, message: str, featviz: Run, nets: Any, tmp_path: Path
) -> None:
    """Exit 2, one line and a hint, and no folder."""
    done = featviz("kernels", nets(net), "--out", tmp_path / "out", *arguments)
    assert done.code == 2 and done.err.startswith(f"error: {message}"), done.err
    assert not (tmp_path / "out").exists()


def test_models_need_no_input(drawn: Any) -> None:
    """Four input channels, which no image has, and no word about preprocessing."""
    assert "preprocessing" not in drawn("four").done.err


def test_a_folder_that_is_not_empty_is_refused(featviz: Run, nets: Any, tmp_path: Path) -> None:
    """Foreign files always, an earlier drawing without --overwrite, which then leaves no trace."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    refused = featviz("kernels", nets("colour"), "--out", out, "--overwrite")
    assert refused.code == 1 and "holds no run of featviz" in refused.err
    (out / "mine.txt").unlink()
    assert featviz("kernels", nets("colour"), "--out", out).code == 0
    again = featviz("kernels", nets("four"), "--out", out)
    assert again.code == 1 and "--overwrite replaces it" in again.err
    assert featviz("kernels", nets("four"), "--out", out, "--overwrite").code == 0
    assert [p.name for p in sorted(out.iterdir())] == [
        "001_0", "manifest.json", "run.json", "stats.npz"
    ]  # fmt: skip


def test_the_same_command_writes_the_same_bytes(drawn: Any) -> None:
    """Every file, in two folders."""
    first, second = (
        {p.relative_to(found.out): p.read_bytes() for p in found.out.rglob("*") if p.is_file()}
        for found in (drawn("shapes", "--all-slices"), drawn("shapes", "--all-slices"))
    )
    assert first == second and len(first) == 7 + 3


def test_run_json_says_what_ran(drawn: Any) -> None:
    """Kind, model, layers and the options that decide what is drawn; nothing of the machine."""
    found = drawn("colour", "--layers", "first", "--all-slices")
    run = read_json(found.out / "run.json")
    assert run["kind"] == "kernels" and run["layers"] == ["first"]
    assert run["options"]["all_slices"] is True and run["options"]["normalize"] == "symmetric"
    assert run["model"]["name"] == "kernel_nets.py:colour"
    assert str(found.out) not in (found.out / "run.json").read_text()


def test_the_manifest_is_written_last(
    nets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure at the second layer leaves the first picture whole and no manifest."""
    real = kernels.encode

    def fails(drawing: Any, file: Any, *rest: Any) -> None:
        real(drawing, file, *rest)
        if len(drawing.stats) == 6:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernels, "encode", fails)
    options = kernels.KernelOptions(out=tmp_path / "out")
    with pytest.raises(write.StoreError, match="No space left"):
        kernels.draw_kernels(ModelOptions(nets("colour")), options)
    left = sorted(p.relative_to(options.out).as_posix() for p in options.out.rglob("*.*"))
    assert left == ["001_first/kernel.png", "run.json"] or left == [
        "001_first", "001_first/kernel.png", "run.json"
    ]  # fmt: skip


def test_json_is_one_document(drawn: Any) -> None:
    """On stdout: the manifest's rows, and what was skipped."""
    found = drawn("lazy", "--json")
    document = json.loads(found.done.out)
    assert document["captures"] == found.manifest["captures"]
    assert document["skipped"] == found.manifest["skipped"]


def test_config_files_win_over_the_default_scale(drawn: Any, tmp_path: Path) -> None:
    """`normalize` in a TOML file replaces symmetric; the command line replaces that."""
    path = tmp_path / "c.toml"
    path.write_text('normalize = "map"\nall-slices = true\n')
    assert drawn("colour").rows["first"]["normalize"] == "symmetric"
    row = drawn("colour", "--config", path).rows["first"]
    assert (row["normalize"], row["slices"]) == ("map", 3)
    given = drawn("colour", "--config", path, "--normalize", "layer").rows["first"]
    assert given["normalize"] == "layer"


def test_every_convolution_of_resnet18(featviz: Run, tmp_path: Path) -> None:
    """Twenty pictures, the first in colour, at their places in named_modules()."""
    out = tmp_path / "out"
    assert featviz("kernels", "resnet18", "--weights", "none", "--out", out).code == 0
    found = Drawn(out, Outcome(0, "", ""))
    modules = list(models.resnet18().named_modules())
    expected = {n: i for i, (n, m) in enumerate(modules) if isinstance(m, nn.Conv2d)}
    assert {row["layer"]: row["index"] for row in found.rows.values()} == expected
    colour = [row["layer"] for row in found.rows.values() if row["layout"] == "rgb"]
    assert colour == ["conv1"] and found.rows["conv1"]["file"] == "001_conv1/kernel.png"


def test_the_shipped_model(featviz: Run, tmp_path: Path) -> None:
    """One input channel: its kernels are drawn themselves, 32 of 3 × 3."""
    out = tmp_path / "out"
    assert featviz("kernels", DIGITS_MODEL, "--out", out, "--scale", 1).code == 0
    found = Drawn(out, Outcome(0, "", ""))
    weight = torch.load(DIGITS_MODEL, weights_only=False)[0].weight.detach()
    assert close(found.tiles("0"), levels(weight[:, 0]))


def test_options_of_the_picture_are_those_of_run() -> None:
    """What `kernels` draws with is a DrawOptions, symmetric unless told otherwise."""
    assert kernels.KernelOptions().draw == DrawOptions(normalize="symmetric")
