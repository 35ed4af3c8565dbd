"""Windows and reordered tokens are put back where the model itself puts them.

Each model holds a layer that sees a map cut into pieces and one that sees the map
whole, with the same values: their pictures must be the same, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from followed import followed
from numpy.testing import assert_array_equal
from timm import create_model
from timm.models.hiera import Hiera
from timm.models.swin_transformer import SwinTransformer
from torch import nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.models.maxvit import MaxVit

from featviz import layout
from featviz.layout.tracing.hints import read_hints
from featviz.records import Hints

Pairs = list[tuple[str, str]]


def swin() -> tuple[nn.Module, Pairs]:
    """12 × 15 tokens in windows of 5 × 5, padded to 15 × 15; every second block is
    shifted."""
    model = SwinTransformer(
        (48, 60), 4, embed_dim=8, depths=(2,), num_heads=(2,), window_size=5
    )
    assert any(model.layers[0].blocks[1].shift_size)
    first = "layers.0.blocks.0"
    shifted = "layers.0.blocks.1"
    return model, [
        (f"{first}.attn", f"{first}.drop_path1"),
        (f"{first}.attn.proj_drop", f"{first}.drop_path1"),
        (f"{shifted}.attn", f"{shifted}.drop_path1"),
        (f"{shifted}.attn.proj_drop", f"{shifted}.drop_path1"),
    ]


def maxvit_of_torchvision() -> tuple[nn.Module, Pairs]:
    """12 × 12 tokens in windows of 3 × 3, behind the image's axis."""
    model = MaxVit(
        input_size=(48, 48),
        stem_channels=8,
        partition_size=3,
        block_channels=[8],
        block_layers=[1],
        head_dim=4,
        stochastic_depth_prob=0.0,
    )
    inside = "blocks.0.layers.0.layers"
    grid = f"{inside}.grid_attention"
    window = f"{inside}.window_attention"
    return model, [
        (f"{window}.partition_swap", f"{inside}.MBconv"),
        (f"{window}.departition_swap", f"{window}.departition_op"),
        (f"{grid}.partition_op", window),
        (f"{grid}.partition_swap", window),
        (f"{grid}.departition_swap", f"{grid}.departition_op"),
    ]


def mobilevit_v2() -> tuple[nn.Module, Pairs]:
    """Patches of 2 × 2 tokens; the transformer sees places in a patch by patches."""
    model = create_model("mobilevitv2_050")
    block = model.stages[2][1]
    block.transformer[0].norm1 = nn.Identity()
    return model, [("stages.2.1.transformer.0.norm1", "stages.2.1.conv_1x1")]


def gcvit() -> tuple[nn.Module, Pairs]:
    """Windows of 2 × 2 tokens; in every second block all of them have the same queries,
    made of the whole image."""
    model = create_model("gcvit_xxtiny", img_size=64)
    block = "stages.1.blocks.1"
    return model, [(f"{block}.attn", f"{block}.ls1")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "size"),
    [
        (swin, (48, 60)),
        (maxvit_of_torchvision, (48, 48)),
        (mobilevit_v2, (64, 96)),
        (gcvit, (64, 64)),
    ],
)
def test_pieces_are_put_together_as_the_model_does(
    build: Callable[[], tuple[nn.Module, Pairs]],
    size: tuple[int, int],
) -> None:
    """The map of a layer that sees pieces is that of the neighbour that sees the whole."""
    torch.manual_seed(0)
    model, pairs = build()
    seen = followed(model, *size)
    for cut, whole in pairs:
        assert torch.equal(seen[cut, ""].maps, seen[whole, ""].maps), (cut, whole)


@pytest.mark.medium
def test_pooled_tokens_stand_as_hiera_itself_puts_them() -> None:
    """At each stage the maps are what timm's own Reroll makes of the tokens."""
    model = Hiera((64, 96), embed_dim=8, num_heads=1, stages=(1, 1, 1, 1)).eval()
    nn.init.zeros_(model.pos_embed)
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected = model.forward_intermediates(image, intermediates_only=True)
    seen = followed(model, 64, 96, image=image)
    for number, maps in enumerate(expected):
        assert_array_equal(seen[f"blocks.{number}", ""].maps, maps[0])


