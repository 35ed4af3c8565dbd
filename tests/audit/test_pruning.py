"""Pruning: which dead channels can be cut out, and the proof that nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Net
from PIL import Image
from torch import Tensor, nn

from featviz.options.commands import Thresholds

from .audited import document, filled, found, kill, loaded, residual, solid, wake


def test_prune_names_the_layer_that_makes_each_dead_channel(
    noise: Path, tmp_path: Path
) -> None:
    """Behind BatchNorm and a shared ReLU it is conv1; behind an addition it is nobody's
    alone."""
    model = residual()
    wake(model.block.conv1)
    kill(model.block.conv1, [1, 3])
    wake(model.block.bn2)
    with torch.no_grad():  # the addition's channel 2 is far below zero, too
        model.block.bn2.bias[2] = -100
    content = document(model, noise, tmp_path, prove=True, batch_size=4)
    assert found(content)["block.relu"]["dead"] == [1, 3]
    assert found(content)["block.relu.call1"]["dead"] == [2]
    assert content["prune"] == {"block.conv1": [1, 3]}
    assert content["not_prunable"] == {
        "block.relu.call1": "block/fn:add mixes channels or tensors"
    }
    assert content["verify"] == {"channels": 2, "images": 6, "largest_change": 0.0}


def test_really_cutting_the_channels_out_changes_nothing(
    noise: Path, tmp_path: Path
) -> None:
    """The oracle for prune.json: a smaller network, built by hand, gives the same
    output."""
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.ReLU()
    ).eval()
    wake(model[0])
    kill(model[0], [1, 4])
    prune = document(model, noise, tmp_path)["prune"]
    assert prune["0"] == [1, 4]
    keep = [channel for channel in range(5) if channel not in prune["0"]]
    small = nn.Sequential(
        nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU()
    ).eval()
    with torch.no_grad():
        for key in ("weight", "bias"):
            getattr(small[0], key).copy_(getattr(model[0], key)[keep])
        small[3].weight.copy_(model[3].weight[:, keep])
        small[3].bias.copy_(model[3].bias)
        images = torch.rand(4, 3, 12, 10)
        torch.testing.assert_close(small(images), model(images), rtol=1e-5, atol=1e-6)


def test_verification_sees_a_channel_that_matters(noise: Path, tmp_path: Path) -> None:
    """With an eps above the channel's values it is cut out although it speaks; the
    change shows."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(480, 2)
    )
    content = document(
        model, noise, tmp_path, prove=True, thresholds=Thresholds(eps=10.0)
    )
    assert content["prune"] == {"0": [0, 1, 2, 3]}
    stacked = torch.stack(
        [
            loaded(model).preprocess.tensor(Image.open(p))[0]
            for p in sorted(noise.iterdir())
        ]
    )
    with torch.no_grad():
        # nothing but the bias is left
        expected = (model(stacked) - model[3].bias).abs().max()
    assert content["verify"]["largest_change"] == pytest.approx(
        float(expected), rel=1e-5
    )


def test_a_layer_that_runs_twice_loses_what_is_dead_both_times(tmp_path: Path) -> None:
    """Channel 1 dies at the first call only, channel 0 at the second only, channel 2 at
    both."""
    bright = solid(tmp_path / "bright.png", (255, 255, 255))
    conv = filled(
        nn.Conv2d(3, 3, 1), torch.diag(torch.tensor([1.0, -1, 1])), [-0.9, 0.0, -2.0]
    )
    twice = Net(
        lambda self, x: self.relu(self.conv(self.relu(self.conv(x)) - 1)),
        conv=conv,
        relu=nn.ReLU(),
    )
    content = document(twice, bright, tmp_path)
    dead = {label: findings["dead"] for label, findings in found(content).items()}
    assert dead == {"relu": [1, 2], "relu.call1": [0, 2]}
    assert content["prune"] == {"conv": [2]}
    # where the output of the second call is used as it is, cutting a channel out would
    # show
    forked = Net(
        lambda self, x: self.conv(self.relu(self.conv(x))), conv=conv, relu=nn.ReLU()
    )
    content = document(forked, bright, tmp_path)
    assert found(content)["relu"]["dead"] == [1, 2]
    assert content["prune"] == {}


def test_channels_that_others_depend_on_are_not_pruned(
    noise: Path, tmp_path: Path
) -> None:
    """GroupNorm mixes channels, and b's own output is used beside its ReLU."""

    def way(self: Any, x: Tensor) -> Tensor:
        raw = self.b(x)
        return self.relu(self.norm(self.a(x))) + self.relu(raw) + raw

    norm = nn.GroupNorm(1, 4)
    b = nn.Conv2d(3, 4, 1)
    wake(norm)
    with torch.no_grad():
        norm.bias[1] = -100
    wake(b)
    kill(b, [2])
    mixed = Net(way, a=nn.Conv2d(3, 4, 1), norm=norm, b=b, relu=nn.ReLU())
    content = document(mixed, noise, tmp_path)
    assert {label: findings["dead"] for label, findings in found(content).items()} == {
        "relu": [1],
        "relu.call1": [2],
    }
    assert content["prune"] == {}
    assert content["not_prunable"] == {
        "relu": "norm mixes channels or tensors",
        "relu.call1": "the output of b is used elsewhere, too",
    }
