"""Interventions, against forward passes written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from gradient_models import SPHERES
from oracle import Tensors, assert_close, input_of, inputs, saved
from torch import Tensor, nn
from torchvision import models

import featviz as fv
from featviz.errors import UsageError
from featviz.gradients import interventions
from featviz.run.results import RunResult
from featviz.rundir.schema import read_json


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


def by_hand(
    model: Net, x: Tensor, **changes: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The same forward pass, with a function put behind each layer named."""
    same = {name: changes.get(name, lambda t: t) for name in ("a", "b", "relu", "fc")}
    found = {"a": same["a"](model.a(x))}
    found["relu"] = same["relu"](found["a"].relu())
    found["b"] = same["b"](model.b(found["relu"]))
    found["relu.call1"] = same["relu"](found["b"].relu())
    found["fc"] = same["fc"](model.fc(found["relu.call1"].mean((2, 3))))
    return found


def changed(
    out: Path, model: nn.Module | None = None, **options: Any
) -> tuple[Tensors, RunResult]:
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
    ({"ablate": ["a:0", "relu:2"]}, {"a": zero(0), "relu": zero(2)}),
    ({"ablate": "Conv2d:1"}, {"a": zero(1), "b": zero(1)}),
    (
        {"edit": "fc:channel 0,1*-1e1"},
        {"fc": lambda t: t * factors(-10, -10, 1, 1, 1, 1)},
    ),
    ({"edit": "relu:clamp=0.1,0.3"}, {"relu": lambda t: t.clamp(0.1, 0.3)}),
    (
        {"edit": ["a:channel 1,2*3", "a:clamp=-1,1"], "ablate": "a:1"},
        {"a": lambda t: (zero(1)(t) * factors(1, 3, 3, 1)[:, None, None]).clamp(-1, 1)},
    ),
]


@pytest.mark.parametrize(("options", "functions"), CHANGES)
def test_interventions_equal_a_forward_pass_by_hand(
    options: dict[str, Any], functions: dict[str, Any], tmp_path: Path
) -> None:
    """They apply at every call, before capture and before the in-place ReLU; all that
    follows from them is drawn; the change of the output is the one by hand."""
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
    for guesses, (scores, indices) in zip(
        (outcome.prediction, outcome.before), order, strict=True
    ):
        assert [guess.index for guess in guesses] == indices.tolist()
        assert [guess.score for guess in guesses] == pytest.approx(
            scores.tolist(), rel=1e-4
        )
    with torch.no_grad():
        # the model itself is as it was
        assert torch.equal(model(image.clone()), plain["fc"])


def test_ablated_channels_are_zero_where_they_were_nan(tmp_path: Path) -> None:
    """Zero is zero, without a sign, whatever stood there."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    model[0].bias.data = torch.tensor([float("nan"), float("inf"), -1.0])
    got, _ = changed(tmp_path / "out", model, layers="0", ablate="0:0-2")
    assert torch.equal(got["0", "output"], torch.zeros(1, 3, 12, 12))
    assert not torch.signbit(got["0", "output"]).any()


TOKENS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "fc": (Net, 2),
    "encoder.layers.encoder_layer_0.ln_1": (
        lambda: models.VisionTransformer(16, 8, 1, 2, 8, 8, num_classes=3),
        3,
    ),
}


@pytest.mark.parametrize("name", TOKENS)
def test_channels_of_tokens_and_channels_last(name: str, tmp_path: Path) -> None:
    """Channels are the last axis of [1, F], [1, T, D] and [1, H, W, C]."""
    torch.manual_seed(0)
    make, axes = TOKENS[name]
    options = {"tensors": "npy", **inputs(16)}
    model = make()
    fv.run(model, SPHERES, name, tmp_path / "out", ablate=f"{name}:1", **options)
    fv.run(model, SPHERES, name, tmp_path / "plain", **options)
    (got,), (plain,) = (
        saved(tmp_path / n / "spheres.jpg").values() for n in ("out", "plain")
    )
    assert plain.ndim == axes and plain[..., 1].any()
    assert torch.equal(got, plain * (torch.arange(plain.shape[-1]) != 1))


def test_noise_is_seeded(tmp_path: Path) -> None:
    """Gaussian with the given deviation; the same for one seed, and for an image of the
    same pixels; other for another seed, and at each call."""
    files = [tmp_path / "spheres.jpg", tmp_path / "twin.jpg"]
    for file in files:
        file.write_bytes(SPHERES.read_bytes())
    runs = []
    noise = {"edit": ("a:noise=0.5", "relu:noise=0.1")}
    for options in ({}, {**noise, "seed": 1}, {**noise, "seed": 2}):
        out = tmp_path / str(len(runs))
        fv.run(Net(), files, "a,b,relu", out, tensors="npy", **options, **inputs(12))
        twin = saved(out / "twin.jpg")
        runs.append(saved(out / "spheres.jpg"))
        assert all(torch.equal(twin[key], tensor) for key, tensor in runs[-1].items())
    plain, one, two = runs
    added, other = (run["a", "output"] - plain["a", "output"] for run in (one, two))
    want = 0.5 * torch.randn(added.shape, generator=torch.Generator().manual_seed(1))
    assert_close(added, want)
    first = one["relu", "output"] - one["a", "output"].relu()
    again = one["relu", "output.call1"] - one["b", "output"].relu()
    assert 0.08 < float(first.std()) < 0.12
    for left, right in ((added, other), (first[..., :8, :8], again)):
        pair = torch.stack([left.flatten(), right.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.2


def test_gradients_follow_interventions(tmp_path: Path) -> None:
    """Nothing flows back through an ablated channel, and a clamp stops what it cuts
    off."""
    model = Net().eval()
    options = {
        "capture": "grad",
        "target": "sum",
        "ablate": "b:1",
        "edit": "a:clamp=-1,0.2",
    }
    got, _ = changed(tmp_path / "out", model, **options)
    image = input_of(model, SPHERES, inputs(12))
    a = model.a(image)
    limited = a.clamp(-1, 0.2)
    b = zero(1)(model.b(limited.relu()))
    want_b, want_a = torch.autograd.grad(
        model.fc(b.relu().mean((2, 3))).sum(), [b, limited]
    )
    assert_close(got["b", "grad"], want_b)
    assert_close(got["a", "grad"], want_a)


def test_grad_scale_multiplies_what_flows_back(tmp_path: Path) -> None:
    """At the layer and before it, not behind it; values stay, so there is no effect to
    report."""
    plain, _ = changed(tmp_path / "plain", capture="output,grad", target="sum")
    got, result = changed(
        tmp_path / "out", capture="output,grad", target="sum", edit="b:grad*-0.5"
    )
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
    """What was done, in the order in which it was done, the prediction before and
    after."""
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


def test_layers_that_do_not_run_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An intervention at them changes nothing, and would look as if the layer did not
    matter."""
    spare = {name: nn.Conv2d(3, 2, 1) for name in ("a", "spare", "other")}
    model = networks.Net(lambda self, x: self.a(x), **spare)
    changed(
        tmp_path / "out", model, layers="a", ablate="Conv2d:0", edit="spare:noise=1"
    )
    assert "ablate='Conv2d:0': spare and 1 more did not run" in caplog.messages
    assert "edit='spare:noise=1': spare did not run" in caplog.messages


