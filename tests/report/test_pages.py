"""What stands on the pages of a report: names, numbers, findings, legends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from conftest import Run
from matplotlib import colormaps
from PIL import Image
from rundirs import Drawn, write_image, write_run

from featviz.options.commands import ReportOptions
from featviz.report import build_report
from featviz.rundir.folder import Folder
from featviz.rundir.write import RunDirectory

from .markup import EVIL, HOSTILE, built, loaded, numbers, pages, script

MIDDLE = colormaps["coolwarm"](127 / 253, bytes=True)


def test_names_and_messages_are_text(gallery: Path) -> None:
    """Whatever a file, a layer or an error is called, it appears as it is; the run's
    page has the model, versions, layers, images, failures and what is incomplete."""
    gallery_pages = pages(gallery)
    # the scripts of the report: its own, of tiles, places and grids, and none besides
    assert all(len(page.of("script")) <= 7 for page in gallery_pages.values())
    assert HOSTILE in gallery_pages["index.html"].text
    assert EVIL in gallery_pages["index.html"].text
    assert HOSTILE in gallery_pages["image-002.html"].text
    assert EVIL in gallery_pages["layer-002.html"].text
    next_ones = [
        a["href"]
        for a in gallery_pages["image-001.html"].of("a")
        if a.get("rel") == "next"
    ]
    assert next_ones == ["image-002.html"]
    for page in gallery_pages.values():
        assert not any("onerror" in attributes for _, attributes in page.tags)
    text = gallery_pages["index.html"].text
    for expected in (
        "resnet18",
        "torch 2.15.0",
        "conv1",
        "relu",
        "bad.jpg",
        "it is truncated",
    ):
        assert expected in text
    assert "half.png" in text
    assert "incomplete: it has no manifest.json" in text
    assert "3 complete of 4, 1 failed, 1 incomplete" in text


def test_alternative_texts_and_sizes_of_all_pictures(gallery: Path) -> None:
    """Each says what it is and how large; sizes are those of the files (Pillow)."""
    for page in pages(gallery).values():
        for image in page.of("img"):
            assert image["src"] == "icon.svg" or image["alt"]
            if image["src"] == "icon.svg":
                continue
            with Image.open(gallery / "report" / unquote(str(image["src"]))) as picture:
                assert (
                    int(str(image["width"])),
                    int(str(image["height"])),
                ) == picture.size
            assert image["loading"] == "lazy"


def test_skipped_and_silent_layers_are_named(tmp_path: Path) -> None:
    """With the reason, and for how many images; on the images' pages too."""
    root = write_run(tmp_path / "out", {"a.png": [Drawn("conv1")]})
    skip = {
        "layer": "head",
        "type": "Head",
        "index": 9,
        "kind": "output",
        "call": 0,
        "key": "",
    }
    for name in ("b.png", "c.png"):
        skipped = [{**skip, "reason": "it is a string"}]
        write_image(RunDirectory(Folder.open(root)), name, [], skipped, ["aux.conv"])
    build_report(root, ReportOptions())
    index = (root / "report" / "index.html").read_text("utf-8")
    for reason in ("it is a string", "never ran"):
        assert f'<td>{reason}</td><td class="n">2</td>' in index
    for name in ("index.html", "image-001.html"):
        text = pages(root)[name].text
        assert "head" in text
        assert "it is a string" in text
        assert "aux.conv" in text
        assert "never ran" in text


def test_dark_in_every_image(gallery: Path) -> None:
    """Channels 1 and 5 are zero in all three images, 3 only in one."""
    page = pages(gallery)["layer-001.html"].text
    assert "2 channels all zero in every one of 3 images: 1, 5" in " ".join(
        page.split()
    )
    assert "3 channels all zero in the one image: 1, 3, 5" in " ".join(page.split())
    index = (gallery / "report" / "index.html").read_text("utf-8")
    row = (
        index.split('id="layers-table"')[1]
        .split("<code>relu</code>")[1]
        .split("</tr>")[0]
    )
    assert re.findall(r'class="n">([^<]*)<', row) == ["6", "45.8\u00a0%", "5", "0"]


