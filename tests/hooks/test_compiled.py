"""Capturing while torch.compile or a backward pass calls modules in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from networks import Net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import featviz as fv

from .small_net import call_counts

COMPILED_RUNS: list[bool] = []
"""One entry for each time that compiled code has run."""


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    COMPILED_RUNS.clear()


def counted(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that counts the runs of what it compiles."""

    def run(*args: Any) -> Any:
        COMPILED_RUNS.append(True)
        return graph(*args)

    return run


def convolution() -> nn.Module:
    """A convolution, and a function of the model's own behind it."""
    return Net(lambda self, x: F.relu(self.conv(x)), conv=nn.Conv2d(3, 4, 3))


class Compiled(NamedTuple):
    """A model of which something is compiled."""

    watched: nn.Module
    """Whose layers are captured."""
    called: Callable[[Tensor], Any]
    conv: str = "conv"
    """Names of the two layers."""
    relu: str = "fn:relu"


def wrapped(model: nn.Module) -> Compiled:
    called: Any = torch.compile(model, backend=counted)
    return Compiled(called, called)


def outside(model: nn.Module) -> Compiled:
    return Compiled(model, torch.compile(model, backend=counted))


def in_place(model: nn.Module) -> Compiled:
    model.compile(backend=counted)
    return Compiled(model, model)


def inside(model: nn.Module) -> Compiled:
    outer = nn.Sequential(model)
    model.compile(backend=counted)
    return Compiled(outer, outer, "0.conv", "0/fn:relu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled_how", "warm"),
    [
        (wrapped, True),
        (outside, True),
        (outside, False),
        (in_place, True),
        (inside, False),
    ],
)
def test_a_compiled_model_is_captured_as_it_is_written(
    compiled_how: Callable[[nn.Module], Compiled], warm: bool
) -> None:
    """Whoever compiled it, and whether it ran before: each call's tensors, under the
    names of the module itself; afterwards the compiled code is in force again, and is
    not captured."""
    torch.manual_seed(0)
    model = convolution()
    image = torch.rand(1, 3, 8, 8)
    expected = model.conv(image)
    compiled = compiled_how(model)
    if warm:
        compiled.called(image)

    with fv.capture(compiled.watched, "Conv2d,fn:relu") as maps:
        compiled.called(image)
        compiled.called(image * 0)
    runs_before = len(COMPILED_RUNS)
    compiled.called(image)

    assert runs_before == warm
    assert len(COMPILED_RUNS) == warm + 1
    assert call_counts(maps) == {compiled.conv: 2, compiled.relu: 2}
    assert torch.equal(maps[compiled.conv][0], expected)
    assert torch.equal(maps[compiled.relu][0], expected.relu())


def stance() -> str:
    """How torch treats compiled code now."""
    name: str = torch._dynamo.eval_frame._stance.stance
    return name


@pytest.mark.medium
@pytest.mark.parametrize("first", [0, 1])
def test_what_is_compiled_stays_aside_until_the_last_capture_ends(first: int) -> None:
    """Two captures that overlap may end in any order, and then compiled code is in
    force."""
    model = convolution()
    torch.compile(model, backend=counted)(torch.rand(1, 3, 8, 8))
    captures = [fv.capture(model, "Conv2d") for _ in range(2)]
    for capture in captures:
        capture.__enter__()
    captures[first].__exit__(None, None, None)
    between = stance()
    captures[1 - first].__exit__(None, None, None)
    assert between == "force_eager"
    assert stance() == "default"


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_calls_that_the_backward_pass_repeats_are_captured_once(
    reentrant: bool, calls: int
) -> None:
    """A checkpointed block runs twice, and gives one tensor for each call of the
    caller's."""
    block = convolution()
    image = torch.rand(1, 3, 8, 8, requires_grad=True)
    runs: list[bool] = []
    block.conv.register_forward_hook(lambda *_: runs.append(True))
    with fv.capture(block, "Conv2d,fn:relu") as maps:
        for _ in range(calls):
            output = checkpoint(block, image, use_reentrant=reentrant)
            output.sum().backward()
    assert len(runs) == 2 * calls
    assert call_counts(maps) == {"conv": calls, "fn:relu": calls}
    assert torch.equal(maps["conv"][0], block.conv(image))
