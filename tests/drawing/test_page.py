"""Pages of labelled maps: figures against the maps' values and matplotlib; the page of
`look`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from drawn_maps import NAN, Box, box_of, captured, drawn, is_magenta, noise
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.testing import assert_array_equal
from PIL import Image
from runs import tree
from torch import Tensor

from featviz.drawing import colormap, page
from featviz.drawing.sheet import Tile
from featviz.records import Bytes

Colour = tuple[int, int, int]


def viridis(shares: np.ndarray) -> np.ndarray:
    """RGB of shares 0..1, by matplotlib."""
    return colormaps["viridis"](shares, bytes=True)[..., :3].astype(int)


def panels_of(tensor: Tensor, **options: Any) -> list[Tile]:
    return page.figure_tiles(drawn(tensor, **options), "viridis")


@pytest.fixture
def maps() -> Tensor:
    """Twenty maps, of which one is zero, and another constant."""
    tensor = noise(1, 20, 6, 5)
    tensor[0, 3] = 0
    tensor[0, 4] = 2.5
    return tensor


@pytest.mark.parametrize(
    ("normalize", "count"),
    [
        ("map", 16),
        ("layer", 1),
        ("symmetric", 1),
    ],
)
def test_panels_show_the_values(normalize: str, count: int, maps: Tensor) -> None:
    """The first 16 maps in viridis, to within a level of their limits."""
    panels = panels_of(maps, normalize=normalize)
    assert len(panels) == 16
    assert len({panel.limits for panel in panels}) == count
    for panel, values in zip(panels, maps[0].numpy(), strict=False):
        low, high = panel.limits
        shares = np.full((6, 5), 0.5)
        if high > low:
            shares = (values - low) / (high - low)
        assert panel.pixels == pytest.approx(viridis(shares), abs=4)


def test_panels_name_constants(maps: Tensor) -> None:
    """A panel's title names the channel, and says whether the map is constant."""
    titles = [panel.title for panel in panels_of(maps)]
    assert titles[2:5] == ["channel 2", "channel 3 (all zero)", "channel 4 (constant)"]


def test_panels_stand_in_the_order_of_the_tiles() -> None:
    """Groups say how many channels they hold."""
    tensor = noise(1, 6, 6, 5)
    tensor[0, 2] = 3 * tensor[0, 1]
    options = {"collapse": 0.99, "order": "mean"}
    titles = [panel.title for panel in panels_of(tensor, **options)]
    channels = [int(title.split()[1]) for title in titles]
    assert channels == list(drawn(tensor, **options).drawn)
    assert "channel 1 ×2" in titles


def test_a_panel_of_a_clip_is_a_channel() -> None:
    """Its slices side by side, between the limits and with the mark of the channel."""
    clip = noise(1, 3, 4, 6, 5)
    clip[0, 1] = 0
    panels = panels_of(clip)
    titles = [panel.title for panel in panels]
    assert titles == ["channel 0", "channel 1 (all zero)", "channel 2"]
    for panel, values in zip(panels, clip[0].numpy(), strict=True):
        assert panel.pixels.shape == (6, 4 * 5, 3)
        assert panel.limits == pytest.approx((values.min(), values.max()))


def test_panels_show_values_that_are_not_finite() -> None:
    """NaN is magenta in a panel."""
    tensor = noise(1, 2, 6, 5)
    tensor[0, 1, 2, 3] = NAN
    panel = panels_of(tensor)[1]
    assert np.argwhere(is_magenta(panel.pixels)).tolist() == [[2, 3]]


def test_a_vector_is_one_panel() -> None:
    """A vector is drawn as one row of pixels."""
    (panel,) = panels_of(torch.arange(10.0)[None])
    assert panel.pixels == pytest.approx(viridis(np.arange(10) / 9)[None], abs=4)


def test_a_strip_says_what_its_numbers_are() -> None:
    """Those of a vector, or the value of each constant map."""
    values = torch.arange(4.0).reshape(1, 4, 1, 1).expand(1, 4, 6, 6)
    (vector,) = panels_of(torch.arange(10.0)[None])
    (constants,) = panels_of(values)
    assert vector.title == "10 numbers"
    assert constants.title == "4 constant maps, a value each"


