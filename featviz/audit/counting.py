"""Counting: the outputs of a model's calls as running statistics of their channels.

    output [B, ...] ── to_rows ──> [B, C, P] ── measure ──> Measurement ── Tally.add ──>
    sums [C, 8]

A `Measurement` is taken inside the hook, before an in-place operation can change the
output. It is added to a `Tally` after the forward pass of the batch. Memory grows with the
channels, not with the images. Mean and variance follow T. F. Chan, G. H. Golub, R. J.
LeVeque, "Updating Formulae ... for Computing Sample Variances", Stanford CS-79-773."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from featviz import layout
from featviz.audit.gates import Doubles
from featviz.audit.parts import Activation, Call
from featviz.audit.plan import CountedCall
from featviz.drawing import values
from featviz.errors import LayoutError
from featviz.records import Floats, Integers
from featviz.run.study import Batch
from featviz.text import counted

TOP = 4
"""Images kept for each channel: those that excite it most."""

COUNT, LOW, HIGH, MEAN, SQUARES, ZEROS, NONFINITE, AT_BOUND = range(8)
"""The columns of `Tally.sums`."""


class Moments(NamedTuple):
    """What the correlation of C channels is computed from. Values that are not finite
    count as zero, since verdicts leave out such channels."""

    values: int
    """How many values each channel has."""
    mean: Doubles
    """[C]."""
    products: Doubles
    """[C, C]: sums of products of deviations from the means."""


class Measurement(NamedTuple):
    """What was measured of one output of a batch, of B images and C channels."""

    statistics: Floats
    """[B, C, 6], in the order of `records.STAT_COLUMNS`."""
    positions: int
    """How many values each channel has in an image."""
    at_bound: Integers | None
    """[B, C]: how many values are at a bound of the activation; None if it has no bound.
    """
    moments: Moments | None
    """None if correlations are not asked for."""


def to_rows(tensor: Tensor, axis: int, images: int) -> Tensor:
    """An output as [images, channels, positions].

    Args:
        axis: the axis of `tensor` that counts channels; not the first.
        images: how many images the batch has. The first axis counts them, or several
            windows or regions of each.

    Raises:
        LayoutError: the first axis cannot be divided among the images, or there are no
            values.
    """
    if tensor.numel() == 0 or tensor.dim() < 2 or tensor.shape[0] % images:
        raise LayoutError(
            f"shape {list(tensor.shape)} is no batch of {images}: --batch-size 1"
        )
    # Windowed attention and regions of a detector fold pieces of an image into the
    # first axis: all pieces of an image count as its positions.
    if axis != 1:
        tensor = tensor.movedim(axis, 1)
    rows = tensor.flatten(2) if tensor.dim() > 2 else tensor[..., None]
    if len(rows) != images:
        rows = rows.reshape(images, -1, *rows.shape[1:]).movedim(2, 1).flatten(2)
    return rows


def measure(
    rows: Tensor, activation: Activation, correlates: bool = False
) -> Measurement:
    """Measure one output of a batch.

    Args:
        rows: [B, C, P], on any device.
        activation: values at its bounds are counted.
        correlates: whether moments are taken, too, which cost a matrix product.
    """
    count, channels, positions = rows.shape
    if rows.device.type == "cpu" and not rows.is_contiguous():
        # The channels are the last axis in memory. A copy image by image is up to five
        # times as fast as one copy of the whole batch, by torch or by numpy.
        copy = rows.new_empty(rows.shape)
        for image, image_copy in zip(rows, copy, strict=True):
            image_copy.copy_(image)
        rows = copy
    flat = rows.reshape(-1, positions)
    # a bound that is NaN is never reached: a comparison with it is false
    bounds = activation.bounds
    low = bounds[0] + activation.margin if len(bounds) > 1 else math.nan
    high = bounds[-1] - activation.margin if bounds else math.nan
    at_bound = np.empty(len(flat), np.int64) if bounds else None
    statistics = values.statistics(flat, low, high, outside=at_bound)
    return Measurement(
        statistics=statistics.reshape(count, channels, -1),
        positions=positions,
        at_bound=None if at_bound is None else at_bound.reshape(count, channels),
        moments=_moments(rows) if correlates else None,
    )


def _moments(rows: Tensor) -> Moments:
    """The moments of one batch [B, C, P]. Values that are not finite count as 0. Products
    are added up in float32."""
    # Deviations from the mean of this batch: in float32, x² - mean² would lose the variance
    # of a channel far from 0.
    channels = rows.movedim(1, 0).flatten(1).nan_to_num(0.0, 0.0, 0.0)
    mean = channels.mean(1)
    deviations = channels - mean[:, None]
    return Moments(
        values=channels.shape[1],
        mean=mean.cpu().numpy().astype(np.float64),
        products=(deviations @ deviations.T).cpu().numpy().astype(np.float64),
    )


@dataclass
class Tally:
    """Running numbers of the C channels of a call over all batches so far, and the images
    that excite each channel most."""

    sums: Doubles
    """[C, 8], see the columns above. Of finite values: count, min (inf without any), max
    (-inf without any), mean, sum of squared deviations. Numbers of values: zero, not
    finite, at a bound (NaN if the layer has no bounds)."""
    best: Doubles
    """[C, TOP]: the largest maxima of images, descending. A non-finite value counts as
    inf; -inf stands for no image."""
    images: Integers
    """[C, TOP]: the numbers of these images; -1 for no image."""
    moments: Moments | None = None
    """None if correlations are not asked for."""

    @classmethod
    def empty(
        cls, channels: int, saturates: bool = False, correlates: bool = False
    ) -> Tally:
        """The tally before the first batch.

        Args:
            channels: how many the call's output has.
            saturates: whether values at a bound are counted.
            correlates: whether moments are added up.
        """
        sums = np.zeros((channels, 8))
        sums[:, LOW] = np.inf
        sums[:, HIGH] = -np.inf
        # NaN stays NaN whatever is added: the mark of a layer without bounds
        sums[:, AT_BOUND] = 0 if saturates else np.nan
        moments = None
        if correlates:
            moments = Moments(0, np.zeros(channels), np.zeros((channels, channels)))
        return cls(
            sums=sums,
            best=np.full((channels, TOP), -np.inf),
            images=np.full((channels, TOP), -1),
            moments=moments,
        )

    def add(self, batch: Measurement, images: Integers) -> None:
        """Add a batch.

        Args:
            images: the numbers of its images, [B].
        """
        from featviz.drawing import loops  # numba takes a while to import

        # compiled loops take no None: an empty array stands for a layer without bounds
        at_bound = batch.at_bound
        if at_bound is None:
            at_bound = np.empty((0, 0), np.int64)
        loops.add_maps(batch.statistics, at_bound, batch.positions, self.sums)
        loops.add_images(batch.statistics, images, self.best, self.images)
        if self.moments is not None and batch.moments is not None:
            self.moments = _join_moments(self.moments, batch.moments)

    @property
    def values(self) -> Doubles:
        """[C]: how many values of each channel were seen, finite or not."""
        return np.asarray(self.sums[:, COUNT] + self.sums[:, NONFINITE])

    def correlation(self) -> Doubles | None:
        """Pearson's r of each pair of channels, [C, C]; 0 if one of the two does not vary.
        None if no moments were taken."""
        if self.moments is None:
            return None
        # the divisors n - 1 of covariance and deviations cancel out
        scale = np.sqrt(np.diag(self.moments.products))
        return _ratio(self.moments.products, np.outer(scale, scale))

    def table(self) -> Doubles:
        """The statistics of channels.npz, [C, 8]: count, min, max, mean and variance of
        finite values; then zero_fraction, nonfinite (a count) and saturated_fraction.

        NaN stands for what is not known: min to variance of a channel without finite
        values, fractions of a channel without values, and saturated_fraction of a layer
        without bounds."""
        table = self.sums.copy()
        table[:, SQUARES] = _ratio(self.sums[:, SQUARES], self.sums[:, COUNT])
        table[self.sums[:, COUNT] == 0, LOW:ZEROS] = np.nan
        # the fractions of a channel without values are 0 / 0, which is NaN
        with np.errstate(invalid="ignore"):
            table[:, [ZEROS, AT_BOUND]] /= self.values[:, None]
        return table


def _join_moments(seen: Moments, batch: Moments) -> Moments:
    """The moments of two sets of values as one set, by Chan's update. The products of each
    set are of deviations from its own mean, so a term for the distance of the two means is
    added."""
    delta = batch.mean - seen.mean
    values = seen.values + batch.values
    share = batch.values / max(1, values)
    correction = np.outer(delta, delta) * (seen.values * share)
    return Moments(
        values=values,
        mean=seen.mean + delta * share,
        products=seen.products + batch.products + correction,
    )


def _ratio(above: Doubles, below: Doubles) -> Doubles:
    """Quotients; 0 where the divisor is 0."""
    return np.asarray(
        np.divide(above, below, out=np.zeros_like(above), where=below != 0)
    )


class CensusOfBatch(NamedTuple):
    """What was measured of a batch. The hooks fill it during the forward pass."""

    images: Integers
    """[B]: the numbers of its images."""
    measured: list[tuple[Call, Measurement]]
    refused: dict[Call, str]
    """Reasons of calls whose outputs cannot be counted."""
    unforeseen: set[str]
    """Labels of calls that the pass on a blank image did not make."""


class Census:
    """The tallies of all counted calls: the collector of `Study.show`. For each batch,
    `Study` calls `begin_batch` and runs the model, whose hooks hand outputs to
    `measure_output`. Then it calls `taken_of_batch`, and `add_batch` with the result of
    that. Nothing of a batch that failed is added."""

    _batch: CensusOfBatch

    def __init__(
        self,
        calls: Mapping[Call, CountedCall],
        correlates: Collection[Call],
        foreseen: Container[Call],
    ) -> None:
        """Begin with no batch.

        Args:
            calls: the calls that are counted.
            correlates: those of them whose moments are taken, too.
            foreseen: the calls that the pass on a blank image made, counted or not. Any
                other call becomes `unforeseen`.
        """
        self.tallies: dict[Call, Tally] = {}
        self.refused: dict[Call, str] = {}
        """Reasons of calls whose outputs cannot be counted."""
        self.unforeseen: set[str] = set()
        """Labels of calls that the pass on a blank image did not make."""
        self.fault: Exception | None = None
        """An exception that is a bug of featviz in `measure_output`, and no fault of the
        model; None if there was none."""
        self._calls = calls
        self._correlates = correlates
        self._foreseen = foreseen

    @property
    def is_large(self) -> bool:
        """Whether what was taken of a batch is too much to send from a worker process: with
        moments it is, since those of 2048 channels have 32 MB."""
        return bool(self._correlates)

    def begin_batch(self, batch: Batch) -> None:
        """Start a batch, and forget what was taken before."""
        self._batch = CensusOfBatch(np.array(batch.images), [], {}, set())

    def taken_of_batch(self) -> CensusOfBatch:
        """What the hooks have taken of the batch since `begin_batch`."""
        return self._batch

    def add_batch(self, taken: CensusOfBatch) -> None:
        """Add a batch to the tallies, after its forward pass. A call that has another
        number of channels than in earlier batches becomes `refused`.

        Args:
            taken: the result of `taken_of_batch`, which may come from a worker process.
        """
        self.unforeseen |= taken.unforeseen
        for call, reason in taken.refused.items():
            self.refused.setdefault(call, reason)
        for call, measurement in taken.measured:
            channels = measurement.statistics.shape[1]
            if call not in self.tallies:
                self.tallies[call] = Tally.empty(
                    channels,
                    saturates=measurement.at_bound is not None,
                    correlates=measurement.moments is not None,
                )
            tally = self.tallies[call]
            # a refused call is still counted, but the results leave it out
            if len(tally.sums) == channels:
                tally.add(measurement, taken.images)
            else:
                self.refused[call] = (
                    f"has {counted(len(tally.sums), 'channel')}, then {channels}"
                )

    def measure_output(self, call: Call, output: Any) -> None:
        """The sink of the hooks: measure the output of a call. A call whose output cannot
        be measured becomes `refused`.

        Raises:
            Exception: a bug of featviz, which is kept as `fault`, too.
        """
        # Hooks report all calls of a watched layer, also those that are not audited. If the
        # pass on a blank image did not make a call, only its label is noted.
        counted = self._calls.get(call)
        if counted is None:
            if call not in self._foreseen:
                self._batch.unforeseen.add(call.label)
            return
        try:
            if not isinstance(output, Tensor):
                raise LayoutError(f"gives a {type(output).__name__}, not a tensor")
            floats = layout.to_floats(output.detach())
            rows = to_rows(floats, counted.channel_axis, len(self._batch.images))
            activation = counted.activation or Activation()
            self._batch.measured.append(
                (call, measure(rows, activation, call in self._correlates))
            )
        except LayoutError as error:
            self._batch.refused.setdefault(call, error.message)
        # kept, since `Study` would take it for a fault of the image
        except Exception as error:
            self.fault = error
            raise
