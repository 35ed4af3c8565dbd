"""From maps of floats to tiles of levels: the one quantiser. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from featviz.drawing import scan
from featviz.drawing.normalize import MODES, Scale
from featviz.records import Bytes, Floats

if TYPE_CHECKING:
    from torch import Tensor

FLAT = 2.0**-20
"""A map whose range is below this share of its largest value is constant but for rounding."""

_FAR = 16.0
"""Where zero lies further below a map than so many of its spans, half a level added to `low` would
be lost in rounding, and takes a pass of its own."""

_TINY = 1e-30
"""Stands for the span where two percentiles are equal: all above is bright, all else dark."""


@dataclass(frozen=True)
class ValueLimits:
    """Values drawn darkest and brightest, float32 [N] or [1]; which `mode` they came from."""

    low: Floats
    high: Floats
    mode: str

    @classmethod
    def fixed(cls, low: float, high: float, mode: str = "range") -> ValueLimits:
        """The same limits for all maps."""
        return cls(np.array([low], np.float32), np.array([high], np.float32), mode)

    @property
    def shared(self) -> tuple[float, float] | None:
        """The limits where all maps have the same."""
        return (float(self.low[0]), float(self.high[0])) if MODES[self.mode].shared else None

    def of_tiles(self, channels: list[int] | None, slices: int) -> ValueLimits:
        """The limits of each tile, from those of each channel.

        Args:
            channels: those that are drawn; None is all of them.
            slices: tiles of each channel.
        """
        if self.shared is not None or (channels is None and slices == 1):
            return self
        low, high = (v if channels is None else v[channels] for v in (self.low, self.high))
        return ValueLimits(np.repeat(low, slices), np.repeat(high, slices), self.mode)


@dataclass(frozen=True)
class _Values:
    """A layer's maps and their finite extremes, as `normalize.LayerValues`."""

    maps: Tensor
    lows: Floats
    highs: Floats

    @cached_property
    def low(self) -> float:
        return float(np.nanmin(self.lows))

    @cached_property
    def high(self) -> float:
        return float(np.nanmax(self.highs))

    def percentiles(self, ranks: tuple[float, ...]) -> tuple[float, float]:
        values = self.maps.cpu().numpy()
        low, high = np.percentile(values[np.isfinite(values)], ranks)
        return float(low), float(high)

    def magnitude(self, rank: float) -> float:
        values = abs(self.maps.cpu().numpy())
        values = values[np.isfinite(values) & (values > 0)]
        return float(np.percentile(values, rank)) if len(values) else 1.0


def limits(scale: Scale, maps: Tensor, low: Floats, high: Floats) -> ValueLimits:
    """The limits of each map; `low` and `high` [N] are the finite extremes of each (else NaN).

    Maps of one number each share the layer's scale, since by their own all would be alike.
    """
    if np.isnan(low).all():
        return ValueLimits.fixed(0.0, 0.0, "layer")
    scale = scale.for_layer if maps[0].numel() == 1 else scale
    shared = MODES[scale.mode].limits
    if shared is None:
        return ValueLimits(low, high, scale.mode)
    return ValueLimits.fixed(*shared(scale.numbers, _Values(maps, low, high)), scale.mode)


def is_flat(low: Floats, high: Floats) -> np.ndarray:
    """bool [N]: which maps are constant but for rounding; one without finite values is not."""
    flat: np.ndarray = high - low <= FLAT * np.maximum(abs(high), abs(low))
    return flat


def to_levels(
    maps: Tensor | np.ndarray, limits: ValueLimits, levels: int, nonfinite: int | None
) -> Bytes:
    """Turn float maps [N, ...] into levels 0..`levels`-1 of the same shape, rounded to the nearest.

    The arithmetic is torchvision's (`make_grid(normalize=True)`, then `save_image`) but for two
    kinds of maps. It draws all constant ones black, whatever their value; here zero is black and
    any other value the middle level, which no other map shows everywhere. It divides by at least
    1e-5, so that maps of tiny values come out dark; here they are drawn like all others. Values
    outside the limits are clipped.

    Args:
        nonfinite: the index drawn for NaN and infinite values; None where there are none.
    """
    low, high, clips = limits.low, limits.high, MODES[limits.mode].clips
    if nonfinite is not None:  # a map without any finite value has no limits
        low, high = np.nan_to_num(low), np.nan_to_num(high)
    flat = np.zeros(len(low), bool) if clips else is_flat(low, high)
    span = np.maximum(np.where(flat, 1, high - low), _TINY).astype(np.float32)
    far = bool((abs(low) > _FAR * span).any())
    half = 0 if far else span * np.float32(0.5 / (levels - 1))
    affine = Affine(
        (low - half).astype(np.float32),
        ((levels - 1) / span).astype(np.float32),
        0.5 if far else 0.0,
        levels - 0.5 if clips or nonfinite is not None else None,
    )
    tiles = quantise(maps, affine)
    if flat.any():
        middle = np.where(low == 0, 0, (levels - 1) // 2 + 1).astype(np.uint8)
        where = flat if len(flat) == len(tiles) else flat.repeat(len(tiles))
        tiles[where] = middle[flat].reshape(-1, *[1] * (tiles.ndim - 1))
    if nonfinite is not None:
        array = maps if isinstance(maps, np.ndarray) else maps.cpu().numpy()
        tiles[~np.isfinite(array)] = nonfinite
    return tiles


@dataclass(frozen=True)
class Affine:
    """level = (value - low) · factor + half, cut to a whole number."""

    low: Floats
    """[N] or [1]."""
    factor: Floats
    """[N] or [1]."""
    half: float
    """0.5, or 0 where `low` has it already."""
    top: float | None
    """Clip to 0..top; None where no value can lie outside."""


def quantise(maps: Tensor | np.ndarray, affine: Affine, on_device: bool | None = None) -> Bytes:
    """Apply it to maps [N, ...].

    Args:
        on_device: scale a tensor where it is, all at once, and send back only the bytes, as for a
            GPU; else by `scan`. None goes by the tensor's device.
    """
    if not isinstance(maps, np.ndarray) and (
        maps.device.type != "cpu" if on_device is None else on_device
    ):
        shape = (-1, *[1] * (maps.ndim - 1))
        below, times = (maps.new_tensor(v).reshape(shape) for v in (affine.low, affine.factor))
        values = (maps - below).mul_(times).add_(affine.half)
        if affine.top is not None:
            values.nan_to_num_(0.0).clamp_(0, affine.top)
        sent: Bytes = values.byte().cpu().numpy()
        return sent
    array = maps if isinstance(maps, np.ndarray) else maps.numpy()
    rows = array.reshape(len(array), -1)
    levels = scan.quantise(rows, affine.low, affine.factor, affine.half, affine.top)
    return levels.reshape(maps.shape)


def pixels(picture: Tensor) -> Bytes:
    """A picture [C, H, W] in 0..1 as pixels [H, W, C] in 0..255."""
    array: Bytes = (picture * 255 + 0.5).byte().permute(1, 2, 0).cpu().numpy()
    return array
