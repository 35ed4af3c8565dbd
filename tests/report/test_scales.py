"""Keys and words of gradients, saliency pictures, strips of constant maps, and slices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from rundirs import Drawn, write_run

from featviz.options import ReportOptions
from featviz.report import build_report

from .markup import read


def text_of(root: Path, page: str, rows: list[Drawn], **options: Any) -> str:
    """The words on a page of the report of a run of one image."""
    write_run(root, {"a.png": rows}, options=options)
    build_report(root, ReportOptions())
    return read(root / "report" / page).words


def key_colors(root: Path, page: str) -> list[list[str]]:
    """The colours of each key on a page, from the darkest level to the brightest."""
    keys = re.findall(r'<p class="key">(.*?)</p>', (root / "report" / page).read_text("utf-8"))
    return [re.findall('fill="(#[0-9a-f]{6})"', key) for key in keys]


def hexes(name: str, levels: np.ndarray) -> list[str]:
    """Colours of matplotlib's colormap at some levels 0..1."""
    return ["#{:02x}{:02x}{:02x}".format(*rgb[:3]) for rgb in colormaps[name](levels, bytes=True)]


def scaled(low: float, high: float, mode: str, **more: Any) -> dict[str, Any]:
    """A row's entries for one scale of all maps."""
    return {"normalize": mode, "range": [low, high], **more}


@pytest.mark.parametrize(
    ("mode", "low", "high", "words"),
    [
        ("symmetric-percentile", -2, 2, "−2 ≥ 2, one scale for all maps"),
        ("symmetric-percentile", -9, 9, "−9 9, one scale for all maps"),
        ("range", 0, 9, "≤ 0 9, one scale for all maps"),
        ("percentile", 0, 2, "≤ 0 ≥ 2, one scale for all maps"),
        ("layer", -1, 4, "−1 4, one scale for all maps"),
    ],
)
def test_a_key_says_where_values_lie_beyond_its_ends(
    tmp_path: Path, mode: str, low: float, high: float, words: str
) -> None:
    """The values go from −1 to 6: an end that is not reached by them has no sign."""
    own = scaled(low, high, mode, min=-1.0, max=6.0 if mode != "layer" else 4.0)
    text = text_of(tmp_path / "out", "layer-000.html", [Drawn("x", kind="grad", more=own)])
    assert f" {words}" in text
    if not words.startswith("≤"):
        assert "≤" not in text


def test_the_gradient_of_an_image_and_its_saliency_have_their_own_colours(tmp_path: Path) -> None:
    """Coolwarm for a gradient, grey for the picture of all its channels, which has no sign."""
    signed = scaled(-2, 2, "symmetric-percentile")
    single = scaled(0, 2, "percentile", reduce="max-abs")
    rows = [
        Drawn("x", kind="grad-input", more=signed),
        Drawn("x", kind="grad-input", key="saliency", nrow=1, more=single, channels=[0]),
    ]
    text = text_of(tmp_path / "out", "layer-000.html", rows, cmap="auto")
    gradient, saliency = key_colors(tmp_path / "out", "layer-000.html")
    ends = np.array([0.0, 1.0])
    assert [gradient[0], gradient[-1]] == hexes("coolwarm", ends)
    assert [saliency[0], saliency[-1]] == ["#000000", "#ffffff"]
    assert "the gradient at the layer’s input · 1 image" in text
    of = "largest absolute value over the channels of the gradient at the layer’s input"
    assert f"grad-input.saliency {of}" in text
    assert "all zero in" not in text


def test_a_reduced_gradient_is_no_saliency(tmp_path: Path) -> None:
    """--reduce mean of a gradient keeps its sign, and its colours."""
    own = scaled(-2, 2, "symmetric-percentile", reduce="mean")
    row = Drawn("x", kind="grad", nrow=1, more=own, channels=[0])
    text_of(tmp_path / "out", "layer-000.html", [row], cmap="auto")
    (colors,) = key_colors(tmp_path / "out", "layer-000.html")
    assert [colors[0], colors[-1]] == hexes("coolwarm", np.array([0.0, 1.0]))


