"""The network as a picture, tables of channels, and the keys of colours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image
from rundirs import Drawn, write_run

from featviz.options.commands import ReportOptions
from featviz.report import build_report
from featviz.report.figures import arrange
from featviz.report.stages import most_varied, network
from featviz.report.totals import ChannelTotals
from featviz.rundir.read import read_run
from featviz.rundir.schema import Capture

from .markup import built, pages, read

VALUES = np.array(
    [
        [-1, 1, 0, 0.5, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [-9, 9, 1, 4, 0.25, 0],
        [2, 2, 2, 0, 0, 0],
        [0, 8, 1, 3, 0.5, 0],
        [-1, 1, 0, 9, 0, 2],
    ],
    np.float32,
)


def test_a_strip_shows_the_tiles_of_its_channels(tmp_path: Path) -> None:
    """The box of every crop holds the grey of the channel that its link names (Pillow)."""
    drawn = Drawn("x", maps=9, channels=[7, 2, 5], nrow=2, tile=(8, 10))
    root = built(tmp_path / "out", {"a.png": [drawn]})
    page = read(root / "report" / "index.html")
    boxes = [str(a["viewbox"]) for a in page.of("svg") if "crop" in str(a.get("class"))]
    links = [str(a["href"]) for a in page.of("a") if "#c" in str(a["href"])]
    assert len(boxes) == 3
    assert {link.split("#")[1] for link in links} == {"c7", "c2", "c5"}
    with Image.open(next(root.rglob("output.png"))) as grid:
        for box, link in zip(boxes, links, strict=True):
            x, y, w, h = map(int, box.split())
            pixels = np.asarray(grid)[y : y + h, x : x + w]
            tile = [7, 2, 5].index(int(link.split("#c")[1]))
            assert pixels.shape == (8, 10)
            assert (pixels.ravel()[1:] == 20 + tile).all()


def test_the_maps_of_a_strip_vary(tmp_path: Path) -> None:
    """The largest deviation comes first, what is not finite last; constant maps go by
    magnitude."""
    root = write_run(tmp_path / "out", {"a.png": [Drawn("x", stats=VALUES)]})
    (image,) = read_run(root).images.values()
    (row,) = image.captures.values()
    assert most_varied(row, VALUES, 1) == [2]
    assert set(most_varied(row, VALUES, 3)) == {2, 4, 0}
    assert most_varied(row, VALUES, 6)[-1] in (1, 3, 5)
    assert len(most_varied(row, VALUES, 6)) == 6
    constant = VALUES.copy()
    constant[:, 3] = 0
    constant[:, 5] = 0
    assert most_varied(row, constant, 1) == [3]


def titles(root: Path) -> list[tuple[str, list[str]]]:
    """The stages of the first image, with their layers."""
    (page, *_), _ = arrange(read_run(root))
    own = page.image.stats()
    figures = [group.figures[0] for group in page.groups]
    stages = network(
        page, {f.picture.id: own[f.row.capture_key.stats_key] for f in figures}
    )
    return [
        (stage.title, [step.group.layer for step in stage.steps]) for stage in stages
    ]


def test_layers_of_one_resolution_are_a_stage(tmp_path: Path) -> None:
    """In call order; single numbers belong to the maps between which they stand, or end
    it all."""
    large = {"tile": (8, 10)}
    small = {"tile": (4, 4)}
    single = {"tile": (2, 2)}
    drawn = [
        Drawn("b", index=9, **large),
        Drawn("a", index=1, **large),
        Drawn("c", index=2, **small),
        Drawn("squeeze", index=3, **single),
        Drawn("d", index=4, **small),
        Drawn("pool", index=5, **single),
    ]
    root = write_run(tmp_path / "out", {"a.png": drawn})
    assert titles(root) == [
        ("4×5", ["b", "a"]),
        ("2×2", ["c", "squeeze", "d"]),
        ("Vectors", ["pool"]),
    ]


def test_layers_are_in_the_models_order(tmp_path: Path) -> None:
    """By position, also where only a later image has the layer."""
    one, two, three = (Drawn(f"layer{n}", index=n) for n in (1, 2, 10))
    root = write_run(tmp_path / "out", {"a.png": [three], "b.png": [one, two, three]})
    _, layers = arrange(read_run(root))
    assert [page.name for page in layers] == ["layer1", "layer2", "layer10"]


def test_one_resolution_is_divided_by_module(tmp_path: Path) -> None:
    """As a transformer's blocks, where more than a dozen layers have maps of one size."""
    names = [f"blocks.{n}.{part}" for n in range(5) for part in ("norm", "attn", "mlp")]
    drawn = [Drawn(name, index=n, maps=2, nrow=2) for n, name in enumerate(names)]
    drawn.append(Drawn("head", index=99, maps=2, nrow=2, tile=(2, 2)))
    root = write_run(tmp_path / "out", {"a.png": drawn})
    assert [title for title, _ in titles(root)] == [
        *(f"blocks.{n}" for n in range(5)),
        "head",
    ]


