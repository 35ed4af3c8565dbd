"""The report in a real browser: Chromium, from file:// and under a CI host's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rundirs import Drawn

from .browsing import STATS, Page, missing_pictures, served
from .markup import built

pytestmark = pytest.mark.slow
JENKINS = "default-src 'none'; img-src 'self'; style-src 'self'"


def names(run: Path) -> list[str]:
    """All pages."""
    return sorted(path.name for path in (run / "report").glob("*.html"))


def test_from_a_file_nothing_is_missing_and_the_console_is_silent(page: Page, run: Path) -> None:
    """Every page, every picture; the fixture looks at the console."""
    assert len(names(run)) == 1 + 4 + 3
    for name in names(run):
        page.open(name)
        assert page.all("img"), name
        assert missing_pictures(page) == [], name


def test_under_the_policy_of_a_ci_host_all_pictures_are_there(browser: Any, run: Path) -> None:
    """`default-src 'none'` stops the scripts; pictures, styles and text are all there."""
    page = Page(browser, run)
    with served(run, JENKINS) as home:
        for name in names(run):
            browser.get(f"{home}/{name}")
            assert page.js("return typeof Grid") == "undefined"
            assert missing_pictures(page) == [], name
            assert page.js("return getComputedStyle(document.body).margin") == "0px"
            assert not page.shown(".control"), "controls that cannot work are not shown"
    messages = [entry["message"] for entry in browser.get_log("browser")]
    assert messages and all("script" in message for message in messages)


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
    from selenium.webdriver import Keys

    page.open("image-001.html")
    page.at(page.all(".frame")[0], 2, click=True)
    dialog = page.one("dialog.viewer")
    assert (
        dialog.get_attribute("open") and dialog.find_element("tag name", "h2").text == "Channel 2"
    )
    assert page.js("return arguments[0].querySelector('img').naturalWidth", dialog) == 24
    assert page.js("const c = arguments[0].querySelector('canvas'); return [c.width, c.height]",
                   dialog) == [70, 60]  # fmt: skip
    page.keys(Keys.ARROW_RIGHT)
    assert dialog.find_element("tag name", "h2").text == "Channel 3"
    page.keys(Keys.ESCAPE)
    assert not page.shown("dialog")


def test_tiles_padding_and_emptiness_are_told_apart(page: Page) -> None:
    """Two tiles a channel, four a row: the fourth is channel 1's, the seventh place is empty; a
    channel of two steps is enlarged twice as wide."""
    page.open("image-001.html")
    centre = "const f = frames.get(document.querySelectorAll('.frame')[2]); "
    at = centre + "return f.grid.channelAt(arguments[0], arguments[1])"
    step, half = 42, 2 + 20
    places = [(n % 4 * step + half, n // 4 * step + half) for n in range(8)]
    assert [page.js(at, *place) for place in places] == [0, 0, 1, 1, 2, 2, None, None]
    assert [page.js(at, *place) for place in ((1, half), (half, 1), (step + 1, half))] == [None] * 3
    page.js("viewer.open(frames.get(document.querySelectorAll('.frame')[2]), 2)")
    canvas = page.one("dialog.viewer canvas")
    assert page.js("return [arguments[0].width, arguments[0].height]", canvas) == [80, 40]


@pytest.mark.parametrize(
    ("by", "key"), [("mean", STATS[:, 2]), ("max", STATS[:, 1]), ("variance", STATS[:, 3] ** 2)]
)
def test_sorting_moves_the_tiles(page: Page, by: str, key: np.ndarray) -> None:
    """The pixels at each place are those of the channel whose turn it is, largest first."""
    page.open("image-001.html")
    page.choose("[data-state=sort]", by)
    frame = page.all(".frame")[0]
    expected = np.argsort(-key)
    assert page.greys(frame, *range(6)) == [20 + c for c in expected]
    page.choose("[data-state=sort]", "index")
    assert page.greys(frame, 0, 5) == [20, 25]


def test_a_channel_that_an_image_lacks_has_no_numbers(browser: Any, tmp_path: Path) -> None:
    """Equal numbers of an image's four channels are not those of the other image's fifth."""
    equal = np.tile(np.float32([0, 9, 9, 1, 0, 0]), (4, 1))
    few, many = Drawn("x", maps=4, stats=equal), Drawn("x", stats=STATS)
    root = built(tmp_path / "out", {"a.png": [few], "b.png": [many]})
    page = Page(browser, root).open("layer-000.html")
    means = page.js(
        "const all = [...frames.values()].map(f => f.grid);"
        "return [3, 4].map(c => all.map(g => String(g.stat(c, 'mean'))))"
    )
    assert means[0][0] == "9" and means[1][0] == "NaN"
    assert [np.float32(row[1]) for row in means] == [STATS[3, 2], STATS[4, 2]]


def test_all_zero_channels_stand_out_over_all_images(page: Page) -> None:
    """On a layer's page the outline is on the channels that are dark in every image."""
    page.open("layer-001.html")
    assert "2 channels all zero in every one of 4 images: 0, 4" in page.one(".dark").text
    page.one("[data-state=zeros]").click()
    marks = page.js("return frames.get(document.querySelector('.frame')).group.marks")
    assert marks == [0, 4]
    page.painted(page.all(".frame")[0])
    page.until("return document.querySelector('canvas.marks')?.width > 0")


def test_filter_leaves_what_matches_by_name_or_type(page: Page) -> None:
    """On the page of the run layers and images, on that of a layer images; and what is empty."""
    page.open("index.html?q=relu")
    assert [row.get_attribute("data-layer") for row in page.shown(".flow > li")] == ["relu"]
    rows = page.shown("#layers-table tbody tr")
    assert [row.text.split()[:2] for row in rows] == [["relu", "ReLU"]]
    assert page.shown(".gallery li") == []
    page.open("layer-000.html?q=deep")
    assert [e.get_attribute("data-item") for e in page.shown("figure")] == ["deep/b#1 %.png"]
    page.open("image-000.html?q=conv2d")
    assert [e.get_attribute("data-layer") for e in page.shown(".group")] == ["conv1"]


def test_keyboard_reaches_everything(page: Page) -> None:
    """j, arrows, Enter, Escape, /, ?, ] and the order of the Tab key."""
    from selenium.webdriver import Keys

    page.open("image-000.html")
    page.keys("j", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert page.shown(".tip")[0].text.startswith("channel 4\n")
    assert page.one(".unseen[aria-live]").get_attribute("textContent").startswith("Channel 4:")
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
    """Links inside it change the page; pictures of layers' pages come from the images' ones."""
    page.browser.get((run / "report.html").as_uri())
    assert len(page.shown("article")) == 1 and page.one("h1").text == "resnet18"
    page.browser.get((run / "report.html").as_uri() + "#layer-001")
    page.browser.refresh()
    assert [a.get_attribute("id") for a in page.shown("article")] == ["layer-001"]
    assert missing_pictures(page) == []
    page.at(page.shown(".frame")[0], 4)
    assert page.shown(".tip")[0].text.startswith("channel 4")


def test_narrow_screens_need_no_sideways_scrolling(page: Page) -> None:
    """At 400 pixels nothing sticks out."""
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for name in ("index.html", "image-002.html", "layer-001.html"):
            page.open(name)
            assert page.js("return document.documentElement.scrollWidth") <= 400, name
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
