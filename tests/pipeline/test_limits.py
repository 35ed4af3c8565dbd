"""How much a run may write: refused by the estimate of --dry-run, and stopped while it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import SCENES, Outcome
from PIL import Image
from runs import SMALL, complete, make_photos, run_json, tree
from torch import nn

from featviz.errors import StoreError, UsageError
from featviz.pipeline import limits
from featviz.records import Limits, Written
from featviz.text import parse_bytes

Run = Callable[..., Outcome]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("500MB", 500_000_000),
        ("500mb", 500_000_000),
        ("2G", 2 * 10**9),
        ("1.5 GB", 1_500_000_000),
        (" 10 kB ", 10_000),
        ("1TB", 10**12),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """A number of bytes, or with a unit, which is a power of 1000."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "MB", "-1", "1e9", "5 apples", "1,5GB", "5MiB", "0x1", "٣MB", "9" * 400]
)
def test_no_sizes(text: str) -> None:
    """Named as it is, with an example."""
    with pytest.raises(UsageError, match="is no amount of bytes"):
        parse_bytes(text)


def test_a_bad_size_is_a_usage_error(featviz: Run, tiny_file: Path, picture: Path) -> None:
    """On the command line, with the option's name."""
    done = featviz("run", tiny_file, picture, "--max-output-size", "5 apples")
    assert done.code == 2 and "--max-output-size" in done.err
    assert "'5 apples' is no amount of bytes; for example 500MB or 2GB" in done.err


@pytest.mark.parametrize(
    ("told", "written", "words"),
    [
        (Limits(bytes=1000), Written(9, 1001), "about 1 kB, and --max-output-size is 1 kB"),
        (Limits(bytes=5 * 10**8), Written(9, 10**9), "about 1 GB, and --max-output-size is 500 MB"),
        (Limits(files=8), Written(9, 10), "about 9 files, and --max-files is 8 files"),
    ],
)
def test_a_plan_above_a_limit(told: Limits, written: Written, words: str) -> None:
    """Says what it would be, and what it may be."""
    with pytest.raises(UsageError, match=words):
        limits.check_plan(told, written)
    with pytest.raises(StoreError, match=r"x\.png would take the run over --max-"):
        limits.check_written(told, written, "x.png")


def test_a_limit_that_is_just_met_holds() -> None:
    """Both before the run and in it."""
    for check in (limits.check_plan, lambda *args: limits.check_written(*args, "x")):
        check(Limits(bytes=10, files=2), Written(2, 10))
        check(Limits(), Written(10**9, 10**15))


@pytest.mark.parametrize("more", [[], ["--tensors", "npy"]], ids=["pictures", "tensors"])
def test_the_estimate_is_that_of_the_dry_run(
    more: list[str], featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """Files exactly, so a limit of as many passes and one less is refused before any work; bytes
    within a factor of two, on the safe side."""
    base = ["run", tiny_file, SCENES, "--layers", "Conv2d,ReLU,Linear", "--size", "96x64", *more]
    told = json.loads(featviz(*base, "--dry-run", "--json").out)
    files, size = told["all_files"], told["estimated_bytes"]
    out = tmp_path / "out"
    for option, value in (("--max-files", files - 1), ("--max-output-size", size - 1)):
        done = featviz(*base, "--out", out, option, value)
        assert done.code == 2 and f"and {option} is" in done.err and not out.exists()
        assert "--dry-run shows" in done.err
    done = featviz(*base, "--out", out, "--max-files", files, "--max-output-size", size)
    assert done.code == 0, done.err
    written = {name: data for name, data in tree(out).items() if name != "run.json"}
    assert len(written) == files
    assert 1 <= size / sum(map(len, written.values())) < 2


@pytest.mark.slow
def test_the_estimate_holds_for_photographs(featviz: Run, tmp_path: Path) -> None:
    """resnet18's default layers over the sample scenes: at least what is written, at most twice."""
    base = ["run", "resnet18", SCENES, "--weights", "none"]
    told = json.loads(featviz(*base, "--dry-run", "--json").out)
    assert featviz(*base, "--out", tmp_path / "out").code == 0
    written = sum(len(data) for name, data in tree(tmp_path / "out").items() if name != "run.json")
    assert 1 <= told["estimated_bytes"] / written < 2


def test_no_files_at_all(featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path) -> None:
    """--max-files 0 refuses every run, a negative number is no number of files."""
    base = ["run", tiny_file, picture, *SMALL, "--out", tmp_path / "out"]
    done = featviz(*base, "--max-files", "0")
    assert done.code == 2 and "about 5 files, and --max-files is 0 files" in done.err
    assert featviz(*base, "--max-files", "-1").code == 2
    assert not (tmp_path / "out").exists()


@pytest.fixture
def growing(tmp_path: Path) -> tuple[Path, Path]:
    """A model that takes images in their own size, and images of which the first is the least."""
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU()), tmp_path / "own.pth")
    for index in range(6):
        make_photos(tmp_path / "made", 1, (16 + 24 * index, 16 + 24 * index))
        (tmp_path / "photos").mkdir(exist_ok=True)
        (tmp_path / "made" / "00.png").rename(tmp_path / "photos" / f"{index}.png")
    return tmp_path / "own.pth", tmp_path / "photos"


