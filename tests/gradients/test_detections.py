"""The boxes of a detector in manifests, JSON lines and reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from detectors import CELL, PLAIN, SIDE, RedDetector, squares
from PIL import Image

import featviz as fv

TWICE = 2 * CELL


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """Two red squares in a file of twice the size of the detector's input."""
    image, _ = squares(5)
    path = tmp_path / "photo.png"
    image.resize((2 * SIDE, 2 * SIDE), Image.Resampling.NEAREST).save(path)
    return path


def expected_boxes() -> list[list[int]]:
    """Of both squares, in pixels of the file."""
    _, corners = squares(5)
    return [
        [x * TWICE, y * TWICE, (x + 1) * TWICE, (y + 1) * TWICE] for x, y in corners
    ]


def run(photo: Path, out: Path, **options: Any) -> Any:
    return fv.run(RedDetector(), photo, "backbone.*", out, **PLAIN, **options)


def test_a_manifest_has_the_boxes_in_pixels_of_the_file(
    photo: Path, tmp_path: Path
) -> None:
    """With class and score; beside them, where the image lies in the input. The result
    in Python has the same, also of an image that an earlier run has drawn."""
    found = run(photo, tmp_path / "out")
    manifest = json.loads((tmp_path / "out/photo.png/manifest.json").read_text())
    first, second = manifest["detections"]
    assert [first["box"], second["box"]] == expected_boxes()
    assert first["index"] == second["index"] == 1
    assert first["name"] is None
    assert first["score"] > second["score"] > 0
    assert manifest["input"]["window"] == [0, 0, SIDE, SIDE]
    again = run(photo, tmp_path / "out", resume=True)
    for result in (found, again):
        boxes = [list(detection.box) for detection in result.images[0].detections]
        assert boxes == expected_boxes()
    assert again.images[0].kept


def test_boxes_of_a_cropped_image_lie_in_the_file(tmp_path: Path, photo: Path) -> None:
    """The input is the middle of a wider file: the boxes are moved by what was cut
    off."""
    wide = Image.new("RGB", (4 * SIDE, 2 * SIDE))
    with Image.open(photo) as square:
        wide.paste(square, (SIDE, 0))
    wide.save(photo)
    options = {"preset": "none", "size": SIDE, "crop": SIDE}
    fv.run(RedDetector(), photo, "backbone.*", tmp_path / "out", **options)
    manifest = json.loads((tmp_path / "out/photo.png/manifest.json").read_text())
    moved = [[x0 + SIDE, y0, x1 + SIDE, y1] for x0, y0, x1, y1 in expected_boxes()]
    assert [row["box"] for row in manifest["detections"]] == moved
    assert manifest["input"]["window"] == [0, -SIDE // 2, SIDE, 2 * SIDE]


def test_a_report_draws_the_boxes_on_the_input(photo: Path, tmp_path: Path) -> None:
    """On its first page and on that of the image, in pixels of the input; a table has
    their numbers, classes and scores."""
    run(photo, tmp_path / "out")
    fv.report(tmp_path / "out")
    for name in ("index.html", "image-000.html"):
        text = (tmp_path / "out/report" / name).read_text()
        seen = text.split('<div class="boxed">')[1].split("</svg>")[0]
        assert f'viewBox="0 0 {SIDE} {SIDE}"' in seen
        edges = re.findall(
            r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"/>',
            seen,
        )
        found = [[float(number) for number in edge] for edge in edges]
        expected = [[x0 / 2, y0 / 2, CELL, CELL] for x0, y0, _, _ in expected_boxes()]
        assert found == expected
        table = text.split("<caption>Boxes</caption>")[1].split("</table>")[0]
        assert re.findall(r'<th scope="row">([^<]*)</th>', table) == [
            "0 class 1",
            "1 class 1",
        ]
