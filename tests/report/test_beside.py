"""What is shown beside a run is of its model: audits, kernels, exemplars; and an audit
alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from PIL import Image
from rundirs import Drawn, write_run

from featviz.errors import CompareError, StoreError, UsageError
from featviz.options.commands import ReportOptions
from featviz.report import build_report
from featviz.report.companions import read_companions
from featviz.report.figures import arrange
from featviz.rundir.read import read_run

from .browsing import Page
from .markup import (
    CHANNEL,
    EVIL,
    Markup,
    assert_says,
    page_of,
    read,
    source,
    write_audit,
    write_exemplars,
)

Model = dict[str, Any]
"""What a record says of a model."""
TUNED = {"kind": "file", "file": "tuned.pth", "sha256": "c" * 64}
SEEDED = {"name": "resnet18", "seed": 0}


def with_exemplars(tmp_path: Path, run_model: Model, exemplars_model: Model) -> Path:
    """The report of a run of one model with exemplars of another."""
    drawn = Drawn("conv1", type="Conv2d", maps=2)
    root = write_run(tmp_path / "out", {"a.png": [drawn]}, model=run_model)
    exemplars = write_exemplars(tmp_path / "best", record={"model": exemplars_model})
    build_report(root, ReportOptions(exemplars=exemplars))
    return root / "report" / "index.html"


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    """The message has both files and the digits of both digests; the hint has the
    command that makes the right one."""
    digits = {"kind": "file", "file": "digits.pth", "sha256": "d" * 64}
    differs = r"digits\.pth \(sha256 d{12}\) there, tuned"
    with pytest.raises(CompareError, match=differs) as caught:
        with_exemplars(tmp_path, TUNED, digits)
    option = f"--exemplars {tmp_path / 'best'}"
    assert f"{option} is of another model" in caught.value.message
    assert "featviz exemplars tuned.pth" in str(caught.value.hint)
    assert not (tmp_path / "out" / "report").exists()


def test_models_of_one_name_are_told_apart_by_their_seed(tmp_path: Path) -> None:
    """torchvision's own with random weights have no digest."""
    with pytest.raises(CompareError, match="another model"):
        with_exemplars(tmp_path, SEEDED, {**SEEDED, "seed": 1})


