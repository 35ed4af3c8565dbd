"""Where a result may be written: apart from what is read; and whose folder it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from featviz.errors import UsageError
from featviz.rundir.destination import check_apart
from featviz.rundir.ownership import holds_run, of_run


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with a file, a link to it from elsewhere, and a link to the folder."""
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"")
    (tmp_path / "linked.jpg").symlink_to(folder / "cat.jpg")
    (tmp_path / "album").symlink_to(folder)
    return folder


@pytest.mark.parametrize(
    "way", ["photos/cat.jpg", "linked.jpg", "album/cat.jpg", "photos/../photos"]
)
def test_an_input_inside_is_in_the_way(photos: Path, way: str) -> None:
    """By its own path, by a link to it, and through a folder that is a link."""
    inputs = [photos.parent / "other.jpg", photos.parent / way]
    with pytest.raises(UsageError, match=r"holds the input|is the input"):
        check_apart(photos, "--out", inputs)
    check_apart(photos.parent / "out", "--out", inputs)


def test_the_place_of_a_link_is_in_the_way(photos: Path) -> None:
    """A link that leads elsewhere would be written over."""
    (photos / "dog.jpg").symlink_to(photos.parent / "elsewhere.jpg")
    with pytest.raises(UsageError, match="holds the input"):
        check_apart(photos, "--out", [photos / "dog.jpg"])


@pytest.mark.parametrize(
    ("changes", "is_run"),
    [({}, True), ({"kind": "kernels"}, True), ({"kind": "x"}, False), ({"model": 1}, False)],
)
def test_a_folder_holds_a_run_by_its_record_alone(
    tmp_path: Path, changes: dict[str, Any], is_run: bool
) -> None:
    """The quick look says what the whole claim says."""
    texts = {"featviz": "1", "torch": "2", "model": {}, "options": {}, "layers": []}
    images = {"images": {"total": 0, "complete": []}, "failures": []}
    record = {"schema_version": 2, **texts, **images, **changes}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert holds_run(tmp_path) is is_run
    assert (of_run(tmp_path) is not None) is is_run
    assert not holds_run(tmp_path / "none")
