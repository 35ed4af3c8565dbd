"""The audit: planted channels are found, and nothing else, over all images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from featviz.audit import plan
from featviz.audit.audit import audit
from featviz.errors import UsageError
from featviz.options import AuditOptions, InputOptions, Thresholds

from . import planted
from .audited import PLAIN, document, filled, found, kill, loaded, residual, solid, wake

LABELS = {
    "modules": ("act", "act2"),
    "shared": ("act", "act.call1"),
    "in place": ("act", "act.call1"),
    "functional": ("fn:relu6", "fn:relu6.call1"),
    "functional in place": ("fn:relu6", "fn:relu6.call1"),
}


@pytest.mark.parametrize(
    "way", ["modules", *(pytest.param(way, marks=pytest.mark.slow) for way in [*LABELS][1:])]
)
def test_exactly_what_was_planted_is_found(way: str, noise: Path, tmp_path: Path) -> None:
    """Each finding at its channels, and at no others, however the activation is called."""
    batch_size = 1 if way == "shared" else 4
    asked = {"thresholds": Thresholds(redundant_at=0.98), "batch_size": batch_size}
    content = document(planted.Planted(way), noise, tmp_path, **asked)
    first, second = LABELS[way]
    assert found(content) == {first: planted.FIRST, second: planted.SECOND}
    assert content["layers"][0]["groups"] == [[2, 3]]
    assert content["images"]["seen"] == 6
    assert [row["values"] for row in content["layers"]] == [6 * 120] * 2


@pytest.mark.parametrize("way", ["shared", "functional in place"])
def test_convolutions_are_judged_at_the_activation_that_follows(
    way: str, noise: Path, tmp_path: Path
) -> None:
    """A selected Conv2d or BatchNorm2d has the dead channels of the activation behind it."""
    content = document(planted.Planted(way), noise, tmp_path, layers="Conv2d,BatchNorm2d")
    first, second = LABELS[way]
    rows = {row["label"]: (row["dead_at"], row["findings"]["dead"]) for row in content["layers"]}
    assert rows == {"conv1": (first, [0]), "bn": (first, [0]), "conv2": (second, [6])}
    assert found(content)["conv2"]["constant"] == [0, 1, 4]  # 6 and all is said: it is dead


def test_dead_on_one_image_and_alive_on_another_is_not_dead(tmp_path: Path) -> None:
    """A channel that only bright images excite is dead for dark ones alone."""
    conv = filled(nn.Conv2d(3, 2, 1), torch.tensor([[1.0, 0, 0], [1, 0, 0]]), [-0.5, -2.0])
    model = nn.Sequential(conv, nn.ReLU())
    both = tmp_path / "both"
    both.mkdir()
    dark = solid(both / "a.png", (10, 0, 0))
    solid(both / "b.png", (250, 0, 0))
    assert found(document(model, dark, tmp_path))["1"]["dead"] == [0, 1]
    assert found(document(model, both, tmp_path))["1"]["dead"] == [1]


def test_where_no_activation_follows_dead_is_refused(noise: Path, tmp_path: Path) -> None:
    """Before an addition, before GELU and before nothing: no verdict, with the reason."""
    content = document(residual(), noise, tmp_path, layers="Conv2d")
    rows = {row["label"]: row for row in content["layers"]}
    reasons = {label: row["not_judged"].get("dead") for label, row in rows.items()}
    assert reasons == {
        "stem": "block.conv1 comes before any activation",
        "block.conv1": None,
        "block.conv2": "block/fn:add comes before any activation",
        "late": "fn:gelu gives no exact zeros",
    }
    assert rows["block.conv1"]["dead_at"] == "block.relu"
    assert "dead" not in rows["late"]["findings"]
    head = document(planted.Planted(), noise, tmp_path, layers="head")["layers"][0]
    assert head["not_judged"]["dead"] == "the model's output comes before any activation"


@pytest.mark.slow
def test_a_shared_activation_is_judged_in_each_place(noise: Path, tmp_path: Path) -> None:
    """One ReLU of two callers: a channel that is dead behind one lives behind the other."""

    def unit(bias: list[float], relu: nn.Module) -> nn.Module:
        conv = filled(nn.Conv2d(3, 3, 1), torch.eye(3), bias)
        return Net(lambda self, x: self.relu(self.conv(x)), conv=conv, relu=relu)

    relu = nn.ReLU()
    model = nn.Sequential(unit([0, -2, 0], relu), unit([0, 2, -2], relu))
    content = document(model, noise, tmp_path)
    dead = {label: findings.get("dead") for label, findings in found(content).items()}
    assert dead == {"0.relu": [1], "1.relu": [2]}
    judged = document(model, noise, tmp_path, layers="Conv2d")["layers"]
    assert [row["dead_at"] for row in judged] == ["0.relu", "1.relu"]


def test_apoz_and_statistics_are_those_of_all_images(noise: Path, tmp_path: Path) -> None:
    """channels.npz and APoZ against numpy over the outputs of all images at once."""
    model = planted.Planted("shared").eval()
    content = document(model, noise, tmp_path)
    images = [loaded(model).preprocess.tensor(Image.open(path)) for path in sorted(noise.iterdir())]
    with torch.no_grad():
        output = F.relu6(model.bn(model.conv1(torch.cat(images))))
    values = output.double().movedim(1, 0).flatten(1).numpy()
    assert content["layers"][0]["apoz"] == pytest.approx((values == 0).mean(1).mean(), abs=1e-9)
    with np.load(tmp_path / "audit" / "channels.npz") as arrays:
        table = arrays["act"]
    good = [0, 1, 2, 3, 4, 6, 7]
    np.testing.assert_allclose(table[good, 1], values.min(1)[good], rtol=1e-6)
    np.testing.assert_allclose(table[good, 3], values.mean(1)[good], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(table[good, 4], values.var(1)[good], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(table[good, 7], (values >= 5.994).mean(1)[good])


@pytest.mark.parametrize(
    ("activation", "bias", "finding"),
    [
        (nn.Tanh(), -30.0, "saturated"),
        (nn.Hardtanh(0.0, 3.0), -9.0, "dead"),
        (nn.SiLU(), -200.0, "constant"),
        pytest.param(nn.ReLU(), 0.0, None, marks=pytest.mark.slow),
        pytest.param(nn.Sigmoid(), 30.0, "saturated", marks=pytest.mark.slow),
        pytest.param(nn.Hardtanh(-2.0, 3.0), 9.0, "saturated", marks=pytest.mark.slow),
        pytest.param(nn.LeakyReLU(), -9.0, None, marks=pytest.mark.slow),
    ],
)
def test_each_activation_is_asked_its_own_question(
    activation: nn.Module, bias: float, finding: str | None, noise: Path, tmp_path: Path
) -> None:
    """Sigmoid saturates, SiLU goes constant, ReLU dies; one that varies has no finding."""
    conv = filled(nn.Conv2d(3, 1, 1), torch.tensor([[0.5] * 3]), [bias])
    own = found(document(nn.Sequential(conv, activation), noise, tmp_path))["1"]
    assert {name for name, channels in own.items() if channels} == ({finding} - {None})


@pytest.mark.slow
def test_channels_last_is_told_by_the_layer_before(tmp_path: Path) -> None:
    """Linear gives [B, 12, 10, 8]: channels last, although 10 × 8 has the input's proportions."""
    linear, path = nn.Linear(3, 8), tmp_path / "x.png"
    wake(linear)
    kill(linear, [5, 7])
    Image.effect_noise((12, 12), 90).convert("RGB").save(path)
    last = Net(
        lambda self, x: self.relu(self.linear(x.permute(0, 2, 3, 1))), linear=linear, relu=nn.ReLU()
    )
    content = document(last, path, tmp_path)
    assert content["layers"][0]["channels"] == 8
    assert content["prune"] == {"linear": [5, 7]}


