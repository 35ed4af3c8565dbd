"""Norms of gradients: layers at which they vanish or explode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gradient_models import SPHERES, Shared, drawn
from oracle import autograd, input_of, inputs, saved
from torch import nn
from torchvision import models

import featviz as fv
from featviz.gradients.passes import gradient_norms, norms_in_words
from featviz.rundir.read import read_json
from featviz.rundir.schema import Capture


def sigmoids(scale: float) -> nn.Module:
    """Twelve layers, of which each multiplies the gradient by about a quarter of `scale`."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        conv = nn.Conv2d(3, 3, 1, bias=False)
        torch.nn.init.dirac_(conv.weight)
        conv.weight.data *= scale
        layers += [conv, nn.Sigmoid() if scale < 10 else nn.Identity()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(("scale", "word"), [(0.1, "vanishing"), (20.0, "exploding")])
def test_vanishing_and_exploding_layers_are_named(
    scale: float, word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With -v, the ratio of the norms of gradients along the depth, as autograd gives them."""
    model = sigmoids(scale)
    want = autograd(model, input_of(model, SPHERES, inputs(12)))
    with caplog.at_level("DEBUG", "featviz"):
        drawn(model, tmp_path / "out", layers="Conv2d", capture="grad")
    (line,) = [text for text in caplog.messages if "gradient norms" in text]
    lengths = {name: float(want[name, "grad"].norm()) for name in ("0", "2", "4", "6", "8", "10")}
    ratios = {name: length / lengths["10"] for name, length in lengths.items()}
    bad = {n: r for n, r in ratios.items() if (r < 1e-3 if word == "vanishing" else r > 1e3)}
    assert 0 < len(bad) < 6
    named = ", ".join(f"{name} ({ratio:.2g})" for name, ratio in bad.items())
    least, most = min(ratios.values()), max(ratios.values())
    assert line == (
        f"spheres.jpg: gradient norms are {least:.2g} to {most:.2g} of that at 10; {word}: {named}"
    )


@pytest.mark.slow
def test_norms_count_every_slice_and_token(tmp_path: Path) -> None:
    """The norm from the manifest is the tensor's, with class tokens beside the grid, vectors and
    enlarged maps; of several calls it is the last one's."""
    torch.manual_seed(0)
    model = models.vit_b_32(image_size=64, num_classes=3)
    model.encoder.layers = model.encoder.layers[:2]
    result = fv.run(
        model, SPHERES, "Encoder*,heads,conv_proj", tmp_path / "out", capture="grad,output",
        tensors="npy", target="class:1", **inputs(64),
    )  # fmt: skip
    got = saved(tmp_path / "out" / "spheres.jpg")
    lengths = gradient_norms([maps.row for maps in result.captures])
    assert next(iter(lengths)) == "conv_proj"
    assert list(lengths)[-1] == "heads"
    for name, norm in lengths.items():
        assert norm == pytest.approx(float(got[name, "grad"].norm()), rel=1e-4)
    torch.manual_seed(3)
    fv.run(Shared(), SPHERES, "relu", tmp_path / "s", capture="grad", target="sum", tensors="npy",
           **inputs(12))  # fmt: skip
    rows = read_json(tmp_path / "s/spheres.jpg/manifest.json")["captures"]
    rows = [Capture(**row) for row in rows]
    last = saved(tmp_path / "s/spheres.jpg")["relu", "grad.call2"]
    assert gradient_norms(rows)["relu"] == pytest.approx(float(last.norm()), rel=1e-4)


def test_report_says_where_nothing_is_wrong_and_where_nothing_can_be_said() -> None:
    """No layer named; None for a single layer, for zero gradients, and without gradients."""
    row = Capture(
        "a", "Conv2d", 1, "grad", 0, "", [1, 1, 2, 2], "nchw", 1, "f",
        {"tile": [4, 4], "scale": 2}, "symmetric", None, -1, 1, 0.0, 1.0, 0.0, 0,
    )  # fmt: skip
    other = replace(row, layer="b", std=2.0)
    assert norms_in_words([other, row]) == (
        "gradient norms are 0.5 to 1 of that at b; none vanishes or explodes"
    )
    assert norms_in_words([row]) is None
    assert norms_in_words([replace(row, std=0.0), replace(other, std=0.0)]) is None
    assert norms_in_words([replace(row, kind="output"), replace(other, kind="output")]) is None
    dead = norms_in_words([row, replace(other, std=0.0)])
    assert dead == "gradient norms are 0 to 1 of that at a; vanishing: b (0)"
