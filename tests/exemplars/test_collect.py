"""Receptive fields against gradients, in networks of every kind of layer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from borrowed import assert_same, state_of
from networks import Net
from torch import Tensor, nn
from torch.nn import functional

from featviz.exemplars.collect import ExemplarCollector, strongest_values
from featviz.exemplars.fields import receptive_fields
from featviz.hooks.layers import list_layers
from featviz.layout import Maps
from featviz.layout.tracing.fields import PixelBox, ReceptiveField, of_image
from featviz.models.load import adopt
from featviz.options import InputOptions


def residual() -> nn.Module:
    """A strided block whose shortcut sees less than its body; the sum is in place."""
    body = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
    )
    return Net(
        lambda self, x: self.last(operator.iadd(self.body(x), self.short(x))),
        body=body,
        short=nn.Conv2d(3, 4, 1, stride=2),
        last=nn.ReLU(inplace=True),
    )


def between(way: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Something that no module does, between two convolutions."""
    return lambda: Net(
        lambda self, x: self.last(way(self.conv(x))),
        conv=nn.Conv2d(3, 4, 3, padding=1),
        last=nn.Conv2d(4, 4, 1),
    )


def pasted(x: Tensor) -> Tensor:
    """A map that is put into another."""
    larger = torch.zeros(x.shape[0], 4, x.shape[2] + 2, x.shape[3])
    larger[:, :, 1:-1] = x
    return larger


def tokens() -> nn.Module:
    """Patches, a class token and one block of attention."""

    def way(self: Any, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.before(torch.cat([self.class_token.expand(len(x), -1, -1), x], 1))
        return self.last(x + self.attention(x, x, x)[0])

    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    norms = {"before": nn.LayerNorm(8), "last": nn.LayerNorm(8)}
    net = Net(way, patches=nn.Conv2d(3, 8, 4, 4), attention=attention, **norms)
    net.class_token = nn.Parameter(torch.ones(1, 1, 8))
    return net


def chain(*layers: nn.Module) -> Callable[[], nn.Module]:
    """A factory of a Sequential whose last layer is called `last`."""

    def make() -> nn.Module:
        net = nn.Sequential(*layers[:-1])
        net.add_module("last", layers[-1])
        return net

    return make


def up(module: nn.Module) -> Callable[[], nn.Module]:
    """Down, up again in one of several ways, and joined with what was there."""

    def way(self: Any, x: Tensor) -> Tensor:
        up = self.up(self.down(x))
        return self.last(torch.cat([up[..., : x.shape[-2], : x.shape[-1]], x], 1))

    convs = {"down": nn.Conv2d(3, 4, 3, 2, 1), "last": nn.Conv2d(7, 4, 3, padding=1)}
    return lambda: Net(way, **convs, up=module)


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "strides": chain(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1)),
    "dilation": chain(
        nn.Conv2d(3, 4, 3, dilation=3), nn.Conv2d(4, 4, 3, padding=2, dilation=2)
    ),
    "pools": chain(
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(3, 4, 3),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.Identity(),
    ),
    "dilated pool": chain(
        nn.MaxPool2d(3, 2, 1, dilation=2, ceil_mode=True), nn.Conv2d(3, 4, 3)
    ),
    "dilated groups up": chain(
        nn.Conv2d(3, 4, 3, 2, 1),
        nn.ConvTranspose2d(4, 4, 3, 2, 3, output_padding=1, groups=2, dilation=3),
    ),
    "adaptive": chain(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d((5, 3))),
    "adaptive down": chain(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d((5, None))),
    "one axis": chain(
        nn.Conv2d(3, 4, (1, 5), (1, 2), (0, 2)), nn.AvgPool2d((3, 1), (2, 1), (1, 0))
    ),
    "one axis up": chain(
        nn.Conv2d(3, 4, 3, (4, 3)),
        nn.ConvTranspose2d(
            4, 4, (2, 3), (3, 2), (1, 0), output_padding=(2, 0), dilation=(1, 2)
        ),
    ),
    "one slice": chain(
        nn.Conv2d(3, 3, 1),
        nn.Unflatten(1, (3, 1)),
        nn.Conv3d(3, 4, (1, 3, 5), (1, 2, 1), (0, 0, 2)),
        nn.Flatten(1, 2),
    ),
    "padding": chain(nn.ZeroPad2d((3, 0, 1, 2)), nn.Conv2d(3, 4, 3), nn.LeakyReLU()),
    "shuffled": chain(
        nn.Conv2d(3, 8, 3, 2),
        nn.PixelShuffle(2),
        nn.Conv2d(2, 2, 3, 1, 1),
        nn.PixelUnshuffle(2),
    ),
    "residual": residual,
    "transposed": up(nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1)),
    "bilinear": up(nn.Upsample(scale_factor=2, mode="bilinear")),
    **{
        name: between(way)
        for name, way in {
            "rolled": lambda x: torch.roll(x, (1, 2), (2, 3)),
            "gated": lambda x: functional.glu(torch.cat([x, x.roll(2, 3)], 1), 1),
            "gated in halves": lambda x: functional.glu(torch.cat([x, x], 3)),
            "einsum of channels": lambda x: torch.einsum(
                "bchw,cd->bdhw", x, torch.ones(4, 4)
            ),
            "einsum of rows": lambda x: torch.einsum(
                "bchw,hk->bckw", x, torch.ones(16, 16)
            ),
            "matrices": lambda x: x @ torch.ones(13, 5),
            "matrices in front": lambda x: torch.ones(4, 16) @ x,
            "windows of a map": lambda x: functional.unfold(x, 3, padding=1).unflatten(
                2, SIZE
            )[:, 8::9],
            "windows of an axis": lambda x: x.unfold(2, 3, 2).sum(-1),
            "windows by name": lambda x: x.unfold(dimension=3, size=2, step=3).amax(-1),
            "larger of two": lambda x: torch.max(x, x.flip(2)),
            "of length one": lambda x: functional.normalize(x, dim=3),
            "normalised": lambda x: functional.layer_norm(x, x.shape[3:]) ** 3,
            "one row": lambda x: x.sum(2, keepdim=True),
            "rows as one": lambda x: x.mean(2)[:, :, None],
            "moved": lambda x: x.movedim(2, 3).flip(3).mT[..., 2:],
            "halves swapped": lambda x: torch.cat(x.chunk(2, 3)[::-1], 3),
            "shuffled channels": lambda x: functional.channel_shuffle(x, 2),
            "filled": lambda x: x + torch.zeros_like(x[..., :1]).expand(x.shape),
        }.items()
    },
}
"""Nets whose layer `last` the functions tell all of."""

