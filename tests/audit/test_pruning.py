"""Pruning: which dead channels can be cut out, and the proof that nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from networks import Net
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet18

from featviz.options.commands import Thresholds

from .audited import (
    dead,
    document,
    filled,
    input_batch,
    kill,
    residual,
    solid,
    wake,
)


@pytest.mark.medium
def test_prune_names_the_layer_that_makes_each_dead_channel(
    noise: Path, tmp_path: Path
) -> None:
    """Behind BatchNorm and a shared ReLU it is conv1; behind an addition it is nobody's
    alone."""
    model = residual()
    wake(model.block.conv1, model.block.bn2)
    kill(model.block.conv1, [1, 3])
    with torch.no_grad():  # the addition's channel 2 is far below zero, too
        model.block.bn2.bias[2] = -100
    content = document(model, noise, tmp_path, prove=True, batch_size=4)
    assert dead(content) == {"block.relu": [1, 3], "block.relu.call1": [2]}
    assert content["prune"] == {"block.conv1": [1, 3]}
    assert content["not_prunable"] == {
        "block.relu.call1": "block/fn:add mixes channels or tensors"
    }
    assert content["verify"] == {"channels": 2, "images": 6, "largest_change": 0.0}


@pytest.mark.medium
def test_without_dead_channels_no_image_is_shown_again(
    noise: Path, tmp_path: Path
) -> None:
    """There is nothing to prove."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    wake(model[0])
    content = document(model, noise, tmp_path, prove=True)
    assert content["verify"] == {"channels": 0, "images": 0, "largest_change": 0.0}


@torch.no_grad()
def cut(
    model: nn.Module, channels: list[int], maker: str, norms: str, readers: str
) -> nn.Module:
    """A copy of a model from which these channels of `maker` are cut out, in each module
    that has them. `norms` and `readers` are names, separated by spaces."""
    small = deepcopy(model)
    width = len(small.get_submodule(maker).weight)
    kept = [channel for channel in range(width) if channel not in channels]
    for name in [maker, *norms.split()]:
        module = small.get_submodule(name)
        for values in [*module.parameters(), *module.buffers()]:
            if values.ndim:
                values.data = values[kept]
    for name in readers.split():
        weight = small.get_submodule(name).weight
        # after flatten, each channel is several columns that stand together
        weight.data = weight.unflatten(1, (width, -1))[:, kept].flatten(1, 2)
    return small


def assert_unchanged(small: nn.Module, model: nn.Module) -> None:
    """Both give the same output."""
    images = torch.rand(4, 3, 12, 10)
    with torch.no_grad():
        torch.testing.assert_close(small(images), model(images), rtol=1e-4, atol=1e-4)


Way: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]


def network(way: Way, **modules: nn.Module) -> nn.Module:
    """Four channels y of an image x, of which channel 1 is dead; `way(self, x, y)` makes
    the output of them."""
    torch.manual_seed(0)
    net = Net(
        lambda self, x: way(self, x, self.relu(self.bn(self.conv(x)))),
        conv=nn.Conv2d(3, 4, 1),
        bn=nn.BatchNorm2d(4),
        relu=nn.ReLU(inplace=True),
        next=nn.Conv2d(4, 4, 3, padding=1),
        pool=nn.MaxPool2d(2),
        **modules,
    )
    wake(net.bn)
    kill(net.bn, [1])
    return net.eval()