def test_components_have_no_colour_bar() -> None:
    """Their colours are no values."""
    (components,) = panels_of(noise(1, 5, 6, 6), reduce="pca")
    (mean,) = panels_of(noise(1, 5, 6, 6), reduce="mean")
    assert components.limits is None
    assert mean.limits is not None


@pytest.mark.parametrize("aspect", [0.5, 1.0, 2.0])
def test_cells_of_a_figure_have_the_proportions_of_its_maps(aspect: float) -> None:
    """Of the maps and of the input, high ones and wide ones."""
    size = page.figure_size(4, aspect)
    assert size.grid.height == pytest.approx(size.grid.width * aspect)
    assert size.seen.height == pytest.approx(size.seen.width * aspect)


GREEN = (10, 200, 30)


def figure_of(
    panels: Sequence[Tile],
    title: str = "t",
    shown: Bytes | None = None,
    aspect: float = 1.0,
) -> Image.Image:
    """A figure as Pillow reads it back; the input is green."""
    if shown is None:
        shown = np.full((8, 8, 3), GREEN, np.uint8)
    file = io.BytesIO()
    seen = Tile("input", shown)
    text = {"Software": "featviz"}
    page.write_figure(file, title, seen, panels, "viridis", text, aspect)
    return Image.open(file)


RAMPS = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8).expand(1, 4, 8, 8)


@pytest.fixture(scope="module")
def figure() -> Image.Image:
    """A figure of four maps that rise evenly."""
    return figure_of(panels_of(RAMPS), "a $title$ of 猫")


@pytest.fixture(scope="module")
def pixels(figure: Image.Image) -> np.ndarray:
    return np.asarray(figure.convert("RGB"))


@pytest.mark.medium
def test_figure_has_the_size_that_was_foretold(figure: Image.Image) -> None:
    """A figure has the size that was foretold, and the texts that it was given."""
    size = page.figure_size(4)
    assert figure.size == (size.width, size.height)
    assert figure.info["Software"] == "featviz"


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("shape", [(20, 30), (30, 20)])
def test_few_panels_are_as_high_as_the_input(
    count: int, shape: tuple[int, int]
) -> None:
    """They stand in a row with it, at one height, and nothing is white below them."""
    colors = [(0, 0, 250 - number) for number in range(count)]
    maps = [np.full((*shape, 3), color, np.uint8) for color in colors]
    panels = [Tile("map", picture) for picture in maps]
    green = np.full((*shape, 3), GREEN, np.uint8)
    pixels = np.asarray(figure_of(panels, "t", green, shape[0] / shape[1]))
    seen = box_of(pixels, GREEN)
    for color in colors:
        drawn = box_of(pixels, color)
        assert (drawn.top, drawn.height) == (seen.top, seen.height)
    assert seen.height / seen.width == pytest.approx(shape[0] / shape[1], abs=0.02)
    assert pixels.shape[0] - seen.top - seen.height < 30


