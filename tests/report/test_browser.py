"""The report in a real browser: Chromium, from file:// and under a CI host's policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from numpy.typing import ArrayLike
from PIL import Image
from rundirs import Drawn
from selenium.webdriver import Keys

from .browsing import STATS, Page, missing_pictures, served
from .markup import built

pytestmark = pytest.mark.slow
JENKINS = "default-src 'none'; img-src 'self'; style-src 'self'"
KINDS = ("index.html", "image-002.html", "layer-001.html")
"""A page of each kind."""


@pytest.fixture
def narrow(page: Page) -> Iterator[Page]:
    """The report through a window of 400 pixels."""
    page.emulate(400)
    yield page
    page.emulate_nothing()


def test_from_a_file_nothing_is_missing(narrow: Page, run: Path) -> None:
    """Every kind of page has its pictures, and nothing sticks out of a narrow window;
    the fixture looks at the console."""
    assert len(list((run / "report").glob("*.html"))) == 1 + 4 + 3 + 1
    for name in KINDS:
        narrow.open(name)
        assert missing_pictures(narrow) == [], name
        assert narrow.all("img"), name
        assert narrow.js("return document.documentElement.scrollWidth") <= 400, name


def test_under_the_policy_of_a_ci_host_all_pictures_are_there(
    browser: Any, run: Path
) -> None:
    """`default-src 'none'` stops the scripts alone; controls that cannot work are not
    shown."""
    page = Page(browser, run)
    with served(run, JENKINS) as home:
        for name in KINDS:
            browser.get(f"{home}/{name}")
            assert page.js("return typeof Grid") == "undefined"
            assert missing_pictures(page) == [], name
            assert page.js("return getComputedStyle(document.body).margin") == "0px"
            assert page.shown(".control") == []
    stopped = ["script" in entry["message"] for entry in browser.get_log("browser")]
    assert set(stopped) == {True}


def number(value: float) -> str:
    """Four digits, with a minus sign."""
    return f"{value:.4g}".replace("-", "−")


def test_hover_tells_the_channel_and_its_numbers(page: Page) -> None:
    """Channel, min, max, mean and zeros are those of stats.npz."""
    page.open("image-001.html")
    page.at(page.all(".frame")[0], 4)
    (tip,) = page.shown(".tip")
    low, high, mean = map(number, STATS[4, :3])
    numbers = f"min {low} · max {high} · mean {mean} · zeros 0.0 %"
    assert tip.text == f"channel 4\n{numbers}"
    page.at(page.all(".frame")[1], 4)
    assert "zeros 100.0 %" in page.shown(".tip")[0].text


def test_click_enlarges_a_tile_beside_the_input(page: Page) -> None:
    """A dialog has both pictures; its arrows go on, and Escape closes it."""
    page.open("image-001.html")
    page.at(page.all(".frame")[0], 2, click=True)
    dialog = page.one("dialog.viewer")
    title = dialog.find_element("tag name", "h2")
    assert title.text == "Channel 2"
    numbers = dialog.find_element("css selector", ".numbers")
    below = dialog.find_element("css selector", ".sides").rect
    assert numbers.rect["y"] >= below["y"] + below["height"]
    input_width = "return arguments[0].querySelector('img').naturalWidth"
    assert page.js(input_width, dialog) == 24
    size = "const c = arguments[0].querySelector('canvas'); return [c.width, c.height]"
    assert page.js(size, dialog) == [70, 60]
    page.keys(Keys.ARROW_RIGHT)
    assert title.text == "Channel 3"
    page.keys(Keys.ESCAPE)
    assert page.shown("dialog") == []


SLICED = "frames.get(document.querySelectorAll('.frame')[2])"
"""The grid of two tiles for each channel, four in a row, of 40 pixels and 2 between."""


def test_tiles_padding_and_emptiness_are_told_apart(page: Page) -> None:
    """The fourth tile is the second of channel 1; what lies between tiles and behind
    the last one is none."""
    page.open("image-001.html")
    points = [[22 + 42 * (n % 4), 22 + 42 * (n // 4)] for n in range(8)]
    points += [[1, 22], [22, 1], [43, 22]]
    at = f"return arguments[0].map((at) => {SLICED}.grid.channelAt(...at))"
    assert page.js(at, points) == [0, 0, 1, 1, 2, 2, None, None, None, None, None]


def test_a_channel_of_two_slices_is_enlarged_twice_as_wide(page: Page) -> None:
    """Both slices stand side by side."""
    page.open("image-001.html")
    page.js(f"viewer.open({SLICED}, 2)")
    canvas = page.one("dialog.viewer canvas")
    size = page.js("return [arguments[0].width, arguments[0].height]", canvas)
    assert size == [80, 40]


@pytest.mark.parametrize(
    ("by", "key"), [("mean", STATS[:, 2]), ("variance", STATS[:, 3] ** 2)]
)
def test_sorting_moves_the_tiles(page: Page, by: str, key: np.ndarray) -> None:
    """The pixels of each tile are those of the channel whose turn it is, largest
    first."""
    page.open("image-001.html")
    page.choose("[data-state=sort]", by)
    greys = page.greys(page.all(".frame")[0], *range(6))
    assert greys == [20 + channel for channel in np.argsort(-key)]


def test_search_leaves_what_matches_by_name(page: Page) -> None:
    """On the page of the run it goes through layers and images."""
    page.open("index.html?q=relu")
    assert page.layers(".flow > li") == ["relu"]
    (row,) = page.shown("#layers-table tbody tr")
    assert row.text.startswith("relu ReLU")
    assert page.shown(".gallery li") == []


def test_search_hides_the_headings_of_what_has_no_result(page: Page) -> None:
    """A heading over nothing would look like a fault; without a search all are there."""
    page.open("index.html")
    heads = [head.text for head in page.shown("h2")]
    page.open("index.html?q=conv1")
    left = [head.text for head in page.shown("h2")]
    assert set(heads) - set(left) == {"4 images", "Findings"}


def test_the_search_for_a_channel_frames_its_map(page: Page) -> None:
    """Only in the layers that are asked for, until something else is."""
    framed = ".strip [aria-current]"
    page.open("index.html?q=relu+4")
    (link,) = page.all(framed)
    assert link.get_attribute("aria-label") == "Channel 4 of relu"
    page.one("[data-filter]").send_keys("1")
    assert page.all(framed) == []


def test_search_says_how_many_match(page: Page) -> None:
    """A type matches too; where nothing does, everything stays."""
    page.open("image-000.html?q=conv2d")
    assert page.layers(".group") == ["conv1"]
    assert page.one(".count").text == "2 of 6 entries shown"
    page.open("layer-000.html?q=xyz")
    assert page.one(".count").text == "no results for “xyz”"
    assert len(page.shown("figure")) == 5


def test_arrows_go_through_the_tiles(page: Page) -> None:
    """`j` takes the first grid, of five columns; what is reached is read out, and Enter
    enlarges it."""
    page.open("image-000.html")
    page.keys("j", Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT)
    assert page.shown(".tip")[0].text.startswith("channel 4\n")
    spoken = page.one(".unseen[aria-live]").get_attribute("textContent")
    assert spoken.startswith("Channel 4:")
    page.keys(Keys.ENTER)
    assert page.one("dialog.viewer h2").text == "Channel 4"


def test_keys_reach_help_search_and_the_next_page(page: Page) -> None:
    """They are `?`, `/`, `]` and `[`, without Ctrl; Tab begins with the link past the
    navigation."""
    page.open("image-000.html")
    page.keys("?")
    assert page.one("dialog.help").is_displayed()
    page.keys(Keys.ESCAPE, "/")
    focused = page.browser.switch_to.active_element
    assert focused.get_attribute("type") == "search"
    page.js("document.activeElement.blur()")
    pressed = "{key: ']', ctrlKey: true, bubbles: true}"
    page.js(f"document.body.dispatchEvent(new KeyboardEvent('keydown', {pressed}))")
    page.settle()
    assert page.browser.current_url.endswith("image-000.html")
    page.keys("]", "[", "]")
    assert page.browser.current_url.endswith("image-001.html")
    page.keys(Keys.TAB)
    assert page.browser.switch_to.active_element.get_attribute("class") == "skip"


def test_one_file_shows_one_page_and_all_pictures(page: Page, run: Path) -> None:
    """Links inside it change the page; pictures of layers' pages come from the images'
    ones."""
    address = (run / "report.html").as_uri()
    page.browser.get(address)
    assert len(page.shown("article")) == 1
    assert page.one("h1").text == "resnet18"
    page.browser.get(f"{address}#layer-001")
    page.browser.refresh()
    (article,) = page.shown("article")
    assert article.get_attribute("id") == "layer-001"
    assert missing_pictures(page) == []
    page.at(page.shown(".frame")[0], 4)
    assert page.shown(".tip")[0].text.startswith("channel 4")


VARIED = np.random.default_rng(3).normal(size=(5, 6, 6)).astype(np.float32)
"""Statistics of a layer in five images, [images, channels, 6]."""
VARIED[:, :, 4:] = 0
VARIED[:, 2, 2] = -VARIED[:, 0, 2]


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five images whose statistics differ."""
    images = {}
    for number, stats in enumerate(VARIED):
        drawn = Drawn("conv1", 6, 1, "Conv2d", stats=stats, tile=(40, 48), scale=4)
        images[f"{number}.png"] = [drawn]
    return built(tmp_path_factory.mktemp("many") / "out", images)


