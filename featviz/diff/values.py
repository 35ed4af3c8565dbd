"""The values behind a run's files: kept tensors and pictures to rows, one for each channel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from featviz.diff.pairing import TensorPair
from featviz.drawing import colormap
from featviz.layout.layouts import LAYOUTS
from featviz.records import STAT_COLUMNS, Bytes, Floats, GridPlan
from featviz.rundir.image import ReadImage, same_content
from featviz.rundir.schema import CaptureRow

_MIN, _MAX = STAT_COLUMNS.index("min"), STAT_COLUMNS.index("max")

_GREYS = 256
"""Levels of a picture without a palette."""

_HALF = 0.501
"""How many levels a value may be away from the one drawn: half a level, and float32's rounding when
it was drawn."""


@dataclass(frozen=True)
class Values:
    """The values of a tensor, as far as a file shows them."""

    data: np.ndarray
    """[channels, N]."""
    slack: np.ndarray | None = None
    """[channels]: how far each value may be off; None where the values are exact."""
    drawn: tuple[int, ...] | None = None
    """The tensor's channels that the rows stand for; None for all of them."""
    hidden: np.ndarray | None = None
    """[channels, N]: which values a label covers, where it can be told; None where none is."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The channels that the rows stand for."""
        return tuple(range(len(self.data))) if self.drawn is None else self.drawn

    def only(self, ids: Sequence[int]) -> Values:
        """The rows of some of the channels."""
        if tuple(ids) == self.ids:
            return self
        place = {channel: i for i, channel in enumerate(self.ids)}
        rows = [place[channel] for channel in ids]
        slack, hidden = (None if v is None else v[rows] for v in (self.slack, self.hidden))
        return Values(self.data[rows], slack, tuple(ids), hidden)

    def without(self, hidden: np.ndarray) -> Values:
        """The values with NaN where a mask [channels, N] says so."""
        return replace(self, data=np.where(hidden, np.nan, self.data))


def map_shape(row: CaptureRow) -> tuple[int, int, int]:
    """Slices, height and width of each channel in the tensor, drawn or not."""
    if row.constant is not None:
        slices, height, width = row.constant
        return slices, height, width
    return (row.slices[1] if row.slices else 1), *row.plan.map_size


def is_part(row: CaptureRow) -> bool:
    """Whether a row's vector is only a part of the kept tensor: a token in front of the grid."""
    return row.layout == "vector" and row.maps * math.prod(map_shape(row)) != math.prod(row.shape)


def from_tensor(array: np.ndarray, row: CaptureRow) -> Values | None:
    """Read the values of each channel from a kept tensor, in the order of the maps where
    `Layout.in_map_order` says so.

    Tokens in front of a grid are left out: they have rows of their own.

    Returns:
        None where the layout does not make the manifest's channels of this shape.
    """
    layout = LAYOUTS.get(row.layout)
    if layout is None or array.ndim not in layout.dimensions:
        return None
    try:
        data = layout.channels_first(array, row.maps)
    except (IndexError, ValueError):
        return None
    count = math.prod(map_shape(row))
    if len(data) != row.maps or data.shape[1] < count:
        return None
    return Values(data[:, data.shape[1] - count :])


def from_picture(
    levels: Bytes, palette: Bytes | None, row: CaptureRow, stats: Floats
) -> Values | None:
    """Read the values behind a grid's pixels, each within half a level; NaN where not finite, and
    anything where a label covers them.

    A level stands for low + level / (levels - 1) · (high - low), where low and high are the
    channel's own minimum and maximum or the range of the manifest.

    Args:
        levels: the pixels, [height, width].
        palette: its colours, [colours, 3]; None for a grey picture.
        stats: [channels, 6], of all channels of the tensor.

    Returns:
        None where the picture has not the size that the manifest says, shows no channels, or has a
        palette that featviz does not write.
    """
    channels = tuple(row.channels) if row.channels else tuple(range(row.maps))
    plan = row.plan
    count = _GREYS if palette is None else _level_count(palette)
    if row.constant is not None and row.constant[0] > 1:
        return None  # another picture may show only some of the slices
    if levels.shape != (plan.height, plan.width) or plan.maps != len(channels) * row.side:
        return None
    if count is None:
        return None
    drawn = _to_tiles(levels, plan).reshape(len(channels), -1)
    low, high = _limits(row, stats[list(channels)])
    step = (high - low) / (count - 1)
    data = low[:, None] + drawn * step[:, None]
    beyond = np.int16(count + 1)  # of a grey picture 257 and no byte, which numpy 2.1.0 dies of
    data[drawn == beyond] = np.nan
    if row.constant is not None:
        data = data.repeat(math.prod(map_shape(row)), axis=1)
    hidden = np.broadcast_to(drawn > beyond, data.shape)
    return Values(data, step * _HALF, channels, hidden if hidden.any() else None)


