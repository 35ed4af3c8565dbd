"""Images of a run divided among worker processes: the same bytes, messages and ends as
in one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from conftest import Run
from PIL import Image
from runs import (
    SMALL,
    complete,
    fill_disk,
    make_photos,
    refused,
    run_json,
    tree,
    wait_for,
)
from torch import nn

import featviz as fv
from featviz.run import workers
from featviz.run.draw import Drawing

pytestmark = pytest.mark.skipif(
    not workers.can_fork(), reason="workers are forked on Linux alone"
)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 8)


@pytest.fixture
def processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[], dict[str, int]]:
    """Which process drew each image, by its name."""
    notes = tmp_path / "processes"
    notes.mkdir()
    real = Drawing.show

    def show(self: Drawing, jobs: Iterable) -> object:
        jobs = list(jobs)
        (notes / jobs[0].sample.name).write_text(str(os.getpid()))
        return real(self, jobs)

    monkeypatch.setattr(Drawing, "show", show)
    return lambda: {path.name: int(path.read_text()) for path in notes.iterdir()}


def test_workers_write_the_bytes_that_one_process_writes(
    draw: Run, tmp_path: Path, processes: Callable[[], dict[str, int]]
) -> None:
    """With one torch thread, as the tests have it; `--json` prints a line for each, in
    order."""
    assert draw(tmp_path / "one", "--jobs", "1").code == 0
    assert set(processes().values()) == {os.getpid()}
    done = draw(tmp_path / "three", "--jobs", "3", "--json")
    assert done.code == 0
    used = processes()
    # which shows how much memory an image takes
    assert used.pop("00.png") == os.getpid()
    assert len(set(used.values())) == 3
    assert os.getpid() not in used.values()
    names = [json.loads(line)["image"] for line in done.out.splitlines()]
    assert names == [f"0{number}.png" for number in range(8)]
    assert tree(tmp_path / "one") == tree(tmp_path / "three")


def test_few_images_take_one_process(
    featviz: Run,
    tiny_file: Path,
    tmp_path: Path,
    processes: Callable[[], dict[str, int]],
) -> None:
    """A fork costs about half an image."""
    few = make_photos(tmp_path / "few", workers.FEWEST_IMAGES - 1)
    assert featviz("run", tiny_file, few, *SMALL, "--out", tmp_path / "out").code == 0
    assert set(processes().values()) == {os.getpid()}


def test_a_broken_image_fails_alone(draw: Run, photos: Path, tmp_path: Path) -> None:
    """It is named in its place, and the others are complete: exit code 3."""
    (photos / "05.png").write_bytes(b"no image")
    done = draw(tmp_path / "out", "--jobs", "2", "--json")
    assert done.code == 3
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["image"] for line in lines if line.get("error")] == ["05.png"]
    assert len(complete(tmp_path / "out")) == 7


def test_an_image_whose_worker_dies_twice_fails(
    draw: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the image and the signal; the others are complete, nothing hidden
    stays."""
    real = Drawing.show

    def show(self: Drawing, jobs: Iterable) -> object:
        jobs = list(jobs)
        if jobs[0].sample.name == "03.png":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, jobs)

    monkeypatch.setattr(Drawing, "show", show)
    done = draw(tmp_path / "out", "--jobs", "2")
    assert done.code == 3
    assert "03.png" in done.err
    assert "SIGKILL" in done.err
    assert len(complete(tmp_path / "out")) == 7
    assert [path.name for path in (tmp_path / "out").glob(".*.part")] == []


def test_a_full_disk_ends_the_run(
    draw: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line and exit code 1; what is complete stays, and --resume makes the run
    whole."""
    with monkeypatch.context() as patch:
        fill_disk(
            patch, lambda path: "04.png" in path.parts and path.name == "output.png"
        )
        refused(draw(tmp_path / "out", "--jobs", "2"), 1, "No space left on device")
    assert {"00.png", "01.png"} <= set(complete(tmp_path / "out"))
    assert draw(tmp_path / "out", "--jobs", "2", "--resume").code == 0
    assert draw(tmp_path / "whole", "--jobs", "1").code == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_module_of_ones_own_stays_in_its_process(tmp_path: Path) -> None:
    """What it counts is there afterwards; `jobs` allows processes."""
    seen: list[int] = []
    module = nn.Sequential(nn.Conv2d(3, 2, 3))
    module.register_forward_hook(lambda part, args, output: seen.append(os.getpid()))
    images = [Image.new("RGB", (20, 20), (n * 20, 99, 0)) for n in range(5)]
    assert (
        fv.run(module, images, "Conv2d", tmp_path / "own", preset="none").exit_code == 0
    )
    assert seen == [os.getpid()] * 5
    result = fv.run(module, images, "Conv2d", tmp_path / "two", preset="none", jobs=2)
    assert result.exit_code == 0
    assert len(seen) == 6
    assert tree(tmp_path / "own") == tree(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_workers_after_their_image(
    number: int, tiny_file: Path, tmp_path: Path
) -> None:
    """Exit code 130, no process is left, and --resume makes the run whole."""
    images = make_photos(tmp_path / "many", 200)
    command = [
        sys.executable,
        "-m",
        "featviz",
        "run",
        tiny_file,
        images,
        *SMALL,
        "--jobs",
        "2",
    ]
    process = subprocess.Popen(
        [*map(str, command), "--out", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(5, tmp_path / "out")
    os.killpg(process.pid, number)  # as a terminal does it
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    images_record = run_json(tmp_path / "out")["images"]
    assert len(images_record["complete"]) + len(images_record["missing"]) == 200
    assert sorted(images_record["complete"]) == complete(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob(".*.part")] == []


@pytest.mark.slow
def test_a_killed_parent_leaves_complete_images_and_no_process(
    tiny_file: Path, tmp_path: Path
) -> None:
    """Its workers end with their image; --resume completes the run."""
    images = make_photos(tmp_path / "many", 60)
    command = [
        sys.executable,
        "-m",
        "featviz",
        "run",
        tiny_file,
        images,
        *SMALL,
        "--jobs",
        "2",
    ]
    arguments = [*map(str, command), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(arguments, start_new_session=True)
    wait_for(5, tmp_path / "out")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("a worker outlived its parent")
    subprocess.run([*arguments, "--resume"], check=True)
    assert len(complete(tmp_path / "out")) == 60
    assert [path.name for path in (tmp_path / "out").glob(".*.part")] == []