@pytest.fixture
def channel(browser: Any, five: Path) -> Page:
    """The page of a layer at the address of a channel."""
    return Page(browser, five).open("layer-000.html#c3")


def test_a_channel_has_a_view_of_all_images(channel: Page) -> None:
    """Images stand by activation, the strongest first; the title has the focus."""
    largest = VARIED[:, 3, 1]
    order = np.argsort(-largest)
    captions = channel.texts(".excited figcaption")
    assert captions == [f"{n}.png max {number(largest[n])}" for n in order]
    title = channel.one(".channel h2")
    assert title.text.startswith("Channel 3")
    assert title == channel.browser.switch_to.active_element


def test_keys_lead_from_channel_to_channel(channel: Page) -> None:
    """The address follows; the browser goes back, and Escape closes the view."""
    channel.keys(Keys.ARROW_RIGHT)
    assert channel.browser.current_url.endswith("#c4")
    assert "Channel 4" in channel.one(".channel h2").text
    channel.browser.back()
    assert "Channel 3" in channel.one(".channel h2").text
    channel.keys(Keys.ESCAPE)
    assert channel.shown(".channel") == []
    assert channel.shown(".beside")
    assert channel.browser.current_url.endswith("layer-000.html")


ORDER = "return frames.get(document.querySelector('.frame')).grid.order"
BY_MEAN = np.argsort(-STATS[:, 2]).tolist()


