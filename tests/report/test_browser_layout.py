"""How tiles, the search and a channel's maps stand in a wide and in a narrow window, in
a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rundirs import Drawn

from featviz.audit.chart import ZeroShares, apoz_chart
from featviz.options.commands import ReportOptions
from featviz.report import build_report

from .browsing import Page
from .markup import CHANNEL, built, write_audit, write_exemplars

pytestmark = pytest.mark.slow
PHONE = 390
LARGEST = 160
"""Pixels of the longer side of a tile that fills the width with others."""


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a landscape, a portrait and a small square, each with 16 channels of a
    layer whose maps have the image's size, and its report."""
    images = {}
    for name, tile, nrow in (
        ("landscape.png", (320, 480), 3),
        ("portrait.png", (400, 300), 4),
        ("small.png", (56, 56), 4),
    ):
        images[name] = [Drawn("conv", 16, nrow=nrow, tile=tile, scale=1)]
    return built(tmp_path_factory.mktemp("sizes") / "out", images)


@pytest.fixture
def page(browser: Any, sizes: Path) -> Iterator[Page]:
    """Opens pages of the report; the window is as it was afterwards."""
    page = Page(browser, sizes)
    yield page
    page.emulate_nothing()


def views(page: Page) -> list[dict[str, Any]]:
    """How the tiles of each grid of a page are laid out."""
    page.until("return [...frames.values()].every((frame) => frame.room > 0)")
    layouts: list[dict[str, Any]] = page.js(
        "return [...frames.values()].map(({view, room}) => ({...view, room}))"
    )
    return layouts


