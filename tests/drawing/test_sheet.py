"""Sheets: where tiles and captions lie, and what fits, against Pillow and numpy."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from featviz.drawing import sheet
from featviz.drawing.sheet import Canvas, Caption, Cell, Letters, PixelCanvas, TileGrid

RED = (250, 10, 20)
BLUE = (10, 20, 250)


def solid(width: int, height: int, colour: tuple[int, int, int] = RED) -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def box(
    picture: Image.Image, colour: tuple[int, int, int]
) -> tuple[int, int, int, int]:
    """Left, top, width and height of the pixels of a colour, which fill their box."""
    here = (np.asarray(picture) == colour).all(2)
    rows = np.flatnonzero(here.any(1))
    columns = np.flatnonzero(here.any(0))
    width = int(columns[-1] - columns[0] + 1)
    height = int(rows[-1] - rows[0] + 1)
    assert here.sum() == width * height
    return int(columns[0]), int(rows[0]), width, height


def test_tiles_of_one_size_run_row_by_row() -> None:
    """The fourth of three in a row is the first of the second row."""
    grid = TileGrid(columns=3, width=20, height=10, left=5, top=7, across=25, down=30)
    assert grid.cell(0) == (5, 7, 20, 10)
    assert grid.cell(2) == (55, 7, 20, 10)
    assert grid.cell(3) == (5, 37, 20, 10)


def test_captions_stand_below_their_tile() -> None:
    """In their colours, line below line, from the tile's left edge on."""
    canvas = PixelCanvas(100, 80, points=12)
    cell = Cell(10, 5, 40, 30)
    canvas.paste(solid(40, 30), cell)
    canvas.caption(cell, [Caption("MM", (0, 0, 200)), Caption("MM", (0, 200, 0))])
    pixels = np.asarray(canvas.image).astype(int)
    assert box(canvas.image, RED) == (10, 5, 40, 30)
    tops = []
    for channel in (2, 1):
        ink = pixels[..., channel] > pixels[..., :].min(2) + 60
        ink[5:35, 10:50] = False
        ys, xs = np.nonzero(ink)
        assert 10 <= xs.min() < 13
        tops.append(ys.min())
    assert tops[0] >= 35
    assert tops[1] - tops[0] == sheet.line_height(12)


@pytest.mark.parametrize("max_width", [30, 60, 1000])
def test_a_long_line_keeps_its_beginning(max_width: int) -> None:
    """As many letters as fit, with a mark; all of them where they fit."""
    line = "a long line of a title"
    short = sheet.begin_of(line, 12, max_width)
    assert sheet.text_width(short, 12) <= max_width
    if max_width == 1000:
        assert short == line
    else:
        assert short.endswith("…")
        assert line.startswith(short[:-1])
        assert sheet.text_width(line[: len(short)] + "…", 12) > max_width


def test_a_long_name_keeps_its_end() -> None:
    """Which tells images apart; control characters are escaped."""
    assert sheet.end_of("cats/0017.jpg", 20) == "cats/0017.jpg"
    assert sheet.end_of("a/very/long/path/0017.jpg", 9) == "…0017.jpg"
    assert sheet.end_of("a\x07", 9) == "a\\x07"


def test_pixels_stay_squares_where_a_picture_grows() -> None:
    """Twice as large each pixel is four; half as large they are mixed; none vanishes."""
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4) * 20)
    grown = np.asarray(sheet.resized(image, 2))
    assert np.array_equal(grown, np.kron(np.asarray(image), np.ones((2, 2), np.uint8)))
    assert sheet.resized(image, 0.5).size == (2, 2)
    assert sheet.resized(image, 0.01).size == (1, 1)


def test_a_text_that_is_too_wide_loses_its_middle() -> None:
    """It says how wide it is then, which is no more than its room; other pixels stay
    white."""
    canvas = Canvas(50, 400)
    text = "encoder.layers.encoder_layer_11.self_attention"
    width = canvas.write(text, 0.5, 0.25, Letters(10), max_width=1.5)
    assert 1.2 < width <= 1.5 < canvas.width(text, Letters(10))
    inked = (canvas.pixels < 255).any(2).any(0)
    assert not inked[:48].any()
    assert not inked[52 + 150 :].any()


def test_a_rectangle_has_a_pixel_at_least() -> None:
    """A bar of no length is a line, as a tick is; a frame lies inside."""
    canvas = Canvas(20, 30)
    canvas.fill(Cell(0.10, 0.05, 0, 0.1), RED)
    assert box(Image.fromarray(canvas.pixels), RED) == (10, 5, 1, 10)
    canvas.frame(Cell(0, 0, 0.3, 0.2))
    black = (canvas.pixels == 0).all(2)
    assert black.sum() == 2 * 30 + 2 * 18
    assert black[0].all()
    assert black[:, -1].all()
