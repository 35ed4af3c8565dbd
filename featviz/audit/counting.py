"""Counting: the outputs of watched calls in numbers, image after image, into running statistics.

Memory goes with the channels, not with the images. Mean and variance follow T. F. Chan, G. H.
Golub, R. J. LeVeque, "Updating Formulae ... for Computing Sample Variances", Stanford CS-79-773.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from featviz import layout
from featviz.audit.gates import Doubles
from featviz.audit.plan import Activation, Call, Spot
from featviz.drawing import values
from featviz.errors import LayoutError
from featviz.records import Floats, Integers
from featviz.run.study import Batch

TOP = 4  # images kept for each channel: those that excite it most


def to_rows(tensor: Tensor, axis: int, images: int) -> Tensor:
    """An output as [images, channels, positions]; the first axis counts images or windows."""
    if tensor.numel() == 0 or tensor.dim() < 2 or tensor.shape[0] % images:
        raise LayoutError(f"shape {list(tensor.shape)} is no batch of {images}: --batch-size 1")
    if axis != 1:
        tensor = tensor.movedim(axis, 1)
    rows = tensor.flatten(2) if tensor.dim() > 2 else tensor[..., None]
    if len(rows) != images:  # windows, regions: several rows to an image
        rows = rows.reshape(images, -1, *rows.shape[1:]).movedim(2, 1).flatten(2)
    return rows


def statistics(rows: Tensor, activation: Activation) -> tuple[Floats, Integers | None]:
    """Statistics of rows [B, C, P], [B, C, 6] in the order of `records.STAT_COLUMNS`, and how many
    values are at a bound of the activation, [B, C]; None without bounds."""
    count, channels, positions = rows.shape
    on_cpu = rows.device.type == "cpu"
    if on_cpu and not rows.is_contiguous():  # channels lie last: image by image torch transposes
        copy = rows.new_empty(rows.shape)  # up to five times as fast as all at once, or numpy
        for image, place in zip(rows, copy, strict=True):
            place.copy_(image)
        rows = copy
    flat = rows.reshape(-1, positions)
    bounds, margin = activation.bounds, activation.margin
    low = bounds[0] + margin if len(bounds) > 1 else math.nan
    high = bounds[-1] - margin if bounds else math.nan
    numbers, reached = values.statistics(flat, low, high, counted=bool(bounds))
    if not on_cpu:
        reached = ((flat <= low) | (flat >= high)).sum(1).cpu().numpy()
    saturated = reached.reshape(count, channels) if bounds else None
    return numbers.reshape(count, channels, -1), saturated


Moments = tuple[int, Doubles, Doubles]
"""Of C channels how many values were seen, their means [C], and the sum of products of deviations
[C, C]. What is not finite counts as zero: verdicts leave out such channels."""


def moments(rows: Tensor) -> Moments:
    """Those of one batch [B, C, P]; products in float32 about the batch's own mean."""
    values = rows.movedim(1, 0).flatten(1).nan_to_num(0.0, 0.0, 0.0)
    mean = values.mean(1)
    values = values - mean[:, None]
    products = (values @ values.T).cpu().numpy().astype(np.float64)
    return values.shape[1], mean.cpu().numpy().astype(np.float64), products


