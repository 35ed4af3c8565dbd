"""What TensorBoard shows of a run: grids, scalars and histograms, one tag for each layer."""

from __future__ import annotations

import importlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from featviz.drawing.values import MAX, ZEROS, widest_type
from featviz.errors import UsageError
from featviz.options import DrawOptions
from featviz.records import BACKWARD, CaptureSite, Floats
from featviz.rundir.folder import Folder, reported
from featviz.rundir.ownership import EVENTS
from featviz.text import printable

BINS = 64
"""Bins of a histogram, of equal width between the smallest and the largest value."""
MOST_MAPS = 64
"""Maps in a grid at most: TensorBoard's writer computes checksums in Python, which takes
22 ms for 100 kB of PNG."""


@dataclass(frozen=True)
class Board:
    """A file of TensorBoard events. In a plain run, each image is a step of the tags. At a
    training step, each image has its own tags, and scalars: so a line in TensorBoard
    follows one image through the training."""

    file: BinaryIO
    step: int | None = None
    """The number of the training step; None for a plain run."""

    def values(
        self,
        site: CaptureSite,
        picture: Callable[[], bytes],
        stats: Floats,
        shown: int,
        histogram: Mapping[str, Any] | None,
        image: str = "",
    ) -> Iterator[dict[str, Any]]:
        """Yield what is shown of a captured tensor: a PNG, a histogram and, at a training
        step, the share of zeros and the number of channels that are nowhere above zero.
        Each is a dict of the fields of TensorBoard's message `Summary.Value`. Tags are
        `output/layer1.0.conv1` and `histogram/layer1.0.conv1`; the tags of tensors that
        are not outputs name the kind: `histogram-input/...`.

        Args:
            site: where the tensor was captured.
            picture: returns the PNG.
            stats: [channels, 6], statistics of all channels.
            shown: how many channels the picture has.
            histogram: the fields of TensorBoard's message HistogramProto; None leaves
                the histogram out.
            image: name of the image, for the tags of a training step.
        """

        def tag(group: str) -> str:
            """The tag of a number or picture of this tensor. TensorBoard groups tags by
            the part before the first slash."""
            if site.kind not in ("output", "grad", group):
                group += f"-{site.kind.split('-')[-1]}"
            stem = site.stem.removeprefix(site.kind)
            name = f"{group}/{site.layer.label}{stem}"
            if self.step is not None and image:
                name += f"/{printable(image)}"
            return name

        png = picture()
        # a PNG's size stands in its first chunk, after signature, length and name
        width, height = struct.unpack(">II", png[16:24])
        note = ""
        if shown < len(stats):
            note = f"{shown} of {len(stats)} maps"
        yield {
            "tag": tag(site.kind),
            "image": {
                "height": height,
                "width": width,
                "colorspace": 3,  # RGB
                "encoded_image_string": png,
            },
            "metadata": {"summary_description": note},
        }
        if histogram is not None:
            # gradients are far smaller than activations: they get a group of their own
            group = "histogram"
            if site.kind in BACKWARD:
                group = "histogram-grad"
            yield {"tag": tag(group), "histo": histogram}
        if self.step is not None:
            # channels that die in a training show in these two lines first
            zeros = float(stats[:, ZEROS].astype(np.float64).mean())
            inactive = float((stats[:, MAX] <= 0).sum())
            yield {"tag": tag("zero_fraction"), "simple_value": zeros}
            yield {"tag": tag("inactive_channels"), "simple_value": inactive}

    def post(
        self, values: Iterable[Mapping[str, Any]], position: int = 0, **fields: Any
    ) -> None:
        """Write values as one event. (torch's SummaryWriter writes in a thread, whose
        errors come as tracebacks.)

        Args:
            values: what `Board.values` yields; may be empty.
            position: number of the image in its run; this is the event's step if the
                board has no training step.
            fields: more fields of TensorBoard's message `Event`.

        Raises:
            StoreError: the file cannot be written.
        """
        # protobuf takes a while to import, and most runs do not need it
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        messages = [Summary.Value(**value) for value in values]
        if messages:
            fields["step"] = position if self.step is None else self.step
            fields["summary"] = Summary(value=messages)
        event = Event(wall_time=time.time(), **fields)
        with reported(self.file.name, "name another folder"):
            RecordWriter(self.file).write(event.SerializeToString())
            self.file.flush()


