"""Going on with a run: what is complete stays, all else is done again, another run is
refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from PIL import Image
from runs import SMALL, check_whole, make_photos, refused, run_json, tree
from torch import nn

import featviz as fv
from featviz.rundir.folder import Folder, hidden_name
from featviz.rundir.ownership import look
from featviz.rundir.write import RunDirectory, json_bytes

pytestmark = pytest.mark.medium


ODD_NAMES = ["a?b.png", "a:b.png", "con.png", "end .png"]
"""Of images; their folders have other names, which all systems can have."""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four pictures."""
    return make_photos(tmp_path / "photos", 4)


@pytest.fixture
def half(undisturbed: Path, tmp_path: Path) -> Path:
    """What a run leaves that was killed in its third image."""
    out = shutil.copytree(undisturbed, tmp_path / "half")
    shutil.rmtree(out / "03.png")
    (out / "02.png" / "manifest.json").unlink()
    (out / "02.png" / "000_0" / "x").mkdir(parents=True)
    (out / "02.png" / "000_0" / hidden_name("output.png")).write_bytes(b"\x89PNG")
    (out / hidden_name("run.json")).write_bytes(b"{")
    record = run_json(undisturbed)
    names = sorted(record["images"]["complete"])
    record["images"] = {"total": 4, "complete": [], "missing": names}
    (out / "run.json").write_text(json.dumps(record))
    return out


def lines_of(output: str) -> list[dict[str, Any]]:
    """What `--json` prints of each image."""
    return [json.loads(line) for line in output.splitlines()]


def test_what_is_complete_is_kept_and_the_rest_is_done(
    draw: Run, undisturbed: Path, half: Path
) -> None:
    """The tree ends equal to an uninterrupted one, and complete images were not
    touched."""
    manifest = half / "00.png" / "manifest.json"
    before = manifest.stat().st_mtime_ns
    done = draw(half, "--resume")
    assert done.code == 0
    assert "(2 were complete before)" in done.err
    assert tree(half) == tree(undisturbed)
    assert manifest.stat().st_mtime_ns == before


def test_a_line_tells_whether_its_image_was_kept(draw: Run, half: Path) -> None:
    """Those of kept images have the fields and the pictures of others."""
    lines = lines_of(draw(half, "--resume", "--json").out)
    assert [line["image"] for line in lines] == ["00.png", "01.png", "02.png", "03.png"]
    assert [line.get("kept") for line in lines] == [True, True, None, None]
    first, _, third, _ = lines
    assert first["prediction"]
    assert set(first) == {*third, "kept"}
    assert first["files"] == third["files"]


@pytest.mark.slow
@pytest.mark.parametrize("names", [[], [hidden_name("run.json")]])
def test_resume_without_a_run_begins_one(
    names: list[str], draw: Run, undisturbed: Path, tmp_path: Path
) -> None:
    """An empty folder, and one whose run.json was being written, are as none."""
    out = tmp_path / "out"
    out.mkdir()
    for name in names:
        (out / name).write_text("{")
    assert draw(out, "--resume").code == 0
    assert tree(out) == tree(undisturbed)


@pytest.mark.parametrize("options", [("--no-marks",), ("--ablate", "0:1")])
def test_other_options_are_refused_by_name(
    options: tuple[str, ...], draw: Run, undisturbed: Path
) -> None:
    """The message says which option it is, what it was and what it would be."""
    before = tree(undisturbed)
    difference = f"there the default, here {' '.join(options)}"
    done = draw(undisturbed, "--resume", *options)
    refused(done, 1, "holds another run: there ", difference)
    assert tree(undisturbed) == before


def test_other_weights_are_another_model(
    draw: Run, tiny: nn.Module, tiny_file: Path, tmp_path: Path
) -> None:
    """The digest of the file tells; where there is no folder, --resume begins one."""
    assert draw(tmp_path / "out", "--resume").code == 0
    torch.nn.init.zeros_(tiny[0].weight)  # type: ignore[index, arg-type]
    torch.save(tiny, tiny_file)
    refused(draw(tmp_path / "out", "--resume"), 1, "its model.sha256 is")


