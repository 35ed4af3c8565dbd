"""Do time and memory grow in a straight line with the images of a run?

    python benchmarks/scale.py [--images 1000,10000]
        [--steps run,resume,report,diff,verify] [--keep FOLDER] [--before CHECKOUT]

Makes images of 64 × 64 pixels of random values, and a network of two convolutions and
two ReLUs of which the two ReLUs are drawn (16 and 32 maps). Then it times what a user
types: `run` twice, once for each side of `diff`; `run --resume` with nothing left to
do; `report`, `diff` and `verify` with `--json` into a file. Each command is a process
of its own.

It prints for each command the seconds on the clock, the CPU seconds of all threads and
processes, and the most memory that they had together, in MB. The CPU seconds are the
figure to compare on a machine that others use, too. `--keep` leaves images and runs in
a folder, and uses those that are there. `--before` lets another checkout make the run
`base`, and this one the run `new`.

Memory is the sum of the processes' proportional set sizes (PSS, `man 5 proc`): pages
that several of them share, such as the weights, count once. Linux alone has it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import numpy as np
from PIL import Image

SIDE = 64
NETWORK = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )
"""
"""A file that MODEL names; torch is seeded so that the weights are those of every run.
"""
STEPS = ("run", "resume", "report", "diff", "verify")
HERE = Path(__file__).parent.parent
SAMPLED_EVERY = 0.25
"""Seconds between two looks at the memory."""


class Cost(NamedTuple):
    """What a command took."""

    seconds: float
    """On the clock."""
    cpu: float
    """Seconds of all its threads and processes."""
    memory: float
    """MB that its processes had together, at most."""


def make_images(folder: Path, count: int) -> None:
    """Write PNG files; what is there is left."""
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        path = folder / f"{n:06d}.png"
        if not path.exists():
            pixels = np.random.default_rng(n).integers(
                0, 256, (SIDE, SIDE, 3), np.uint8
            )
            Image.fromarray(pixels).save(path, compress_level=1)


def run_command(root: Path, out: str, *more: str) -> list[str]:
    """`featviz run` over all images of a folder."""
    sizes = ["--size", str(SIDE), "--crop", str(SIDE), "--layers", "ReLU"]
    return [
        "run",
        f"{root / 'net.py'}:build",
        str(root / "images"),
        *sizes,
        "--out",
        out,
        *more,
    ]


def commands(root: Path) -> dict[str, list[list[str]]]:
    """What a user types, by the name of the step."""
    runs = [str(root / name) for name in ("base", "new")]
    return {
        "run": [run_command(root, out) for out in runs],
        "resume": [run_command(root, runs[0], "--resume")],
        "report": [["report", runs[0], "--out", str(root / "report")]],
        "diff": [["diff", *runs]],
        "verify": [["verify", runs[0], "--json"]],
    }


def memory_of(process_id: int) -> float:
    """MB of a process and all its descendants: the sum of their proportional set
    sizes."""
    total = 0.0
    # a process may end while it is looked at
    with suppress(OSError):
        for line in Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) / 1024
        for task in Path(f"/proc/{process_id}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += memory_of(int(child))
    return total


def cost_of(command: list[str], checkout: Path, log: Path) -> Cost:
    """Run a command of a checkout to its end."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    samples = [0.0]
    ended = Event()

    def watch(process_id: int) -> None:
        while not ended.wait(SAMPLED_EVERY):
            samples.append(memory_of(process_id))

    with log.open("ab") as file:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "featviz", *command],
            stdout=file,
            stderr=file,
            env=environment,
            cwd=log.parent,  # not the clone, whose package `-m` would find first
        )
        watcher = Thread(target=watch, args=[process.pid])
        watcher.start()
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        ended.set()
        watcher.join()
    if status:
        raise SystemExit(f"featviz {' '.join(command)} failed; see {log}")
    return Cost(seconds, used.ru_utime + used.ru_stime, max(samples))


def measure(root: Path, count: int, steps: list[str], before: Path) -> None:
    """Print a line for each command over a folder of images.

    Args:
        root: where images and runs are.
        count: of images.
        before: the checkout that makes the first run.
    """
    make_images(root / "images", count)
    (root / "net.py").write_text(NETWORK)
    for step in steps:
        for command in commands(root)[step]:
            if step == "run" and (Path(command[-1]) / "run.json").exists():
                continue
            is_base = step == "run" and Path(command[-1]).name == "base"
            checkout = before if is_base else HERE
            cost = cost_of(command, checkout, root / "log.txt")
            each = 1000 * cost.cpu / count
            title = f"{step} before" if checkout != HERE else step
            print(
                f"{count:7,} images  {title:11} {cost.seconds:8.1f} s"
                f"  CPU {cost.cpu:8.1f} s ({each:6.2f} ms an image)"
                f"  {cost.memory:6.0f} MB",
                flush=True,
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", default="1000,10000")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--before", type=Path, default=HERE)
    args = parser.parse_args()
    for count in map(int, args.images.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            root = (args.keep or Path(folder)) / str(count)
            measure(root, count, args.steps.split(","), args.before.resolve())


if __name__ == "__main__":
    main()
