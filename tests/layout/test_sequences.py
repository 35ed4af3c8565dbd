"""Models that people have: what is drawn as a picture of the image comes from the
image.

The maps are compared with clones of independent hooks, unfolded here by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from followed import Seen, followed

from featviz import layout
from featviz.records import Hints, Trace

HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
SMALL = {"num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def _timm(name: str, **smaller: object) -> Any:
    """One of timm's models; `smaller` leaves out blocks that repeat others."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    return timm.create_model(name, **smaller)


def detr() -> Any:
    """100 queries beside a backbone's map of 10 × 10 places."""
    lib = _transformers()
    backbone = lib.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = lib.DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=100,
        **HEADS,
    )
    return lib.DetrForObjectDetection(config)


def of_transformers(name: str, **settings: Any) -> Any:
    """A small model of a library's own class, `Eomt` with its head
    `ForUniversalSegmentation`."""
    lib = _transformers()
    kind, _, head = name.partition(" ")
    config = getattr(lib, f"{kind}Config")(**settings)
    config._attn_implementation = "eager"
    return getattr(lib, kind + head)(config)


@pytest.mark.slow
def test_frames_of_transformers_are_grids() -> None:
    """TimeSformer takes [1, T, C, H, W]: its tokens are maps of each frame, whether a
    piece is a frame, the times of a place, or the whole clip with the times of each
    place side by side."""
    settings = {
        **SMALL,
        "hidden_size": 32,
        "image_size": 32,
        "patch_size": 8,
        "num_frames": 5,
    }
    clip = torch.randn(1, 5, 3, 32, 32)
    seen = followed(
        of_transformers("Timesformer Model", **settings), 32, 32, image=clip
    )
    layer = "encoder.layer.3"
    for name, key, first, order in (
        (f"{layer}.layernorm_before", "", 1, (3, 0, 1, 2)),
        (f"{layer}.temporal_layernorm", "", 0, (3, 2, 0, 1)),
        (layer, "0", 1, (3, 2, 0, 1)),
    ):
        capture = seen[name, key]
        tokens = capture.tensor[:, first:]
        sizes = (5, 4, 4) if order[1] == 0 else (4, 4, 5)
        assert capture.layout == "windows", name
        assert torch.equal(capture.maps, tokens.reshape(*sizes, 32).permute(order)), (
            name
        )
    assert seen[f"{layer}.attention.attention.attn_drop", ""].layout == "attention"


def test_a_class_token_may_stand_in_front_of_each_piece() -> None:
    """The token of each frame is a row; what stands before the model's own has another
    name."""
    positions = np.array([-1, 0, 1, 2, 3, -1, 4, 5, 6, 7])
    trace = Trace(grid=(2, 2, 2), axes=(0, 1), positions=positions)
    frames = torch.randn(2, 5, 3)
    hints = Hints(input_size=(8, 8), prefix_tokens=("class_token",), trace=trace)
    drawn_maps = layout.to_maps(frames, hints)
    assert {name: maps.layout for name, maps in drawn_maps.items()} == {
        "": "windows",
        "class_token": "vector",
    }
    assert torch.equal(drawn_maps["class_token"].data[:, 0, :, 0], frames[:, 0].T)
    positions = np.array([-1, -1, -1, 0, 1, 2, 3])
    hints = replace(hints, trace=Trace(grid=(1, 2, 2), axes=(1,), positions=positions))
    tokens = torch.randn(1, 7, 3)
    drawn_maps = layout.to_maps(tokens, hints)
    assert torch.equal(drawn_maps["extra_token"].data[:, 0, :, 0], tokens[0, :2].T)
    assert torch.equal(drawn_maps["class_token"].data[:, 0, :, 0], tokens[0, 2:3].T)


def of_kind(seen: Mapping[tuple[str, str], Seen], *kinds: str) -> set[str]:
    return {name for (name, _), one in seen.items() if one.layout in kinds}


@pytest.mark.slow
def test_no_query_of_detr_is_a_place() -> None:
    """With as many queries as places, no layer of the decoder but the keys' and values'
    is a map, and of the encoder every layer is."""
    seen = followed(detr(), 320, 320)
    spatial = of_kind(seen, "tokens", "ncl", "heads", "windows", "nhw", "nhwc")
    decoder = {name for name in spatial if name.startswith("model.decoder")}
    assert decoder == {
        f"model.decoder.layers.{i}.encoder_attn.{projection}_proj"
        for i in (0, 1)
        for projection in "kv"
    }
    encoder = {name for name, _ in seen if name.startswith("model.encoder.layers")}
    assert encoder <= spatial | of_kind(seen, "attention")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "smaller"), [("levit_128s", {}), ("mixer_s16_224", {})]
)
def test_transformers_that_were_read_right_stay_as_they_are(
    name: str, smaller: dict[str, object]
) -> None:
    """What is followed through the model says of every layer what its shape and blocks
    say."""
    torch.manual_seed(0)
    model = _timm(name, **smaller)
    with_origins, without = (
        followed(model, 224, 224, trace=trace) for trace in (True, False)
    )
    assert {at: capture.layout for at, capture in with_origins.items()} == {
        at: capture.layout for at, capture in without.items()
    }
    assert "tokens" in {capture.layout for capture in with_origins.values()}
    for at, capture in with_origins.items():
        assert torch.equal(capture.maps, without[at].maps), at
