"""The report in a real browser: Chromium, from file:// and under a CI host's policy."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image
from rundirs import Drawn
from selenium.webdriver import Keys

from .browsing import STATS, Page, missing_pictures, served
from .markup import built

pytestmark = pytest.mark.slow
JENKINS = "default-src 'none'; img-src 'self'; style-src 'self'"


def test_from_a_file_nothing_is_missing_and_the_console_is_silent(
    page: Page, run: Path
) -> None:
    """Every kind of page, every picture, at 400 pixels, where nothing sticks out; the
    fixture looks at the console."""
    assert len(list((run / "report").glob("*.html"))) == 1 + 4 + 3 + 1
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for name in ("index.html", "image-002.html", "layer-001.html"):
            page.open(name)
            assert missing_pictures(page) == [], name
            assert page.all("img"), name
            assert page.js("return document.documentElement.scrollWidth") <= 400, name
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_under_the_policy_of_a_ci_host_all_pictures_are_there(
    browser: Any, run: Path
) -> None:
    """`default-src 'none'` stops the scripts; pictures, styles and text are all there."""
    page = Page(browser, run)
    with served(run, JENKINS) as home:
        for name in ("index.html", "image-002.html", "layer-001.html"):
            browser.get(f"{home}/{name}")
            assert page.js("return typeof Grid") == "undefined"
            assert missing_pictures(page) == [], name
            assert page.js("return getComputedStyle(document.body).margin") == "0px"
            assert not page.shown(".control"), "controls that cannot work are not shown"
    messages = [entry["message"] for entry in browser.get_log("browser")]
    assert messages
    assert all("script" in message for message in messages)


def test_hover_tells_the_channel_and_its_numbers(page: Page) -> None:
    """Channel, min, max, mean and zeros are those of stats.npz."""
    page.open("image-001.html")
    page.at(page.all(".frame")[0], 4)
    (tip,) = page.shown(".tip")
    low, high, mean = (float(f"{value:.4g}") for value in STATS[4, :3])
    words = f"channel 4\nmin {low:g} · max {high:g} · mean {mean:g} · zeros 0.0 %"
    assert tip.text == words.replace("-", "−")
    page.at(page.all(".frame")[1], 4)
    assert "zeros 100.0 %" in page.shown(".tip")[0].text


def test_click_enlarges_a_tile_beside_the_input(page: Page) -> None:
    """A dialog with both pictures; its buttons and arrows go on; Escape closes it."""
    page.open("image-001.html")
    page.at(page.all(".frame")[0], 2, click=True)
    dialog = page.one("dialog.viewer")
    title = dialog.find_element("tag name", "h2")
    assert dialog.get_attribute("open")
    assert title.text == "Channel 2"
    assert (
        page.js("return arguments[0].querySelector('img').naturalWidth", dialog) == 24
    )
    size = "const c = arguments[0].querySelector('canvas'); return [c.width, c.height]"
    assert page.js(size, dialog) == [70, 60]
    page.keys(Keys.ARROW_RIGHT)
    assert title.text == "Channel 3"
    page.keys(Keys.ESCAPE)
    assert not page.shown("dialog")


def test_tiles_padding_and_emptiness_are_told_apart(page: Page) -> None:
    """Two tiles a channel, four a row: the fourth is channel 1's, the seventh place is
    empty; a channel of two steps is enlarged twice as wide."""
    page.open("image-001.html")
    centre = "const f = frames.get(document.querySelectorAll('.frame')[2]); "
    at = centre + "return f.grid.channelAt(arguments[0], arguments[1])"
    step = 42
    half = 2 + 20
    positions = [(n % 4 * step + half, n // 4 * step + half) for n in range(8)]
    assert [page.js(at, *position) for position in positions] == [
        0,
        0,
        1,
        1,
        2,
        2,
        None,
        None,
    ]
    assert [
        page.js(at, *position) for position in ((1, half), (half, 1), (step + 1, half))
    ] == [None] * 3
    page.js("viewer.open(frames.get(document.querySelectorAll('.frame')[2]), 2)")
    canvas = page.one("dialog.viewer canvas")
    assert page.js("return [arguments[0].width, arguments[0].height]", canvas) == [
        80,
        40,
    ]


def test_sorting_moves_the_tiles(page: Page) -> None:
    """The pixels at each place are those of the channel whose turn it is, largest
    first."""
    page.open("image-001.html")
    frame = page.all(".frame")[0]
    for by, key in (("mean", STATS[:, 2]), ("variance", STATS[:, 3] ** 2)):
        page.choose("[data-state=sort]", by)
        assert page.greys(frame, *range(6)) == [20 + c for c in np.argsort(-key)]


def test_search_leaves_what_matches_by_name_or_type(page: Page) -> None:
    """On the page of the run layers and images, and says how many; where nothing
    matches, everything stays."""
    page.open("index.html?q=relu")
    assert [row.get_attribute("data-layer") for row in page.shown(".flow > li")] == [
        "relu"
    ]
    rows = page.shown("#layers-table tbody tr")
    assert [row.text.split()[:2] for row in rows] == [["relu", "ReLU"]]
    assert page.shown(".gallery li") == []
    page.open("image-000.html?q=conv2d")
    assert [e.get_attribute("data-layer") for e in page.shown(".group")] == ["conv1"]
    assert page.one(".count").text == "2 of 6"
    page.open("layer-000.html?q=xyz")
    assert page.one(".count").text == "nothing matches “xyz”"
    assert len(page.shown("figure")) == 5


def test_keyboard_reaches_everything(page: Page) -> None:
    """j, arrows, Enter, Escape, /, ?, ] and the order of the Tab key."""
    page.open("image-000.html")
    page.keys("j", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert page.shown(".tip")[0].text.startswith("channel 4\n")
    assert (
        page.one(".unseen[aria-live]")
        .get_attribute("textContent")
        .startswith("Channel 4:")
    )
    page.keys(Keys.ENTER)
    assert page.one("dialog.viewer h2").text == "Channel 4"
    page.keys(Keys.ESCAPE, "?")
    assert page.one("dialog.help").is_displayed()
    page.keys(Keys.ESCAPE, "/")
    assert page.browser.switch_to.active_element.get_attribute("type") == "search"
    page.js("document.activeElement.blur()")
    page.keys("]")
    assert page.browser.current_url.endswith("image-001.html")
    page.keys(Keys.TAB)
    assert page.browser.switch_to.active_element.get_attribute("class") == "skip"


def test_one_file_shows_one_page_and_all_pictures(page: Page, run: Path) -> None:
    """Links inside it change the page; pictures of layers' pages come from the images'
    ones."""
    page.browser.get((run / "report.html").as_uri())
    assert len(page.shown("article")) == 1
    assert page.one("h1").text == "resnet18"
    page.browser.get((run / "report.html").as_uri() + "#layer-001")
    page.browser.refresh()
    assert [a.get_attribute("id") for a in page.shown("article")] == ["layer-001"]
    assert missing_pictures(page) == []
    page.at(page.shown(".frame")[0], 4)
    assert page.shown(".tip")[0].text.startswith("channel 4")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A run of five images whose statistics differ, and these, [images, channels, 6]."""
    stats = np.random.default_rng(3).normal(size=(5, 6, 6)).astype(np.float32)
    stats[:, :, 4:] = 0
    stats[:, 2, 2] = -stats[:, 0, 2]
    names = [f"{n}.png" for n in range(5)]
    images = {
        name: [Drawn("conv1", 6, 1, "Conv2d", stats=own, tile=(40, 48), scale=4)]
        for name, own in zip(names, stats, strict=True)
    }
    root = built(tmp_path_factory.mktemp("many") / "out", images)
    return root, stats


