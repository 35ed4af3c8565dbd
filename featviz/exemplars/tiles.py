"""Crops as tiles, and the pictures made of tiles: of a channel, and of all channels of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, sqrt
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from featviz.text import printable

TILE = 128
"""Pixels a side of a tile in the picture of a channel."""

_GAP, _TEXT, _LINE = 8, 12, 15
_TITLE = 2 * _LINE + _GAP
_CAPTION = 2 * _LINE + 2
_LABEL = 92
_BETWEEN, _COLUMN_GAP = 4, 24
_SMALL = (64, 48, 32)
"""Pixels a side of a tile in a sheet: the first with which it has no more than _MOST_PIXELS."""
_MOST_PIXELS, _MOST_SHOWN = 2**26, 40
_LONGEST_NAME = 19
_PAPER, _INK, _FAINT, _EMPTY = "#ffffff", "#1b2129", "#66707c", "#e3e6ea"
_MARK = "#ffd400"
_SMALLEST_MARK = 6
"""Pixels a side of the mark of a place."""

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class TileText:
    """What stands below a tile."""

    value: float
    image: str


def cut(
    picture: Image.Image,
    box: Box | None,
    size: tuple[int, int],
    place: Sequence[int] | None = None,
) -> Image.Image:
    """A crop as a tile of TILE × TILE pixels, in the middle of it.

    Args:
        picture: the input as the model saw it, RGB.
        box: left, top, right, bottom in its pixels; None gives an empty tile.
        size: height and width of the largest crop of the layer, which fills the tile: all crops of
            a layer have one scale.
        place: row, column, rows and columns of the map. Where the crop is the whole picture, the
            place is marked.
    """
    tile = Image.new("RGB", (TILE, TILE), _EMPTY)
    if box is None:
        return tile
    crop = picture.crop(box)
    factor = TILE / max(*size, *crop.size)
    width, height = (max(1, min(TILE, round(side * factor))) for side in crop.size)
    kind = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BILINEAR
    left, top = (TILE - width) // 2, (TILE - height) // 2
    tile.paste(crop.resize((width, height), kind), (left, top))
    if place is not None and box == (0, 0, *picture.size) and max(place[2:]) > 1:
        _mark(tile, (left, top, width, height), place)
    return tile


def _mark(tile: Image.Image, at: tuple[int, int, int, int], place: Sequence[int]) -> None:
    """Outline the part of the picture in which a place of the map lies."""
    left, top, width, height = at
    row, column, rows, columns = place
    across, down = (max(_SMALLEST_MARK, n) for n in (width / columns, height / rows))
    middle = (left + (column + 0.5) * width / columns, top + (row + 0.5) * height / rows)
    box = [middle[0] - across / 2, middle[1] - down / 2]
    box += [box[0] + across - 1, box[1] + down - 1]
    draw = ImageDraw.Draw(tile)
    draw.rectangle([box[0] - 1, box[1] - 1, box[2] + 1, box[3] + 1], outline=_INK)
    draw.rectangle(box, outline=_MARK)


def _columns(count: int) -> int:
    """Tiles in a row of a channel's picture."""
    return max(1, ceil(sqrt(count)))


def slot(rank: int, count: int) -> Box:
    """Where the tile of a rank lies in the picture of a channel that has room for `count`."""
    row, column = divmod(rank, _columns(count))
    left = _GAP + column * (TILE + _GAP)
    top = _TITLE + _GAP + row * (TILE + _CAPTION + _GAP)
    return left, top, left + TILE, top + TILE


def channel_size(count: int) -> tuple[int, int]:
    """Width and height of the picture of a channel with room for `count` tiles."""
    _, _, right, _ = slot(_columns(count) - 1, count)
    _, _, _, bottom = slot(count - 1, count)
    return max(right, 2 * (TILE + _GAP)) + _GAP, bottom + _CAPTION + _GAP


def draw_channel(
    title: Sequence[str], tiles: Sequence[Image.Image], texts: Sequence[TileText], count: int
) -> Image.Image:
    """The picture of a channel: two lines of title, then its tiles, best first.

    Args:
        count: tiles for which there is room.
    """
    picture = Image.new("RGB", channel_size(count), _PAPER)
    _write(picture, (_GAP, _GAP), _fitting(title[0], picture.width), _INK)
    _write(picture, (_GAP, _GAP + _LINE), _fitting(title[1], picture.width), _FAINT)
    for rank, (tile, text) in enumerate(zip(tiles, texts, strict=True)):
        left, top, _, bottom = slot(rank, count)
        picture.paste(tile, (left, top))
        _write(picture, (left, bottom + 1), f"{text.value:.4g}", _INK)
        _write(picture, (left, bottom + 1 + _LINE), short(text.image), _FAINT)
    return picture


