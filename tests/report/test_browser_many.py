"""A layer of many channels in many images, in a real browser."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from rundirs import Drawn

from .browsing import Page
from .markup import built

pytestmark = pytest.mark.slow
CHANNELS = 512
# the channels that vary most: every twentieth
VARIED = list(range(0, CHANNELS, 20))
DEAD = 501


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 29 images, whose layer has 512 channels, and its report."""
    stats = np.tile(np.float32([-1, 1, 0, 0.1, 0, 0]), (CHANNELS, 1))
    stats[VARIED, 3] = 2 + np.arange(len(VARIED)) / 100
    stats[DEAD] = [0, 0, 0, 0, 1, 0]
    drawn = Drawn(
        "layer4", CHANNELS, type="ReLU", nrow=23, tile=(32, 32), scale=4, stats=stats
    )
    names = [f"{n:02d}.png" for n in range(29)]
    root = tmp_path_factory.mktemp("many") / "out"
    return built(root, dict.fromkeys(names, (drawn,)))


@pytest.fixture
def page(browser: Any, many: Path) -> Page:
    """Opens pages of the report."""
    return Page(browser, many)


def shown_channels(page: Page) -> list[int]:
    """The channels that the first grid shows, in their order."""
    channels: list[int] = page.js(
        "const {grid} = [...frames.values()][0];"
        " return [...Array(grid.count).keys()].map((n) => grid.channelOf(n))"
    )
    return channels


def test_it_opens_within_two_seconds(page: Page) -> None:
    """Each kind of page, until it is loaded and painted."""
    for name in ("index.html", "image-000.html", "layer-000.html"):
        start = monotonic()
        page.open(name)
        page.until("return document.readyState === 'complete'")
        assert monotonic() - start < 2, name


def ends_of_viewer(page: Page, channel: int) -> list[bool]:
    """Whether nothing precedes an enlarged channel, and nothing follows it."""
    code = "viewer.open([...frames.values()][0], arguments[0]); viewer.box.close();"
    page.js(code, channel)
    ends: list[bool] = page.js(
        "return [viewer.previous.disabled, viewer.next.disabled]"
    )
    return ends


def test_the_channels_that_vary_most_are_shown_and_the_others_unfold(
    page: Page,
) -> None:
    """24 of 512: one that is all zero, then the most varied. The page is short until
    all are asked for, and the enlarged one leads to no others."""
    page.open("layer-000.html")
    assert shown_channels(page) == [DEAD, *VARIED[::-1][:23]]
    assert "24 of 512 channels: one that is all zero, and" in page.one(".fold").text
    assert page.js("return document.documentElement.scrollHeight") < 12_000
    frame = page.all(".frame")[0]
    page.painted(frame)
    assert page.shown(".frame canvas.names")
    page.choose("[data-state=sort]", "index")
    assert shown_channels(page) == list(range(24))
    ends = [ends_of_viewer(page, 0), ends_of_viewer(page, 23)]
    assert ends == [[True, False], [False, True]]
    page.one("[data-unfold]").click()
    assert shown_channels(page) == list(range(CHANNELS))


def test_grids_stand_side_by_side_below_their_names(page: Page) -> None:
    """As many in a row as have room for 24 tiles of 80 pixels; the name of an image is
    above its grid."""
    page.open("layer-000.html")
    page.until("return [...frames.values()].every((frame) => frame.room > 0)")
    figures = [figure.rect for figure in page.all(".beside > .maps")]
    width = page.one(".beside").rect["width"]
    in_row = [box for box in figures if box["y"] == figures[0]["y"]]
    column = 24 * 16  # pixels of 24rem, with as many between columns as 1.5rem
    assert len(in_row) == (width + 24) // (column + 24) >= 2
    name = page.one(".maps .name").rect
    frame = page.one(".maps .frame").rect
    assert name["y"] < frame["y"]
    assert frame["width"] > 0.9 * in_row[0]["width"]


def test_enter_opens_the_only_hit_of_the_search(page: Page) -> None:
    """The channel of the one layer; of several hits none."""
    page.open("index.html")
    search = page.one("[data-filter]")
    search.send_keys("layer4 17\n")
    page.until("return location.href.endsWith('layer-000.html#c17')")
    page.open("index.html")
    page.one("[data-filter]").send_keys("png\n")
    page.settle()
    assert page.browser.current_url.split("?")[0].endswith("index.html")
