"""Gates that are called attention and give maps, beside the weights of an attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import featviz as fv


class AttentionGate(nn.Module):
    """Weighs each place of a map, as in an Attention U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[1, 8, H, W]."""
        return x * self.gate(x).sigmoid()


class Gated(nn.Module):
    """A map of a quarter of the input's size, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attn = nn.Conv2d(3, 8, 4, 4), AttentionGate()

    def forward(self, x: Tensor) -> Tensor:
        """[1, 8, H, W]."""
        return self.attn(self.stem(x))


class Weights(nn.Module):
    """Weights of tokens for each other, of two heads."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[1, heads, T, T] of [1, T, D]."""
        heads = tokens.unflatten(2, (2, -1)).transpose(1, 2)
        return (heads @ heads.transpose(-2, -1)).softmax(-1)


class Attending(nn.Module):
    """Tokens of patches of a quarter of the input's side, and their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attn = nn.Conv2d(3, 8, 16, 16), Weights()

    def forward(self, x: Tensor) -> Tensor:
        """[1, D]."""
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        return (self.attn(tokens) @ tokens[:, None]).mean((1, 2))


@pytest.mark.parametrize(("model", "layout"), [(Gated, "nchw"), (Attending, "attention")])
def test_a_square_map_is_no_matrix_of_weights(model: type[nn.Module], layout: str) -> None:
    """At 64 pixels both have 16 rows and columns, as many as there are tokens of 4 × 4 patches."""
    (maps,) = fv.run(model(), torch.rand(3, 64, 64), "attn", size=64).captures
    assert maps.row.shape[-2:] == [16, 16] and maps.row.layout == layout


def test_the_layout_of_each_size_is_looked_at() -> None:
    """After an image of which the gate has another number of rows."""
    images = [torch.rand(3, 80, 80), torch.rand(3, 64, 64)]
    run = fv.run(Gated(), images, "attn", preset="none")
    assert [(maps.row.shape[-1], maps.row.layout) for maps in run.captures] == [
        (20, "nchw"),
        (16, "nchw"),
    ]