@dataclass
class Tally:
    """Running numbers of a call's C channels, and the images that excite each most."""

    sums: Doubles
    """[C, 8]: of finite values count, min (inf without any), max (-inf), mean, sum of squared
    deviations; how many are zero, not finite, and at a bound (NaN where the layer has none)."""
    best: Doubles
    """The largest maxima [C, TOP]; a non-finite value counts as inf, -inf stands for no image."""
    images: Integers  # numbers of their images, [C, TOP], best first; -1 for no image
    moments: Moments | None = None

    @classmethod
    def nothing(cls, channels: int, saturates: bool = False, correlates: bool = False) -> Tally:
        """Before the first batch."""
        sums = np.zeros((channels, 8))
        sums[:, 1:3] = np.inf, -np.inf
        sums[:, 7] = 0 if saturates else np.nan
        none = (0, np.zeros(channels), np.zeros((channels, channels))) if correlates else None
        return cls(sums, np.full((channels, TOP), -np.inf), np.full((channels, TOP), -1), none)

    def add(
        self,
        stats: Floats,
        positions: int,
        images: Integers,
        reached: Integers | None = None,
        more: Moments | None = None,
    ) -> None:
        """Add a batch of these images [B], by what `statistics` says of [B, C, positions]."""
        from featviz.drawing import loops  # numba takes a while to import

        at_bound = np.empty((0, 0), np.int64) if reached is None else reached
        loops.add_maps(stats, at_bound, positions, self.sums)
        loops.add_images(stats, images, self.best, self.images)
        if self.moments is not None and more is not None:  # Chan's update, by the means' difference
            count, mean, products = self.moments
            delta, share = more[1] - mean, more[0] / max(1, count + more[0])
            products = products + more[2] + np.outer(delta, delta) * (count * share)
            self.moments = count + more[0], mean + delta * share, products

    @property
    def values(self) -> Doubles:
        """How many values of each channel were seen, finite or not."""
        return np.asarray(self.sums[:, 0] + self.sums[:, 6])

    def correlation(self) -> Doubles | None:
        """Pearson's r of each pair, [C, C]; 0 where a channel does not vary."""
        if self.moments is None:
            return None
        scale = np.sqrt(np.diag(self.moments[2]))
        return _ratio(self.moments[2], np.outer(scale, scale))

    def table(self) -> Doubles:
        """[C, 8]: count, min, max, mean and variance of finite values; zero_fraction, nonfinite,
        saturated_fraction, NaN where the layer cannot saturate or nothing was seen."""
        table = self.sums.copy()
        table[:, 4] = _ratio(self.sums[:, 4], self.sums[:, 0])
        table[self.sums[:, 0] == 0, 1:5] = np.nan
        with np.errstate(invalid="ignore"):
            table[:, [5, 7]] /= self.values[:, None]
        return table


def _ratio(above: Doubles, below: Doubles) -> Doubles:
    """Quotients; 0 where the divisor is 0."""
    return np.asarray(np.divide(above, below, out=np.zeros_like(above), where=below != 0))


class Census:
    """Statistics of every spot over all images; of an image that failed, nothing stays."""

    def __init__(
        self, spots: Mapping[Call, Spot], correlate: Container[Call], known: Container[Call]
    ) -> None:
        """Count these spots, some of which have their moments streamed, too; calls that are neither
        spots nor known are unforeseen."""
        self.spots, self.correlate, self.known = spots, correlate, known
        self.tallies: dict[Call, Tally] = {}
        self.faults: dict[Call, str] = {}  # what cannot be counted, with the reason
        self.unforeseen: set[str] = set()
        self.fault: Exception | None = None  # a bug of ours, to tell it from one of the model
        self._images: Integers = np.empty(0, np.int64)
        self._measured: list[tuple[Call, tuple[Any, ...]]] = []  # with arguments of `Tally.add`

    def begin(self, batch: Batch) -> None:
        """Start a batch; what was not committed is forgotten."""
        self._images, self._measured = np.array(batch.images), []

    def commit(self) -> None:
        """Count the batch, which the model has taken."""
        for call, part in self._measured:
            channels, also = part[0].shape[1], (part[3] is not None, part[4] is not None)
            if call not in self.tallies:
                self.tallies[call] = Tally.nothing(channels, *also)
            tally = self.tallies[call]
            if len(tally.sums) == channels:
                tally.add(*part)
            else:
                self.faults[call] = f"has {len(tally.sums)} channels, then {channels}"
        self._measured = []

    def take(self, call: Call, output: Any) -> None:
        """The sink of the hooks: measure the tensor now, count it when the image is through."""
        if call not in self.spots:
            if call not in self.known:
                self.unforeseen.add(call.label)
            return
        spot = self.spots[call]
        try:
            if not isinstance(output, Tensor):
                raise LayoutError(f"gives a {type(output).__name__}, not a tensor")
            rows = to_rows(layout.to_floats(output.detach()), spot.axis, len(self._images))
            numbers, saturated = statistics(rows, spot.activation or Activation())
            more = moments(rows) if call in self.correlate else None
            part = (numbers, rows.shape[2], self._images, saturated, more)
            self._measured.append((call, part))
        except LayoutError as error:
            self.faults.setdefault(call, error.message)
        except Exception as error:
            self.fault = error
            raise
