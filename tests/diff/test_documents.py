"""What `featviz diff` writes: its page, difference maps and JUnit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image
from report.markup import Markup
from rundirs import Drawn, write_run

from featviz import __version__
from featviz.rundir import REPORT_ASSETS

from .changed_network import CHANGED, CLI, Run, documented, drawn, nan_bias, one_weight

HOSTILE = "<img src=x onerror=alert(1)> & 'b'.png"
LOST = "<u onclick=alert(2)>.png"


def check_nothing_is_inline(page: Markup) -> None:
    """No style, script or handler, nor a frame of another page."""
    assert not {tag for tag, _ in page.tags} & {"style", "iframe"}
    names = {name for _, attributes in page.tags for name in attributes}
    assert not {name for name in names if name.startswith(("on", "style"))}
    assert page.inline.strip() == ""


def links_of(page: Markup) -> list[str]:
    """What its pictures, scripts and references lead to."""
    return [str(a[name]) for _, a in page.tags for name in ("src", "href") if name in a]


def test_the_page(featviz: CLI, run: Run, photos: Path, tmp_path: Path) -> None:
    """Nothing inline, escaped names, links that lead to files, and a pair with its
    difference."""
    (photos / "b.png").rename(photos / HOSTILE)
    (photos / "a.png").rename(photos / LOST)
    base = run("base", images=photos / HOSTILE)
    new = run("<i>new", change=one_weight)
    html = tmp_path / "pages" / "a diff#1.html"
    done = featviz("diff", base, new, "--html", html)
    assert done.code == 4
    page = Markup(html.read_text("utf-8"))
    check_nothing_is_inline(page)
    links = links_of(page)
    assert not any(" " in link for link in links)
    pictures = [link for link in links if link.endswith(".png")]
    # of the three layers that differ: the input, before, after, and the difference
    assert len(pictures) == 3 * 4
    for link in (link for link in links if not link.startswith("#")):
        path = unquote(link.partition("#")[0])
        assert (html.parent / path).is_file(), link
    for text in (HOSTILE, "first at 2 (Conv2d)", f"image {LOST} (not there)", str(new)):
        assert text in page.text


def test_the_page_tells_what_interventions_did(
    featviz: CLI, run: Run, tmp_path: Path
) -> None:
    """At the top, beside the verdict; and the options in which the runs differ."""
    base = run("base")
    new = run("new", "--ablate", f"2:{CHANGED}")
    assert featviz("diff", base, new, "--html", tmp_path / "d.html").code == 4
    text = (tmp_path / "d.html").read_text("utf-8")
    assert f"<b>Changed while NEW ran:</b> ablate 2:{CHANGED}" in text
    assert "Changed while BASE ran" not in text
    assert text.count("first to diverge") == 1
    assert text.index("first to diverge") > text.index('data-layer="2"')
    assert featviz("diff", base, base, "--html", tmp_path / "d.html").code == 0
    same = (tmp_path / "d.html").read_text("utf-8")
    assert "<b>Equal</b>" in same
    assert "data-group" not in same


def test_difference_maps(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """Each pixel has the colour of its signed difference, on one scale for all
    pictures."""
    base = run("base", "--tensors", "npy")
    new = run("new", "--tensors", "npy", change=one_weight)
    _, document = documented(featviz, base, new, "--out", tmp_path / "maps")
    pictures = drawn(tmp_path / "maps")
    assert list(pictures) == ["2 (Conv2d)", "3 (ReLU)", "4 (Conv2d)"]
    limits = {row["limit"] for row in document["maps"]}
    assert len(limits) == 1
    limit = limits.pop()
    worst = max(max(layer["channels"]["relative"]) for layer in document["layers"])
    assert limit == pytest.approx(worst)
    colors = colormaps["coolwarm"](np.linspace(0, 1, 254), bytes=True)[:, :3]
    for row in document["maps"]:
        file = f"{row['image']}/{int(row['label']) + 1:03d}_{row['label']}/output.npy"
        b, n = (np.load(root / file)[0].astype(np.float64) for root in (base, new))
        signed = (n - b) / (
            np.maximum(abs(b), abs(n)) + max(abs(b).max(), abs(n).max())
        )
        assert row["source"] == "kept tensors"
        picture = pictures[
            f"{row['label']} ({'ReLU' if row['label'] == '3' else 'Conv2d'})"
        ]
        assert picture.text["Channels"] == ",".join(map(str, row["channels"]))  # type: ignore[attr-defined]
        tile = tile_of(np.asarray(picture.convert("RGB")), row, signed.shape[1:])
        levels = np.floor(
            (signed[row["channels"][0]] / limit + 1) / 2 * 253 + 0.5
        ).astype(int)
        np.testing.assert_array_equal(tile, colors[levels])
    assert document["maps"][0]["channels"] == [CHANGED]


def test_before_and_after_share_a_scale_and_an_order(
    featviz: CLI, run: Run, tmp_path: Path
) -> None:
    """A level is the same value in both pictures: its share of the span of both."""
    base = run("base", "--tensors", "npy")
    new = run("new", "--tensors", "npy", change=one_weight)
    _, document = documented(featviz, base, new, "--out", tmp_path / "maps")
    row = next(row for row in document["maps"] if row["label"] == "4")
    low, high = row["range"]
    for root, file in ((base, row["before"]), (new, row["after"])):
        maps = np.load(root / row["image"] / "005_4" / "output.npy")[0]
        with Image.open(tmp_path / "maps" / file) as picture:
            assert picture.text["Channels"].split(",") == [*map(str, row["channels"])]  # type: ignore[attr-defined]
            pixels = np.asarray(picture.convert("RGB"))[..., 0]
        shown = maps[row["channels"][0]]
        expected = np.floor((shown - low) / (high - low) * 253 + 0.5) * 255 / 253
        tile = tile_of(pixels, row, shown.shape)
        np.testing.assert_allclose(tile, expected, atol=1.01)


def tile_of(
    pixels: np.ndarray, one: dict[str, Any], size: tuple[int, ...]
) -> np.ndarray:
    """The first map of a picture, at its own size: 96 pixels are enough, and all gaps
    are alike."""
    factor = -(-96 // max(size))
    tile = size[1] * factor
    columns = pixels.shape[1] // tile
    at = (pixels.shape[1] - columns * tile) // (columns + 1)
    return pixels[at : at + size[0] * factor : factor, at : at + tile : factor]


def test_what_is_not_finite_on_one_side_is_magenta(
    featviz: CLI, run: Run, tmp_path: Path
) -> None:
    """All of the channel that became NaN."""
    featviz(
        "diff", run("base"), run("new", change=nan_bias), "--out", tmp_path / "maps"
    )
    picture = drawn(tmp_path / "maps")["2 (Conv2d)"]
    assert picture.text["Channels"] == str(CHANGED)  # type: ignore[attr-defined]
    magenta = (np.asarray(picture.convert("RGB")) == (255, 0, 255)).all(axis=2)
    assert magenta.sum() == 96 * 96


def test_the_folder_of_the_maps(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """It has the document, and its files; an earlier result is replaced whole."""
    base = run("base")
    new = run("new", change=one_weight)
    maps = tmp_path / "d-maps"
    html = tmp_path / "d.html"
    document = documented(featviz, base, new, "--html", html)[1]
    assert len(drawn(maps)) == 3
    assert len(list(maps.glob("*.png"))) == 3 * 3
    written = json.loads((maps / "diff.json").read_text("utf-8"))
    files = written.pop("files")
    version = written.pop("featviz")
    assert sorted(files) == sorted(
        p.name for p in maps.iterdir() if p.name != "diff.json"
    )
    assert version == __version__
    assert written == document
    assert featviz("diff", base, base, "--html", html).code == 0
    remaining = sorted(path.name for path in maps.iterdir())
    assert remaining == sorted(["diff.json", "grids.js", *REPORT_ASSETS])


def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two images, six channels: channel 1 differs in both, 4 in one, and 1 is constant
    in NEW."""
    base = np.tile(np.float32([-2, 3, 0.5, 1, 0, 0]), (6, 1))
    flat = base.copy()
    other = base.copy()
    flat[1] = other[1] = [-9, -9, -9, 0, 0, 0]
    other[4, :2] = [-2, 2]
    before = {name: [Drawn("x", stats=base)] for name in ("a.png", "b.png")}
    after = {"a.png": [Drawn("x", stats=other)], "b.png": [Drawn("x", stats=flat)]}
    return write_run(tmp_path / "base", before), write_run(tmp_path / "new", after)


