"""--out: it may not be or hold what is read, and a second attempt works or says why
not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import Run
from rundirs import RUN_RECORD
from runs import SMALL, complete, refused, snapshot

pytestmark = pytest.mark.medium


@pytest.mark.parametrize(
    ("out", "options"),
    [("photos/../photos", ()), ("link", ("--overwrite",)), (".", ("--resume",))],
)
def test_out_may_not_be_or_hold_the_images(
    out: str,
    options: tuple[str, ...],
    draw: Run,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However it is spelt, and even if a run.json lies there: exit code 2, and all
    stays."""
    (tmp_path / "link").symlink_to(photos)
    for folder in (photos, tmp_path):
        (folder / "run.json").write_text(json.dumps(RUN_RECORD))
    before = snapshot(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = draw(out, *options)
    refused(done, 2, "holds the input", "00.png", "hint: name another place with --out")
    done = featviz("audit", tiny_file, photos, "--out", out, "--overwrite")
    refused(done, 2, "holds the input")
    assert snapshot(tmp_path) == before


def test_out_may_not_hold_the_model(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """A file, a factory's file, the weights: no folder that holds one becomes the
    run's."""
    nets = tmp_path / "nets"
    nets.mkdir()
    tiny_file.rename(nets / "tiny.pth")
    (nets / "net.py").write_text("from torch import nn\nmake = nn.Identity\n")
    (nets / "run.json").write_text(json.dumps(RUN_RECORD))
    before = snapshot(tmp_path)
    for model in (nets / "tiny.pth", f"{nets / 'net.py'}:make"):
        for command in (("run", model, photos), ("kernels", model)):
            done = featviz(*command, "--out", nets, "--overwrite")
            refused(done, 2, "holds the input")
    weights = ("--weights", nets / "tiny.pth")
    done = featviz("audit", "resnet18", photos, *weights, "--out", nets)
    refused(done, 2, "holds the input")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("option", ["--junit", "--prune-out"])
def test_a_file_that_is_written_is_no_input(
    option: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Neither an image, nor the archive it comes from, nor the model."""
    packed = shutil.make_archive(str(tmp_path / "p"), "zip", photos)
    before = snapshot(tmp_path)
    for path in (packed, photos / "00.png", tiny_file):
        done = featviz("audit", tiny_file, photos, packed, option, path, "--overwrite")
        refused(done, 2, f"{option} ", " is the input ")
    assert snapshot(tmp_path) == before


def test_merge_does_not_replace_what_it_reads(
    featviz: Run, ran: Path, tmp_path: Path
) -> None:
    """A folder above the run is not replaced either."""
    before = snapshot(tmp_path)
    done = featviz("merge", ran, "--out", tmp_path, "--overwrite")
    refused(done, 2, "overlap")
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_diff_does_not_replace_what_it_reads(
    featviz: Run, ran: Path, tmp_path: Path
) -> None:
    """The run itself is an input."""
    before = snapshot(tmp_path)
    refused(featviz("diff", ran, ran, "--out", ran), 2, "the input")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_out_below_the_images_works_again(
    option: str,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`featviz run MODEL .` has its default --out there; the images stay."""
    before = snapshot(photos)
    monkeypatch.chdir(photos)
    run = ("run", tiny_file, ".", *SMALL)
    assert featviz(*run).code == 0
    assert featviz(*run, option).code == 0
    assert complete(photos / "featviz-out") == ["00.png", "01.png"]
    shutil.rmtree(photos / "featviz-out")
    assert snapshot(photos) == before


def test_an_audit_below_the_images_works_again(
    featviz: Run, tiny_file: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pictures are no images of the next one; the images stay."""
    before = snapshot(photos)
    monkeypatch.chdir(photos)
    audit = ("audit", tiny_file, ".", "--size", "16", "--overwrite")
    assert featviz(*audit).code == 0
    assert featviz(*audit).code == 0
    record = json.loads((photos / "featviz-audit" / "audit.json").read_text())
    assert record["images"]["total"] == 2
    shutil.rmtree(photos / "featviz-audit")
    assert snapshot(photos) == before


def test_a_run_is_in_the_way(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path
) -> None:
    """The refusal names the way out."""
    base = ("run", tiny_file, photos, "--out", ran)
    before = snapshot(ran)
    message = "holds a run, 2 images complete"
    hint = "hint: `run --resume` goes on with it"
    refused(featviz(*base, *SMALL), 1, message, hint)
    refused(featviz(*base, "--seed", "3"), 1, message)
    assert snapshot(ran) == before
    (ran / "a.txt").write_text("mine")
    refused(featviz(*base, "--overwrite"), 1, "did not write: a.txt")
