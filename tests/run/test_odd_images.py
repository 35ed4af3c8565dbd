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

pytestmark = pytest.mark.medium


def archive(folder: Path, *names: str) -> Path:
    """A zip file of pictures with these names."""
    path = folder / "x.zip"
    with zipfile.ZipFile(path, "w") as packed:
        for name in names:
            packed.writestr(name, png())
    return path


@pytest.mark.parametrize("name", ODD_MEMBERS[::12], ids=lambda name: ascii(name)[:24])
def test_a_member_of_an_archive_takes_no_place_of_ours(
    name: str, featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """It gets a safe name, and the run goes on; run.json stays ours, and --overwrite
    works."""
    path = archive(tmp_path, name, "good.png")
    out = tmp_path / "out"
    images = (f"{path}::{name}", f"{path}::good.png")
    run = ("run", tiny_file, *images, "--out", out, *SMALL)
    assert featviz(*run).code == 0
    assert len(complete(out)) == 2
    assert run_json(out)["images"]["total"] == 2
    assert list(out.rglob(".*")) == []
    assert featviz(*run, "--overwrite").code == 0
    around = sorted(path.name for path in tmp_path.iterdir())
    assert around == ["out", "tiny.pth", "x.zip"]


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
    jobs = list(visit(samples, read, show, batch_size=2))
    assert [job.result for job in jobs] == ["a", None, None]
    errors = [type(job.error) for job in jobs]
    assert errors == [type(None), ImageError, ForwardError]
