"""Tiles in a picture: make_grid's arrangement, decoded by Pillow from the file as
written."""

from __future__ import annotations

import io
import zlib
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from drawn_maps import chunks, drawn, is_magenta, noise, row_of, tiles_of
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import colormaps
from numpy.testing import assert_array_equal
from PIL import Image
from tiles import assert_row
from torch import Tensor
from torchvision.utils import make_grid, save_image

from featviz.drawing import grid
from featviz.drawing.channels import choose_channels, count_chosen
from featviz.drawing.colormap import Palette
from featviz.drawing.picture import caption, encode, write_png
from featviz.errors import LayoutError
from featviz.options import PAD_GREY, DrawOptions
from featviz.records import GridPlan


def written(tensor: Tensor, **options: Any) -> Image.Image:
    """The picture as Pillow reads it back from the encoded file."""
    file = io.BytesIO()
    text = caption(row_of(tensor, **options))
    encode(drawn(tensor, **options), file, options.get("format", "png"), text)
    image = Image.open(file)
    image.load()
    return image


def torchvision_picture(tensor: Tensor, **options: Any) -> np.ndarray:
    """One channel of what make_grid and save_image write for a layer's output."""
    file = io.BytesIO()
    maps = tensor.permute(1, 0, 2, 3)
    save_image(maps, file, format="png", normalize=True, scale_each=True, **options)
    return np.asarray(Image.open(file))[..., 0]


@pytest.mark.medium
@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 40),
    height=st.integers(1, 12),
    width=st.integers(2, 12),
    seed=st.integers(0, 2**32 - 1),
    options=st.fixed_dictionaries(
        {
            "nrow": st.integers(1, 45),
            "padding": st.integers(0, 4),
            "pad_value": st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0]),
        }
    ),
)
def test_picture_equals_make_grid_and_save_image(
    count: int,
    height: int,
    width: int,
    seed: int,
    options: dict[str, Any],
) -> None:
    """With scale 1 and grey the decoded PNG is torchvision's, within one grey level."""
    tensor = noise(1, count, height, width, seed=seed)
    picture = written(tensor, **options)
    expected = torchvision_picture(tensor, **options)
    assert picture.mode == "L"
    assert picture.size == expected.shape[::-1]
    assert np.abs(np.asarray(picture).astype(int) - expected).max() <= 1


@pytest.mark.parametrize(("min_tile", "factor"), [(32, 4), (500, 9)])
def test_a_tile_alone_is_as_large_as_a_picture(min_tile: int, factor: int) -> None:
    """224 pixels, or min_tile if that is more."""
    options = DrawOptions(min_tile=min_tile)
    plan = grid.plan((1, 1, 56, 40), options, alone=True)
    assert plan.scale == (factor, factor)


@pytest.mark.parametrize(
    ("height", "width", "factor"),
    [
        (7, 7, 5),
        (1, 4, 8),
        (31, 16, 2),
        (32, 1, 1),
        (56, 56, 1),
    ],
)
def test_small_maps_grow_to_min_tile(height: int, width: int, factor: int) -> None:
    """`scale=None` takes the least whole factor by which the longer side reaches
    min_tile."""
    plan = grid.plan((6, 1, height, width), DrawOptions())
    assert plan.scale == (factor, factor)
    assert max(plan.tile) >= 32
    assert (factor - 1) * max(height, width) < 32


@pytest.mark.medium
@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 150),
    height=st.integers(1, 120),
    width=st.integers(1, 120),
    padding=st.integers(0, 30),
    slices=st.integers(1, 3),
)
def test_auto_nrow_makes_the_longer_side_shortest(
    count: int,
    height: int,
    width: int,
    padding: int,
    slices: int,
) -> None:
    """No other number of columns makes a picture with a shorter longer side, and no
    larger one as short a side; slices of a channel stay side by side."""

    def planned(nrow: int | None) -> GridPlan:
        options = DrawOptions(scale=1, padding=padding, nrow=nrow)
        return grid.plan((count, slices, height, width), options)

    sides = {}
    for columns in range(slices, count * slices + 1, slices):
        plan = planned(columns)
        sides[columns] = max(plan.height, plan.width)
    shortest = [columns for columns in sides if sides[columns] == min(sides.values())]
    assert planned(None).columns == shortest[-1]


MARKS = {1: grid.ZERO, 4: grid.CONSTANT, 5: grid.ZERO}
"""Of tiles by number."""
GAP = 201
"""The grey between tiles."""


