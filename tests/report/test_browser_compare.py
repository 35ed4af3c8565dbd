"""The page of a comparison, and markup in every string, in a real browser."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rundirs import Drawn, summed_anew, write_run

from featviz.diff import diff
from featviz.options.commands import DiffFiles, DiffThresholds, ReportOptions
from featviz.report import build_report
from featviz.report.comparison_page import render_comparison

from .browsing import STATS, Page, missing_pictures

pytestmark = pytest.mark.slow


def moved(by: float) -> np.ndarray:
    """The statistics of the other run: channel 4 moved most, channel 2 half as much."""
    stats = STATS.copy()
    stats[4, :4] += by
    stats[2, :4] += by / 2
    return stats


def write_layers(root: Path, second: float, third: float) -> Path:
    """A run of three layers, of which two moved by this much."""
    drawn = []
    for index, by in enumerate((0.0, second, third), 1):
        drawn.append(
            Drawn(
                f"conv{index}",
                index=index,
                type="Conv2d",
                stats=moved(by),
                tile=(60, 70),
                scale=10,
            )
        )
    return write_run(root, {"a.png": drawn})


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of which the second layer differs a little, and the third more; and their
    page."""
    folder = tmp_path_factory.mktemp("compared")
    before = write_layers(folder / "before", second=0, third=0)
    after = write_layers(folder / "after", second=0.5, third=4)
    outputs = DiffFiles(html=folder / "diff.html")
    diff(before, after, DiffThresholds(), outputs, render_comparison)
    build_report(before, ReportOptions(compare=after))
    return folder


@pytest.fixture
def page(browser: Any, compared: Path) -> Page:
    """The page of the comparison, wide; no message on the console is expected."""
    browser.get_log("browser")
    browser.get((compared / "diff.html").as_uri())
    yield Page(browser, compared / "before")
    browser.set_window_size(1200, 900)
    assert browser.get_log("browser") == []


def test_layers_by_position_by_change_and_the_changed_ones_only(page: Page) -> None:
    """What is set stands in the address, and holds when it is loaded again."""
    assert page.layers(".compared") == ["conv1", "conv2", "conv3"]
    assert page.one("#compared-001 .badge").text == "first to diverge"
    page.choose("[data-state=rank]", "change")
    assert page.layers(".compared") == ["conv3", "conv2", "conv1"]
    page.one("[data-state=changed]").click()
    page.browser.refresh()
    assert page.layers(".compared") == ["conv3", "conv2"]
    page.choose("[data-state=rank]", "")
    assert page.layers(".compared") == ["conv2", "conv3"]


@pytest.mark.parametrize("width", [1200, 400])
def test_a_pair_stays_on_one_row(page: Page, width: int) -> None:
    """It does on a phone too, where the page is no wider than the window; also on the
    page of a layer."""
    page.emulate(width)
    tops = (
        "return [...document.querySelectorAll('.both, .pair')].map(row =>"
        " [...row.querySelectorAll('.maps')].slice(0, 2).map(f =>"
        " f.getBoundingClientRect().top))"
    )
    page.browser.refresh()
    pairs = page.js(tops)
    widths = [page.js("return document.documentElement.scrollWidth")]
    page.open("layer-001.html")
    pairs += page.js(tops)
    widths.append(page.js("return document.documentElement.scrollWidth"))
    page.emulate_nothing()
    assert len(pairs) == 3
    assert pairs == [[first, first] for first, *_ in pairs]
    assert max(widths) <= width


def test_a_compared_run_leads_to_the_page_of_the_comparison(page: Page) -> None:
    """Its verdict is a link."""
    page.open("index.html")
    page.one(".verdict a[href='comparison.html']").click()
    page.until("return location.pathname.endsWith('comparison.html')")
    assert page.layers(".compared") == ["conv1", "conv2", "conv3"]
    assert missing_pictures(page) == []


def test_before_after_and_difference_are_columns(page: Page) -> None:
    """They stand on one row in a wide window, with the same channels in the same
    order."""
    page.browser.set_window_size(1400, 900)
    page.open("comparison.html")
    assert page.texts("#compared-002 .maps .name") == ["before", "after", "difference"]
    first, second, third = page.shown("#compared-002 .maps")
    assert first.rect["y"] == second.rect["y"] == third.rect["y"]
    assert first.rect["x"] < second.rect["x"] < third.rect["x"]
    assert channels_of(first)[:2] == ["4", "2"]
    assert channels_of(first) == channels_of(second) == channels_of(third)


def test_the_gap_above_the_tiles_is_empty_on_the_page(
    page: Page, tmp_path: Path
) -> None:
    """The line that a file has there would be too small to read, and stands below."""
    for name, by in (("before", 0), ("after", 4)):
        drawn = Drawn("conv", tile=(200, 260), scale=1, stats=moved(by))
        write_run(tmp_path / name, {"a.png": [drawn]})
    outputs = DiffFiles(html=tmp_path / "diff.html")
    roots = (tmp_path / "before", tmp_path / "after")
    diff(*roots, DiffThresholds(), outputs, render_comparison)
    (file,) = tmp_path.glob("diff-maps/*.before.png")
    page.browser.get((tmp_path / "diff.html").as_uri())
    frame = page.shown(".frame")[0]
    page.painted(frame)
    for source, has_line in (
        (file.read_bytes(), True),
        (frame.screenshot_as_png, False),
    ):
        with Image.open(io.BytesIO(source)) as opened:
            shown = np.asarray(opened.convert("L")).astype(int)
        gap = shown[2 : int(0.03 * shown.shape[1]), 2:-2]
        assert bool(np.ptp(gap)) == has_line


