"""What belongs to others stays untouched: folders that are no run, links, inputs, odd files."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Outcome
from PIL import Image
from runs import SMALL, complete, make_photos, run_json, tree
from torch import nn

from featviz.errors import ImageError, StoreError, UsageError
from featviz.images import archives, decode, find
from featviz.records import Sample
from featviz.rundir import atomic, ownership, write
from featviz.text import safe_name

Run = Callable[..., Outcome]


def snapshot(folder: Path) -> dict[str, object]:
    """Every file below a folder with its bytes, every link with its target, every empty folder."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_file():
            found[name] = path.read_bytes()
        elif path.is_dir() and not any(path.iterdir()):
            found[name] = "empty folder"
    return found


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 2)


@pytest.fixture
def ran(featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path) -> Path:
    """A run of two images."""
    assert featviz("run", tiny_file, photos, "--out", tmp_path / "out", *SMALL).code == 0
    return tmp_path / "out"


def refused(done: Outcome, code: int, *words: str) -> None:
    """One line of error that holds these words, and no traceback."""
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.code == code and len(lines) == 1, done
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err, (word, done.err)


# Records of other programs

GOOD = {
    "schema_version": 1,
    "featviz": "0.1.0",
    "torch": "2.6.0",
    "model": {},
    "layers": [],
    "options": {},
    "images": {"total": 0, "complete": []},
    "failures": [],
}

NOT_OURS: dict[str, Any] = {
    "no JSON": "{",
    "empty": "",
    "list": [],
    "another program's": {"name": "proj", "scripts": {}},
    "version only": {"schema_version": 1},
    "version is text": {**GOOD, "schema_version": "1"},
    "version is true": {**GOOD, "schema_version": True},
    "version is zero": {**GOOD, "schema_version": 0},
    "no featviz": {k: v for k, v in GOOD.items() if k != "featviz"},
    "no failures": {k: v for k, v in GOOD.items() if k != "failures"},
    "images is a list": {**GOOD, "images": ["a"]},
    "layers is text": {**GOOD, "layers": "conv1"},
    "another kind": {**GOOD, "kind": "benchmarks"},
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", NOT_OURS)
def test_a_run_json_of_another_program_makes_no_folder_ours(
    kind: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """--overwrite touches nothing, whatever the file holds; neither does --resume."""
    content = NOT_OURS[kind]
    proj = tmp_path / "proj"
    (proj / "src").mkdir(parents=True)
    (proj / "src" / "main.py").write_text("print()")
    (proj / "run.json").write_text(content if isinstance(content, str) else json.dumps(content))
    before = snapshot(proj)
    done = featviz("run", tiny_file, photos, "--out", proj, "--overwrite", *SMALL)
    refused(done, 1, "is not empty and holds no run of featviz: its run.json is none")
    assert featviz("run", tiny_file, photos, "--out", proj, "--resume", *SMALL).code == 1
    refused(featviz("kernels", tiny_file, "--out", proj, "--overwrite"), 1, "holds no run")
    assert snapshot(proj) == before


def test_a_run_json_that_is_a_link_makes_no_folder_ours(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path, tmp_path: Path
) -> None:
    """A record has to lie in the folder itself."""
    proj = tmp_path / "proj"
    proj.mkdir()
    (proj / "notes.txt").write_text("mine")
    (proj / "run.json").symlink_to(ran / "run.json")
    before = snapshot(tmp_path)
    done = featviz("run", tiny_file, photos, "--out", proj, "--overwrite", *SMALL)
    refused(done, 1, "holds no run of featviz")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["audit.json", "models.json"])
@pytest.mark.parametrize("text", ["{}", '{"schema_version": 1}', '{"schema_version": 1, "x": []}'])
def test_an_audit_json_of_another_program(
    name: str, text: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """npm audit writes an audit.json, too: nothing of its folder goes."""
    proj = tmp_path / "proj"
    proj.mkdir()
    (proj / name).write_text(text)
    (proj / "keep.txt").write_text("mine")
    before = snapshot(proj)
    done = featviz("audit", tiny_file, photos, "--size", "16", "--out", proj, "--overwrite")
    refused(done, 1, f"holds no audit of featviz: its {name} is none that featviz wrote")
    assert snapshot(proj) == before


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema_version": 1, "base": "a"}'])
def test_a_diff_json_of_another_program(text: str, featviz: Run, ran: Path, tmp_path: Path) -> None:
    """diff replaces nothing but an earlier difference of its own."""
    proj = tmp_path / "proj"
    proj.mkdir()
    (proj / "diff.json").write_text(text)
    (proj / "keep.txt").write_text("mine")
    before = snapshot(proj)
    refused(
        featviz("diff", ran, ran, "--out", proj),
        1,
        "holds no diff of featviz: its diff.json is none",
    )
    assert snapshot(proj) == before


# Foreign files in folders that are ours


def test_files_of_others_in_a_run_stop_overwrite(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path
) -> None:
    """They are named, folders of nothing else as folders, and nothing at all is removed."""
    (ran / "a.txt").write_text("mine")
    (ran / "src" / "deep").mkdir(parents=True)
    (ran / "src" / "deep" / "main.py").write_text("mine")
    (ran / "src" / "other.py").write_text("mine")
    (ran / "00.png" / "note.md").write_text("mine")
    (ran / "00.png" / "001_0" / "output.bak.png").write_text("mine")
    before = snapshot(ran)
    done = featviz("run", tiny_file, photos, "--out", ran, "--overwrite", *SMALL)
    refused(done, 1, "holds files that featviz did not write: ", "a.txt", "src/", "and 1 more")
    assert snapshot(ran) == before


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json.txt",
        "00.png/manifest.json.bak",
        "00.png/001_0/notes.png",
        "00.png/001_0/deeper/output.png",
        "00.png/999_new/output.png",
        "99.png/input.png",
        "report/mine.html",
        "report/image-1.html",
        "report.html",
        "bases.npz",
        ".git/config",
        ".keep.part",
    ],
)
def test_no_name_makes_a_file_ours(
    name: str, featviz: Run, tiny_file: Path, photos: Path, ran: Path
) -> None:
    """Only what is listed goes; the name of a file is no proof."""
    (ran / name).parent.mkdir(parents=True, exist_ok=True)
    (ran / name).write_text("mine")
    before = snapshot(ran)
    done = featviz("run", tiny_file, photos, "--out", ran, "--overwrite", *SMALL)
    refused(done, 1, "holds files that featviz did not write: ")
    assert snapshot(ran) == before


