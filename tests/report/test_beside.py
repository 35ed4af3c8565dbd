"""What is shown beside a run is of its model: audits, kernels, exemplars; and an audit
alone."""

from __future__ import annotations

import json
import logging
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from rundirs import Drawn, write_run

from featviz.errors import CompareError, StoreError, UsageError
from featviz.options.commands import ReportOptions
from featviz.report import build_report

from .browsing import Page
from .markup import CHANNEL, EVIL, Markup, read, write_audit, write_exemplars

OWN = {"kind": "file", "file": "tuned.pth", "sha256": "c" * 64}


def of_model(root: Path, file: str, model: Any) -> Path:
    """Write another model into a record."""
    path = root / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    return root


def shown(tmp_path: Path, run: Any, other: Any) -> Path:
    """The report of a run of one model with exemplars of another."""
    drawn = Drawn("conv1", type="Conv2d", maps=2)
    root = write_run(tmp_path / "out", {"a.png": [drawn]}, model=run)
    found = of_model(write_exemplars(tmp_path / "found"), "exemplars.json", other)
    build_report(root, ReportOptions(exemplars=found))
    return root / "report" / "index.html"


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    """Both files and the digits of both digests, and the command that makes the right
    one."""
    other = {"kind": "file", "file": "digits.pth", "sha256": "d" * 64}
    with pytest.raises(
        CompareError, match=r"digits\.pth \(sha256 d{12}\) there, tuned"
    ) as caught:
        shown(tmp_path, OWN, other)
    assert (
        f"--exemplars {tmp_path / 'found'} is of another model" in caught.value.message
    )
    assert "featviz exemplars tuned.pth" in str(caught.value.hint)
    assert not (tmp_path / "out" / "report").exists()


SEEDED = {"name": "resnet18", "seed": 0}


@pytest.mark.parametrize(
    ("run", "other", "same"),
    [
        ({"sha256": "a", "parameters": "p"}, {"sha256": "b", "parameters": "p"}, True),
        (SEEDED, SEEDED, True),
        (SEEDED, {"name": "resnet18", "seed": 1}, False),
    ],
)
def test_models_are_told_apart(
    tmp_path: Path, run: Any, other: Any, same: bool, caplog: Any
) -> None:
    """By the digest of the parameters or of the file, whatever they are called, without
    a warning; without digests, as torchvision's own with random weights, by name,
    weights and seed."""
    expected = (
        nullcontext() if same else pytest.raises(CompareError, match="another model")
    )
    with caplog.at_level(logging.WARNING), expected:
        assert shown(tmp_path, run, other).exists()
    assert caplog.messages == []


def test_what_does_not_tell_its_model_is_shown_with_a_warning(
    tmp_path: Path, caplog: Any
) -> None:
    """Where one of the two has no digest."""
    assert shown(tmp_path, OWN, {}).exists()
    assert "whether it is of the run's model is not known" in caplog.text


def compared(featviz: Any, tmp_path: Path, **second: Any) -> tuple[str, Markup]:
    """The address and the first page of a report beside another run, of which `b` has
    changed."""
    changed = np.tile(np.float32([-3, 7, 0.5, 1, 0, 0]), (6, 1))
    other = [Drawn("a", index=0), Drawn("b", index=1), Drawn("c", index=2)]
    mine = [other[0], Drawn("b", index=1, stats=changed), other[2]]
    base = write_run(tmp_path / "base", {"a.png": other})
    root = write_run(tmp_path / "new", {"a.png": mine}, **second)
    assert featviz("report", root, "--compare", base).code == 0
    return str(base), read(root / "report" / "index.html")


