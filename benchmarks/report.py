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
from pathlib import Path

import numpy as np
from PIL import Image

from featviz.options.commands import ReportOptions
from featviz.report import build_report
from featviz.rundir.folder import Folder
from featviz.rundir.write import RunDirectory

SEEN = (28, 28)
"""Width and height of the picture that stands for what the model saw."""


def make_run(root: Path, images: int, layers: int, channels: int) -> None:
    """Write a run directory; all its grids are one picture of `channels` maps of 14 ×
    14."""
    rng = np.random.default_rng(0)
    columns = max(1, int(channels**0.5))
    rows = -(-channels // columns)
    pixels = rng.integers(0, 256, (rows * 30 + 2, columns * 30 + 2), dtype=np.uint8)
    picture = root.with_suffix(".png")
    Image.fromarray(pixels).save(picture)
    grid, seen = (
        picture.read_bytes(),
        Path(__file__).parent / "../sample_images/digits/00-5.png",
    )
    store = RunDirectory(Folder.open(root))
    names = [f"image_{n:04d}.jpg" for n in range(images)]
    for name in names:
        folder = store.new_image(name)
        rows_ = [_row(n, channels, columns) for n in range(layers)]
        files = {str(row["file"]): grid for row in rows_} | {
            "input.png": seen.read_bytes()
        }
        for file, content in files.items():
            with folder.writing(file) as opened:
                opened.write(content)
        numbers = _numbers(rng, layers, channels)
        stats = {
            f"{row['layer']}|output|0|": own
            for row, own in zip(rows_, numbers, strict=True)
        }
        manifest = {
            "image": {"path": name, "sha256": ""},
            "input": {"shape": [1, 3, *SEEN[::-1]], "preprocessing": ""},
            "captures": rows_,
            "skipped": [],
            "never_ran": [],
        }
        folder.finish(manifest, stats)
    store.write_run({"images": {"total": images, "complete": names}, "failures": []})


def _numbers(rng: np.random.Generator, layers: int, channels: int) -> np.ndarray:
    """Statistics float32 [layers, channels, 6]: convolutions without zeros, and ReLUs,
    whose smallest value is 0, in turn."""
    numbers = rng.normal(size=(layers, channels, 6)).astype(np.float32)
    numbers[0::2, :, 4] = 0
    numbers[1::2, :, 0] = 0
    numbers[1::2, :, 4] = rng.integers(0, 197, (len(numbers[1::2]), channels)) / 196
    numbers[:, :, 5] = 0
    return numbers


def _measure(root: Path) -> tuple[float, float, float, dict[str, int]]:
    """Seconds on the clock and of one core, MB at the most, and the bytes of each file."""
    start, cpu = time.perf_counter(), time.process_time()
    result = build_report(root, ReportOptions())
    seconds = time.perf_counter() - start, time.process_time() - cpu
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return *seconds, most, {path.name: path.stat().st_size for path in result.files}


def _row(index: int, channels: int, columns: int) -> dict[str, object]:
    name = f"features.{index}.conv"
    return {
        "layer": name,
        "type": "Conv2d",
        "index": index,
        "kind": "output",
        "call": 0,
        "key": "",
        "shape": [1, channels, 14, 14],
        "layout": "nchw",
        "maps": channels,
        "file": f"{index:03d}_{name}/output.png",
        "grid": {"nrow": columns, "padding": 2, "tile": [28, 28], "scale": 2},
        "normalize": "map",
        "range": None,
        "min": 0.0,
        "max": 1.0,
        "mean": 0.5,
        "std": 0.3,
        "zero_fraction": 0.1,
        "nonfinite": 0,
    }


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
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(1, maxtasksperchild=1) as pool:
            rounds = [pool.apply(_measure, (root,)) for _ in range(args.rounds)]
        *figures, sizes = zip(*rounds, strict=True)
        wall, cpu, memory = map(statistics.median, figures)
        print(f"{wall:.2f} s, {cpu:.2f} s of one core, {memory:.0f} MB at the most")
        numbers = args.images * args.layers * args.channels * 6 * 4
        print(f"statistics: {numbers / 1e6:.1f} MB")
        for suffix in (".html", ".js"):
            own = [size for name, size in sizes[0].items() if name.endswith(suffix)]
            print(
                f"{len(own)} {suffix}: {sum(own) / 1e6:.1f} MB,"
                f" {sum(own) / numbers:.2f} of the statistics, largest"
                f" {max(own) / 1e6:.2f} MB"
            )


if __name__ == "__main__":
    main()
