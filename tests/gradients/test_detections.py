"""The boxes of a detector in manifests, JSON lines and reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from detectors import CELL, PLAIN, SIDE, RedDetector, squares
from PIL import Image
from tiles import manifest

import featviz as fv
from featviz.models.preprocess import Chain, Preprocess
from featviz.records import Detection
from featviz.run.prepare import ModelInput

pytestmark = pytest.mark.medium


SQUARES = squares(5)[1]
BOXES = [list(square.box(scale=2)) for square in SQUARES]
"""Of both squares, in pixels of the file."""


@pytest.fixture
def photo() -> Path:
    """Two red squares in a file of twice the size of the detector's input."""
    image, _ = squares(5)
    path = Path("photo.png")
    image.resize((2 * SIDE, 2 * SIDE), Image.Resampling.NEAREST).save(path)
    return path


def run(photo: Path, **options: Any) -> Any:
    return fv.run(RedDetector(), photo, "backbone.*", "out", **{**PLAIN, **options})


def test_a_manifest_has_the_boxes_in_pixels_of_the_file(photo: Path) -> None:
    """Each has its class and score; beside them stands where the image lies in the
    input."""
    run(photo)

    content = manifest(Path("out/photo.png"))
    first, second = content["detections"]
    assert [first["box"], second["box"]] == BOXES
    assert first["index"] == second["index"] == 1
    assert first["name"] is None
    assert first["score"] > second["score"] > 0
    assert content["input"]["window"] == [0, 0, SIDE, SIDE]


def test_results_have_the_boxes_of_new_and_of_earlier_images(photo: Path) -> None:
    """A run that is resumed reads them from the manifest."""
    drawn = run(photo).images[0]
    resumed = run(photo, resume=True).images[0]

    assert resumed.kept
    assert [list(detection.box) for detection in drawn.detections] == BOXES
    assert [list(detection.box) for detection in resumed.detections] == BOXES


def test_boxes_of_a_cropped_image_lie_in_the_file(photo: Path) -> None:
    """The input is the middle of a wider file: the boxes are moved by what was cut
    off."""
    wide = Image.new("RGB", (4 * SIDE, 2 * SIDE))
    with Image.open(photo) as square:
        wide.paste(square, (SIDE, 0))
    wide.save(photo)

    run(photo, crop=SIDE)

    content = manifest(Path("out/photo.png"))
    moved = [list(square.box(scale=2, offset=SIDE)) for square in SQUARES]
    assert [row["box"] for row in content["detections"]] == moved
    assert content["input"]["window"] == [0, -SIDE // 2, SIDE, 2 * SIDE]


def test_boxes_are_stretched_with_their_image() -> None:
    """Across and down by themselves, and end at the edges of the file."""
    image = ModelInput(
        images=(Image.new("RGB", (80, 100)),),
        sha256="",
        args=[torch.zeros(1, 3, 20, 40)],
        preprocess=Preprocess(Chain(resize=(20, 40))),
        words="",
        window=None,
    )
    inside = Detection((4.0, 2.0, 8.0, 6.0), index=0, name=None, score=0.5)
    beyond = Detection((-1.0, -1.0, 41.0, 21.0), index=0, name=None, score=0.5)
    boxes = [detection.box for detection in image.in_file([inside, beyond])]
    assert boxes == [(8.0, 10.0, 16.0, 30.0), (0, 0, 80, 100)]


EDGES = r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"/>'


@pytest.fixture
def report(photo: Path) -> Path:
    """The report of a run of the detector on a file that its input has half as wide, and
    a quarter as high."""
    with Image.open(photo) as image:
        high = image.resize((2 * SIDE, 4 * SIDE), Image.Resampling.NEAREST)
    high.save(photo)
    run(photo, size=(SIDE, SIDE))
    fv.report("out")
    return Path("out/report")


@pytest.mark.parametrize("page", ["index.html", "image-000.html"])
def test_a_report_draws_the_boxes_on_the_input(page: str, report: Path) -> None:
    """They are in pixels of the input, and a table has their numbers and classes."""
    text = (report / page).read_text()

    picture = text.split('<div class="boxed">')[1].split("</svg>")[0]
    assert f'viewBox="0 0 {SIDE} {SIDE}"' in picture
    drawn = [tuple(map(float, edge)) for edge in re.findall(EDGES, picture)]
    assert drawn == [(square.x, square.y, CELL, CELL) for square in SQUARES]
    assert re.findall(r">(\d+)</text>", picture) == ["0", "1"]
    table = text.split("<caption>Boxes</caption>")[1].split("</table>")[0]
    headings = re.findall(r'<th scope="row">([^<]*)</th>', table)
    assert headings == ["0 class 1", "1 class 1"]
