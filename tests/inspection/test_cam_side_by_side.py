"""Class activation maps made by worker processes: the same as those of one process."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import forked
import pytest
import torch
from conftest import DIGITS, DIGITS_MODEL, Run
from PIL import Image
from runs import make_photos, tree
from torch import nn

import featviz as fv
from featviz.run import workers

pytestmark = [
    pytest.mark.skipif(
        not workers.can_fork(), reason="workers are forked on Linux alone"
    ),
    pytest.mark.medium,
]

DEADLY = """
import os
import signal

from torch import nn


class Deadly(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, images):
        if images.min() > 0.9:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.head(self.conv(images).relu().mean((2, 3)))
"""
"""A network whose process dies where an image is white."""


def test_workers_write_the_pictures_that_one_process_writes(
    featviz: Run, tmp_path: Path
) -> None:
    """All bytes are the same, and `--json` prints the images in their order."""
    command = ["cam", DIGITS_MODEL, DIGITS, "--json"]
    expected = featviz(*command, "--jobs", "1", "--out", tmp_path / "expected")
    done = featviz(*command, "--jobs", "2", "--out", tmp_path / "done")
    assert expected.code == done.code == 0
    images = [json.loads(line)["image"] for line in done.out.splitlines()]
    assert images == sorted(path.name for path in DIGITS.glob("*.png"))
    assert tree(tmp_path / "done") == tree(tmp_path / "expected")


def test_an_image_whose_worker_dies_is_named(featviz: Run, tmp_path: Path) -> None:
    """The exit code is 3, and the others have their pictures."""
    (tmp_path / "net.py").write_text(DEADLY)
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, level in enumerate((10, 60, 110, 255, 160)):
        Image.new("L", (16, 16), level).save(photos / f"{number}.png")
    options = ("--size", "16", "--preset", "none", "--jobs", "2", "--out", "cams")
    done = featviz("cam", "net.py:Deadly", photos, *options)
    assert done.code == 3
    assert "3.png: its worker process ended by signal 9 (SIGKILL), twice" in done.err
    pictures = sorted(path.name for path in (tmp_path / "cams").iterdir())
    assert pictures == ["cam-0.png", "cam-1.png", "cam-2.png", "cam-4.png"]


@pytest.mark.slow
def test_an_exported_program_is_explained_in_one_process(
    tmp_path: Path,
) -> None:
    """torch.export makes autograd start threads, which no worker process has: all
    images have their maps all the same."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2704, 3))
    program = torch.export.export(net.eval(), (torch.zeros(1, 1, 28, 28),))
    torch.export.save(program, tmp_path / "net.pt2")
    options = ("--size", "28", "--jobs", "2", "--out", tmp_path / "cams")
    command = ["cam", tmp_path / "net.pt2", DIGITS, "--trust", *options]
    done = forked.command(tmp_path / "process", *command).ended()
    assert (done.code, "failed" in done.err) == (0, False), done.err
    assert len([*(tmp_path / "cams").iterdir()]) == len([*DIGITS.glob("*.png")])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes_and_leaves_no_half_file(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Workers end the image that they have; the exit code is that of Ctrl-C."""
    # so many that a slow machine does not draw them all before the signal comes
    photos = make_photos(tmp_path / "photos", 200, (28, 28))
    cams = tmp_path / "cams"
    command = ["cam", DIGITS_MODEL, photos, "--jobs", "2", "--json", "--out", cams]
    process = forked.command(tmp_path / "process", *command)
    while process.process.is_alive() and len([*cams.glob("cam-*.png")]) < 3:
        time.sleep(0.005)
    process.kill(number)
    done = process.ended()
    assert done.code == 130
    assert done.err.endswith("error: interrupted\n")
    assert 3 <= len([*cams.glob("cam-*.png")]) < 200
    assert [*cams.glob(".*")] == []


def test_a_module_of_the_callers_stays_in_its_process() -> None:
    """Its hooks see all images."""
    seen: list[int] = []
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2028, 10)
    )
    net.register_forward_hook(lambda *_: seen.append(1))
    maps = fv.cam(net, DIGITS, "class:3", size=28)
    assert len(maps.images) == len([*DIGITS.glob("*.png")])
    assert len(seen) >= len(maps.images)
