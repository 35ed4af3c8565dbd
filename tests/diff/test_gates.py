"""`featviz diff --fail-on`: signal to noise and cosine of layers, and limits on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rundirs import Drawn, write_run

from .changed_network import CLI, Run, documented, layer_of, nan_bias, one_weight

KEPT = ("--tensors", "npy")


def decibels(base: np.ndarray, new: np.ndarray) -> float:
    """Ten times the logarithm of the power of the signal over that of the noise."""
    return float(10 * np.log10((base**2).sum() / ((new - base) ** 2).sum()))


def test_sqnr_is_what_numpy_makes_of_the_tensors(featviz: CLI, run: Run) -> None:
    """In each image to 0.01 dB; a layer has the number of its worst image, and none
    where nothing differs."""
    base = run("base", *KEPT)
    new = run("new", *KEPT, change=one_weight)
    _, document = documented(featviz, base, new)
    for name, index in (("2", 3), ("4", 5)):
        row = layer_of(document, name)
        expected = {}
        for image in ("a.png", "b.png"):
            file = f"{image}/{index:03d}_{name}/output.npy"
            old, now = (np.load(root / file).astype(np.float64) for root in (base, new))
            expected[image] = decibels(old, now)
            assert row["images"][image]["sqnr"] == pytest.approx(
                expected[image], abs=0.01
            )
        assert row["sqnr"] == pytest.approx(min(expected.values()), abs=0.01)
    assert layer_of(document, "0")["sqnr"] is None
    table = featviz("diff", base, new).out
    assert f"{layer_of(document, '2')['sqnr']:.2f} dB" in table


def test_pictures_have_no_sqnr(featviz: CLI, run: Run) -> None:
    """Their levels have noise of their own: the number is left out, and a gate on it
    says how to get it."""
    base = run("base")
    new = run("new", change=one_weight)
    _, document = documented(featviz, base, new)
    assert {row["sqnr"] for row in document["layers"]} == {None}
    done = featviz("diff", base, new)
    assert "cosine" in done.out and "SQNR" not in done.out
    done = featviz("diff", base, new, "--fail-on", "sqnr<20")
    assert done.code == 2
    assert "the sqnr of no layer is known" in done.err
    assert "--tensors npy" in done.err


def test_values_that_are_not_finite_fail_a_gate(featviz: CLI, run: Run) -> None:
    """NaN in one run alone is no noise and no angle, and no gate passes over it."""
    runs = (run("base", *KEPT), run("new", *KEPT, change=nan_bias))
    for gate in ("sqnr<20", "cosine<0.9"):
        done = featviz("diff", *runs, "--fail-on", gate)
        assert done.code == 4
        assert "values that are finite in one run alone" in done.out + done.err


def test_gates_take_the_place_of_equality(featviz: CLI, run: Run) -> None:
    """The exit code is 4 below the limit and 0 above it, though channels differ; the
    verdict names the layer and its number."""
    runs = (run("base", *KEPT), run("new", *KEPT, change=one_weight))
    _, document = documented(featviz, *runs)
    lowest = min(row["sqnr"] for row in document["layers"] if row["sqnr"] is not None)
    passed = featviz("diff", *runs, "--fail-on", f"sqnr<{lowest - 0.1:.3f}")
    assert passed.code == 0
    assert f"held: lowest {lowest:.4g} dB" in passed.out
    gates = ("--fail-on", f"sqnr<{lowest + 0.1:.3f}", "--fail-on", "cosine<-1")
    code, document = documented(featviz, *runs, *gates)
    assert code == 4
    assert not document["equal"]
    assert [gate["held"] for gate in document["gates"]] == [False, True]
    assert f"({lowest:.4g} dB) below" in document["gates"][0]["message"]
    of_first = ("--fail-on", f"0:sqnr<{lowest + 0.1:.3f}")
    done = featviz("diff", *runs, *of_first)
    assert (done.code, done.out.splitlines()[-1].split(": ")[-1]) == (
        0,
        "nothing differs",
    )


def test_a_layer_that_cannot_be_compared_fails_each_gate(
    featviz: CLI, tmp_path: Path
) -> None:
    """With the reason; JUnit has the gates."""
    runs = [write_run(tmp_path / str(n), {"a.png": [Drawn("x", n)]}) for n in (6, 7)]
    junit = tmp_path / "d.xml"
    done = featviz("diff", *runs, "--fail-on", "cosine<0.5", "--junit", junit)
    assert done.code == 4
    assert "x (shape 1×6×4×5 in BASE, 1×7×4×5 in NEW)" in done.out
    assert junit.read_text("utf-8").count("<testcase") == 1


@pytest.mark.parametrize(
    ("gate", "message", "hint"),
    [
        ("sqnr>20", "is no gate", "sqnr<20"),
        ("snr<20", "there is no measure 'snr'", "did you mean sqnr?"),
        ("y:cosine<1", "no compared layer is called 'y'", "there is x"),
    ],
)
def test_gates_that_are_none(
    featviz: CLI, tmp_path: Path, gate: str, message: str, hint: str
) -> None:
    """One line says what is wrong, the next what is right."""
    root = write_run(tmp_path / "run", {"a.png": [Drawn("x")]})
    done = featviz("diff", root, root, "--fail-on", gate)
    assert done.code == 2
    assert message in done.err
    assert hint in done.err
