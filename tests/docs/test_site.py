"""The report that the documentation's site offers for a try."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from documents import read
from runs import tree


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder, with the report as Sphinx makes it of docs/conf.py."""
    folder = tmp_path_factory.mktemp("site")
    configuration = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    builder = SimpleNamespace(format="html")
    configuration["make_report"](SimpleNamespace(outdir=folder, builder=builder), None)
    return folder


LINK = re.compile(r"\]\(site:(?P<page>.*)#(?P<layer>.*)@.*\)")
"""The link of docs/places.md to a layer in the report's page."""


@pytest.mark.slow
def test_the_site_has_a_report_to_try(site: Path) -> None:
    """docs/places.md links it, and all of it takes less than 3 MB."""
    link = LINK.search(read("places"))
    assert link
    assert (site / link["page"]).is_file()
    assert sum(map(len, tree(site).values())) < 3_000_000


@pytest.mark.slow
def test_the_report_of_the_site_answers(site: Path) -> None:
    """It has an answer for nine images and four layers, of which one is linked."""
    report = site / "try" / "report"
    index = (report / "places-index.js").read_text()
    answers = json.loads(index.partition("=")[2].rstrip(";\n"))
    assert len(answers["images"]) == 9
    assert len(list(report.glob("places-0*.js"))) == 9
    layers = [layer["name"] for layer in answers["layers"] if not layer["reason"]]
    assert len(layers) == 4
    assert LINK.search(read("places"))["layer"] in layers
