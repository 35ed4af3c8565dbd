"""Boxes, rings and edges on pictures, pixel by pixel."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
import pytest

from featviz.drawing.outlines import with_boxes, with_outline, with_ring
from featviz.drawing.sheet import text_width
from featviz.records import Bytes

GREY = np.full((100, 140, 3), 128, np.uint8)
LABEL_HEIGHT = 14
LABEL_WIDTH = ceil(text_width("dog", 11)) + 4
Box = tuple[float, float, float, float]


def is_drawn(pixels: Bytes) -> np.ndarray:
    """Which pixels are no longer grey, [h, w]."""
    return (pixels != 128).any(axis=2)


def drawn_columns(pixels: Bytes) -> tuple[int, int]:
    """The first and the last column with something on it."""
    columns = np.flatnonzero(is_drawn(pixels).any(axis=0))
    return int(columns[0]), int(columns[-1])


def drawn_rows(pixels: Bytes) -> tuple[int, int]:
    """The first and the last row with something on it."""
    rows = np.flatnonzero(is_drawn(pixels).any(axis=1))
    return int(rows[0]), int(rows[-1])


@pytest.mark.parametrize(
    ("box", "columns", "rows"),
    [
        ((20, 30, 90, 60), (20, 90), (30, 60)),
        ((19.6, 30.4, 90.4, 59.6), (20, 90), (30, 60)),
        ((-50, 30, 300, 60), (0, 139), (30, 60)),
        ((20, -5, 90, 200), (20, 90), (0, 99)),
    ],
)
def test_a_box_lies_on_its_pixels(
    box: Box, columns: tuple[int, int], rows: tuple[int, int]
) -> None:
    """Rounded, and with its edge inside where it reaches beyond the picture; a black
    line is outside of a light one."""
    pixels = with_boxes(GREY, [box], [""])
    assert drawn_columns(pixels) == columns
    assert drawn_rows(pixels) == rows
    corner = (rows[0], columns[0])
    assert tuple(pixels[corner]) == (0, 0, 0)
    assert tuple(pixels[corner[0] + 1, corner[1] + 1]) == (255, 255, 255)
    assert tuple(pixels[50, 70]) == (128, 128, 128)


def test_a_flat_box_is_a_dark_line() -> None:
    """There is no room for a light one in it."""
    for box in ((20, 30, 90, 31), (20, 30, 21, 60)):
        pixels = with_boxes(GREY, [box], [""])
        assert set(np.unique(pixels)) == {0, 128}


def test_lines_are_as_thick_as_the_longer_side_wants() -> None:
    """A pixel for each two hundred."""
    wide = np.full((100, 1000, 3), 128, np.uint8)
    mask = np.zeros((100, 1000), bool)
    mask[:, :500] = True
    boxed = with_boxes(wide, [(100, 10, 800, 90)], [""])
    outlined = with_outline(wide, mask)
    for pixels in (boxed[50, :400], outlined[50]):
        assert (pixels == 255).all(axis=1).sum() == 5


def label_at(pixels: Bytes, left: int, top: int) -> Bytes:
    """The pixels of the label `dog`, by its upper left corner."""
    return pixels[top : top + LABEL_HEIGHT, left : left + LABEL_WIDTH]


WORD = label_at(with_boxes(GREY, [(20, 40, 90, 60)], ["dog"]), 20, 40 - LABEL_HEIGHT)


@pytest.mark.parametrize(
    ("corner", "left", "top"),
    [
        ((60, 50), 60, 50 - LABEL_HEIGHT),
        ((60, LABEL_HEIGHT), 60, 0),
        ((60, LABEL_HEIGHT - 1), 60, LABEL_HEIGHT - 1),
        ((60, 0), 60, 0),
        ((135, 50), 140 - LABEL_WIDTH, 50 - LABEL_HEIGHT),
    ],
)
def test_a_label_stands_where_it_is_whole(
    corner: tuple[int, int], left: int, top: int
) -> None:
    """Above the box, or inside it at the upper edge; further to the left at the right
    edge."""
    x, y = corner
    pixels = with_boxes(GREY, [(x, y, 139, 99)], ["dog"])
    assert (WORD < 64).any()
    assert np.array_equal(label_at(pixels, left, top), WORD)


def test_control_characters_of_a_label_are_written_out() -> None:
    """A file may call a class as it likes."""
    box = (20, 40, 90, 60)
    shown = with_boxes(GREY, [box], ["a\x07"])
    assert np.array_equal(shown, with_boxes(GREY, [box], ["a\\x07"]))


def test_a_label_is_black_on_white() -> None:
    """As the line of its box is white, with black beside it."""
    pixels = with_boxes(GREY, [(20, 40, 90, 60)], ["dog"])
    ground = label_at(pixels, 20, 40 - LABEL_HEIGHT)
    assert tuple(ground[0, 0]) == (255, 255, 255)
    assert tuple(pixels[50, 21]) == (255, 255, 255)
    assert (ground < 64).all(axis=2).any()


@pytest.mark.parametrize("size", [(100, LABEL_WIDTH - 1), (2 * LABEL_HEIGHT - 1, 140)])
def test_a_label_without_room_is_left_out(size: tuple[int, int]) -> None:
    """Narrower than the text, or lower than two lines."""
    grey = np.full((*size, 3), 128, np.uint8)
    box = (1, 20, 12, 26)
    assert np.array_equal(
        with_boxes(grey, [box], ["dog"]), with_boxes(grey, [box], [""])
    )


def test_the_first_box_lies_on_top() -> None:
    """It is the most confident one."""
    first: Box = (20, 40, 90, 60)
    second: Box = (24, 38, 95, 70)
    alone = with_boxes(GREY, [first], ["dog"])
    both = with_boxes(GREY, [first, second], ["dog", "a cat"])
    assert np.array_equal(both[is_drawn(alone)], alone[is_drawn(alone)])
    assert is_drawn(both).sum() > is_drawn(alone).sum()


@pytest.mark.parametrize("spot", [(0.25, 0.5), (0.5, 0.75)])
def test_a_ring_is_round_its_spot(spot: Sequence[float]) -> None:
    """A tenth of the longer side away from it, in black and white."""
    x, y = spot
    drawn = is_drawn(with_ring(GREY, x, y))
    rows, columns = np.nonzero(drawn)
    distances = np.hypot(columns - x * 140, rows - y * 100)
    assert distances.min() > 14 - 4
    assert distances.max() < 14 + 4
    assert drawn[round(y * 100), round(x * 140) + 14]


@pytest.mark.parametrize("scale", [1, 4])
def test_an_outline_is_the_edge_of_its_region(scale: int) -> None:
    """Inside of it, whatever the size of the mask; the picture's border is none."""
    mask = np.zeros((100 // scale, 140 // scale), bool)
    mask[: 40 // scale, : 80 // scale] = True
    pixels = with_outline(GREY, mask)
    assert drawn_rows(pixels) == (0, 39)
    assert drawn_columns(pixels) == (0, 79)
    assert tuple(pixels[39, 30]) == (255, 255, 255)
    assert tuple(pixels[20, 79]) == (255, 255, 255)
    assert tuple(pixels[38, 30]) == (0, 0, 0)
    assert not is_drawn(pixels)[:37, :77].any()
