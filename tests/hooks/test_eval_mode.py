"""A model is given back as it was: modes, weights, buffers, attributes, and switches of
torch."""

from __future__ import annotations

from collections.abc import Iterator
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
    adapted = Adapted()
    model = nn.Sequential(adapted, nn.ReLU()).train(training)
    weight = adapted.weight.clone()
    merged = adapted.merged
    with in_eval_mode(model):
        assert adapted.merged
        assert not model.training
    assert torch.equal(adapted.weight, weight)
    assert adapted.merged is merged
    assert adapted.training is training


def test_an_adapted_model_still_learns() -> None:
    """The second weight gets a gradient in the training that goes on."""
    adapted = Adapted()
    model = nn.Sequential(adapted, nn.ReLU()).train()
    with in_eval_mode(model):
        pass
    model(IMAGE[None]).sum().backward()
    assert adapted.second.grad is not None


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


def test_a_lazy_module_keeps_its_compiled_call() -> None:
    """One that was compiled in place runs as written in the block, compiled afterwards."""
    layer = nn.LazyConv2d(4, 3)
    calls: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append("compiled")
        return graph.forward

    layer.compile(backend=backend)
    with in_eval_mode(layer):
        layer(IMAGE[None])
    assert not calls
    layer(IMAGE[None])
    assert calls


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


@pytest.mark.medium
@pytest.mark.parametrize(
    "options", [{}, {"capture": "output,grad", "target": "mean"}], ids=["out", "grad"]
)
def test_no_image_depends_on_the_one_before(options: dict[str, Any]) -> None:
    """A state in attributes and buffers is put back after each image, with gradients as
    without; what a list holds stays there, as the docs say."""
    torch.manual_seed(0)
    model = Recurrent()
    alone = fv.run(model, IMAGE, "conv,Recurrent", size=16, **options)
    both = fv.run(model, [1 - IMAGE, IMAGE], "conv,Recurrent", size=16, **options)
    for first, second in zip(alone.captures, both.images[1].captures, strict=True):
        assert (first.layer, first.mean) == (second.layer, second.mean)
    assert model.state == 0.0
    assert model.gain.item() == 1
    assert not hasattr(model, "last")
    assert model.calls


class HooksItself(nn.Module):
    """Places a hook on a part of it in its first pass, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)
        self.is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.conv.register_forward_hook(lambda module, args, output: output + 1)
            self.is_hooked = True
        return self.conv(x)


def test_hooks_of_the_models_own_go_with_what_it_knows_of_them() -> None:
    """Else each pass would place another one, and the next would see the sum of all."""
    model = HooksItself().eval()
    with torch.no_grad():
        convolved = nn.functional.conv2d(
            IMAGE[None], model.conv.weight, model.conv.bias
        )
    for _ in range(2):
        run = fv.run(model, [IMAGE, IMAGE], "HooksItself", preset="none")
        assert not model.is_hooked
        assert not model.conv._forward_hooks
        for image in run.images:
            (maps,) = image.captures
            assert maps.mean == pytest.approx(convolved.mean().item() + 1, abs=0.01)


@pytest.fixture(params=[True, False])
def fast_path(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether torch may use its fast path of attention; for this test."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(request.param)
    yield request.param
    torch.backends.mha.set_fastpath_enabled(before)


def test_blocks_that_overlap_put_the_fast_path_back(fast_path: bool) -> None:
    """It is the whole process's; whoever ends last puts back what was there before the
    first."""
    begun = Event()
    end = Event()

    def stay_in_eval_mode() -> None:
        with in_eval_mode(nn.ReLU()):
            begun.set()
            end.wait(10)

    thread = Thread(target=stay_in_eval_mode)
    with in_eval_mode(nn.ReLU()):
        thread.start()
        begun.wait(10)
    between = torch.backends.mha.get_fastpath_enabled()
    end.set()
    thread.join()
    assert not between
    assert torch.backends.mha.get_fastpath_enabled() is fast_path


class Buffering(nn.Module):
    """Makes a buffer on the way."""

    def forward(self, x: Tensor) -> Tensor:
        """The image, which it keeps."""
        self.register_buffer("kept", x)
        return x


def test_a_buffer_that_is_made_on_the_way_goes() -> None:
    """It would hold the last image, and stand in the model's state."""
    model = Buffering()
    with in_eval_mode(model):
        model(IMAGE)
        assert "kept" in model.state_dict()
    assert not model.state_dict()


def test_a_lazy_layer_can_be_trained_that_saw_its_input_in_inference_mode() -> None:
    """Parameters that inference mode makes never get a gradient."""
    layer = nn.LazyLinear(2)
    with torch.inference_mode(), in_eval_mode(layer):
        layer(torch.zeros(1, 3))
    assert not layer.weight.is_inference()