def test_figure_shows_the_input_on_its_left(pixels: np.ndarray) -> None:
    """The input is enlarged, and fills a rectangle in the left half."""
    box = box_of(pixels, GREEN)
    assert box.width * box.height > 300 * 300
    assert box.left + box.width <= pixels.shape[1] / 2


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_figure_shows_maps_and_bars_from_end_to_end(
    share: float,
    pixels: np.ndarray,
) -> None:
    """Both ends of viridis are in all four maps, right of the input."""
    has_colour = (pixels == viridis(np.array([share]))).all(-1)
    assert np.count_nonzero(has_colour) > 4 * 20 * 20
    assert not has_colour[:, : pixels.shape[1] // 3].any()


def test_figure_has_a_title_and_a_margin(pixels: np.ndarray) -> None:
    """There is text at the top, and white at the bottom."""
    assert (pixels[:40] < 100).any()
    assert (pixels[-3:] == 255).all()


def test_ticks_stand_at_their_values() -> None:
    """Of a bar from 0 to 10.9 the lowest tick is at its end, the highest one below its
    top."""
    panel = Tile("maps", np.full((8, 8, 3), 9, np.uint8), (0.0, 10.9))
    pixels = np.asarray(figure_of([panel]).convert("RGB")).astype(int)
    is_top = abs(pixels - (253, 231, 36)).sum(2) < 30
    rows, columns = is_top.nonzero()
    ticks = np.flatnonzero(pixels[:, columns.max() + 4].sum(1) < 99)
    length = ticks.max() - rows.min()
    expected = length * 0.9 / 10.9
    assert ticks.min() - rows.min() == pytest.approx(expected, abs=2)


def test_the_bar_of_one_value_has_it_in_the_middle() -> None:
    """It reaches half a unit beyond it on both sides."""
    panel = Tile("maps", np.full((8, 8, 3), 9, np.uint8), (2.0, 2.0))
    pixels = np.asarray(figure_of([panel]).convert("RGB")).astype(int)
    is_top = abs(pixels - (253, 231, 36)).sum(2) < 30
    rows, columns = is_top.nonzero()
    ticks = np.flatnonzero(pixels[:, columns.max() + 4].sum(1) < 99)
    positions = 1 - (ticks - rows.min()) / (340 - 4)
    expected = np.array(page.ticks(1.5, 2.5).values) - 1.5
    assert positions[::-1] == pytest.approx(expected, abs=0.02)


def corner_of(number: int, count: int) -> tuple[int, int]:
    """Left and top of a panel of a figure, in pixels."""
    cell = page.figure_size(count).grid.cell(number)
    return round(100 * cell.left), round(100 * cell.top)


@pytest.mark.medium
def test_panels_have_the_pixels_of_their_maps() -> None:
    """Each map is enlarged to squares in its place."""
    tensor = noise(1, 4, 17, 10)
    tensor[0, 3, 2:9] = NAN
    panels = panels_of(tensor)
    pixels = np.asarray(figure_of(panels))
    for number, panel in enumerate(panels):
        x, y = corner_of(number, 4)
        centres = pixels[y + 5 : y + 170 : 10, x + 40 : x + 135 : 10]
        assert_array_equal(centres, panel.pixels)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("low", "high"),
    [
        (-3.3, 2.6),
        (999.97, 1000.03),
        (-4e-4, 3e-4),
    ],
)
def test_ticks_are_those_of_matplotlibs_colour_bar(low: float, high: float) -> None:
    """The same numbers at the same values, with what multiplies them."""
    paper = Figure(figsize=(2, 2), dpi=100)
    image = paper.add_subplot().imshow(np.zeros((2, 2)), vmin=low, vmax=high)
    axes = paper.add_axes((0.5, 0.1, 0.05, 0.85))
    bar = paper.colorbar(image, cax=axes)
    axes.tick_params(labelsize=6)
    FigureCanvasAgg(paper).draw()  # type: ignore[no-untyped-call]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    shown = {
        label: value
        for label, value in zip(labels, bar.get_ticks(), strict=True)
        if low <= value <= high
    }
    ticks = page.ticks(low, high)
    assert ticks.numbers == list(shown)
    assert ticks.values == pytest.approx(list(shown.values()))
    assert ticks.factor == axes.yaxis.get_offset_text().get_text()


@pytest.mark.medium
@pytest.mark.filterwarnings("error")
def test_any_name_of_an_image_can_be_a_title() -> None:
    """Bytes that are no UTF-8, line breaks, thousands of letters and those of no font."""
    title = "a\udcff\nb\x07.png" + "x" * 500
    pixels = np.asarray(figure_of(panels_of(RAMPS), title))
    assert (pixels[:40] < 255).any()
    assert (pixels[:2] == 255).all()


