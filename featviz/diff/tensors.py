"""One tensor of an image in two runs: what their files say of its values, and how far
it changed.

They are compared by the best that both runs have: kept tensors; else the statistics
together with the pixels of grids, which are exact to half a level; else the statistics
alone."""

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

# levels by which a value may be off the drawn one: half a level, and float32's rounding
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
    """bool [channels]; True for all where there is a reason."""
    reason: str | None = None
    """Why it could not be compared; then `change` says that nothing differs."""
    zero: ZeroChannels | None = None
    """None where zeros do not say that a channel is dead: the tensor is not the output of
    a ReLU or its like."""

    @property
    def extent(self) -> tuple[float, float]:
        """How much changed, to rank images by: the largest relative difference, 0..1 (1
        where it cannot be measured), and the share of channels that differ."""
        incomparable = bool(self.reason) or bool(self.change.unlike.any())
        largest = 1.0 if incomparable else float(self.change.relative.max())
        return largest, float(self.differs.mean())

    @property
    def cosine(self) -> float:
        """`Change.layer_cosine`; NaN also where a channel that differs is not drawn."""
        unknown = np.isnan(self.change.products).any(1)
        if (self.differs & unknown).any():
            return math.nan
        return self.change.layer_cosine

    @property
    def sqnr(self) -> float:
        """`Change.layer_sqnr` of kept tensors, else NaN: the levels of a picture have
        noise of their own, and statistics have no values."""
        return self.change.layer_sqnr if self.by == TENSORS else math.nan


class ChannelValues(NamedTuple):
    """The values of some channels, as a picture shows them."""

    channels: list[int]
    """Their indices in the tensor."""
    values: np.ndarray
    """[channels, N]."""
    slack: np.ndarray
    """[channels]: how far a value may be off."""


class ValuePair(NamedTuple):
    """The values of some channels in both runs."""

    channels: list[int]
    """Their indices in the tensor."""
    base: np.ndarray
    """[channels, N]."""
    new: np.ndarray
    slack: np.ndarray
    """[channels]: how far the difference of two values may be off; 0 for kept tensors."""


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
    """The shape of the maps in the tensor, of which fewer slices may be drawn. Maps that
    are drawn as stripes, since each has one value, count in full size."""
    if row.constant is not None:
        return MapShape(*row.constant)
    slices = row.slices[1] if row.slices else 1
    return MapShape(slices, *row.plan.map_size)


