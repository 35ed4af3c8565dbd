"""What is written on tiles: labels against Pillow's own text, marks of constant maps."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from drawn_maps import colours, drawn, drawn_tiles, is_magenta, noise
from matplotlib import colormaps
from numpy.testing import assert_array_equal
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from featviz.drawing import grid
from featviz.drawing.picture import to_png


def tiles(tensor: Tensor, **options: Any) -> np.ndarray:
    """RGB tiles [N, h, w, 3] of a picture without padding."""
    return np.stack(drawn_tiles(tensor, **{"padding": 0, **options}))


def has_changed(tensor: Tensor, **options: Any) -> list[bool]:
    """Which tiles the options change."""
    changed = tiles(tensor, **options) != tiles(tensor)
    return changed.any(axis=(1, 2, 3)).tolist()


def pillows(text: str) -> np.ndarray:
    """A text as Pillow draws it in its bitmap font, white on black: bool [rows,
    columns] of ink."""
    image = Image.new("1", (100, 20))
    font = ImageFont.load_default_imagefont()
    ImageDraw.Draw(image).text((0, 0), text, fill=1, font=font)
    return np.asarray(image.crop(image.getbbox()))


@pytest.mark.parametrize("channel", [0, 10])
@pytest.mark.parametrize("cmap", ["grey", "viridis", "coolwarm"])
def test_label_is_pillows_text_in_white_on_black(cmap: str, channel: int) -> None:
    """The channel stands in the upper left of its tile, one pixel of ground around it;
    all other pixels are those of the map."""
    tensor = noise(1, 12, 24, 30)
    tile = tiles(tensor, cmap=cmap, labels=True)[channel]
    height, width = grid.glyphs(str(channel)).shape
    assert height == 9
    assert width == 6 * len(str(channel)) + 1
    label = Image.fromarray(tile[:height, :width].astype(np.uint8)).convert("L")
    assert set(np.unique(label)) == {0, 255}
    box = label.getbbox()
    assert min(box) >= 1
    ink = np.asarray(label.crop(box)) > 0
    assert_array_equal(ink, pillows(str(channel)))
    difference = np.abs(tile - tiles(tensor, cmap=cmap)[channel])
    difference[:height, :width] = 0
    assert difference.max() <= (0 if cmap == "grey" else 8)


def test_labelled_colormap_is_still_matplotlibs() -> None:
    """Black and white take two of its levels, and what is left spans the whole map."""
    ramp = torch.linspace(0, 1, 252).expand(1, 1, 40, 252)
    last_row = tiles(ramp, labels=True, cmap="viridis")[0, -1]
    expected = colormaps["viridis"](np.linspace(0, 1, 252), bytes=True)
    assert_array_equal(last_row, expected[:, :3])


def test_clip_is_labelled_once_for_each_channel() -> None:
    """Of tiles side by side the first has the label."""
    changed = has_changed(noise(1, 2, 3, 20, 20), labels=True)
    assert changed == [True, False, False, True, False, False]


def test_how_many_share_a_clip_is_said_once() -> None:
    """Of tiles side by side the last has it."""
    tensor = noise(1, 2, 3, 20, 20)
    tensor[0, 1] = tensor[0, 0]
    alone = tiles(tensor[:, :1])
    shared = tiles(tensor, collapse=0.9)
    changed = (shared != alone).any(axis=(1, 2, 3))
    assert changed.tolist() == [False, False, True]


def test_letters_are_white_beside_a_hole() -> None:
    """Magenta is for what is not finite alone."""
    tensor = noise(1, 2, 24, 30)
    tensor[0, 1, 20, 20] = torch.nan
    picture = tiles(tensor, labels=True)
    assert np.argwhere(is_magenta(picture)).tolist() == [[1, 20, 20]]
    assert set(np.unique(picture[:, :9, :7])) == {0, 255}


def test_label_larger_than_its_tile_is_left_out() -> None:
    """Tiles of 12 pixels hold one digit: the others stay plain."""
    changed = has_changed(noise(1, 12, 12, 12), labels=True)
    assert changed == [True] * 10 + [False] * 2


def test_of_two_texts_that_would_touch_the_channel_stays() -> None:
    """A tile of 14 pixels holds no `×N` beside it."""
    tensor = noise(1, 3, 9, 14)
    tensor[0, 1] = tensor[0, 0]
    shared, _ = tiles(tensor, labels=True, collapse=0.9)
    alone, _ = tiles(tensor[:, [0, 2]], labels=True)
    assert_array_equal(shared, alone)


def test_two_texts_stand_in_two_corners() -> None:
    """A tile of 30 pixels holds the channel on its left and `×N` on its right."""
    tensor = noise(1, 2, 9, 30)
    tensor[0, 1] = tensor[0, 0]
    (tile,) = tiles(tensor, labels=True, collapse=0.9)
    assert set(np.unique(tile[:, :7])) == {0, 255}
    assert set(np.unique(tile[:, -13:])) == {0, 255}


@pytest.mark.parametrize("cmap", ["grey", "viridis"])
def test_two_texts_of_a_narrow_tile_stand_one_below_the_other(cmap: str) -> None:
    """In black and white, whatever the colours of the map."""
    tensor = noise(1, 2, 30, 14)
    tensor[0, 1] = tensor[0, 0]
    (tile,) = tiles(tensor, labels=True, collapse=0.9, cmap=cmap)
    for text in (tile[:9, :7], tile[-9:, -13:]):
        assert set(np.unique(text)) == {0, 255}


@pytest.mark.parametrize(
    ("kind", "marks"),
    [
        ("output", [grid.ZERO, grid.CONSTANT, grid.NONE]),
        ("input", [grid.ZERO, grid.CONSTANT, grid.NONE]),
        ("grad", [grid.ZERO, grid.NONE, grid.NONE]),
        ("grad-input", [grid.ZERO, grid.NONE, grid.NONE]),
    ],
)
def test_of_gradients_zeros_alone_are_marked(kind: str, marks: list[int]) -> None:
    """Behind a pooling they are constant by nature."""
    tensor = noise(1, 3, 9, 9)
    tensor[0, 0] = 0
    tensor[0, 1] = 2
    assert drawn(tensor, kind).marks.tolist() == marks


@pytest.mark.parametrize("cmap", ["grey", "viridis"])
def test_how_many_share_a_tile_is_in_black_and_white(cmap: str) -> None:
    """Also where no channel has its number, whatever the colours of the map."""
    tensor = noise(1, 2, 20, 20)
    tensor[0, 1] = tensor[0, 0]
    (tile,) = tiles(tensor, collapse=0.9, cmap=cmap)
    assert set(np.unique(tile[-9:, -13:])) == {0, 255}


@pytest.mark.parametrize(
    ("options", "last"), [({"labels": True}, 1), ({"collapse": 0.9}, 1), ({}, 0)]
)
def test_what_is_written_on_tiles_is_in_the_file(
    options: dict[str, Any], last: int
) -> None:
    """Numbers, `×N`, or the mark of a map of zeros."""
    tensor = noise(1, 3, 20, 20)
    tensor[0, 1] = tensor[0, 0]
    tensor[0, 2] *= last
    picture = drawn(tensor, **options)
    png = np.asarray(Image.open(io.BytesIO(to_png(picture))).convert("RGB"))
    assert picture.tile_labels or picture.marks.any()
    assert_array_equal(png, colours(picture))


EVERY_SIZE = pytest.mark.parametrize("size", [(28, 28), (7, 7), (56, 40)], ids=str)
EVERY_CMAP = pytest.mark.parametrize("cmap", ["grey", "viridis"])


def marked_tile(map_values: Tensor, cmap: str) -> np.ndarray:
    """The RGB tile of a map beside one that is not constant."""
    maps = torch.stack([map_values, noise(*map_values.shape)])
    return tiles(maps[None], cmap=cmap)[0]


def lowest_colour(cmap: str) -> np.ndarray:
    """RGB of the lowest level, by matplotlib."""
    name = {"grey": "gray"}.get(cmap, cmap)
    return colormaps[name](np.linspace(0, 1, 254), bytes=True)[0, :3]


@EVERY_SIZE
@EVERY_CMAP
def test_a_map_of_zeros_is_crossed_out(size: tuple[int, int], cmap: str) -> None:
    """A cross from corner to corner, well visible, and not too much of the tile."""
    tile = marked_tile(torch.zeros(size), cmap)
    lowest = lowest_colour(cmap)
    cross = (tile != lowest).any(-1)
    assert_array_equal(cross, cross[::-1])
    assert_array_equal(cross, cross[:, ::-1])
    assert cross[0, 0]
    assert cross[-1, 0]
    assert cross.mean() < 0.5
    assert np.abs(tile[0, 0] - lowest).max() > 60


@EVERY_SIZE
@EVERY_CMAP
def test_a_constant_map_has_one_stroke(size: tuple[int, int], cmap: str) -> None:
    """From the lower left to the upper right, whatever the value is."""
    seven = marked_tile(torch.full(size, 7.0), cmap)
    assert_array_equal(seven, marked_tile(torch.full(size, -3.0), cmap))
    stroke = (seven != seven[0, 0]).any(-1)
    assert stroke[-1, 0]
    assert stroke[0, -1]
    assert_array_equal(stroke, stroke[::-1, ::-1])
    assert stroke.mean() < 0.3
    assert stroke.any(axis=0).all()
    assert stroke.any(axis=1).all()


@pytest.mark.parametrize("size", [28, 7])
def test_the_stroke_of_a_square_is_its_diagonal(size: int) -> None:
    """The stroke of a square has one pixel in each row."""
    seven = marked_tile(torch.full((size, size), 7.0), "grey")
    stroke = (seven != seven[0, 0]).any(-1)
    assert_array_equal(stroke[::-1], np.eye(size, dtype=bool))


@EVERY_SIZE
@EVERY_CMAP
def test_a_map_with_one_bright_pixel_has_no_mark(
    size: tuple[int, int],
    cmap: str,
) -> None:
    """The bright pixel alone differs from the ground."""
    maps = torch.zeros(size)
    maps[2, 1] = 1.0
    bright = (marked_tile(maps, cmap) != lowest_colour(cmap)).any(-1)
    assert np.argwhere(bright).tolist() == [[2, 1]]


@EVERY_SIZE
@EVERY_CMAP
def test_a_nonfinite_map_has_no_mark(size: tuple[int, int], cmap: str) -> None:
    """A map without a finite value is magenta everywhere."""
    assert is_magenta(marked_tile(torch.full(size, torch.inf), cmap)).all()


@pytest.mark.parametrize(
    ("tensor", "options"),
    [
        pytest.param(torch.zeros(1, 4, 1, 1), {}, id="zeros of one number"),
        pytest.param(torch.full((1, 4, 1, 1), 3.0), {}, id="maps of one number"),
        pytest.param(torch.zeros(1, 6), {}, id="a vector"),
        pytest.param(torch.zeros(1, 4, 2, 2), {"reduce": "mean"}, id="all channels"),
    ],
)
def test_what_is_constant_by_nature_has_no_marks(
    tensor: Tensor,
    options: dict[str, Any],
) -> None:
    """Maps of one number, vectors and the tile of all channels stay plain."""
    assert len(np.unique(tiles(tensor, scale=20, **options))) == 1


@pytest.mark.parametrize(
    ("size", "scale", "levels"),
    [
        ((4, 4), 1, 1),
        ((4, 4), 2, 2),
        ((5, 5), 1, 2),
        ((4, 9), 1, 1),
        ((9, 4), 1, 1),
    ],
)
def test_a_mark_needs_five_pixels(
    size: tuple[int, int], scale: int, levels: int
) -> None:
    """On either side: tiles of four pixels stay plain; enlarged ones are marked."""
    assert len(np.unique(tiles(torch.zeros(1, 3, *size), scale=scale))) == levels


def test_nan_beside_one_value_is_not_constant() -> None:
    """A map of one value and a NaN shows the NaN, without a stroke that would hide
    where."""
    maps = torch.full((1, 2, 12, 12), 5.0)
    maps[0, 0, 3, 4] = torch.nan
    tile, _ = tiles(maps)
    magenta = is_magenta(tile)
    assert np.argwhere(magenta).tolist() == [[3, 4]]
    assert len(np.unique(tile[~magenta], axis=0)) == 1
