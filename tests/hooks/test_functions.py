"""Functions inside forward: which calls are captured, under which names, with which
values; and that torch's function mode is entered only where functions are asked for,
and always left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import Net
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torchvision import models

import featviz as fv
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.functions import list_functions

from .small_net import SUMS, grab


class TestAgainstForwardsByHand:
    """What is captured is what torchvision's own lines compute."""

    def test_the_residual_sums_of_resnet18(self) -> None:
        """Eight sums, one a block, each before the in-place ReLU overwrites it."""
        torch.manual_seed(0)
        model = models.resnet18().eval()
        image = torch.randn(1, 3, 64, 64)
        seen = grab(model, "fn:add", image)
        with torch.inference_mode():
            x = model.maxpool(F.relu(model.bn1(model.conv1(image))))
            names = []
            for stage in ("layer1", "layer2", "layer3", "layer4"):
                for i, block in enumerate(getattr(model, stage)):
                    same = x if block.downsample is None else block.downsample(x)
                    total = (
                        block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x))))) + same
                    )
                    names.append(f"{stage}.{i}/fn:add")
                    (got,) = seen[names[-1]]
                    assert torch.equal(got, total)
                    assert bool((got < 0).any())
                    x = F.relu(total)
        assert list(seen) == names
        assert len(names) == 8


class TestWhoCalls:
    """The module in which a function happens."""

    def test_modules_of_torch_keep_their_functions_to_themselves(self) -> None:
        """Conv2d, ReLU, MaxPool2d and what derives from them without a forward of its
        own call functions too, which are theirs; a subclass with its own forward
        reports its own."""

        class Same(nn.Conv2d):
            pass

        class Other(nn.Conv2d):
            def forward(self, x: Tensor) -> Tensor:
                return F.conv2d(x, self.weight).abs()

        model = nn.Sequential(
            nn.Conv2d(3, 3, 1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            Same(3, 3, 1),
            Other(3, 3, 1),
            nn.MultiheadAttention(4, 2),
        )[:-1]
        with in_eval_mode(model):
            functions = list_functions(model, [torch.zeros(1, 3, 4, 4)])
        assert {layer.name: calls for layer, calls in functions.items()} == {
            "4/fn:conv2d": 1,
            "4/fn:abs": 1,
        }

    def test_what_a_function_calls_inside_is_not_reported(self) -> None:
        """F.interpolate is one call, whatever it is made of."""
        model = Net(lambda self, x: F.group_norm(F.interpolate(x, size=(4, 4)), 1))
        found = list_functions(model, [torch.zeros(1, 3, 2, 2)])
        assert [layer.type for layer in found] == ["fn:interpolate", "fn:group_norm"]

    def test_a_function_behind_an_inner_module_is_the_outers(self) -> None:
        """Before, between and behind calls of inner modules the outer one is running."""
        a = Net(lambda self, x: x * 2)
        b = Net(lambda self, x: x * 2)
        outer = Net(lambda self, x: (self.b(self.a(x * 3) * 5) * 7).sum(), a=a, b=b)
        seen = grab(nn.Sequential(outer), "fn:mul,fn:sum", torch.ones(1, 1))
        assert {
            name: [t.item() for t in tensors] for name, tensors in seen.items()
        } == {
            "0/fn:mul": [3, 30, 420],
            "0.a/fn:mul": [6],
            "0.b/fn:mul": [60],
            "0/fn:sum": [420],
        }

    def test_a_failure_that_the_model_catches(self) -> None:
        """After an inner module has raised and was caught, the outer one is running
        again."""

        def fails(self: nn.Module, x: Tensor) -> Tensor:
            raise ValueError(float((x - 1).sum()))

        def catches(self: nn.Module, x: Tensor) -> Any:
            try:
                return self.inner(x)
            except ValueError:
                return x + 1

        seen = grab(
            nn.Sequential(Net(catches, inner=Net(fails))),
            "fn:add,fn:sub",
            torch.zeros(1, 1),
        )
        assert set(seen) == {"0/fn:add", "0.inner/fn:sub"}

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
            (
                lambda x: F.max_pool2d(x, 2, return_indices=True),
                "max_pool2d_with_indices",
            ),
            (lambda x: torch.stack([x, x]), "stack"),
            (
                lambda x: F.scaled_dot_product_attention(x, x, x),
                "scaled_dot_product_attention",
            ),
        ],
    )
    def test_what_a_call_is_called(
        self, call: Callable[[Tensor], Any], name: str
    ) -> None:
        """Each way to write it is captured under the function's name, with what it
        gives."""
        image = torch.rand(1, 2, 4, 4)
        seen = grab(Net(lambda self, x: call(x)), f"fn:{name}", image)
        want = call(image)
        got = seen[f"fn:{name}" + (":0" if isinstance(want, tuple) else "")][-1]
        assert torch.equal(got, want[0] if isinstance(want, tuple) else want)


def test_functions_of_an_exported_program(net: nn.Module) -> None:
    """The operators of an exported program have the names of the functions they were,
    and what stands for torch's own modules keeps its functions to itself."""
    image = torch.randn(1, 3, 6, 8)
    program = torch.export.unflatten(torch.export.export(net, (image,)))
    functions = list_functions(program, [image])
    names = [layer.name for layer in functions]
    assert set(SUMS) | {"fn:sub", "fn:relu", "fn:cat"} <= set(names)
    assert not [
        name for name in names if ".conv/" in name or ".relu/" in name or ".T" in name
    ]
    assert {x.name: calls for x, calls in functions.items()}["fn:relu"] == 3
    want = grab(net, "fn:add", image)
    with torch.inference_mode(), fv.capture(program, "fn:add") as got:
        program(image)
    assert list(got) == SUMS
    assert all(torch.allclose(got[name][0], want[name][0], atol=1e-6) for name in SUMS)


def leftovers(model: nn.Module) -> int:
    """Hooks and function modes that are still there."""
    modules = list(model.modules())
    hooks_left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)
    return hooks_left + len(_get_current_function_mode_stack())


@pytest.mark.filterwarnings("error")  # a hook of ours that fails behind theirs warns
@pytest.mark.parametrize("at", ["layer1.1.conv", "layer2.0.relu"])
def test_a_failing_forward_leaves_nothing_behind(at: str, net: nn.Module) -> None:
    """After an exception inside forward no hook and no mode is left, and the next pass
    works."""

    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("on purpose")

    handle = net.get_submodule(at).register_forward_pre_hook(fail)
    image = torch.randn(1, 3, 6, 8)
    for attempt in (
        lambda: grab(net, "fn:add,Conv2d", image),
        lambda: list_functions(net, [image]),
    ):
        with pytest.raises(RuntimeError, match="on purpose"):
            attempt()
        assert leftovers(net) == 1
    handle.remove()
    assert list(grab(net, "fn:add", image)) == SUMS
    assert leftovers(net) == 0
