"""Runs that are copied to an object store, here fsspec's own `memory://`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import refused, tree
from stores import URL, put, stored

import featviz as fv
from featviz.errors import UsageError
from featviz.files.urls import Url
from featviz.rundir.mirror import Mirror

pytestmark = pytest.mark.medium


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder, in which the run is written: `maps`, as the URL's last name."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here" / "maps"


def test_the_folder_and_the_store_have_the_same_files(
    featviz: Run, run: list[object], local: Path, here: Path
) -> None:
    """Both are, byte for byte, those of a run without a URL."""
    done = featviz(*run, "--out", URL)
    assert done.code == 0
    assert "of 4 images in maps; to look at them: featviz report" in done.err
    assert stored() == tree(here) == tree(local)


def test_resume_of_a_complete_run_changes_nothing(
    featviz: Run, run: list[object], local: Path, here: Path
) -> None:
    """All images were complete before."""
    assert featviz(*run, "--out", URL).code == 0
    done = featviz(*run, "--out", URL, "--resume")
    assert done.code == 0
    assert "(4 were complete before)" in done.err
    assert stored() == tree(local)


def test_the_manifest_of_an_image_is_put_last(
    local: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has one there has all its files; run.json comes behind the images that it
    lists."""
    names: list[str] = []
    real = type(memory).put_file

    def noted(self: Any, source: str, target: str, **more: Any) -> None:
        names.append(target.removeprefix("/bucket/maps/"))
        real(self, source, target, **more)

    monkeypatch.setattr(type(memory), "put_file", noted)
    Mirror(Url.of_run(URL), local).put_run(["01.png", "00.png"])
    assert names[-1] == "run.json"
    for folder in ("00.png", "01.png"):
        files = [name for name in names if name.startswith(folder)]
        assert len(files) == 5
        assert files[-1] == f"{folder}/manifest.json"
    # of another process, which finds the images there
    names.clear()
    Mirror(Url.of_run(URL), local).put_run(["01.png", "00.png"])
    assert names == ["run.json"]


def test_an_image_has_the_same_folder_in_the_store(
    featviz: Run, run: list[object], photos: Path, here: Path
) -> None:
    """Also where its name had to be changed for one."""
    (photos / "00.png").rename(photos / "a:b.png")
    assert featviz(*run, "--out", URL).code == 0
    assert stored() == tree(here)


def test_a_store_that_does_not_answer_ends_the_run(
    featviz: Run,
    run: list[object],
    local: Path,
    here: Path,
    memory: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one line; the folder keeps what is complete, and `--resume` puts it there."""
    real = type(memory).put_file

    def choosy(self: Any, source: str, target: str, **more: Any) -> None:
        if target.endswith("01.png/stats.npz"):
            raise OSError(5, "no answer")
        real(self, source, target, **more)

    with monkeypatch.context() as patched:
        patched.setattr(type(memory), "put_file", choosy)
        done = featviz(*run, "--out", URL)
    refused(done, 1, f"{URL} cannot be written: ", "--resume puts the rest there")
    assert (here / "00.png" / "manifest.json").exists()
    assert "01.png/manifest.json" not in stored()
    assert featviz(*run, "--out", URL, "--resume").code == 0
    assert stored() == tree(here) == tree(local)


def test_overwrite_replaces_the_objects_of_the_run(
    featviz: Run, run: list[object], local: Path, here: Path
) -> None:
    """And those of others stay."""
    assert featviz(*run, "--cmap", "viridis", "--out", URL).code == 0
    put("notes.txt", b"mine")
    assert featviz(*run, "--out", URL, "--overwrite").code == 0
    assert stored() == {**tree(local), "notes.txt": b"mine"}


def test_shards_of_one_folder_copy_the_whole_run(
    featviz: Run, run: list[object], local: Path, here: Path
) -> None:
    """The last one to end puts the run.json of all."""
    for shard in ("1/2", "2/2"):
        assert featviz(*run, "--shard", shard, "--out", URL).code == 0
    assert stored() == tree(local)
    assert json.loads(stored()["run.json"])["images"]["missing"] == []


SECRET = "s3://me:geheim@bucket/x"
MESSAGE = "s3://bucket/x is a URL"


@pytest.mark.parametrize("option", ["--tensorboard", "--out"])
def test_other_options_take_no_url(
    option: str, featviz: Run, tiny_file: Path, photos: Path
) -> None:
    """A path would become a folder `s3:`; the message names the URL without its
    password."""
    command = {"--tensorboard": "run", "--out": "audit"}[option]
    done = featviz(command, tiny_file, photos, option, SECRET)
    refused(done, 2, MESSAGE)
    assert "geheim" not in done.err


def test_other_arguments_take_no_url(tiny_file: Path, photos: Path) -> None:
    """In Python it is as on the command line."""
    with pytest.raises(UsageError, match=f"tensorboard: {MESSAGE}"):
        fv.run(str(tiny_file), str(photos), tensorboard=SECRET)
