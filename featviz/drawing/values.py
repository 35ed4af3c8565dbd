"""From maps of floats to numbers and levels: statistics of channels, limits, the one
quantiser. Values on a CPU go through compiled loops; torch is imported only for what
lies elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from featviz.drawing.normalize import MODES, Scale
from featviz.records import STAT_COLUMNS, Bytes, Floats, Integers

if TYPE_CHECKING:
    from torch import Tensor, dtype

MIN, MAX, MEAN, STD, ZEROS, NONFINITE = range(6)
"""Columns of statistics, in the order of `records.STAT_COLUMNS`."""

FLAT = 2.0**-20
"""A map whose range is below this share of its largest value is constant but for
rounding."""

_FAR = 16.0
"""Where zero lies further from a map than this many of its spans, half a level is not
taken from `low`, since it would be lost in rounding, but added in the end."""

_TINY = 1e-30
"""The reciprocal of a smaller span may overflow. Also the span where two percentiles
are equal: all above is bright, else dark."""
_LARGER = np.float32(2.0**64)
"""What maps of a tiny span are multiplied by: a power of two, which changes no digit.
"""
_UNCLIPPED = -1.0
"""In the place of the highest level, where all values are known to fit."""


def for_loops(array: np.ndarray) -> np.ndarray:
    """An array as compiled loops take it: in C order, and one that may be written to; a
    copy where it is not so."""
    return array if array.flags.carray else array.copy()


# Statistics


def statistics(
    maps: Tensor,
    low: float = math.nan,
    high: float = math.nan,
    outside: Integers | None = None,
) -> Floats:
    """Statistics of each map over its finite values.

    Args:
        maps: float32 [N, ...].
        low, high: limits for `outside`; NaN bounds nothing.
        outside: int64 [N], which is filled: how many values of each map are at `low` or
            below, or at `high` or above. None where nobody asks.

    Returns:
        float32 [N, 6] in the order of `records.STAT_COLUMNS`. The standard deviation is
        the population's. A map without a finite value has NaN for its first four.
    """
    from featviz.drawing import loops  # numba takes a while to import

    if maps.device.type != "cpu":
        if outside is not None:
            are_outside = (maps <= low) | (maps >= high)
            outside[:] = are_outside.flatten(1).sum(1).cpu().numpy()
        return statistics_on_device(maps.flatten(1))
    rows = for_loops(np.asarray(maps, np.float32))
    rows = rows.reshape(len(rows), -1)
    stats = np.empty((len(rows), len(STAT_COLUMNS)), np.float32)
    loops.statistics(
        rows,
        rows.view(np.int32),
        stats,
        stats.view(np.int32),
        np.float32(low),
        np.float32(high),
        np.empty(0, np.int64) if outside is None else outside,
    )
    # the loop leaves to numpy what has NaN or needs float64
    for n in (stats[:, STD] < 0).nonzero()[0]:
        stats[n, :ZEROS] = _exact_moments(rows[n])
    return stats


def _exact_moments(row: Floats) -> np.ndarray:
    """Min, max, mean and standard deviation of a row's finite values, float64 [4]; NaN
    where it has none."""
    finite = row[np.isfinite(row)].astype(np.float64)
    if not len(finite):
        return np.full(ZEROS, math.nan)
    return np.array([finite.min(), finite.max(), finite.mean(), finite.std()])


def statistics_on_device(rows: Tensor) -> Floats:
    """The statistics of `statistics`, made where the values are, so that six numbers a
    map are sent back, not the map.

    Args:
        rows: float32 [N, W], on any device.

    Returns:
        float32 [N, 6].
    """
    import torch

    finite = torch.isfinite(rows)
    count = finite.sum(1)
    # extremes of nothing are infinite, which nobody would tell from values
    empty = count == 0
    low = torch.where(finite, rows, torch.inf).amin(1).masked_fill(empty, torch.nan)
    high = torch.where(finite, rows, -torch.inf).amax(1).masked_fill(empty, torch.nan)
    numbers = torch.where(finite, rows, 0.0).to(widest_type(rows))
    mean = numbers.sum(1) / count
    deviation = torch.where(finite, numbers - mean[:, None], 0.0)
    std = (deviation.square().sum(1) / count).sqrt()
    zeros = (rows == 0).sum(1) / rows.shape[1]
    columns = [low, high, mean, std, zeros, rows.shape[1] - count]
    stats = torch.stack([column.float() for column in columns], dim=1).cpu().numpy()
    return stats


def inner_deviations(maps: Tensor, border: int) -> Floats:
    """The standard deviation of each map without its border, float32 [N].

    Where an image ends, padding puts zeros beside it, and convolutions answer to that
    edge whatever the image is: a flat map with a bright frame would else count as one
    that varies.

    Args:
        maps: float32 [N, ..., H, W].
        border: pixels that are left out on each side, but at most a quarter of the
            height or the width.
    """
    from featviz.drawing import loops  # numba takes a while to import

    height, width = maps.shape[-2:]
    border = min(border, min(height, width) // 4)
    if maps.device.type != "cpu":
        return inner_statistics(maps, border)[:, STD]
    rows = maps.flatten(1).contiguous().numpy()
    deviations = np.empty(len(rows), np.float32)
    loops.inner_deviations(rows, width, height, border, deviations)
    # the loop leaves to numpy what has NaN or needs float64
    for n in (deviations < 0).nonzero()[0]:
        deviations[n] = inner_statistics(maps[n : n + 1], border)[0, STD]
    return deviations


def inner_statistics(maps: Tensor, border: int) -> Floats:
    """The `statistics` of maps [N, ..., H, W] without their border, float32 [N, 6];
    `border` as in `inner_deviations`."""
    height, width = maps.shape[-2:]
    border = min(border, min(height, width) // 4)
    inner = maps[..., border : height - border, border : width - border]
    return statistics(inner)


def widest_type(tensor: Tensor) -> dtype:
    """The type in which a tensor's device adds with the fewest losses: float64, which
    Apple's devices (MPS) do not have."""
    import torch

    return torch.float32 if tensor.device.type == "mps" else torch.float64


