"""A call is named by who calls: a shared module is a layer in each place where it
stands."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from networks import Net
from torch import Tensor, nn
from torch.nn import functional as F

import featviz as fv
from featviz.hooks.capture import hooked
from featviz.hooks.functions import list_functions
from featviz.hooks.layers import list_layers
from featviz.hooks.selectors import parse, select

from .small_net import Unit, grab

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


def convolutions(model: Yolo) -> dict[str, list[Tensor]]:
    """What each convolution gives, by hand."""
    with torch.no_grad():
        stem = model.stem.conv(IMAGE)
        first = model.m[0].conv(F.silu(stem))
        second = model.m[1].conv(F.silu(first))
        return {
            "stem": [stem],
            "m.0": [first],
            "m.1": [second, model.m[1].conv(F.silu(second))],
        }


def names(model: nn.Module, text: str) -> list[str]:
    return [layer.name for layer in select(list_layers(model), parse(text))]


def test_each_place_has_its_own_calls() -> None:
    """The activation's output under the name of each caller; two calls of one caller
    stay two."""
    model = Yolo().eval()
    got = grab(model, "SiLU", IMAGE)
    want = {
        f"{name}.act": [F.silu(t) for t in ts]
        for name, ts in convolutions(model).items()
    }
    assert {name: len(calls) for name, calls in got.items()} == {
        "stem.act": 1,
        "m.0.act": 1,
        "m.1.act": 2,
    }
    for name, calls in want.items():
        for call, value in zip(got[name], calls, strict=True):
            assert torch.equal(call, value)


def test_inputs_and_gradients_belong_to_the_place_too(tmp_path: Path) -> None:
    """What goes into the activation in one place, and the gradient there."""
    model = Yolo().eval()
    sites: dict[tuple[str, str], Tensor] = {}
    layers = select(list_layers(model), parse("m.0.act"))

    def keep(site: object, tensor: Tensor) -> None:
        sites[site.layer.name, site.stem] = tensor.clone()  # type: ignore[attr-defined]

    with hooked(model, layers, keep, capture_kinds=("input", "grad")):
        model(IMAGE).sum().backward()
    assert list(sites) == [("m.0.act", "input"), ("m.0.act", "grad")]
    torch.testing.assert_close(sites["m.0.act", "input"], convolutions(model)["m.0"][0])
    first = F.silu(convolutions(model)["m.0"][0]).requires_grad_()
    (want,) = torch.autograd.grad(model.m[1](model.m[1](first)).sum(), first)
    torch.testing.assert_close(sites["m.0.act", "grad"], want)


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
def test_selectors_match_the_name_of_the_place(text: str, taken: list[str]) -> None:
    """Globs, regular expressions, indices and exclusions speak of places."""
    assert names(Yolo(), text) == taken


def test_a_sequential_calls_by_position() -> None:
    """Plain nn.Sequential, also one that is called twice."""
    relu = nn.ReLU()
    row = nn.Sequential(nn.Conv2d(3, 3, 1), relu, nn.Conv2d(3, 3, 1), relu)
    got = grab(nn.Sequential(row, nn.Identity(), row), "ReLU", IMAGE)
    assert {n: len(calls) for n, calls in got.items()} == {
        "0.1": 1,
        "0.3": 1,
        "2.1": 1,
        "2.3": 1,
    }
    with torch.no_grad():
        first = row[0](IMAGE).relu()
        second = row[2](first).relu()
        assert torch.equal(got["0.1"][0], first)
        assert torch.equal(got["0.3"][0], second)
        assert torch.equal(got["2.1"][0], row[0](second).relu())


def test_a_caller_that_is_reached_by_a_method() -> None:
    """What is not called itself is not seen: the nearest place inside the caller
    counts."""
    model = Net(lambda self, x: self.body.act(self.body.forward(x)), body=Yolo())
    model.body.act = Conv.default_act  # type: ignore[assignment]
    got = grab(model, "SiLU", IMAGE)
    assert {name: len(calls) for name, calls in got.items()} == {
        "body.stem.act": 1,
        "body.m.0.act": 1,
        "body.m.1.act": 2,
        "body.act": 1,
    }


def test_a_shared_block_shares_what_is_inside() -> None:
    """Modules and functions inside a block are named by the block's place."""
    unit = Unit()
    model = nn.Sequential(unit, nn.Identity(), nn.Sequential(unit))
    got = grab(model, "Conv2d,fn:add", IMAGE)
    assert {name: len(calls) for name, calls in got.items()} == {
        "0.conv": 1,
        "0/fn:add": 1,
        "2.0.conv": 1,
        "2.0/fn:add": 1,
    }
    assert [layer.name for layer in list_functions(model, [IMAGE])] == [
        "0/fn:add",
        "2.0/fn:add",
    ]
    with torch.no_grad():
        assert torch.equal(got["2.0.conv"][0], unit.conv(unit(IMAGE)))


