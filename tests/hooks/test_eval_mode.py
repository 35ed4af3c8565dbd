"""A model is given back as it was: modes, weights, buffers, attributes, and switches of
torch."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featviz as fv
from featviz.errors import UsageError
from featviz.hooks.eval_mode import in_eval_mode

IMAGE = torch.rand(3, 16, 16)


class Adapted(nn.Conv2d):
    """Adds a second weight to the first for eval, and takes it away to train, as
    adapters do."""

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
    weight = model[0].weight.clone()
    merged = model[0].merged
    with in_eval_mode(model):
        assert model[0].merged
        assert not model.training
    assert torch.equal(model[0].weight, weight)
    assert model[0].merged is merged
    assert model[0].training is training
    if training:
        model(IMAGE[None]).sum().backward()
        assert model[0].second.grad is not None


def test_lazy_modules_are_refused_until_they_have_seen_an_input() -> None:
    """The first input makes their parameters, and is not ours to choose."""
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    with pytest.raises(
        UsageError, match=r"the model's 0 \(LazyConv2d\) gets its size from the"
    ):
        fv.run(model, IMAGE, "Conv2d,ReLU", size=16)
    assert isinstance(model[0], nn.LazyConv2d)
    assert model[0].has_uninitialized_params()
    model(IMAGE[None])
    assert len(fv.run(model, IMAGE, "Conv2d,ReLU", size=16).captures) == 2


def test_a_lazy_module_is_back_in_training_mode() -> None:
    """Its first input makes another class of it, whose flag is the user's all the same."""
    model = nn.Sequential(nn.LazyBatchNorm2d()).train()
    with in_eval_mode(model):
        model(IMAGE[None])
    assert isinstance(model[0], nn.BatchNorm2d)
    assert model[0].training


class Recurrent(nn.Module):
    """Keeps a state from call to call: in an attribute, in a buffer, and in one made on
    the way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)
        self.state: Tensor | float = 0.0
        self.register_buffer("gain", torch.ones(1))
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """Of the image and the state."""
        self.state = torch.tanh(self.conv(x) * self.gain + self.state)
        self.gain = self.gain + 1
        self.last = self.state
        self.calls.append(len(self.calls))
        return self.state


@pytest.mark.parametrize("capture", ["output", "output,grad"])
def test_no_image_depends_on_the_one_before(capture: str) -> None:
    """A state in attributes and buffers is put back after each image, with gradients as
    without; what a list holds stays there, as the docs say."""
    torch.manual_seed(0)
    model = Recurrent()
    options: dict[str, Any] = {"size": 16, "capture": capture, "target": "mean"}
    if capture == "output":
        del options["target"]
    alone = fv.run(model, IMAGE, "conv,Recurrent", **options)
    after_another = fv.run(model, [1 - IMAGE, IMAGE], "conv,Recurrent", **options)
    first = alone.captures
    second = after_another.images[1].captures
    assert [maps.mean for maps in first] == [maps.mean for maps in second]
    assert [maps.layer for maps in first] == [maps.layer for maps in second]
    assert model.state == 0.0
    assert model.gain.item() == 1
    assert not hasattr(model, "last")
    assert model.calls


@pytest.mark.parametrize("fast", [True, False])
def test_blocks_that_overlap_put_the_fast_path_back(fast: bool) -> None:
    """It is the whole process's; whoever ends last puts back what was there before the
    first."""
    mha = torch.backends.mha
    begun = Event()
    end = Event()

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
