"""The page of a series of runs: what stands on it, in any folder that somebody hands
over."""

from __future__ import annotations

import json
import re
import shutil
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
from .markup import EVIL, HOSTILE, Markup, page_of

DEAD = {0: [0, 1, 2], 100: [1], 250: []}
"""Channels of the ReLU that are dead, by step."""

Findings = dict[str, dict[str, list[int]]]
"""Channels by layer and finding."""


def write_findings(run: Path, findings: Findings) -> None:
    """An audit.json with a row of six channels for each layer."""
    rows = []
    for layer, channels in findings.items():
        label = layer or "Conv2d"
        row = {"layer": layer, "label": label, "type": "ReLU", "channels": 6}
        rows.append({**row, "findings": channels})
    content = {
        "schema_version": 1,
        "featviz": "0",
        "model": {},
        "options": {},
        "total": {},
        "images": {"total": 2, "seen": 2, "failures": []},
        "layers": rows,
    }
    (run / "audit.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of two images, one of a hostile name, and two layers, one of a
    hostile name; and their report, to be read alone."""
    root = tmp_path_factory.mktemp("series") / "out"
    for step, dead in DEAD.items():
        conv = Drawn("conv", index=1, type="Conv2d", shade=20 + step // 5)
        drawn = [conv, Drawn(EVIL, index=2)]
        run = write_run(root / f"step-{step:06d}", {"a.png": drawn, HOSTILE: drawn})
        findings = {EVIL: {"dead": dead, "constant": []}, "conv": {"nonfinite": []}}
        write_findings(run, findings)
    build_report(root, ReportOptions())
    return root


@pytest.fixture
def series(written: Path, tmp_path: Path) -> Path:
    """The same series, to be changed."""
    return shutil.copytree(written, tmp_path / "out")


@pytest.fixture(scope="module")
def page(written: Path) -> Markup:
    """The page of the series."""
    return page_of(written)


@pytest.mark.medium
def test_every_step_of_every_layer_and_image_is_shown(
    written: Path, page: Markup
) -> None:
    """They stand in the order of the steps, with pictures that are there; this is the
    page without scripts."""
    assert page.values("li", "data-step") == ["0", "100", "250"] * 4
    pictures = [image["src"] for image in page.of("img") if "loading" in image]
    inputs = 2 * 2
    assert len(pictures) == 3 * 2 * 2 + inputs
    for address in pictures:
        assert (written / "report" / unquote(str(address))).is_file()
    assert {"step 0 ·", "step 100 ·", "step 250 ·"} <= set(
        re.findall(r"step \d+ ·", page.text)
    )


def test_a_picture_has_its_key_and_its_input(page: Markup) -> None:
    """At each step the colours are explained, and once what crossed-out maps are; the
    input stands at the head."""
    assert page.text.count("crossed out: zero everywhere") == 1
    assert page.text.count("min max, scaled per map") == 3 * 2 * 2
    assert len(page.pictures("What the model saw of a.png")) == 2


@pytest.mark.medium
def test_nothing_is_inline(written: Path, page: Markup) -> None:
    """A Content-Security-Policy without inline script and style leaves the page whole,
    which needs six files."""
    assert page.inline.strip() == ""
    assert not any("style" in attributes for _, attributes in page.tags)
    assert page.values("script", "src") == ["tiles.js", "series.js"]
    files = {path.name for path in (written / "report").iterdir()}
    assert files == {
        "icon.svg",
        "index.html",
        "report.json",
        "series.js",
        "style.css",
        "tiles.js",
    }


def test_nothing_hostile_is_markup(page: Markup) -> None:
    """The names of a layer and of an image are text."""
    assert EVIL in page.text
    assert HOSTILE in page.text
    assert "x" not in page.values("img", "src")


def test_the_slider_knows_the_steps(page: Markup) -> None:
    """It has a label, stands at the last step, and is hidden until the script runs."""
    (slider,) = (tag for tag in page.of("input") if tag["type"] == "range")
    expected = {"data-steps": "0 100 250", "max": "2", "value": "2"}
    assert expected.items() <= slider.items()
    assert page.values("label", "for") == [slider["id"]]
    classes = [tag.get("class") for tag in page.of("div") if "hidden" in tag]
    assert "control step-slider" in classes


def test_curves_are_the_audits_counts(page: Markup) -> None:
    """Steps lie at their distance, the most channels at the upper edge."""
    (curve,) = page.of("polyline")
    points = str(curve["points"]).replace(",", " ").split()
    expected = [6, 6, 6 + 308 * 100 / 250, 6 + 52 * 2 / 3, 314, 58]
    assert [float(value) for value in points] == pytest.approx(expected, abs=0.01)
    assert curve["class"] == "dead"


def test_a_series_may_have_one_step(tmp_path: Path) -> None:
    """Its curve is a point at the left edge."""
    root = tmp_path / "out"
    run = write_run(root / "step-000007", {"a.png": [Drawn("relu")]})
    write_findings(run, {"relu": {"dead": [1]}})
    build_report(root, ReportOptions())
    (curve,) = page_of(root).of("polyline")
    assert str(curve["points"]).replace(",", " ").split()[0] == "6.0"


def test_the_upper_edge_of_the_curves_has_their_largest_count(written: Path) -> None:
    """Three channels were dead at most, of six."""
    html = (written / "report" / "index.html").read_text()

    chart = html[
        html.index("<svg role") : html.index("</svg>", html.index("<svg role"))
    ]

    assert re.findall("<text[^>]*>([^<]*)</text>", chart) == ["3", "0"]


def test_curves_are_described(page: Markup) -> None:
    """The chart has a label, and a layer without findings says so."""
    label = "Channels with a finding by step; the numbers stand below"
    assert label in page.values("svg", "aria-label")
    assert "No channel is dead, constant, NaN or infinite at any step." in page.text


def test_the_model_itself_has_its_curve(tmp_path: Path) -> None:
    """A model of a single module, which has no name, is found in the audits by its
    label; steps have any number of digits."""
    for step, dead in {0: [1], 1_000_000: [1, 2]}.items():
        run = write_run(
            tmp_path / f"step-{step:06d}", {"a.png": [Drawn("", type="Conv2d")]}
        )
        write_findings(run, {"": {"dead": dead}})
    build_report(tmp_path, ReportOptions())
    page = page_of(tmp_path)
    assert page.values("polyline", "class") == ["dead"]
    assert page.values("li", "data-step") == ["0", "1000000"]


def test_an_image_that_failed_is_named(tmp_path: Path) -> None:
    """The result has its step, its name and the reason."""
    step = tmp_path / "step-000000"
    write_run(step, {"a.png": [Drawn("relu")]}, {"b.png": "b.png is empty"})
    result = build_report(tmp_path, ReportOptions())
    assert result.incomplete == {"step-000000/b.png": "b.png is empty"}


@pytest.mark.medium
def test_findings_of_unknown_names_are_not_shown(series: Path) -> None:
    """An audit.json may be anybody's, and names stand in classes and selectors."""
    write_findings(series / "step-000250", {EVIL: {'x"] *': [1], "dead": [3]}})
    build_report(series, ReportOptions())
    page = page_of(series)
    assert page.values("polyline", "class") == ["dead"]
    assert 'x"]' not in page.text


@pytest.mark.medium
def test_a_damaged_step_is_named_and_the_others_are_shown(series: Path) -> None:
    """The page and the result say so; a step that is a link is none."""
    (series / "step-000100" / "run.json").write_text("{")
    (series / "step-000250" / "a.png" / "input.png").unlink()
    (series / "step-000300").symlink_to(series / "step-000000")
    result = build_report(series, ReportOptions())
    assert list(result.incomplete) == ["step-000100", "step-000250/a.png"]
    text = page_of(series).text
    assert "cannot be read" in text
    assert "step 300" not in text


@pytest.mark.medium
def test_layers_stand_in_the_order_of_the_model(tmp_path: Path) -> None:
    """Also where the first image lacks one; the title has the class of the model."""
    root = tmp_path / "out"
    model = {"kind": "torchvision", "name": "net", "type": "Net", "step": 7}
    relu = Drawn("relu", index=2)
    images = {"a.png": [relu], "b.png": [Drawn("conv", index=1), relu]}
    write_run(root / "step-000007", images, model=model)
    build_report(root, ReportOptions())
    text = page_of(root).text
    assert "Training of Net 1 step, 7 to 7 · 2 layers" in text
    assert text.index("conv ReLU") < text.index("relu ReLU")


@pytest.mark.medium
def test_a_series_without_a_step_is_refused(series: Path) -> None:
    """There is nothing to show where no step can be read."""
    for path in read_steps(series).values():
        (path / "run.json").write_text("{")
    with pytest.raises(StoreError, match="has no step that can be shown"):
        build_report(series, ReportOptions())


@pytest.fixture(scope="module")
def grey(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A series of three steps whose grids have other greys, and its report."""
    root = tmp_path_factory.mktemp("series") / "out"
    for step, dead in DEAD.items():
        drawn = [Drawn("relu", shade=20 + step // 2, tile=(40, 48), scale=4)]
        run = write_run(root / f"step-{step:06d}", {"a.png": drawn, "b.png": drawn})
        write_findings(run, {"relu": {"dead": dead}})
    build_report(root, ReportOptions())
    return root


@pytest.fixture
def opened(browser: Any, grey: Path) -> Page:
    """The page of the series in the browser; no error on the console is expected."""
    browser.get_log("browser")  # of pages that other tests opened
    yield Page(browser, grey).open("index.html")
    assert not [log for log in browser.get_log("browser") if log["level"] == "SEVERE"]


def steps_of(page: Page) -> list[str]:
    """The step of each picture that is seen."""
    return [frame.get_attribute("data-step") for frame in page.shown(".frames li")]


@pytest.mark.slow
def test_keys_move_the_step(opened: Page) -> None:
    """The last step comes first; pictures follow the slider."""
    from selenium.webdriver import Keys

    slider = opened.one(".step-slider input")
    assert steps_of(opened) == ["250", "250"]
    slider.send_keys(Keys.ARROW_LEFT)
    assert steps_of(opened) == ["100", "100"]
    assert opened.greys(opened.shown(".frames .frame")[0], 0) == [70]
    slider.send_keys(Keys.HOME)
    assert steps_of(opened) == ["0", "0"]
    assert missing_pictures(opened) == []


@pytest.mark.slow
def test_a_step_is_told_wherever_it_counts(opened: Page) -> None:
    """The slider, the count and the mark in the curve are those of the step in the
    address; an address of no step shows the last one."""
    opened.open("index.html?step=100")
    assert steps_of(opened) == ["100", "100"]
    slider = opened.one(".step-slider input")
    assert slider.get_attribute("aria-valuetext") == "step 100"
    assert opened.one(".step-slider output").text == "100"
    assert opened.one("[data-count=dead]").text == "1"
    mark = float(opened.one("[data-now]").get_attribute("x1"))
    assert mark == pytest.approx(6 + 308 * 100 / 250, abs=0.01)
    assert steps_of(opened.open("index.html?step=7")) == ["250", "250"]


@pytest.mark.slow
def test_curves_of_a_later_start_begin_at_their_first_step(
    browser: Any, series: Path
) -> None:
    """The mark stands at the left edge for it, and at the right edge for the last."""
    shutil.rmtree(series / "step-000000")
    build_report(series, ReportOptions())
    marks = []
    for step in (100, 250):
        page = Page(browser, series).open(f"index.html?step={step}")
        marks.append(float(page.one("[data-now]").get_attribute("x1")))
    assert marks == pytest.approx([6, 314], abs=0.01)


@pytest.mark.slow
def test_a_step_without_an_audit_has_no_count(browser: Any, series: Path) -> None:
    """None is not zero."""
    (series / "step-000100" / "audit.json").unlink()
    build_report(series, ReportOptions())
    page = Page(browser, series).open("index.html?step=100")
    assert page.one("[data-count=dead]").text == "–"


@pytest.mark.slow
def test_a_series_plays_until_the_slider_is_moved(opened: Page) -> None:
    """Behind the last step the first one follows."""
    from selenium.webdriver import Keys

    opened.one("[data-play]").click()
    assert opened.one("[data-play]").text == "Pause"
    opened.until("return current === 0")
    opened.one(".step-slider input").send_keys(Keys.END)
    assert opened.one("[data-play]").text == "Play"
    assert opened.js("return playing") is None
    assert steps_of(opened) == ["250", "250"]


@pytest.mark.slow
def test_the_address_says_the_step(opened: Page) -> None:
    """It changes with the slider."""
    from selenium.webdriver import Keys

    opened.one(".step-slider input").send_keys(Keys.ARROW_LEFT)
    opened.settle()
    assert "step=100" in opened.browser.current_url


@pytest.mark.slow
def test_tiles_fill_the_width_with_their_numbers(opened: Page) -> None:
    """Whatever step is shown, in a wide and in a narrow window; canvases of other steps
    are hidden with them."""
    for width in (1200, 390):
        opened.emulate(width)
        opened.open("index.html?step=100")
        opened.one(".step-slider [data-play]")
        frames = opened.shown(".frames .frame")
        assert len(frames) == 2
        room = opened.one(".frames").rect["width"]
        assert 0.9 * room < frames[0].rect["width"] <= room
        assert len(opened.shown(".frames canvas.names")) == 2
        assert opened.js("return document.documentElement.scrollWidth") <= width
    opened.emulate_nothing()