def test_a_compared_run_has_its_verdict_at_the_head(
    featviz: Any, tmp_path: Path
) -> None:
    """Diff's own words, and a link to the first layer that diverges."""
    base, page = compared(featviz, tmp_path)
    words = page.words
    verdict = featviz("diff", base, tmp_path / "new").out.splitlines()[-1]
    assert (
        f"Different {verdict.removeprefix('different: ')} First layer to diverge: b"
        in words
    )
    assert words.index("Different") < words.index("Feature maps of")
    assert [
        a["class"] for a in page.of("section") if a.get("aria-label") == "Verdict"
    ] == ["verdict apart"]
    text = (tmp_path / "new" / "report" / "index.html").read_text()
    assert (
        '<a href="layer-001.html"><code>b</code></a>'
        in text.split("First layer")[1][:80]
    )


def test_runs_that_cannot_be_compared_say_why(featviz: Any, tmp_path: Path) -> None:
    """The pictures stand beside one another all the same."""
    options = {"layers": None, "normalize": "layer", "cmap": "grey", "nrow": None}
    _, page = compared(featviz, tmp_path, options=options)
    assert "Not compared these runs cannot be compared: the scale mode is" in page.words


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A run of one layer of two channels."""
    drawn = Drawn("conv1", index=1, type="Conv2d", maps=2)
    return write_run(tmp_path / "out", {"a.png": [drawn]})


def test_the_page_of_a_layer_has_its_exemplars(two: Path, tmp_path: Path) -> None:
    """The sheet as a picture, the pictures of channels for the script, and what a unit
    sees."""
    exemplars = write_exemplars(tmp_path / "found")
    build_report(two, ReportOptions(exemplars=exemplars))
    page = read(two / "report" / "layer-000.html")
    assert "the largest value over 4 images; a unit sees 3×5 pixels" in page.text
    extra = json.loads(
        next(str(a["data-extra"]) for a in page.of("details") if "data-extra" in a)
    )
    assert list(extra) == ["0"]
    assert (
        two / "report" / extra["0"]["src"]
    ).resolve() == exemplars / "001_conv1/output/c00000.png"
    assert (extra["0"]["width"], extra["0"]["height"]) == (70, 40)
    assert extra["0"]["alt"].endswith(f"{EVIL} 2.5")
    sheets = [a for a in page.of("img") if "Exemplars of all channels" in str(a["alt"])]
    assert [(a["width"], a["height"]) for a in sheets] == [("50", "30")]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer": "elsewhere"}, "has exemplars of no layer of this run"),
        (
            {"channels": [{**CHANNEL, "file": "../../secret.png"}]},
            "it lies outside its folder",
        ),
    ],
)
def test_exemplars_that_do_not_fit(
    two: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    """Each is refused in a line of its own, before anything is written."""
    found = write_exemplars(tmp_path / "found", **changed)
    with pytest.raises(StoreError, match=message):
        build_report(two, ReportOptions(exemplars=found))
    assert not (two / "report").exists()


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


def test_an_audit_alone_is_a_page(audit: Path, featviz: Run) -> None:
    """Its counts, a row for each layer, and the pictures of suspects, of their own
    size."""
    done = featviz("report", audit, "--json")
    assert done.code == 0
    assert json.loads(done.out)["page"] == str(audit / "report" / "index.html")
    page = read(audit / "report" / "index.html")
    text = page.words
    assert "net.pth 9 images · input: RGB, as it is 2 dead 1 constant" in text
    flat = "".join(page.text.split())
    assert "reluReLU637.5%2dead1,41constant5" in flat
    assert f"{EVIL}ReLU6––" in flat
    assert "2 of 3 channels with a finding; maps of conv1, the input of relu" in text
    assert "Optionseps 0.5" in text
    assert "f" * 64 in text
    (image,) = pictures(page)
    where = (audit / "report" / str(image["src"])).resolve()
    assert where == (audit / "suspects" / "relu.png").resolve()
    assert (image["width"], image["height"]) == ("300", "266")
    anchors = {a["href"] for a in page.of("a")} & {"#audited-000", "#audited-001"}
    assert anchors == {"#audited-000"}
    assert "audited-000" in {section.get("id") for section in page.of("section")}


def test_what_goes_with_a_run_goes_with_nothing_else(
    audit: Path, tmp_path: Path
) -> None:
    """The option is named, before anything is written: with an audit, and with a
    series."""
    write_run(tmp_path / "steps" / "step-000100", {"a.png": [Drawn("relu")]})
    for root, name in ((audit, "compare"), (tmp_path / "steps", "audit")):
        with pytest.raises(
            UsageError, match=f"--{name} goes with a run, and {root} holds"
        ):
            build_report(root, ReportOptions(**{name: audit}))  # type: ignore[arg-type]
        assert not (root / "report").exists()


def test_a_picture_of_suspects_is_where_audits_put_it(tmp_path: Path) -> None:
    """No other file is opened, whatever audit.json names."""
    audit = write_audit(tmp_path / "audit", file="../secret.png")
    with pytest.raises(StoreError, match="it lies outside its folder"):
        build_report(audit, ReportOptions())
    assert not (audit / "report").exists()


def test_a_picture_of_suspects_that_is_missing_is_not_shown(
    audit: Path, run: Path
) -> None:
    """As of an audit.json alone; what is no picture is refused."""
    path = audit / "suspects" / "relu.png"
    path.write_bytes(b"GIF89a")
    with pytest.raises(StoreError, match="is no PNG"):
        build_report(audit, ReportOptions())
    path.unlink()
    build_report(run, ReportOptions(audit=audit))
    page = read(run / "report" / "layer-001.html")
    assert pictures(page) == []
    assert "2 dead" in page.text


def test_a_run_shows_an_audits_findings_and_suspects(run: Path, audit: Path) -> None:
    """Badges in the network, and the picture on the page of the layer only, in every
    form."""
    build_report(run, ReportOptions(audit=audit))
    report = run / "report"
    index = read(report / "index.html").words
    assert index.count("2 dead (audit) 1 constant (audit)") == 1
    assert "2 dead 1, 4" in index
    layer = read(report / "layer-001.html")
    (image,) = pictures(layer)
    (rows,) = (
        json.loads(str(a["data-extra"]))
        for a in layer.of("details")
        if "data-extra" in a
    )
    assert rows == {"4": [0, 42, 300, 112], "1": [0, 154, 300, 112]}
    assert (report / str(image["src"])).resolve() == (
        audit / "suspects" / "relu.png"
    ).resolve()
    assert pictures(read(report / "layer-000.html")) == []
    out = run.parent / "one.html"
    build_report(run, ReportOptions(audit=audit, single_file=True, out=out))
    (image,) = pictures(read(out))
    assert str(image["src"]).startswith("data:image/png;base64,")


@pytest.mark.slow
def test_the_page_of_a_channel_has_its_row(
    browser: Any, run: Path, audit: Path
) -> None:
    """The row of the suspects' picture that is the channel's; none for other channels."""
    build_report(run, ReportOptions(audit=audit))
    for channel, boxes in ((1, ["0 154 300 112"]), (0, [])):
        page = Page(browser, run).open(f"layer-001.html#c{channel}")
        found = page.all(".channel .sought svg")
        assert [one.get_dom_attribute("viewBox") for one in found] == boxes


def test_an_audit_outranks_the_run_at_the_head(tmp_path: Path, audit: Path) -> None:
    """The head has its count; what it found behind a layer that was not drawn stands at
    the layer whose maps come to it, with a link and a badge."""
    root = write_run(tmp_path / "conv", {"a.png": [Drawn("conv1", type="Conv2d")]})
    build_report(root, ReportOptions(audit=audit))
    index = read(root / "report" / "index.html")
    text = index.words
    assert "Dead channels: 2 in 1 layer, by the audit of 9 images" in text
    assert re.search(
        r"conv1 Conv2d 6 × 4×5 .{0,50} 2 dead \(audit\) 1 constant \(audit\)", text
    )
    assert "#audit" in {a["href"] for a in index.of("a")}
    row = (
        (root / "report" / "index.html").read_text().split('aria-labelledby="audit"')[1]
    )
    assert '<a href="layer-000.html"><code>relu</code></a>' in row
    assert len(pictures(read(root / "report" / "layer-000.html"))) == 1
