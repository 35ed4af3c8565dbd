"""The audit: planted channels are found, and nothing else; what it writes, proves and refuses."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
from conftest import DIGITS, DIGITS_MODEL, Outcome
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from featviz import audit as story
from featviz.audit import AuditOptions, call_graph, counting, gates, output
from featviz.audit.model_audit import AuditRequest
from featviz.errors import UsageError
from featviz.images.find import find_samples
from featviz.images.group import natural_key
from featviz.models.load import LoadedModel, adopt
from featviz.models.preprocess import InputOptions
from featviz.records.findings import FINDINGS, Thresholds

PLANTED = Path(planted.__file__)
PLAIN = InputOptions(size=(12, 10), mean=(0.0,) * 3, std=(1.0,) * 3)
COLOURS = ("--size", "12x10", "--mean", "0,0,0", "--std", "1,1,1")
Run = Callable[..., Outcome]


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """Six pictures of independent random colours, 10 × 12."""
    folder = tmp_path / "noise"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for index in range(6):
        pixels = generator.integers(1, 256, (12, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


def solid(path: Path, colour: tuple[int, int, int]) -> Path:
    Image.new("RGB", (10, 12), colour).save(path)
    return path


def loaded(module: nn.Module, inputs: InputOptions = PLAIN) -> LoadedModel:
    return adopt(module.eval(), inputs)


def document(module: nn.Module, images: object, tmp_path: Path, **asked: Any) -> dict[str, Any]:
    """audit.json of a module."""
    out = tmp_path / "audit"
    shutil.rmtree(out, ignore_errors=True)
    options = AuditOptions(AuditRequest(inputs=PLAIN, **asked), out=out)
    story.audit(loaded(module), [str(images)], options)
    content: dict[str, Any] = json.loads((out / "audit.json").read_text())
    return content


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def found(content: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    return {row["label"]: row["findings"] for row in content["layers"]}


LABELS = {
    "modules": ("act", "act2"),
    "shared": ("act", "act.call1"),
    "in place": ("act", "act.call1"),
    "functional": ("fn:relu6", "fn:relu6.call1"),
    "functional in place": ("fn:relu6", "fn:relu6.call1"),
}


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("way", LABELS)
def test_exactly_what_was_planted_is_found(
    way: str, batch_size: int, noise: Path, tmp_path: Path
) -> None:
    """Each finding at its channels, and at no others, however the activation is called."""
    asked = {"thresholds": Thresholds(redundant_at=0.98), "batch_size": batch_size}
    content = document(planted.Planted(way), noise, tmp_path, **asked)
    first, second = LABELS[way]
    assert found(content) == {first: planted.FIRST, second: planted.SECOND}
    assert content["layers"][0]["groups"] == [[2, 3]]
    assert content["images"]["seen"] == 6
    assert [row["values"] for row in content["layers"]] == [6 * 120] * 2


@pytest.mark.parametrize("way", LABELS)
@pytest.mark.slow
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
    conv = nn.Conv2d(3, 2, 1)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[1.0, 0, 0], [1, 0, 0]])[:, :, None, None])
        conv.bias.copy_(torch.tensor([-0.5, -2.0]))
    model = nn.Sequential(conv, nn.ReLU())
    both = tmp_path / "both"
    both.mkdir()
    dark = solid(both / "a.png", (10, 0, 0))
    solid(both / "b.png", (250, 0, 0))
    assert found(document(model, dark, tmp_path))["1"]["dead"] == [0, 1]
    assert found(document(model, both, tmp_path))["1"]["dead"] == [1]


class Block(nn.Module):
    """A residual block that shares its ReLU, as in ResNet-18."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 4, 1), Block()
        self.late = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.late(self.block(self.stem(x))))


def test_where_no_activation_follows_dead_is_refused(noise: Path, tmp_path: Path) -> None:
    """Before an addition, before GELU and before nothing: no verdict, with the reason."""
    content = document(Residual(), noise, tmp_path, layers="Conv2d")
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


