"""The keys of colours: which level stands for which value, and what has no key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from rundirs import Drawn, write_run

from featviz.report.color_keys import color_key
from featviz.rundir.read import read_run

from .markup import assert_says, built, page_of, source


def scaled(low: float, high: float, mode: str, **more: Any) -> dict[str, Any]:
    """A row's entries for one scale of all maps."""
    return {"normalize": mode, "range": [low, high], **more}


@pytest.mark.medium
def test_the_first_page_says_what_dark_is(tmp_path: Path) -> None:
    """All strips of a kind have one key; a row tells its range, and a map its own."""
    stats = np.tile(np.float32([-2, 3, 1.5, 1, 0, 0]), (6, 1))
    keys = {
        "min max, scaled per map": {"normalize": "map", "range": None},
        "min max, scaled per layer": scaled(-2, 3, "layer"),
        "− +, 0 in the middle, scaled per layer": scaled(-3, 3, "symmetric"),
        "≤ 0 3, one scale for all maps": scaled(0, 3, "range"),
    }
    drawn = []
    for index, fields in enumerate([*keys.values(), *keys.values()]):
        row = {**fields, "min": -2.0, "max": 3.0}
        drawn.append(Drawn(f"x{index}", stats=stats, index=index, more=row))
    page = page_of(built(tmp_path / "out", {"a.png": drawn}))
    for key in keys:
        assert page.text.count(key) == 1
    assert page.text.count("range −2 to 3") == 8
    assert page.values("a", "title").count("Channel 0: −2 to 3") == 8


@pytest.mark.parametrize(
    ("mode", "low", "high", "key"),
    [
        ("symmetric-percentile", -2, 2, "−2 ≥ 2"),
        ("symmetric-percentile", -9, 9, "−9 9"),
        ("range", 0, 9, "≤ 0 9"),
        ("range", -1, 6, "−1 6"),
        ("percentile", 0, 2, "≤ 0 ≥ 2"),
        ("layer", -1, 6, "−1 6"),
    ],
)
def test_a_key_says_where_values_lie_beyond_its_ends(
    mode: str, low: float, high: float, key: str, tmp_path: Path
) -> None:
    """The values go from −1 to 6: an end that is not reached by them has no sign."""
    fields = scaled(low, high, mode, min=-1.0, max=6.0)
    root = built(tmp_path / "out", {"a.png": [Drawn("x", kind="grad", more=fields)]})
    text = page_of(root, "layer-000.html").text
    assert f" {key}, one scale for all maps" in text
    assert ("for all maps of this image" in text) == (mode != "range")
    assert text.count("≤") == key.count("≤")


def test_a_single_map_shares_its_scale_with_none(tmp_path: Path) -> None:
    """There is nothing to be said of it."""
    drawn = Drawn("x", maps=1, nrow=1, more=scaled(0, 1, "layer", min=0.0, max=1.0))
    root = built(tmp_path / "out", {"a.png": [drawn]})
    assert "one scale" not in page_of(root, "layer-000.html").text


def key_colors(root: Path, name: str) -> list[list[str]]:
    """The colours of each key on a page, from the darkest level to the brightest."""
    keys = re.findall(r'<p class="key">(.*?)</p>', source(root, name))
    return [re.findall('fill="(#[0-9a-f]{6})"', key) for key in keys]


def test_a_gradient_and_its_saliency_have_their_own_colours(tmp_path: Path) -> None:
    """The gradient of an image is coolwarm (matplotlib); the picture of all its
    channels, which has no sign, is grey."""
    gradient = Drawn("x", kind="grad-input", more=scaled(-2, 2, "symmetric-percentile"))
    saliency = Drawn(
        "x",
        kind="grad-input",
        key="saliency",
        nrow=1,
        channels=[0],
        more=scaled(0, 2, "percentile", reduce="max-abs"),
    )
    images = {"a.png": [gradient, saliency]}
    root = built(tmp_path / "out", images, options={"cmap": "auto"})
    coolwarm, grey = key_colors(root, "layer-000.html")
    blue, red = colormaps["coolwarm"]([0.0, 1.0], bytes=True)
    assert (coolwarm[0], coolwarm[-1]) == (
        f"#{bytes(blue[:3]).hex()}",
        f"#{bytes(red[:3]).hex()}",
    )
    assert (grey[0], grey[-1]) == ("#000000", "#ffffff")
    text = page_of(root, "layer-000.html").text
    assert "the gradient at the layer’s input · 1 image" in text
    reduction = "largest absolute value over the channels of the gradient"
    assert f"grad-input.saliency {reduction} at the layer’s input" in text
    assert "all zero in" not in text


@pytest.fixture
def strip(tmp_path: Path) -> Path:
    """A report of the gradient behind a global pooling: a number for each of six
    constant maps of 7×7."""
    stats = np.zeros((6, 6), np.float32)
    stats[:, :3] = np.array([0.5, -3, 1, -0.25, 2, 0])[:, None]
    geometry = {"constant": [1, 7, 7], "shape": [1, 6, 7, 7]}
    drawn = Drawn(
        "x",
        kind="grad",
        nrow=6,
        padding=0,
        tile=(30, 12),
        scale=(30, 12),
        stats=stats,
        more=scaled(-3, 3, "symmetric-percentile", **geometry),
    )
    return built(tmp_path / "out", {"a.png": [drawn]})


@pytest.mark.medium
def test_a_strip_of_constant_maps_is_called_that(strip: Path) -> None:
    """The pages of the image and of the layer say so; its shape is that of the maps, not
    of stripes."""
    text = page_of(strip, "image-000.html").text
    assert_says(
        text,
        "one stripe per channel, each map constant; one scale for all",
        "each map of 7×7 holds one value; drawn as a strip",
        "6 × 7×7, each constant",
    )
    assert "6 values" not in text
    layer = page_of(strip, "layer-000.html").text
    assert "one stripe per channel, each map constant" in layer


def test_the_bars_of_a_gradient_are_by_magnitude(strip: Path) -> None:
    """The most negative entry comes first where it is the largest; outputs go by
    value."""
    bars = source(strip).split('class="bars values"')[1].split("</table>")[0]
    assert "Largest magnitudes of 6" in bars
    channels = re.findall(r'href="layer-000.html#c(\d)"', bars)
    assert channels == ["1", "4", "2", "0", "3", "5"]
    begins = re.findall(r'class="part" x="([\d.]+)"', bars)
    assert [float(x) for x in begins] == [0, 60, 60, 60, 55, 60]


@pytest.mark.parametrize("marks", [True, False])
def test_the_legend_tells_of_marks_where_they_are_drawn(
    marks: bool, tmp_path: Path
) -> None:
    """Under --no-marks no map is crossed out, and the legend speaks of none."""
    root = built(tmp_path / "out", {"a.png": [Drawn("x")]}, options={"marks": marks})
    assert ("crossed out" in page_of(root, "layer-000.html").text) == marks


@pytest.mark.parametrize(
    ("cmap", "overlay", "is_grey"),
    [
        ("grey", None, True),
        ("gray", None, True),
        ("grey", 0.6, False),
        ("viridis", None, False),
    ],
)
def test_greys_alone_may_be_shown_in_other_colours(
    cmap: str, overlay: float | None, is_grey: bool, tmp_path: Path
) -> None:
    """Not those of maps that lie over the input already."""
    drawn = Drawn("x", more={} if overlay is None else {"overlay": overlay})
    (image,) = read_run(write_run(tmp_path / "out", {"a.png": [drawn]})).images.values()
    (row,) = image.captures.values()
    assert color_key(row, {"cmap": cmap}).is_grey is is_grey
