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
from gradient_models import FOLDER, SPHERES
from networks import Net
from oracle import assert_close, input_of, inputs, saved
from tiles import manifest
from torch import Tensor, nn

import featviz as fv
from featviz.errors import UsageError
from featviz.gradients.targets import parse

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
        self.conv = nn.Conv2d(3, 4, 3)
        self.act = nn.ReLU(inplace=True)
        self.fc = self.again = nn.Linear(4, 5)
        self.two = Net(lambda self, x: (x * 1, x * 3))
        self.idle = nn.Identity()
        self.output = output

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


def gradient(model: nn.Module, target: str | None, out: str = "out") -> Tensor:
    """The gradient at the convolution."""
    options = {"capture": "grad", "tensors": "npy", **inputs(8)}
    fv.run(model, SPHERES, "conv", out, target=target, **options)
    return saved(Path(out) / "spheres.jpg")["conv", "grad"]


Value = Callable[[Tensor, Tensor, Tensor], Tensor]
VALUES: dict[str | None, Value] = {
    None: lambda conv, act, scores: scores.max(),
    "class:2": lambda conv, act, scores: scores[0, 2],
    "sum": lambda conv, act, scores: scores.sum(),
    "norm": lambda conv, act, scores: scores.square().sum().sqrt(),
    "layer:fc:3": lambda conv, act, scores: scores[0, 3],
    "layer:again:2": lambda conv, act, scores: scores[0, 2],
    "layer:act:1": lambda conv, act, scores: act[0, 1].mean(),
}
INSIDE: dict[str, Value] = {
    "output[out]": lambda conv, act, scores: scores.mul(2).mean(),
    "output[aux][0]:class:4": lambda conv, act, scores: scores[0, 4],
    "output[aux][-1][left]:norm": lambda conv, act, scores: scores.mul(3).norm(),
    "output[3][logits]:sum": lambda conv, act, scores: (scores + 1).sum(),
}


@pytest.mark.medium
@pytest.mark.parametrize("target", [*VALUES, *INSIDE])
def test_gradients_are_of_the_number_asked_for(target: str | None) -> None:
    """A layer's value is its own, before a later in-place ReLU. Keys, positions from
    either end and names of fields lead into dicts, tuples and objects."""
    model = Heads(nested if target in INSIDE else plain).eval()
    conv = model.conv(input_of(model, SPHERES, inputs(8)))
    act = conv.relu()
    value = {**VALUES, **INSIDE}[target](conv, act, model.fc(act.mean((2, 3))))
    (expected,) = torch.autograd.grad(value, conv)

    assert_close(gradient(model, target), expected)

    record = manifest(FOLDER)["target"]
    assert record["value"] == pytest.approx(value.item(), rel=1e-5)
    assert record["of"] == (target or "top1")
    assert record["grad_rule"] == "plain"


def test_of_a_layer_that_runs_twice_the_last_output_is_meant() -> None:
    """It is nearest to the output."""
    model = Net(
        lambda self, x: self.act(self.act(self.conv(x)) * 3 - 0.1).flatten(1),
        conv=nn.Conv2d(3, 4, 3),
        act=nn.ReLU(),
    ).eval()
    conv = model.conv(input_of(model, SPHERES, inputs(8)))
    last = (conv.relu() * 3 - 0.1).relu().mean()
    (expected,) = torch.autograd.grad(last, conv)

    assert_close(gradient(model, "layer:act"), expected)

    assert manifest(FOLDER)["target"]["value"] == pytest.approx(last.item(), rel=1e-5)


CATS = ("tabby", "tiger cat", "Egyptian cat")
SCORES = torch.tensor([[1.0, 2.0, 3.0]])


@pytest.mark.parametrize(
    ("target", "value", "name"),
    [("class:Tiger Cat", 2, "tiger cat"), ("class:egyptian cat", 3, "Egyptian cat")],
)
def test_classes_have_names_in_any_case(target: str, value: float, name: str) -> None:
    """The target tells how the name is written."""
    assert parse(target).value(SCORES, CATS)[:2] == (value, name)