def from_tensor(array: np.ndarray, row: Capture, behind: int = 0) -> np.ndarray | None:
    """The values of each channel in a kept tensor, [channels, N]; None where the array
    has not the channels that the manifest says.

    Args:
        array: the kept tensor, of any shape: its file may have been exchanged.
        row: the tensor in the manifest.
        behind: how many tokens stand behind the grid. They are left out, as those before
            it are: they have rows of their own.
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
    # [class token, patches ..., tokens behind]: counted from the end, since the number of
    # tokens in front is not in the row
    end = data.shape[1] - behind
    return data[:, end - size : end]


def from_picture(
    levels: Bytes, palette: Bytes | None, row: Capture, stats: Floats
) -> ChannelValues | None:
    """The values of a picture's tiles, within half a level; NaN where they are not
    finite. None where the picture has another size than the manifest says, or a palette
    with labels, which cover values.

    Args:
        levels: [height, width], indices into the palette.
        palette: [levels, 3]; None for grey levels.
        stats: [channels, 6] of all channels.
    """
    if not is_readable(levels, palette, row):
        return None
    channels = drawn_channels(row)
    drawn = tiles_of(levels, row).reshape(len(channels), -1)
    low, step = level_scale(palette, row, stats)
    values = low[:, None] + drawn * step[:, None]
    # the last entry of a palette is the colour of what is not finite
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
        """The tensors that both have, in the order of BASE.

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
        """Whether both runs kept the tensor in a file that holds no more than its
        channels."""
        for row in self.rows:
            if row.tensor is None:
                return False
            # a vector may be a piece of its tensor: a token beside the grid
            size = row.maps * map_shape(row).size
            if row.layout == "vector" and size != math.prod(row.shape):
                return False
        return True

    def tensors(self) -> ValuePair | None:
        """The values of both kept tensors; None where they were not kept, or do not hold
        the channels of the manifest."""
        if not self.has_tensors:
            return None
        # tokens behind the grid are a capture of their own, whose size is left out here
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
        """The values in both pictures, of the channels that both show. None where a
        picture does not show values, or the two differ in slices or scale mode, or share
        no channel."""
        # of other slices each channel would hold other values; on another kind of scale
        # half a level would be another slack
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
        # --channels may have chosen others in the other run
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
    """Compare a tensor of an image. Where shapes or layouts differ, the result has a
    `reason`, and all its channels differ.

    Args:
        tolerance: the relative difference up to which values are equal, 0..1.

    Raises:
        DamagedError: a file of an image cannot be read.
    """
    base, _ = pair.rows
    reason = _incomparable(pair)
    if reason is not None:
        # tensors of two shapes differ, and no number says by how much
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
    """The channels that are zero in both runs. None if the tensor is not the output of a
    ReLU or its like, or if interventions changed NEW: they may have set zeros."""
    # told by values: a model may have its own class of ReLU, or a block that ends in one
    has_negatives = any((table[:, 0] < 0).any() for table in pair.stats)
    is_changed = bool(pair.images[1].manifest.interventions)
    if has_negatives or is_changed or pair.key.kind != "output":
        return None
    # the columns of STAT_COLUMNS: share of zeros, and values that are not finite
    before, after = ((table[:, 4] == 1) & (table[:, 5] == 0) for table in pair.stats)
    return ZeroChannels(before, after)


def _incomparable(pair: TensorPair) -> str | None:
    """Why two tensors cannot be compared channel by channel; None where they can."""
    # ONNX exported from TensorFlow has channels last: the maps are the same
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
    """Compare two tensors of one shape: what was compared (TENSORS, PIXELS or STATISTICS),
    and the change."""
    # Equal files need not be decoded. Equal pictures may be of two scales, so that the
    # statistics have to be equal, too.
    old, now = pair.stats
    if np.array_equal(old, now, equal_nan=True) and _same_files(pair):
        method = TENSORS if pair.has_tensors else PIXELS
        return method, no_change(len(old), map_shape(pair.rows[0]).size)
    scale = scale_of(old, now)
    kept = pair.tensors()
    if kept is not None:
        return TENSORS, compare(kept.base, kept.new, scale)
    # Both, since each misses something: values may move within a map, which leaves its
    # statistics as they are, and a picture is exact to half a level alone.
    statistics = compare_stats(old, now, scale)
    drawn = pair.pixels()
    if drawn is None:
        return STATISTICS, statistics
    pixels = compare(drawn.base, drawn.new, scale, drawn.slack)
    return PIXELS, _larger(statistics, pixels, drawn.channels)


def _same_files(pair: TensorPair) -> bool:
    """Whether the files that show the values have the same bytes in both runs."""
    files = [str(row.tensor if pair.has_tensors else row.file) for row in pair.rows]
    base, new = zip(pair.images, files, strict=True)
    return same_content(base, new)


def _larger(statistics: Change, pixels: Change, channels: list[int]) -> Change:
    """The larger difference of two comparisons in each channel. Cosines and products are
    those of pixels: statistics have none.

    Args:
        statistics: of all channels; it is changed in place, and returned.
        pixels: of `channels` alone, in their order.
        channels: indices of the channels whose pixels are known in both runs.
    """
    np.maximum.at(statistics.absolute, channels, pixels.absolute)
    np.maximum.at(statistics.relative, channels, pixels.relative)
    np.maximum.at(statistics.unlike, channels, pixels.unlike)
    statistics.cosine[channels] = pixels.cosine
    statistics.products[channels] = pixels.products
    return statistics
