"""How far two tensors are apart, channel by channel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from featviz.diff.pairing import TensorPair
from featviz.diff.result import PIXELS, STATISTICS, TENSORS, Change, Finding
from featviz.diff.values import ImagePair, keeps, map_shape, slack_of
from featviz.records import STAT_COLUMNS, Floats
from featviz.rundir.schema import CaptureRow
from featviz.text import by

_COMPARED = 4
"""Columns of the statistics that are compared, from the first: min, max, mean, std. The count of
exact zeros is not, because rounding turns a zero into 1e-9."""
_NONFINITE = STAT_COLUMNS.index("nonfinite")

_BLOCK = 2**17
"""Values compared at a time: they stay in a core's cache."""


def measure(images: ImagePair, pair: TensorPair, tolerance: float) -> Finding:
    """Compare a tensor of an image: by the kept tensors, else by statistics and pixels.

    Raises:
        DamagedError: a file is missing or broken.
    """
    row = pair.base
    reason = _why_not(row, pair.new)
    if reason is not None:
        method, change = STATISTICS, no_change(row.maps, 1)
        differs = np.ones(row.maps, np.bool_)
    else:
        method, change = _change(images, pair)
        differs = change.differs(tolerance)
    return Finding(pair.image, pair.place, row.type, row.index, method, change, differs, reason)


def _why_not(base: CaptureRow, new: CaptureRow) -> str | None:
    """Why two tensors have no channels in common."""
    if base.shape != new.shape:
        return f"shape {by(base.shape)} in BASE, {by(new.shape)} in NEW"
    if (base.layout, base.maps) != (new.layout, new.maps):
        return f"layout {base.layout} in BASE, {new.layout} in NEW"
    return None


def _change(images: ImagePair, pair: TensorPair) -> tuple[str, Change]:
    """What two tensors were compared by, and how far they are apart."""
    base, new = images.stats(pair)
    if np.array_equal(base, new, equal_nan=True) and images.same_files(pair):
        method = TENSORS if keeps(pair) else PIXELS
        return method, no_change(len(base), math.prod(map_shape(pair.base)))
    scale = scale_of(base, new)
    if (kept := images.tensors(pair)) is not None:
        return TENSORS, compare(kept[0].data, kept[1].data, scale)
    change = compare_stats(base, new, scale)
    if (drawn := images.pixels(pair)) is None:
        return STATISTICS, change
    part = compare(drawn[0].data, drawn[1].data, scale, slack_of(drawn))
    return PIXELS, joined(change, part, drawn[0].ids)


def scale_of(*stats: Floats) -> float:
    """The largest finite magnitude among statistics [channels, 6] of several sides."""
    extremes = np.abs(np.concatenate([one[:, :2] for one in stats]))
    return float(np.max(extremes, initial=0.0, where=np.isfinite(extremes)))


def no_change(channels: int, size: int) -> Change:
    """The change between two equal tensors, with `size` values in a channel."""
    zeros, cosine = np.zeros(channels), np.full(channels, 1.0 if size > 1 else np.nan)
    return Change(zeros, zeros, cosine, np.zeros(channels, np.int64), np.ones((channels, 3)))


