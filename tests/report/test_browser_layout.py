"""How tiles, the search and a channel's maps stand in a wide and in a narrow window, in
a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rundirs import Drawn

from .browsing import Page
from .markup import built

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
    assert count.text == "2 of 5"
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