def test_a_manifest_cannot_list_the_files_of_others(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path, tmp_path: Path
) -> None:
    """Names that featviz gives to no picture are not removed for being listed; nor `..`."""
    (tmp_path / "precious.png").write_text("mine")
    (ran / "00.png" / "thesis.tex").write_text("mine")
    path = ran / "00.png" / "manifest.json"
    manifest = json.loads(path.read_text())
    row = manifest["captures"][0]
    listed = ["thesis.tex", "../../precious.png", "000_x/../../../precious.png", "/etc/passwd"]
    manifest["captures"] += [{**row, "file": name, "tensor": name} for name in listed]
    path.write_text(json.dumps(manifest))
    before = snapshot(tmp_path)
    done = featviz("run", tiny_file, photos, "--out", ran, "--overwrite", *SMALL)
    refused(done, 1, "did not write: 00.png/thesis.tex")
    assert snapshot(tmp_path) == before


def test_a_record_cannot_name_folders_outside(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path, tmp_path: Path
) -> None:
    """`..` and absolute names in run.json lead nowhere."""
    record = run_json(ran)
    record["images"]["missing"] = ["../photos", "..", ".", str(photos), "00.png/../../photos"]
    (ran / "run.json").write_text(json.dumps(record))
    before = snapshot(photos)
    base = ["run", tiny_file, photos, "--out", ran, *SMALL]
    assert featviz(*base, "--overwrite").code == 0
    assert snapshot(photos) == before


def test_a_manifest_elsewhere_is_not_ours(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path
) -> None:
    """A copy of an image's folder under another name is not what the run wrote."""
    shutil.copytree(ran / "00.png", ran / "backup")
    before = snapshot(ran)
    done = featviz("run", tiny_file, photos, "--out", ran, "--overwrite", *SMALL)
    refused(done, 1, "did not write: backup/")
    assert snapshot(ran) == before


def test_links_in_a_run_stop_overwrite(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path, tmp_path: Path
) -> None:
    """A link in the place of a picture, a folder or a manifest is nothing that featviz wrote."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "output.png").write_text("mine")
    for place in ("00.png/input.png", "01.png/002_1", "01.png/manifest.json"):
        saved = tmp_path / "saved"
        (ran / place).rename(saved)
        (ran / place).symlink_to(tmp_path / "target")
        before = snapshot(tmp_path)
        done = featviz("run", tiny_file, photos, "--out", ran, "--overwrite", *SMALL)
        refused(done, 1, f"did not write: {place}")
        assert snapshot(tmp_path) == before
        (ran / place).unlink()
        saved.rename(ran / place)


def test_what_featviz_writes_into_a_run_goes_with_it(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Both reports, figures, tensors, bases, parts of killed runs, and --tensorboard inside."""
    out = tmp_path / "out"
    base = ["run", tiny_file, photos, "--out", out, *SMALL, "--tensors", "npy"]
    base += ["--reduce", "pca", "--shared-basis", "--tensorboard", out / "board"]
    assert featviz(*base, "--report").code == 0
    assert featviz("report", out, "--single-file").code == 0
    for name in (".run.json.part", ".bases.npz.0123456789abcdef.part", "00.png/.stats.npz.part"):
        (out / name).write_text("left")
    board = tree(out / "board")
    done = featviz(*base, "--overwrite")
    assert done.code == 0, done.err
    assert not (out / "report").exists() and not (out / "report.html").exists()
    assert not list(out.rglob("*.part")) and complete(out) == ["00.png", "01.png"]
    assert board.items() <= tree(out / "board").items()


