"""One tensor of an image in two runs: what their files say of its values, and how far
it changed.

The most exact data that both runs have is compared: kept tensors; or else the statistics
and the pixels of grids, which are exact to half a level; or else only the statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from featviz.diff.compare import Change, compare, compare_stats, no_change, scale_of
from featviz.drawing.readback import (
    drawn_channels,
    is_readable,
    level_scale,
    tiles_of,
)
from featviz.layout.layouts import BEHIND, LAYOUTS
from featviz.records import Bytes, CaptureKey, Floats
from featviz.rundir.image import ReadImage, same_content
from featviz.rundir.schema import Capture
from featviz.text import by

TENSORS = "tensors"
PIXELS = "statistics and pixels"
STATISTICS = "statistics"

# by how many levels a drawn value may be wrong: half a level, and the rounding of float32
_HALF_LEVEL = 0.501


class ZeroChannels(NamedTuple):
    """Which channels of a tensor are zero everywhere in an image; bool [channels]."""

    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class TensorChange:
    """One tensor of one image, compared."""

    image: str
    key: CaptureKey
    type: str
    index: int
    by: str
    """What was compared: TENSORS, PIXELS or STATISTICS."""
    change: Change
    differs: np.ndarray
    """bool [channels]; True for all if there is a `reason`."""
    reason: str | None = None
    """Why the tensor could not be compared; then `change` says that nothing differs. None if
    it was compared."""
    zero: ZeroChannels | None = None
    """None if a zero channel need not be dead: see `_zero_channels`."""

    @property
    def extent(self) -> tuple[float, float]:
        """How much changed, to rank images by: the largest relative difference, 0..1 (1 if
        it cannot be measured), and the share of channels that differ."""
        incomparable = bool(self.reason) or bool(self.change.unlike.any())
        largest = 1.0 if incomparable else float(self.change.relative.max())
        return largest, float(self.differs.mean())

    @property
    def cosine(self) -> float:
        """`Change.layer_cosine`; also NaN if only the statistics of a channel that differs
        are known."""
        unknown = np.isnan(self.change.products).any(1)
        if (self.differs & unknown).any():
            return math.nan
        return self.change.layer_cosine

    @property
    def sqnr(self) -> float:
        """`Change.layer_sqnr` of kept tensors, and else NaN: the levels of a picture are
        rounded, and statistics have no values."""
        return self.change.layer_sqnr if self.by == TENSORS else math.nan


class ChannelValues(NamedTuple):
    """The values of some channels, as a picture shows them."""

    channels: list[int]
    """Their indices in the tensor."""
    values: np.ndarray
    """[channels, N]."""
    slack: np.ndarray
    """[channels]: by how much a value may be wrong."""


class ValuePair(NamedTuple):
    """The values of some channels in both runs."""

    channels: list[int]
    """Their indices in the tensor."""
    base: np.ndarray
    """[channels, N]."""
    new: np.ndarray
    slack: np.ndarray
    """[channels]: by how much the difference of two values may be wrong; 0 for kept
    tensors."""


class MapShape(NamedTuple):
    """The shape of each channel of a tensor."""

    slices: int
    """Maps side by side, as the time steps of a clip; 1 of most tensors."""
    height: int
    width: int

    @property
    def size(self) -> int:
        """How many values a channel has."""
        return self.slices * self.height * self.width


def map_shape(row: Capture) -> MapShape:
    """The shape of the maps in the tensor. All slices count, even if not all are drawn, and
    constant maps count in full size, though they are drawn as stripes."""
    if row.constant is not None:
        return MapShape(*row.constant)
    slices = row.slices[1] if row.slices else 1
    return MapShape(slices, *row.plan.map_size)


def from_tensor(array: np.ndarray, row: Capture, behind: int = 0) -> np.ndarray | None:
    """The values of each channel in a kept tensor, [channels, N]; None if the array does
    not have the shape that follows from the manifest.

    Args:
        array: the kept tensor, of any shape: its file may have been replaced.
        row: the tensor's row in the manifest.
        behind: how many tokens stand behind the grid. Tokens before and behind the grid are
            left out, since they have rows of their own.
    """
    layout = LAYOUTS.get(row.layout)
    if layout is None or array.ndim not in layout.dimensions:
        return None
    try:
        data: np.ndarray = layout.channels_first(array, row.maps)
    except (IndexError, ValueError):
        return None
    size = map_shape(row).size
    if len(data) != row.maps or data.shape[1] < size:
        return None
    # [class token, patches ..., tokens behind]: counted from the end, since the row does
    # not say how many tokens stand before the grid
    end = data.shape[1] - behind
    return data[:, end - size : end]


def from_picture(
    levels: Bytes, palette: Bytes | None, row: Capture, stats: Floats
) -> ChannelValues | None:
    """The values of a picture's tiles, exact to half a level; NaN for values that are not
    finite. None if the picture does not have the size that the manifest says, or if it has
    a palette and labels, which cover values.

    Args:
        levels: [height, width], indices into the palette.
        palette: [levels, 3]; None for grey levels.
        row: the tensor's row in the manifest.
        stats: the statistics of all channels, [channels, 6].
    """
    if not is_readable(levels, palette, row):
        return None
    channels = drawn_channels(row)
    drawn = tiles_of(levels, row).reshape(len(channels), -1)
    low, step = level_scale(palette, row, stats)
    values = low[:, None] + drawn * step[:, None]
    # the last entry of a palette is the colour of values that are not finite
    if palette is not None:
        values[drawn == 255] = np.nan
    # one stripe stands for a whole map
    if row.constant is not None:
        values = values.repeat(map_shape(row).size, axis=1)
    return ChannelValues(channels, values, step * _HALF_LEVEL)


@dataclass(frozen=True)
class TensorPair:
    """A tensor of an image in BASE and in NEW."""

    key: CaptureKey
    images: tuple[ReadImage, ReadImage]
    rows: tuple[Capture, Capture]
    stats: tuple[Floats, Floats]
    """Each [channels, 6]."""

    @classmethod
    def read(cls, base: ReadImage, new: ReadImage) -> Iterator[TensorPair]:
        """The tensors that both images have, in the order of BASE.

        Raises:
            DamagedError: the statistics of an image cannot be read.
        """
        base_stats = base.stats()
        new_stats = new.stats()
        for key, row in base.captures.items():
            if key in new.captures:
                rows = (row, new.captures[key])
                stats = (base_stats[key.stats_key], new_stats[key.stats_key])
                yield cls(key, (base, new), rows, stats)

    @property
    def has_tensors(self) -> bool:
        """Whether both runs kept the tensor, each in a file that holds its channels and
        nothing else."""
        for row in self.rows:
            if row.tensor is None:
                return False
            # A vector may be a part of a larger tensor, such as a class token. The file
            # then holds the whole tensor.
            size = row.maps * map_shape(row).size
            if row.layout == "vector" and size != math.prod(row.shape):
                return False
        return True

    def tensors(self) -> ValuePair | None:
        """The values of both kept tensors; None if they were not kept, or do not have the
        shape that follows from the manifest.

        Raises:
            DamagedError: a file cannot be read.
        """
        if not self.has_tensors:
            return None
        # tokens behind the grid are a capture of their own, whose row says how many
        values = []
        behind_key = self.key._replace(key=f"{self.key.key}.{BEHIND}".lstrip("."))
        for image, row in zip(self.images, self.rows, strict=True):
            array = image.tensor(row)
            behind = image.captures.get(behind_key)
            if array is None:
                return None
            tokens = 0 if behind is None else map_shape(behind).size
            channels = from_tensor(array, row, tokens)
            if channels is None:
                return None
            values.append(channels)
        count = self.rows[0].maps
        return ValuePair(list(range(count)), values[0], values[1], np.zeros(count))

    def pixels(self) -> ValuePair | None:
        """The values in both pictures, of the channels that both show. None if a picture
        does not show values, or if the two differ in slices or scale mode, or share no
        channel.

        Raises:
            DamagedError: a picture cannot be read.
        """
        # with different slices, values do not correspond; with different scale modes, half
        # a level is not the same difference
        base_row, new_row = self.rows
        if (
            base_row.drawn_slices != new_row.drawn_slices
            or base_row.normalize != new_row.normalize
        ):
            return None
        values = []
        for image, row, stats in zip(self.images, self.rows, self.stats, strict=True):
            picture = image.levels(row)
            channels = None if picture is None else from_picture(*picture, row, stats)
            if channels is None:
                return None
            values.append(channels)
        base, new = values
        # the runs may have had different --channels
        common, old, now = np.intersect1d(
            base.channels, new.channels, return_indices=True
        )
        if base.values.shape[1] != new.values.shape[1] or not len(common):
            return None
        return ValuePair(
            channels=common.tolist(),
            base=base.values[old],
            new=new.values[now],
            slack=base.slack[old] + new.slack[now],
        )


def compare_pair(pair: TensorPair, tolerance: float) -> TensorChange:
    """Compare a tensor of an image. If shapes or layouts differ, the result has a `reason`,
    and all its channels differ.

    Args:
        tolerance: the relative difference up to which values are equal, 0..1.

    Raises:
        DamagedError: a file of an image cannot be read.
    """
    base, _ = pair.rows
    reason = _incomparable_reason(pair)
    if reason is not None:
        # a difference without a number
        method = STATISTICS
        change = no_change(base.maps, 1)
        differs = np.ones(base.maps, np.bool_)
    else:
        method, change = _change_of(pair)
        differs = change.differs(tolerance)
    return TensorChange(
        image=pair.images[0].name,
        key=pair.key,
        type=base.type,
        index=base.index,
        by=method,
        change=change,
        differs=differs,
        reason=reason,
        zero=None if reason else _zero_channels(pair),
    )


def _zero_channels(pair: TensorPair) -> ZeroChannels | None:
    """The zero channels of the tensor in each run. None if the tensor is not the output of
    a ReLU or the like, or if interventions changed NEW: they may have set zeros."""
    # recognised by its values: a model may have its own ReLU class, or a block may end in a
    # ReLU
    has_negatives = any((table[:, 0] < 0).any() for table in pair.stats)
    is_changed = bool(pair.images[1].manifest.interventions)
    if has_negatives or is_changed or pair.key.kind != "output":
        return None
    # the columns of STAT_COLUMNS: share of zeros, and values that are not finite
    before, after = ((table[:, 4] == 1) & (table[:, 5] == 0) for table in pair.stats)
    return ZeroChannels(before, after)


def _incomparable_reason(pair: TensorPair) -> str | None:
    """Why two tensors cannot be compared channel by channel; None if they can."""
    # ONNX exported from TensorFlow has channels last, but its maps are the same
    base, new = pair.rows
    is_turned = {base.layout, new.layout} == {"nchw", "nhwc"}
    if is_turned and (base.maps, map_shape(base)) == (new.maps, map_shape(new)):
        return None
    if base.shape != new.shape:
        return f"shape {by(base.shape)} in BASE, {by(new.shape)} in NEW"
    if (base.layout, base.maps) != (new.layout, new.maps):
        return f"layout {base.layout} in BASE, {new.layout} in NEW"
    return None


def _change_of(pair: TensorPair) -> tuple[str, Change]:
    """Compare two tensors of one shape.

    Returns:
        What was compared (TENSORS, PIXELS or STATISTICS), and the change.

    Raises:
        DamagedError: a file of an image cannot be read.
    """
    # Equal files need not be decoded. The statistics must be equal, too: two scales can
    # make equal pictures of different values.
    old, now = pair.stats
    if np.array_equal(old, now, equal_nan=True) and _have_equal_files(pair):
        method = TENSORS if pair.has_tensors else PIXELS
        return method, no_change(len(old), map_shape(pair.rows[0]).size)
    scale = scale_of(old, now)
    kept = pair.tensors()
    if kept is not None:
        return TENSORS, compare(kept.base, kept.new, scale)
    # Both are compared, since each misses something: statistics stay as they are if values
    # move within a map, and a picture is only exact to half a level.
    statistics = compare_stats(old, now, scale)
    drawn = pair.pixels()
    if drawn is None:
        return STATISTICS, statistics
    pixels = compare(drawn.base, drawn.new, scale, drawn.slack)
    return PIXELS, _with_larger_differences(statistics, pixels, drawn.channels)


def _have_equal_files(pair: TensorPair) -> bool:
    """Whether the files of the values (kept tensors, or else pictures) have the same bytes
    in both runs."""
    files = [str(row.tensor if pair.has_tensors else row.file) for row in pair.rows]
    base, new = zip(pair.images, files, strict=True)
    return same_content(base, new)


def _with_larger_differences(
    statistics: Change, pixels: Change, channels: list[int]
) -> Change:
    """Take the larger difference of two comparisons in each channel, and the cosine and the
    products of the pixels, since statistics have none.

    Args:
        statistics: the change of all channels; it is modified in place, and returned.
        pixels: the change of the channels in `channels`, in the same order.
        channels: indices of the channels whose pixels are known in both runs.
    """
    np.maximum.at(statistics.absolute, channels, pixels.absolute)
    np.maximum.at(statistics.relative, channels, pixels.relative)
    np.maximum.at(statistics.unlike, channels, pixels.unlike)
    statistics.cosine[channels] = pixels.cosine
    statistics.products[channels] = pixels.products
    return statistics
