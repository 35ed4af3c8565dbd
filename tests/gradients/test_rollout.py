"""Attention rollout and the attention of a block, against products in numpy of weights
that the libraries return themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from borrowed import assert_same, state_of
from networks import Net, attend
from torch import Tensor, nn
from torch.nn import functional

import featviz as fv
from featviz.errors import LayoutError, UsageError
from featviz.gradients.attention import AttentionPath, attended
from featviz.layout.tracing.hints import HintBook
from featviz.records import CaptureSite, Layer

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
    """Patches of 8×8 pixels, with a class token, two registers, or neither, and three
    blocks."""

    def __init__(self, has_class: bool = True, has_registers: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        if has_class:
            self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        if has_registers:
            self.register_tokens = nn.Parameter(torch.randn(1, 2, 16))
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def tokens(self, image: Tensor) -> Tensor:
        """What enters the first block."""
        patches = 3 * self.patches(image).flatten(2).transpose(1, 2)
        beside = [parameter for _, parameter in self.named_parameters(recurse=False)]
        return torch.cat([*beside, patches], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
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
    net.eval()
    weights = []
    with torch.no_grad():
        x = net.tokens(args)
        for block in net.blocks:
            y = block.norm(x)
            _, per_head = block.attn(y, y, y, average_attn_weights=False)
            weights.append(per_head.numpy())
            x = block(x)
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


@pytest.mark.medium
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
    """It is the class token's row on the grid, at the second block and at the last; the
    attention of a block is that row of its own weights. The model stays as it was."""
    net = build()
    image = torch.rand(3, 32, 48)
    weights = weights_of(net, shown(image))
    layers = ",".join(block.format(number) for number in (1, 2))
    before = state_of(net)

    rollout = fv.cam(net, image, method="rollout", layers=layers, **SIZE)
    attention = fv.cam(net, image, method="attention", layers=layers, **SIZE)

    assert_same(before, state_of(net))
    joined = [product(weights[:2]), product(weights)]
    assert_rows(rollout.maps, [matrix[0, 1:] for matrix in joined])
    assert_rows(attention.maps, [layer[0].mean(0)[0, 1:] for layer in weights[1:]])


def assert_rows(maps: Sequence[Any], rows: Sequence[np.ndarray]) -> None:
    """Each map is a row of a matrix on the grid of the patches."""
    for layer_map, row in zip(maps, rows, strict=True):
        expected = row.reshape(4, 6)
        np.testing.assert_allclose(layer_map.tensor.numpy(), expected, rtol=1e-3)


@pytest.mark.medium
def test_without_a_class_token_it_is_the_mean_token() -> None:
    """The mean over all rows."""
    net = Transformer(has_class=False)
    image = torch.rand(3, 32, 48)
    weights = weights_of_multihead(net, shown(image))

    page = fv.cam(net, image, method="rollout", **SIZE)

    assert [layer_map.layer for layer_map in page.maps] == ["blocks.2"]
    assert_rows(page.maps, [product(weights).mean(0)])


@pytest.mark.medium
def test_registers_stand_for_nothing() -> None:
    """Without a class token it is the mean over the patches' rows alone; behind one,
    they are columns that are left out."""
    image = torch.rand(3, 32, 48)
    alone = Transformer(has_class=False, has_registers=True)
    behind = Transformer(has_registers=True)
    products = [
        product(weights_of_multihead(net, shown(image))) for net in (alone, behind)
    ]

    pages = [fv.cam(net, image, method="rollout", **SIZE) for net in (alone, behind)]

    assert_rows(pages[0].maps, [products[0][2:, 2:].mean(0)])
    assert_rows(pages[1].maps, [products[1][0, 3:]])


@pytest.mark.medium
def test_a_run_draws_it_for_each_layer() -> None:
    """There is one map a block; the patches come before any attention, and are skipped."""
    layers = "patches,blocks.*,!*.*.*"
    image = torch.rand(3, 32, 48)

    result = fv.run(Transformer(), image, layers, reduce="rollout", **SIZE)

    names = [capture.layer for capture in result.captures]
    assert names == ["blocks.0", "blocks.1", "blocks.2"]
    assert {capture.row.reduce for capture in result.captures} == {"rollout"}
    (skip,) = result.images[0].skipped
    assert skip.layer == "patches"
    assert skip.reason.startswith("has no attention weights before it")


def attention_of(image: Tensor, way: Callable[[Any, Tensor], Any]) -> Tensor:
    """The attention of a network that is one layer."""
    net = nn.Sequential(Net(way))
    return fv.cam(net, image, None, "attention", "Net", preset="none").tensor


def by_name(self: nn.Module, x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)[:, None]
    arguments = {"query": tokens, "key": tokens, "value": tokens}
    output = functional.scaled_dot_product_attention(**arguments)
    return output[:, 0].transpose(1, 2).reshape(x.shape)


def test_arguments_of_attention_may_be_named() -> None:
    """`query=`, `key=` and `value=` are those by position."""
    image = torch.rand(3, 8, 8)
    maps = [attention_of(image, way) for way in (attend, by_name)]
    assert torch.equal(*maps)


def masked(self: nn.Module, x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)[:, None]
    mask = torch.ones(tokens.shape[2], tokens.shape[2]).tril().bool()
    output = functional.scaled_dot_product_attention(tokens, tokens, tokens, mask)
    return output[:, 0].transpose(1, 2).reshape(x.shape)


def test_a_mask_by_position_holds() -> None:
    """Where each token attends to those before it, the first gets more of the mean than
    the last."""
    attention = attention_of(torch.rand(3, 8, 8), masked).flatten()
    assert attention[0] > 0.05
    assert attention[-1] < 1e-3


def in_windows(self: nn.Module, x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2).reshape(-1, 1, 16, 3)
    functional.scaled_dot_product_attention(tokens, tokens, tokens)
    return x + 0


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Conv2d(3, 4, 3), "has no attention weights before it"),
        (Net(in_windows), "within 4 windows, not of all tokens"),
    ],
)
def test_what_has_no_weights_is_refused_in_a_line(
    layer: nn.Module, message: str
) -> None:
    """A CNN, and attention within windows."""
    image = torch.rand(3, 8, 8)
    with pytest.raises(UsageError, match=message):
        fv.cam(nn.Sequential(layer), image, None, "rollout", "0", preset="none")


def test_a_reason_is_said_once() -> None:
    """Of a ReLU that runs twice, and of two layers; the hint is a method that fits."""
    relu = nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), relu, nn.Conv2d(4, 4, 3), relu)
    with pytest.raises(UsageError) as caught:
        fv.cam(model, torch.rand(3, 8, 8), None, "rollout", "Conv2d,1", preset="none")
    assert caught.value.message.count("has no attention weights") == 1
    assert "skipped: layer 0, layer 1, layer 2 (has no" in caught.value.message
    assert caught.value.hint == "method gradcam needs no attention"


def test_windows_of_one_image_do_not_keep_the_next_from_its_map() -> None:
    """A small image is one window: attention of all tokens."""
    net = nn.Sequential(Net(in_windows))
    images = [torch.rand(3, 8, 8), torch.rand(3, 4, 4)]
    large, small = fv.cam(net, images, None, "rollout", "0", preset="none").images
    assert "within 4 windows" in str(large.error)
    assert small.error is None
    assert small.maps[0].tensor.shape == (4, 4)


def test_attention_has_no_target() -> None:
    """It does not depend on one."""
    message = "target does nothing without gradients"
    with pytest.raises(UsageError, match=message):
        fv.cam(Transformer(), torch.rand(3, 32, 48), "sum", "rollout", **SIZE)


def weights_of(tokens: int, heads: int = 2) -> Tensor:
    """Weights [1, heads, T, T], whose rows sum to one."""
    return torch.rand(1, heads, tokens, tokens).softmax(-1)


def mapped(path: AttentionPath, layout: str, method: str = "attention") -> Tensor:
    """The map of a path behind a layer of tokens in a layout that the user names."""
    site = CaptureSite(Layer(1, "block", "Block"), "output", 0, "")
    book = HintBook(nn.Identity(), (1, 3, 32, 32), [layout])
    assert path.last is not None
    return path.map_at(site, torch.zeros(1, len(path.last), 5), book, method)


def test_tokens_behind_the_grid_are_no_part_of_the_mean() -> None:
    """They ask for something else than the places do."""
    path = AttentionPath()
    weights = weights_of(18)
    path.add_block(weights)
    expected = weights[0].mean(0)[:16].mean(0)
    drawn = mapped(path, "tokens:4x4+0,2")
    torch.testing.assert_close(drawn.flatten(), expected)


def test_the_last_block_has_a_map_where_the_product_has_none() -> None:
    """A pooling between two blocks leaves fewer tokens; a new pass forgets it."""
    path = AttentionPath()
    for tokens in (16, 4):
        path.add_block(weights_of(tokens))
    assert mapped(path, "tokens:2x2").numel() == 4
    with pytest.raises(LayoutError, match="has 4 tokens behind a block of 16"):
        mapped(path, "tokens:2x2", "rollout")
    path.begin()
    path.add_block(weights_of(4))
    assert mapped(path, "tokens:2x2", "rollout").numel() == 4


def test_heads_are_no_windows() -> None:
    """Weights may come without an axis of images; a single token attends to itself."""
    path = AttentionPath()
    weights = weights_of(4, heads=3)
    path.add_block(weights[0])
    path.add_block(torch.ones(1, 3, 1, 1))
    assert path.reason == ""
    assert path.last is not None
    torch.testing.assert_close(path.last, weights[0].mean(0))


@pytest.mark.parametrize(
    ("call", "is_taken"),
    [
        (lambda x: x.softmax(-1), True),
        (lambda x: functional.softmax(x, dim=3), True),
        (lambda x: torch.softmax(x, 3), True),
        (lambda x: x.softmax(2), False),
        (lambda x: x[0].softmax(-1), False),
    ],
)
def test_weights_are_a_softmax_over_keys(
    call: Callable[[Tensor], Tensor], is_taken: bool
) -> None:
    """However the axis is counted; of classes it is none."""
    path = AttentionPath()
    with attended(path):
        call(torch.rand(1, 2, 4, 4))
    assert (path.last is not None) == is_taken
