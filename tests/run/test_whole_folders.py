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
from featviz.rundir import LOCK_FILE

AtImage = Callable[..., None]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 5)


# The folder goes away


MESSAGE = "was removed or renamed while the run wrote into it"


def check_nothing(out: Path) -> None:
    """No run.json lists images which are not there."""
    assert not (out / "run.json").exists()
    assert complete(out) == []


@pytest.mark.medium
@pytest.mark.parametrize(
    "is_replaced", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_a_folder_that_is_renamed_ends_the_run(
    is_replaced: bool, draw: Run, undisturbed: Path, at_image: AtImage
) -> None:
    """Exit code 1, also where another folder is in its place; what was written is whole
    where it is now."""
    out = undisturbed.parent / "out"
    elsewhere = undisturbed.parent / "elsewhere"

    def rename() -> None:
        out.rename(elsewhere)
        if is_replaced:
            out.mkdir()

    at_image("02.png", rename)
    refused(draw(out), 1, MESSAGE)
    check_nothing(out)
    check_whole(elsewhere)
    assert draw(elsewhere, "--resume").code == 0
    assert tree(elsewhere) == tree(undisturbed)


@pytest.mark.slow
def test_a_folder_that_is_removed_ends_the_run(
    draw: Run, tmp_path: Path, at_image: AtImage
) -> None:
    """Exit code 1; it is not made again."""
    out = tmp_path / "out"

    def remove() -> None:
        while out.exists():  # encoders write into it meanwhile
            shutil.rmtree(out, ignore_errors=True)

    at_image("02.png", remove)
    refused(draw(out), 1, MESSAGE)
    check_nothing(out)


# run.json


@pytest.mark.medium
def test_images_without_run_json_are_not_taken_over(
    draw: Run, undisturbed: Path
) -> None:
    """--resume goes on with a run of which it knows that it is the same."""
    (undisturbed / "run.json").unlink()
    before = tree(undisturbed)
    refused(
        draw(undisturbed, "--resume"), 1, "is not empty and holds no run of featviz"
    )
    assert tree(undisturbed) == before


@pytest.mark.medium
def test_run_json_is_written_while_a_run_goes_on(
    draw: Run, tmp_path: Path, at_image: AtImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the fifth image, it lists those that were complete when it was last
    due: the fourth among them if its files were written by then."""
    out = tmp_path / "out"
    monkeypatch.setattr(pipeline, "SAVED_EVERY", 0)
    seen: list[str] = []
    at_image("04.png", lambda: seen.extend(run_json(out)["images"]["complete"]))
    assert draw(out).code == 0
    assert seen
    assert set(seen) <= {"00.png", "01.png", "02.png", "03.png"}


# Inputs that are gone


@pytest.mark.medium
def test_images_whose_inputs_are_gone_are_named(
    draw: Run, photos: Path, undisturbed: Path
) -> None:
    """--resume leaves them, and says so; without their folders the tree is that of a
    run without them."""
    (photos / "01.png").unlink()
    done = draw(undisturbed, "--resume")
    assert "01.png is kept, though no longer among the inputs" in done.err
    (photos / "03.png").unlink()
    done = draw(undisturbed, "--resume")
    assert done.code == 0
    assert "01.png, 03.png are kept, though no longer among the inputs" in done.err
    assert len(complete(undisturbed)) == 5
    shutil.rmtree(undisturbed / "01.png")
    shutil.rmtree(undisturbed / "03.png")
    assert "no longer among" not in draw(undisturbed, "--resume").err
    assert draw(undisturbed.parent / "three").code == 0
    assert tree(undisturbed) == tree(undisturbed.parent / "three")


@pytest.mark.medium
def test_an_image_whose_folder_has_another_name_is_no_stranger(
    draw: Run, photos: Path, tmp_path: Path
) -> None:
    """Where its own name is none that every system takes."""
    (photos / "01.png").rename(photos / "a:b?.png")
    assert draw(tmp_path / "out").code == 0
    done = draw(tmp_path / "out", "--resume")
    assert done.code == 0
    assert "no longer among" not in done.err


# --overwrite


@pytest.mark.medium
def test_the_old_run_stays_until_the_new_one_is_whole(
    draw: Run, undisturbed: Path, at_image: AtImage
) -> None:
    """At the last image it is still there; then the new one is, and nothing is left
    beside it."""
    before = tree(undisturbed)
    seen: dict[str, bytes] = {}
    at_image("04.png", lambda: seen.update(tree(undisturbed)))
    around = sorted(undisturbed.parent.iterdir())
    assert draw(undisturbed, "--overwrite", "--cmap", "viridis").code == 0
    del seen[LOCK_FILE]
    assert seen == before
    assert sorted(undisturbed.parent.iterdir()) == around
    assert draw(undisturbed.parent / "fresh", "--cmap", "viridis").code == 0
    assert tree(undisturbed) == tree(undisturbed.parent / "fresh")


@pytest.mark.medium
def test_an_overwrite_that_fails_keeps_the_earlier_run(
    draw: Run, undisturbed: Path, at_image: AtImage
) -> None:
    """It is whole, and nothing of the new one stays beside it."""
    before = tree(undisturbed)
    around = sorted(undisturbed.parent.iterdir())

    def fail() -> None:
        raise StoreError("no more")

    at_image("03.png", fail)
    assert draw(undisturbed, "--overwrite", "--cmap", "viridis").code == 1
    assert tree(undisturbed) == before
    assert sorted(undisturbed.parent.iterdir()) == around
