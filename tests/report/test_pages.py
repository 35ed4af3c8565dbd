"""What stands on the pages of a report: names, numbers, findings, legends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from conftest import Run
from matplotlib import colormaps
from PIL import Image
from rundirs import Drawn, write_image, write_run

from featviz.options.commands import ReportOptions
from featviz.report import build_report
from featviz.report.depth_chart import depth_chart
from featviz.rundir.folder import Folder
from featviz.rundir.write import RunDirectory

from .markup import (
    EVIL,
    HOSTILE,
    Markup,
    assert_says,
    built,
    loaded,
    numbers,
    page_of,
    pages,
    script,
    source,
)


def color_code(rgb: Any) -> str:
    """`#rrggbb` of the first three numbers."""
    return "#" + bytes(rgb[:3]).hex()


def targets_in(page: Markup) -> list[str]:
    """The ids that links of a page lead to, but for that of its main part."""
    targets = []
    for address in page.values("a", "href"):
        if address.startswith("#") and address != "#main":
            targets.append(address[1:])
    return targets


@pytest.mark.parametrize("name", ["index.html", "image-002.html", "layer-002.html"])
def test_jumps_lead_to_parts_of_the_page(name: str, gallery: Path) -> None:
    """Each to the one element that has this id."""
    page = page_of(gallery, name)
    targets = targets_in(page)
    ids = [str(attributes["id"]) for _, attributes in page.tags if "id" in attributes]
    assert {"class": "jumps", "aria-label": "On this page"} in page.of("nav")
    assert len(targets) > 1
    assert [ids.count(target) for target in targets] == [1] * len(targets)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("index.html", [HOSTILE, EVIL]),
        ("image-002.html", [HOSTILE]),
        ("layer-002.html", [EVIL]),
    ],
)
def test_hostile_names_are_text(gallery: Path, name: str, texts: list[str]) -> None:
    """What a file, a layer or an error is called appears as it is, and makes no
    element."""
    page = page_of(gallery, name)
    assert_says(page.text, *texts)
    assert not any("onerror" in attributes for _, attributes in page.tags)
    # the scripts of the report: its own, of tiles, places and grids, and none besides
    assert len(page.of("script")) <= 7


def test_the_first_page_tells_the_run(gallery: Path) -> None:
    """It has the model, versions, layers, failures, and what is incomplete."""
    assert_says(
        page_of(gallery).text,
        "resnet18",
        "torch 2.15.0",
        "conv1",
        "relu",
        "bad.jpg",
        "it is truncated",
        "half.png",
        "incomplete: it has no manifest.json",
        "3 images of 4, 1 failed, 1 incomplete",
    )


def test_the_page_of_an_image_leads_to_the_next(gallery: Path) -> None:
    """The link has the relation `next`."""
    links = page_of(gallery, "image-001.html").of("a")
    following = [link["href"] for link in links if link.get("rel") == "next"]
    assert following == ["image-002.html"]


@pytest.mark.medium
def test_pictures_have_texts_and_sizes(gallery: Path) -> None:
    """Each says what it is and how large; sizes are those of the files (Pillow)."""
    for page in pages(gallery).values():
        for image in page.of("img"):
            if image["src"] == "icon.svg":
                continue
            with Image.open(gallery / "report" / unquote(str(image["src"]))) as picture:
                size = picture.size
            assert image["alt"]
            assert image["loading"] == "lazy"
            assert (image["width"], image["height"]) == tuple(map(str, size))


SKIP = {
    "layer": "head",
    "type": "Head",
    "index": 9,
    "kind": "output",
    "call": 0,
    "key": "",
    "reason": "it is a string",
}
"""Of a manifest: a layer's call that gave nothing to draw."""


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    """A report of three images, two of which have a layer that was skipped, and one
    that never ran."""
    root = write_run(tmp_path / "out", {"a.png": [Drawn("conv1")]})
    run = RunDirectory(Folder.open(root))
    for name in ("b.png", "c.png"):
        write_image(run, name, [], [SKIP], ["aux.conv"])
    build_report(root, ReportOptions())
    return root


