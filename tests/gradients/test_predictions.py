"""Predictions: the likeliest classes of a picture, and their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import DIGITS, DIGITS_MODEL, Run
from oracle import input_of

from featviz.gradients import passes as predictions
from featviz.rundir.schema import read_json


def test_predictions_are_softmax_and_topk(tmp_path: Path, featviz: Run) -> None:
    """Manifest, --json and stderr say the five likeliest classes, as torch counts them."""
    model = torch.load(DIGITS_MODEL, weights_only=False).eval()
    files = sorted(DIGITS.iterdir())[:3]
    done = featviz(
        "run",
        DIGITS_MODEL,
        *files,
        "--layers",
        "Linear",
        "--out",
        tmp_path / "out",
        "--json",
        "-v",
    )
    lines = [json.loads(line) for line in done.out.splitlines()]
    for file, line in zip(files, lines, strict=True):
        with torch.no_grad():
            scores = model(input_of(model, file, {}))[0]
        shares, order = scores.softmax(0).topk(5)
        assert [guess["index"] for guess in line["prediction"]] == order.tolist()
        assert line["prediction"][0]["index"] == int(file.stem[-1])
        probabilities = [guess["probability"] for guess in line["prediction"]]
        assert probabilities == pytest.approx(shares.tolist(), rel=1e-4, abs=1e-7)
        assert [g["score"] for g in line["prediction"]] == pytest.approx(
            scores[order].tolist(), rel=1e-4
        )
        manifest = read_json(tmp_path / "out" / file.name / "manifest.json")
        assert manifest["prediction"] == line["prediction"]
        words = ", ".join(
            f"class {i} {rounded(share)} %"
            for i, share in zip(order.tolist(), probabilities, strict=True)
        )
        assert f"{file.name}: {words}\n" in done.err


def rounded(share: float) -> str:
    """One decimal, and neither 0 nor 100 of what is between them."""
    return (
        "< 0.1"
        if share < 5e-4
        else "> 99.9"
        if share >= 0.9995
        else f"{100 * share:.1f}"
    )


def test_predictions_have_names_only_of_their_own_classes() -> None:
    """Names of 3 classes are not put on 4; of outputs that are no scores there is no
    prediction."""
    scores = torch.tensor([[0.0, 2.0, 1.0]])
    named = predictions.top_classes(scores, ("a", "b", "c"))
    assert [guess.name for guess in named] == ["b", "c", "a"]
    assert named[0].text == "b 66.5 %"
    other = predictions.top_classes(torch.zeros(1, 4), ("a", "b", "c"))
    assert {guess.name for guess in other} == {None}
    assert other[0].text.startswith("class ")
    quantised = torch.quantize_per_tensor(scores, 0.5, 0, torch.quint8)
    assert predictions.top_classes(quantised) == predictions.top_classes(scores)
    odd = [scores + 1j, torch.nested.nested_tensor([scores[0]]), scores.to_sparse()]
    shapes = [
        scores[0],
        scores[:, :1],
        torch.zeros(2, 3),
        scores / 0,
        {"out": scores},
        None,
    ]
    assert [predictions.top_classes(output) for output in (*odd, *shapes)] == [()] * 9


def test_scores_stand_where_the_model_says() -> None:
    """Under a key of the output, in the output itself, or nowhere."""
    scores = torch.tensor([[0.0, 2.0, 1.0]])
    output = {"logits": scores, "hidden": torch.zeros(1, 9)}
    indices = [
        guess.index for guess in predictions.top_classes(output, scores="logits")
    ]
    assert indices == [1, 2, 0]
    assert (
        predictions.top_classes(output)
        == predictions.top_classes(output, scores="x")
        == ()
    )
    assert predictions.top_classes(scores, scores=None) == ()


def test_change_of_outputs_is_as_exact_as_they_are() -> None:
    """Doubles differ by less than a float32 tells; a tensor more, or none, is no
    number."""
    one = torch.ones(2, 2, dtype=torch.float64)
    assert predictions.largest_change([one], [one + 1e-12])[0] == pytest.approx(
        1e-12, rel=1e-3, abs=0
    )
    assert predictions.largest_change([one], [one, one]) == (None, 0)
    assert predictions.largest_change([one], [one[0]]) == (None, 0)
    assert predictions.largest_change([], []) == (None, 0)


def test_the_largest_change_is_that_of_all_outputs() -> None:
    """Wherever it stands among several."""
    one = torch.zeros(2)
    for changes in ((3, 1), (1, 3)):
        assert predictions.largest_change([one, one], [one + by for by in changes]) == (
            3.0,
            0,
        )