def test_a_place_that_nobody_calls_is_no_news() -> None:
    """A module that runs from one place is not named for another, such as the model
    itself, which only hands it on; one that runs from none of its places is named
    once."""
    shared = nn.ReLU()
    spare = nn.Tanh()
    row = nn.Sequential(shared)
    idle = nn.Sequential(shared, spare)
    model = Net(
        lambda self, x: self.used(x), shared=shared, spare=spare, used=row, unused=idle
    )

    def silent(selectors: str) -> list[str]:
        layers = select(list_layers(model), parse(selectors))
        with hooked(model, layers, lambda *_: None) as recorder:
            model(IMAGE)
        return [layer.name for layer in recorder.never_ran]

    assert silent("ReLU") == []
    assert silent("*") == ["spare", "unused"]
    assert silent("shared,unused.0") == ["shared"]  # of which nothing is drawn


@pytest.mark.parametrize(
    ("layers", "names"),
    [("Conv2d", ["a", "b.1"]), ("fn:relu", ["fn:relu"]), ("b.1", ["b.1"])],
)
def test_the_calls_of_a_copy_are_those_of_its_original(
    layers: str, names: list[str]
) -> None:
    """Hooks are copied with a module, and tell the layer for which they were
    registered."""
    block = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 2, 1))
    model = Net(
        lambda self, x: copy.deepcopy(self.b)(self.a(x).relu()),
        a=nn.Conv2d(3, 3, 1),
        b=block,
    )
    run = fv.run(model, IMAGE[0].clamp(0, 1), layers, preset="none")
    assert [maps.layer for maps in run.captures] == names
    assert not run.failures


def test_places_of_a_model_that_was_changed_are_read_anew() -> None:
    """A module that was exchanged, added or taken away is seen in a model that was read
    before."""
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU())
    assert [layer.type for layer in list_layers(model)] == [
        "Sequential",
        "Conv2d",
        "ReLU",
    ]
    model[1] = nn.Sigmoid()
    model.append(nn.Flatten())
    assert [layer.type for layer in list_layers(model)][2:] == ["Sigmoid", "Flatten"]
    del model[2]
    model.append(model[0])
    assert [layer.name for layer in list_layers(model)] == ["", "0", "1", "2"]


def test_calls_beyond_the_places_belong_to_the_last() -> None:
    """Who reaches into a Sequential of one activation, and calls its end once more."""
    act = nn.ReLU()

    def way(net: nn.Module, x: Tensor) -> Tensor:
        for step in (*net.steps, net.steps[-1]):  # type: ignore[misc, index]
            x = step(x)
        return x

    got = grab(Net(way, steps=nn.Sequential(act, act)).eval(), "ReLU", IMAGE)
    assert {name: len(calls) for name, calls in got.items()} == {
        "steps.0": 1,
        "steps.1": 2,
    }
