"""A run directory to report on, and a browser to look at its report."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rundirs import Drawn, write_image, write_run

from featviz.options.commands import ReportOptions
from featviz.report import build_report
from featviz.rundir.folder import Folder
from featviz.rundir.write import RunDirectory

from .browsing import DARK, STATS, Page
from .markup import EVIL, HOSTILE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window, 1200 pixels wide; without it, the test is skipped. It
    takes seconds to start: who changes it (its size, colours, scripts) changes it
    back."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("no chromium with chromedriver here")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "window-size=1200,900",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three complete images, one of a hostile name; failures, and one incomplete; with
    its report, to be read alone."""
    dark = np.zeros((6, 6))
    dark[:, 1] = [1, 0, 2, 0, 3, 0]
    dark[[1, 3, 5], 4] = 1
    brighter = dark.copy()
    brighter[3] = [0, 1, 0.5, 0.1, 0.5, 0]
    a = [Drawn("conv1", index=1, type="Conv2d"), Drawn("relu", index=2, stats=dark)]
    b = [Drawn("conv1", index=1, type="Conv2d"), Drawn("relu", index=2, stats=brighter)]
    again = Drawn("relu", index=2, call=1, stats=dark)
    images = {
        "a.png": [*a, again],
        "deep/b #1%.png": b,
        HOSTILE: [*b, Drawn(EVIL, index=3)],
    }
    out = tmp_path_factory.mktemp("gallery") / "out"
    write_run(out, images, {"bad.jpg": f"it is truncated {EVIL}"})
    half = write_image(RunDirectory(Folder.open(out)), "half.png", a)
    (half / "manifest.json").unlink()
    build_report(out, ReportOptions())
    return out


@pytest.fixture
def root(gallery: Path, tmp_path: Path) -> Path:
    """The same run, without the report, to be changed."""
    return shutil.copytree(gallery, tmp_path / "out", ignore=lambda *_: {"report"})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four images, one of which is called like an attack, and its report."""
    size: dict[str, Any] = {"tile": (60, 70), "scale": 10}
    conv = Drawn("conv1", index=1, type="Conv2d", stats=STATS, **size)
    relu = Drawn("relu", index=2, stats=DARK, **size)
    clip = Drawn(
        "clip",
        index=3,
        type="Conv3d",
        maps=3,
        nrow=4,
        slices=(2, 2),
        tile=(40, 40),
        scale=4,
    )
    names = ["a.png", "deep/b#1 %.png", HOSTILE, "ü.png"]
    folder = tmp_path_factory.mktemp("run")
    drawn = [conv, relu, clip]
    root = write_run(folder / "out", dict.fromkeys(names, drawn))
    other_run = write_run(folder / "other", {"a.png": [conv]})
    build_report(root, ReportOptions(compare=other_run))
    build_report(root, ReportOptions(single_file=True))
    return root


@pytest.fixture
def page(browser: Any, run: Path) -> Page:
    """Opens pages of the report from file://; no message on the console is expected."""
    browser.get_log("browser")
    opened = Page(browser, run)
    yield opened
    assert browser.get_log("browser") == []
