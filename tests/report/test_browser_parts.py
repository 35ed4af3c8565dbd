"""What the scripts of a report compute, asked of them in one page: layouts, numbers,
searches, the order of tables, places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .browsing import Page

pytestmark = pytest.mark.slow

GRID = """
const packed = (values, type) =>
  btoa(String.fromCharCode(...new Uint8Array(type.from(values).buffer)));
const column = (...values) => packed(values, Float32Array);
const grid = new Grid({
  nrow: 3, padding: 2, tile: [4, 6], size: [26, 14], maps: 5, slices: 1,
  stats: [column(-1), column(2), column(0, 1, 2, 3, 4), column(1), column(0, 1, 0.5, 0, 0),
    column(0, 0, 0, 7, 0)],
  collapsed: { 0: [0, 2, 4] },
});
"""
"""Five tiles of 4 × 6 pixels, three in a row, two pixels apart; tile 5 is missing."""

PLACES = """
const packed = (values, type) =>
  btoa(String.fromCharCode(...new Uint8Array(type.from(values).buffer)));
const places = new PlaceGrid({
  size: [3, 4], factor: 2, field: [-1, 5, 2, -3, 7, 4],
  vectors: packed([127, 0, 0, 127, 64, 0, ...Array(18).fill(0)], Int8Array),
  channels: packed(Array(24).fill(0), Uint8Array),
  values: packed(Array(24).fill(0), Int8Array),
}, { units: [1 / 127, 1 / 127], channels: 2 });
const rounded = (numbers) => [...numbers].map((number) => Number(number.toFixed(3)));
const stub = (...cosines) => ({
  vector: () => [],
  cosines: () => Float32Array.from(cosines),
  around: (place) => [place - 1, place, place + 1],
});
const answer = new Answer([stub(1, 0.95, 0.9, 0.8, 0.7), null, stub(0.5, 0.99, 0.6)], 0, 0);
"""
"""Three rows of four places, of which each is two by two values; and the answer of two
images for the first place of the first one."""

NUMBERS = {
    "percent(0)": "0.0\u00a0%",
    "percent(0.0004)": "<\u00a00.1\u00a0%",
    "percent(0.5)": "50.0\u00a0%",
    "percent(0.9994)": "99.9\u00a0%",
    "percent(0.9995)": ">\u00a099.9\u00a0%",
    "percent(1)": "100.0\u00a0%",
    "digits(-2.50001)": "−2.5",
    "digits(123456)": "123500",
    "digits(NaN)": "–",
}
TILES = {
    "grid.box(0)": [2, 2, 6, 4],
    "grid.box(4)": [10, 8, 6, 4],
    "grid.channelAt(2, 2)": 0,
    "grid.channelAt(15, 11)": 4,
    "grid.channelAt(1, 5)": None,
    "grid.channelAt(8, 2)": None,
    "grid.channelAt(5, 6)": None,
    "grid.channelAt(27, 2)": None,
    "grid.channelAt(18, 8)": None,
    "grid.channelsPerRow(400)": 5,
    "grid.channelsPerRow(400, 100)": 3,
    "grid.channelsPerRow(50, 100)": 1,
    "grid.laidOut(400, 9)": {
        "nrow": 5,
        "padding": 3,
        "tile": [51, 76],
        "caption": 15,
        "size": [398, 72],
    },
    "grid.laidOut(400, 2, 12)": {
        "nrow": 2,
        "padding": 3,
        "tile": [8, 12],
        "caption": 0,
        "size": [33, 36],
    },
    # of a column of five tiles with numbers below them, the last row of each
    "[65, 146, 227, 308, 389].map((y) => grid.channelAt(3, y, grid.laidOut(100, 1)))": [
        0,
        1,
        2,
        3,
        4,
    ],
    "[0, 1].map((channel) => grid.title(channel))": [
        "Channel 0, and 2, 4 like it",
        "Channel 1",
    ],
    "grid.sentence(2)": "min −1 · max 2 · mean 2 · zeros 50.0\u00a0%",
    "grid.sentence(3)": (
        "min −1 · max 2 · mean 3 · zeros 0.0\u00a0% · 7 NaN or infinite"
    ),
    "Number.isNaN(grid.stat(5, 'mean'))": True,
    "[0, 1, 3].map((channel) => grid.allZero(channel))": [False, True, False],
    "Object.assign(grid, {order: [4, 1]}).count": 2,
    "Object.assign(grid, {order: [4, 1]}).channelAt(10, 2)": 1,
    "Object.assign(grid, {order: [4, 1]}).positionOf(4)": 0,
    "Object.assign(grid, {order: [4, 1]}).positionOf(0)": -1,
}
SEARCHES = {
    "channelQuery('conv1 17')": {"channel": 17, "terms": ["conv1"]},
    "channelQuery('Conv1 c17 ')": {"channel": 17, "terms": ["conv1"]},
    "channelQuery('relu channel 3')": {"channel": 3, "terms": ["relu"]},
    "channelQuery('#3')": {"channel": 3, "terms": []},
    "channelQuery('conv17')": None,
    "channelQuery('conv1')": None,
    "tensorsWith(document, channelQuery('conv1 5')).length": 1,
    "tensorsWith(document, channelQuery('conv1 6')).length": 0,
}
TABLES = {
    "numberIn({textContent: ' 1,234 '})": 1234,
    "numberIn({textContent: '−2.5'})": -2.5,
    "numberIn({textContent: '<\u00a00.1\u00a0%'})": 0.1,
    "numberIn({textContent: 'relu'})": None,
    "String(numberIn({textContent: '–'}))": "-Infinity",
    "['b', '2', '–', '10', 'a', '−3'].map((textContent) => ({textContent}))"
    ".sort(compareCells).map(({textContent}) => textContent)": [
        "–",
        "−3",
        "2",
        "10",
        "a",
        "b",
    ],
}
RANKS = {
    ("variance", "1, 3"): "-5",
    ("mean", "1, 3"): "-2",
    ("max", "NaN, 3"): "-3",
    ("max", "NaN, NaN"): "Infinity",
}
"""The rank of a channel by the statistic and its numbers in two images."""
OF_PLACES = {
    "places.interval(0, [-1, 5, 2], 100)": {"begin": 0, "length": 7},
    "places.interval(3, [-1, 5, 2], 100)": {"begin": 11, "length": 8},
    "places.interval(3, [-1, 5, 2], 15)": {"begin": 11, "length": 4},
    "places.seen(5, [40, 30])": [5, 3, 14, 8],
    "places.at({x: 0.99, y: 0.01})": 3,
    "places.at({x: 1, y: 1})": 11,
    "places.at({x: 0.5, y: 0.5})": 6,
    "places.middle(6)": {"x": 0.625, "y": 0.5},
    "places.around(0)": [0, 1, 4, 5],
    "places.around(5)": [0, 1, 2, 4, 5, 6, 8, 9, 10],
    "places.around(11)": [6, 7, 10, 11],
    "rounded(places.cosines([1, 0]).slice(0, 3))": [1, 0, 0.504],
    "rounded(places.cosines([64 / 127, 0]).slice(0, 3))": [0.504, 0, 1],
    "answer.nearest(9).map(({image, place}) => [image, place])": [
        [2, 1],
        [0, 2],
        [0, 4],
    ],
    "answer.nearest(2).length": 2,
    "new Answer([stub(1, 0, 9, 0, 8, 0, 7, 0, 6)], 0, 0).nearest(9).length": 4,
    "answer.best(2)": 1,
    "rounded([0.5, 0.9, 0.95, 1].map((cosine) => answer.light(cosine)))": [
        0,
        0,
        0.5,
        1,
    ],
}


GROUP = f"""{GRID}
const group = Object.assign(Object.create(Group.prototype), {{
  frames: [{{ grid }}], most: 2, paint: () => {{}},
}});
const sorted = (by, most = 2) => {{
  Object.assign(group, {{ most }}).sort(by);
  return grid.order;
}};
const frame = (name, max, isOther = false) => ({{
  name, isOther, imageName: name, grid: {{ slots: new Map([[0, 0]]), stat: () => max }},
}});
const view = {{ group: {{ frames: [
  frame("a", 1), frame("b", NaN), frame("c", 3), frame("c", 9, true), frame("d", -2),
] }} }};
const zeros = (maps, ...channels) => (
  {{ grid: {{ maps, allZero: (channel) => channels.includes(channel) }} }});