def test_functions_are_named_by_the_module_that_calls_them(noise: Path, tmp_path: Path) -> None:
    """`fn:gelu` of the model itself; a selector takes them."""
    content = document(Residual(), noise, tmp_path)
    assert [row["label"] for row in content["layers"]] == [
        "block.relu", "block.relu.call1", "fn:gelu",
    ]  # fmt: skip
    assert list(found(document(Residual(), noise, tmp_path, layers="fn:gelu"))) == ["fn:gelu"]


def wake(layer: nn.Module) -> None:
    """No channel of random weights dies by chance."""
    with torch.no_grad():
        layer.bias.fill_(5.0)


def kill(conv: nn.Module, channels: list[int]) -> None:
    with torch.no_grad():
        conv.weight[channels] = 0
        conv.bias[channels] = -3


def test_prune_names_the_layer_that_makes_each_dead_channel(noise: Path, tmp_path: Path) -> None:
    """Behind BatchNorm and a shared ReLU it is conv1; behind an addition it is nobody's alone."""
    model = Residual()
    wake(model.block.conv1)
    kill(model.block.conv1, [1, 3])
    wake(model.block.bn2)
    with torch.no_grad():  # the addition's channel 2 is far below zero, too
        model.block.bn2.bias[2] = -100
    content = document(model, noise, tmp_path, verify=True)
    assert found(content)["block.relu"]["dead"] == [1, 3]
    assert found(content)["block.relu.call1"]["dead"] == [2]
    assert content["prune"] == {"block.conv1": [1, 3]}
    assert content["not_prunable"] == {"block.relu.call1": "block/fn:add mixes channels or tensors"}
    assert content["verify"] == {"channels": 2, "images": 6, "largest_change": 0.0}


def test_really_cutting_the_channels_out_changes_nothing(noise: Path, tmp_path: Path) -> None:
    """The oracle for prune.json: a smaller network, built by hand, gives the same output."""
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
    """With an eps above the channel's values it is cut out although it speaks; the change shows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(480, 2))
    content = document(model, noise, tmp_path, verify=True, thresholds=Thresholds(eps=10.0))
    assert content["prune"] == {"0": [0, 1, 2, 3]}
    stacked = torch.stack(
        [loaded(model).preprocess.tensor(Image.open(p))[0] for p in sorted(noise.iterdir())]
    )
    with torch.no_grad():
        expected = (model(stacked) - model[3].bias).abs().max()  # nothing but the bias is left
    assert content["verify"]["largest_change"] == pytest.approx(float(expected), rel=1e-5)


class SpoiledByCutting(nn.Module):
    """Divides by a channel that holds 0.001 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 2, 1), nn.ReLU()
        with torch.no_grad():
            self.conv.weight.zero_()
            self.conv.bias.copy_(torch.tensor([1e-3, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv(x))
        return torch.stack([(y[:, 1] / y[:, 0]).mean((1, 2)), y[:, 1].mean((1, 2))], 1)


def test_verification_counts_values_that_become_infinite(noise: Path, tmp_path: Path) -> None:
    """An output that becomes infinite has its shape still: the change of the others is given."""
    content = document(
        SpoiledByCutting(), noise, tmp_path, verify=True, thresholds=Thresholds(eps=0.01)
    )
    assert content["prune"] == {"conv": [0]}
    assert content["verify"] == {"channels": 1, "images": 6, "largest_change": 0.0, "nonfinite": 6}


class Twice(nn.Module):
    """One convolution that runs twice, with a ReLU behind each call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 3, 1), nn.ReLU()
        with torch.no_grad():
            self.conv.weight.copy_(torch.eye(3)[:, :, None, None])
            self.conv.weight[1, 1] = -1
            self.conv.bias.copy_(torch.tensor([-0.9, 0.0, -2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(self.relu(self.conv(x)) - 1))


def test_a_layer_that_runs_twice_loses_what_is_dead_both_times(tmp_path: Path) -> None:
    """Channel 1 dies at the first call only, channel 0 at the second only, channel 2 at both."""
    bright = solid(tmp_path / "bright.png", (255, 255, 255))
    content = document(Twice(), bright, tmp_path)
    dead = {label: own["dead"] for label, own in found(content).items()}
    assert dead == {"relu": [1, 2], "relu.call1": [0, 2]}
    assert content["prune"] == {"conv": [2]}


class Forked(nn.Module):
    """One convolution that runs twice, with a ReLU behind its first call only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 3, 1), nn.ReLU()
        wake(self.conv)
        kill(self.conv, [1])

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.relu(self.conv(x)))


