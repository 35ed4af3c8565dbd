"""`featviz sheet`: figures and animations of runs, against their grids and numbers."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from rundirs import Drawn, summed_anew, write_run

import featviz as fv
from featviz.drawing import figure
from featviz.drawing.animation import write_animation
from featviz.drawing.grid import glyphs
from featviz.errors import StoreError, UsageError
from featviz.options import read
from featviz.options.commands import SheetOptions
from featviz.sheets.sheets import Sheet, make_sheet

LARGE: dict[str, Any] = {"tile": (64, 80), "scale": 8}
"""Tiles that a figure shows in their own size."""


def cut(drawn: Drawn, tile: int) -> np.ndarray:
    """A tile of a grid, by make_grid's arithmetic (torchvision.utils.make_grid)."""
    height, width = drawn.tile
    row, column = divmod(tile, drawn.nrow)
    y = row * (height + drawn.padding) + drawn.padding
    x = column * (width + drawn.padding) + drawn.padding
    return drawn.pixels()[y : y + height, x : x + width]


class Corner(NamedTuple):
    """Of a tile in a figure, in pixels."""

    y: int
    x: int


def corner_of(sheet: Sheet, tile: np.ndarray) -> Corner:
    """Where the one copy of a tile begins, which is there pixel for pixel."""
    pixels = sheet.pixels[..., 0]
    height, width = tile.shape
    corners = []
    # where the four corners fit, of which there are few
    top, bottom = pixels[: 1 - height], pixels[height - 1 :]
    left, right = slice(None, 1 - width), slice(width - 1, None)
    fits = (top[:, left] == tile[0, 0]) & (top[:, right] == tile[0, -1])
    fits &= (bottom[:, left] == tile[-1, 0]) & (bottom[:, right] == tile[-1, -1])
    for y, x in np.argwhere(fits).tolist():
        if np.array_equal(pixels[y : y + height, x : x + width], tile):
            corners.append(Corner(y, x))
    (corner,) = corners
    return corner


def sheet_of(*roots: Path, **options: Any) -> Sheet:
    """A sheet of runs that are there."""
    return make_sheet(roots, read(SheetOptions, options))


def run_of(*drawn: Drawn, folder: str = "out") -> Path:
    """A run of one image, in the test's own folder."""
    return write_run(Path(folder), {"a.png": drawn})


A = Drawn("relu", shade=20, **LARGE)
B = Drawn("relu", shade=120, **LARGE)


@pytest.fixture
def root() -> Path:
    """Two images, six channels."""
    return write_run(Path("out"), {"a.png": [A], "b.png": [B]})


@pytest.mark.medium
def test_columns_are_images_and_rows_are_channels(root: Path) -> None:
    """Every tile is there once, pixel for pixel, in the column of its image and the row
    of its channel."""
    sheet = sheet_of(root)
    of_a = np.array([corner_of(sheet, cut(A, channel)) for channel in range(6)])
    of_b = np.array([corner_of(sheet, cut(B, channel)) for channel in range(6)])
    rows, columns = of_a.T
    assert (np.diff(rows) > 64).all()
    assert (columns == columns[0]).all()
    assert (of_b - of_a == (0, 84)).all()
    assert sheet.channels == {"relu": [0, 1, 2, 3, 4, 5]}


@pytest.mark.medium
def test_channels_of_one_image_stand_side_by_side(root: Path) -> None:
    """In the order in which they were named."""
    sheet = sheet_of(root, images="b.png", channels="4,0-1")
    corners = [corner_of(sheet, cut(B, channel)) for channel in (4, 0, 1)]
    assert len({corner.y for corner in corners}) == 1
    assert corners == sorted(corners)
    assert sheet.images == ["b.png"]


def test_many_channels_of_one_image_go_on_below() -> None:
    """Twenty stand in three rows of seven, each below its like."""
    many = Drawn("relu", maps=20, nrow=5, **LARGE)
    sheet = sheet_of(run_of(many))
    corners = [corner_of(sheet, cut(many, channel)) for channel in range(20)]
    assert corners == sorted(corners)
    rows = sorted({corner.y for corner in corners})
    assert [[corner.y for corner in corners].count(y) for y in rows] == [7, 7, 6]
    assert corners[7].x == corners[0].x


def test_what_a_tile_says_itself_is_not_said_below_it() -> None:
    """Tiles of `run --labels` have their numbers in the corner, others below."""
    heights = []
    for labels in (False, True):
        root = write_run(Path(f"{labels}"), {"a.png": [A]}, options={"labels": labels})
        heights.append(len(sheet_of(root, channels="4").pixels))
    line = 14
    assert heights[0] - heights[1] == line


