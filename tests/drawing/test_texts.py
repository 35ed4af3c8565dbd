"""Where texts stand on pages and figures: on the paper, beside pictures and beside one
another."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest

from featviz.drawing import figure, page
from featviz.drawing.figure import ColorScale, TableRow, TileTable
from featviz.drawing.sheet import Canvas, Cell, Letters, Tile
from featviz.inspection.field_picture import FieldTile, draw_fields
from featviz.records import Bytes

TOLERANCE = 0.02
"""Inches: two pixels, since letters reach a little beyond their boxes."""


def picture(height: int, width: int) -> Bytes:
    return np.full((height, width, 3), 200, np.uint8)


class Text(NamedTuple):
    """A text as it stands on paper, and where."""

    text: str
    cell: Cell


@dataclass
class Paper:
    """What was written and pasted on a canvas, in inches."""

    height: float = 0
    width: float = 0
    texts: list[Text] = field(default_factory=list)
    pictures: list[Cell] = field(default_factory=list)

    def cell_of(self, text: str) -> Cell:
        """Where a text stands that is there once."""
        (cell,) = [written.cell for written in self.texts if written.text == text]
        return cell


def middle(cell: Cell) -> float:
    """Of a rectangle, down."""
    return cell.top + cell.height / 2


def bottom(cell: Cell) -> float:
    return cell.top + cell.height


def right(cell: Cell) -> float:
    return cell.left + cell.width


def box_of_text(
    width: float,
    x: float,
    y: float,
    letters: Letters,
    anchor: str = "right",
    upright: bool = False,
) -> Cell:
    """Where a text stands, by the documentation of `Canvas.write`."""
    height = letters.points / 72
    if upright:
        return Cell(x - height / 2, y - width / 2, height, width)
    left = {"right": x, "left": x - width}.get(anchor, x - width / 2)
    top = y - height if anchor == "above" else y - height / 2
    return Cell(left, top, width, height)


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paper]:
    """The paper that is drawn on next."""
    seen = Paper()
    write = Canvas.write
    paste = Canvas.paste

    def written(
        canvas: Canvas,
        text: str,
        x: float,
        y: float,
        letters: Letters,
        anchor: Any = "right",
        max_width: float | None = None,
        upright: bool = False,
    ) -> float:
        seen.height, seen.width = (
            side / canvas.dpi for side in canvas.pixels.shape[:2]
        )
        width = write(canvas, text, x, y, letters, anchor, max_width, upright)
        shown = text if max_width is None else canvas.shorten(text, letters, max_width)
        if shown:
            cell = box_of_text(width, x, y, letters, anchor, upright)
            seen.texts.append(Text(shown, cell))
        return width

    def pasted(canvas: Canvas, pixels: Bytes, cell: Cell, smooth: bool = False) -> None:
        seen.pictures.append(cell)
        paste(canvas, pixels, cell, smooth)

    monkeypatch.setattr(Canvas, "write", written)
    monkeypatch.setattr(Canvas, "paste", pasted)
    return seen


def overlap(one: Cell, other: Cell) -> bool:
    """Whether two rectangles share more than their edges."""
    across = min(right(one), right(other)) - max(one.left, other.left)
    down = min(bottom(one), bottom(other)) - max(one.top, other.top)
    return across > TOLERANCE and down > TOLERANCE


def is_within(cell: Cell, paper: Paper) -> bool:
    begins_inside = min(cell.left, cell.top) > -TOLERANCE
    ends_inside = (
        right(cell) < paper.width + TOLERANCE
        and bottom(cell) < paper.height + TOLERANCE
    )
    return begins_inside and ends_inside


def check(paper: Paper) -> None:
    """All texts stand on the paper, and lie over no picture and no other text."""
    assert paper.texts
    for text, cell in paper.texts:
        assert is_within(cell, paper), text
        assert not any(overlap(cell, other) for other in paper.pictures), text
    for one, other in combinations(paper.texts, 2):
        assert not overlap(one.cell, other.cell), (one, other)


LONG = "encoder.layers.encoder_layer_11.self_attention.out_proj_of_all_heads"


# The page of `look`


def row(
    name: str, *lines: str, height: int = 4, width: int = 6, strip: bool = False
) -> Any:
    """A layer with two maps, or one strip."""
    titles = (
        [f"{name[:3]} 7"] if strip else [f"{name[:3]} {number}" for number in (3, 11)]
    )
    tiles = [
        Tile(title, picture(height, width), note=f"0 … {title}!") for title in titles
    ]
    return page.PageRow(name, lines, tiles, strip)


PREDICTION: dict[str, Any] = {
    "bars": [page.PageBar("cat", 0.75), page.PageBar("dog", 0.125)],
}
REMARKS: dict[str, Any] = {"remarks": ["nothing is known of its output", "second line"]}


def draw_page(rows: list[Any], title: str = "net", **fields: Any) -> None:
    defaults: dict[str, Any] = {
        "title": title,
        "subtitle": f"{title}.png",
        "pictures": [Tile("input", picture(5, 7)), Tile("output", picture(7, 5))],
        "bars": [],
        "remarks": [],
        "key": f"{title} channel",
        "cmap": "grey",
    }
    page.draw_page(page.Page(rows=rows, **{**defaults, **fields}))


@pytest.mark.parametrize("title", ["net", LONG])
@pytest.mark.parametrize("head", [PREDICTION, REMARKS], ids=["prediction", "remarks"])
def test_texts_of_a_page_stay_apart(
    paper: Paper, title: str, head: dict[str, Any]
) -> None:
    """Short names and long ones, of maps that are higher and lower than they, and of a
    strip."""
    rows = [
        row("conv1", "4×6", "1 call"),
        row(LONG, "Linear", "2×3", "3 calls", height=2),
        row("fc", "Linear", width=8, height=1, strip=True),
        row("body.last", "8×8", height=8),
    ]
    draw_page(rows, title, **head)
    check(paper)


def maps_of(paper: Paper) -> list[Cell]:
    """The maps of a page, beside the column of names; two a row."""
    return [cell for cell in paper.pictures if cell.left > 2 and cell.top > 2.5]


def test_names_stand_in_the_middle_of_their_maps(paper: Paper) -> None:
    """With the lines below them; a name that has more lines than fit begins at the top
    of its maps."""
    rows = [
        row("conv1", "one"),
        row("conv2", "two", "three"),
        row("conv3", *"abcdefghijklm"),
    ]
    draw_page(rows)
    first, _, second, _, third, _ = maps_of(paper)
    lines = [paper.cell_of("conv1"), paper.cell_of("one")]
    assert sum(map(middle, lines)) / 2 == pytest.approx(middle(first), abs=TOLERANCE)
    assert middle(paper.cell_of("two")) == pytest.approx(middle(second), abs=TOLERANCE)
    high = paper.cell_of("conv3").top
    assert third.top - TOLERANCE < high < third.top + 0.1


@pytest.mark.parametrize(("note", "is_shown"), [("0 … 1", True), ("0 … 1" * 30, False)])
def test_a_note_without_room_is_left_out(
    paper: Paper, note: str, is_shown: bool
) -> None:
    """Half a number misleads."""
    draw_page([page.PageRow("conv1", [], [Tile("3", picture(4, 6), note=note)])])
    check(paper)
    assert (note in [text for text, _ in paper.texts]) is is_shown


STACK = "encoder.layers.encoder_layer_11"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("conv1", ["conv1"]),
        (STACK, ["encoder.layers.", "encoder_layer_11"]),
        (f"{STACK}.outs", ["encoder.layers.", "encoder_layer_11.", "outs"]),
        (f"{STACK}.out_projections_of_all", ["encoder.layers.", "…", "of_all"]),
    ],
)
def test_names_are_broken_behind_dots_and_underscores(
    paper: Paper, name: str, lines: list[str]
) -> None:
    """A line has eighteen letters; of more than three lines the first and the last are
    left."""
    draw_page([row(name)])
    below = [text for text, cell in paper.texts if cell.left < 0.4 and cell.top > 2.5]
    assert below == [*lines, "min"]


def test_rows_of_maps_are_equally_high(paper: Paper) -> None:
    """Whatever their names take; a strip takes what it needs."""
    rows = [
        row("conv1", "one"),
        row("conv2", *"abcdefgh"),
        row("conv3", "two"),
        row("fc", "three", strip=True),
        row("conv4", "four"),
    ]
    draw_page(rows)
    tops = [cell.top for cell in maps_of(paper)]
    steps = np.diff(sorted(set(tops)))
    assert steps[0] == pytest.approx(steps[1], abs=TOLERANCE)
    assert steps[2] == pytest.approx(steps[1], abs=0.1), "the strip below is higher"
    assert steps[3] < steps[0] / 2


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (9, 10)], ids=str)
def test_all_maps_have_whole_pixels(paper: Paper, shape: tuple[int, int]) -> None:
    """Tiles of any proportion begin and end with whole pixels: none is blurred, or
    larger than its neighbours."""
    tiles = [Tile(f"{number}", picture(*shape)) for number in range(8)]
    draw_page([page.PageRow("conv1", [], tiles)])
    for cell in maps_of(paper):
        pixels = 100 * np.array(cell)
        assert pixels == pytest.approx(pixels.round(), abs=1e-6)


def test_classes_that_fit_stay_whole(paper: Paper) -> None:
    """Beside bars, also the longest one in bold letters."""
    bars = [page.PageBar("a bullfrog, on a leaf", 0.5), page.PageBar("cat", 0.25)]
    draw_page([row("conv1")], bars=bars)
    assert paper.cell_of("cat")
    assert paper.cell_of("a bullfrog, on a leaf")


def drop_ticks(paper: Paper, *kept: str) -> None:
    """Leave out the numbers of colour bars, which lie close to their ticks."""
    paper.texts = [
        text for text in paper.texts if len(text.text) > 5 or text.text in kept
    ]


@pytest.mark.parametrize("title", ["net", 9 * LONG])
@pytest.mark.parametrize("count", [1, 5])
def test_texts_of_a_figure_stay_apart(paper: Paper, title: str, count: int) -> None:
    """Of tiles with colour bars, the factor of their numbers and what these show, beside
    the input; a long title has small letters, and none is larger than that of a short
    one."""
    tiles = []
    for n in range(count):
        limits = (-n - 0.001, n / 1000)
        tiles.append(Tile(f"{LONG} {n}", picture(3, 4), limits, "evidence (CAM)"))
    tiles.append(Tile(LONG, picture(3, 4), (0.0, 7e-20), "evidence (CAM)"))
    seen = Tile("input", picture(8, 9))
    page.write_figure(io.BytesIO(), title, seen, tiles, "viridis", {})
    assert [text.text for text in paper.texts].count("evidence (CAM)") == count + 1
    drop_ticks(paper, title, "1e−20")
    check(paper)
    assert paper.cell_of("1e−20")
    assert paper.cell_of(title).height <= 10 / 72


def test_titles_of_fields_and_of_layers_are_whole(paper: Paper) -> None:
    """Of a model with random weights, whose layers have names of nineteen letters."""
    name = "backbone.body.layer"
    tile = FieldTile(
        "resnet18 (random weights)",
        name,
        np.eye(9),
        None,
        {0.2: 1, 0.3: 2, 0.5: 3, 0.99: 9},
    )
    draw_fields([tile], 1, "magma")
    draw_page([row("backbone.body.conv1")])
    written = " ".join(text.text for text in paper.texts)
    assert (
        "the layers of resnet18 (random weights) look: effective receptive" in written
    )
    assert "backbone.body. conv1" in written


# Figures for papers

SCALE = ColorScale("viridis", -1.0, 3.0, "a value")


def table(
    *rows: TableRow, title: str = "", scale: ColorScale | None = None
) -> TileTable:
    return TileTable(["first", "second"], rows, title, scale)


def table_row(label: str, block: str = "", captions: tuple[str, ...] = ()) -> TableRow:
    return TableRow(label, [picture(60, 80)] * 2, block, captions)


TABLES = {
    "plain": [table_row("3"), table_row("11")],
    "labels": [table_row("channel 3"), table_row("a much longer label")],
    "blocks": [table_row("3", "conv1"), table_row("11", "conv1"), table_row("5", "fc")],
    "no labels": [table_row("", "conv1"), table_row("", "conv2")],
    "captions": [table_row("3", "conv1", ("max 3", "max 0.25"))],
}


@pytest.mark.parametrize("rows", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("title", ["", 2 * LONG])
@pytest.mark.parametrize("scale", [None, SCALE], ids=["own scales", "one scale"])
def test_texts_of_a_table_stay_apart(
    paper: Paper, rows: list[TableRow], title: str, scale: ColorScale | None
) -> None:
    """Titles, heads, names of blocks and rows, captions and the numbers of the colour
    bar."""
    shown = table(*rows, title=title, scale=scale)
    figure.draw_table(shown, figure.lay_out(shown))
    check(paper)


def test_names_of_a_table_stand_beside_what_they_name(paper: Paper) -> None:
    """The name of a block in the middle of its rows, that of a row in the middle of its
    tiles, the title in the middle above all."""
    shown = table(*TABLES["blocks"], title="net")
    figure.draw_table(shown, figure.lay_out(shown))
    first, _, second, _, third, _ = paper.pictures
    expected = {
        "3": middle(first),
        "11": middle(second),
        "5": middle(third),
        "conv1": (first.top + bottom(second)) / 2,
        "fc": middle(third),
    }
    for text, height in expected.items():
        cell = paper.cell_of(text)
        assert middle(cell) == pytest.approx(height, abs=TOLERANCE), text
        assert right(cell) < first.left
    title = paper.cell_of("net")
    assert title.left + title.width / 2 == pytest.approx(paper.width / 2, abs=TOLERANCE)
    assert bottom(title) < paper.cell_of("first").top
