"""Tokens, windows and attention weights: models whose tokens say themselves where they stand."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Outcome
from PIL import Image
from tiles import assert_drawn, levels, manifest, rows
from torch import Tensor, nn
from torchvision import models

import featviz as fv
from featviz import layout
from featviz.errors import LayoutError, UsageError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers
from featviz.layout.overrides import HintBook
from featviz.records import Hints, Layer

PATCH = 4
AS_IS: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
"""Preprocessing that leaves the values as they are."""


class Block(nn.Module):
    """Holds a module and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.same(x)


class PositionViT(nn.Module):
    """Its tokens are the means of their patch in red, green and blue, behind tokens of its own.

    With `channels_first`, the blocks see [1, D, T] instead of [1, T, D].
    """

    def __init__(self, *names: str, counts: Sequence[int] = (), channels_first: bool = False):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, 3, PATCH, PATCH, bias=False)
        weight = torch.eye(3)[:, :, None, None].repeat(1, 1, PATCH, PATCH) / PATCH**2
        self.conv_proj.weight = nn.Parameter(weight)
        for place, (name, count) in enumerate(zip(names, counts, strict=True)):
            own = -1.0 - place - torch.arange(count * 3.0).reshape(1, count, 3) / 100
            self.register_parameter(name, nn.Parameter(own))
        self.names, self.channels_first = names, channels_first
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv_proj(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([*(getattr(self, name) for name in self.names), tokens], dim=1)
        return self.blocks(tokens.transpose(1, 2) if self.channels_first else tokens)


def ramps(height: int, width: int, patch: int = PATCH) -> np.ndarray:
    """An RGB picture whose red counts rows of patches, green columns, blue both."""
    y, x = np.mgrid[0:height, 0:width] // patch
    return np.stack([3 * y + 1, 2 * x + 1, 5 * y + x], axis=-1).astype(np.uint8)


def positions(height: int, width: int) -> Tensor:
    """The maps [3, height, width] that the tokens of a ramps picture make."""
    return torch.from_numpy(ramps(height, width, 1)).permute(2, 0, 1) / 255


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save a picture of ramps of this size."""

    def save(height: int, width: int) -> Path:
        path = tmp_path / "ramps.png"
        Image.fromarray(ramps(height, width)).save(path)
        return path

    return save


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What featviz logs, also after a command line has set the logger up for itself."""
    logger = logging.getLogger("featviz")
    before, logger.propagate = logger.propagate, True
    yield caplog
    logger.propagate = before


def look(
    model: nn.Module, image: Path, layers: str, size: tuple[int, int], **options: Any
) -> tuple[Path, dict[tuple[str, int, str], dict[str, Any]]]:
    """Run a model on a picture as it is, and read the captures back."""
    out = image.parent / "out"
    result = fv.run(
        model, image, layers, out, overwrite=True, scale=1, size=size, **AS_IS, **options
    )
    assert result.failures == ()
    return out / image.name, rows(out / image.name)


PREFIXES: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]] = {
    "none": ((), (), ()),
    "class": (("class_token",), (1,), ("class_token",)),
    "distilled": (
        ("cls_token", "dist_token"),
        (1, 1),
        ("class_token", "distillation_token"),
    ),
    "registers": (("cls_token", "register_tokens"), (1, 4), ("class_token", "register_tokens")),
    "timm": (("cls_token", "reg_token"), (1, 4), ("class_token", "register_tokens")),
}


@pytest.mark.parametrize("size", [(56, 80), (56, 56), (59, 83), (32, 100)], ids=str)
@pytest.mark.parametrize("kind", PREFIXES)
def test_tokens_are_drawn_where_their_patches_lay(
    kind: str, size: tuple[int, int], saved: Callable[..., Path]
) -> None:
    """Channel 0 is the picture of rows, 1 of columns: no shift, no transposition; sides that are
    no multiples of a patch lose what is left over (trap 8)."""
    names, counts, _ = PREFIXES[kind]
    folder, found = look(PositionViT(*names, counts=counts), saved(*size), "blocks.1", size)
    row = found["blocks.1", 0, ""]
    high, wide = size[0] // PATCH, size[1] // PATCH
    assert (row["layout"], row["maps"], row["grid"]["tile"]) == ("tokens", 3, [high, wide])
    assert row["shape"] == [1, sum(counts) + high * wide, 3]
    assert_drawn(folder, row, positions(high, wide))