FACTORY = """
import torch
from torch import nn

def make(width=2):
    net = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU())
    torch.nn.init.constant_(net[0].weight, 0.5)
    return net
"""


@pytest.fixture
def from_factory(featviz: Run, photos: Path, tmp_path: Path) -> Run:
    """A run of the model of a factory, with more options; the first one is drawn."""
    file = tmp_path / "net.py"
    file.write_text(FACTORY)
    run = ("run", f"{file}:make", photos, "--out", tmp_path / "out", *SMALL)
    assert featviz(*run).code == 0
    return lambda *more: featviz(*run, "--resume", *more)


def test_a_factory_gives_the_same_model_again(from_factory: Run) -> None:
    """Its code and its parameters are the same."""
    assert from_factory().code == 0


def test_a_factory_with_other_arguments_gives_another_model(from_factory: Run) -> None:
    """The parameters tell."""
    done = from_factory("--model-arg", "width=3")
    refused(done, 1, "its model.parameters is")


def test_a_factory_that_was_edited_gives_another_model(
    from_factory: Run, tmp_path: Path
) -> None:
    """The digest of its code tells."""
    (tmp_path / "net.py").write_text(FACTORY.replace("0.5", "0.25"))
    refused(from_factory(), 1, "its model.code_sha256 is")


def test_from_python(tiny: nn.Module, photos: Path, tmp_path: Path) -> None:
    """featviz.run(resume=True) keeps what is complete, and refuses a module with other
    weights."""
    fv.run(tiny, photos, "Conv2d", tmp_path / "out", size=16)
    again = fv.run(tiny, photos, "Conv2d", tmp_path / "out", size=16, resume=True)
    kept = [(image.kept, len(image.captures)) for image in again.images]
    assert kept == [(True, 1)] * 4
    torch.nn.init.zeros_(tiny[0].weight)  # type: ignore[index, arg-type]
    with pytest.raises(fv.errors.StoreError, match=r"its model\.parameters is"):
        fv.run(tiny, photos, "Conv2d", tmp_path / "out", size=16, resume=True)


