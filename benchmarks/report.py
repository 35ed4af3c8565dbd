"""How long does `featviz report` take for a large run?

    python benchmarks/report.py [--images 200] [--layers 100] [--channels 64] [--rounds 3]

Writes a run directory of small random grids (no model is involved), builds its report a few times,
and prints the median seconds, on the clock and of one core, and the number and bytes of the pages
and scripts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from featviz.report import ReportOptions, build_report
from featviz.rundir.write import RunDirectory

SEEN = (28, 28)
"""Width and height of the picture that stands for what the model saw."""


def make_run(root: Path, images: int, layers: int, channels: int) -> None:
    """Write a run directory; all its grids are one picture of `channels` maps of 14 × 14."""
    rng = np.random.default_rng(0)
    columns = max(1, int(channels**0.5))
    rows = -(-channels // columns)
    pixels = rng.integers(0, 256, (rows * 30 + 2, columns * 30 + 2), dtype=np.uint8)
    picture = root.with_suffix(".png")
    Image.fromarray(pixels).save(picture)
    grid, seen = picture.read_bytes(), (Path(__file__).parent / "../sample_images/digits/00-5.png")
    store = RunDirectory.create(root)
    names = [f"image_{n:04d}.jpg" for n in range(images)]
    for name in names:
        folder = store.image(name)
        rows_ = [_row(n, channels, columns) for n in range(layers)]
        for row in rows_:
            file = folder.path / str(row["file"])
            file.parent.mkdir(parents=True)
            file.write_bytes(grid)
        (folder.path / "input.png").write_bytes(seen.read_bytes())
        numbers = rng.random((layers, channels, 6), dtype=np.float32)
        stats = {f"{row['layer']}|output|0|": own for row, own in zip(rows_, numbers, strict=True)}
        manifest = {
            "image": {"path": name, "sha256": ""},
            "input": {"shape": [1, 3, *SEEN[::-1]], "preprocessing": ""},
            "captures": rows_,
            "skipped": [],
            "never_ran": [],
        }
        folder.finish(manifest, stats)
    store.write_run({"images": {"total": images, "complete": names}, "failures": []})


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
        seconds = []
        for _ in range(args.rounds):
            start, cpu = time.perf_counter(), time.process_time()
            result = build_report(root, ReportOptions())
            seconds.append((time.perf_counter() - start, time.process_time() - cpu))
        sizes = {path: path.stat().st_size for path in result.files}
        wall, cpu = map(statistics.median, zip(*seconds, strict=True))
        print(f"{wall:.2f} s, {cpu:.2f} s of one core")
        for suffix in (".html", ".js"):
            own = [size for path, size in sizes.items() if path.suffix == suffix]
            print(f"{len(own)} {suffix}: {sum(own) / 1e6:.1f} MB, largest {max(own) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
