"""Runs in object stores, in fsspec's own `memory://`: the same tree, in whole images only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import make_photos, refused, tree
from stores import URL, put, stored

import featviz as fv
from featviz.errors import UsageError
from featviz.files.urls import Url
from featviz.run import draw
from featviz.rundir.store import Store
from featviz.rundir.write import RunDirectory


@pytest.mark.slow
def test_the_tree_is_that_of_a_folder(featviz: Run, words: list[object], tmp_path: Path) -> None:
    """Byte for byte, without the lock; `--resume` with nothing to do changes nothing."""
    more = ["--flat", "--tensors", "npy", "--figure"]
    assert featviz(*words, *more, "--out", tmp_path / "out").code == 0
    done = featviz(*words, *more, "--out", URL)
    assert done.code == 0 and f"of 4 images in {URL}; to look at them: featviz report" in done.err
    assert stored() == tree(tmp_path / "out")
    again = featviz(*words, *more, "--out", URL, "--resume")
    assert again.code == 0 and "(4 were complete before)" in again.err
    assert stored() == tree(tmp_path / "out")


def test_files_are_only_passing_through_this_machine(
    featviz: Run, words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that is uploaded is removed here, and nothing is left at the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []
    real = Store.put

    def counted(self: Store, files: dict[str, Path]) -> None:
        (folder,) = (tmp_path / "tmp").glob("featviz-*/maps")
        seen.append(len([path for path in folder.iterdir() if path.name != "run.json"]))
        real(self, files)

    monkeypatch.setattr(Store, "put", counted)
    make_photos(tmp_path / "photos", 9)
    assert featviz(*words, "--out", URL).code == 0
    assert 1 <= max(seen) <= 4 and list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "memory:").exists() and not (tmp_path / "featviz-out").exists()


def test_the_manifest_of_an_image_is_uploaded_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has one there has all its files."""
    puts: list[list[str]] = []
    monkeypatch.setattr(Store, "put", lambda self, files: puts.append([*files]))
    folder = RunDirectory(tmp_path, Url.of_run(URL)).new_image("a.png")
    with folder.writing("input.png") as file:
        file.write(b"x")
    folder.finish({}, {})
    assert puts == [["a.png/input.png", "a.png/stats.npz"], ["a.png/manifest.json"]]


@pytest.mark.parametrize("lost", ["00.png/stats.npz"])
def test_resume_mends_what_was_lost(
    lost: str, featviz: Run, words: list[object], local: Path, memory: Any
) -> None:
    """An image of which a file is gone is drawn again."""
    assert featviz(*words, "--out", URL).code == 0
    memory.rm_file(f"/bucket/maps/{lost}")
    assert featviz(*words, "--out", URL, "--resume").code == 0
    assert stored() == tree(local)


def test_a_store_that_no_longer_answers_ends_the_run(
    featviz: Run, words: list[object], memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three images in a row, with exit code 1 and the remedy."""
    real = type(memory).put_file

    def choosy(self: Any, source: str, goal: str, **more: Any) -> None:
        if goal.endswith("input.png"):
            raise OSError(5, "no answer")
        real(self, source, goal, **more)

    monkeypatch.setattr(type(memory), "put_file", choosy)
    done = featviz(*words, "--out", URL, "--jobs", "1")
    assert done.code == 1 and "--resume when the store answers" in done.err
    failures = json.loads(stored()["run.json"])["failures"]
    assert len(failures) == draw.MOST_LOST - 1 == 2 and len(stored()) == 1


def test_a_taken_place_is_refused(featviz: Run, words: list[object]) -> None:
    """The same run, another run, and what is no run: each in one line, before the model is there;
    nothing is changed."""
    assert featviz(*words, "--out", URL).code == 0
    before = stored()
    refused(featviz(*words, "--out", URL), 1, f"{URL} holds a run, 4 images complete")
    other = featviz(*words, "--cmap", "viridis", "--out", URL, "--resume")
    refused(other, 1, f"--resume: {URL} holds another run; there --cmap auto")
    assert stored() == before
    put("notes.txt", b"mine", "memory://bucket/else")
    for more in ([], ["--resume"]):
        done = featviz(*words, "--out", "memory://bucket/else", *more)
        refused(done, 1, "is not empty and holds no run of featviz: notes.txt")
    assert list(stored("memory://bucket/else")) == ["notes.txt"]


def test_options_for_folders_are_refused(featviz: Run, words: list[object]) -> None:
    """With what to do instead; nothing is written."""
    for more, said in (("--overwrite", "remove the run there first"), ("--open", "needs a folder")):
        refused(featviz(*words, "--out", URL, more), 2, said)
    assert stored() == {}


def test_other_options_take_no_url(featviz: Run, words: list[object]) -> None:
    """A path would become a folder `s3:`; the message names the URL without its password."""
    secret = "s3://me:geheim@bucket/x"
    model, photos = words[1:3]
    for command in ([*words, "--tensorboard", secret], ["audit", model, photos, "--out", secret]):
        done = featviz(*command)
        refused(done, 2, "s3://bucket/x is a URL")
        assert "geheim" not in done.err
    with pytest.raises(UsageError, match="tensorboard: s3://bucket/x is a URL"):
        fv.run(str(model), str(photos), tensorboard=secret)


def test_a_manifest_whose_answer_was_lost_is_removed(
    featviz: Run, words: list[object], local: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has it, but says that it failed: the image has failed, and nothing of it stays."""
    real = type(memory).put_file

    def deaf(self: Any, source: str, goal: str, **more: Any) -> None:
        real(self, source, goal, **more)
        if goal.endswith("00.png/manifest.json"):
            raise TimeoutError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(type(memory), "put_file", deaf)
        assert featviz(*words, "--out", URL).code == 3
    assert not [name for name in stored() if name.startswith("00.png")]
    assert featviz(*words, "--out", URL, "--resume").code == 0
    assert stored() == tree(local)
