"""`featviz verify`: what was changed in a run is found, and what was not is left alone."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import SMALL, make_photos, refused, tree

from featviz.rundir.folder import hidden_name
from featviz.rundir.read import read_run
from featviz.rundir.studies import step_folder
from featviz.rundir.verify import verify


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five pictures."""
    return make_photos(tmp_path / "photos", 5)


@pytest.fixture
def base(tiny_file: Path, photos: Path) -> list[object]:
    """A run with tensors beside the pictures, without its folder."""
    return ["run", tiny_file, photos, *SMALL, "--tensors", "npy", "--out"]


@pytest.fixture
def run(featviz: Run, base: list[object], drawn_once: Path, tmp_path: Path) -> Path:
    """Its folder, drawn once."""
    kept = drawn_once / "verified"
    if not kept.exists():
        assert featviz(*base, kept).code == 0
    return shutil.copytree(kept, tmp_path / "run")


def faults_of(run: Path) -> list[str]:
    """What `verify` says of the images of a run."""
    return [row["fault"] for row in verify([run])[0]["faults"]]


def rows_of(output: str) -> list[dict[str, Any]]:
    """What `--json` prints of each run."""
    rows: list[dict[str, Any]] = json.loads(output)["runs"]
    return rows


@pytest.mark.medium
def test_a_manifest_lists_every_other_file(run: Path) -> None:
    """Sizes and SHA-256 are those of the files (hashlib)."""
    for path in run.glob("*/manifest.json"):
        expected = []
        for name, data in tree(path.parent).items():
            digest = hashlib.sha256(data).hexdigest()
            expected.append({"file": name, "bytes": len(data), "sha256": digest})
        expected = [row for row in expected if row["file"] != "manifest.json"]
        assert json.loads(path.read_text())["files"] == expected


@pytest.mark.medium
def test_a_manifest_ends_with_its_own_digest(run: Path) -> None:
    """It is the SHA-256 of all that stands before it (hashlib)."""
    for path in run.glob("*/manifest.json"):
        head, _, tail = path.read_bytes().rpartition(b',\n "sha256": "')
        assert tail.decode() == f'{hashlib.sha256(head).hexdigest()}"\n}}\n'


@pytest.mark.medium
def test_a_run_without_faults(featviz: Run, run: Path) -> None:
    """Exit code 0, the counts of what was read, and nothing is changed."""
    before = tree(run)
    done = featviz("verify", run, "--json")
    assert done.code == 0
    assert "5 images" in done.err
    document = json.loads(done.out)
    assert document["whole"] is True
    (row,) = document["runs"]
    expected = {"images": 5, "files": len(before) - 1, "missing": 0, "faults": []}
    assert expected.items() <= row.items()
    assert tree(run) == before


def flip(path: Path, dice: random.Random) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


FAULTS: dict[str, Callable[[Path, random.Random], object]] = {
    "removed": lambda path, dice: path.unlink(),
    "emptied": lambda path, dice: path.write_bytes(b""),
    "flipped": flip,
    "turned": lambda path, dice: path.write_bytes(path.read_bytes()[::-1]),
}


@pytest.mark.medium
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, run: Path) -> None:
    """One file of one image is removed, emptied, changed by a bit, or turned around
    with its size kept: it is found each time, and no other image is blamed (seed
    18)."""
    dice = random.Random(18)
    paths = sorted(path for path in run.glob("*/**/*") if path.is_file())
    for path in dice.sample(paths, 6):
        before = path.read_bytes()
        FAULTS[fault](path, dice)
        images = {row["image"] for row in verify([run])[0]["faults"]}
        assert images == {path.relative_to(run).parts[0]}, path
        path.write_bytes(before)
    assert faults_of(run) == []


@pytest.mark.medium
def test_a_fault_is_exit_code_4_with_its_file(featviz: Run, run: Path) -> None:
    """stderr and --json name the file; the other runs are checked too."""
    sound = shutil.copytree(run, run.parent / "sound")
    flip(run / "02.png" / "stats.npz", random.Random(1))
    (run / "03.png" / "input.png").unlink()
    shutil.rmtree(run / "04.png")
    done = featviz("verify", run, sound, "--json")
    assert done.code == 4
    assert done.err.count("error: ") == 3
    first, second = rows_of(done.out)
    faults = {row["image"]: row["fault"] for row in first["faults"]}
    assert "stats.npz" in faults["02.png"]
    assert "03.png/input.png is missing" in faults["03.png"]
    gone = "04.png: run.json calls it complete, its folder is missing"
    assert faults["04.png"] == gone
    assert second["faults"] == []


