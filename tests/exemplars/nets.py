"""Small networks whose layers see the input in every way that there is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A strided block whose shortcut sees less than its body; the sum is in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)
        )
        self.short = nn.Conv2d(3, 4, 1, stride=2)
        self.last = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.short(x)
        return self.last(out)


class Branches(nn.Module):
    """Kernels of different sizes, joined by their channels; half of them go on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, (5, 1), padding=(2, 0))
        self.last = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.a(x), F.max_pool2d(self.b(x), 3, 1, 1)], dim=1)
        _, half = joined.chunk(2, dim=1)
        return self.last(half)


class Excitation(nn.Module):
    """Squeeze and excitation: each place is scaled by a mean over all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.last = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.last(x * self.fc(F.adaptive_avg_pool2d(x, 1)).sigmoid())


class Hourglass(nn.Module):
    """Down, up again in one of several ways, and joined with what was there."""

    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, 2, 1), up
        self.last = nn.Conv2d(7, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(self.down(x))
        return self.last(torch.cat([up[..., : x.shape[-2], : x.shape[-1]], x], 1))


class ChannelsLast(nn.Module):
    """As in ConvNeXt: a linear layer and a normalisation at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 5, padding=2), nn.LayerNorm(4)
        self.last = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class Rolled(nn.Module):
    """Moves the map by a pixel, which no table of places follows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.roll(self.conv(x), (1, 2), (2, 3)))


class Pasted(nn.Module):
    """Writes its map into a tensor of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        room = torch.zeros(x.shape[0], 4, x.shape[2] + 2, x.shape[3])
        room[:, :, 1:-1] = x
        return self.last(room)


class Tokens(nn.Module):
    """Patches, a class token and one block of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.class_token = nn.Parameter(torch.ones(1, 1, 8))
        self.before = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.before(torch.cat([self.class_token.expand(len(x), -1, -1), x], 1))
        return self.last(x + self.attention(x, x, x)[0])


def chain(*layers: nn.Module) -> Callable[[], nn.Module]:
    """A factory of a Sequential whose last layer is called `last`."""

    def make() -> nn.Module:
        net = nn.Sequential(*layers[:-1])
        net.add_module("last", layers[-1])
        return net

    return make


def up(module: nn.Module) -> Callable[[], nn.Module]:
    return lambda: Hourglass(module)


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "strides": chain(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1)),
    "dilation": chain(nn.Conv2d(3, 4, 3, dilation=3), nn.Conv2d(4, 4, 3, padding=2, dilation=2)),
    "pools": chain(
        nn.MaxPool2d(3, 2, 1), nn.Conv2d(3, 4, 3), nn.AvgPool2d(2, ceil_mode=True), nn.Identity()
    ),
    "dilated pool": chain(nn.Conv2d(3, 4, 2), nn.MaxPool2d(2, 1, dilation=2)),
    "same": chain(nn.Conv2d(3, 4, 4, padding="same"), nn.BatchNorm2d(4), nn.SiLU()),
    "adaptive": chain(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d((5, 3))),
    "padding": chain(nn.ZeroPad2d((3, 0, 1, 2)), nn.Conv2d(3, 4, 3), nn.LeakyReLU()),
    "mirrored": chain(nn.ReflectionPad2d(2), nn.Conv2d(3, 4, 5)),
    "repeated": chain(nn.ReplicationPad2d((1, 2, 0, 3)), nn.Conv2d(3, 4, 3)),
    "around": chain(nn.CircularPad2d(1), nn.Conv2d(3, 4, 3)),
    "shuffled": chain(
        nn.Conv2d(3, 8, 3, 2),
        nn.PixelShuffle(2),
        nn.Conv2d(2, 2, 3, padding=1),
        nn.PixelUnshuffle(2),
    ),
    "residual": Residual,
    "branches": Branches,
    "excitation": Excitation,
    "group norm": chain(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)),
    "transposed": up(nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1)),
    "gaps": chain(nn.Conv2d(3, 4, 3, 2), nn.ConvTranspose2d(4, 4, 2, 3, 1)),
    "nearest": up(nn.Upsample(scale_factor=2)),
    "bilinear": up(nn.Upsample(scale_factor=2, mode="bilinear")),
    "corners": up(nn.UpsamplingBilinear2d(size=(20, 18))),
    "channels last": ChannelsLast,
}
"""Nets whose layer `last` the functions tell all of."""

MEASURED: dict[str, Callable[[], nn.Module]] = {"rolled": Rolled, "pasted": Pasted}
"""Nets whose functions do not tell it."""
