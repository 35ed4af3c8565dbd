"""Several processes on one run: shares, torchrun, and what happens when one of them ends."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from conftest import Outcome
from PIL import Image
from runs import SMALL, check_whole, complete, make_photos, run_json, tree
from teams import SLOW, torchrun
from torch import nn

from featviz.errors import FeatvizError, StoreError, UsageError
from featviz.models.load import pick_device
from featviz.pipeline import processes
from featviz.pipeline.processes import ALONE, World, parse_shard
from featviz.records import Sample, Shard

Run = Callable[..., Outcome]


@pytest.mark.parametrize(("text", "index", "count"), [("1/1", 0, 1), ("2/8", 1, 8), ("8/8", 7, 8)])
def test_shards_count_from_one(text: str, index: int, count: int) -> None:
    """I/N is the I-th of N."""
    assert parse_shard(text) == Shard(index, count)


@pytest.mark.parametrize(
    "text", ["", "0/2", "3/2", "1", "/2", "1/", "a/b", "-1/2", "1/2/3", "1./2"]
)
def test_no_shards(text: str, featviz: Run, tiny_file: Path, picture: Path) -> None:
    """Named as it is, with an example; a usage error on the command line."""
    with pytest.raises(UsageError, match="is no part of a whole"):
        parse_shard(text)
    done = featviz("run", tiny_file, picture, f"--shard={text}")
    assert done.code == 2


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("images", [0, 1, 5, 7, 20])
def test_shards_are_a_partition(images: int, count: int) -> None:
    """Together all images, none twice, and no share is larger than another by more than one."""
    samples = [Sample(f"{i}.png", (Path(f"{i}.png"),)) for i in range(images)]
    parts = [Shard(index, count).of(samples) for index in range(count)]
    assert sorted(s.name for part in parts for s in part) == sorted(s.name for s in samples)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_more_shards_than_images(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path
) -> None:
    """An empty share is no error."""
    out = tmp_path / "out"
    done = featviz("run", tiny_file, picture, *SMALL, "--out", out, "--shard", "2/2", "--json")
    assert done.code == 0 and done.out == "" and complete(out) == []


@pytest.mark.parametrize("order", ["sorted", "listed"])
def test_shards_merged_are_one_run(
    order: str, featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """`featviz merge` of the folders of all shards gives the tree of a single run, also where
    images were listed in another order than that of their names."""
    photos = sorted(make_photos(tmp_path / "photos", 7).iterdir())
    listed = photos if order == "sorted" else [photos[i] for i in (4, 0, 6, 2, 5, 1, 3)]
    base = ["run", tiny_file, *listed, *SMALL, "--out"]
    assert featviz(*base, tmp_path / "single").code == 0
    parts = [tmp_path / f"part{index}" for index in (1, 2, 3)]
    for index, part in enumerate(parts):
        assert featviz(*base, part, "--shard", f"{index + 1}/3").code == 0
    assert featviz("merge", *parts, "--out", tmp_path / "whole").code == 0
    assert tree(tmp_path / "whole") == tree(tmp_path / "single")


def test_alone() -> None:
    """One process does it all, and waits for nobody."""
    assert ALONE.first and ALONE.share(None) == Shard() and ALONE.gather(5) == [5]
    assert ALONE.share(Shard(1, 4)) == Shard(1, 4)
    assert ALONE.at_first(lambda: 7) == 7
    with pytest.raises(StoreError, match="no room"):
        ALONE.at_first(_fail)


def _fail() -> None:
    raise StoreError("no room")


def test_a_team_takes_no_other_shard() -> None:
    """torchrun and --shard together would divide twice."""
    assert World(1, 4).share(None) == Shard(0, 1)
    with pytest.raises(UsageError, match="--shard divides what torchrun divides already"):
        World(0, 2).share(Shard(0, 2))


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "1"}])
def test_without_torchrun_there_is_no_team(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, whether it is said or not."""
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with processes.world(5) as team:
        assert team == ALONE


