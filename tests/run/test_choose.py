"""The layers of a first look at models of torchvision, timm, transformers and
Ultralytics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import Net
from torch import Tensor, nn
from torchvision import models

from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.run.choose import choose_layers

TORCHVISION = {
    "resnet18": "conv1 relu layer1 layer2 layer3 layer4",
    "swin_t": "0.0 1 3 5 7",
    "regnet_y_400mf": (
        "stem stem.0 trunk_output.block1 trunk_output.block2 trunk_output.block3 "
        "trunk_output.block4"
    ),
    "squeezenet1_1": "0 1 4 7 12",
}
"""Names of the layers; those of `features` without it."""

TIMM = {
    "pvt_v2_b0": "patch_embed.proj stages.0 stages.1 stages.2 stages.3",
    "mobilenetv4_conv_small": "conv_stem bn1 blocks.0 blocks.1 blocks.2 blocks.4",
}

YOLO = {"yolo11n": "0 0.conv 2 4 6 10 13 16 19 22"}
"""Names of the layers without `model`: backbone, then neck; nothing of the head."""


def cases(models: dict[str, str]) -> list[Any]:
    """Models with the names of their layers; the smallest one runs between edits."""
    slow = [
        pytest.param(name, names, id=name, marks=pytest.mark.slow)
        for name, names in models.items()
        if name != "squeezenet1_1"
    ]
    quick = [case for case in models.items() if case[0] == "squeezenet1_1"]
    return [*slow, *quick]


def looked_at(model: nn.Module, height: int, width: int) -> list[str]:
    """Names of the layers that are drawn where none are named."""
    loaded = adopt(model.eval(), InputOptions(size=(height, width), input_channels=3))
    layers = choose_layers(loaded, None, [torch.zeros(1, 3, height, width)])
    return [layer.name for layer in layers]


@pytest.mark.medium
@pytest.mark.parametrize(("name", "names"), cases(TORCHVISION))
def test_models_of_torchvision(name: str, names: str) -> None:
    """The first convolution, and the block or stage that ends each resolution."""
    layers = looked_at(models.get_model(name, weights=None), 224, 224)
    assert [layer.removeprefix("features.") for layer in layers] == names.split()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "names"), cases(TIMM))
def test_models_of_timm(name: str, names: str) -> None:
    """Stages whole, and no Identity, Dropout or norm behind them."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    assert looked_at(timm.create_model(name), 224, 224) == names.split()


@pytest.mark.parametrize(("name", "names"), cases(YOLO))
def test_models_of_ultralytics(name: str, names: str) -> None:
    """The ends of the backbone's and the neck's stages, on the way down, up and down
    again."""
    files: Any = pytest.importorskip(
        "models.ultralytics_files",
        reason="ultralytics is not installed",
        exc_type=ImportError,
    )
    layers = looked_at(files.built(name), 96, 128)
    assert [layer.removeprefix("model.") for layer in layers] == names.split()


SMALL_VIT = {
    "image_size": 64,
    "patch_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
SWIN = {
    "image_size": 128,
    "embed_dim": 16,
    "depths": [2, 2, 2, 1],
    "num_heads": [1, 1, 2, 2],
    "window_size": 4,
}
SEGFORMER = {"hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16}


TRANSFORMERS = {
    "Segformer": (
        "segformer.stages.0 segformer.stages.0.patch_embeddings.proj segformer.stages.1"
        " segformer.stages.2 segformer.stages.3 decode_head"
    ),
    "ViT": (
        "vit.embeddings.patch_embeddings.projection vit.layers.0 vit.layers.1"
        " vit.layers.2"
    ),
    "Swin": (
        "swin.embeddings.patch_embeddings.projection swin.encoder.layers.0.blocks.1"
        " swin.encoder.layers.1.blocks.1 swin.encoder.layers.2.blocks.1"
        " swin.encoder.layers.3"
    ),
}


def small_transformer(name: str) -> nn.Module:
    """A model of transformers with random weights."""
    library: Any = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    )
    if name == "Segformer":
        config = library.SegformerConfig(**SEGFORMER)
        return library.SegformerForSemanticSegmentation(config)  # type: ignore[no-any-return]
    if name == "ViT":
        return library.ViTForImageClassification(library.ViTConfig(**SMALL_VIT))  # type: ignore[no-any-return]
    return library.SwinForImageClassification(library.SwinConfig(**SWIN))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "height", "width"),
    [("Segformer", 128, 160), ("ViT", 64, 64), ("Swin", 128, 128)],
)
def test_models_of_transformers(name: str, height: int, width: int) -> None:
    """Ends of stages where the resolution falls, each block where it does not; no parts
    of heads."""
    layers = looked_at(small_transformer(name), height, width)
    assert layers == TRANSFORMERS[name].split()


