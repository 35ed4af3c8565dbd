"""Interventions, against forward passes written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Run
from gradient_models import FOLDER, SPHERES
from networks import Net
from oracle import (
    Tensors,
    assert_all_close,
    assert_close,
    input_of,
    inputs,
    saved,
)
from PIL import Image
from runs import run_json
from tiles import manifest
from torch import Tensor, nn
from torchvision import models

import featviz as fv
from featviz.errors import UsageError
from featviz.gradients.interventions import parse
from featviz.run.results import RunResult


class Rectified(nn.Module):
    """Convolutions in front of one in-place ReLU, tokens, and scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a = nn.Conv2d(3, 4, 3)
        self.b = nn.Conv2d(4, 4, 3)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x))
        x = self.relu(self.b(x))
        return self.fc(x.mean((2, 3)))


Change = Callable[[Tensor], Tensor]


def same(tensor: Tensor) -> Tensor:
    return tensor


def by_hand(
    model: Rectified,
    a: Change = same,
    b: Change = same,
    relu: Change = same,
    fc: Change = same,
) -> Tensors:
    """The forward pass of the image, with a function behind each layer."""
    with torch.no_grad():
        at_a = a(model.a(input_of(model, SPHERES, inputs(12))))
        at_relu = relu(at_a.relu())
        at_b = b(model.b(at_relu))
        at_relu_again = relu(at_b.relu())
        return {
            ("a", "output"): at_a,
            ("relu", "output"): at_relu,
            ("b", "output"): at_b,
            ("relu", "output.call1"): at_relu_again,
            ("fc", "output"): fc(model.fc(at_relu_again.mean((2, 3)))),
        }


class Changed(NamedTuple):
    """A run with interventions."""

    tensors: Tensors
    result: RunResult


def changed(
    model: nn.Module | None = None,
    layers: str = "a,b,relu,fc",
    out: str = "out",
    **options: Any,
) -> Changed:
    """Run a model on one image."""
    model = model or Rectified()
    options |= inputs(12)
    result = fv.run(model, SPHERES, layers, out, tensors="npy", **options)
    return Changed(saved(Path(out) / "spheres.jpg"), result)


def times(*factors: float) -> Change:
    """A factor for each channel."""

    def change(tensor: Tensor) -> Tensor:
        axes = [1] * (tensor.ndim - 2)
        return tensor * torch.tensor(factors).view(1, -1, *axes)

    return change


CHANGES: list[tuple[dict[str, Any], dict[str, Change]]] = [
    (
        {"ablate": ["a:0", "relu:2"]},
        {"a": times(0, 1, 1, 1), "relu": times(1, 1, 0, 1)},
    ),
    ({"ablate": "Conv2d:1"}, {"a": times(1, 0, 1, 1), "b": times(1, 0, 1, 1)}),
    ({"edit": "fc:channel 0,1*-1e1"}, {"fc": times(-10, -10, 1, 1, 1, 1)}),
    ({"edit": "relu:clamp=0.1,0.3"}, {"relu": lambda t: t.clamp(0.1, 0.3)}),
    (
        {"edit": ["a:channel 1,2*3", "a:clamp=-1,1"], "ablate": "a:1"},
        {"a": lambda t: times(1, 0, 3, 1)(t).clamp(-1, 1)},
    ),
]


@pytest.mark.medium
@pytest.mark.parametrize(("options", "functions"), CHANGES)
def test_interventions_equal_a_forward_pass_by_hand(
    options: dict[str, Any], functions: dict[str, Change]
) -> None:
    """They apply at every call, before capture and before the in-place ReLU; all that
    follows from them is drawn, and the model itself stays as it was."""
    model = Rectified().eval()
    expected = by_hand(model, **functions)
    before = by_hand(model)

    tensors, _ = changed(model, **options)

    assert_all_close(tensors, expected)
    after = by_hand(model)
    assert all(torch.equal(after[site], tensor) for site, tensor in before.items())


@pytest.mark.medium
def test_the_effect_of_interventions_is_the_one_by_hand() -> None:
    """The largest change of the output, and the prediction before and after."""
    scores = by_hand(Rectified().eval())["fc", "output"]
    expected = times(-10, -10, 1, 1, 1, 1)(scores)

    _, result = changed(edit="fc:channel 0,1*-10")

    outcome = result.images[0].outcome
    change = (expected - scores).abs().max().item()
    assert outcome.largest_change == pytest.approx(change, rel=1e-4)
    for prediction, logits in (
        (outcome.before, scores),
        (outcome.prediction, expected),
    ):
        values, indices = logits[0].topk(5)
        assert [guess.index for guess in prediction] == indices.tolist()
        drawn = [guess.score for guess in prediction]
        assert drawn == pytest.approx(values.tolist(), rel=1e-4)