@pytest.mark.medium
@pytest.mark.parametrize("name", ["index.html", "image-001.html"])
def test_skipped_and_silent_layers_are_named(silent: Path, name: str) -> None:
    """Each has its reason, on the page of the run and on those of images."""
    page = page_of(silent, name)
    assert_says(page.text, "head", "it is a string", "aux.conv", "never ran")


@pytest.mark.medium
@pytest.mark.parametrize("reason", ["it is a string", "never ran"])
def test_the_first_page_counts_images_without_a_layer(
    silent: Path, reason: str
) -> None:
    """The reason stands beside the number of its images."""
    assert f'<td>{reason}</td><td class="n">2</td>' in source(silent)


def test_an_image_counts_once_for_all_calls_that_were_skipped(tmp_path: Path) -> None:
    """Of a layer that was skipped at two calls in one image, and at three in another,
    the first page counts two images."""
    root = write_run(tmp_path / "out", {"a.png": [Drawn("conv1")]})
    run = RunDirectory(Folder.open(root))
    for name, calls in (("b.png", 2), ("c.png", 3)):
        skips = [{**SKIP, "call": call} for call in range(calls)]
        write_image(run, name, [], skips)
    build_report(root, ReportOptions())
    assert re.findall(r'a string</td><td class="n">(\d+)<', source(root)) == ["2"]


def test_dark_in_every_image(gallery: Path) -> None:
    """Channels 1 and 5 are zero in all three images, 3 only in one; the first page has
    the counts."""
    assert_says(
        page_of(gallery, "layer-001.html").text,
        "2 channels all zero in every one of 3 images: 1, 5",
        "3 channels all zero in the one image: 1, 3, 5",
    )
    rows = table_rows(gallery)
    # shares of zeros of six channels: 3 in one image and 2.5 in two; 3 in one image
    assert rows["relu"] == ["6", "44.4\u00a0%", "2", "0"]
    assert rows["relu.call1"] == ["6", "50.0\u00a0%", "3", "0"]


def table_rows(root: Path) -> dict[str, list[str]]:
    """The numbers of each row in the table of layers, by what the row is called."""
    table = source(root).split('id="layers-table"')[1].split("</table>")[0]
    rows = {}
    for text in table.split("<tr ")[1:]:
        name = re.search("<code>(.*?)</code></a> <small>(.*?)</small>", text)
        assert name is not None
        numbers = re.findall(r'class="n">([^<]*)<', text)
        rows[" ".join(name.groups()).strip().replace("<wbr>", "")] = numbers
    return rows


def test_tensors_stand_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    """In the table and among the findings, not in the model's order, each call of a
    layer by itself, and gradients behind the outputs."""
    dark = np.zeros((6, 6), np.float32)
    dark[:, 4] = 1
    drawn = [
        Drawn("conv", index=1, maps=5),
        Drawn("act", index=3, stats=dark),
        Drawn("down", index=2, stats=dark),
        Drawn("act", index=3, call=1, stats=dark),
        Drawn("act", index=3, call=1, kind="grad"),
        Drawn("act", index=3, kind="grad"),
    ]
    root = built(tmp_path / "out", {"a.png": drawn, "b.png": drawn})

    names = ["conv", "act", "down", "act.call1", "act.call1 grad", "act grad"]
    assert list(table_rows(root)) == names
    findings = source(root).split('class="findings">')[1].split("</ul>")[0]
    assert re.findall("<code>(.*?)</code>", findings) == [
        "act",
        "down",
        "act.<wbr>call1",
    ]


@pytest.mark.parametrize(("count", "is_folded"), [(12, False), (13, True)])
def test_more_than_twelve_findings_are_folded(
    count: int, is_folded: bool, tmp_path: Path
) -> None:
    """With their number."""
    dark = np.zeros((6, 6), np.float32)
    dark[:, 4] = 1
    drawn = [Drawn(f"relu{n}", index=n, stats=dark) for n in range(count)]
    text = source(built(tmp_path / "out", {"a.png": drawn}))
    assert (f"<summary>{count} findings</summary>" in text) == is_folded


