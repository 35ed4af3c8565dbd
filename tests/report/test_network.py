"""The network as a picture, and tables of channels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rundirs import Drawn, write_run
from torch import nn

import featviz
from featviz.options.commands import ReportOptions
from featviz.report import build_report
from featviz.report.figures import arrange
from featviz.report.stages import most_varied, network
from featviz.report.totals import HIGH, LOW, ChannelTotals
from featviz.rundir.read import read_run
from featviz.rundir.schema import Capture

from .markup import assert_says, built, page_of, source

VALUES = np.array(
    [
        [-1, 1, 0, 0.5, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [-9, 9, 1, 4, 0.25, 0],
        [2, 2, 2, 0, 0, 0],
        [0, 8, 1, 3, 0.5, 0],
        [-1, 1, 0, 9, 0, 2],
    ],
    np.float32,
)
"""Statistics of six channels: 1 is all zero, 3 constant, 5 has values that are not
finite."""


def one_layer(root: Path, *stats: np.ndarray) -> Path:
    """A report of one layer in `0.png`, `1.png`, ... with these statistics."""
    images = {
        f"{n}.png": [Drawn("x", stats=numbers)] for n, numbers in enumerate(stats)
    }
    return built(root, images)


def test_a_strip_shows_the_tiles_of_its_channels(tmp_path: Path) -> None:
    """The box of every crop holds the grey of the channel that its link names
    (Pillow), and the number stands below it."""
    channels = [7, 2, 5]
    drawn = Drawn("x", maps=9, channels=channels, nrow=2, tile=(8, 10))
    root = built(tmp_path / "out", {"a.png": [drawn]})
    page = page_of(root)
    grid = np.asarray(Image.open(next(root.rglob("output.png"))))
    crops = [svg for svg in page.of("svg") if "crop" in str(svg.get("class"))]
    links = filter(re.compile("#c").search, page.values("a", "href"))
    seen = {}
    for crop, link in zip(crops, links, strict=True):
        x, y, width, height = map(int, str(crop["viewbox"]).split())
        pixels = grid[y : y + height, x : x + width]
        assert pixels.shape == (8, 10)
        # the first pixel tells a tile that is turned round
        seen[link.partition("#c")[2]] = set(pixels.ravel()[1:])
    assert seen == {"7": {20}, "2": {21}, "5": {22}}
    below = re.findall("</svg><small>(.*?)</small>", source(root))
    assert below == list(seen)


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    """The row of a layer of six channels."""
    root = write_run(tmp_path / "out", {"a.png": [Drawn("x", stats=VALUES)]})
    (image,) = read_run(root).images.values()
    (row,) = image.captures.values()
    return row


def test_the_maps_of_a_strip_vary(capture: Capture) -> None:
    """The largest deviation comes first, and what is not finite last."""
    assert most_varied(capture, VALUES, 1) == [2]
    assert set(most_varied(capture, VALUES, 3)) == {2, 4, 0}
    # wherever it stands: behind those that do not vary
    for table, nonfinite in ((VALUES, 5), (VALUES[::-1], 0)):
        every = most_varied(capture, table, 6)
        assert sorted(every) == [0, 1, 2, 3, 4, 5]
        assert every[-1] == nonfinite


@pytest.mark.parametrize(("deviation", "second"), [(0.18, 1), (0.14, 2)])
def test_maps_differ_by_mean_and_deviation_alike(
    capture: Capture, deviation: float, second: int
) -> None:
    """Of a range, a deviation has half at most, so it counts twice: against a mean that
    is 0.3 away, a deviation of 0.12 less is nearer, one of 0.16 less is farther."""
    table = np.zeros((6, 6), np.float32)
    table[:, 1] = 1
    table[:, 2] = 0.5
    table[:, 3] = [0.3, 0.29, deviation, 0.01, 0.01, 0.01]
    table[1, 2] = 0.8
    assert most_varied(capture, table, 2) == [0, second]


def test_constant_maps_go_by_magnitude(capture: Capture) -> None:
    """Where no map varies, the one of the largest value comes first."""
    constant = VALUES.copy()
    constant[:, [3, 5]] = 0
    assert most_varied(capture, constant, 1) == [3]
    # a map that is not finite is no map that varies
    constant[5, [3, 5]] = [2, 1]
    assert most_varied(capture, constant, 1) == [3]


def stages_of(root: Path) -> list[tuple[str, list[str]]]:
    """The title of each stage of the first image, and its layers."""
    (page, *_), _ = arrange(read_run(root))
    stats = page.image.stats()
    figures = [group.figures[0] for group in page.groups]
    by_picture = {
        figure.picture.id: stats[figure.row.capture_key.stats_key] for figure in figures
    }
    stages = []
    for stage in network(page, by_picture):
        stages.append((stage.title, [step.group.layer for step in stage.steps]))
    return stages


def test_layers_of_one_resolution_are_a_stage(tmp_path: Path) -> None:
    """They stand in call order; single numbers belong to the maps between which they
    stand, or end it all."""
    drawn = [
        Drawn("b", index=9, tile=(8, 10)),
        Drawn("a", index=1, tile=(8, 10)),
        Drawn("c", index=2, tile=(4, 4)),
        Drawn("squeeze", index=3, tile=(2, 2)),
        Drawn("d", index=4, tile=(4, 4)),
        Drawn("pool", index=5, tile=(2, 2)),
    ]
    root = write_run(tmp_path / "out", {"a.png": drawn})
    assert stages_of(root) == [
        ("4×5", ["b", "a"]),
        ("2×2", ["c", "squeeze", "d"]),
        ("Vectors", ["pool"]),
    ]


@pytest.mark.parametrize(
    ("blocks", "modules", "is_divided"), [(40, 1, False), (20, 4, True), (2, 8, False)]
)
def test_stages_are_neither_many_nor_few(
    blocks: int, modules: int, is_divided: bool, tmp_path: Path
) -> None:
    """Of one resolution at most sixteen, or a fourth of the layers, and more than two."""
    names = [f"blocks.{n}.{m}" for n in range(blocks) for m in range(modules)]
    drawn = [Drawn(name, index=n, maps=1, nrow=1) for n, name in enumerate(names)]
    root = write_run(tmp_path / "out", {"a.png": drawn})
    expected = [f"blocks.{n}" for n in range(blocks)] if is_divided else ["4×5"]
    assert [title for title, _ in stages_of(root)] == expected


@pytest.mark.parametrize(
    ("tile", "shape"),
    [((8, 24), ""), ((8, 25), "wide"), ((16, 8), ""), ((17, 8), "tall")],
)
def test_a_long_map_is_shown_whole_and_squeezed(
    tile: tuple[int, int], shape: str, tmp_path: Path
) -> None:
    """More than three times as wide as high, or twice as high as wide."""
    drawn = Drawn("x", maps=2, nrow=2, padding=1, tile=tile, scale=1)
    ((page, *_), _) = arrange(read_run(write_run(tmp_path / "out", {"a.png": [drawn]})))
    stats = {page.groups[0].figures[0].picture.id: np.zeros((2, 6), np.float32)}
    (first, second) = network(page, stats)[0].steps[0].tiles
    height, width = tile
    assert (first.box, first.shape) == ((1, 1, width, height), shape)
    assert (second.box, second.shape) == ((2 + width, 1, width, height), shape)


def test_the_first_stage_is_open_however_large(tmp_path: Path) -> None:
    """Others are folded where sixty layers would be open with them."""
    drawn = [Drawn(f"a{n}", index=n, maps=1, nrow=1) for n in range(61)]
    drawn.append(Drawn("b", index=99, maps=1, nrow=1, tile=(2, 2)))
    ((page, *_), _) = arrange(read_run(write_run(tmp_path / "out", {"a.png": drawn})))
    table = np.zeros((1, 6), np.float32)
    stats = {group.figures[0].picture.id: table for group in page.groups}
    assert [stage.is_open for stage in network(page, stats)] == [True, False]


@pytest.mark.parametrize(
    ("columns", "tile", "room"),
    [
        (8, (8, 10), "small"),
        (9, (8, 10), "middle"),
        (16, (8, 10), "middle"),
        (17, (8, 10), "whole"),
        (4, (80, 24), "small"),
        (4, (8, 80), "whole"),
    ],
)
def test_tiles_have_the_room_to_be_seen(
    columns: int, tile: tuple[int, int], room: str, tmp_path: Path
) -> None:
    """A third of the page, two thirds, or a row of their own: also what is wide and
    low."""
    maps = columns if tile == (8, 80) else 7 * columns
    drawn = Drawn("x", maps=maps, nrow=columns, tile=tile, scale=1)
    ((page, *_), _) = arrange(read_run(write_run(tmp_path / "out", {"a.png": [drawn]})))
    assert page.groups[0].figures[0].width_class == room


def test_a_stage_names_its_layers_and_the_one_that_is_shown(tmp_path: Path) -> None:
    """A stage of one layer names that layer alone."""
    drawn = [
        Drawn("c", index=1, type="Conv2d"),
        Drawn("r", index=2, type="ReLU"),
        Drawn("pool", index=3, tile=(2, 2)),
    ]
    text = page_of(built(tmp_path / "out", {"a.png": drawn})).text
    assert_says(text, "· layers c to r (2) · maps of layer r (ReLU)", "· layer pool")


@pytest.mark.parametrize(
    ("layers", "sizes", "shown"),
    [(12, 1, [1, 3, 6, 8, 11]), (12, 3, [3, 7, 11]), (4, 1, [1, 3]), (2, 1, [1])],
)
def test_few_stages_show_several_layers(
    layers: int, sizes: int, shown: list[int], tmp_path: Path
) -> None:
    """Five in all stages together, and half of a stage at most; of three, one each."""
    drawn = []
    for number in range(layers):
        side = 4 * (1 + number * sizes // layers)
        name = f"block{number}"
        drawn.append(Drawn(name, index=number, maps=1, nrow=1, tile=(side, side)))
    page = page_of(built(tmp_path / "out", {"a.png": drawn}))
    assert re.findall(r"maps of layer block(\d+)", page.text) == [str(n) for n in shown]


@pytest.mark.parametrize(
    ("target", "shown"), [(None, "class 1 (62.2 %)"), ("class:0", "class 0 (37.8 %)")]
)
def test_a_report_of_class_maps_names_method_and_target(
    target: str | None, shown: str, tmp_path: Path
) -> None:
    """One map of each layer, unfolded, in the order of the network, though gradients come
    from its end."""
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    head = nn.Linear(2, 2)
    convolutions = [nn.Conv2d(3, 2, 3, 2), nn.ReLU(), nn.Conv2d(2, 2, 3, 2), nn.ReLU()]
    net = nn.Sequential(*convolutions, *pool, head)
    for values in net.parameters():
        nn.init.constant_(values, 0.1)
    # the softmax of s and s + 0.5 is 37.8 and 62.2 %
    head.bias.data = torch.tensor([0.0, 0.5])
    options = {"reduce": "gradcam", "target": target, "preset": "none"}
    featviz.run(net, torch.rand(3, 16, 16), "ReLU", tmp_path / "run", **options)
    featviz.report(tmp_path / "run")
    page = page_of(tmp_path / "run")
    assert_says(
        page.text,
        f"Grad-CAM of image-0.png for {shown}",
        "Grad-CAM · layers 1 to 3 (2)",
        "1 ReLU of 2 maps",
        "3 ReLU of 2 maps",
    )
    assert "Feature maps" not in page.text
    assert "maps of layer" not in page.text
    text = page_of(tmp_path / "run", "layer-000.html").text
    assert_says(text, "3 →")


def test_layers_are_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    """Not in that of the model, in which a block's own function stands before its
    modules."""
    ran = {
        "stem": 1,
        "block.conv": 3,
        "block/fn:relu": 2,
        "block/fn:add": 2,
        "block": 2,
    }
    drawn = [Drawn(name, index=index) for name, index in ran.items()]
    root = built(tmp_path / "out", {"a.png": drawn})
    assert [page.name for page in arrange(read_run(root)).layers] == [*ran]
    text = page_of(root, "layer-001.html").text
    assert_says(text, "← stem", "block/fn:relu →")


def test_layers_of_a_later_image_stand_between_those_that_it_shares(
    tmp_path: Path,
) -> None:
    """Behind the layer that ran before them in that image."""
    shared, before, behind = (Drawn(name) for name in ("shared", "before", "behind"))
    images = {"a.png": [shared], "b.png": [before, shared, behind]}
    _, layers = arrange(read_run(write_run(tmp_path / "out", images)))
    assert [page.name for page in layers] == ["before", "shared", "behind"]


def test_one_resolution_is_divided_by_module(tmp_path: Path) -> None:
    """The blocks of a transformer are stages, since more than a dozen layers have maps
    of one size."""
    blocks = [f"blocks.{n}" for n in range(5)]
    names = [f"{block}.{module}" for block in blocks for module in "abc"]
    drawn = [Drawn(name, index=n, maps=2, nrow=2) for n, name in enumerate(names)]
    drawn.append(Drawn("head", index=99, maps=2, nrow=2, tile=(2, 2)))
    root = write_run(tmp_path / "out", {"a.png": drawn})
    assert [title for title, _ in stages_of(root)] == [*blocks, "head"]


SECOND = VALUES.copy()
SECOND[1] = [0, 5, 1, 1, 0.5, 0]


@pytest.fixture
def second_image(tmp_path: Path) -> Path:
    """A report of two images, of which the second has values in channel 1."""
    return one_layer(tmp_path / "out", VALUES, SECOND)


def percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


@pytest.mark.medium
def test_the_first_page_has_the_findings_of_all_images(second_image: Path) -> None:
    """Zeros and range are those of both (numpy), and a channel is all zero where it is
    in both."""
    text = source(second_image)
    assert percent(np.concatenate([VALUES, SECOND])[:, 4].mean()) in text
    assert "range −9 to 9</span>\n<span>over 2 images" in text
    assert "1 all zero" not in text
    assert_says(text, "1 constant", "1 NaN or infinite")


def test_the_page_of_an_image_has_its_findings(second_image: Path) -> None:
    """Zeros and findings are those of the image alone."""
    text = source(second_image, "image-000.html")
    assert percent(VALUES[:, 4].mean()) in text
    assert "1 all zero" in text
    assert "over 2 images" not in text


CAPTURE = {
    "layer": "x",
    "type": "X",
    "index": 0,
    "call": 0,
    "key": "",
    "layout": "nchw",
    "maps": 6,
    "file": "x.png",
    "normalize": "map",
    "range": None,
    "min": 0.0,
    "max": 1.0,
    "mean": 0.0,
    "std": 0.0,
    "zero_fraction": 0.0,
    "nonfinite": 0,
}
EVERY = {"all zero", "constant", "NaN or infinite"}


@pytest.mark.parametrize(
    ("capture_kind", "size", "images", "findings"),
    [
        ("output", 4, 1, EVERY),
        ("grad", 4, 1, {"NaN or infinite"}),
        ("output", 1, 1, {"NaN or infinite"}),
        ("output", 1, 2, EVERY),
    ],
)
def test_a_constant_gradient_and_a_single_number_are_no_finding(
    capture_kind: str, size: int, images: int, findings: set[str]
) -> None:
    """Behind global pooling all gradients are constant maps, which says nothing; no
    channel is both all zero and constant."""
    grid = {"nrow": 3, "padding": 2, "tile": [size, size], "scale": 1}
    row = Capture(kind=capture_kind, grid=grid, shape=[1, 6, size, size], **CAPTURE)  # type: ignore[arg-type]
    totals = ChannelTotals()
    for _ in range(images):
        totals.add(row, VALUES)
    assert set(totals.findings) == findings
    zeros = set(totals.findings.get("all zero", ()))
    assert zeros.isdisjoint(totals.findings.get("constant", ()))


@pytest.mark.parametrize("first_is_finite", [False, True])
def test_an_image_without_a_finite_value_hides_no_other(first_is_finite: bool) -> None:
    """The range of each channel is that of the images that have one."""
    grid = {"nrow": 3, "padding": 2, "tile": [4, 4], "scale": 1}
    row = Capture(kind="output", grid=grid, shape=[1, 6, 4, 4], **CAPTURE)  # type: ignore[arg-type]
    nothing = VALUES.copy()
    nothing[:, :4] = np.nan
    nothing[:, 5] = 16
    totals = ChannelTotals()
    for stats in (VALUES, nothing) if first_is_finite else (nothing, VALUES):
        totals.add(row, stats)
    ranges = totals.table[:, [LOW, HIGH]]
    np.testing.assert_array_equal(ranges, VALUES[:, :2])
    assert set(totals.findings) == {"NaN or infinite"}


def number(value: float) -> str:
    """Four digits, with a minus sign."""
    return f"{value:.4g}".replace("-", "−")


@pytest.mark.medium
def test_rows_of_channels_hold_the_totals(tmp_path: Path) -> None:
    """Smallest, largest, mean and zeros over the images (numpy) stand at the channel's
    address."""
    stats = np.stack([VALUES, VALUES + np.float32([-1.2343, 2, 0.5126, 0, 0, 0])])
    text = source(one_layer(tmp_path / "out", *stats), "layer-000.html")
    for channel in range(6):
        row = text.split(f'<tr id="c{channel}">')[1].split("</tr>")[0]
        columns = stats[:, channel].T
        assert re.findall(r'<td class="n">([^<]*)</td>', row) == [
            number(columns[0].min()),
            number(columns[1].max()),
            number(columns[2].mean()),
            percent(columns[4].mean()),
        ]


def bars_of(root: Path) -> str:
    """The bars of a vector on the first page."""
    return source(root).split('class="bars values"')[1].split("</table>")[0]


def with_prediction(root: Path, scores: list[float]) -> Path:
    """A report of a vector of ten values, and a prediction of its last two classes with
    these scores."""
    stats = np.zeros((10, 6), np.float32)
    stats[:, :3] = np.arange(10)[:, None] / 2
    strip = Drawn(
        "fc",
        10,
        nrow=10,
        padding=0,
        tile=(12, 12),
        scale=12,
        stats=stats,
        more={"layout": "vector", "shape": [1, 10]},
    )
    write_run(root, {"a.png": [strip]})
    path = root / "a.png" / "manifest.json"
    content = json.loads(path.read_text())
    tabby = {"index": 9, "score": scores[0], "name": "tabby", "probability": 0.75}
    dog = {"index": 8, "score": scores[1], "name": "dog", "probability": 0.125}
    content["prediction"] = [tabby, dog]
    path.write_text(json.dumps(content))
    build_report(root, ReportOptions())
    return root


def test_a_vector_is_bars_with_the_names_of_classes(tmp_path: Path) -> None:
    """Its values are the scores of the prediction; lengths are in proportion."""
    bars = bars_of(with_prediction(tmp_path / "out", [4.5, 4.0]))
    names = re.findall(r'<a href="layer-000.html#c(\d)">([^<]*)<', bars)
    assert names[:3] == [("9", "tabby"), ("8", "dog"), ("7", "class 7")]
    lengths = re.findall(r'width="([\d.]+)" height="8"/>', bars)
    expected = np.arange(9, -1, -1) * 100 / 9
    assert [float(length) for length in lengths] == pytest.approx(expected, abs=0.01)


def test_bars_of_negative_values_end_at_zero(tmp_path: Path) -> None:
    """The others begin there."""
    stats = np.zeros((4, 6), np.float32)
    stats[:, :3] = np.array([[3], [1], [-1], [-2]])
    row = {"layout": "vector", "shape": [1, 4]}
    strip = Drawn("fc", 4, nrow=4, padding=0, stats=stats, more=row)
    bars = bars_of(built(tmp_path / "out", {"a.png": [strip]}))
    starts_and_lengths = re.findall(r'x="([\d.]+)" width="([\d.]+)" height="8"', bars)
    expected = [(40.0, 60.0), (40.0, 20.0), (20.0, 20.0), (0.0, 40.0)]
    assert [(float(x), float(w)) for x, w in starts_and_lengths] == expected


def test_bars_have_finite_values_alone(tmp_path: Path) -> None:
    """What is NaN is no zero."""
    stats = np.zeros((4, 6), np.float32)
    stats[:, :3] = np.array([[-3], [-1], [np.nan], [-2]])
    stats[2, 5] = 1
    row = {"layout": "vector", "shape": [1, 4]}
    strip = Drawn("fc", 4, nrow=4, padding=0, stats=stats, more=row)
    bars = bars_of(built(tmp_path / "out", {"a.png": [strip]}))
    assert re.findall(r'#c(\d)"', bars) == ["1", "3", "0"]


def test_a_vector_of_other_values_has_no_names(tmp_path: Path) -> None:
    """The prediction is told, and is not taken for the vector's."""
    root = with_prediction(tmp_path / "out", [1.0, 2.0])
    assert "tabby" not in bars_of(root)
    for text in ("tabby", "75.0\u00a0%", "12.5\u00a0%"):
        assert text in source(root)


