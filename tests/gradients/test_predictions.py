"""Predictions: the likeliest classes of a picture, and their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DIGITS, DIGITS_MODEL, Outcome, Run
from oracle import input_of
from tiles import manifest
from torch import Tensor

from featviz.gradients.passes import largest_change, top_classes

FILES = sorted(DIGITS.iterdir())[:3]


@pytest.fixture
def printed(featviz: Run) -> Outcome:
    """What `run` prints of three digits."""
    options = ("--layers", "Linear", "--out", "out", "--json", "-v")
    return featviz("run", DIGITS_MODEL, *FILES, *options)


@pytest.mark.medium
def test_predictions_are_softmax_and_topk(printed: Outcome) -> None:
    """JSON lines and manifests have the five likeliest classes, as torch counts them."""
    model = torch.load(DIGITS_MODEL, weights_only=False).eval()
    for file, line in zip(FILES, printed.out.splitlines(), strict=True):
        with torch.no_grad():
            scores = model(input_of(model, file, {}))[0]
        shares, order = scores.softmax(0).topk(5)
        prediction = json.loads(line)["prediction"]
        assert column(prediction, "index") == order.tolist()
        probabilities = pytest.approx(shares.tolist(), rel=1e-4, abs=1e-7)
        assert column(prediction, "probability") == probabilities
        numbers = pytest.approx(scores[order].tolist(), rel=1e-4)
        assert column(prediction, "score") == numbers
        assert prediction[0]["index"] == int(file.stem[-1])
        assert manifest("out" / Path(file.name))["prediction"] == prediction


def column(prediction: list[dict[str, Any]], name: str) -> list[Any]:
    return [guess[name] for guess in prediction]


@pytest.mark.medium
def test_predictions_are_printed_in_percent(printed: Outcome) -> None:
    """With one decimal, and neither 0 nor 100 for what is between them."""
    for file, line in zip(FILES, printed.out.splitlines(), strict=True):
        guesses = json.loads(line)["prediction"]
        texts = [
            f"class {guess['index']} {percent(guess['probability'])} %"
            for guess in guesses
        ]
        assert f"{file.name}: {', '.join(texts)}\n" in printed.err


def percent(share: float) -> str:
    if share < 5e-4:
        return "< 0.1"
    if share >= 0.9995:
        return "> 99.9"
    return f"{100 * share:.1f}"


SCORES = torch.tensor([[0.0, 2.0, 1.0]])
NAMES = ("a", "b", "c")


def test_predictions_have_the_names_of_their_classes() -> None:
    """The likeliest class comes first."""
    guesses = top_classes(SCORES, NAMES)
    assert [guess.name for guess in guesses] == ["b", "c", "a"]
    assert guesses[0].text == "b 66.5 %"


def test_names_are_not_put_on_another_number_of_classes() -> None:
    """The numbers of the classes stand for them."""
    guesses = top_classes(torch.zeros(1, 4), NAMES)
    assert {guess.name for guess in guesses} == {None}
    assert guesses[0].text.startswith("class ")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantised_scores_have_a_prediction() -> None:
    """They are taken as the numbers that they stand for."""
    quantised = torch.quantize_per_tensor(SCORES, 0.5, 0, torch.quint8)
    assert top_classes(quantised) == top_classes(SCORES)


NO_SCORES: dict[str, Any] = {
    "complex": SCORES + 1j,
    "nested": torch.nested.nested_tensor([SCORES[0]], layout=torch.jagged),
    "sparse": SCORES.to_sparse(),
    "no batch": SCORES[0],
    "one class": SCORES[:, :1],
    "two images": torch.zeros(2, 3),
    "not finite": SCORES / 0,
    "dict": {"out": SCORES},
    "nothing": None,
}


@pytest.mark.parametrize("name", NO_SCORES)
def test_what_is_no_scores_has_no_prediction(name: str) -> None:
    """Scores are real numbers [1, K], all finite, of two classes and more."""
    assert top_classes(NO_SCORES[name]) == ()


def test_scores_stand_where_the_model_says() -> None:
    """Under a key of the output, in the output itself, or nowhere."""
    output = {"logits": SCORES, "hidden": torch.zeros(1, 9)}
    assert top_classes(output, scores="logits") == top_classes(SCORES)
    assert top_classes(output, scores="x") == ()
    assert top_classes(SCORES, scores=None) == ()


ONES = torch.ones(2, 2, dtype=torch.float64)
INFINITE = float("inf")
NAN = float("nan")


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ([ONES], [ONES + 1e-12], pytest.approx(1e-12, rel=1e-3, abs=0)),
        ([ONES, ONES], [ONES + 3, ONES + 1], 3.0),
        ([ONES, ONES], [ONES + 1, ONES + 3], 3.0),
        ([ONES], [ONES, ONES], None),
        ([ONES], [ONES[0]], None),
        ([], [], None),
    ],
)
def test_the_largest_change_is_that_of_all_outputs(
    before: list[Tensor], after: list[Tensor], change: float | None
) -> None:
    """Doubles differ by less than a float32 tells; a tensor more, one of another shape,
    or none, is no number."""
    assert largest_change(before, after) == (change, 0)


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ([0, INFINITE, NAN, 1], [0.5, INFINITE, NAN, 1], (0.5, 0)),
        ([0, INFINITE, NAN, 1], [0, -INFINITE, 2, NAN], (0, 3)),
        ([NAN, INFINITE], [NAN, INFINITE], (0, 0)),
    ],
)
def test_values_that_are_not_finite_change_where_they_become_others(
    before: list[float], after: list[float], change: tuple[float, int]
) -> None:
    """They are counted in all outputs, and are no part of the largest change."""
    old = torch.tensor(before)
    new = torch.tensor(after)
    assert largest_change([old], [new]) == change
    largest, count = change
    assert largest_change([old, ONES], [new, ONES]) == change
    assert largest_change([old, old], [new, new]) == (largest, 2 * count)
