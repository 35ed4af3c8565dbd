"""A run directory that earlier code wrote (see tests/data) is read, continued and replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import DIGITS, DIGITS_MODEL, ROOT, Outcome
from PIL import Image

CLI = Callable[..., Outcome]

OLD = ROOT / "tests" / "data" / "run-0.1.0"
PICTURES = (DIGITS / "00-5.png", DIGITS / "01-8.png")
NAMES = [path.name for path in PICTURES]
OPTIONS = (
    *("--layers", "Conv2d#0,ReLU#0,Linear#-1", "--max-maps", "4", "--scale", "1"),
    *("--capture", "output,grad", "--target", "top1", "-q"),
    *("--padding", "2"),  # black, as 0.1.0 had it by default
)
VERSIONS = ("featviz", "torch", "torchvision")


def run(featviz: CLI, out: Path, *options: object) -> Outcome:
    """The command that wrote the old run, into another folder."""
    return featviz("run", DIGITS_MODEL, *PICTURES, *OPTIONS, "--out", out, *options)


@pytest.fixture
def fresh(featviz: CLI, tmp_path: Path) -> Path:
    """What the same command writes today."""
    done = run(featviz, tmp_path / "fresh")
    assert done.code == 0, done.err
    return tmp_path / "fresh"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the old run that may be written into."""
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def record(root: Path) -> dict[str, Any]:
    """The content of run.json."""
    content: dict[str, Any] = json.loads((root / "run.json").read_text("utf-8"))
    return content


def files(root: Path) -> dict[str, bytes]:
    """All files of a folder with their bytes."""
    paths = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def with_versions_of(root: Path, other: Path) -> None:
    """Let run.json name the versions that another run names, and the manifests its fingerprint."""
    versions = {name: record(other)[name] for name in VERSIONS}
    (root / "run.json").write_text(json.dumps(record(root) | versions), "utf-8")
    for name in NAMES:
        path, fresh = (folder / name / "manifest.json" for folder in (root, other))
        fingerprint = json.loads(fresh.read_text("utf-8"))["fingerprint"]
        content = json.loads(path.read_text("utf-8")) | {"fingerprint": fingerprint}
        path.write_text(json.dumps(content), "utf-8")


def test_a_report_shows_an_old_run(featviz: CLI, old: Path) -> None:
    """A page for each image and layer, nothing left out."""
    done = featviz("report", old, "--json")
    assert (done.code, done.err) == (0, "")
    names = {Path(path).name for path in json.loads(done.out)["files"]}
    assert {"index.html", "image-001.html", "layer-002.html"} <= names
    page = (old / "report" / "index.html").read_text("utf-8")
    assert all(name in page for name in NAMES)


def test_a_sheet_is_cut_from_an_old_run(featviz: CLI, tmp_path: Path) -> None:
    """Every drawn channel of both images, for outputs and for gradients."""
    for stem in ("output", "grad"):
        out = tmp_path / f"{stem}.png"
        done = featviz("sheet", OLD, "--layer", "0", "--tensor", stem, "--out", out, "--json")
        assert done.code == 0, done.err
        assert json.loads(done.out) == {
            "file": str(out),
            "images": NAMES,
            "channels": [0, 1, 2, 3],
        }
        with Image.open(out) as sheet:
            assert sheet.width > 2 * 28 and sheet.height > 4 * 28


def test_a_fresh_run_equals_the_old_one(featviz: CLI, fresh: Path) -> None:
    """diff compares every tensor and finds no difference."""
    done = featviz("diff", OLD, fresh, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["equal"] and found["images"] == NAMES and len(found["layers"]) == 6


def test_an_old_run_is_merged_with_a_new_one(
    featviz: CLI, old: Path, fresh: Path, tmp_path: Path
) -> None:
    """Parts with one image each, one of them old, become a run of both."""
    with_versions_of(old, fresh)
    for root, other in ((old, NAMES[1]), (fresh, NAMES[0])):
        shutil.rmtree(root / other)
        own = record(root)
        images = {"total": 1, "complete": [name for name in NAMES if name != other]}
        (root / "run.json").write_text(json.dumps(own | {"images": images}), "utf-8")
    done = featviz("merge", old, fresh, "--out", tmp_path / "both", "-q")
    assert done.code == 0, done.err
    assert record(tmp_path / "both")["images"]["complete"] == NAMES
    assert featviz("diff", OLD, tmp_path / "both").code == 0


def test_resume_goes_on_with_an_old_run(featviz: CLI, old: Path, fresh: Path) -> None:
    """An image that is complete stays to the byte, one that is missing is drawn, and the result is
    the old run."""
    with_versions_of(old, fresh)
    shutil.rmtree(old / NAMES[1])
    kept = files(old / NAMES[0])
    done = run(featviz, old, "--resume")
    assert done.code == 0, done.err
    assert files(old / NAMES[0]) == kept
    assert record(old)["images"]["complete"] == NAMES
    assert featviz("diff", OLD, old).code == 0


def test_resume_names_the_version_that_differs(featviz: CLI, old: Path) -> None:
    """A run of other versions is another run: refused, with the field, and untouched."""
    (old / "run.json").write_text(json.dumps(record(old) | {"torch": "1.0"}), "utf-8")
    before = files(old)
    done = run(featviz, old, "--resume")
    assert done.code == 1 and 'its torch is "1.0"' in done.err
    assert files(old) == before


def test_overwrite_replaces_an_old_run(featviz: CLI, old: Path, fresh: Path) -> None:
    """Everything that the old run lists goes, and nothing of it is foreign."""
    assert featviz("report", old, "-q").code == 0
    done = run(featviz, old, "--overwrite")
    assert done.code == 0, done.err
    assert files(old) == files(fresh)
