"""From maps of floats to numbers and levels: statistics of channels, limits, the one quantiser.
Values on a CPU go through compiled loops; torch is imported only for what lies elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from featviz.drawing.normalize import MODES, Scale
from featviz.records import STAT_COLUMNS, Bytes, Floats, Integers

if TYPE_CHECKING:
    from torch import Tensor

MIN, MAX, MEAN, STD, ZEROS, NONFINITE = range(6)
"""Columns of statistics, in the order of `records.STAT_COLUMNS`."""

FLAT = 2.0**-20
"""A map whose range is below this share of its largest value is constant but for rounding."""

_FAR = 16.0
"""Where zero lies further below a map than so many of its spans, half a level added to `low` would
be lost in rounding, and takes a pass of its own."""

_TINY, _LARGER = 1e-30, np.float32(2.0**64)
"""The reciprocal of a smaller span may overflow: such a map is multiplied by a power of two, which
changes no digit. Also the span where two percentiles are equal: all above is bright, else dark."""


# Statistics


def statistics(
    maps: Tensor | np.ndarray, low: float = math.nan, high: float = math.nan, counted: bool = False
) -> tuple[Floats, Integers]:
    """Statistics [N, 6] of each map of float32 [N, ...] over its finite values, in the order of
    `records.STAT_COLUMNS`; and, if `counted` on a CPU, how many values are at `low` or below, or at
    `high` or above (NaN bounds nothing). The standard deviation is the population's. A map without
    a finite value has NaN for its first four."""
    from featviz.drawing import loops

    outside = np.empty(len(maps) if counted else 0, np.int64)
    if not isinstance(maps, np.ndarray) and maps.device.type != "cpu":
        return statistics_on_device(maps.flatten(1)), outside
    rows = np.require(np.asarray(maps), np.float32, ["C", "W"])
    rows = rows.reshape(len(rows), -1)
    stats = np.empty((len(rows), len(STAT_COLUMNS)), np.float32)
    bounds = np.float32(low), np.float32(high)
    loops.statistics(rows, rows.view(np.int32), stats, stats.view(np.int32), *bounds, outside)
    for n in np.flatnonzero(stats[:, STD] < 0):
        known = rows[n][np.isfinite(rows[n])].astype(np.float64)
        numbers = (known.min(), known.max(), known.mean(), known.std()) if len(known) else math.nan
        stats[n, :ZEROS] = numbers
    return stats, outside


def statistics_on_device(rows: Tensor) -> Floats:
    """The same where the values are, so that only the numbers are sent back."""
    import torch

    finite = torch.isfinite(rows)
    count, zeros = finite.sum(1), (rows == 0).sum(1) / rows.shape[1]
    low = torch.where(finite, rows, torch.inf).amin(1).masked_fill(count == 0, torch.nan)
    high = torch.where(finite, rows, -torch.inf).amax(1).masked_fill(count == 0, torch.nan)
    wide = torch.float32 if rows.device.type == "mps" else torch.float64
    known = torch.where(finite, rows, 0.0).to(wide)
    mean = known.sum(1) / count
    deviation = torch.where(finite, known - mean[:, None], 0.0)
    std = (deviation.square().sum(1) / count).sqrt()
    columns = [low, high, mean, std, zeros, rows.shape[1] - count]
    stats: Floats = torch.stack([column.float() for column in columns], dim=1).cpu().numpy()
    return stats


def overall(stats: Floats, values: int) -> dict[str, float | int | None]:
    """min, max, mean, std (None where no value is finite), zero_fraction and nonfinite of all maps
    together, of so many values each, from the statistics of each."""
    numbers = stats.astype(np.float64)
    finite = values - numbers[:, NONFINITE]
    found: dict[str, float | int | None] = dict.fromkeys(STAT_COLUMNS[:ZEROS])
    if total := float(finite.sum()):
        if not finite.all():
            numbers, finite = numbers[finite > 0], finite[finite > 0]
        means, stds, shares = numbers[:, MEAN], numbers[:, STD], finite / total
        mean = float(shares @ means)
        variance = float(shares @ (stds * stds + (means - mean) ** 2))
        low, high = float(numbers[:, MIN].min()), float(numbers[:, MAX].max())
        found |= {"min": low, "max": high, "mean": mean, "std": math.sqrt(variance)}
    zeros, nonfinite = stats[:, ZEROS:].sum(0, np.float64)
    return {**found, "zero_fraction": float(zeros) / len(stats), "nonfinite": int(nonfinite)}


def is_constant(stats: Floats) -> np.ndarray:
    """bool [N]: which maps have one value everywhere, but for rounding, by their statistics."""
    low, high = stats[:, MIN], stats[:, MAX]
    flat: np.ndarray = high - low <= FLAT * np.maximum(abs(high), abs(low))
    flat &= stats[:, NONFINITE] == 0
    return flat


# Limits


@dataclass(frozen=True)
class ValueLimits:
    """Values drawn darkest and brightest, float32 [N] or [1]; which `mode` they came from."""

    low: Floats
    high: Floats
    mode: str
    shared: tuple[float, float] | None = None
    """The limits where all maps have the same."""

    @classmethod
    def fixed(cls, low: float, high: float, mode: str = "range") -> ValueLimits:
        """The same limits for all maps."""
        ends = np.array([low], np.float32), np.array([high], np.float32)
        return cls(*ends, mode, (float(ends[0][0]), float(ends[1][0])))


def limits(
    scale: Scale, maps: Tensor, low: Floats, high: Floats, together: bool = False
) -> ValueLimits:
    """The limits of each map; `low` and `high` [N] are the finite extremes of each (else NaN). Maps
    of one number each share the layer's scale, others where they are drawn `together`."""
    if np.isnan(low).all():
        return ValueLimits.fixed(0.0, 0.0, "layer")
    mode, numbers = scale
    if mode == "map" and maps[0].numel() > 1 and not together:
        return ValueLimits(low, high, mode)
    if mode in ("range", "none"):
        low_end, high_end = numbers or (0.0, 1.0)
        return ValueLimits.fixed(low_end, high_end, mode)
    ends = float(np.nanmin(low)), float(np.nanmax(high))
    if mode == "symmetric":
        largest = max(map(abs, ends)) or 1.0
        return ValueLimits.fixed(-largest, largest, mode)
    if "percentile" in mode:
        values = maps.cpu().numpy()
        values = values[np.isfinite(values)]
        if mode == "percentile":
            bottom, top = np.percentile(values, numbers)
            return ValueLimits.fixed(float(bottom), float(top), mode)
        values = abs(values[values != 0])
        largest = float(np.percentile(values, numbers[0])) if len(values) else 1.0
        return ValueLimits.fixed(-largest, largest, mode)
    return ValueLimits.fixed(*ends, "layer")