def test_a_layer_whose_other_call_is_used_as_it_is_loses_nothing(
    noise: Path, tmp_path: Path
) -> None:
    """Its dead channel is -3 in the output of the second call: cutting it out would show."""
    content = document(Forked(), noise, tmp_path)
    assert found(content)["relu"]["dead"] == [1]
    assert content["prune"] == {}


class Mixed(nn.Module):
    """What a chain from a convolution to its ReLU must not hold, for pruning to be safe."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 4, 1), nn.GroupNorm(1, 4)
        self.b, self.relu = nn.Conv2d(3, 4, 1), nn.ReLU()
        with torch.no_grad():
            self.norm.bias.fill_(5.0)[1] = -100
        wake(self.b)
        kill(self.b, [2])

    def forward(self, x: Tensor) -> Tensor:
        raw = self.b(x)
        return self.relu(self.norm(self.a(x))) + self.relu(raw) + raw


def test_channels_that_others_depend_on_are_not_pruned(noise: Path, tmp_path: Path) -> None:
    """GroupNorm mixes channels, and b's own output is used beside its ReLU."""
    content = document(Mixed(), noise, tmp_path)
    assert {label: own["dead"] for label, own in found(content).items()} == {
        "relu": [1], "relu.call1": [2],
    }  # fmt: skip
    assert content["prune"] == {}
    assert content["not_prunable"] == {
        "relu": "norm mixes channels or tensors",
        "relu.call1": "the output of b is used elsewhere, too",
    }


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
        (nn.Sigmoid(), 30.0, "saturated"),
        (nn.Sigmoid(), -30.0, "saturated"),
        (nn.Tanh(), -30.0, "saturated"),
        (nn.Hardsigmoid(), -9.0, "saturated"),
        (nn.Hardtanh(-2.0, 3.0), 9.0, "saturated"),
        (nn.Hardtanh(0.0, 3.0), -9.0, "dead"),
        (nn.SiLU(), -200.0, "constant"),
        (nn.GELU(), -200.0, "constant"),
        (nn.Hardswish(), -9.0, "constant"),
        (nn.ReLU(), -9.0, "dead"),
        (nn.ReLU(), 0.0, None),
        (nn.Sigmoid(), 0.0, None),
        (nn.GELU(), 0.0, None),
        (nn.LeakyReLU(), -9.0, None),
    ],
)
def test_each_activation_is_asked_its_own_question(
    activation: nn.Module, bias: float, finding: str | None, noise: Path, tmp_path: Path
) -> None:
    """Sigmoid saturates, SiLU goes constant, ReLU dies; one that varies has no finding."""
    conv = nn.Conv2d(3, 1, 1)
    with torch.no_grad():
        conv.weight.fill_(0.5)
        conv.bias.fill_(bias)
    own = found(document(nn.Sequential(conv, activation), noise, tmp_path))["1"]
    assert {name for name, channels in own.items() if channels} == ({finding} - {None})