def test_a_channel_has_a_view_of_all_images(
    browser: Any, many: tuple[Path, np.ndarray]
) -> None:
    """At its address: images by activation, the strongest first; neighbours; Escape
    closes it."""
    root, stats = many
    page = Page(browser, root).open("layer-000.html#c3")
    captions = [caption.text for caption in page.shown(".excited figcaption")]
    order = np.argsort(-stats[:, 3, 1])
    values = [f"{stats[n, 3, 1]:.4g}".replace("-", "−") for n in order]
    assert captions == [
        f"{n}.png max {value}" for n, value in zip(order, values, strict=True)
    ]
    assert page.one(".channel h2").text.startswith("Channel 3")
    assert page.one(".channel h2") == browser.switch_to.active_element
    page.keys(Keys.ARROW_RIGHT)
    assert browser.current_url.endswith("#c4")
    assert "Channel 4" in page.one(".channel h2").text
    browser.back()
    page.settle()
    assert "Channel 3" in page.one(".channel h2").text
    page.keys(Keys.ESCAPE)
    assert not page.shown(".channel")
    assert page.shown(".beside")
    assert browser.current_url.endswith("layer-000.html")


def test_what_is_set_stands_in_the_address(page: Page) -> None:
    """Loading again, and following a link, show the same; controls tell the truth."""
    page.open("image-001.html")
    page.choose("[data-state=sort]", "mean")
    page.choose("[data-state=cmap]", "magma")
    page.one("[data-filter]").send_keys("conv1")
    page.browser.refresh()
    url = page.browser.current_url
    assert "sort=mean" in url
    assert "cmap=magma" in url
    assert "q=conv1" in url
    order = "return frames.get(document.querySelector('.frame')).grid.order"
    sorted_by_mean = np.argsort(-STATS[:, 2]).tolist()
    assert page.js(order) == sorted_by_mean
    assert page.one("[data-state=sort]").get_attribute("value") == "mean"
    assert page.one("[data-filter]").get_attribute("value") == "conv1"
    assert len(page.shown(".group")) == 1
    page.one(".group h4 a").click()
    assert "sort=mean" in page.browser.current_url
    assert page.js(order) == sorted_by_mean


