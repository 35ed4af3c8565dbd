"""Attention weights: a map for each head, equal to those computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from networks import Net
from ramps import look, save
from tiles import assert_drawn, manifest, raw
from torch import Tensor, nn
from torchvision import models

import featviz as fv
from featviz.hooks.eval_mode import in_eval_mode


def small_vit() -> nn.Module:
    """torchvision's own ViT: 4 × 4 patches, 2 heads, 2 layers."""
    torch.manual_seed(0)
    model: nn.Module = models.VisionTransformer(32, 8, 2, 2, 16, 32)
    nn.init.normal_(model.heads.head.weight)
    return model.eval()


def by_hand(block: nn.Module, tokens: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt d) of an encoder block whose normalised input is [1, T, D]."""
    attention = block.self_attention
    q, k, _ = nn.functional.linear(
        tokens, attention.in_proj_weight, attention.in_proj_bias
    ).chunk(3, dim=-1)
    heads = attention.num_heads
    head_size = attention.head_dim
    q, k = (
        projected.reshape(-1, heads, head_size).transpose(0, 1).double()
        for projected in (q[0], k[0])
    )
    scores = torch.stack([q[h] @ k[h].T / math.sqrt(head_size) for h in range(heads)])
    exponents = scores.exp()
    return exponents / exponents.sum(-1, keepdim=True)


@pytest.mark.parametrize("fast", [True, False])
def test_attention_weights_are_softmax_of_queries_and_keys(
    fast: bool, tmp_path: Path
) -> None:
    """A selected attention gives a map for each head whose rows sum to 1; torch's
    setting of the fast path is as before."""
    model = small_vit()
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        folder, captures = look(
            model,
            save(tmp_path, 32, 32),
            "MultiheadAttention#0,*_0.ln_1",
            (32, 32),
            tensors="npy",
        )
        assert torch.backends.mha.get_fastpath_enabled() is fast
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    name = "encoder.layers.encoder_layer_0"
    row = captures[f"{name}.self_attention", 0, "1"]
    weights = raw(folder, row)
    tokens = raw(folder, captures[f"{name}.ln_1", 0, ""])
    want = by_hand(model.get_submodule(name), tokens)
    assert (row["layout"], row["maps"], row["shape"]) == (
        "attention",
        2,
        [1, 2, 17, 17],
    )
    assert torch.allclose(weights[0].double(), want, atol=1e-6)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 2, 17), atol=1e-5)
    assert_drawn(folder, row, want)
    assert captures[f"{name}.self_attention", 0, "0"]["layout"] == "tokens"
    assert (f"{name}.self_attention", 0, "0.class_token") in captures
    assert manifest(folder)["skipped"] == []


def test_need_weights_is_put_back_when_the_run_is_over(tmp_path: Path) -> None:
    """After a run no hook asks for weights any more."""
    model = small_vit()
    look(model, save(tmp_path, 32, 32), "MultiheadAttention", (32, 32))
    attention = model.encoder.layers.encoder_layer_0.self_attention
    assert not attention._forward_pre_hooks
    assert not attention._forward_hooks
    with in_eval_mode(model):
        x = torch.randn(1, 5, 16)
        assert attention(x, x, x, need_weights=False)[1] is None


def gated() -> nn.Module:
    """A map of a quarter of the input's size, and a gate that weighs each place of it,
    as in an Attention U-Net."""
    gate = Net(lambda self, x: x * self.gate(x).sigmoid(), gate=nn.Conv2d(8, 1, 1))
    return Net(
        lambda self, x: self.attn(self.stem(x)), stem=nn.Conv2d(3, 8, 4, 4), attn=gate
    )


def attending() -> nn.Module:
    """Tokens of patches of a quarter of the input's side, and the weights of two heads."""

    def weights(self: nn.Module, tokens: Tensor) -> Tensor:
        heads = tokens.unflatten(2, (2, -1)).transpose(1, 2)
        return (heads @ heads.transpose(-2, -1)).softmax(-1)

    def way(self: nn.Module, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        return (self.attn(tokens) @ tokens[:, None]).mean((1, 2))

    return Net(way, stem=nn.Conv2d(3, 8, 16, 16), attn=Net(weights))


@pytest.mark.parametrize(
    ("model", "layout"), [(gated, "nchw"), (attending, "attention")]
)
def test_a_square_map_is_no_matrix_of_weights(
    model: Callable[[], nn.Module], layout: str
) -> None:
    """At 64 pixels both have 16 rows and columns, as many as there are tokens of 4 × 4
    patches."""
    (maps,) = fv.run(model(), torch.rand(3, 64, 64), "attn", size=64).captures
    assert maps.row.shape[-2:] == [16, 16]
    assert maps.row.layout == layout
