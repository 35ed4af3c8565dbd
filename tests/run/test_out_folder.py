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
    for spec in (nets / "tiny.pth", f"{nets / 'net.py'}:make"):
        for command in (
            ["run", spec, photos],
            ["kernels", spec],
            ["audit", spec, photos],
        ):
            done = featviz(*command, "--out", nets, "--overwrite")
            refused(done, 2, "holds the input")
    done = featviz(
        "run", "resnet18", photos, "--weights", nets / "tiny.pth", "--out", nets
    )
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


@pytest.mark.parametrize(
    ("where", "command"),
    [("above", "merge"), pytest.param("itself", "diff", marks=pytest.mark.slow)],
)
def test_out_may_not_be_or_hold_a_run_that_is_read(
    where: str, command: str, featviz: Run, ran: Path, tmp_path: Path
) -> None:
    """diff and merge do not replace what they read."""
    out = ran if where == "itself" else tmp_path
    before = snapshot(tmp_path)
    arguments = [ran, ran] if command == "diff" else [ran]
    done = featviz(
        command, *arguments, "--out", out, *(["--overwrite"] * (command == "merge"))
    )
    assert done.code == 2
    assert "the input" in done.err or "overlap" in done.err
    assert snapshot(tmp_path) == before


def test_out_below_the_images_works_again_and_again(
    featviz: Run, tiny_file: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`featviz run MODEL .` with the default --out; the same for audit. The images
    stay."""
    before = snapshot(photos)
    monkeypatch.chdir(photos)
    base = ["run", tiny_file, ".", *SMALL]
    assert [
        featviz(*base, *options).code
        for options in ((), ("--resume",), ("--overwrite",))
    ] == [0] * 3
    assert complete(photos / "featviz-out") == ["00.png", "01.png"]
    shutil.rmtree("featviz-out")
    audits = ["audit", tiny_file, ".", "--size", "16", "--overwrite"]
    assert [featviz(*audits).code for _ in range(2)] == [0, 0]
    assert (
        json.loads(Path("featviz-audit/audit.json").read_text())["images"]["total"] == 2
    )
    shutil.rmtree("featviz-audit")
    assert snapshot(photos) == before


def test_a_run_is_in_the_way(
    featviz: Run, tiny_file: Path, photos: Path, ran: Path
) -> None:
    """The refusal names the way out."""
    base = ["run", tiny_file, photos, "--out", ran]
    before = snapshot(ran)
    done = featviz(*base, *SMALL)
    refused(
        done,
        1,
        "holds a run, 2 images complete",
        "hint: `run --resume` goes on with it",
    )
    refused(featviz(*base, "--seed", "3"), 1, "holds a run, 2 images complete")
    assert snapshot(ran) == before
    (ran / "a.txt").write_text("mine")
    refused(featviz(*base, "--overwrite"), 1, "did not write: a.txt")