def channels_of(column: Any) -> list[str]:
    """The numbers of the channels in a column of maps."""
    texts = column.find_elements("css selector", ".numbers text")
    return [text.text for text in texts]


def write_predicted(root: Path, classes: dict[str, int]) -> Path:
    """A run that predicts these classes, by image."""
    write_run(root, {image: [Drawn("conv1")] for image in classes})
    for image, index in classes.items():
        path = root / image / "manifest.json"
        content = json.loads(path.read_text())
        guess = {"index": index, "name": f"class {index}", "score": 9}
        content["prediction"] = [{**guess, "probability": 0.9996}]
        path.write_text(json.dumps(content))
    return root


def test_a_print_has_the_pictures_that_nobody_has_scrolled_to(
    page: Page, tmp_path: Path
) -> None:
    """The maps of a comparison are there when the page is loaded, those of an image
    follow."""
    for name, by in (("before", 0.0), ("after", 4.0)):
        drawn = []
        for index in range(1, 41):
            layer = Drawn(f"conv{index}", index=index, stats=moved(by), tile=(60, 70))
            drawn.append(layer)
        write_run(tmp_path / name, {"a.png": drawn})
    outputs = DiffFiles(html=tmp_path / "diff.html")
    roots = (tmp_path / "before", tmp_path / "after")
    diff(*roots, DiffThresholds(), outputs, render_comparison)
    build_report(roots[0], ReportOptions())

    page.browser.get((tmp_path / "diff.html").as_uri())
    page.until("return document.readyState === 'complete'")
    maps = "return [...document.querySelectorAll('.maps img')]"
    assert page.js(f"{maps}.length") == 120
    assert page.js(f"{maps}.every(image => image.complete && image.naturalWidth)")

    page.browser.get((tmp_path / "before/report/image-000.html").as_uri())
    page.until("return document.readyState === 'complete'")
    of_page = "[...document.querySelectorAll('.page img')]"
    assert page.js(f"return {of_page}.length") > 40
    page.until(f"return {of_page}.every(image => image.naturalWidth)")


def test_a_long_table_of_predictions_is_folded(tmp_path: Path) -> None:
    """The maps are near the head; what is folded says how many changed ones it has."""
    names = [f"{number:02}.png" for number in range(30)]
    before = write_predicted(tmp_path / "before", dict.fromkeys(names, 5))
    changed = dict.fromkeys(names[10:], 3)
    after = write_predicted(tmp_path / "after", dict.fromkeys(names, 5) | changed)
    build_report(after, ReportOptions(compare=before))
    source = (after / "report" / "comparison.html").read_text()
    shown, _, folded = source.split('id="predictions"')[1].partition("<details")
    assert shown.count(">changed</span>") == 4
    title = "26 more, 16 of them changed"
    assert folded.startswith(f' class="table"><summary>{title}</summary>')
    assert folded.count(">changed</span>") == 16
    assert '<a href="#predictions">20 of 30 predictions changed</a>' in source


def test_columns_of_predictions_stand_below_their_titles_on_a_phone_too(
    page: Page, tmp_path: Path
) -> None:
    """Of a changed and an unchanged prediction; nothing of the table is cut off."""
    before = write_predicted(tmp_path / "before", {"00-5.png": 5, "01-8.png": 8})
    after = write_predicted(tmp_path / "after", {"00-5.png": 3, "01-8.png": 8})
    outputs = DiffFiles(html=tmp_path / "diff.html")
    diff(before, after, DiffThresholds(), outputs, render_comparison)
    page.browser.get((tmp_path / "diff.html").as_uri())
    page.emulate(390)
    table = "document.querySelector('#predictions + .scroll table')"
    edges = page.js(
        f"return [...{table}.rows].map(row =>"
        " [...row.cells].map(cell => cell.getBoundingClientRect().right))"
    )
    (after_cell,) = page.js(
        f"return [...{table}.rows[1].cells].map(c => c.innerText)"
        ".filter(text => text.includes('changed'))"
    )
    page.emulate_nothing()
    assert len(edges) == 3
    assert edges[0] == edges[1] == edges[2]
    assert max(edges[0]) <= 390 - 16
    assert after_cell.split() == ["class", "3", "changed"]


EVIL = (
    "</script><script>document.title='pwned'</script><img src=x"
    " onerror=\"document.title='pwned'\">'\"><svg"
    " onload=\"document.title='pwned'\">{{7*7}}\u2028\u2029javascript:alert(1)/`${1}`"
)
"""Markup and script for whatever place it is put into."""


