"""Functions inside forward: which calls are captured, under which names, with which
values; and that torch's function mode is entered only where functions are asked for,
and always left."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import Net
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torchvision import models
from torchvision.models.resnet import BasicBlock

import featviz as fv
from featviz.errors import ForwardError
from featviz.hooks.capture import hooked, list_functions
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import function_in
from featviz.records import CaptureSite

from .small_net import SUMS, Maps, assert_equal, grab


def block_sums(model: nn.Module, image: Tensor) -> Maps:
    """The residual sums of a ResNet-18, by torchvision's own lines."""
    x = model.maxpool(F.relu(model.bn1(model.conv1(image))))
    sums: Maps = {}
    for name, block in model.named_modules():
        if isinstance(block, BasicBlock):
            residual = x if block.downsample is None else block.downsample(x)
            out = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))
            sums[f"{name}/fn:add"] = [out + residual]
            x = F.relu(out + residual)
    return sums


@pytest.mark.medium
def test_the_residual_sums_of_resnet18() -> None:
    """Eight sums, one a block, each before the in-place ReLU overwrites it."""
    torch.manual_seed(0)
    model = models.resnet18().eval()
    image = torch.randn(1, 3, 64, 64)
    maps = grab(model, "fn:add", image)
    with torch.inference_mode():
        expected = block_sums(model, image)
    assert len(maps) == 8
    assert list(maps) == list(expected)
    assert_equal(maps, expected)
    assert all(calls[0].min() < 0 for calls in maps.values())


class Inherited(nn.Conv2d):
    """Without a forward of its own."""


class Absolute(nn.Conv2d):
    """With one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight).abs()


def called(model: nn.Module, x: Tensor) -> dict[str, int]:
    """The calls of each function."""
    with in_eval_mode(model):
        return {layer.name: n for layer, n in list_functions(model, [x]).items()}


def test_modules_of_torch_keep_their_functions_to_themselves() -> None:
    """Conv2d, ReLU, MaxPool2d and what derives from them without a forward of its own
    call functions too, which are theirs; a subclass with its own forward reports its
    own."""
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Inherited(3, 3, 1),
        Absolute(3, 3, 1),
    )
    functions = called(model, torch.zeros(1, 3, 4, 4))
    assert functions == {"4/fn:conv2d": 1, "4/fn:abs": 1}


def test_what_a_function_calls_inside_is_not_reported() -> None:
    """F.interpolate is one call, whatever it is made of."""
    model = Net(lambda self, x: F.group_norm(F.interpolate(x, size=(4, 4)), 1))
    functions = called(model, torch.zeros(1, 3, 2, 2))
    assert functions == {"fn:interpolate": 1, "fn:group_norm": 1}


def test_a_function_behind_an_inner_module_is_the_outers() -> None:
    """Before, between and behind calls of inner modules the outer one is running."""
    outer = Net(
        lambda self, x: (self.b(self.a(x * 3) * 5) * 7).sum(),
        a=Net(lambda self, x: x * 2),
        b=Net(lambda self, x: x * 2),
    )
    maps = grab(nn.Sequential(outer), "fn:mul,fn:sum", torch.ones(1, 1))
    assert {name: [t.item() for t in calls] for name, calls in maps.items()} == {
        "0/fn:mul": [3, 30, 420],
        "0.a/fn:mul": [6],
        "0.b/fn:mul": [60],
        "0/fn:sum": [420],
    }


def test_a_failure_that_the_model_catches() -> None:
    """After an inner module has raised and was caught, the outer one is running
    again."""

    def fails(self: nn.Module, x: Tensor) -> Tensor:
        raise ValueError(float((x - 1).sum()))

    def catches(self: Net, x: Tensor) -> Any:
        try:
            return self.inner(x)
        except ValueError:
            return x + 1

    model = nn.Sequential(Net(catches, inner=Net(fails)))
    maps = grab(model, "fn:add,fn:sub", torch.zeros(1, 1))
    assert set(maps) == {"0/fn:add", "0.inner/fn:sub"}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: x + x, "add"),
        (lambda x: x.clone().add_(1), "add"),
        (lambda x: 1 - x, "sub"),
        (lambda x: 2 / (x + 3), "div"),
        (lambda x: 2**x, "pow"),
        (lambda x: F.gelu(x), "gelu"),
        (lambda x: F.max_pool2d(x, 2), "max_pool2d"),
        (lambda x: torch.stack([x, x]), "stack"),
        (lambda x: torch.concat([x, x]), "cat"),
        (lambda x: torch.concatenate([x, x]), "cat"),
        (lambda x: torch.absolute(x), "abs"),
        (lambda x: x.clip(0.5), "clamp"),
        (lambda x: torch.divide(x, 2), "div"),
        (lambda x: x.true_divide(2), "div"),
        (lambda x: torch.multiply(x, 2), "mul"),
        (lambda x: torch.negative(x), "neg"),
        (lambda x: torch.subtract(x, 2), "sub"),
        (lambda x: torch.rsub(x, 2), "sub"),
        (lambda x: x.mT, "mT"),
        (
            lambda x: F.scaled_dot_product_attention(x, x, x),
            "scaled_dot_product_attention",
        ),
    ],
)
def test_what_a_call_is_called(call: Callable[[Tensor], Tensor], name: str) -> None:
    """Each way to write it is captured under the function's name, with what it gives."""
    image = torch.rand(1, 2, 4, 4)
    maps = grab(Net(lambda self, x: call(x)), f"fn:{name}", image)
    assert torch.equal(maps[f"fn:{name}"][-1], call(image))