def test_images_that_grow_are_stopped_on_the_way(
    featviz: Run, growing: tuple[Path, Path], tmp_path: Path
) -> None:
    """The estimate takes the first image's size; while it runs, no image goes over the limit, and
    the same run stops at the same image; a larger limit and --resume make it whole."""
    base = ["run", *growing, "--channels", "1", "--out"]
    told = json.loads(featviz(*base, tmp_path / "x", "--dry-run", "--json").out)
    assert featviz(*base, tmp_path / "whole").code == 0
    limit = 2 * told["estimated_bytes"]
    trees = []
    for name, jobs in (("one", 1), ("two", 4)):
        out = tmp_path / name
        done = featviz(*base, out, "--max-output-size", limit, "--jobs", jobs)
        assert done.code == 1
        kept = complete(out)
        assert f"error: {len(kept)}.png would take the run over --max-output-size" in done.err
        trees.append(tree(out))
        size = sum(len(data) for file, data in trees[-1].items() if file != "run.json")
        more = sum(len(d) for f, d in tree(tmp_path / "whole").items() if f[0] == str(len(kept)))
        assert size <= limit < size + more
        run = run_json(out)["images"]
        assert run["complete"] == kept and len(run["missing"]) == 6 - len(kept)
    assert trees[0] == trees[1] and 2 <= len(complete(out)) < 6
    done = featviz(*base, out, "--max-output-size", "1GB", "--resume")
    assert done.code == 0 and tree(out) == tree(tmp_path / "whole")


def test_what_is_kept_counts(featviz: Run, growing: tuple[Path, Path], tmp_path: Path) -> None:
    """A resumed run with the same limit stops at the same image, and takes nothing away."""
    base = ["run", *growing, "--channels", "1", "--out", tmp_path / "out"]
    told = json.loads(featviz(*base, "--dry-run", "--json").out)
    base += ["--max-output-size", 2 * told["estimated_bytes"]]
    assert featviz(*base).code == 1
    before = tree(tmp_path / "out")
    again = featviz(*base, "--resume")
    assert again.code == 1 and "would take the run over" in again.err
    assert tree(tmp_path / "out") == before


def test_a_limit_below_what_is_complete(
    featviz: Run, growing: tuple[Path, Path], tmp_path: Path
) -> None:
    """Complete images are never removed, whatever the limit."""
    base = ["run", *growing, "--channels", "1", "--out", tmp_path / "out"]
    assert featviz(*base).code == 0
    before = tree(tmp_path / "out")
    told = json.loads(featviz(*base, "--dry-run", "--json").out)
    done = featviz(*base, "--resume", "--max-output-size", told["estimated_bytes"])
    assert done.code == 1
    after = tree(tmp_path / "out")
    assert {k: v for k, v in after.items() if k != "run.json"} == {
        k: v for k, v in before.items() if k != "run.json"
    }
    assert run_json(tmp_path / "out")["images"]["missing"] == []


def test_failed_images_do_not_count(featviz: Run, tiny_file: Path, tmp_path: Path) -> None:
    """What a failed image wrote is gone, and leaves room for others."""
    photos = make_photos(tmp_path / "photos", 3)
    (photos / "01.png").write_bytes(b"no picture")
    base = ["run", tiny_file, photos, *SMALL, "--out", tmp_path / "out"]
    told = json.loads(featviz(*base, "--dry-run", "--json").out)
    assert featviz(*base, "--max-files", told["all_files"]).code == 3
    assert Image.open(tmp_path / "out" / "02.png" / "input.png").size == (18, 16)


def test_a_shard_is_held_to_its_share(featviz: Run, tiny_file: Path, tmp_path: Path) -> None:
    """The limit is for what this command writes, and so is the dry run."""
    photos = make_photos(tmp_path / "photos", 4)
    base = ["run", tiny_file, photos, *SMALL, "--out", tmp_path / "out"]
    whole = json.loads(featviz(*base, "--dry-run", "--json").out)["all_files"]
    half = json.loads(featviz(*base, "--dry-run", "--json", "--shard", "1/2").out)["all_files"]
    assert half == whole // 2
    assert featviz(*base, "--max-files", half).code == 2
    assert featviz(*base, "--max-files", half, "--shard", "1/2").code == 0