def test_ablated_channels_are_zero_where_they_were_nan() -> None:
    """Zero is zero, without a sign, whatever stood there."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    model[0].bias.data = torch.tensor([torch.nan, torch.inf, -1.0])
    tensors, _ = changed(model, "0", ablate="0:0-2")
    output = tensors["0", "output"]
    assert torch.equal(output, torch.zeros(1, 3, 12, 12))
    assert not output.signbit().any()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return models.VisionTransformer(12, 6, 1, 2, 8, 8, num_classes=3)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("make", "layer", "axes"),
    [(Rectified, "fc", 2), (transformer, "encoder.layers.encoder_layer_0.ln_1", 3)],
)
def test_channels_of_tokens_are_the_last_axis(
    make: Callable[[], nn.Module], layer: str, axes: int
) -> None:
    """Of [1, F] and [1, T, D]."""
    model = make()
    site = (layer, "output")
    plain = changed(model, layer, "plain").tensors[site]
    ablated = changed(model, layer, ablate=f"{layer}:1").tensors[site]

    assert plain.ndim == axes
    assert plain[..., 1].any()
    assert torch.equal(ablated, plain * (torch.arange(plain.shape[-1]) != 1))


def noisy(seed: int) -> Tensors:
    """Noise behind two layers."""
    edits = ("a:noise=0.5", "relu:noise=0.1")
    return changed(out=str(seed), edit=edits, seed=seed).tensors


def correlation(noise: Tensor, reference: Tensor) -> float:
    """Pearson's."""
    pair = torch.stack([noise.flatten(), reference.flatten()])
    return abs(torch.corrcoef(pair)[0, 1].item())


@pytest.mark.medium
def test_noise_is_gaussian_of_the_seed() -> None:
    """It has the deviation of the option, and is another for another seed."""
    plain = by_hand(Rectified().eval())["a", "output"]
    first = noisy(1)["a", "output"] - plain
    second = noisy(2)["a", "output"] - plain
    generator = torch.Generator().manual_seed(1)
    assert_close(first, 0.5 * torch.randn(plain.shape, generator=generator))
    assert correlation(first, second) < 0.2


@pytest.mark.medium
def test_noise_is_another_at_each_call() -> None:
    """A ReLU that runs twice has two."""
    tensors = noisy(1)
    first = tensors["relu", "output"] - tensors["a", "output"].relu()
    second = tensors["relu", "output.call1"] - tensors["b", "output"].relu()
    assert first.std().item() == pytest.approx(0.1, rel=0.2)
    assert correlation(first[..., :8, :8], second) < 0.2


@pytest.mark.medium
def test_noise_does_not_depend_on_the_images_before() -> None:
    """Two images of the same pixels get the same."""
    files = [Path("one.jpg"), Path("twin.jpg")]
    for file in files:
        file.write_bytes(SPHERES.read_bytes())
    options = {"edit": "a:noise=0.5", "tensors": "npy", **inputs(12)}

    fv.run(Rectified(), files, "a", "out", **options)

    tensors = [saved("out" / file)["a", "output"] for file in files]
    assert torch.equal(*tensors)


@pytest.mark.medium
def test_gradients_follow_interventions() -> None:
    """Nothing flows back through an ablated channel, and a clamp stops what it cuts
    off."""
    model = Rectified().eval()
    limited = model.a(input_of(model, SPHERES, inputs(12))).clamp(-1, 0.2)
    b = times(1, 0, 1, 1)(model.b(limited.relu()))
    total = model.fc(b.relu().mean((2, 3))).sum()
    of_b, of_a = torch.autograd.grad(total, [b, limited])

    edits = {"ablate": "b:1", "edit": "a:clamp=-1,0.2"}
    tensors, _ = changed(model, capture="grad", target="sum", **edits)

    assert_close(tensors["b", "grad"], of_b)
    assert_close(tensors["a", "grad"], of_a)


