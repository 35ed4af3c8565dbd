"""Targets: what gradients are of, against autograd of the same number, and every
refusal."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gradient_models import SPHERES
from networks import Net
from oracle import assert_close, input_of, inputs, saved
from torch import Tensor, nn

import featviz as fv
from featviz.errors import UsageError
from featviz.gradients import targets
from featviz.rundir.schema import read_json

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Answer:
    """A dataclass-like output."""

    logits: Tensor
    note: str = "fine"


class Heads(nn.Module):
    """A layer that gives a tuple, one that does not run, and whatever output is asked
    for."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.act, self.fc = (
            nn.Conv2d(3, 4, 3),
            nn.ReLU(inplace=True),
            nn.Linear(4, 5),
        )
        self.two = Net(lambda self, x: (x * 1, x * 3))
        self.output, self.idle = output, nn.Identity()

    def forward(self, x: Tensor) -> Any:
        x = self.two(x)[0]
        return self.output(self.fc(self.act(self.conv(x)).mean((2, 3))))


def plain(scores: Tensor) -> Tensor:
    return scores


def nested(scores: Tensor) -> Any:
    return {
        "out": scores.view(1, 5, 1, 1) * 2,
        "aux": [scores, Pair(scores * 3, (scores, None))],
        "whole": scores.argmax(1),
        3: Answer(scores + 1),
    }


def gradient(
    model: nn.Module, target: str | None, out: Path
) -> tuple[Tensor, dict[str, Any]]:
    """The gradient at the convolution, and the manifest's word on the target."""
    fv.run(
        model,
        SPHERES,
        "conv",
        out,
        capture="grad",
        target=target,
        tensors="npy",
        **inputs(8),
    )
    manifest = read_json(out / "spheres.jpg" / "manifest.json")
    return saved(out / "spheres.jpg")["conv", "grad"], manifest["target"]