def test_an_image_that_has_changed_is_done_again(
    draw: Run, photos: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Its sha256 tells; the tree is that of a new run."""
    Image.new("RGB", (30, 20), "red").save(photos / "02.png")
    assert draw(undisturbed, "--resume").code == 0
    assert draw(tmp_path / "new").code == 0
    assert tree(undisturbed) == tree(tmp_path / "new")


def test_failures_are_tried_again_and_keep_the_exit_code(
    draw: Run, photos: Path, tmp_path: Path
) -> None:
    """An image that stays broken ends a resumed run with 3; mended, with 0."""
    out = tmp_path / "out"
    good = (photos / "01.png").read_bytes()
    (photos / "01.png").write_bytes(good[:60])
    assert draw(out).code == 3
    before = tree(out)
    refused(draw(out, "--resume"), 3, "error: 01.png ")
    assert tree(out) == before
    (photos / "01.png").write_bytes(good)
    assert draw(out, "--resume").code == 0
    assert run_json(out)["failures"] == []


def test_an_image_that_was_mended_by_a_killed_shard_is_no_failure(
    draw: Run, photos: Path, tmp_path: Path
) -> None:
    """Its manifest counts, not the run.json that the killed one did not write."""
    out = tmp_path / "out"
    good = (photos / "01.png").read_bytes()
    (photos / "01.png").write_bytes(good[:60])
    draw(out, "--shard", "1/2")
    assert draw(out, "--shard", "2/2").code == 3
    earlier = (out / "run.json").read_bytes()
    (photos / "01.png").write_bytes(good)
    assert draw(out, "--shard", "2/2", "--resume").code == 0
    (out / "run.json").write_bytes(earlier)
    assert draw(out, "--shard", "1/2", "--resume").code == 0
    assert run_json(out)["failures"] == []


@pytest.mark.parametrize("count", [1, 5, 12])
def test_an_overwrite_that_is_killed_leaves_nothing_that_looks_complete(
    count: int, draw: Run, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the removal got, there is no manifest without its files, and --resume
    makes the run whole."""
    before = tree(undisturbed)
    unlink = os.unlink
    removed: list[object] = []

    def killed(path: Any, **options: Any) -> None:
        if len(removed) == count:
            raise SystemExit(9)
        removed.append(path)
        unlink(path, **options)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(os, "unlink", killed)
        RunDirectory(Folder.open(undisturbed)).clear(look(undisturbed).ours)
    check_whole(undisturbed)
    assert (undisturbed / "run.json").is_file()
    assert draw(undisturbed, "--resume").code == 0
    assert tree(undisturbed) == before


def rewrite(path: Path, old: str, new: str) -> None:
    """Replace a text in a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def sealed_anew(folder: Path, **fields: object) -> None:
    """Change fields of a manifest that stays sound and sealed, as `verify` says."""
    content = {**json.loads((folder / "manifest.json").read_text()), **fields}
    del content["sha256"]
    (folder / "manifest.json").write_bytes(json_bytes(content, sealed=True))


HARMS: dict[str, Callable[[Path], object]] = {
    "cut": lambda image: (image / "manifest.json").write_bytes(b'{"schema_version": 2'),
    "another run": lambda image: sealed_anew(image, fingerprint="0" * 64),
    "outside": lambda image: rewrite(
        image / "manifest.json", "/output.png", "/../../../secret.png"
    ),
    "picture": lambda image: next(image.rglob("output.png")).unlink(),
    "short": lambda image: os.truncate(next(image.rglob("output.png")), 99),
    "statistics": lambda image: (image / "stats.npz").write_bytes(b"PK"),
}


@pytest.mark.parametrize(
    "harm",
    [
        "another run",
        "short",
        pytest.param("cut", marks=pytest.mark.slow),
        pytest.param("outside", marks=pytest.mark.slow),
        pytest.param("picture", marks=pytest.mark.slow),
        pytest.param("statistics", marks=pytest.mark.slow),
    ],
)
def test_an_image_that_does_not_fit_is_drawn_again(
    harm: str, draw: Run, undisturbed: Path
) -> None:
    """--resume believes a manifest as little as report does, keeps the others, removes
    what it left, and ends in the same tree."""
    before = tree(undisturbed)
    HARMS[harm](undisturbed / "01.png")
    (undisturbed / "01.png" / "004_left" / "output.png").parent.mkdir()
    assert tree(undisturbed) != before
    done = draw(undisturbed, "--resume", "--json")
    kept = [line.get("kept") for line in lines_of(done.out)]
    assert kept == [True, None, True, True]
    assert tree(undisturbed) == before
    assert not (undisturbed / "01.png" / "004_left").exists()


def test_an_image_that_cannot_be_drawn_again_fails_alone(
    draw: Run, undisturbed: Path
) -> None:
    """Its folder holds somebody's file beside a manifest of other settings."""
    sealed_anew(undisturbed / "01.png", fingerprint="0" * 64)
    (undisturbed / "01.png" / "notes.txt").write_text("mine")
    done = draw(undisturbed, "--resume", "--json")
    refused(done, 3, "01.png", "holds files that featviz did not write")
    assert [line["image"] for line in lines_of(done.out)] == [
        "00.png",
        "01.png",
        "02.png",
        "03.png",
    ]
    assert (undisturbed / "01.png" / "notes.txt").read_text() == "mine"


def test_images_whose_names_no_folder_can_have_are_found_complete(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """The second shard names those of the first in run.json, and no shard is drawn
    twice."""
    for photo, name in zip(sorted(photos.iterdir()), ODD_NAMES, strict=True):
        photo.rename(photos / name)
    out = tmp_path / "out"
    command = ["run", tiny_file, photos, *SMALL, "--out", out]
    for shard in ("1/2", "2/2"):
        done = featviz(*command, "--shard", shard)
        assert done.code == 0, done.err
    images = run_json(out)["images"]
    assert (sorted(images["complete"]), images["missing"]) == (sorted(ODD_NAMES), [])
    refused(featviz(*command, "--shard", "1/2"), 1, "2 images of shard 1/2")