@pytest.mark.parametrize(("count", "is_open"), [(60, True), (61, False)])
def test_the_table_of_many_layers_is_folded(
    count: int, is_open: bool, tmp_path: Path
) -> None:
    """Up to sixty it is open."""
    drawn = [Drawn(f"conv{n}", index=n, maps=1) for n in range(count)]
    text = source(built(tmp_path / "out", {"a.png": drawn}))
    assert ('<details class="table" data-stage open>' in text) == is_open


def test_one_value_that_is_not_finite_is_not_one_in_every_image(
    tmp_path: Path,
) -> None:
    """A channel that is all zero is so in each; a single NaN need not be."""
    broken = Drawn("relu").numbers
    broken[0, 5] = 1
    images = {"a.png": [Drawn("relu", stats=broken)], "b.png": [Drawn("relu")]}
    text = page_of(built(tmp_path / "out", images)).text
    assert "1 channel NaN or infinite: 0" in text


def test_the_table_counts_zeros_that_are_no_finding(tmp_path: Path) -> None:
    """One value of one image is no map that is dark."""
    stats = np.zeros((6, 6), np.float32)
    stats[:2, 4] = 1
    stats[2:, :3] = 1
    fields = {"layout": "vector", "shape": [1, 6]}
    drawn = Drawn("fc", nrow=6, stats=stats, more=fields)
    text = source(built(tmp_path / "out", {"a.png": [drawn]}))
    row = text.split("<td>ReLU</td>")[1].split("</tr>")[0]
    assert re.findall('<td class="n">([^<]*)</td>', row)[2:] == ["2", "0"]


