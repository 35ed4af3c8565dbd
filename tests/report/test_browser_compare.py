"""The page of a comparison, and markup in every string, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rundirs import Drawn, summed_anew, write_run

from featviz.diff import diff
from featviz.options.commands import DiffFiles, DiffThresholds, ReportOptions
from featviz.report import build_report
from featviz.report.comparison_page import render_comparison

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
    """Runs of which the second layer differs a little, and the third more; and their
    page."""
    folder = tmp_path_factory.mktemp("compared")
    for name, little, large in (("before", 0.0, 0.0), ("after", 0.5, 4.0)):
        layers = [("conv1", 0.0), ("conv2", little), ("conv3", large)]
        drawn = [
            Drawn(
                layer,
                index=n,
                type="Conv2d",
                stats=changed(by),
                tile=(60, 70),
                scale=10,
            )
            for n, (layer, by) in enumerate(layers, 1)
        ]
        write_run(folder / name, {"a.png": drawn})
    outputs = DiffFiles(html=folder / "diff.html")
    diff(
        folder / "before",
        folder / "after",
        DiffThresholds(),
        outputs,
        render_comparison,
    )
    build_report(folder / "before", ReportOptions(compare=folder / "after"))
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
    assert page.one("#compared-001 .badge").text == "first to diverge"
    page.choose("[data-state=rank]", "change")
    assert layers(page) == ["conv3", "conv2", "conv1"]
    page.one("[data-state=changed]").click()
    page.browser.refresh()
    assert layers(page) == ["conv3", "conv2"]
    page.choose("[data-state=rank]", "")
    assert layers(page) == ["conv2", "conv3"]


@pytest.mark.parametrize("width", [1200, 400])
def test_a_pair_stays_on_one_row(page: Page, width: int) -> None:
    """On a phone too, where the page is no wider than the window; also on the page of a
    layer."""
    page.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    page.browser.refresh()
    for name in ("", "layer-001.html"):
        if name:
            page.open(name)
        tops = page.js(
            "return [...document.querySelectorAll('.both, .pair')].map(row =>"
            " [...row.querySelectorAll('.maps')].slice(0, 2).map(f =>"
            " f.getBoundingClientRect().top))"
        )
        assert tops
        assert all(len(set(pair)) == 1 and len(pair) == 2 for pair in tops)
        assert page.js("return document.documentElement.scrollWidth") <= width
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_compared_run_leads_to_the_page_of_the_comparison(page: Page) -> None:
    """Before, after and the difference stand in three columns, with the same numbers;
    their pictures are there."""
    page.browser.set_window_size(1400, 900)
    page.open("index.html")
    page.one(".verdict a[href='comparison.html']").click()
    page.until("return location.pathname.endsWith('comparison.html')")
    assert layers(page) == ["conv1", "conv2", "conv3"]
    columns = page.shown("#compared-002 .maps")
    assert [column.find_element("class name", "name").text for column in columns] == [
        "before",
        "after",
        "difference",
    ]
    boxes = [column.rect for column in columns]
    assert len({box["y"] for box in boxes}) == 1
    assert boxes[0]["x"] < boxes[1]["x"] < boxes[2]["x"]
    numbers = [
        [text.text for text in column.find_elements("css selector", ".numbers text")]
        for column in columns
    ]
    assert numbers[0][:2] == ["4", "2"]
    assert numbers[0] == numbers[1] == numbers[2]
    assert missing_pictures(page) == []


EVIL = (
    "</script><script>document.title='pwned'</script><img src=x"
    " onerror=\"document.title='pwned'\">'\"><svg"
    " onload=\"document.title='pwned'\">{{7*7}}\u2028\u2029javascript:alert(1)/`${1}`"
)
"""Markup and script for whatever place it is put into."""


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of runs and an audit whose every string is markup."""
    import json

    fields = {"layout": EVIL, "collapsed": {"0": [0, 1]}, "shape": [1, 6, 4, 5]}
    drawn = [
        Drawn(
            EVIL, index=1, type=EVIL, key=EVIL, more={**fields, "file": "a b&c<d>.png"}
        ),
        Drawn(
            f"{EVIL}2",
            index=2,
            type=EVIL,
            more={"normalize": EVIL, "file": "x'\"y.png"},
        ),
    ]
    strings = {
        "model": {"name": EVIL, EVIL: [EVIL, {EVIL: EVIL}]},
        "preprocessing": EVIL,
    }
    strings |= {"device": EVIL, "featviz": EVIL, "layers": [EVIL]}  # type: ignore[dict-item]
    options = {"cmap": EVIL, "pick": EVIL, "order": EVIL, EVIL: {EVIL: EVIL}}
    folder = tmp_path_factory.mktemp("evil")
    names = {EVIL: drawn, f"{EVIL}2.png": drawn}
    for shade, out in enumerate(("one", "two")):
        root = write_run(
            folder / out, names, {f"{EVIL}3": EVIL}, options=options, **strings
        )
        for path in root.rglob("manifest.json"):
            content = json.loads(path.read_text())
            content["input"]["preprocessing"] = EVIL
            content["image"]["files"] = [EVIL]
            content["prediction"] = [
                {"index": 1, "name": EVIL, "score": 1, "probability": 0.5}
            ]
            content["target"] = {"of": EVIL, "value": 1, "grad_rule": EVIL}
            content["interventions"] = [{"kind": EVIL, "what": EVIL}]
            skip = {"index": 3, "kind": EVIL, "call": 0, "key": EVIL, "reason": EVIL}
            content["skipped"] = [{"layer": f"{EVIL}4", "type": EVIL, **skip}]
            content["never_ran"] = [f"{EVIL}5"]
            for row, name in zip(
                content["captures"], ("a b&c<d>.png", "x'\"y.png"), strict=True
            ):
                drawn_at = next(path.parent.glob(f"00{row['index']}_*")) / "x"
                real = next(drawn_at.parent.glob("*.png"))
                real.rename(path.parent / name)
                if out == "two" and row["index"] == 2:
                    row["mean"] = 3.0
            path.write_text(json.dumps(content))
        with np.load(next(root.rglob("stats.npz"))) as arrays:
            changed = {key: arrays[key] + shade for key in arrays.files}
        np.savez(next(root.rglob("stats.npz")), **changed)
        for path in root.rglob("manifest.json"):
            summed_anew(path.parent)
    finding = {
        "label": EVIL,
        "layer": EVIL,
        "type": EVIL,
        "channels": 6,
        "findings": {EVIL: [1]},
    }
    audit = {"images": {"seen": 1}, "layers": [finding]}
    (folder / "one" / "audit.json").write_text(json.dumps(audit))
    (folder / "one" / EVIL.replace("/", "")).mkdir()
    (folder / "one" / EVIL.replace("/", "") / "manifest.json").write_text(EVIL)
    build_report(folder / "one", ReportOptions(compare=folder / "two"))
    build_report(folder / "one", ReportOptions(single_file=True))
    outputs = DiffFiles(html=folder / "one" / "diff.html")
    diff(folder / "one", folder / "two", DiffThresholds(), outputs, render_comparison)
    return folder / "one"