def pixel(page: Page, frame: Any, place: int) -> tuple[int, ...]:
    """The colour in the middle of a tile of a grid of three columns and two rows."""
    page.painted(frame)
    picture = Image.open(io.BytesIO(frame.screenshot_as_png)).convert("RGB")
    x = (place % 3 + 0.5) / 3 * picture.width
    y = (place // 3 + 0.5) / 2 * picture.height
    color: tuple[int, ...] = picture.getpixel((int(x), int(y)))  # type: ignore[assignment]
    return color


def test_colours_are_those_of_matplotlib(page: Page) -> None:
    """Of the grey that the picture has there, within three levels, whatever the tile
    size."""
    for name, size in (("magma", "&size=96"), ("coolwarm", "")):
        page.open(f"image-001.html?cmap={name}{size}")
        frame = page.all(".frame")[0]
        for place in (0, 5):
            wanted = colormaps[name]((20 + place) / 255, bytes=True)[:3]
            assert np.abs(np.subtract(pixel(page, frame, place), wanted)).max() <= 3


def test_maps_lie_over_the_input(page: Page) -> None:
    """Six tenths of the map's colour, four of the input's, where the map has the
    input's shape."""
    page.open("image-001.html?over=60&cmap=inverted")
    frame = page.all(".frame")[0]
    seen = Image.open(page.run / "deep" / "b#1 %.png" / "input.png").convert("RGB")
    red, green, blue = pixel(page, frame, 4)
    across, down = seen.size
    near = np.asarray(
        seen.crop((across // 2 - 2, down // 2 - 2, across // 2 + 2, down // 2 + 2))
    )
    low = near.min((0, 1)) * 0.4
    high = near.max((0, 1)) * 0.4
    rest = np.subtract((red, green, blue), 0.6 * (255 - 24))
    assert (rest >= low - 4).all()
    assert (rest <= high + 4).all()


def test_one_search_finds_channels(page: Page) -> None:
    """`/` goes to it on every page; a layer or a type and a number lead to the channel."""
    for text, name in (("conv1 c5", "layer-000"), ("channel 5", "index")):
        page.open(f"{name}.html")
        page.keys("/", *text)
        links = page.shown(".results a")
        assert links[0].text == "conv1 Conv2d, channel 5"
        assert (len(links) > 1) == (text == "channel 5")
        links[0].click()
        assert "Channel 5" in page.one(".channel h2").text
        assert page.browser.current_url.endswith("layer-000.html#c5")


def test_a_table_says_which_column_sorts_it(page: Page) -> None:
    """Numbers by value, largest first; the heading tells, and the address keeps it."""
    page.open("index.html")
    heads = "#layers-table thead th"
    page.all(f"{heads} button")[3].click()  # zeros
    zeros = "#layers-table td:nth-child(4)"
    for _ in range(2):
        shown = [
            float(cell.text.split("\u00a0")[0].rstrip("%")) for cell in page.all(zeros)
        ]
        assert shown == sorted(shown, reverse=True)
        assert len(set(shown)) > 1
        sorts = [head.get_attribute("aria-sort") for head in page.all(heads)]
        assert sorts.count("descending") == 1
        assert sorts[3] == "descending"
        page.browser.refresh()
    page.all(f"{heads} button")[3].click()
    assert page.all(heads)[3].get_attribute("aria-sort") == "ascending"


def test_outlines_are_seen_on_every_grey(page: Page) -> None:
    """Those of channels that are dark in every image; the line has a dark edge."""
    page.open("layer-001.html")
    page.one("[data-state=zeros]").click()
    frame = page.all(".frame")[0]
    assert page.js("return frames.get(arguments[0]).group.marks", frame) == [0, 4]
    pixel(page, frame, 0)
    picture = np.asarray(
        Image.open(io.BytesIO(frame.screenshot_as_png)).convert("RGB")
    ).astype(int)
    column = picture[: picture.shape[0] // 4, picture.shape[1] // 6]
    assert (column.sum(1) == 0).any()
    assert (np.abs(column - [255, 176, 0]).max(1) < 40).any()