def without_axis(pixels: np.ndarray) -> np.ndarray:
    """Grey pixels without an axis of colours."""
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


def expected_grid(tiles: np.ndarray, plan: GridPlan, marked: bool) -> np.ndarray:
    """Tiles enlarged by Kronecker's product, with their marks, and padding elsewhere."""
    picture = np.full((plan.height, plan.width, tiles.shape[-1]), GAP, np.uint8)
    shapes = grid.mark_shapes(plan.tile)
    cells = tiles_of(picture, plan)
    for number, tile in enumerate(tiles):
        cells[number][:] = np.kron(tile, np.ones((*plan.scale, 1), np.uint8))
        if marked and number in MARKS:
            cells[number][shapes[MARKS[number] - 1]] = 128 + tile[0, 0, 0]
    return picture


def row_filters(png: bytes, height: int) -> np.ndarray:
    """The filter of each row of a PNG."""
    data = b"".join(chunk.content for chunk in chunks(png) if chunk.name == b"IDAT")
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, -1)
    return rows[:, 0]


def example_tiles(depth: int) -> np.ndarray:
    """Eight tiles [5, 6, depth]: noise, but for those that are marked, and one whose
    rows are equal."""
    tiles = np.random.default_rng(1).integers(0, 200, (8, 5, 6, depth), dtype=np.uint8)
    tiles[1] = 0
    tiles[4] = 100
    tiles[5] = 0
    tiles[6, 2:] = 7
    return tiles


def write_grid(tiles: np.ndarray, plan: GridPlan, marked: bool) -> bytes:
    """A PNG of tiles in a plan."""
    marks = np.zeros(len(tiles), np.uint8)
    if marked:
        marks[list(MARKS)] = list(MARKS.values())
    palette = Palette(256, GAP, None, None)
    strips = grid.strips(plan, without_axis(tiles), palette, marks=marks)
    file = io.BytesIO()
    write_png(file, (plan.height, plan.width), strips)
    return file.getvalue()


