"""A call is named by who calls: a shared module is a layer in each place where it
stands."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import Net
from torch import Tensor, nn
from torch.nn import functional as F

import featviz as fv
from featviz.hooks.capture import hooked, list_functions
from featviz.hooks.layers import list_layers
from featviz.hooks.selectors import parse, select
from featviz.records import CaptureSite

from .small_net import Maps, Unit, assert_equal, call_counts, grab

IMAGE = torch.randn(1, 3, 6, 8, generator=torch.Generator().manual_seed(0))


class Conv(nn.Module):
    """Ultralytics' Conv: the activation is one object for the whole network."""

    default_act = nn.SiLU()

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.act = Conv.default_act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class Yolo(nn.Module):
    """Three convolutions with one activation, the third one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Conv()
        self.m = nn.ModuleList([Conv(), Conv()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.m[0](self.stem(x))
        return self.m[1](self.m[1](x))


def convolutions(model: Yolo) -> Maps:
    """What each convolution gives, by hand."""
    with torch.no_grad():
        stem = model.stem.conv(IMAGE)
        first = model.m[0].conv(F.silu(stem))
        second = model.m[1].conv(F.silu(first))
        third = model.m[1].conv(F.silu(second))
    return {"stem": [stem], "m.0": [first], "m.1": [second, third]}


def names(model: nn.Module, selectors: str) -> list[str]:
    return [layer.name for layer in select(list_layers(model), parse(selectors))]


def test_each_caller_has_its_own_calls() -> None:
    """The activation's output stands under the name of each caller; two calls of one
    caller stay two."""
    model = Yolo().eval()
    maps = grab(model, "SiLU", IMAGE)
    convs = convolutions(model)
    assert_equal(
        maps,
        {
            "stem.act": [F.silu(convs["stem"][0])],
            "m.0.act": [F.silu(convs["m.0"][0])],
            "m.1.act": [F.silu(convs["m.1"][0]), F.silu(convs["m.1"][1])],
        },
    )


def test_inputs_and_gradients_belong_to_the_caller_too() -> None:
    """What goes into the activation at one caller, and the gradient there."""
    model = Yolo().eval()
    captures: dict[str, Tensor] = {}
    layers = select(list_layers(model), parse("m.0.act"))

    def keep(site: CaptureSite, tensor: Tensor) -> None:
        captures[f"{site.layer.name} {site.stem}"] = tensor.clone()

    with hooked(model, layers, keep, capture_kinds=("input", "grad")):
        model(IMAGE).sum().backward()

    into = convolutions(model)["m.0"][0]
    first = F.silu(into).requires_grad_()
    (gradient,) = torch.autograd.grad(model.m[1](model.m[1](first)).sum(), first)
    assert list(captures) == ["m.0.act input", "m.0.act grad"]
    torch.testing.assert_close(captures["m.0.act input"], into)
    torch.testing.assert_close(captures["m.0.act grad"], gradient)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("SiLU", ["stem.act", "m.0.act", "m.1.act"]),
        ("SiLU@m.*", ["m.0.act", "m.1.act"]),
        ("m.1.*", ["m.1.conv", "m.1.act"]),
        ("re:^m.*act$", ["m.0.act", "m.1.act"]),
        ("SiLU#-1", ["m.1.act"]),
        ("SiLU#1", ["m.0.act"]),
        ("*.act,!stem.*", ["m.0.act", "m.1.act"]),
    ],
)
def test_selectors_match_the_name_at_each_caller(text: str, taken: list[str]) -> None:
    """Globs, regular expressions, indices and exclusions speak of these names."""
    assert names(Yolo(), text) == taken


def test_a_sequential_calls_by_position() -> None:
    """Plain nn.Sequential, also one that is called twice."""
    relu = nn.ReLU()
    row = nn.Sequential(nn.Conv2d(3, 3, 1), relu, nn.Conv2d(3, 3, 1), relu)
    maps = grab(nn.Sequential(row, nn.Identity(), row), "ReLU", IMAGE)
    with torch.no_grad():
        first = row[0](IMAGE).relu()
        second = row[2](first).relu()
        third = row[0](second).relu()
        fourth = row[2](third).relu()
    assert_equal(
        maps, {"0.1": [first], "0.3": [second], "2.1": [third], "2.3": [fourth]}
    )


def test_a_caller_that_is_reached_by_a_method() -> None:
    """A module whose forward is called as a method is not seen: the nearest name inside
    it counts."""
    model = Net(lambda self, x: self.body.act(self.body.forward(x)), body=Yolo())
    model.body.act = Conv.default_act
    assert call_counts(grab(model, "SiLU", IMAGE)) == {
        "body.stem.act": 1,
        "body.m.0.act": 1,
        "body.m.1.act": 2,
        "body.act": 1,
    }


def test_a_shared_block_shares_what_is_inside() -> None:
    """Modules and functions inside a block are named by where the block stands."""
    unit = Unit()
    model = nn.Sequential(unit, nn.Identity(), nn.Sequential(unit))
    maps = grab(model, "Conv2d,fn:add", IMAGE)
    functions = [layer.name for layer in list_functions(model, [IMAGE])]
    with torch.no_grad():
        first = unit.conv(IMAGE)
        second = unit.conv(unit(IMAGE))
    assert functions == ["0/fn:add", "2.0/fn:add"]
    assert call_counts(maps) == dict.fromkeys(["0.conv", "2.0.conv", *functions], 1)
    assert torch.equal(maps["0.conv"][0], first)
    assert torch.equal(maps["2.0.conv"][0], second)


@pytest.mark.parametrize(
    ("selectors", "silent"),
    [("ReLU", []), ("*", ["spare", "unused"]), ("shared,unused.0", ["shared"])],
)
def test_a_module_never_ran_only_if_it_ran_under_no_name(
    selectors: str, silent: list[str]
) -> None:
    """A module that runs under one name is not named for another, such as the model
    itself, which only hands it on; one that runs under none is named once."""
    shared = nn.ReLU()
    spare = nn.Tanh()
    model = Net(
        lambda self, x: self.used(x),
        shared=shared,
        spare=spare,
        used=nn.Sequential(shared),
        unused=nn.Sequential(shared, spare),
    )
    layers = select(list_layers(model), parse(selectors))
    with hooked(model, layers, lambda *_: None) as recorder:
        model(IMAGE)
    assert [layer.name for layer in recorder.never_ran] == silent


@pytest.mark.parametrize(
    ("layers", "names"),
    [("Conv2d", ["a", "b.1"]), ("fn:relu", ["fn:relu"]), ("b.1", ["b.1"])],
)
def test_the_calls_of_a_copy_are_those_of_its_original(
    layers: str, names: list[str]
) -> None:
    """Hooks are copied with a module, and tell the layer for which they were
    registered."""
    model = Net(
        lambda self, x: copy.deepcopy(self.b)(self.a(x).relu()),
        a=nn.Conv2d(3, 3, 1),
        b=nn.Sequential(nn.ReLU(), nn.Conv2d(3, 2, 1)),
    )
    run = fv.run(model, IMAGE[0].clamp(0, 1), layers, preset="none")
    assert [maps.layer for maps in run.captures] == names
    assert not run.failures


def types(model: nn.Module) -> list[str]:
    return [layer.type for layer in list_layers(model)]


def test_layers_of_a_model_that_was_changed_are_read_anew() -> None:
    """A module that was exchanged, added or taken away is seen in a model that was read
    before."""
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU())
    assert types(model) == ["Sequential", "Conv2d", "ReLU"]
    model[1] = nn.Sigmoid()
    model.append(nn.Flatten())
    assert types(model) == ["Sequential", "Conv2d", "Sigmoid", "Flatten"]
    del model[2]
    model.append(model[0])
    assert names(model, "*") == ["", "0", "1", "2"]
    model[0] = nn.Conv2d(3, 3, 1)
    assert call_counts(grab(model, "Conv2d", IMAGE)) == {"0": 1, "2": 1}


def test_calls_beyond_the_names_belong_to_the_last() -> None:
    """Who reaches into a Sequential of one activation, and calls its end once more."""
    act = nn.ReLU()

    def way(net: Net, x: Tensor) -> Tensor:
        first, last = net.steps
        return last(last(first(x)))

    maps = grab(Net(way, steps=nn.Sequential(act, act)).eval(), "ReLU", IMAGE)
    assert call_counts(maps) == {"steps.0": 1, "steps.1": 2}