def test_the_input_of_a_function_is_what_it_was_given() -> None:
    """Before the function overwrites it; by name, too."""
    image = torch.randn(1, 2, 4, 4)
    model = Net(lambda self, x: F.relu(input=(x - 1).relu_() - 0.5, inplace=True))
    taken: dict[str, Tensor] = {}

    def keep(site: CaptureSite, tensor: Tensor) -> None:
        taken[f"{site.layer.name} {site.call}"] = tensor.clone()

    with hooked(model, [], keep, ("input",), lambda layer: layer.name == "fn:relu"):
        model(image)

    expected = {"fn:relu 0": image - 1, "fn:relu 1": (image - 1).relu() - 0.5}
    torch.testing.assert_close(taken, expected, rtol=0, atol=0)


def test_a_call_that_gives_several_tensors() -> None:
    """Each of them has its key."""
    image = torch.rand(1, 2, 4, 4)
    pool = partial(F.max_pool2d, kernel_size=2, return_indices=True)
    maps = grab(Net(lambda self, x: pool(x)), "fn:max_pool2d_with_indices", image)
    values, indices = pool(image)
    assert torch.equal(maps["fn:max_pool2d_with_indices:0"][0], values)
    assert torch.equal(maps["fn:max_pool2d_with_indices:1"][0], indices)


@pytest.fixture
def program(net: nn.Module) -> nn.Module:
    """The small model, exported."""
    exported = torch.export.export(net, (torch.randn(1, 3, 6, 8),))
    return torch.export.unflatten(exported)


@pytest.mark.medium
def test_functions_of_an_exported_program(program: nn.Module) -> None:
    """The operators of an exported program have the names of the functions they were,
    and what stands for torch's own modules keeps its functions to itself."""
    functions = called(program, torch.randn(1, 3, 6, 8))
    assert {*SUMS, "fn:sub", "fn:relu", "fn:cat"} <= set(functions)
    assert functions["fn:relu"] == 3
    for name in functions:
        assert ".conv/" not in name
        assert ".relu/" not in name
        assert ".T" not in name


@pytest.mark.medium
def test_values_of_an_exported_program(net: nn.Module, program: nn.Module) -> None:
    """A function of the program gives what that of the module gave."""
    image = torch.randn(1, 3, 6, 8)
    expected = grab(net, "fn:add", image)
    with torch.inference_mode(), fv.capture(program, "fn:add") as maps:
        program(image)
    assert list(maps) == SUMS
    torch.testing.assert_close(dict(maps), expected, rtol=0, atol=1e-6)


def leftovers(model: nn.Module) -> int:
    """Hooks and function modes that are still there."""
    modules = list(model.modules())
    hooks_left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)
    return hooks_left + len(_get_current_function_mode_stack())


@pytest.mark.filterwarnings("error")  # a hook of ours that fails behind theirs warns
@pytest.mark.parametrize("failing", ["layer1.1.conv", "layer2.0.relu"])
@pytest.mark.parametrize(
    "attempt",
    [
        lambda net, image: grab(net, "fn:add,Conv2d", image),
        lambda net, image: list_functions(net, [image]),
    ],
    ids=["grab", "list"],
)
def test_a_failing_forward_leaves_nothing_behind(
    attempt: Callable[[nn.Module, Tensor], object], failing: str, net: nn.Module
) -> None:
    """After an exception inside forward no hook and no mode is left, and the next pass
    works."""

    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("on purpose")

    handle = net.get_submodule(failing).register_forward_pre_hook(fail)
    image = torch.randn(1, 3, 6, 8)
    with pytest.raises((RuntimeError, ForwardError), match="on purpose"):
        attempt(net, image)
    assert leftovers(net) == 1
    handle.remove()
    assert list(grab(net, "fn:add", image)) == SUMS
    assert leftovers(net) == 0


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("layer1.0/fn:relu", "relu"),
        ("fn:relu", "relu"),
        ("layer1.fn:relu", None),
        ("layer1.0", None),
        ("", None),
    ],
)
def test_a_function_stands_behind_a_slash(name: str, function: str | None) -> None:
    """A module may be called `fn:relu`, too."""
    assert function_in(name) == function
