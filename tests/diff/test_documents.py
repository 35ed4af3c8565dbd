"""What `featviz diff` writes: its page, difference maps and JUnit."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from PIL import Image
from report.markup import Markup
from rundirs import Drawn, write_run
from torch import nn

from featviz import __version__
from featviz.diff.comparison import DifferenceMap, ValueSpan
from featviz.records import GridPlan
from featviz.rundir import REPORT_ASSETS

from .changed_network import (
    CHANGED,
    CLI,
    KEPT,
    Document,
    Pair,
    Run,
    documented,
    drawn,
    kept_tensors,
    nan_bias,
    one_weight,
)

pytestmark = pytest.mark.medium


HOSTILE = "<img src=x onerror=alert(1)> & 'b'.png"
LOST = "<u onclick=alert(2)>.png"


def links_of(page: Markup) -> list[str]:
    """What its pictures, scripts and references lead to."""
    return [str(a[name]) for _, a in page.tags for name in ("src", "href") if name in a]


class WrittenPage(NamedTuple):
    """The page of a diff."""

    path: Path
    page: Markup


@pytest.fixture
def hostile(featviz: CLI, run: Run, photos: Path) -> WrittenPage:
    """Of images and a run whose names are markup; one image is in NEW only."""
    (photos / "b.png").rename(photos / HOSTILE)
    (photos / "a.png").rename(photos / LOST)
    base = run("base", images=photos / HOSTILE)
    new = run("<i>new", change=one_weight)
    path = Path("pages/a diff#1.html")
    assert featviz("diff", base, new, "--html", path).code == 4
    return WrittenPage(path, Markup(path.read_text("utf-8")))


def test_nothing_of_the_page_is_inline(hostile: WrittenPage) -> None:
    """There is no style, script or handler, nor a frame of another page."""
    page = hostile.page
    assert page.inline.strip() == ""
    for tag, attributes in page.tags:
        assert tag not in ("style", "iframe")
        assert not [name for name in attributes if name.startswith(("on", "style"))]


def test_links_of_the_page_lead_to_files(hostile: WrittenPage) -> None:
    """Of each of the three layers that differ it shows the input, before, after, and
    the difference."""
    path, page = hostile
    links = links_of(page)
    assert not any(" " in link for link in links)
    assert len([link for link in links if link.endswith(".png")]) == 3 * 4
    for link in links:
        file = unquote(link.partition("#")[0])
        assert (path.parent / file).exists(), link


def test_names_on_the_page_are_text(hostile: WrittenPage) -> None:
    """Those of images and of a run are escaped."""
    text = hostile.page.text
    assert HOSTILE in text
    assert f"image {LOST} (not there)" in text
    assert "<i>new" in text
    assert "First layer to diverge: 2 Conv2d" in text


def test_the_page_tells_what_interventions_did(featviz: CLI, run: Run) -> None:
    """At the top, beside the verdict; the first layer to diverge is marked once."""
    page = Path("d.html")
    new = run("new", "--ablate", f"2:{CHANGED}")
    assert featviz("diff", run("base"), new, "--html", page).code == 4
    text = page.read_text("utf-8")
    assert f"<b>Changed while NEW ran:</b> ablate 2:{CHANGED}" in text
    assert "Changed while BASE ran" not in text
    assert text.count("first to diverge") == 1
    assert text.index("first to diverge") > text.index('data-layer="2"')


def test_the_page_of_equal_runs(featviz: CLI, run: Run) -> None:
    """It has a verdict, and no groups of layers."""
    base = run("base")
    page = Path("d.html")
    assert featviz("diff", base, base, "--html", page).code == 0
    text = page.read_text("utf-8")
    assert "<b>Equal</b>" in text
    assert "data-group" not in text


def page_of(featviz: CLI, base: Path, new: Path) -> str:
    """The source of the page of two runs."""
    featviz("diff", base, new, "--html", "d.html")
    return Path("d.html").read_text("utf-8")


def with_predictions(name: str, classes: list[int]) -> Path:
    """A run of images that are taken for these classes."""
    names = [f"{n}.png" for n in range(len(classes))]
    root = write_run(Path(name), {image: [Drawn("x")] for image in names})
    for image, index in zip(names, classes, strict=True):
        path = root / image / "manifest.json"
        content = json.loads(path.read_text())
        score = {"index": index, "score": 1.0, "name": None, "probability": 0.5}
        content["prediction"] = [score]
        path.write_text(json.dumps(content))
    return root


def test_the_page_counts_predictions_that_changed(featviz: CLI) -> None:
    """Also among those that are folded; each is marked once."""
    base = with_predictions("base", [0] * 6)
    text = page_of(featviz, base, with_predictions("new", [1] * 5 + [0]))
    assert "6 predictions, 5 changed" in text
    assert "2 more, 1 of them changed" in text
    assert text.count('<span class="badge">changed</span>') == 5


@pytest.mark.parametrize(
    ("options", "heading"),
    [
        ({"cmap": "magma"}, "1 setting of the runs that differs<"),
        ({"cmap": "magma", "edit": ["x"]}, "1 setting of the runs that differs<"),
        ({"cmap": "magma", "nrow": 4}, "2 settings of the runs that differ<"),
    ],
)
def test_the_page_counts_settings(
    options: dict[str, object], heading: str, featviz: CLI
) -> None:
    """Without what interventions did, which stands at the head."""
    images = {"a.png": [Drawn("x")]}
    base = write_run(Path("base"), images, options={"cmap": "grey", "nrow": 2})
    new = write_run(Path("new"), images, options={"nrow": 2, **options})
    assert heading in page_of(featviz, base, new)


def test_the_page_has_numbers_of_single_values(featviz: CLI) -> None:
    """Of the channel that changed; an equal layer stands behind all others."""
    value = Drawn("fc", type="Linear", kind="grad", tile=(8, 8), scale=8)
    stats = value.numbers
    stats[4, 2] += 1
    changed = Drawn("fc", type="Linear", kind="grad", tile=(8, 8), scale=8, stats=stats)
    base = write_run(Path("base"), {"a.png": [value, Drawn("relu")]})
    new = write_run(Path("new"), {"a.png": [changed, Drawn("relu")]})
    text = page_of(featviz, base, new)
    assert re.findall('<th scope="row" class="n">([^<]*)</th>', text) == ["4"]
    (before, after, difference) = re.findall('<td class="n">([^<]*)</td>', text)[-3:]
    assert float(after) - float(before) == pytest.approx(float(difference)) == 1
    assert "<small>Linear · grad</small>" in text
    assert 'data-layer="relu" data-change="-1"' in text
    assert "have pictures" not in text


def test_the_page_of_the_current_folder_names_it(
    featviz: CLI, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the path that was typed, since a dot has no name."""
    base = run("older")
    run("newer")
    monkeypatch.chdir(base)
    featviz("diff", ".", "../newer", "--html", "../d.html")
    text = " ".join(Markup(Path("../d.html").read_text("utf-8")).text.split())
    assert ". → ../newer" in text