@pytest.fixture
def strip() -> Drawn:
    """The gradient behind a global pooling: a number for each of six constant maps of 7×7."""
    stats = np.zeros((6, 6), np.float32)
    stats[:, :3] = np.array([0.5, -3, 1, -0.25, 2, 0])[:, None]
    own = scaled(-3, 3, "symmetric-percentile", constant=[1, 7, 7], shape=[1, 6, 7, 7])
    return Drawn(
        "x", kind="grad", nrow=6, padding=0, tile=(30, 12), scale=(30, 12), stats=stats, more=own
    )


def test_a_strip_of_constant_maps_is_called_that(tmp_path: Path, strip: Drawn) -> None:
    """On the page of the image and of the layer; its shape is that of the maps, not of stripes."""
    text = text_of(tmp_path / "out", "image-000.html", [strip])
    assert "one stripe per channel, each map constant; one scale for all" in text
    assert "each map of 7×7 holds one value; drawn as a strip" in text
    assert "6 × 7×7, each constant" in text and "6 values" not in text
    layer = read(tmp_path / "out" / "report" / "layer-000.html").words
    assert "one stripe per channel, each map constant" in layer


def test_the_bars_of_a_gradient_are_by_magnitude(tmp_path: Path, strip: Drawn) -> None:
    """The most negative entry comes first where it is the largest; outputs go by value."""
    text_of(tmp_path / "out", "index.html", [strip])
    page = (tmp_path / "out" / "report" / "index.html").read_text("utf-8")
    bars = page.split('class="bars values"')[1].split("</table>")[0]
    order = re.findall(r'href="layer-000.html#c(\d)"', bars)
    assert order == ["1", "4", "2", "0", "3", "5"] and "Largest magnitudes of 6" in bars


def test_gradients_are_stages_of_their_own(tmp_path: Path, strip: Drawn) -> None:
    """Forward and backward at the same resolution are not mixed."""
    size = {"tile": (14, 14), "scale": 2}
    forward = [Drawn(name, index=n, **size) for n, name in enumerate("ab")]  # type: ignore[arg-type]
    backward = [strip, Drawn("b", kind="grad", index=1, **size)]  # type: ignore[arg-type]
    write_run(tmp_path / "out", {"a.png": [*forward, *backward]})
    build_report(tmp_path / "out", ReportOptions())
    text = (tmp_path / "out" / "report" / "index.html").read_text("utf-8")
    assert re.findall("<summary><h3>(.*?)</h3>", text) == ["7×7", "Gradients, 7×7"]


@pytest.mark.parametrize(
    ("steps", "words"), [([0, 6, 23], "3 of 24: 0, 6, 23"), (None, "3 of 24: 0–2")]
)
def test_slices_are_named(tmp_path: Path, steps: list[int] | None, words: str) -> None:
    """Those that the manifest has; where it names none, they are the first."""
    row = Drawn("x", slices=(3, 24), nrow=3, more={"steps": steps} if steps else {})
    text = text_of(tmp_path / "out", "image-000.html", [row])
    assert f"for each channel {words}" in text
    layer = read(tmp_path / "out" / "report" / "layer-000.html").words
    assert f"slices {words}" in layer


def test_no_marks_no_words_about_them(tmp_path: Path) -> None:
    """Under --no-marks no map is crossed out, and the legend speaks of none."""
    assert "crossed out" in text_of(tmp_path / "with", "layer-000.html", [Drawn("x")])
    assert "crossed out" not in text_of(
        tmp_path / "without", "layer-000.html", [Drawn("x")], marks=False
    )


def test_the_mean_of_kernels_lies_within_its_scale(tmp_path: Path) -> None:
    """Its row has the extremes of all weights, beyond the scale, which clips none."""
    own = scaled(-0.5, 0.5, "symmetric", min=-4.0, max=4.0, layout="mean")
    text = text_of(tmp_path / "out", "layer-000.html", [Drawn("x", more=own)])
    assert "−0.5 0.5, one scale" in text and "≤" not in text and "≥" not in text
