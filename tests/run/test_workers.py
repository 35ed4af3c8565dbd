"""Several processes on one run: shards, torchrun, srun, and what happens when one of
them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Run
from runs import (
    SMALL,
    check_whole,
    complete,
    make_photos,
    refused,
    run_json,
    tree,
    wait_for,
)

from featviz.cli.run import shard_of_process
from featviz.errors import UsageError
from featviz.models.load import pick_device
from featviz.options import RunOptions, read
from featviz.records import Sample, Shard

VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")

SLOW = """
import os, time
from torch import nn

class Slow(nn.Module):
    '''A convolution that takes PAUSE seconds.'''
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)
        nn.init.constant_(self.conv.weight, 0.5)
        nn.init.zeros_(self.conv.bias)
    def forward(self, x):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return self.conv(x)
"""


@pytest.mark.parametrize("text", ["0/2", "3/2", "٣/4", "1/" + "9" * 5000])
def test_no_shards(
    text: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Named as it is, with an example; digits of other kinds are no numbers."""
    done = featviz(
        "run", tiny_file, photos, f"--shard={text}", "--out", tmp_path / "out"
    )
    refused(done, 2, "expected I/N with I from 1 to N", "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("images", "count"), [(1, 7), (20, 7)])
def test_shards_are_a_partition(images: int, count: int) -> None:
    """Together all images, none twice, and no share is larger than another by more than
    one."""
    samples = [Sample(f"{i}.png", (Path(f"{i}.png"),)) for i in range(images)]
    parts = [Shard(index, count).of(samples) for index in range(count)]
    assert sorted(s.name for part in parts for s in part) == sorted(
        s.name for s in samples
    )
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert read(RunOptions, {"shard": f"{count}/{count}"}).shard == Shard(
        count - 1, count
    )


@pytest.mark.parametrize(
    ("variables", "shard"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4"}, "refused"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "refused"),
        ({"SLURM_PROCID": "9", "SLURM_NTASKS": "2"}, "refused"),
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Shard(1, 4)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, Shard(2, 3)),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "2", "SLURM_NTASKS": "3"},
            None,
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "2", "SLURM_NTASKS": "3"},
            Shard(1, 2),
        ),
    ],
)
def test_the_shard_of_a_process(
    variables: dict[str, str],
    shard: Shard | str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun's numbers count before those of SLURM, which batch jobs set in part;
    those that do not fit are a usage error with their values."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if shard != "refused":
        assert shard_of_process() == shard
        return
    with pytest.raises(UsageError, match="name no process of several") as caught:
        shard_of_process()
    assert all(
        f"{name}={value}" in caught.value.message for name, value in variables.items()
    )


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By local rank, going round where there are fewer; only for `auto`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    assert pick_device("auto") == torch.device("cuda")
    for name in ("SLURM_LOCALID", "LOCAL_RANK"):
        for rank, index in (("0", 0), ("3", 3), ("4", 0), ("6", 2)):
            monkeypatch.setenv(name, rank)
            assert pick_device("auto") == torch.device(f"cuda:{index}")
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type in ("cpu", "mps")


def test_stdin_under_torchrun_is_refused(
    featviz: Run, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes have one stdin, of which each would get some lines."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = featviz("run", tiny_file, "-", "--out", tmp_path / "out")
    refused(done, 2, "which the processes of torchrun cannot divide", "give a folder")


@pytest.mark.parametrize(
    ("names", "codes"),
    [(("RANK", "WORLD_SIZE"), [0, 3]), (("SLURM_PROCID", "SLURM_NTASKS"), [1, 3])],
)
def test_the_last_of_several_processes_says_that_images_failed(
    names: tuple[str, str],
    codes: list[int],
    draw: Run,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun would end the others where the first says it; srun lets each speak."""
    (photos / "00.png").write_bytes(b"no picture")
    monkeypatch.setenv(names[1], "2")
    exit_codes = []
    for rank in "01":
        monkeypatch.setenv(names[0], rank)
        exit_codes.append(draw(tmp_path / "out").code)
    assert exit_codes == codes


# Shards of one folder, and of several


@pytest.mark.slow
def test_shards_merged_are_one_run(
    featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """`featviz merge` of the folders of all shards gives the tree of a single run, with
    a failed image; and so do shards that write into one folder, one after the other. An
    empty shard is no error."""
    photos = sorted(make_photos(tmp_path / "photos", 7).iterdir())
    photos[2].write_bytes(b"no picture")
    base = ["run", tiny_file, *photos, *SMALL, "--out"]
    single = tmp_path / "single"
    merged = tmp_path / "whole"
    assert featviz(*base, single).code == 3
    shards = [tmp_path / f"part{index}" for index in (1, 2, 3)]
    for index, shard in enumerate(shards):
        assert featviz(*base, shard, "--shard", f"{index + 1}/3").code in (0, 3)
    assert featviz("merge", *shards, "--out", merged).code == 3
    assert tree(merged) == tree(single)
    assert complete(shards[0])
    assert run_json(shards[0])["images"]["missing"]
    for index in (5, 8, 1, 2, 3, 4, 6, 7):
        assert featviz(*base, tmp_path / "one", "--shard", f"{index}/8").code in (0, 1)
    assert tree(tmp_path / "one") == tree(single)


def test_what_a_shard_may_not_join(draw: Run, tmp_path: Path) -> None:
    """Another run, or one with images of this shard; --overwrite would remove the
    others'."""
    out = tmp_path / "out"
    assert draw(out, "--shard", "1/2").code == 0
    before = tree(out)
    done = draw(out, "--shard", "1/2")
    refused(
        done, 1, f"--out {out} holds 1 image of shard 1/2", "--resume goes on with it"
    )
    done = draw(out, "--shard", "2/2", "--cmap", "viridis")
    refused(done, 1, f"--out {out} holds another run", "cmap")
    done = draw(out, "--shard", "2/2", "--overwrite")
    refused(done, 2, "overwrite would remove what other shards write", "shard 2/2")
    assert tree(out) == before
    assert draw(out, "--shard", "2/2").code == 0
    assert draw(out, "--shard", "1/2", "--resume").code == 0
    assert draw(out, "--overwrite").code == 0


@pytest.mark.slow
def test_torchrun_divides_the_images_and_leaves_one_run(
    featviz: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a signal, which torchrun passes on, run.json tells what is missing;
    --resume goes on to the tree of a single process, with the failed image."""
    photos = make_photos(tmp_path / "photos", 12)
    out = tmp_path / "out"
    (photos / "03.png").write_bytes(b"no picture")
    (tmp_path / "slow.py").write_text(SLOW)
    base = [
        "run",
        f"{tmp_path}/slow.py:Slow",
        str(photos),
        "--layers",
        "Conv2d",
        "--size",
        "16",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=2", "-m", "featviz", *base, "--out", str(out)]
    with subprocess.Popen(
        torchrun, stderr=subprocess.PIPE, text=True, env={**os.environ, "PAUSE": "0.3"}
    ) as process:
        wait_for(3, out)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode != 0
    assert "draws shard 2/2 of the images" in err
    images = run_json(out)["images"]
    assert images["complete"] == complete(out), err
    assert "stopping after this image" in err
    assert images["missing"]
    check_whole(out)
    assert 3 <= len(complete(out)) < 11
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert featviz(*base, "--out", out, "--resume").code == 3
    assert featviz(*base, "--out", tmp_path / "single").code == 3
    assert tree(out) == tree(tmp_path / "single")
    assert not list(out.glob(".*"))
    assert [row["image"] for row in run_json(out)["failures"]] == ["03.png"]
