"""Sheets: where tiles and captions lie, and what fits, against Pillow and numpy."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from drawn_maps import box_of
from numpy.testing import assert_array_equal
from PIL import Image

from featviz.drawing import sheet
from featviz.drawing.sheet import Canvas, Caption, Cell, Letters, PixelCanvas, TileGrid
from featviz.drawing.vector import VectorCanvas

RED = (250, 10, 20)


@pytest.mark.parametrize(
    ("number", "cell"),
    [
        (0, (5, 7, 20, 10)),
        (2, (55, 7, 20, 10)),
        (3, (5, 37, 20, 10)),
    ],
)
def test_tiles_of_one_size_run_row_by_row(
    number: int,
    cell: tuple[int, int, int, int],
) -> None:
    """The fourth of three in a row is the first of the second row."""
    grid = TileGrid(columns=3, width=20, height=10, left=5, top=7, across=25, down=30)
    assert grid.cell(number) == cell


def test_a_picture_fills_its_cell() -> None:
    """A picture that is pasted fills its cell to the pixel."""
    canvas = PixelCanvas(100, 80, points=12)
    canvas.paste(Image.new("RGB", (40, 30), RED), Cell(10, 5, 40, 30))
    assert box_of(np.asarray(canvas.image), RED) == (10, 5, 40, 30)


def test_captions_stand_below_their_tile() -> None:
    """In their colours, line below line, from the tile's left edge on."""
    canvas = PixelCanvas(100, 80, points=12)
    captions = [Caption("MM", (0, 0, 200)), Caption("MM", (0, 200, 0))]
    canvas.caption(Cell(10, 5, 40, 30), captions)
    pixels = np.asarray(canvas.image).astype(int)
    tops = []
    for channel in (2, 1):
        ink = pixels[..., channel] > pixels.min(2) + 60
        rows, columns = np.nonzero(ink)
        assert 10 <= columns.min() < 13
        tops.append(rows.min())
    assert tops[0] >= 35
    assert tops[1] - tops[0] == sheet.line_height(12)


LINE = "a long line of a title"


@pytest.mark.parametrize("max_width", [30, 60])
def test_a_long_line_keeps_its_beginning(max_width: int) -> None:
    """As many letters as fit are kept, and a mark stands behind them."""
    short = sheet.begin_of(LINE, 12, max_width)
    count = len(short) - 1
    assert short == f"{LINE[:count]}…"
    assert sheet.text_width(short, 12) <= max_width
    assert sheet.text_width(f"{LINE[: count + 1]}…", 12) > max_width


def test_a_line_that_fits_stays_whole() -> None:
    """A line that fits has no mark."""
    assert sheet.begin_of(LINE, 12, 1000) == LINE


@pytest.mark.parametrize("max_width", [30, 60])
def test_a_long_name_keeps_its_end(max_width: int) -> None:
    """The end of a name tells images apart; as many letters as fit are kept."""
    name = "a/very/long/path/0017.jpg"
    short = sheet.end_of(name, 12, max_width)
    count = len(short) - 1
    assert short == f"…{name[-count:]}"
    assert sheet.text_width(short, 12) <= max_width
    assert sheet.text_width(f"…{name[-count - 1 :]}", 12) > max_width


def test_a_name_that_fits_stays_whole() -> None:
    """It has no mark; control characters are escaped."""
    assert sheet.end_of("cats/0017.jpg", 12, 1000) == "cats/0017.jpg"
    assert sheet.end_of("a\x07", 12, 1000) == "a\\x07"


def test_letters_have_accents_and_signs() -> None:
    """None of them is the box that stands for a letter that is lacking."""
    lacking = sheet.pixel_font(12).getmask("\ue000")
    for letter in "éß×Я":
        assert bytes(sheet.pixel_font(12).getmask(letter)) != bytes(lacking)


def test_pixels_stay_squares_where_a_picture_grows() -> None:
    """Each pixel becomes four in a picture that is twice as large."""
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    grown = sheet.resize(Image.fromarray(pixels), 2)
    assert_array_equal(grown, np.kron(pixels, np.ones((2, 2), np.uint8)))


def test_a_picture_that_shrinks_is_smoothed() -> None:
    """Of a chessboard of single pixels grey is left."""
    y, x = np.mgrid[:8, :8]
    board = ((y + x) % 2 * 255).astype(np.uint8)
    shrunk = np.asarray(sheet.resize(Image.fromarray(board), 0.5))
    assert set(np.unique(shrunk)) <= set(range(110, 146))


@pytest.mark.parametrize(
    ("factor", "size"),
    [
        (0.5, (2, 2)),
        (0.01, (1, 1)),
    ],
)
def test_a_picture_that_shrinks_does_not_vanish(
    factor: float,
    size: tuple[int, int],
) -> None:
    """One pixel stays of each side."""
    assert sheet.resize(Image.new("L", (4, 3)), factor).size == size


