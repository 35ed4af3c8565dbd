"""The report that the documentation's site offers for a try."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from documents import read


@pytest.mark.slow
def test_the_site_has_a_report_to_try(tmp_path: Path) -> None:
    """The page that docs/places.md links answers for nine images and four blocks, and
    all of it takes less than 3 MB."""
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    site = SimpleNamespace(outdir=tmp_path, builder=SimpleNamespace(format="html"))

    conf.make_report(site, None)

    page, layer = re.findall(r"\]\(site:(.*)#(.*)@.*\)", read("places"))[0]
    assert (tmp_path / page).is_file()
    report = tmp_path / "try" / "report"
    index = (report / "places-index.js").read_text()
    places = json.loads(index.partition("=")[2].rstrip(";\n"))
    assert len(places["images"]) == 9
    answering = [layer for layer in places["layers"] if not layer["reason"]]
    assert len(answering) == 4
    assert layer in [entry["name"] for entry in answering]
    assert len(list(report.glob("places-0*.js"))) == 9
    files = [path for path in (tmp_path / "try").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
