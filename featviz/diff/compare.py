"""How far two tensors are apart, channel by channel: from kept tensors, pictures and statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from featviz.drawing import colormap
from featviz.layout.layouts import BEHIND, LAYOUTS
from featviz.records import Bytes, CaptureKey, Floats
from featviz.rundir.image import ReadImage, same_content
from featviz.rundir.schema import Capture
from featviz.text import by

TENSORS, PIXELS, STATISTICS = "tensors", "statistics and pixels", "statistics"

_HALF = 0.501
"""Levels by which a value may be off the one drawn: half a level, and float32's rounding."""
_BLOCK = 2**17  # values compared at a time: they stay in a core's cache


@dataclass(frozen=True)
class Change:
    """How far apart two tensors are, in each channel; all arrays are [channels]."""

    absolute: np.ndarray  # largest difference of finite values
    relative: np.ndarray
    """Largest |new - base| / (max(|new|, |base|) + scale), 0..1: see `compare.compare`."""
    cosine: np.ndarray
    """-1..1; 1 where both are zero; NaN for a single number, or where only statistics are known."""
    unlike: np.ndarray
    """How many values are NaN or infinite on one side, and something else on the other."""
    products: np.ndarray
    """[channels, 3]: base · new, base · base and new · new of finite values, in one unit for all
    channels; NaN where only statistics are known."""

    @property
    def layer_cosine(self) -> float:
        """The cosine over all channels together; NaN where only statistics are known."""
        known = self.products[~np.isnan(self.products).any(1)]
        return float(_cosine(known.sum(0, keepdims=True))[0]) if len(known) else math.nan

    def differs(self, tolerance: float) -> np.ndarray:
        """Which channels have a value beyond the tolerance, or one that is finite on one side."""
        return np.asarray((self.relative > tolerance) | (self.unlike > 0))


def worst_first(relative: np.ndarray, unlike: np.ndarray, among: np.ndarray) -> list[int]:
    """The channels of a mask, the most changed first."""
    return [int(i) for i in np.lexsort((-relative, -unlike)) if among[i]]


@dataclass(frozen=True)
class Finding:
    """One tensor of one image, compared."""

    image: str
    place: CaptureKey
    type: str
    index: int
    by: str
    change: Change
    differs: np.ndarray  # bool [channels]; all where there is a reason
    reason: str | None = None

    @property
    def severity(self) -> tuple[float, float]:
        """The largest difference and the share of channels that differ; the larger, the worse."""
        lost = bool(self.reason) or bool(self.change.unlike.any())
        return 1.0 if lost else float(self.change.relative.max()), float(self.differs.mean())


Sides = tuple[list[int], np.ndarray, np.ndarray, np.ndarray]
"""Channels of a tensor; their values in BASE and in NEW, as far as files show them, [channels, N];
and how far the difference of two may be off, [channels]; 0 where the values are exact."""


def map_shape(row: Capture) -> tuple[int, int, int]:
    """Slices, height and width of each channel in the tensor, drawn or not."""
    slices, *size = row.constant or (row.slices[1] if row.slices else 1, *row.plan.map_size)
    return slices, size[0], size[1]


def from_tensor(array: np.ndarray, row: Capture, behind: int = 0) -> np.ndarray | None:
    """The values of each channel in a kept tensor, [channels, N]; None where the layout does not
    make the manifest's channels of it. Tokens beside a grid, `behind` of them behind it, are left
    out: they have rows of their own."""
    layout = LAYOUTS.get(row.layout)
    if layout is None or array.ndim not in layout.dimensions:
        return None
    try:
        data: np.ndarray = layout.channels_first(array, row.maps)
    except (IndexError, ValueError):
        return None
    count = math.prod(map_shape(row))
    if len(data) != row.maps or data.shape[1] < count:
        return None
    end = data.shape[1] - behind
    return data[:, end - count : end]