def test_channels_last_is_told_by_the_layer_before(tmp_path: Path) -> None:
    """Linear gives [B, 12, 10, 8]: channels last, although 10 × 8 has the input's proportions."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.relu = nn.Linear(3, 8), nn.ReLU()
            wake(self.linear)
            kill(self.linear, [5, 7])

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.linear(x.permute(0, 2, 3, 1)))

    path = tmp_path / "x.png"
    Image.effect_noise((12, 12), 90).convert("RGB").save(path)
    content = document(Last(), path, tmp_path)
    assert content["layers"][0]["channels"] == 8
    assert content["prune"] == {"linear": [5, 7]}


def test_images_of_other_shapes_fall_into_other_batches(tmp_path: Path) -> None:
    """Neighbours of one shape go together, never more than asked for, and none is lost."""
    sizes = [(8, 8)] * 3 + [(6, 8)] + [(8, 8)] * 2
    for index, size in enumerate(sizes):
        Image.new("RGB", size, (index, 0, 0)).save(tmp_path / f"{index}.png")
    model = adopt(nn.Conv2d(1, 1, 1), InputOptions())
    samples = find_samples([str(tmp_path)])
    made = list(counting.batches(samples, model, InputOptions(), 2, lambda n, e: None))
    assert [batch.images for batch in made] == [(0, 1), (2,), (3,), (4, 5)]
    assert [tuple(batch.inputs[0].shape[2:]) for batch in made] == [(8, 8), (8, 8), (8, 6), (8, 8)]


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
    story.audit(model, [str(noise)], AuditOptions(AuditRequest(inputs=PLAIN), out=tmp_path / "a"))
    for module in model.module.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert module.training
    model.module.head = nn.Linear(3, 1)
    with pytest.raises(Exception, match="head"):
        call_graph.trace(model, [torch.zeros(1, 3, 4, 4)])
    assert not any(module._forward_hooks for module in model.module.modules())


def test_no_layers_at_all_and_none_that_ran(noise: Path, tmp_path: Path) -> None:
    """Both are usage errors that say what there is."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    with pytest.raises(UsageError, match="neither activations nor convolutions"):
        document(Idle(), noise, tmp_path)
    with pytest.raises(UsageError) as error:
        document(Idle(), noise, tmp_path, layers="ReLU")
    assert "spare never ran" in str(error.value.hint)


