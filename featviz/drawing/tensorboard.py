"""What TensorBoard shows of a run: grids, scalars and histograms, one tag a layer."""

from __future__ import annotations

import importlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from featviz.drawing import grid
from featviz.drawing.picture import GridPicture
from featviz.drawing.values import MAX, ZEROS
from featviz.errors import UsageError
from featviz.options import DrawOptions
from featviz.records import Floats, Site, is_gradient
from featviz.rundir import atomic
from featviz.text import printable

BINS = 64
"""Bins of a histogram, of equal width between the smallest and the largest value."""

MOST_MAPS = 64
"""Maps in a grid: the writer's checksums are Python, 22 ms for 100 kB of PNG."""

EVENTS = "events.out.tfevents.*"
"""Names of the files of a board."""


@dataclass(frozen=True)
class Post:
    """One captured tensor as a board shows it."""

    site: Site
    picture: Callable[[], bytes]
    """Gives the PNG."""
    stats: Floats
    """[channels, 6]"""
    histogram: Mapping[str, Any] | None
    note: str = ""
    """How many maps are shown, where they are not all."""
    image: str = ""
    """The name of the image; empty for kernels."""

    def tag(self, what: str, named: bool) -> str:
        """`what/layer1.0.conv1`; what is not of an output says so: `what-input/...`."""
        site = self.site
        kind = "" if site.kind in ("output", "grad", what) else f"-{site.kind.split('-')[-1]}"
        image = f"/{printable(self.image)}" if named and self.image else ""
        return f"{what}{kind}/{site.layer.label}{site.stem.removeprefix(site.kind)}{image}"

    def values(self, training: bool) -> Iterator[dict[str, Any]]:
        """The fields of TensorBoard's messages `Summary.Value`: a picture, a histogram and, in a
        training, the share of zeros and the number of channels that are nowhere above zero."""
        kind, data = self.site.kind, self.picture()
        width, height = struct.unpack(">II", data[16:24])  # of a PNG
        image = {"height": height, "width": width, "colorspace": 3, "encoded_image_string": data}
        note = {"summary_description": self.note}
        yield {"tag": self.tag(kind, training), "image": image, "metadata": note}
        if self.histogram is not None:
            group = "histogram-grad" if is_gradient(kind) else "histogram"
            yield {"tag": self.tag(group, training), "histo": self.histogram}
        if training:
            zeros = float(self.stats[:, ZEROS].astype(np.float64).mean())
            inactive = float((self.stats[:, MAX] <= 0).sum())
            yield {"tag": self.tag("zero_fraction", True), "simple_value": zeros}
            yield {"tag": self.tag("inactive_channels", True), "simple_value": inactive}


@dataclass(frozen=True)
class Board:
    """A file of TensorBoard events.

    The images of a run are the steps of a tag. At a training step, each image has tags of its own,
    and scalars: a line through them is that of one image over the training. StoreError is raised
    where the file cannot be written.
    """

    file: BinaryIO
    step: int | None = None
    """The training step that is shown; None for a run of its own."""

    def post(self, posts: Sequence[Post], position: int) -> None:
        """Write what was captured of an image as one event: all of it, or nothing."""
        values = [value for post in posts for value in post.values(self.step is not None)]
        self._write(values, position)

    def add_scalars(self, values: Mapping[str, float]) -> None:
        """Write numbers of a training step by their tags, as one event."""
        self._write([{"tag": tag, "simple_value": value} for tag, value in values.items()])

    def _write(self, values: Sequence[Mapping[str, Any]], position: int = 0, **more: Any) -> None:
        """Add an event. (SummaryWriter does so in a thread, whose errors come as tracebacks.)"""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        if values:
            step = position if self.step is None else self.step
            summary = Summary(value=[Summary.Value(**value) for value in values])
            more |= {"step": step, "summary": summary}
        event = Event(wall_time=time.time(), **more)
        with atomic.reported(self.file.name, "name another folder"):
            RecordWriter(self.file).write(event.SerializeToString())
            self.file.flush()


def run_folder(logdir: Path, run: Path) -> Path:
    """The folder of a run's events, called like the run's own: each folder of LOGDIR is a run."""
    return logdir / (run.resolve().name or "run")


def histogram(tensor: Tensor) -> dict[str, Any] | None:
    """Count the finite values of a dense float tensor in bins, as the fields of TensorBoard's
    message HistogramProto; None where it has none."""
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    values = tensor.detach().flatten().to(wide)
    if not torch.isfinite(values.sum()):  # a tenth of the time of looking at each
        values = values[torch.isfinite(values)]
    if not len(values):
        return None
    low, high = (float(v) for v in torch.aminmax(values))
    margin = 0.0 if high > low else max(0.5, abs(low) * 1e-6)
    return {
        "min": low,
        "max": high,
        "num": len(values),
        "sum": float(values.sum()),
        "sum_squares": float(torch.linalg.vector_norm(values)) ** 2,
        "bucket_limit": np.linspace(low - margin, high + margin, BINS + 1)[1:].tolist(),
        "bucket": torch.histc(values, BINS, low - margin, high + margin).tolist(),
    }


def as_make_grid(picture: GridPicture, options: DrawOptions) -> GridPicture:
    """The first tiles in the geometry of `make_grid(nrow=int(sqrt(C)))`, but for `nrow` and `scale`
    where the options name them. A vector stays one strip.
    """
    if picture.strip:
        return picture
    side = picture.slices[0]
    drawn = picture.plan.maps // side
    shown = min(drawn, max(1, MOST_MAPS // side))
    nrow, factor = options.nrow or isqrt(shown) * side, options.scale or 1
    options = structs.replace(options, nrow=nrow, scale=factor, format="png")
    plan = grid.plan((shown, side, *picture.plan.map_size), options)
    channels = picture.channels if shown == drawn else list(picture.drawn[:shown])
    tiles = picture.tiles if shown == drawn else picture.tiles[: shown * side]
    return replace(picture, plan=plan, tiles=tiles, channels=channels)


def note(picture: GridPicture) -> str:
    """How many maps are shown, where they are not all."""
    shown, total = len(picture.drawn), len(picture.stats)
    return "" if shown == total else f"{shown} of {total} maps"


def require() -> None:
    """Say early that events cannot be written."""
    try:
        importlib.import_module("tensorboard.summary.writer.record_writer")
    except ImportError as error:
        raise UsageError(
            f"--tensorboard needs the package tensorboard: {error}",
            "pip install 'featviz[tensorboard]'",
        ) from error


@contextmanager
def opened(folder: Path | None, below: Path | None = None) -> Iterator[Board | None]:
    """A board in a folder, flushed and closed at the end; None without one.

    Args:
        below: the run directory; where the folder lies in it, it may not do so by a link.
    """
    if folder is None:
        yield None
        return
    require()
    name = f"{EVENTS[:-1]}{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
    if below is not None and os.path.relpath(folder, below).startswith(os.pardir):
        below = None
    with (
        atomic.reported(folder, "name another folder"),
        atomic.opened(folder, below),
        (folder / name).open("xb") as file,
    ):
        board = Board(file)
        board._write((), file_version="brain.Event:2")
        yield board