SIZE = (16, 13)
"""Height and width of the input."""
Boxes = dict[tuple[int, ...], PixelBox | None]
"""By the place in the map; None for one that sees no pixel."""


def plain_inputs(size: tuple[int, int]) -> InputOptions:
    return InputOptions(size=size, mean=(0.0,) * 3, std=(1.0,) * 3)


def seen_by(
    net: nn.Module, layer: str, size: tuple[int, int] = SIZE
) -> ReceptiveField | None:
    """What the units of a layer see; None where it is unknown."""
    model = adopt(net.eval(), plain_inputs(size))
    blank = [torch.zeros(1, 3, *size)]
    layers = [listed for listed in list_layers(net) if listed.name == layer]
    sources = ExemplarCollector(model, layers, blank).sources.values()
    (source,) = [source for source in sources if not source.site.key]
    return receptive_fields(model, [source], blank).get(source.site)


def uncancelled(net: nn.Module) -> nn.Module:
    """The network with weights of which none cancel out, and no ReLU is closed."""
    for parameter in net.parameters():
        parameter.data = parameter.detach().abs() + 0.1
    return net.eval()


def box_around(mask: Tensor) -> PixelBox | None:
    """The box around the pixels [H, W] that are true."""
    rows, columns = torch.nonzero(mask, as_tuple=True)
    if not len(rows):
        return None
    first = (int(columns.min()), int(rows.min()))
    return PixelBox(*first, int(columns.max()) + 1, int(rows.max()) + 1)


def by_gradient(net: nn.Module) -> Boxes:
    """The box around all pixels on which the gradient at each place of the output is
    not zero, for any of 32 images: a maximum passes it on to one pixel only."""
    image = torch.rand(32, 3, *SIZE, generator=torch.Generator().manual_seed(1))
    image.requires_grad_()
    output: Tensor = uncancelled(net)(image)
    weights = torch.arange(1.0, output.shape[1] + 1)[:, None, None]
    summed = (output * weights).sum((0, 1))
    boxes: Boxes = {}
    for position in np.ndindex(*summed.shape):
        (gradient,) = torch.autograd.grad(summed[position], image, retain_graph=True)
        boxes[position] = box_around((gradient != 0).any(0).any(0))
    return boxes


