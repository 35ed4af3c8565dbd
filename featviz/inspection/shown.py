"""What a page of `look` shows of one layer: its maps, and words on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from featviz.drawing import colormap, stats
from featviz.drawing.overview import OverviewRow, OverviewTile
from featviz.drawing.picture import GridPicture
from featviz.drawing.telling import ranked, unlike
from featviz.records import Bytes, Floats, PageOptions, Site, finite
from featviz.text import by, counted

if TYPE_CHECKING:
    from torch import Tensor

Span = tuple[float | None, float | None]
"""The least and the greatest finite value; None where there is none."""


@dataclass(frozen=True)
class ShownLayer:
    """A layer's most telling maps."""

    layer: str
    type: str
    index: int
    calls: int
    """How often it ran; the maps are those of the first call that gave some."""
    key: str
    """Where in its output the tensor is."""
    shape: tuple[int, ...]
    layout: str
    maps: int
    """How many it has."""
    constant: int
    """How many of them have one value everywhere, and are not shown beside others."""
    nonfinite: int
    """NaN and infinite values in all of its maps."""
    slice: tuple[int, int] | None
    """Which slice of each map is shown, and of how many, where it has several."""
    channels: tuple[int, ...]
    """The shown maps, the most telling one first; of a vector its largest numbers."""
    ranges: tuple[Span, ...]
    """The least and the greatest value of each, between which its colours run; maps of one number
    have one scale for all. Of a vector those of all its numbers."""
    strip: bool
    """Whether its numbers are one strip: those of a vector, or of maps that are all constant."""
    tiles: Sequence[Bytes] = field(repr=False, compare=False, default=())
    """RGB [h, w, 3] of each map, not enlarged; of a vector the one strip of all its numbers."""

    @property
    def one_scale(self) -> bool:
        """Whether its maps are single numbers, which one scale tells apart."""
        return not self.strip and self.tiles[0].shape[:2] == (1, 1)

    def as_json(self) -> dict[str, Any]:
        """All but the pixels."""
        return {k: v for k, v in vars(self).items() if k != "tiles"}


def telling(site: Site, tensor: Tensor, picture: GridPicture, options: PageOptions) -> ShownLayer:
    """The most telling maps of a tensor that is drawn."""
    numbers = picture.stats
    colors, side = colormap.table(picture.palette), picture.slices[0]
    order, middles = ranked(numbers, options.by), picture.tiles[:][side // 2 :: side]
    channels = order[: options.maps] if picture.strip else unlike(middles, order, options.maps)
    places = [channel * side + side // 2 for channel in channels]
    if picture.strip:
        tiles = [colors[np.concatenate(list(picture.tiles[:]), axis=1)]]
    else:
        tiles = [colors[picture.tiles[place : place + 1][0]] for place in places]
    return ShownLayer(
        layer=site.layer.name,
        type=site.layer.type,
        index=site.layer.index,
        calls=1,
        key=site.key,
        shape=tuple(tensor.shape),
        layout=picture.layout,
        maps=len(numbers),
        constant=0 if picture.values == 1 else int(stats.is_constant(numbers).sum()),
        nonfinite=int(numbers[:, stats.NONFINITE].sum()),
        slice=(side // 2, side) if side > 1 else None,
        channels=tuple(channels),
        ranges=_ranges(numbers if picture.strip else numbers[channels], picture.strip),
        strip=picture.strip,
        tiles=tiles,
    )


def _ranges(numbers: Floats, together: bool) -> tuple[Span, ...]:
    """From statistics [C, 6]: of each map, or one of all together."""
    ends = [(finite(float(row[stats.MIN])), finite(float(row[stats.MAX]))) for row in numbers]
    if not together:
        return tuple(ends)
    low, high = ([end for end in side if end is not None] for side in zip(*ends, strict=True))
    return ((min(low, default=None), max(high, default=None)),)


def words_on(row: ShownLayer) -> OverviewRow:
    """A layer's row on the page."""
    lines = [row.type, by(row.shape)]
    if row.slice is not None:
        lines.append(f"middle of {row.slice[1]} slices")
    if row.one_scale:
        lines.append("one scale for all")
    if row.calls > 1:
        lines.append(f"call 1 of {row.calls}")
    if row.constant:
        lines.append(f"{row.constant} of {row.maps} constant")
    if row.nonfinite:
        lines.append(f"{row.nonfinite} NaN or infinite")
    return OverviewRow(row.layer or row.type, lines, list(_tiles(row)), row.strip)


def _tiles(row: ShownLayer) -> Iterator[OverviewTile]:
    if row.strip:
        low, high = row.ranges[0]
        words = "all equal" if low == high else f"largest at {', '.join(map(str, row.channels))}"
        yield OverviewTile(f"{counted(row.maps, 'number')}, {words}", _span(row, 0), row.tiles[0])
        return
    for place, channel in enumerate(row.channels):
        spans = [_span(row, place), _span(row, place, "…"), _span(row, place, "…", 1)]
        yield OverviewTile(str(channel), spans[0], row.tiles[place], spans[1:])


def _span(row: ShownLayer, place: int, between: str = " … ", digits: int = 2) -> str:
    low, high = row.ranges[place]
    if low is None or high is None:
        return ""
    first, last = _brief(low, digits), _brief(high, digits)
    if first == last:
        return "≈" * (low != high) + first
    return f"{first}{between}{last}"


def _brief(value: float, digits: int) -> str:
    """A number in a few letters, as 0.013, 1.2, 350, 2e-6: with a power of ten where that is
    shorter."""
    if 10 <= abs(value) < 1e5:
        return f"{value:.0f}"
    base, _, power = f"{value:.{digits - 1}e}".partition("e")
    scientific = f"{float(base):g}e{int(power)}"
    return min(f"{value:.{digits}g}", scientific, key=len) if value else "0"