FORMS = {
    "ablate": "for example 'layer3.*.relu:5,17' or 'conv1:0-3'",
    "edit": (
        "for example 'conv1:channel 3*2.0', 'relu:clamp=0,6', 'conv1:noise=0.1', "
        "'layer4:grad*0.5'"
    ),
}
UNREADABLE = {
    "ablate": (
        "conv|:3|conv:|conv:x|conv:-1|conv:3-1|conv:0-99999999999|conv:²|conv:1.5"
    ),
    "edit": (
        "conv:channel 3|conv:channel*2|conv:channel"
        " 3*nan|relu:clamp=6|relu:clamp=0,6,7|"
        "conv1:noise=-0.1|conv1:noise=x|noise=1|layer4:grad|layer4:grad*x"
    ),
}


@pytest.mark.parametrize(
    ("kind", "text"),
    [(kind, text) for kind, texts in UNREADABLE.items() for text in texts.split("|")],
)
def test_unreadable_interventions_are_refused(kind: str, text: str) -> None:
    """With an example."""
    with pytest.raises(UsageError) as caught:
        interventions.parse(kind, text)
    assert caught.value.message == f"{kind}={text!r} cannot be read"
    assert caught.value.hint == FORMS[kind]


def test_forms_that_can_be_read() -> None:
    """Selectors of every kind in front, spaces, ranges and exponents behind."""
    parse = interventions.parse
    assert parse("ablate", "re:^layer[34]:x:1 , 3-5,4").channels == (1, 3, 4, 5)
    assert parse("ablate", "re:^layer[34]:x:1").selectors == "re:^layer[34]:x"
    assert parse("edit", "a,b:channel 1*-1.5E-2").numbers == (-0.015,)
    assert parse("edit", "Conv2d@layer1.*#0:clamp=-.5,+6.").numbers == (-0.5, 6.0)


def odd() -> nn.Module:
    """A layer with an axis too many for its channels to be known, and one that gives a
    tuple."""

    def way(self: nn.Module, x: Tensor) -> Tensor:
        return self.two(self.many(self.a(x).view(1, 4, 1, 10, 10, 1)))[0].flatten(1)

    two = networks.Net(lambda self, x: (x, x))
    return networks.Net(way, a=nn.Conv2d(3, 4, 3), many=nn.Identity(), two=two)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("ablate", "a:4,9", "a has channels 0 to 3, not 4, 9"),
        ("ablate", "a:4-99", "a has channels 0 to 3, not 4, 5, 6, ..."),
        ("edit", "a:clamp=2,1", "2 is above 1"),
        ("ablate", "layer9:1", "no layer matches 'layer9'"),
        ("ablate", "fn:relu:1", "functions cannot be changed, only modules"),
        ("ablate", "two:1", "two gives a tuple, not a tensor"),
        (
            "ablate",
            "many:1",
            "it is unknown which axis of many [1, 4, 1, 10, 10, 1] counts channels",
        ),
    ],
)
def test_interventions_that_cannot_be_made_are_refused(
    kind: str, text: str, words: str, tmp_path: Path
) -> None:
    """One line, and nothing is written."""
    with pytest.raises(UsageError) as caught:
        changed(tmp_path / "out", odd(), layers="a", **{kind: text})
    assert caught.value.message == f"{kind}={text!r}: {words}"
    assert not (tmp_path / "out").exists()


def test_noise_does_not_depend_on_the_images_before(tmp_path: Path) -> None:
    """Two images of the same pixels get the same."""
    files = [tmp_path / "one.jpg", tmp_path / "twin.jpg"]
    for file in files:
        file.write_bytes(SPHERES.read_bytes())
    options = {"edit": "a:noise=0.5", "tensors": "npy", **inputs(12)}
    fv.run(Net(), files, "a", tmp_path / "out", **options)
    one, twin = (saved(tmp_path / "out" / file.name)["a", "output"] for file in files)
    assert torch.equal(one, twin)