@pytest.mark.medium
@pytest.mark.parametrize(
    ("count", "in_rows"), [(12, [12]), (25, [9, 9, 7]), (78, [13] * 6)]
)
def test_many_images_go_on_below(count: int, in_rows: list[int]) -> None:
    """More than twelve of few rows are blocks that are about square together, each below
    its like."""
    images = {}
    for number in range(count):
        drawn = Drawn("relu", maps=1, shade=number + 10, tile=(24, 30), scale=3)
        images[f"{number:02}.png"] = [drawn]
    sheet = sheet_of(write_run(Path("out"), images))
    corners = [corner_of(sheet, cut(drawn, 0)) for (drawn,) in images.values()]
    assert corners == sorted(corners)
    rows = Counter(corner.y for corner in corners)
    assert [rows[y] for y in sorted(rows)] == in_rows
    assert corners[-in_rows[-1]].x == corners[0].x


def small_runs(count: int, maps: int) -> Path:
    """A run of so many small images and channels."""
    images = {}
    for number in range(count):
        drawn = Drawn("relu", maps=maps, shade=number, tile=(24, 30), scale=3)
        images[f"n{number:02}.png"] = [drawn]
    return write_run(Path(f"out{count}"), images)


def test_images_of_many_rows_stay_side_by_side() -> None:
    """Thirteen of nine rows are about square: the figure is as high as that of
    twelve."""
    heights = [len(sheet_of(small_runs(count, maps=8)).pixels) for count in (12, 13)]
    assert heights[0] == heights[1]


@pytest.mark.medium
def test_names_of_images_that_go_on_below_stand_once() -> None:
    """Below what the model saw, not below each map of it."""
    out = Path("figure.svg")
    sheet_of(small_runs(25, maps=1), out=out)
    texts = re.findall(r">(n\d\d)</text>", out.read_text("utf-8"))
    assert texts == [f"n{number:02}" for number in range(25)]


def test_numbers_of_tiles_stay_readable() -> None:
    """A tile that is made smaller keeps the number that `run --labels` wrote on it, pixel
    for pixel; what looks like no number is made smaller with its map."""
    number = np.where(glyphs("17"), 250, 10).astype(np.uint8)[..., None].repeat(3, 2)
    labelled = np.full((80, 80, 3), 100, np.uint8)
    labelled[: number.shape[0], : number.shape[1]] = number
    plain = np.arange(80, dtype=np.uint8)[None, :, None].repeat(80, 0).repeat(3, 2)
    row = figure.TableRow("", [labelled, plain], numbers=["17", "17"])
    table = figure.TileTable(["", ""], [row])
    layout = figure.lay_out(table, width=2.5)  # centimetres
    pixels = figure.draw_table(table, layout).pixels
    (left, width), (right, _) = ((round(x * 100), w) for x, w in layout.columns)
    top = round(layout.top * 100)
    assert width < 0.5  # inches, of tiles that had 0.8
    drawn = pixels[top : top + number.shape[0], left : left + number.shape[1]]
    assert np.array_equal(drawn, number)
    assert (np.diff(pixels[top + 1, right : right + 30, 0].astype(int)) > 0).all()


def test_a_number_is_not_wider_than_its_tile() -> None:
    """It would lie over the gap."""
    labelled = np.full((80, 80, 3), 100, np.uint8)
    height, width = glyphs("17").shape
    labelled[:height, :width] = np.where(glyphs("17"), 250, 10)[..., None]
    row = figure.TableRow("", [labelled, labelled], numbers=["17", "17"])
    table = figure.TileTable(["", ""], [row])
    layout = figure.lay_out(table, width=1.1)  # centimetres
    pixels = figure.draw_table(table, layout).pixels
    (left, cell_width), (right, _) = layout.columns
    assert cell_width * 100 < width
    gap = pixels[:, round((left + cell_width) * 100) : round(right * 100)]
    assert gap.shape[1] >= 2
    assert (gap == 255).all()


@pytest.mark.parametrize("dpi", [100, 300])
def test_a_number_is_as_large_as_in_the_run(dpi: int) -> None:
    """Whatever the pixels of an inch are."""
    number = np.where(glyphs("17"), 250, 10).astype(np.uint8)[..., None].repeat(3, 2)
    height, width = number.shape[:2]
    labelled = np.full((80, 80, 3), 100, np.uint8)
    labelled[:height, :width] = number
    row = figure.TableRow("", [labelled], numbers=["17"])
    table = figure.TileTable([""], [row])
    layout = figure.lay_out(table, width=1.5)  # centimetres
    pixels = figure.draw_table(table, layout, dpi).pixels
    cell = layout.cell(0, 0)
    top = round(cell.top * dpi)
    left = round(cell.left * dpi)
    factor = dpi // 100
    drawn = pixels[top : top + height * factor, left : left + width * factor]
    assert np.array_equal(drawn[::factor, ::factor], number)


