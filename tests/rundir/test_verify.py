"""`featviz verify`: what was changed in a run is found, and what was not is left alone."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Outcome
from rundirs import without_sums
from runs import SMALL, make_photos, tree

from featviz.rundir import sums
from featviz.rundir.verify import verify

Run = Callable[..., Outcome]


@pytest.fixture
def whole(featviz: Run, tiny_file: Path, tmp_path: Path) -> Path:
    """A run of five images with tensors beside the pictures."""
    photos = make_photos(tmp_path / "photos", 5)
    done = featviz(
        "run", tiny_file, photos, *SMALL, "--tensors", "npy", "--out", tmp_path / "whole"
    )
    assert done.code == 0
    return tmp_path / "whole"


def test_a_manifest_lists_every_other_file(whole: Path) -> None:
    """Sizes and SHA-256 are those of the files, by hashlib; the manifest ends with its own."""
    for path in sorted(whole.glob("*/manifest.json")):
        rows = json.loads(path.read_text())["files"]
        files = {p.relative_to(path.parent).as_posix(): p for p in path.parent.rglob("*.*")}
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


def removed(path: Path, dice: random.Random) -> None:
    path.unlink()


def emptied(path: Path, dice: random.Random) -> None:
    path.write_bytes(b"")


def flipped(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def swapped(path: Path, dice: random.Random) -> None:
    """Two bytes that differ change places: the size stays."""
    data = bytearray(path.read_bytes())
    one, other = dice.sample(range(len(data)), 2)
    while data[one] == data[other]:
        one, other = dice.sample(range(len(data)), 2)
    data[one], data[other] = data[other], data[one]
    path.write_bytes(data)


FAULTS = (removed, emptied, flipped, swapped)


def test_a_hundred_planted_faults_are_found(whole: Path) -> None:
    """One file of one image is removed, emptied, or changed by a bit or two bytes: it is found
    each time, and no other image is blamed (seed 18)."""
    dice = random.Random(18)
    paths = sorted(p for p in whole.rglob("*") if p.is_file() and p.parent != whole)
    for number in range(100):
        path, plant = dice.choice(paths), FAULTS[number % len(FAULTS)]
        before = path.read_bytes()
        plant(path, dice)
        name = path.relative_to(whole).parts[0]
        run = verify([whole]).runs[0]
        blamed = {image.name for image in run.images if image.faults}
        assert blamed == {name} and not run.is_whole, (number, plant.__name__, path)
        path.write_bytes(before)
    assert verify([whole]).exit_code == 0


def test_a_fault_is_exit_code_4_with_its_file(featviz: Run, whole: Path) -> None:
    """stderr and --json name the file; the other runs are checked too."""
    shutil.copytree(whole, whole.parent / "other")
    flipped(whole / "02.png" / "stats.npz", random.Random(1))
    removed(whole / "03.png" / "input.png", random.Random(1))
    shutil.rmtree(whole / "04.png")
    done = featviz("verify", whole, whole.parent / "other", "--json")
    assert done.code == 4
    first, second = json.loads(done.out)["runs"]
    said = {row["image"]: row["fault"] for row in first["faults"]}
    assert "stats.npz" in said["02.png"] and "03.png/input.png is missing" in said["03.png"]
    assert said[None] == "run.json calls 04.png complete, its folder is missing"
    assert second["faults"] == [] and done.err.count("error: ") == 3


def test_resume_verify_mends_what_does_not_fit(featviz: Run, tiny_file: Path, whole: Path) -> None:
    """--resume alone sees what is missing or has another size; --verify reads all."""
    before = tree(whole)
    base = ["run", tiny_file, whole.parent / "photos", *SMALL, "--tensors", "npy", "--out", whole]
    removed(whole / "00.png" / "stats.npz", random.Random(1))
    emptied(whole / "01.png" / "001_0" / "output.npy", random.Random(1))
    path = whole / "02.png" / "001_0" / "output.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    kept = [
        json.loads(line).get("kept") for line in run_lines(featviz(*base, "--resume", "--json"))
    ]
    assert kept == [None, None, True, True, True] and tree(whole) != before
    lines = run_lines(featviz(*base, "--resume", "--verify", "--json"))
    assert [json.loads(line).get("kept") for line in lines] == [True, True, None, True, True]
    assert tree(whole) == before


def run_lines(done: Outcome) -> list[str]:
    assert done.code == 0, done.err
    return done.out.splitlines()


def test_runs_without_checksums_stay_readable(featviz: Run, whole: Path) -> None:
    """Those of an earlier featviz: their files are looked at, and a line says what was not."""
    done = featviz("verify", ROOT / "tests" / "data" / "run-0.1.0")
    assert done.code == 0 and "2 images without checksums" in done.err
    without_sums(whole / "00.png")
    assert "1 image without checksums" in featviz("verify", whole).err
    (whole / "00.png" / "input.png").unlink()
    assert featviz("verify", whole).code == 4


def test_a_lost_run_json_is_named(featviz: Run, whole: Path, tmp_path: Path) -> None:
    """The images are checked all the same; a folder without any is no run."""
    (whole / "run.json").unlink()
    done = featviz("verify", whole)
    assert done.code == 4 and "it has no run.json; --resume writes it anew" in done.err
    (tmp_path / "empty").mkdir()
    done = featviz("verify", tmp_path / "empty")
    assert done.code == 1 and "is no run directory" in done.err


@pytest.mark.parametrize("place", [0, 5, 20, -1, -4, -70, -80])
def test_a_seal_breaks_with_any_bit(place: int) -> None:
    """Also in the checksum itself and behind it."""
    data = sums.sealed(b'{\n "a": 1,\n "b": [\n  2\n ]\n}\n')
    assert json.loads(data)["b"] == [2] and sums.is_sealed(data)
    for bit in range(8):
        broken = bytearray(data)
        broken[place] ^= 1 << bit
        assert not sums.is_sealed(bytes(broken))
    assert not sums.is_sealed(b"") and not sums.is_sealed(data + b"\n")
