"""Tiles in a picture: make_grid's arrangement, decoded by Pillow from the file as
written."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from drawn_maps import chunks, tiles_of
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import colormaps
from msgspec.structs import replace
from PIL import Image
from torch import Tensor
from torchvision.utils import make_grid, save_image

from featviz.drawing import drawer, grid
from featviz.drawing.channels import choose_channels, count_chosen
from featviz.drawing.colormap import Palette
from featviz.drawing.picture import GridPicture, caption, describe, encode, write_png
from featviz.errors import LayoutError
from featviz.options import PAD_GREY, DrawOptions
from featviz.records import CaptureSite, Layer
from featviz.rundir.schema import Capture

PLAIN = DrawOptions(scale=1)
SITE = CaptureSite(Layer(4, "layer1.0.conv1", "Conv2d"), "output", 1, "")


def drawn(tensor: Tensor, options: DrawOptions = PLAIN) -> GridPicture:
    """A tensor drawn under the options' own scale."""
    return drawer.draw(options, SITE, tensor)[""]


def written(tensor: Tensor, options: DrawOptions = PLAIN) -> Image.Image:
    """The picture as Pillow reads it back from the encoded file."""
    picture = drawn(tensor, options)
    row = describe(picture, SITE, tensor.shape, "output.png")
    file = io.BytesIO()
    encode(picture, file, options.format, caption(row))
    image = Image.open(io.BytesIO(file.getvalue()))
    image.load()
    return image


def described(tensor: Tensor, options: DrawOptions = PLAIN) -> Capture:
    """The manifest's row of a drawing."""
    return describe(drawn(tensor, options), SITE, tensor.shape, "output.png")


def torchvision_picture(
    tensor: Tensor, nrow: int, padding: int, pad_value: float
) -> np.ndarray:
    """One channel of what make_grid and save_image write for a layer's output."""
    file = io.BytesIO()
    save_image(
        tensor.permute(1, 0, 2, 3),
        file,
        format="png",
        nrow=nrow,
        padding=padding,
        pad_value=pad_value,
        normalize=True,
        scale_each=True,
    )
    return np.asarray(Image.open(file))[..., 0]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(2, 12),
    st.integers(1, 45),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0]),
    st.integers(0, 2**32 - 1),
)
def test_picture_equals_make_grid_and_save_image(
    count: int,
    height: int,
    width: int,
    nrow: int,
    padding: int,
    pad_value: float,
    seed: int,
) -> None:
    """With scale 1 and grey the decoded PNG is torchvision's, within one grey level."""
    tensor = torch.randn(
        1, count, height, width, generator=torch.Generator().manual_seed(seed)
    )
    options = replace(PLAIN, nrow=nrow, padding=padding, pad_value=pad_value)
    picture = written(tensor, options)
    expected = torchvision_picture(tensor, nrow, padding, pad_value)
    assert picture.mode == "L"
    assert picture.size == expected.shape[::-1]
    assert np.abs(np.asarray(picture).astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    ("height", "width", "factor"),
    [(7, 7, 5), (1, 4, 8), (31, 16, 2), (32, 1, 1), (56, 56, 1)],
)
def test_small_maps_grow_to_min_tile(height: int, width: int, factor: int) -> None:
    """`scale=None` takes the least whole factor by which the longer side reaches
    min_tile."""
    plan = grid.plan((6, 1, height, width), DrawOptions())
    assert plan.scale == (factor, factor)
    assert max(plan.tile) >= 32 > (factor - 1) * max(height, width)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 150), st.integers(1, 120), st.integers(1, 120), st.integers(0, 3))
def test_auto_nrow_makes_the_longer_side_shortest(
    count: int, height: int, width: int, padding: int
) -> None:
    """No other number of columns makes a picture with a shorter longer side."""
    options = replace(PLAIN, padding=padding)
    found = grid.plan((count, 1, height, width), options)
    others = (
        grid.plan((count, 1, height, width), replace(options, nrow=n))
        for n in range(1, count + 1)
    )
    assert max(found.height, found.width) == min(max(p.height, p.width) for p in others)


