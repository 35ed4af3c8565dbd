"""Do time and memory grow in a straight line with the images of a run?

    python benchmarks/scale.py [--images 1000,10000] [--steps
    run,resume,report,diff,verify]
                               [--keep FOLDER]

Makes images of 64 × 64 pixels of random values, and a network of two convolutions and
two ReLUs of which the two ReLUs are drawn (16 and 32 maps). Then it times what a user
types: `run` twice, once for each side of `diff`; `run --resume` with nothing left to
do; `report`, `diff` and `verify` with `--json` into a file. Each command is a process
of its own.

It prints for each command the seconds on the clock, the CPU seconds of all threads, the
most resident memory in MB. The CPU seconds are the figure to compare on a machine that
others use, too. `--keep` leaves images and runs in a folder, and uses those that are
there."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def timed(command: list[str], log: Path) -> tuple[float, float, float]:
    """Seconds on the clock, CPU seconds of all threads, and the most resident memory in
    MB."""
    with log.open("ab") as file:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "featviz", *command], stdout=file, stderr=file
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"featviz {' '.join(command)} failed; see {log}")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def measure(root: Path, count: int, steps: list[str]) -> None:
    """Print a line for each command over a folder of images."""
    make_images(root / "images", count)
    (root / "net.py").write_text(NETWORK)
    for step in steps:
        for command in commands(root)[step]:
            if step == "run" and (Path(command[-1]) / "run.json").exists():
                continue
            seconds, cpu, memory = timed(command, root / "log.txt")
            each = 1000 * cpu / count
            print(
                f"{count:7,} images  {step:7} {seconds:8.1f} s  CPU {cpu:8.1f} s "
                f"({each:6.2f} ms an image)  {memory:6.0f} MB",
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
    args = parser.parse_args()
    for count in map(int, args.images.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            root = (args.keep or Path(folder)) / str(count)
            measure(root, count, args.steps.split(","))


if __name__ == "__main__":
    main()