# Levels


def to_levels(
    maps: Tensor | np.ndarray, limits: ValueLimits, levels: int, nonfinite: int | None
) -> Bytes:
    """Turn float maps [N, ...] into levels 0..`levels`-1 of the same shape, rounded to the nearest;
    NaN and infinite values into the index `nonfinite`, which is None where there are none.

    The arithmetic is torchvision's (`make_grid(normalize=True)`, then `save_image`), but of
    constant maps only zero is black and any other value the middle level.
    """
    from featviz.drawing import loops

    low, high, clips = limits.low, limits.high, MODES[limits.mode].clips
    if nonfinite is not None:  # a map without any finite value has no limits
        low, high = np.nan_to_num(low), np.nan_to_num(high)
    flat = np.zeros(len(low), bool)
    if not clips:
        flat = high - low <= FLAT * np.maximum(abs(high), abs(low))
    span, rows = np.where(flat, 1, high - low).astype(np.float32), maps
    tiny = (span > 0) & (span < _TINY)
    if tiny.any():
        times = np.where(tiny, _LARGER, np.float32(1))
        low, span = low * times, span * times
        shape = (-1, *[1] * (maps.ndim - 1))
        factors = times if isinstance(maps, np.ndarray) else maps.new_tensor(times)
        rows = maps * factors.reshape(shape)
    span = np.maximum(span, np.float32(_TINY))
    far = bool((abs(low) > _FAR * span).any())
    below = low if far else low - span * np.float32(0.5 / (levels - 1))
    factor = ((levels - 1) / span).astype(np.float32)
    top = levels - 0.5 if clips or nonfinite is not None else None
    line = below.astype(np.float32), factor, 0.5 if far else 0.0
    if isinstance(rows, np.ndarray) or rows.device.type == "cpu":
        values = np.require(np.asarray(rows), np.float32, ["C", "W"])
        tiles, count = np.empty(values.shape, np.uint8), len(values)
        each = (v if len(v) == count else v.repeat(count) for v in line[:2])
        loops.quantise(
            *(values.reshape(count, -1), *each, line[2]),
            *(-1.0 if top is None else top, tiles.reshape(count, -1)),
        )
    else:
        tiles = quantise_on_device(rows, *line, top)
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
    """(value - low) · factor + half of maps [N, ...], clipped to 0..top (unless None; NaN to 0) and
    cut to whole numbers where the maps are, so that only the bytes are sent back."""
    shape = (-1, *[1] * (maps.ndim - 1))
    below, times = (maps.new_tensor(v).reshape(shape) for v in (low, factor))
    values = (maps - below).mul_(times).add_(half)
    if top is not None:
        values.nan_to_num_(0.0).clamp_(0, top)
    sent: Bytes = values.byte().cpu().numpy()
    return sent


def to_pixels(picture: Tensor) -> Bytes:
    """A picture [C, H, W] in 0..1 as pixels [H, W, C] in 0..255."""
    array: Bytes = (picture * 255 + 0.5).byte().permute(1, 2, 0).cpu().numpy()
    return array
