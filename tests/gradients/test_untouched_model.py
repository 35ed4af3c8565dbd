"""A backward pass leaves the model, torch and the memory as they were."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from borrowed import assert_same, state_of
from gradient_models import SPHERES, Given
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
    modules, parameters = list(model.modules()), list(model.parameters())
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
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 5)
        self.given = Given(torch.ones(1, 5))
        self.fails, self.features = fails, None
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
        return self.fc(x.mean((2, 3))) * self.given()


FAILURES: dict[str, tuple[type[BaseException], str] | None] = {
    "": None,
    "forward": (ForwardError, r"the model failed in Restless: no way\n"),
    "backward": (ForwardError, r"the backward pass failed: no way\n"),
    "interrupt": (KeyboardInterrupt, "^$"),
    "sink": (ZeroDivisionError, "ours"),
}


@pytest.mark.parametrize(
    ("fails", "rule"), [("", "guided"), *((x, "plain") for x in FAILURES)]
)
def test_the_model_is_as_before_whatever_happens(
    fails: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, buffers, requires_grad, .grad, training flags, hooks of modules and
    tensors, RNG state and modes, after gradients and interventions, also after a
    raise."""
    torch.manual_seed(0)
    KEPT.clear()
    model = Restless(fails).train()
    model.norm.eval()
    model.conv.requires_grad_(False)
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    if fails == "sink":
        monkeypatch.setattr(sys.modules["featviz.run.draw"], "draw", _broken)
    before = everything_of(model)
    options = {
        "capture": "output,input,grad,grad-input",
        "target": "layer:fc:1",
        "grad_rule": rule,
        "ablate": "conv:1",
        "edit": ["norm:noise=0.1", "given:grad*2", "fc:clamp=-1,1"],
    }
    expected = FAILURES[fails]
    if expected is None:
        result = fv.run(
            model, SPHERES, "*,fn:mean", tmp_path / "out", **options, **inputs(12)
        )
        assert result.exit_code == 0
        skipped = [(skip.layer, skip.kind) for skip in result.images[0].skipped]
        none = [("given", "input"), ("given", "grad-input")]
        # the last are behind the target
        assert skipped == [*none, ("given", "grad"), ("", "grad")]
        assert KEPT
        assert all(tensor._backward_hooks in (None, {}) for tensor in KEPT)
    else:
        with pytest.raises(expected[0], match=expected[1]):
            fv.run(model, SPHERES, "*", tmp_path / "out", **options, **inputs(12))
    after = everything_of(model)
    values = zip(before.pop("values"), after.pop("values"), strict=True)
    assert all(torch.equal(a, b) for a, b in values)
    assert_same(before, after)


def _broken(*arguments: object, **keywords: object) -> None:
    raise ZeroDivisionError("ours")


@pytest.mark.slow
def test_nothing_of_a_graph_outlives_its_image(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """After the eighth image there are no more tensors than after the third."""
    gc.freeze()  # what other tests have left is neither counted nor looked through
    request.addfinalizer(gc.unfreeze)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.LazyLinear(5),
    )
    model(torch.zeros(1, 3, 16, 16))
    for index in range(8):
        (tmp_path / f"{index}.jpg").write_bytes(SPHERES.read_bytes())
    alive: list[int] = []
    seen: list[object] = []

    def count(image: object, total: int) -> None:
        seen.append(image)
        if len(seen) in (3, 8):
            gc.collect()
            alive.append(
                sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
            )

    options = InputOptions(**inputs(16))
    passes = PassOptions(
        ("output", "input", "grad", "grad-input"), None, "guided", edit=("0:noise=0.1",)
    )
    drawn = RunOptions("*", tmp_path / "out", inputs=options, passes=passes)
    run(adopt(model, options), [str(tmp_path / "*.jpg")], drawn, count)
    assert len(alive) == 2
    assert alive[1] <= alive[0]


class Anchored(nn.Module):
    """Keeps its anchors for the next call, as the heads of YOLO do; both ways to keep
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.anchors, self.grids = torch.empty(0), [torch.empty(0)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.anchors.shape != x.shape:
            self.anchors, self.grids[0] = torch.rand_like(x), torch.rand_like(x)
        return (x * self.anchors * self.grids[0]).mean((2, 3))


def test_what_a_model_keeps_from_a_pass_can_take_part_in_gradients(
    tmp_path: Path,
) -> None:
    """Autograd refuses tensors of inference mode; and whoever lent the model may train
    it."""
    model = Anchored()
    result = fv.run(
        model,
        SPHERES,
        "conv",
        tmp_path / "a",
        size=(8, 8),
        capture="grad",
        target="class:0",
    )
    assert [capture.kind for capture in result.images[0].captures] == ["grad"]
    fv.run(model, SPHERES, "conv", tmp_path / "b", size=(9, 9))
    model(torch.ones(1, 3, 9, 9)).sum().backward()
    assert model.conv.weight.grad is not None and model.anchors.shape == (1, 2, 9, 9)
