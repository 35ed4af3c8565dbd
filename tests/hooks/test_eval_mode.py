"""A model is given back as it was: modes, weights, buffers, attributes, and switches of torch."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featviz as fv
from featviz.hooks.eval_mode import in_eval_mode

IMAGE = torch.rand(3, 16, 16)


WAYS: dict[str, tuple[Callable[[Any, Tensor], object], Callable[[Any], Tensor]]] = {
    "attribute": (lambda net, made: setattr(net, "kept", made), lambda net: net.kept),
    "list": (lambda net, made: net.row.append(made), lambda net: net.row[0]),
    "mapping": (lambda net, made: net.map.update(a=[made]), lambda net: net.map["a"][0]),
    "set": (lambda net, made: net.set.add(made), lambda net: next(iter(net.set))),
    "tuple": (lambda net, made: net.pair[0].append(made), lambda net: net.pair[0][0]),
    "module": (
        lambda net, made: setattr(net, "inner", nn.Conv2d(1, 4, 1)),
        lambda net: net.inner(torch.ones(1, 1, 1, 1)),
    ),
    "empty buffer": (lambda net, made: setattr(net, "table", made), lambda net: net.table),
    "new buffer": (lambda net, made: net.register_buffer("new", made), lambda net: net.new),
    "empty parameter": (
        lambda net, made: setattr(net, "scale", nn.Parameter(made)),
        lambda net: net.scale,
    ),
    "new parameter": (
        lambda net, made: setattr(net, "weight", nn.Parameter(made)),
        lambda net: net.weight,
    ),
}
"""How a module keeps what its first forward makes, and how it gets that back."""


class Keeping(nn.Module):
    """A convolution, weighed with what is kept in one of these ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv, self.made = how, nn.Conv2d(3, 4, 3), False
        self.row, self.map, self.set, self.pair = [], {}, set(), ([],)  # type: ignore[var-annotated]
        self.register_buffer("table", None)
        self.register_parameter("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        """The convolution, weighed with what is kept."""
        keep, kept = WAYS[self.how]
        if not self.made:
            keep(self, torch.full((4, 1, 1), 2.0))
        self.made = True
        return self.conv(x) * kept(self)


@pytest.mark.parametrize("how", WAYS)
def test_what_forward_keeps_can_be_trained_with(how: str) -> None:
    """Tensors of inference mode would end the next backward; what is kept stays what it is."""
    model = Keeping(how).train()
    with in_eval_mode(model):
        made = model(IMAGE[None])
    kept = WAYS[how][1](model)
    assert torch.equal(model.conv(IMAGE[None]) * kept, made)
    model(IMAGE[None]).sum().backward()
    assert model.conv.weight.grad is not None
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))


class Adapted(nn.Conv2d):
    """Adds a second weight to the first for eval, and takes it away to train, as adapters do."""

    def __init__(self) -> None:
        super().__init__(3, 4, 3)
        self.weight.requires_grad_(False)
        self.second = nn.Parameter(torch.randn_like(self.weight))
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        """Merge or unmerge."""
        if mode == self.merged:
            self.weight.data += -self.second.data if mode else self.second.data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        """Of both weights."""
        weight = self.weight if self.merged else self.weight + self.second
        return nn.functional.conv2d(x, weight, self.bias)


@pytest.mark.parametrize("training", [True, False])
def test_a_train_of_the_models_own_is_asked_and_undone(training: bool) -> None:
    """In eval mode weights are merged; afterwards they are, bit by bit, what they were."""
    model = nn.Sequential(Adapted(), nn.ReLU()).train(training)
    weight, merged = model[0].weight.clone(), model[0].merged
    with in_eval_mode(model):
        assert model[0].merged and not model.training
    assert torch.equal(model[0].weight, weight)
    assert model[0].merged is merged and model[0].training is training
    if training:
        model(IMAGE[None]).sum().backward()
        assert model[0].second.grad is not None


def test_lazy_modules_can_be_trained_afterwards() -> None:
    """The first input makes their parameters: outside of inference mode."""
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    assert len(fv.run(model, IMAGE, "Conv2d,ReLU", size=16).captures) == 2
    assert model[0].weight.shape == (4, 3, 3, 3) and model.training
    model(IMAGE[None]).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("fast", [True, False])
def test_blocks_that_overlap_put_the_fast_path_back(fast: bool) -> None:
    """It is the whole process's; whoever ends last puts back what was there before the first."""
    mha = torch.backends.mha
    begun, end = Event(), Event()

    def other() -> None:
        with in_eval_mode(nn.ReLU()):
            begun.set()
            end.wait(10)

    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(fast)
    try:
        with in_eval_mode(nn.ReLU()):
            thread = Thread(target=other)
            thread.start()
            begun.wait(10)
        assert not mha.get_fastpath_enabled()
        end.set()
        thread.join()
        assert mha.get_fastpath_enabled() is fast
    finally:
        mha.set_fastpath_enabled(before)