def run_folder(logdir: Path, run: Path) -> Path:
    """The folder in `logdir` for the events of a run directory. It has the name of that
    directory, since TensorBoard shows each folder of LOGDIR as a run of this name."""
    return logdir / (run.resolve().name or "run")


def histogram(tensor: Tensor) -> dict[str, Any] | None:
    """Count the finite values of a dense float tensor, of any shape, in BINS bins.

    Returns:
        The fields of TensorBoard's message HistogramProto; None if no value is finite.
    """
    values = tensor.detach().flatten().to(widest_type(tensor))
    # the sum takes a tenth of the time of testing each value
    if not torch.isfinite(values.sum()):
        values = values[torch.isfinite(values)]
    if not len(values):
        return None
    ends = torch.aminmax(values)
    low = float(ends.min)
    high = float(ends.max)
    # if all values are equal, the bins get some width around them; 1e-6 of a value is
    # not lost in float64
    margin = 0.0
    if low == high:
        margin = max(0.5, abs(low) * 1e-6)
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
    """A picture of only the first MOST_MAPS tiles, laid out as by torchvision's
    `make_grid(tiles, nrow=int(sqrt(C)))`, unless the options set `nrow` and `scale`. A
    strip of numbers stays as it is."""
    # in rows and columns, the numbers of a strip would look like maps
    if picture.strip:
        return picture
    slices = picture.slices[0]
    channels = picture.plan.tile_count // slices
    shown = min(channels, max(1, MOST_MAPS // slices))
    options = structs.replace(
        options,
        nrow=options.nrow or isqrt(shown) * slices,
        scale=options.scale or 1,
        format="png",
    )
    plan = grid.plan((shown, slices, *picture.plan.map_size), options)
    if shown == channels:
        return replace(picture, plan=plan)
    tiles = picture.tiles[: shown * slices]
    return replace(
        picture, plan=plan, tiles=tiles, channels=list(picture.drawn[:shown])
    )


def check_installed() -> None:
    """Raise UsageError, before the run, if the package tensorboard is missing."""
    try:
        importlib.import_module("tensorboard.summary.writer.record_writer")
    except ImportError as error:
        message = f"--tensorboard needs the package tensorboard: {error}"
        raise UsageError(message, "pip install 'featviz[tensorboard]'") from error


@contextmanager
def open_board(
    folder: Path | None, below: Path | None = None
) -> Iterator[Board | None]:
    """Open a board in a folder, and close it at the end. None if `folder` is None.

    Args:
        folder: folder for the events; it is made if it is missing.
        below: a run directory. If the folder lies in it, the path from there to the
            folder may not contain links. None allows all links.

    Raises:
        UsageError: the package tensorboard is missing.
        StoreError: the folder cannot be written, or a link leads to it.
    """
    if folder is None:
        yield None
        return
    check_installed()
    # a name as SummaryWriter's; TensorBoard reads files with `tfevents` in their names
    name = f"{EVENTS}{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
    base = folder
    if below is not None and not os.path.relpath(folder, below).startswith(os.pardir):
        base = below
    relative = os.path.relpath(folder, base).replace(os.sep, "/")
    with (
        reported(folder, "name another folder"),
        Folder.open(base) as above,
        above.folder(relative, make=True) as opened_folder,
        opened_folder.create(name) as file,
    ):
        board = Board(file)
        # TensorBoard reads a file without a version as an old one
        board.post((), file_version="brain.Event:2")
        yield board