@pytest.mark.parametrize("size", [(64, 96), (480, 641), (1000, 300), (33, 57)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size_divisible": 1, "fixed_size": (320, 300)},
    ],
)
def test_detectors_resize_before_the_first_layer(
    size: tuple[int, int],
    options: dict[str, Any],
) -> None:
    """Layouts are told by the size that torchvision's transform gives to the layers."""
    transform = GeneralizedRCNNTransform(200, 333, [0.0] * 3, [1.0] * 3, **options)
    images, _ = transform.eval()([torch.zeros(3, *size)])
    hints = read_hints(nn.Sequential(transform), (1, 3, *size))["0"]
    assert hints.input_size == tuple(images.tensors.shape[-2:])


def recognised(
    model: nn.Module,
    layer: str,
    shape: list[int],
    size: tuple[int, int],
) -> str:
    """The layout of a layer's output, of an image of this size."""
    hints = read_hints(model, (1, 3, *size))[layer]
    return layout.recognise(shape, hints).layout


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        ("0", [1, 12, 16, 24], "nchw"),
        ("1", [1, 12, 16, 24], "nhwc"),
        ("2", [1, 36, 48], "ncl"),
        ("3", [2, 4, 3, 6, 8], "batch"),
    ],
)
def test_convolutions_have_their_channels_first_whatever_the_proportions(
    layer: str,
    shape: list[int],
    expected: str,
) -> None:
    """[1, 12, 16, 24] of a convolution is no channels-last map of a 3:4 input (RPN
    heads)."""
    model = nn.Sequential(
        nn.Conv2d(3, 12, 1),
        nn.ReLU(),
        nn.Conv1d(12, 9, 1),
        nn.Conv3d(3, 4, 1),
    )
    assert recognised(model, layer, shape, (96, 128)) == expected


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ([1, 3234, 4], (96, 128)),
        ([1, 4608, 91], (128, 192)),
    ],
)
def test_boxes_of_detectors_are_no_tokens(
    shape: list[int],
    size: tuple[int, int],
) -> None:
    """The outputs of SSD's, FCOS's and RetinaNet's heads are boxes of several maps in
    one row."""
    assert layout.recognise(shape, Hints(input_size=size)).layout == "sequence"


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("backbone", "tokens"),
        ("head", "sequence"),
    ],
)
def test_heads_of_detectors_have_no_tokens_their_backbones_may(
    layer: str,
    expected: str,
) -> None:
    """322 boxes are no 14 × 23 grid of a 96 × 160 input, whatever their number."""
    transform = GeneralizedRCNNTransform(96, 160, [0.0] * 3, [1.0] * 3)
    modules = {"transform": transform, "backbone": nn.ReLU(), "head": nn.ReLU()}
    model = nn.ModuleDict(modules)
    assert recognised(model, layer, [1, 322, 8], (96, 160)) == expected


SQUARE = (256, 256)
TWO_PREFIXES = ("class_token", "distillation_token")


@pytest.mark.parametrize(
    ("shape", "hints", "name"),
    [
        ([1, 320, 320, 4], Hints((256, 320), in_attention=True), "attention"),
        ([1, 8, 1025, 19], Hints(SQUARE), "heads"),
        ([1, 512, 1, 26], Hints(SQUARE), "nchw"),
        ([1, 64, 16, 1], Hints(SQUARE), "nchw"),
        ([1, 2, 64], Hints(SQUARE, prefix_tokens=TWO_PREFIXES), "vector"),
        ([1, 15, 15, 512], Hints(SQUARE, channels="last", in_attention=True), "nhwc"),
    ],
)
def test_what_looks_like_something_else(
    shape: list[int],
    hints: Hints,
    name: str,
) -> None:
    """Shapes that two layouts could claim, as they occur in SAM2, GCViT, CaiT, CoaT,
    CRNN, PiT."""
    assert layout.recognise(shape, hints).layout == name


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([1, 512, 49], "ncl"),
        ([1, 512, 256], "sequence"),
    ],
)
def test_only_the_tokens_that_a_mixer_has_are_tokens(
    shape: list[int],
    expected: str,
) -> None:
    """Hidden units of the network that mixes 49 tokens make no grid, though 256 is 16 ×
    16."""
    mixer = nn.Sequential(nn.Linear(49, 256), nn.Linear(256, 49))
    model = nn.ModuleDict({"mlp_tokens": mixer})
    assert recognised(model, "mlp_tokens.1", shape, (224, 224)) == expected