def test_an_image_that_fails_leaves_nothing_behind(noise: Path, tmp_path: Path) -> None:
    """A model that refuses one image of a batch: the others count, and what the guilty one gave
    before it failed does not."""

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(x)
            if bool((x.amin((1, 2, 3)) == 1).any()):
                raise ValueError("all white")
            return x

    clean = document(Picky(), noise, tmp_path)
    solid(noise / "3b.png", (255, 255, 255))
    content = document(Picky(), noise, tmp_path, batch_size=4)
    assert [f["image"] for f in content["images"]["failures"]] == ["3b.png"]
    assert "all white" in content["images"]["failures"][0]["error"]
    assert content["images"]["seen"] == 6
    assert content["layers"][0]["values"] == clean["layers"][0]["values"] == 6 * 120
    assert content["layers"][0]["apoz"] == clean["layers"][0]["apoz"]


def test_the_model_is_given_back_as_it_was(noise: Path, tmp_path: Path) -> None:
    """No hook stays, and training flags return, also when the model raised."""
    model = loaded(planted.Planted("shared"))
    model.module.train()
    audit(model, [str(noise)], AuditOptions(inputs=PLAIN, out=tmp_path / "a"))
    for module in model.module.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert module.training
    model.module.head = nn.Linear(3, 1)
    with pytest.raises(Exception, match="head"):
        plan.choose(model, None, [torch.zeros(1, 3, 4, 4)])
    assert not any(module._forward_hooks for module in model.module.modules())


