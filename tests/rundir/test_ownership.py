"""--overwrite removes what featviz wrote, and nothing of others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from rundirs import RUN_RECORD
from runs import complete, refused, run_json, snapshot, tree

from featviz.errors import StoreError
from featviz.rundir import place
from featviz.rundir.folder import hidden_name
from featviz.rundir.ownership import is_own_name, look
from featviz.rundir.place import RUN, check_free

NOT_OURS: dict[str, Any] = {
    "no JSON": "{",
    "empty": "",
    "list": [],
    "another program's": {"name": "proj", "scripts": {}},
    "version only": {"schema_version": 2},
    "version is text": {**RUN_RECORD, "schema_version": "2"},
    "version is true": {**RUN_RECORD, "schema_version": True},
    "version is zero": {**RUN_RECORD, "schema_version": 0},
    "no featviz": {k: v for k, v in RUN_RECORD.items() if k != "featviz"},
    "no failures": {k: v for k, v in RUN_RECORD.items() if k != "failures"},
    "images is a list": {**RUN_RECORD, "images": ["a"]},
    "layers is text": {**RUN_RECORD, "layers": "conv1"},
    "another kind": {**RUN_RECORD, "kind": "benchmarks"},
    "deep": "[" * 100_000,
}
"""Files named run.json that featviz did not write."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of somebody with a program."""
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "project" / "src" / "main.py").write_text("print()")
    return tmp_path / "project"


@pytest.mark.parametrize("content", NOT_OURS.values(), ids=NOT_OURS)
def test_a_run_json_of_another_program_is_none(content: Any, project: Path) -> None:
    """No folder becomes ours by it, whatever it holds."""
    text = content if isinstance(content, str) else json.dumps(content)
    (project / "run.json").write_text(text)
    none = r"holds no run of featviz: its run\.json is none"
    with pytest.raises(StoreError, match=none):
        check_free(project, RUN, True)


def test_commands_leave_the_folder_of_another_program(
    draw: Run, featviz: Run, tiny_file: Path, project: Path
) -> None:
    """--overwrite touches nothing; neither does --resume."""
    (project / "run.json").write_text("{}")
    before = snapshot(project)
    refused(draw(project, "--overwrite"), 1, "is not empty and holds no run of featviz")
    refused(draw(project, "--resume"), 1)
    kernels = ("kernels", tiny_file, "--out", project, "--overwrite")
    refused(featviz(*kernels), 1, "holds no run")
    assert snapshot(project) == before


STRANGERS = (
    "manifest.json.txt",
    "00.png/manifest.json.bak",
    "00.png/001_0/notes.png",
    "00.png/001_0/deeper/output.png",
    "00.png/999_new/output.png",
    "99.png/input.png",
    "report/mine.html",
    "report/image-1.html",
    "report.html",
    ".git/config",
    ".keep.part",
)


@pytest.mark.medium
def test_no_name_makes_a_file_ours(draw: Run, ran: Path) -> None:
    """Only what is listed goes; the name of a file is no proof, and a manifest elsewhere
    makes nothing ours."""
    shutil.copytree(ran / "00.png", ran / "backup")
    for name in STRANGERS:
        (ran / name).parent.mkdir(parents=True, exist_ok=True)
        (ran / name).write_text("mine")
    copied = [f"backup/{path}" for path in tree(ran / "backup")]
    assert sorted(look(ran)[1]) == sorted([*STRANGERS, *copied])
    before = snapshot(ran)
    refused(draw(ran, "--overwrite"), 1, "holds files that featviz did not write: ")
    assert snapshot(ran) == before


def test_files_nearest_to_the_folder_are_named_first(ran: Path) -> None:
    """They tell most of what it is."""
    for name in ("a/b/deep.txt", "m/inner.txt", "z.txt", "x.txt"):
        (ran / name).parent.mkdir(parents=True, exist_ok=True)
        (ran / name).write_text("mine")
    names = r"did not write: x\.txt, z\.txt, m/inner\.txt"
    with pytest.raises(StoreError, match=names):
        check_free(ran, RUN, overwrite=True)


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("manifest.json", True),
        ("stats.npz", True),
        ("input.png", True),
        ("004_layer1.0.conv1/output.png", True),
        ("004_layer1.0.conv1/grad-input.call1.boxes.webp", True),
        ("1004_fc/input.npy", True),
        ("003_conv/kernel.jpg", True),
        ("cat__004_conv1.grad.npy", True),
        ("cat__004_conv1.png", True),
        ("output.png", False),
        ("004_conv1/notes.png", False),
        ("004_conv1/output.txt", False),
        ("004_conv1/inner/output.png", False),
        ("04_conv1/output.png", False),
        ("004_conv1/outputs.png", False),
        ("cat_004_conv1.png", False),
        ("notes.txt", False),
    ],
)
def test_names_that_files_of_an_image_have(name: str, is_ours: bool) -> None:
    """--resume removes an image that has no manifest by these."""
    assert is_own_name(name) is is_ours