def test_a_vector_that_is_shorter_than_the_list_of_classes(tmp_path: Path) -> None:
    """It is none of their scores."""
    root = with_prediction(tmp_path / "out", [4.5, 4.0])
    path = root / "a.png" / "manifest.json"
    path.write_text(path.read_text().replace('"index": 8', '"index": 10'))
    build_report(root, ReportOptions())
    assert "tabby" not in bars_of(root)


def rectified(*dark: int) -> np.ndarray:
    """The statistics of six channels with zeros and nothing below, of which some are
    all zero."""
    stats = np.tile(np.float32([0, 3, 0.5, 1, 0.5, 0]), (6, 1))
    stats[list(dark)] = [0, 0, 0, 0, 1, 0]
    return stats


CONV = Drawn(
    "c", type="Conv2d", stats=np.tile(np.float32([-2, 3, 0.5, 1, 0, 0]), (6, 1))
)
BLOCK = Drawn("b", type="Block", stats=rectified(4))
POOLED = [
    Drawn(name, index=index, type=name, stats=rectified(1))
    for index, name in enumerate(("ReLU", "MaxPool2d"))
]

NUMBER = Drawn("r", index=2, scale=1, tile=(1, 1))
"""One value of each channel, which in one image says nothing of it."""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("images", "verdict"),
    [
        (
            [
                [Drawn("x", stats=rectified(1, 5))],
                [Drawn("x", stats=rectified(1, 3, 5))],
            ],
            "2 in 1 layer",
        ),
        ([[Drawn("x")]] * 2, "none in the one activation drawn"),
        ([[CONV, BLOCK]] * 2, "1 in 1 layer"),
        ([POOLED] * 2, "1 in 1 l"),
        ([[Drawn("x"), NUMBER], [Drawn("x")]], "none in the one activation drawn"),
    ],
)
def test_the_first_page_begins_with_the_dead_channels(
    tmp_path: Path, images: list[list[Drawn]], verdict: str
) -> None:
    """It counts those that are zero in every image, with a link to their names: of
    activations only, which a convolution's output is not and a block's may be, and once
    for a pooling behind a ReLU."""
    root = built(
        tmp_path / "out", {f"{n}.png": drawn for n, drawn in enumerate(images)}
    )
    assert f"Dead channels (zero in every image): {verdict}" in page_of(root).text
    assert f'<a href="#findings">{verdict}' in source(root)