@pytest.mark.parametrize("kind", PREFIXES)
def test_tokens_beside_the_grid_are_vectors_of_their_own(
    kind: str, saved: Callable[..., Path]
) -> None:
    """Class, distillation and register tokens stand in pictures of their own, with their own
    numbers; registers are rows of one strip."""
    names, counts, parts = PREFIXES[kind]
    model = PositionViT(*names, counts=counts)
    folder, found = look(model, saved(56, 80), "blocks.0", (56, 80), tensors="npy")
    assert set(found) == {("blocks.0", 0, key) for key in ("", *parts)}
    stats = np.load(folder / "stats.npz")
    for name, part in zip(names, parts, strict=True):
        row, own = found["blocks.0", 0, part], getattr(model, name).detach()[0]
        assert row["file"].endswith(f"_blocks.0/output.{part}.png")
        assert (row["layout"], row["maps"]) == ("vector", 3)
        assert row["range"] == pytest.approx([float(own.min()), float(own.max())])
        assert (row["min"], row["max"]) == pytest.approx((float(own.min()), float(own.max())))
        strip = np.asarray(Image.open(folder / row["file"]))
        assert np.abs(strip.astype(int) - levels(own[None])[0].astype(int)).max() <= 1
        numbers = stats[f"blocks.0|output|0|{part}"]
        assert np.allclose(numbers[:, :2], torch.stack([own.amin(0), own.amax(0)], 1).numpy())
    grid = stats["blocks.0|output|0|"]
    assert grid[:, 0].min() >= 0  # the model's own tokens are negative: none is in the grid


def test_a_224_by_320_picture_has_14_by_20_tokens() -> None:
    """ViT-B/16's 281 tokens are a class token and a grid of 14 × 20, not 14 × 14."""
    with torch.device("meta"):
        model = models.vit_b_16()
    hints = HintBook(model, (1, 3, 224, 320)).of(list_layers(model)[5])
    assert layout.map_size([1, 281, 768], hints) == ("tokens", 14, 20)
    assert layout.map_size([1, 280, 768], hints) == ("tokens", 14, 20)
    assert layout.map_size([1, 196, 768], hints) is None


