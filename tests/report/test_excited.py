"""Exemplars on the pages of layers and channels."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rundirs import Drawn, write_run

from featviz.errors import StoreError
from featviz.report import ReportOptions, build_report

from .markup import EVIL, Markup, read


def write_exemplars(root: Path, layer: str = "conv1", **changed: Any) -> Path:
    """A folder as `featviz exemplars` writes it: two channels, of which the second has none."""
    folder = root / "001_conv1" / "output"
    folder.mkdir(parents=True)
    Image.new("RGB", (50, 30)).save(root / "001_conv1" / "output.png")
    Image.new("RGB", (70, 40)).save(folder / "c00000.png")
    best = {"image": EVIL, "number": 0, "value": 2.5, "place": None, "map": None, "box": None}
    channels = [
        {"channel": 0, "file": "001_conv1/output/c00000.png", "exemplars": [best]},
        {"channel": 1, "file": None, "exemplars": []},
    ]
    own = {
        "layer": layer, "type": "Conv2d", "index": 1, "call": 0, "key": "", "class_name": None,
        "shape": [1, 2, 4, 4], "layout": "nchw", "sheet": "001_conv1/output.png",
        "receptive_field": {"how": "computed", "size": [3, 5]}, "channels": channels,
    }  # fmt: skip
    content = {
        "schema_version": 1, "featviz": "1", "torch": "2", "torchvision": "0", "device": "cpu",
        "model": {}, "preprocessing": "", "options": {"by": "max", "top": 9}, "shard": None,
        "images": {"total": 4, "seen": 4, "failures": []}, "skipped": [], "never_ran": [],
        "layers": [own | changed],
    }  # fmt: skip
    (root / "exemplars.json").write_text(json.dumps(content))
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one layer."""
    drawn = Drawn("conv1", index=1, type="Conv2d", maps=2)
    return write_run(tmp_path / "out", {"a.png": [drawn]})


def test_the_page_of_a_layer_has_its_exemplars(run: Path, tmp_path: Path) -> None:
    """The sheet as a picture, the pictures of channels for the script, and what a unit sees."""
    found = write_exemplars(tmp_path / "found")
    build_report(run, ReportOptions(exemplars=found))
    page = read(run / "report" / "layer-000.html")
    assert "of 4 images those with the largest value; a unit sees 3×5 pixels" in page.text
    own = json.loads(
        next(str(a["data-exemplars"]) for a in page.of("details") if "data-exemplars" in a)
    )
    assert list(own) == ["0"]
    assert (run / "report" / own["0"][0]["src"]).resolve() == found / "001_conv1/output/c00000.png"
    assert (own["0"][0]["width"], own["0"][0]["height"]) == (70, 40)
    assert own["0"][0]["alt"].endswith(f"{EVIL} 2.5")
    sheets = [a for a in page.of("img") if "Exemplars of all channels" in str(a["alt"])]
    assert [(a["width"], a["height"]) for a in sheets] == [("50", "30")]


def test_one_file_and_a_zip_file_have_them_too(run: Path, tmp_path: Path) -> None:
    """One file has the sheet inside; its size counts."""
    found = write_exemplars(tmp_path / "found")
    out = tmp_path / "one.html"
    build_report(run, ReportOptions(exemplars=found, single_file=True, out=out))
    shown = [a for a in read(out).of("img") if "Exemplars of all channels" in str(a["alt"])]
    assert str(shown[0]["src"]).startswith("data:image/png;base64,")
    build_report(run, ReportOptions(exemplars=found, zip=True))
    with zipfile.ZipFile(run / "report.zip") as packed:
        page = Markup(packed.read("layer-000.html").decode())
        own = next(a["data-exemplars"] for a in page.of("details") if "data-exemplars" in a)
        best = packed.read(json.loads(str(own))["0"][0]["src"])
    assert best == (found / "001_conv1/output/c00000.png").read_bytes()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sheet": "../../secret.png"}, "is no name of a sheet"),
        ({"sheet": "001_conv1/output.call7.png"}, "is missing"),
        ({"layer": "elsewhere"}, "has exemplars of no layer of this run"),
    ],
)
def test_exemplars_that_do_not_fit(
    run: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    """Each is refused in a line of its own, before anything is written."""
    found = write_exemplars(tmp_path / "found", **changed)
    with pytest.raises(StoreError, match=message):
        build_report(run, ReportOptions(exemplars=found))
    assert not (run / "report").exists()


def test_a_picture_that_is_a_link_or_no_picture(run: Path, tmp_path: Path) -> None:
    """Nothing is followed out of the folder, and nothing but PNG is taken for one."""
    found = write_exemplars(tmp_path / "found")
    sheet = found / "001_conv1" / "output.png"
    sheet.write_bytes(b"GIF89a")
    with pytest.raises(StoreError, match="is no PNG"):
        build_report(run, ReportOptions(exemplars=found))
    sheet.unlink()
    sheet.symlink_to(found / "001_conv1" / "output" / "c00000.png")
    with pytest.raises(StoreError, match="found"):
        build_report(run, ReportOptions(exemplars=found))


@pytest.mark.slow
def test_the_page_of_a_channel_begins_with_its_exemplars(
    browser: Any, run: Path, tmp_path: Path
) -> None:
    """The channel that has a picture shows it at once; the other shows none."""
    build_report(run, ReportOptions(exemplars=write_exemplars(tmp_path / "found")))
    browser.get_log("browser")
    address = (run / "report" / "layer-000.html").as_uri()
    for channel, count in ((0, 1), (1, 0)):
        browser.get("about:blank")
        browser.get(f"{address}#c{channel}")
        shown = browser.find_elements("css selector", ".channel .sought img")
        assert len(shown) == count
        for image in shown:
            browser.execute_script("return arguments[0].decode()", image)
            assert browser.execute_script("return arguments[0].naturalWidth", image) == 70
    assert browser.get_log("browser") == []
