"""Do encoders scale with `--jobs`, and does the queue of tiles stay bounded? With simulated cores.

    python benchmarks/encoders.py [--jobs 1,2,4,8,16] [--layers 50] [--forward 60] [--deflate 20]

A whole run over copies of one image, by a module whose forward pass sleeps for as long as a pass
would take, and then hands a map of 64 x 112 x 112 to each of its layers. Drawing a picture's strips
and deflating them is replaced by an equal sleep for each picture. Both sleeps are without the GIL
and take no core, so any number of them fit side by side, as on a machine with a core for each.

It shows how far the threads, the queue, the order in which images are finished, and all of the
Python that is left in an encoder (the manifest's row, the caption, opening and closing the file)
let throughput grow: `ideal` is 1 / max(forward, layers x deflate / jobs). `queued` is the most that
tiles under way have held, beside the bound of the queue.

On two cores: 1.8, 2.6, 4.3, 7.7 and 12 images a second with 1, 2, 4, 8 and 16 encoders. The forward
thread deflates, too, where it would wait for them, so one encoder does as much as two. (While it
only waited: 0.92, 1.87, 3.68, 7.37 and 9.0, where the forward thread is the bound: 60 ms asleep,
about 50 ms that draw the 40 million values.) The queue never held more than its 64 MiB.

It does not show how real deflating shares the memory and the caches of 16 cores, nor the speed of
any machine: the statistics, the levels and the Python are real, and share the cores that are there.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from featviz.models.load import adopt
from featviz.options import DrawOptions, InputOptions, RunOptions
from featviz.records import ImageResult
from featviz.run import run as pipeline
from featviz.run.encoders import Background

T = TypeVar("T")

PHOTO = Path(__file__).parent.parent / "sample_images" / "scenes" / "landscape.jpg"
SHAPE = (1, 64, 112, 112)
"""Of each layer's output: that of resnet18's first convolution at 224 x 224."""
WARM = 2
"""Images before the clock starts."""


class Replayed(nn.Module):
    """Sleeps for a forward pass, and gives each of its layers the same map."""

    def __init__(self, layers: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(layers))
        self.seconds = seconds
        self.maps = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of two classes, [1, 2]."""
        time.sleep(self.seconds)
        for layer in self.layers:
            layer(self.maps)
        return x.mean((2, 3))[:, :2]


class Watched(Background):
    """Notes how many bytes were under way at most."""

    most = 0

    def submit(self, size: int, task: Callable[[], T]) -> Future[T]:
        """Run a task, as `Background.submit` does."""
        future = super().submit(size, task)
        Watched.most = max(Watched.most, self._held)
        return future


def measure(jobs: int, given: argparse.Namespace, folder: Path) -> float:
    """Images a second, from the first ones on."""
    model = adopt(Replayed(given.layers, given.forward / 1e3).eval(), InputOptions(size=224))
    ends: list[float] = []

    def asleep(*_: Any, **__: Any) -> None:
        time.sleep(given.deflate / 1e3)

    def progress(image: ImageResult, total: int) -> None:
        ends.append(time.perf_counter())

    Watched.most = 0
    with (
        tempfile.TemporaryDirectory() as out,
        patch("featviz.drawing.picture.write_png", asleep),
        patch("featviz.run.encoders.Background", Watched),
    ):
        draw = DrawOptions(scale=1)
        options = RunOptions("layers.*", Path(out) / "out", draw=draw, jobs=jobs)
        pipeline.run(model, [str(folder)], options, progress)
    return (len(ends) - WARM) / (ends[-1] - ends[WARM - 1])


def copies(folder: Path, count: int) -> None:
    """The same photograph under many names."""
    for number in range(count):
        shutil.copy(PHOTO, folder / f"{number:03d}.jpg")


def table(given: argparse.Namespace, jobs: Sequence[int], folder: Path) -> None:
    """Print a line for each number of encoders."""
    print("jobs  images/s  grown  ideal  queued MiB")
    first = None
    for count in jobs:
        speed = measure(count, given, folder)
        first = first or speed
        longest = max(given.forward, given.layers * given.deflate / count)
        queued = f"{Watched.most / 2**20:.0f} of {pipeline.QUEUE_BYTES / 2**20:.0f}"
        print(f"{count:4d}{speed:10.2f}{speed / first:7.1f}{1e3 / longest:7.2f}{queued:>12s}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", default="1,2,4,8,16")
    parser.add_argument("--images", type=int, default=8, help="that are timed")
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--forward", type=float, default=60, help="ms of a forward pass")
    parser.add_argument("--deflate", type=float, default=20, help="ms of a picture")
    given = parser.parse_args()
    logging.getLogger("featviz").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        copies(Path(folder), given.images + WARM)
        table(given, [int(count) for count in given.jobs.split(",")], Path(folder))


if __name__ == "__main__":
    main()
