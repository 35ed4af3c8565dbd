"""Odd images in a run: members of archives, names that collide, FIFOs and devices."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import Run
from hostile_images import ODD_MEMBERS, png
from runs import SMALL, complete, run_json

from featviz.errors import ForwardError, ImageError
from featviz.records import Sample
from featviz.run.visit import ImageJob, visit
from featviz.text import safe_name


@pytest.mark.parametrize("name", ODD_MEMBERS[::12], ids=lambda name: ascii(name)[:24])
def test_a_member_of_an_archive_takes_no_place_of_ours(
    name: str, featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """It gets a safe name, and the run goes on; run.json stays ours, and --overwrite
    works."""
    content = png()
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as packed:
        for member in (name, "good.png"):
            packed.writestr(member, content)
    out = tmp_path / "out"
    base = [
        "run",
        tiny_file,
        f"{path}::{name}",
        f"{path}::good.png",
        "--out",
        out,
        *SMALL,
    ]
    if name == "..":
        assert featviz(*base).code in (0, 2, 3)
        return
    done = featviz(*base)
    assert done.code == 0, done.err
    assert len(complete(out)) == 2
    assert run_json(out)["images"]["total"] == 2
    inside = [part for path in out.rglob("*") for part in path.relative_to(out).parts]
    assert not [part for part in inside if part.startswith(".")]
    assert featviz(*base, "--overwrite").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "tiny.pth", "x.zip"]


def test_names_that_lead_to_one_folder_are_told_apart(
    featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """One image is called as the safe name of another: each is drawn in a folder of its
    own."""
    content = png()
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("a:b.png", safe_name("a:b.png"), "a:b.png/c.png"):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    assert featviz("run", tiny_file, path, "--out", tmp_path / "out", *SMALL).code == 0
    assert len(complete(tmp_path / "out")) == 3


def test_a_fifo_in_a_folder_is_no_image(
    draw: Run, photos: Path, tmp_path: Path
) -> None:
    """It is left out, and the images are drawn."""
    os.mkfifo(photos / "aa.png")
    (photos / "zero.png").symlink_to("/dev/zero")
    done = draw(tmp_path / "out")
    assert done.code == 0
    assert complete(tmp_path / "out") == ["00.png", "01.png"]


def test_unreadable_images_stay_where_a_batch_is_shown_again() -> None:
    """Each image of a batch that fails is yielded, in order, with its own error."""

    def read(sample: Sample) -> str:
        if sample.name == "b":
            raise ImageError("b is broken")
        return sample.name

    def show(images: Sequence[ImageJob[str, str]]) -> str:
        if len(images) > 1 or images[0].input == "c":
            raise ForwardError("the model failed")
        return str(images[0].input)

    samples = [Sample(name, (Path(name),)) for name in "abc"]
    seen = list(visit(samples, read, show, batch_size=2))
    assert [(one.sample.name, one.result) for one in seen] == [
        ("a", "a"),
        ("b", None),
        ("c", None),
    ]
    assert [type(one.error) for one in seen] == [type(None), ImageError, ForwardError]
