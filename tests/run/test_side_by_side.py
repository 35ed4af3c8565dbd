"""Images of a run divided among worker processes: the same bytes, messages and ends as
in one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
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
from featviz import cli
from featviz.run import workers
from featviz.run.draw import Drawing, DrawnJob, ImageWriter

pytestmark = [
    pytest.mark.skipif(
        not workers.can_fork(), reason="workers are forked on Linux alone"
    ),
    pytest.mark.medium,
]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 8)


Processes = Callable[[], dict[str, int]]
"""Gives the process that drew each image, by its name."""
Show = Callable[[Drawing, Sequence[DrawnJob]], ImageWriter]


@pytest.fixture
def before_image(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have a function called with the name of each image, in the process that draws
    it."""

    def register(action: Callable[[str], object]) -> None:
        real: Show = Drawing.show

        def show(self: Drawing, jobs: Sequence[DrawnJob]) -> ImageWriter:
            action(jobs[0].sample.name)
            return real(self, jobs)

        monkeypatch.setattr(Drawing, "show", show)

    return register


@pytest.fixture
def processes(tmp_path: Path, before_image: Callable[..., None]) -> Processes:
    """Notes which process draws each image."""
    notes = tmp_path / "processes"
    notes.mkdir()
    before_image(lambda name: (notes / name).write_text(str(os.getpid())))
    return lambda: {path.name: int(path.read_text()) for path in notes.iterdir()}


def test_workers_write_the_bytes_that_one_process_writes(
    draw: Run, tmp_path: Path
) -> None:
    """They do with one torch thread, as the tests have it; `--json` prints a line for
    each, in order."""
    assert draw(tmp_path / "alone", "--jobs", "1").code == 0
    done = draw(tmp_path / "divided", "--jobs", "3", "--json")
    assert done.code == 0
    names = [json.loads(line)["image"] for line in done.out.splitlines()]
    assert names == [f"0{number}.png" for number in range(8)]
    assert tree(tmp_path / "alone") == tree(tmp_path / "divided")


@pytest.mark.medium
def test_torch_has_its_threads_afterwards(
    photos: Path, tiny_file: Path, tmp_path: Path
) -> None:
    """Workers have one thread each, and whoever called has as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        fv.run(str(tiny_file), str(photos), "Conv2d", tmp_path / "out", jobs=2, size=16)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_images_are_divided_among_workers(
    draw: Run, tmp_path: Path, processes: Processes
) -> None:
    """This process draws the first image alone, which shows how much memory one takes."""
    assert draw(tmp_path / "out", "--jobs", "3").code == 0
    used = processes()
    assert used.pop("00.png") == os.getpid()
    assert len(set(used.values())) == 3
    assert os.getpid() not in used.values()


def test_few_images_take_one_process(
    featviz: Run,
    tiny_file: Path,
    tmp_path: Path,
    processes: Processes,
    two_cores: None,
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


def hidden(out: Path) -> list[Path]:
    """What a run has not finished."""
    return list(out.glob(".*.part"))


def test_an_image_whose_worker_dies_twice_fails(
    draw: Run, tmp_path: Path, before_image: Callable[..., None]
) -> None:
    """The line names the image and the signal; the others are complete, nothing hidden
    stays."""

    def die(name: str) -> None:
        if name == "03.png":
            os.kill(os.getpid(), signal.SIGKILL)

    before_image(die)
    done = draw(tmp_path / "out", "--jobs", "2")
    refused(done, 3, "03.png", "SIGKILL")
    assert len(complete(tmp_path / "out")) == 7
    assert hidden(tmp_path / "out") == []


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
    module.register_forward_hook(lambda *_: seen.append(os.getpid()))
    images = [Image.new("RGB", (20, 20), (n * 20, 99, 0)) for n in range(5)]
    result = fv.run(module, images, "Conv2d", tmp_path / "alone", preset="none")
    assert result.exit_code == 0
    assert seen == [os.getpid()] * 5
    fv.run(module, images, "Conv2d", tmp_path / "divided", preset="none", jobs=2)
    assert len(seen) == 6
    assert tree(tmp_path / "alone") == tree(tmp_path / "divided")


def begin(*arguments: object) -> int:
    """Begin `featviz ARGUMENTS` in a session of its own, as a terminal does; gives its
    process."""
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup may have ignored
        code = cli.guarded([str(argument) for argument in arguments])
    finally:
        os._exit(code)


@pytest.fixture
def run(tiny_file: Path, tmp_path: Path) -> list[object]:
    """A run of 200 images with two workers."""
    images = make_photos(tmp_path / "many", 200)
    out = tmp_path / "out"
    return ["run", tiny_file, images, *SMALL, "--jobs", "2", "-q", "--out", out]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_workers_after_their_image(
    number: int, run: list[object], tmp_path: Path
) -> None:
    """Exit code 130; no process is left, and run.json tells what is complete."""
    process = begin(*run)
    wait_for(5, tmp_path / "out")
    os.killpg(process, number)  # as a terminal does it
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(process, 0)
    images = run_json(tmp_path / "out")["images"]
    assert sorted(images["complete"]) == complete(tmp_path / "out")
    assert len(images["complete"]) + len(images["missing"]) == 200
    assert hidden(tmp_path / "out") == []


def wait_for_group(process: int) -> None:
    """Wait until no process of a session is left."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a worker outlived its parent")


@pytest.mark.slow
def test_a_killed_parent_leaves_complete_images_and_no_process(
    featviz: Run, run: list[object], tmp_path: Path
) -> None:
    """Its workers end with their image; --resume completes the run."""
    process = begin(*run)
    wait_for(5, tmp_path / "out")
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    wait_for_group(process)
    assert 5 <= len(complete(tmp_path / "out")) < 200
    assert featviz(*run, "--resume").code == 0
    assert len(complete(tmp_path / "out")) == 200
    assert hidden(tmp_path / "out") == []
