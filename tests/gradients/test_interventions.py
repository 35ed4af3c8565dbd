"""Interventions, against forward passes written by hand."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome
from gradient_models import SPHERES
from oracle import Tensors, assert_close, input_of, inputs, saved
from torch import Tensor, nn
from torchvision import models

import featviz as fv
from featviz.errors import UsageError
from featviz.gradients import interventions
from featviz.records import RunResult
from featviz.rundir.read import read_json


class Net(nn.Module):
    """Convolutions in front of one in-place ReLU, tokens, and scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x))
        x = self.relu(self.b(x))
        return self.fc(x.mean((2, 3)))


def by_hand(model: Net, x: Tensor, **changes: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The same forward pass, with a function put behind each layer named."""
    same = {name: changes.get(name, lambda t: t) for name in ("a", "b", "relu", "fc")}
    found = {"a": same["a"](model.a(x))}
    found["relu"] = same["relu"](found["a"].relu())
    found["b"] = same["b"](model.b(found["relu"]))
    found["relu.call1"] = same["relu"](found["b"].relu())
    found["fc"] = same["fc"](model.fc(found["relu.call1"].mean((2, 3))))
    return found


def changed(out: Path, model: nn.Module | None = None, **options: Any) -> tuple[Tensors, RunResult]:
    """Run, with the raw tensors."""
    model = Net() if model is None else model
    options = {"layers": "a,b,relu,fc", **options}
    layers = options.pop("layers")
    result = fv.run(model, SPHERES, layers, out, tensors="npy", **options, **inputs(12))
    return saved(out / "spheres.jpg"), result


def zero(*channels: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        keep = torch.ones(tensor.shape[1]).index_fill(0, torch.tensor(channels), 0.0)
        return tensor * keep.view(1, -1, *[1] * (tensor.ndim - 2))

    return change


def factors(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


CHANGES: list[tuple[dict[str, Any], dict[str, Callable[[Tensor], Tensor]]]] = [
    ({"ablate": "a:1,3"}, {"a": zero(1, 3)}),
    ({"ablate": "b:0-2"}, {"b": zero(0, 1, 2)}),
    ({"ablate": ["a:0", "relu:2"]}, {"a": zero(0), "relu": zero(2)}),
    ({"ablate": "fc:5"}, {"fc": zero(5)}),
    ({"ablate": "Conv2d:1"}, {"a": zero(1), "b": zero(1)}),
    ({"edit": "a:channel 3*2.5"}, {"a": lambda t: t * factors(1, 1, 1, 2.5)[:, None, None]}),
    ({"edit": "fc:channel 0,1*-1e1"}, {"fc": lambda t: t * factors(-10, -10, 1, 1, 1, 1)}),
    ({"edit": "relu:clamp=0.1,0.3"}, {"relu": lambda t: t.clamp(0.1, 0.3)}),
    ({"edit": "a:clamp=-.5,0"}, {"a": lambda t: t.clamp(-0.5, 0)}),
    (
        {"edit": ["a:channel 1,2*3", "a:clamp=-1,1"], "ablate": "a:1"},
        {"a": lambda t: (zero(1)(t) * factors(1, 3, 3, 1)[:, None, None]).clamp(-1, 1)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "functions"), CHANGES)
def test_interventions_equal_a_forward_pass_by_hand(
    options: dict[str, Any], functions: dict[str, Any], tmp_path: Path
) -> None:
    """They apply at every call, before capture and before the in-place ReLU; all that follows
    from them is drawn; the change of the output is the one by hand."""
    model = Net().eval()
    with torch.no_grad():
        image = input_of(model, SPHERES, inputs(12))
        want, plain = by_hand(model, image, **functions), by_hand(model, image)
    got, result = changed(tmp_path / "out", model, **options)
    for name, tensor in want.items():
        layer, _, call = name.partition(".")
        assert_close(got[layer, f"output.{call}".rstrip(".")], tensor, name)
    outcome = result.images[0].outcome
    assert outcome.largest_change == pytest.approx(
        float((want["fc"] - plain["fc"]).abs().max()), rel=1e-4
    )
    order = [want["fc"][0].topk(5), plain["fc"][0].topk(5)]
    for guesses, (scores, indices) in zip((outcome.prediction, outcome.before), order, strict=True):
        assert [guess.index for guess in guesses] == indices.tolist()
        assert [guess.score for guess in guesses] == pytest.approx(scores.tolist(), rel=1e-4)
    with torch.no_grad():
        assert torch.equal(model(image.clone()), plain["fc"])  # the model itself is as it was


def test_ablated_channels_are_zero_where_they_were_nan(tmp_path: Path) -> None:
    """Zero is zero, without a sign, whatever stood there."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    model[0].bias.data = torch.tensor([float("nan"), float("inf"), -1.0])
    got, _ = changed(tmp_path / "out", model, layers="0", ablate="0:0-2")
    assert torch.equal(got["0", "output"], torch.zeros(1, 3, 12, 12))
    assert not torch.signbit(got["0", "output"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nn.Linear", "vit", "swin"])
def test_channels_of_tokens_and_channels_last(kind: str, tmp_path: Path) -> None:
    """Channels are the last axis of [1, T, D] and of [1, H, W, C]."""
    torch.manual_seed(0)
    names = {
        "nn.Linear": "fc",
        "vit": "encoder.layers.encoder_layer_0.ln_1",
        "swin": "features.1.0",
    }
    if kind == "nn.Linear":
        model: nn.Module = Net()
    elif kind == "vit":
        model = models.vit_b_32(image_size=64, num_classes=3)
        model.encoder.layers = model.encoder.layers[:1]
    else:
        model = models.SwinTransformer([4, 4], 12, [1, 1], [2, 2], [4, 4], num_classes=2)
    options = {"tensors": "npy", **inputs(64)}
    fv.run(model, SPHERES, names[kind], tmp_path / "out", ablate=f"{names[kind]}:1", **options)
    (got,) = saved(tmp_path / "out" / "spheres.jpg").values()
    fv.run(model, SPHERES, names[kind], tmp_path / "plain", **options)
    (plain,) = saved(tmp_path / "plain" / "spheres.jpg").values()
    assert plain.ndim == {"nn.Linear": 2, "vit": 3, "swin": 4}[kind]
    assert not got[..., 1].any()
    assert plain[..., 1].any()
    rest = [i for i in range(plain.shape[-1]) if i != 1]
    assert torch.equal(got[..., rest], plain[..., rest])


def test_layout_that_was_told_decides_the_channels(tmp_path: Path) -> None:
    """--tensor-layout holds for interventions as for drawing, already in the trial."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    got, _ = changed(
        tmp_path / "out", model, layers="0", ablate="0:11", tensor_layout=["nhwc"],
    )  # fmt: skip
    assert not got["0", "output"][..., 11].any()
    assert got["0", "output"][..., 10].any()


def test_noise_is_seeded(tmp_path: Path) -> None:
    """Gaussian with the given deviation; the same for one seed, other for another; other at each
    call and layer."""
    plain, _ = changed(tmp_path / "plain")
    runs = {}
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        runs[name], _ = changed(tmp_path / name, edit=["a:noise=0.5", "relu:noise=0.1"], seed=seed)
    assert all(torch.equal(runs["one"][key], runs["again"][key]) for key in runs["one"])
    added = runs["one"]["a", "output"] - plain["a", "output"]
    want = 0.5 * torch.randn(added.shape, generator=torch.Generator().manual_seed(1))
    assert_close(added, want)
    other = runs["two"]["a", "output"] - plain["a", "output"]
    assert abs(float(torch.corrcoef(torch.stack([added.flatten(), other.flatten()]))[0, 1])) < 0.2
    at_relu = runs["one"]["relu", "output"] - runs["one"]["a", "output"].relu()
    again = runs["one"]["relu", "output.call1"] - runs["one"]["b", "output"].relu()
    assert 0.08 < float(at_relu.std()) < 0.12
    first = at_relu[..., :8, :8].flatten()
    assert abs(float(torch.corrcoef(torch.stack([first, again.flatten()]))[0, 1])) < 0.2
    for path in (tmp_path / "one").rglob("*.*"):
        if path.is_file() and path.suffix != ".npz":
            other_path = tmp_path / "again" / path.relative_to(tmp_path / "one")
            assert filecmp.cmp(path, other_path, shallow=False), path


def test_the_same_images_get_the_same_noise(tmp_path: Path) -> None:
    """A run of two equal images gives equal tensors."""
    for name in ("x.jpg", "y.jpg"):
        (tmp_path / name).write_bytes(SPHERES.read_bytes())
    files = [tmp_path / "x.jpg", tmp_path / "y.jpg"]
    fv.run(
        Net(), files, "a", tmp_path / "out", edit="a:noise=1", tensors="npy", seed=3, **inputs(12)
    )  # fmt: skip
    one, two = (saved(tmp_path / "out" / name)["a", "output"] for name in ("x.jpg", "y.jpg"))
    assert torch.equal(one, two)


def test_random_numbers_of_a_model_do_not_count_as_a_change(tmp_path: Path) -> None:
    """With and without the interventions it draws the same ones."""

    class Drawing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(1, 6)

    _, result = changed(tmp_path / "out", Drawing(), edit="a:clamp=-1e9,1e9")
    assert result.images[0].outcome.largest_change == 0


def test_a_model_that_changes_its_input_is_not_fed_twice(tmp_path: Path) -> None:
    """The pass without interventions works on a copy."""
    model = nn.Sequential(AddOne(), nn.Conv2d(3, 2, 1))
    got, _ = changed(tmp_path / "out", model, layers="0", ablate="1:0")
    assert torch.equal(got["0", "output"], input_of(model, SPHERES, inputs(12)) + 1)


class AddOne(nn.Module):
    """Works in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def test_gradients_follow_interventions(tmp_path: Path) -> None:
    """Nothing flows back through an ablated channel, and a clamp stops what it cuts off."""
    model = Net().eval()
    options = {"capture": "grad", "target": "sum", "ablate": "b:1", "edit": "a:clamp=-1,0.2"}
    got, _ = changed(tmp_path / "out", model, **options)
    image = input_of(model, SPHERES, inputs(12))
    a = model.a(image)
    limited = a.clamp(-1, 0.2)
    b = zero(1)(model.b(limited.relu()))
    (want_b, want_a) = torch.autograd.grad(model.fc(b.relu().mean((2, 3))).sum(), [b, limited])
    assert_close(got["b", "grad"], want_b)
    assert_close(got["a", "grad"], want_a)


def test_grad_scale_multiplies_what_flows_back(tmp_path: Path) -> None:
    """At the layer and before it, not behind it; values stay, so there is no effect to report."""
    plain, _ = changed(tmp_path / "plain", capture="output,grad", target="sum")
    got, result = changed(tmp_path / "out", capture="output,grad", target="sum", edit="b:grad*-0.5")
    assert_close(got["b", "grad"], plain["b", "grad"] * -0.5)
    assert_close(got["a", "grad"], plain["a", "grad"] * -0.5)
    assert torch.equal(got["relu", "grad.call1"], plain["relu", "grad.call1"])
    for key in plain:
        if key[1].startswith("output"):
            assert torch.equal(got[key], plain[key])
    assert not result.images[0].outcome.intervened
    manifest = read_json(tmp_path / "out/spheres.jpg/manifest.json")
    assert manifest["interventions"] == [{"kind": "edit", "what": "b:grad*-0.5"}]
    assert "effect" not in manifest


def test_manifest_lists_interventions_and_their_effect(tmp_path: Path) -> None:
    """What was done, in the order in which it was done, the prediction before and after."""
    _, result = changed(tmp_path / "out", edit="a:noise=0.1", ablate=["relu:1", "a:0"])
    manifest = read_json(tmp_path / "out" / "spheres.jpg" / "manifest.json")
    assert manifest["interventions"] == [
        {"kind": "ablate", "what": "relu:1"},
        {"kind": "ablate", "what": "a:0"},
        {"kind": "edit", "what": "a:noise=0.1"},
    ]
    outcome = result.images[0].outcome
    assert manifest["effect"]["largest_change"] == outcome.largest_change
    before = [guess["index"] for guess in manifest["effect"]["before"]]
    assert before == [guess.index for guess in outcome.before]
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["options"]["ablate"] == ["relu:1", "a:0"]
    assert run["options"]["edit"] == ["a:noise=0.1"]


NET = """
import torch
from torch import nn
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 3))
class Boxes(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1, bias=False)
    def forward(self, x):
        found = self.conv(x).flatten()
        return {"boxes": found[found != 0]}
class Both(nn.Module):
    def forward(self, x):
        return x, x
def both():
    return nn.Sequential(Both())
class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.spare = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)
        self.other = nn.Conv2d(3, 2, 1)
    def forward(self, x):
        return self.conv(x)
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
    def forward(self, x):
        return self.inner(x.view(1, 3, 1, 12, 12, 1))
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    """A file of factories."""
    (tmp_path / "changed_nets.py").write_text(NET)
    return tmp_path / "changed_nets.py"


@pytest.fixture
def shown(featviz: Callable[..., Outcome], nets: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Run one of NET on the command line."""

    def invoke(name: str, *arguments: str) -> Outcome:
        fixed = ("--size", "12x12", "--mean", "0,0,0", "--std", "1,1,1", "--out", tmp_path / "out")
        return featviz("run", f"{nets}:{name}", SPHERES, *fixed, *arguments)

    return invoke


def test_stderr_says_before_after_and_the_change(shown: Callable[..., Outcome]) -> None:
    """The five likeliest of either, and the largest change; --json has the same."""
    done = shown("net", "--layers", "0", "--ablate", "1:0-3", "--json")
    assert done.code == 0
    before, after, change, _ = done.err.splitlines()
    line = json.loads(done.out)
    effect = line["effect"]
    assert before.startswith(f"spheres.jpg before: class {effect['before'][0]['index']} ")
    assert after.startswith(f"spheres.jpg after: class {line['prediction'][0]['index']} ")
    assert before.count("%") == after.count("%") == 3
    assert change == (f"spheres.jpg: the output changed by at most {effect['largest_change']:.4g}")
    assert effect["largest_change"] > 0


def test_output_of_another_shape_is_said_to_be_one(shown: Callable[..., Outcome]) -> None:
    """Where the number of findings changes there is no largest difference."""
    done = shown("Boxes", "--layers", "conv", "--ablate", "conv:0", "--json")
    assert "spheres.jpg: the output cannot be compared: its shape changed, or" in done.err
    assert json.loads(done.out)["effect"] == {"largest_change": None, "nonfinite": 0, "before": []}


def test_layers_that_do_not_run_are_warned_of(shown: Callable[..., Outcome]) -> None:
    """An intervention at them changes nothing, and would look as if the layer did not matter."""
    done = shown("Spare", "--layers", "conv", "--ablate", "Conv2d:0", "--edit", "spare:noise=1")
    assert done.code == 0
    assert "warning: ablate='Conv2d:0': spare and 1 more did not run" in done.err
    assert "warning: edit='spare:noise=1': spare did not run" in done.err


FORMS = {
    "ablate": "for example 'layer3.*.relu:5,17' or 'conv1:0-3'",
    "edit": "for example 'conv1:channel 3*2.0', 'relu:clamp=0,6', 'conv1:noise=0.1', "
    "'layer4:grad*0.5'",
}
UNREADABLE = {
    "ablate": "conv|:3|conv:|conv:x|conv:-1|conv:3-1| :1|conv:1,|conv:0-99999999999|conv:²|"
    "conv:1.5",
    "edit": "conv:channel 3|conv:channel*2|conv:channel 3*|conv:channel 3*x|conv:channel 3*nan|"
    "relu:clamp=6|relu:clamp=0,6,7|relu:clamp=a,b|relu:clamp=0,|conv1:noise=-0.1|conv1:noise=x|"
    "conv1:noise=1,2|conv1:0.1|noise=1|layer4|layer4:grad|layer4:grad*|layer4:grad*x",
}


@pytest.mark.parametrize(
    ("kind", "text"),
    [(kind, text) for kind, texts in UNREADABLE.items() for text in texts.split("|")],
)
def test_unreadable_interventions_are_refused(
    kind: str, text: str, featviz: Callable[..., Outcome]
) -> None:
    """Before a model is loaded, with an example."""
    done = featviz("run", "no_such_model", SPHERES, f"--{kind}", text)
    assert done.code == 2
    assert done.err == f"error: {kind}={text!r} cannot be read\nhint: {FORMS[kind]}\n"


def test_forms_that_can_be_read() -> None:
    """Selectors of every kind in front, spaces, ranges and exponents behind."""
    parse = interventions.parse
    assert parse("ablate", "re:^layer[34]:x:1 , 3-5,4").channels == (1, 3, 4, 5)
    assert parse("ablate", "re:^layer[34]:x:1").selectors == "re:^layer[34]:x"
    assert parse("edit", "a,b:channel 1*-1.5E-2").numbers == (-0.015,)
    assert parse("edit", "Conv2d@layer1.*#0:clamp=-.5,+6.").numbers == (-0.5, 6.0)


REFUSED = [
    ("net", ("--ablate", "0:4,9"), "ablate='0:4,9': 0 has channels 0 to 3, not 4, 9"),
    ("net", ("--ablate", "0:4-99"), "ablate='0:4-99': 0 has channels 0 to 3, not 4, 5, 6, ..."),
    ("net", ("--edit", "4:channel 3*1"), "edit='4:channel 3*1': 4 has channels 0 to 2, not 3"),
    ("net", ("--edit", "0:clamp=2,1"), "edit='0:clamp=2,1': 2 is above 1"),
    ("net", ("--ablate", "layer9:1"), "ablate='layer9:1': no layer matches 'layer9'"),
    ("net", ("--ablate", "fn:relu:1"),
     "ablate='fn:relu:1': functions cannot be changed, only modules"),
    ("net", ("--ablate", "re:(:1"), "selector 're:(' is no regular expression: missing ), "
     "unterminated subpattern at position 0"),
    ("both", ("--ablate", "0:1"), "ablate='0:1': 0 gives a tuple, not a tensor"),
    ("both", ("--edit", "0:noise=1"), "edit='0:noise=1': 0 gives a tuple, not a tensor"),
    ("Odd", ("--ablate", "inner:1"), "ablate='inner:1': it is unknown which axis of inner "
     "[1, 3, 1, 12, 12, 1] counts channels"),
    ("net", ("--dry-run", "--ablate", "0:9"), "ablate='0:9': 0 has channels 0 to 3, not 9"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_interventions_that_cannot_be_made_are_refused(
    name: str, arguments: tuple[str, ...], message: str, shown: Callable[..., Outcome],
    tmp_path: Path,
) -> None:  # fmt: skip
    """One line, exit code 2, nothing written."""
    done = shown(name, *arguments)
    assert (done.code, done.err.splitlines()[0]) == (2, f"error: {message}")
    assert len(done.err.splitlines()) <= 2
    assert not (tmp_path / "out").exists()


def test_api_takes_one_or_several_and_refuses_the_rest(tmp_path: Path) -> None:
    """A string is one intervention; a bad form and a needless seed are errors."""
    one, _ = changed(tmp_path / "one", ablate="a:1", layers="a")
    several, _ = changed(tmp_path / "several", ablate=("a:1",), layers="a")
    assert torch.equal(one["a", "output"], several["a", "output"])
    with pytest.raises(UsageError, match="seed is for a MODEL string"):
        changed(tmp_path / "x", seed=3)
    with pytest.raises(UsageError, match="ablate='a' cannot be read"):
        changed(tmp_path / "x", ablate="a")
    assert not (tmp_path / "x").exists()
