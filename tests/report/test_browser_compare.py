"""The page of a comparison in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rundirs import Drawn, write_run

from featviz.diff import Outputs, compare_runs, diff
from featviz.options import DiffThresholds, ReportOptions
from featviz.report import build_report, compare

from .browsing import STATS, Page, missing_pictures

pytestmark = pytest.mark.slow


def changed(by: float) -> np.ndarray:
    """The statistics of the other run: channel 4 moved most, channel 2 half as much."""
    stats = STATS.copy()
    stats[4, :4] += by
    stats[2, :4] += by / 2
    return stats


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of which the second layer differs a little, and the third more; and their page."""
    folder = tmp_path_factory.mktemp("compared")
    for name, little, much in (("before", 0.0, 0.0), ("after", 0.5, 4.0)):
        layers = [("conv1", 0.0), ("conv2", little), ("conv3", much)]
        drawn = [
            Drawn(layer, index=n, type="Conv2d", stats=changed(by), tile=(60, 70), scale=10)
            for n, (layer, by) in enumerate(layers, 1)
        ]
        write_run(folder / name, {"a.png": drawn})
    outputs = Outputs(html=folder / "diff.html", render=compare.render)
    diff(folder / "before", folder / "after", DiffThresholds(), outputs)
    build_report(folder / "before", ReportOptions(compare=folder / "after"), compare_runs)
    return folder


@pytest.fixture
def page(browser: Any, compared: Path) -> Page:
    """The page of the comparison, wide; no message on the console is expected."""
    browser.get_log("browser")
    browser.get((compared / "diff.html").as_uri())
    yield Page(browser, compared / "before")
    browser.set_window_size(1200, 900)
    assert browser.get_log("browser") == []


def layers(page: Page) -> list[str]:
    """The layers that are seen, in their order."""
    return [row.get_attribute("data-layer") for row in page.shown(".compared")]


def test_layers_by_position_by_change_and_the_changed_ones_only(page: Page) -> None:
    """What is set stands in the address, and holds when it is loaded again."""
    assert layers(page) == ["conv1", "conv2", "conv3"]
    assert page.one("#layer-001 .badge").text == "first to diverge"
    page.choose("[data-state=rank]", "change")
    assert layers(page) == ["conv3", "conv2", "conv1"]
    page.one("[data-state=changed]").click()
    page.browser.refresh()
    assert layers(page) == ["conv3", "conv2"]
    page.choose("[data-state=rank]", "")
    assert layers(page) == ["conv2", "conv3"]


def test_tiles_by_change(page: Page) -> None:
    """The most changed channel comes first, in both runs alike."""
    page.choose("[data-state=sort]", "change")
    orders = page.js("return [...groups.values()].map(g => g.frames.slice(0, 2)"
                     ".map(f => [f.grid.channelOf(0), f.grid.channelOf(1)]))")  # fmt: skip
    assert orders == [[[4, 2], [4, 2]], [[4, 2], [4, 2]]]


@pytest.mark.parametrize("width", [1200, 400])
def test_a_pair_stays_on_one_row(page: Page, width: int) -> None:
    """On a phone too, where the page is no wider than the window; also on the page of a layer."""
    page.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    page.browser.refresh()
    for name in ("", "layer-001.html"):
        if name:
            page.open(name)
        tops = page.js(
            "return [...document.querySelectorAll('.both, .pair')].map(row => "
            "[...row.children].slice(0, 2).map(f => f.getBoundingClientRect().top))"
        )
        assert tops and all(len(set(pair)) == 1 and len(pair) == 2 for pair in tops)
        assert page.js("return document.documentElement.scrollWidth") <= width
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_an_enlarged_tile_stands_beside_its_double(page: Page) -> None:
    """The other run's, named; a comparison has no page of a channel to lead to."""
    page.at(page.all("#layer-002 .frame")[0], 4, click=True)
    captions = [each.text for each in page.shown("dialog.viewer .excited figcaption")]
    assert captions[0] == "NEW"
    assert "relative difference 0." in page.one("dialog.viewer .numbers").text
    assert not page.shown("dialog.viewer .bar a")


def test_a_compared_run_begins_with_the_first_layer_that_diverges(page: Page) -> None:
    """Before, after and the difference, side by side on the first screen, then all layers by change."""
    page.browser.set_window_size(1400, 900)
    page.open("index.html")
    images = page.shown(".both img")
    ways = [image.get_attribute("src").rsplit("/", 4)[-4] for image in images]
    assert ways == ["after", "before", "after", "before"]
    assert all("002_conv2" in image.get_attribute("src") for image in images)
    boxes = [image.rect for image in images]
    assert len({box["y"] for box in boxes}) == 1 and boxes[2] == boxes[3]
    assert boxes[0]["x"] < boxes[1]["x"] < boxes[2]["x"]
    assert boxes[0]["y"] + boxes[0]["height"] < 900
    rows = page.shown("[aria-labelledby=changes] tbody tr")
    assert [row.text.split()[0] for row in rows] == ["conv3", "conv2"]
    assert rows[0].rect["y"] < 900


def test_no_picture_is_missing(page: Page) -> None:
    """Those of both runs and the differences, found from where the page is."""
    assert missing_pictures(page) == []
    assert len(page.all(".both img")) >= 2 * 4