def _level_count(palette: Bytes) -> int | None:
    """How many levels a palette has: its last magenta stands for what is not finite, and the
    padding lies between it and the levels; the ink of labels may follow (`colormap.colored`). None
    where there is no magenta in such a place."""
    magenta = np.flatnonzero((palette == colormap.MAGENTA).all(1))
    return int(magenta[-1]) - 1 if len(magenta) and magenta[-1] > 2 else None


def _to_tiles(levels: Bytes, plan: GridPlan) -> Bytes:
    """Cut a picture into its maps [maps, h, w], without title, padding and enlargement."""
    (height, width), (down, across), padding = plan.tile, plan.scale, plan.padding
    slots = levels[plan.top + padding :, padding:].reshape(
        plan.rows, height + padding, plan.columns, width + padding
    )
    slots = slots[:, :height:down, :, :width:across].swapaxes(1, 2)
    return slots.reshape(plan.rows * plan.columns, *plan.map_size)[: plan.maps]


def _limits(row: CaptureRow, stats: Floats) -> tuple[np.ndarray, np.ndarray]:
    """Values drawn darkest and brightest, float64 [channels]."""
    if row.range is None:
        low, high = stats[:, _MIN].astype(np.float64), stats[:, _MAX].astype(np.float64)
    else:
        low, high = (np.full(len(stats), np.nan if v is None else v) for v in row.range)
    return np.nan_to_num(low), np.nan_to_num(high)


@dataclass(frozen=True)
class ImagePair:
    """An image in both runs, with the statistics of its tensors."""

    base: ReadImage
    new: ReadImage
    base_stats: Mapping[str, Floats]
    new_stats: Mapping[str, Floats]

    @classmethod
    def read(cls, base: ReadImage, new: ReadImage) -> ImagePair:
        """Read the statistics of both.

        Raises:
            DamagedError: they cannot be read.
        """
        return cls(base, new, base.stats(), new.stats())

    def stats(self, pair: TensorPair) -> tuple[Floats, Floats]:
        """The statistics of a tensor in BASE and NEW, each [channels, 6]."""
        key = pair.place.stats_key
        return self.base_stats[key], self.new_stats[key]

    def tensors(self, pair: TensorPair) -> tuple[Values, Values] | None:
        """Read the values of both kept tensors; None where there are none that show the channels.

        Raises:
            DamagedError: a file is missing or broken.
        """
        if not keeps(pair):
            return None
        sides = []
        for image, row in ((self.base, pair.base), (self.new, pair.new)):
            array = image.tensor(row)
            values = None if array is None else from_tensor(array, row)
            if values is None:
                return None
            sides.append(values)
        return sides[0], sides[1]

    def pixels(self, pair: TensorPair) -> tuple[Values, Values] | None:
        """Read the values behind both pictures, of the channels that both have drawn; None where
        the pictures do not show them.

        Raises:
            DamagedError: a file is missing or broken.
        """
        if pair.base.beside != pair.new.beside or pair.base.normalize != pair.new.normalize:
            return None
        sides = []
        for image, row, stats in zip(
            (self.base, self.new), (pair.base, pair.new), self.stats(pair), strict=True
        ):
            picture = image.levels(row)
            values = None if picture is None else from_picture(*picture, row, stats)
            if values is None:
                return None
            sides.append(values)
        base, new = sides
        ids = [i for i in base.ids if i in set(new.ids)]
        if not ids or base.data.shape[1] != new.data.shape[1]:
            return None
        return _without_labels(base.only(ids), new.only(ids))

    def same_files(self, pair: TensorPair) -> bool:
        """Whether the files that hold a tensor's values, kept or drawn, are equal byte by byte."""
        kept = keeps(pair)
        names = [row.tensor if kept else row.file for row in (pair.base, pair.new)]
        return same_content((self.base, str(names[0])), (self.new, str(names[1])))


def _without_labels(base: Values, new: Values) -> tuple[Values, Values]:
    """The values of two sides, both NaN where a label covers one of them."""
    masks = [values.hidden for values in (base, new) if values.hidden is not None]
    if not masks:
        return base, new
    hidden = np.logical_or.reduce(masks)
    return base.without(hidden), new.without(hidden)


def keeps(pair: TensorPair) -> bool:
    """Whether both runs keep a tensor whose channels are all those of the rows."""
    return all(row.tensor is not None and not is_part(row) for row in (pair.base, pair.new))


def slack_of(values: tuple[Values, Values]) -> np.ndarray | None:
    """[channels]: how far two values may be apart that are the same; None where both are exact."""
    one, other = (v.slack for v in values)
    return None if one is None or other is None else one + other
