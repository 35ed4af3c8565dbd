"""Tokens: models whose tokens say themselves where they stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from ramps import PATCH, PositionViT, look, positions, save
from tiles import assert_drawn, levels
from torchvision import models

from featviz import layout
from featviz.hooks.layers import list_layers
from featviz.layout.tracing.hints import HintBook
from featviz.records import Hints

PREFIXES: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]] = {
    "none": ((), (), ()),
    "distilled": (
        ("cls_token", "dist_token"),
        (1, 1),
        ("class_token", "distillation_token"),
    ),
    "registers": (
        ("cls_token", "register_tokens"),
        (1, 4),
        ("class_token", "register_tokens"),
    ),
}


@pytest.mark.parametrize(
    ("model_type", "size"),
    [("none", (56, 56)), ("distilled", (59, 83)), ("registers", (59, 83))],
    ids=str,
)
def test_tokens_are_drawn_where_their_patches_lay(
    model_type: str, size: tuple[int, int], tmp_path: Path
) -> None:
    """Channel 0 is the picture of rows, 1 of columns: no shift, no transposition; sides
    that are no multiples of a patch lose what is left over."""
    names, counts, _ = PREFIXES[model_type]
    folder, captures = look(
        PositionViT(*names, counts=counts), save(tmp_path, *size), "blocks.1", size
    )
    row = captures["blocks.1", 0, ""]
    high = size[0] // PATCH
    wide = size[1] // PATCH
    assert (row["layout"], row["maps"], row["grid"]["tile"]) == (
        "tokens",
        3,
        [high, wide],
    )
    assert row["shape"] == [1, sum(counts) + high * wide, 3]
    assert_drawn(folder, row, positions(high, wide))


@pytest.mark.parametrize("prefix_type", ["distilled", "registers"])
def test_tokens_beside_the_grid_are_vectors_of_their_own(
    prefix_type: str, tmp_path: Path
) -> None:
    """Class, distillation and register tokens stand in pictures of their own, with
    their own numbers; registers are rows of one strip."""
    names, counts, prefix_parts = PREFIXES[prefix_type]
    model = PositionViT(*names, counts=counts)
    folder, captures = look(
        model, save(tmp_path, 56, 80), "blocks.0", (56, 80), tensors="npy"
    )
    assert set(captures) == {("blocks.0", 0, key) for key in ("", *prefix_parts)}
    stats = np.load(folder / "stats.npz")
    for name, expected in zip(names, prefix_parts, strict=True):
        row = captures["blocks.0", 0, expected]
        parameter = getattr(model, name).detach()[0]
        assert row["file"].endswith(f"_blocks.0/output.{expected}.png")
        assert (row["layout"], row["maps"]) == ("vector", 3)
        assert row["range"] == pytest.approx(
            [float(parameter.min()), float(parameter.max())]
        )
        assert (row["min"], row["max"]) == pytest.approx(
            (float(parameter.min()), float(parameter.max()))
        )
        strip = np.asarray(Image.open(folder / row["file"]))
        assert (
            np.abs(strip.astype(int) - levels(parameter[None])[0].astype(int)).max()
            <= 1
        )
        numbers = stats[f"blocks.0|output|0|{expected}"]
        assert np.allclose(
            numbers[:, :2],
            torch.stack([parameter.amin(0), parameter.amax(0)], 1).numpy(),
        )
    grid = stats["blocks.0|output|0|"]
    # the model's own tokens are negative: none is in the grid
    assert grid[:, 0].min() >= 0


def test_a_224_by_320_picture_has_14_by_20_tokens() -> None:
    """ViT-B/16's 281 tokens are a class token and a grid of 14 × 20, not 14 × 14."""
    with torch.device("meta"):
        model = models.vit_b_16()
    hints = HintBook(model, (1, 3, 224, 320)).of_layer(list_layers(model)[5])
    assert layout.map_size([1, 281, 768], hints) == ("tokens", 14, 20)
    assert layout.map_size([1, 280, 768], hints) == ("tokens", 14, 20)
    assert layout.map_size([1, 196, 768], hints) is None


@pytest.mark.parametrize("size", [(32, 100)], ids=str)
def test_tokens_with_channels_first(size: tuple[int, int], tmp_path: Path) -> None:
    """[1, D, T] gives the same pictures as [1, T, D]."""
    model = PositionViT("cls_token", counts=(1,), channels_first=True)
    folder, found = look(model, save(tmp_path, *size), "blocks.0", size)
    row = found["blocks.0", 0, ""]
    assert row["layout"] == "ncl"
    assert_drawn(folder, row, positions(size[0] // PATCH, size[1] // PATCH))
    assert found["blocks.0", 0, "class_token"]["max"] < 0


def test_heads_come_one_behind_the_other() -> None:
    """[1, heads, T, D], queries for example: the channels of head 0, then those of head
    1."""
    maps = positions(14, 20)
    # [1, 2, 280, 3]
    split = torch.stack([maps, maps + 1]).flatten(2).transpose(1, 2)[None]
    drawn = layout.to_maps(split, Hints(input_size=(224, 320), in_attention=True))[""]
    assert drawn.layout == "heads"
    assert torch.equal(drawn.data[:, 0], torch.cat([maps, maps + 1]))


def test_the_patches_own_grid_wins_where_both_axes_make_one() -> None:
    """[1, 256, 196] behind patches of 16 is channels first, [1, 196, 256] is not."""
    hints = Hints(input_size=(224, 224), patch_size=(16, 16))
    assert layout.map_size([1, 256, 196], hints) == ("ncl", 14, 14)
    assert layout.map_size([1, 196, 256], hints) == ("tokens", 14, 14)