def test_what_is_set_stands_in_the_address(page: Page) -> None:
    """The page that is loaded again shows the same, and its controls tell it."""
    page.open("image-001.html")
    page.choose("[data-state=sort]", "mean")
    page.choose("[data-state=cmap]", "magma")
    page.one("[data-filter]").send_keys("conv1")
    page.browser.refresh()
    _, _, query = page.browser.current_url.partition("?")
    assert {"sort=mean", "cmap=magma", "q=conv1"} <= set(query.split("&"))
    assert page.js(ORDER) == BY_MEAN
    assert page.one("[data-state=sort]").get_attribute("value") == "mean"
    assert page.one("[data-filter]").get_attribute("value") == "conv1"
    assert len(page.shown(".group")) == 1


def test_what_is_set_holds_on_the_next_page(page: Page) -> None:
    """A link that is followed carries it along."""
    page.open("image-001.html?sort=mean")
    page.one(".group h4 a").click()
    assert "sort=mean" in page.browser.current_url
    assert page.js(ORDER) == BY_MEAN


@pytest.mark.parametrize(("name", "size"), [("magma", "&size=96"), ("coolwarm", "")])
def test_colours_are_those_of_matplotlib(page: Page, name: str, size: str) -> None:
    """They are the colours of the picture's grey, within three levels, whatever the
    tile size."""
    page.open(f"image-001.html?cmap={name}{size}")
    colors = page.colors(page.all(".frame")[0], 0, 5)
    expected = colormaps[name](np.array([20, 25]) / 255, bytes=True)[:, :3]
    np.testing.assert_allclose(colors, expected, atol=3)


