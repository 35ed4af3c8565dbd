"""From maps of floats to numbers and levels: statistics of channels, limits, the one
quantiser. Compiled loops treat values on a CPU; torch is imported only for values on
other devices."""

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
"""A map whose range is below this share of its largest absolute value counts as constant:
the rest is rounding."""

_FAR = 16.0
"""If `low` lies further from zero than this many spans of a map, half a level is added at
the end (`Line.half`): taken from `low`, it would be lost in rounding."""

_TINY = 1e-30
"""The reciprocal of a smaller span may overflow. If limits are equal, the span is set to
this: values above them become bright, all others dark."""
_LARGER = np.float32(2.0**64)
"""The factor by which maps with a tiny span are multiplied: a power of two, which changes
no digit."""
_UNCLIPPED = -1.0
"""Stands for the highest level if all values are known to fit."""


def for_loops(array: np.ndarray) -> np.ndarray:
    """An array as compiled loops take it: in C order, aligned, and writable. A copy, if
    the array is not so."""
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
        low, high: limits for `outside`; NaN is no limit.
        outside: int64 [N], which is filled: how many values of each map are at `low` or
            below, or at `high` or above. None if this is not needed.

    Returns:
        float32 [N, 6] in the order of `records.STAT_COLUMNS`. The standard deviation is
        the population's. Min, max, mean and deviation of a map without a finite value are
        NaN.
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
    # the loop marks rows that have NaN or need float64: numpy does these
    for n in (stats[:, STD] < 0).nonzero()[0]:
        stats[n, :ZEROS] = _exact_moments(rows[n])
    return stats


def _exact_moments(row: Floats) -> np.ndarray:
    """Min, max, mean and standard deviation of a row's finite values, float64 [4]; all NaN
    if it has no finite value."""
    finite = row[np.isfinite(row)].astype(np.float64)
    if not len(finite):
        return np.full(ZEROS, math.nan)
    return np.array([finite.min(), finite.max(), finite.mean(), finite.std()])


def statistics_on_device(rows: Tensor) -> Floats:
    """The same statistics as `statistics`, computed on the device of the values: only six
    numbers for each map are sent back.

    Args:
        rows: float32 [N, W], on any device.

    Returns:
        float32 [N, 6].
    """
    import torch

    finite = torch.isfinite(rows)
    count = finite.sum(1)
    # min and max of no value would be infinite: NaN instead
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

    Padding puts zeros around an image, and convolutions respond to that edge, whatever
    the image shows. With the border, a flat map with a bright frame would count as one
    that varies.

    Args:
        maps: float32 [N, ..., H, W].
        border: pixels that are left out on each side; at most a quarter of the height or
            the width is left out.
    """
    from featviz.drawing import loops  # numba takes a while to import

    height, width = maps.shape[-2:]
    border = min(border, min(height, width) // 4)
    if maps.device.type != "cpu":
        return inner_statistics(maps, border)[:, STD]
    rows = maps.flatten(1).contiguous().numpy()
    deviations = np.empty(len(rows), np.float32)
    loops.inner_deviations(rows, width, height, border, deviations)
    # the loop marks rows that have NaN or need float64: numpy does these
    for n in (deviations < 0).nonzero()[0]:
        deviations[n] = inner_statistics(maps[n : n + 1], border)[0, STD]
    return deviations


def inner_statistics(maps: Tensor, border: int) -> Floats:
    """The `statistics` of maps [N, ..., H, W] without their border, float32 [N, 6]. See
    `inner_deviations` for `border`."""
    height, width = maps.shape[-2:]
    border = min(border, min(height, width) // 4)
    inner = maps[..., border : height - border, border : width - border]
    return statistics(inner)


def widest_type(tensor: Tensor) -> dtype:
    """The widest float type of a tensor's device, in which sums lose the fewest digits:
    float64, or float32 on Apple's devices (MPS)."""
    import torch

    return torch.float32 if tensor.device.type == "mps" else torch.float64


