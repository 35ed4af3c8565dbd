"""The page of `look`: tiles of one size, squares that stay squares, names that fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from featviz.drawing import colormap
from featviz.drawing.page import Panel, draw_page
from featviz.records import Bytes

COLOURS = ((250, 10, 20), (20, 250, 10), (10, 20, 250), (250, 240, 20))


def solid(height: int, width: int, colour: tuple[int, int, int]) -> Bytes:
    return np.full((height, width, 3), colour, np.uint8)


def quarters() -> Bytes:
    """2 × 2 pixels of four colours."""
    return np.array(COLOURS, np.uint8).reshape(2, 2, 3)


def page(*tiles: Bytes, **fields: Any) -> Bytes:
    """A page with one row of tiles."""
    maps = [Panel(str(place), pixels, note="0 … 1") for place, pixels in enumerate(tiles)]
    known = {
        "title": "net",
        "subtitle": "a.png",
        "pictures": [("input", solid(4, 4, (128, 128, 128)))],
        "bars": [],
        "remarks": [],
        "rows": [("conv1", ["Conv2d"], maps, False)],
        "key": "",
        "cmap": "grey",
    }
    return draw_page(**{**known, **fields})


def box(drawn: Bytes, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Top, left, height and width of the pixels of a colour, which fill their box."""
    here = (drawn == colour).all(2)
    rows, columns = np.flatnonzero(here.any(1)), np.flatnonzero(here.any(0))
    height, width = int(rows[-1] - rows[0] + 1), int(columns[-1] - columns[0] + 1)
    assert here.sum() == height * width
    return int(rows[0]), int(columns[0]), height, width


def test_pixels_of_a_map_stay_squares() -> None:
    """2 × 2 pixels become four squares of 60 pixels, in their places."""
    drawn = page(quarters())
    top, left, *size = box(drawn, COLOURS[0])
    assert size == [60, 60]
    for place, colour in enumerate(COLOURS):
        row, column = divmod(place, 2)
        assert box(drawn, colour) == (top + 60 * row, left + 60 * column, 60, 60)


def test_all_tiles_have_one_size() -> None:
    """Maps of 3 and of 240 pixels a side, beside each other."""
    sizes = (3, 7, 240)
    drawn = page(*(solid(n, n, c) for n, c in zip(sizes, COLOURS, strict=False)))
    boxes = [box(drawn, colour) for colour in COLOURS[:3]]
    assert {(top, height, width) for top, _, height, width in boxes} == {(boxes[0][0], 120, 120)}
    assert np.diff([left for _, left, _, _ in boxes]).tolist() == [128, 128]


@pytest.mark.parametrize("shape", [(20, 60), (30, 20), (2, 200)])
def test_a_map_keeps_its_proportions(shape: tuple[int, int]) -> None:
    """Wide and tall ones, too, within a pixel, and no tile is larger than 155 pixels a side."""
    _, _, height, width = box(page(solid(*shape, COLOURS[0])), COLOURS[0])
    assert max(height, width) <= 155
    assert abs(width * shape[0] - height * shape[1]) <= max(shape)


def test_bars_are_as_long_as_the_shares() -> None:
    """Half of the length of a share of one, for a share of a half."""
    whole, half = (page(quarters(), bars=[("cat", share)], cmap="Reds") for share in (1.0, 0.5))
    accent = tuple(int(part) for part in colormap.ramp("Reds")[256 * 2 // 5])
    assert abs(box(whole[:330], accent)[3] - 2 * box(half[:330], accent)[3]) <= 1


def test_a_strip_is_as_wide_as_the_row() -> None:
    """All numbers of a vector side by side, from the names to the margin."""
    row = "fc", ["Linear"], [Panel("4", solid(1, 4, COLOURS[0]))], True
    drawn = page(quarters(), rows=[row])
    _, left, height, width = box(drawn, COLOURS[0])
    assert (left, height, left + width) == (210, 30, drawn.shape[1] - 30)


@pytest.mark.parametrize("name", ["a" * 300, "encoder.layers.encoder_layer_11.attn.\x1b]0;y\x07"])
def test_names_stay_in_their_column(name: str) -> None:
    """However long, a name and its lines touch no tile and need no second look."""
    row = name, [name or "x"] * 6, [Panel("0", quarters(), note="0 … 1")], False
    drawn = page(rows=[row], title=name, subtitle=name, key=name)
    top = box(drawn, COLOURS[0])[0]
    assert (drawn[top - 5 : top + 150, 200:210] == 255).all()
    assert (drawn[:, :25] == 255).all() and (drawn[:, -25:] == 255).all()