@pytest.mark.slow
def test_without_activations_convolutions_are_asked_whether_they_vary(
    noise: Path, tmp_path: Path
) -> None:
    """A purely linear model: constant and nonfinite, of its Conv2d."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    kill(model[0], [2])
    assert found(document(model, noise, tmp_path)) == {"0": {"constant": [2], "nonfinite": []}}


# ---------------------------------------------------------------------------------------------
# The command line


def planted_call(way: str) -> list[str]:
    return [f"{PLANTED}:make", "--model-arg", f"way={way}", *COLOURS]


def test_command_prints_a_table_and_writes_the_files(
    featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """A row for each layer and the total on stdout; findings, statistics and pictures in --out."""
    out = tmp_path / "out"
    done = featviz("audit", *planted_call("shared"), noise, "--out", out)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split() == [
        "layer", "type", "channels", "APoZ", "dead", "constant", "saturated", "nonfinite",
    ]  # fmt: skip
    assert lines[1].split()[:3] == ["act", "ReLU6", "8"] and lines[1].split()[4:] == list("1111")
    assert lines[3].split()[0] == "total" and lines[3].split()[3:] == list("2322")
    assert "6 images seen; the verdicts hold for these images" in done.err
    content = json.loads((out / "audit.json").read_text())
    assert content["schema_version"] == 1 and content["model"]["name"] == "planted.py:make"
    assert names_in(out) == ["apoz.png", "audit.json", "channels.npz", "suspects"]
    assert str(tmp_path) not in (out / "audit.json").read_text()


def test_json_on_stdout_is_the_file(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """One document, the same findings."""
    out = tmp_path / "out"
    done = featviz("audit", *planted_call("shared"), noise, "--out", out, "--json")
    printed, written = json.loads(done.out), json.loads((out / "audit.json").read_text())
    assert printed == {key: value for key, value in written.items() if key != "drawn"}


@pytest.mark.slow
def test_the_same_command_writes_the_same_bytes(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """Twice, into two folders: every file is equal."""
    trees = []
    for name in ("a", "b"):
        featviz("audit", *planted_call("shared"), noise, "--out", tmp_path / name, "-q")
        files = sorted(p for p in (tmp_path / name).rglob("*") if p.is_file())
        trees.append({str(p.relative_to(tmp_path / name)): p.read_bytes() for p in files})
    assert trees[0] == trees[1] and len(trees[0]) == 7


def test_suspects_are_drawn_with_the_images_that_excite_them_most(
    featviz: Run, tmp_path: Path
) -> None:
    """The row of a saturated channel shows the four brightest of six images, best first."""
    folder = tmp_path / "reds"
    folder.mkdir()
    for value in (40, 250, 120, 200, 80, 160):
        solid(folder / f"{value:03d}.png", (value, 0, 0))
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Sigmoid())
    with torch.no_grad():  # channel 0 is sound, and excited most by the darkest
        model[0].weight.copy_(torch.tensor([[-1.0, 0, 0], [1, 0, 0]])[:, :, None, None])
        model[0].bias.copy_(torch.tensor([0.0, 7.0]))
    torch.save(model, tmp_path / "m.pth")
    out = tmp_path / "out"
    done = featviz(
        "audit", tmp_path / "m.pth", folder, "--out", out, *COLOURS, "--saturated-at", 0.5
    )
    assert done.code == 0, done.err
    (drawn,) = json.loads((out / "audit.json").read_text())["drawn"]
    assert drawn == {
        "layer": "1", "shown": "1", "channels": [1], "suspects": 1, "file": "suspects/1.png",
    }  # fmt: skip
    pixels = np.asarray(Image.open(out / drawn["file"]))
    reds = [v for v in (250, 200, 160, 120) if (pixels == (v, 0, 0)).all(-1).sum() > 2000]
    assert reds == [250, 200, 160, 120]
    assert not (pixels == (80, 0, 0)).all(-1).any()
    columns = [int(np.argwhere((pixels == (v, 0, 0)).all(-1))[:, 1].min()) for v in reds]
    assert columns == sorted(columns)


@pytest.mark.slow
def test_the_number_of_suspects_is_limited_and_said(
    featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """--max-suspects 2 draws two, and says of how many; 0 draws none."""
    out = tmp_path / "out"
    call = ["audit", *planted_call("shared"), noise, "--out", out, "--overwrite"]
    assert featviz(*call, "--max-suspects", 2).code == 0
    drawn = json.loads((out / "audit.json").read_text())["drawn"]
    assert sum(len(row["channels"]) for row in drawn) == 2
    assert {row["suspects"] for row in drawn} == {4}
    assert featviz(*call, "--max-suspects", 0).code == 0
    assert not (out / "suspects").exists()


def test_a_broken_image_is_named_and_the_others_count(
    featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """Exit code 3; with all broken 1, and nothing is written."""
    (noise / "bad.png").write_bytes(b"no image")
    out = tmp_path / "out"
    done = featviz("audit", *planted_call("shared"), noise, "--out", out)
    assert done.code == 3 and "error: bad.png: bad.png is no image" in done.err
    assert "6 images seen" in done.err
    done = featviz("audit", *planted_call("shared"), noise / "bad.png", "--out", tmp_path / "none")
    assert done.code == 1 and "no image of 1 went through" in done.err
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_the_output_folder_is_not_taken_from_others(
    featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """Something else is refused whatever is asked; an audit only without --overwrite."""
    call = ["audit", *planted_call("shared"), noise, "--out"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    done = featviz(*call, other, "--overwrite")
    assert done.code == 1 and "holds no audit of featviz" in done.err
    assert (other / "thesis.txt").read_text() == "mine"
    assert featviz(*call, tmp_path / "out").code == 0
    done = featviz(*call, tmp_path / "out")
    assert done.code == 1 and "--overwrite replaces it" in done.err
    (tmp_path / "out" / "mine.txt").write_text("mine")
    done = featviz(*call, tmp_path / "out", "--overwrite")
    assert done.code == 1 and "holds files that featviz did not write: mine.txt" in done.err
    (tmp_path / "out" / "mine.txt").unlink()
    assert featviz(*call, tmp_path / "out", "--overwrite").code == 0


@pytest.mark.slow
def test_interrupted_it_leaves_the_old_results(
    featviz: Run, noise: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of writing: 130, what was there is there, and nothing lies beside it."""
    out = tmp_path / "out"
    call = ["audit", *planted_call("shared"), noise, "--out", out]
    assert featviz(*call).code == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(story.output, "apoz_chart", interrupt)
    assert featviz(*call, "--overwrite").code == 130
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    assert names_in(tmp_path) == ["noise", "out"]


