"""How long does `featviz report` take for a large run, how much memory, and how much
room?

    python benchmarks/report.py [--images 200] [--layers 100] [--channels 64] [--rounds
    3]

Writes a run directory of small grids (no model is involved), builds its report a few
times, each in a process of its own, and prints the median seconds, on the clock and of
one core, the most memory that a process took, and the number and bytes of the pages and
scripts, beside the statistics."""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from featviz.options.commands import ReportOptions
from featviz.report import build_report
from featviz.rundir.folder import Folder
from featviz.rundir.write import RunDirectory

INPUT = Path(__file__).parent / "../sample_images/digits/00-5.png"
INPUT_SIZE = (28, 28)
"""Height and width."""
MAP_SIZE = (14, 14)
SCALE = 2
PADDING = 2


class Measurement(NamedTuple):
    """What one report took."""

    seconds: float
    core_seconds: float
    memory: float
    """Of the process at its largest, in MB."""
    sizes: Mapping[str, int]
    """Bytes of each file of the report."""


def make_run(root: Path, images: int, layers: int, channels: int) -> None:
    """Write a run directory; all its grids are one picture of `channels` maps."""
    rng = np.random.default_rng(0)
    nrow = max(1, int(channels**0.5))
    rows = -(-channels // nrow)
    slot = MAP_SIZE[0] * SCALE + PADDING
    size = (rows * slot + PADDING, nrow * slot + PADDING)
    picture = root.with_suffix(".png")
    Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(picture)
    captures = [_capture(index, channels, nrow) for index in range(layers)]
    contents = {"input.png": INPUT.read_bytes()}
    for capture in captures:
        contents[str(capture["file"])] = picture.read_bytes()
    store = RunDirectory(Folder.open(root))
    names = [f"image_{number:04d}.jpg" for number in range(images)]
    for name in names:
        folder = store.new_image(name)
        for file, content in contents.items():
            with folder.writing(file) as opened:
                opened.write(content)
        manifest = {
            "image": {"path": name, "sha256": ""},
            "input": {"shape": [1, 3, *INPUT_SIZE], "preprocessing": ""},
            "captures": captures,
            "skipped": [],
            "never_ran": [],
        }
        stats = {}
        for index, capture in enumerate(captures):
            stats[f"{capture['layer']}|output|0|"] = _stats(rng, index, channels)
        folder.finish(manifest, stats)
    store.write_run({"images": {"total": images, "complete": names}, "failures": []})


def _capture(index: int, channels: int, nrow: int) -> dict[str, object]:
    """The row of a layer in the manifest."""
    name = f"features.{index}.conv"
    height, width = MAP_SIZE
    tile = [height * SCALE, width * SCALE]
    return {
        "layer": name,
        "type": "Conv2d",
        "index": index,
        "kind": "output",
        "call": 0,
        "key": "",
        "shape": [1, channels, height, width],
        "layout": "nchw",
        "maps": channels,
        "file": f"{index:03d}_{name}/output.png",
        "grid": {"nrow": nrow, "padding": PADDING, "tile": tile, "scale": SCALE},
        "normalize": "map",
        "range": None,
        "min": 0.0,
        "max": 1.0,
        "mean": 0.5,
        "std": 0.3,
        "zero_fraction": 0.1,
        "nonfinite": 0,
    }


def _stats(rng: np.random.Generator, index: int, channels: int) -> np.ndarray:
    """Statistics float32 [channels, 6] of a layer: of a convolution without zeros, and
    of a ReLU, whose smallest value is 0, in turn."""
    stats = rng.normal(size=(channels, 6)).astype(np.float32)
    stats[:, 4:] = 0
    if index % 2:
        values = MAP_SIZE[0] * MAP_SIZE[1]
        stats[:, 0] = 0
        stats[:, 4] = rng.integers(0, values + 1, channels) / values
    return stats


def _measure(root: Path) -> Measurement:
    """Build the report of a run."""
    start = time.perf_counter()
    core_start = time.process_time()
    result = build_report(root, ReportOptions())
    seconds = time.perf_counter() - start
    core_seconds = time.process_time() - core_start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sizes = {path.name: path.stat().st_size for path in result.files}
    return Measurement(seconds, core_seconds, memory, sizes)


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        make_run(root, args.images, args.layers, args.channels)
        # a process holds its largest memory until it ends
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(1, maxtasksperchild=1) as pool:
            rounds = [pool.apply(_measure, (root,)) for _ in range(args.rounds)]
    seconds = statistics.median(measured.seconds for measured in rounds)
    core_seconds = statistics.median(measured.core_seconds for measured in rounds)
    memory = statistics.median(measured.memory for measured in rounds)
    print(f"{seconds:.2f} s, {core_seconds:.2f} s of one core, {memory:.0f} MB at most")
    stats_bytes = args.images * args.layers * args.channels * 6 * 4
    print(f"statistics: {stats_bytes / 1e6:.1f} MB")
    for suffix in (".html", ".js"):
        sizes = []
        for name, size in rounds[0].sizes.items():
            if name.endswith(suffix):
                sizes.append(size)
        print(
            f"{len(sizes)} {suffix}: {sum(sizes) / 1e6:.1f} MB,"
            f" {sum(sizes) / stats_bytes:.2f} of the statistics, largest"
            f" {max(sizes) / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main()
