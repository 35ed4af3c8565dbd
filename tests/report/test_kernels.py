"""Kernels beside the channels that they make: `report --kernels`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SCENES, Outcome
from PIL import Image

from .browsing import Page
from .markup import read


@pytest.fixture
def both(featviz: Callable[..., Outcome], tiny_file: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run of a small network, and the kernels of its convolutions."""
    run, kernels = tmp_path / "out", tmp_path / "kernels #1"
    size = ("--size", 24, "--crop", 24)
    image = SCENES / "spheres.jpg"
    done = featviz("run", tiny_file, image, "--layers", "*", *size, "--out", run)
    assert done.code == 0, done.err
    assert featviz("kernels", tiny_file, "--out", kernels).code == 0
    return run, kernels


def test_kernels_stand_on_the_pages_of_their_layers(
    featviz: Callable[..., Outcome], both: tuple[Path, Path]
) -> None:
    """Each convolution has its picture, with the numbers of its scale; other layers have none."""
    run, kernels = both
    assert featviz("report", run, "--kernels", kernels).code == 0
    rows = json.loads((kernels / "manifest.json").read_text())["captures"]
    shown = {}
    for path in sorted((run / "report").glob("layer-*.html")):
        page = read(path)
        pictures = [str(a["src"]) for a in page.of("img") if "kernel" in str(a["alt"])]
        shown |= {page.text.split("Layer\n")[1].split()[0]: pictures} if pictures else {}
    assert shown.keys() == {row["layer"] for row in rows}
    for row in rows:
        assert shown[row["layer"]] == [f"../../kernels%20%231/{row['file']}"]


@pytest.mark.slow
def test_a_channel_shows_its_kernel(
    featviz: Callable[..., Outcome], both: tuple[Path, Path], browser: Any
) -> None:
    """The box that is cut out of the picture is the tile of the channel (geometry by numpy)."""
    run, kernels = both
    assert featviz("report", run, "--kernels", kernels).code == 0
    row = json.loads((kernels / "manifest.json").read_text())["captures"][0]
    pages = {read(path).text.split("Layer\n")[1].split()[0]: path.name
             for path in (run / "report").glob("layer-*.html")}  # fmt: skip
    page = Page(browser, run).open(f"{pages[row['layer']]}#c2")
    box = page.one(".known svg.crop").get_dom_attribute("viewBox")
    down, across = np.unravel_index(2 * row["slices"], (row["maps"], row["grid"]["nrow"]))
    step = np.add(row["grid"]["tile"], row["grid"]["padding"])
    top, left = np.multiply((down, across), step) + row["grid"]["padding"]
    assert box == f"{left} {top} {row['grid']['tile'][1]} {row['grid']['tile'][0]}"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: shutil.rmtree(p), "it has no run.json"),
        (lambda p: (p / "run.json").write_text('{"schema_version": 1}'), "holds no kernels"),
        (lambda p: next(p.rglob("kernel.png")).unlink(), "kernel.png is missing"),
        (lambda p: Image.new("L", (3, 3)).save(next(p.rglob("kernel.png"))), "has 3×3 pixels"),
        (lambda p: (p / "manifest.json").write_text('{"schema_version": 1}'), "captures is null"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    ],
)
def test_what_holds_no_kernels_is_refused(
    featviz: Callable[..., Outcome],
    both: tuple[Path, Path],
    damage: Callable[[Path], object],
    words: str,
) -> None:
    """In one line that names the file, and nothing is written."""
    run, kernels = both
    damage(kernels)
    done = featviz("report", run, "--kernels", kernels)
    assert done.code == 1 and words in done.err and "Traceback" not in done.err
    assert not (run / "report").exists()


@pytest.mark.parametrize("value", ["../x.png", "/etc/passwd.png", 3])
def test_a_kernels_picture_is_inside_its_folder(
    featviz: Callable[..., Outcome], both: tuple[Path, Path], value: object
) -> None:
    """A manifest of somebody else names no other file."""
    run, kernels = both
    path = kernels / "manifest.json"
    content = json.loads(path.read_text())
    content["captures"][0]["file"] = value
    path.write_text(json.dumps(content))
    done = featviz("report", run, "--kernels", kernels)
    assert done.code == 1 and "captures[0].file" in done.err


def test_a_kernel_of_three_inputs_has_no_grey_key(
    featviz: Callable[..., Outcome], both: tuple[Path, Path]
) -> None:
    """It is drawn as red, green and blue, and the page says so with the limits of its scale."""
    run, kernels = both
    rows = json.loads((kernels / "manifest.json").read_text())["captures"]
    (colored,) = [row for row in rows if row["layout"] == "rgb"]
    assert featviz("report", run, "--kernels", kernels).code == 0
    texts = [read(path).text for path in (run / "report").glob("layer-*.html")]
    low, high = (f"{value:.4g}".replace("-", "−") for value in colored["range"])
    words = f"red, green and blue, each from {low} to {high}"
    assert [words in text for text in texts].count(True) == 1
