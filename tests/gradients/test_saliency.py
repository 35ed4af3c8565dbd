"""The gradient at the image as one picture: the largest absolute value over the
channels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, Run
from PIL import Image
from tiles import raw, rows

BASE = (
    "--layers",
    "0,1",
    "--capture",
    "grad-input",
    "--target",
    "class:1",
    "--tensors",
    "npy",
)


@pytest.fixture
def run(featviz: Run, tiny_file: Path, picture: Path) -> Callable[..., Path]:
    """Run the tiny model with these options; the image's folder."""

    def invoke(*options: object) -> Path:
        options += (*BASE, *SMALL, "--out", "out")
        done = featviz("run", tiny_file, picture, *options)
        assert done.code == 0, done.err
        return Path("out/picture.png")

    return invoke


@pytest.mark.medium
def test_saliency_is_the_largest_absolute_value(run: Callable[..., Path]) -> None:
    """Beside the three channels stands one grey picture of their gradient, between its
    1st and 99th percentile; a layer further on has none."""
    folder = run("--scale", 1)

    captures = rows(folder)
    assert sorted(captures) == [("0", 0, ""), ("0", 0, "saliency"), ("1", 0, "")]
    row = captures["0", 0, "saliency"]
    assert row["reduce"] == "max-abs"
    assert row["maps"] == 3
    assert row["file"].endswith("grad-input.saliency.png")
    gradient = raw(folder, captures["0", 0, ""])[0]
    largest = gradient.abs().amax(0).numpy()
    low, high = np.percentile(largest, (1, 99))
    assert row["range"] == pytest.approx([low, high])
    levels = np.clip((largest - low) / (high - low), 0, 1) * 255
    with Image.open(folder / row["file"]) as picture:
        assert picture.mode == "L"
        assert np.abs(np.asarray(picture) - levels).max() <= 1


@pytest.mark.medium
def test_saliency_lies_over_the_image(run: Callable[..., Path]) -> None:
    """At alpha 0 it is what the model saw."""
    folder = run("--overlay", 0, "--scale", 1)
    row = rows(folder)["0", 0, "saliency"]
    picture = np.asarray(Image.open(folder / row["file"]))
    assert np.array_equal(picture, np.asarray(Image.open(folder / "input.png")))
