"""A backward pass leaves the model, torch and the memory as they were."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from borrowed import assert_same, state_of
from gradient_models import SPHERES, Table
from oracle import inputs
from torch import Tensor, nn

import featviz as fv
from featviz.errors import ForwardError
from featviz.models.load import adopt
from featviz.options import InputOptions, PassOptions, RunOptions
from featviz.run.run import run


def everything_of(model: nn.Module) -> dict[str, Any]:
    """What may be borrowed of a model and of torch, and every hook there can be."""
    state = state_of(model)
    modules = list(model.modules())
    parameters = list(model.parameters())
    return {
        **state,
        "values": [p.detach().clone() for p in parameters],
        "versions": [p._version for p in parameters],
        "tensor hooks": [p._backward_hooks for p in parameters],
        "backward hooks": [
            len(m._backward_hooks)
            + len(m._backward_pre_hooks)
            + len(m._forward_hooks_with_kwargs)
            for m in modules
        ],
        "attributes": [sorted(vars(m)) for m in modules],
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "function modes": torch._C._len_torch_function_stack(),
    }


class Explode(torch.autograd.Function):
    """Raises on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no way\nback")


KEPT: list[Tensor] = []
"""Features of `Restless` models, of this test alone."""


class Restless(nn.Module):
    """Draws random numbers, changes its buffers, gives its parameter, keeps its
    features, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 5)
        self.table = Table(torch.ones(1, 5))
        self.fails = fails
        self.features = None
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.relu(self.norm(self.conv(x))) + torch.rand(1)
        self.features = x
        KEPT.append(x)
        if self.fails == "forward":
            raise ValueError("no way")
        if self.fails == "interrupt":
            raise KeyboardInterrupt
        x = Explode.apply(x) if self.fails == "backward" else x
        return self.fc(x.mean((2, 3))) * self.table()


def lent(fails: str = "") -> Restless:
    """A model in a mixed state, of which much may be changed."""
    torch.manual_seed(0)
    KEPT.clear()
    model = Restless(fails).train()
    model.norm.eval()
    model.conv.requires_grad_(False)
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    return model


def assert_untouched(before: dict[str, Any], model: nn.Module) -> None:
    """Parameters, buffers, requires_grad, .grad, training flags, hooks of modules and
    tensors, RNG state and modes are as before."""
    after = everything_of(model)
    for old, new in zip(before.pop("values"), after.pop("values"), strict=True):
        assert torch.equal(old, new)
    assert_same(before, after)


CHANGES: dict[str, Any] = {
    "capture": "output,input,grad,grad-input",
    "target": "layer:fc:1",
    "ablate": "conv:1",
    "edit": ["norm:noise=0.1", "table:grad*2", "fc:clamp=-1,1"],
    **inputs(12),
}
"""Gradients and interventions."""


@pytest.mark.medium
@pytest.mark.parametrize("rule", ["plain", "guided"])
def test_the_model_is_as_before_after_gradients(rule: str) -> None:
    """No hook stays on a tensor that the model has kept, either."""
    model = lent()
    before = everything_of(model)

    result = fv.run(model, SPHERES, "*,fn:mean", "out", grad_rule=rule, **CHANGES)

    assert result.exit_code == 0
    assert [(skip.layer, skip.kind) for skip in result.images[0].skipped] == [
        ("table", "input"),
        ("table", "grad-input"),
        # these are behind the target
        ("table", "grad"),
        ("", "grad"),
    ]
    assert KEPT
    assert all(tensor._backward_hooks in (None, {}) for tensor in KEPT)
    assert_untouched(before, model)


@pytest.mark.parametrize(
    ("fails", "error", "message"),
    [
        ("forward", ForwardError, r"the model failed in Restless: no way\n"),
        ("backward", ForwardError, r"the backward pass failed: no way\n"),
        ("interrupt", KeyboardInterrupt, "^$"),
    ],
)
def test_the_model_is_as_before_after_it_has_failed(
    fails: str, error: type[BaseException], message: str
) -> None:
    """On the way forward, on the way back, and where the user breaks off."""
    model = lent(fails)
    before = everything_of(model)
    with pytest.raises(error, match=message):
        fv.run(model, SPHERES, "*", "out", **CHANGES)
    assert_untouched(before, model)


@pytest.mark.medium
def test_the_model_is_as_before_after_we_have_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of the drawing code comes out as it is."""

    def draw(*arguments: object, **keywords: object) -> None:
        raise ZeroDivisionError("ours")

    model = lent()
    before = everything_of(model)
    # the module: `featviz.run.draw` would be looked up in the function `featviz.run`
    monkeypatch.setattr(sys.modules["featviz.run.draw"], "draw", draw)
    with pytest.raises(ZeroDivisionError, match="ours"):
        fv.run(model, SPHERES, "*", "out", **CHANGES)
    assert_untouched(before, model)


def tensors_alive() -> int:
    """How many tensors there are in this process."""
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


@pytest.mark.slow
def test_nothing_of_a_graph_outlives_its_image() -> None:
    """After the sixth image there are no more tensors than after the third."""
    gc.freeze()  # what other tests have left is neither counted nor looked through
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten())
    for index in range(6):
        Path(f"{index}.jpg").write_bytes(SPHERES.read_bytes())
    alive: list[int] = []
    options = InputOptions(**inputs(8))
    edits = ("0:noise=0.1",)
    captures = ("output", "input", "grad", "grad-input")
    passes = PassOptions(captures, None, "guided", edit=edits)
    drawn = RunOptions("*", Path("out"), inputs=options, passes=passes)

    def count(image: object, total: int) -> None:
        alive.append(tensors_alive())

    run(adopt(model, options), ["*.jpg"], drawn, count)

    assert len(alive) == 6
    assert alive[5] <= alive[2]


class Anchored(nn.Module):
    """Keeps its anchors for the next call, as the heads of YOLO do; both ways to keep
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.anchors = torch.empty(0)
        self.grids = [torch.empty(0)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.anchors.shape != x.shape:
            self.anchors = torch.rand_like(x)
            self.grids[0] = torch.rand_like(x)
        return (x * self.anchors * self.grids[0]).mean((2, 3))


@pytest.mark.medium
def test_what_a_model_keeps_from_a_pass_can_take_part_in_gradients() -> None:
    """Autograd refuses tensors of inference mode; and whoever lent the model may train
    it."""
    model = Anchored()
    gradients = {"capture": "grad", "target": "class:0"}
    result = fv.run(model, SPHERES, "conv", "a", size=(8, 8), **gradients)
    assert [capture.kind for capture in result.captures] == ["grad"]
    fv.run(model, SPHERES, "conv", "b", size=(9, 9))
    model(torch.ones(1, 3, 9, 9)).sum().backward()
    assert model.conv.weight.grad is not None
    assert model.anchors.shape == (1, 2, 9, 9)