def test_blocks_of_one_resolution_are_all_taken() -> None:
    """Those of a transformer behind its patch embedding, and nothing around them."""
    vit = models.VisionTransformer(64, 16, 3, 2, 32, 64, num_classes=5)
    blocks = [f"encoder.layers.encoder_layer_{n}" for n in range(3)]
    assert looked_at(vit, 64, 64) == ["conv_proj", *blocks]


def test_a_model_without_maps_shows_its_vectors() -> None:
    """Its linear layers and what follows them; the model itself is none of its layers."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 2)
    )
    assert looked_at(model, 2, 2) == ["0", "1", "2", "3", "4"]


def test_a_model_of_one_layer_shows_that() -> None:
    """A convolution by itself is the model, which is no stage of another."""
    assert looked_at(nn.Conv2d(3, 2, 3), 16, 16) == [""]


@pytest.mark.parametrize(("side", "first"), [(4, "4"), (8, None)])
def test_an_image_that_is_too_small_for_a_stage_is_warned_of(
    side: int, first: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Two poolings leave one place of 4 by 4 pixels, in which a kernel of 3 by 3 sees
    nothing; a kernel of 1 by 1, as behind a global pooling, needs no more."""
    layers: list[nn.Module] = []
    for channels in (3, 4, 4):
        layers += [nn.Conv2d(channels, 4, 3, padding=1), nn.MaxPool2d(2)]
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    looked_at(nn.Sequential(*layers, nn.Conv2d(4, 2, 1)), side, side)
    expected = []
    if first is not None:
        expected = [
            f"images of {side}×{side} are too small: maps from layer {first} on are single"
            " numbers, and not taken; --size makes images larger, --layers takes any layer"
        ]
    assert [text for text in caplog.messages if "too small" in text] == expected


def test_dropout_identity_and_poolings_are_no_ends() -> None:
    """The last layer that changes values is taken; a resolution of poolings alone has
    no end."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Dropout(), nn.Identity(), nn.MaxPool2d(2)
    )
    assert looked_at(model, 16, 16) == ["0", "1"]


def test_a_u_net_shows_both_arms() -> None:
    """Each resolution twice, on the way down and on the way up; one pooling and one
    upsampling serve all of them."""

    def forward(self: Any, x: Tensor) -> Tensor:
        high = self.down1(x)
        middle = self.down2(self.pool(high))
        x = self.up2(torch.cat([middle, self.grow(self.bottom(self.pool(middle)))], 1))
        return self.head(self.up1(torch.cat([high, self.grow(x)], 1)))  # type: ignore[no-any-return]

    widths = {"down1": 3, "down2": 8, "bottom": 8, "up2": 16, "up1": 16}
    modules: dict[str, nn.Module] = {
        name: nn.Sequential(nn.Conv2d(inside, 8, 3, padding=1), nn.BatchNorm2d(8))
        for name, inside in widths.items()
    }
    modules |= {"pool": nn.MaxPool2d(2), "grow": nn.Upsample(scale_factor=2)}
    net = Net(forward, **modules, head=nn.Conv2d(8, 2, 1))
    assert looked_at(net, 32, 48) == [
        "down1",
        "down1.0",
        "down2",
        "bottom",
        "up2",
        "up1",
    ]


@pytest.mark.parametrize("height", [32, 34])
def test_stages_of_a_wide_image_are_told_by_its_proportions(height: int) -> None:
    """Each halves height and width, and rounds 34 rows by itself; the trunk that holds
    them is opened."""
    steps = [nn.Sequential(nn.Conv2d(n, 4, 3, 2, 1), nn.ReLU()) for n in (3, 4, 4, 4)]
    model = nn.Sequential(steps[0], nn.Sequential(*steps[1:]))
    assert looked_at(model, height, 2 * height) == ["0", "0.0", "1.0", "1.1", "1.2"]
