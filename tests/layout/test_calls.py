"""Receptive fields are followed through a function, however it is called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import featviz as fv

IMAGE = torch.rand(3, 24, 24)


class Between(nn.Module):
    """Two convolutions with a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], channels: int = 4) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """First, function, second."""
        return self.second(self.function(self.first(x)))


def field_behind(model: nn.Module) -> object:
    """What a value of the second convolution sees."""
    result = fv.run(model, IMAGE, "second", preset="none")
    return result.captures[0].row.receptive_field


@pytest.mark.parametrize(
    ("by_name", "by_position", "channels"),
    [
        (
            lambda x: torch.cat(tensors=[x, x.relu()], dim=1),
            lambda x: torch.cat([x, x.relu()], 1),
            8,
        ),
        (
            lambda x: torch.max(x, -x),
            lambda x: torch.maximum(x, -x),
            4,
        ),
    ],
    ids=["cat", "max"],
)
def test_a_call_by_names_sees_what_a_call_by_position_does(
    by_name: Callable[[Tensor], Tensor],
    by_position: Callable[[Tensor], Tensor],
    channels: int,
) -> None:
    """Arguments by name, and torch.max of two tensors, which is torch.maximum."""
    expected = field_behind(Between(by_position, channels))

    assert field_behind(Between(by_name, channels)) == expected
    assert expected is not None
