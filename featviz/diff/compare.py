"""How far two arrays are apart, channel by channel.

The relative difference is a share of the larger value and the layer's largest magnitude
together, since small values among large ones are not exact (threads and libraries move
them):

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
    """-1..1; 1 where both are zero; NaN for a single number, or where only statistics
    are known."""
    unlike: np.ndarray
    """How many values are NaN or infinite in one tensor, and something else in the
    other."""
    products: np.ndarray
    """[channels, 4]: base · new, base · base, new · new, and (new - base) · (new - base).
    Values are divided by the layer's scale before, and count as 0 where one of the two is
    not finite. NaN where only statistics are known."""

    @property
    def layer_cosine(self) -> float:
        """The cosine over all channels whose products are known; NaN where none are."""
        products = self._layer_products
        return math.nan if products is None else float(_cosine(products)[0])

    @property
    def layer_sqnr(self) -> float:
        """Signal to quantization noise in dB over all channels whose products are known:
        10·log10 of the power of base over that of the difference. Infinite where nothing
        differs, minus infinite where base is zero, NaN where no products are known."""
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
        """The products [1, 4], added over the channels; None where none are known."""
        # of a picture only the drawn channels are known
        measured = self.products[~np.isnan(self.products).any(1)]
        return measured.sum(0, keepdims=True) if len(measured) else None

    def differs(self, tolerance: float) -> np.ndarray:
        """Which channels have a relative difference above the tolerance, or a value that
        is finite in one tensor only; bool [channels]."""
        return np.asarray((self.relative > tolerance) | (self.unlike > 0))


def worst_first(
    relative: np.ndarray, unlike: np.ndarray, among: np.ndarray
) -> list[int]:
    """Some channels, the most changed first: by the number of unlike values, then by the
    largest relative difference.

    Args:
        relative: [channels], 0..1.
        unlike: [channels], `Change.unlike`.
        among: bool [channels], the channels to sort; the others are left out.
    """
    order = np.lexsort((-relative, -unlike))
    return [int(channel) for channel in order if among[channel]]


def scale_of(*stats: Floats) -> float:
    """The largest finite magnitude in the first two columns of some arrays; 0 where there
    is none. Of statistics [channels, 6] these are the least and the greatest value.
    """
    extremes = np.abs(np.concatenate([table[:, :2] for table in stats]))
    return float(np.max(extremes, initial=0.0, where=np.isfinite(extremes)))


def no_change(channels: int, size: int) -> Change:
    """The change between two equal tensors.

    Args:
        channels: how many they have.
        size: values of a channel.
    """
    # the products of any vector and itself will do: those of ones, without noise
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
        scale: the layer's largest magnitude, 0 if all is zero.
        slack: [channels], how much of a difference is taken off it, since values are not
            known more exactly; None for nothing.
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
    """The change of some channels; arguments as of `compare`.

    Args:
        old: values of base, float64 [C, N].
        now: values of new, float64 [C, N].
    """
    differences = _differences(old, now, scale, slack)
    finite = np.isfinite(old) & np.isfinite(now)
    # shares of the layer's largest magnitude, whose squares a double can hold
    old = np.where(finite, old, 0.0) / (scale or 1.0)
    now = np.where(finite, now, 0.0) / (scale or 1.0)
    # the noise by itself: as base² - 2·base·new + new² it would drown in rounding
    noise = now - old
    pairs = ((old, now), (old, old), (now, now), (noise, noise))
    products = np.stack([np.einsum("ij,ij->i", *pair) for pair in pairs], axis=1)
    # the cosine of two single numbers says no more than their signs
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
    """Compare two tensors by their statistics, from which no cosine follows.

    Args:
        base: [channels, 6], in the order of `records.STAT_COLUMNS`.
        new: the same, of as many channels.
        scale: the layer's largest magnitude.
    """
    # min, max, mean and std. Not the share of zeros: it changes where rounding makes 1e-9
    # of a zero, which is no difference.
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
    """The signed relative difference of each value; NaN where only one value is finite.

    Args:
        base: [channels, N].
        new: of the same shape; where it is larger, the result is positive.
        scale: the layer's largest magnitude.
        slack: [channels], as of `compare`.

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
    """new - base, brought towards 0 by the slack; 0 where one is not finite."""
    relative: np.ndarray
    """`difference` as a share of the larger magnitude and the scale together, -1..1."""
    unlike: np.ndarray
    """Whether only one is finite, or neither is and they differ (inf and NaN)."""


def _differences(
    base: np.ndarray, new: np.ndarray, scale: float, slack: np.ndarray
) -> _Differences:
    """Compare values one by one; arguments as of `signed`, in float64."""
    # the usual case by itself: masked subtraction takes longer
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
    # only where something differs: else 0 / 0 in a layer of zeros
    relative = np.divide(
        difference, divisor, out=np.zeros_like(base), where=difference != 0
    )
    return _Differences(difference, relative, unlike)


def _cosine(products: np.ndarray) -> np.ndarray:
    """The cosine similarity -1..1 of each row of `Change.products`; 1 where both vectors
    are zero, 0 where one of them is."""
    base = products[:, _BASE]
    new = products[:, _NEW]
    # two roots, since the product of two squares may be beyond what a double holds
    norms = np.sqrt(base) * np.sqrt(new)
    dot = products[:, _DOT]
    cosine = np.divide(dot, norms, out=np.zeros_like(dot), where=norms > 0)
    # Exactly 1 of two equal vectors, also of zeros. The quotient may be less, since
    # sqrt(8) * sqrt(8) is 8.000000000000002, and a gate `cosine<1` would fail.
    is_equal = (dot == base) & (dot == new)
    return np.asarray(np.where(is_equal, 1.0, cosine.clip(-1.0, 1.0)))