@pytest.mark.medium
def test_grad_scale_multiplies_what_flows_back() -> None:
    """It holds at the layer and before it, not behind it; values stay, so there is no
    effect to report."""
    options = {"capture": "output,grad", "target": "sum"}
    plain, _ = changed(out="plain", **options)
    tensors, result = changed(edit="b:grad*-0.5", **options)

    for (layer, stem), tensor in plain.items():
        is_scaled = (layer, stem) in (("b", "grad"), ("a", "grad"), ("relu", "grad"))
        assert_close(tensors[layer, stem], tensor * (-0.5 if is_scaled else 1))
    assert not result.images[0].outcome.intervened
    content = manifest(FOLDER)
    (row,) = content["interventions"]
    assert row == {
        "kind": "edit",
        "what": "b:grad*-0.5",
        "layers": {"b": 2},
        "zeroed": [],
    }
    assert "effect" not in content


OUTPUTS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 2, 1)

    def forward(self, x):
        y = self.conv(x)
        return {output}
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("y.abs().clamp(max=0)", "the output changed by at most 0\n"),
        (
            "y[y != 0]",
            "the output cannot be compared: its shape changed, or it is complex,"
            " sparse or nested\n",
        ),
        # of the 128 values of two maps all those of the ablated one are infinite
        (
            "1 / y",
            "the output changed by at most 0, and 64 of its values became NaN or"
            " infinite, or ceased to be\n",
        ),
    ],
)
def test_the_command_tells_what_an_ablation_changes(
    output: str, line: str, featviz: Run
) -> None:
    """Nothing, something that is no difference, or values that are no numbers."""
    Path("net.py").write_text(OUTPUTS.format(output=output))
    Image.new("RGB", (8, 8), "red").save("red.png")
    options = ("--layers", "conv", "--ablate", "conv:0", "--preset", "none")

    done = featviz("run", "net.py:Net", "red.png", *options)

    assert done.code == 0
    assert f"red.png: {line}" in done.err


@pytest.mark.medium
def test_manifest_lists_interventions_and_their_effect() -> None:
    """They stand in the order in which they were made, with the layers that they change
    and the channels that they set to zero; the run record has the options."""
    ablated = ["relu:1", "a:0"]
    _, result = changed(edit="a:noise=0.1", ablate=ablated)

    content = manifest(FOLDER)
    assert [tuple(row.values()) for row in content["interventions"]] == [
        ("ablate", "relu:1", {"relu": 3}, [1]),
        ("ablate", "a:0", {"a": 1}, [0]),
        ("edit", "a:noise=0.1", {"a": 1}, []),
    ]
    outcome = result.images[0].outcome
    assert content["effect"]["largest_change"] == outcome.largest_change
    before = [guess["index"] for guess in content["effect"]["before"]]
    assert before == [guess.index for guess in outcome.before]
    options = run_json(FOLDER.parent)["options"]
    assert (options["ablate"], options["edit"]) == (ablated, ["a:noise=0.1"])


def test_layers_that_do_not_run_are_warned_of(
    messages: pytest.LogCaptureFixture,
) -> None:
    """An intervention at them changes nothing, and would look as if the layer did not
    matter."""
    layers = {name: nn.Conv2d(3, 2, 1) for name in ("a", "spare", "other")}
    model = Net(lambda self, x: self.a(x), **layers)
    edits = {"ablate": "Conv2d:0", "edit": "spare:noise=1"}

    changed(model, "a", **edits)

    warnings = messages.messages
    assert "ablate 'Conv2d:0': spare and 1 more did not run" in warnings
    assert "edit 'spare:noise=1': spare did not run" in warnings


def test_selectors_that_take_nothing_are_warned_of(
    messages: pytest.LogCaptureFixture,
) -> None:
    """Beside one that takes a layer, a misspelt one would change nothing, unnoticed."""
    model = Net(lambda self, x: self.other(x), other=nn.Conv2d(3, 2, 1))

    changed(model, "other", ablate="other,othre:0")

    warning = "ablate 'other,othre:0': selector 'othre' matches no layer"
    assert f"{warning}; did you mean other?" in messages.messages


HINTS = {
    "ablate": "for example 'layer3.*.relu:5,17' or 'conv1:0-3'",
    "edit": (
        "for example 'conv1:channel 3*2.0', 'relu:clamp=0,6', 'conv1:noise=0.1', "
        "'layer4:grad*0.5'"
    ),
}
UNREADABLE = {
    "ablate": [
        "conv",
        ":3",
        "conv:",
        "conv:x",
        "conv:-1",
        "conv:3-1",
        "conv:0-99999999999",
        "conv:²",
        "conv:1.5",
    ],
    "edit": [
        "conv:channel 3",
        "conv:channel*2",
        "conv:channel 3*nan",
        "relu:clamp=6",
        "relu:clamp=0,6,7",
        "conv1:noise=-0.1",
        "conv1:noise=x",
        "noise=1",
        "layer4:grad",
        "layer4:grad*x",
    ],
}


