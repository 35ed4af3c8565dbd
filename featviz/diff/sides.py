"""Both sides of an image: their statistics, and the values behind a tensor's files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from featviz.diff.comparing import Change, compare, compare_stats, joined, no_change, scale_of
from featviz.diff.findings import PIXELS, STATISTICS, TENSORS, Finding
from featviz.diff.pairing import Pair
from featviz.diff.readback import Values, from_picture, from_tensor, held, is_part
from featviz.records import Capture, Floats
from featviz.rundir.read import ReadImage, same_content
from featviz.text import by


@dataclass(frozen=True)
class Sides:
    """An image in both runs."""

    base: ReadImage
    new: ReadImage
    base_stats: Mapping[str, Floats]
    new_stats: Mapping[str, Floats]

    @classmethod
    def of(cls, base: ReadImage, new: ReadImage) -> Sides:
        """Read the statistics of both.

        Raises:
            StoreError: they cannot be read.
        """
        return cls(base, new, base.stats(), new.stats())

    def stats(self, pair: Pair) -> tuple[Floats, Floats]:
        """Of a tensor, [channels, 6], in BASE and NEW."""
        key = pair.place.stats_key
        return self.base_stats[key], self.new_stats[key]

    def measure(self, pair: Pair, tolerance: float) -> Finding:
        """Compare a tensor: by the kept tensors, else by statistics and pixels."""
        row = pair.base
        reason = _why_not(row, pair.new)
        if reason is not None:
            by, change = STATISTICS, no_change(row.maps, 1)
            differs = np.ones(row.maps, np.bool_)
        else:
            by, change = self._change(pair)
            differs = change.differs(tolerance)
        return Finding(pair.image, pair.place, row.type, row.index, by, change, differs, reason)

    def tensors(self, pair: Pair) -> tuple[Values, Values] | None:
        """The values of both kept tensors; None where there are none that show the channels."""
        if not _keeps(pair.base) or not _keeps(pair.new):
            return None
        found = []
        for image, row in ((self.base, pair.base), (self.new, pair.new)):
            array = image.tensor(row)
            values = None if array is None else from_tensor(array, row)
            if values is None:
                return None
            found.append(values)
        return found[0], found[1]

    def pixels(self, pair: Pair) -> tuple[Values, Values] | None:
        """The values behind both pictures, of the channels that both have drawn; None where the
        pictures do not show them."""
        found = []
        for image, row, stats in zip(
            (self.base, self.new), (pair.base, pair.new), self.stats(pair), strict=True
        ):
            picture = image.levels(row)
            values = None if picture is None else from_picture(*picture, row, stats)
            if values is None:
                return None
            found.append(values)
        return _of_both(*found)

    def _change(self, pair: Pair) -> tuple[str, Change]:
        base, new = self.stats(pair)
        kept = _keeps(pair.base) and _keeps(pair.new)
        if np.array_equal(base, new, equal_nan=True) and self._same_file(pair, kept):
            return TENSORS if kept else PIXELS, no_change(len(base), math.prod(held(pair.base)))
        scale = scale_of(base, new)
        if (values := self.tensors(pair)) is not None:
            return TENSORS, compare(values[0].data, values[1].data, scale)
        change = compare_stats(base, new, scale)
        if (values := self.pixels(pair)) is None:
            return STATISTICS, change
        drawn = compare(values[0].data, values[1].data, scale, slack_of(values))
        return PIXELS, joined(change, drawn, values[0].ids)

    def _same_file(self, pair: Pair, kept: bool) -> bool:
        names = (pair.base.tensor, pair.new.tensor) if kept else (pair.base.file, pair.new.file)
        return same_content((self.base, str(names[0])), (self.new, str(names[1])))


def slack_of(values: tuple[Values, Values]) -> np.ndarray | None:
    """[channels]: how far two values may be apart that are the same."""
    one, other = (v.slack for v in values)
    return None if one is None or other is None else one + other


def _keeps(row: Capture) -> bool:
    return row.tensor is not None and not is_part(row)


def _why_not(base: Capture, new: Capture) -> str | None:
    """Why two tensors have no channels in common."""
    if base.shape != new.shape:
        return f"shape {by(base.shape)} in BASE, {by(new.shape)} in NEW"
    if (base.layout, base.maps) != (new.layout, new.maps):
        return f"layout {base.layout} in BASE, {new.layout} in NEW"
    return None


def _of_both(base: Values, new: Values) -> tuple[Values, Values] | None:
    """Only the channels, and of each the slices, that both have."""
    ids = [i for i in base.ids if i in set(new.ids)]
    if not ids or base.data.shape[1] != new.data.shape[1]:
        return None
    return base.only(ids), new.only(ids)
