"""How far two arrays are apart, channel by channel.

The relative difference is the difference as a share of a sum: of the larger value, and of
`scale`, which is the layer's largest magnitude. Without `scale`, small values in a layer of
large ones would seem to differ, since another thread count or library changes them a little:

    |new - base| / (max(|new|, |base|) + scale)        0..1

Two more measures, of a whole tensor, tell how good a quantized model is:

    cosine    base · new / (|base| |new|)               -1..1
    SQNR      10·log10(|base|² / |new - base|²)         dB; 20 dB: noise a tenth of the signal
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from featviz.records import Floats

# values compared at a time: they stay in a core's cache
_BLOCK = 2**17
# the columns of `Change.products`
_DOT, _BASE, _NEW, _NOISE = range(4)


class Change(NamedTuple):
    """How far apart two tensors are, in each channel; all arrays are [channels]."""

    absolute: np.ndarray
    """The largest difference of finite values."""
    relative: np.ndarray
    """The largest |new - base| / (max(|new|, |base|) + scale), 0..1."""
    cosine: np.ndarray
    """-1..1; 1 if both are zero; NaN for a single number, or if only statistics are
    known."""
    unlike: np.ndarray
    """How many values are NaN or infinite in one tensor, and something else in the
    other."""
    products: np.ndarray
    """[channels, 4]: base · new, base · base, new · new, and (new - base) · (new - base).
    First, all values are divided by the layer's scale, and pairs of values that are not
    both finite are set to 0. NaN if only statistics are known."""

    @property
    def layer_cosine(self) -> float:
        """The cosine over all channels whose products are known; NaN if none are."""
        products = self._layer_products
        return math.nan if products is None else float(_cosine(products)[0])

    @property
    def layer_sqnr(self) -> float:
        """Signal to quantization noise in dB over all channels whose products are known:
        10·log10 of the power of base over the power of the difference. Infinite if nothing
        differs, minus infinite if base is zero, NaN if no products are known."""
        products = self._layer_products
        if products is None:
            return math.nan
        # the scale of the products cancels out
        signal = products[0, _BASE]
        noise = products[0, _NOISE]
        if noise == 0:
            return math.inf
        return 10 * math.log10(signal / noise) if signal > 0 else -math.inf

    @property
    def _layer_products(self) -> np.ndarray | None:
        """The sums of the products over the channels, [1, 4]; None if none are known."""
        # a picture shows only the drawn channels
        measured = self.products[~np.isnan(self.products).any(1)]
        return measured.sum(0, keepdims=True) if len(measured) else None

    def differs(self, tolerance: float) -> np.ndarray:
        """Which channels have a relative difference above the tolerance, or unlike values;
        bool [channels]."""
        return np.asarray((self.relative > tolerance) | (self.unlike > 0))


def worst_first(
    relative: np.ndarray, unlike: np.ndarray, among: np.ndarray
) -> list[int]:
    """Sort channels by their change, the most changed first: first by the number of unlike
    values, then by the largest relative difference.

    Args:
        relative: `Change.relative`, [channels].
        unlike: `Change.unlike`, [channels].
        among: bool [channels], the channels to sort; the others are left out.
    """
    order = np.lexsort((-relative, -unlike))
    return [int(channel) for channel in order if among[channel]]


def scale_of(*stats: Floats) -> float:
    """The largest finite magnitude of all values of some tensors; 0 if none is finite.

    Args:
        stats: statistics [channels, 6], whose first two columns are the least and the
            greatest value; or values [N, 1].
    """
    extremes = np.abs(np.concatenate([table[:, :2] for table in stats]))
    return float(np.max(extremes, initial=0.0, where=np.isfinite(extremes)))


def no_change(channels: int, size: int) -> Change:
    """The change between two equal tensors.

    Args:
        channels: how many channels they have.
        size: how many values a channel has.
    """
    # as if all values were one: the products of any vector with itself would do
    zeros = np.zeros(channels)
    products = np.ones((channels, 4))
    products[:, _NOISE] = 0
    return Change(
        absolute=zeros,
        relative=zeros,
        cosine=np.full(channels, 1.0 if size > 1 else np.nan),
        unlike=np.zeros(channels, np.int64),
        products=products,
    )


def compare(
    base: np.ndarray, new: np.ndarray, scale: float, slack: np.ndarray | None = None
) -> Change:
    """Compare two tensors. NaN equals NaN, and an infinity equals itself.

    Args:
        base: values [channels, N] of any number type; N is not 0.
        new: of the same shape.
        scale: the layer's largest magnitude; 0 if all values are zero.
        slack: [channels], by how much a difference may be wrong, since values of a picture
            are rounded. It is subtracted from each difference. None for 0.
    """
    if slack is None:
        slack = np.zeros(len(base))
    blocks = []
    step = max(1, _BLOCK // max(1, base.shape[1]))
    for start in range(0, len(base), step):
        rows = slice(start, start + step)
        # the sums of products of a large channel would lose digits in float32
        old = base[rows].astype(np.float64)
        now = new[rows].astype(np.float64)
        blocks.append(_compare_block(old, now, scale, slack[rows]))
    # field by field
    return Change(*map(np.concatenate, zip(*blocks, strict=True)))


def _compare_block(
    old: np.ndarray, now: np.ndarray, scale: float, slack: np.ndarray
) -> Change:
    """The change of some channels, with `scale` and `slack` as in `compare`.

    Args:
        old: values of base, float64 [C, N].
        now: values of new, float64 [C, N].
    """
    differences = _differences(old, now, scale, slack)
    finite = np.isfinite(old) & np.isfinite(now)
    # as shares of the layer's largest magnitude, so that squares do not overflow
    old = np.where(finite, old, 0.0) / (scale or 1.0)
    now = np.where(finite, now, 0.0) / (scale or 1.0)
    # not as base² - 2·base·new + new², where rounding errors would hide a small noise
    noise = now - old
    pairs = ((old, now), (old, old), (now, now), (noise, noise))
    products = np.stack([np.einsum("ij,ij->i", *pair) for pair in pairs], axis=1)
    # no cosine of single numbers: it would tell only whether their signs are equal
    cosine = np.full(len(old), np.nan)
    if old.shape[1] > 1:
        cosine = _cosine(products)
    return Change(
        absolute=abs(differences.difference).max(1),
        relative=abs(differences.relative).max(1),
        cosine=cosine,
        unlike=differences.unlike.sum(1),
        products=products,
    )


def compare_stats(base: Floats, new: Floats, scale: float) -> Change:
    """Compare two tensors by their statistics. The cosine and the products of the result
    are NaN.

    Args:
        base: [channels, 6], in the order of `records.STAT_COLUMNS`.
        new: of the same shape.
        scale: the layer's largest magnitude.
    """
    # min, max, mean and std. Not the share of zeros, which changes if rounding turns a zero
    # into 1e-9.
    moments = compare(base[:, :4], new[:, :4], scale)
    nonfinite = abs(new[:, 5] - base[:, 5]).astype(np.int64)
    return Change(
        absolute=moments.absolute,
        relative=moments.relative,
        cosine=np.full(len(base), np.nan),
        unlike=np.maximum(moments.unlike, nonfinite),
        products=np.full((len(base), 4), np.nan),
    )


def signed(
    base: np.ndarray, new: np.ndarray, scale: float, slack: np.ndarray
) -> np.ndarray:
    """The signed relative difference of each value; NaN for unlike values (see `Change`).

    Args:
        base: [channels, N].
        new: of the same shape; where a value is larger than in `base`, the result is
            positive.
        scale: the layer's largest magnitude.
        slack: [channels], as in `compare`.

    Returns:
        float64 [channels, N], -1..1.
    """
    differences = _differences(
        base.astype(np.float64), new.astype(np.float64), scale, slack
    )
    relative = differences.relative
    relative[differences.unlike] = np.nan
    return relative


class _Differences(NamedTuple):
    """How each value differs, [channels, N]."""

    difference: np.ndarray
    """new - base, with the slack taken off its magnitude; 0 if one of both is not
    finite."""
    relative: np.ndarray
    """`difference` as a share of the larger magnitude plus the scale, -1..1."""
    unlike: np.ndarray
    """Whether only one is finite, or neither is and they differ (inf and NaN)."""


def _differences(
    base: np.ndarray, new: np.ndarray, scale: float, slack: np.ndarray
) -> _Differences:
    """Compare values one by one; the arguments are those of `signed`, in float64."""
    # usually all values are finite: plain subtraction is faster than a masked one
    finite = np.isfinite(base) & np.isfinite(new)
    if finite.all():
        difference = new - base
        unlike = np.zeros(base.shape, np.bool_)
    else:
        difference = np.subtract(new, base, out=np.zeros_like(base), where=finite)
        unlike = ~finite & ~((base == new) | (np.isnan(base) & np.isnan(new)))
    if slack.any():
        beyond = abs(difference) - slack[:, None]
        difference = np.sign(difference) * np.maximum(beyond, 0)
    divisor = np.fmax(abs(base), abs(new)) + scale
    # only where something differs: a layer of zeros would give 0 / 0
    relative = np.divide(
        difference, divisor, out=np.zeros_like(base), where=difference != 0
    )
    return _Differences(difference, relative, unlike)


def _cosine(products: np.ndarray) -> np.ndarray:
    """The cosine similarity -1..1 of each row of `Change.products`; 1 if both vectors are
    zero, 0 if only one of them is."""
    base = products[:, _BASE]
    new = products[:, _NEW]
    # two roots, since the product of the two squares may overflow
    norms = np.sqrt(base) * np.sqrt(new)
    dot = products[:, _DOT]
    cosine = np.divide(dot, norms, out=np.zeros_like(dot), where=norms > 0)
    # Two equal vectors, also two of zeros, get exactly 1. The quotient may be less, since
    # sqrt(8) * sqrt(8) is 8.000000000000002, and then a gate `cosine<1` would fail.
    is_equal = (dot == base) & (dot == new)
    return np.asarray(np.where(is_equal, 1.0, cosine.clip(-1.0, 1.0)))
