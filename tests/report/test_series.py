"""The page of a series of runs: what stands on it, in any folder that somebody hands
over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from rundirs import Drawn, write_run

from featviz.errors import StoreError
from featviz.options.commands import ReportOptions
from featviz.report import build_report
from featviz.rundir.studies import read_steps

from .browsing import Page, missing_pictures
from .markup import EVIL, HOSTILE, Markup, read

DEAD = {0: [0, 1, 2], 100: [1], 250: []}
"""Channels of the ReLU that are dead, by step."""


def write_audit(root: Path, findings: Mapping[str, Mapping[str, list[int]]]) -> None:
    """An audit.json with a row of six channels for each layer."""
    rows = [
        {
            "layer": layer,
            "label": layer,
            "type": "ReLU",
            "channels": 6,
            "findings": found,
        }
        for layer, found in findings.items()
    ]
    content = {
        "schema_version": 1,
        "featviz": "0",
        "model": {},
        "options": {},
        "total": {},
    }
    images = {"total": 2, "seen": 2, "failures": []}
    (root / "audit.json").write_text(
        json.dumps({**content, "images": images, "layers": rows})
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of two images, one of a hostile name, and two layers, one of a
    hostile name; and their report, to be read alone."""
    root = tmp_path_factory.mktemp("series") / "out"
    for step, dead in DEAD.items():
        drawn = [
            Drawn("conv", index=1, type="Conv2d", shade=20 + step // 5),
            Drawn(EVIL, index=2),
        ]
        run = write_run(root / f"step-{step:06d}", {"a.png": drawn, HOSTILE: drawn})
        write_audit(
            run, {EVIL: {"dead": dead, "constant": []}, "conv": {"nonfinite": []}}
        )
    build_report(root, ReportOptions())
    return root


@pytest.fixture
def series(made: Path, tmp_path: Path) -> Path:
    """The same series, to be changed."""
    return shutil.copytree(made, tmp_path / "out")


@pytest.fixture(scope="module")
def page(made: Path) -> Markup:
    """The page of the series."""
    return read(made / "report" / "index.html")


def test_every_step_of_every_layer_and_image_is_shown(made: Path, page: Markup) -> None:
    """In the order of the steps, with pictures that are there; this is the page without
    scripts."""
    sources = [str(image["src"]) for image in page.of("img") if "loading" in image]
    assert len(sources) == 3 * 2 * 2
    assert all((made / "report" / unquote(src)).resolve().is_file() for src in sources)
    steps = [
        int(str(frame["data-step"])) for frame in page.of("li") if "data-step" in frame
    ]
    assert steps == [0, 100, 250] * 4
    assert [f"step {step} ·" in page.text for step in DEAD] == [True] * 3


def test_nothing_is_inline_and_nothing_hostile_is_markup(
    made: Path, page: Markup
) -> None:
    """A Content-Security-Policy without inline script and style leaves the page whole;
    the slider is hidden until the script runs, has a label, knows the steps, and stands
    at the last one."""
    assert page.inline.strip() == ""
    assert not any("style" in attrs for _, attrs in page.tags)
    assert not any(str(image.get("src")) == "x" for image in page.of("img"))
    assert [script["src"] for script in page.of("script")] == ["series.js"]
    assert EVIL in page.text
    assert HOSTILE in page.text
    files = sorted(path.name for path in (made / "report").iterdir())
    assert files == ["icon.svg", "index.html", "report.json", "series.js", "style.css"]
    (slider,) = (tag for tag in page.of("input") if tag["type"] == "range")
    assert (slider["data-steps"], slider["max"], slider["value"]) == (
        "0 100 250",
        "2",
        "2",
    )
    assert [label["for"] for label in page.of("label")] == [slider["id"]]
    (control,) = (
        div for div in page.of("div") if div.get("class") == "control step-slider"
    )
    assert "hidden" in control


def test_curves_are_the_audits_counts(page: Markup) -> None:
    """Steps lie at their distance, the most channels at the upper edge; a table has the
    numbers."""
    (curve,) = page.of("polyline")
    points = [
        tuple(map(float, point.split(","))) for point in str(curve["points"]).split()
    ]
    assert curve["class"] == "dead"
    assert [x for x, _ in points] == pytest.approx(
        [6, 6 + 308 * 100 / 250, 314], abs=0.01
    )
    assert [y for _, y in points] == pytest.approx([6, 6 + 52 * 2 / 3, 58], abs=0.01)
    (chart,) = (svg for svg in page.of("svg") if svg.get("role") == "img")
    assert (
        chart["aria-label"]
        == "Channels with a finding by step; the numbers stand below"
    )
    assert "No channel is dead, constant, NaN or infinite at any step." in page.text


def test_findings_of_unknown_names_are_not_shown(series: Path) -> None:
    """An audit.json may be anybody's, and names stand in classes and selectors."""
    write_audit(series / "step-000250", {EVIL: {'x"] *': [1], "dead": [3]}})
    build_report(series, ReportOptions())
    page = read(series / "report" / "index.html")
    assert [line["class"] for line in page.of("polyline")] == ["dead"]
    assert 'x"]' not in page.text


def test_a_damaged_step_is_named_and_the_others_are_shown(series: Path) -> None:
    """The result says so as well; a step that is a link is none."""
    (series / "step-000100" / "run.json").write_text("{")
    (series / "step-000250" / "a.png" / "input.png").unlink()
    (series / "step-000300").symlink_to(series / "step-000000")
    result = build_report(series, ReportOptions())
    assert list(result.incomplete) == ["step-000100", "step-000250/a.png"]
    page = read(result.page)
    assert "cannot be read" in page.text
    assert "step 300" not in page.text
    for path in read_steps(series).values():
        (path / "run.json").write_text("{")
    with pytest.raises(StoreError, match="has no step that can be shown"):
        build_report(series, ReportOptions())


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.mark.slow
def test_one_step_is_shown_and_keys_move_it(browser: Any, shown: Path) -> None:
    """The last one first; the pictures, the count and the mark in the curve follow the
    slider; the address says the step."""
    from selenium.webdriver import Keys

    browser.get_log("browser")  # of pages that other tests opened
    page = Page(browser, shown).open("index.html")
    assert _steps(page) == ["250", "250"]
    assert page.one("[data-count=dead]").text == "0"
    page.one(".step-slider input").send_keys(Keys.ARROW_LEFT)
    assert _steps(page) == ["100", "100"]
    assert page.one("[data-count=dead]").text == "1"
    assert page.one(".step-slider input").get_attribute("aria-valuetext") == "step 100"
    assert page.one(".step-slider output").text == "100"
    assert "step=100" in browser.current_url
    x = float(page.one("[data-now]").get_attribute("x1"))
    assert x == pytest.approx(6 + 308 * 100 / 250, abs=0.01)
    assert page.greys(page.shown(".frames li")[0], 0) == [70]
    page.one(".step-slider input").send_keys(Keys.HOME)
    assert _steps(page) == ["0", "0"]
    assert missing_pictures(page) == []
    assert _steps(page.open("index.html?step=100")) == ["100", "100"]
    assert _steps(page.open("index.html?step=7")) == ["250", "250"]
    assert [log for log in browser.get_log("browser") if log["level"] == "SEVERE"] == []