@pytest.mark.parametrize(
    ("option", "text"),
    [(option, text) for option, texts in UNREADABLE.items() for text in texts],
)
def test_unreadable_interventions_are_refused(option: str, text: str) -> None:
    """With an example. Where nothing stands behind a colon, the message says so."""
    reason = "cannot be read"
    if ":" not in text.rstrip(":"):
        lacking = "channels" if option == "ablate" else "change"
        reason = f"has no {lacking} behind a colon"
    with pytest.raises(UsageError) as caught:
        parse(option, text)
    assert caught.value.message == f"{option} {text!r} {reason}"
    assert caught.value.hint == HINTS[option]


@pytest.mark.parametrize(
    ("text", "selectors", "channels"),
    [
        ("re:^layer[34]:x:1 , 3-5,4", "re:^layer[34]:x", (1, 3, 4, 5)),
        ("conv1:0", "conv1", (0,)),
    ],
)
def test_channels_can_be_lists_and_ranges(
    text: str, selectors: str, channels: tuple[int, ...]
) -> None:
    """Selectors of every kind stand in front."""
    ablation = parse("ablate", text)
    assert ablation.selectors == selectors
    assert ablation.channels == channels


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("a,b:channel 1*-1.5E-2", (-0.015,)),
        ("Conv2d@layer1.*#0:clamp=-.5,+6.", (-0.5, 6.0)),
        ("a:CLAMP = 3, 3", (3.0, 3.0)),
    ],
)
def test_numbers_are_written_as_python_writes_them(
    text: str, numbers: tuple[float, ...]
) -> None:
    """Exponents and signs included."""
    assert parse("edit", text).numbers == numbers


def odd() -> nn.Module:
    """A layer with an axis too many for its channels to be known, and one that gives a
    tuple."""

    def way(self: nn.Module, x: Tensor) -> Tensor:
        return self.two(self.many(self.a(x).view(1, 4, 1, 10, 10, 1)))[0].flatten(1)

    two = Net(lambda self, x: (x, x))
    return Net(way, a=nn.Conv2d(3, 4, 3), many=nn.Identity(), two=two)


@pytest.mark.parametrize(
    ("option", "text", "reason"),
    [
        ("ablate", "a:4,9", "a has channels 0 to 3, not 4, 9"),
        ("ablate", "a:4-99", "a has channels 0 to 3, not 4, 5, 6 and 93 more"),
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
    option: str, text: str, reason: str
) -> None:
    """One line, and nothing is written."""
    with pytest.raises(UsageError) as caught:
        changed(odd(), "a", **{option: text})
    assert caught.value.message == f"{option} {text!r}: {reason}"
    assert not FOLDER.parent.exists()


@pytest.mark.parametrize(
    ("option", "text", "channels"),
    [
        ("ablate", "a:3,1", (3, 1)),
        ("edit", "a:channel 3*0", (3,)),
        ("edit", "a:channels 1-2*0.0", (1, 2)),
        ("edit", "a:channel 3*2", ()),
        ("edit", "a:clamp=0,6", ()),
        ("edit", "a:grad*0", ()),
    ],
)
def test_a_factor_of_zero_sets_channels_to_zero(
    option: str, text: str, channels: tuple[int, ...]
) -> None:
    """A report calls no channel dead that somebody has set to zero."""
    assert parse(option, text).zeroed == channels


def test_a_scaled_gradient_is_that_of_the_layer_alone() -> None:
    """An identity returns what it was given; its caller uses it under both names."""
    net = Net(
        lambda self, x: joined(self.first(x), self.second),
        first=nn.Conv2d(3, 2, 1),
        second=nn.Identity(),
    )
    image = torch.rand(3, 4, 4)
    options = {"capture": "grad", "target": "sum", "edit": "second:grad*0"}
    result = fv.run(net, image, "first", preset="none", tensors=True, **options)
    (gradient,) = result.captures
    assert (gradient.tensor == 1).all()


def joined(x: Tensor, layer: nn.Module) -> Tensor:
    """What a layer makes of a tensor, and the tensor itself."""
    return layer(x) + x


def test_effects_are_told_of_changes_beside_those_of_gradients() -> None:
    """Whichever comes last."""
    options = {"capture": "grad", "target": "sum", "preset": "none"}
    net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU())
    changes = {"ablate": "0:0,1", "edit": "1:grad*2"}
    result = fv.run(net, torch.rand(3, 4, 4), "0", **changes, **options)
    outcome = result.images[0].outcome
    assert outcome.intervened
    assert outcome.largest_change is not None
