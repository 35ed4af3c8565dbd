"""No violation that axe-core finds, on every kind of page, light and dark, wide and
narrow.

axe-core (https://github.com/dequelabs/axe-core, MPL 2.0) is not part of the repository:
`npm install --no-save axe-core` puts it where these tests look.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rundirs import Drawn, write_run

import featviz as fv
from featviz.options.commands import ReportOptions
from featviz.report import build_report

from .browsing import DARK, STATS
from .markup import write_audit, write_exemplars

pytestmark = pytest.mark.slow
AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
PAGES = (
    "run/report/index.html",
    "run/report/image-000.html",
    "run/report/layer-000.html#c1",
    "run/report/layer-002.html",
    "compared/index.html",
    "compared/comparison.html",
    "compared/layer-000.html",
    "audit/report/index.html",
    "kernels/report/index.html",
    "series/report/index.html",
    "one.html",
    "diff.html",
)
RUN = (
    "const done = arguments[arguments.length - 1];axe.run(document, {resultTypes:"
    " ['violations']}).then(({violations}) => done(violations.map((v) => `${v.id}:"
    " ${v.nodes.map((n) => n.target.join(' ')).join(', ')}`)),(error) =>"
    " done([String(error)]));"
)


STRIP: dict[str, Any] = {"nrow": 10, "padding": 0, "tile": (12, 12), "scale": 12}
VECTOR = np.zeros((10, 6), np.float32)
VECTOR[:, 2] = np.arange(10)
CONV = Drawn("conv1", index=1, type="Conv2d", stats=STATS, tile=(60, 70), scale=10)
DRAWN = [
    CONV,
    replace(CONV, kind="grad", tile=(8, 10), scale=2),
    Drawn("clip", index=2, type="Conv3d", maps=3, nrow=4, slices=(2, 2)),
    Drawn("relu", index=3, stats=DARK, tile=(60, 70), scale=10),
    Drawn("fc", 10, 4, "Linear", stats=VECTOR, more={"layout": "vector"}, **STRIP),
]
"""Captures of every kind."""


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of page: of a run with all that is shown beside it, of
    two runs, of an audit, of kernels, of a series, in one file, and of a difference."""
    top = tmp_path_factory.mktemp("pages")
    names = ["a.png", "b.png", "c.png"]
    failures = {"bad.jpg": "it is truncated"}
    run = write_run(top / "run", dict.fromkeys(names, DRAWN), failures)
    shifted = [replace(CONV, stats=STATS + 1)]
    other_run = write_run(top / "other", dict.fromkeys(names, shifted))
    audit = write_audit(top / "audit")
    studies = {"audit": audit, "exemplars": write_exemplars(top / "exemplars")}
    build_report(run, ReportOptions(**studies))
    build_report(run, ReportOptions(**studies, single_file=True, out=top / "one.html"))
    build_report(run, ReportOptions(compare=other_run, out=top / "compared"))
    build_report(audit, ReportOptions())
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5), torch.nn.Conv2d(4, 9, 3))
    fv.kernels(net, out=top / "kernels")
    build_report(top / "kernels", ReportOptions())
    for step in (0, 100):
        write_audit(write_run(top / f"series/step-{step:06d}", {"a.png": DRAWN}))
    build_report(top / "series", ReportOptions())
    fv.diff(run, other_run, html=top / "diff.html")
    return top


@pytest.fixture(scope="module")
def axe(browser: Any) -> Iterator[Any]:
    """The browser, with axe-core's text; the window is as it was afterwards."""
    if not AXE.is_file():
        pytest.skip("no axe-core here: npm install --no-save axe-core")
    browser.axe = AXE.read_text("utf-8")
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def check(axe: Any) -> list[str]:
    """What axe-core finds on the page that is open."""
    if axe.execute_script("return typeof axe === 'undefined'"):
        axe.execute_script(axe.axe)
    violations: list[str] = axe.execute_async_script(RUN)
    return violations


def prefer(axe: Any, scheme: str) -> None:
    """Look at pages as somebody does who prefers light or dark."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    axe.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def widen(axe: Any, width: int) -> None:
    """Look through a window of this width."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    axe.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing(axe: Any, every_kind: Path, page: str) -> None:
    """It looks at names, roles, contrast and order, in a wide window that is light, and
    in a narrow one that is dark."""
    axe.get("about:blank")
    axe.get(f"{every_kind.as_uri()}/{page}")
    for width, scheme in ((1400, "light"), (390, "dark")):
        widen(axe, width)
        prefer(axe, scheme)
        is_dark = "return matchMedia('(prefers-color-scheme: dark)').matches"
        assert axe.execute_script(is_dark) == (scheme == "dark")
        assert check(axe) == [], scheme


@pytest.mark.parametrize(
    "code", ["viewer.open([...frames.values()][0], 0)", "help.open()"]
)
def test_axe_finds_nothing_in_what_floats(
    axe: Any, every_kind: Path, code: str
) -> None:
    """The enlarged tile and the keys are looked at on the page of a layer, light and
    dark."""
    axe.get(f"{every_kind.as_uri()}/run/report/layer-000.html")
    axe.execute_script(code)
    dialogs = "return document.querySelectorAll('dialog[open]').length"
    assert axe.execute_script(dialogs) == 1
    for scheme in ("light", "dark"):
        prefer(axe, scheme)
        assert check(axe) == [], scheme


def test_axe_finds_a_planted_fault(axe: Any, every_kind: Path) -> None:
    """A picture without a text is found: the tests above can fail."""
    axe.get(f"{every_kind.as_uri()}/audit/report/index.html")
    axe.execute_script("document.querySelector('main').append(new Image(20, 20))")
    assert "image-alt: " in "\n".join(check(axe))
