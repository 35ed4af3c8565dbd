"""Per-channel numbers of maps: min, max, mean, std, zero fraction and non-finite count."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from featviz.drawing import levels, scan
from featviz.records import STAT_COLUMNS, Floats

MIN, MAX, MEAN, STD, ZEROS, NONFINITE = range(6)


def channel_stats(maps: Tensor) -> Floats:
    """Statistics of each map [H, W] of float32 maps [N, H, W], over its finite values.

    Returns:
        float32 [N, 6] in the order of `records.STAT_COLUMNS`. std is the population's (divided by
        the count). A map without a finite value has NaN for min, max, mean and std.
    """
    rows = maps.flatten(1)
    if rows.device.type == "cpu":
        return scan.statistics(rows.numpy())
    return _on_device(rows)


def is_constant(stats: Floats) -> np.ndarray:
    """bool [N]: which maps have one value everywhere, but for rounding, by their statistics."""
    flat: np.ndarray = levels.is_flat(stats[:, MIN], stats[:, MAX]) & (stats[:, NONFINITE] == 0)
    return flat


def overall(stats: Floats, values: int) -> dict[str, float | int | None]:
    """The same numbers over all maps together; `values` is the count of values in each map.

    Returns:
        min, max, mean, std, zero_fraction, nonfinite; None where no value is finite.
    """
    low, high, mean, std, zeros, nonfinite = scan.overall(stats, values)
    known = dict(zip(("min", "max", "mean", "std"), (low, high, mean, std), strict=True))
    found = {name: None if math.isnan(number) else number for name, number in known.items()}
    return {**found, "zero_fraction": zeros, "nonfinite": int(nonfinite)}


def _on_device(rows: Tensor) -> Floats:
    """Where the values are, so that only the numbers are sent back."""
    variance, mean = torch.var_mean(rows, dim=1, correction=0)
    zeros = (rows == 0).sum(1) / rows.shape[1]
    columns = torch.stack([rows.amin(1), rows.amax(1), mean, variance.sqrt(), zeros])
    numbers = columns.cpu().numpy()
    if not np.isfinite(numbers).all():
        return _masked_stats(rows)
    stats = np.zeros((len(rows), len(STAT_COLUMNS)), np.float32)
    stats[:, :NONFINITE] = numbers.T
    return stats


def _masked_stats(rows: Tensor) -> Floats:
    """In float64 and over the finite values only, where some are not or a square is not."""
    finite = torch.isfinite(rows)
    count = finite.sum(1)
    nothing = count == 0
    known = torch.where(finite, rows, 0.0).double()
    mean = known.sum(1) / count
    deviation = torch.where(finite, known - mean[:, None], 0.0)
    std = (deviation.square().sum(1) / count).sqrt()
    low = torch.where(finite, rows, torch.inf).amin(1).masked_fill(nothing, torch.nan)
    high = torch.where(finite, rows, -torch.inf).amax(1).masked_fill(nothing, torch.nan)
    zeros = (rows == 0).sum(1) / rows.shape[1]
    columns = [low, high, mean, std, zeros, rows.shape[1] - count]
    array: Floats = torch.stack([column.float() for column in columns], dim=1).cpu().numpy()
    return array
