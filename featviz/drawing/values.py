"""From maps of floats to numbers and levels: statistics of channels, limits, the one
quantiser. Values on a CPU go through compiled loops; torch is imported only for what
lies elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from featviz.drawing.normalize import MODES, Scale
from featviz.records import STAT_COLUMNS, Bytes, Floats, Integers

if TYPE_CHECKING:
    from torch import Tensor

MIN, MAX, MEAN, STD, ZEROS, NONFINITE = range(6)
"""Columns of statistics, in the order of `records.STAT_COLUMNS`."""

FLAT = 2.0**-20
"""A map whose range is below this share of its largest value is constant but for
rounding."""

_FAR = 16.0
"""Where zero lies further below a map than so many of its spans, half a level added to
`low` would be lost in rounding, and takes a pass of its own."""

_TINY = 1e-30
"""The reciprocal of a smaller span may overflow. Also the span where two percentiles
are equal: all above is bright, else dark."""
_LARGER = np.float32(2.0**64)
"""What maps of a tiny span are multiplied by: a power of two, which changes no digit.
"""


# Statistics


def statistics(
    maps: Tensor | np.ndarray,
    low: float = math.nan,
    high: float = math.nan,
    counted: bool = False,
) -> tuple[Floats, Integers]:
    """Statistics of each map over its finite values.

    Args:
        maps: float32 [N, ...].
        low, high: limits for the count of values outside; NaN bounds nothing.
        counted: whether to count them, which is done on a CPU alone.

    Returns:
        float32 [N, 6] in the order of `records.STAT_COLUMNS`, where the standard
        deviation is the population's and a map without a finite value has NaN for its
        first four; and how many values of each map are at `low` or below, or at `high`
        or above, which is empty unless `counted`.
    """
    from featviz.drawing import loops

    outside = np.empty(len(maps) if counted else 0, np.int64)
    if not isinstance(maps, np.ndarray) and maps.device.type != "cpu":
        return statistics_on_device(maps.flatten(1)), outside
    rows = np.require(np.asarray(maps), np.float32, ["C", "W"])
    rows = rows.reshape(len(rows), -1)
    stats = np.empty((len(rows), len(STAT_COLUMNS)), np.float32)
    bounds = np.float32(low), np.float32(high)
    loops.statistics(
        rows, rows.view(np.int32), stats, stats.view(np.int32), *bounds, outside
    )
    # the loop leaves to numpy what has NaN, or needs float64
    for n in np.flatnonzero(stats[:, STD] < 0):
        finite = rows[n][np.isfinite(rows[n])].astype(np.float64)
        stats[n, :ZEROS] = math.nan
        if len(finite):
            stats[n, :ZEROS] = finite.min(), finite.max(), finite.mean(), finite.std()
    return stats, outside


def statistics_on_device(rows: Tensor) -> Floats:
    """The same where the values are, so that only the numbers are sent back."""
    import torch

    finite = torch.isfinite(rows)
    count = finite.sum(1)
    low = (
        torch.where(finite, rows, torch.inf).amin(1).masked_fill(count == 0, torch.nan)
    )
    high = (
        torch.where(finite, rows, -torch.inf).amax(1).masked_fill(count == 0, torch.nan)
    )
    # MPS has no float64
    wide = torch.float32 if rows.device.type == "mps" else torch.float64
    numbers = torch.where(finite, rows, 0.0).to(wide)
    mean = numbers.sum(1) / count
    deviation = torch.where(finite, numbers - mean[:, None], 0.0)
    std = (deviation.square().sum(1) / count).sqrt()
    zeros = (rows == 0).sum(1) / rows.shape[1]
    columns = [low, high, mean, std, zeros, rows.shape[1] - count]
    stats: Floats = (
        torch.stack([column.float() for column in columns], dim=1).cpu().numpy()
    )
    return stats


def inner_deviations(maps: Tensor, border: int) -> Floats:
    """The standard deviation of each map without its border, float32 [N].

    Where an image ends, padding puts zeros beside it, and convolutions answer to that
    edge whatever the image is: a flat map with a bright frame would else count as one
    that varies.

    Args:
        maps: float32 [N, ..., H, W].
        border: pixels that are left out on each side. At least half of the height and
            of the width stays.
    """
    height, width = maps.shape[-2:]
    border = min(border, min(height, width) // 4)
    inner = maps[..., border : height - border, border : width - border]
    deviations: Floats = statistics(inner)[0][:, STD]
    return deviations


def overall(stats: Floats, values: int) -> dict[str, float | int | None]:
    """The statistics of all maps together, from those of each.

    Args:
        stats: [N, 6].
        values: numbers in each map.

    Returns:
        min, max, mean, std (None where no value is finite), zero_fraction and
        nonfinite.
    """
    summary: dict[str, float | int | None] = dict.fromkeys(STAT_COLUMNS)
    zeros, nonfinite = stats[:, ZEROS:].sum(0, np.float64)
    summary["zero_fraction"] = float(zeros) / len(stats)
    summary["nonfinite"] = int(nonfinite)
    numbers = stats.astype(np.float64)
    finite = values - numbers[:, NONFINITE]
    total = float(finite.sum())
    if not total:
        return summary
    if not finite.all():  # maps without a finite value hold NaN
        numbers = numbers[finite > 0]
        finite = finite[finite > 0]
    means = numbers[:, MEAN]
    stds = numbers[:, STD]
    shares = finite / total
    mean = float(shares @ means)
    # The variance of all is that inside the maps, and that of their means.
    variance = float(shares @ (stds * stds + (means - mean) ** 2))
    summary["min"] = float(numbers[:, MIN].min())
    summary["max"] = float(numbers[:, MAX].max())
    summary["mean"] = mean
    summary["std"] = math.sqrt(variance)
    return summary


def is_constant(stats: Floats) -> np.ndarray:
    """bool [N]: which maps have one value everywhere, but for rounding, by their
    statistics."""
    low = stats[:, MIN]
    high = stats[:, MAX]
    flat: np.ndarray = high - low <= FLAT * np.maximum(abs(high), abs(low))
    flat &= stats[:, NONFINITE] == 0
    return flat


# Limits


@dataclass(frozen=True)
class ValueLimits:
    """Values drawn darkest and brightest, float32 [N] or [1]; which `mode` they came
    from."""

    low: Floats
    high: Floats
    mode: str
    shared: tuple[float, float] | None = None
    """The limits where all maps have the same."""

    @classmethod
    def fixed(cls, low: float, high: float, mode: str = "range") -> ValueLimits:
        """The same limits for all maps."""
        lows = np.array([low], np.float32)
        highs = np.array([high], np.float32)
        return cls(lows, highs, mode, (float(lows[0]), float(highs[0])))

    def of_tiles(self, channels: Sequence[int] | None, slices: int) -> ValueLimits:
        """The limits of tiles, from those of channels.

        Args:
            channels: those that are drawn; None for all.
            slices: tiles of each channel.
        """
        drawn = slice(None) if channels is None else channels
        low = self.low[drawn].repeat(slices)
        return replace(self, low=low, high=self.high[drawn].repeat(slices))


def limits(
    scale: Scale, maps: Tensor, low: Floats, high: Floats, together: bool = False
) -> ValueLimits:
    """The limits of each map. Maps of one number each share the layer's scale.

    Args:
        maps: float32 [N, ...].
        low, high: the finite extremes of each map, [N]; NaN where there are none.
        together: whether maps share the layer's scale in the mode `map`, too.
    """
    if np.isnan(low).all():
        return ValueLimits.fixed(0.0, 0.0, "layer")
    mode, numbers = scale
    # A map of one number, scaled by itself, would be black whatever it is: 0, 7 and -3
    # alike.
    if mode == "map" and maps[0].numel() > 1 and not together:
        return ValueLimits(low, high, mode)
    if mode in ("range", "none"):
        low_end, high_end = numbers or (0.0, 1.0)
        return ValueLimits.fixed(low_end, high_end, mode)
    lowest = float(np.nanmin(low))
    highest = float(np.nanmax(high))
    if mode == "symmetric":
        largest = max(abs(lowest), abs(highest)) or 1.0
        return ValueLimits.fixed(-largest, largest, mode)
    if mode == "percentile":
        lowest, highest = np.percentile(_finite(maps), numbers).tolist()
        return ValueLimits.fixed(lowest, highest, mode)
    if mode == "symmetric-percentile":
        values = _finite(maps)
        values = abs(values[values != 0])
        largest = float(np.percentile(values, numbers[0])) if len(values) else 1.0
        return ValueLimits.fixed(-largest, largest, mode)
    return ValueLimits.fixed(lowest, highest, "layer")


def _finite(maps: Tensor) -> Floats:
    values: Floats = maps.cpu().numpy()
    return values[np.isfinite(values)]


# Levels


def to_levels(
    maps: Tensor | np.ndarray, limits: ValueLimits, levels: int, nonfinite: int | None
) -> Bytes:
    """Turn floats into levels, rounded to the nearest.

    The arithmetic is torchvision's (`make_grid(normalize=True)`, then `save_image`),
    but of constant maps only zero is black and any other value the middle level. A
    level is

        floor((value - low) · factor + 1/2),  factor = (levels - 1) / (high - low),

    where the half is added to `low` beforehand, which saves the loop an addition,
    unless `low` is so large beside the span that the half would be lost in rounding.

    Args:
        maps: [N, ...], on any device.
        limits: of each map or of all.
        levels: how many there are; 0 is the darkest.
        nonfinite: the level of NaN and infinite values; None where there are none.

    Returns:
        uint8 of the shape of `maps`.
    """
    from featviz.drawing import loops

    low = limits.low
    high = limits.high
    clips = MODES[limits.mode].clips
    if nonfinite is not None:  # a map without any finite value has no limits
        low = np.nan_to_num(low)
        high = np.nan_to_num(high)
    flat = np.zeros(len(low), bool)
    if not clips:
        flat = high - low <= FLAT * np.maximum(abs(high), abs(low))
    span = np.where(flat, 1, high - low).astype(np.float32)
    rows = maps
    tiny = (span > 0) & (span < _TINY)
    if tiny.any():
        factors = np.where(tiny, _LARGER, np.float32(1))
        low = low * factors
        span = span * factors
        times = factors if isinstance(maps, np.ndarray) else maps.new_tensor(factors)
        rows = maps * times.reshape(-1, *[1] * (maps.ndim - 1))
    span = np.maximum(span, np.float32(_TINY))
    # Where zero lies far below the values, the half is added behind the multiplication
    # instead.
    is_far = bool((abs(low) > _FAR * span).any())
    start = (low if is_far else low - span * np.float32(0.5 / (levels - 1))).astype(
        np.float32
    )
    factor = ((levels - 1) / span).astype(np.float32)
    half = 0.5 if is_far else 0.0
    top = levels - 0.5 if clips or nonfinite is not None else None
    if isinstance(rows, np.ndarray) or rows.device.type == "cpu":
        numbers = np.require(np.asarray(rows), np.float32, ["C", "W"])
        count = len(numbers)
        tiles = np.empty(numbers.shape, np.uint8)
        if len(start) < count:
            start = start.repeat(count)
            factor = factor.repeat(count)
        loops.quantise(
            numbers.reshape(count, -1),
            start,
            factor,
            half,
            -1.0 if top is None else top,
            tiles.reshape(count, -1),
        )
    else:
        tiles = quantise_on_device(rows, start, factor, half, top)
    # A constant map has no span to scale by: zero is black, anything else the middle
    # grey, so that dead channels are told from others.
    if flat.any():
        middle = np.where(low == 0, 0, (levels - 1) // 2 + 1).astype(np.uint8)
        where = flat if len(flat) == len(tiles) else flat.repeat(len(tiles))
        tiles[where] = middle[flat].reshape(-1, *[1] * (tiles.ndim - 1))
    if nonfinite is not None:
        array = maps if isinstance(maps, np.ndarray) else maps.cpu().numpy()
        tiles[~np.isfinite(array)] = nonfinite
    return tiles


def quantise_on_device(
    maps: Tensor, low: Floats, factor: Floats, half: float, top: float | None
) -> Bytes:
    """Levels of maps on the device where the maps are, so that only bytes are sent
    back: (value - low) · factor + half, cut to whole numbers.

    Args:
        maps: [N, ...].
        low: [N], the value of each map that becomes level 0.
        factor: [N], levels for each unit of a map's values.
        half: 0.5 to round to the nearest level, 0 to cut.
        top: the highest level, to which values are clipped, and NaN becomes 0. None
            where all values are finite and known to fit 0..255.
    """
    shape = (-1, *[1] * (maps.ndim - 1))
    levels = maps - maps.new_tensor(low).reshape(shape)
    levels = levels.mul_(maps.new_tensor(factor).reshape(shape)).add_(half)
    if top is not None:
        levels.nan_to_num_(0.0).clamp_(0, top)
    tiles: Bytes = levels.byte().cpu().numpy()
    return tiles


def to_pixels(picture: Tensor) -> Bytes:
    """A picture [C, H, W] in 0..1 as pixels [H, W, C] in 0..255."""
    array: Bytes = (picture * 255 + 0.5).byte().permute(1, 2, 0).cpu().numpy()
    return array
