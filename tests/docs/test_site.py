"""The documentation's site: the report that it offers for a try, and how it shows
--help."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from runs import tree

CONF = ROOT / "docs" / "conf.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder, with the report as Sphinx makes it of docs/conf.py."""
    folder = tmp_path_factory.mktemp("site")
    configuration = runpy.run_path(str(CONF))
    builder = SimpleNamespace(format="html")
    configuration["make_report"](SimpleNamespace(outdir=folder, builder=builder), None)
    return folder


LINK = re.compile(r'^TRY = "(?P<page>.*)#(?P<layer>.*)@.*"$', re.MULTILINE)
"""The link of docs/conf.py to a layer in the report's page."""


def link() -> re.Match[str]:
    """The link above each page of the site."""
    match = LINK.search(CONF.read_text())
    assert match
    return match


@pytest.mark.slow
def test_the_site_has_a_report_to_try(site: Path) -> None:
    """Each page links it, and all of it takes less than 3 MB."""
    assert (site / link()["page"]).is_file()
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
    assert link()["layer"] in layers


HELP = """\
Layers of 'conv*', as of |a - b|.

| Examples:
|   featviz diff a b --json | jq .x
|   featviz diff a b --layers '*'

| absolute   the largest |a - b|
"""
"""As sphinx-click writes it: bars lead the lines that --help does not wrap."""


def test_the_site_keeps_the_lines_of_examples() -> None:
    """Examples and tables of --help are blocks of code, line for line, and the stars and
    bars of all its words are shown as they are."""
    core = pytest.importorskip("docutils.core")
    nodes = pytest.importorskip("docutils.nodes")
    lines = HELP.splitlines()

    runpy.run_path(str(CONF))["escape"](None, None, lines)

    page = core.publish_doctree("\n".join(lines))
    assert [node.astext() for node in page.findall(nodes.literal_block)] == [
        "Examples:\n  featviz diff a b --json | jq .x\n  featviz diff a b --layers '*'",
        "absolute   the largest |a - b|",
    ]
    assert [node.astext() for node in page.findall(nodes.paragraph)] == [
        "Layers of 'conv*', as of |a - b|."
    ]
