"""From maps of floats to tiles of grey levels: what is darkest, what is brightest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from featviz.errors import UsageError
from featviz.records import Bytes, Floats

FLAT = 2.0**-20
"""A map whose range is below this share of its largest value is constant but for rounding."""

_FAR = 16.0
"""Where zero lies further below a map than so many of its spans, half a level added to `low` would
be lost in rounding, and takes a pass of its own."""

_BLOCK = 65_536
"""Floats that are scaled at a time on a CPU: 256 KiB."""

_TINY = 1e-30
"""Stands for the span where two percentiles are equal: all above is bright, all else dark."""


@dataclass(frozen=True)
class Scale:
    """A scale mode and its numbers: `range` with (0, 6), `percentile` with (1, 99)."""

    mode: str
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class ValueLimits:
    """Values drawn darkest and brightest, float32 [N] or [1]; which `mode` they came from."""

    low: Floats
    high: Floats
    mode: str

    @property
    def shared(self) -> tuple[float, float] | None:
        """The limits where all maps have the same."""
        return None if self.mode == "map" else (float(self.low[0]), float(self.high[0]))


def parse_scale(text: str) -> Scale:
    """Read `map`, `layer`, `none`, `symmetric`, `range:LO,HI` or `percentile:LO,HI`; `auto` is
    `map`, which gradients have replaced before.

    Raises:
        UsageError: anything else, LO not below HI, or percentiles outside 0..100.
    """
    mode, _, tail = ("map" if text == "auto" else text).partition(":")
    if mode not in MODES or (bool(tail) != (mode in _NUMBERS)):
        raise UsageError(
            f"--normalize {text!r} is no scale",
            "one of map, layer, none, symmetric, range:LO,HI, percentile:LO,HI",
        )
    return Scale(mode, _numbers(text, mode, tail) if tail else ())


def limits(scale: Scale, maps: Tensor, low: Floats, high: Floats) -> ValueLimits:
    """The limits of each map; `low` and `high` [N] are the finite extremes of each (else NaN).

    Maps of one number each share the layer's scale, since by their own all would be alike.
    """
    mode = "layer" if scale.mode == "map" and maps[0].numel() == 1 else scale.mode
    if np.isnan(low).all():
        return ValueLimits(np.zeros(1, np.float32), np.zeros(1, np.float32), "layer")
    return MODES[mode](Scale(mode, scale.numbers), maps, low, high)


def is_flat(low: Floats, high: Floats) -> np.ndarray:
    """bool [N]: which maps are constant but for rounding; one without finite values is not."""
    found: np.ndarray = high - low <= FLAT * np.maximum(abs(high), abs(low))
    return found


def to_tiles(maps: Tensor, limits: ValueLimits, levels: int, nonfinite: int | None) -> Bytes:
    """Turn float32 maps [N, H, W] into levels 0..`levels`-1, rounded to the nearest.

    The arithmetic is torchvision's (`make_grid(normalize=True)`, then `save_image`) but for two
    kinds of maps. It draws all constant ones black, whatever their value; here zero is black and
    any other value the middle level, which no other map shows everywhere. It divides by at least
    1e-5, so that maps of tiny values come out dark; here they are drawn like all others. Values
    outside the limits are clipped.

    Args:
        nonfinite: the index drawn for NaN and infinite values; None where there are none.
    """
    low, high = limits.low, limits.high
    if nonfinite is not None:  # a map without any finite value has no limits
        low, high = np.nan_to_num(low), np.nan_to_num(high)
    own = limits.mode in ("map", "layer")
    flat = own & is_flat(low, high)
    span = np.maximum(np.where(flat, 1, high - low), _TINY).astype(np.float32)
    far = bool((abs(low) > _FAR * span).any())
    half = 0 if far else span * np.float32(0.5 / (levels - 1))
    affine = Affine(
        _float32(low - half),
        _float32((levels - 1) / span),
        0.5 if far else 0.0,
        None if own and nonfinite is None else levels - 0.5,
    )
    quantise = quantise_blocks if maps.device.type == "cpu" else quantise_whole
    tiles = quantise(maps, affine)
    _fill_flat(tiles, flat, low, (levels - 1) // 2 + 1)
    if nonfinite is not None:
        tiles[~torch.isfinite(maps).cpu().numpy()] = nonfinite
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


def quantise_whole(maps: Tensor, affine: Affine) -> Bytes:
    """Apply it to maps [N, H, W] on their device, which sends back only the bytes."""
    low, factor = (
        torch.from_numpy(v).to(maps.device)[:, None, None] for v in (affine.low, affine.factor)
    )
    scaled = (maps - low).mul_(factor).add_(affine.half)
    if affine.top is not None:
        scaled.nan_to_num_(0.0).clamp_(0, affine.top)
    array: Bytes = scaled.to(torch.uint8).cpu().numpy()
    return array


def quantise_blocks(maps: Tensor, affine: Affine) -> Bytes:
    """The same on a CPU, in blocks that stay in its cache: half the time."""
    rows = maps.numpy().reshape(len(maps), -1)
    count, width = rows.shape
    low, factor = (np.broadcast_to(v[:, None], (count, 1)) for v in (affine.low, affine.factor))
    step = max(1, _BLOCK // width)
    scratch = np.empty((min(step, count), width), np.float32)
    tiles = np.empty((count, width), np.uint8)
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        scaled = np.subtract(rows[part], low[part], out=scratch[: part.stop - start])
        np.multiply(scaled, factor[part], out=scaled)
        if affine.half:
            scaled += affine.half
        if affine.top is not None:
            np.clip(np.nan_to_num(scaled, copy=False), 0, affine.top, out=scaled)
        np.copyto(tiles[part], scaled, casting="unsafe")
    return tiles.reshape(maps.shape)


def _float32(values: np.ndarray) -> Floats:
    return np.atleast_1d(values).astype(np.float32)


def _fill_flat(tiles: Bytes, flat: np.ndarray, low: Floats, middle: int) -> None:
    if not np.any(flat):
        return
    value = np.where(low == 0, 0, middle).astype(np.uint8)
    where = np.broadcast_to(flat, len(tiles))
    tiles[where] = np.broadcast_to(value, len(tiles))[where][:, None, None]


def _by_map(scale: Scale, maps: Tensor, low: Floats, high: Floats) -> ValueLimits:
    return ValueLimits(low, high, "map")


def _by_layer(scale: Scale, maps: Tensor, low: Floats, high: Floats) -> ValueLimits:
    return _fixed("layer", float(np.nanmin(low)), float(np.nanmax(high)))


def _as_is(scale: Scale, maps: Tensor, low: Floats, high: Floats) -> ValueLimits:
    return _fixed("none", 0.0, 1.0)


def _by_range(scale: Scale, maps: Tensor, low: Floats, high: Floats) -> ValueLimits:
    return _fixed("range", *scale.numbers)


def _symmetric(scale: Scale, maps: Tensor, low: Floats, high: Floats) -> ValueLimits:
    largest = float(max(np.nanmax(np.abs(low)), np.nanmax(np.abs(high)))) or 1.0
    return _fixed("symmetric", -largest, largest)


def _by_percentile(scale: Scale, maps: Tensor, low: Floats, high: Floats) -> ValueLimits:
    values = maps.cpu().numpy()
    bottom, top = np.percentile(values[np.isfinite(values)], scale.numbers)
    return _fixed("percentile", float(bottom), float(top))


def _fixed(mode: str, low: float, high: float) -> ValueLimits:
    return ValueLimits(np.array([low], np.float32), np.array([high], np.float32), mode)


Mode = Callable[[Scale, Tensor, Floats, Floats], ValueLimits]
MODES: dict[str, Mode] = {
    "map": _by_map,
    "layer": _by_layer,
    "none": _as_is,
    "range": _by_range,
    "symmetric": _symmetric,
    "percentile": _by_percentile,
}
_NUMBERS = ("range", "percentile")


def _numbers(text: str, mode: str, tail: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in tail.split(","))
    except ValueError:
        raise UsageError(
            f"--normalize {text!r}: {tail!r} is not two numbers", f"for example {mode}:1,99"
        ) from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"--normalize {text!r}: {low:g} is not below {high:g}", "give LO,HI")
    if mode == "percentile" and not (low >= 0 and high <= 100):
        raise UsageError(
            f"--normalize {text!r}: percentiles lie between 0 and 100", "percentile:1,99"
        )
    return low, high