def test_prune_out_and_verify(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """prune.json is {layer: [channels]}, and leaving them out changes nothing."""
    prune = tmp_path / "prune.json"
    done = featviz(
        "audit", *planted_call("in place"), noise, "--out", tmp_path / "out",
        "--prune-out", prune, "--verify",
    )  # fmt: skip
    assert done.code == 0
    assert json.loads(prune.read_text()) == {"conv1": [0], "conv2": [6]}
    assert "without the 2 channels that can be cut out the output changes by 0 at most" in done.err


@pytest.mark.slow
def test_several_models_share_a_table(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """A glob in natural order and --model: a column for each, and a folder of its own."""
    torch.manual_seed(0)
    for epoch, dead in ((2, []), (10, [0]), (1, [0, 2])):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
        with torch.no_grad():
            model[0].bias.fill_(3.0)
        kill(model[0], dead)
        torch.save(model, tmp_path / f"epoch_{epoch}.pth")
    out = tmp_path / "out"
    done = featviz(
        "audit", tmp_path / "epoch_*.pth", noise, "--model", tmp_path / "epoch_2.pth",
        "--out", out, *COLOURS,
    )  # fmt: skip
    assert done.code == 0, done.err
    header, row, *totals = done.out.splitlines()
    assert header.split() == [
        "layer", "epoch_1.pth", "epoch_2.pth", "epoch_10.pth", "epoch_2.pth", "(2)",
    ]  # fmt: skip
    assert row.split() == ["1", "2", "dead", "0", "1", "dead", "0"]
    assert totals[0].split()[:6] == ["total", "dead", "2", "of", "4", "(50.0%)"]
    names = ["00_epoch_1.pth", "01_epoch_2.pth", "02_epoch_10.pth", "03_epoch_2.pth (2)"]
    assert names_in(out) == [*names, "models.json", "models.png"]
    rows = json.loads((out / "models.json").read_text())["models"]
    assert [row["findings"]["dead"] for row in rows] == [2, 0, 1, 0]
    assert Image.open(out / "models.png").size[0] > 300


def test_no_model_matches_a_glob(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """A usage error that names the pattern; --prune-out with several models, too."""
    done = featviz("audit", tmp_path / "no_*.pth", noise)
    assert done.code == 2 and "no model file matches" in done.err
    done = featviz(
        "audit", *planted_call("shared"), noise, "--model", "resnet18", "--prune-out", "x.json"
    )
    assert done.code == 2 and "--prune-out is for one model" in done.err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--batch-size", 0, "--batch-size 0 is below 1"),
        ("--eps", -1, "--eps -1 is below 0"),
        ("--eps", "nan", "--eps nan is below 0"),
        ("--saturated-at", 1.5, "--saturated-at 1.5 is not between 0 and 1"),
        ("--redundant-at", 0, "--redundant-at 0 is not between 0 and 1"),
        ("--max-suspects", -1, "--max-suspects -1 is below 0"),
        ("--background", "nope", "is no colour"),
    ],
)
def test_bad_values(
    option: str, value: object, message: str, featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """Refused before any work, with the value."""
    done = featviz("audit", *planted_call("shared"), noise, option, value, "--out", tmp_path / "o")
    assert done.code == 2 and message in done.err


def test_natural_order() -> None:
    """Numbers by their value, not letter by letter."""
    names = ["e_10", "e_9", "e_1b2", "e_1b10", "10", "9", "a"]
    assert sorted(names, key=natural_key) == ["9", "10", "a", "e_1b2", "e_1b10", "e_9", "e_10"]


@pytest.mark.slow
def test_config_supplies_models_and_gates(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """Lists in a TOML file stand for repeated options; a MODEL on the command line wins."""
    torch.save(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), tmp_path / "m.pth")
    config = tmp_path / "c.toml"
    config.write_text(
        f'images = ["{noise}"]\nsize = "12x10"\nmean = [0, 0, 0]\nstd = [1, 1, 1]\n'
        f'[audit]\nmodel = ["{tmp_path}/m.pth"]\nfail-on = ["dead>90%", "nonfinite>0"]\n'
    )
    done = featviz("audit", "--config", config, "--out", tmp_path / "a")
    assert done.code == 0, done.err
    assert (tmp_path / "a" / "audit.json").is_file()
    done = featviz("audit", "--config", config, f"{PLANTED}:make", "--out", tmp_path / "b")
    assert done.code == 4 and "gate nonfinite>0 is broken" in done.err
    assert (tmp_path / "b" / "audit.json").is_file()


# ---------------------------------------------------------------------------------------------
# The demonstration, and memory


@pytest.mark.slow
def test_digits_demonstration(featviz: Run, tmp_path: Path) -> None:
    """The shipped network has no dead channel on its own samples; one that is killed is found,
    made by its convolution, and not missed."""
    done = featviz("audit", DIGITS_MODEL, DIGITS, "--out", tmp_path / "a", "--verify", "--json")
    assert done.code == 0 and json.loads(done.out)["total"]["findings"]["dead"] == 0
    model = torch.load(DIGITS_MODEL, weights_only=False)
    kill(model[3], [7, 30])
    torch.save(model, tmp_path / "killed.pth")
    done = featviz(
        "audit", tmp_path / "killed.pth", DIGITS, "--out", tmp_path / "b", "--verify", "--json"
    )
    content = json.loads(done.out)
    assert content["prune"] == {"3": [7, 30]}
    assert content["verify"] == {"channels": 2, "images": 20, "largest_change": 0.0}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_images(tmp_path: Path) -> None:
    """200 images of resnet18: after the twentieth the process grows by less than 16 MB."""
    from torchvision import models

    folder = tmp_path / "many"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for index in range(200):
        pixels = generator.integers(0, 256, (96, 96, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:03d}.png")
    resident: list[int] = []

    def progress(image: str, error: object, total: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE"))

    model = adopt(models.resnet18(), InputOptions(size=(96, 96), mean=(0.5,) * 3, std=(1.0,) * 3))
    options = AuditOptions(AuditRequest(max_suspects=0, batch_size=2), out=tmp_path / "out")
    story.audit(model, [str(folder)], options, progress)
    assert len(resident) == 200
    assert max(resident[20:]) - resident[19] < 16e6


def test_control_characters_in_names_are_escaped_in_charts(tmp_path: Path) -> None:
    """matplotlib has no glyph for them, and would warn of each."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert output.apoz_chart([("a\x1b[1m\n", 0.5, 0.0)], "title").startswith(b"\x89PNG")
        assert output.dead_chart(["m\x07.pth"], {"dead": [0.5]}).startswith(b"\x89PNG")


def test_every_finding_is_in_the_help_and_has_a_gate(featviz: Run) -> None:
    """A finding is one record: its definition is in the help, and its example is a gate on it."""
    words = " ".join(featviz("audit", "--help").out.split())
    for name, finding in FINDINGS.items():
        assert f"{name} {finding.definition}" in words
        assert gates.parse(finding.gate).finding == name
        assert set(finding.yields_to) < set(FINDINGS) - {name}
    assert sorted(finding.severity for finding in FINDINGS.values()) == list(range(len(FINDINGS)))
