"""The audit: planted channels are found, and nothing else, over all images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net
from torch import Tensor, nn
from torch.nn import functional as F

from featviz.audit import plan
from featviz.audit.audit import audit
from featviz.errors import FeatvizError, ForwardError
from featviz.options.commands import AuditOptions, Thresholds
from featviz.run import workers

from . import planted
from .audited import (
    PLAIN,
    column,
    dead,
    document,
    filled,
    input_batch,
    loaded,
    residual,
    solid,
)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("way", "batch_size", "first", "second"),
    [
        ("modules", 4, "act", "act2"),
        ("shared", 1, "act", "act.call1"),
        ("in place", 4, "act", "act.call1"),
        ("functional", 4, "fn:relu6", "fn:relu6.call1"),
        ("functional in place", 4, "fn:relu6", "fn:relu6.call1"),
    ],
)
def test_exactly_what_was_planted_is_found(
    way: str, batch_size: int, first: str, second: str, noise: Path, tmp_path: Path
) -> None:
    """Each finding at its channels, and at no others, however the activation is called."""
    content = document(
        planted.Planted(way),
        noise,
        tmp_path,
        thresholds=Thresholds(redundant_at=0.98),
        batch_size=batch_size,
    )
    assert column(content, "findings") == {first: planted.FIRST, second: planted.SECOND}
    assert column(content, "groups") == {first: [[2, 3]], second: [[2, 3]]}
    assert column(content, "values") == dict.fromkeys([first, second], 6 * 120)
    assert content["images"]["seen"] == 6


def test_convolutions_are_judged_at_the_activation_that_follows(
    noise: Path, tmp_path: Path
) -> None:
    """A selected Conv2d or BatchNorm2d has the dead channels of the activation behind
    it."""
    model = planted.Planted("functional in place")
    content = document(model, noise, tmp_path, layers="Conv2d,BatchNorm2d")
    assert column(content, "dead_at") == {
        "conv1": "fn:relu6",
        "bn": "fn:relu6",
        "conv2": "fn:relu6.call1",
    }
    assert dead(content) == {"conv1": [0], "bn": [0], "conv2": [6]}
    # 6 is dead, and said to be nothing else
    assert column(content, "findings")["conv2"]["constant"] == [0, 1, 4]


@pytest.mark.medium
def test_dead_on_one_image_and_alive_on_another_is_not_dead(tmp_path: Path) -> None:
    """A channel that only bright images excite is dead for dark ones alone."""
    reds = torch.tensor([[1.0, 0, 0], [1, 0, 0]])
    model = nn.Sequential(filled(nn.Conv2d(3, 2, 1), reds, [-0.5, -2.0]), nn.ReLU())
    both = tmp_path / "both"
    both.mkdir()
    dark = solid(both / "a.png", (10, 0, 0))
    solid(both / "b.png", (250, 0, 0))
    assert dead(document(model, dark, tmp_path)) == {"1": [0, 1]}
    assert dead(document(model, both, tmp_path)) == {"1": [1]}


@pytest.mark.medium
def test_where_no_activation_follows_dead_is_refused(
    noise: Path, tmp_path: Path
) -> None:
    """Before an addition and before GELU: no verdict, with the reason."""
    content = document(residual(), noise, tmp_path, layers="Conv2d")
    assert column(content, "not_judged") == {
        "stem": {"dead": "block.conv1 comes before any activation"},
        "block.conv1": {},
        "block.conv2": {"dead": "block/fn:add comes before any activation"},
        "late": {"dead": "fn:gelu gives no exact zeros"},
    }
    assert column(content, "dead_at")["block.conv1"] == "block.relu"
    assert list(dead(content)) == ["block.conv1"]


@pytest.mark.medium
def test_at_the_end_of_the_model_dead_is_refused(noise: Path, tmp_path: Path) -> None:
    """Behind the last layer comes nothing: no verdict, with the reason."""
    content = document(planted.Planted(), noise, tmp_path, layers="head")
    reason = "the model's output comes before any activation"
    assert column(content, "not_judged")["head"]["dead"] == reason


def test_at_an_activation_of_other_channels_dead_is_refused(
    noise: Path, tmp_path: Path
) -> None:
    """Channels that lie last are what pooling makes fewer of: the first of one is not
    the first of the other."""
    net = Net(
        lambda self, x: self.act(self.pool(self.fc(x))),
        fc=nn.Linear(10, 8),
        pool=nn.MaxPool2d(2),
        act=nn.ReLU(),
    )
    content = document(net, noise, tmp_path, layers="fc")
    reason = "act, which follows, has other channels"
    assert column(content, "not_judged") == {"fc": {"dead": reason}}


@pytest.mark.medium
def test_apoz_and_statistics_are_those_of_all_images(
    noise: Path, tmp_path: Path
) -> None:
    """channels.npz and APoZ against numpy over the outputs of all images at once."""
    model = planted.Planted("shared").eval()
    content = document(model, noise, tmp_path)
    with torch.no_grad():
        output = F.relu6(model.bn(model.conv1(input_batch(model, noise))))
    values = output.double().movedim(1, 0).flatten(1).numpy()
    apoz = (values == 0).mean(1).mean()
    assert column(content, "apoz")["act"] == pytest.approx(apoz, abs=1e-9)

    finite = [0, 1, 2, 3, 4, 6, 7]
    values = values[finite]
    with np.load(tmp_path / "audit" / "channels.npz") as arrays:
        table = arrays["act"][finite]
    np.testing.assert_allclose(table[:, 1], values.min(1), rtol=1e-6)
    np.testing.assert_allclose(table[:, 3], values.mean(1), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(table[:, 4], values.var(1), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(table[:, 7], (values >= 5.994).mean(1))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("activation", "bias", "finding"),
    [
        (nn.Tanh(), -30.0, "saturated"),
        (nn.Hardtanh(0.0, 3.0), -9.0, "dead"),
        (nn.SiLU(), -200.0, "constant"),
        (nn.LeakyReLU(), -9.0, "none"),
    ],
)
def test_each_activation_is_asked_its_own_question(
    activation: nn.Module, bias: float, finding: str, noise: Path, tmp_path: Path
) -> None:
    """Sigmoid saturates, SiLU goes constant, ReLU dies; one that varies has no finding."""
    conv = filled(nn.Conv2d(3, 1, 1), torch.tensor([[0.5] * 3]), [bias])
    content = document(nn.Sequential(conv, activation), noise, tmp_path)
    for name, channels in column(content, "findings")["1"].items():
        assert channels == ([0] if name == finding else [])


@pytest.mark.parametrize(
    ("function", "module"),
    [
        (F.relu, nn.ReLU()),
        (F.relu6, nn.ReLU6()),
        (F.hardtanh, nn.Hardtanh()),
        (torch.ops.aten.hardtanh, nn.Hardtanh()),
        (partial(F.hardtanh, min_val=0), nn.Hardtanh(0, 1)),
        (partial(F.hardtanh, max_val=3), nn.Hardtanh(-1, 3)),
        (torch.sigmoid, nn.Sigmoid()),
        (torch.tanh, nn.Tanh()),
        (F.hardswish, nn.Hardswish()),
    ],
)
def test_a_function_is_asked_what_its_module_is_asked(
    function: Callable[[Tensor], Tensor], module: nn.Module, noise: Path, tmp_path: Path
) -> None:
    """With the same ends by default: channels far below, at, between and above them."""
    biases = [-20.0, -1.6, -0.7, 0.2, 0.8, 1.6, 2.7, 3.5, 6.0, 20.0]
    found = []
    for way in (function, module):
        conv = filled(nn.Conv2d(3, 10, 1), torch.tensor([[0.1, 0, 0]] * 10), biases)
        net = Net(lambda net, x, way=way: way(net.conv(x)), conv=conv)
        if way is module:
            net.act = module
        (of_layer,) = column(document(net, noise, tmp_path), "findings").values()
        found.append(of_layer)
    assert found[0] == found[1]


class Sums(nn.Module):
    """Three modules of one class, two activations that are functions, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(torch.sigmoid(self.one(x)))
        return torch.tanh(self.three(x + 1))


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("ReLU#0", ["one"]),
        ("ReLU#1", ["two"]),
        ("ReLU#-1", ["three"]),
        ("ReLU#:2", ["one", "two"]),
        ("ReLU#::2", ["one", "three"]),
        ("fn:sigmoid#0,ReLU#2", ["fn:sigmoid", "three"]),
        ("fn:add", ["fn:add"]),
        ("fn:add,two,fn:tanh", ["two", "fn:add", "fn:tanh"]),
    ],
)
def test_selectors_count_each_layer_once(
    text: str, labels: list[str], noise: Path, tmp_path: Path
) -> None:
    """As they do in a run: modules, and the activations that are functions."""
    content = document(Sums(), noise, tmp_path, layers=text)
    assert list(column(content, "findings")) == labels


