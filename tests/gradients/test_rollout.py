"""Attention rollout and the attention of a block, against products in numpy of weights
that the libraries return themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from borrowed import assert_same, state_of
from torch import Tensor, nn

import featviz as fv
from featviz.errors import UsageError

SIZE = {"size": (32, 48), "crop": (32, 48), "mean": [0.5] * 3, "std": [0.5] * 3}


class Block(nn.Module):
    """Self-attention, with a path around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attn(y, y, y, need_weights=False)[0]


class Transformer(nn.Module):
    """Patches of 8×8 pixels, with or without a class token, and three blocks."""

    def __init__(self, has_class: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        if has_class:
            self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = 3 * self.patches(x).flatten(2).transpose(1, 2)
        if hasattr(self, "cls_token"):
            x = torch.cat([self.cls_token, x], dim=1)
        for block in self.blocks:
            x = block(x)
        return x


def product(weights: Sequence[np.ndarray]) -> np.ndarray:
    """Abnar and Zuidema's product: [1, heads, T, T] of each block to [T, T]."""
    joined = np.eye(weights[0].shape[-1])
    for layer in weights:
        mean = layer[0].mean(0)
        joined = (0.5 * mean + 0.5 * np.eye(len(mean))) @ joined
    return joined


def shown(image: Tensor) -> Tensor:
    """What the model sees of an image of 8 bits: [1, 3, H, W], from -1 to 1."""
    return (image * 255).round().div(255).sub(0.5).div(0.5)[None]


def weights_of_multihead(net: Transformer, args: Tensor) -> list[np.ndarray]:
    """The weights of each block, as its attention returns them."""
    weights = []

    def keep(block: nn.Module, inputs: Any) -> None:
        y = block.norm(inputs[0])
        _, kept = block.attn(y, y, y, average_attn_weights=False)
        weights.append(kept.numpy())

    handles = [block.register_forward_pre_hook(keep) for block in net.blocks]
    with torch.no_grad():
        net.eval()(args)
    for handle in handles:
        handle.remove()
    return weights


def timm_net() -> nn.Module:
    """A small ViT of timm, with a class token, whose attention is fused."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(2)
    net = timm.models.vision_transformer.VisionTransformer(
        img_size=(32, 48), patch_size=8, embed_dim=32, depth=3, num_heads=4
    )
    for block in net.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.5)
    return net


def weights_of_timm(net: Any, args: Tensor) -> list[np.ndarray]:
    """The weights of each block, behind its softmax, with `fused_attn` off."""
    weights: list[np.ndarray] = []
    handles = []
    for block in net.blocks:
        block.attn.fused_attn = False
        keep = lambda module, args, output: weights.append(output.numpy())  # noqa: E731
        handles.append(block.attn.attn_drop.register_forward_hook(keep))
    with torch.no_grad():
        net.eval()(args)
    for block, handle in zip(net.blocks, handles, strict=True):
        block.attn.fused_attn = True
        handle.remove()
    return weights


def huggingface_net() -> nn.Module:
    """A small ViT of transformers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    config = transformers.ViTConfig(
        image_size=(32, 48),
        patch_size=8,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        initializer_range=0.5,
    )
    return transformers.ViTModel(config, add_pooling_layer=False)


def weights_of_huggingface(net: Any, args: Tensor) -> list[np.ndarray]:
    """The weights as `output_attentions` returns them from `eager`."""
    before = net.config._attn_implementation
    net.set_attn_implementation("eager")
    with torch.no_grad():
        output = net.eval()(args, output_attentions=True)
    net.set_attn_implementation(before)
    return [weights.numpy() for weights in output.attentions]


@pytest.mark.parametrize(
    ("build", "weights_of", "block"),
    [
        (Transformer, weights_of_multihead, "blocks.{}"),
        (timm_net, weights_of_timm, "blocks.{}"),
        pytest.param(
            huggingface_net,
            weights_of_huggingface,
            "re:layers?.{}$",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["torch", "timm", "transformers"],
)
def test_rollout_is_the_product_of_the_weights_up_to_a_layer(
    build: Callable[[], Any], weights_of: Callable[..., Any], block: str
) -> None:
    """The class token's row on the grid, at the second block and at the last; the
    attention of a block is that row of its own weights. The model stays as it was."""
    net = build()
    image = torch.rand(3, 32, 48)
    weights = weights_of(net, shown(image))
    layers = ",".join(block.format(number) for number in (1, 2))
    before = state_of(net)

    rollout = fv.cam(net, image, method="rollout", layers=layers, **SIZE)
    attention = fv.cam(net, image, method="attention", layers=layers, **SIZE)

    assert_same(before, state_of(net))
    assert len(rollout.maps) == 2
    for number, cam, of_block in zip((1, 2), rollout.maps, attention.maps, strict=True):
        expected = product(weights[: number + 1])[0, 1:].reshape(4, 6)
        np.testing.assert_allclose(cam.tensor.numpy(), expected, rtol=1e-3)
        row = weights[number][0].mean(0)[0, 1:].reshape(4, 6)
        np.testing.assert_allclose(of_block.tensor.numpy(), row, rtol=1e-3)


def test_without_a_class_token_it_is_the_mean_token() -> None:
    """The mean over all rows."""
    net = Transformer(has_class=False)
    image = torch.rand(3, 32, 48)
    weights = weights_of_multihead(net, shown(image))

    found = fv.cam(net, image, method="rollout", **SIZE)

    assert [cam.layer for cam in found.maps] == ["blocks.2"]
    expected = product(weights).mean(0).reshape(4, 6)
    np.testing.assert_allclose(found.tensor.numpy(), expected, rtol=1e-3)


def test_a_run_draws_it_for_each_layer(tmp_path: Path) -> None:
    """One map a block; the patches come before any attention, and are skipped."""
    found = fv.run(
        Transformer(),
        torch.rand(3, 32, 48),
        "patches,blocks.*,!*.*.*",
        reduce="rollout",
        normalize="none",
        scale=1,
        **SIZE,
    )
    assert [capture.layer for capture in found.captures] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    assert all(capture.row.reduce == "rollout" for capture in found.captures)
    (skip,) = found.images[0].skipped
    assert skip.layer == "patches"
    assert skip.reason.startswith("has no attention weights before it")


def test_arguments_of_attention_may_be_named() -> None:
    """`query=`, `key=` and `value=` are those by position."""

    class Attention(nn.Module):
        def __init__(self, named: bool) -> None:
            super().__init__()
            self.named = named

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(2).transpose(1, 2)[:, None]
            attend = nn.functional.scaled_dot_product_attention
            if self.named:
                output = attend(query=tokens, key=tokens, value=tokens)
            else:
                output = attend(tokens, tokens, tokens)
            return output[:, 0].transpose(1, 2).reshape(x.shape)

    image = torch.rand(3, 8, 8)
    maps = []
    for named in (False, True):
        net = nn.Sequential(Attention(named))
        cams = fv.cam(net, image, None, "attention", "Attention", preset="none")
        maps.append(cams.images[0].maps[0].tensor)
    assert torch.equal(*maps)


def test_what_has_no_weights_is_refused_in_a_line() -> None:
    """A CNN, attention within windows, and a target, on which attention does not
    depend."""
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    with pytest.raises(UsageError, match="has no attention weights before it"):
        fv.cam(convolution, torch.rand(3, 16, 16), method="rollout", preset="none")

    class Windows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(2).transpose(1, 2).reshape(4, 1, -1, 3)
            nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
            return x + 0

    with pytest.raises(UsageError, match="within 4 windows, not of all tokens"):
        net = nn.Sequential(Windows())
        fv.cam(net, torch.rand(3, 8, 8), None, "rollout", "Windows", preset="none")
    with pytest.raises(UsageError, match="target does nothing without gradients"):
        fv.cam(Transformer(), torch.rand(3, 32, 48), "sum", "rollout", **SIZE)