def test_zeros_range_and_findings_are_those_of_all_images(tmp_path: Path) -> None:
    """On the page of the run; on the page of an image they are its own (numpy)."""
    second_stats = VALUES.copy()
    second_stats[1] = [0, 5, 1, 1, 0.5, 0]
    root = built(
        tmp_path / "out",
        {
            "a.png": [Drawn("x", stats=VALUES)],
            "b.png": [Drawn("x", stats=second_stats)],
        },
    )
    share = 100 * np.concatenate([VALUES, second_stats])[:, 4].mean()
    index, image = (pages(root)[f"{name}.html"].text for name in ("index", "image-000"))
    assert f"{share:.1f}\u00a0%" in index
    assert f"{100 * VALUES[:, 4].mean():.1f}\u00a0%" in image
    assert "−9 to 9" in index
    assert "1 all zero" not in index
    assert "1 all zero" in image
    assert "1 constant" in index
    assert "1 NaN or infinite" in index


def test_a_constant_gradient_and_a_single_number_are_no_finding() -> None:
    """Behind global pooling all gradients are constant maps, which says nothing."""

    def found(capture_kind: str, tile: tuple[int, int], times: int) -> set[str]:
        grid = {"nrow": 3, "padding": 2, "tile": list(tile), "scale": 1}
        fields = {
            "layer": "x",
            "type": "X",
            "index": 0,
            "call": 0,
            "key": "",
            "shape": [1, 6, *tile],
            "layout": "nchw",
            "maps": 6,
            "file": "x.png",
            "normalize": "map",
            "range": None,
            "min": 0.0,
            "max": 1.0,
            "mean": 0.0,
            "std": 0.0,
            "zero_fraction": 0.0,
            "nonfinite": 0,
        }
        totals = ChannelTotals()
        for _ in range(times):
            totals.add(Capture(kind=capture_kind, grid=grid, **fields), VALUES)  # type: ignore[arg-type]
        assert not set(totals.findings.get("constant", ())) & set(
            totals.findings.get("all zero", ())
        )
        return set(totals.findings)

    assert found("output", (4, 4), 1) == {"all zero", "constant", "NaN or infinite"}
    assert found("grad", (4, 4), 1) == {"NaN or infinite"}
    assert found("output", (1, 1), 1) == {"NaN or infinite"}
    assert found("output", (1, 1), 2) == {"all zero", "constant", "NaN or infinite"}


def test_rows_of_channels_hold_the_totals(tmp_path: Path) -> None:
    """Smallest, largest, mean and zeros over the images (numpy), at the channel's
    address."""
    second_stats = VALUES + np.float32([-1.2343, 2, 0.5126, 0, 0, 0])
    root = built(
        tmp_path / "out",
        {
            "a.png": [Drawn("x", stats=VALUES)],
            "b.png": [Drawn("x", stats=second_stats)],
        },
    )
    text = (root / "report" / "layer-000.html").read_text("utf-8")
    all_stats = np.stack([VALUES, second_stats])
    for channel in range(6):
        row = text.split(f'<tr id="c{channel}">')[1].split("</tr>")[0]
        cells = re.findall(r'<td class="n">([^<]*)</td>', row)
        low = all_stats[:, channel, 0].min()
        high = all_stats[:, channel, 1].max()
        mean = all_stats[:, channel, 2].mean()
        zeros = all_stats[:, channel, 4].mean()
        numbers = [f"{value:.4g}".replace("-", "−") for value in (low, high, mean)]
        assert cells == [*numbers, f"{100 * zeros:.1f}\u00a0%"]