@pytest.mark.slow
def test_run_writes_a_figure_with_each_picture(
    featviz: Run,
    tmp_path: Path,
    tiny_file: Path,
    picture: Path,
) -> None:
    """The manifest names the file; the grid is unchanged."""
    base = ("run", tiny_file, picture, "--layers", "0,4", "-q")
    assert featviz(*base, "--out", tmp_path / "plain").code == 0
    assert featviz(*base, "--out", tmp_path / "figure", "--figure").code == 0
    plain = tree(tmp_path / "plain" / "picture.png")
    written = tree(tmp_path / "figure" / "picture.png")
    figures = {"001_0/output.figure.png", "005_4/output.figure.png"}
    assert written.keys() - plain.keys() == figures
    assert written["001_0/output.png"] == plain["001_0/output.png"]
    row = captured(tmp_path / "figure", "picture.png", "0")
    assert row["figure"] == "001_0/output.figure.png"
    image = Image.open(io.BytesIO(written[row["figure"]]))
    assert image.info["Layer"] == "0 (Conv2d)"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("size", "levels"),
    [
        pytest.param(1360, range(110, 146), id="smaller"),
        pytest.param(17, [0, 255], id="larger"),
    ],
)
def test_a_fine_overlay_is_reduced_smoothly(size: int, levels: list[int]) -> None:
    """Of a chessboard of single pixels that does not fit its panel, grey is left;
    colours that are enlarged stay squares."""
    y, x = np.mgrid[:size, :size]
    board = ((y + x) % 2 * 255).astype(np.uint8)[..., None].repeat(3, axis=2)
    figure = np.asarray(figure_of([Tile("", board, (0, 1))], "", board))
    x, y = corner_of(0, 1)
    inside = figure[y + 20 : y + 300, x + 20 : x + 300]
    assert set(inside.flat) <= set(levels)


# The page of `look`


COLOURS = ((250, 10, 20), (20, 250, 10), (10, 20, 250), (250, 240, 20))
QUARTERS = np.array(COLOURS, np.uint8).reshape(2, 2, 3)
"""2 × 2 pixels of four colours."""


def solid(height: int, width: int, colour: Colour) -> Bytes:
    return np.full((height, width, 3), colour, np.uint8)


def look(*tiles: Bytes, **fields: Any) -> Bytes:
    """A page with one row of tiles."""
    maps = [Tile(str(n), pixels, note="0 … 1") for n, pixels in enumerate(tiles)]
    defaults = {
        "title": "net",
        "subtitle": "a.png",
        "pictures": [Tile("input", solid(4, 4, (128, 128, 128)))],
        "bars": [],
        "remarks": [],
        "rows": [page.PageRow("conv1", ["Conv2d"], maps)],
        "key": "",
        "cmap": "grey",
    }
    return page.draw_page(page.Page(**{**defaults, **fields}))


@pytest.mark.medium
def test_pixels_of_a_map_stay_squares() -> None:
    """2 × 2 pixels become four squares of 180 pixels, in their places."""
    drawn = look(QUARTERS)
    x, y, *_ = box_of(drawn, COLOURS[0])
    assert [box_of(drawn, colour) for colour in COLOURS] == [
        (x, y, 180, 180),
        (x + 180, y, 180, 180),
        (x, y + 180, 180, 180),
        (x + 180, y + 180, 180, 180),
    ]


@pytest.mark.medium
def test_all_tiles_have_one_size() -> None:
    """Maps of 3 and of 240 pixels a side are drawn in one size."""
    drawn = look(
        solid(3, 3, COLOURS[0]),
        solid(7, 7, COLOURS[1]),
        solid(240, 240, COLOURS[2]),
        *[solid(5, 5, (0, 0, 0))] * 5,
    )
    x, y, *_ = box_of(drawn, COLOURS[0])
    assert [box_of(drawn, colour) for colour in COLOURS[:3]] == [
        (x, y, 120, 120),
        (x + 128, y, 120, 120),
        (x + 256, y, 120, 120),
    ]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layers", "maps", "side"), [(1, 1, 360), (3, 1, 200), (1, 2, 276), (1, 8, 120)]
)
def test_few_maps_are_large(layers: int, maps: int, side: int) -> None:
    """They fill the narrowest page, and those of several layers six inches of height."""
    tiles = [Tile("0", solid(9, 9, COLOURS[0]))] * maps
    tiles[0] = Tile("0", solid(9, 9, COLOURS[1]))
    others = page.PageRow("conv1", [], [Tile("0", solid(9, 9, COLOURS[0]))] * maps)
    rows = [page.PageRow("conv1", [], tiles), *[others] * (layers - 1)]
    _, _, *size = box_of(look(rows=rows), COLOURS[1])
    assert size == [side, side]


