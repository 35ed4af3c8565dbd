"""Audits: on the pages of a run, and as a page of their own."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from PIL import Image
from rundirs import Drawn, write_run

from featviz.errors import StoreError, UsageError
from featviz.report import ReportOptions, build_report
from featviz.rundir.ownership import of_audit

from .browsing import Page
from .markup import EVIL, Markup, read

CLI = Callable[..., Outcome]


def write_audit(root: Path, **changed: Any) -> Path:
    """A folder as `featviz audit` writes it: of two layers one has suspects, channels 4 and 1."""
    (root / "suspects").mkdir(parents=True)
    Image.effect_noise((300, 42 + 2 * 112), 90).save(root / "suspects" / "relu.png")
    drawn = {
        "layer": "relu", "shown": "conv1", "channels": [4, 1], "suspects": 3,
        "file": "suspects/relu.png", "rows": [42, 112],
    }  # fmt: skip
    row = {"type": "ReLU", "channels": 6, "call": 0}
    found = {"dead": [1, 4], "constant": [5]}
    layers = [
        {**row, "layer": "relu", "label": "relu", "findings": found, "apoz": 0.375},
        {**row, "layer": EVIL, "label": EVIL, "findings": {"dead": []}, "apoz": None},
    ]
    content = {
        "schema_version": 1, "featviz": "0.1.0", "torch": "2.15.0", "device": "cpu",
        "model": {"file": "net.pth", "sha256": "f" * 64}, "preprocessing": "RGB, as it is",
        "options": {"eps": 0.5, "layers": None}, "images": {"total": 9, "seen": 9},
        "layers": layers, "total": {}, "drawn": [{**drawn, **changed}],
    }  # fmt: skip
    (root / "audit.json").write_text(json.dumps(content))
    return root


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    """An audit of two layers."""
    return write_audit(tmp_path / "audit")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of the same model."""
    drawn = [Drawn("conv1", index=1, type="Conv2d"), Drawn("relu", index=2)]
    return write_run(tmp_path / "out", {"a.png": drawn})


def pictures(page: Markup) -> list[dict[str, str | None]]:
    """The pictures of suspects on a page."""
    return [i for i in page.of("img") if str(i["alt"]).startswith("Suspects of")]


def test_an_audit_alone_is_a_page(audit: Path, featviz: CLI) -> None:
    """Its counts, a row for each layer, and the pictures of suspects, of their own size."""
    done = featviz("report", audit, "--json")
    assert done.code == 0 and json.loads(done.out)["page"] == str(audit / "report" / "index.html")
    page = read(audit / "report" / "index.html")
    text = " ".join(page.text.split())
    assert "net.pth 9 images · input: RGB, as it is 2 dead 1 constant" in text
    flat = "".join(page.text.split())
    assert "reluReLU637.5%2dead1,41constant5" in flat
    assert f"{EVIL}ReLU6––" in flat
    assert "2 of 3 channels with a finding; the maps are those of conv1, which come to relu" in text
    assert "Optionseps 0.5" in text and "f" * 64 in text
    (image,) = pictures(page)
    where = (audit / "report" / str(image["src"])).resolve()
    assert where == (audit / "suspects" / "relu.png").resolve()
    assert (image["width"], image["height"]) == ("300", "266")
    anchors = {a["href"] for a in page.of("a")} & {"#audited-000", "#audited-001"}
    assert anchors == {"#audited-000"}
    assert "audited-000" in {section.get("id") for section in page.of("section")}


def test_one_file_and_a_zip_file_of_an_audit(audit: Path, tmp_path: Path) -> None:
    """Each holds the picture; one file that is too large is refused with the way out."""
    out = tmp_path / "audit.html"
    build_report(audit, ReportOptions(single_file=True, out=out))
    (image,) = pictures(read(out))
    assert str(image["src"]).startswith("data:image/png;base64,")
    with pytest.raises(StoreError, match=r"--max-size is 0\.01 MB"):
        build_report(audit, ReportOptions(single_file=True, max_size=10_000))
    assert not (audit / "report.html").exists()
    build_report(audit, ReportOptions(zip=True))
    with zipfile.ZipFile(audit / "report.zip") as packed:
        (image,) = pictures(Markup(packed.read("index.html").decode()))
        kept = packed.read(str(image["src"]))
    assert kept == (audit / "suspects" / "relu.png").read_bytes()


def test_an_audit_may_be_made_again_over_its_report(audit: Path) -> None:
    """What --overwrite removes: the page, one file and a zip file are featviz's own."""
    for options in (ReportOptions(), ReportOptions(single_file=True), ReportOptions(zip=True)):
        build_report(audit, options)
    claim = of_audit(audit)
    assert claim is not None and claim.strangers() == []
    (audit / "report" / "mine.txt").write_text("mine")
    assert claim.strangers() == ["report/mine.txt"]


