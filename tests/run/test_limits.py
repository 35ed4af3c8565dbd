"""How much a run may write: refused by the estimate of --dry-run, and stopped while it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import SCENES, Outcome
from PIL import Image
from runs import complete, make_photos, run_json, tree
from torch import nn

from featviz.text import parse_bytes

Run = Callable[..., Outcome]


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("7B", 7), ("500mb", 5e8), ("2G", 2e9), ("1.5 GB", 1.5e9), (" 10 kB ", 10_000)],
)
def test_sizes(text: str, size: int) -> None:
    """A number of bytes, or with a unit, which is a power of 1000."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "MB", "-1", "1e9", "5 apples", "1,5GB", "5MiB", "0x1", "٣MB", "9" * 400]
)
def test_no_sizes(text: str) -> None:
    """Neither another unit, nor another form of a number."""
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_bytes(text)


@pytest.mark.parametrize("more", [[], ["--tensors", "npy"]], ids=["pictures", "tensors"])
def test_the_estimate_is_that_of_the_dry_run(
    more: list[str], featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """Files exactly; bytes within a factor of two, on the safe side. A limit of as many bytes
    passes, and one less is refused before any work."""
    base = ["run", tiny_file, SCENES, "--layers", "Conv2d,ReLU,Linear", "--size", "96x64", *more]
    told = json.loads(featviz(*base, "--dry-run", "--json").out)
    files, size = told["all_files"], told["estimated_bytes"]
    out = tmp_path / "out"
    done = featviz(*base, "--out", out, "--max-output-size", size - 1)
    assert done.code == 2 and "and --max-output-size is" in done.err and not out.exists()
    assert "--dry-run shows" in done.err
    done = featviz(*base, "--out", out, "--max-output-size", 0)
    said = r"the run would write about \d+(\.\d+)? [kM]B, and --max-output-size is 0 B"
    assert done.code == 2 and re.search(said, done.err) and not out.exists()
    done = featviz(*base, "--out", out, "--max-output-size", size)
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
    """A resumed run with the same limit stops at the same image, and takes nothing away: complete
    images are never removed, whatever the limit."""
    base = ["run", *growing, "--channels", "1", "--out", tmp_path / "out"]
    told = json.loads(featviz(*base, "--dry-run", "--json").out)
    base += ["--max-output-size", 2 * told["estimated_bytes"]]
    assert featviz(*base).code == 1
    before = tree(tmp_path / "out")
    again = featviz(*base, "--resume")
    assert again.code == 1 and "would take the run over" in again.err
    assert tree(tmp_path / "out") == before
    assert featviz(*base[:-2], "--resume").code == 0
    before = tree(tmp_path / "out")
    again = featviz(*base[:-1], told["estimated_bytes"], "--resume")
    assert again.code == 1 and run_json(tmp_path / "out")["images"]["missing"] == []
    assert {**tree(tmp_path / "out"), "run.json": b""} == {**before, "run.json": b""}


def test_failed_images_do_not_count(draw: Run, tmp_path: Path) -> None:
    """What a failed image wrote is gone, and leaves room for others."""
    photos = make_photos(tmp_path / "photos", 3)
    (photos / "01.png").write_bytes(b"no picture")
    told = json.loads(draw(tmp_path / "out", "--dry-run", "--json").out)
    assert draw(tmp_path / "out", "--max-output-size", told["estimated_bytes"]).code == 3
    assert Image.open(tmp_path / "out" / "02.png" / "input.png").size == (18, 16)


def test_a_shard_is_held_to_its_share(draw: Run, tmp_path: Path) -> None:
    """The limit is for what this command writes, and so is the dry run."""
    make_photos(tmp_path / "photos", 4)
    share = ["--shard", "1/2"]
    plans = [draw("x", "--dry-run", "--json", *more).out for more in ([], share)]
    whole, half = (json.loads(plan)["estimated_bytes"] for plan in plans)
    assert half == whole // 2
    assert draw(tmp_path / "free", *share).code == 0
    written = tree(tmp_path / "free").items()
    limit = ["--max-output-size", sum(len(data) for name, data in written if name != "run.json")]
    assert draw(tmp_path / "out", *limit).code == 2
    assert draw(tmp_path / "out", *limit, *share).code == 0