def overall(stats: Floats, values: int) -> dict[str, float | int | None]:
    """The statistics of all maps together, from the statistics of each map.

    Args:
        stats: float32 [N, 6].
        values: how many numbers each map has.

    Returns:
        `min`, `max`, `mean`, `std`, `zero_fraction` and `nonfinite`, by these names. The
        first four are None if no value is finite.
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
    # The variance of all values is the mean of the maps' variances plus the variance of
    # their means (the law of total variance).
    variance = float(shares @ (stds * stds + (means - mean) ** 2))
    return {
        "min": float(lows.min()),
        "max": float(highs.max()),
        "mean": mean,
        "std": math.sqrt(variance),
        **counts,
    }


def is_constant(stats: Floats) -> np.ndarray:
    """bool [N]: which maps have one value everywhere, up to rounding. `stats` are their
    statistics [N, 6]."""
    constant = _are_equal(stats[:, MIN], stats[:, MAX])
    constant &= stats[:, NONFINITE] == 0
    return constant


def _are_equal(low: Floats, high: Floats) -> np.ndarray:
    """bool [N]: which pairs of limits are equal up to rounding."""
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
    """Three principal components of vectors.

    The directions are eigenvectors of the covariance [C, C]. If there are fewer vectors
    than C, they are computed from the smaller matrix [N, N], which has the same
    eigenvalues. The largest number of each direction is positive, so that the same
    vectors give the same colours on every machine.

    Args:
        vectors: finite numbers [N, C]; N may be 0.

    Returns:
        float32 [N, 3], in standard deviations from the mean. A component along which the
        vectors do not vary is 0.
    """
    components = np.zeros((len(vectors), COMPONENTS), np.float32)
    if not len(vectors):
        return components
    # in float32 the smaller components would be lost
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    # 2048 channels of 7×7 pixels have at most 49 eigenvalues that are not zero
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
    """The values drawn darkest, float32 [N], or [1] for all maps."""
    high: Floats
    """The values drawn brightest, in the same shape."""
    mode: str
    """The name in `normalize.MODES` of the mode that gave these limits."""
    shared: tuple[float, float] | None = None
    """The limits of all maps; None if each map has its own."""
    clips: bool = False
    """Whether values may lie outside the limits, even if the mode clips nothing."""

    @classmethod
    def fixed(cls, low: float, high: float, mode: str = "range") -> ValueLimits:
        """Limits that are the same for all maps. `low` is drawn darkest, `high` brightest;
        `mode` is a name of `normalize.MODES`."""
        lows = np.array([low], np.float32)
        highs = np.array([high], np.float32)
        return cls(lows, highs, mode, (float(lows[0]), float(highs[0])))

    def of_tiles(self, channels: Sequence[int] | None, slices: int) -> ValueLimits:
        """The limits of each tile, from the limits of each channel.

        Args:
            channels: the channels that are drawn; None for all.
            slices: how many tiles each channel has.
        """
        if len(self.low) == 1 or (channels is None and slices == 1):
            return self
        drawn = slice(None) if channels is None else channels
        low = self.low[drawn].repeat(slices)
        return replace(self, low=low, high=self.high[drawn].repeat(slices))


def limits(
    scale: Scale, maps: Tensor, stats: Floats, together: bool = False
) -> ValueLimits:
    """The limits of each map.

    Args:
        scale: the mode and its numbers.
        maps: float32 [N, ...], from which the percentiles are computed.
        stats: float32 [N, 6], whose extremes are the limits in other modes.
        together: whether the maps share limits in the mode `map`, too. Maps of one number
            always do.

    Returns:
        The limits. If maps share them in the mode `map`, they are those of the mode
        `layer`; if no map has a finite value, they are 0 and 0.
    """
    low = stats[:, MIN]
    high = stats[:, MAX]
    if np.isnan(low).all():
        return ValueLimits.fixed(0.0, 0.0, "layer")
    mode, numbers = scale
    # With limits of its own, a map of one number would be black, whatever the number is.
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
    """A percentile of the absolute values of maps that are finite and not zero; 1 if there
    are no such values.

    With the zeros of a sparse gradient, most of its other values would lie beyond the
    percentile."""
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

    The arithmetic is that of torchvision's `make_grid(normalize=True)` and `save_image`,
    with one exception: a constant map is black only if it is zero, else it gets the
    middle level. A level is

        floor((value - low) · factor + 1/2),  factor = (levels - 1) / (high - low),

    or the same up to rounding, with the half moved into `start`:

        floor((value - start) · factor),      start = low - 1 / (2 · factor)

    The second form is used unless `low` is far from zero: there, half a level would be
    lost in the rounding of `start`.

    Args:
        maps: float32 [N, ...], on any device.
        limits: limits of each map, or one pair for all.
        levels: how many levels there are; 0 is the darkest.
        nonfinite: the level of NaN and infinite values; None if there are no such values.

    Returns:
        uint8 of the shape of `maps`.
    """
    low = limits.low
    high = limits.high
    if nonfinite is not None:  # the limits of a map without a finite value are NaN
        low = np.nan_to_num(low)
        high = np.nan_to_num(high)
    may_clip = MODES[limits.mode].clips
    # if values may lie outside the limits, a map with equal limits may still vary
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
    # If the limits are the maps' extremes, nothing needs clipping: this saves two
    # comparisons for each value.
    may_clip = may_clip or limits.clips or nonfinite is not None
    top = levels - 0.5 if may_clip else _UNCLIPPED
    tiles = _quantise(values, line, top)
    # at the end, since the loop turns NaN into level 0
    if nonfinite is not None:
        tiles[~np.isfinite(_as_array(maps))] = nonfinite
    return tiles


def _as_array(maps: Tensor | np.ndarray) -> np.ndarray:
    """Maps as an array in the CPU's memory."""
    return maps if isinstance(maps, np.ndarray) else maps.cpu().numpy()


class Line(NamedTuple):
    """How values become levels: (value - start) · factor + half, cut to a whole number.
    Each field is float32 [N], a number for each map, or [1] for all maps."""

    start: Floats
    """The value that becomes `half`."""
    factor: Floats
    """Levels for each unit of the values."""
    half: Floats
    """0.5 to round to the nearest level, or 0 if this half is in `start` already. For a
    constant map, its level."""


def _line(low: Floats, span: Floats, constant: np.ndarray, levels: int) -> Line:
    """The line from a map's values to levels.

    Args:
        low: the value of level 0, float32 [N] or [1].
        span: the value of the last level minus `low`, above 0.
        constant: bool of the same shape: which maps have one value everywhere.
        levels: how many levels there are.
    """
    factor = np.float32(levels - 1) / span
    half = np.zeros_like(span)
    start = low - span * np.float32(0.5 / (levels - 1))
    if (abs(low) > _FAR * span).any():
        start = low.copy()
        half += np.float32(0.5)
    if constant.any():
        # zero is black, any other constant the middle level: so dead channels can be
        # told from others
        start[constant] = factor[constant] = 0
        half[constant] = np.where(low[constant] == 0, 0, (levels - 1) // 2 + 1)
    return Line(start, factor, half)


def _quantise(maps: Tensor | np.ndarray, line: Line, top: float) -> Bytes:
    """The levels of maps [N, ...], uint8 in their shape. See `loops.quantise` for `top`."""
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
    """The same levels as `loops.quantise`, computed on the maps' device: only bytes are
    sent back.

    Args:
        maps: float32 [N, ...].
        line: the numbers of each map, or of all maps.
        top: see `loops.quantise`.

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
