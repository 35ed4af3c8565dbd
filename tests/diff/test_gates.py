"""`featviz diff --fail-on`: signal to noise and cosine of layers, and limits on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Outcome
from rundirs import Drawn, summed_anew, write_run

from .changed_network import (
    CLI,
    IMAGES,
    KEPT,
    Pair,
    Run,
    documented,
    kept_tensors,
    layer_of,
    nan_bias,
    one_weight,
)

pytestmark = pytest.mark.medium


def decibels(base: np.ndarray, new: np.ndarray) -> float:
    """Ten times the logarithm of the power of the signal over that of the noise."""
    return float(10 * np.log10((base**2).sum() / ((new - base) ** 2).sum()))


@pytest.mark.parametrize("layer", ["2", "4"])
def test_sqnr_is_what_numpy_makes_of_the_tensors(
    featviz: CLI, pair: Pair, layer: str
) -> None:
    """In each image to 0.01 dB; a layer has the number of its worst image."""
    expected = {}
    for image in IMAGES:
        number = decibels(*kept_tensors(pair, image, layer))
        expected[image] = pytest.approx(number, abs=0.01)

    row = layer_of(documented(featviz, *pair).document, layer)

    sqnr = {image: row["images"][image]["sqnr"] for image in IMAGES}
    assert sqnr == expected
    assert row["sqnr"] == min(sqnr.values())
    assert f"{row['sqnr']:.2f} dB" in featviz("diff", *pair).out


def test_a_layer_that_does_not_differ_has_no_sqnr(featviz: CLI, pair: Pair) -> None:
    """There is no noise."""
    document = documented(featviz, *pair).document
    assert layer_of(document, "0")["sqnr"] is None


def test_a_layer_at_the_limit_is_not_below_it(featviz: CLI, pair: Pair) -> None:
    """Equal runs have the cosine 1 everywhere."""
    base, _ = pair
    assert featviz("diff", base, base, "--fail-on", "cosine<1").code == 0


def test_pictures_have_no_sqnr(featviz: CLI, run: Run) -> None:
    """Their levels have noise of their own: the number is left out, and a gate on it
    says how to get it."""
    runs = (run("base"), run("new", change=one_weight))
    document = documented(featviz, *runs).document
    assert {row["sqnr"] for row in document["layers"]} == {None}
    table = featviz("diff", *runs).out
    assert "cosine" in table
    assert "SQNR" not in table
    done = featviz("diff", *runs, "--fail-on", "sqnr<20")
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


@pytest.mark.parametrize(
    "options",
    [("--cmap", "magma", "--labels"), ("--channels", "0-2")],
    ids=["numbers over a colour map", "the changed channel is not drawn"],
)
def test_a_changed_layer_without_the_number_fails_a_gate(
    featviz: CLI, run: Run, options: tuple[str, ...]
) -> None:
    """The layers before it, which are equal, do not make the gate hold; a gate on this
    layer alone says what hides its values."""
    runs = (run("base", *options), run("new", *options, change=one_weight))

    every_layer = featviz("diff", *runs, "--fail-on", "cosine<-1")
    changed_layer = featviz("diff", *runs, "--fail-on", "2:cosine<-1")

    assert every_layer.code == 4
    assert "gate cosine<-1 failed: 2 (cosine not known)" in every_layer.out
    assert changed_layer.code == 2
    assert "all channels of both as PNG" in changed_layer.err
    assert "numbers over a colour map (--labels, --cmap)" in changed_layer.err


def test_a_changed_layer_that_kept_no_tensors_fails_a_gate_on_noise(
    featviz: CLI,
) -> None:
    """Though the tensors of another layer were kept; a token, which no file shows by
    itself, is named."""
    held = _gate_on_noise(featviz, Drawn("x", key="class_token"))
    assert held.code == 0
    assert "; the sqnr of single tokens is not known" in held.out
    failed = _gate_on_noise(featviz, Drawn("y", index=2))
    assert failed.code == 4
    assert "y (sqnr not known) below -50 dB; run both with --tensors npy" in failed.out


def _gate_on_noise(featviz: CLI, pictured: Drawn) -> Outcome:
    """A gate far below the noise of a kept tensor, beside one that is drawn alone."""
    kept = Drawn("x", more={"tensor": "001_x/output.npy"})
    runs = []
    for value in (1.0, 1.5):
        root = Path(f"{pictured.layer}-{value}")
        shaded = replace(pictured, shade=int(20 * value))
        write_run(root, {"a.png": [kept, shaded]})
        values = np.full((1, 6, 4, 5), value, np.float32)
        np.save(root / "a.png" / "001_x" / "output.npy", values)
        summed_anew(root / "a.png")
        runs.append(root)
    return featviz("diff", *runs, "--fail-on", "sqnr<-50")


def test_a_layer_of_which_one_image_is_not_known_fails_a_gate(featviz: CLI) -> None:
    """That the number is known of another image does not excuse it."""
    file = "001_x/output.npy"
    kept = Drawn("x", more={"tensor": file})
    runs = []
    for value in (1.0, 1.5):
        pictured = Drawn("x", shade=int(20 * value))
        root = write_run(Path(f"{value}"), {"a.png": [kept], "b.png": [pictured]})
        np.save(root / "a.png" / file, np.full((1, 6, 4, 5), value, np.float32))
        summed_anew(root / "a.png")
        runs.append(root)
    done = featviz("diff", *runs, "--fail-on", "sqnr<-50")
    assert done.code == 4
    assert "x (sqnr not known) below -50 dB" in done.out


@pytest.fixture
def lowest(featviz: CLI, pair: Pair) -> float:
    """The sqnr of the worst layer."""
    layers = documented(featviz, *pair).document["layers"]
    return min(row["sqnr"] for row in layers if row["sqnr"] is not None)


def test_a_gate_passes_below_all_layers(
    featviz: CLI, pair: Pair, lowest: float
) -> None:
    """The exit code is 0, though channels differ."""
    done = featviz("diff", *pair, "--fail-on", f"sqnr<{lowest - 0.1:.3f}")
    assert done.code == 0
    assert f"held: lowest {lowest:.4g} dB" in done.out


def test_a_gate_fails_above_a_layer(featviz: CLI, pair: Pair, lowest: float) -> None:
    """The exit code is 4, and the verdict names the number; each gate has its own."""
    gates = ("--fail-on", f"sqnr<{lowest + 0.1:.3f}", "--fail-on", "cosine<-1")
    code, document = documented(featviz, *pair, *gates)
    assert code == 4
    assert not document["equal"]
    failed, passed = document["gates"]
    assert not failed["held"]
    assert f"({lowest:.4g} dB) below" in failed["message"]
    assert passed["held"]


def test_a_gate_of_a_layer_does_not_see_the_others(featviz: CLI, pair: Pair) -> None:
    """The first layer is equal."""
    done = featviz("diff", *pair, "--fail-on", "0:sqnr<100")
    assert done.code == 0
    assert done.out.splitlines()[-1].endswith(": nothing differs")


def test_a_gate_of_a_class_does_not_see_the_others(featviz: CLI, pair: Pair) -> None:
    """It is named as it is written in the table; measures have no case."""
    changed = featviz("diff", *pair, "--fail-on", "Conv2d:COSINE<1")
    assert changed.code == 4
    assert "gate Conv2d:COSINE<1 failed: 2 (" in changed.out
    assert "3 (" not in changed.out.split("failed: ")[1]


def test_a_layer_that_cannot_be_compared_fails_each_gate(featviz: CLI) -> None:
    """With the reason; JUnit has the gates."""
    runs = [write_run(Path(str(n)), {"a.png": [Drawn("x", n)]}) for n in (6, 7)]
    junit = Path("d.xml")
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
def test_gates_that_are_none(featviz: CLI, gate: str, message: str, hint: str) -> None:
    """One line says what is wrong, the next what is right."""
    root = write_run(Path("run"), {"a.png": [Drawn("x")]})
    done = featviz("diff", root, root, "--fail-on", gate)
    assert done.code == 2
    assert message in done.err
    assert hint in done.err
