"""What TensorBoard shows of a run: grids, scalars and histograms, one tag a layer."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featviz.drawing import grid
from featviz.drawing.picture import GridPicture
from featviz.errors import StoreError, UsageError
from featviz.records import STAT_COLUMNS, DrawOptions, Floats, Site, is_gradient
from featviz.rundir import atomic

BINS = 64
"""Bins of a histogram, of equal width between the smallest and the largest value."""

EVENTS = "events.out.tfevents.*"
"""Names of the files that TensorBoard's writer makes."""

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

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._peaks: dict[str, Floats] = {}

    def post(self, post: Post, step: int) -> None:
        """Write a tensor's picture, histogram and scalars.

        Scalars of an output or an input are its share of zeros, and the channels that were above
        zero in none of the images up to here; of a gradient its Euclidean norm.
        """
        self._image(post.tag(post.site.kind), post, step)
        if post.histogram is not None:
            self._histogram(post.tag(_group(post.site.kind)), post.histogram, step)
        for what, value in self._scalars(post):
            self._writer.add_scalar(post.tag(what), value, step)

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

    def _image(self, tag: str, post: Post, step: int) -> None:
        """Our own PNG as it is: `add_image` would decode nothing, but encode ten times as long."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        height, width = post.size
        image = Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=post.picture.result()
        )
        self._writer.file_writer.add_summary(
            Summary(value=[Summary.Value(tag=tag, image=image)]), step
        )

    def _histogram(self, tag: str, found: Histogram, step: int) -> None:
        self._writer.add_histogram_raw(
            tag,
            min=found.low,
            max=found.high,
            num=int(sum(found.counts)),
            sum=found.total,
            sum_squares=found.squares,
            bucket_limits=found.edges,
            bucket_counts=found.counts,
            global_step=step,
        )


def _group(kind: str) -> str:
    return "histogram-grad" if is_gradient(kind) else "histogram"


def histogram(tensor: Tensor) -> Histogram | None:
    """Count the finite values of a dense float tensor in bins; None where it has none."""
    values = tensor.detach().flatten().float()
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    if not torch.isfinite(values.sum(dtype=wide)):  # a tenth of the time of looking at each
        values = values[torch.isfinite(values)]
    if not len(values):
        return None
    low, high = (float(v) for v in torch.aminmax(values))
    start, end = (low, high) if high > low else (low - 0.5, high + 0.5)
    counts = torch.histc(values, BINS, start, end)
    edges = np.linspace(start, end, BINS + 1)[1:]
    total = float(values.sum(dtype=wide))
    length = float(torch.linalg.vector_norm(values, dtype=wide))
    return Histogram(low, high, total, length**2, edges.tolist(), counts.tolist())


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


def require() -> Any:
    """torch.utils.tensorboard's SummaryWriter.

    Raises:
        UsageError: the package tensorboard is not installed.
    """
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
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
    kind = require()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writer = kind(str(folder))
    except OSError as error:
        raise StoreError(
            f"--tensorboard {folder} cannot be written: {error.strerror or error}",
            "name another folder",
        ) from error
    try:
        yield Board(writer)
    finally:
        writer.close()