@pytest.mark.medium
def test_an_image_of_two_faults_is_one_image(featviz: Run, run: Path) -> None:
    """Each file is named, and the image counted once."""
    for path in sorted((run / "02.png").rglob("output.npy"))[:2]:
        flip(path, random.Random(1))
    done = featviz("verify", run)
    assert done.code == 4
    assert done.err.count("error: ") == 2
    assert "1 image damaged" in done.err


def other_number(data: bytes) -> bytes:
    """A manifest with a number that no other field contradicts."""
    return data.replace(b'"nonfinite": 0', b'"nonfinite": 1', 1)


def unsealed(data: bytes) -> bytes:
    """A manifest without its own digest."""
    return data[: data.rindex(b",")] + b"\n}\n"


@pytest.mark.medium
@pytest.mark.parametrize("change", [other_number, unsealed])
def test_a_manifest_that_still_fits_is_not_as_it_was_written(
    change: Callable[[bytes], bytes], run: Path
) -> None:
    """Its own digest tells."""
    path = run / "01.png" / "manifest.json"
    path.write_bytes(change(path.read_bytes()))
    assert faults_of(run) == ["01.png/manifest.json is not as it was written"]


@pytest.fixture
def series(featviz: Run, run: Path) -> Path:
    """A series of four steps: a sound one, one with a flipped bit, one without its
    run.json, and one of which nothing is left; with a report beside them."""
    root = run.parent / "series"
    steps = [shutil.copytree(run, step_folder(root, n)) for n in (0, 10, 20, 10**6)]
    assert featviz("report", root).code == 0
    flip(steps[1] / "02.png" / "stats.npz", random.Random(1))
    (steps[2] / "run.json").unlink()
    shutil.rmtree(steps[3])
    steps[3].mkdir()
    return root


@pytest.mark.medium
def test_a_damaged_step_is_named(featviz: Run, series: Path) -> None:
    """Each step has a row."""
    rows = rows_of(featviz("verify", series, "--json").out)
    assert [row["series"] for row in rows] == [str(series)] * 4
    sound, flipped, lost, emptied = (row["faults"] for row in rows)
    assert sound == []
    assert "stats.npz" in flipped[0]["fault"]
    assert "no run.json" in lost[0]["fault"]
    assert "no run.json" in emptied[0]["fault"]


@pytest.mark.medium
def test_a_series_has_one_line(featviz: Run, series: Path) -> None:
    """Exit code 4, with the number of damaged steps."""
    done = featviz("verify", series)
    assert done.code == 4
    assert f"{series}: a series of 4 steps: 3 steps damaged" in done.err


@pytest.mark.medium
def test_resume_mends_what_is_missing(
    featviz: Run, base: list[object], run: Path
) -> None:
    """It sees files that are not there or have another size, and keeps other images."""
    before = tree(run)
    (run / "00.png" / "stats.npz").unlink()
    (run / "01.png" / "001_0" / "output.npy").write_bytes(b"")
    done = featviz(*base, run, "--resume", "--json")
    kept = [json.loads(line).get("kept") for line in done.out.splitlines()]
    assert kept == [None, None, True, True, True]
    assert tree(run) == before


@pytest.mark.medium
def test_an_image_that_verify_names_is_drawn_again(
    featviz: Run, base: list[object], run: Path
) -> None:
    """A changed byte, of which --resume sees nothing, is mended where the image's folder
    is removed."""
    before = tree(run)
    flip(run / "02.png" / "001_0" / "output.npy", random.Random(1))
    assert featviz(*base, run, "--resume").code == 0
    assert tree(run) != before
    assert [row["image"] for row in verify([run])[0]["faults"]] == ["02.png"]
    shutil.rmtree(run / "02.png")
    assert featviz(*base, run, "--resume").code == 0
    assert tree(run) == before


