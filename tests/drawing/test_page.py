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
from drawn_maps import NAN, SITE, captured, files, noise
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from featviz.drawing import colormap, drawer, page, sheet
from featviz.drawing.picture import GridPicture
from featviz.options import DrawOptions
from featviz.records import Bytes

SHOWN = np.zeros((4, 4, 3), np.uint8)


def panels_of(picture: GridPicture) -> list[sheet.Tile]:
    return page.figure_tiles(picture, "viridis")


def drawn(tensor: Tensor, **options: Any) -> GridPicture:
    return drawer.draw(DrawOptions(**options), SITE, tensor)[""]


@pytest.mark.parametrize("normalize", ["map", "layer", "symmetric"])
def test_panels_show_the_values(normalize: str) -> None:
    """The first 16 maps in viridis, to within a level of their limits; constants are
    named."""
    tensor = noise(1, 20, 6, 5)
    tensor[0, 3], tensor[0, 4] = 0, 2.5
    panels = panels_of(drawn(tensor, normalize=normalize))
    assert len(panels) == 16
    for channel, panel in enumerate(panels):
        assert panel.limits is not None
        low, high = panel.limits
        share = (tensor[0, channel].numpy() - low) / (high - low) if high > low else 0.5
        expected = colormaps["viridis"](np.broadcast_to(share, (6, 5)), bytes=True)[
            ..., :3
        ]
        assert np.abs(panel.pixels.astype(int) - expected).max() <= 4
    titles = [panel.title for panel in panels[:5]]
    assert titles[2:] == ["channel 2", "channel 3 (all zero)", "channel 4 (constant)"]
    assert len({panel.limits for panel in panels}) == (1 if normalize != "map" else 16)


def test_panels_name_channels_and_hide_nothing() -> None:
    """NaN is magenta, groups say how many, and a vector is one panel."""
    tensor = noise(1, 6, 6, 5)
    tensor[0, 2] = 3 * tensor[0, 1]
    tensor[0, 4, 1, 1] = NAN
    picture = drawn(tensor, collapse=0.99, order="mean")
    panels = {panel.title: panel for panel in panels_of(picture)}
    assert [int(t.split()[1]) for t in panels] == list(picture.drawn)
    assert "channel 1 ×2" in panels
    holes = (panels["channel 4"].pixels == (255, 0, 255)).all(-1)
    assert holes[1, 1]
    assert holes.sum() == 1
    (panel,) = panels_of(drawn(torch.arange(10.0)[None]))
    expected = colormaps["viridis"](np.arange(10) / 9, bytes=True)[None, :, :3]
    assert np.abs(panel.pixels.astype(int) - expected).max() <= 4


def written(
    panels: Sequence[sheet.Tile], title: str = "t", shown: np.ndarray = SHOWN
) -> bytes:
    file = io.BytesIO()
    page.write_figure(file, title, shown, panels, "viridis", {"Software": "featviz"})
    return file.getvalue()


def example(count: int = 4, title: str = "a $title$ of 猫") -> bytes:
    tensor = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8).expand(1, count, 8, 8)
    shown = np.full((8, 8, 3), (10, 200, 30), np.uint8)
    return written(panels_of(drawn(tensor)), title, shown)


