"""What a Watcher costs: the CPU time of one drawing against that of 100 training steps.

    python benchmarks/watching.py

On a CPU alone; CPU time is compared, not the clock, so that other programs do not
matter much."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torchvision.models import resnet18

import featviz

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE / "configs"))

from train_digits_cnn import build_model  # noqa: E402

IMAGES = [
    str(path) for path in sorted((HERE / "sample_images" / "digits").glob("*.png"))[:4]
]
EVERY = 100


def digits() -> tuple[nn.Module, tuple[int, ...], str, dict[str, Any]]:
    """The demonstration's network as its script trains it."""
    return build_model(32), (64, 1, 28, 28), "Conv2d,ReLU", {}


def resnet() -> tuple[nn.Module, tuple[int, ...], str, dict[str, Any]]:
    """resnet18 on pictures of the size of CIFAR's, with the layers that are taken by
    default."""
    return resnet18(num_classes=10), (64, 3, 32, 32), "", {"size": 32}


def seconds(task: Callable[[], object], repeats: int) -> float:
    """The median CPU time of a call, after one that warms up."""
    task()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        task()
        times.append(time.process_time() - began)
    return median(times)


def measure(
    make: Callable[[], tuple[nn.Module, tuple[int, ...], str, dict[str, Any]]],
) -> None:
    """Print the time of a training step, of a drawing, and their ratio at every=100."""
    model, shape, layers, options = make()
    optimizer = torch.optim.AdamW(model.parameters())
    pixels, labels = torch.rand(shape), torch.randint(0, 10, shape[:1])

    def step() -> None:
        loss = nn.functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        chosen = layers or None
        out = Path(folder) / "series"
        watcher = featviz.Watcher(model, IMAGES, chosen, 1, out, **options)
        training, drawing = seconds(step, 10), seconds(watcher.step, 10)
        count = sum(1 for _ in (out / "step-000001").rglob("*.png")) - len(IMAGES)
    share = drawing / (EVERY * training)
    print(
        f"{make.__name__}: {1000 * training:.0f} ms a training step,"
        f" {1000 * drawing:.0f} ms a drawing of {count} grids of {len(IMAGES)} images,"
        f" {share:.2%} at every={EVERY}"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    for one in (digits, resnet):
        measure(one)
