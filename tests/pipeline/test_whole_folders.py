"""The folder of a run while it is written: that it stays the same one, what replaces it and when,
and how its run.json comes back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Outcome
from runs import SMALL, check_whole, complete, make_photos, packed_tree, refused, run_json, tree

from featviz import pipeline
from featviz.errors import StoreError
from featviz.pipeline import session
from featviz.records import Sample
from featviz.rundir import archive

Run = Callable[..., Outcome]
AtImage = Callable[[str, Callable[[], object]], None]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 5)


@pytest.fixture
def whole(featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path) -> Path:
    """The same run as the tests make, undisturbed."""
    assert featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "whole").code == 0
    return tmp_path / "whole"


@pytest.fixture
def at_image(monkeypatch: pytest.MonkeyPatch) -> AtImage:
    """Have something happen once, when an image is about to be read."""
    events: dict[str, Callable[[], object]] = {}
    real = session.Session.visit

    def visit(self: session.Session, sample: Sample, *more: object) -> None:
        events.pop(sample.name, lambda: None)()
        real(self, sample, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(session.Session, "visit", visit)
    return events.__setitem__


# The folder goes away


@pytest.mark.parametrize("image", ["00.png", "01.png", "02.png", "04.png"])
@pytest.mark.parametrize("how", ["renamed", "removed", "replaced"])
def test_a_folder_that_goes_away_ends_the_run(
    image: str,
    how: str,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    whole: Path,
    at_image: AtImage,
) -> None:
    """Exit code 1, and no run.json that lists images which are not there."""
    out, elsewhere = whole.parent / "out", whole.parent / "elsewhere"

    def go() -> None:
        while how == "removed" and out.exists():  # encoders write into it meanwhile
            shutil.rmtree(out, ignore_errors=True)
        if how != "removed":
            out.rename(elsewhere)
        if how == "replaced":
            out.mkdir()

    at_image(image, go)
    base = ["run", tiny_file, photos, *SMALL, "--out"]
    done = featviz(*base, out)
    refused(done, 1, "was removed or renamed while the run wrote into it")
    assert not (out / "run.json").exists() and complete(out) == []
    if how != "removed":
        check_whole(elsewhere)
        assert featviz(*base, elsewhere, "--resume").code == 0
        assert tree(elsewhere) == tree(whole)


# run.json


@pytest.mark.parametrize("damage", ["missing", "empty", "half", "older"])
def test_run_json_comes_back_from_the_manifests(
    damage: str, featviz: Run, tiny_file: Path, photos: Path, whole: Path
) -> None:
    """--resume keeps the images, and writes it as it was."""
    before, path = tree(whole), whole / "run.json"
    if damage == "missing":
        path.unlink()
    elif damage == "older":
        images = {"total": 5, "complete": [], "missing": run_json(whole)["images"]["complete"]}
        path.write_text(json.dumps({**run_json(whole), "images": images}))
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:200])
    done = featviz("run", tiny_file, photos, *SMALL, "--out", whole, "--resume", "--json")
    assert done.code == 0 and done.out.count('"kept": true') == 5
    assert tree(whole) == before


def test_images_of_another_run_are_not_taken_over(
    featviz: Run, tiny_file: Path, photos: Path, whole: Path
) -> None:
    """Without run.json, too, --resume goes on with the same run only."""
    (whole / "run.json").unlink()
    before = tree(whole)
    done = featviz(
        *("run", tiny_file, photos, *SMALL, "--cmap", "viridis", "--out", whole, "--resume")
    )
    refused(done, 1, "is not empty and holds no run of featviz")
    assert tree(whole) == before


def test_run_json_is_written_while_a_run_goes_on(
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    tmp_path: Path,
    at_image: AtImage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed at the fifth image, it lists those that were complete when it was last due."""
    monkeypatch.setattr(pipeline, "SAVED_EVERY", 0)
    seen: list[list[str]] = []
    at_image("04.png", lambda: seen.append(run_json(tmp_path / "out")["images"]["complete"]))
    assert featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "out").code == 0
    assert seen[0] and set(seen[0]) <= {"00.png", "01.png", "02.png"}


# Inputs that are gone


def test_images_whose_inputs_are_gone_are_named_and_pruned(
    featviz: Run, tiny_file: Path, photos: Path, whole: Path
) -> None:
    """--resume leaves them, and says so; --prune leaves the tree of a run without them."""
    (photos / "01.png").unlink()
    (photos / "03.png").unlink()
    base = ["run", tiny_file, photos, *SMALL, "--out"]
    done = featviz(*base, whole, "--resume")
    assert done.code == 0
    assert "01.png, 03.png: stays; --prune removes what is, no longer among the inputs" in done.err
    assert len(complete(whole)) == 5
    (whole / "01.png" / "notes.txt").write_text("mine")
    done = featviz(*base, whole, "--resume", "--prune")
    assert done.code == 0 and "01.png, 03.png: removed, no longer among the inputs" in done.err
    assert [p.name for p in (whole / "01.png").iterdir()] == ["notes.txt"]
    shutil.rmtree(whole / "01.png")
    assert featviz(*base, whole.parent / "three").code == 0
    assert tree(whole) == tree(whole.parent / "three")


# --overwrite