@pytest.mark.parametrize("piece", [1, 2**18], ids=["rows", "whole"])
@pytest.mark.parametrize(("colours", "padding"), [(1, 0), (1, 2), (3, 2)])
@pytest.mark.parametrize("factor", [1, 2, 3, 4, 5, 7])
def test_pictures_in_pieces_are_tiles_enlarged_marked_and_laid(
    factor: int, colours: int, padding: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow reads each tile by Kronecker's product, with its mark, and padding
    elsewhere; of rows that enlarging repeats nothing is left behind PNG's filter 2
    (up)."""
    plan = grid.plan((8, 1, 5, 6), DrawOptions(nrow=3, padding=padding, scale=factor))
    rng = np.random.default_rng(factor)
    tiles = rng.integers(0, 200, (8, 5, 6, colours), dtype=np.uint8)
    tiles[1], tiles[4], tiles[5], tiles[6, 2:] = 0, 100, 0, 7
    marks = {1: grid.ZERO, 4: grid.CONSTANT, 5: grid.ZERO}
    colors = Palette(256, 201, None, None)
    monkeypatch.setattr(grid, "PIECE_BYTES", piece)
    shapes = grid.marks(plan.tile)
    high = plan.tile[0] + padding
    wide = plan.tile[1] + padding
    for written in (
        None,
        {number: grid.Label(mark=mark) for number, mark in marks.items()},
    ):
        expected = np.full((plan.height, plan.width, colours), 201, np.uint8)
        for number, tile in enumerate(tiles):
            grown = np.kron(tile, np.ones((factor, factor, 1), np.uint8))
            if written and number in marks:
                grown[shapes[marks[number] - 1]] = 128 + tile[0, 0, 0]
            top = padding + number // 3 * high
            left_edge = padding + number % 3 * wide
            expected[top : top + plan.tile[0], left_edge : left_edge + plan.tile[1]] = (
                grown
            )
        file = io.BytesIO()
        shown = tiles if colours == 3 else tiles[..., 0]
        strips = grid.strips(plan, shown, colors, written)
        write_png(file, (plan.height, plan.width), strips)
        picture = np.asarray(Image.open(file)).reshape(expected.shape)
        assert np.array_equal(picture, expected)
        if written is None:
            data = b"".join(
                chunk
                for chunk_type, chunk in chunks(file.getvalue())
                if chunk_type == b"IDAT"
            )
            lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(
                plan.height, -1
            )
            filters = lines[:, 0]
            first = padding + np.arange(5) * factor
            repeated = [filters[first + again] for again in range(1, factor)]
            assert all((repetition == 2).all() for repetition in repeated)


def test_vector_is_one_strip_without_padding() -> None:
    """[1, F] is one row of F cells, side by side, on one shared scale; `nrow` breaks
    it."""
    tensor = torch.tensor([[0.0, 10.0, 5.0, 2.5]])
    assert np.asarray(written(tensor)).tolist() == [[0, 255, 128, 64]]
    row = described(tensor)
    assert (row.layout, row.normalize, row.range) == ("vector", "layer", [0.0, 10.0])
    grown = np.asarray(written(tensor, DrawOptions()))
    assert np.array_equal(grown, np.kron([[0, 255, 128, 64]], np.ones((32, 32), int)))
    rows = written(torch.arange(6.0)[None], replace(PLAIN, nrow=3))
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
    options: dict[str, Any], padding: int, grey: float, cmap: str
) -> None:
    """Padding and pad_value mean what they mean in make_grid as soon as one is given;
    with neither, gaps and unused cells are a grey that neither a dark nor a constant
    map has."""
    tensor = torch.rand(1, 5, 9, 7, generator=torch.Generator().manual_seed(0))
    picture = written(tensor, DrawOptions(scale=1, nrow=3, cmap=cmap, **options))
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    maps = torch.zeros(5, 1, 9, 7)
    expected = make_grid(maps, nrow=3, padding=padding, pad_value=grey).permute(1, 2, 0)
    inside = make_grid(torch.ones(5, 1, 9, 7), nrow=3, padding=padding)[0] > 0
    assert pixels.shape == expected.shape
    gaps = ~inside.numpy()
    assert np.array_equal(
        pixels[gaps], (expected.numpy() * 255 + 0.5).astype(int)[gaps]
    )


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
    means = np.array([0.0, 4.0, np.nan, 9.0, -7.0, 2.0])
    deviations = np.array([1.0, 1.0, 3.0, 0.0, 5.0, 1.0])
    assert choose_channels(text, range(6), means, deviations) == channels
    assert count_chosen(text, 6) == len(channels)


def test_a_channel_that_is_not_there_is_no_choice() -> None:
    """Beside others it is left out; alone it is told."""
    zeros = np.zeros(6)
    with pytest.raises(LayoutError, match="has 6 channels, none of 7-9"):
        choose_channels("7-9", range(6), zeros, zeros)


def test_text_chunks_tell_what_the_picture_shows() -> None:
    """Layer, call, channels and range are in the file."""
    tensor = torch.tensor([[[[0.0, 1.0]], [[-2.0, 6.0]], [[1.0, 1.0]]]])
    text = written(tensor, replace(PLAIN, normalize="layer")).info
    assert text["Layer"] == "layer1.0.conv1 (Conv2d)"
    assert text["Call"] == "1 output"
    assert text["Channels"] == "0-2"
    assert text["Maps"] == "3 of 3"
    assert text["Range"] == "layer: -2.0 to 6.0"
    comment = written(tensor, replace(PLAIN, format="jpg")).info["comment"]
    assert b"Layer: layer1.0.conv1 (Conv2d)" in comment
    few = replace(PLAIN, channels="top:2")
    assert written(tensor, few).info["Channels"] == "1-2"
    assert written(tensor).info["Range"] == "map: each map its own"
    spread = written(torch.randn(1, 30, 2, 2), replace(PLAIN, channels="spread:3"))
    assert spread.info["Channels"] == "0,14,29"


def test_manifest_row_tells_geometry_and_numbers() -> None:
    """The row has the grid in pixels, and the numbers of all values."""
    tensor = torch.arange(24.0).reshape(1, 4, 2, 3)
    row = described(tensor, DrawOptions(nrow=3, padding=1, scale=5))
    assert row.grid == {"nrow": 3, "padding": 1, "tile": [10, 15], "scale": 5}
    assert (row.shape, row.layout, row.maps) == ([1, 4, 2, 3], "nchw", 4)
    assert (row.layer, row.index, row.call) == ("layer1.0.conv1", 4, 1)
    assert (row.min, row.max, row.mean, row.nonfinite) == (0, 23, 11.5, 0)
    assert row.std == pytest.approx(np.arange(24).std())
    assert row.channels is None
    assert row.zero_fraction == pytest.approx(1 / 24)


@pytest.mark.parametrize("cmap", ["viridis", "tab10"])
@pytest.mark.parametrize("format", ["png", "webp"])
def test_colormap_is_matplotlibs(cmap: str, format: str) -> None:
    """A colormap PNG has a palette, never RGB, and its colours are matplotlib's."""
    tensor = torch.linspace(0, 1, 254).reshape(1, 1, 1, 254)
    found = written(tensor, replace(PLAIN, cmap=cmap, format=format))  # type: ignore[arg-type]
    assert found.mode == ("P" if format == "png" else "RGB")
    expected = colormaps[cmap](np.linspace(0, 1, 254), bytes=True)[:, :3]
    assert np.array_equal(np.asarray(found.convert("RGB"))[0], expected)


@pytest.mark.parametrize("cmap", ["grey", "viridis"])
@pytest.mark.parametrize("pad_value", [0.0, 0.5, 1.0])
def test_nonfinite_values_are_magenta(cmap: str, pad_value: float) -> None:
    """NaN and Inf show as (255, 0, 255) and nothing else does; the padding stays grey."""
    tensor = torch.rand(1, 4, 5, 6, generator=torch.Generator().manual_seed(5))
    tensor[0, 1, 2, 3], tensor[0, 3, 0, 0] = float("nan"), float("-inf")
    options = replace(PLAIN, cmap=cmap, pad_value=pad_value)
    image = written(tensor, options)
    assert image.mode == "P"
    pixels = np.asarray(image.convert("RGB"))
    assert (pixels[0] == int(pad_value * 255 + 0.5)).all()
    magenta = (pixels == (255, 0, 255)).all(axis=-1)
    tiles = np.stack(tiles_of(magenta, drawn(tensor, options).plan))
    assert np.array_equal(tiles, ~np.isfinite(tensor[0].numpy()))
    assert magenta.sum() == 2


@pytest.mark.parametrize(("format", "most"), [("webp", 16_383), ("jpg", 65_500)])
@pytest.mark.parametrize("upright", [True, False])
def test_picture_larger_than_its_format_is_refused(
    format: str, most: int, upright: bool
) -> None:
    """The largest side that a format holds can be written; one pixel more is refused by
    name."""
    shape = (1, 1, most, 1) if upright else (1, 1, 1, most)
    options = replace(PLAIN, format=format)
    assert max(written(torch.zeros(shape), options).size) == most
    larger = [side + (side == most) for side in shape]
    with pytest.raises(
        LayoutError, match=rf"{most + 1}.*more than {format} holds \({most} a side"
    ):
        drawn(torch.zeros(larger), options)


def test_a_picture_larger_than_pillow_opens_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the layer's name; the picture is written all the same."""
    written(torch.rand(1, 4, 3, 3))
    assert not caplog.messages
    monkeypatch.setattr("featviz.drawing.picture.MAX_PIXELS", 20)
    assert written(torch.rand(1, 4, 3, 3)).size == (12, 12)
    assert "the picture of layer1.0.conv1 (Conv2d) has 0 megapixels" in caplog.text