def test_half_of_torchruns_variables(
    featviz: Run, tiny_file: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A usage error that says what is missing."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    done = featviz("run", tiny_file, picture)
    assert done.code == 2 and "MASTER_ADDR" in done.err and "start with torchrun" in done.err


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By local rank, going round where there are fewer; only for `auto`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert pick_device("auto") == torch.device("cuda")
    for rank, index in (("0", 0), ("3", 3), ("4", 0), ("6", 2)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert pick_device("auto") == torch.device(f"cuda:{index}")
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("auto") == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type in ("cpu", "mps")


# Several processes


@pytest.mark.slow
def test_a_team_audits_as_one_process_does(tmp_path: Path) -> None:
    """Three processes count, prove and draw, each with its part of 13 images: findings, images,
    numbers and pictures are those of one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3), nn.ReLU())
    with torch.no_grad():
        model[0].weight[2], model[0].bias[2] = 0, -1
    torch.save(model, tmp_path / "net.pth")
    (tmp_path / "photos").mkdir()
    for index in range(12):
        noise = np.random.default_rng(index).integers(0, 255, (12, 14, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / "photos" / f"{index:02d}.png")
    (tmp_path / "photos" / "broken.png").write_bytes(b"no image")
    base = ["audit", tmp_path / "net.pth", tmp_path / "photos", "--size", "12x14", "--verify"]
    base += ["--redundant-at", "0.99", "--out"]
    assert forked.command(tmp_path / "alone", *base, tmp_path / "one").ended().code == 3
    done = forked.ended(forked.team(tmp_path / "said", *base, tmp_path / "team", count=3))
    assert [outcome.code for outcome in done] == [3, 0, 0], done
    documents = [json.loads((tmp_path / d / "audit.json").read_text()) for d in ("one", "team")]
    assert documents[0]["images"] == documents[1]["images"]
    assert documents[0]["images"]["seen"] == 12
    for row, other in zip(*(d["layers"] for d in documents), strict=True):
        assert row["findings"] == other["findings"] and row["apoz"] == pytest.approx(other["apoz"])
    assert documents[0]["prune"] == documents[1]["prune"] == {"0": [2]}
    assert documents[1]["verify"] == documents[0]["verify"]
    assert documents[1]["verify"]["largest_change"] == 0 and documents[1]["verify"]["images"] == 12
    suspects = [
        {n: b for n, b in tree(tmp_path / d).items() if ".png" in n} for d in ("one", "team")
    ]
    assert suspects[0] == suspects[1] and suspects[0]
    with (
        np.load(tmp_path / "one" / "channels.npz") as a,
        np.load(tmp_path / "team" / "channels.npz") as b,
    ):
        assert set(a.files) == set(b.files)
        for key in a.files:
            np.testing.assert_allclose(a[key], b[key], rtol=1e-6, atol=1e-9)
    assert [outcome.out.count("total ") for outcome in done] == [1, 0, 0]  # one table


@pytest.mark.slow
def test_torchrun_divides_the_images_and_leaves_one_run(tiny_file: Path, tmp_path: Path) -> None:
    """Union complete, intersection empty, one run.json, and the tree of a single process; the
    list on stdin is read once; images that fail are in run.json."""
    photos = make_photos(tmp_path / "photos", 9)
    (photos / "03.png").write_bytes(b"no picture")
    base = ["run", tiny_file, *SMALL, "--json", "--out"]
    single = forked.command(tmp_path / "alone", *base, tmp_path / "single", photos)
    assert single.ended().code == 3
    listed = "".join(f"{path}\n" for path in sorted(photos.iterdir()))
    with torchrun(*base, tmp_path / "team", "-", stdin=subprocess.PIPE) as process:
        out, err = process.communicate(listed)
    lines = [json.loads(line) for line in out.splitlines()]
    assert sorted(line["image"] for line in lines) == [f"0{i}.png" for i in range(9)], err
    assert tree(tmp_path / "team") == tree(tmp_path / "single")
    assert len(list((tmp_path / "team").rglob("run.json"))) == 1
    assert [row["image"] for row in run_json(tmp_path / "team")["failures"]] == ["03.png"]
    assert "error: 03.png is no image" in err


def wait_for(count: int, out: Path) -> None:
    deadline, found = time.monotonic() + 60, 0
    while found < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        with suppress(FileNotFoundError):  # a folder got its final name while it was listed
            found = len(complete(out))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Numbers as under torchrun."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def slow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A run of 16 images, two or three in a second; half of them in each of two processes."""
    photos = make_photos(tmp_path / "photos", 16)
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.setenv("PAUSE", "0.4")
    return ["run", f"{tmp_path / 'slow.py'}:Slow", photos, "--layers", "Conv2d", "--size", "16"]


def check_resumed(base: list[object], out: Path, featviz: Run) -> None:
    """What has stopped is whole, and --resume makes the tree of one run."""
    check_whole(out)
    assert 3 <= len(complete(out)) < 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAUSE", "0")
        assert featviz(*base, "--out", out, "--resume").code == 0
        assert featviz(*base, "--out", out.parent / "single").code == 0
    assert tree(out) == tree(out.parent / "single")


def check_told(out: Path, err: str) -> None:
    """run.json tells what is missing, and the process that writes it what it does."""
    images = run_json(out)["images"]
    assert images["complete"] == complete(out), err
    assert len(images["missing"]) == 16 - len(complete(out))
    assert "stopping after this image" in err


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_torchrun_passes_a_signal_on(slow_run: list[object], featviz: Run, tmp_path: Path) -> None:
    """Complete images are whole, run.json tells, and --resume makes the tree of one run."""
    out = tmp_path / "out"
    with torchrun(*slow_run, "--out", out) as process:
        wait_for(3, out)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode != 0
    check_told(out, err)
    check_resumed(slow_run, out, featviz)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("event", ["SIGINT", "first dies", "second dies"])
def test_a_team_that_is_stopped(
    event: str, slow_run: list[object], featviz: Run, tmp_path: Path
) -> None:
    """By a signal, with all that is done in an archive; or because one of two is killed, after
    which torchrun would end the other: what is complete is whole, run.json tells (unless who writes
    it is dead), and --resume makes the tree of one run."""
    out, archive = tmp_path / "out", tmp_path / "x.zip"
    packed = event == "SIGINT"
    where = ["--archive", archive] if packed else ["--out", out]
    team = forked.team(tmp_path / "said", *slow_run, *where, count=2)
    wait_for(3, tmp_path if packed else out)
    dies = int(event == "second dies")
    team[dies].kill(signal.SIGINT if packed else signal.SIGKILL)
    team[1 - dies].kill(signal.SIGINT if packed else signal.SIGTERM)
    done = forked.ended(team)
    codes = [130, 130] if packed else [-signal.SIGKILL, 1]
    assert [done[dies].code, done[1 - dies].code] == codes, done
    if packed:
        shutil.unpack_archive(archive, out)
        assert not list(tmp_path.glob(".*"))
    if event != "first dies":
        check_told(out, done[0].err)
    if event == "second dies":
        assert "error: another process of this run has ended before its time" in done[0].err
    check_resumed(slow_run, out, featviz)


def test_what_fails_in_the_first_process_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises there; the others end with the same code, and without a word."""
    shared: list[object] = []

    def broadcast(values: list[object], src: int) -> None:
        if shared:
            values[:] = shared
        shared[:] = values

    def refused() -> None:
        raise UsageError("no such thing")

    monkeypatch.setattr(processes.dist, "broadcast_object_list", broadcast)
    with pytest.raises(UsageError, match="no such thing"):
        World(0, 2).at_first(refused)
    with pytest.raises(SystemExit) as caught:
        World(1, 2).at_first(refused)
    assert caught.value.code == 2
    shared.clear()
    assert [World(rank, 2).at_first(lambda r=rank: r + 5) for rank in (0, 1)] == [5, 5]


def test_a_death_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gloo raises when a connection is gone becomes a line that says what to do."""

    def gone(*arguments: object, **more: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:5")

    monkeypatch.setattr(processes.dist, "all_gather_object", gone)
    monkeypatch.setattr(processes.dist, "broadcast_object_list", gone)
    for call in (lambda: World(0, 2).gather(1), lambda: World(1, 2).at_first(lambda: 1)):
        with pytest.raises(FeatvizError, match="another process of this run") as caught:
            call()
        assert "--resume goes on" in str(caught.value.hint)