RANDOM = np.random.default_rng(0).random((6, 6), dtype=np.float32)
NOT_FINITE = np.full((6, 6), [np.nan, 1, -0.0, 0, 0, 4], np.float32)
NOT_FINITE[2, 1] = np.inf


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of nine images and four layers, whose statistics are random, not finite,
    and equal."""
    layers = [RANDOM, NOT_FINITE, 0 * RANDOM, RANDOM[::-1]]
    drawn = [Drawn(f"x{n}", index=n, stats=stats) for n, stats in enumerate(layers)]
    names = [f"{n}.png" for n in range(9)]
    out = tmp_path_factory.mktemp("measured") / "out"
    return built(out, dict.fromkeys(names, drawn))


@pytest.mark.parametrize(("image", "layer"), [(0, 0), (3, 1), (7, 3), (8, 2)])
def test_the_numbers_of_the_pages_are_those_of_stats_npz(
    measured: Path, image: int, layer: int
) -> None:
    """They are equal bit for bit, on the page of the image and on that of the layer."""
    with np.load(measured / f"{image}.png" / "stats.npz") as arrays:
        expected = arrays[f"x{layer}|output|0|"]
    for name in (f"image-{image:03d}.html", f"layer-{layer:03d}.html"):
        shown = numbers(loaded(measured, name)[f"p{image}-{layer}"])
        assert shown.tobytes() == expected.tobytes(), name


def test_a_script_has_at_most_sixteen_grids(measured: Path) -> None:
    """A page of a few grids does not load those of the whole run."""
    scripts = (measured / "report").glob("grids-*.js")
    assert max(len(script(path)) for path in scripts) == 16


@pytest.mark.medium
def test_the_numbers_of_a_grid_stand_once(gallery: Path) -> None:
    """Each grid is in one script, which every page loads that shows it."""
    grids: list[str] = []
    for path in (gallery / "report").glob("grids-*.js"):
        grids += script(path)
    assert len(grids) == len(set(grids)) == 3 + 2 + 3
    for name, page in pages(gallery).items():
        shown = page.values("div", "data-grid")
        assert set(shown) <= loaded(gallery, name).keys()
        assert bool(shown) == name.startswith(("image", "layer"))


def test_geometry_of_the_script_is_the_manifests(tmp_path: Path) -> None:
    """The script has nrow, padding, tile, slices and the channels that were drawn."""
    drawn = Drawn(
        "x", maps=9, channels=[2, 5], slices=(2, 7), nrow=3, padding=1, tile=(6, 4)
    )
    root = built(tmp_path / "out", {"a.png": [drawn]})
    with Image.open(next(root.rglob("output.png"))) as picture:
        size = picture.size
    expected = {
        "nrow": 3,
        "padding": 1,
        "tile": [6, 4],
        "slices": 2,
        "channels": [2, 5],
        "maps": 9,
        "size": list(size),
    }
    geometry = loaded(root, "image-000.html")["p0-0"]
    assert expected.items() <= geometry.items()
    assert_says(
        page_of(root, "image-000.html").text, "2 of 9", "for each channel 2 of 7: 0–1"
    )


@pytest.mark.medium
def test_compared_runs_stand_side_by_side(root: Path, tmp_path: Path) -> None:
    """Pictures of the same tensor of the same image are neighbours, both runs are named,
    and images of one run alone are as without."""
    drawn = Drawn("relu", index=7, shade=99)
    other_run = write_run(tmp_path / "new#2", {"a.png": [drawn]})
    build_report(root, ReportOptions(compare=other_run))
    page = page_of(root, "image-000.html")
    pictures = page.pictures(" of a.png")
    assert [unquote(str(image["src"])) for image in pictures] == [
        "../a.png/input.png",
        "../a.png/001_conv1/output.png",
        "../a.png/002_relu/output.png",
        "../../new#2/a.png/007_relu/output.png",
        "../a.png/002_relu/output.call1.png",
    ]
    assert "new#2" in page.text
    assert "out, compared with new#2" in page_of(root).text
    assert "new#2" not in str(page_of(root, "image-001.html").tags)


@pytest.mark.parametrize(
    ("normalize", "cmap", "entries"),
    [
        (
            "map",
            "grey",
            {
                "crossed out: zero everywhere": ("#000000", 2, "#808080"),
                "one line across: constant": ("#808080", 1, "#000000"),
                "NaN or infinite": ("#ff00ff", 0, ""),
            },
        ),
        ("layer", "viridis", {"NaN or infinite": ("#ff00ff", 0, "")}),
        ("symmetric", "coolwarm", {"NaN or infinite": ("#ff00ff", 0, "")}),
    ],
)
def test_the_legend_says_what_colours_mean(
    tmp_path: Path,
    normalize: str,
    cmap: str,
    entries: dict[str, tuple[str, int, str]],
) -> None:
    """What is true of all pictures of the page, and no end of a scale, which stands
    beside the pictures that have it; with the lines of the marks on tiles."""
    options = {"normalize": normalize, "cmap": cmap}
    drawn = Drawn("x", more={"normalize": normalize})
    root = built(tmp_path / "out", {"a.png": [drawn]}, options=options)
    for name in ("image-000.html", "layer-000.html"):
        mark = r'<path d="([^"]+)" stroke="(#\w{6})"/>'
        swatch = rf'fill="(#\w{{6}})"/>(?:{mark})?</svg>([^<]+)</li>'
        found = {}
        for color, lines, ink, meaning in re.findall(swatch, source(root, name)):
            found[meaning] = (color, lines.count("M"), ink)
        assert found == entries


@pytest.fixture
def reduced(tmp_path: Path) -> Path:
    """A report of a run with one tile for all channels of a layer."""
    fields = {"reduce": "pca", "normalize": "range", "range": [-2.0, 2.0]}
    drawn = Drawn("x", nrow=1, channels=[0], more=fields)
    return built(tmp_path / "out", {"a.png": [drawn]})


def test_one_tile_of_all_channels_is_called_that(reduced: Path) -> None:
    """No channel's numbers are its own: those that stand there are of all channels."""
    page = page_of(reduced, "image-000.html")
    assert_says(
        page.text,
        "Maps6, as one tile: their principal components 1 to 3 (--reduce pca)",
        ", of all channels Mean",
        "each component from −2 to 2 standard deviations",
        "much of the first principal component",
    )
    assert "crossed out" not in page.text
    assert loaded(reduced, "image-000.html")["p0-0"]["channels"] == []
    alt = "principal components 1 to 3 of 6 feature maps of x, output, of a.png"
    assert alt in page.values("img", "alt")