@pytest.mark.parametrize(
    ("choice", "top"),
    [
        ("&cmap=inverted", 255 - 24),
        ("", colormaps["viridis"](24 / 255, bytes=True)[:3]),
    ],
)
def test_maps_lie_over_the_input(page: Page, choice: str, top: ArrayLike) -> None:
    """A pixel is six tenths of the map's colour and four of the input's, where the map
    has the input's shape. Grey maps would not be seen: they are coloured."""
    page.open(f"image-001.html?over=60{choice}")
    (color,) = page.colors(page.all(".frame")[0], 4)
    with Image.open(page.run / "deep" / "b#1 %.png" / "input.png") as image:
        pixels = np.asarray(image)
    row = pixels.shape[0] // 2
    column = pixels.shape[1] // 2
    near = 0.4 * pixels[row - 2 : row + 2, column - 2 : column + 2]
    rest = np.subtract(color, 0.6 * np.asarray(top))
    assert (rest >= near.min((0, 1)) - 4).all()
    assert (rest <= near.max((0, 1)) + 4).all()


@pytest.mark.parametrize(
    ("name", "text"), [("layer-000.html", "conv1 c5"), ("index.html", "channel 5")]
)
def test_one_search_finds_channels(page: Page, name: str, text: str) -> None:
    """`/` goes to it on every page; a layer or a type and a number lead to the
    channel."""
    page.open(name)
    page.keys("/", *text)
    links = page.shown(".results a")
    assert links[0].text == "conv1 Conv2d, channel 5"
    assert (len(links) > 1) == (text == "channel 5")
    links[0].click()
    assert "Channel 5" in page.one(".channel h2").text
    assert page.browser.current_url.endswith("layer-000.html#c5")


def sorts_of(page: Page) -> list[str | None]:
    """How each column of the table of layers is sorted."""
    heads = page.all("#layers-table thead th")
    return [head.get_attribute("aria-sort") for head in heads]


def zeros_of(page: Page) -> list[float]:
    """The shares of zeros in the table of layers, row by row."""
    cells = page.texts("#layers-table td:nth-child(4)")
    return [float(text.rstrip("\u00a0 %")) for text in cells]


def test_a_table_says_which_column_sorts_it(page: Page) -> None:
    """Numbers go by value, largest first; the address keeps it, and a second click
    turns it round."""
    page.open("index.html")
    by_zeros = "#layers-table thead th:nth-child(4) button"
    page.one(by_zeros).click()
    for _ in range(2):
        zeros = zeros_of(page)
        assert zeros == sorted(zeros, reverse=True)
        assert len(set(zeros)) > 1
        assert sorts_of(page).count("descending") == 1
        assert sorts_of(page)[3] == "descending"
        page.browser.refresh()
    page.one(by_zeros).click()
    assert sorts_of(page)[3] == "ascending"


def test_outlines_are_seen_on_every_grey(page: Page) -> None:
    """Those of channels that are dark in every image have a dark edge."""
    page.open("layer-001.html")
    page.one("[data-state=zeros]").click()
    frame = page.all(".frame")[0]
    assert page.js("return frames.get(arguments[0]).group.marks", frame) == [0, 4]
    page.painted(frame)
    pixels = np.asarray(page.screenshot(frame)).astype(int)
    column = pixels[: len(pixels) // 4, pixels.shape[1] // 6]
    assert (column.sum(1) == 0).any()
    assert (abs(column - [255, 176, 0]).max(1) < 40).any()
