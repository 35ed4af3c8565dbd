"""Manifests, as they are read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rundirs import Drawn, write_image

from featviz.records import Detection
from featviz.rundir.folder import Folder
from featviz.rundir.image import ImageFields, Input, Manifest, read_manifest
from featviz.rundir.write import RunDirectory

Files = list[dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda files: files[1:], "files lacks 001_relu/output.png"),
        (lambda files: [*files, {**files[0], "file": "x.png"}], "files lists x.png"),
        (lambda files: [*files, files[0]], "files lists a file twice"),
    ],
)
def test_a_list_of_files_that_is_not_that_of_the_rows(
    change: Callable[[Files], Files], fault: str, tmp_path: Path
) -> None:
    """What is not listed has no checksum."""
    store = RunDirectory(Folder.open(tmp_path))
    folder = write_image(store, "a.png", [Drawn("relu")])
    content = json.loads((folder / "manifest.json").read_text())
    content["files"] = change(content["files"])
    with pytest.raises(ValueError, match=f"^{fault}$"):
        read_manifest(json.dumps(content).encode())


@pytest.mark.parametrize("size", [{}, {"width": 8}, {"width": 0, "height": 8}])
def test_an_image_without_pixels_is_refused(
    size: dict[str, int], tmp_path: Path
) -> None:
    """A report would divide by its sides."""
    store = RunDirectory(Folder.open(tmp_path))
    folder = write_image(store, "a.png", [Drawn("relu")])
    content = json.loads((folder / "manifest.json").read_text())
    content["image"]["size"] = size
    with pytest.raises(ValueError, match="size"):
        read_manifest(json.dumps(content).encode())


def test_boxes_lie_in_an_input_that_was_stretched() -> None:
    """An image of 100 x 50 pixels in a window of 200 x 200."""
    manifest = Manifest(
        schema_version=2,
        image=ImageFields("a.png", "", size={"width": 100, "height": 50}),
        input=Input([1, 3, 220, 220], "", window=[10, 20, 200, 200]),
        captures=[],
        skipped=[],
        never_ran=[],
        files=[],
        detections=[Detection((10, 5, 30, 25), 0, None, 0.5)],
    )
    assert manifest.boxes == [(20 + 20, 10 + 20, 40, 80)]
