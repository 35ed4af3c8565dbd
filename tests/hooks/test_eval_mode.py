"""A model is given back as it was: modes, weights, buffers, attributes, and switches of torch."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch
from torch import Tensor, nn

import featviz as fv
from featviz.hooks.eval_mode import in_eval_mode

IMAGE = torch.rand(3, 16, 16)


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