@pytest.mark.medium
@pytest.mark.parametrize(
    ("run_model", "exemplars_model"),
    [
        ({"sha256": "a", "parameters": "p"}, {"sha256": "b", "parameters": "p"}),
        (SEEDED, SEEDED),
    ],
)
def test_a_model_is_known_again(
    tmp_path: Path,
    run_model: Model,
    exemplars_model: Model,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its parameters count before its file; without digests its name, weights and seed
    do. Nothing is warned of."""
    assert with_exemplars(tmp_path, run_model, exemplars_model).exists()
    assert caplog.messages == []


def test_what_does_not_tell_its_model_is_shown_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two records one has no digest."""
    assert with_exemplars(tmp_path, TUNED, {}).exists()
    assert "whether it is of the run's model is not known" in caplog.text


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A run of three layers."""
    drawn = [Drawn(name, index=index) for index, name in enumerate("abc")]
    return write_run(tmp_path / "base", {"a.png": drawn})


def write_changed(base: Path, **record: Any) -> Path:
    """A run beside it, whose layer `b` has other numbers."""
    stats = np.tile(np.float32([-3, 7, 0.5, 1, 0, 0]), (6, 1))
    drawn = [Drawn("a", index=0), Drawn("b", index=1, stats=stats), Drawn("c", index=2)]
    return write_run(base.with_name("new"), {"a.png": drawn}, **record)


@pytest.mark.medium
def test_a_compared_run_has_its_verdict_at_the_head(featviz: Run, base: Path) -> None:
    """It is the one of `diff`, with a link to the first layer that diverges."""
    root = write_changed(base)
    verdict = featviz("diff", base, root).out.splitlines()[-1]
    assert featviz("report", root, "--compare", base).code == 0
    page = page_of(root)
    difference, _ = verdict.removeprefix("different: ").split(", first at ")
    assert f"Different {difference} First layer to diverge: b" in page.text
    assert page.text.index("Different") < page.text.index("Feature maps of")
    sections = [tag["class"] for tag in page.of("section") if "aria-label" in tag]
    assert "verdict apart" in sections
    link = '<a href="layer-001.html"><code>b</code></a>'
    assert link in source(root).split("First layer")[1][:80]


@pytest.mark.medium
def test_runs_that_cannot_be_compared_say_why(featviz: Run, base: Path) -> None:
    """On the page and on stderr. The pictures stand beside one another all the same."""
    options = {"layers": None, "normalize": "layer", "cmap": "grey", "nrow": None}
    root = write_changed(base, options=options)
    outcome = featviz("report", root, "--compare", base)
    assert outcome.code == 0
    reason = "these runs cannot be compared: the scale mode is"
    assert f"Not compared {reason}" in page_of(root).text
    assert f"warning: not compared with {base}: {reason}" in outcome.err


@pytest.fixture
def two_channels(tmp_path: Path) -> Path:
    """A run of one layer of two channels."""
    drawn = Drawn("conv1", index=1, type="Conv2d", maps=2)
    return write_run(tmp_path / "out", {"a.png": [drawn]})


def extra_of(page: Markup) -> dict[str, Any]:
    """What the script of a layer's page shows of channels, by channel."""
    (text,) = page.values("details", "data-extra")
    extra: dict[str, Any] = json.loads(text)
    return extra


def test_the_page_of_a_layer_has_its_exemplars(
    two_channels: Path, tmp_path: Path
) -> None:
    """It has the sheet as a picture, and says what a unit sees."""
    exemplars = write_exemplars(tmp_path / "best")
    build_report(two_channels, ReportOptions(exemplars=exemplars))
    page = page_of(two_channels, "layer-000.html")
    assert "the largest value over 4 images; a unit sees 3×5 pixels" in page.text
    (sheet,) = page.pictures("Exemplars of all")
    assert (sheet["width"], sheet["height"]) == ("50", "30")


@pytest.mark.parametrize("how", ["unknown", "no place"])
def test_exemplars_say_nothing_of_a_field_that_was_not_computed(
    how: str, two_channels: Path, tmp_path: Path
) -> None:
    """They say by what they were ranked."""
    field = {"how": how, "size": [0, 0]}
    record = {"options": {"by": "mean", "top": 9}}
    exemplars = write_exemplars(tmp_path / "best", record=record, receptive_field=field)
    build_report(two_channels, ReportOptions(exemplars=exemplars))
    text = page_of(two_channels, "layer-000.html").text
    assert "the largest mean over 4 images" in text
    assert "a unit sees" not in text


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """As those of Monday and Tuesday, in folders of their own."""
    drawn = {"a.png": [Drawn("conv1")]}
    base = write_run(tmp_path / "monday" / "out", drawn)
    run = write_run(tmp_path / "tuesday" / "out", drawn)
    build_report(run, ReportOptions(compare=base))
    assert_says(page_of(run, "layer-000.html").text, "out (this)", "out (other)")


def test_a_comparison_tells_settings_that_one_run_lacks(tmp_path: Path) -> None:
    """With a dash, as of runs of two versions; and none that are alike."""
    drawn = {"a.png": [Drawn("conv1")]}
    same = {"layers": None, "normalize": "map", "cmap": "grey", "nrow": 8}
    base = write_run(tmp_path / "base", drawn, options={**same, "flat": True})
    run = write_run(tmp_path / "new", drawn, options={**same, "scale": 2})
    build_report(run, ReportOptions(compare=base))
    text = page_of(run, "comparison.html").text
    assert_says(text, "2 settings of the runs that differ", "flatyes–", "scale–2")
    assert "nrow" not in text


def test_the_model_itself_is_missing_by_its_class(tmp_path: Path) -> None:
    """It has no name; each reason is told once for an image."""
    root = write_run(tmp_path / "out", {"a.png": [Drawn("conv1")]})
    path = root / "a.png" / "manifest.json"
    manifest = json.loads(path.read_text())
    skip = {
        "layer": "",
        "type": "Net",
        "index": 0,
        "kind": "output",
        "call": 0,
        "key": "",
    }
    manifest["skipped"] = [{**skip, "reason": "is None"}]
    manifest["never_ran"] = ["aux"]
    path.write_text(json.dumps(manifest))
    (page,) = arrange(read_run(root)).images
    assert [tuple(missing) for missing in page.missing_layers] == [
        ("Net", "is None"),
        ("aux", "never ran"),
    ]


def test_the_exemplars_of_channels_are_for_the_script(
    two_channels: Path, tmp_path: Path
) -> None:
    """A channel that has exemplars has a picture of them."""
    exemplars = write_exemplars(tmp_path / "best")
    build_report(two_channels, ReportOptions(exemplars=exemplars))
    extra = extra_of(page_of(two_channels, "layer-000.html"))
    assert extra.keys() == {"0"}
    path = (two_channels / "report" / extra["0"]["src"]).resolve()
    assert path == exemplars / "001_conv1/output/c00000.png"
    assert (extra["0"]["width"], extra["0"]["height"]) == (70, 40)
    assert extra["0"]["tiles"] == [[[8, 44, 128, 128], f"2.5 {EVIL}"]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer": "elsewhere"}, "has exemplars of no layer of this run"),
        (
            {"channels": [{**CHANNEL, "file": "../../secret.png"}]},
            "it lies outside its folder",
        ),
        (
            {"channels": [{**CHANNEL, "exemplars": []}]},
            "channel 0 of 001_conv1/output.png has 0 exemplars",
        ),
    ],
)
def test_exemplars_that_do_not_fit(
    two_channels: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    """Each is refused in a line of its own, before anything is written."""
    exemplars = write_exemplars(tmp_path / "best", **changed)
    with pytest.raises(StoreError, match=message):
        build_report(two_channels, ReportOptions(exemplars=exemplars))
    assert not (two_channels / "report").exists()


def test_a_layer_of_two_classes_is_named_once(
    two_channels: Path, tmp_path: Path
) -> None:
    """In the hint of how to run again."""
    exemplars = write_exemplars(tmp_path / "best", layer="elsewhere")
    path = exemplars / "exemplars.json"
    content = json.loads(path.read_text())
    content["layers"].append({**content["layers"][0], "call": 1})
    path.write_text(json.dumps(content))
    with pytest.raises(StoreError) as caught:
        build_report(two_channels, ReportOptions(exemplars=exemplars))
    assert caught.value.hint == "run again with these --layers: elsewhere"


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    """An audit of two layers."""
    return write_audit(tmp_path / "audit")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of the same model."""
    drawn = [Drawn("conv1", index=1, type="Conv2d"), Drawn("relu", index=2)]
    return write_run(tmp_path / "out", {"a.png": drawn})


def test_what_an_audit_says_too_is_said_once(audit: Path, tmp_path: Path) -> None:
    """Of the same channels the audit has seen more images; of others both are said."""
    stats = np.zeros((6, 6), np.float32)
    stats[:, :3] = np.arange(6)[:, None] + np.float32([0, 2, 1])
    stats[[1, 4]] = [0, 0, 0, 0, 1, 0]
    other = stats.copy()
    other[2] = [0, 0, 0, 0, 1, 0]
    for name, numbers, badges in (
        ("same", stats, []),
        ("other", other, ["3 all zero"]),
    ):
        drawn = Drawn("relu", stats=numbers)
        root = write_run(tmp_path / name, {f"{i}.png": [drawn] for i in "ab"})
        build_report(root, ReportOptions(audit=audit))
        who = source(root).split('<div class="who">')[1].split("</div>")[0]
        texts = re.findall(r'class="badge"[^>]*>([^<]*)<', who)
        assert texts == [*badges, "2 dead (audit)", "1 constant (audit)"]


@pytest.mark.medium
def test_an_audit_alone_is_a_page(audit: Path, featviz: Run) -> None:
    """It has the counts, the options, the model and a row for each layer."""
    done = featviz("report", audit, "--json")
    assert json.loads(done.out)["page"] == str(audit / "report" / "index.html")
    text = page_of(audit).text
    assert_says(
        text,
        "net.pth 9 images · input: RGB, as it is 2 dead 1 constant",
        "relu ReLU 2 of 3 channels with a finding; no image excites these: the maps "
        "show what conv1 gives to relu, nothing above 0",
        "Optionseps 0.5",
    )
    assert "f" * 64 in text
    assert "layers auto" not in text
    assert "No findings" not in text
    joined = text.replace(" ", "")
    assert "reluReLU637.5%2dead1,41constant5" in joined
    assert f"{EVIL}ReLU6––".replace(" ", "") in joined


def test_suspects_of_a_call_that_was_not_drawn_stand_at_the_layer(
    audit: Path, run: Path
) -> None:
    """At its first tensor."""
    path = audit / "audit.json"
    content = json.loads(path.read_text())
    content["layers"][0] |= {"call": 1, "label": "relu.call1"}
    content["drawn"][0]["layer"] = "relu.call1"
    path.write_text(json.dumps(content))
    build_report(run, ReportOptions(audit=audit))
    assert "Suspects of the audit" in page_of(run, "layer-001.html").text


def test_an_audit_without_findings_says_so(audit: Path) -> None:
    """Above its table, which has dashes."""
    content = json.loads((audit / "audit.json").read_text())
    content["layers"][0]["findings"] = {"dead": []}
    (audit / "audit.json").write_text(json.dumps(content))
    build_report(audit, ReportOptions())
    assert "No findings in any channel of these layers." in page_of(audit).text
    assert '<span class="badge none">0 dead</span>' in source(audit)


def test_an_audit_says_that_weights_are_random(audit: Path) -> None:
    """What is dead by chance says nothing of a trained model."""
    build_report(audit, ReportOptions())
    assert "Random weights" not in page_of(audit).text
    content = json.loads((audit / "audit.json").read_text())
    content["model"]["weights"] = "none"
    (audit / "audit.json").write_text(json.dumps(content))
    build_report(audit, ReportOptions())
    assert "Random weights (--weights none)" in page_of(audit).text


def test_the_chart_of_an_audit_stands_beside_its_table(audit: Path) -> None:
    """It is a picture of the audit's folder; an audit without it has the table alone."""
    build_report(audit, ReportOptions())
    assert page_of(audit).pictures("Average percentage") == []
    Image.new("RGB", (60, 40)).save(audit / "apoz.png")
    build_report(audit, ReportOptions(overwrite=True))
    (image,) = page_of(audit).pictures("Average percentage")
    assert (audit / "report" / str(image["src"])).resolve() == audit / "apoz.png"
    assert (image["width"], image["height"]) == ("60", "40")


def suspects_of(page: Markup) -> list[str]:
    """The addresses of a page's pictures of suspects."""
    return page.values("image", "href")


def test_the_suspects_of_an_audit_are_tiles_of_their_picture(audit: Path) -> None:
    """Each channel has its finding, its scale, and an image beside its map; the row of
    the layer leads there."""
    build_report(audit, ReportOptions())
    page = page_of(audit)
    (picture,) = suspects_of(page)
    path = (audit / "report" / str(picture)).resolve()
    assert path == (audit / "suspects" / "relu.png").resolve()
    assert page.values("li", "data-row") == ["4", "1"]
    tiles = ["160 42 60 40", "230 42 60 40"]
    assert [box for box in page.values("svg", "viewbox") if box in tiles] == tiles * 2
    assert_says(page.text, "channel 4 dead", "−1.5 0", "a.png", "channel 1 dead")
    links = set(page.values("a", "href"))
    assert links & {"#audited-000", "#audited-001"} == {"#audited-000"}
    assert "audited-000" in page.values("section", "id")


@pytest.mark.parametrize("option", ["compare", "audit"])
def test_what_goes_with_a_run_goes_with_nothing_else(
    option: str, audit: Path, tmp_path: Path
) -> None:
    """The option is named, with an audit and with a series, before anything is
    written."""
    series = tmp_path / "steps"
    write_run(series / "step-000100", {"a.png": [Drawn("relu")]})
    root = {"compare": audit, "audit": series}[option]
    message = f"--{option} goes with a run, and {root} holds"
    with pytest.raises(UsageError, match=message):
        build_report(root, ReportOptions(**{option: audit}))  # type: ignore[arg-type]
    assert not (root / "report").exists()


def test_a_picture_of_suspects_is_where_audits_put_it(tmp_path: Path) -> None:
    """No other file is opened, whatever audit.json names."""
    audit = write_audit(tmp_path / "audit", file="../secret.png")
    with pytest.raises(StoreError, match="it lies outside its folder"):
        build_report(audit, ReportOptions())
    assert not (audit / "report").exists()


def test_what_is_no_picture_of_suspects_is_refused(audit: Path) -> None:
    """Another format under its name is none."""
    (audit / "suspects" / "relu.png").write_bytes(b"GIF89a")
    with pytest.raises(StoreError, match="is no PNG"):
        build_report(audit, ReportOptions())


@pytest.mark.medium
def test_a_picture_of_suspects_that_is_missing_is_not_shown(
    audit: Path, run: Path
) -> None:
    """The findings of an audit.json alone are shown all the same."""
    (audit / "suspects" / "relu.png").unlink()
    build_report(run, ReportOptions(audit=audit))
    page = page_of(run, "layer-001.html")
    assert suspects_of(page) == []
    assert "2 dead" in page.text


@pytest.mark.medium
def test_a_run_shows_an_audits_findings(run: Path, audit: Path) -> None:
    """They are badges in the network, and a list on the first page."""
    build_report(run, ReportOptions(audit=audit))
    text = page_of(run).text
    assert text.count("2 dead (audit) 1 constant (audit)") == 1
    assert "2 dead 1, 4" in text


@pytest.mark.medium
def test_a_run_shows_an_audits_suspects(run: Path, audit: Path) -> None:
    """They are on the page of the layer only, with a row for each channel."""
    build_report(run, ReportOptions(audit=audit))
    page = page_of(run, "layer-001.html")
    (picture,) = suspects_of(page)
    path = (run / "report" / str(picture)).resolve()
    assert path == (audit / "suspects" / "relu.png").resolve()
    assert page.values("li", "data-row") == ["4", "1"]
    assert suspects_of(page_of(run, "layer-000.html")) == []


def test_suspects_stand_at_the_first_tensor_of_their_call(
    tmp_path: Path, audit: Path
) -> None:
    """A layer of several tensors has them once."""
    tensors = [Drawn("relu", key="0"), Drawn("relu", key="1"), Drawn("relu", call=1)]
    run = read_run(write_run(tmp_path / "out", {"a.png": tensors}))
    pages = arrange(run).layers
    extras = read_companions(run, pages, ReportOptions(audit=audit)).extras
    groups = [group for page in pages for group in page.groups]
    assert [(group.stem, len(extras[group.id])) for group in groups] == [
        ("output.0", 1),
        ("output.1", 0),
        ("output.call1", 0),
    ]


@pytest.mark.parametrize(
    ("suspects", "text"),
    [(3, "2 of 3 channels with a finding"), (2, "2 channels with a finding")],
)
def test_suspects_without_a_row_are_counted(
    suspects: int, text: str, tmp_path: Path
) -> None:
    """A picture may show two of three; where it has all, it says how many."""
    root = write_audit(tmp_path / "audit", suspects=suspects)
    build_report(root, ReportOptions())
    found = re.search(r"(\d of )?\d channels with a finding", page_of(root).text)
    assert found is not None
    assert found[0] == text


def test_a_run_with_an_audit_in_its_folder_is_a_run(run: Path, audit: Path) -> None:
    """Its pages show both."""
    shutil.copytree(audit, run, dirs_exist_ok=True)
    build_report(run, ReportOptions())
    assert suspects_of(page_of(run, "layer-001.html"))
    assert (run / "report" / "image-000.html").is_file()


def test_one_file_has_an_audits_suspects(run: Path, audit: Path) -> None:
    """Their picture is inside it."""
    out = run.parent / "one.html"
    build_report(run, ReportOptions(audit=audit, single_file=True, out=out))
    (picture,) = suspects_of(read(out))
    assert str(picture).startswith("data:image/png;base64,")


@pytest.mark.slow
def test_the_page_of_a_channel_has_its_row(
    browser: Any, run: Path, audit: Path
) -> None:
    """It shows the channel's row of suspects, and none for other channels."""
    build_report(run, ReportOptions(audit=audit))
    page = Page(browser, run)
    for channel, rows in ((1, ["1"]), (0, [])):
        page.open(f"layer-001.html#c{channel}")
        shown = page.all(".channel .sought li")
        assert [row.get_dom_attribute("data-row") for row in shown] == rows


@pytest.fixture
def undrawn(tmp_path: Path, audit: Path) -> Path:
    """A report of a run without the layer behind which the audit has findings."""
    root = write_run(tmp_path / "conv", {"a.png": [Drawn("conv1", type="Conv2d")]})
    build_report(root, ReportOptions(audit=audit))
    return root


@pytest.mark.medium
def test_an_audit_outranks_the_run_at_the_head(undrawn: Path) -> None:
    """The first line has the audit's count, and leads to it."""
    page = page_of(undrawn)
    assert "Dead channels: 2 in 1 layer, by the audit of 9 images" in page.text
    assert "#audit" in page.values("a", "href")


@pytest.mark.medium
def test_findings_behind_a_layer_that_was_not_drawn(undrawn: Path) -> None:
    """They stand at the layer whose maps come to it, with a link, a badge and the
    picture."""
    badges = r"conv1 Conv2d 6 × 4×5 .{0,50} 2 dead \(audit\) 1 constant \(audit\)"
    assert re.search(badges, page_of(undrawn).text)
    audited = source(undrawn).split('aria-labelledby="audit"')[1]
    assert '<a href="layer-000.html"><code>relu</code></a>' in audited
    assert len(suspects_of(page_of(undrawn, "layer-000.html"))) == 1
