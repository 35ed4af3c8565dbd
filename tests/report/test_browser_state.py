"""Channels, sizes, colours, search and the address of a page, in a real browser."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image
from rundirs import Drawn, write_run
from selenium.webdriver import Keys

from featviz.options import ReportOptions
from featviz.report import build_report

from .browsing import STATS, Page, served
from .markup import built

pytestmark = pytest.mark.slow


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


def test_a_channel_has_a_view_of_all_images(browser: Any, many: tuple[Path, np.ndarray]) -> None:
    """At its address: images by activation, the strongest first; neighbours; Escape closes it."""
    root, stats = many
    page = Page(browser, root).open("layer-000.html#c3")
    captions = [caption.text for caption in page.shown(".excited figcaption")]
    order = np.argsort(-stats[:, 3, 1])
    values = [f"{stats[n, 3, 1]:.4g}".replace("-", "−") for n in order]
    assert captions == [f"{n}.png max {value}" for n, value in zip(order, values, strict=True)]
    assert page.one(".channel h2").text.startswith("Channel 3")
    assert page.one(".channel h2") == browser.switch_to.active_element
    page.keys(Keys.ARROW_RIGHT)
    assert browser.current_url.endswith("#c4") and "Channel 4" in page.one(".channel h2").text
    browser.back()
    page.settle()
    assert "Channel 3" in page.one(".channel h2").text
    page.keys(Keys.ESCAPE)
    assert not page.shown(".channel") and page.shown(".beside")
    assert browser.current_url.endswith("layer-000.html")


def test_what_is_set_stands_in_the_address(page: Page) -> None:
    """Loading again, and going back from another page, show the same; controls tell the truth."""
    page.open("image-001.html")
    page.choose("[data-state=sort]", "mean")
    page.choose("[data-state=cmap]", "magma")
    page.one("[data-filter]").send_keys("conv1")
    url = page.browser.current_url
    assert "sort=mean" in url and "cmap=magma" in url and "q=conv1" in url
    order = "return frames.get(document.querySelector('.frame')).grid.order"
    sorted_by_mean = np.argsort(-STATS[:, 2]).tolist()

    def same() -> None:
        assert page.js(order) == sorted_by_mean
        assert page.one("[data-state=sort]").get_attribute("value") == "mean"
        assert page.one("[data-filter]").get_attribute("value") == "conv1"
        assert len(page.shown(".group")) == 1

    page.browser.refresh()
    same()
    page.one(".group h4 a").click()
    assert "sort=mean" in page.browser.current_url and page.js(order) == sorted_by_mean
    page.browser.back()
    same()


def test_tiles_have_the_size_that_is_set(page: Page) -> None:
    """Their longer side; rows are wrapped to the room; a point means the channel that is there."""
    page.open("image-001.html?size=120")
    frame = page.all(".frame")[0]
    page.js("arguments[0].scrollIntoView({block: 'center'})", frame)
    view = page.js("const f = frames.get(arguments[0]); return f.view", frame)
    assert view["tile"] == [103, 120] and view["nrow"] == 3
    assert frame.rect["width"] == view["size"][0] == 3 * 123 + 3
    x, y = 3 + 123 + 60, 3 + 106 + 50
    at = "const [e, x, y] = arguments; const f = frames.get(e);"
    at += " return f.grid.channelAt(x, y, f.view)"
    assert page.js(at, frame, x, y) == 4
    assert page.js("return frames.get(arguments[0]).grid.resized(120, 260).nrow", frame) == 2


def pixel(page: Page, frame: Any, place: int) -> tuple[int, ...]:
    """The colour in the middle of a tile of a grid of three columns and two rows."""
    page.painted(frame)
    picture = Image.open(io.BytesIO(frame.screenshot_as_png)).convert("RGB")
    x, y = (place % 3 + 0.5) / 3 * picture.width, (place // 3 + 0.5) / 2 * picture.height
    color: tuple[int, ...] = picture.getpixel((int(x), int(y)))  # type: ignore[assignment]
    return color


@pytest.mark.parametrize("name", ["viridis", "magma", "coolwarm"])
def test_colours_are_those_of_matplotlib(page: Page, name: str) -> None:
    """Of the grey that the picture has there, within three levels, whatever the tile size."""
    for size in ("", "&size=96"):
        page.open(f"image-001.html?cmap={name}{size}")
        frame = page.all(".frame")[0]
        for place in (0, 5):
            wanted = colormaps[name]((20 + place) / 255, bytes=True)[:3]
            assert np.abs(np.subtract(pixel(page, frame, place), wanted)).max() <= 3


def test_maps_lie_over_the_input(page: Page) -> None:
    """Six tenths of the map's colour, four of the input's, where the map has the input's shape."""
    page.open("image-001.html?over=1&cmap=inverted")
    frame = page.all(".frame")[0]
    seen = Image.open(page.run / "deep" / "b#1 %.png" / "input.png").convert("RGB")
    red, green, blue = pixel(page, frame, 4)
    across, down = seen.size
    near = np.asarray(seen.crop((across // 2 - 2, down // 2 - 2, across // 2 + 2, down // 2 + 2)))
    low, high = near.min((0, 1)) * 0.4, near.max((0, 1)) * 0.4
    rest = np.subtract((red, green, blue), 0.6 * (255 - 24))
    assert (rest >= low - 4).all() and (rest <= high + 4).all()


@pytest.mark.parametrize("text", ["conv 5", "Conv2d 5", "conv1 c5", "channel 5"])
def test_one_search_finds_channels(page: Page, text: str) -> None:
    """`/` goes to it on every page; a layer or a type and a number lead to the channel."""
    for name in ("index.html", "image-001.html", "layer-000.html"):
        page.open(name)
        page.keys("/", *text)
        links = page.shown(".results a")
        assert links[0].text == "conv1 Conv2d, channel 5"
        assert (len(links) > 1) == (text == "channel 5" and name != "layer-000.html")
        links[0].click()
        assert "Channel 5" in page.one(".channel h2").text
        assert page.browser.current_url.endswith("layer-000.html#c5")


def test_what_is_found_is_counted(browser: Any, tmp_path: Path) -> None:
    """That nothing is found, too; a layer has one link, however often it was called."""
    calls = [Drawn("relu", call=n) for n in range(3)]
    build_report(write_run(tmp_path / "out", {"a.png": calls}), ReportOptions())
    page = Page(browser, tmp_path / "out").open("index.html?q=relu+5")
    assert [link.text for link in page.shown(".results a")] == ["relu ReLU, channel 5"]
    page.open("image-000.html?q=relu")
    assert page.one(".count").text == "6 of 6"
    page.open("layer-000.html?q=xyz")
    assert page.one(".count").text == "nothing matches “xyz”"
    assert page.shown("figure")


def test_a_table_says_which_column_sorts_it(page: Page) -> None:
    """Numbers by value, largest first; the heading tells, and the address keeps it."""
    page.open("index.html")
    heads = "#layers-table thead th"
    page.all(f"{heads} button")[3].click()  # zeros
    zeros = "#layers-table td:nth-child(4)"
    for _ in range(2):
        shown = [float(cell.text.split("\u00a0")[0].rstrip("%")) for cell in page.all(zeros)]
        assert shown == sorted(shown, reverse=True) and len(set(shown)) > 1
        sorts = [head.get_attribute("aria-sort") for head in page.all(heads)]
        assert sorts.count("descending") == 1 and sorts[3] == "descending"
        page.browser.refresh()
    page.all(f"{heads} button")[3].click()
    assert page.all(heads)[3].get_attribute("aria-sort") == "ascending"


def test_the_cursor_comes_back_from_the_enlarged_view(page: Page) -> None:
    """Enter opens the first tile where none was chosen; after Escape the arrows go on from it; in
    the view the arrows go up and down, and layer and image are named."""
    page.open("image-000.html")
    page.keys("j", Keys.ENTER)
    assert page.one("dialog.viewer h2").text == "Channel 0"
    assert page.one("dialog.viewer .where").text.startswith("conv1 · ")
    page.keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert page.one("dialog.viewer h2").text == "Channel 4"
    assert page.one("dialog.viewer [aria-live]").text.startswith("Channel 4: min")
    page.keys(Keys.ESCAPE, Keys.ARROW_RIGHT)
    assert page.shown(".tip")[0].text.startswith("channel 5\n")


def test_outlines_are_seen_on_every_grey(page: Page) -> None:
    """The marked line and its dark edge differ by 3:1 or more from each other."""
    page.open("layer-001.html?zeros=1")
    frame = page.all(".frame")[0]
    pixel(page, frame, 0)
    picture = np.asarray(Image.open(io.BytesIO(frame.screenshot_as_png)).convert("RGB")).astype(int)
    column = picture[: picture.shape[0] // 4, picture.shape[1] // 6]
    assert (column.sum(1) == 0).any()
    assert (np.abs(column - [255, 176, 0]).max(1) < 40).any()


def test_print_leaves_the_controls_out(page: Page) -> None:
    """On paper there are maps and numbers, no controls, and nothing is cut off."""
    page.open("image-001.html")
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert not page.shown(".control") and not page.shown(".top") and page.shown(".frame")
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_under_a_policy_of_own_files_everything_works(browser: Any, run: Path) -> None:
    """`default-src 'self'`: no violation, and colours, sizes and channels are as without it."""
    browser.get_log("browser")
    page, changed = Page(browser, run), "image-001.html?size=64&cmap=viridis&over=1"
    with served(run, "default-src 'self'") as home:
        for name in ("index.html", changed, "layer-000.html#c1"):
            browser.get(f"{home}/{name}")
            assert page.shown(".control")
        assert page.shown(".channel .trio")
    assert browser.get_log("browser") == []
