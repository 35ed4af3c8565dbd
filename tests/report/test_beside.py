"""What is shown beside a run is of the run's model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from rundirs import Drawn, write_run

from featviz.errors import CompareError, StoreError
from featviz.report import ReportOptions, build_report

from .markup import Markup, read
from .test_audited import write_audit
from .test_excited import write_exemplars

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
    """Both files and the digits of both digests, and the command that makes the right one."""
    other = {"kind": "file", "file": "digits.pth", "sha256": "d" * 64}
    with pytest.raises(CompareError, match=r"digits\.pth \(sha256 d{12}\) there, tuned") as caught:
        shown(tmp_path, OWN, other)
    assert f"--exemplars {tmp_path / 'found'} is of another model" in caught.value.message
    assert "featviz exemplars tuned.pth" in str(caught.value.hint)
    assert not (tmp_path / "out" / "report").exists()


def test_an_audit_of_another_model_is_refused(tmp_path: Path) -> None:
    """Also the one that lies in the run."""
    root = write_run(tmp_path / "out", {"a.png": [Drawn("relu")]}, model=OWN)
    with pytest.raises(CompareError, match=r"--audit .* is of another model"):
        build_report(root, ReportOptions(audit=write_audit(tmp_path / "audit")))
    (root / "audit.json").write_text((tmp_path / "audit" / "audit.json").read_text())
    with pytest.raises(CompareError, match=r"out/audit\.json is of another model"):
        build_report(root, ReportOptions())


ALIKE = [
    (OWN, {**OWN, "file": "copy.pth"}),
    (
        {"file": "a.pth", "sha256": "a" * 64, "parameters": "p"},
        {"file": "b.pth", "sha256": "b" * 64, "parameters": "p"},
    ),
    ({"name": "resnet18", "seed": 0}, {"name": "resnet18", "seed": 0}),
]


@pytest.mark.parametrize(("run", "other"), ALIKE)
def test_one_model_of_two_names_is_shown(tmp_path: Path, run: Any, other: Any, caplog: Any) -> None:
    """By the digest of its file, by that of its parameters, or by its name, without a warning."""
    with caplog.at_level(logging.WARNING):
        assert shown(tmp_path, run, other).exists()
    assert caplog.messages == []


@pytest.mark.parametrize("other", [{"name": "resnet18", "seed": 1}, {"name": "vgg16", "seed": 0}])
def test_models_without_digests_differ_by_name_weights_and_seed(tmp_path: Path, other: Any) -> None:
    """As torchvision's own with random weights."""
    with pytest.raises(CompareError, match="of another model"):
        shown(tmp_path, {"name": "resnet18", "seed": 0}, other)


def test_what_does_not_tell_its_model_is_shown_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    """Where one of the two has no digest."""
    assert shown(tmp_path, OWN, {}).exists()
    assert "whether it is of the run's model is not known" in caplog.text


def test_kernels_of_no_drawn_layer_are_refused(featviz: Any, tmp_path: Path) -> None:
    """They would vanish without a word; the message names the layers to draw."""
    drawn, digits = Drawn("4", index=5), ROOT / "configs" / "digits_cnn.pth"
    assert featviz("kernels", digits, "--out", tmp_path / "kernels").code == 0
    model = json.loads((tmp_path / "kernels" / "run.json").read_text())["model"]
    root = write_run(tmp_path / "out", {"a.png": [drawn]}, model=model)
    with pytest.raises(StoreError, match="has kernels of no layer of this run") as caught:
        build_report(root, ReportOptions(kernels=tmp_path / "kernels"))
    assert "--layers: 0, 3, 6" in str(caught.value.hint)


def compared(featviz: Any, tmp_path: Path, **second: Any) -> tuple[str, Markup]:
    """The address and the first page of a report beside another run, of which `b` has changed."""
    changed = np.tile(np.float32([-3, 7, 0.5, 1, 0, 0]), (6, 1))
    other = [Drawn("a", index=0), Drawn("b", index=1), Drawn("c", index=2)]
    mine = [other[0], Drawn("b", index=1, stats=changed), other[2]]
    base = write_run(tmp_path / "base", {"a.png": other})
    root = write_run(tmp_path / "new", {"a.png": mine}, **second)
    assert featviz("report", root, "--compare", base).code == 0
    return str(base), read(root / "report" / "index.html")


def test_a_compared_run_has_its_verdict_at_the_head(featviz: Any, tmp_path: Path) -> None:
    """Diff's own words, a link to the first layer that diverges, and the command for all."""
    base, page = compared(featviz, tmp_path)
    words = " ".join(page.text.split())
    said = featviz("diff", base, tmp_path / "new").out.splitlines()[-1]
    assert f"Different {said.removeprefix('different: ')} First layer that diverges: b" in words
    assert words.index("Different") < words.index("What the network makes of")
    assert f"featviz diff {base} {tmp_path / 'new'} --html" in words
    assert [a["class"] for a in page.of("section") if a.get("aria-label") == "Verdict"] == [
        "verdict apart"
    ]
    text = (tmp_path / "new" / "report" / "index.html").read_text()
    assert '<a href="layer-001.html"><code>b</code></a>' in text.split("First layer")[1][:80]


def test_runs_that_cannot_be_compared_say_why(featviz: Any, tmp_path: Path) -> None:
    """The pictures stand beside one another all the same."""
    options = {"layers": None, "normalize": "layer", "cmap": "grey", "nrow": None}
    _, page = compared(featviz, tmp_path, options=options)
    assert "Not compared these runs cannot be compared: the scale mode is" in " ".join(
        page.text.split()
    )