@pytest.mark.parametrize("size", [(56, 80), (32, 100)], ids=str)
def test_tokens_with_channels_first(size: tuple[int, int], saved: Callable[..., Path]) -> None:
    """[1, D, T] gives the same pictures as [1, T, D]."""
    model = PositionViT("cls_token", counts=(1,), channels_first=True)
    folder, found = look(model, saved(*size), "blocks.0", size)
    row = found["blocks.0", 0, ""]
    assert row["layout"] == "ncl"
    assert_drawn(folder, row, positions(size[0] // PATCH, size[1] // PATCH))
    assert found["blocks.0", 0, "class_token"]["max"] < 0


def test_heads_come_one_behind_the_other() -> None:
    """[1, heads, T, D], queries for example: the channels of head 0, then those of head 1."""
    maps = positions(14, 20)
    split = torch.stack([maps, maps + 1]).flatten(2).transpose(1, 2)[None]  # [1, 2, 280, 3]
    drawn = layout.to_maps(split, Hints(input_size=(224, 320), attention=True))[""]
    assert drawn.layout == "heads"
    assert torch.equal(drawn.data[:, 0], torch.cat([maps, maps + 1]))


@pytest.mark.parametrize("kind", ["class", "registers"])
def test_without_selectors_a_transformer_shows_its_patches_and_blocks(
    kind: str, saved: Callable[..., Path]
) -> None:
    """The patch embedding and the end of each block: what a first look takes."""
    names, counts, _ = PREFIXES[kind]
    model = PositionViT(*names, counts=counts)
    result = fv.run(model, saved(56, 80), None, saved(56, 80).parent / "o", size=(56, 80), **AS_IS)
    assert list(dict.fromkeys(c.layer for c in result.images[0].captures)) == [
        "conv_proj",
        "blocks.0",
        "blocks.1",
    ]


@pytest.mark.slow
def test_the_first_look_at_vit_b_16(featviz: Callable[..., Outcome]) -> None:
    """conv_proj and its twelve encoder blocks, told by `featviz layers`."""
    got = featviz("layers", "vit_b_16", "--weights", "none", "--json")
    taken = [row["name"] for row in json.loads(got.out)["layers"] if row["selected"]]
    assert taken == ["conv_proj", *(f"encoder.layers.encoder_layer_{i}" for i in range(12))]


def test_nan_tokens_are_magenta_in_their_places(
    saved: Callable[..., Path], messages: pytest.LogCaptureFixture
) -> None:
    """One NaN is one magenta pixel of the grid; the rest of its map keeps its levels."""

    class Spoilt(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[0, 1 + 3 * 20 + 7, 1] = math.nan
            return x

    model = PositionViT("cls_token", counts=(1,))
    model.blocks[1] = Spoilt()
    folder, found = look(model, saved(56, 80), "blocks.1", (56, 80), nrow=1, padding=0)
    row = found["blocks.1", 0, ""]
    pixels = np.asarray(Image.open(folder / row["file"]).convert("RGB")).reshape(3, 14, 20, 3)
    assert np.argwhere((pixels == [255, 0, 255]).all(-1)).tolist() == [[1, 3, 7]]
    want = levels(positions(14, 20)).astype(int)
    keep = np.ones((3, 14, 20), bool)
    keep[1, 3, 7] = False
    assert np.abs(pixels[..., 0].astype(int) - want)[keep].max() <= 2
    assert row["nonfinite"] == 1
    assert "blocks.1 output of ramps.png holds 1 NaN or infinite values" in messages.text


def test_max_maps_of_tokens(saved: Callable[..., Path]) -> None:
    """--max-maps leaves channels out, never tokens, and both pictures and manifest say so."""
    model = PositionViT("cls_token", counts=(1,))
    folder, found = look(model, saved(56, 80), "blocks.0", (56, 80), max_maps=2)
    row = found["blocks.0", 0, ""]
    assert (row["maps"], row["channels"]) == (3, [0, 1])
    assert_drawn(folder, row, positions(14, 20)[:2])
    assert found["blocks.0", 0, "class_token"]["channels"] == [0, 1]
    assert "2 of 3 (--max-maps)" in Image.open(folder / row["file"]).text["Maps"]


FACTORY = """
import sys
sys.path.insert(0, {tests!r})
from test_tokens import PositionViT


def make():
    return PositionViT("cls_token", "register_tokens", counts=(1, 4))


def plain(count=1):
    return PositionViT("odd_name", counts=(count,))
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    """A file with factories of position-encoding transformers."""
    path = tmp_path / "nets.py"
    path.write_text(FACTORY.format(tests=str(Path(__file__).parent)), "utf-8")
    return path


TOLD = ["--mean", "0,0,0", "--std", "1,1,1", "--size", "56x80", "--scale", "1"]


def test_dry_run_lists_what_a_run_writes(
    factory: Path, saved: Callable[..., Path], featviz: Callable[..., Outcome], tmp_path: Path
) -> None:
    """--dry-run names the pictures of class and register tokens, in the sizes that they get."""
    line = ["run", f"{factory}:make", saved(56, 80), "--layers", "blocks.0", *TOLD]
    line += ["--out", tmp_path / "o"]
    planned = json.loads(featviz(*line, "--dry-run", "--json").out)["per_image"]
    assert [f["file"] for f in planned] == [
        "output.png",
        "output.class_token.png",
        "output.register_tokens.png",
    ]
    assert featviz(*line).code == 0
    for file in planned:
        (path,) = (tmp_path / "o" / "ramps.png").glob(f"*_blocks.0/{file['file']}")
        assert Image.open(path).size == (file["width"], file["height"])


class TestTensorLayout:
    """--tensor-layout, through the command line."""

    @pytest.fixture(autouse=True)
    def line(
        self,
        factory: Path,
        saved: Callable[..., Path],
        featviz: Callable[..., Outcome],
        tmp_path: Path,
    ) -> None:
        self.image, self.call, self.factory = saved(56, 80), featviz, factory
        self.out = tmp_path / "out"

    def run(self, *told: str, layers: str = "blocks.*.same", make: str = "plain") -> Outcome:
        options = [part for text in told for part in ("--tensor-layout", text)]
        return self.call(
            "run", f"{self.factory}:{make}", self.image, "--layers", layers, *TOLD, *options,
            "--out", self.out, "--overwrite",
        )  # fmt: skip

    def captures(self) -> dict[tuple[str, int, str], dict[str, Any]]:
        return rows(self.out / "ramps.png")

    def test_without_it_one_token_of_an_odd_name_is_an_extra_one(self) -> None:
        """A token too many, of a parameter with no known name, is told apart all the same."""
        assert self.run().code == 0
        found = self.captures()
        assert found["blocks.0.same", 0, ""]["layout"] == "tokens"
        assert_drawn(self.out / "ramps.png", found["blocks.0.same", 0, ""], positions(14, 20))
        assert ("blocks.0.same", 0, "extra_token") in found

    def test_a_grid_with_extra_tokens(self) -> None:
        """tokens:14x20+1 is taken at its word; a transposed 20x14 draws another picture."""
        assert self.run("tokens:14x20+1").code == 0
        row = self.captures()["blocks.0.same", 0, ""]
        assert (row["layout"], row["grid"]["tile"]) == ("tokens", [14, 20])
        assert_drawn(self.out / "ramps.png", row, positions(14, 20))
        assert self.run("tokens:20x14+1").code == 0
        row = self.captures()["blocks.0.same", 0, ""]
        assert row["grid"]["tile"] == [20, 14]
        assert_drawn(self.out / "ramps.png", row, positions(14, 20).reshape(3, 20, 14))

    def test_selectors_say_for_which_layers(self) -> None:
        """SELECTORS=LAYOUT is for these layers only; of several the last that matches counts."""
        assert self.run("tokens:20x14+1", "blocks.1.*=tokens:14x20+1").code == 0
        found = self.captures()
        assert found["blocks.0.same", 0, ""]["grid"]["tile"] == [20, 14]
        assert found["blocks.1.same", 0, ""]["grid"]["tile"] == [14, 20]
        assert self.run("Identity,!blocks.0.*=tokens:20x14+1").code == 0
        found = self.captures()
        assert found["blocks.0.same", 0, ""]["grid"]["tile"] == [14, 20]
        assert found["blocks.1.same", 0, ""]["grid"]["tile"] == [20, 14]

    def test_a_grid_that_does_not_fit_is_skipped_with_the_reason(self) -> None:
        """Nothing is drawn by a told layout that the tensor cannot have."""
        assert self.run("tokens:10x10").code == 0
        (first, _) = manifest(self.out / "ramps.png")["skipped"]
        assert first["reason"] == (
            "shape [1, 281, 3]: 281 tokens are no grid of --tensor-layout tokens:10x10"
        )
        assert self.run("nchw").code == 0
        (first, _) = manifest(self.out / "ramps.png")["skipped"]
        assert first["reason"] == "shape [1, 281, 3] cannot be read as nchw (--tensor-layout)"

    def test_a_map_can_be_told_to_be_channels_last(self) -> None:
        """nhwc for a convolution's [1, 3, 14, 20]: twenty maps of 3 × 14."""
        assert self.run("Conv2d=nhwc", layers="conv_proj,blocks.0.same").code == 0
        found = self.captures()
        row = found["conv_proj", 0, ""]
        assert (row["layout"], row["maps"], row["grid"]["tile"]) == ("nhwc", 20, [3, 14])
        assert_drawn(self.out / "ramps.png", row, positions(14, 20).permute(2, 0, 1))
        assert found["blocks.0.same", 0, ""]["layout"] == "tokens"

    def test_a_vector_of_many_rows(self) -> None:
        """vector draws [1, T, D] as it stands: D columns, T rows."""
        assert self.run("vector").code == 0
        row = self.captures()["blocks.0.same", 0, ""]
        assert (row["layout"], row["maps"], row["grid"]["tile"]) == ("vector", 3, [281, 1])

    @pytest.mark.parametrize(
        ("told", "message"),
        [
            ("nwhc", "'nwhc' is no layout"),
            ("Conv2d=", "'' is no layout"),
            ("nhwc:14x20", "'nhwc:14x20' is no layout"),
            ("tokens:", "'' is no grid"),
            ("tokens:14", "'14' is no grid"),
            ("tokens:0x20", "'0x20' is no grid"),
            ("tokens:14x20-1", "'14x20-1' is no grid"),
            ("=nhwc", "the list '' holds no selector"),
            ("re:(=nhwc", "is no regular expression"),
            ("Conv2d#0=nhwc", "takes no index"),
            ("Conv2d#::2=nhwc", "takes no index"),
        ],
    )
    def test_bad_values_are_usage_errors(self, told: str, message: str) -> None:
        """Exit 2 before any work, one line that names the value, and a hint what there is."""
        got = self.run(told)
        assert got.code == 2
        first, second = got.err.splitlines()
        assert first.startswith(f"error: --tensor-layout {told!r}: ") and message in first
        assert second.startswith("hint: ")
        assert not self.out.exists()


def test_grid_takes_a_told_layout() -> None:
    """featviz.grid draws tokens where their grid is said, and says why not where it is not."""
    maps = positions(14, 20)
    tokens = torch.cat([torch.zeros(1, 3), maps.flatten(1).T])[None]
    got = fv.grid(tokens, tensor_layout="tokens:14x20+1", scale=1, padding=0, nrow=1)
    assert np.abs(np.asarray(got).reshape(3, 14, 20).astype(int) - levels(maps)).max() <= 1
    got = fv.grid(maps.permute(1, 2, 0)[None], tensor_layout="nhwc", scale=1, padding=0, nrow=1)
    assert np.abs(np.asarray(got).reshape(3, 14, 20).astype(int) - levels(maps)).max() <= 1
    with pytest.raises(LayoutError, match=r"shape \[1, 281, 3\].*--tensor-layout"):
        fv.grid(tokens)
    with pytest.raises(LayoutError, match="281 tokens are no grid"):
        fv.grid(tokens, tensor_layout="tokens:14x20")
    with pytest.raises(UsageError, match="'bogus' is no layout"):
        fv.grid(tokens, tensor_layout="bogus")


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
    kind: str, size: tuple[int, int], saved: Callable[..., Path]
) -> None:
    """The picture of every layer between partition and departition is that of the coordinates;
    for a grid before the axes are swapped, after that, and after they are swapped back."""
    sides = (size[0] * PATCH, size[1] * PATCH)
    model = Cut(window_layer_of_torchvision(kind, size))
    folder, found = look(model, saved(*sides), "*", sides)
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


def raw(folder: Path, row: dict[str, Any]) -> Tensor:
    """The tensor that --tensors npy kept."""
    return torch.from_numpy(np.load(folder / row["tensor"]))


def test_windows_of_timms_swin_are_put_and_rolled_back(saved: Callable[..., Path]) -> None:
    """In plain and in shifted blocks the picture is timm's own window_reverse and roll (trap 8)."""
    model = swin()
    from timm.models.swin_transformer import window_reverse

    layers = "WindowAttention,*.attn.qkv,*.attn.proj,SwinTransformerBlock,*.norm1"
    folder, found = look(model, saved(112, 168), layers, (112, 168), tensors="npy")
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
    saved: Callable[..., Path],
) -> None:
    """With linears that copy, what qkv shows is what goes into the block: no shift is left over."""
    model = swin()
    keep_coordinates(model.layers[0])
    folder, found = look(model, saved(112, 168), "layers.0.blocks.1.*", (112, 168), tensors="npy")
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


def small_vit() -> nn.Module:
    """torchvision's own ViT: 4 × 4 patches, 2 heads, 2 layers."""
    torch.manual_seed(0)
    model: nn.Module = models.VisionTransformer(32, 8, 2, 2, 16, 32)
    nn.init.normal_(model.heads.head.weight)
    return model.eval()


def by_hand(block: nn.Module, tokens: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt d) of an encoder block whose normalised input is [1, T, D]."""
    attention = block.self_attention
    q, k, _ = nn.functional.linear(tokens, attention.in_proj_weight, attention.in_proj_bias).chunk(
        3, dim=-1
    )
    heads, side = attention.num_heads, attention.head_dim
    q, k = (part.reshape(-1, heads, side).transpose(0, 1).double() for part in (q[0], k[0]))
    scores = torch.stack([q[h] @ k[h].T / math.sqrt(side) for h in range(heads)])
    exponents = scores.exp()
    return exponents / exponents.sum(-1, keepdim=True)


@pytest.mark.parametrize("fast", [True, False])
def test_attention_weights_are_softmax_of_queries_and_keys(
    fast: bool, saved: Callable[..., Path]
) -> None:
    """A selected attention gives a map for each head whose rows sum to 1; torch's setting of the
    fast path is as before (trap 6)."""
    model, before = small_vit(), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        folder, found = look(
            model, saved(32, 32), "MultiheadAttention#0,*_0.ln_1", (32, 32), tensors="npy"
        )
        assert torch.backends.mha.get_fastpath_enabled() is fast
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    name = "encoder.layers.encoder_layer_0"
    row = found[f"{name}.self_attention", 0, "1"]
    weights = raw(folder, row)
    tokens = raw(folder, found[f"{name}.ln_1", 0, ""])
    want = by_hand(model.get_submodule(name), tokens)
    assert (row["layout"], row["maps"], row["shape"]) == ("attention", 2, [1, 2, 17, 17])
    assert torch.allclose(weights[0].double(), want, atol=1e-6)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 2, 17), atol=1e-5)
    assert_drawn(folder, row, want)
    assert found[f"{name}.self_attention", 0, "0"]["layout"] == "tokens"
    assert (f"{name}.self_attention", 0, "0.class_token") in found
    assert manifest(folder)["skipped"] == []


@pytest.mark.slow
def test_asking_for_weights_changes_the_output_by_rounding_only() -> None:
    """With the attentions hooked the model gives what it gives alone, within 1e-5."""
    model, image = small_vit(), torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        plain = model(image)
        with fv.capture(model, "MultiheadAttention") as maps:
            hooked = model(image)
        again = model(image)
    assert len(maps) == 4 and bool(plain.abs().max() > 1e-2)
    assert torch.allclose(plain, hooked, atol=1e-5)
    assert torch.equal(plain, again)


def test_averaged_attention_weights_are_one_map() -> None:
    """[1, T, T], averaged over heads, is an attention as well."""
    weights = torch.rand(1, 17, 17).softmax(-1)
    drawn = layout.to_maps(weights, Hints(input_size=(32, 32), attention=True))[""]
    assert (drawn.layout, drawn.data.shape) == ("attention", (1, 1, 17, 17))
    assert torch.equal(drawn.data[0], weights)


def test_need_weights_is_put_back_when_the_run_is_over(saved: Callable[..., Path]) -> None:
    """After a run no hook asks for weights any more."""
    model = small_vit()
    look(model, saved(32, 32), "MultiheadAttention", (32, 32))
    attention = model.encoder.layers.encoder_layer_0.self_attention
    assert not attention._forward_pre_hooks and not attention._forward_hooks
    with in_eval_mode(model):
        x = torch.randn(1, 5, 16)
        assert attention(x, x, x, need_weights=False)[1] is None


@pytest.mark.slow
def test_attention_weights_of_vit_b_16(tmp_path: Path) -> None:
    """The same for the first attention of vit_b_16, through the command line's selector."""
    torch.manual_seed(0)
    model = models.vit_b_16().eval()
    image = tmp_path / "ramps.png"
    Image.fromarray(ramps(224, 224)).save(image)
    layers = "MultiheadAttention#0,*_0.ln_1"
    folder, found = look(model, image, layers, (224, 224), tensors="npy")
    name = "encoder.layers.encoder_layer_0"
    weights = raw(folder, found[f"{name}.self_attention", 0, "1"])
    tokens = raw(folder, found[f"{name}.ln_1", 0, ""])
    assert weights.shape == (1, 12, 197, 197)
    want = by_hand(model.get_submodule(name), tokens)
    assert torch.allclose(weights[0].double(), want, atol=1e-6)


def test_the_patches_own_grid_wins_where_both_axes_make_one() -> None:
    """[1, 256, 196] behind patches of 16 is channels first, [1, 196, 256] is not."""
    hints = Hints(input_size=(224, 224), patch=(16, 16))
    assert layout.map_size([1, 256, 196], hints) == ("ncl", 14, 14)
    assert layout.map_size([1, 196, 256], hints) == ("tokens", 14, 14)


def test_hints_are_the_same_under_every_name_of_a_shared_block() -> None:
    """A block that is used twice is told to be windowed by either name."""
    layer = window_layer_of_torchvision("window", (28, 28))
    model = Cut(layer)
    model.again = layer  # type: ignore[assignment]
    book = HintBook(model, (1, 3, 112, 112))
    for name in ("layer", "again"):
        hints = book.of(Layer(0, f"{name}.attn_layer.0", "LayerNorm"))
        assert layout.map_size([1, 16, 49, 4], hints) == ("windows", 28, 28)
