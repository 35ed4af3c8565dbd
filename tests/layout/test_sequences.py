"""Models that people have: what is drawn as a picture of the image comes from the
image.

The maps are compared with clones of independent hooks, unfolded here by hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from followed import Seen, followed
from numpy.testing import assert_array_equal

from featviz import layout
from featviz.records import Hints, Trace

SMALL_RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}
SMALL_DETR = {
    "use_timm_backbone": False,
    "backbone": None,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_queries": 100,
}
SMALL_TIMESFORMER = {
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "num_frames": 5,
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def timesformer(transformers: Any) -> dict[tuple[str, str], Seen]:
    """What is drawn of a TimeSformer, which takes [1, T, C, H, W]."""
    config = transformers.TimesformerConfig(**SMALL_TIMESFORMER)
    config._attn_implementation = "eager"
    model = transformers.TimesformerModel(config)
    return followed(model, 32, 32, image=torch.randn(1, 5, 3, 32, 32))


LAYER = "encoder.layer.3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "key", "prefixes", "sizes", "axes"),
    [
        pytest.param(
            f"{LAYER}.layernorm_before",
            "",
            1,
            (5, 4, 4),
            (3, 0, 1, 2),
            id="a piece is a frame",
        ),
        pytest.param(
            f"{LAYER}.temporal_layernorm",
            "",
            0,
            (4, 4, 5),
            (3, 2, 0, 1),
            id="a piece has the times of a position",
        ),
        pytest.param(
            LAYER,
            "0",
            1,
            (4, 4, 5),
            (3, 2, 0, 1),
            id="times of each position side by side",
        ),
    ],
)
def test_frames_of_transformers_are_grids(
    layer: str,
    key: str,
    prefixes: int,
    sizes: tuple[int, ...],
    axes: tuple[int, ...],
    timesformer: dict[tuple[str, str], Seen],
) -> None:
    """The tokens of a TimeSformer are maps of each frame."""
    seen = timesformer[layer, key]
    assert seen.layout == "windows"
    tokens = seen.tensor[:, prefixes:].reshape(*sizes, 32)
    assert_array_equal(seen.maps, tokens.permute(axes))


@pytest.mark.slow
def test_attention_of_frames_is_attention(
    timesformer: dict[tuple[str, str], Seen],
) -> None:
    """The weights within each piece are attention."""
    weights = timesformer[f"{LAYER}.attention.attention.attn_drop", ""]
    assert weights.layout == "attention"


def test_a_class_token_may_stand_in_front_of_each_piece() -> None:
    """The token of each frame is a row."""
    positions = np.array([-1, 0, 1, 2, 3, -1, 4, 5, 6, 7])
    trace = Trace(grid=(2, 2, 2), axes=(0, 1), positions=positions)
    frames = torch.randn(2, 5, 3)
    hints = Hints(input_size=(8, 8), prefix_tokens=("class_token",), trace=trace)
    maps = layout.to_maps(frames, hints)
    assert maps[""].layout == "windows"
    assert maps["class_token"].layout == "vector"
    assert_array_equal(maps["class_token"].data[:, 0, :, 0], frames[:, 0].T)


def test_what_stands_before_the_models_own_token_has_another_name() -> None:
    """Two tokens before the class token are extra ones."""
    positions = np.array([-1, -1, -1, 0, 1, 2, 3])
    trace = Trace(grid=(1, 2, 2), axes=(1,), positions=positions)
    tokens = torch.randn(1, 7, 3)
    hints = Hints(input_size=(8, 8), prefix_tokens=("class_token",), trace=trace)
    maps = layout.to_maps(tokens, hints)
    assert_array_equal(maps["extra_token"].data[:, 0, :, 0], tokens[0, :2].T)
    assert_array_equal(maps["class_token"].data[:, 0, :, 0], tokens[0, 2:3].T)


SPATIAL = {"tokens", "ncl", "heads", "windows", "nhw", "nhwc"}


@pytest.mark.slow
def test_no_query_of_detr_is_a_position(transformers: Any) -> None:
    """With as many queries as places, no layer of the decoder but the keys' and values'
    is a map, and of the encoder every layer is."""
    backbone = transformers.ResNetConfig(**SMALL_RESNET)
    config = transformers.DetrConfig(backbone_config=backbone, **SMALL_DETR)
    seen = followed(transformers.DetrForObjectDetection(config), 320, 320)
    decoder = set()
    encoder = set()
    for (name, _), capture in seen.items():
        if name.startswith("model.decoder") and capture.layout in SPATIAL:
            decoder.add(name.removeprefix("model.decoder.layers."))
        if name.startswith("model.encoder.layers"):
            encoder.add(capture.layout)
    assert encoder <= SPATIAL | {"attention"}
    assert decoder == {
        "0.encoder_attn.k_proj",
        "0.encoder_attn.v_proj",
        "1.encoder_attn.k_proj",
        "1.encoder_attn.v_proj",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["levit_128s", "mixer_s16_224"])
def test_transformers_that_were_read_right_stay_as_they_are(name: str) -> None:
    """What is followed through the model says of every layer what its shape and blocks
    say."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(0)
    model = timm.create_model(name)
    traced = followed(model, 224, 224)
    guessed = followed(model, 224, 224, trace=False)
    assert traced.keys() == guessed.keys()
    assert "tokens" in {seen.layout for seen in traced.values()}
    for key, seen in traced.items():
        assert seen.layout == guessed[key].layout, key
        assert torch.equal(seen.maps, guessed[key].maps), key