def compare(
    base: np.ndarray, new: np.ndarray, scale: float, slack: np.ndarray | None = None
) -> Change:
    """Compare values [channels, N].

    A difference is set against the value itself and `scale`, the layer's largest magnitude: like
    numpy.allclose with rtol = tolerance and atol = tolerance · scale. Rounding moves a value by a
    share of what was summed up for it, so that small values among large ones are not exact.
    NaN equals NaN, and an infinity itself.

    Args:
        slack: [channels]; differences up to it are none.
    """
    count = len(base)
    width, slack = base.shape[1], np.zeros(count) if slack is None else slack
    parts = [_compare(base[rows], new[rows], scale, slack[rows]) for rows in _blocks(count, width)]
    return Change(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def compare_stats(base: Floats, new: Floats, scale: float) -> Change:
    """Compare statistics [channels, 6], of which no cosine follows."""
    moments = compare(base[:, :_COMPARED], new[:, :_COMPARED], scale)
    unlike = np.abs(new[:, _NONFINITE] - base[:, _NONFINITE]).astype(np.int64)
    unknown = np.full(len(base), np.nan)
    unlike, products = np.maximum(moments.unlike, unlike), np.full((len(base), 3), np.nan)
    return Change(moments.absolute, moments.relative, unknown, unlike, products)


def joined(whole: Change, part: Change, channels: Sequence[int]) -> Change:
    """Join two changes of a tensor, where `part` is that of some channels of `whole`.

    In these channels the larger difference counts, and the cosine and the products of `part`.
    """
    at = list(channels)
    columns = {name: column.copy() for name, column in vars(whole).items()}
    for name in ("absolute", "relative", "unlike"):
        columns[name][at] = np.maximum(columns[name][at], getattr(part, name))
    columns["cosine"][at], columns["products"][at] = part.cosine, part.products
    return Change(**columns)


def signed(
    base: np.ndarray, new: np.ndarray, scale: float, slack: np.ndarray | None = None
) -> np.ndarray:
    """The relative difference of each value, as in `Change.relative`, with its sign.

    Returns:
        Float64 in the shape of the arguments, whose first axis is channels; -1..1, and NaN where
        one side is not finite and the other is something else.
    """
    base, new = base.astype(np.float64), new.astype(np.float64)
    difference, unlike = _differences(base, new, slack)
    ratio = _relative(difference, base, new, scale)
    ratio[unlike] = np.nan
    return ratio


def _compare(
    base: np.ndarray, new: np.ndarray, scale: float, slack: np.ndarray
) -> tuple[np.ndarray, ...]:
    base, new = base.astype(np.float64), new.astype(np.float64)
    difference, unlike = _differences(base, new, slack)
    relative = _relative(difference, base, new, scale)
    cosine, products = _cosine(base, new, scale)
    return abs(difference).max(1), abs(relative).max(1), cosine, unlike.sum(1), products


def _differences(
    base: np.ndarray, new: np.ndarray, slack: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """new - base beyond the slack where both are finite, else 0; and which values are NaN or
    infinite on one side and something else on the other."""
    finite = np.isfinite(base) & np.isfinite(new)
    if finite.all():
        difference, unlike = new - base, np.zeros(base.shape, np.bool_)
    else:
        difference = np.subtract(new, base, out=np.zeros_like(base), where=finite)
        unlike = ~finite & ~((base == new) | (np.isnan(base) & np.isnan(new)))
    if slack is not None and slack.any():
        beyond = abs(difference) - slack.reshape(-1, *[1] * (base.ndim - 1))
        difference = np.sign(difference) * np.maximum(beyond, 0)
    return difference, unlike


def _relative(
    difference: np.ndarray, base: np.ndarray, new: np.ndarray, scale: float
) -> np.ndarray:
    """The difference of each value as a share of the larger value and the scale; 0 where there is
    none."""
    size = np.fmax(abs(base), abs(new)) + scale
    ratio: np.ndarray = np.divide(difference, size, out=np.zeros_like(base), where=difference != 0)
    return ratio


def _cosine(base: np.ndarray, new: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The cosine of each pair of rows, and their products in units of `scale`; the largest value of
    each row is made 1 first, so that no square overflows."""
    finite = np.isfinite(base) & np.isfinite(new)
    (base, one), (new, other) = (_unit(np.where(finite, rows, 0.0)) for rows in (base, new))
    dot = np.einsum("ij,ij->i", base, new)
    lengths = [np.linalg.norm(rows, axis=1) for rows in (base, new)]
    norms = lengths[0] * lengths[1]
    cosine = np.zeros(len(base))
    cosine[~base.any(1) & ~new.any(1)] = 1.0
    np.divide(dot, norms, out=cosine, where=norms > 0)
    if base.shape[1] == 1:
        cosine[:] = np.nan
    one, other = one / (scale or 1.0), other / (scale or 1.0)
    products = (dot * one * other, (lengths[0] * one) ** 2, (lengths[1] * other) ** 2)
    return cosine.clip(-1.0, 1.0), np.stack(products, axis=1)


def _unit(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose largest magnitude is 1, and the magnitudes by which they were divided."""
    largest = np.abs(rows).max(1, keepdims=True)
    factor = np.where(largest > 0, largest, 1.0)
    return rows / factor, factor[:, 0]


def _blocks(count: int, width: int) -> Iterator[slice]:
    step = max(1, _BLOCK // max(1, width))
    return (slice(start, start + step) for start in range(0, count, step))