@pytest.mark.slow
def test_no_layers_at_all_and_none_that_ran(noise: Path, tmp_path: Path) -> None:
    """Both are usage errors that say what there is."""
    idle = Net(lambda self, x: x * 2, spare=nn.ReLU())
    with pytest.raises(UsageError, match="neither activations nor convolutions"):
        document(idle, noise, tmp_path)
    with pytest.raises(UsageError) as error:
        document(idle, noise, tmp_path, layers="ReLU")
    assert "spare never ran" in str(error.value.hint)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_images(tmp_path: Path) -> None:
    """200 images: after the twentieth the process grows by less than 16 MB."""
    pixels = np.random.default_rng(0).integers(0, 256, (200, 48, 48, 3), dtype=np.uint8)
    for index, one in enumerate(pixels):
        Image.fromarray(one).save(tmp_path / f"{index:03d}.png")
    resident: list[int] = []

    def progress(image: str, error: object, total: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE"))

    net = nn.Sequential(nn.Conv2d(3, 64, 7, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU())
    options = AuditOptions(max_suspects=0, batch_size=2, out=tmp_path / "out")
    audit(loaded(net, InputOptions(size=(48, 48))), [str(tmp_path)], options, progress)
    assert len(resident) == 200
    assert max(resident[20:]) - resident[19] < 16e6


@pytest.mark.slow
def test_what_has_no_channels_is_named_and_not_counted(tmp_path: Path) -> None:
    """A detector's scores [1, classes, anchors] have no axis of channels that is known: anchors do
    not count as saturated channels, and the maps before them are audited."""

    def way(self: Any, x: Tensor) -> Tensor:
        x = self.act(self.conv(x))
        rows = torch.cat([x.flatten(2), x.flatten(2)[..., :17]], 2)
        return self.scores(rows * 1000)

    detector = Net(way, conv=nn.Conv2d(3, 11, 3), act=nn.ReLU(), scores=nn.Sigmoid())
    content = document(detector, solid(tmp_path / "red.png", (255, 0, 0)), tmp_path)
    assert [(row["layer"], row["channels"]) for row in content["layers"]] == [("act", 11)]
    (skipped,) = content["skipped"]
    assert skipped["layer"] == "scores"
    assert skipped["reason"] == "shape [1, 11, 97] has no axis known to count channels"


@pytest.mark.slow
def test_maps_and_tokens_without_a_known_maker_are_counted_by_their_layout(tmp_path: Path) -> None:
    """Where no layer before says which axis counts channels, the layout of the output does."""

    def way(self: Any, x: Tensor) -> Tensor:
        wide = torch.cat([x, x], 1) * 1.0
        self.maps(wide)
        self.last(wide.permute(0, 2, 3, 1) * 1.0)
        return self.tokens(wide.flatten(2).transpose(1, 2) * 1.0)

    names = ("maps", "last", "tokens")
    mixed = Net(way, **{name: nn.Sigmoid() for name in names})
    content = document(mixed, solid(tmp_path / "red.png", (255, 0, 0)), tmp_path)
    assert {row["layer"]: row["channels"] for row in content["layers"]} == dict.fromkeys(names, 6)
