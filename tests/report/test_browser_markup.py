"""Markup in every string of a report and of a comparison, shown by Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rundirs import Drawn, summed_anew, write_run

from featviz.options import ReportOptions
from featviz.report import build_report

pytestmark = pytest.mark.slow
EVIL = (
    "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    "'\"><svg onload=\"document.title='pwned'\">{{7*7}}\u2028\u2029javascript:alert(1)//`${1}`"
)
"""Markup and script for whatever place it is put into."""


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of runs and an audit whose every string is markup."""
    import json

    from featviz.diff import Outputs, diff
    from featviz.options import DiffThresholds
    from featviz.report import compare

    more = {"layout": EVIL, "collapsed": {"0": [0, 1]}, "shape": [1, 6, 4, 5]}
    drawn = [
        Drawn(EVIL, index=1, type=EVIL, key=EVIL, more={**more, "file": "a b&c<d>.png"}),
        Drawn(f"{EVIL}2", index=2, type=EVIL, more={"normalize": EVIL, "file": "x'\"y.png"}),
    ]
    strings = {"model": {"name": EVIL, EVIL: [EVIL, {EVIL: EVIL}]}, "preprocessing": EVIL}
    strings |= {"device": EVIL, "featviz": EVIL, "layers": [EVIL]}  # type: ignore[dict-item]
    options = {"cmap": EVIL, "pick": EVIL, "order": EVIL, EVIL: {EVIL: EVIL}}
    folder = tmp_path_factory.mktemp("evil")
    names = {EVIL: drawn, f"{EVIL}2.png": drawn}
    for shade, out in enumerate(("one", "two")):
        root = write_run(folder / out, names, {f"{EVIL}3": EVIL}, options=options, **strings)
        for path in root.rglob("manifest.json"):
            content = json.loads(path.read_text())
            content["input"]["preprocessing"] = EVIL
            content["image"]["files"] = [EVIL]
            content["prediction"] = [{"index": 1, "name": EVIL, "score": 1, "probability": 0.5}]
            content["target"] = {"of": EVIL, "value": 1, "grad_rule": EVIL}
            content["interventions"] = [{"kind": EVIL, "what": EVIL}]
            skip = {"index": 3, "kind": EVIL, "call": 0, "key": EVIL, "reason": EVIL}
            content["skipped"] = [{"layer": f"{EVIL}4", "type": EVIL, **skip}]
            content["never_ran"] = [f"{EVIL}5"]
            for row, name in zip(content["captures"], ("a b&c<d>.png", "x'\"y.png"), strict=True):
                drawn_at = next(path.parent.glob(f"00{row['index']}_*")) / "x"
                real = next(drawn_at.parent.glob("*.png"))
                real.rename(path.parent / name)
                if out == "two" and row["index"] == 2:
                    row["mean"] = 3.0
            path.write_text(json.dumps(content))
        with np.load(next(root.rglob("stats.npz"))) as held:
            changed = {key: held[key] + shade for key in held.files}
        np.savez(next(root.rglob("stats.npz")), **changed)
        for path in root.rglob("manifest.json"):
            summed_anew(path.parent)
    finding = {"label": EVIL, "layer": EVIL, "type": EVIL, "channels": 6, "findings": {EVIL: [1]}}
    audit = {"images": {"seen": 1}, "layers": [finding]}
    (folder / "one" / "audit.json").write_text(json.dumps(audit))
    (folder / "one" / EVIL.replace("/", "")).mkdir()
    (folder / "one" / EVIL.replace("/", "") / "manifest.json").write_text(EVIL)
    build_report(folder / "one", ReportOptions(compare=folder / "two"))
    build_report(folder / "one", ReportOptions(single_file=True))
    outputs = Outputs(html=folder / "one" / "diff.html", render=compare.render)
    diff(folder / "one", folder / "two", DiffThresholds(), outputs)
    return folder / "one"


def test_a_run_whose_every_string_is_markup_runs_no_script(browser: Any, evil: Path) -> None:
    """On every page of a report, in one file, and in a diff: no script, no dialog, no element."""
    from selenium.common.exceptions import NoAlertPresentException

    pages = [*sorted((evil / "report").glob("*.html")), evil / "report.html", evil / "diff.html"]
    assert len(pages) == 1 + 2 + 2 + 2
    browser.get_log("browser")
    for path in pages:
        browser.get(path.as_uri())
        text = browser.find_element("css selector", "body").text
        assert "</script><script>" in text, path
        for control in browser.find_elements("css selector", "[data-state=sort]"):
            browser.execute_script(
                "for (const o of arguments[0].options) { arguments[0].value = o.value;"
                "arguments[0].dispatchEvent(new Event('change')); }", control)  # fmt: skip
        for frame in browser.find_elements("css selector", "[data-grid]"):
            browser.execute_script("arguments[0].focus();", frame)
            browser.execute_script(
                "for (const key of ['ArrowRight', 'Enter', 'Escape']) arguments[0].dispatchEvent("
                "new KeyboardEvent('keydown', {key, bubbles: true}))", frame)  # fmt: skip
        made = browser.execute_script(
            "return [document.title, document.querySelectorAll("
            "'[onerror], [onload], img[src=x], script:not([src]):not([src=\"\"])').length]"
        )
        inline = 5 if path.name == "report.html" else 0
        assert made[0] != "pwned" and made[1] == inline, (path, made)
        with pytest.raises(NoAlertPresentException):
            _ = browser.switch_to.alert.text
    assert [line for line in browser.get_log("browser") if "favicon" not in line["message"]] == []
