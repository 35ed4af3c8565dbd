"""Tiny models of transformers, made from configuration objects and saved as the library
does it; for tests, which skip where transformers is not installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIDES = {"image_size": 32, "patch_size": 8}
TOKENS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VIT = {**SIDES, **TOKENS}
TEXT = {
    **TOKENS,
    "vocab_size": 99,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
NAMES = {0: "cat", 1: "dog", 2: "a \x1b[31mred\x1b[0m bird"}


def _detr() -> Any:
    backbone = transformers.ResNetConfig(
        **STAGES, embedding_size=8, out_features=["stage4"]
    )
    return transformers.DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        backbone=None,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=100,
    )


MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "dinov2": (
        "Dinov2Model",
        lambda: transformers.Dinov2Config(**{**VIT, "mlp_ratio": 2}),
    ),
    "vit": (
        "ViTForImageClassification",
        lambda: transformers.ViTConfig(**VIT, id2label=NAMES),
    ),
    "clip": (
        "CLIPModel",
        lambda: transformers.CLIPConfig(
            vision_config=VIT, text_config=TEXT, projection_dim=16
        ),
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        lambda: transformers.SegformerConfig(
            hidden_sizes=[8, 16, 24, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 2],
            decoder_hidden_size=16,
            num_labels=5,
        ),
    ),
    "detr": ("DetrForObjectDetection", _detr),
}
"""The families: the class, and how a tiny configuration of it is made."""

PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov2": ("BitImageProcessor", {"size": {"shortest_edge": 36}, "crop_size": 32}),
    "vit": ("ViTImageProcessor", {"size": {"height": 32, "width": 32}}),
    "clip": ("CLIPImageProcessor", {"size": {"shortest_edge": 32}, "crop_size": 32}),
    "segformer": ("SegformerImageProcessor", {"size": {"height": 64, "width": 64}}),
    "detr": ("DetrImageProcessor", {"size": {"shortest_edge": 64, "longest_edge": 80}}),
}
"""Their image processors, for images of the tiny models' sizes."""


def save(family: str, folder: Path) -> Path:
    """Save a tiny model of a family with random weights, and its image processor."""
    class_name, configure = MODELS[family]
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(configure())
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and "position" not in name:
            tensor.add_(torch.randn_like(tensor) * 0.05)
    model.save_pretrained(folder)
    processor, options = PROCESSORS[family]
    getattr(transformers, processor)(**options).save_pretrained(folder)
    return folder


def theirs(folder: Path) -> Any:
    """The model as the library loads it."""
    config = json.loads((folder / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0])
    return model.from_pretrained(
        folder, local_files_only=True, attn_implementation="eager"
    )


def edit(folder: Path, **values: Any) -> Path:
    """Change values of a folder's config.json; None removes one."""
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return folder


def photo(width: int = 600, height: int = 400) -> Image.Image:
    """Colour noise of several sizes, with edges."""
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    coarse = Image.fromarray(values[:40, :60]).resize(
        (width, height), Image.Resampling.BILINEAR
    )
    return Image.blend(coarse, Image.fromarray(values), 0.3)