def with_prediction(root: Path, scores: list[float]) -> str:
    """A report of a vector of ten values, whose second and fourth are the model's
    prediction."""
    stats = np.zeros((10, 6), np.float32)
    stats[:, 0] = stats[:, 1] = stats[:, 2] = np.arange(10) / 2
    fields = {"layout": "vector", "shape": [1, 10]}
    strip = Drawn(
        "fc", 10, nrow=10, padding=0, tile=(12, 12), scale=12, stats=stats, more=fields
    )
    write_run(root, {"a.png": [strip]})
    path = root / "a.png" / "manifest.json"
    content = json.loads(path.read_text())
    named = zip((9, 8), scores, ("tabby", "dog"), (0.75, 0.125), strict=True)
    content["prediction"] = [
        {"index": i, "score": score, "name": name, "probability": p}
        for i, score, name, p in named
    ]
    path.write_text(json.dumps(content))
    build_report(root, ReportOptions())
    return (root / "report" / "index.html").read_text("utf-8")


def test_a_vector_is_bars_with_the_names_of_classes(tmp_path: Path) -> None:
    """Only where its values are the scores of the prediction; lengths are in
    proportion."""
    page = with_prediction(tmp_path / "fits", [4.5, 4.0])
    bars = page.split('class="bars values"')[1].split("</table>")[0]
    assert re.findall(r'<a href="layer-000.html#c(\d)">([^<]*)<', bars)[:3] == [
        ("9", "tabby"),
        ("8", "dog"),
        ("7", "7"),
    ]
    lengths = [
        float(text) for text in re.findall(r'width="([\d.]+)" height="8"/>', bars)
    ]
    assert lengths == pytest.approx([100 * n / 9 for n in range(9, -1, -1)], abs=0.01)
    other_page = with_prediction(tmp_path / "other", [1.0, 2.0])
    assert (
        "tabby" not in other_page.split('class="bars values"')[1].split("</table>")[0]
    )
    assert "tabby" in other_page
    assert "75.0\u00a0%" in other_page
    assert "12.5\u00a0%" in other_page


BOTH = ("ReLU", "MaxPool2d")


def rectified(*dark: int) -> np.ndarray:
    """The statistics of six channels with zeros and nothing below, of which some are
    all zero."""
    stats = np.tile(np.float32([0, 3, 0.5, 1, 0.5, 0]), (6, 1))
    stats[list(dark)] = [0, 0, 0, 0, 1, 0]
    return stats


CONV = Drawn(
    "c", type="Conv2d", stats=np.tile(np.float32([-2, 3, 0.5, 1, 0, 0]), (6, 1))
)


@pytest.mark.parametrize(
    ("images", "channels"),
    [
        (
            [[Drawn("x", stats=rectified(*dark))] for dark in ((1, 5), (1, 3, 5))],
            "2 in 1 layer",
        ),
        ([[Drawn("x")]], "none in the one activation drawn"),
        ([[CONV]], "unknown: no activation was drawn"),
        ([[CONV, Drawn("b", type="Block", stats=rectified(4))]], "1 in 1 layer"),
        (
            [[Drawn("r", scale=1, tile=(1, 1))]],
            "unknown: only one value of each channel",
        ),
        (
            [
                [
                    Drawn(t, index=n, type=t, stats=rectified(1))
                    for n, t in enumerate(BOTH)
                ]
            ],
            "1 in 1 l",
        ),
    ],
)
def test_the_first_page_begins_with_the_dead_channels(
    tmp_path: Path, images: list[list[Drawn]], channels: str
) -> None:
    """Those that are zero in every image, with a link to their names: of activations
    only, which a convolution's output is not and a block's may be, and once for a
    pooling behind a ReLU."""
    root = built(
        tmp_path / "out", {f"{n}.png": drawn for n, drawn in enumerate(images)}
    )
    page = pages(root)["index.html"]
    where = "every image" if len(images) > 1 else "the image"
    assert f"Dead channels (zero in {where}): {channels}" in page.words
    if channels.startswith("unknown"):
        assert "No channel is dead" not in page.text
    else:
        text = (root / "report" / "index.html").read_text("utf-8")
        assert f'<a href="#findings">{channels}' in text