def test_the_page_names_the_first_run_as_the_base(featviz: CLI, run: Run) -> None:
    """In the title, and at each run: BASE first."""
    base = run("older")
    new = run("newer", change=one_weight)
    featviz("diff", base, new, "--html", "d.html")
    text = " ".join(Markup(Path("d.html").read_text("utf-8")).text.split())
    assert "older → newer" in text
    assert re.search(r"BASE[^A-Z]*older\b.*NEW[^A-Z]*newer\b", text)


MAPS = Path("maps")


@pytest.fixture
def mapped(featviz: CLI, pair: Pair) -> Document:
    """The document of two runs with tensors, whose difference maps are drawn."""
    return documented(featviz, *pair, "--out", MAPS).document


def test_each_difference_map_has_the_scale_of_its_layer(mapped: Document) -> None:
    """Its largest relative difference: on the scale of another one, a small difference
    would be grey."""
    assert list(drawn(MAPS)) == ["2 (Conv2d)", "3 (ReLU)", "4 (Conv2d)"]
    worst = {}
    for layer in mapped["layers"]:
        worst[layer["layer"]] = max(layer["channels"]["relative"])
    for row in mapped["maps"]:
        assert row["limit"] == pytest.approx(worst[row["label"]])
        assert row["source"] == "kept tensors"
    assert len({row["limit"] for row in mapped["maps"]}) > 1
    assert mapped["maps"][0]["channels"] == [CHANGED]


def test_difference_maps_have_the_colours_of_their_values(
    mapped: Document, pair: Pair
) -> None:
    """Each pixel has that of its signed difference."""
    colors = colormaps["coolwarm"](np.linspace(0, 1, 254), bytes=True)[:, :3]
    pictures = list(drawn(MAPS).values())
    for row, picture in zip(mapped["maps"], pictures, strict=True):
        channels = ",".join(map(str, row["channels"]))
        assert picture.text["Channels"] == channels  # type: ignore[attr-defined]
        before, after = kept_tensors(pair, row["image"], row["label"])
        scale = max(abs(before).max(), abs(after).max())
        shares = (after - before) / (np.maximum(abs(before), abs(after)) + scale)
        expected = level_of(shares[row["channels"][0]], -row["limit"], row["limit"])
        tile = tile_of(np.asarray(picture.convert("RGB")), before.shape[1:])
        np.testing.assert_array_equal(tile, colors[expected])