def from_picture(
    levels: Bytes, palette: Bytes | None, row: Capture, stats: Floats
) -> tuple[list[int], np.ndarray, np.ndarray] | None:
    """The values behind a grid's pixels: the drawn channels; their values [channels, N], within
    half a level and NaN where not finite; and how far each may be off. None where the picture has
    another size than the manifest says, or a palette with labels, which cover values."""
    channels, plan = list(row.channels or range(row.maps)), row.plan
    count = 256 if palette is None else 254  # and two for padding and what is not finite
    ours = palette is None or (len(palette) == 256 and (palette[-1] == colormap.MAGENTA).all())
    fits = levels.shape == (plan.height, plan.width) and plan.maps == len(channels) * row.side
    whole = row.constant is None or row.constant[0] == 1  # another may show only some slices
    if not (ours and fits and whole):
        return None
    (height, width), (down, across), padding = plan.tile, plan.scale, plan.padding
    slots = levels[padding:, padding:].reshape(
        plan.rows, height + padding, plan.columns, width + padding
    )
    slots = slots[:, :height:down, :, :width:across].swapaxes(1, 2)
    tiles = slots.reshape(plan.rows * plan.columns, *plan.map_size)[: plan.maps]
    drawn = tiles.reshape(len(channels), -1)
    own = stats[channels].astype(np.float64)
    ends = (own[:, 0], own[:, 1]) if row.range is None else row.range
    low, high = (np.nan_to_num(np.full(len(own), np.nan if end is None else end)) for end in ends)
    step = (high - low) / (count - 1)
    data = low[:, None] + drawn * step[:, None]
    if palette is not None:
        data[drawn == 255] = np.nan
    if row.constant is not None:
        data = data.repeat(math.prod(map_shape(row)), axis=1)
    return channels, data, step * _HALF


@dataclass(frozen=True)
class TensorPair:
    """A tensor of an image in BASE and in NEW."""

    place: CaptureKey
    images: tuple[ReadImage, ReadImage]
    rows: tuple[Capture, Capture]
    stats: tuple[Floats, Floats]  # each [channels, 6]

    @classmethod
    def read(cls, base: ReadImage, new: ReadImage) -> Iterator[TensorPair]:
        """The tensors that both have; DamagedError where their statistics cannot be read."""
        stats = base.stats(), new.stats()
        for place in (place for place in base.captures if place in new.captures):
            rows, key = (base.captures[place], new.captures[place]), place.stats_key
            yield cls(place, (base, new), rows, (stats[0][key], stats[1][key]))

    @property
    def keeps(self) -> bool:
        """Whether both runs keep a tensor whose channels are all those of the rows."""
        for row in self.rows:  # a vector may be a part of its tensor: a token beside the grid
            size = row.maps * math.prod(map_shape(row))
            if row.tensor is None or (row.layout == "vector" and size != math.prod(row.shape)):
                return False
        return True

    def tensors(self) -> Sides | None:
        """The values of both kept tensors, where there are any that show the channels."""
        sides = []
        for image, row in zip(self.images, self.rows, strict=True) if self.keeps else ():
            array, behind = image.tensor(row), f"{self.place.key}.{BEHIND}".lstrip(".")
            part = image.captures.get(self.place._replace(key=behind))
            beside = 0 if part is None else math.prod(map_shape(part))
            values = None if array is None else from_tensor(array, row, beside)
            if values is None:
                return None
            sides.append(values)
        channels = self.rows[0].maps
        return (list(range(channels)), sides[0], sides[1], np.zeros(channels)) if sides else None

    def pixels(self) -> Sides | None:
        """The values behind both pictures, where they show them, of channels that both have."""
        one, two = self.rows
        if one.beside != two.beside or one.normalize != two.normalize:
            return None
        sides = []
        for image, row, stats in zip(self.images, self.rows, self.stats, strict=True):
            picture = image.levels(row)
            values = None if picture is None else from_picture(*picture, row, stats)
            if values is None:
                return None
            sides.append(values)
        (channels, before, old_slack), (others, after, new_slack) = sides
        ids, old, new = np.intersect1d(channels, others, return_indices=True)
        if before.shape[1] != after.shape[1] or not len(ids):
            return None
        return ids.tolist(), before[old], after[new], old_slack[old] + new_slack[new]