def test_a_sheet_has_one_tile_of_all_channels(
    featviz: Run, reduced: Path, tmp_path: Path
) -> None:
    """Its document lists no channel, and a channel that is asked for is refused."""
    sheet = ("sheet", reduced, "--layers", "x", "--out", tmp_path / "sheet.png")
    done = featviz(*sheet, "--json")
    assert json.loads(done.out)["channels"] == {"x": []}
    done = featviz(*sheet, "--channels", "0")
    assert done.code == 2
    assert "all channels of x are one tile" in done.err


def test_an_overlay_has_no_marks(tmp_path: Path) -> None:
    """Its key says what the colours over the input are, which are those of --cmap
    auto."""
    options = {"normalize": "map", "cmap": "auto"}
    drawn = Drawn("x", more={"overlay": 0.6})
    root = built(tmp_path / "out", {"a.png": [drawn]}, options=options)
    page = page_of(root, "image-000.html")
    assert "min max, scaled per map, 60.0 % over the input" in page.text
    assert "crossed out" not in page.text
    assert loaded(root, "image-000.html")["p0-0"]["over"] is True
    for rgb in colormaps["viridis"]([0.0, 1.0], bytes=True):
        assert f'fill="{color_code(rgb)}"' in source(root, "image-000.html")


@pytest.mark.medium
def test_the_option_that_left_maps_out_is_named(tmp_path: Path) -> None:
    """The page names --collapse, --channels or both, the channels that share a tile,
    and the order."""
    shared = {"collapsed": {"1": [1, 2, 4]}}
    drawn = [
        Drawn("alike", index=1, channels=[3, 0, 5, 1], nrow=2, more=shared),
        Drawn("picked", index=2, channels=[0, 3], nrow=2),
        Drawn("both", index=3, channels=[1, 5], nrow=2, more=shared),
        Drawn("all", index=4),
    ]
    options = {"pick": "top", "order": "similarity"}
    root = built(tmp_path / "out", {"a.png": drawn}, options=options)
    assert_says(
        page_of(root, "image-000.html").text,
        "Maps4 of 6 (--collapse) Share a tile1 for 1–2, 4 Orderby similarity (--order)",
        "Maps2 of 6 Range",
        "Maps2 of 6 (--collapse) Share a tile",
        "Maps6 Range",
    )
    assert loaded(root, "image-000.html")["p0-0"]["collapsed"] == {"1": [1, 2, 4]}


def test_an_unknown_colormap_has_no_colours(tmp_path: Path) -> None:
    """Of a colormap of a later matplotlib the legend leaves out what it cannot show."""
    root = built(tmp_path / "out", {"a.png": [Drawn("x")]}, options={"cmap": "no such"})
    assert "NaN or infinite" in page_of(root, "image-000.html").text


def test_the_axis_of_a_comparison_has_its_unit() -> None:
    """Its ends are round numbers: of SQNR decibels, of the cosine numbers alone."""
    layers: Any = [
        SimpleNamespace(label="conv", sqnr=38.0, cosine=0.999),
        SimpleNamespace(label="head", sqnr=21.5, cosine=0.97),
    ]
    chart = depth_chart(layers)
    assert chart is not None
    ends = {curve.name: (curve.low, curve.high) for curve in chart.curves}
    assert ends == {"SQNR": ("20 dB", "40 dB"), "cosine": ("0.95", "1")}
