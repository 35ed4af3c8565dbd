"""From what a run wrote back to values: kept tensors and pictures to rows, one for each channel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from featviz.records import STAT_COLUMNS, Bytes, Capture, Floats

MIN, MAX = STAT_COLUMNS.index("min"), STAT_COLUMNS.index("max")

LEVELS = {"L": 256, "P": 254}
"""Levels of a picture by Pillow's mode; a palette keeps 254 for the padding, 255 for what is not
finite."""
_NONFINITE = 255

_HALF = 0.501
"""Of a level: how far a value may be from the one drawn; the rest is float32's rounding when it was
drawn."""


@dataclass(frozen=True)
class Values:
    """What is known of a tensor's values."""

    data: np.ndarray
    """[channels, N]."""
    slack: np.ndarray | None = None
    """[channels]: each value may be off by so much; None where they are exact."""
    drawn: tuple[int, ...] | None = None
    """Which of the tensor's channels these are; None for all of them."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The channels that these are."""
        return tuple(range(len(self.data))) if self.drawn is None else self.drawn

    def only(self, ids: Sequence[int]) -> Values:
        """Those of some of these channels."""
        if tuple(ids) == self.ids:
            return self
        place = {channel: i for i, channel in enumerate(self.ids)}
        rows = [place[channel] for channel in ids]
        slack = None if self.slack is None else self.slack[rows]
        return Values(self.data[rows], slack, tuple(ids))


def held(row: Capture) -> tuple[int, int, int]:
    """Slices, height and width of each channel, as the tensor holds them."""
    (down, across), (height, width) = _scale(row), _tile(row)
    return (row.slices[1] if row.slices else 1), height // down, width // across


def is_part(row: Capture) -> bool:
    """Whether the kept tensor holds more than this row's vector: the tokens around it."""
    return row.layout == "vector" and row.maps * math.prod(held(row)) != math.prod(row.shape)


def is_spatial(row: Capture) -> bool:
    """Whether `from_tensor` gives the values in the order of the maps."""
    return row.layout != "windows"


def from_tensor(array: np.ndarray, row: Capture) -> Values | None:
    """The values of each channel, in the order of the maps (but for windows).

    Tokens in front of a grid are left out: they have rows of their own.

    Returns:
        None where the layout does not make the manifest's channels of this shape.
    """
    try:
        data = _CHANNELS_FIRST[row.layout](array, row)
    except (KeyError, ValueError):
        return None
    count = math.prod(held(row))
    if len(data) != row.maps or data.shape[1] < count:
        return None
    return Values(data[:, data.shape[1] - count :])


def from_picture(levels: Bytes, mode: str, row: Capture, stats: Floats) -> Values | None:
    """The values behind a grid's pixels, each within half a level; NaN for what is not finite.

    A level stands for low + level / (levels - 1) · (high - low), where low and high are the
    channel's own minimum and maximum or the range of the manifest.

    Returns:
        None where the picture has not the size that the manifest says.
    """
    channels = tuple(row.channels) if row.channels else tuple(range(row.maps))
    tiles = _tiles(levels, row, len(channels) * (row.slices[0] if row.slices else 1))
    if tiles is None:
        return None
    drawn = tiles.reshape(len(channels), -1)
    low, high = _limits(row, stats[list(channels)])
    step = (high - low) / (LEVELS[mode] - 1)
    data = low[:, None] + drawn * step[:, None]
    if mode == "P":
        data[drawn == _NONFINITE] = np.nan
    return Values(data, step * _HALF, channels)


def _tiles(levels: Bytes, row: Capture, count: int) -> Bytes | None:
    """A picture to its tiles [count, h, w], without padding and enlargement."""
    (height, width), grid = _tile(row), row.grid
    padding, columns = int(str(grid["padding"])), int(str(grid["nrow"]))
    rows = -(-count // columns)
    size = rows * (height + padding) + padding, columns * (width + padding) + padding
    if levels.shape != size:
        return None
    slots = levels[padding:, padding:].reshape(rows, height + padding, columns, width + padding)
    down, across = _scale(row)
    slots = slots[:, :height:down, :, :width:across].swapaxes(1, 2)
    return slots.reshape(rows * columns, *slots.shape[2:])[:count]


def _limits(row: Capture, stats: Floats) -> tuple[np.ndarray, np.ndarray]:
    """Values drawn darkest and brightest, float64 [channels]."""
    if row.range is None:
        low, high = stats[:, MIN].astype(np.float64), stats[:, MAX].astype(np.float64)
    else:
        low, high = (np.full(len(stats), np.nan if v is None else v) for v in row.range)
    return np.nan_to_num(low), np.nan_to_num(high)


def _tile(row: Capture) -> tuple[int, int]:
    tile: Any = row.grid["tile"]
    return int(tile[0]), int(tile[1])


def _scale(row: Capture) -> tuple[int, int]:
    scale: Any = row.grid["scale"]
    return (scale, scale) if isinstance(scale, int) else (int(scale[0]), int(scale[1]))


def _windows(array: np.ndarray, row: Capture) -> np.ndarray:
    """[n, C, a, b], or the channels last."""
    axis = -1 if array.shape[-1] == row.maps else 1
    return _rows(array, axis)


def _rows(array: np.ndarray, axis: int) -> np.ndarray:
    """The axis of channels first, all others in one."""
    first = np.moveaxis(array, axis, 0)
    return first.reshape(len(first), -1)


_CHANNELS_FIRST: Mapping[str, Callable[[np.ndarray, Capture], np.ndarray]] = {
    "nchw": lambda array, row: _rows(array, 1),
    "nhwc": lambda array, row: _rows(array, 3),
    "tokens": lambda array, row: _rows(array.reshape(*array.shape[1:2], -1), 1),
    "ncl": lambda array, row: _rows(array, 1),
    "heads": lambda array, row: array[0].swapaxes(1, 2).reshape(-1, array.shape[2]),
    "windows": _windows,
    "attention": lambda array, row: array.reshape(-1, array.shape[-2] * array.shape[-1]),
    "vector": lambda array, row: _rows(array, -1),
    "batch": lambda array, row: _rows(array, 1),
    "ncthw": lambda array, row: _rows(array, 1),
    "nthwc": lambda array, row: _rows(array, 4),
}
"""The layouts of `run`, each as [channels, N]; what stands in front of N is not of the grid."""