def measure(pair: TensorPair, tolerance: float) -> Finding:
    """Compare a tensor of an image: by the kept tensors, else by statistics and pixels."""
    base, new = pair.rows
    what, reason = (pair.images[0].name, pair.place, base.type, base.index), None
    if base.shape != new.shape:
        reason = f"shape {by(base.shape)} in BASE, {by(new.shape)} in NEW"
    elif (base.layout, base.maps) != (new.layout, new.maps):
        reason = f"layout {base.layout} in BASE, {new.layout} in NEW"
    if reason:
        all_differ = np.ones(base.maps, np.bool_)
        return Finding(*what, STATISTICS, no_change(base.maps, 1), all_differ, reason)
    old, now = pair.stats
    method, scale = TENSORS if pair.keeps else PIXELS, scale_of(old, now)
    files = [str(row.tensor if pair.keeps else row.file) for row in pair.rows]
    same = np.array_equal(old, now, equal_nan=True)
    if same and same_content(*zip(pair.images, files, strict=True)):
        change = no_change(len(old), math.prod(map_shape(base)))
    elif (values := pair.tensors()) is not None:
        change = compare(*values[1:3], scale)
    elif (values := pair.pixels()) is None:
        method, change = STATISTICS, compare_stats(old, now, scale)
    else:
        method, (at, before, after, slack) = PIXELS, values
        part = compare(before, after, scale, slack)
        columns = {name: own.copy() for name, own in vars(compare_stats(old, now, scale)).items()}
        for name in ("absolute", "relative", "unlike"):  # the larger difference counts
            columns[name][at] = np.maximum(columns[name][at], getattr(part, name))
        columns["cosine"][at], columns["products"][at] = part.cosine, part.products
        change = Change(**columns)
    return Finding(*what, method, change, change.differs(tolerance))


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
    """Compare values [channels, N]. A difference is set against the value itself and `scale`, the
    layer's largest magnitude: small values among large ones are not exact. NaN equals NaN, an
    infinity itself, and what differs by the slack [channels] at most."""
    slack = np.zeros(len(base)) if slack is None else slack
    step = max(1, _BLOCK // max(1, base.shape[1]))
    parts = []
    for start in range(0, len(base), step):
        rows = slice(start, start + step)
        old, now = base[rows].astype(np.float64), new[rows].astype(np.float64)
        difference, relative, unlike = _differences(old, now, scale, slack[rows])
        finite = np.isfinite(old) & np.isfinite(now)
        one, two = (np.where(finite, side, 0.0) / (scale or 1.0) for side in (old, now))
        pairs = (one, two), (one, one), (two, two)
        products = np.stack([np.einsum("ij,ij->i", *pair) for pair in pairs], axis=1)
        cosine = _cosine(products) if base.shape[1] > 1 else np.full(len(old), np.nan)
        largest = abs(difference).max(1), abs(relative).max(1)
        parts.append((*largest, cosine, unlike.sum(1), products))
    return Change(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def compare_stats(base: Floats, new: Floats, scale: float) -> Change:
    """Compare statistics [channels, 6], of which no cosine follows."""
    moments = compare(base[:, :4], new[:, :4], scale)  # not the zeros: rounding makes them 1e-9
    unlike = np.maximum(moments.unlike, abs(new[:, 5] - base[:, 5]).astype(np.int64))
    unknown = np.full((len(base), 3), np.nan)
    return Change(moments.absolute, moments.relative, unknown[:, 0], unlike, unknown)


def signed(base: np.ndarray, new: np.ndarray, scale: float, slack: np.ndarray) -> np.ndarray:
    """The signed relative difference of each value; NaN where only one side is not finite."""
    old, now = base.astype(np.float64), new.astype(np.float64)
    _, ratio, unlike = _differences(old, now, scale, slack)
    ratio[unlike] = np.nan
    return ratio


def _differences(
    base: np.ndarray, new: np.ndarray, scale: float, slack: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each value: new - base beyond the slack, 0 where one is not finite; this as a share of the
    larger value and the scale; and whether only one is not finite, or both are and not alike."""
    finite = np.isfinite(base) & np.isfinite(new)
    if finite.all():
        difference, unlike = new - base, np.zeros(base.shape, np.bool_)
    else:
        difference = np.subtract(new, base, out=np.zeros_like(base), where=finite)
        unlike = ~finite & ~((base == new) | (np.isnan(base) & np.isnan(new)))
    if slack.any():
        beyond = abs(difference) - slack[:, None]
        difference = np.sign(difference) * np.maximum(beyond, 0)
    size = np.fmax(abs(base), abs(new)) + scale
    ratio = np.divide(difference, size, out=np.zeros_like(base), where=difference != 0)
    return difference, ratio, unlike


def _cosine(products: np.ndarray) -> np.ndarray:
    """Cosine similarities from `Change.products`."""
    dot, base, new = products.T
    norms = np.sqrt(base) * np.sqrt(new)
    alike = np.where(base == new, 1.0, 0.0)
    return np.asarray(np.divide(dot, norms, out=alike, where=norms > 0).clip(-1.0, 1.0))
