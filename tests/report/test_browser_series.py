"""The slider of a series in a real browser: by keys, by play, from its address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rundirs import Drawn, write_run
from selenium.webdriver import Keys
from selenium.webdriver.support.wait import WebDriverWait

from featviz.report import ReportOptions, build_report

from .browsing import Page, missing_pictures
from .test_series import DEAD, write_audit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A series of three steps whose grids have other greys, and its report."""
    root = tmp_path_factory.mktemp("series") / "out"
    for step, dead in DEAD.items():
        drawn = [Drawn("relu", shade=20 + step // 2, tile=(40, 48), scale=4)]
        run = write_run(root / f"step-{step:06d}", {"a.png": drawn, "b.png": drawn})
        write_audit(run, {"relu": {"dead": dead}})
    build_report(root, ReportOptions())
    return root


def _steps(page: Page) -> list[str]:
    return [frame.get_attribute("data-step") for frame in page.shown(".frames li")]


def test_one_step_is_shown_and_keys_move_it(browser: Any, root: Path) -> None:
    """The last one first; the pictures, the count and the mark in the curve follow the slider."""
    page = Page(browser, root).open("index.html")
    assert _steps(page) == ["250", "250"] and page.one("[data-count=dead]").text == "0"
    page.one(".step-slider input").send_keys(Keys.ARROW_LEFT)
    assert _steps(page) == ["100", "100"] and page.one("[data-count=dead]").text == "1"
    assert page.one(".step-slider input").get_attribute("aria-valuetext") == "step 100"
    assert page.one(".step-slider output").text == "100" and "step=100" in browser.current_url
    x = float(page.one("[data-now]").get_attribute("x1"))
    assert x == pytest.approx(6 + 308 * 100 / 250, abs=0.01)
    assert page.greys(page.shown(".frames li")[0], 0) == [70]
    page.one(".step-slider input").send_keys(Keys.HOME)
    assert _steps(page) == ["0", "0"] and missing_pictures(page) == []
    assert [log for log in browser.get_log("browser") if log["level"] == "SEVERE"] == []


def test_the_address_says_the_step(browser: Any, root: Path) -> None:
    """Loading it again shows the same; a step that is not there shows the last one."""
    page = Page(browser, root).open("index.html?step=100")
    assert _steps(page) == ["100", "100"]
    assert _steps(page.open("index.html?step=7")) == ["250", "250"]


def test_play_goes_through_the_steps_and_stops(browser: Any, root: Path) -> None:
    """From the first one, where it stood at the end."""
    page = Page(browser, root).open("index.html")
    page.one("[data-play]").click()
    assert _steps(page) == ["0", "0"] and page.one("[data-play]").text == "Pause"
    WebDriverWait(browser, 20).until(lambda _: page.one("[data-play]").text == "Play")
    assert _steps(page) == ["250", "250"]


def test_without_scripts_all_steps_stand_side_by_side(browser: Any, root: Path) -> None:
    """The slider is not there, and each strip has every step."""
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page = Page(browser, root).open("index.html")
        assert _steps(page) == ["0", "100", "250"] * 2 and page.shown(".step-slider") == []
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
