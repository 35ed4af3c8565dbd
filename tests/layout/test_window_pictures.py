"""Windows of torchvision's and timm's blocks, drawn where they were cut out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from ramps import PATCH, look, positions, ramps, save
from tiles import assert_drawn, raw
from torch import Tensor, nn
from torchvision import models

from featviz import layout
from featviz.layout.overrides import HintBook
from featviz.records import Layer


class Cut(nn.Module):
    """Coordinates of patches [1, 4, H, W], shown to a layer that cuts windows."""

    def __init__(self, layer: nn.Module, channels_last: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, PATCH, PATCH, bias=False)
        colours = torch.eye(3)[[0, 1, 2, 0]][:, :, None, None]
        self.stem.weight = nn.Parameter(colours.repeat(1, 1, PATCH, PATCH) / PATCH**2)
        self.layer, self.channels_last = layer, channels_last

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.layer(x.permute(0, 2, 3, 1) if self.channels_last else x)


def coordinates(height: int, width: int) -> Tensor:
    """What Cut's stem gives: the maps [4, height, width]."""
    return positions(height, width)[[0, 1, 2, 0]].float()


def keep_coordinates(module: nn.Module) -> None:
    """Linears copy their input (the first of them, and as often as there is room), norms do
    nothing: what a layer gives is then where it stands."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            copies = torch.eye(part.in_features).repeat(
                -(-part.out_features // part.in_features), 1
            )
            part.weight = nn.Parameter(copies[: part.out_features])
            part.bias = None if part.bias is None else nn.Parameter(part.bias * 0)
        elif isinstance(part, nn.LayerNorm):
            part.forward = lambda x: x * 1  # type: ignore[method-assign]


def window_layer_of_torchvision(kind: str, size: tuple[int, int]) -> nn.Module:
    """MaxViT's attention over windows of 7, or over grids of 7, that adds nothing."""
    layer = models.maxvit.PartitionAttentionLayer(
        4, 2, 7, kind, size, 2, nn.GELU, nn.LayerNorm, 0.0, 0.0, 0.0
    )
    keep_coordinates(layer)
    for last in (layer.attn_layer[1].merge, layer.mlp_layer[3]):
        last.weight = nn.Parameter(last.weight * 0)
    return layer


@pytest.mark.parametrize(
    ("kind", "size"), [("window", (28, 28)), ("window", (28, 42)), ("grid", (28, 28))], ids=str
)
def test_windows_of_torchvisions_maxvit_lie_where_they_were_cut(
    kind: str, size: tuple[int, int], tmp_path: Path
) -> None:
    """The picture of every layer between partition and departition is that of the coordinates;
    for a grid before the axes are swapped, after that, and after they are swapped back."""
    sides = (size[0] * PATCH, size[1] * PATCH)
    model = Cut(window_layer_of_torchvision(kind, size))
    folder, found = look(model, save(tmp_path, *sides), "*", sides)
    seen = {name: row for (name, _, key), row in found.items() if not key}
    inside = ["partition_op", "partition_swap", "attn_layer.0", "mlp_layer.0", "mlp_layer.1"]
    inside += ["attn_layer.1.to_qkv", "departition_swap"]
    for name in inside:
        row = seen[f"layer.{name}"]
        assert row["layout"] == "windows" and row["grid"]["tile"] == list(size), name
        times = row["maps"] // 4
        assert_drawn(folder, row, coordinates(*size).repeat(times, 1, 1))
    assert seen["layer.departition_op"]["layout"] == "nchw"
    assert_drawn(folder, seen["layer.departition_op"], coordinates(*size))


def swin() -> nn.Module:
    """timm's Swin, small: maps of 28 × 42 and 14 × 21, windows of 7, every second block shifted."""
    swin_transformer = pytest.importorskip("timm.models.swin_transformer")
    torch.manual_seed(0)
    model: nn.Module = swin_transformer.SwinTransformer(
        img_size=(112, 168), window_size=7, embed_dim=8, depths=(2, 2), num_heads=(2, 2)
    )
    return model.eval()


def test_windows_of_timms_swin_are_put_and_rolled_back(tmp_path: Path) -> None:
    """In plain and in shifted blocks the picture is timm's own window_reverse and roll."""
    model = swin()
    from timm.models.swin_transformer import window_reverse

    layers = "WindowAttention,*.attn.qkv,*.attn.proj,SwinTransformerBlock,*.norm1"
    folder, found = look(model, save(tmp_path, 112, 168), layers, (112, 168), tensors="npy")
    shifted = 0
    for (name, _, _), row in found.items():
        tensor = raw(folder, row)
        if ".attn" not in name:
            assert (row["layout"], tensor.ndim) == ("nhwc", 4)
            assert_drawn(folder, row, tensor[0].permute(2, 0, 1))
            continue
        block = model.get_submodule(name.partition(".attn")[0])
        high, wide = block.input_resolution
        back = window_reverse(tensor.view(-1, 7, 7, tensor.shape[-1]), (7, 7), high, wide)
        back = torch.roll(back, block.shift_size, (1, 2))
        shifted += any(block.shift_size)
        assert row["layout"] == "windows"
        assert_drawn(folder, row, back[0].permute(2, 0, 1))
    assert (len(found), shifted) == (4 * 5, 2 * 3)