EVERY_PIECE = pytest.mark.parametrize("piece", [1, 2**18], ids=["rows", "whole"])
EVERY_FACTOR = pytest.mark.parametrize("factor", [1, 2, 3, 4, 5, 7])


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
@pytest.mark.parametrize(("depth", "padding"), [(1, 0), (1, 2), (3, 2)])
@EVERY_PIECE
@EVERY_FACTOR
def test_pictures_in_pieces_are_tiles_enlarged_marked_and_laid(
    factor: int,
    piece: int,
    depth: int,
    padding: int,
    marked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pillow reads each tile where it belongs, with its mark."""
    monkeypatch.setattr(grid, "PIECE_BYTES", piece)
    plan = grid.plan((8, 1, 5, 6), DrawOptions(nrow=3, padding=padding, scale=factor))
    tiles = example_tiles(depth)
    png = write_grid(tiles, plan, marked)
    expected = without_axis(expected_grid(tiles, plan, marked))
    assert_array_equal(Image.open(io.BytesIO(png)), expected)


@pytest.mark.parametrize("depth", [1, 3])
@EVERY_PIECE
@EVERY_FACTOR
def test_rows_that_enlarging_repeats_take_no_bytes(
    factor: int,
    piece: int,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PNG's filter 2 (up) leaves nothing of rows that enlarging repeats."""
    monkeypatch.setattr(grid, "PIECE_BYTES", piece)
    plan = grid.plan((8, 1, 5, 6), DrawOptions(nrow=3, padding=2, scale=factor))
    png = write_grid(example_tiles(depth), plan, marked=False)
    first_tiles = row_filters(png, plan.height)[2 : 2 + 5 * factor]
    assert (first_tiles.reshape(5, factor)[:, 1:] == 2).all()


VECTOR = torch.tensor([[0.0, 10.0, 5.0, 2.5]])


def test_vector_is_one_strip_without_padding() -> None:
    """[1, F] is one row of F cells, side by side, on one shared scale."""
    assert np.asarray(written(VECTOR)).tolist() == [[0, 255, 128, 64]]
    row = asdict(row_of(VECTOR))
    assert_row(row, layout="vector", normalize="layer", range=[0.0, 10.0])


def test_cells_of_a_vector_grow() -> None:
    """Cells are enlarged to squares of min_tile."""
    grown = written(VECTOR, scale=None)
    expected = np.kron([[0, 255, 128, 64]], np.ones((32, 32), int))
    assert_array_equal(grown, expected)


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_a_strip_is_at_most_eight_times_as_wide_as_high(rows: int) -> None:
    """Whatever the rows of its cells."""
    plan = grid.plan((10, 1, rows, 1), DrawOptions(), strip=True)
    assert plan.width == 320
    assert 40 <= plan.height < 40 + rows


def test_nrow_breaks_a_vector() -> None:
    """A vector is broken into rows of so many cells."""
    rows = written(torch.arange(6.0)[None], nrow=3)
    assert np.asarray(rows).tolist() == [[0, 51, 102], [153, 204, 255]]


@pytest.mark.parametrize(
    ("options", "padding", "grey"),
    [
        ({}, 2, PAD_GREY),
        ({"padding": 2}, 2, 0.0),
        ({"pad_value": 1.0}, 2, 1.0),
        ({"padding": 1, "pad_value": 0.2}, 1, 0.2),
    ],
)
@pytest.mark.parametrize("cmap", ["grey", "viridis"])
def test_gaps_are_make_grids_where_padding_is_given(
    options: dict[str, Any],
    padding: int,
    grey: float,
    cmap: str,
) -> None:
    """Padding and pad_value mean what they mean in make_grid as soon as one is given;
    with neither, gaps and unused cells are a grey that neither a dark nor a constant
    map has."""
    picture = written(torch.rand(1, 5, 9, 7), nrow=3, cmap=cmap, **options)
    pixels = np.asarray(picture.convert("RGB"))
    holes = torch.full((5, 1, 9, 7), -1.0)
    expected = make_grid(holes, nrow=3, padding=padding, pad_value=grey)[0].numpy()
    assert pixels.shape[:2] == expected.shape
    is_gap = expected >= 0
    assert set(pixels[is_gap].flat) == {int(grey * 255 + 0.5)}


MEANS = np.array([0.0, 4.0, np.nan, 9.0, -7.0, 2.0])
DEVIATIONS = np.array([1.0, 1.0, 3.0, 0.0, 5.0, 1.0])


@pytest.mark.parametrize(
    ("text", "channels"),
    [
        ("first:3", [0, 1, 2]),
        ("first", [0, 1, 2, 3, 4, 5]),
        ("spread:3", [0, 2, 5]),
        ("spread:1", [0]),
        ("top:3", [3, 1, 5]),
        ("top:9", [3, 1, 5, 0, 4, 2]),
        ("varied:2", [4, 2]),
        ("5,0-1,9", [5, 0, 1]),
    ],
)
def test_channels_are_chosen(text: str, channels: list[int]) -> None:
    """By number in the order of the text, or the first of a ranking; a mean of NaN is
    the last."""
    assert choose_channels(text, range(6), MEANS, DEVIATIONS) == channels
    assert count_chosen(text, 6) == len(channels)


def test_channels_that_are_not_there_are_no_choice() -> None:
    """An error names the channels that are not there."""
    with pytest.raises(LayoutError, match=r"has 6 channels \(0-5\), none of 7-9"):
        choose_channels("7-9", range(6), MEANS, DEVIATIONS)


THREE = torch.tensor([[[[0.0, 1.0]], [[-2.0, 6.0]], [[1.0, 1.0]]]])
"""Three maps of two pixels."""


def test_text_chunks_tell_what_the_picture_shows() -> None:
    """Layer, call, channels and range are in the file."""
    assert_row(
        written(THREE, normalize="layer").info,
        Layer="layer1.0.conv1 (Conv2d)",
        Call="1 output",
        Channels="0-2",
        Maps="3 of 3",
        Range="layer: -2.0 to 6.0",
    )


@pytest.mark.parametrize(
    ("tensor", "options", "name", "expected"),
    [
        (THREE, {"channels": "top:2"}, "Channels", "1-2"),
        (noise(1, 30, 2, 2), {"channels": "spread:3"}, "Channels", "0,14,29"),
        (THREE, {}, "Range", "map: each map its own"),
    ],
)
def test_text_chunks_tell_which_channels_and_ranges(
    tensor: Tensor,
    options: dict[str, str],
    name: str,
    expected: str,
) -> None:
    """Texts give channels as ranges of numbers, and limits where all maps share them."""
    assert written(tensor, **options).info[name] == expected


def test_a_jpeg_tells_it_in_its_comment() -> None:
    """The comment of a JPEG holds the same texts as lines."""
    comment = written(THREE, format="jpg").info["comment"]
    assert b"Layer: layer1.0.conv1 (Conv2d)" in comment


def test_manifest_row_has_the_grid_in_pixels() -> None:
    """The size of a tile is counted in enlarged pixels."""
    row = row_of(torch.zeros(1, 4, 2, 3), nrow=3, padding=1, scale=5, marks=False)
    assert row.grid == {"nrow": 3, "padding": 1, "tile": [10, 15], "scale": 5}


def test_manifest_row_of_a_strip_has_two_scales() -> None:
    """Down and across; the strip is eight times as wide as it is high."""
    row = row_of(torch.rand(1, 100), scale=None)
    assert row.grid["tile"] == row.grid["scale"] == [125, 10]


def test_manifest_row_tells_layer_and_numbers() -> None:
    """The row names the capture, and has the statistics of all values."""
    row = row_of(torch.arange(24.0).reshape(1, 4, 2, 3))
    assert_row(
        asdict(row),
        layer="layer1.0.conv1",
        index=4,
        call=1,
        shape=[1, 4, 2, 3],
        layout="nchw",
        maps=4,
        channels=None,
        min=0,
        max=23,
        mean=11.5,
        std=pytest.approx(np.arange(24).std()),
        zero_fraction=pytest.approx(1 / 24),
        nonfinite=0,
    )


@pytest.mark.parametrize("cmap", ["viridis", "tab10"])
@pytest.mark.parametrize(
    ("format", "mode"),
    [
        ("png", "P"),
        ("webp", "RGB"),
    ],
)
def test_colormap_is_matplotlibs(cmap: str, format: str, mode: str) -> None:
    """A colormap PNG has a palette, never RGB, and its colours are matplotlib's."""
    levels = np.linspace(0, 1, 254)
    ramp = torch.from_numpy(levels).float()[None, None, None]
    picture = written(ramp, cmap=cmap, format=format)
    assert picture.mode == mode
    expected = colormaps[cmap](levels, bytes=True)[:, :3]
    assert_array_equal(np.asarray(picture.convert("RGB"))[0], expected)


@pytest.mark.parametrize("cmap", ["grey", "viridis"])
@pytest.mark.parametrize("pad_value", [0.0, 0.5, 1.0])
def test_nonfinite_values_are_magenta(cmap: str, pad_value: float) -> None:
    """NaN and Inf show as (255, 0, 255) and nothing else does; the padding stays grey."""
    tensor = torch.rand(1, 4, 5, 6)
    tensor[0, 1, 2, 3] = torch.nan
    tensor[0, 3, 0, 0] = -torch.inf
    options = {"cmap": cmap, "pad_value": pad_value}
    picture = written(tensor, **options)
    assert picture.mode == "P"
    pixels = np.asarray(picture.convert("RGB"))
    assert set(pixels[0].flat) == {int(pad_value * 255 + 0.5)}
    magenta = is_magenta(pixels)
    assert magenta.sum() == 2
    tiles = tiles_of(magenta, drawn(tensor, **options).plan)
    assert_array_equal(tiles, ~np.isfinite(tensor[0].numpy()))


LARGEST = {"webp": 16_383, "jpg": 65_500}
EVERY_LIMIT = pytest.mark.parametrize(("format", "largest"), LARGEST.items())
UPRIGHT = pytest.mark.parametrize("upright", [True, False])


def long_map(length: int, upright: bool) -> Tensor:
    """A map of one column, or of one row."""
    shape = (length, 1) if upright else (1, length)
    return torch.zeros(1, 1, *shape)


@EVERY_LIMIT
@UPRIGHT
def test_the_largest_picture_of_a_format_is_written(
    format: str,
    largest: int,
    upright: bool,
) -> None:
    """Pillow reads a picture of the most pixels that its format has."""
    assert max(written(long_map(largest, upright), format=format).size) == largest


@EVERY_LIMIT
@UPRIGHT
def test_picture_larger_than_its_format_is_refused(
    format: str,
    largest: int,
    upright: bool,
) -> None:
    """A picture with one pixel more is refused, and the error names the format."""
    message = rf"{largest + 1}.*more than {format} holds \({largest} a side"
    with pytest.raises(LayoutError, match=message):
        drawn(long_map(largest + 1, upright), format=format)


def test_a_picture_larger_than_pillow_opens_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning names the layer; the picture is written all the same."""
    written(torch.rand(1, 4, 3, 3))
    assert not caplog.messages
    monkeypatch.setattr("featviz.drawing.picture.MAX_PIXELS", 20)
    assert written(torch.rand(1, 4, 3, 3)).size == (12, 12)
    assert "the picture of layer1.0.conv1 (Conv2d) has 0 megapixels" in caplog.text