def test_of_many_layers_the_first_and_the_worst_are_drawn(
    featviz: CLI, tmp_path: Path
) -> None:
    """Sixty of 62, in the order of the model."""
    runs = [
        [Drawn(f"l{n}", index=n, shade=20 + n * more) for n in range(1, 63)]
        for more in (0, 3)
    ]
    sides = (
        write_run(tmp_path / f"{n}", {"a.png": rows}) for n, rows in enumerate(runs)
    )
    featviz("diff", *sides, "--out", tmp_path / "maps")
    expected = [f"l{n} (ReLU)" for n in (1, *range(4, 63))]
    assert list(drawn(tmp_path / "maps")) == expected


def test_channels_are_counted_once_whatever_the_images(
    featviz: CLI, tmp_path: Path
) -> None:
    """In the line, the table and on the page; JSON and the gate count each in each
    image."""
    base, new = two_runs(tmp_path)
    page = tmp_path / "d.html"
    done = featviz("diff", base, new, "--html", page)
    assert "2 of 6 channels differ (3 of 12 counted in each image, 25.00%)" in done.out
    assert "2/6" in done.out
    assert "2 of 6 channels" in page.read_text()
    document = json.loads(featviz("diff", base, new, "--json").out)
    assert document["channels"] == {"differing": 3, "total": 12, "ratio": 0.25}
    assert featviz("diff", base, new, "--max-diff-ratio", 0.25).code == 0
    assert featviz("diff", base, new, "--max-diff-ratio", 0.24).code == 4


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_no_text(featviz: CLI, tmp_path: Path) -> None:
    """An image named in bytes that are no UTF-8 is told in documents."""
    base = write_run(
        tmp_path / "base", {"a.png": [Drawn("x")], "b\udcff.png": [Drawn("x")]}
    )
    new = write_run(tmp_path / "new", {"a.png": [Drawn("x")]})
    done = featviz(
        "diff", base, new, "--html", tmp_path / "d.html", "--junit", tmp_path / "d.xml"
    )
    assert done.code == 4
    assert "b?.png" in (tmp_path / "d.html").read_text("utf-8")
    assert "b\N{REPLACEMENT CHARACTER}.png" in (tmp_path / "d.xml").read_text("utf-8")
