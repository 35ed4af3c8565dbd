"""Hidden folders of images: what killed runs leave goes, what is not ours stays, and
nobody reads half an image."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import Run
from networks import Net
from PIL import Image
from runs import SMALL, complete, make_photos, refused, run_json, snapshot
from torch import Tensor, nn

import featviz as fv
from featviz.rundir.folder import hidden_name, hides


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """`00.png` and `01.png`, also in the folders `a` and `a/b`."""
    for folder in (".", "a", "a/b"):
        make_photos(tmp_path / "photos" / folder, 2)
    return tmp_path / "photos"


def hidden(out: Path) -> list[str]:
    """Hidden files and folders, empty ones among them."""
    return sorted(p.relative_to(out).as_posix() for p in out.rglob(".*"))


def hide(out: Path, name: str, state: str) -> Path:
    """What a run leaves that was killed while it wrote this image."""
    folder = out / name
    hidden = folder.with_name(hidden_name(folder.name))
    if state == "complete beside":
        shutil.copytree(folder, hidden)
        return hidden
    folder.rename(hidden)
    if state == "no manifest":
        (hidden / "manifest.json").unlink()
        (hidden / "stats.npz").write_bytes(b"PK")
    if state == "empty":
        shutil.rmtree(hidden)
        (hidden / "000_0").mkdir(parents=True)
    note_missing(out)
    return hidden


def note_missing(out: Path) -> None:
    """run.json as it was when the run began, before any image was complete."""
    run = run_json(out)
    names = [*run["images"]["complete"], *run["images"]["missing"]]
    run["images"] = {"total": len(names), "complete": [], "missing": names}
    (out / "run.json").write_text(json.dumps(run))


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("01.png", "no manifest"),
        pytest.param("a/b/01.png", "empty", marks=pytest.mark.slow),
        pytest.param("a/b/01.png", "complete beside", marks=pytest.mark.slow),
    ],
)
def test_what_a_killed_run_left_is_cleared(
    name: str,
    state: str,
    draw: Run,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    """--resume ends in the tree of an uninterrupted run, to the last empty folder; with
    fewer images, too, nothing hidden stays, and --overwrite leaves nothing of the old
    run. A file in a hidden folder goes with it."""
    before = snapshot(whole)
    fewer = ["run", tiny_file, photos / "00.png", *SMALL, "--out"]
    (hide(whole, name, state) / "note.txt").write_text("left")
    assert draw(whole, "--resume").code == 0
    assert snapshot(whole) == before
    assert hidden(whole) == []
    hide(whole, name, state)
    assert featviz(*fewer, whole, "--resume").code == 0
    assert hidden(whole) == []
    assert draw(whole, "--resume").code == 0
    assert snapshot(whole) == before
    hide(whole, name, state)
    assert featviz(*fewer, whole, "--overwrite").code == 0
    assert featviz(*fewer, tmp_path / "new").code == 0
    assert snapshot(whole) == snapshot(tmp_path / "new")


@pytest.mark.parametrize(
    "folder", [".01.png.part", pytest.param("a/x/y", marks=pytest.mark.slow)]
)
def test_folders_of_others_that_look_hidden(
    folder: str, draw: Run, featviz: Run, whole: Path
) -> None:
    """No image of the run would be in their place: even their empty folders stay."""
    (whole / folder / "empty").mkdir(parents=True)
    (whole / folder / "input.png").write_text("mine")
    before = snapshot(whole)
    done = draw(whole, "--resume")
    assert done.code == 0
    assert "stays" not in done.err
    assert snapshot(whole) == before
    done = draw(whole, "--overwrite")
    refused(done, 1, "featviz did not write: ")


def test_a_shard_leaves_what_another_may_be_writing(draw: Run, whole: Path) -> None:
    """Two shards with --resume in one folder: each clears its own images; all are
    cleared without --shard."""
    before = snapshot(whole)
    own_image = "00.png"
    foreign_image = "01.png"
    hide(whole, own_image, "no manifest")
    hide(whole, foreign_image, "no manifest")
    assert draw(whole, "--resume", "--shard", "1/2").code == 0
    assert hides(hidden(whole)[0], foreign_image)
    assert draw(whole, "--resume").code == 0
    assert snapshot(whole) == before


# Readers


def test_no_reader_sees_a_hidden_folder(
    featviz: Run, tiny_file: Path, photos: Path, whole: Path, tmp_path: Path
) -> None:
    """report, sheet, diff and merge give what they give without it, whatever it holds."""
    results = {}
    for name in ("plain", "beside"):
        run = tmp_path / name / "run"
        out = tmp_path / name / "results"
        shutil.copytree(whole, run)
        if name == "beside":
            for image in ("01.png", "a/b/00.png"):
                (hide(run, image, "complete beside") / "input.png").write_bytes(
                    b"half a picture"
                )
        assert featviz("report", run, "--out", out / "report").code == 0
        assert (
            featviz("sheet", run, "--layers", "0", "--out", out / "sheet.png").code == 0
        )
        assert featviz("merge", run, "--out", out / "merged").code == 0
        results[name] = snapshot(out)
    assert results["plain"] == results["beside"]
    done = featviz("diff", whole, tmp_path / "beside" / "run")
    assert done.code == 0
    assert ".part" not in done.out + done.err


# Images that fail


def test_a_failed_image_leaves_nothing(tmp_path: Path) -> None:
    """Neither a hidden folder nor folders above it, in a folder of its own as beside
    others, where two layers of pictures that are mostly bright are drawn before the
    model raises."""

    def way(self: Net, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.conv(x))
        if x.mean() > 1:
            raise ValueError("too bright")
        return y.mean((2, 3))

    picky = Net(way, conv=nn.Conv2d(3, 2, 3), relu=nn.ReLU())
    make_photos(tmp_path / "photos" / "mixed", 2)
    for name in ("mixed/02.png", "bad/deep/00.png", "bad/01.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), "white").save(tmp_path / "photos" / name)
    done = fv.run(picky, tmp_path / "photos", out=tmp_path / "out", size=16)
    assert len(done.failures) == 3
    assert complete(tmp_path / "out") == ["mixed/00.png", "mixed/01.png"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"mixed", "run.json"}
    assert {path.name for path in (tmp_path / "out" / "mixed").iterdir()} == {
        "00.png",
        "01.png",
    }


def test_two_parts_of_an_output_with_one_name(photos: Path, tmp_path: Path) -> None:
    """The first is drawn, the second is skipped with a reason: the run goes on, and
    reads back."""
    twice = Net(lambda self, x: {"a": {"b": x}, "a.b": x + 1, "c": x})
    model = nn.Sequential(twice, Net(lambda self, parts: parts["c"].mean((2, 3))))
    arguments = (model, photos / "00.png", "0", tmp_path / "out")
    done = fv.run(*arguments, size=16, tensors="npy")
    (image,) = done.images
    assert [row.key for row in image.captures] == ["a.b", "c"]
    assert [(row.key, row.reason) for row in image.skipped] == [
        ("a.b", "another part of this output has the same name")
    ]
    assert fv.run(*arguments, size=16, tensors="npy", resume=True).images[0].kept


# Kernels