def tile_of(picture: Image.Image, rank: int, count: int) -> Image.Image:
    """The tile of a rank, cut out of the picture of a channel."""
    return picture.crop(slot(rank, count)).convert("RGB")


@dataclass(frozen=True)
class SheetPlan:
    """How a sheet is laid out: its tiles are as large as its pixels allow."""

    tile: int
    """Pixels a side of a tile."""
    shown: int
    """Tiles in a row."""
    rows: int
    """Channels that are shown, the first ones."""

    @classmethod
    def of(cls, channels: int, count: int) -> SheetPlan:
        """Make tiles smaller, then leave out tiles of each channel, then channels."""
        count = min(count, _MOST_SHOWN)
        for tile in _SMALL:
            if cls(tile, count, channels).pixels <= _MOST_PIXELS:
                return cls(tile, count, channels)
        one = cls(_SMALL[-1], 0, 1)
        width = _MOST_PIXELS // (channels * one.height) - one.width
        shown = min(count, max(1, width // (one.tile + _BETWEEN)))
        rows = _MOST_PIXELS // cls(one.tile, shown, 1).pixels
        return cls(one.tile, shown, min(channels, rows))

    @property
    def width(self) -> int:
        """Pixels of a row, with the space beside it."""
        return _LABEL + self.shown * (self.tile + _BETWEEN) + _COLUMN_GAP

    @property
    def height(self) -> int:
        """Pixels of a row, with the space below it."""
        return self.tile + _LINE + _GAP

    @property
    def pixels(self) -> int:
        """Of all rows."""
        return self.rows * self.width * self.height


class Sheet:
    """The picture of a layer: a row of small tiles for each channel, in as many columns of rows as
    make it about square."""

    def __init__(self, title: Sequence[str], channels: int, count: int) -> None:
        """An empty sheet.

        Args:
            count: tiles of a channel, at most.
        """
        self._plan = plan = SheetPlan.of(channels, count)
        lines = [*title, *_left_out(plan, channels, count)]
        columns = max(1, round(sqrt(plan.rows * plan.height / plan.width)))
        self._high = max(1, ceil(plan.rows / columns))
        widest = max(int(_font().getlength(line)) for line in lines) + 2 * _GAP
        width = max(ceil(plan.rows / self._high) * plan.width + _GAP, widest)
        self._top = len(lines) * _LINE + 3 * _GAP
        height = self._top + self._high * plan.height + _GAP
        self.picture = Image.new("RGB", (width, height), _PAPER)
        for number, line in enumerate(lines):
            color = _INK if number == 0 else _FAINT
            _write(self.picture, (_GAP, _GAP + number * _LINE), line, color)

    def add(self, channel: int, tiles: Sequence[Image.Image], values: Sequence[float]) -> None:
        """The row of a channel."""
        if channel >= self._plan.rows:
            return
        column, down = divmod(channel, self._high)
        left, top = _GAP + column * self._plan.width, self._top + down * self._plan.height
        side = self._plan.tile
        _write(self.picture, (left, top + (side - _LINE) // 2), f"channel {channel}", _INK)
        if note := _note(values):
            _write(self.picture, (left, top + (side + _LINE) // 2), note, _FAINT)
        shown = list(zip(tiles, values, strict=True))[: self._plan.shown]
        for rank, (tile, value) in enumerate(shown):
            at = left + _LABEL + rank * (side + _BETWEEN)
            self.picture.paste(tile.resize((side, side), Image.Resampling.BOX), (at, top))
            _write(self.picture, (at, top + side), f"{value:.3g}", _FAINT)


def _note(values: Sequence[float]) -> str:
    """What a row of values cannot say: a dead channel gives zero to every image, a saturated one
    its bound."""
    if not values:
        return "no finite value"
    return "all equal" if len(values) > 1 and values[0] == values[-1] else ""


def _left_out(plan: SheetPlan, channels: int, count: int) -> list[str]:
    """What is not on a sheet, in words; the pictures of the channels have it."""
    left = []
    if plan.shown < count:
        left.append(f"the first {plan.shown} of up to {count} images")
    if plan.rows < channels:
        left.append(f"the first {plan.rows} of {channels} channels")
    return [f"for want of room only {' of '.join(left)}"] if left else []


def short(name: str) -> str:
    """The end of a name, which tells images apart."""
    name = printable(name)
    return name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]


def _fitting(line: str, width: int) -> str:
    """A line that is cut where the picture ends."""
    if _font().getlength(line) <= width - 2 * _GAP:
        return line
    while line and _font().getlength(line + "…") > width - 2 * _GAP:
        line = line[:-1]
    return line + "…"


def _write(picture: Image.Image, at: tuple[int, int], text: str, color: str) -> None:
    ImageDraw.Draw(picture).text(at, text, fill=color, font=_font())


@cache
def _font() -> Any:
    return ImageFont.load_default(_TEXT)