class Picky(nn.Module):
    """Refuses a white image, behind an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        if bool((x.amin((1, 2, 3)) == 1).any()):
            raise ValueError("all white")
        return x


@pytest.mark.medium
def test_an_image_that_fails_leaves_nothing_behind(noise: Path, tmp_path: Path) -> None:
    """A model that refuses one image of a batch: the others count, and what the guilty
    one gave before it failed does not."""
    clean = document(Picky(), noise, tmp_path)
    solid(noise / "3b.png", (255, 255, 255))
    content = document(Picky(), noise, tmp_path, batch_size=4)
    (failure,) = content["images"]["failures"]
    assert failure["image"] == "3b.png"
    assert "all white" in failure["error"]
    assert content["images"]["seen"] == 6
    assert column(content, "values") == {"relu": 6 * 120}
    assert column(content, "apoz") == column(clean, "apoz")


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.modules()
    )


@pytest.mark.medium
def test_the_model_is_given_back_as_it_was(noise: Path, tmp_path: Path) -> None:
    """No hook stays, and training flags return."""
    model = loaded(planted.Planted("shared"))
    model.module.train()
    audit(model, [str(noise)], AuditOptions(inputs=PLAIN, out=tmp_path / "a"))
    assert hooks_of(model.module) == 0
    assert all(module.training for module in model.module.modules())


def test_a_model_that_raises_is_given_back_as_it_was() -> None:
    """No hook stays of a pass that did not end."""
    model = loaded(planted.Planted("shared"))
    model.module.head = nn.Linear(3, 1)
    with pytest.raises(ForwardError, match="head"):
        plan.plan_audit(model, None, [torch.zeros(1, 3, 4, 4)])
    assert hooks_of(model.module) == 0


@pytest.mark.medium
def test_what_has_no_channels_is_named_and_not_counted(tmp_path: Path) -> None:
    """A detector's scores [1, classes, anchors] have no axis of channels that is known:
    anchors do not count as saturated channels, and the maps before them are audited."""

    def way(self: Any, x: Tensor) -> Tensor:
        x = self.act(self.conv(x))
        rows = torch.cat([x.flatten(2), x.flatten(2)[..., :17]], 2)
        return self.scores(rows * 1000)

    detector = Net(way, conv=nn.Conv2d(3, 11, 3), act=nn.ReLU(), scores=nn.Sigmoid())
    content = document(detector, solid(tmp_path / "red.png", (255, 0, 0)), tmp_path)
    (skipped,) = content["skipped"]
    assert column(content, "channels") == {"act": 11}
    assert skipped["layer"] == "scores"
    assert skipped["reason"] == "shape [1, 11, 97] has no axis known to count channels"


def test_maps_and_tokens_without_a_known_maker_are_counted_by_their_layout(
    tmp_path: Path,
) -> None:
    """Where no layer before says which axis counts channels, the layout of the output
    does."""

    def way(self: Any, x: Tensor) -> Tensor:
        wide = torch.cat([x, x], 1) * 1.0
        self.maps(wide)
        self.last(wide.permute(0, 2, 3, 1) * 1.0)
        return self.tokens(wide.flatten(2).transpose(1, 2) * 1.0)

    mixed = Net(way, maps=nn.Sigmoid(), last=nn.Sigmoid(), tokens=nn.Sigmoid())
    content = document(mixed, solid(tmp_path / "red.png", (255, 0, 0)), tmp_path)
    assert column(content, "channels") == {"maps": 6, "last": 6, "tokens": 6}


@pytest.mark.medium
def test_a_call_whose_channels_change_is_named(tmp_path: Path, noise: Path) -> None:
    """A call with other channels than before is skipped, with both counts."""
    # as many channels as the first pixel says
    fickle = Net(
        lambda self, x: self.relu(x if x[0, 0, 0, 0] > 0.5 else x[:, :2]),
        relu=nn.ReLU(),
    )
    (skipped,) = document(fickle, noise, tmp_path)["skipped"]
    assert skipped["layer"] == "relu"
    assert "channels, then" in skipped["reason"]


@pytest.mark.medium
@pytest.mark.parametrize("cores", [1, 2])
def test_progress_is_told_of_each_image_and_of_how_many_there_are(
    cores: int, noise: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names in their order, an error for the one that is broken, and always seven."""
    monkeypatch.setattr(workers, "usable_cores", lambda: cores)
    (noise / "3b.png").write_bytes(b"no image")
    told: list[tuple[str, bool, int]] = []

    def progress(image: str, error: FeatvizError | None, total: int) -> None:
        told.append((image, error is None, total))

    options = AuditOptions(out=tmp_path / "out", inputs=PLAIN)
    audit(loaded(planted.Planted("modules")), [str(noise)], options, progress)
    names = ["0", "1", "2", "3", "3b", "4", "5"]
    assert told == [(f"{name}.png", name != "3b", 7) for name in names]
