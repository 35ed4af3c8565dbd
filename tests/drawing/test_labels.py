"""What is written on tiles: labels against Pillow's own text, marks of constant maps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawn_maps import SITE, noise
from matplotlib import colormaps
from msgspec.structs import replace
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from featviz.drawing import drawer, grid
from featviz.drawing.picture import to_image
from featviz.options import DrawOptions

PLAIN = DrawOptions(scale=1, padding=0)
LABELLED = replace(PLAIN, labels=True)
INFINITE = float("inf")


def tiles(tensor: Tensor, options: DrawOptions) -> np.ndarray:
    """RGB tiles [N, h, w, 3] of a picture without padding, one column."""
    options = replace(options, nrow=1)
    picture = drawer.draw(options, SITE, tensor)[""]
    whole = np.asarray(to_image(picture).convert("RGB"))
    return whole.reshape(picture.plan.maps, *picture.plan.tile, 3)


def pillows(text: str) -> np.ndarray:
    """A text as Pillow draws it in its bitmap font, white on black: bool [rows,
    columns] of ink."""
    image = Image.new("1", (100, 20))
    ImageDraw.Draw(image).text(
        (0, 0), text, fill=1, font=ImageFont.load_default_imagefont()
    )
    ink = np.asarray(image)
    rows = np.flatnonzero(ink.any(1))
    columns = np.flatnonzero(ink.any(0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


@pytest.mark.parametrize("cmap", ["grey", "viridis", "coolwarm"])
def test_label_is_pillows_text_in_white_on_black(cmap: str) -> None:
    """The channel stands in the upper left of its tile, one pixel of ground around it;
    all other pixels are those of the map."""
    tensor = noise(1, 12, 24, 30)
    plain = tiles(tensor, replace(PLAIN, cmap=cmap)).astype(int)
    drawn_tiles = tiles(tensor, replace(LABELLED, cmap=cmap)).astype(int)
    for channel, (tile, before) in enumerate(zip(drawn_tiles, plain, strict=True)):
        height, width = grid.glyphs(str(channel)).shape
        assert (height, width) == (9, 6 * len(str(channel)) + 1)
        box = tile[:height, :width]
        assert set(np.unique(box)) == {0, 255}
        ink = box[..., 0] == 255
        label = pillows(str(channel))
        where = np.argwhere(ink).min(0)
        inside = ink[
            where[0] : where[0] + label.shape[0], where[1] : where[1] + label.shape[1]
        ]
        assert np.array_equal(inside, label)
        assert inside.sum() == ink.sum()
        assert where.min() >= 1
        rest = np.ones(tile.shape[:2], bool)
        rest[:height, :width] = False
        assert np.abs(tile - before)[rest].max() <= (0 if cmap == "grey" else 8)


def test_labelled_colormap_is_still_matplotlibs() -> None:
    """Black and white take two of its levels, and what is left spans the whole map."""
    ramp = torch.linspace(0, 1, 252).reshape(1, 1, 1, 252).expand(1, 1, 40, 252)
    found = tiles(ramp, replace(LABELLED, cmap="viridis"))[0, -1]
    assert np.array_equal(
        found, colormaps["viridis"](np.linspace(0, 1, 252), bytes=True)[:, :3]
    )


def test_clip_is_labelled_once_for_each_channel() -> None:
    """Of tiles side by side the first has the label."""
    tensor = noise(1, 2, 3, 20, 20)
    changed = (tiles(tensor, LABELLED) != tiles(tensor, PLAIN)).any(axis=(1, 2, 3))
    assert changed.tolist() == [True, False, False, True, False, False]


def test_label_larger_than_its_tile_is_left_out() -> None:
    """Tiles of 12 pixels hold one digit: the others stay plain."""
    tensor = noise(1, 12, 12, 12)
    changed = (tiles(tensor, LABELLED) != tiles(tensor, PLAIN)).any(axis=(1, 2, 3))
    assert changed.tolist() == [True] * 10 + [False] * 2


def test_two_texts_never_cover_each_other() -> None:
    """In a tile too small for the channel and `×N`, the channel stays."""
    tensor = noise(1, 3, 9, 14)
    tensor[0, 1] = tensor[0, 0]
    drawn_tiles = tiles(tensor, replace(LABELLED, collapse=0.9))
    alone = tiles(tensor[:, [0, 2]], LABELLED)
    assert np.array_equal(drawn_tiles[0], alone[0])
    wide = noise(1, 2, 9, 30)
    wide[0, 1] = wide[0, 0]
    labelled = tiles(wide, replace(LABELLED, collapse=0.9))[0]
    assert set(np.unique(labelled[:, :7])) == {0, 255}
    assert set(np.unique(labelled[:, -13:])) == {0, 255}


EVERY_SIZE = pytest.mark.parametrize("size", [(28, 28), (7, 7), (56, 40)])
EVERY_CMAP = pytest.mark.parametrize("cmap", ["grey", "viridis"])


def marked_tiles(size: tuple[int, int], cmap: str) -> np.ndarray:
    """RGB tiles of maps of 0, of 7, of -3, of one bright pixel, of values that are not
    finite."""
    maps = noise(6, *size).abs()
    maps[0] = 0
    maps[1] = 7.0
    maps[2] = -3.0
    maps[3] = 0
    maps[4] = INFINITE
    maps[3, 2, 1] = 1.0
    return tiles(maps[None], replace(PLAIN, cmap=cmap)).astype(int)


def lowest_color(cmap: str) -> np.ndarray:
    """RGB of the lowest level, by matplotlib."""
    if cmap == "grey":
        return np.zeros(3)
    return colormaps[cmap](np.linspace(0, 1, 254), bytes=True)[0, :3]


@EVERY_SIZE
@EVERY_CMAP
def test_a_map_of_zeros_is_crossed_out(size: tuple[int, int], cmap: str) -> None:
    """A cross from corner to corner, well visible, and not too much of the tile."""
    zero = marked_tiles(size, cmap)[0]
    lowest = lowest_color(cmap)
    cross = (zero != lowest).any(-1)
    assert np.array_equal(cross, cross[::-1])
    assert np.array_equal(cross, cross[:, ::-1])
    assert cross[0, 0]
    assert cross[-1, 0]
    assert 0 < cross.mean() < 0.5
    assert np.abs(zero[cross][0] - lowest).max() > 60


@EVERY_SIZE
@EVERY_CMAP
def test_a_constant_map_has_one_stroke(size: tuple[int, int], cmap: str) -> None:
    """From the lower left to the upper right, whatever the value is."""
    drawn_tiles = marked_tiles(size, cmap)
    seven = drawn_tiles[1]
    stroke = (seven != seven[0, 0]).any(-1)
    assert np.array_equal(seven, drawn_tiles[2])
    assert stroke[-1, 0]
    assert stroke[0, -1]
    assert not stroke[0, 0]
    assert np.array_equal(stroke, stroke[::-1, ::-1])
    assert 0 < stroke.mean() < 0.3
    if size[0] == size[1] and cmap == "grey":
        assert np.array_equal(stroke[::-1], np.eye(size[0], dtype=bool))


@EVERY_SIZE
@EVERY_CMAP
def test_dark_and_nonfinite_maps_have_no_marks(
    size: tuple[int, int], cmap: str
) -> None:
    """One bright pixel alone; magenta everywhere."""
    drawn_tiles = marked_tiles(size, cmap)
    bright = (drawn_tiles[3] != lowest_color(cmap)).any(-1)
    assert bright.sum() == 1
    assert (drawn_tiles[4] == (255, 0, 255)).all()


def test_what_is_constant_by_nature_has_no_marks() -> None:
    """Maps of one number, vectors, and one tile of all channels."""
    for tensor in (
        torch.zeros(1, 4, 1, 1),
        torch.zeros(1, 6),
        torch.full((1, 4, 1, 1), 3.0),
    ):
        options = replace(PLAIN, scale=20)
        assert len(np.unique(tiles(tensor, options))) == 1
    one = tiles(torch.zeros(1, 4, 20, 20), replace(PLAIN, reduce="mean"))
    assert len(np.unique(one)) == 1


def test_a_mark_needs_five_pixels() -> None:
    """Tiny tiles at scale 1 stay plain; enlarged ones are marked."""
    tensor = torch.zeros(1, 3, 4, 4)
    assert len(np.unique(tiles(tensor, PLAIN))) == 1
    assert len(np.unique(tiles(tensor, replace(PLAIN, scale=2)))) == 2


def test_nan_beside_one_value_is_not_constant() -> None:
    """A map of one value and a NaN shows the NaN, without a stroke that would hide
    where."""
    maps = torch.full((2, 12, 12), 5.0)
    maps[0, 3, 4] = float("nan")
    found = tiles(maps[None], PLAIN)
    magenta = (found[0] == (255, 0, 255)).all(-1)
    assert magenta.sum() == 1
    assert magenta[3, 4]
    assert len(np.unique(found[0][~magenta], axis=0)) == 1