def test_a_run_whose_every_string_is_markup_runs_no_script(
    browser: Any, evil: Path
) -> None:
    """On every page of a report, in one file, and in a diff: no script, no dialog, no
    element."""
    from selenium.common.exceptions import NoAlertPresentException

    pages = [
        *sorted((evil / "report").glob("*.html")),
        evil / "report.html",
        evil / "diff.html",
    ]
    assert len(pages) == 1 + 2 + 2 + 3
    browser.get_log("browser")
    for path in pages:
        browser.get(path.as_uri())
        text = browser.find_element("css selector", "body").text
        assert "</script><script>" in text, path
        for control in browser.find_elements("css selector", "[data-state=sort]"):
            browser.execute_script(
                "for (const o of arguments[0].options) { arguments[0].value = o.value;"
                "arguments[0].dispatchEvent(new Event('change')); }",
                control,
            )
        for frame in browser.find_elements("css selector", "[data-grid]"):
            browser.execute_script("arguments[0].focus();", frame)
            browser.execute_script(
                "for (const key of ['ArrowRight', 'Enter', 'Escape'])"
                " arguments[0].dispatchEvent(new KeyboardEvent('keydown', {key,"
                " bubbles: true}))",
                frame,
            )
        made = browser.execute_script(
            "return [document.title, document.querySelectorAll('[onerror], [onload],"
            ' img[src=x], script:not([src]):not([src=""])\').length]'
        )
        inline = 5 if path.name == "report.html" else 0
        assert made[0] != "pwned" and made[1] == inline, (path, made)
        with pytest.raises(NoAlertPresentException):
            _ = browser.switch_to.alert.text
    assert [
        line for line in browser.get_log("browser") if "favicon" not in line["message"]
    ] == []