def test_a_manifest_cannot_list_the_files_of_others(
    draw: Run, ran: Path, tmp_path: Path
) -> None:
    """Neither by a row of a picture without a checksum, nor by `..`."""
    (tmp_path / "precious.png").write_text("mine")
    (ran / "00.png" / "thesis.tex").write_text("mine")
    path = ran / "00.png" / "manifest.json"
    manifest = json.loads(path.read_text())
    row = manifest["captures"][0]
    listed = ["../../precious.png", "000_x/../../../precious.png", "/etc/passwd"]
    manifest["captures"].append({**row, "file": "thesis.tex", "tensor": "thesis.tex"})
    manifest["files"] += [{**manifest["files"][0], "file": name} for name in listed]
    path.write_text(json.dumps(manifest))
    before = snapshot(tmp_path)
    done = draw(ran, "--overwrite")
    refused(done, 1, "did not write: 00.png/thesis.tex")
    assert snapshot(tmp_path) == before


@pytest.mark.medium
def test_a_record_cannot_name_folders_outside(
    draw: Run, photos: Path, ran: Path
) -> None:
    """`..` and absolute names in run.json lead nowhere."""
    record = run_json(ran)
    names = ["../photos", "..", ".", str(photos), "00.png/../../photos"]
    record["images"]["missing"] = names
    (ran / "run.json").write_text(json.dumps(record))
    before = snapshot(photos)
    assert draw(ran, "--overwrite").code == 0
    assert snapshot(photos) == before


@pytest.mark.medium
def test_what_featviz_writes_into_a_run_goes_with_it(
    draw: Run, featviz: Run, ran: Path
) -> None:
    """Both reports, and parts of killed runs."""
    before = tree(ran)
    assert featviz("report", ran).code == 0
    assert featviz("report", ran, "--single-file").code == 0
    for name in (hidden_name("run.json"), f"00.png/{hidden_name('stats.npz')}"):
        (ran / name).write_text("left")
    assert draw(ran, "--overwrite").code == 0
    assert tree(ran) == before


@pytest.mark.medium
def test_a_board_in_a_run_stays(draw: Run, tmp_path: Path) -> None:
    """Its events are added to; figures and tensors are replaced."""
    out = tmp_path / "out"
    more = ("--tensors", "npy", "--reduce", "pca", "--tensorboard", out / "board")
    assert draw(out, *more).code == 0
    board = tree(out / "board")
    assert board
    assert draw(out, *more, "--overwrite").code == 0
    assert board.items() <= tree(out / "board").items()
    assert complete(out) == ["00.png", "01.png"]


@pytest.mark.medium
def test_images_that_only_their_manifest_knows_go_too(
    draw: Run, photos: Path, ran: Path
) -> None:
    """A run that was resumed with fewer images."""
    (photos / "01.png").unlink()
    assert draw(ran, "--resume").code == 0
    assert complete(ran) == ["00.png", "01.png"]
    assert draw(ran, "--overwrite").code == 0
    assert complete(ran) == ["00.png"]
    assert not (ran / "01.png").exists()


@pytest.mark.medium
def test_what_comes_while_a_result_is_made_stays(
    featviz: Run, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is looked at again before it is replaced."""
    out = tmp_path / "result"
    assert featviz("diff", ran, ran, "--out", out).code == 0
    real = place.hidden_name

    def meanwhile(name: str, *ending: str) -> str:
        (out / "note.txt").write_text("mine")
        return real(name, *ending)

    monkeypatch.setattr(place, "hidden_name", meanwhile)
    refused(featviz("diff", ran, ran, "--out", out), 1, "did not write: note.txt")
    assert (out / "note.txt").read_text() == "mine"
    assert (out / "diff.json").is_file()
    assert list(tmp_path.glob(".*")) == []