def layers_of(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """What the layers give, out of place."""
    conv = model.conv(input_of(model, SPHERES, inputs(8)))
    act = conv.relu()
    return conv, act, model.fc(act.mean((2, 3)))


Value = Callable[[Tensor, Tensor, Tensor], Tensor]
VALUES: dict[str | None, Value] = {
    None: lambda conv, act, scores: scores.max(),
    "class:2": lambda conv, act, scores: scores[0, 2],
    "sum": lambda conv, act, scores: scores.sum(),
    "norm": lambda conv, act, scores: scores.square().sum().sqrt(),
    "layer:fc:3": lambda conv, act, scores: scores[0, 3],
    "layer:act:1": lambda conv, act, scores: act[0, 1].mean(),
}
INSIDE: dict[str, Value] = {
    "output[out]": lambda conv, act, scores: scores.mul(2).mean(),
    "output[aux][0]:class:4": lambda conv, act, scores: scores[0, 4],
    "output[aux][-1][left]:norm": lambda conv, act, scores: scores.mul(3).norm(),
    "output[3][logits]:sum": lambda conv, act, scores: (scores + 1).sum(),
}


@pytest.mark.parametrize("target", [*VALUES, *INSIDE])
def test_gradients_are_of_the_number_asked_for(
    target: str | None, tmp_path: Path
) -> None:
    """Each target's value and gradient; a layer's is its own, before a later in-place
    ReLU. Keys, positions from either end and names of fields lead into dicts, tuples
    and objects."""
    model = Heads(nested if target in INSIDE else plain).eval()
    got, said = gradient(model, target, tmp_path / "out")
    conv, act, scores = layers_of(model)
    value = {**VALUES, **INSIDE}[target](conv, act, scores)
    assert_close(got, torch.autograd.grad(value, conv)[0])
    assert said["value"] == pytest.approx(float(value.detach()), rel=1e-5)
    assert (said["of"], said["grad_rule"]) == (target or "top1", "plain")


def test_names_of_classes() -> None:
    """A name in any case; a near one is suggested; names of another head are not used."""
    names = ("tabby", "tiger cat", "Egyptian cat")
    scores = torch.tensor([[1.0, 2.0, 3.0]])
    assert targets.parse("class:Tiger Cat").value(scores, names)[:2] == (2, "tiger cat")
    assert targets.parse("class:egyptian cat").value(scores, names)[:2] == (
        3,
        "Egyptian cat",
    )
    for text, given, hint in (
        ("class:tigercat", scores, "did you mean tiger cat?"),
        (
            "class:tabby",
            torch.zeros(1, 4),
            "these weights have no names; give its number; targets here: top1, class:0",
        ),
        (
            "class:zebra",
            scores,
            "the classes are tabby, tiger cat, Egyptian cat; a number is one, too",
        ),
    ):
        with pytest.raises(
            UsageError, match=f"{text}': no class has this name"
        ) as caught:
            targets.parse(text).value(given, names)
        assert caught.value.hint == hint


UNREADABLE = [
    "",
    "top2",
    "class",
    "class:",
    "sum:3",
    "mean:",
    "output",
    "output:mean",
    "output[]",
    "output[a",
    "output[a]:",
    "output[a]:max",
    "layer:",
    "layer:conv:x",
    "layer::3",
    "layer:conv:-1",
    "layer:conv:²",
]


@pytest.mark.parametrize("text", UNREADABLE)
def test_unreadable_targets_are_refused(text: str) -> None:
    """With an example."""
    with pytest.raises(
        UsageError, match=f"target {re.escape(repr(text))} cannot be read"
    ) as caught:
        targets.parse(text)
    assert caught.value.hint is not None


HERE = "targets here: "


class Refusal(NamedTuple):
    """A target that a network does not have."""

    network: Callable[[Tensor], Any]
    target: str | None
    message: str
    """What stands behind the target."""
    hint: str | None


REFUSED: list[Refusal] = [
    Refusal(
        nested,
        "norm",
        ": the output is no tensor there; the model gives output[out] [1, 5, 1, 1], "
        "output[aux][0] [1, 5], output[aux][1][0] [1, 5], output[aux][1][1][0] [1, 5], "
        "output[whole] [1], output[3][logits] [1, 5]",
        f"{HERE}'output[out]:norm'",
    ),
    Refusal(
        nested, "output[whole]:sum", ": it holds torch.int64, and has no gradient", None
    ),
    Refusal(
        lambda scores: [scores] * 11,
        "output[11]",
        ": the output is no tensor there; the model gives "
        + ", ".join(f"output[{i}] [1, 5]" for i in range(8))
        + " and 3 more",
        f"{HERE}'output[0]:norm'",
    ),
    Refusal(
        lambda scores: scores.expand(2, 5),
        "class:3",
        " needs scores of classes [1, K], not [2, 5]",
        f"{HERE}norm",
    ),
    Refusal(plain, "class:5", ": there are 5 classes, 0 to 4", f"{HERE}top1, class:0"),
    Refusal(
        plain,
        "class:cat",
        ": no class has this name",
        f"these weights have no names; give its number; {HERE}top1, class:0",
    ),
    Refusal(plain, "layer:con", ": no layer is called 'con'", "did you mean conv?"),
    Refusal(plain, "layer:conv:4", ": the layer has channels 0 to 3", None),
    Refusal(
        plain,
        "layer:two",
        ": the layer gives output[0] [1, 3, 8, 8], output[1] [1, 3, 8, 8]",
        None,
    ),
    Refusal(plain, "layer:idle", ": the layer does not run", None),
    Refusal(
        lambda scores: scores.detach(),
        None,
        ": no gradient flows back from it",
        "the model is quantized, or detaches it, or computes it under torch.no_grad",
    ),
]


@pytest.mark.parametrize(("output", "target", "words", "hint"), REFUSED)
def test_targets_that_do_not_fit_are_refused_before_anything_is_written(
    output: Callable[[Tensor], Any],
    target: str | None,
    words: str,
    hint: str | None,
    tmp_path: Path,
) -> None:
    """One line that lists what there is; no output folder."""
    with pytest.raises(UsageError) as caught:
        gradient(Heads(output), target, tmp_path / "out")
    assert (caught.value.message, caught.value.hint) == (
        f"target {target or 'top1'!r}{words}",
        hint,
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_callers_modes_do_not_matter(
    context: Callable[[], Any], tmp_path: Path
) -> None:
    """Under the caller's own no_grad or inference_mode, gradients are what they are
    outside."""
    model = Heads(plain)
    want, _ = gradient(model, "sum", tmp_path / "outside")
    with context():
        got, _ = gradient(model, "sum", tmp_path / "inside")
        assert not torch.is_grad_enabled()
    assert torch.equal(got, want)


def test_nan_scores_have_a_gradient_and_a_manifest(tmp_path: Path) -> None:
    """NaN is no JSON: the target's value is null there, and there is no prediction."""
    model = Heads(lambda scores: scores * float("nan"))
    got, said = gradient(model, "sum", tmp_path / "out")
    assert said["value"] is None
    assert got.isnan().any()
    manifest = read_json(tmp_path / "out/spheres.jpg/manifest.json")
    assert manifest["captures"][0]["nonfinite"] == got.isnan().sum()
    assert "prediction" not in manifest


def test_scores_of_classes_stand_where_the_model_says() -> None:
    """top1 and class:N read a key of the output; other reductions need the key named;
    without a classifier the error says what there is."""
    output = {"logits": torch.tensor([[1.0, 5.0, 2.0]]), "hidden": torch.ones(1, 4)}
    assert targets.parse(None).value(output, (), "logits")[:2] == (5, "class 1")
    assert targets.parse("class:b").value(output, ("a", "B", "c"), "logits")[:2] == (
        5,
        "B",
    )
    assert targets.parse("output[hidden]:sum").value(output, (), None)[0] == 4
    with pytest.raises(UsageError, match="the model gives output"):
        targets.parse("mean").value(output, (), "logits")
    with pytest.raises(
        UsageError, match=r"is no classifier; it gives output\[logits\] \[1, 3\]"
    ):
        targets.parse("class:1").value(output, (), None)
