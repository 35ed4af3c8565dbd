"""How fast is `featviz run`? Against the plain way, the bare forward pass and a strict
floor.

    python benchmarks/run.py [--models resnet18,resnet50,vgg16] [--rounds 5] [--images
    10]

For each model, with random weights, at 224 × 224, every output of Conv2d and ReLU, the
sides interleaved in rounds:

  plain    a hook with output.clone().permute(1, 0, 2, 3), then torchvision's
           save_image(normalize=True, scale_each=True)
  bare     the forward pass alone, with as many threads as torch takes
  floor    (the forward pass on one thread + one pass that scales the values + ISA-L's level 1 over
           the very bytes that featviz's pictures hold), each part alone, divided by the
           cores
  busy     the same work of one image on each core at the same time, divided by the cores: what
           the cores can do that share their memory and its caches
  featviz  what an image more costs the command: the time of `featviz run model.pth folder` with
           images + 2 copies of a photograph less its time with 2, divided by their
           difference

Medians over the rounds in milliseconds an image, the ratios, and the megabytes of the
pictures.

Files are written into memory where the system has a folder for that (/dev/shm), by all
sides: ext4 makes files slowly for minutes after many were deleted, as those of each
round are, which no user does between two images."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from isal import isal_zlib
from torch import Tensor, nn
from torchvision import models
from torchvision.utils import save_image

from featviz.drawing import values
from featviz.images.decode import decode
from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.records import Sample

MEMORY = Path("/dev/shm")
PHOTO = Path(__file__).parent.parent / "sample_images" / "scenes" / "landscape.jpg"
INPUTS = InputOptions(
    size=256,
    crop=224,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    input_channels=3,
)
FEW = 2
"""Images of the shorter of two runs."""

BUSY = 5
"""Images that each core works on in a row."""


class Bench:
    """One model, and what each side does with it."""

    def __init__(self, name: str, images: int, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.images, self.runs = folder, images, 0
        self.module = models.get_model(name, weights=None).eval()
        self.weights = folder / f"{name}.pth"
        torch.save(self.module.state_dict(), self.weights)
        for count in (FEW, FEW + images):
            (folder / str(count)).mkdir()
            for index in range(count):
                shutil.copy(PHOTO, folder / str(count) / f"{index:03d}.jpg")
        model = adopt(self.module, INPUTS)
        self.tensor = model.preprocess.tensor(decode(Sample("photo", (PHOTO,)))[0][0])
        self.outputs: list[Tensor] = []
        self._hooked(lambda part, args, output: self.outputs.append(output[0].clone()))
        self._command(FEW)  # compiles, and fills caches
        self.rows = _png_rows(self.out / "000.jpg")

    @property
    def out(self) -> Path:
        """The run directory of the last command."""
        return self.folder / f"out{self.runs}"

    def plain(self) -> float:
        """The way of the scripts: keep clones, then let torchvision draw them."""
        kept: list[Tensor] = []
        out = self.folder / "plain"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        start = time.perf_counter()
        self._hooked(
            lambda p, args, output: kept.append(output.clone().permute(1, 0, 2, 3))
        )
        for index, maps in enumerate(kept):
            save_image(maps, out / f"{index}.png", normalize=True, scale_each=True)
        return time.perf_counter() - start

    def bare(self) -> float:
        """The forward pass."""
        return _timed(lambda: self.module(self.tensor))

    def floor(self) -> float:
        """Seconds of the parts, each alone on one thread, divided by the cores."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        seconds = _timed(self._work)
        torch.set_num_threads(threads)
        return seconds / cores()

    def busy(self) -> float:
        """Seconds of the same parts, an image on each core at the same time."""
        threads, count = torch.get_num_threads(), BUSY * cores()
        torch.set_num_threads(1)
        with ThreadPoolExecutor(cores()) as pool:
            seconds = _timed(
                lambda: list(pool.map(lambda _: self._work(), range(count)))
            )
        torch.set_num_threads(threads)
        return seconds / count

    def featviz(self) -> float:
        """What an image more costs the command."""
        few, many = (self._command(count) for count in (FEW, FEW + self.images))
        return (many - few) / self.images

    def megabytes(self) -> tuple[float, float]:
        """Of one image's pictures, plain and featviz's."""
        pictures = (self.out / "000.jpg").rglob("*.png")
        sizes = [path.stat().st_size for path in pictures if path.name != "input.png"]
        return _size(self.folder / "plain"), sum(sizes) / 1e6

    def _work(self) -> None:
        """What cannot be left out: forward, scale, deflate."""
        with torch.inference_mode():
            self.module(self.tensor)
        self._scale()
        for rows in self.rows:
            isal_zlib.compress(rows, 1)

    def _hooked(self, hook: Callable[..., object]) -> None:
        parts = [
            part
            for part in self.module.modules()
            if isinstance(part, (nn.Conv2d, nn.ReLU))
        ]

        def guarded(part: nn.Module, args: object, output: Tensor) -> None:
            if output.dim() == 4:
                hook(part, args, output)

        handles = [part.register_forward_hook(guarded) for part in parts]
        self.module(self.tensor)
        for handle in handles:
            handle.remove()

    def _scale(self) -> None:
        limits = values.ValueLimits.fixed(0, 1)
        for maps in self.outputs:
            values.to_levels(maps, limits, 256, None)

    def _command(self, count: int) -> float:
        """Seconds of `featviz run` over so many images, into a folder of its own; the
        one before is removed first, or the disk would write gigabytes of pictures
        meanwhile."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.runs += 1
        words = [
            str(self.weights),
            str(self.folder / str(count)),
            "--layers",
            "Conv2d,ReLU",
        ]
        words += ["--out", str(self.out), "-q"]
        command = [sys.executable, "-m", "featviz", "run", *words]
        return _timed(lambda: subprocess.run(command, cwd=self.folder, check=True))


def _png_rows(folder: Path) -> list[bytes]:
    """What is deflated in the pictures below a folder: the rows behind their filters."""
    return [
        zlib.decompress(b"".join(_data_chunks(path.read_bytes())))
        for path in folder.rglob("*.png")
        if path.name != "input.png"
    ]


def _data_chunks(data: bytes) -> list[bytes]:
    found, at = [], 8
    while at < len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IDAT":
            found.append(data[at + 8 : at + 8 + length])
        at += 12 + length
    return found


def _size(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*.png")) / 1e6


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def measure(name: str, rounds: int, images: int, folder: Path) -> str:
    """One line of the table."""
    folder.mkdir()
    with torch.inference_mode():
        bench = Bench(name, images, folder)
        sides: dict[str, list[float]] = {
            side: [] for side in ("plain", "bare", "floor", "busy", "featviz")
        }
        for _ in range(rounds):
            for side, seconds in sides.items():
                seconds.append(getattr(bench, side)())
        plain_mb, ours_mb = bench.megabytes()
    plain, bare, floor, busy, ours = (
        statistics.median(seconds) * 1e3 for seconds in sides.values()
    )
    return (
        f"{name:9s}{plain:8.0f}{bare:7.0f}{floor:7.0f}{busy:7.0f}{ours:9.0f}{plain / ours:15.1f}"
        f"{ours / floor:15.2f}{ours / busy:14.2f}{plain_mb:10.1f}{ours_mb:12.1f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="resnet18,resnet50,vgg16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=10)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {cores()} cores; milliseconds an image, medians")
    print(
        "model       plain   bare  floor   busy  featviz  plain/featviz  featviz/floor"
        "  featviz/busy  MB plain  MB featviz"
    )
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        for name in args.models.split(","):
            print(
                measure(name, args.rounds, args.images, Path(folder) / name), flush=True
            )


if __name__ == "__main__":
    main()