@pytest.mark.parametrize(
    ("target", "scores", "hint"),
    [
        ("class:tigercat", SCORES, "did you mean 'class:tiger cat'?"),
        ("class:taby", SCORES, "did you mean class:tabby?"),
        (
            "class:cat",
            SCORES,
            "did you mean 'class:tiger cat' or 'class:egyptian cat'?",
        ),
        (
            "class:zebra",
            SCORES,
            "the classes are tabby, tiger cat, Egyptian cat; a number is one, too",
        ),
        (
            "class:tabby",
            torch.zeros(1, 4),
            "the weights name no classes: give a number, or --classes FILE with a name on"
            " each line; targets here: top1, class:0 to class:3",
        ),
        (
            "class:tabby",
            torch.zeros(1, 2),
            "the weights name no classes: give a number, or --classes FILE with a name on"
            " each line; targets here: top1, class:0 to class:1",
        ),
    ],
)
def test_a_class_that_has_no_such_name_is_refused(
    target: str, scores: Tensor, hint: str
) -> None:
    """A near name is suggested; names of another head are not used."""
    message = f"{target}': no class has this name"
    with pytest.raises(UsageError, match=message) as caught:
        parse(target).value(scores, CATS)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("target", "sum"),
        ("grad_rule", "guided"),
        ("edit", "conv:grad*0.5"),
        ("edit", ["conv:noise=0.1", "act:grad*2"]),
    ],
)
def test_what_changes_gradients_alone_is_refused_without_them(
    option: str, value: Any
) -> None:
    """The message begins with the option, and nothing is written."""
    with pytest.raises(UsageError, match="does nothing without gradients") as caught:
        fv.run(Heads(plain), SPHERES, "conv", "out", **{option: value}, **inputs(8))
    assert caught.value.message.startswith(option)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("reduce", "capture", "message"),
    [
        ("gradcam", "grad", "a layer's output and its gradient, not of capture=grad"),
        ("rollout", "output,grad", "attention weights, not of capture=output,grad"),
        ("attention", "input", "attention weights, not of capture=input"),
    ],
)
def test_a_map_that_is_made_of_other_captures_is_refused(
    reduce: str, capture: str, message: str
) -> None:
    """What it is made of is captured by itself."""
    with pytest.raises(UsageError) as caught:
        fv.run(Heads(plain), SPHERES, "conv", reduce=reduce, capture=capture)
    assert caught.value.message == f"reduce={reduce} is made of {message}"
    assert caught.value.hint == "leave capture out"


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
        parse(text)
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("text", "as_class"),
    [("tabby", "class:tabby"), ("tiger cat", "'class:tiger cat'")],
)
def test_the_bare_name_of_a_class_is_offered_as_a_target(
    text: str, as_class: str
) -> None:
    """As it is typed in a shell, before the other targets; not of a word that begins
    other targets."""
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert str(caught.value.hint).startswith(
        f"a class of this name is written {as_class}; "
    )
    with pytest.raises(UsageError) as caught:
        parse("output")
    assert str(caught.value.hint).startswith("class:NAME")


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
    Refusal(
        plain,
        "class:5",
        ": there are 5 classes, 0 to 4",
        f"{HERE}top1, class:0 to class:4",
    ),
    Refusal(
        plain,
        "box:0",
        ": this model gives [1, 5], and no box",
        f"{HERE}top1, class:0 to class:4, norm",
    ),
    Refusal(
        plain,
        "class:cat",
        ": no class has this name",
        "the weights name no classes: give a number, or"
        " classes=FILE with a name on"
        f" each line; {HERE}top1, class:0 to class:4",
    ),
    Refusal(plain, "layer:con", ": no layer is called 'con'", "did you mean conv?"),
    Refusal(
        plain,
        "layer:conv:4",
        ": the layer has channels 0 to 3",
        "`featviz layers MODEL` shows the channels of each layer",
    ),
    Refusal(
        plain,
        "layer:two",
        ": the layer gives output[0] [1, 3, 8, 8], output[1] [1, 3, 8, 8]",
        None,
    ),
    Refusal(
        plain,
        "layer:idle",
        ": the layer does not run",
        "`featviz layers MODEL` counts calls",
    ),
    Refusal(
        lambda scores: scores.detach(),
        None,
        ": no gradient flows back from it",
        "the model is quantized, or detaches it, or computes it under torch.no_grad",
    ),
]


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.message[:40])
def test_targets_that_do_not_fit_are_refused_before_anything_is_written(
    refusal: Refusal,
) -> None:
    """One line lists what there is, and there is no output folder."""
    target = refusal.target
    with pytest.raises(UsageError) as caught:
        gradient(Heads(refusal.network), target)
    assert caught.value.message == f"target {target or 'top1'!r}{refusal.message}"
    assert caught.value.hint == refusal.hint
    assert not FOLDER.parent.exists()


