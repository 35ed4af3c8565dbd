"""The gradient at the image as one picture: the largest absolute value over the
channels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, Run
from PIL import Image
from tiles import rows

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
def run(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path
) -> Callable[..., Path]:
    """Run the tiny model with these options; the image's folder."""

    def invoke(*options: object) -> Path:
        words = ("run", tiny_file, picture, *BASE, *SMALL, *options)
        done = featviz(*words, "--out", tmp_path / "out", "--overwrite")
        assert done.code == 0, done.err
        return tmp_path / "out" / "picture.png"

    return invoke


def test_saliency_is_the_largest_absolute_value(run: Callable[..., Path]) -> None:
    """Beside the three channels one grey picture of their gradient, between its 1st and
    99th percentile; none at a layer further on."""
    folder = run("--scale", 1)
    found = rows(folder)
    assert sorted(found) == [("0", 0, ""), ("0", 0, "saliency"), ("1", 0, "")]
    row = found["0", 0, "saliency"]
    assert (row["reduce"], row["maps"]) == ("max-abs", 3)
    assert row["file"].endswith("grad-input.saliency.png")
    gradient = np.load(folder / found["0", 0, ""]["tensor"])
    largest = np.abs(gradient[0]).max(0)
    low, high = np.percentile(largest, (1, 99))
    assert row["range"] == pytest.approx([low, high])
    wanted = np.clip((largest - low) / (high - low), 0, 1) * 255
    with Image.open(folder / row["file"]) as image:
        assert image.mode == "L"
        assert np.abs(np.asarray(image) - wanted).max() <= 1


def test_saliency_lies_over_the_image(run: Callable[..., Path]) -> None:
    """At alpha 0 it is what the model saw."""
    folder = run("--overlay", 0, "--scale", 1)
    row = rows(folder)["0", 0, "saliency"]
    with (
        Image.open(folder / row["file"]) as image,
        Image.open(folder / "input.png") as shown,
    ):
        assert np.array_equal(np.asarray(image), np.asarray(shown))
