"""The folder of a run while it is written: that it stays the same one, what replaces it
and when, and how its run.json comes back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run
from runs import check_whole, complete, make_photos, refused, run_json, tree

from featviz.errors import StoreError
from featviz.run import run as pipeline

AtImage = Callable[..., None]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 5)


# The folder goes away


@pytest.mark.parametrize(
    "how",
    [
        "replaced",
        *(pytest.param(h, marks=pytest.mark.slow) for h in ("renamed", "removed")),
    ],
)
def test_a_folder_that_goes_away_ends_the_run(
    how: str, draw: Run, whole: Path, at_image: AtImage
) -> None:
    """Exit code 1, and no run.json that lists images which are not there."""
    out = whole.parent / "out"
    elsewhere = whole.parent / "elsewhere"

    def go() -> None:
        while how == "removed" and out.exists():  # encoders write into it meanwhile
            shutil.rmtree(out, ignore_errors=True)
        if how != "removed":
            out.rename(elsewhere)
        if how == "replaced":
            out.mkdir()

    at_image("02.png", go)
    done = draw(out)
    refused(done, 1, "was removed or renamed while the run wrote into it")
    assert not (out / "run.json").exists()
    assert complete(out) == []
    if how != "removed":
        check_whole(elsewhere)
        assert draw(elsewhere, "--resume").code == 0
        assert tree(elsewhere) == tree(whole)


# run.json


def test_images_without_run_json_are_not_taken_over(draw: Run, whole: Path) -> None:
    """--resume goes on with a run of which it knows that it is the same."""
    (whole / "run.json").unlink()
    before = tree(whole)
    refused(draw(whole, "--resume"), 1, "is not empty and holds no run of featviz")
    assert tree(whole) == before


def test_run_json_is_written_while_a_run_goes_on(
    draw: Run, tmp_path: Path, at_image: AtImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the fifth image, it lists those that were complete when it was last
    due: the fourth among them if its files were written by then."""
    monkeypatch.setattr(pipeline, "SAVED_EVERY", 0)
    seen: list[list[str]] = []
    at_image(
        "04.png", lambda: seen.append(run_json(tmp_path / "out")["images"]["complete"])
    )
    assert draw(tmp_path / "out").code == 0
    assert seen[0]
    assert set(seen[0]) <= {f"0{n}.png" for n in range(4)}


# Inputs that are gone


def test_images_whose_inputs_are_gone_are_named(
    draw: Run, photos: Path, whole: Path
) -> None:
    """--resume leaves them, and says so; without their folders the tree is that of a
    run without them."""
    (photos / "01.png").unlink()
    (photos / "03.png").unlink()
    done = draw(whole, "--resume")
    assert done.code == 0
    assert "01.png, 03.png are kept, though no longer among the inputs" in done.err
    assert len(complete(whole)) == 5
    for name in ("01.png", "03.png"):
        shutil.rmtree(whole / name)
    assert draw(whole, "--resume").err.count("no longer among") == 0
    assert draw(whole.parent / "three").code == 0
    assert tree(whole) == tree(whole.parent / "three")


# --overwrite


def test_the_old_run_stays_until_the_new_one_is_whole(
    draw: Run, whole: Path, at_image: AtImage
) -> None:
    """At the last image it is still there; then the new one is, and nothing is left
    beside it."""
    before = tree(whole)
    seen = []
    at_image("04.png", lambda: seen.append(tree(whole)))
    around = sorted(whole.parent.iterdir())
    assert draw(whole, "--overwrite", "--cmap", "viridis").code == 0
    seen[0].pop(".featviz.lock")
    assert seen == [before]
    assert sorted(whole.parent.iterdir()) == around
    assert draw(whole.parent / "fresh", "--cmap", "viridis").code == 0
    assert tree(whole) == tree(whole.parent / "fresh")


def test_an_overwrite_that_fails_keeps_the_earlier_run(
    draw: Run, whole: Path, at_image: AtImage
) -> None:
    """It is whole, and nothing of the new one stays beside it."""
    before = tree(whole)
    around = sorted(whole.parent.iterdir())

    def fail() -> None:
        raise StoreError("no more")

    at_image("03.png", fail)
    assert draw(whole, "--overwrite", "--cmap", "viridis").code == 1
    assert tree(whole) == before
    assert sorted(whole.parent.iterdir()) == around