def test_a_text_that_is_too_wide_loses_its_middle() -> None:
    """It says how wide it is then, which is no more than its room; other pixels stay
    white."""
    canvas = Canvas(50, 400)
    text = "encoder.layers.encoder_layer_11.self_attention"
    width = canvas.write(text, 0.5, 0.25, Letters(10), max_width=1.5)
    assert 1.2 < width <= 1.5
    assert canvas.width(text, Letters(10)) > 1.5
    inked = np.flatnonzero((canvas.pixels < 255).any(2).any(0))
    assert inked.min() >= 48
    assert inked.max() < 52 + 150


def test_a_rectangle_has_a_pixel_at_least() -> None:
    """A bar of no length is a line, as a tick is."""
    canvas = Canvas(20, 30)
    canvas.fill(Cell(0.10, 0.05, 0, 0.1), RED)
    assert box_of(canvas.pixels, RED) == (10, 5, 1, 10)


def test_a_frame_lies_inside_its_rectangle() -> None:
    """A frame is one pixel wide, and lies inside its rectangle."""
    canvas = Canvas(20, 30)
    canvas.frame(Cell(0, 0, 0.3, 0.2))
    expected = np.ones((20, 30), bool)
    expected[1:-1, 1:-1] = False
    assert_array_equal((canvas.pixels == 0).all(2), expected)


@pytest.mark.parametrize(
    ("cell", "columns", "rows"),
    [
        (Cell(0.228, 0.104, 0.1, 0.05), (23, 33), (10, 15)),
        (Cell(0.1, 0.2, 0.001, 0.001), (10, 11), (20, 21)),
    ],
)
def test_a_rectangle_has_rounded_edges(
    cell: Cell, columns: tuple[int, int], rows: tuple[int, int]
) -> None:
    """And one pixel at least."""
    canvas = Canvas(40, 50)
    canvas.fill(cell, (255, 0, 0))
    expected = np.full((40, 50, 3), 255, np.uint8)
    expected[slice(*rows), slice(*columns)] = (255, 0, 0)
    assert_array_equal(canvas.pixels, expected)


def saved_svg() -> str:
    """The SVG of a picture that is red at its upper left and blue at its lower right,
    with a text that runs upwards."""
    canvas = VectorCanvas(1.0, 2.0)
    pixels = np.zeros((2, 3, 3), np.uint8)
    pixels[0, 0] = RED
    pixels[1, 2] = (0, 0, 250)
    canvas.paste(pixels, Cell(0.1, 0.2, 0.9, 0.6))
    canvas.write("up", 1.5, 0.5, Letters(8), upright=True)
    file = io.BytesIO()
    canvas.save(file, "svg")
    return file.getvalue().decode()


def test_a_picture_stands_upright_in_an_svg() -> None:
    """As its own pixels, large enough to be seen; the same figure is the same text."""
    text = saved_svg()
    (data,) = re.findall(r'base64,([^"]+)"', text)
    picture = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    assert picture.size == (129, 86)
    assert picture.getpixel((0, 0)) == RED
    assert picture.getpixel((128, 85)) == (0, 0, 250)
    (matrix,) = re.findall(r"matrix\(([^)]+)\)", text)
    across, _, _, down, left, top = map(float, matrix.split())
    points = (129 * across, 86 * down, left, top)
    assert points == pytest.approx((64.8, 43.2, 7.2, 14.4))
    assert "rotate(-90" in text
    assert saved_svg() == text


def test_rectangles_of_an_svg_have_points_and_colours() -> None:
    """72 points an inch, counted from the upper left."""
    canvas = VectorCanvas(1.0, 2.0)
    canvas.fill(Cell(0.5, 0.25, 1.0, 0.5), RED)
    canvas.frame(Cell(0.25, 0.125, 1.5, 0.75))
    file = io.BytesIO()
    canvas.save(file, "svg")

    drawn = []
    for path, style in re.findall(
        r'<path d="([^"]+)" [^>]*style="([^"]+)"', file.getvalue().decode()
    ):
        points = np.array(re.findall(r"[ML] (\S+) (\S+)", path), float)
        drawn.append((style, points.min(0).tolist(), points.max(0).tolist()))
    red = "#{:02x}{:02x}{:02x}".format(*RED)
    fill, frame = drawn[-2:]
    assert fill[0].startswith(f"fill: {red}")
    assert fill[1:] == ([36, 18], [108, 54])
    assert "fill: none" in frame[0]
    assert "stroke: #000000" in frame[0]
    assert frame[1:] == ([18, 9], [126, 63])