def pooled(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Dropout and pooling lie between the channels and the linear module."""
    y = self.pool(F.dropout(y, training=self.training))
    return self.head(torch.flatten(y, 1))


CAN_BE_CUT: dict[str, tuple[Way, dict[str, nn.Module], str]] = {
    "convolution": (lambda self, x, y: self.next(y), {}, "next"),
    "two readers": (
        lambda self, x, y: self.next(y) + self.other(self.pool(y)).mean(),
        {"other": nn.Conv2d(4, 1, 1)},
        "next other",
    ),
    "flatten": (pooled, {"head": nn.Linear(4 * 30, 2)}, "head"),
    "view": (
        lambda self, x, y: self.head(y.view(len(y), -1)),
        {"head": nn.Linear(4 * 120, 2)},
        "head",
    ),
    "mean": (
        lambda self, x, y: self.head(y.mean((2, -1))),
        {"head": nn.Linear(4, 2)},
        "head",
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("case", CAN_BE_CUT)
def test_really_cutting_the_channels_out_changes_nothing(
    case: str, noise: Path, tmp_path: Path
) -> None:
    """The oracle for prune.json: a smaller network gives the same output."""
    way, modules, readers = CAN_BE_CUT[case]
    model = network(way, **modules)
    assert document(model, noise, tmp_path)["prune"] == {"conv": [1]}
    small = cut(model, [1], "conv", norms="bn", readers=readers)
    assert len(small.get_submodule("conv").weight) == 3
    assert_unchanged(small, model)


def late_addition(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The addition comes long after the activation."""
    pooled = F.dropout(self.pool(y), training=self.training).flatten(1)
    return self.head(pooled) + pooled


def assignment(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """A convolution reads the channels, and so does a tensor made before."""
    joined = torch.zeros(len(y), 8, 12, 10)
    joined[:, :4] = y
    joined[:, 4:] = self.next(y)
    return joined


class Standardised(nn.Conv2d):
    """Each weight depends on the weights of all input channels."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight / self.weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias)


CANNOT_BE_CUT: dict[str, tuple[Way, dict[str, nn.Module], str]] = {
    "addition": (lambda self, x, y: self.next(y) + y, {}, "fn:add"),
    "late addition": (late_addition, {"head": nn.Linear(120, 120)}, "fn:add"),
    "product": (lambda self, x, y: self.next(y).sigmoid() * y, {}, "fn:mul"),
    "U-Net": (lambda self, x, y: torch.cat([self.next(y), y], 1), {}, "fn:cat"),
    "assignment": (assignment, {}, "fn:setitem"),
    "output": (lambda self, x, y: y, {}, "the model's output"),
    "groups": (
        lambda self, x, y: self.deep(y),
        {"deep": nn.Conv2d(4, 4, 1, groups=4)},
        "deep",
    ),
    "norm": (
        lambda self, x, y: self.next(self.late(y)),
        {"late": nn.BatchNorm2d(4)},
        "late",
    ),
    "standardised": (
        lambda self, x, y: self.scaled(y),
        {"scaled": Standardised(4, 2, 1)},
        "scaled",
    ),
    "weight norm": (
        lambda self, x, y: self.scaled(y),
        {"scaled": nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 2, 1))},
        "scaled/fn:conv2d",
    ),
    "columns": (
        lambda self, x, y: self.head(y),
        {"head": nn.Linear(10, 2)},
        "head",
    ),
    "a number in view": (
        lambda self, x, y: self.head(y.view(-1, 480)),
        {"head": nn.Linear(480, 2)},
        "fn:view",
    ),
    "channels last": (
        lambda self, x, y: self.head(y.permute(0, 2, 3, 1).flatten(1)),
        {"head": nn.Linear(480, 2)},
        "fn:permute",
    ),
    "mean of channels": (lambda self, x, y: y.mean((1, 2)), {}, "fn:mean"),
    "pixel shuffle": (lambda self, x, y: F.pixel_shuffle(y, 2), {}, "fn:pixel_shuffle"),
}


@pytest.mark.medium
@pytest.mark.parametrize("case", CANNOT_BE_CUT)
def test_a_channel_that_more_than_input_channels_read_stays(
    case: str, noise: Path, tmp_path: Path
) -> None:
    """It is dead, but the list leaves it out, and the reason names what reads it."""
    way, modules, reader = CANNOT_BE_CUT[case]
    content = document(network(way, **modules), noise, tmp_path)
    reason = f"{reader} takes it, and may need every channel"
    assert dead(content)["relu"] == [1]
    assert content["prune"] == {}
    assert content["not_prunable"] == {"relu": reason}


@pytest.mark.medium
def test_a_residual_network_keeps_the_channels_of_its_shortcuts(
    noise: Path, tmp_path: Path
) -> None:
    """In ResNet-18 the shortcut of layer1 adds the stem's channels; those inside a block
    can really be cut out."""
    torch.manual_seed(0)
    model = resnet18(num_classes=7).eval()
    block = model.layer1[0]
    wake(model.bn1, block.bn1, block.bn2)
    kill(model.bn1, [3])
    kill(block.bn1, [2, 5])
    content = document(model, noise, tmp_path, layers="relu,layer1.0.relu")
    assert dead(content)["relu"] == [3]
    assert content["prune"] == {"layer1.0.conv1": [2, 5]}
    reason = "layer1.0/fn:add takes it, and may need every channel"
    assert content["not_prunable"]["relu"] == reason

    small = cut(model, [2, 5], "layer1.0.conv1", "layer1.0.bn1", "layer1.0.conv2")
    assert_unchanged(small, model)
    broken = cut(model, [3], "conv1", "bn1", "layer1.0.conv1")
    with pytest.raises(RuntimeError, match="must match the size"):
        assert_unchanged(broken, model)


@pytest.mark.medium
def test_verification_sees_a_channel_that_matters(noise: Path, tmp_path: Path) -> None:
    """With an eps above the channel's values it is cut out although it speaks; the
    change shows."""
    torch.manual_seed(0)
    linear = nn.Linear(480, 2)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), linear)
    thresholds = Thresholds(eps=10.0)
    content = document(model, noise, tmp_path, prove=True, thresholds=thresholds)
    with torch.no_grad():
        # nothing but the bias is left
        changes = model(input_batch(model, noise)) - linear.bias
    largest = float(changes.abs().max())
    assert content["prune"] == {"0": [0, 1, 2, 3]}
    assert content["verify"]["largest_change"] == pytest.approx(largest, rel=1e-5)


@pytest.fixture
def bright(tmp_path: Path) -> Path:
    return solid(tmp_path / "bright.png", (255, 255, 255))


@pytest.fixture
def conv() -> nn.Conv2d:
    """Of a bright image channel 1 is dead; channel 2 is of any image; of zeros channel
    0, too."""
    weights = torch.diag(torch.tensor([1.0, -1, 1]))
    return filled(nn.Conv2d(3, 3, 1), weights, [-0.9, 0.0, -2.0])


@pytest.mark.medium
def test_a_layer_that_runs_twice_loses_what_is_dead_both_times(
    conv: nn.Conv2d, bright: Path, tmp_path: Path
) -> None:
    """Channel 1 dies at the first call only, channel 0 at the second only, channel 2 at
    both; what reads them runs twice, too."""

    def branch(self: Any, x: Tensor) -> Tensor:
        return self.next(self.relu(self.conv(x)))

    twice = Net(
        lambda self, x: branch(self, x) + branch(self, -x),
        conv=conv,
        relu=nn.ReLU(),
        next=nn.Conv2d(3, 2, 1),
    )
    content = document(twice, bright, tmp_path)
    assert dead(content) == {"relu": [1, 2], "relu.call1": [0, 2]}
    assert content["prune"] == {"conv": [2]}
    assert_unchanged(cut(twice, [2], "conv", norms="", readers="next"), twice)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("way", "shared"),
    [
        (lambda self, x: self.conv(self.relu(self.conv(x))), "conv"),
        (lambda self, x: self.next(self.relu(self.conv(x))) + self.next(x), "next"),
    ],
)
def test_a_layer_that_also_runs_elsewhere_loses_nothing(
    way: Any, shared: str, conv: nn.Conv2d, bright: Path, tmp_path: Path
) -> None:
    """There the channel that is cut out would be missing."""
    forked = Net(way, conv=conv, relu=nn.ReLU(), next=nn.Conv2d(3, 2, 1))
    content = document(forked, bright, tmp_path)
    assert dead(content) == {"relu": [1, 2]}
    assert content["prune"] == {}
    assert content["not_prunable"] == {"relu": f"{shared} runs elsewhere, too"}


@pytest.mark.medium
@pytest.mark.parametrize("groups", [1, 4])
def test_a_maker_in_two_places_or_with_groups_loses_nothing(
    groups: int, noise: Path, tmp_path: Path
) -> None:
    """Its groups have equally many channels, and its places the same weights."""
    shared = nn.Conv2d(4, 4, 1, groups=groups)
    places = [shared, nn.ReLU(), shared] if groups == 1 else [shared, nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *places, nn.Conv2d(4, 2, 1))
    wake(shared)
    kill(shared, [2])
    content = document(model, noise, tmp_path)
    assert dead(content) == {"2": [2]}
    assert content["prune"] == {}
    reason = "no single channel can be cut out of layer 1"
    assert content["not_prunable"] == {"2": reason}


@pytest.mark.medium
def test_channels_that_others_depend_on_are_not_pruned(
    noise: Path, tmp_path: Path
) -> None:
    """GroupNorm mixes channels, and b's own output is used beside its ReLU."""

    def way(self: Any, x: Tensor) -> Tensor:
        raw = self.b(x)
        return self.relu(self.norm(self.a(x))) + self.relu(raw) + raw

    mixed = Net(
        way,
        a=nn.Conv2d(3, 4, 1),
        norm=nn.GroupNorm(1, 4),
        b=nn.Conv2d(3, 4, 1),
        relu=nn.ReLU(),
    )
    wake(mixed.norm, mixed.b)
    with torch.no_grad():
        mixed.norm.bias[1] = -100
    kill(mixed.b, [2])
    content = document(mixed, noise, tmp_path)
    assert dead(content) == {"relu": [1], "relu.call1": [2]}
    assert content["prune"] == {}
    assert content["not_prunable"] == {
        "relu": "norm mixes channels or tensors",
        "relu.call1": "the output of b is used elsewhere, too",
    }


def small_channel(way: Any) -> Any:
    """A network whose channel 1 is 0.5 everywhere, which an eps of 1 takes for dead. Its
    module `pick` gives this channel alone."""
    net = Net(way, conv=nn.Conv2d(3, 4, 1), relu=nn.ReLU(), pick=nn.Conv2d(4, 1, 1))
    filled(net.pick, torch.eye(4)[1:2], [0.0])
    wake(net.conv)
    kill(net.conv, [1])
    nn.init.constant_(net.conv.bias[1:2], 0.5)
    return net


@pytest.mark.medium
def test_values_that_become_infinite_are_counted_in_all_images(
    noise: Path, tmp_path: Path
) -> None:
    """One of each image, in batches of four."""
    net = small_channel(
        lambda self, x: 1 / self.pick(self.relu(self.conv(x)))[:, 0, 0, 0]
    )
    options = {"thresholds": Thresholds(eps=1), "layers": "relu", "batch_size": 4}
    content = document(net, noise, tmp_path, prove=True, **options)
    assert content["verify"]["nonfinite"] == content["verify"]["images"] == 6


@pytest.mark.medium
def test_an_output_that_the_next_pass_overwrites_is_compared(
    noise: Path, tmp_path: Path
) -> None:
    """A model may return the same tensor each time."""
    kept = torch.zeros(1)

    def way(self: Any, x: Tensor) -> Tensor:
        return kept.copy_(self.pick(self.relu(self.conv(x)))[:, 0, 0, 0])

    options = {"thresholds": Thresholds(eps=1), "layers": "relu"}
    content = document(small_channel(way), noise, tmp_path, prove=True, **options)
    assert content["verify"]["largest_change"] == 0.5


@pytest.mark.medium
def test_outputs_of_another_shape_have_no_largest_change(
    noise: Path, tmp_path: Path
) -> None:
    """As of a detector that finds fewer boxes: here a channel that is small, and not
    zero, is counted as dead, and what it gave is gone."""

    def way(self: Any, x: Tensor) -> Tensor:
        x = self.pick(self.relu(self.conv(x)))
        return x[x > 0]

    net = small_channel(way)
    content = document(
        net, noise, tmp_path, prove=True, thresholds=Thresholds(eps=1), layers="relu"
    )
    assert content["prune"] == {"conv": [1]}
    assert content["verify"] == {"channels": 1, "images": 6, "largest_change": None}