def test_images_that_only_their_manifest_knows_go_too(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was resumed with fewer images; also where its removal is killed half way."""
    (photos / "01.png").unlink()
    base = ["run", tiny_file, photos, "--out", ran, *SMALL]
    assert featviz(*base, "--resume").code == 0
    assert complete(ran) == ["00.png", "01.png"]
    count, unlink = [4], os.unlink

    def killed(*arguments: Any, **named: Any) -> None:
        count[0] -= 1
        if count[0] < 0:
            raise SystemExit(9)
        unlink(*arguments, **named)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(os, "unlink", killed)
        write.RunDirectory.create(ran, overwrite=True)
    assert complete(ran) == [] and "01.png" in run_json(ran)["images"]["missing"]
    assert featviz(*base).code == 0
    assert complete(ran) == ["00.png"] and not (ran / "01.png").exists()


@pytest.mark.parametrize("command", ["audit", "kernels", "merge", "report", "diff"])
def test_files_of_others_in_other_results_stop_them(
    command: str, featviz: Run, tiny_file: Path, photos: Path, ran: Path, tmp_path: Path
) -> None:
    """The second time there lies a note in the folder: it stays, and so does the result."""
    out = tmp_path / "result"
    again = {
        "audit": ["audit", tiny_file, photos, "--size", "16", "--out", out, "--overwrite"],
        "kernels": ["kernels", tiny_file, "--out", out, "--overwrite"],
        "merge": ["merge", ran, "--out", out, "--overwrite"],
        "report": ["report", ran, "--out", out],
        "diff": ["diff", ran, ran, "--out", out],
    }[command]
    assert featviz(*again).code == 0
    assert featviz(*again).code == 0
    (out / "note.txt").write_text("mine")
    before = snapshot(tmp_path)
    refused(featviz(*again), 1, "holds files that featviz did not write: note.txt")
    assert snapshot(tmp_path) == before


def test_several_audits_and_files_that_were_named_beside(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """The audits of several models are ours, and --junit in --out is in nobody's way."""
    out = tmp_path / "audits"
    base = ["audit", tiny_file, photos, "--model", tiny_file, "--size", "16", "--out", out]
    base += ["--junit", out / "junit.xml", "--overwrite"]
    assert [featviz(*base).code for _ in range(2)] == [0, 0]
    assert sorted(path.name for path in out.iterdir() if path.is_file()) == [
        "junit.xml",
        "models.json",
        "models.png",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audits", "photos", "tiny.pth"]


def test_what_comes_while_a_result_is_made_stays(
    featviz: Run, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is looked at again before it is replaced."""
    out = tmp_path / "result"
    assert featviz("diff", ran, ran, "--out", out).code == 0
    real = atomic.part_name

    def meanwhile(name: str) -> str:
        (out / "note.txt").write_text("mine")
        return real(name)

    monkeypatch.setattr(atomic, "part_name", meanwhile)
    refused(featviz("diff", ran, ran, "--out", out), 1, "did not write: note.txt")
    assert (out / "note.txt").read_text() == "mine" and (out / "diff.json").is_file()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_a_page_or_picture_of_another_program_is_no_report_and_no_sheet(
    featviz: Run, ran: Path, photos: Path
) -> None:
    """report --single-file and sheet name one file: it has to be one of theirs."""
    page = ran.parent / "index.html"
    page.write_text("<h1>mine</h1>")
    refused(featviz("report", ran, "--single-file", "--out", page), 1, "is no report of featviz")
    sheet = ["sheet", ran, "--layer", "0", "--out"]
    for path in (photos / "00.png", page, ran / "run.json", ran / "00.png" / "input.png"):
        before = path.read_bytes()
        refused(featviz(*sheet, path), 1, "is there and is no sheet of featviz")
        assert path.read_bytes() == before
    assert [featviz(*sheet, ran.parent / "s.png").code for _ in range(2)] == [0, 0]


# Links in the way of what is written


@pytest.mark.parametrize("name", [".run.json.part", ".bases.npz.part", ".report.html.part"])
def test_a_link_with_the_name_of_a_part_is_not_written_through(
    name: str, featviz: Run, tiny_file: Path, photos: Path, ran: Path, tmp_path: Path
) -> None:
    """These names were predictable; the files that are written have others now."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (ran / name).symlink_to(victim)
    assert featviz("run", tiny_file, photos, "--out", ran, *SMALL, "--resume").code == 0
    assert featviz("report", ran, "--single-file").code == 0
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("place", ["00.png", "00.png/001_0"])
@pytest.mark.parametrize("kind", ["folder", "dead", "file"])
def test_resume_does_not_write_through_a_linked_folder(
    place: str, kind: str, featviz: Run, tiny_file: Path, photos: Path, ran: Path, tmp_path: Path
) -> None:
    """An image's folder, or a layer's in it, that leads elsewhere stops the run."""
    elsewhere = tmp_path / "elsewhere"
    if kind == "folder":
        elsewhere.mkdir()
        (elsewhere / "manifest.json").write_text("mine")
        (elsewhere / "output.png").write_text("mine")
    elif kind == "file":
        elsewhere.write_text("mine")
    (ran / "00.png" / "manifest.json").unlink()
    shutil.rmtree(ran / place)
    (ran / place).symlink_to(elsewhere)
    before = snapshot(elsewhere) if elsewhere.is_dir() else kind
    done = featviz("run", tiny_file, photos, "--out", ran, *SMALL, "--resume")
    refused(done, 1, "is a symbolic link, and nothing is written through one")
    assert (snapshot(elsewhere) if elsewhere.is_dir() else kind) == before
    assert (ran / place).is_symlink() and elsewhere.exists() == (kind != "dead")


def test_a_linked_folder_above_an_image(featviz: Run, tiny_file: Path, tmp_path: Path) -> None:
    """Each component below --out counts; --out itself may be a link, for it was named."""
    photos = make_photos(tmp_path / "photos" / "sub" / "deep", 1).parent.parent
    (tmp_path / "real").mkdir()
    (tmp_path / "away").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    base = ["run", tiny_file, photos, "--out", tmp_path / "out", *SMALL]
    assert featviz(*base).code == 0 and complete(tmp_path / "real") == ["sub/deep/00.png"]
    shutil.rmtree(tmp_path / "real" / "sub")
    (tmp_path / "real" / "sub").symlink_to(tmp_path / "away")
    refused(featviz(*base, "--resume"), 1, "out/sub is a symbolic link")
    assert snapshot(tmp_path / "away") == {}


def test_a_board_behind_a_link_in_the_run(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path, tmp_path: Path
) -> None:
    """--tensorboard inside --out goes through no link either."""
    (tmp_path / "away").mkdir()
    (ran / "board").symlink_to(tmp_path / "away")
    base = ["run", tiny_file, photos, "--out", ran, *SMALL, "--resume", "--tensorboard"]
    refused(featviz(*base, ran / "board" / "x"), 1, "board is a symbolic link")
    assert snapshot(tmp_path / "away") == {}


def test_a_link_in_the_place_of_a_file_is_replaced_not_followed(tmp_path: Path) -> None:
    """What is written takes the link's place; its target stays."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "f").symlink_to(tmp_path / "victim")
    with atomic.atomic(tmp_path / "f") as file:
        file.write(b"new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "f").read_bytes() == b"new" and not (tmp_path / "f").is_symlink()


def test_parts_have_names_that_nobody_can_guess(tmp_path: Path) -> None:
    """16 hex digits, new each time; the file is made by this process, or not at all."""
    names = set()
    for _ in range(3):
        with atomic.atomic(tmp_path / "x.png") as file:
            (part,) = (path.name for path in tmp_path.iterdir() if path.name != "x.png")
            names.add(part)
            file.write(b"")
    assert len(names) == 3 and {atomic.part_of(name) for name in names} == {"x.png"}
    assert (tmp_path / "x.png").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_part_that_is_there_already_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if somebody did guess: a link, a file or a folder of that name is refused."""
    monkeypatch.setattr(atomic, "part_name", lambda name: ".guessed")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".guessed").symlink_to(victim)
    exists = pytest.raises(StoreError, match="f cannot be written: File exists")
    with exists, atomic.atomic(tmp_path / "f") as file:
        file.write(b"new")
    assert victim.read_text() == "mine" and (tmp_path / ".guessed").is_symlink()


@pytest.mark.parametrize("way", ["../x", "a/../../x"])
def test_nothing_is_written_outside_the_folder(way: str, tmp_path: Path) -> None:
    """A path that climbs out is refused."""
    (tmp_path / "out").mkdir()
    outside = pytest.raises(StoreError, match="cannot be written")
    with outside, atomic.atomic(tmp_path / "out" / way, tmp_path / "out"):
        pytest.fail("there is nothing to write to")
    assert snapshot(tmp_path) == {"out": "empty folder"}


def test_resume_removes_nothing_of_others(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path
) -> None:
    """A run.json that names a folder of the user's as an image that is missing: files in it that
    have no name of ours stay; what a killed run left goes."""
    record = run_json(ran)
    make_photos(photos / "src", 1)
    record["images"]["missing"] = ["src/00.png"]
    (ran / "run.json").write_text(json.dumps(record))
    (ran / "src" / "00.png" / "004_left").mkdir(parents=True)
    (ran / "src" / "00.png" / "004_left" / "output.png").write_text("left")
    (ran / "src" / "00.png" / "main.py").write_text("mine")
    (ran / "src" / "other.py").write_text("mine")
    assert featviz("run", tiny_file, photos, "--out", ran, *SMALL, "--resume").code == 0
    assert (ran / "src" / "00.png" / "main.py").read_text() == "mine"
    assert (ran / "src" / "other.py").read_text() == "mine"
    assert not (ran / "src" / "00.png" / "004_left").exists()
    assert complete(ran) == ["00.png", "01.png", "src/00.png"]


# Inputs


@pytest.mark.parametrize("out", ["photos", "photos/.", "photos/../photos", "link", "."])
@pytest.mark.parametrize("more", [(), ("--overwrite",), ("--resume",)])
def test_out_may_not_be_or_hold_the_images(
    out: str,
    more: tuple[str, ...],
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However it is spelt, and even if a run.json lies there: exit code 2, and all stays."""
    (tmp_path / "link").symlink_to(photos)
    for place in (photos, tmp_path):
        (place / "run.json").write_text(json.dumps(GOOD))
    before = snapshot(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = featviz("run", tiny_file, photos, "--out", out, *SMALL, *more)
    refused(done, 2, "holds the input", "00.png", "hint: name another place with --out")
    done = featviz("audit", tiny_file, photos, "--out", out, "--overwrite")
    refused(done, 2, "holds the input")
    assert snapshot(tmp_path) == before


def test_out_may_not_hold_the_model(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """A file, a factory's file, the weights: no folder that holds one becomes the run's."""
    nets = tmp_path / "nets"
    nets.mkdir()
    tiny_file.rename(nets / "tiny.pth")
    (nets / "net.py").write_text("from torch import nn\nmake = nn.Identity\n")
    (nets / "run.json").write_text(json.dumps(GOOD))
    before = snapshot(tmp_path)
    for spec in (nets / "tiny.pth", f"{nets / 'net.py'}:make"):
        for command in (["run", spec, photos], ["kernels", spec], ["audit", spec, photos]):
            done = featviz(*command, "--out", nets, "--overwrite")
            refused(done, 2, "holds the input")
    done = featviz("run", "resnet18", photos, "--weights", nets / "tiny.pth", "--out", nets)
    refused(done, 2, "holds the input")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("option", ["--archive", "--junit", "--prune-out"])
def test_a_file_that_is_written_is_no_input(
    option: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Neither an image, nor the archive it comes from, nor the model."""
    packed = shutil.make_archive(str(tmp_path / "p"), "zip", photos)
    before = snapshot(tmp_path)
    command = ["run"] if option == "--archive" else ["audit"]
    for path in (packed, photos / "00.png", tiny_file):
        done = featviz(*command, tiny_file, photos, packed, option, path, "--overwrite")
        refused(done, 2, f"{option} ", " is the input ")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("where", ["itself", "above"])
@pytest.mark.parametrize("command", ["diff", "merge"])
def test_out_may_not_be_or_hold_a_run_that_is_read(
    where: str, command: str, featviz: Run, ran: Path, tmp_path: Path
) -> None:
    """diff and merge do not replace what they read."""
    out = ran if where == "itself" else tmp_path
    before = snapshot(tmp_path)
    arguments = [ran, ran] if command == "diff" else [ran]
    done = featviz(command, *arguments, "--out", out, *(["--overwrite"] * (command == "merge")))
    assert done.code == 2 and ("the input" in done.err or "overlap" in done.err)
    assert snapshot(tmp_path) == before


def test_out_below_the_images_works_again_and_again(
    featviz: Run, tiny_file: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`featviz run MODEL .` with the default --out; the same for audit. The images stay."""
    before = snapshot(photos)
    monkeypatch.chdir(photos)
    base = ["run", tiny_file, ".", *SMALL]
    assert [featviz(*base, *more).code for more in ((), ("--resume",), ("--overwrite",))] == [0] * 3
    assert complete(photos / "featviz-out") == ["00.png", "01.png"]
    shutil.rmtree("featviz-out")
    audits = ["audit", tiny_file, ".", "--size", "16", "--overwrite"]
    assert [featviz(*audits).code for _ in range(2)] == [0, 0]
    assert json.loads(Path("featviz-audit/audit.json").read_text())["images"]["total"] == 2
    shutil.rmtree("featviz-audit")
    assert snapshot(photos) == before


def test_a_folder_of_images_below_the_images_is_no_out(
    featviz: Run, tiny_file: Path, photos: Path
) -> None:
    """`--out photos/maps` where maps held images when the run began: they stay."""
    make_photos(photos / "maps", 1)
    before = snapshot(photos)
    done = featviz("run", tiny_file, photos, "--out", photos / "maps", "--overwrite", *SMALL)
    refused(done, 1, "is not empty and holds no run of featviz")
    assert snapshot(photos) == before


# The second attempt


def test_a_first_attempt_that_failed_does_not_block_the_second(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Where no image is complete the same command works once its cause is mended."""
    out = tmp_path / "out"
    good = (photos / "00.png").read_bytes()
    (photos / "01.png").unlink()
    (photos / "00.png").write_bytes(b"no picture")
    base = ["run", tiny_file, photos, "--out", out, *SMALL]
    assert featviz(*base).code == 3 or run_json(out)["failures"]
    (photos / "00.png").write_bytes(good)
    (out / "00.png" / "001_0").mkdir(parents=True)
    (out / "00.png" / "001_0" / ".output.png.part").write_text("left")
    assert featviz(*base).code == 0 and complete(out) == ["00.png"]
    (out / "00.png" / "manifest.json").unlink()
    (out / "notes.txt").write_text("mine")
    refused(featviz(*base), 1, "files that featviz did not write: notes.txt")


def test_the_refusal_tells_the_same_run_from_another(
    featviz: Run, tiny: nn.Module, tiny_file: Path, photos: Path, ran: Path, tmp_path: Path
) -> None:
    """And names the way out: --resume for the same run, the difference for another."""
    base = ["run", tiny_file, photos, "--out", ran]
    before = snapshot(ran)
    done = featviz(*base, *SMALL)
    refused(done, 1, "holds the same run, 2 images complete", "hint: --resume goes on with it")
    done = featviz(*base, *SMALL, "--cmap", "viridis")
    refused(done, 1, 'holds another run; its options.cmap is "auto", this one\'s "viridis"')
    nn.init.zeros_(tiny[0].weight)  # type: ignore[index, arg-type]
    torch.save(tiny, tiny_file)
    refused(featviz(*base, *SMALL), 1, "holds another run; its model.sha256 is")
    done = featviz(*base, *SMALL, "--seed", "3")
    refused(done, 1, "holds another run")
    assert snapshot(ran) == before


def test_a_factory_may_give_another_model_under_the_same_name(
    featviz: Run, photos: Path, tmp_path: Path
) -> None:
    """Before it is called nobody knows: the refusal claims no more than the same options."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\nmake = lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU())\n"
    )
    base = ["run", f"{tmp_path / 'net.py'}:make", photos, "--out", tmp_path / "out", *SMALL]
    assert featviz(*base).code == 0
    (tmp_path / "net.py").write_text("raise SystemExit('is not to be run')\n")
    refused(featviz(*base), 1, "holds a run with the same options, 2 images complete")
    (tmp_path / "out" / "a.txt").write_text("mine")
    refused(featviz(*base, "--overwrite"), 1, "did not write: a.txt")


# Images


def _eps(path: Path) -> None:
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) (w) file\nshowpage\n")


def _picture(path: Path) -> bytes:
    make_photos(path, 1)
    return (path / "00.png").read_bytes()


LOOKS: dict[str, tuple[bytes, str]] = {
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PostScript"),
    "EPS with a preview": (b"\xc5\xd0\xd3\xc6" + bytes(60), "EPS"),
    "PDF": (b"%PDF-1.7\n", "PDF"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
    "XML": (b"\xef\xbb\xbf<?xml version='1.0'?><!DOCTYPE x [<!ENTITY a 'b'>]>", "SVG"),
    "HTML": (b"<!DOCTYPE html><script>alert(1)</script>", "HTML"),
    "WMF": (b"\xd7\xcd\xc6\x9a" + bytes(60), "WMF"),
    "Photoshop": (b"8BPS\0\1" + bytes(60), "Photoshop"),
    "FITS": (b"SIMPLE  =                    T", "FITS"),
    "HEIC": (b"\0\0\0\x18ftypheic" + bytes(60), "HEIC"),
    "script": (b"#!/bin/sh\ntouch owned\n", "a script"),
    "zip": (b"PK\3\4" + bytes(60), "a zip file"),
}


@pytest.mark.parametrize("kind", LOOKS)
def test_a_file_that_is_no_picture_says_what_it_looks_like(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is called; no program is started to find out."""
    content, looks = LOOKS[kind]

    def started(*arguments: object, **named: object) -> None:
        pytest.fail(f"a program was started: {arguments}")

    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.setattr("subprocess.check_call", started)
    path = tmp_path / "e.png"
    path.write_bytes(content)
    match = rf"^e\.png is no image that featviz reads: it looks like .*{looks}"
    with pytest.raises(ImageError, match=match):
        decode.decode(Sample("e.png", (path,)))


def test_every_format_on_the_list_is_read(tmp_path: Path) -> None:
    """What is written by Pillow in each of them comes back; EPS is none of them."""
    from featviz.images.formats import IMAGE_FORMATS

    Image.init()
    names = [known.pillow for known in IMAGE_FORMATS]
    assert "EPS" not in names and set(names) - {"AVIF"} <= Image.OPEN.keys()
    read = []
    for name in names:
        if name in Image.SAVE and name in Image.OPEN:
            path = tmp_path / f"{name}.img"
            Image.new("RGB", (16, 16), (200, 100, 50)).save(path, name)
            pixels = np.asarray(decode.decode(Sample("x", (path,))).images[0]).astype(int)
            assert np.abs(pixels - (200, 100, 50)).max() < 12, name
            read.append(name)
    assert len(read) >= 12


ODD_MEMBERS = [
    "run.json/b.png",
    "RUN.JSON/b.png",
    "manifest.json/b.png",
    "stats.npz",
    "manifest.json",
    "run.json",
    "bases.npz/x.png",
    "audit.json/x.png",
    "../../up.png",
    "/etc/x.png",
    "..",
    ".hidden.png",
    ".a.png.0123456789abcdef.part/x.png",
    "a/" * 60 + "x.png",
    "d" * 250 + "/" + "e" * 250 + ".png",
    "con/x.png",
    "a\nb.png",
    "<script>.png",
]


@pytest.mark.parametrize("name", ODD_MEMBERS, ids=lambda name: ascii(name)[:24])
def test_a_member_of_an_archive_takes_no_place_of_ours(
    name: str, featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """It gets a safe name, and the run goes on; run.json stays ours, and --overwrite works."""
    content = _picture(tmp_path / "photos")
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as packed:
        for member in (name, "good.png"):
            packed.writestr(member, content)
    out = tmp_path / "out"
    base = ["run", tiny_file, f"{path}::{name}", f"{path}::good.png", "--out", out, *SMALL]
    if name == "..":
        assert featviz(*base).code in (0, 2, 3)
        return
    done = featviz(*base)
    assert done.code == 0, done.err
    assert len(complete(out)) == 2 and run_json(out)["images"]["total"] == 2
    inside = [part for path in out.rglob("*") for part in path.relative_to(out).parts]
    assert not [part for part in inside if part.startswith(".")]
    assert featviz(*base, "--overwrite").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "photos", "tiny.pth", "x.zip"]


def test_names_that_lead_to_one_folder_are_told_apart(
    featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """One image is called as the safe name of another: both are drawn, in folders of their own."""
    content = _picture(tmp_path / "photos")
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("a:b.png", safe_name("a:b.png"), "a:b.png/c.png"):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    assert featviz("run", tiny_file, path, "--out", tmp_path / "out", *SMALL).code == 0
    assert len(complete(tmp_path / "out")) == 3


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_fifo, _device])
@pytest.mark.parametrize("name", ["odd.png", "odd.tar", "odd.zip", "odd.tar.gz"])
def test_a_fifo_or_device_as_image(
    make: Callable[[Path], None],
    name: str,
    featviz: Run,
    tiny_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Named, as an archive, or on stdin: one line, and nothing waits for a writer."""
    odd = tmp_path / name
    make(odd)
    done = featviz("run", tiny_file, odd, "--out", tmp_path / "out", *SMALL)
    assert done.code in (1, 2, 3) and name in done.err and "Traceback" not in done.err
    assert "no regular file" in done.err or "is no file, but a" in done.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{odd}\n".encode())))
    done = featviz("run", tiny_file, "-", "--out", tmp_path / "other", *SMALL)
    assert done.code in (1, 3) and "is no file, but a" in done.err


def test_a_fifo_in_a_folder_is_no_image(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """It is left out with a warning, and the images are drawn."""
    os.mkfifo(photos / "aa.png")
    (photos / "zero.png").symlink_to("/dev/zero")
    done = featviz("run", tiny_file, photos, "--out", tmp_path / "out", *SMALL)
    assert done.code == 0 and complete(tmp_path / "out") == ["00.png", "01.png"]
    assert done.err.count("is no regular file, and left out") == 2


def test_a_fifo_among_the_stills_of_a_clip(photos: Path) -> None:
    """It is none of the clip's frames, and nothing waits for it."""
    from featviz.images import group

    os.mkfifo(photos / "00a.png")
    (clip,) = group.clips(find.find_samples([str(photos)]))
    assert [path.name for path in clip.paths] == ["00.png", "01.png"]
    named = group.clips(find.find_samples([str(photos / "00a.png")]))
    with pytest.raises(ImageError, match=r"00a\.png is no file, but a FIFO"):
        decode.decode(named[0])


def test_a_file_without_end_is_no_picture(tmp_path: Path) -> None:
    """Its size is looked at before it is read; this one takes no room on the disk."""
    path = tmp_path / "huge.png"
    with path.open("wb") as file:
        file.truncate(archives.MAX_FILE_BYTES + 1)
    with pytest.raises(ImageError, match=r"huge\.png cannot be read: it has 1073741825 bytes"):
        decode.decode(Sample("huge.png", (path,)))


def _header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def _zeros(opener: Callable[..., Any], path: Path, head: bytes, size: int) -> None:
    with opener(path, "wb") as file:
        file.write(head)
        for _ in range(size >> 20):
            file.write(bytes(2**20))


@pytest.mark.parametrize(
    ("opener", "name"), [(gzip.open, "b.tar.gz"), (bz2.open, "b.tar.bz2")], ids=["gz", "bz2"]
)
def test_a_compressed_tar_that_never_ends(
    opener: Callable[..., Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a tar unpacks to is bounded by its own size; the listing stops there."""
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 2**23)
    path = tmp_path / name
    _zeros(opener, path, _header("a.png", 2**34), 2**26)
    assert path.stat().st_size < 100_000
    with pytest.raises(UsageError, match=r"cannot be read: it unpacks to more than \d+ bytes"):
        find.find_samples([str(path)])


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_header_of_many_gigabytes(
    kind: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long name, or extended header, is not read into memory whatever it claims."""
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 2**23)
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 2**22)
    path = tmp_path / "x.tar.gz"
    _zeros(gzip.open, path, _header("a.png", 2**33, kind), 2**26)
    with pytest.raises(UsageError, match=r"cannot be read: "):
        find.find_samples([str(path)])


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_header_of_a_few_megabytes(kind: bytes, tmp_path: Path) -> None:
    """A header is read at once, and its copies take several times its size: it has to be short."""
    size = archives.MAX_HEADER_BYTES + 1
    record = b"%d path=" % size
    body = record + b"a" * (size - len(record) - 1) + b"\n"
    path = tmp_path / "x.tar.gz"
    with gzip.open(path, "wb") as file:
        file.write(_header("a.png", size, kind) + body + bytes(-size % 512))
        file.write(_header("b.png", 0) + bytes(1024))
    with pytest.raises(UsageError, match=r"cannot be read: it has a header of \d+ bytes"):
        find.find_samples([str(path)])


def test_a_million_members_in_a_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted while they are listed."""
    monkeypatch.setattr(archives, "MAX_MEMBERS", 500)
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(_header("a.png", 0) * 5000 + bytes(1024)))
    with pytest.raises(UsageError, match=r"it has more than \d+ members, packed into a few bytes"):
        find.find_samples([str(path)])


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_that_lies_about_its_sizes(method: int, tmp_path: Path) -> None:
    """A member gives no more than it says, however much its data unpacks to."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", method) as packed:
        packed.writestr("a.png", bytes(2**26))
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        at = data.index(signature) + offset
        data[at : at + 4] = (100).to_bytes(4, "little")
    path.write_bytes(data)
    (sample,) = find.find_samples([str(path)])
    with pytest.raises(ImageError, match=r"a\.png"):
        decode.decode(sample)


def test_links_and_devices_in_a_tar_are_no_images(tmp_path: Path) -> None:
    """Neither followed nor made; hard links, FIFOs and devices as little as symbolic links."""
    content = _picture(tmp_path / "photos")
    path = tmp_path / "x.tar"
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE)
    with tarfile.open(path, "w") as tar:
        for number, kind in enumerate(kinds):
            info = tarfile.TarInfo(f"{number}.png")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        info = tarfile.TarInfo("good.png")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    assert [sample.name for sample in find.find_samples([str(path)])] == ["good.png"]


# What was found on the way


@pytest.mark.parametrize(
    "text", ["²/4", "1/²", "٣/4", "1/" + "9" * 5000, "0/4", "5/4", "1/0", "/", ""]
)
def test_odd_shards_are_usage_errors(
    text: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Digits of other kinds are no numbers, and neither are five thousand nines."""
    done = featviz("run", tiny_file, photos, "--shard", text, "--out", tmp_path / "out")
    refused(done, 2, "is no part of a whole", "I/N with I from 1 to N")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rank", "size", "says"), [("0", "2", True), ("1", "2", False)])
def test_a_dry_run_under_torchrun_is_said_once(
    rank: str,
    size: str,
    says: bool,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first process speaks for all."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    done = featviz("run", tiny_file, photos, "--dry-run", *SMALL)
    assert done.code == 0 and ("2 images: " in done.out) == says and bool(done.out) == says


def test_bare_featviz_shows_the_help_and_no_error(featviz: Run) -> None:
    """It is the answer to the question, as click gives it."""
    done = featviz()
    assert done.code in (0, 2) and "error" not in done.out + done.err
    assert "Usage: featviz" in done.out + done.err and "Commands:" in done.out + done.err


def test_the_help_of_audit_says_one_thing_of_layers(featviz: Run) -> None:
    """Without --layers it looks at all activations, and says so wherever it speaks of it."""
    words = " ".join(featviz("audit", "--help").out.split())
    assert "[default: (all activations, functions included)]" in words
    assert "one layer for each stage" not in words
    assert "one layer for each stage" in " ".join(featviz("run", "--help").out.split())


def test_audit_verify_names_the_image_that_fails(
    featviz: Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that is broken from the start does not shift the names of the others."""
    make_photos(photos, 4)
    (photos / "00.png").write_bytes(b"no picture")
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU())
    with torch.no_grad():
        net[0].bias[1] = -1000.0  # type: ignore[union-attr, index]
    torch.save(net.eval(), tmp_path / "net.pth")
    real, seen = decode.decode, []

    def vanishing(sample: Sample, *more: Any) -> Any:
        seen.append(sample.name)
        if sample.name == "02.png" and seen.count("02.png") > 1:
            raise ImageError("02.png cannot be read: it vanished", None)
        return real(sample, *more)

    monkeypatch.setattr("featviz.images.decode.decode", vanishing)
    base = ["audit", tmp_path / "net.pth", photos, "--size", "16", "--out", tmp_path / "out"]
    done = featviz(*base, "--verify", "--max-suspects", "0")
    assert "error: 02.png: 02.png cannot be read: it vanished" in done.err
    assert "error: 01.png" not in done.err and "error: 00.png: 00.png is no image" in done.err


def test_the_walk_over_a_large_run_is_quick(tmp_path: Path) -> None:
    """Every manifest is read once, not once for each file (a count, no clock)."""
    run = write.RunDirectory.create(tmp_path / "out")
    names = [f"{n:02d}.png" for n in range(20)]
    for name in names:
        folder = run.image(name)
        files = [f"{n:03d}_x/output.png" for n in range(20)]
        for file in files:
            with folder.writing(file) as opened:
                opened.write(b"")
        folder.finish({"image": {"path": name}, "captures": [{"file": f} for f in files]}, {})
    run.write_run({**GOOD, "images": {"total": 20, "complete": names}})
    reads: list[object] = []
    real = ownership._record
    ownership._record = lambda *a: reads.append(a) or real(*a)  # type: ignore[func-returns-value]
    try:
        claim = ownership.of_run(tmp_path / "out")
        assert claim is not None and claim.strangers() == [] and len(claim.files()) == 441
    finally:
        ownership._record = real
    assert len(reads) == 21
