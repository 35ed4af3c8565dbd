"""Receptive fields against gradients, in networks of every kind of layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from featviz.exemplars.collect import ExemplarSource, plan_targets
from featviz.exemplars.receptive import ReceptiveFields
from featviz.hooks.layers import list_layers
from featviz.models.load import adopt
from featviz.options import InputOptions


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
    """Moves the map by a pixel."""

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


class Windows(nn.Module):
    """Attention in rolled windows of 4 × 3 places, beside a mask that is made by assignments."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv, self.last = nn.Conv2d(3, 4, 2, 2), nn.Linear(4, 12), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.roll(self.patches(x), (1, 2), (2, 3))[:, :, :8, :6].permute(0, 2, 3, 1)
        cut = x.reshape(len(x), 2, 4, 2, 3, 4).transpose(2, 3).reshape(-1, 12, 4)
        q, k, v = self.qkv(cut).chunk(3, -1)
        mask = cut.new_zeros(12, 12)
        mask[:6, 6:] = 1.0
        found = (q @ k.transpose(-2, -1) + mask).softmax(-1) @ v
        found = found.reshape(-1, 2, 2, 4, 3, 4).transpose(2, 3).reshape(x.shape)
        return self.last(found.permute(0, 3, 1, 2))


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
    "rolled": Rolled,
    "windows": Windows,
}
"""Nets whose layer `last` the functions tell all of."""

HEIGHT, WIDTH = 16, 13
LONG = ("mirrored", "padding", "same", "channels last", "corners", "bilinear")
"""Those whose gradients take longest."""
Boxes = dict[tuple[int, int], tuple[int, int, int, int] | None]


def fields_of(
    net: nn.Module, layer: str, size: tuple[int, int]
) -> tuple[ReceptiveFields, ExemplarSource]:
    """What the tool says of a layer."""
    model = adopt(net.eval(), InputOptions(size=size, mean=(0.0,) * 3, std=(1.0,) * 3))
    blank = [torch.zeros(1, 3, *size)]
    layers = [one for one in list_layers(net) if one.name == layer]
    (target,) = (t for t in plan_targets(model, layers, blank).targets.values() if not t.site.key)
    return ReceptiveFields(model, [target], blank), target


def by_gradient(net: nn.Module, size: tuple[int, int], images: int = 48) -> Boxes:
    """The box around all pixels on which the gradient at each place of the output is not zero, for
    any of many images: a maximum passes it on to one pixel only."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in net.parameters():  # nothing cancels out, and no ReLU is closed
            parameter.data = parameter.detach().abs() + 0.1
        image = torch.rand(images, 3, *size, requires_grad=True)
    output: Tensor = net.eval()(image)
    weights = torch.arange(1.0, output.shape[1] + 1)[:, None, None]
    summed = (output * weights).sum((0, 1))
    boxes: Boxes = {}
    for row in range(summed.shape[0]):
        for column in range(summed.shape[1]):
            (gradient,) = torch.autograd.grad(summed[row, column], image, retain_graph=True)
            ys, xs = torch.nonzero((gradient != 0).any(0).any(0), as_tuple=True)
            boxes[row, column] = None
            if len(ys):
                ends = (int(xs.max()) + 1, int(ys.max()) + 1)
                boxes[row, column] = (int(xs.min()), int(ys.min()), *ends)
    return boxes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in COMPUTED],
)
def test_what_the_functions_tell_is_what_gradients_say(name: str) -> None:
    """Every place of the last layer, at borders and in the middle, pixel for pixel."""
    net = COMPUTED[name]()
    fields, target = fields_of(net, "last", (HEIGHT, WIDTH))
    assert fields.how(target) == "computed"
    expected = by_gradient(net, (HEIGHT, WIDTH))
    assert {place: fields.box(target, *place) for place in expected} == expected


def test_of_what_no_function_tells_the_whole_image_is_shown() -> None:
    """A map that is pasted into another: unknown, and said to be."""
    fields, target = fields_of(Pasted(), "last", (HEIGHT, WIDTH))
    assert fields.how(target) == "unknown"
    assert fields.box(target, 3, 3) == (0, 0, WIDTH, HEIGHT)
    assert fields.size(target) == (HEIGHT, WIDTH)


@pytest.mark.parametrize(
    ("layer", "how", "box"),
    [
        ("patches", "computed", (4, 8, 8, 12)),
        ("before", "computed", (4, 8, 8, 12)),
        ("last", "computed", (0, 0, 16, 16)),
    ],
)
def test_attention_sees_the_whole_image(
    layer: str, how: str, box: tuple[int, int, int, int]
) -> None:
    """Patches see themselves; behind attention all see everything."""
    fields, target = fields_of(Tokens(), layer, (16, 16))
    assert (fields.how(target), fields.box(target, 2, 1)) == (how, box)


def test_a_vector_has_no_place() -> None:
    """The whole input is shown of a layer behind global pooling."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    fields, target = fields_of(net, "3", (HEIGHT, WIDTH))
    assert fields.how(target) == "no place"
    assert fields.size(target) == (HEIGHT, WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "sees"),
    [
        ("conv1", 7),
        ("maxpool", 11),
        ("layer1", 43),
        pytest.param("layer2", 99, marks=pytest.mark.slow),
        pytest.param("layer3", 211, marks=pytest.mark.slow),
        ("layer4", 435),
    ],
)
def test_resnet18_sees_what_is_known_of_it(layer: str, sees: int) -> None:
    """The sizes that the formula of strides and kernels gives, in an image that has room for them
    (Araujo, Norris, Sim, "Computing Receptive Fields of Convolutional Neural Networks", 2019)."""
    fields, target = fields_of(torchvision.models.resnet18(weights=None), layer, (480, 480))
    assert fields.how(target) == "computed" and fields.size(target) == (sees, sees)


def test_nothing_of_the_model_changes() -> None:
    """Flags, buffers, gradients and hooks are as before."""
    make: Callable[[], nn.Module] = COMPUTED["same"]
    net = make().train()
    model = adopt(net, InputOptions(size=(12, 12), mean=(0.0,) * 3, std=(1.0,) * 3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()
    blank = [torch.zeros(1, 3, 12, 12)]
    targets = plan_targets(model, list_layers(net), blank).targets
    fields = ReceptiveFields(model, list(targets.values()), blank)
    assert [fields.how(target) for target in targets.values()]
    assert net.training and all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
