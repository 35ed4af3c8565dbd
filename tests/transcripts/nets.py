"""Networks of the transcripts, where they stand as `net.py`. Their weights are multiples
of 1/8 and their images are black and white, so that float32 holds every sum exactly."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def eighths(module: nn.Module, step: int) -> None:
    """Set all weights to multiples of 1/8 from -3/8 to 3/8, in an order that no flip and
    no exchange of axes leaves as it is.

    Args:
        step: no multiple of 7, and so that no two filters are alike.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            numbers = torch.arange(parameter.numel()) * step % 7 - 3
            parameter.copy_(numbers.reshape(parameter.shape) / 8)


class Small(nn.Module):
    """Images [3, 8, 16] to five classes. `act` runs twice, a third ReLU is a function,
    and `far` is a branch."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.edges = nn.Conv2d(3, 4, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.mix = nn.Conv2d(4, width, 3, stride=2, padding=1, groups=2)
        self.far = nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(width, 5)
        for step, module in ((5, self.mix), (3, self.far), (4, self.head)):
            eighths(module, step)
        weight = self.edges.weight.data.zero_()
        bias = self.edges.bias.data.zero_()
        # red as it is
        weight[0, 0, 1, 1] = 1
        # where green begins (from left to right: 1) and ends (-1)
        weight[1, 1, 1, 2] = 1
        weight[1, 1, 1, 0] = -1
        # constant
        bias[2] = 0.5
        # red again, but never above zero
        weight[3, 0, 1, 1] = 1
        bias[3] = -1

    def forward(self, image: Tensor) -> Tensor:
        edges = self.act(self.edges(image))
        mixed = self.act(self.mix(edges))
        joined = F.relu(mixed + self.far(mixed))
        return self.head(self.pool(joined).mean((2, 3)))