@pytest.mark.medium
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_callers_modes_do_not_matter(context: Callable[[], Any]) -> None:
    """Under the caller's own no_grad or inference_mode, gradients are what they are
    outside."""
    model = Heads(plain)
    expected = gradient(model, "sum", "outside")
    with context():
        inside = gradient(model, "sum", "inside")
        assert not torch.is_grad_enabled()
    assert torch.equal(inside, expected)


@pytest.mark.medium
def test_nan_scores_have_a_gradient_and_a_manifest() -> None:
    """NaN is no JSON: the target's value is null there, and there is no prediction."""
    model = Heads(lambda scores: scores * torch.nan)
    values = gradient(model, "sum")
    content = manifest(FOLDER)
    assert values.isnan().any()
    assert content["captures"][0]["nonfinite"] == values.isnan().sum()
    assert content["target"]["value"] is None
    assert "prediction" not in content


LOGITS = {"logits": torch.tensor([[1.0, 5.0, 2.0]]), "hidden": torch.ones(1, 4)}


@pytest.mark.parametrize(
    ("target", "value"),
    [
        (None, (5, "class 1")),
        ("class:b", (5, "B")),
        ("output[hidden]:sum", (4, "output[hidden]:sum")),
    ],
)
def test_scores_of_classes_stand_where_the_model_says(
    target: str | None, value: tuple[float, str]
) -> None:
    """top1 and class:N read a key of the output; others name theirs."""
    names = ("a", "B", "c") if target == "class:b" else ()
    assert parse(target).value(LOGITS, names, "logits")[:2] == value


@pytest.mark.parametrize(
    ("target", "key", "message"),
    [
        ("mean", "logits", "the model gives output"),
        ("class:1", None, r"is no classifier; it gives output\[logits\] \[1, 3\]"),
    ],
)
def test_a_target_without_scores_is_refused(
    target: str, key: str | None, message: str
) -> None:
    """The message tells what there is."""
    with pytest.raises(UsageError, match=message):
        parse(target).value(LOGITS, (), key)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("class:1", "dog"),
        ("top1", "dog"),
        ("output[aux]:class:1", "output[aux]:class:1"),
        ("output[aux]:top1", "output[aux]:top1"),
    ],
)
def test_names_are_those_of_the_models_scores(text: str, title: str) -> None:
    """Another head may have other classes."""
    scores = torch.tensor([[1.0, 3.0]])
    target = parse(text)
    output = {"aux": scores} if target.keys else scores
    value = target.value(output, ("cat", "dog"))
    assert value.title == title
    assert float(value.number) == 3


@pytest.mark.parametrize(
    ("text", "examples"),
    [
        ("box", "top1, class:0 to class:4, norm"),
        ("output[aux]:box", "output[aux]:norm"),
    ],
)
def test_targets_of_other_families_name_those_that_there_are(
    text: str, examples: str
) -> None:
    """Of another tensor of the output nobody knows that it has scores."""
    target = parse(text)
    scores = torch.zeros(1, 5)
    with pytest.raises(UsageError, match=r"this model gives \[1, 5\], and no box") as e:
        target.value({"aux": scores} if target.keys else scores)
    assert e.value.hint == f"targets here: {examples}"
