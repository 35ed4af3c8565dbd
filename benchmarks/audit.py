"""How fast is `featviz audit`? Against the bare forward pass with the same decoding.

    python benchmarks/audit.py [--models resnet18] [--batch-sizes 1,8] [--images 200] [--rounds 3]

For each model, with random weights, at 224 × 224, in one process and interleaved:

  a  decode, prepare and batch the images, and run the bare model on them, one after the other
  b  the whole audit: tracing the model, counting, judging, the chart and the files; its default
     layers (all activations), without --redundant-at and without pictures of suspects; it reads
     the next images in a thread

torch's idle threads wait as in the command: OMP_WAIT_POLICY is passive, unless it is set.

Medians over the rounds, in images a second, and b/a; the same ratio in core-seconds, which other
processes on the machine disturb less; and by how many MB the process grew from the tenth image of
an audit to the last.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

import torch
from torch import nn
from torchvision import models

from featviz.audit import AuditOptions, audit
from featviz.audit.model_audit import AuditRequest
from featviz.images.find import find_samples
from featviz.models.load import LoadedModel, adopt
from featviz.models.preprocess import InputOptions
from featviz.pipeline.prepare import read_input

SCENES = Path(__file__).parent.parent / "sample_images" / "scenes"
INPUTS = InputOptions(
    size=256, crop=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), channels=3
)


def bare(model: LoadedModel, folder: Path, batch_size: int) -> None:
    """Nothing but reading the images and the forward pass, one after the other."""
    samples = find_samples([str(folder)])
    with torch.inference_mode():
        for start in range(0, len(samples), batch_size):
            some = samples[start : start + batch_size]
            inputs = [read_input(sample, model.preprocess, INPUTS)[1][0] for sample in some]
            model.module(torch.cat(inputs))


def audited(model: LoadedModel, folder: Path, batch_size: int, resident: list[int]) -> None:
    """The audit, noting the resident memory after each image."""
    with tempfile.TemporaryDirectory() as out:
        asked = AuditRequest(inputs=INPUTS, batch_size=batch_size, max_suspects=0)
        audit(
            model,
            [str(folder)],
            AuditOptions(asked, out=Path(out) / "audit"),
            lambda image, error, total: resident.append(_resident()),
        )


def measure(module: nn.Module, folder: Path, images: int, batch_size: int, rounds: int) -> str:
    """One line of the table."""
    model = adopt(module.eval(), INPUTS)
    taken: list[tuple[float, ...]] = []
    resident: list[int] = []
    model.module(torch.zeros(batch_size, 3, 224, 224))
    for _ in range(rounds):
        resident.clear()
        a = _seconds(lambda: bare(model, folder, batch_size))
        b = _seconds(lambda: audited(model, folder, batch_size, resident))
        taken.append((*a, *b))
    wall_a, cores_a, wall_b, cores_b = (statistics.median(v) for v in zip(*taken, strict=True))
    growth = (max(resident[10:]) - resident[9]) / 1e6
    return (
        f"{batch_size:6d}{images / wall_a:8.1f}{images / wall_b:8.1f}{wall_a / wall_b:7.2f}"
        f"{cores_a / cores_b:7.2f}{growth:9.1f}"
    )


def copies(folder: Path, count: int) -> None:
    """The sample scenes over and over, as files of their own."""
    scenes: Sequence[Path] = sorted(SCENES.iterdir())
    for index in range(count):
        scene = scenes[index % len(scenes)]
        (folder / f"{index:04d}{scene.suffix}").write_bytes(scene.read_bytes())


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that the work takes, and core-seconds."""
    start, cores = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cores


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="resnet18")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    logging.getLogger("featviz").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.images} images")
    print("images a second, medians\nmodel        batch       a       b    b/a  cores  growth MB")
    with tempfile.TemporaryDirectory() as name:
        copies(Path(name), args.images)
        for model in args.models.split(","):
            for size in map(int, args.batch_sizes.split(",")):
                torch.manual_seed(0)
                module = models.get_model(model, weights=None)
                line = measure(module, Path(name), args.images, size, args.rounds)
                print(f"{model:12s}{line}", flush=True)


if __name__ == "__main__":
    main()