def overall(stats: Floats, values: int) -> dict[str, float | int | None]:
    """The statistics of all maps together, from those of each.

    Args:
        stats: float32 [N, 6].
        values: numbers in each map.

    Returns:
        min, max, mean, std (None where no value is finite), zero_fraction and
        nonfinite, by these names.
    """
    numbers = stats.astype(np.float64)
    nonfinite = int(numbers[:, NONFINITE].sum())
    counts = {
        "zero_fraction": float(numbers[:, ZEROS].mean()),
        "nonfinite": nonfinite,
    }
    if nonfinite:
        # maps without a finite value hold NaN
        numbers = numbers[numbers[:, NONFINITE] < values]
        if not len(numbers):
            return {**dict.fromkeys(STAT_COLUMNS), **counts}
    finite = values - numbers[:, NONFINITE]
    lows, highs, means, stds = numbers[:, :ZEROS].T
    shares = finite / finite.sum()
    mean = float(shares @ means)
    # The variance of all values is that inside the maps and that of their means
    # (the law of total variance).
    variance = float(shares @ (stds * stds + (means - mean) ** 2))
    return {
        "min": float(lows.min()),
        "max": float(highs.max()),
        "mean": mean,
        "std": math.sqrt(variance),
        **counts,
    }


def is_constant(stats: Floats) -> np.ndarray:
    """bool [N]: which maps have one value everywhere, but for rounding, by their
    statistics [N, 6]."""
    constant = _are_equal(stats[:, MIN], stats[:, MAX])
    constant &= stats[:, NONFINITE] == 0
    return constant


def _are_equal(low: Floats, high: Floats) -> np.ndarray:
    """bool [N]: which limits, from `low` to `high`, are equal but for rounding."""
    are_equal: np.ndarray = high - low <= FLAT * np.maximum(abs(high), abs(low))
    return are_equal


# Components


COMPONENTS = 3
PCA_SPAN = 2.5
"""Standard deviations from the mean at which a principal component is darkest and
brightest."""
_NOTHING = 1e-12
"""A component whose variance is below this share of the first one's is rounding."""