def test_a_strip_beside_maps_makes_no_wide_column() -> None:
    """Columns of strips are as wide as the others."""
    strip = np.zeros((2, 40, 3), np.uint8)
    square = np.zeros((40, 40, 3), np.uint8)
    rows = [figure.TableRow("", [strip, square])] * 2
    layout = figure.lay_out(figure.TileTable(["", ""], rows))
    assert layout.cell(0, 0).width == pytest.approx(layout.cell(0, 1).width)


def test_tall_images_beside_wide_ones_leave_little_white() -> None:
    """Neither has more than four times the area of the other."""
    wide = np.full((50, 200, 3), 50, np.uint8)
    tall = np.full((200, 50, 3), 90, np.uint8)
    rows = [figure.TableRow("", [wide, tall]), figure.TableRow("", [wide, tall])]
    table = figure.TileTable(["", ""], rows)
    layout = figure.lay_out(table)
    pixels = figure.draw_table(table, layout).pixels[..., 0]
    areas = [int((pixels == shade).sum()) for shade in (50, 90)]
    assert max(areas) <= 4 * min(areas)
    assert (pixels == 255).mean() < 0.6


def test_a_selector_that_takes_no_layer_is_warned_of(
    root: Path, messages: pytest.LogCaptureFixture
) -> None:
    """The others are drawn; the warning names what may be meant."""
    sheet = sheet_of(root, layers="relu,relo")
    assert list(sheet.channels) == ["relu"]
    (warning,) = messages.messages
    assert warning == "selector 'relo' matches no layer of the runs; did you mean relu?"


@pytest.mark.medium
def test_layers_and_runs_are_rows() -> None:
    """Layers in the order of the model, runs one below the other."""
    conv1 = Drawn("conv1", index=1, shade=30, **LARGE)
    conv2 = Drawn("conv2", index=2, shade=60, **LARGE)
    second = Drawn("conv1", index=1, shade=130, **LARGE)
    images = {"a.png": [conv2, conv1], "b.png": [conv2]}
    runs = [
        write_run(Path("first"), images),
        run_of(second, folder="second"),
    ]

    sheet = sheet_of(*runs, layers="conv*", images="a.png", channels=2)

    corners = [corner_of(sheet, cut(drawn, 2)) for drawn in (conv1, conv2, second)]
    assert corners == sorted(corners)
    assert len({corner.x for corner in corners}) == 1
    assert sheet.channels == {"conv1": [2], "conv2": [2]}


@pytest.fixture
def tables() -> np.ndarray:
    """Statistics [images, channels, 6]; one image has a channel of NaN, and another has
    the contrasts of fifty."""
    tables = np.random.default_rng(3).random((3, 40, 6)).astype(np.float32)
    tables[1, :, 3] *= 50
    tables[0, 7, :4] = np.nan
    return tables


@pytest.fixture
def run_of_tables(tables: np.ndarray) -> Path:
    images = {
        f"{number}.png": [Drawn("relu", maps=40, nrow=8, stats=table)]
        for number, table in enumerate(tables)
    }
    return write_run(Path("out"), images)


def descending(values: np.ndarray) -> list[int]:
    """The channels, that of the largest value first."""
    order: list[int] = np.argsort(-values, kind="stable").tolist()
    return order


@pytest.mark.medium
def test_channels_are_chosen_by_their_mean(
    tables: np.ndarray, run_of_tables: Path
) -> None:
    """Over all images, as numpy ranks stats.npz; NaN counts for nothing. By default 24
    are shown."""
    expected = descending(np.nanmean(tables[..., 2].astype(np.float64), axis=0))
    top = sheet_of(run_of_tables, channels="top:5")
    assert top.channels["relu"] == expected[:5]
    assert sheet_of(run_of_tables).channels["relu"] == expected[:24]


def test_varied_channels_are_of_the_half_that_varies_most(
    tables: np.ndarray, run_of_tables: Path
) -> None:
    """As a share of the largest deviation in its image, averaged over the images; the
    first one is shown first."""
    stds = np.nan_to_num(tables[..., 3].astype(np.float64))
    shares = (stds / stds.max(axis=1, keepdims=True)).mean(axis=0)
    expected = descending(shares)
    varied = sheet_of(run_of_tables, channels="varied:5").channels["relu"]
    assert varied[0] == expected[0]
    assert set(varied) <= set(expected[:20])