def test_the_old_run_stays_until_the_new_one_is_whole(
    featviz: Run, tiny_file: Path, photos: Path, whole: Path, at_image: AtImage
) -> None:
    """At the last image it is still there; then the new one is, and nothing is left beside it."""
    before, seen = tree(whole), []
    base = ["run", tiny_file, photos, *SMALL, "--cmap", "viridis", "--out"]
    at_image("04.png", lambda: seen.append(tree(whole)))
    around = sorted(whole.parent.iterdir())
    assert featviz(*base, whole, "--overwrite").code == 0
    seen[0].pop(".featviz.lock")
    assert seen == [before] and sorted(whole.parent.iterdir()) == around
    assert featviz(*base, whole.parent / "fresh").code == 0
    assert tree(whole) == tree(whole.parent / "fresh")


def test_an_overwrite_that_is_stopped_keeps_both(
    featviz: Run, tiny_file: Path, photos: Path, whole: Path, at_image: AtImage
) -> None:
    """The old run is whole, the new one is named, can be gone on with, and is cleared by the next
    --overwrite."""
    before = tree(whole)

    def stop() -> None:
        raise StoreError("no more")

    base = ["run", tiny_file, photos, *SMALL, "--cmap", "viridis", "--out"]
    at_image("03.png", stop)
    done = featviz(*base, whole, "--overwrite")
    (part,) = [p for p in whole.parent.iterdir() if p.name.startswith(".whole.")]
    assert done.code == 1 and f"what is done of the new run is in {part}" in done.err
    assert tree(whole) == before and run_json(part)["images"]["complete"]
    assert featviz(*base, part, "--resume").code == 0
    assert featviz(*base, whole, "--overwrite").code == 0
    assert not part.exists() and "viridis" in (whole / "run.json").read_text()


def test_an_overwrite_that_cannot_begin_leaves_nothing(
    featviz: Run, tiny_file: Path, photos: Path, whole: Path
) -> None:
    """No layer, no model: the old run stays, and no folder appears."""
    before, around = tree(whole), sorted(whole.parent.iterdir())
    assert featviz("run", tiny_file, photos, "--layers", "x", "--out", whole, "--overwrite").code
    assert tree(whole) == before and sorted(whole.parent.iterdir()) == around


def test_what_killed_reports_left_is_cleared(featviz: Run, whole: Path) -> None:
    """Hidden folders of the same name, whatever process made them; no others."""
    left = whole / ".report.0123456789abcdef.part"
    other = whole / ".report.txt"
    left.mkdir()
    (left / "index.html").write_text("half")
    other.write_text("mine")
    assert featviz("report", whole).code == 0
    assert not left.exists() and other.read_text() == "mine"


# --archive


@contextmanager
def no_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def full(*arguments: object) -> None:
        raise StoreError("maps.zip cannot be written: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(archive, "pack", full)
        yield


def test_a_run_that_cannot_be_packed_stays(
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """stderr says where; --resume draws nothing anew, packs it and leaves no folder."""
    base = ["run", tiny_file, photos, *SMALL, "--json", "--archive", tmp_path / "maps.zip"]
    with no_room(monkeypatch):
        done = featviz(*base)
    (room,) = [p for p in tmp_path.iterdir() if p.name.startswith(".maps.zip.")]
    assert done.code == 1 and f"the run stays in {room / 'run'}; --resume" in done.err
    assert tree(room / "run") == tree(whole)
    done = featviz(*base, "--resume")
    assert done.code == 0 and done.out.count('"kept": true') == 5
    assert packed_tree(tmp_path / "maps.zip") == tree(whole)
    assert not room.exists() and not list(tmp_path.glob(".*"))


def test_resume_finds_the_hidden_folder_of_a_killed_archive(
    featviz: Run, tiny_file: Path, photos: Path, whole: Path, tmp_path: Path
) -> None:
    """Complete images are kept, and so is the archive's content; there may also be none."""
    base = ["run", tiny_file, photos, *SMALL, "--json", "--archive", tmp_path / "maps.zip"]
    room = tmp_path / ".maps.zip.0123456789abcdef.part"
    room.mkdir()
    shutil.copytree(whole, room / "run")
    shutil.rmtree(room / "run" / "03.png")
    done = featviz(*base, "--resume")
    assert done.code == 0 and done.out.count('"kept": true') == 4
    assert packed_tree(tmp_path / "maps.zip") == tree(whole) and not room.exists()
    (tmp_path / "maps.zip").unlink()
    assert featviz(*base, "--resume").code == 0
    assert packed_tree(tmp_path / "maps.zip") == tree(whole)


# --durable


def test_durable_syncs_each_file_before_the_image_has_its_name(
    featviz: Run, tiny_file: Path, photos: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of an image, and its folders, go to the disk; the bytes are the same."""
    synced: dict[str, bool] = {}
    real = os.fsync

    def fsync(descriptor: int) -> None:
        way = Path(f"/proc/self/fd/{descriptor}").readlink()
        if way.parent.parent.name == "out" or way.parent.name == "out":
            synced[str(way)] = way.name.startswith(".") or ".part" in str(way)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    out = whole.parent / "out"
    base = ["run", tiny_file, photos / "00.png", *SMALL, "--out"]
    assert featviz(*base, out).code == 0 and synced == {}
    assert featviz(*base, out, "--overwrite").code == 0
    shutil.rmtree(out)
    assert featviz(*base, out, "--durable").code == 0
    names = {Path(way).name for way, hidden in synced.items() if hidden}
    assert {"input.png", "stats.npz", "manifest.json"} <= names
    assert tree(out / "00.png") == tree(whole / "00.png")