def test_the_numbers_of_the_pages_are_those_of_stats_npz(tmp_path: Path) -> None:
    """Bit for bit, on the page of the image and on that of the layer: random, equal,
    not finite."""
    rng = np.random.default_rng(0)
    values = rng.random((6, 6), dtype=np.float32)
    nan = np.full((6, 6), [np.nan, 1, -0.0, 0, 0, 4], np.float32)
    nan[2, 1] = np.inf
    layers = [
        (f"x{n}", stats)
        for n, stats in enumerate([values, nan, 0 * values, values[::-1]])
    ]
    names = [f"{n}.png" for n in range(9)]
    drawn = [
        Drawn(layer, index=n, stats=stats) for n, (layer, stats) in enumerate(layers)
    ]
    root = built(tmp_path / "out", dict.fromkeys(names, drawn))
    assert max(len(script(path)) for path in (root / "report").glob("grids-*.js")) == 16
    for image, layer in ((0, 0), (3, 1), (7, 3), (8, 2)):
        with np.load(root / names[image] / "stats.npz") as arrays:
            expected = arrays[f"x{layer}|output|0|"]
        for page in (f"image-{image:03d}.html", f"layer-{layer:03d}.html"):
            page_numbers = numbers(loaded(root, page)[f"p{image}-{layer}"])
            assert page_numbers.tobytes() == expected.tobytes(), page


def test_the_numbers_of_a_grid_stand_once(gallery: Path) -> None:
    """In one script, which all pages load that show the grid."""
    held = [
        id for path in (gallery / "report").glob("grids-*.js") for id in script(path)
    ]
    assert len(held) == len(set(held)) == 3 + 2 + 3
    for name, page in pages(gallery).items():
        shown = {str(tag["data-grid"]) for tag in page.of("div") if "data-grid" in tag}
        assert shown <= loaded(gallery, name).keys()
        assert bool(shown) == name.startswith(("image", "layer"))


def test_geometry_of_the_script_is_the_manifests(tmp_path: Path) -> None:
    """nrow, padding, tile, slices and the channels that were drawn."""
    drawn = Drawn(
        "x", maps=9, channels=[2, 5], slices=(2, 7), nrow=3, padding=1, tile=(6, 4)
    )
    root = built(tmp_path / "out", {"a.png": [drawn]})
    geometry = loaded(root, "image-000.html")["p0-0"]
    assert (geometry["nrow"], geometry["padding"], geometry["tile"]) == (3, 1, [6, 4])
    assert (geometry["slices"], geometry["channels"], geometry["maps"]) == (
        2,
        [2, 5],
        9,
    )
    with Image.open(next(root.rglob("output.png"))) as picture:
        assert geometry["size"] == list(picture.size)
    text = pages(root)["image-000.html"].text
    assert "2 of 9" in text
    assert "for each channel 2 of 7: 0–1" in text


def test_compared_runs_stand_side_by_side(root: Path, tmp_path: Path) -> None:
    """Figures of the same tensor of the same image; both runs are named; the rest is
    untouched."""
    new_run = write_run(
        tmp_path / "new#2", {"a.png": [Drawn("relu", index=7, shade=99)]}
    )
    build_report(root, ReportOptions(compare=new_run))
    page = pages(root)["image-000.html"]
    pictures = [i for i in page.of("img") if "output.png" in str(i["src"])]
    sources = [unquote(str(i["src"])) for i in pictures if " of a.png" in str(i["alt"])]
    assert sources == [
        "../a.png/001_conv1/output.png",
        "../a.png/002_relu/output.png",
        "../../new#2/a.png/007_relu/output.png",
    ]
    assert "new#2" in page.text
    assert "out, compared with new#2" in pages(root)["index.html"].text
    assert "new#2" not in "".join(
        str(tag) for tag in pages(root)["image-001.html"].tags
    )