@pytest.mark.parametrize("collapse", [{}, {"collapse": 0.9}])
def test_varied_channels_look_different(
    collapse: dict[str, float], tmp_path: Path
) -> None:
    """Channel 1 is half of channel 0, and channel 2 varies less than both; a channel of
    zeros comes last."""
    conv = torch.nn.Conv2d(3, 4, 1, bias=False)
    kernels = [[4.0, 0, 0], [2.0, 0, 0], [0, 1.0, 0], [0, 0, 0]]
    conv.weight.data = torch.tensor(kernels)[..., None, None]
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), "uint8")
    fv.run(conv, pixels, "*", tmp_path / "run", preset="none", **collapse)

    (two,) = sheet_of(tmp_path / "run", channels="varied:2").channels.values()
    (all_,) = sheet_of(tmp_path / "run", channels="varied:4").channels.values()

    assert two == [0, 2]
    assert all_ == [0, 2, *([] if collapse else [1]), 3]


def test_each_further_channel_differs_most(tmp_path: Path) -> None:
    """By numpy, its least distance from those before it is the largest one: of maps in
    their own scale, without their mean."""
    conv = torch.nn.Conv2d(3, 9, 3, bias=False)
    torch.nn.init.normal_(conv.weight, generator=torch.Generator().manual_seed(1))
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), "uint8")
    result = fv.run(
        conv, pixels, "*", tmp_path / "run", preset="none", tensors=True, scale=1
    )
    maps = result.captures[0].tensor[0].flatten(1).numpy()
    expected = [int(maps.std(axis=1).argmax())]
    maps = (maps - maps.mean(1, keepdims=True)) / np.ptp(maps, axis=1, keepdims=True)
    distances = np.linalg.norm(maps[:, None] - maps, axis=2)
    while len(expected) < 9:
        expected.append(int(distances[expected].min(axis=0).argmax()))

    (channels,) = sheet_of(tmp_path / "run", channels="varied:9").channels.values()

    assert channels == expected


@pytest.mark.parametrize(("count", "shown"), [(24, 24), (25, 24)])
def test_all_channels_are_shown_up_to_a_number(count: int, shown: int) -> None:
    """In their order; of more the strongest come first."""
    table = np.random.default_rng(5).random((count, 6)).astype(np.float32)
    run = run_of(Drawn("relu", maps=count, nrow=5, stats=table))
    expected = list(range(count)) if count == shown else descending(table[:, 2])
    assert sheet_of(run).channels["relu"] == expected[:shown]


@pytest.mark.medium
@pytest.mark.parametrize(
    "drawn",
    [
        Drawn("relu", maps=3, slices=(4, 9), nrow=5, padding=0, tile=(32, 56), scale=4),
        Drawn("relu", maps=4, nrow=4, padding=0, tile=(32, 64), scale=(32, 64)),
    ],
    ids=["slices across rows", "strip"],
)
def test_tiles_are_cut_by_the_manifests_geometry(drawn: Drawn) -> None:
    """Also where a channel has several tiles, and of a strip."""
    sheet = sheet_of(run_of(drawn))
    steps = drawn.slices[0] if drawn.slices else 1
    for first in range(0, drawn.plan.tile_count, steps):
        tiles = [cut(drawn, first + step) for step in range(steps)]
        assert corner_of(sheet, np.hstack(tiles))


@pytest.mark.medium
def test_a_channel_that_one_image_lacks_leaves_its_place_white() -> None:
    """`run --channels top:2` draws other channels of each image; rows go by channel."""
    a = Drawn("relu", maps=6, channels=[0, 3], nrow=2, shade=20, **LARGE)
    b = Drawn("relu", maps=6, channels=[3, 5], nrow=2, shade=120, **LARGE)
    sheet = sheet_of(write_run(Path("out"), {"a.png": [a], "b.png": [b]}))
    of_b = corner_of(sheet, cut(b, 0))
    assert of_b.y == corner_of(sheet, cut(a, 1)).y
    y = corner_of(sheet, cut(a, 0)).y
    assert (sheet.pixels[y : y + 64, of_b.x : of_b.x + 80] == 255).all()


def test_every_call_of_a_layer_has_rows_of_its_own() -> None:
    """The calls of a layer stand below each other, by the names that tables give
    them."""
    second = Drawn("relu", call=1, shade=70, **LARGE)
    sheet = sheet_of(run_of(A, second), channels="2,4")
    assert sheet.channels == {"relu": [2, 4], "relu.call1": [2, 4]}
    assert sheet.layers == 1
    above = corner_of(sheet, cut(A, 4))
    below = corner_of(sheet, cut(second, 4))
    assert (below.x, below.y > above.y) == (above.x, True)


