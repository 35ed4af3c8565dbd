"""Attention weights: a map for each head, equal to those computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import Net
from ramps import look, save
from tiles import assert_drawn, assert_row, manifest, raw
from torch import Tensor, nn
from torchvision import models

import featviz as fv
from featviz.hooks.eval_mode import in_eval_mode

BLOCK = "encoder.layers.encoder_layer_0"
ATTENTION = f"{BLOCK}.self_attention"


def small_vit() -> nn.Module:
    """torchvision's own ViT: 4 × 4 patches, 2 heads, 2 layers."""
    torch.manual_seed(0)
    model: nn.Module = models.VisionTransformer(32, 8, 2, 2, 16, 32)
    nn.init.normal_(model.heads.head.weight)
    return model.eval()


def by_hand(attention: nn.MultiheadAttention, tokens: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt d) of normalised tokens [1, T, D], by head."""
    projected = tokens @ attention.in_proj_weight.T + attention.in_proj_bias
    heads = projected[0].double().unflatten(1, (3, attention.num_heads, -1))
    queries, keys, _ = heads.permute(1, 2, 0, 3)
    scores = queries @ keys.transpose(1, 2) / math.sqrt(attention.head_dim)
    exponents = scores.exp()
    return exponents / exponents.sum(-1, keepdim=True)


@pytest.fixture(params=[True, False], ids=["fast path", "slow path"])
def fast_path(request: pytest.FixtureRequest) -> Iterator[bool]:
    """torch's setting, which must stay as it is."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(request.param)
    yield request.param
    assert torch.backends.mha.get_fastpath_enabled() is request.param
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.medium
def test_attention_weights_are_softmax_of_queries_and_keys(
    fast_path: bool,
    tmp_path: Path,
) -> None:
    """A selected attention gives a map for each head whose rows sum to 1, beside its
    tokens."""
    model = small_vit()
    layers = "MultiheadAttention#0,*_0.ln_1"
    seen = look(model, save(tmp_path, 32, 32), layers, (32, 32), tensors="npy")
    row = seen.row(ATTENTION, "1")
    assert_row(row, layout="attention", shape=[1, 2, 17, 17])
    tokens = raw(seen.folder, seen.row(f"{BLOCK}.ln_1"))
    expected = by_hand(model.get_submodule(ATTENTION), tokens)
    weights = raw(seen.folder, row)[0].double()
    assert torch.allclose(weights, expected, atol=1e-6)
    assert_drawn(seen.folder, row, expected)
    assert seen.row(ATTENTION, "0")["layout"] == "tokens"
    assert (ATTENTION, 0, "0.class_token") in seen.captures
    assert manifest(seen.folder)["skipped"] == []


@pytest.mark.medium
def test_need_weights_is_put_back_when_the_run_is_over(tmp_path: Path) -> None:
    """After a run no hook asks for weights any more."""
    model = small_vit()
    look(model, save(tmp_path, 32, 32), "MultiheadAttention", (32, 32))
    attention = model.get_submodule(ATTENTION)
    x = torch.randn(1, 5, 16)
    with in_eval_mode(model):
        _, weights = attention(x, x, x, need_weights=False)
    assert weights is None


def gated() -> nn.Module:
    """A map of a quarter of the input's size, and a gate that weighs each place of it,
    as in an Attention U-Net."""
    gate = Net(lambda self, x: x * self.gate(x).sigmoid(), gate=nn.Conv2d(8, 1, 1))
    stem = nn.Conv2d(3, 8, 4, 4)
    return Net(lambda self, x: self.attn(self.stem(x)), stem=stem, attn=gate)


def attending(count: int = 2) -> nn.Module:
    """Tokens of patches of 16 × 16 pixels, and the weights of so many heads."""

    def weights(self: nn.Module, tokens: Tensor) -> Tensor:
        heads = tokens.unflatten(2, (count, -1)).transpose(1, 2)
        return (heads @ heads.transpose(-2, -1)).softmax(-1)

    def attend(self: nn.Module, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        return (self.attn(tokens) @ tokens[:, None]).mean((1, 2))

    return Net(attend, stem=nn.Conv2d(3, 8, 16, 16), attn=Net(weights))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (gated, "nchw"),
        (attending, "attention"),
    ],
)
def test_a_square_map_is_no_matrix_of_weights(
    model: Callable[[], nn.Module],
    layout: str,
) -> None:
    """At 64 pixels both have 16 rows and columns, as many as there are tokens of 4 × 4
    patches."""
    (maps,) = fv.run(model(), torch.rand(3, 64, 64), "attn", size=64).captures
    assert maps.row.shape[-2:] == [16, 16]
    assert maps.row.layout == layout


@pytest.mark.medium
def test_as_many_heads_as_tokens_come_before_them() -> None:
    """Of [1, 4, 4, 4] the second axis counts the heads: each has rows that sum to 1."""
    (maps,) = fv.run(attending(4), torch.rand(3, 32, 32), "attn", size=32).captures
    assert maps.row.layout == "attention"
    assert maps.row.shape == [1, 4, 4, 4]
    assert np.allclose(maps.stats["mean"], 1 / 4)