def test_a_lost_run_json_is_named(featviz: Run, run: Path) -> None:
    """The images are checked all the same."""
    (run / "run.json").unlink()
    remedy = "--resume writes it anew"
    refused(featviz("verify", run), 4, f"it has no run.json; {remedy}")
    assert f"{remedy} from the images' manifests" in featviz("report", run).err


@pytest.mark.parametrize("begun", ["", "a.png"])
def test_a_folder_without_images_is_no_run(
    begun: str, featviz: Run, tmp_path: Path
) -> None:
    """Exit code 1, also where an image was begun."""
    root = tmp_path / "root"
    (root / begun).mkdir(parents=True)
    (root / begun / "input.png").touch()
    refused(featviz("verify", root), 1, "is no run directory")


def settings_of(data: bytes) -> object:
    """What a run.json says of the run, None where it cannot be read; the list of what is
    missing follows from it."""
    try:
        content = json.loads(data)
        images = content.pop("images")
        return content, images["total"], images["complete"]
    except (ValueError, KeyError, TypeError):
        return None


@pytest.mark.medium
def test_a_changed_setting_in_run_json_is_found(run: Path) -> None:
    """Each flipped bit that changes a setting, or which images there are, is found
    (seed 27)."""
    path = run / "run.json"
    data = path.read_bytes()
    dice = random.Random(27)
    changes = 0
    for _ in range(12):
        path.write_bytes(data)
        flip(path, dice)
        is_changed = settings_of(path.read_bytes()) != settings_of(data)
        assert bool(faults_of(run)) is is_changed, path.read_bytes()
        changes += is_changed
    assert changes > 6


@pytest.mark.medium
def test_a_total_that_is_no_sum_of_the_images_is_found(run: Path) -> None:
    """It counts those that are complete, failed or missing."""
    path = run / "run.json"
    record = json.loads(path.read_text())
    record["images"]["total"] = 6
    path.write_text(json.dumps(record))
    assert faults_of(run) == ["run.json has images.total 6, and names 5"]


@pytest.mark.medium
def test_images_that_are_not_whole_are_named_up_to_twenty(
    featviz: Run, run: Path
) -> None:
    """Of the others the number is told, by what reads the run."""
    for number in range(22):
        copy = shutil.copytree(run / "00.png", run / f"copy-{number:02}.png")
        (copy / "input.png").unlink()
    done = featviz("report", run)
    assert done.err.count("is incomplete (") == 20
    assert "2 images more are incomplete" in done.err


@pytest.mark.medium
def test_images_stand_in_the_order_of_run_json(run: Path) -> None:
    """Those that it does not name, since a run was killed before, come last."""
    record = json.loads((run / "run.json").read_text())
    first, *others = record["images"]["complete"]
    named = others[::-1]
    record["images"]["complete"] = named
    (run / "run.json").write_text(json.dumps(record))
    assert list(read_run(run).images) == [*named, first]


def test_files_that_featviz_writes_beside_images_are_known(
    featviz: Run, run: Path
) -> None:
    """They are a report, and what a killed run has left."""
    assert featviz("report", run).code == 0
    (run / hidden_name("run.json")).write_text("left")
    assert verify([run])[0]["unlisted"] == []


def test_files_that_nothing_lists_are_named(featviz: Run, run: Path) -> None:
    """They are a warning and a row, and no fault."""
    (run / "report.zip").write_bytes(b"PK\x03\x04 broken")
    (run / "notes.txt").write_text("mine")
    (run / "00.png" / "001_0" / "output.call7.png").write_text("mine")
    done = featviz("verify", run, "--json")
    assert done.code == 0
    assert "nothing lists notes.txt, report.zip, 0" in done.err
    (row,) = rows_of(done.out)
    strange = ["notes.txt", "report.zip", "00.png/001_0/output.call7.png"]
    assert row["unlisted"] == strange


@pytest.mark.parametrize("command", ["verify", "report", "sheet", "merge"])
def test_of_a_folder_of_runs_four_are_named(command: str, featviz: Run) -> None:
    """In their order; the others are counted."""
    for number in range(6):
        folder = Path(f"many/{number}")
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
    done = featviz(command, "many")
    assert done.code != 0
    assert "hint: give a run: many/0, many/1, many/2, many/3 and 2 more" in done.err
