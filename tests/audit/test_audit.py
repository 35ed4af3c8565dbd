"""The audit: planted channels are found, and nothing else, over all images."""

from __future__ import annotations

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
from featviz.options.commands import AuditOptions, Thresholds

from . import planted
from .audited import PLAIN, document, filled, found, loaded, residual, solid

LABELS = {
    "modules": ("act", "act2"),
    "shared": ("act", "act.call1"),
    "in place": ("act", "act.call1"),
    "functional": ("fn:relu6", "fn:relu6.call1"),
    "functional in place": ("fn:relu6", "fn:relu6.call1"),
}


@pytest.mark.parametrize(
    "way",
    ["modules", *(pytest.param(way, marks=pytest.mark.slow) for way in [*LABELS][1:])],
)
def test_exactly_what_was_planted_is_found(
    way: str, noise: Path, tmp_path: Path
) -> None:
    """Each finding at its channels, and at no others, however the activation is called."""
    batch_size = 1 if way == "shared" else 4
    asked = {"thresholds": Thresholds(redundant_at=0.98), "batch_size": batch_size}
    content = document(planted.Planted(way), noise, tmp_path, **asked)
    first, second = LABELS[way]
    assert found(content) == {first: planted.FIRST, second: planted.SECOND}
    assert content["layers"][0]["groups"] == [[2, 3]]
    assert content["images"]["seen"] == 6
    assert [row["values"] for row in content["layers"]] == [6 * 120] * 2


def test_convolutions_are_judged_at_the_activation_that_follows(
    noise: Path, tmp_path: Path
) -> None:
    """A selected Conv2d or BatchNorm2d has the dead channels of the activation behind
    it."""
    way = "functional in place"
    content = document(
        planted.Planted(way), noise, tmp_path, layers="Conv2d,BatchNorm2d"
    )
    first, second = LABELS[way]
    rows = {
        row["label"]: (row["dead_at"], row["findings"]["dead"])
        for row in content["layers"]
    }
    assert rows == {"conv1": (first, [0]), "bn": (first, [0]), "conv2": (second, [6])}
    # 6 and all is said: it is dead
    assert found(content)["conv2"]["constant"] == [0, 1, 4]


def test_dead_on_one_image_and_alive_on_another_is_not_dead(tmp_path: Path) -> None:
    """A channel that only bright images excite is dead for dark ones alone."""
    conv = filled(
        nn.Conv2d(3, 2, 1), torch.tensor([[1.0, 0, 0], [1, 0, 0]]), [-0.5, -2.0]
    )
    model = nn.Sequential(conv, nn.ReLU())
    both = tmp_path / "both"
    both.mkdir()
    dark = solid(both / "a.png", (10, 0, 0))
    solid(both / "b.png", (250, 0, 0))
    assert found(document(model, dark, tmp_path))["1"]["dead"] == [0, 1]
    assert found(document(model, both, tmp_path))["1"]["dead"] == [1]


def test_where_no_activation_follows_dead_is_refused(
    noise: Path, tmp_path: Path
) -> None:
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
    assert (
        head["not_judged"]["dead"] == "the model's output comes before any activation"
    )


def test_apoz_and_statistics_are_those_of_all_images(
    noise: Path, tmp_path: Path
) -> None:
    """channels.npz and APoZ against numpy over the outputs of all images at once."""
    model = planted.Planted("shared").eval()
    content = document(model, noise, tmp_path)
    images = [
        loaded(model).preprocess.tensor(Image.open(path))
        for path in sorted(noise.iterdir())
    ]
    with torch.no_grad():
        output = F.relu6(model.bn(model.conv1(torch.cat(images))))
    values = output.double().movedim(1, 0).flatten(1).numpy()
    assert content["layers"][0]["apoz"] == pytest.approx(
        (values == 0).mean(1).mean(), abs=1e-9
    )
    with np.load(tmp_path / "audit" / "channels.npz") as arrays:
        table = arrays["act"]
    good = [0, 1, 2, 3, 4, 6, 7]
    np.testing.assert_allclose(table[good, 1], values.min(1)[good], rtol=1e-6)
    np.testing.assert_allclose(
        table[good, 3], values.mean(1)[good], rtol=1e-5, atol=1e-7
    )
    np.testing.assert_allclose(
        table[good, 4], values.var(1)[good], rtol=1e-5, atol=1e-9
    )
    np.testing.assert_allclose(table[good, 7], (values >= 5.994).mean(1)[good])


@pytest.mark.parametrize(
    ("activation", "bias", "finding"),
    [
        (nn.Tanh(), -30.0, "saturated"),
        (nn.Hardtanh(0.0, 3.0), -9.0, "dead"),
        (nn.SiLU(), -200.0, "constant"),
        (nn.LeakyReLU(), -9.0, None),
    ],
)
def test_each_activation_is_asked_its_own_question(
    activation: nn.Module, bias: float, finding: str | None, noise: Path, tmp_path: Path
) -> None:
    """Sigmoid saturates, SiLU goes constant, ReLU dies; one that varies has no finding."""
    conv = filled(nn.Conv2d(3, 1, 1), torch.tensor([[0.5] * 3]), [bias])
    own = found(document(nn.Sequential(conv, activation), noise, tmp_path))["1"]
    assert {name for name, channels in own.items() if channels} == ({finding} - {None})


def test_an_image_that_fails_leaves_nothing_behind(noise: Path, tmp_path: Path) -> None:
    """A model that refuses one image of a batch: the others count, and what the guilty
    one gave before it failed does not."""

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
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert module.training
    model.module.head = nn.Linear(3, 1)
    with pytest.raises(Exception, match="head"):
        plan.choose(model, None, [torch.zeros(1, 3, 4, 4)])
    assert not any(module._forward_hooks for module in model.module.modules())


def test_what_has_no_channels_is_named_and_not_counted(tmp_path: Path) -> None:
    """A detector's scores [1, classes, anchors] have no axis of channels that is known:
    anchors do not count as saturated channels, and the maps before them are audited."""

    def way(self: Any, x: Tensor) -> Tensor:
        x = self.act(self.conv(x))
        rows = torch.cat([x.flatten(2), x.flatten(2)[..., :17]], 2)
        return self.scores(rows * 1000)

    detector = Net(way, conv=nn.Conv2d(3, 11, 3), act=nn.ReLU(), scores=nn.Sigmoid())
    content = document(detector, solid(tmp_path / "red.png", (255, 0, 0)), tmp_path)
    assert [(row["layer"], row["channels"]) for row in content["layers"]] == [
        ("act", 11)
    ]
    (skipped,) = content["skipped"]
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

    names = ("maps", "last", "tokens")
    mixed = Net(way, **{name: nn.Sigmoid() for name in names})
    content = document(mixed, solid(tmp_path / "red.png", (255, 0, 0)), tmp_path)
    assert {
        row["layer"]: row["channels"] for row in content["layers"]
    } == dict.fromkeys(names, 6)


def test_a_call_whose_channels_change_is_named(tmp_path: Path, noise: Path) -> None:
    """A call with other channels than before is skipped, with both counts."""
    # as many channels as the first pixel says
    fickle = Net(
        lambda self, x: self.relu(x if x[0, 0, 0, 0] > 0.5 else x[:, :2]),
        relu=nn.ReLU(),
    )
    skipped = document(fickle, noise, tmp_path)["skipped"]
    assert [entry["layer"] for entry in skipped] == ["relu"]
    assert "channels, then" in skipped[0]["reason"]
