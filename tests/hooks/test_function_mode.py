"""torch's function mode: entered only where functions are asked for, and always left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import featviz as fv
from featviz.hooks.capture import hooked
from featviz.hooks.forward import forward
from featviz.hooks.functions import list_functions
from featviz.records import Layer

from .small_net import AS_IS, SUMS, grab


def leftovers(model: nn.Module) -> int:
    """Hooks and function modes that are still there."""
    modules = list(model.modules())
    hooks_left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)
    return hooks_left + len(_get_current_function_mode_stack())


@pytest.mark.filterwarnings("error")  # a hook of ours that fails behind theirs warns
@pytest.mark.parametrize("at", ["layer1.1.conv", "layer2.0.relu"])
def test_a_failing_forward_leaves_nothing_behind(at: str, net: nn.Module) -> None:
    """After an exception inside forward no hook and no mode is left, and the next pass works."""

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


def test_a_failing_sink_leaves_nothing_behind(net: nn.Module) -> None:
    """A fault of ours comes out, and hooks and mode are gone."""

    def broken(site: Any, tensor: Tensor) -> None:
        raise ZeroDivisionError("ours")

    (layer,) = [x for x in _functions(net) if x.name == "layer2.0/fn:add"]
    with (
        pytest.raises(ZeroDivisionError, match="ours"),
        hooked(net, [layer], broken) as recorder,
    ):
        forward(net, [torch.randn(1, 3, 6, 8)], recorder)
    assert leftovers(net) == 0


def _functions(model: nn.Module) -> list[Layer]:
    return list(list_functions(model, [torch.zeros(1, 3, 6, 8)]))


def test_the_output_is_the_same_bit_for_bit(net: nn.Module) -> None:
    """Watching functions changes no value."""
    image = torch.randn(1, 3, 6, 8)
    plain = net(image)
    with fv.capture(net, "fn:add,fn:relu,fn:cat,Conv2d"):
        assert torch.equal(net(image), plain)


@pytest.mark.slow
def test_no_mode_where_no_function_is_asked_for(
    net: nn.Module, picture: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Captures of modules never enter torch's function mode; a run enters it to follow the first
    image of each shape (and the zeros, without selectors), and another one for fn:."""
    entered: list[type] = []
    enter = TorchFunctionMode.__enter__

    def counting(self: TorchFunctionMode) -> Any:
        entered.append(type(self))
        return enter(self)

    monkeypatch.setattr(TorchFunctionMode, "__enter__", counting)
    grab(net, "*", torch.randn(1, 3, 6, 8))
    assert entered == []
    twice = [picture, Image.open(picture)]
    for layers, times in ((None, 2), ("Conv2d,ReLU", 1), ("*", 1), ("!*.conv", 1)):
        entered.clear()
        fv.run(net, twice, layers, tmp_path / "o", overwrite=True, size=(12, 16), **AS_IS)
        assert len(entered) == times
    entered.clear()
    fv.run(net, picture, "fn:add", tmp_path / "o", overwrite=True, size=(12, 16), **AS_IS)
    assert len(entered) == 3  # to list them, to follow the image, and for the image
    entered.clear()
    grab(net, "fn:add", torch.randn(1, 3, 6, 8))
    assert len(entered) == 1
