"""What TensorBoard shows of a run: grids, scalars and histograms, one tag a layer."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featviz.drawing import event_file, grid, scan
from featviz.drawing.event_file import EventFile
from featviz.drawing.picture import GridPicture
from featviz.errors import StoreError, UsageError
from featviz.records import STAT_COLUMNS, DrawOptions, Floats, Site, is_gradient
from featviz.rundir import atomic

BINS = 64
"""Bins of a histogram, of equal width between the smallest and the largest value."""

EVENTS = f"{event_file.PREFIX}*"
"""Names of the files of a board."""

_MAX, _MEAN, _STD, _ZEROS, _NONFINITE = (
    STAT_COLUMNS.index(name) for name in ("max", "mean", "std", "zero_fraction", "nonfinite")
)


@dataclass(frozen=True)
class Histogram:
    """Counts of the finite values of a tensor, with what TensorBoard wants to know beside them."""

    low: float
    high: float
    total: float
    squares: float
    edges: list[float]
    """Upper ends of the bins."""
    counts: list[float]


@dataclass(frozen=True)
class Post:
    """One captured tensor as a board shows it."""

    site: Site
    picture: Future[bytes]
    """A PNG."""
    size: tuple[int, int]
    """Its height and width in pixels."""
    stats: Floats
    """[channels, 6]"""
    values: int
    """Numbers in each channel."""
    histogram: Histogram | None

    def tag(self, what: str) -> str:
        """`what/layer1.0.conv1`; what is not of an output says so: `what-input/...`."""
        site = self.site
        kind = "" if site.kind in ("output", "grad", what) else f"-{site.kind.split('-')[-1]}"
        return f"{what}{kind}/{site.layer.label}{site.stem.removeprefix(site.kind)}"


class Board:
    """A folder of TensorBoard events. Posts are to come in the order of their steps."""

    def __init__(
        self, events: EventFile, earlier: Collection[tuple[int, str]] | None = None
    ) -> None:
        """Begin with nothing.

        Args:
            earlier: step and tag of each picture of the run that this one goes on with; None where
                it has posted nothing here.
        """
        self._events, self._earlier = events, frozenset(earlier or ())
        self._lacking = earlier is not None
        self._steps = {step for step, tag in self._earlier if not tag.startswith("kernel/")}
        self._peaks: dict[str, Floats] = {}

    def lacks(self, step: int) -> bool:
        """Whether the run that this one goes on with was killed before it posted an image."""
        return self._lacking and step not in self._steps

    def post(self, posts: Sequence[Post], step: int) -> None:
        """Write the pictures, histograms and scalars of an image as one event: all of them are in
        the file, or none. Those that are there already are left out.

        Scalars of an output or an input are its share of zeros, and the channels that were above
        zero in none of the images up to here; of a gradient its Euclidean norm.

        Raises:
            StoreError: the file cannot be written.
        """
        new = [post for post in posts if (step, post.tag(post.site.kind)) not in self._earlier]
        if values := [value for post in new for value in self._values(post)]:
            self._events.add(values, step)

    def _values(self, post: Post) -> Iterator[Any]:
        """Of TensorBoard's message `Summary.Value`."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        yield Summary.Value(tag=post.tag(post.site.kind), image=_image(post))
        if post.histogram is not None:
            tag = post.tag(_group(post.site.kind))
            yield Summary.Value(tag=tag, histo=_proto(post.histogram))
        for what, value in self._scalars(post):
            yield Summary.Value(tag=post.tag(what), simple_value=value)

    def remember(self, key: str, stats: Floats) -> None:
        """Take in the statistics [channels, 6] of an image that an earlier run has posted."""
        peak = np.nan_to_num(stats[:, _MAX], nan=-np.inf)
        before = self._peaks.get(key, peak)
        self._peaks[key] = np.maximum(before, peak) if before.shape == peak.shape else peak

    def _scalars(self, post: Post) -> Iterator[tuple[str, float]]:
        stats, kind = post.stats.astype(np.float64), post.site.kind
        if is_gradient(kind):
            count = post.values - stats[:, _NONFINITE]
            power = count * (stats[:, _STD] ** 2 + stats[:, _MEAN] ** 2)
            yield "grad_norm", float(np.sqrt(power[count > 0].sum()))
        elif kind != "kernel":
            self.remember(post.site.stats_key, post.stats)
            yield "zero_fraction", float(stats[:, _ZEROS].mean())
            yield "dead_channels", float((self._peaks[post.site.stats_key] <= 0).sum())