@pytest.mark.parametrize(
    ("name", "width", "is_shown"),
    [
        ("index.html", PHONE, True),
        ("index.html", 1280, False),
        ("layer-000.html", 1280, True),
    ],
)
def test_jumps_are_one_line(name: str, width: int, is_shown: bool, page: Page) -> None:
    """On a phone, and where a page is long on a wide screen, too; Tab reaches them."""
    page.emulate(width)
    page.open(name)
    jumps = page.shown(".jumps a")
    assert bool(jumps) == is_shown
    if is_shown:
        assert len({jump.rect["y"] for jump in jumps}) == 1
        jumps[-1].send_keys("")
        assert page.js("return document.activeElement.closest('.jumps') !== null")
        assert page.js("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1200, PHONE])
@pytest.mark.parametrize("image", range(3))
def test_the_maps_of_an_image_fill_the_width(
    width: int, image: int, page: Page
) -> None:
    """Large ones shrink and small ones grow: at least four stand in a row, and a page is
    a few screens long."""
    page.emulate(width)
    page.open(f"image-{image:03d}.html")
    (view,) = views(page)
    assert view["nrow"] >= 4
    assert max(view["tile"]) <= LARGEST
    assert 0.9 * view["room"] < view["size"][0] <= view["room"]
    assert page.js("return document.documentElement.scrollWidth") <= width
    assert page.js("return document.documentElement.scrollHeight") < 2000


@pytest.mark.parametrize("width", [1200, PHONE])
@pytest.mark.parametrize("tile", [0, 40])
def test_a_channel_is_at_the_same_place_for_images_of_several_sizes(
    width: int, tile: int, page: Page
) -> None:
    """On the page of a layer all grids have as many columns, also where the user has
    chosen the size of tiles; nothing has to be said of it."""
    page.emulate(width)
    page.open(f"layer-000.html?size={tile or ''}")
    layouts = views(page)
    assert len(layouts) == 3
    assert len({view["nrow"] for view in layouts}) == 1
    assert layouts[0]["nrow"] > 1
    assert "same position" not in page.one("main").text


def test_the_search_of_a_phone_has_room_for_what_is_typed(page: Page) -> None:
    """Its field has a row of its own, also while the count of matches stands below."""
    page.emulate(PHONE)
    page.open("index.html")
    field = page.one("[data-filter]")
    field.send_keys("conv")
    count = page.one(".count")
    assert count.text == "2 of 5 entries shown"
    assert field.rect["width"] > 0.8 * PHONE
    assert count.rect["y"] >= field.rect["y"] + field.rect["height"]


def test_the_maps_of_a_channel_keep_their_shape_on_a_phone(page: Page) -> None:
    """The map of a landscape is three to two, however narrow the window is; where there
    is no room beside it, the overlay stands below."""
    page.emulate(PHONE)
    page.open("layer-000.html#c3")
    assert page.one(".excited figcaption a").text == "landscape.png"
    pictures = page.all(".excited figure:first-child .trio > *")
    seen, shown, over = (picture.rect for picture in pictures)
    assert shown["width"] == pytest.approx(1.5 * shown["height"], 0.02)
    assert over["width"] / over["height"] == seen["width"] / seen["height"]
    assert over["y"] > seen["y"]
    assert page.js("return document.documentElement.scrollWidth") <= PHONE


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a layer of tall maps, one of a sequence, and one of wide ones."""
    drawn = [
        Drawn("tall", 40, 0, nrow=20, tile=(128, 8), scale=1),
        Drawn("sequence", 8, 1, nrow=8, tile=(900, 1), scale=1),
        Drawn("wide", 8, 2, nrow=2, tile=(4, 128), scale=1),
    ]
    images = dict.fromkeys(["a.png", "b.png"], drawn)
    return built(tmp_path_factory.mktemp("narrow") / "out", images)


@pytest.mark.parametrize("width", [1200, PHONE])
@pytest.mark.parametrize("layer", range(3))
def test_tall_maps_do_not_make_tall_pages(
    browser: Any, narrow: Path, layer: int, width: int
) -> None:
    """A map is no higher than a third of a screen, wide enough for its number, and all
    fit into the page."""
    page = Page(browser, narrow)
    page.emulate(width)
    page.open(f"layer-{layer:03d}.html")
    for view in views(page):
        height, breadth = view["tile"]
        assert height <= 320
        assert breadth >= 20
        assert view["caption"] > 0
        assert view["size"][0] <= view["room"]
    page.emulate_nothing()


def test_strips_show_whole_maps(browser: Any, narrow: Path) -> None:
    """A tall or a wide one is squeezed, to twice as high as wide and to three times as
    wide as high: what lies in the middle of a sequence is not the sequence."""
    page = Page(browser, narrow)
    page.open("index.html")
    page.js("for (const fold of document.querySelectorAll('details')) fold.open = true")
    ratios = {"128 8": 0.5, "900 1": 0.5, "4 128": 3}
    seen = {}
    for crop in page.shown(".flow .crop"):
        *_, width, height = crop.get_dom_attribute("viewBox").split(" ")
        shown = page.js("return arguments[0].getBoundingClientRect().toJSON()", crop)
        seen[f"{height} {width}"] = shown["width"] / shown["height"]
    assert seen == pytest.approx(ratios, rel=0.02)


def test_what_is_printed_is_laid_out_like_what_is_seen(page: Page) -> None:
    """Grids below the window are painted for paper: else it would show their pictures
    squeezed into another layout."""
    page.emulate(PHONE)
    page.open("layer-000.html")
    page.js("for (const image of document.images) image.loading = 'eager'")
    page.until("return [...document.images].every((image) => image.complete)")
    seen = "return document.querySelectorAll('.frame.redrawn').length"
    assert page.js(seen) < 3
    page.js("dispatchEvent(new Event('beforeprint'))")
    assert page.js(seen) == 3


def test_the_sheet_of_a_channel_fits_a_phone(browser: Any, tmp_path: Path) -> None:
    """Its exemplars stand below one another, each above its value, and none is cut
    off."""
    root = built(tmp_path / "out", {"a.png": [Drawn("conv1", maps=2)]})
    exemplars = write_exemplars(tmp_path / "best")
    build_report(root, ReportOptions(exemplars=exemplars))
    page = Page(browser, root)
    page.emulate(PHONE)
    page.open("layer-000.html#c0")
    (tile,) = page.all(".channel .tiled figure")
    assert 0 < tile.rect["width"] < PHONE
    assert tile.text.startswith("2.5 ")
    page.emulate_nothing()


def test_the_paper_of_exemplars_is_dark_in_the_dark(
    browser: Any, tmp_path: Path
) -> None:
    """It has the ground of the page, and the tiles keep their colours; the white sheet
    glared."""
    root = built(tmp_path / "out", {"a.png": [Drawn("conv1", maps=2)]})
    channels = [{**CHANNEL, "row": [40, 10, 68, 32]}]
    exemplars = write_exemplars(tmp_path / "best", channels=channels)
    sheet = Image.new("RGB", (140, 60), "white")
    for left in (40, 76):
        sheet.paste((200, 40, 10), (left, 10, left + 32, 42))
    sheet.save(exemplars / "001_conv1/output.png")
    build_report(root, ReportOptions(exemplars=exemplars))
    page = Page(browser, root)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    picture = page.open("layer-000.html").one(".on-paper")
    page.js("arguments[0].scrollIntoView()", picture)
    page.until("return [...document.images].every((image) => image.complete)")
    pixels = np.asarray(page.screenshot(picture)).astype(int)[..., :3]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

    for x in (5, 74, 120):
        assert abs(pixels[26, x] - [0x12, 0x16, 0x1B]).max() <= 1
    for x in (50, 90):
        assert abs(pixels[26, x] - [200, 40, 10]).max() <= 1


def test_the_chart_of_an_audit_is_dark_in_the_dark(
    browser: Any, tmp_path: Path
) -> None:
    """Its ground is that of the page, its letters are bright, and its bars keep their
    hues."""
    audit = write_audit(tmp_path / "audit")
    chart = apoz_chart([ZeroShares("relu", 1.0, 0.5)], "Zeros")
    Image.fromarray(chart).save(audit / "apoz.png")
    build_report(audit, ReportOptions())
    page = Page(browser, audit)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    picture = page.open("index.html").one(".abreast img")
    pixels = np.asarray(page.screenshot(picture)).astype(int)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

    assert abs(pixels[0, 0] - [0x12, 0x16, 0x1B]).max() <= 1
    assert pixels[:30].min(2).max() > 200
    red = pixels[..., 0]
    blue = pixels[..., 2]
    assert (red > blue + 60).sum() > 100
    assert (blue > red + 40).sum() > 1000