def test_figure_shows_input_maps_and_bars() -> None:
    """The input's colour, viridis from end to end, a title and ticks, in the size
    foretold."""
    image = Image.open(io.BytesIO(example()))
    size = page.figure_size(4)
    assert image.size == (size.width, size.height)
    assert image.info["Software"] == "featviz"
    pixels = np.asarray(image.convert("RGB"))
    shown = (pixels == (10, 200, 30)).all(-1)
    assert np.count_nonzero(shown) > 300 * 300
    assert shown.any(0).nonzero()[0].max() < pixels.shape[1] / 2
    for x in (0.0, 1.0):
        colour = colormaps["viridis"](x, bytes=True)[:3]
        where = (pixels == colour).all(-1)
        assert np.count_nonzero(where[:, : pixels.shape[1] // 3]) == 0
        assert np.count_nonzero(where) > 4 * 20 * 20
    title = pixels[:40]
    assert (title < 100).any()
    assert (pixels[-3:] == 255).all()


def test_ticks_stand_at_their_values() -> None:
    """Of a bar from 0 to 10.9 the lowest tick is at its end, the highest one below its
    top."""
    panel = sheet.Tile("maps", np.zeros((8, 8, 3), np.uint8) + 9, (0.0, 10.9))
    pixels = np.asarray(Image.open(io.BytesIO(written([panel]))).convert("RGB")).astype(
        int
    )
    rows, columns = (abs(pixels - (253, 231, 36)).sum(2) < 30).nonzero()
    beside = pixels[:, columns.max() + 4].sum(1) < 99
    ticks = beside.nonzero()[0]
    height = (ticks.max() - rows.min()) / 10.9
    assert ticks.min() - rows.min() == pytest.approx(0.9 * height, abs=2)


def test_panels_have_the_pixels_of_their_maps() -> None:
    """Each map in its place, enlarged to squares."""
    tensor = noise(1, 4, 17, 10)
    tensor[0, 3, 2:9] = NAN
    panels = panels_of(drawn(tensor))
    pixels = np.asarray(Image.open(io.BytesIO(written(panels))))
    for number, panel in enumerate(panels):
        cell = page.figure_size(4).grid.cell(number)
        left_edge = round(100 * cell.left)
        top = round(100 * cell.top)
        shown = pixels[top : top + 170, left_edge + 35 : left_edge + 135][5::10, 5::10]
        assert np.array_equal(shown, panel.pixels)


@pytest.mark.parametrize(
    ("low", "high"), [(-3.3, 2.6), (999.97, 1000.03), (-4e-4, 3e-4)]
)
def test_ticks_are_those_of_matplotlibs_colour_bar(low: float, high: float) -> None:
    """The same numbers at the same values, with what multiplies them."""
    paper = Figure(figsize=(2, 2), dpi=100)
    image = paper.add_subplot().imshow(np.zeros((2, 2)), vmin=low, vmax=high)
    axes = paper.add_axes((0.5, 0.1, 0.05, 0.85))
    bar = paper.colorbar(image, cax=axes)
    axes.tick_params(labelsize=6)
    FigureCanvasAgg(paper).draw()  # type: ignore[no-untyped-call]
    expected = [
        (value, label.get_text())
        for value, label in zip(bar.get_ticks(), axes.get_yticklabels(), strict=True)
        if low <= value <= high
    ]
    ticks = page.ticks(low, high)
    assert ticks.numbers == [number for _, number in expected]
    assert ticks.values == pytest.approx([value for value, _ in expected])
    assert ticks.factor == axes.yaxis.get_offset_text().get_text()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("title", ["a\udcff\nb\x07.png" + "x" * 500])
def test_any_name_of_an_image_can_be_a_title(title: str) -> None:
    """Bytes that are no UTF-8, line breaks, thousands of letters and those of no font."""
    pixels = np.asarray(Image.open(io.BytesIO(example(title=title))))
    assert (pixels[:40] < 255).any()
    assert (pixels[:2] == 255).all()


@pytest.mark.slow
def test_run_writes_a_figure_beside_each_picture(
    featviz: Run, tmp_path: Path, tiny_file: Path, picture: Path
) -> None:
    """The manifest names the file; the grid is unchanged."""
    base = ("run", tiny_file, picture, "--layers", "0,4", "-q")
    assert featviz(*base, "--out", tmp_path / "plain").code == 0
    assert featviz(*base, "--out", tmp_path / "figure", "--figure").code == 0
    plain = files(tmp_path / "plain")
    written = files(tmp_path / "figure")
    extra = {name for name in written if name not in plain}
    assert extra == {
        f"picture.png/{folder}/output.figure.png" for folder in ("001_0", "005_4")
    }
    grid = "picture.png/001_0/output.png"
    assert written[grid] == plain[grid]
    row = captured(tmp_path / "figure", "picture.png", "0")
    assert row["figure"] == "001_0/output.figure.png"
    text = Image.open(tmp_path / "figure" / "picture.png" / row["figure"]).info
    assert text["Layer"] == "0 (Conv2d)"


def test_a_fine_overlay_is_reduced_smoothly() -> None:
    """Of a chessboard of single pixels that does not fit its panel, grey is left;
    colours that are enlarged stay squares."""
    for size, levels in ((1360, range(110, 146)), (17, (0, 255))):
        y, x = np.mgrid[:size, :size]
        board = np.repeat(((y + x) % 2 * 255).astype(np.uint8)[..., None], 3, axis=2)
        file = io.BytesIO(written([sheet.Tile("", board, (0, 1))], "", board))
        cell = page.figure_size(1).grid.cell(0)
        left_edge = round(100 * cell.left)
        top = round(100 * cell.top)
        inside = np.asarray(Image.open(file))[
            top + 20 : top + 300, left_edge + 20 : left_edge + 300
        ]
        assert np.isin(inside, list(levels)).all()


# The page of `look`


COLOURS = ((250, 10, 20), (20, 250, 10), (10, 20, 250), (250, 240, 20))


def solid(height: int, width: int, colour: tuple[int, int, int]) -> Bytes:
    return np.full((height, width, 3), colour, np.uint8)


def quarters() -> Bytes:
    """2 × 2 pixels of four colours."""
    return np.array(COLOURS, np.uint8).reshape(2, 2, 3)


def look(*tiles: Bytes, **fields: Any) -> Bytes:
    """A page with one row of tiles."""
    maps = [
        sheet.Tile(str(number), pixels, note="0 … 1")
        for number, pixels in enumerate(tiles)
    ]
    texts = {
        "title": "net",
        "subtitle": "a.png",
        "pictures": [sheet.Tile("input", solid(4, 4, (128, 128, 128)))],
        "bars": [],
        "remarks": [],
        "rows": [page.PageRow("conv1", ["Conv2d"], maps)],
        "key": "",
        "cmap": "grey",
    }
    return page.draw_page(page.Page(**{**texts, **fields}))


def box(drawn: Bytes, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Top, left, height and width of the pixels of a colour, which fill their box."""
    here = (drawn == colour).all(2)
    rows = np.flatnonzero(here.any(1))
    columns = np.flatnonzero(here.any(0))
    height = int(rows[-1] - rows[0] + 1)
    width = int(columns[-1] - columns[0] + 1)
    assert here.sum() == height * width
    return int(rows[0]), int(columns[0]), height, width


def test_pixels_of_a_map_stay_squares() -> None:
    """2 × 2 pixels become four squares of 60 pixels, in their places."""
    drawn = look(quarters())
    top, left, *size = box(drawn, COLOURS[0])
    assert size == [60, 60]
    for place, colour in enumerate(COLOURS):
        row, column = divmod(place, 2)
        assert box(drawn, colour) == (top + 60 * row, left + 60 * column, 60, 60)


def test_all_tiles_have_one_size() -> None:
    """Maps of 3 and of 240 pixels a side, beside each other."""
    sizes = (3, 7, 240)
    drawn = look(*(solid(n, n, c) for n, c in zip(sizes, COLOURS, strict=False)))
    boxes = [box(drawn, colour) for colour in COLOURS[:3]]
    assert {(top, height, width) for top, _, height, width in boxes} == {
        (boxes[0][0], 120, 120)
    }
    assert np.diff([left for _, left, _, _ in boxes]).tolist() == [128, 128]


def test_more_than_eight_maps_go_on_below() -> None:
    """Sixty-four make the page higher, not wider."""
    tiles = [solid(9, 9, (250, 10, 3 * number)) for number in range(64)]
    drawn = look(*tiles)
    assert drawn.shape[1] == look(*tiles[:8]).shape[1]
    for number in (0, 7, 8, 63):
        top, left, _, _ = box(drawn, (250, 10, 3 * number))
        first_top, first_left, _, _ = box(drawn, (250, 10, 0))
        row, column = divmod(number, 8)
        assert top == first_top + 140 * row
        assert left == first_left + 128 * column


@pytest.mark.parametrize("shape", [(20, 60), (30, 20), (2, 200)])
def test_a_map_keeps_its_proportions(shape: tuple[int, int]) -> None:
    """Wide and tall ones, too, within a pixel, and no tile is larger than 155 pixels a
    side."""
    _, _, height, width = box(look(solid(*shape, COLOURS[0])), COLOURS[0])
    assert max(height, width) <= 155
    assert abs(width * shape[0] - height * shape[1]) <= max(shape)


def test_bars_are_as_long_as_the_shares() -> None:
    """Half of the length of a share of one, for a share of a half."""
    whole, half = (
        look(quarters(), bars=[page.PageBar("cat", share)], cmap="Reds")
        for share in (1.0, 0.5)
    )
    accent = tuple(int(part) for part in colormap.ramp("Reds")[256 * 2 // 5])
    assert abs(box(whole[:330], accent)[3] - 2 * box(half[:330], accent)[3]) <= 1


def test_a_strip_is_as_wide_as_the_row() -> None:
    """All numbers of a vector side by side, from the names to the margin."""
    row = page.PageRow(
        "fc", ["Linear"], [sheet.Tile("4", solid(1, 4, COLOURS[0]))], strip=True
    )
    drawn = look(quarters(), rows=[row])
    _, left, height, width = box(drawn, COLOURS[0])
    assert (left, height, left + width) == (210, 30, drawn.shape[1] - 30)


@pytest.mark.parametrize(
    "name", ["a" * 300, "encoder.layers.encoder_layer_11.attn.\x1b]0;y\x07"]
)
def test_names_stay_in_their_column(name: str) -> None:
    """However long, a name and its lines touch no tile and need no second look."""
    row = page.PageRow(
        name, [name or "x"] * 6, [sheet.Tile("0", quarters(), note="0 … 1")]
    )
    drawn = look(rows=[row], title=name, subtitle=name, key=name)
    top = box(drawn, COLOURS[0])[0]
    assert (drawn[top - 5 : top + 150, 200:210] == 255).all()
    assert (drawn[:, :25] == 255).all()
    assert (drawn[:, -25:] == 255).all()
