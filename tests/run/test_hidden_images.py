"""Hidden folders of images: what killed runs leave goes, what is not ours stays, and
nobody reads half an image."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from conftest import Run
from networks import Net
from PIL import Image
from runs import SMALL, make_photos, refused, run_json, snapshot
from torch import Tensor, nn

import featviz as fv
from featviz.rundir.folder import hidden_name, hides

pytestmark = pytest.mark.medium


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """`00.png` and `01.png`, also in the folders `a` and `a/b`."""
    for folder in (".", "a", "a/b"):
        make_photos(tmp_path / "photos" / folder, 2)
    return tmp_path / "photos"


def hidden(out: Path) -> list[str]:
    """Hidden files and folders, empty ones among them."""
    return sorted(path.relative_to(out).as_posix() for path in out.rglob(".*"))


def copy_hidden(image: Path) -> Path:
    """What a run leaves that was killed before its image got its name."""
    return shutil.copytree(image, image.with_name(hidden_name(image.name)))


def hide(image: Path) -> Path:
    """The same, with the image itself not there."""
    return image.rename(image.with_name(hidden_name(image.name)))


def hide_unfinished(image: Path) -> Path:
    """What a run leaves that was killed while it wrote the image."""
    folder = hide(image)
    (folder / "manifest.json").unlink()
    (folder / "stats.npz").write_bytes(b"PK")
    return folder


def hide_empty(image: Path) -> Path:
    """What a run leaves that was killed before the first picture."""
    folder = hide(image)
    shutil.rmtree(folder)
    (folder / "000_0").mkdir(parents=True)
    return folder


def note_missing(out: Path) -> None:
    """run.json as it was when the run began, before any image was complete."""
    record = run_json(out)
    names = [*record["images"]["complete"], *record["images"]["missing"]]
    record["images"] = {"total": len(names), "complete": [], "missing": names}
    (out / "run.json").write_text(json.dumps(record))


@pytest.fixture(
    params=[
        ("01.png", hide_unfinished),
        pytest.param(("a/b/01.png", hide_empty), marks=pytest.mark.slow),
        pytest.param(("a/b/01.png", copy_hidden), marks=pytest.mark.slow),
    ],
    ids=["unfinished", "empty", "complete beside"],
)
def killed(request: pytest.FixtureRequest, undisturbed: Path, tmp_path: Path) -> Path:
    """What a run leaves that was killed, with a file of somebody in its hidden
    folder."""
    out = shutil.copytree(undisturbed, tmp_path / "killed")
    name, harm = request.param
    (harm(out / name) / "note.txt").write_text("left")
    if harm != copy_hidden:
        note_missing(out)
    return out


def test_resume_clears_what_a_killed_run_left(
    draw: Run, killed: Path, undisturbed: Path
) -> None:
    """It ends in the tree of an uninterrupted run, to the last empty folder."""
    assert draw(killed, "--resume").code == 0
    assert snapshot(killed) == snapshot(undisturbed)


@pytest.fixture
def fewer(featviz: Run, tiny_file: Path, photos: Path) -> Run:
    """The run with one image, into a folder, with more options."""
    base = ("run", tiny_file, photos / "00.png", *SMALL, "--out")
    return lambda *more: featviz(*base, *more)


def test_resume_with_fewer_images_clears_it_too(
    draw: Run, fewer: Run, killed: Path, undisturbed: Path
) -> None:
    """Nothing hidden stays; with all images the run is whole again."""
    assert fewer(killed, "--resume").code == 0
    assert hidden(killed) == []
    assert draw(killed, "--resume").code == 0
    assert snapshot(killed) == snapshot(undisturbed)


def test_overwrite_clears_it_too(fewer: Run, killed: Path, tmp_path: Path) -> None:
    """Nothing of the old run stays."""
    assert fewer(killed, "--overwrite").code == 0
    assert fewer(tmp_path / "new").code == 0
    assert snapshot(killed) == snapshot(tmp_path / "new")


@pytest.mark.parametrize(
    "folder", [".01.png.part", pytest.param("a/x/y", marks=pytest.mark.slow)]
)
def test_folders_of_others_that_look_hidden(
    folder: str, draw: Run, undisturbed: Path
) -> None:
    """No image of the run would be in their place: even their empty folders stay."""
    (undisturbed / folder / "empty").mkdir(parents=True)
    (undisturbed / folder / "input.png").write_text("mine")
    before = snapshot(undisturbed)
    done = draw(undisturbed, "--resume")
    assert done.code == 0
    assert "stays" not in done.err
    assert snapshot(undisturbed) == before
    refused(draw(undisturbed, "--overwrite"), 1, "featviz did not write: ")


def test_a_shard_leaves_what_another_may_be_writing(
    draw: Run, undisturbed: Path
) -> None:
    """Of two shards with --resume in one folder each clears its own images; all are
    cleared without --shard."""
    before = snapshot(undisturbed)
    for name in ("00.png", "01.png"):
        hide_unfinished(undisturbed / name)
    note_missing(undisturbed)
    assert draw(undisturbed, "--resume", "--shard", "1/2").code == 0
    assert hides(hidden(undisturbed)[0], "01.png")
    assert draw(undisturbed, "--resume").code == 0
    assert snapshot(undisturbed) == before


# Readers


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("report", ()),
        ("sheet", ("--layers", "0")),
        ("merge", ()),
    ],
)
def test_no_reader_sees_a_hidden_folder(
    command: str,
    options: tuple[str, ...],
    featviz: Run,
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    """Each gives what it gives without it, whatever it holds."""
    results = {}
    for name in ("plain", "beside"):
        run = shutil.copytree(undisturbed, tmp_path / name / "run")
        if name == "beside":
            for image in ("01.png", "a/b/00.png"):
                (copy_hidden(run / image) / "input.png").write_bytes(b"half a picture")
        out = tmp_path / name / "result.png"
        assert featviz(command, run, *options, "--out", out).code == 0
        results[name] = out.read_bytes() if out.is_file() else snapshot(out)
    assert results["plain"] == results["beside"]


def test_a_comparison_sees_no_hidden_folder(featviz: Run, undisturbed: Path) -> None:
    """A run with one is equal to that without it."""
    beside = shutil.copytree(undisturbed, undisturbed.with_name("beside"))
    (copy_hidden(beside / "01.png") / "input.png").write_bytes(b"half a picture")
    done = featviz("diff", undisturbed, beside)
    assert done.code == 0
    assert ".part" not in done.out + done.err


# Images that fail


def test_a_failed_image_leaves_nothing(tmp_path: Path) -> None:
    """Neither a hidden folder nor folders above it stay, in a folder of its own as
    beside others, where layers are drawn before the model raises at bright pictures."""

    def forward(self: Net, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.conv(x))
        if x.mean() > 1:
            raise ValueError("too bright")
        return y.mean((2, 3))

    picky = Net(forward, conv=nn.Conv2d(3, 2, 3), relu=nn.ReLU())
    photos = make_photos(tmp_path / "photos" / "mixed", 2).parent
    for name in ("mixed/02.png", "bad/deep/00.png", "bad/01.png"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), "white").save(photos / name)
    out = tmp_path / "out"
    done = fv.run(picky, photos, out=out, size=16)
    assert len(done.failures) == 3
    folders = [path for path in out.glob("*/") if path.is_dir()]
    assert folders == [out / "mixed"]
    assert sorted(path.name for path in folders[0].iterdir()) == ["00.png", "01.png"]


def test_two_parts_of_an_output_with_one_name(photos: Path, tmp_path: Path) -> None:
    """The first is drawn, the second is skipped with a reason: the run goes on, and
    reads back."""
    twice = Net(lambda self, x: {"a": {"b": x}, "a.b": x + 1, "c": x})
    model = nn.Sequential(twice, Net(lambda self, parts: parts["c"].mean((2, 3))))
    run = partial(
        fv.run, model, photos / "00.png", "0", tmp_path / "out", size=16, tensors="npy"
    )
    (image,) = run().images
    assert [row.key for row in image.captures] == ["a.b", "c"]
    reason = "another part of this output has the same name"
    assert [(row.key, row.reason) for row in image.skipped] == [("a.b", reason)]
    assert run(resume=True).images[0].kept