def test_the_first_page_says_what_dark_is(tmp_path: Path) -> None:
    """One key for all strips of a kind; a row tells its range, and a map its own."""
    stats = np.tile(np.float32([-2, 3, 1.5, 1, 0, 0]), (6, 1))
    keys = {
        ("map", None): "min max, scaled per map",
        ("layer", (-2, 3)): "min max, scaled per layer",
        ("symmetric", (-3, 3)): "− +, 0 in the middle, scaled per layer",
        ("range", (0, 3)): "≤ 0 3, one scale for all maps",
    }
    drawn = []
    for n, (mode, limits) in enumerate([*keys] * 2):
        fields = {
            "normalize": mode,
            "range": limits and list(limits),
            "min": -2.0,
            "max": 3.0,
        }
        drawn.append(Drawn(f"x{n}", stats=stats, index=n, more=fields))
    index = pages(built(tmp_path / "out", {"a.png": drawn}))["index.html"]
    assert all(index.words.count(key) == 1 for key in keys.values())
    assert index.words.count("range −2 to 3") == 8
    assert [a.get("title") for a in index.of("a")].count("Channel 0: −2 to 3") == 8


def text_of(root: Path, page: str, rows: list[Drawn], **options: Any) -> str:
    """The words on a page of the report of a run of one image."""
    write_run(root, {"a.png": rows}, options=options)
    build_report(root, ReportOptions())
    return read(root / "report" / page).words


def key_colors(root: Path, page: str) -> list[list[str]]:
    """The colours of each key on a page, from the darkest level to the brightest."""
    keys = re.findall(
        r'<p class="key">(.*?)</p>', (root / "report" / page).read_text("utf-8")
    )
    return [re.findall('fill="(#[0-9a-f]{6})"', key) for key in keys]


def hexes(name: str, levels: np.ndarray) -> list[str]:
    """Colours of matplotlib's colormap at some levels 0..1."""
    return [
        "#{:02x}{:02x}{:02x}".format(*rgb[:3])
        for rgb in colormaps[name](levels, bytes=True)
    ]


def scaled(low: float, high: float, mode: str, **more: Any) -> dict[str, Any]:
    """A row's entries for one scale of all maps."""
    return {"normalize": mode, "range": [low, high], **more}


def test_a_key_says_where_values_lie_beyond_its_ends(tmp_path: Path) -> None:
    """The values go from −1 to 6: an end that is not reached by them has no sign."""
    keys = {
        ("symmetric-percentile", -2, 2): "−2 ≥ 2, one scale for all maps",
        ("symmetric-percentile", -9, 9): "−9 9, one scale for all maps",
        ("range", 0, 9): "≤ 0 9, one scale for all maps",
        ("percentile", 0, 2): "≤ 0 ≥ 2, one scale for all maps",
        ("layer", -1, 6): "−1 6, one scale for all maps",
    }
    rows = [
        Drawn(
            f"x{n}",
            index=n,
            kind="grad",
            more=scaled(low, high, mode, min=-1.0, max=6.0),
        )
        for n, (mode, low, high) in enumerate(keys)
    ]
    root = built(tmp_path / "out", {"a.png": rows})
    for n, label in enumerate(keys.values()):
        text = read(root / "report" / f"layer-{n:03d}.html").words
        assert f" {label}" in text
        assert text.count("≤") == label.count("≤")