FILES = ("a b&c<d>.png", "x'\"y.png")
"""Odd names of the pictures of two captures."""
RECORD: dict[str, Any] = {
    "model": {"name": EVIL, EVIL: [EVIL, {EVIL: EVIL}]},
    "preprocessing": EVIL,
    "device": EVIL,
    "featviz": EVIL,
    "layers": [EVIL],
    "options": {"cmap": EVIL, "pick": EVIL, "order": EVIL, EVIL: {EVIL: EVIL}},
}
MANIFEST = {
    "prediction": [{"index": 1, "name": EVIL, "score": 1, "probability": 0.5}],
    "target": {"of": EVIL, "value": 1, "grad_rule": EVIL},
    "interventions": [{"kind": EVIL, "what": EVIL}],
    "skipped": [
        {
            "layer": f"{EVIL}4",
            "type": EVIL,
            "index": 3,
            "kind": EVIL,
            "call": 0,
            "key": EVIL,
            "reason": EVIL,
        }
    ],
    "never_ran": [f"{EVIL}5"],
}
AUDIT = {
    "images": {"seen": 1},
    "layers": [
        {
            "label": EVIL,
            "layer": EVIL,
            "type": EVIL,
            "channels": 6,
            "findings": {EVIL: [1]},
        }
    ],
}


def write_evil(root: Path) -> Path:
    """A run whose every string is markup."""
    fields: dict[str, Any] = {
        "layout": EVIL,
        "collapsed": {"0": [0, 1]},
        "shape": [1, 6, 4, 5],
    }
    fields["file"] = FILES[0]
    first = Drawn(EVIL, index=1, type=EVIL, key=EVIL, more=fields)
    scale = {"normalize": EVIL, "file": FILES[1]}
    second = Drawn(f"{EVIL}2", index=2, type=EVIL, more=scale)
    images = {name: [first, second] for name in (EVIL, f"{EVIL}2.png")}
    write_run(root, images, {f"{EVIL}3": EVIL}, **RECORD)
    for path in root.rglob("manifest.json"):
        content = json.loads(path.read_text())
        content["input"]["preprocessing"] = EVIL
        content["image"]["files"] = [EVIL]
        path.write_text(json.dumps({**content, **MANIFEST}))
        for index, name in enumerate(FILES, 1):
            (picture,) = path.parent.glob(f"00{index}_*/*.png")
            picture.rename(path.parent / name)
        summed_anew(path.parent)
    return root


def shift(root: Path) -> None:
    """Change the statistics of an image, and the mean of its second capture."""
    path = next(root.rglob("manifest.json"))
    content = json.loads(path.read_text())
    content["captures"][1]["mean"] = 3.0
    path.write_text(json.dumps(content))
    with np.load(path.with_name("stats.npz")) as arrays:
        stats = {key: arrays[key] + 1 for key in arrays.files}
    np.savez(path.with_name("stats.npz"), **stats)
    summed_anew(path.parent)


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of runs and an audit whose every string is markup."""
    folder = tmp_path_factory.mktemp("evil")
    root = write_evil(folder / "one")
    changed = write_evil(folder / "two")
    shift(changed)
    (root / "audit.json").write_text(json.dumps(AUDIT))
    odd = root / EVIL.replace("/", "")
    odd.mkdir()
    (odd / "manifest.json").write_text(EVIL)
    build_report(root, ReportOptions(compare=changed))
    build_report(root, ReportOptions(single_file=True))
    outputs = DiffFiles(html=root / "diff.html")
    diff(root, changed, DiffThresholds(), outputs, render_comparison)
    return root


SORT_BY_ALL = """
    for (const list of document.querySelectorAll('[data-state=sort]'))
      for (const option of list.options) {
        list.value = option.value;
        list.dispatchEvent(new Event('change'));
      }
"""
OPEN_ALL = """
    for (const grid of document.querySelectorAll('[data-grid]')) {
      grid.focus();
      for (const key of ['ArrowRight', 'Enter', 'Escape'])
        grid.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
    }
"""
COUNT = """
    const elements = document.querySelectorAll('[onerror], [onload], img[src=x],'
      + ' script:not([src]):not([src=""])');
    return [document.title === 'pwned', elements.length];
"""


def test_a_run_whose_every_string_is_markup_runs_no_script(
    browser: Any, evil: Path
) -> None:
    """On every page of a report, in one file, and in a diff there is no script, no
    dialog, and no element of it, whatever is clicked."""
    from selenium.common.exceptions import NoAlertPresentException

    paths = sorted((evil / "report").glob("*.html"))
    paths += [evil / "report.html", evil / "diff.html"]
    assert len(paths) == 1 + 2 + 2 + 3
    browser.get_log("browser")
    for path in paths:
        browser.get(path.as_uri())
        body = browser.find_element("css selector", "body")
        assert "</script><script>" in body.text, path
        browser.execute_script(SORT_BY_ALL)
        browser.execute_script(OPEN_ALL)
        own_scripts = {"report.html": 5}.get(path.name, 0)
        assert browser.execute_script(COUNT) == [False, own_scripts], path
        with pytest.raises(NoAlertPresentException):
            _ = browser.switch_to.alert.text
    assert [m for m in browser.get_log("browser") if "favicon" not in str(m)] == []