@pytest.mark.parametrize("name", ["compare", "kernels", "exemplars", "audit"])
def test_what_goes_with_a_run_goes_with_no_audit(audit: Path, name: str) -> None:
    """The option is named, with the way to show both."""
    with pytest.raises(UsageError, match=f"--{name} goes with a run") as caught:
        build_report(audit, ReportOptions(**{name: audit}))  # type: ignore[arg-type]
    assert f"--audit {audit}" in str(caught.value.hint)


def test_audits_of_several_models(tmp_path: Path) -> None:
    """Each has a folder, one of which is to be given."""
    write_audit(tmp_path / "all" / "00_a")
    (tmp_path / "all" / "models.json").write_text('{"schema_version": 1, "models": []}')
    with pytest.raises(StoreError, match="the audits of several models") as caught:
        build_report(tmp_path / "all", ReportOptions())
    assert "00_a" in str(caught.value.hint)
    build_report(tmp_path / "all" / "00_a", ReportOptions())


@pytest.mark.parametrize("file", ["../secret.png", "/etc/x.png", "suspects/../x.png", "x.png"])
def test_a_picture_of_suspects_is_where_audits_put_it(tmp_path: Path, file: str) -> None:
    """No other file is opened, whatever audit.json names."""
    audit = write_audit(tmp_path / "audit", file=file)
    with pytest.raises(StoreError, match=r"drawn\[0\]\.file"):
        build_report(audit, ReportOptions())
    assert not (audit / "report").exists()


def test_a_picture_of_suspects_that_is_no_png_or_missing(audit: Path, run: Path) -> None:
    """What is no picture is refused; what is missing is not shown, as of an audit.json alone."""
    path = audit / "suspects" / "relu.png"
    path.write_bytes(b"GIF89a")
    with pytest.raises(StoreError, match="is no PNG"):
        build_report(audit, ReportOptions())
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(StoreError):
        build_report(audit, ReportOptions())
    path.unlink()
    build_report(audit, ReportOptions())
    build_report(run, ReportOptions(audit=audit))
    for page in (audit / "report" / "index.html", run / "report" / "layer-001.html"):
        assert pictures(read(page)) == [] and "2 dead" in read(page).text


def test_a_run_shows_an_audits_findings_and_suspects(run: Path, audit: Path) -> None:
    """Badges in the network, and the picture on the page of the layer only, in every form."""
    build_report(run, ReportOptions(audit=audit))
    report = run / "report"
    index = " ".join(read(report / "index.html").text.split())
    assert index.count("2 dead (audit) 1 constant (audit)") == 1 and "2 dead 1, 4" in index
    (image,) = pictures(read(report / "layer-001.html"))
    assert (report / str(image["src"])).resolve() == (audit / "suspects" / "relu.png").resolve()
    assert pictures(read(report / "layer-000.html")) == []
    out = run.parent / "one.html"
    build_report(run, ReportOptions(audit=audit, single_file=True, out=out))
    (image,) = pictures(read(out))
    assert str(image["src"]).startswith("data:image/png;base64,")


@pytest.mark.slow
@pytest.mark.parametrize(("channel", "box"), [(4, "0 42 300 112"), (1, "0 154 300 112"), (0, "")])
def test_the_page_of_a_channel_has_its_row(
    browser: Any, run: Path, audit: Path, channel: int, box: str
) -> None:
    """The row of the suspects' picture that is the channel's; none for other channels."""
    build_report(run, ReportOptions(audit=audit))
    page = Page(browser, run).open(f"layer-001.html#c{channel}")
    boxes = [e.get_dom_attribute("viewBox") for e in page.all(".channel .sought svg")]
    assert boxes == ([box] if box else [])


def test_an_audit_outranks_the_run_at_the_head(tmp_path: Path, audit: Path) -> None:
    """The head has its count; what it found behind a layer that was not drawn stands at the layer
    whose maps come to it, with a link and a badge."""
    root = write_run(tmp_path / "conv", {"a.png": [Drawn("conv1", type="Conv2d")]})
    build_report(root, ReportOptions(audit=audit))
    index = read(root / "report" / "index.html")
    text = " ".join(index.text.split())
    assert "Dead channels: 2 in 1 layer, by the audit of 9 images" in text
    assert "conv1 Conv2d 6 × 4×5 2 dead (audit) 1 constant (audit)" in text
    assert "#audit" in {a["href"] for a in index.of("a")}
    row = (root / "report" / "index.html").read_text().split('aria-labelledby="audit"')[1]
    assert '<a href="layer-000.html"><code>relu</code></a>' in row
    assert len(pictures(read(root / "report" / "layer-000.html"))) == 1
