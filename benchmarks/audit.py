"""How fast is `featviz audit`? Against a script that only reads the images and runs the
model.

    python benchmarks/audit.py [--models resnet18,mobilenet_v2] [--batch-sizes 1,8]
    [--images 200]

For each model, with random weights, at 224 × 224, each side a process of its own, in
turns:

  a  decode, prepare and batch the images, and run the bare model on them, one after the other
  b  `featviz audit model.pth folder` with its default layers (all activations), without
     --redundant-at and without pictures of suspects; it reads the next images in a
     thread

What counts is an image more: the time for images + 16 copies of the sample scenes less
that for 16, divided by their difference. In both, torch's idle threads wait
(OMP_WAIT_POLICY is passive), and glibc keeps the memory that layers free: a script that
does not ask for this takes up to twice as long for batches of 8.

Medians over the rounds: milliseconds an image and a/b; the same ratio of core-seconds,
which other processes on the machine disturb less; the seconds of the audit of 16
images, all but a few tenths of which are spent on imports, tracing, and the chart; and
by how many MB the audit of all images grew beyond that of 16."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torchvision import models

from featviz.images.find import find_samples
from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.run.prepare import read_input

SCENES = Path(__file__).parent.parent / "sample_images" / "scenes"
INPUTS = InputOptions(
    size=256,
    crop=224,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    input_channels=3,
)
FEW = 16
"""Images of the shorter of two runs."""

ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_MMAP_THRESHOLD_": str(64 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}


def bare(weights: Path, folder: Path, batch_size: int) -> None:
    """Nothing but reading the images and the forward pass, one after the other."""
    module = models.get_model(weights.stem, weights=None)
    module.load_state_dict(torch.load(weights))
    preprocess = adopt(module.eval(), INPUTS).preprocess
    samples = find_samples([str(folder)])
    with torch.inference_mode():
        for start in range(0, len(samples), batch_size):
            some = samples[start : start + batch_size]
            inputs = [read_input(sample, preprocess, INPUTS).args[0] for sample in some]
            module(torch.cat(inputs))


def measure(name: str, folder: Path, images: int, batch_size: int, rounds: int) -> str:
    """One line of the table."""
    weights, out = folder / f"{name}.pth", folder / "audit"
    script = [
        sys.executable,
        __file__,
        "--batch-sizes",
        str(batch_size),
        "--bare",
        str(weights),
    ]
    words = [
        *("--arch", name, "--size", "256", "--crop", "224"),
        "--batch-size",
        str(batch_size),
    ]
    words += [*("--max-suspects", "0", "--overwrite", "-q", "--out"), str(out)]
    audit = [sys.executable, "-m", "featviz", "audit", str(weights)]
    taken: list[list[float]] = []
    for _ in range(rounds + 1):  # the first compiles, and fills caches
        sides = [
            [
                _cost([*command, str(folder / str(count)), *more])
                for count in (FEW, FEW + images)
            ]
            for command, more in ((script, []), (audit, words))
        ]
        costs = [
            (b - a) / images
            for few, many in sides
            for a, b in zip(few, many, strict=True)
        ]
        taken.append([*costs, sides[1][0][0]])
    a, a_cores, _, b, b_cores, growth, few = (
        statistics.median(v) for v in zip(*taken[1:], strict=True)
    )
    return (
        f"{name:14s}{batch_size:5d}{a * 1e3:8.1f}{b * 1e3:8.1f}{a / b:7.2f}"
        f"{a_cores / b_cores:7.2f}{few:8.1f}{growth * images:8.1f}"
    )


def _cost(command: Sequence[str]) -> tuple[float, float, float]:
    """Seconds that a process takes, its core-seconds, and its largest resident memory
    in MB."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env={**os.environ, **ENVIRONMENT}
    )
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command}: exit code {process.returncode}")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


def copies(folder: Path, count: int) -> None:
    """The sample scenes over and over, as files of their own."""
    folder.mkdir()
    scenes = sorted(SCENES.iterdir())
    for index in range(count):
        scene = scenes[index % len(scenes)]
        shutil.copy(scene, folder / f"{index:04d}{scene.suffix}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="resnet18,mobilenet_v2")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = list(map(int, args.batch_sizes.split(",")))
    if args.bare:
        bare(args.bare[0], args.bare[1], sizes[0])
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; medians")
    print(
        "model         batch    a ms    b ms    a/b  cores  few s  growth MB",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for count in (FEW, FEW + args.images):
            copies(folder / str(count), count)
        for name in args.models.split(","):
            torch.manual_seed(0)
            torch.save(
                models.get_model(name, weights=None).state_dict(),
                folder / f"{name}.pth",
            )
            for size in sizes:
                print(measure(name, folder, args.images, size, args.rounds), flush=True)


if __name__ == "__main__":
    main()