@pytest.mark.parametrize(
    "changes", [{"ablate": "0:1"}, {"edit": "0:channel 1*0"}], ids=["ablate", "edit"]
)
@pytest.mark.parametrize("layers", ["Conv2d,ReLU", "ReLU"])
def test_ablated_channels_are_not_dead(
    tmp_path: Path, changes: dict[str, str], layers: str
) -> None:
    """Neither in the layer, drawn or not, nor in the ReLU behind it; what a later
    convolution leaves dark is, though it has the same number."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU())
    with torch.no_grad():
        for convolution in (model[0], model[2]):
            convolution.weight.fill_(1)
            convolution.bias.copy_(torch.tensor([1, 1, 1, 1]))
        model[2].bias.copy_(torch.tensor([1, -9, -9, 1]))  # type: ignore[operator]
    ramp = np.tile(np.linspace(0, 1, 8, dtype=np.float32), (8, 1))
    images = [ramp, ramp.T]

    featviz.run(model, images, layers, tmp_path / "out", **changes)
    build_report(tmp_path / "out", ReportOptions())

    text = page_of(tmp_path / "out").text
    assert_says(
        text,
        "Changed while it ran: " + " ".join(*changes.items()),
        "Dead channels (zero in every image): 2 in 1 layer",
        "1 ReLU 1 channel ablated in every image: 1"
        " 3 ReLU 2 channels all zero (dead) in every image: 1–2",
    )
    in_convolution = "0 Conv2d 1 channel ablated in every image: 1 1 ReLU"
    assert (in_convolution in text) == ("Conv2d" in layers)


@pytest.mark.parametrize("layers", ["ReLU", "BatchNorm2d,Dropout,ReLU"])
def test_channels_of_several_changes_are_ablated(tmp_path: Path, layers: str) -> None:
    """Of one layer, and of two that stand before the same output, drawn or not."""
    norms = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
    model = nn.Sequential(nn.Conv2d(1, 6, 1), *norms, nn.Dropout(), nn.ReLU()).eval()
    nn.init.ones_(model[0].bias)  # type: ignore[arg-type]
    nn.init.uniform_(model[0].weight, 0.1, 1)  # type: ignore[arg-type]
    ramp = np.tile(np.linspace(0, 1, 8, dtype=np.float32), (8, 1))
    out = tmp_path / "out"
    featviz.run(model, ramp, layers, out, ablate=("1:1", "1:3", "2:4"), size=8)
    build_report(out, ReportOptions())
    assert "4 ReLU 3 channels ablated: 1, 3–4" in page_of(out).text


@pytest.mark.parametrize("weights", ["none", "DEFAULT"])
def test_random_weights_are_said_at_the_head(tmp_path: Path, weights: str) -> None:
    """Their maps look as if they had been learned."""
    model = {"kind": "torchvision", "name": "resnet18", "weights": weights}
    root = write_run(tmp_path / "out", {"a.png": [CONV]}, model=model)
    build_report(root, ReportOptions())
    text = page_of(root).text
    assert ("Random weights (--weights none): the maps show" in text) == (
        weights == "none"
    )


def test_a_stage_names_the_call_that_it_shows(tmp_path: Path) -> None:
    """A block's ReLU may run twice, and the second is the block's output."""
    drawn = [Drawn("conv"), Drawn("relu", index=2), Drawn("relu", index=2, call=1)]
    text = page_of(built(tmp_path / "out", {"a.png": drawn})).text
    assert "layers conv to relu.call1 (2) · maps of layer relu.call1 (ReLU)" in text


def test_one_image_proves_no_channel_dead(tmp_path: Path) -> None:
    """Neither the head nor the findings call a channel dead that is zero in it."""
    text = page_of(built(tmp_path / "out", {"a.png": [BLOCK]})).text
    head = "all zero in this image (one image cannot show which are dead): 1 in 1 layer"
    assert_says(text, head, "1 channel all zero: 4")
    assert "(dead)" not in text


@pytest.mark.medium
@pytest.mark.parametrize(
    ("drawn", "reason"),
    [
        (CONV, "no ReLU was drawn"),
        (NUMBER, "only one value of each channel"),
    ],
)
def test_dead_channels_may_be_unknown(
    tmp_path: Path, drawn: Drawn, reason: str
) -> None:
    """The page gives the reason, and does not say that there are none."""
    text = page_of(built(tmp_path / "out", {"a.png": [drawn]})).text
    assert f"unknown: {reason}" in text
    assert "No channel is dead" not in text


@pytest.mark.medium
def test_gradients_are_stages_of_their_own(tmp_path: Path) -> None:
    """Forward and backward at the same resolution are not mixed."""
    size: dict[str, Any] = {"tile": (14, 14), "scale": 2}
    drawn = [Drawn("a", **size), Drawn("b", **size), Drawn("b", kind="grad", **size)]
    root = built(tmp_path / "out", {"a.png": drawn})
    titles = re.findall("<summary><h3>(.*?)</h3>", source(root))
    assert titles == ["7×7", "Gradients, 7×7"]


@pytest.mark.medium
def test_slices_are_named(tmp_path: Path) -> None:
    """The page has those of the manifest; where it names none, they are the first."""
    steps = {"steps": [0, 6, 23]}
    drawn = [
        Drawn("x", slices=(3, 24), nrow=3, more=steps),
        Drawn("y", index=2, slices=(3, 24), nrow=3),
    ]
    root = built(tmp_path / "out", {"a.png": drawn})
    text = page_of(root, "image-000.html").text
    assert_says(text, "for each channel 3 of 24: 0, 6, 23", "3 of 24: 0–2")
    assert "slices 3 of 24: 0–2" in page_of(root, "layer-001.html").text
    crops = page_of(root).values("svg", "viewbox")
    assert set(crops) >= {f"2 {2 + 10 * channel} 10 8" for channel in range(6)}
