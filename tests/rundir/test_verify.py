"""`featviz verify`: what was changed in a run is found, and what was not is left alone."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run
from runs import SMALL, make_photos, tree

from featviz import cli
from featviz.rundir.folder import hidden_name
from featviz.rundir.studies import step_folder
from featviz.rundir.verify import verify


@pytest.fixture
def whole(tiny_file: Path, drawn_once: Path, tmp_path: Path) -> Path:
    """A run of five images with tensors beside the pictures, drawn once."""
    photos, run = make_photos(tmp_path / "photos", 5), drawn_once.with_name("whole")
    if not run.exists():
        words = [
            "run",
            tiny_file,
            photos,
            "--out",
            run,
            *SMALL,
            "--tensors",
            "npy",
            "-q",
        ]
        assert cli.guarded([str(word) for word in words]) == 0
    return shutil.copytree(run, tmp_path / "whole")


def test_a_manifest_lists_every_other_file(whole: Path) -> None:
    """Sizes and SHA-256 are those of the files, by hashlib; the manifest ends with its
    own."""
    for path in sorted(whole.glob("*/manifest.json")):
        rows = json.loads(path.read_text())["files"]
        files = {
            p.relative_to(path.parent).as_posix(): p for p in path.parent.rglob("*.*")
        }
        assert [row["file"] for row in rows] == sorted(files.keys() - {"manifest.json"})
        for row in rows:
            data = files[row["file"]].read_bytes()
            found = (len(data), hashlib.sha256(data).hexdigest())
            assert (row["bytes"], row["sha256"]) == found
        head, _, tail = path.read_bytes().rpartition(b',\n "sha256": "')
        assert tail == hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'


def test_a_whole_run_is_whole(featviz: Run, whole: Path) -> None:
    """Exit code 0, the counts of what was read, and nothing is changed."""
    before = tree(whole)
    done = featviz("verify", whole, "--json")
    assert done.code == 0
    document = json.loads(done.out)
    (run,) = document["runs"]
    assert document["whole"] and run["faults"] == []
    assert (run["images"], run["files"], run["missing"]) == (5, len(before) - 1, 0)
    assert "5 images" in done.err and "whole" in done.err
    assert tree(whole) == before


def flipped(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


FAULTS: dict[str, Callable[[Path, random.Random], object]] = {
    "removed": lambda path, dice: path.unlink(),
    "emptied": lambda path, dice: path.write_bytes(b""),
    "flipped": flipped,
    "turned": lambda path, dice: path.write_bytes(path.read_bytes()[::-1]),
}


def test_planted_faults_are_found(whole: Path) -> None:
    """One file of one image is removed, emptied, changed by a bit, or turned around
    with its size kept: it is found each time, and no other image is blamed (seed
    18)."""
    dice = random.Random(18)
    paths = sorted(p for p in whole.rglob("*") if p.is_file() and p.parent != whole)
    for number in range(24):
        path, fault = dice.choice(paths), [*FAULTS][number % len(FAULTS)]
        before = path.read_bytes()
        FAULTS[fault](path, dice)
        name = path.relative_to(whole).parts[0]
        run = verify([whole])[0]
        assert {row["image"] for row in run["faults"]} == {name}, (number, fault, path)
        path.write_bytes(before)
    assert not verify([whole])[0]["faults"]


def test_a_fault_is_exit_code_4_with_its_file(featviz: Run, whole: Path) -> None:
    """stderr and --json name the file; the other runs are checked too."""
    shutil.copytree(whole, whole.parent / "other")
    flipped(whole / "02.png" / "stats.npz", random.Random(1))
    (whole / "03.png" / "input.png").unlink()
    shutil.rmtree(whole / "04.png")
    done = featviz("verify", whole, whole.parent / "other", "--json")
    assert done.code == 4
    first, second = json.loads(done.out)["runs"]
    said = {row["image"]: row["fault"] for row in first["faults"]}
    assert (
        "stats.npz" in said["02.png"]
        and "03.png/input.png is missing" in said["03.png"]
    )
    assert said["04.png"] == "04.png: run.json calls it complete, its folder is missing"
    assert second["faults"] == [] and done.err.count("error: ") == 3


def test_a_manifest_that_still_fits_is_not_as_it_was_written(whole: Path) -> None:
    """Another number, which no field contradicts, breaks its own checksum; one without
    is none."""
    path = whole / "01.png" / "manifest.json"
    data = path.read_bytes()
    for changed in (
        data.replace(b'"nonfinite": 0', b'"nonfinite": 1', 1),
        data[: data.rindex(b",")] + b"\n}\n",
    ):
        path.write_bytes(changed)
        faults = [row["fault"] for row in verify([whole])[0]["faults"]]
        assert faults == ["01.png/manifest.json is not as it was written"]


def test_a_damaged_step_is_named(featviz: Run, whole: Path) -> None:
    """Each step has a row, and the series one line; also one of which nothing is left,
    and a report beside them is none."""
    root = whole.parent / "series"
    for step in (0, 10, 20, 10**6):
        shutil.copytree(whole, step_folder(root, step))
    assert featviz("report", root).code == 0
    flipped(step_folder(root, 10) / "02.png" / "stats.npz", random.Random(1))
    (step_folder(root, 20) / "run.json").unlink()
    shutil.rmtree(step_folder(root, 10**6))
    step_folder(root, 10**6).mkdir()
    done = featviz("verify", root, "--json")
    rows = json.loads(done.out)["runs"]
    assert [row["series"] for row in rows] == [str(root)] * 4
    assert done.code == 4 and [len(row["faults"]) for row in rows] == [0, 1, 1, 1]
    assert "stats.npz" in rows[1]["faults"][0]["fault"]
    assert all("no run.json" in row["faults"][0]["fault"] for row in rows[2:])
    assert f"{root}: a series of 4 steps: 3 steps damaged" in done.err


def test_resume_mends_what_does_not_fit(
    featviz: Run, tiny_file: Path, whole: Path
) -> None:
    """What is missing or has another size it sees; an image of which `verify` names a
    file is drawn again when its folder is gone."""
    before = tree(whole)
    base = [
        "run",
        tiny_file,
        whole.parent / "photos",
        *SMALL,
        "--tensors",
        "npy",
        "--out",
        whole,
    ]
    (whole / "00.png" / "stats.npz").unlink()
    (whole / "01.png" / "001_0" / "output.npy").write_bytes(b"")
    path = whole / "02.png" / "001_0" / "output.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    kept = [
        json.loads(row).get("kept")
        for row in featviz(*base, "--resume", "--json").out.split("\n")[:-1]
    ]
    assert kept == [None, None, True, True, True] and tree(whole) != before
    named = json.loads(featviz("verify", whole, "--json").out)["runs"][0]["faults"]
    assert [row["image"] for row in named] == ["02.png"]
    shutil.rmtree(whole / "02.png")
    assert featviz(*base, "--resume").code == 0 and tree(whole) == before


def test_a_lost_run_json_is_named(featviz: Run, whole: Path, tmp_path: Path) -> None:
    """The images are checked all the same; a folder without any is no run."""
    (whole / "run.json").unlink()
    done = featviz("verify", whole)
    assert done.code == 4 and "it has no run.json; --resume writes it anew" in done.err
    assert (
        "--resume writes it anew from the images' manifests"
        in featviz("report", whole).err
    )
    (tmp_path / "empty").mkdir()
    done = featviz("verify", tmp_path / "empty")
    assert done.code == 1 and "is no run directory" in done.err


def test_a_changed_setting_in_run_json_is_found(whole: Path) -> None:
    """Each flipped bit that changes a setting, or which images there are, is found
    (seed 27)."""

    def told(data: bytes) -> object:
        try:
            content = json.loads(data)
            images = content["images"]
            return {**content, "images": (images["total"], images["complete"])}
        except (ValueError, KeyError, TypeError):
            return None

    path, dice, found = whole / "run.json", random.Random(27), 0
    data = path.read_bytes()
    for _ in range(12):
        path.write_bytes(data)
        flipped(path, dice)
        changed = told(path.read_bytes()) != told(data)
        assert bool(verify([whole])[0]["faults"]) is changed, path.read_bytes()
        found += changed
    assert found > 6


def test_files_that_nothing_lists_are_named(featviz: Run, whole: Path) -> None:
    """A warning and a row; they are no fault. Reports and locks are known, and so is
    what a killed run has left."""
    assert featviz("report", whole).code == 0
    (whole / hidden_name("run.json")).write_text("left")
    assert (
        json.loads(featviz("verify", whole, "--json").out)["runs"][0]["unlisted"] == []
    )
    (whole / "report.zip").write_bytes(b"PK\x03\x04 broken")
    (whole / "notes.txt").write_text("mine")
    (whole / "00.png" / "001_0" / "output.call7.png").write_text("mine")
    done = featviz("verify", whole, "--json")
    assert done.code == 0 and "nothing lists notes.txt, report.zip, 0" in done.err
    unlisted = json.loads(done.out)["runs"][0]["unlisted"]
    assert unlisted == ["notes.txt", "report.zip", "00.png/001_0/output.call7.png"]