@pytest.mark.parametrize(
    ("normalize", "cmap", "entries"),
    [
        (
            "map",
            "grey",
            {
                "crossed out: zero everywhere": "#000000",
                "one line across: constant": "#808080",
                "NaN or infinite": "#ff00ff",
            },
        ),
        ("layer", "viridis", {"one scale for all maps of an image: min": "#440154"}),
        ("symmetric", "coolwarm", {"zero": "#{:02x}{:02x}{:02x}".format(*MIDDLE[:3])}),
    ],
)
def test_the_legend_says_what_colours_mean(
    tmp_path: Path, normalize: str, cmap: str, entries: dict[str, str]
) -> None:
    """By scale and colormap; the colours are matplotlib's."""
    options = {"normalize": normalize, "cmap": cmap}
    drawn = Drawn("x", more={"normalize": normalize})
    root = built(tmp_path / "out", {"a.png": [drawn]}, options=options)
    for name in ("image-000.html", "layer-000.html"):
        text = (root / "report" / name).read_text("utf-8")
        for meaning, color in entries.items():
            assert f'fill="{color}"/></svg>{meaning}</li>' in text


def test_one_tile_of_all_channels_is_called_that(featviz: Run, tmp_path: Path) -> None:
    """No channel's numbers are its; the numbers that are told are those of all
    channels."""
    fields = {"reduce": "pca", "normalize": "range", "range": [-2.0, 2.0]}
    drawn = Drawn("x", nrow=1, channels=[0], more=fields)
    root = built(tmp_path / "out", {"a.png": [drawn]})
    page = pages(root)["image-000.html"]
    assert (
        "Maps6, as one tile: their principal components 1 to 3 (--reduce pca)"
        in page.words
    )
    assert ", of all channels Mean" in page.words
    assert "crossed out" not in page.words
    assert "each component from −2 to 2 standard deviations" in page.words
    assert "much of the first principal component" in page.words
    assert loaded(root, "image-000.html")["p0-0"]["channels"] == []
    alt = "principal components 1 to 3 of 6 feature maps of x, output, of a.png"
    assert alt in [i["alt"] for i in page.of("img")]
    sheet = tmp_path / "sheet.png"
    done = featviz("sheet", root, "--layers", "x", "--out", sheet, "--json")
    assert done.code == 0
    assert json.loads(done.out)["channels"] == {"x": []}
    done = featviz("sheet", root, "--layers", "x", "--channels", "0")
    assert done.code == 2
    assert "all channels of x are one tile" in done.err


def test_an_overlay_has_no_marks(tmp_path: Path) -> None:
    """Its legend says what the colours over the input are, which are those of --cmap
    auto."""
    options = {"normalize": "map", "cmap": "auto"}
    drawn = Drawn("x", more={"overlay": 0.6})
    root = built(tmp_path / "out", {"a.png": [drawn]}, options=options)
    text = pages(root)["image-000.html"].words
    assert "scaled per map, 60.0 % over the input" in text
    assert "over the input: min of each map" in text
    assert "crossed out" not in text
    assert loaded(root, "image-000.html")["p0-0"]["over"] is True
    page = (root / "report" / "image-000.html").read_text()
    for color in colormaps["viridis"]([0.0, 1.0], bytes=True)[:, :3]:
        assert 'fill="#{:02x}{:02x}{:02x}"'.format(*color) in page


def test_the_option_that_left_maps_out_is_named(tmp_path: Path) -> None:
    """--collapse, --channels, or both; who shares a tile; and the order."""
    shared = {"collapsed": {"1": [1, 2, 4]}}
    drawn = [
        Drawn("alike", index=1, channels=[3, 0, 5, 1], nrow=2, more=shared),
        Drawn("picked", index=2, channels=[0, 3], nrow=2),
        Drawn("both", index=3, channels=[1, 5], nrow=2, more=shared),
        Drawn("all", index=4),
    ]
    options = {"pick": "top", "order": "similarity"}
    root = built(tmp_path / "out", {"a.png": drawn}, options=options)
    text = pages(root)["image-000.html"].words
    assert (
        "Maps4 of 6 (--collapse) Share a tile1 for 1–2, 4 Orderby similarity (--order)"
        in text
    )
    assert "Maps2 of 6 Range" in text
    assert "Maps2 of 6 (--collapse) Share a tile" in text
    assert "Maps6 Range" in text
    assert loaded(root, "image-000.html")["p0-0"]["collapsed"] == {"1": [1, 2, 4]}


def test_an_unknown_colormap_has_no_colours(tmp_path: Path) -> None:
    """A run of a later matplotlib: the legend leaves out what it cannot show."""
    root = built(tmp_path / "out", {"a.png": [Drawn("x")]}, options={"cmap": "no such"})
    assert "NaN or infinite" in pages(root)["image-000.html"].text
