"""What TensorBoard shows of a run: grids, scalars and histograms, one tag a layer."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from featviz.text import printable

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

    image: str = ""
    """The name of the image; empty for kernels."""

    def tag(self, what: str, named: bool) -> str:
        """`what/layer1.0.conv1`; what is not of an output says so: `what-input/...`.

        Args:
            named: end in the image's name.
        """
        site = self.site
        kind = "" if site.kind in ("output", "grad", what) else f"-{site.kind.split('-')[-1]}"
        image = f"/{printable(self.image)}" if named and self.image else ""
        return f"{what}{kind}/{site.layer.label}{site.stem.removeprefix(site.kind)}{image}"


class Board:
    """A folder of TensorBoard events, of one run.

    Without a training step, the images of a run are the steps of a tag. With one, each image has
    tags of its own, and scalars: a line through them is that of one image over the training.
    """

    def __init__(
        self,
        events: EventFile,
        step: int | None = None,
        earlier: Collection[tuple[int, str]] | None = None,
    ) -> None:
        """Begin with nothing.

        Args:
            step: the training step that the run shows, if it shows one.
            earlier: step and tag of each picture of the run that this one goes on with; None where
                it has posted nothing here.
        """
        self._events, self._step, self._earlier = events, step, frozenset(earlier or ())
        self._lacking = earlier is not None
        images = [(at, tag) for at, tag in self._earlier if not tag.startswith("kernel/")]
        self._positions = {at for at, _ in images}
        self._names = {tag.split("/", 2)[-1] for at, tag in images if at == step}

    def lacks(self, position: int, image: str) -> bool:
        """Whether the run that this one goes on with was killed before it posted an image.

        Args:
            position: of the image among those of the run, from 0.
            image: its name.
        """
        if self._step is None:
            return self._lacking and position not in self._positions
        return self._lacking and printable(image) not in self._names

    def post(self, posts: Sequence[Post], position: int) -> None:
        """Write the pictures and histograms of an image, and at a training step its scalars, as one
        event: all of them are in the file, or none. Those that are there already are left out.

        Scalars of an output or an input are its share of zeros, and how many channels are above
        zero nowhere in the image; of a gradient its Euclidean norm.

        Args:
            position: of the image among those of the run, from 0.

        Raises:
            StoreError: the file cannot be written.
        """
        trained, step = self._step is not None, position if self._step is None else self._step
        new = [p for p in posts if (step, p.tag(p.site.kind, trained)) not in self._earlier]
        if values := [value for post in new for value in self._values(post)]:
            self._events.add(values, step)

    def add_scalars(self, values: Mapping[str, float]) -> None:
        """Write numbers of a training step by their tags, as one event.

        Raises:
            StoreError: the file cannot be written.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        rows = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._events.add(rows, self._step or 0)

    def at_step(self, step: int) -> Board:
        """The same file of events at another training step."""
        return Board(self._events, step)

    def _values(self, post: Post) -> Iterator[Any]:
        """Of TensorBoard's message `Summary.Value`."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        trained, kind = self._step is not None, post.site.kind
        yield Summary.Value(tag=post.tag(kind, trained), image=_image(post))
        if post.histogram is not None:
            tag = post.tag(_group(kind), trained)
            yield Summary.Value(tag=tag, histo=_proto(post.histogram))
        for what, value in _scalars(post) if trained else ():
            yield Summary.Value(tag=post.tag(what, trained), simple_value=value)


def run_folder(logdir: Path, run: Path) -> Path:
    """The folder of a run's events: TensorBoard shows each folder of LOGDIR as a run.

    Args:
        run: the run's folder or archive, whose name it gets.
    """
    return logdir / (run.resolve().name.removesuffix(".zip") or "run")


def _scalars(post: Post) -> Iterator[tuple[str, float]]:
    stats, kind = post.stats.astype(np.float64), post.site.kind
    if is_gradient(kind):
        count = post.values - stats[:, _NONFINITE]
        power = count * (stats[:, _STD] ** 2 + stats[:, _MEAN] ** 2)
        yield "grad_norm", float(np.sqrt(power[count > 0].sum()))
    elif kind != "kernel":
        yield "zero_fraction", float(stats[:, _ZEROS].mean())
        yield "inactive_channels", float((stats[:, _MAX] <= 0).sum())


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
    folder: Path | None,
    below: Path | None = None,
    step: int | None = None,
    resume: bool = False,
) -> Iterator[Board | None]:
    """A board in a folder, flushed and closed at the end; None without one.

    Args:
        step: the training step that the run shows; None where it shows none.
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
        yield Board(events, step, earlier)
    finally:
        with atomic.reported(folder, "name another folder"):
            events.close()
