"""Capturing while torch.compile or a backward pass calls modules in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import Net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import featviz as fv

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


def wrapped(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Any]]:
    called = torch.compile(model, backend=counted)
    return called, called  # type: ignore[return-value]


def outside(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Any]]:
    return model, torch.compile(model, backend=counted)


def in_place(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Any]]:
    model.compile(backend=counted)
    return model, model


def inside(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Any]]:
    whole = nn.Sequential(model)
    model.compile(backend=counted)
    return whole, whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "warm"),
    [
        (wrapped, True),
        (outside, True),
        (outside, False),
        (in_place, True),
        (inside, False),
    ],
)
def test_a_compiled_model_is_captured_as_it_is_written(
    compiled: Any, warm: bool
) -> None:
    """Whoever compiled it, and whether it ran before: each call's tensors, under the
    names of the module itself; afterwards the compiled code is in force again, and is
    not captured."""
    torch.manual_seed(0)
    model = convolution()
    image = torch.rand(1, 3, 8, 8)
    conv = model.conv(image)
    watched, call = compiled(model)
    if warm:
        call(image)
    with fv.capture(watched, "Conv2d,fn:relu") as maps:
        call(image)
        call(image * 0)
    prefix = "0" if compiled is inside else ""
    names = [f"{prefix}.conv".lstrip("."), f"{prefix}/fn:relu".lstrip("/")]
    assert list(maps) == names
    assert torch.equal(maps[names[0]][0], conv)
    assert torch.equal(maps[names[1]][0], conv.relu())
    assert [len(tensors) for tensors in maps.values()] == [2, 2]
    assert len(COMPILED_RUNS) == warm
    call(image)
    assert len(COMPILED_RUNS) == warm + 1
    assert [len(tensors) for tensors in maps.values()] == [2, 2]


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_compiled_stays_aside_until_the_last_capture_ends(first: int) -> None:
    """Two captures that overlap may end in any order, and then compiled code is in
    force."""
    model = convolution()
    image = torch.rand(1, 3, 8, 8)
    torch.compile(model, backend=counted)(image)
    stance = torch._dynamo.eval_frame._stance.stance
    captures = [fv.capture(model, "Conv2d") for _ in range(2)]
    for capture in captures:
        capture.__enter__()
    captures[first].__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    captures[1 - first].__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == stance == "default"


@pytest.mark.parametrize("reentrant", [True, False])
def test_calls_that_the_backward_pass_repeats_are_captured_once(
    reentrant: bool,
) -> None:
    """A checkpointed block runs twice, and gives one tensor for each call of the
    caller's."""
    block = convolution()
    image = torch.rand(1, 3, 8, 8, requires_grad=True)
    runs: list[bool] = []
    block.conv.register_forward_hook(lambda *_: runs.append(True))
    for calls in (1, 2):
        with fv.capture(block, "Conv2d,fn:relu") as maps:
            for _ in range(calls):
                checkpoint(block, image, use_reentrant=reentrant).sum().backward()  # type: ignore[no-untyped-call]
        assert {name: len(tensors) for name, tensors in maps.items()} == {
            "conv": calls,
            "fn:relu": calls,
        }
        assert torch.equal(maps["conv"][0], block.conv(image))
    assert len(runs) == 2 * (1 + 2) + 2