@pytest.mark.medium
def test_more_than_eight_maps_go_on_below() -> None:
    """Sixty-four maps make the page higher, not wider."""
    tiles = [solid(9, 9, (250, 10, 3 * number)) for number in range(64)]
    drawn = look(*tiles)
    assert drawn.shape[1] == look(*tiles[:8]).shape[1]
    first = box_of(drawn, (250, 10, 0))
    for number in (7, 8, 63):
        box = box_of(drawn, (250, 10, 3 * number))
        row, column = divmod(number, 8)
        assert box.top == first.top + 140 * row
        assert box.left == first.left + 128 * column


@pytest.mark.medium
@pytest.mark.parametrize("shape", [(20, 60), (30, 20), (2, 200)], ids=str)
def test_a_map_keeps_its_proportions(shape: tuple[int, int]) -> None:
    """Wide and tall ones, too, within a pixel; one alone has room for 560 × 360."""
    box = box_of(look(solid(*shape, COLOURS[0])), COLOURS[0])
    assert box.width <= 560
    assert box.height <= 360
    assert abs(box.width * shape[0] - box.height * shape[1]) <= max(shape)


@pytest.mark.medium
def test_a_map_lies_in_the_middle_of_its_cell() -> None:
    """A tall one beside a square one, within a pixel; the cells are 284 pixels apart."""
    drawn = look(solid(60, 60, COLOURS[0]), solid(60, 20, COLOURS[1]))
    square = box_of(drawn, COLOURS[0])
    tall = box_of(drawn, COLOURS[1])
    assert tall.width < square.width
    middle = square.left + square.width / 2 + 284
    assert abs(tall.left + tall.width / 2 - middle) <= 1
    assert abs((tall.top + tall.height / 2) - (square.top + square.height / 2)) <= 1


@pytest.mark.medium
def test_bars_are_as_long_as_the_shares() -> None:
    """The bar of a half is half as long as the bar of one."""
    accent = tuple(colormap.ramp("Reds")[256 * 2 // 5].tolist())

    def bar(share: float) -> Box:
        drawn = look(QUARTERS, bars=[page.PageBar("cat", share)], cmap="Reds")
        return box_of(drawn[:330], accent)

    assert bar(1.0).width == pytest.approx(2 * bar(0.5).width, abs=1)


@pytest.mark.medium
def test_two_bars_stand_together() -> None:
    """They are half an inch apart, as the bars of five classes nearly are."""
    green = np.array(GREEN, np.uint8)
    blue = np.array((0, 0, 250), np.uint8)
    bars = [page.PageBar("cat", 0.6, green), page.PageBar("dog", 0.4, blue)]
    drawn = look(QUARTERS, bars=bars)
    first = box_of(drawn[:330], GREEN)
    second = box_of(drawn[:330], (0, 0, 250))
    assert second.top - first.top == pytest.approx(50, abs=1)


def test_a_strip_is_as_wide_as_the_row() -> None:
    """The numbers of a vector reach from the names to the margin."""
    strip = Tile("4", solid(1, 4, COLOURS[0]))
    drawn = look(rows=[page.PageRow("fc", ["Linear"], [strip], strip=True)])
    box = box_of(drawn, COLOURS[0])
    assert box.left == 210
    assert box.height == 30
    assert box.left + box.width == drawn.shape[1] - 30


@pytest.mark.medium
@pytest.mark.parametrize(
    "name",
    [
        "a" * 300,
        "encoder.layers.encoder_layer_11.attn.\x1b]0;y\x07",
    ],
)
def test_names_stay_in_their_column(name: str) -> None:
    """However long, a name and its lines touch no tile and need no second look."""
    tile = Tile("0", QUARTERS, note="0 … 1")
    row = page.PageRow(name, [name] * 6, [tile])
    drawn = look(rows=[row], title=name, subtitle=name, key=name)
    top = box_of(drawn, COLOURS[0]).top
    assert (drawn[top - 5 : top + 150, 200:210] == 255).all()
    assert (drawn[:, :25] == 255).all()
    assert (drawn[:, -25:] == 255).all()