def test_another_tensor_of_the_layer() -> None:
    """--tensor takes the second call; a wrong one names those that there are."""
    second = Drawn("relu", call=1, shade=90, **LARGE)
    root = run_of(A, second)
    assert corner_of(sheet_of(root, tensor="output.call1"), cut(second, 2))
    with pytest.raises(UsageError, match="the runs have no 'grad'") as caught:
        sheet_of(root, tensor="grad")
    assert "output, output.call1" in str(caught.value.hint)


@pytest.mark.medium
def test_a_scale_that_all_tiles_share_has_a_colour_bar() -> None:
    """On the right, from the brightest at the top to the darkest; scales of their own
    have none."""
    shared = Drawn("relu", more={"normalize": "range", "range": [-1.0, 3.0]}, **LARGE)
    with_bar = sheet_of(run_of(shared))
    without = sheet_of(run_of(A, folder="own"))
    assert with_bar.pixels.shape[1] - without.pixels.shape[1] == 75
    bar = with_bar.pixels[:, -72, 0].astype(int)
    bar = bar[np.flatnonzero(bar < 255)[0] :][1:60]
    assert (np.diff(bar) <= 0).all()


@pytest.mark.medium
@pytest.mark.parametrize(("width", "dpi"), [(8.5, 300), (17.0, 100)])
def test_a_figure_is_as_wide_as_it_is_told(root: Path, width: float, dpi: int) -> None:
    """In centimetres, and the PNG says how many pixels an inch has."""
    out = Path("figure.png")
    sheet = sheet_of(root, width=width, dpi=dpi, out=out)
    assert abs(sheet.image.width - width / 2.54 * dpi) <= 1
    with Image.open(out) as picture:
        assert picture.info["dpi"] == pytest.approx((dpi, dpi), abs=0.1)
        assert np.array_equal(np.asarray(picture), sheet.pixels)


PDF: dict[str, Any] = {"channels": "2,5", "title": "Layer relu", "width": 8.5}


@pytest.mark.medium
def test_a_pdf_has_its_fonts(root: Path) -> None:
    """TrueType fonts are embedded, none of type 3; the same command gives the same
    bytes."""
    out = Path("figure.pdf")
    sheet_of(root, out=out, **PDF)
    data = out.read_bytes()
    assert b"/FontFile2" in data
    assert b"/Type3" not in data
    assert data.count(b"/Subtype /Image") == 6
    sheet_of(root, out=out, overwrite=True, **PDF)
    assert out.read_bytes() == data


@pytest.mark.medium
@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="of poppler-utils")
def test_text_of_a_pdf_is_text(root: Path) -> None:
    """The title, the names of the images and the channels."""
    out = Path("figure.pdf")
    sheet_of(root, out=out, **PDF)
    command = ["pdftotext", "-layout", out, "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {"Layer", "relu", "a", "b", "input", "2", "5"} <= set(text.split())


@pytest.mark.medium
def test_the_note_of_a_narrow_figure_takes_more_lines(root: Path) -> None:
    """Every word is there, in the order of the lines."""
    out = Path("figure.svg")
    for width in (5.5, 12):
        sheet_of(root, out=out, width=width, overwrite=True)
        lines = re.findall(r"<text[^>]*>([^<]*)</text>", out.read_text("utf-8"))
        note = "each map from its least to its greatest value"
        assert note in " ".join(lines), lines


@pytest.mark.medium
def test_text_of_an_svg_is_text(root: Path) -> None:
    """And a name cannot become markup."""
    out = Path("figure.svg")
    sheet_of(root, out=out, title="<relu> $x$")
    text = out.read_text()
    assert ">input</text>" in text
    assert "&lt;relu&gt; $x$</text>" in text
    assert text.count("<image ") == 14


def moving(path: Path) -> list[np.ndarray]:
    """The frames of an animation, as Pillow reads them."""
    frames = []
    with Image.open(path) as opened:
        for number in range(getattr(opened, "n_frames", 1)):
            opened.seek(number)
            frames.append(np.asarray(opened.convert("RGB")).astype(int))
    return frames


def inside(frame: np.ndarray, corner: Corner) -> np.ndarray:
    """A tile without its edges."""
    return frame[corner.y + 10 : corner.y + 54, corner.x + 10 : corner.x + 70]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("format", "fps", "duration"), [("gif", 5, 200), ("webp", 1, 1000)]
)
def test_images_follow_one_another(
    root: Path, format: str, fps: float, duration: int
) -> None:
    """A frame for each image, of one size, each with its own tile."""
    out = Path(f"moving.{format}")
    sheet = sheet_of(root, channels="3", out=out, fps=fps)
    frames = moving(out)
    assert sheet.frames == len(frames) == 2
    corner = corner_of(sheet, cut(A, 3))
    for frame, drawn in zip(frames, (A, B), strict=True):
        assert abs(inside(frame, corner) - cut(drawn, 3)[10, 10]).max() <= 3
    with Image.open(out) as opened:
        opened.seek(1)
        opened.load()
        assert opened.info["duration"] == duration
        assert opened.info["loop"] == 0, "it is played for ever"


