"""Which filter and deflate level? Bytes and milliseconds of each, on real feature maps.

    python benchmarks/encode.py [--models resnet18,resnet50,vgg16]

The grids are those of `benchmarks/run.py`; PNG's filters none, sub, up, average and
paeth, the deflate of featviz, ISA-L's levels 0, 1 and 3, and zlib's level 6 for
comparison. One thread; the filters are timed apart, in numpy, since that is what
featviz would run."""

from __future__ import annotations

import argparse
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isal import isal_zlib
from run import INPUTS, PHOTO
from torchvision import models

from featviz.drawing import deflate, grid
from featviz.drawing.drawer import draw
from featviz.drawing.picture import to_image
from featviz.hooks import selectors
from featviz.hooks.capture import hooked
from featviz.hooks.layers import list_layers
from featviz.images.decode import decode
from featviz.models.load import adopt
from featviz.options import DrawOptions
from featviz.records import Bytes, CaptureSite, Sample

FILTERS = ("none", "sub", "up", "average", "paeth")


def filtered(grid: Bytes, kind: str) -> Bytes:
    """A grid's rows behind their filter byte (PNG specification, section 9)."""
    left, up, corner = (np.zeros_like(grid) for _ in range(3))
    left[:, 1:], up[1:], corner[1:, 1:] = grid[:, :-1], grid[:-1], grid[:-1, :-1]
    guess: dict[str, Callable[[], np.ndarray]] = {
        "none": lambda: np.zeros_like(grid),
        "sub": lambda: left,
        "up": lambda: up,
        "average": lambda: ((left.astype(np.uint16) + up) >> 1).astype(np.uint8),
        "paeth": lambda: paeth(left, up, corner),
    }
    rows = np.empty((grid.shape[0], grid.shape[1] + 1), np.uint8)
    rows[:, 0] = FILTERS.index(kind)
    np.subtract(grid, guess[kind](), out=rows[:, 1:])
    return rows


def paeth(left: Bytes, up: Bytes, corner: Bytes) -> Bytes:
    """The neighbour nearest to left + up - corner."""
    a, b, c = (values.astype(np.int16) for values in (left, up, corner))
    near = [abs(b - c), abs(a - c), abs(a + b - 2 * c)]
    picked: Bytes = np.where(
        (near[0] <= near[1]) & (near[0] <= near[2]),
        left,
        np.where(near[1] <= near[2], up, corner),
    )
    return picked


def grids(name: str, file: Path) -> list[Bytes]:
    """Every grid of a model with random weights, at scale 1."""
    torch.manual_seed(0)
    module = models.get_model(name, weights=None).eval()
    tensor = adopt(module, INPUTS).preprocess.tensor(
        decode(Sample(file.name, (file,)))[0][0]
    )
    found: list[Bytes] = []

    def sink(site: CaptureSite, maps: torch.Tensor) -> None:
        if maps.dim() == 4:
            found.append(
                np.asarray(to_image(draw(DrawOptions(scale=1), site, maps)[""]))
            )

    layers = selectors.select(list_layers(module), selectors.parse("Conv2d,ReLU"))
    with torch.inference_mode(), hooked(module, layers, sink):
        module(tensor)
    return found


def deflated(rows: Bytes) -> bytes:
    """As `png` does, in its pieces."""
    size = max(1, grid.PIECE_BYTES // rows.shape[1])
    pieces = (
        rows[start : start + size].flatten() for start in range(0, len(rows), size)
    )
    return b"".join(chain.from_iterable(deflate.compress(pieces, rows.size)))


def report(
    label: str, pictures: Sequence[Bytes], deflate: Callable[[Any], bytes]
) -> None:
    """Print the time to deflate all pictures, and the bytes."""
    start = time.perf_counter()
    size = sum(len(deflate(rows)) for rows in pictures)
    print(
        f"  {label:22s}{(time.perf_counter() - start) * 1e3:7.0f}"
        f" ms{size / 1e6:8.2f} MB"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="resnet18,resnet50,vgg16")
    logging.getLogger("featviz").setLevel(logging.ERROR)
    for name in parser.parse_args().models.split(","):
        pictures = [
            g for file in sorted(PHOTO.parent.iterdir())[:2] for g in grids(name, file)
        ]
        print(
            f"{name}: {sum(p.size for p in pictures) / 1e6:.1f} MB of pixels in two"
            " images"
        )
        for kind in FILTERS:
            start = time.perf_counter()
            rows = [filtered(picture, kind) for picture in pictures]
            print(f" {kind}: filtered in {(time.perf_counter() - start) * 1e3:.0f} ms")
            report("featviz", rows, deflated)
            for level in (0, 1, 3):
                report(f"ISA-L {level}", rows, partial(isal_zlib.compress, level=level))
            if kind == "sub":
                report("zlib 6", rows, partial(zlib.compress, level=6))


if __name__ == "__main__":
    main()