def principal_components(vectors: Floats) -> Floats:
    """Three principal components of finite vectors [N, C], float32 [N, 3], in standard
    deviations from the mean; 0 along directions in which they do not vary.

    The directions are eigenvectors of the covariance of the C numbers, got from the N
    vectors where these are fewer (they share eigenvalues). The largest number of each
    is positive, so that the same vectors give the same colours on every machine.
    """
    components = np.zeros((len(vectors), COMPONENTS), np.float32)
    if not len(vectors):
        return components
    # in float32 the smaller components would be lost
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    # 2048 channels of 7×7 pixels have 49 eigenvalues that are not zero
    if len(centred) < centred.shape[1]:
        variances, across = np.linalg.eigh(centred @ centred.T / len(centred))
        directions = centred.T @ across
    else:
        variances, directions = np.linalg.eigh(centred.T @ centred / len(centred))
    # the smallest eigenvalue comes first
    for number in range(min(COMPONENTS, len(variances))):
        variance = variances[-1 - number]
        direction = directions[:, -1 - number]
        if variance <= _NOTHING * variances[-1]:
            break
        length = np.linalg.norm(direction) * np.sqrt(variance)
        sign = np.sign(direction[abs(direction).argmax()])
        components[:, number] = centred @ direction * sign / length
    return components


# Limits


@dataclass(frozen=True)
class ValueLimits:
    """The values of maps that are drawn darkest and brightest."""

    low: Floats
    """Drawn darkest, float32 [N], or [1] for all maps alike."""
    high: Floats
    """Drawn brightest, of the same shape."""
    mode: str
    """The name in `normalize.MODES` of the mode that they came from."""
    shared: tuple[float, float] | None = None
    """The limits where all maps have the same."""
    clips: bool = False
    """Whether values may lie beyond the limits, though the mode clips nothing."""

    @classmethod
    def fixed(cls, low: float, high: float, mode: str = "range") -> ValueLimits:
        """Limits that are the same for all maps, in a mode of `normalize.MODES`: `low` is
        drawn darkest, `high` brightest."""
        lows = np.array([low], np.float32)
        highs = np.array([high], np.float32)
        return cls(lows, highs, mode, (float(lows[0]), float(highs[0])))

    def of_tiles(self, channels: Sequence[int] | None, slices: int) -> ValueLimits:
        """The limits of tiles, from those of channels.

        Args:
            channels: those that are drawn; None for all.
            slices: tiles of each channel.
        """
        if len(self.low) == 1 or (channels is None and slices == 1):
            return self
        drawn = slice(None) if channels is None else channels
        low = self.low[drawn].repeat(slices)
        return replace(self, low=low, high=self.high[drawn].repeat(slices))


def limits(
    scale: Scale, maps: Tensor, stats: Floats, together: bool = False
) -> ValueLimits:
    """The limits of each map. Maps of one number each share the layer's scale.

    Args:
        maps: float32 [N, ...], of which percentiles are taken.
        stats: float32 [N, 6], whose extremes are the limits of other modes.
        together: whether maps share the layer's scale in the mode `map`, too.

    Returns:
        Those of the mode `layer` for a shared scale in the mode `map`, and 0 to 0 where
        no map has a finite value.
    """
    low = stats[:, MIN]
    high = stats[:, MAX]
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
    if mode == "percentile":
        lowest, highest = np.percentile(_finite(maps), numbers).tolist()
        return ValueLimits.fixed(lowest, highest, mode)
    lowest = float(np.nanmin(low))
    highest = float(np.nanmax(high))
    if mode.startswith("symmetric"):
        largest = max(abs(lowest), abs(highest)) or 1.0
        if numbers:
            largest = _percentile_of_sizes(maps, numbers[0])
        return ValueLimits.fixed(-largest, largest, mode)
    if mode == "positive":
        return ValueLimits.fixed(0.0, abs(highest), mode)
    return ValueLimits.fixed(lowest, highest, "layer")


def _percentile_of_sizes(maps: Tensor, percentile: float) -> float:
    """A percentile of the absolute values of maps; 1 where there are none but zeros.

    Zeros do not count: a sparse gradient would have most of its values beyond."""
    sizes = abs(_finite(maps))
    sizes = sizes[sizes != 0]
    return float(np.percentile(sizes, percentile)) if len(sizes) else 1.0