def test_the_queries_of_a_shifted_block_stand_where_its_input_does(
    tmp_path: Path,
) -> None:
    """With linears that copy, what qkv shows is what goes into the block: no shift is left over."""
    model = swin()
    keep_coordinates(model.layers[0])
    folder, found = look(
        model, save(tmp_path, 112, 168), "layers.0.blocks.1.*", (112, 168), tensors="npy"
    )
    into = raw(folder, found["layers.0.blocks.1.norm1", 0, ""])[0].permute(2, 0, 1)
    assert_drawn(folder, found["layers.0.blocks.1.attn.qkv", 0, ""], into.repeat(3, 1, 1))


@pytest.mark.slow
def test_windows_and_grids_of_timms_maxvit(tmp_path: Path) -> None:
    """Blocks and grids are timm's own window_reverse and grid_reverse, and qkv that copies shows
    the map that goes into it."""
    timm = pytest.importorskip("timm")
    from timm.models.maxxvit import grid_reverse, window_reverse

    model = timm.create_model("maxvit_tiny_tf_224").eval()
    for part in model.modules():
        if type(part).__name__ == "AttentionCl":
            keep_coordinates(part)
    image = tmp_path / "ramps.png"
    Image.fromarray(ramps(224, 224)).save(image)
    layers = "AttentionCl@stages.?.blocks.0.*,stages.?.blocks.0.*.qkv,stages.?.blocks.0.*.norm1"
    folder, found = look(model, image, layers, (224, 224), tensors="npy")
    kinds = {"attn_block": window_reverse, "attn_grid": grid_reverse}
    for stage, side in enumerate((56, 28, 14)):
        for kind, reverse in kinds.items():
            name = f"stages.{stage}.blocks.0.{kind}"
            row, into = found[f"{name}.attn.qkv", 0, ""], raw(folder, found[f"{name}.norm1", 0, ""])
            assert_drawn(folder, row, into[0].permute(2, 0, 1).repeat(3, 1, 1))
            row = found[f"{name}.attn", 0, ""]
            assert row["layout"] == "windows"
            maps = reverse(raw(folder, row), [7, 7], [side, side])
            assert_drawn(folder, row, maps[0].permute(2, 0, 1))
    assert found["stages.3.blocks.0.attn_block.attn", 0, ""]["grid"]["tile"] == [7, 7]


@pytest.mark.slow
def test_windows_of_the_whole_maxvit_t(tmp_path: Path) -> None:
    """In every block of maxvit_t, what is behind partition_op and swap is drawn as torchvision's
    own departition puts it back."""
    model = models.maxvit_t().eval()
    image = tmp_path / "ramps.png"
    Image.fromarray(ramps(224, 224)).save(image)
    layers = "LayerNorm@*_attention.mlp_layer.0,*.partition_swap"
    folder, found = look(model, image, layers, (224, 224), tensors="npy", max_maps=8)
    drawn = 0
    for (name, _, _), row in found.items():
        tensor = raw(folder, row)
        layer = model.get_submodule(name.partition("_attention")[0] + "_attention")
        gh, gw = (side // layer.p for side in layer.grid_size)
        maps = layer.departition_op(layer.departition_swap(tensor), layer.p, gh, gw)[0, :8]
        varied = maps.flatten(1).amax(1) > maps.flatten(1).amin(1)
        if row["grid"]["tile"] != [7, 7] and bool(varied.all()):
            assert row["layout"] == "windows"
            assert_drawn(folder, row, maps)
            drawn += 1
    assert drawn >= 30


@pytest.mark.slow
def test_swin_t_of_torchvision_is_channels_last(tmp_path: Path) -> None:
    """Every stage of swin_t is [1, H, W, C], on a picture that is not square."""
    model = models.swin_t().eval()
    image = tmp_path / "ramps.png"
    Image.fromarray(ramps(224, 320)).save(image)
    folder, found = look(model, image, "features.*", (224, 320), tensors="npy", max_maps=8)
    stages = {n: r for (n, _, _), r in found.items() if n.count(".") == 1 and n != "features.0.0"}
    sizes = []
    for row in stages.values():
        assert row["layout"] == "nhwc"
        assert_drawn(folder, row, raw(folder, row)[0].permute(2, 0, 1)[:8])
        sizes.append(row["grid"]["tile"])
    assert [56, 80] in sizes and [7, 10] in sizes


def test_hints_are_the_same_under_every_name_of_a_shared_block() -> None:
    """A block that is used twice is told to be windowed by either name."""
    layer = window_layer_of_torchvision("window", (28, 28))
    model = Cut(layer)
    model.again = layer  # type: ignore[assignment]
    book = HintBook(model, (1, 3, 112, 112))
    for name in ("layer", "again"):
        hints = book.of(Layer(0, f"{name}.attn_layer.0", "LayerNorm"))
        assert layout.map_size([1, 16, 49, 4], hints) == ("windows", 28, 28)