def test_the_gradient_of_an_image_and_its_saliency_have_their_own_colours(
    tmp_path: Path,
) -> None:
    """Coolwarm for a gradient, grey for the picture of all its channels, which has no
    sign."""
    signed = scaled(-2, 2, "symmetric-percentile")
    single = scaled(0, 2, "percentile", reduce="max-abs")
    rows = [
        Drawn("x", kind="grad-input", more=signed),
        Drawn(
            "x", kind="grad-input", key="saliency", nrow=1, more=single, channels=[0]
        ),
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


@pytest.fixture
def strip() -> Drawn:
    """The gradient behind a global pooling: a number for each of six constant maps of
    7×7."""
    stats = np.zeros((6, 6), np.float32)
    stats[:, :3] = np.array([0.5, -3, 1, -0.25, 2, 0])[:, None]
    own = scaled(-3, 3, "symmetric-percentile", constant=[1, 7, 7], shape=[1, 6, 7, 7])
    return Drawn(
        "x",
        kind="grad",
        nrow=6,
        padding=0,
        tile=(30, 12),
        scale=(30, 12),
        stats=stats,
        more=own,
    )


def test_a_strip_of_constant_maps_is_called_that(tmp_path: Path, strip: Drawn) -> None:
    """On the page of the image and of the layer; its shape is that of the maps, not of
    stripes."""
    text = text_of(tmp_path / "out", "image-000.html", [strip])
    assert "one stripe per channel, each map constant; one scale for all" in text
    assert "each map of 7×7 holds one value; drawn as a strip" in text
    assert "6 × 7×7, each constant" in text
    assert "6 values" not in text
    layer = read(tmp_path / "out" / "report" / "layer-000.html").words
    assert "one stripe per channel, each map constant" in layer


def test_the_bars_of_a_gradient_are_by_magnitude(tmp_path: Path, strip: Drawn) -> None:
    """The most negative entry comes first where it is the largest; outputs go by value."""
    text_of(tmp_path / "out", "index.html", [strip])
    page = (tmp_path / "out" / "report" / "index.html").read_text("utf-8")
    bars = page.split('class="bars values"')[1].split("</table>")[0]
    order = re.findall(r'href="layer-000.html#c(\d)"', bars)
    assert order == ["1", "4", "2", "0", "3", "5"]
    assert "Largest magnitudes of 6" in bars
    begins = [float(x) for x in re.findall(r'class="part" x="([\d.]+)"', bars)]
    assert begins == [0, 60, 60, 60, 55, 60]


def test_gradients_are_stages_of_their_own(tmp_path: Path, strip: Drawn) -> None:
    """Forward and backward at the same resolution are not mixed."""
    size = {"tile": (14, 14), "scale": 2}
    forward = [Drawn(name, index=n, **size) for n, name in enumerate("ab")]  # type: ignore[arg-type]
    backward = [strip, Drawn("b", kind="grad", index=1, **size)]  # type: ignore[arg-type]
    write_run(tmp_path / "out", {"a.png": [*forward, *backward]})
    build_report(tmp_path / "out", ReportOptions())
    text = (tmp_path / "out" / "report" / "index.html").read_text("utf-8")
    assert re.findall("<summary><h3>(.*?)</h3>", text) == ["7×7", "Gradients, 7×7"]


def test_slices_are_named(tmp_path: Path) -> None:
    """Those that the manifest has; where it names none, they are the first."""
    some = Drawn("x", slices=(3, 24), nrow=3, more={"steps": [0, 6, 23]})
    rows = [some, Drawn("y", index=2, slices=(3, 24), nrow=3)]
    text = text_of(tmp_path / "out", "image-000.html", rows)
    assert "for each channel 3 of 24: 0, 6, 23" in text
    assert "3 of 24: 0–2" in text
    crops = {
        a.get("viewbox") for a in read(tmp_path / "out/report/index.html").of("svg")
    }
    assert crops >= {f"2 {2 + 10 * channel} 10 8" for channel in range(6)}
    assert (
        "slices 3 of 24: 0–2"
        in read(tmp_path / "out" / "report" / "layer-001.html").words
    )


def test_no_marks_no_words_about_them(tmp_path: Path) -> None:
    """Under --no-marks no map is crossed out, and the legend speaks of none."""
    assert "crossed out" in text_of(tmp_path / "with", "layer-000.html", [Drawn("x")])
    assert "crossed out" not in text_of(
        tmp_path / "without", "layer-000.html", [Drawn("x")], marks=False
    )