def _finite(maps: Tensor) -> Floats:
    """The finite values of maps, [n]."""
    values: Floats = _as_array(maps)
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

    or, the same but for rounding, with the half taken from `low` beforehand:

        floor((value - start) · factor),      start = low - 1 / (2 · factor)

    The second is used unless `low` is far from zero, where half a level would be lost
    in its rounding.

    Args:
        maps: float32 [N, ...], on any device.
        limits: of each map or of all.
        levels: how many there are; 0 is the darkest.
        nonfinite: the level of NaN and infinite values; None where there are none.

    Returns:
        uint8 of the shape of `maps`.
    """
    low = limits.low
    high = limits.high
    if nonfinite is not None:  # a map without any finite value has no limits
        low = np.nan_to_num(low)
        high = np.nan_to_num(high)
    may_clip = MODES[limits.mode].clips
    # where values may lie outside the limits, equal limits say nothing of the map
    constant = _are_equal(low, high) & (not may_clip)
    span = np.where(constant, np.float32(1), high - low)
    values = maps
    is_tiny = (span > 0) & (span < _TINY)
    if is_tiny.any():
        times = np.where(is_tiny, _LARGER, np.float32(1))
        low = low * times
        span = span * times
        values = _as_array(maps) * times.reshape(-1, *[1] * (maps.ndim - 1))
    line = _line(low, np.maximum(span, np.float32(_TINY)), constant, levels)
    # limits that are the extremes need no clipping, which saves two comparisons a value
    may_clip = may_clip or limits.clips or nonfinite is not None
    top = levels - 0.5 if may_clip else _UNCLIPPED
    tiles = _quantised(values, line, top)
    # at the end, since the loop made level 0 of NaN
    if nonfinite is not None:
        tiles[~np.isfinite(_as_array(maps))] = nonfinite
    return tiles


def _as_array(maps: Tensor | np.ndarray) -> np.ndarray:
    """Maps as an array in this machine's memory."""
    return maps if isinstance(maps, np.ndarray) else maps.cpu().numpy()


class Line(NamedTuple):
    """How values become levels: (value - start) · factor + half, cut to a whole number.
    Float32 [N], a number for each map, or [1]."""

    start: Floats
    """The value that becomes `half`."""
    factor: Floats
    """Levels for each unit of the values."""
    half: Floats
    """0.5 to round to the nearest level, 0 where `start` has it; the level of a constant
    map."""


def _line(low: Floats, span: Floats, constant: np.ndarray, levels: int) -> Line:
    """The line from a map's values to levels.

    Args:
        low: the value of level 0, float32 [N] or [1].
        span: from there to the value of the last level.
        constant: bool of that shape, which maps have one value everywhere, and no span.
        levels: how many there are.
    """
    factor = np.float32(levels - 1) / span
    half = np.zeros_like(span)
    start = low - span * np.float32(0.5 / (levels - 1))
    if (abs(low) > _FAR * span).any():
        start = low.copy()
        half += np.float32(0.5)
    if constant.any():
        # zero is black, anything else the middle level, so that dead channels are told
        # from others
        start[constant] = factor[constant] = 0
        half[constant] = np.where(low[constant] == 0, 0, (levels - 1) // 2 + 1)
    return Line(start, factor, half)


def _quantised(maps: Tensor | np.ndarray, line: Line, top: float) -> Bytes:
    """Levels of maps [N, ...], uint8 of their shape; `top` as in `loops.quantise`."""
    from featviz.drawing import loops  # numba takes a while to import

    if not isinstance(maps, np.ndarray) and maps.device.type != "cpu":
        return quantise_on_device(maps, line, top)
    rows = for_loops(np.asarray(maps, np.float32))
    count = len(rows)
    if len(line.start) < count:
        line = Line._make(numbers.repeat(count) for numbers in line)
    levels = np.empty(rows.shape, np.uint8)
    loops.quantise(rows.reshape(count, -1), *line, top, levels.reshape(count, -1))
    return levels


def quantise_on_device(maps: Tensor, line: Line, top: float) -> Bytes:
    """The levels of `loops.quantise`, made where the maps are, so that only bytes are
    sent back.

    Args:
        maps: float32 [N, ...].
        line: a number for each map, or one for all.
        top: as in `loops.quantise`.

    Returns:
        uint8 of the shape of `maps`.
    """
    shape = (-1, *[1] * (maps.ndim - 1))
    start, factor, half = (maps.new_tensor(x).reshape(shape) for x in line)
    levels = (maps - start).mul_(factor).add_(half)
    if top != _UNCLIPPED:
        levels.nan_to_num_(0.0).clamp_(0, top)
    return levels.byte().cpu().numpy()


def to_pixels(picture: Tensor) -> Bytes:
    """A picture [C, H, W] in 0..1 as pixels uint8 [H, W, C], rounded."""
    return (picture * 255 + 0.5).byte().permute(1, 2, 0).cpu().numpy()


def to_rgb(picture: Tensor) -> Bytes:
    """A picture [1, H, W] or [3, H, W] in 0..1 as pixels uint8 [H, W, 3], rounded."""
    return to_pixels(picture.expand(3, -1, -1))