def _image(post: Post) -> Any:
    """Our own PNG as it is."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    height, width = post.size
    return Summary.Image(
        height=height, width=width, colorspace=3, encoded_image_string=post.picture.result()
    )


def _proto(counted: Histogram) -> Any:
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto

    return HistogramProto(
        min=counted.low,
        max=counted.high,
        num=sum(counted.counts),
        sum=counted.total,
        sum_squares=counted.squares,
        bucket_limit=counted.edges,
        bucket=counted.counts,
    )


def _group(kind: str) -> str:
    return "histogram-grad" if is_gradient(kind) else "histogram"


def histogram(tensor: Tensor) -> Histogram | None:
    """Count the finite values of a dense float tensor in bins; None where it has none."""
    values = tensor.detach().flatten().float()
    if not torch.isfinite(
        values.sum(dtype=_wide(values))
    ):  # a tenth of the time of looking at each
        values = values[torch.isfinite(values)]
    if not len(values):
        return None
    low, high = (float(v) for v in torch.aminmax(values))
    margin = 0.0 if high > low else max(0.5, abs(low) * 1e-6)
    start, end = low - margin, high + margin
    counts, total, squares = _counted(values, start, end)
    edges = np.linspace(start, end, BINS + 1)[1:]
    return Histogram(low, high, total, squares, edges.tolist(), counts)


def _counted(values: Tensor, start: float, end: float) -> tuple[list[float], float, float]:
    """Counts of finite values in bins, their sum, and the sum of their squares."""
    loops = scan.compiled()
    if loops is not None and values.device.type == "cpu":
        counts = np.zeros((4, BINS), np.int64)
        total, squares = loops.count(values.numpy(), start, BINS / (end - start), counts)
        return counts.sum(0).tolist(), total, squares
    wide = _wide(values)
    length = float(torch.linalg.vector_norm(values, dtype=wide))
    bins = torch.histc(values, BINS, start, end).tolist()
    return bins, float(values.sum(dtype=wide)), length**2


def _wide(values: Tensor) -> torch.dtype:
    """The widest floats of a tensor's device."""
    return torch.float32 if values.device.type == "mps" else torch.float64


def as_make_grid(picture: GridPicture, options: DrawOptions) -> GridPicture:
    """The same tiles in the geometry of `make_grid(nrow=int(sqrt(C)))`, but for `nrow` and `scale`
    where the options name them. A vector stays one strip.
    """
    if picture.strip:
        return picture
    plan, side = picture.plan, picture.slices[0]
    channels = plan.maps // side
    nrow, factor = options.nrow or isqrt(channels) * side, options.scale or 1
    options = replace(options, nrow=nrow, scale=factor)
    return replace(picture, plan=grid.plan((channels, side, *plan.map_size), options))


def require() -> None:
    """Say early that TensorBoard's messages cannot be written.

    Raises:
        UsageError: the package tensorboard is not installed.
    """
    try:
        importlib.import_module("tensorboard.compat.proto.event_pb2")
    except ImportError as error:
        raise UsageError(
            f"--tensorboard needs the package tensorboard: {error}",
            "pip install 'featviz[tensorboard]'",
        ) from error


@contextmanager
def opened(
    folder: Path | None, below: Path | None = None, resume: bool = False
) -> Iterator[Board | None]:
    """A board in a folder, flushed and closed at the end; None without one.

    Args:
        resume: go on with what an earlier run has posted there, if it has begun a file.
        below: the run directory; where the folder lies in it, it may not do so by a link.

    Raises:
        UsageError: the package tensorboard is not installed.
        StoreError: the folder cannot be written.
    """
    if folder is None:
        yield None
        return
    if below is not None:
        way = os.path.relpath(folder.absolute(), below.absolute()).replace(os.sep, "/")
        atomic.refuse_links(below, [] if way.startswith(os.pardir) else [way])
    require()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begun = resume and any(folder.glob(EVENTS))
        earlier = set(event_file.read_pictures(folder)) if begun else None
        events = EventFile(folder)
    except OSError as error:
        raise StoreError(
            f"--tensorboard {folder} cannot be written: {error.strerror or error}",
            "name another folder",
        ) from error
    try:
        yield Board(events, earlier)
    finally:
        with atomic.reported(folder, "name another folder"):
            events.close()