const both = Object.create(Group.prototype, {{
  frames: {{ value: [zeros(3, 0, 2), zeros(2, 0, 2)] }},
  channels: {{ value: [0, 1, 2] }},
  paint: {{ value: () => {{}} }},
}});
const changed = new Grid({{ ...grid, change: column(0.25), stats: grid.stats }});
const difference = new Grid({{
  ...grid, change: column(0.25), stats: Array(6).fill(column(NaN)),
}});
const picture = document.createElement("img");
const width = (box, options) => cut(picture, box, 50, "", options).getAttribute("width");
"""
"""A group of one grid, of which two channels are shown while it is folded; the frames of
a channel; two grids of three and of two channels."""

OF_GROUPS = {
    "sorted('mean')": [4, 3],
    "sorted('index')": [0, 1],
    "sorted('drawn')": [1, 0],  # channel 1 is all zero
    "sorted('mean', Infinity)": [4, 3, 2, 1, 0],
    "sorted('drawn', Infinity)": None,
    "ChannelView.prototype.frames.call(view, 0).map(({name}) => name)": [
        "c",
        "a",
        "d",
        "b",
    ],
    "ChannelView.prototype.frames.call(view, 1)": [],
    "ChannelView.prototype.before.call(view, view.group.frames[2], 0).isOther": True,
    "ChannelView.prototype.before.call(view, view.group.frames[0], 0) ?? null": None,
    "Group.prototype.outlineZeros.call(both, true) ?? both.marks": [0],
    "Group.prototype.outlineZeros.call(both, false) ?? both.marks": [],
    "changed.sentence(1)": (
        "min −1 · max 2 · mean 1 · zeros 100.0\u00a0% · relative difference 0.25"
    ),
    "difference.sentence(1)": "relative difference 0.25 at most",
    "width([0, 0, 100, 100])": "50",
    "width([0, 0, 400, 100])": "150",
    "width([0, 0, 400, 100], {widest: Infinity})": "200",
    "width([0, 0, 10, 100])": "25",
}
KEYS = {
    "moved(Frame.prototype, inGrid, 'cursor')": [0, 2, 0, 4, 0, 4],
    "moved(viewer, inViewer, 'step')": [-1, 1, -3, 3],
    "numbered.channels": [2, 9, 10],
}
"""Where arrows, Home and End lead from the second of five tiles, three in a row; steps of
the dialog, where six tiles in a row are three channels; channels in order."""
KEY_STUBS = f"""{GRID}
const moved = (kind, stub, name) => {{
  const positions = [];
  const object = Object.create(kind, Object.getOwnPropertyDescriptors(
    {{ ...stub, [name]: (position) => positions.push(position) }}));
  for (const key of ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "x"]) {{
    object.key({{ key, preventDefault: () => {{}} }});
  }}
  return positions;
}};
const inGrid = {{ grid, view: grid, group: {{ active: 1 }}, last: null }};
const inViewer = {{ frame: {{ view: {{ nrow: 6 }}, grid: {{ slices: 2 }} }} }};
const numbered = Object.create(Group.prototype, {{
  frames: {{ value: [{{ grid: {{ channels: [10, 2] }} }}, {{ grid: {{ channels: [9, 2] }} }}] }},
}});
"""
ADDRESSES = {
    "channelAddress('layer-003.html#c0', 17)": "layer-003.html#c17",
    "channelAddress('#layer-003-t1-c0', 17)": "#layer-003-t1-c17",
    "SPOT_ADDRESS.exec('layer2@0.41,0.63').slice(1)": ["layer2", "0.41", "0.63", None],
    "SPOT_ADDRESS.exec('a@b/output.call1@0,1,12').slice(1)": [
        "a@b/output.call1",
        "0",
        "1",
        "12",
    ],
    "SPOT_ADDRESS.exec('layer2@0.41')": None,
    "layerName({name: 'conv1', stem: 'output'})": "conv1",
    "layerName({name: 'conv1', stem: 'output.call1'})": "conv1.call1",
    "highest([1, 3, 3])": 1,
    "spotIn({left: 10, top: 20, width: 100, height: 50}, {clientX: 35, clientY: 45})": {
        "x": 0.25,
        "y": 0.5,
    },
    "containedBox({getBoundingClientRect: () => ({left: 1, top: 2, width: 100,"
    " height: 100}), naturalWidth: 50, naturalHeight: 200})": {
        "left": 1,
        "top": 2,
        "width": 25,
        "height": 100,
    },
}


@pytest.fixture(scope="module")
def scripts(browser: Any, run: Path) -> Page:
    """The page of the run, whose scripts answer."""
    return Page(browser, run).open("index.html")


@pytest.mark.parametrize(
    ("code", "expected"),
    [*NUMBERS.items(), *SEARCHES.items(), *TABLES.items(), *ADDRESSES.items()],
)
def test_texts_and_numbers(scripts: Page, code: str, expected: object) -> None:
    """Those of tiles, of the search, of tables that are sorted, and of places."""
    assert scripts.js(f"return {code}") == expected


@pytest.mark.parametrize(("code", "expected"), TILES.items())
def test_a_grid_knows_its_tiles(scripts: Page, code: str, expected: object) -> None:
    """Where they lie in the picture and laid out anew, what is said of them, and which
    are shown in which order."""
    assert scripts.js(f"{GRID} return {code}") == expected


@pytest.mark.parametrize(("code", "expected"), OF_GROUPS.items())
def test_a_group_sorts_and_marks_its_channels(
    scripts: Page, code: str, expected: object
) -> None:
    """Alike in all of its grids; a channel has its maps of the largest value first."""
    assert scripts.js(f"{GROUP} return {code}") == expected


@pytest.mark.parametrize(("code", "expected"), KEYS.items())
def test_arrows_move_by_tiles_and_rows(
    scripts: Page, code: str, expected: object
) -> None:
    """In a grid and in the dialog of a tile; a group has its channels by number."""
    assert scripts.js(f"{KEY_STUBS} return {code}") == expected


def test_a_link_takes_along_what_is_set_now(scripts: Page) -> None:
    """Not what was set when it was followed before."""
    code = """
    const target = document.querySelector('a[href$="image-001.html"]');
    const followed = (sort) => {
      if (sort) state.values.set("sort", sort);
      else state.values.delete("sort");
      carry({ target });
      return new URL(target.href).search;
    };
    return [followed("mean"), followed("")];
    """
    assert scripts.js(code) == ["?sort=mean", ""]


def test_a_search_unfolds_the_stage_of_what_it_finds(scripts: Page) -> None:
    """And hides the others; the table of layers is one of them."""
    code = """
    const stages = [...document.querySelectorAll("[data-stage]")];
    const searched = (text) => {
      search.value = text;
      for (const stage of stages) stage.open = false;
      filter(shownPage());
      return stages.map((stage) => [stage.hidden, stage.open]);
    };
    return [searched("clip"), searched("")];
    """
    assert scripts.js(code) == [
        [[True, False], [False, True], [False, True]],
        [[False, False]] * 3,
    ]


def test_a_layer_with_two_tensors_is_one_result(scripts: Page) -> None:
    """Twelve layers are linked at most."""
    code = """
    const tensor = (number, tensor) => ({ dataset: {
      layer: `l${number}`, type: "ReLU", spot: `layer-${number}.html#${tensor}c0`,
    } });
    const linked = (tensors) => {
      showResults(tensors, { channel: 7 });
      return [...results.querySelectorAll("a")].map((link) => link.getAttribute("href"));
    };
    const many = Array.from({ length: 13 }, (_, number) => tensor(number, ""));
    return [linked([tensor(1, ""), tensor(1, "t1-"), tensor(2, "")]), linked(many).length,
      linked([]).length, results.hidden];
    """
    assert scripts.js(code) == [
        ["layer-1.html#c7", "layer-2.html#c7"],
        12,
        0,
        True,
    ]


@pytest.mark.parametrize(("statistic", "numbers"), RANKS)
def test_a_channel_is_ranked_by_all_images(
    scripts: Page, statistic: str, numbers: str
) -> None:
    """By the average of what is finite: of variances, not of deviations."""
    frames = f"[{numbers}].map((number) => ({{grid: {{stat: () => number}}}}))"
    code = f"Group.prototype.rank.call({{frames: {frames}}}, 0, '{statistic}')"
    assert scripts.js(f"return String({code})") == RANKS[statistic, numbers]


@pytest.mark.parametrize(("code", "expected"), OF_PLACES.items())
def test_places_know_their_neighbours(
    scripts: Page, code: str, expected: object
) -> None:
    """What they see, what touches them, how alike they are, and which come first."""
    assert scripts.js(f"{PLACES} return {code}") == expected


def test_a_panel_tells_what_its_answer_is_made_of(scripts: Page) -> None:
    """How many values are averaged, and which images are compared, where it is not each
    and all."""
    code = """
    const layer = { name: "relu", stem: "output", channels: 4, units: [1, 2], error: 0.01 };
    const kept = lens.grid;
    const note = (factor, compared) => {
      lens.grid = () => ({ factor, field: [0] });
      return PlacePanel.prototype.noteOf.call({ index: { images: [0, 1, 2], compared } }, layer);
    };
    const notes = [note(1, 3), note(2, 2)];
    lens.grid = kept;
    return notes;
    """
    cosines = (
        "The numbers say how alike two places are to the 4 channels: 1 is the same, 0"
        " unlike (cosine similarity, right to about 0.01)."
    )
    averaged = "A place is the mean of 2×2 values of the map."
    compared = "Of 3 images, the first 2 are compared."
    assert scripts.js(code) == [cosines, f"{cosines} {averaged} {compared}"]


@pytest.mark.parametrize("y", ["5", "innerHeight - 5"])
@pytest.mark.parametrize("x", ["5", "innerWidth - 5"])
def test_a_tip_stays_in_the_window(scripts: Page, x: str, y: str) -> None:
    """As wide as elsewhere beside a scroll bar, and above the pointer where there is no
    room below."""
    code = f"""
    const frame = {{ grid: {{ title: () => "Channel 0", sentence: () => "min 0" }} }};
    tip.show(frame, 0, 100, 100);
    const width = tip.box.offsetWidth;
    tip.show(frame, 0, {x}, {y});
    const {{ left, top, right, bottom }} = tip.box.getBoundingClientRect();
    const isSqueezed = tip.box.offsetWidth < width;
    tip.hide();
    const isBeside = bottom < {y} || top > {y};
    return [isSqueezed, isBeside, left >= 0, top >= 0, right <= innerWidth, bottom <= innerHeight];
    """
    assert scripts.js(code) == [False, True, True, True, True, True]
