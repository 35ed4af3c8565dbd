"""Receptive fields against gradients, in networks of every kind of layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

from featviz.exemplars.collecting import ExemplarSource, plan_targets
from featviz.exemplars.receptive import ReceptiveFields
from featviz.hooks.layers import list_layers
from featviz.models.load import adopt
from featviz.models.preprocess import InputOptions

from .nets import COMPUTED, MEASURED, Tokens

HEIGHT, WIDTH = 20, 17
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


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_what_no_function_tells_is_measured(name: str) -> None:
    """The same boxes, and the tool says that they are measured."""
    net = MEASURED[name]()
    fields, target = fields_of(net, "last", (HEIGHT, WIDTH))
    assert fields.how(target) == "measured"
    places = [(0, 0), (1, 1), (7, 9), (19, 16)]
    found = {place: fields.box(target, *place) for place in places}
    expected = by_gradient(net, (HEIGHT, WIDTH))
    whole = (0, 0, WIDTH, HEIGHT)
    assert found == {place: expected[place] or whole for place in places}


@pytest.mark.parametrize(
    ("layer", "how", "box"),
    [
        ("patches", "computed", (4, 8, 8, 12)),
        ("before", "measured", (4, 8, 8, 12)),
        ("last", "computed", (0, 0, 16, 16)),
    ],
)
def test_attention_sees_the_whole_image(
    layer: str, how: str, box: tuple[int, int, int, int]
) -> None:
    """Patches see themselves, before attention as tokens, too; behind it all see everything."""
    fields, target = fields_of(Tokens(), layer, (16, 16))
    assert (fields.how(target), fields.box(target, 2, 1)) == (how, box)


def test_a_vector_has_no_place() -> None:
    """The whole input is shown of a layer behind global pooling."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    fields, target = fields_of(net, "3", (HEIGHT, WIDTH))
    assert fields.how(target) == "no place"
    assert fields.size(target) == (HEIGHT, WIDTH)


def test_what_has_no_gradient_is_shown_whole() -> None:
    """A layer that autograd cannot follow is said to be unknown."""

    class Cut(nn.Module):
        """Rolls a map that was taken out of the graph."""

        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.roll(x.detach(), 1, 3))

    fields, target = fields_of(Cut(), "last", (HEIGHT, WIDTH))
    assert fields.how(target) == "unknown"
    assert fields.box(target, 3, 3) == (0, 0, WIDTH, HEIGHT)


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


@pytest.mark.parametrize(
    ("name", "maps"),
    [
        pytest.param("densenet121", "features", marks=pytest.mark.slow),
        pytest.param("googlenet", "inception5b", marks=pytest.mark.slow),
        ("mobilenet_v3_small", "features"),
        pytest.param("shufflenet_v2_x0_5", "conv5", marks=pytest.mark.slow),
        pytest.param("convnext_tiny", "features", marks=pytest.mark.slow),
        pytest.param("inception_v3", "Mixed_7c", marks=pytest.mark.slow),
        pytest.param("efficientnet_b0", "features", marks=pytest.mark.slow),
        pytest.param("regnet_y_400mf", "trunk_output", marks=pytest.mark.slow),
    ],
)
def test_convolutional_networks_need_no_measuring(name: str, maps: str) -> None:
    """The functions of torchvision's networks tell all, with all their ways to join branches."""
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    net = torchvision.models.get_model(name, weights=None, **options)
    fields, target = fields_of(net, maps, (96, 96))
    assert fields.how(target) == "computed"


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