SLOW = ("bilinear", "transposed")


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in COMPUTED]
)
def test_what_the_functions_tell_is_what_gradients_say(name: str) -> None:
    """Every place of the last layer, at borders and in the middle, pixel for pixel."""
    net = COMPUTED[name]()
    field = seen_by(net, "last")
    assert field is not None
    expected = by_gradient(net)
    assert {place: field.box(*place) for place in expected} == expected


def test_what_no_function_tells_is_unknown() -> None:
    """A map that is put into another."""
    assert seen_by(between(pasted)(), "last") is None


@pytest.mark.parametrize(
    ("layer", "box"),
    [
        ("patches", (4, 8, 8, 12)),
        ("before", (4, 8, 8, 12)),
        ("last", (0, 0, 16, 16)),
    ],
)
def test_attention_sees_the_whole_image(
    layer: str, box: tuple[int, int, int, int]
) -> None:
    """Patches see themselves; behind attention all see everything."""
    field = seen_by(tokens(), layer, (16, 16))
    assert field is not None
    assert field.box(2, 1) == box


def test_a_vector_has_no_place() -> None:
    """Nothing is known of a layer behind global pooling."""
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert seen_by(nn.Sequential(pooled, nn.Linear(3, 2)), "1") is None


@pytest.mark.slow
def test_resnet18_sees_what_is_known_of_it() -> None:
    """The size that the formula of strides and kernels gives, in an image that is large
    enough for it (Araujo, Norris, Sim, "Computing Receptive Fields of Convolutional
    Neural Networks", 2019)."""
    field = seen_by(torchvision.models.resnet18(weights=None), "layer4", (448, 448))
    assert field is not None
    assert field.largest == (435, 435)


@pytest.mark.medium
def test_nothing_of_the_model_changes() -> None:
    """Flags, buffers, gradients and hooks are as before."""
    net = COMPUTED["strides"]()
    model = adopt(net, plain_inputs((12, 12)))
    net.train()
    before = state_of(net)
    blank = [torch.zeros(1, 3, 12, 12)]
    sources = list(ExemplarCollector(model, list_layers(net), blank).sources.values())

    fields = receptive_fields(model, sources, blank)

    assert len(fields) == len(sources) > 0
    assert_same(before, state_of(net))


@pytest.mark.parametrize(
    ("layout", "shape", "rank_by", "position"),
    [
        ("nchw", (1, 4, 5), "max", (2, 3, 4, 5)),
        ("nchw", (1, 4, 5), "mean", (-1,) * 4),
        ("vector", (1, 4, 5), "max", (-1,) * 4),
        ("ncthw", (3, 4, 5), "max", (-1,) * 4),
    ],
)
def test_a_value_has_a_position_in_a_map_of_the_image(
    layout: str, shape: tuple[int, ...], rank_by: Any, position: tuple[int, ...]
) -> None:
    """Not in a vector, among the steps of a clip, or where the whole map counts; NaN and
    infinity are passed over."""
    data = torch.zeros(2, *shape)
    data[0, -1, 2, 3] = 7
    data[0, -1, 0, 0] = torch.nan
    data[0, -1, 3, 0] = torch.inf
    data[1] = torch.nan
    strongest = strongest_values(Maps(layout, data), rank_by)
    count = data[0].numel() - 2
    expected = 7 if rank_by == "max" else 7 / count
    assert strongest.values[0] == pytest.approx(expected)
    assert tuple(strongest.positions[0]) == position
    assert not np.isfinite(strongest.values[1])


def test_fields_that_step_evenly_are_six_numbers() -> None:
    """Begin, end and step of rows and of columns; none where a row or a column begins,
    or ends, elsewhere, or a single place does."""
    pixels = torch.stack([table[0, 0] for table in of_image((1, 1, 6, 8))])
    assert ReceptiveField(pixels).lines((6, 8)) == [0, 1, 1, 0, 1, 1]
    rows = (slice(None), 3)
    places: list[tuple[int, Any]] = [(0, 3), (2, 3), (1, rows), (3, rows), (0, (3, 5))]
    for edge, place in places:
        edges = pixels.clone()
        edges[edge][place] -= 1
        assert ReceptiveField(edges).lines((6, 8)) is None
