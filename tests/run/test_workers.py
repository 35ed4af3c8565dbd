"""Several processes on one run: shards, torchrun, srun, and what happens when one of
them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import chain
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
    samples = [Sample(f"{i:02d}.png", (Path(f"{i}.png"),)) for i in range(images)]
    shares = [Shard(index, count).of(samples) for index in range(count)]
    names = [sample.name for sample in chain(*shares)]
    assert sorted(names) == [sample.name for sample in samples]
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


def test_shards_are_counted_from_one() -> None:
    """The option 7/7 is the last of seven."""
    assert read(RunOptions, {"shard": "7/7"}).shard == Shard(6, 7)


@pytest.fixture
def variables(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The variables of several processes: these are set, and no others."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    values: dict[str, str] = request.param
    return values


SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}


@pytest.mark.parametrize(
    ("variables", "shard"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Shard(1, 4)),
        (SLURM, Shard(2, 3)),
        ({"RANK": "0", "WORLD_SIZE": "1", **SLURM}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", **SLURM}, Shard(1, 2)),
    ],
    indirect=["variables"],
)
def test_the_shard_of_a_process(variables: dict[str, str], shard: Shard | None) -> None:
    """torchrun's numbers count before those of SLURM, which batch jobs set in part."""
    assert shard_of_process() == shard


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "4", "WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": "two"},
        {"SLURM_PROCID": "9", "SLURM_NTASKS": "2"},
    ],
    indirect=True,
)
def test_numbers_of_no_process_are_refused(variables: dict[str, str]) -> None:
    """The message has the variables with their values."""
    with pytest.raises(UsageError, match="name no process of several") as caught:
        shard_of_process()
    for name, value in variables.items():
        assert f"{name}={value}" in caught.value.message


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, 2),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 0),
    ],
    indirect=["variables"],
)
def test_of_several_processes_the_first_tells_what_would_be_drawn(
    variables: dict[str, str], lines: int, featviz: Run, tiny_file: Path, picture: Path
) -> None:
    """Once, and for all of them."""
    done = featviz("run", tiny_file, picture, "--layers", "0", "--dry-run")
    assert done.code == 0
    assert len(done.out.splitlines()) == lines


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch knows four GPUs, and no process has a local rank."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "LOCAL_RANK"])
@pytest.mark.parametrize(("rank", "index"), [(0, 0), (3, 3), (4, 0), (6, 2)])
def test_each_process_takes_a_gpu_of_its_own(
    name: str, rank: int, index: int, four_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local rank is its number, going round where there are fewer."""
    monkeypatch.setenv(name, str(rank))
    assert pick_device("auto") == torch.device(f"cuda:{index}")


def test_one_process_leaves_the_gpu_to_torch(four_gpus: None) -> None:
    """`auto` is torch's own GPU, `cpu` none."""
    assert pick_device("auto") == torch.device("cuda")
    assert pick_device("cpu") == torch.device("cpu")


def test_without_a_gpu_auto_is_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the CPU, or Apple's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type in ("cpu", "mps")


@pytest.mark.medium
def test_stdin_under_torchrun_is_refused(
    featviz: Run, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes have one stdin, of which each would get some lines."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = featviz("run", tiny_file, "-", "--out", tmp_path / "out")
    refused(done, 2, "which the processes of torchrun cannot divide", "give a folder")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("rank", "count", "broken", "codes"),
    [
        ("RANK", "WORLD_SIZE", "00.png", [0, 3]),
        ("RANK", "WORLD_SIZE", "01.png", [0, 1]),
        ("SLURM_PROCID", "SLURM_NTASKS", "00.png", [1, 3]),
        ("SLURM_PROCID", "SLURM_NTASKS", "01.png", [0, 1]),
    ],
)
def test_the_last_of_several_processes_says_that_images_failed(
    rank: str,
    count: str,
    broken: str,
    codes: list[int],
    draw: Run,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun would end the others where the first says it; srun lets each speak."""
    (photos / broken).write_bytes(b"no picture")
    monkeypatch.setenv(count, "2")
    exit_codes = []
    for number in "01":
        monkeypatch.setenv(rank, number)
        exit_codes.append(draw(tmp_path / "out").code)
    assert exit_codes == codes


# Shards of one folder, and of several


@pytest.fixture
def run(tiny_file: Path, tmp_path: Path) -> list[object]:
    """A run of seven images, of which one is broken, without its folder."""
    photos = sorted(make_photos(tmp_path / "photos", 7).iterdir())
    photos[2].write_bytes(b"no picture")
    return ["run", tiny_file, *photos, *SMALL, "--out"]


@pytest.fixture
def single(featviz: Run, run: list[object], tmp_path: Path) -> Path:
    """The run in one process."""
    assert featviz(*run, tmp_path / "single").code == 3
    return tmp_path / "single"


@pytest.mark.slow
def test_shards_merged_are_one_run(
    featviz: Run, run: list[object], single: Path, tmp_path: Path
) -> None:
    """`featviz merge` of the folders of all shards gives the tree of a single run, with
    a failed image."""
    shards = [tmp_path / f"shard{number}" for number in (1, 2, 3)]
    codes = []
    for number, shard in enumerate(shards, 1):
        codes.append(featviz(*run, shard, "--shard", f"{number}/3").code)
    assert sorted(codes) == [0, 0, 3]
    assert complete(shards[0])
    assert run_json(shards[0])["images"]["missing"]
    assert featviz("merge", *shards, "--out", tmp_path / "merged").code == 3
    assert tree(tmp_path / "merged") == tree(single)


@pytest.mark.slow
def test_shards_in_one_folder_are_one_run(
    featviz: Run, run: list[object], single: Path, tmp_path: Path
) -> None:
    """They write one after the other, in any order; an empty shard is no error."""
    for number in (5, 8, 1, 2, 3, 4, 6, 7):
        done = featviz(*run, tmp_path / "out", "--shard", f"{number}/8")
        assert done.code in (0, 1)
    assert tree(tmp_path / "out") == tree(single)


@pytest.fixture
def first_half(draw: Run, tmp_path: Path) -> Path:
    """A run of which one of two shards is drawn."""
    assert draw(tmp_path / "out", "--shard", "1/2").code == 0
    return tmp_path / "out"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("options", "code", "texts"),
    [
        (
            ("--shard", "1/2"),
            1,
            ("holds 1 image of shard 1/2", "--resume goes on with it"),
        ),
        (
            ("--shard", "2/2", "--cmap", "viridis"),
            1,
            ("holds another run", "cmap"),
        ),
        (
            ("--shard", "2/2", "--overwrite"),
            2,
            ("overwrite would remove what other shards write", "shard 2/2"),
        ),
    ],
)
def test_what_a_shard_may_not_join(
    options: tuple[str, ...],
    code: int,
    texts: tuple[str, ...],
    draw: Run,
    first_half: Path,
) -> None:
    """It is another run, or one with images of this shard; --overwrite would remove the
    others'."""
    before = tree(first_half)
    refused(draw(first_half, *options), code, *texts)
    assert tree(first_half) == before


@pytest.mark.medium
def test_what_a_shard_may_join(draw: Run, first_half: Path) -> None:
    """It is a run without its images; a shard goes on with --resume, and all of it is
    replaced without --shard."""
    assert draw(first_half, "--shard", "2/2").code == 0
    assert draw(first_half, "--shard", "1/2", "--resume").code == 0
    assert draw(first_half, "--overwrite").code == 0


@pytest.fixture
def slow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run of twelve images, of which one is broken, with a model that takes its
    time."""
    photos = make_photos(tmp_path / "photos", 12)
    (photos / "03.png").write_bytes(b"no picture")
    (tmp_path / "slow.py").write_text(SLOW)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    model = f"{tmp_path}/slow.py:Slow"
    return ["run", model, str(photos), "--layers", "Conv2d", "--size", "16", "--out"]


@pytest.mark.slow
def test_torchrun_divides_the_images_and_leaves_one_run(
    featviz: Run, slow_run: list[str], tmp_path: Path
) -> None:
    """After a signal, which torchrun passes on, run.json tells what is missing;
    --resume goes on to the tree of a single process, with the failed image."""
    out = tmp_path / "out"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=2", "-m", "featviz", *slow_run, str(out)]
    environment = {**os.environ, "PAUSE": "0.3"}
    with subprocess.Popen(
        torchrun, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        wait_for(3, out)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode != 0
    assert "draws shard 2/2 of the images" in errors
    assert "stopping after this image" in errors
    check_interrupted(out)
    assert featviz(*slow_run, out, "--resume").code == 3
    assert featviz(*slow_run, tmp_path / "single").code == 3
    assert tree(out) == tree(tmp_path / "single")
    assert not list(out.glob(".*"))


def check_interrupted(out: Path) -> None:
    """Of twelve images some are complete, and run.json tells which."""
    check_whole(out)
    images = run_json(out)["images"]
    assert images["complete"] == complete(out)
    assert images["missing"]
    assert 3 <= len(images["complete"]) < 11