@pytest.mark.medium
def test_slices_of_a_clip_follow_one_another() -> None:
    """A frame for each step of the layer that has most."""
    clip = Drawn("relu", maps=2, slices=(3, 3), nrow=3, padding=0, **LARGE)
    run = write_run(Path("out"), {"clip": [clip]})
    out = Path("clip.gif")
    sheet = sheet_of(run, channels="1", out=out)
    y, x = corner_of(sheet, cut(clip, 3))
    shades = [int(frame[y + 20, x + 20, 0]) for frame in moving(out)]
    assert shades == [int(cut(clip, tile)[20, 20]) for tile in (3, 4, 5)]


@pytest.mark.medium
@pytest.mark.parametrize(("fewer", "shown"), [(2, (0, 0, 1, 1)), (3, (0, 1, 1, 2))])
def test_a_slice_of_a_layer_with_fewer_stands_for_several(
    fewer: int, shown: tuple[int, ...]
) -> None:
    """Two slices beside four are shown twice each: a layer may halve the time. Of three
    the one in the middle is."""
    long = Drawn("long", maps=1, slices=(4, 4), nrow=4, padding=0, **LARGE)
    short = Drawn(
        "short",
        maps=1,
        index=2,
        slices=(fewer, fewer),
        nrow=fewer,
        padding=0,
        shade=90,
        **LARGE,
    )
    run = write_run(Path("out"), {"clip": [long, short]})
    out = Path("clip.gif")

    sheet = sheet_of(run, layers="long,short", channels="0", out=out)

    y, x = corner_of(sheet, cut(short, 0))
    shades = [int(frame[y + 20, x + 20, 0]) for frame in moving(out)]
    assert shades == [int(cut(short, tile)[20, 20]) for tile in shown]


@pytest.mark.medium
def test_steps_of_a_training_follow_one_another() -> None:
    """A frame for each step, in their order; all images are in it."""
    steps = {2: A, 10: B, 30: A}
    for number, drawn in steps.items():
        write_run(Path(f"s/step-{number:06d}"), {"a.png": [drawn], "b.png": [A]})
    out = Path("training.gif")
    sheet = sheet_of(Path("s"), channels="3", out=out)
    frames = moving(out)
    assert sheet.frames == len(frames) == 3
    assert sheet.images == ["a.png", "b.png"]
    assert not np.array_equal(frames[0], frames[2]), "the step is written"
    assert abs(frames[0] - frames[1]).max() > 90


