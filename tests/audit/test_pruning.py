"""Pruning: which dead channels can be cut out, and the proof that nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Net
from torch import Tensor, nn

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


def convolutions(channels: int) -> nn.Sequential:
    """Two of them; the first makes so many channels."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 4, 3),
        nn.ReLU(),
    ).eval()


@pytest.mark.medium
@torch.no_grad()
def test_really_cutting_the_channels_out_changes_nothing(
    noise: Path, tmp_path: Path
) -> None:
    """The oracle for prune.json: a smaller network, built by hand, gives the same
    output."""
    model = convolutions(5)
    wake(model[0])
    kill(model[0], [1, 4])
    prune = document(model, noise, tmp_path)["prune"]
    assert prune["0"] == [1, 4]

    kept = [0, 2, 3]
    small = convolutions(3)
    small[0].weight.copy_(model[0].weight[kept])
    small[0].bias.copy_(model[0].bias[kept])
    small[3].weight.copy_(model[3].weight[:, kept])
    small[3].bias.copy_(model[3].bias)
    images = torch.rand(4, 3, 12, 10)
    torch.testing.assert_close(small(images), model(images), rtol=1e-5, atol=1e-6)


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
    both."""
    twice = Net(
        lambda self, x: self.relu(self.conv(self.relu(self.conv(x)) - 1)),
        conv=conv,
        relu=nn.ReLU(),
    )
    content = document(twice, bright, tmp_path)
    assert dead(content) == {"relu": [1, 2], "relu.call1": [0, 2]}
    assert content["prune"] == {"conv": [2]}


@pytest.mark.medium
def test_a_layer_whose_second_output_is_used_loses_nothing(
    conv: nn.Conv2d, bright: Path, tmp_path: Path
) -> None:
    """Cutting a channel out would show where no activation follows the second call."""
    forked = Net(
        lambda self, x: self.conv(self.relu(self.conv(x))), conv=conv, relu=nn.ReLU()
    )
    content = document(forked, bright, tmp_path)
    assert dead(content) == {"relu": [1, 2]}
    assert content["prune"] == {}


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
    """A network whose channel 1 is 0.5 everywhere, which an eps of 1 takes for dead."""
    net = Net(way, conv=nn.Conv2d(3, 4, 1), relu=nn.ReLU())
    wake(net.conv)
    kill(net.conv, [1])
    nn.init.constant_(net.conv.bias[1:2], 0.5)
    return net


@pytest.mark.medium
def test_values_that_become_infinite_are_counted_in_all_images(
    noise: Path, tmp_path: Path
) -> None:
    """One of each image, in batches of four."""
    net = small_channel(lambda self, x: 1 / self.relu(self.conv(x))[:, 1, 0, 0])
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
        return kept.copy_(self.relu(self.conv(x))[:, 1, 0, 0])

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
        x = self.relu(self.conv(x))
        return x[x > 0]

    net = small_channel(way)
    content = document(
        net, noise, tmp_path, prove=True, thresholds=Thresholds(eps=1), layers="relu"
    )
    assert content["prune"] == {"conv": [1]}
    assert content["verify"] == {"channels": 1, "images": 6, "largest_change": None}