def level_of(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """0 to 253."""
    return np.floor((values - low) / (high - low) * 253 + 0.5).astype(int)


def test_before_and_after_share_a_scale_and_an_order(
    mapped: Document, pair: Pair
) -> None:
    """A level is the same value in both pictures: its share of the span of both."""
    row = mapped["maps"][2]
    tensors = kept_tensors(pair, row["image"], row["label"])
    files = (row["before"], row["after"])
    for file, values in zip(files, tensors, strict=True):
        with Image.open(MAPS / file) as picture:
            channels = picture.text["Channels"]  # type: ignore[attr-defined]
            pixels = np.asarray(picture.convert("RGB"))[..., 0]
        assert channels == ",".join(map(str, row["channels"]))
        expected = level_of(values[row["channels"][0]], *row["range"]) * 255 / 253
        tile = tile_of(pixels, values.shape[1:])
        np.testing.assert_allclose(tile, expected, atol=1.01)


def tile_of(pixels: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """The first map of a picture, at its own size: 96 pixels are enough, and all gaps
    are alike."""
    factor = -(-96 // max(size))
    height = size[0] * factor
    width = size[1] * factor
    columns = pixels.shape[1] // width
    gap = (pixels.shape[1] - columns * width) // (columns + 1)
    return pixels[gap : gap + height : factor, gap : gap + width : factor]


def tiles_of(path: Path, size: tuple[int, int]) -> np.ndarray:
    """The maps of a grey picture at their own size, [count, h, w]: lines of one grey are
    between them."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))[..., 0].copy()
    # a line of text may stand in the gap above, which is as high as the one below
    last_row = np.flatnonzero((pixels != 51).any(axis=1))[-1]
    pixels[: len(pixels) - 1 - last_row] = 51
    rows = spans((pixels != 51).any(axis=1))
    columns = spans((pixels != 51).any(axis=0))
    factor = len(rows[0]) // size[0]
    tiles = [pixels[row[0] :, column[0] :] for row in rows for column in columns]
    return np.stack(
        [tile[: len(rows[0]) : factor, : len(columns[0]) : factor] for tile in tiles]
    )


def spans(inside: np.ndarray) -> list[np.ndarray]:
    """The runs of true values, by their indices."""
    indices = np.flatnonzero(inside)
    return np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)


@pytest.mark.parametrize(("depth", "shown"), [(3, 3), (19, 16)])
def test_slices_of_volumes_are_drawn_before_and_after(
    featviz: CLI, depth: int, shown: int
) -> None:
    """The first 16 of each changed channel, in their order, and no other channel."""
    volume = np.arange(depth * 15, dtype=np.float32).reshape(depth, 3, 5) % 11
    np.save("volume.npy", volume)
    weights = {"before": [1, 2, 3, 4], "after": [1, -2, 3.5, 6]}
    for name, values in weights.items():
        conv = nn.Conv3d(1, 4, 1, bias=False)
        conv.weight.data[:] = torch.tensor(values).reshape(4, 1, 1, 1, 1)
        torch.save(nn.Sequential(conv), f"{name}.pth")
    models = [f"{name}.pth" for name in weights]
    done = documented(featviz, *models, "volume.npy", "--layers", "0", "--out", MAPS)
    (row,) = done.document["maps"]
    assert sorted(row["channels"]) == [1, 2, 3]
    for name, values in weights.items():
        factors = np.array(values)[row["channels"], None, None, None]
        expected = (factors * volume[:shown]).reshape(-1, 3, 5)
        levels = level_of(expected, *row["range"]) * 255 / 253
        tiles = tiles_of(MAPS / "diff-maps" / row[name], (3, 5))
        np.testing.assert_allclose(tiles[: 3 * shown], levels, atol=1.01)
        # cells without a map are as grey as the gaps
        assert (tiles[3 * shown :] == 51).all()


def test_sixteen_channels_of_a_layer_are_drawn_at_most(featviz: CLI) -> None:
    """The most changed ones; here all are alike."""
    runs = []
    for shade in (20, 60):
        drawn = Drawn("x", maps=20, shade=shade)
        runs.append(write_run(Path(f"{shade}"), {"a.png": [drawn]}))
    (row,) = documented(featviz, *runs, "--out", MAPS).document["maps"]
    assert len(row["channels"]) == 16


def test_the_number_of_a_channel_stands_below_the_middle_of_its_slices() -> None:
    """In a gap of 10 pixels, at 0.8 of its height; a channel may begin amid a row."""
    plan = GridPlan(
        tile_count=4, columns=4, rows=1, map_size=(3, 5), scale=(10, 10), padding=10
    )
    maps = DifferenceMap(
        file="",
        before_file="",
        after_file="",
        image="",
        label="",
        stem="",
        channels=(7, 2),
        source="",
        limit=1,
        range=ValueSpan(0, 1),
        plan=plan,
        slices=2,
    )
    assert maps.numbered_tiles == [(7, 65, 48), (2, 185, 48)]


def test_what_is_not_finite_on_one_side_is_magenta(featviz: CLI, run: Run) -> None:
    """All of the channel that became NaN."""
    featviz("diff", run("base"), run("new", change=nan_bias), "--out", MAPS)
    picture = drawn(MAPS)["2 (Conv2d)"]
    assert picture.text["Channels"] == str(CHANGED)  # type: ignore[attr-defined]
    magenta = (np.asarray(picture.convert("RGB")) == (255, 0, 255)).all(axis=2)
    assert magenta.sum() == 96 * 96


def infinite_bias(model: nn.Sequential) -> None:
    model[2].bias[CHANGED] = float("inf")


def test_what_is_finite_on_no_side_is_magenta(featviz: CLI, run: Run) -> None:
    """A channel that was NaN and is infinite, in all three pictures; its range is 0."""
    base = run("base", *KEPT, change=nan_bias)
    new = run("new", *KEPT, change=infinite_bias)
    row = documented(featviz, base, new, "--out", MAPS).document["maps"][0]
    assert row["channels"] == [CHANGED]
    assert row["range"] == [0, 0]
    assert row["limit"] == 1  # of differences that there are none of
    for name in ("file", "before", "after"):
        with Image.open(MAPS / row[name]) as picture:
            magenta = np.asarray(picture.convert("RGB")) == (255, 0, 255)
        assert magenta.all(axis=2).sum() == 96 * 96


def test_the_folder_of_the_maps_has_the_document(featviz: CLI, run: Run) -> None:
    """And a list of its files."""
    html = Path("d.html")
    new = run("new", change=one_weight)
    document = documented(featviz, run("base"), new, "--html", html).document

    maps = Path("d-maps")
    assert len(list(maps.glob("*.png"))) == 3 * 3
    written = json.loads((maps / "diff.json").read_text("utf-8"))
    names = {path.name for path in maps.iterdir()}
    assert set(written.pop("files")) == names - {"diff.json"}
    assert written.pop("featviz") == __version__
    assert written == document


def test_maps_beside_a_page_lie_where_they_were_asked_for(
    featviz: CLI, run: Run
) -> None:
    """The page shows those of `--out`, and has no folder of its own."""
    new = run("new", change=one_weight)
    featviz("diff", run("base"), new, "--html", "d.html", "--out", MAPS)
    assert len(list(MAPS.glob("*.png"))) == 3 * 3
    assert not Path("d-maps").exists()
    assert f'="{MAPS}/' in Path("d.html").read_text("utf-8")


def test_an_earlier_result_is_replaced_whole(featviz: CLI, run: Run) -> None:
    """No picture of it stays."""
    base = run("base")
    html = Path("d.html")
    for new in (run("new", change=one_weight), base):
        featviz("diff", base, new, "--html", html)
    names = {path.name for path in Path("d-maps").iterdir()}
    assert names == {"diff.json", "grids.js", *REPORT_ASSETS}


def test_of_many_layers_the_first_and_the_worst_are_drawn(featviz: CLI) -> None:
    """Sixty of 62, in the order of the model."""
    runs = []
    for brighter in (0, 3):
        rows = [
            Drawn(f"l{index}", maps=1, index=index, shade=20 + index * brighter)
            for index in range(1, 63)
        ]
        runs.append(write_run(Path(str(brighter)), {"a.png": rows}))
    featviz("diff", *runs, "--out", "maps")
    expected = [f"l{index} (ReLU)" for index in (1, *range(4, 63))]
    assert list(drawn(MAPS)) == expected


@pytest.fixture
def uneven() -> Pair:
    """Two images, six channels: channel 1 differs in both, 4 in one."""
    base = np.tile(np.float32([-2, 3, 0.5, 1, 0, 0]), (6, 1))
    one_channel = base.copy()
    one_channel[1] = [-9, -9, -9, 0, 0, 0]  # constant
    two_channels = one_channel.copy()
    two_channels[4, :2] = [-2, 2]
    before = {name: [Drawn("x", stats=base)] for name in ("a.png", "b.png")}
    after = {
        "a.png": [Drawn("x", stats=two_channels)],
        "b.png": [Drawn("x", stats=one_channel)],
    }
    return write_run(Path("base"), before), write_run(Path("new"), after)


def test_channels_are_counted_once_for_readers(featviz: CLI, uneven: Pair) -> None:
    """In the line, the table and on the page."""
    page = Path("d.html")
    done = featviz("diff", *uneven, "--html", page)
    assert "2 of 6 channels differ (3 of 12 counted in each image, 25.00%)" in done.out
    assert "2/6" in done.out
    assert "2 of 6 channels" in page.read_text()


def page_of_shifted(featviz: CLI, *images: str) -> str:
    """The page that compares runs of images whose values differ by 1."""
    runs = []
    for shift in (0, 1):
        stats = np.tile(np.float32([-2, 3, 0.5, 1, 0, 0]), (6, 1)) + shift
        drawn = {image: [Drawn("x", stats=stats)] for image in images}
        runs.append(write_run(Path(f"{len(images)}-{shift}"), drawn))
    featviz("diff", *runs, "--html", "page.html")
    return Path("page.html").read_text("utf-8")


def test_the_page_tells_what_is_of_all_images(featviz: CLI) -> None:
    """Of several images the facts; the maps are of one. With one image both are the
    same."""
    of_two = page_of_shifted(featviz, "a.png", "b.png")
    of_one = page_of_shifted(featviz, "a.png")
    assert "<dt>most changed, all images</dt><dd>0, 1, 2, 3, 4</dd>" in of_two
    assert "<dt>differs most in</dt><dd>a.png</dd>" in of_two
    assert "maps are of the image in which it differs most" in of_two
    assert "<dt>most changed</dt><dd>0, 1, 2, 3, 4</dd>" in of_one
    assert "all images" not in of_one


def test_channels_are_counted_in_each_image_for_machines(
    featviz: CLI, uneven: Pair
) -> None:
    """In JSON, and for the limit of the share."""
    channels = documented(featviz, *uneven).document["channels"]
    assert channels == {"differing": 3, "total": 12, "ratio": 0.25}
    assert featviz("diff", *uneven, "--max-diff-ratio", 0.25).code == 0
    assert featviz("diff", *uneven, "--max-diff-ratio", 0.24).code == 4


def test_runs_within_the_limit_are_not_called_equal(featviz: CLI, uneven: Pair) -> None:
    """Neither the last line nor the page says so: both name the limit and the largest
    difference."""
    options = ("--max-diff-ratio", 0.25, "--html", "within.html")
    done = featviz("diff", *uneven, *options)
    row = documented(featviz, *uneven).document["layers"]
    largest = max(max(layer["channels"]["relative"]) for layer in row)
    (line,) = [text for text in done.out.splitlines() if "compared" in text]
    assert line.startswith("within --max-diff-ratio 0.25: ")
    assert f"(3 of 12 counted in each image, 25.00%) by at most {largest:.3g}" in line
    page = Path("within.html").read_text()
    assert "<b>Within --max-diff-ratio 0.25</b>" in page
    assert "<b>Equal</b>" not in page


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_no_text(featviz: CLI) -> None:
    """An image named in bytes that are no UTF-8 is told in documents."""
    drawn = [Drawn("x")]
    base = write_run(Path("base"), {"a.png": drawn, "b\udcff.png": drawn})
    new = write_run(Path("new"), {"a.png": drawn})
    html = Path("d.html")
    junit = Path("d.xml")
    assert featviz("diff", base, new, "--html", html, "--junit", junit).code == 4
    assert "b?.png" in html.read_text("utf-8")
    assert "b\N{REPLACEMENT CHARACTER}.png" in junit.read_text("utf-8")


def test_difference_maps_name_their_layer(mapped: Document) -> None:
    """Where the gap above the tiles has room, the layer and the ends of the colours stand
    in it, in the middle of the colours; and where it has none, the gap is empty."""
    pictures = [np.asarray(picture) for picture in drawn(MAPS).values()]
    gap = pictures[0][0, 0]
    assert pictures[0].shape[1] < 200
    assert {*np.unique(pictures[0][:4])} == {gap}
    wide = pictures[2]
    last_row = np.flatnonzero((wide != gap).any(1))[-1]
    # the gap below all tiles is as high as the one above
    letters = wide[: len(wide) - 1 - last_row]
    assert {*np.unique(letters)} == {127, gap}
    assert 200 < np.count_nonzero(letters == 127) < letters.size / 4
