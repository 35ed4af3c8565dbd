"""Two sets of numbers side by side: how far apart, channel by channel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from featviz.records import STAT_COLUMNS, Floats

_COMPARED = 4
"""Columns of the statistics that are compared: min, max, mean, std. The count of exact zeros is
not: rounding turns a zero into 1e-9."""
_NONFINITE = STAT_COLUMNS.index("nonfinite")

_BLOCK = 2**17
"""Values looked at a time: they stay in a core's cache."""


@dataclass(frozen=True)
class Change:
    """How far apart two tensors are, in each channel; all arrays are [channels]."""

    absolute: np.ndarray
    """Largest absolute difference where both values are finite."""
    relative: np.ndarray
    """Largest |new - base| / (max(|new|, |base|) + scale), 0..1: see `compare`."""
    cosine: np.ndarray
    """Cosine similarity over the values that are finite on both sides, -1..1; 1 where both are
    zero; NaN where it is not known, or where a channel is a single number."""
    unlike: np.ndarray
    """Values that are NaN or infinite on one side, and something else on the other."""
    products: np.ndarray
    """[channels, 3]: base · new, base · base and new · new over the values that are finite on both
    sides, in one unit for all channels; NaN where they are not known."""

    @property
    def layer_cosine(self) -> float:
        """Cosine similarity over all channels together, whatever a channel by itself has: one that
        is zero on one side alone says little of a layer. 1 where both sides are zero, NaN where it
        is not known."""
        known = self.products[~np.isnan(self.products).any(1)]
        if not len(known):
            return math.nan
        dot, base, new = map(float, known.sum(0))
        if base == 0 or new == 0:
            return 1.0 if base == new else 0.0
        return min(1.0, max(-1.0, dot / (math.sqrt(base) * math.sqrt(new))))

    def differs(self, tolerance: float) -> np.ndarray:
        """Channels, bool, with a value beyond the tolerance, or one that is finite on one side."""
        differing: np.ndarray = (self.relative > tolerance) | (self.unlike > 0)
        return differing

    def worst_first(self, among: np.ndarray) -> list[int]:
        """Channels of a mask, the most changed first."""
        order = np.lexsort((-self.relative, -self.unlike))
        return [int(i) for i in order if among[i]]


def scale_of(*stats: Floats) -> float:
    """The largest finite magnitude among statistics [channels, 6] of several sides."""
    extremes = np.abs(np.concatenate([one[:, :2] for one in stats]))
    return float(np.max(extremes, initial=0.0, where=np.isfinite(extremes)))


def no_change(channels: int, values: int) -> Change:
    """Of two equal tensors with so many values in a channel."""
    zeros, cosine = np.zeros(channels), np.full(channels, 1.0 if values > 1 else np.nan)
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
    """Compare statistics [channels, 6]; the cosine is not known."""
    found = compare(base[:, :_COMPARED], new[:, :_COMPARED], scale)
    unlike = np.abs(new[:, _NONFINITE] - base[:, _NONFINITE]).astype(np.int64)
    unknown = np.full(len(base), np.nan)
    unlike, products = np.maximum(found.unlike, unlike), np.full((len(base), 3), np.nan)
    return Change(found.absolute, found.relative, unknown, unlike, products)


def joined(whole: Change, part: Change, channels: Sequence[int]) -> Change:
    """Both findings: `part` is of these channels of `whole`; the larger difference counts, and the
    cosine and the products of `part`."""
    at = list(channels)
    columns = {name: column.copy() for name, column in vars(whole).items()}
    for name in ("absolute", "relative", "unlike"):
        columns[name][at] = np.maximum(columns[name][at], getattr(part, name))
    columns["cosine"][at], columns["products"][at] = part.cosine, part.products
    return Change(**columns)


def signed(
    base: np.ndarray, new: np.ndarray, scale: float, slack: np.ndarray | None = None
) -> np.ndarray:
    """`Change.relative` of each value, with its sign; NaN where one side is not finite and the
    other is something else. Float64, the shape of the arguments, whose first axis is channels."""
    base, new = base.astype(np.float64), new.astype(np.float64)
    difference, unlike = _differences(base, new)
    if slack is not None:
        beyond = np.abs(difference) - slack.reshape(-1, *[1] * (base.ndim - 1))
        difference = np.sign(difference) * np.maximum(beyond, 0)
    size = np.fmax(np.abs(base), np.abs(new)) + scale
    ratio: np.ndarray = np.zeros_like(base)
    np.divide(difference, size, out=ratio, where=difference != 0)
    ratio[unlike] = np.nan
    return ratio


def _compare(
    base: np.ndarray, new: np.ndarray, scale: float, slack: np.ndarray
) -> tuple[np.ndarray, ...]:
    base, new = base.astype(np.float64), new.astype(np.float64)
    difference, unlike = _differences(base, new)
    absolute = np.maximum(np.abs(difference).max(1) - slack, 0)
    relative = np.nan_to_num(np.abs(signed(base, new, scale, slack))).max(1)
    cosine, products = _cosine(base, new, scale)
    return absolute, relative, cosine, unlike.sum(1), products


def _differences(base: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """new - base where both are finite, else 0; and where just one is, or two infinities differ."""
    finite = np.isfinite(base) & np.isfinite(new)
    if finite.all():
        return new - base, np.zeros(base.shape, np.bool_)
    difference = np.subtract(new, base, out=np.zeros_like(base), where=finite)
    return difference, ~finite & ~((base == new) | (np.isnan(base) & np.isnan(new)))


def _cosine(base: np.ndarray, new: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Of rows, and their products in units of `scale`; the largest values of rows are made 1 first,
    so that no square overflows."""
    finite = np.isfinite(base) & np.isfinite(new)
    (base, one), (new, other) = (_unit(np.where(finite, values, 0.0)) for values in (base, new))
    dot = np.einsum("ij,ij->i", base, new)
    lengths = [np.linalg.norm(values, axis=1) for values in (base, new)]
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
    """Rows whose largest magnitude is 1, and what they were divided by."""
    largest = np.abs(rows).max(1, keepdims=True)
    factor = np.where(largest > 0, largest, 1.0)
    return rows / factor, factor[:, 0]


def _blocks(count: int, width: int) -> Iterator[slice]:
    step = max(1, _BLOCK // max(1, width))
    return (slice(start, start + step) for start in range(0, count, step))
