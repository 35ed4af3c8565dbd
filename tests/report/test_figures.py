"""Figures of `run --figure` on the pages of layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from rundirs import Drawn, without_sums, write_run

from featviz.report import ReportOptions, build_report
from featviz.rundir.read import read_run

from .markup import EVIL, read


def with_figure(root: Path, content: bytes | None = None) -> Path:
    """A run of one image and one layer, whose figure has 120×80 pixels, or holds these bytes."""
    write_run(root, {"a.png": [Drawn("conv1"), Drawn("relu", index=2)]})
    figure = root / "a.png" / "001_conv1" / "output.figure.png"
    Image.effect_noise((120, 80), 90).save(figure)
    if content is not None:
        figure.write_bytes(content)
    path = root / "a.png" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["captures"][0]["figure"] = "001_conv1/output.figure.png"
    path.write_text(json.dumps(manifest))
    without_sums(root / "a.png")
    return root


def shown(page: Path) -> list[dict[str, str | None]]:
    """The figures on a page."""
    return [i for i in read(page).of("img") if str(i["alt"]).startswith("Figure of")]


def test_the_page_of_a_layer_shows_its_figures(tmp_path: Path) -> None:
    """The file of the run, of its own size, on that page only."""
    root = with_figure(tmp_path / "run")
    build_report(root, ReportOptions())
    (image,) = shown(root / "report" / "layer-000.html")
    where = (root / "report" / str(image["src"])).resolve()
    assert where == (root / "a.png" / "001_conv1" / "output.figure.png").resolve()
    assert (image["width"], image["height"]) == ("120", "80")
    assert image["alt"] == "Figure of conv1, output, of a.png"
    for other in ("layer-001.html", "image-000.html", "index.html"):
        assert shown(root / "report" / other) == []


def test_one_file_leaves_figures_out_before_anything_else(tmp_path: Path) -> None:
    """It shows them where they fit, and else says that it does not."""
    root, out = with_figure(tmp_path / "run"), tmp_path / "one.html"
    build_report(root, ReportOptions(single_file=True, out=out))
    (image,) = shown(out)
    assert str(image["src"]).startswith("data:image/png;base64,")
    most = out.stat().st_size - 4000
    result = build_report(root, ReportOptions(single_file=True, out=out, max_size=most))
    assert shown(out) == [] and result.tiles is None and not result.smaller
    assert "it leaves out the run’s figures (--figure)" in read(out).text
    assert "large maps" not in read(out).text


@pytest.mark.parametrize("content", [b"GIF89a", EVIL.encode(), b""])
def test_a_figure_that_is_no_png(tmp_path: Path, content: bytes) -> None:
    """Its image is damaged, and is named with the file."""
    root = with_figure(tmp_path / "run", content)
    run = read_run(root)
    assert not run.images and "output.figure.png" in run.damaged["a.png"]
    assert "is no PNG" in run.damaged["a.png"]