@pytest.mark.medium
def test_a_step_that_lacks_the_layer_leaves_its_row_white() -> None:
    """The frames of a training have one layout, whatever a step has drawn."""
    conv = Drawn("conv", shade=20, **LARGE)
    for number, drawn in {2: A, 10: conv, 30: A}.items():
        run_of(drawn, folder=f"s/step-{number:06d}")
    out = Path("training.gif")
    sheet = sheet_of(Path("s"), layers="relu", channels="3", out=out)
    first, lacking, last = moving(out)
    assert sheet.frames == 3
    assert first.shape == lacking.shape == last.shape
    corner = corner_of(sheet, cut(A, 3))
    assert (inside(lacking, corner) >= 250).all()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("folder", "roots", "titles"),
    [
        (".", ("a/out", "b/out"), ("a/out", "b/out")),
        (".", ("a/out", "b/out", "c"), ("a/out", "b/out", "c")),
        ("a/out", (".", "../../b/out"), ("out", "../../b/out")),
        ("a/out/a.png", ("..", "../../../b/out"), ("..", "../../../b/out")),
    ],
)
def test_runs_in_folders_of_one_name_are_told_apart(
    folder: str,
    roots: tuple[str, ...],
    titles: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By their paths as they were typed; a run in the current folder has the folder's
    name."""
    for name in ("a/out", "b/out", "c"):
        write_run(Path(name), {"a.png": [A], "b.png": [B]})
    out = Path("figure.svg")
    monkeypatch.chdir(folder)
    sheet_of(*map(Path, roots), channels="3", out=out)
    texts = re.findall(r">([^<>\n]+)</text>", out.read_text())
    for title in titles:
        assert any(title in text for text in texts), texts


@pytest.mark.medium
@pytest.mark.parametrize("fps", [2, 7.5])
def test_a_video_has_a_frame_for_each_image(root: Path, fps: float) -> None:
    """As PyAV decodes it, of even sides, at the rate that was asked for."""
    av = pytest.importorskip("av", reason="featviz[video]")
    out = Path("moving.mp4")
    sheet_of(root, channels="3", out=out, fps=fps)
    with av.open(str(out)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="gray") for frame in container.decode(stream)]
        assert stream.average_rate == fps
    assert len(frames) == 2
    assert abs(frames[0].astype(int) - frames[1]).max() > 60


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a[1].png", ["a[1].png", "in/a1.png"]),
        ("a1", ["in/a1.png"]),
        ("a1.png", ["in/a1.png"]),
        ("in/*", ["in/a1.png"]),
        ("b,", ["b.png"]),
        ("b,a*", ["b.png", "a[1].png", "in/a1.png"]),
        ("b,*.png", ["b.png", "a[1].png", "in/a1.png"]),
    ],
)
def test_images_are_named_by_path_file_or_glob(pattern: str, names: list[str]) -> None:
    """In the order of the patterns, each once; a name may have what is special in a
    glob."""
    images = {name: [A] for name in ("a[1].png", "b.png", "in/a1.png")}
    run = write_run(Path("out"), images)
    assert sheet_of(run, images=pattern, channels="3").images == names


@pytest.mark.parametrize(("captions", "more"), [((), 0), (("",), 0), (("7",), 0.14)])
def test_captions_take_room_where_there_is_one(
    captions: tuple[str, ...], more: float
) -> None:
    """A row of the tile, a gap, and a line."""
    tiles = [np.zeros((64, 64, 3), np.uint8)]
    rows = [figure.TableRow("", tiles, captions=captions)] * 2
    layout = figure.lay_out(figure.TileTable([""], rows))
    assert layout.step == pytest.approx(0.64 + 0.04 + more)


@pytest.mark.parametrize(
    ("rows", "inches"),
    [
        ([[300], [16]], 0.64),
        ([[300], [100]], 1.0),
        ([[300], [100], [30]], 1.0),
        ([[300], [400]], 2.24),
        ([[300, 16, 16]], 0.64),
    ],
)
def test_cells_are_as_wide_as_the_maps_need(
    rows: list[list[int]], inches: float
) -> None:
    """The widest map is enlarged by a whole factor to 64 pixels, and made smaller than
    225; what the model saw, in front, does not count."""
    table_rows = []
    for sides in rows:
        tiles = [np.zeros((side, side, 3), np.uint8) for side in sides]
        table_rows.append(figure.TableRow("", tiles))
    layout = figure.lay_out(figure.TileTable([""] * len(rows[0]), table_rows))
    assert layout.cell(0, 0).width == pytest.approx(inches)


def test_inputs_without_maps_can_be_seen() -> None:
    """As in a series whose first step lacks the layer: the narrowest is as wide as the
    widest map may be."""
    shapes = [(20, 40, 3), (40, 20, 3)]
    inputs = [np.zeros(shape, np.uint8) for shape in shapes]
    rows = [
        figure.TableRow("input", inputs, is_input=True),
        figure.TableRow("relu", [None, None]),
    ]
    layout = figure.lay_out(figure.TileTable(["a", "b"], rows))
    widths = [layout.cell(0, column).width for column in (0, 1)]
    assert min(widths) == pytest.approx(2.24)


@pytest.mark.parametrize(("fps", "duration"), [(15, 67), (8, 125), (1000, 1)])
def test_a_frame_lasts_whole_milliseconds(fps: float, duration: int) -> None:
    """Rounded, so that a long animation keeps its time."""
    frames = [np.full((4, 4, 3), shade, np.uint8) for shade in (0, 255)]
    file = io.BytesIO()
    write_animation(frames, file, "webp", fps)
    with Image.open(file) as opened:
        opened.seek(1)
        opened.load()
        assert opened.info["duration"] == duration


@pytest.mark.medium
@pytest.mark.parametrize(("height", "width"), [(33, 48), (32, 49), (33, 49), (32, 48)])
def test_a_side_of_odd_pixels_gets_a_white_one(height: int, width: int) -> None:
    """H.264 has one colour for two by two pixels."""
    av = pytest.importorskip("av", reason="featviz[video]")
    file = io.BytesIO()
    write_animation([np.zeros((height, width, 3), np.uint8)], file, "mp4", 1)
    file.seek(0)
    with av.open(file) as container:
        (frame,) = (image.to_ndarray(format="gray") for image in container.decode())
    assert frame.shape == (height + height % 2, width + width % 2)
    assert (frame[:height, :width] < 40).all()
    assert (frame[height:] > 200).all()
    assert (frame[:, width:] > 200).all()


@pytest.mark.parametrize("name", ["FIGURE.PNG", "Figure.Gif"])
def test_an_ending_may_have_any_case(root: Path, name: str) -> None:
    """The file is of the format that it says."""
    sheet_of(root, channels="3", out=Path(name))
    with Image.open(name) as picture:
        assert picture.format == Path(name).suffix[1:].upper()


def test_a_note_holds_for_all_rows() -> None:
    """Where one layer has a scale of its own and another has not, it is not said."""
    fixed = {"normalize": "range", "range": [-1.0, 3.0]}
    run = run_of(A, Drawn("conv", index=2, more=fixed, **LARGE))
    out = Path("figure.svg")
    sheet_of(run, layers="*", channels="3", out=out)
    assert "each map from its least" not in out.read_text("utf-8")


def test_images_that_a_run_left_out_are_told() -> None:
    """Those that are not whole."""
    run = write_run(Path("out"), {"a.png": [A], "b.png": [B]})
    (run / "b.png" / "manifest.json").write_text("{")
    sheet = sheet_of(run, channels="3")
    assert sheet.images == ["a.png"]
    assert list(sheet.left_out) == ["b.png"]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"layers": "conv9"}, "the runs have no layer 'conv9'", "they have relu"),
        ({"images": "c*"}, "the runs have no image 'c*'", "they have a.png, b.png"),
        (
            {"channels": "6-9"},
            "relu has 6 channels (0-5), none of 6-9",
            "it has 0 to 5",
        ),
        ({"width": 0.5}, "--width 0.5 has no room for 2 columns", "a greater --width"),
        ({"out": Path("x.bmp")}, "--out x.bmp is none of png, pdf", "--out figure.pdf"),
    ],
)
def test_refusals(root: Path, options: dict[str, Any], message: str, hint: str) -> None:
    """Each in one line, with what there is instead."""
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        sheet_of(root, **options)
    assert hint in str(caught.value.hint)


@pytest.mark.slow
def test_channels_and_one_tile_of_all_do_not_mix() -> None:
    """Rows of the one would be white in the other."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    for name, options in {"maps": {}, "mean": {"reduce": "mean"}}.items():
        fv.run(net, torch.rand(3, 16, 16), "0", name, size=16, **options)
    with pytest.raises(UsageError, match="one tile of all channels in some runs"):
        sheet_of(Path("maps"), Path("mean"))


def test_several_layers_must_be_named() -> None:
    """All of them in one figure are hardly meant."""
    run = run_of(A, Drawn("conv", index=2))
    with pytest.raises(
        UsageError, match="a sheet of runs with 2 layers needs --layers"
    ) as caught:
        sheet_of(run)
    assert "relu, conv" in str(caught.value.hint)


def test_a_figure_that_nothing_opens_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its pixels."""
    monkeypatch.setattr("featviz.drawing.sheet.MAX_PIXELS", 100)
    with pytest.raises(UsageError, match="more than Pillow opens"):
        sheet_of(root)


@pytest.mark.medium
def test_images_that_cannot_be_read(root: Path) -> None:
    """One is left out by name; of none there is no figure."""
    with pytest.raises(StoreError, match="no complete image"):
        sheet_of(write_run(Path("empty"), {}, {"a.png": "truncated"}))
    break_grids(root, ["a.png"])
    sheet = sheet_of(root)
    assert sheet.images == ["b.png"]
    assert list(sheet.left_out) == ["a.png"]
    break_grids(root, ["b.png"])
    with pytest.raises(StoreError, match=r"a\.png/001_relu/output\.png cannot be read"):
        sheet_of(root)


def break_grids(root: Path, names: Sequence[str]) -> None:
    """Cut the end off the pictures of images."""
    for name in names:
        path = root / name / "001_relu" / "output.png"
        path.write_bytes(path.read_bytes()[:-30])
        summed_anew(path.parent.parent)


def test_command_line(featviz: Run, root: Path) -> None:
    """The default name is sheet.png, which the next sheet replaces; --json says what is
    on it."""
    for channels in ("0", "top:2"):
        done = featviz("sheet", root, "--channels", channels, "--json")
        assert done.code == 0
    assert json.loads(done.out) == {
        "file": "sheet.png",
        "images": ["a.png", "b.png"],
        "channels": {"relu": [5, 4]},
        "frames": 1,
    }
    assert (Path("sheet.png")).is_file()
