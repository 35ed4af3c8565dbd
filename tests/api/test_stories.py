"""The functions of the commands: what they give is what the commands give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import featviz as fv
from featviz.errors import FeatvizError, StoreError, UsageError

from .drawn import AS_IT_IS

CLI = Callable[..., Any]
FLAGS = ("--size", "20x24", "--mean", "0,0,0", "--std", "1,1,1")


def test_layers_are_those_of_the_command(
    featviz: CLI, tiny: nn.Module, tiny_file: Path
) -> None:
    """For a module and for its file, as data; the table has a row for each."""
    told = json.loads(
        featviz("layers", tiny_file, *FLAGS, "--layers", "Conv2d", "--json").out
    )
    for model in (tiny, tiny_file, str(tiny_file)):
        listed = fv.layers(model, nn.Conv2d, **AS_IT_IS)
        assert json.loads(json.dumps(listed.document)) == told
    assert listed._repr_html_().count("<tr>") == 1 + len(listed.rows)
    for row in listed.rows:
        assert f">{row.type}<" in listed._repr_html_()
    assert repr(listed) == "<Listing: 6 modules, 137 parameters, 51,860 MACs>"
    printed = featviz(
        "layers", tiny_file, *FLAGS, "--layers", "Conv2d"
    ).out.splitlines()
    assert [line.split() for line in str(listed).splitlines()] == [
        s.split() for s in printed
    ]


@pytest.mark.slow
def test_look_is_the_page_of_the_command(
    featviz: CLI, tiny: nn.Module, tiny_file: Path, picture: Path, tmp_path: Path
) -> None:
    """The same pixels, prediction and numbers, for a path and for an image in memory;
    without `out` nothing is written, and training stays on."""
    flags = (*FLAGS, "--layers", "0,1", "--maps", "2", "--cmap", "magma", "--json")
    printed = json.loads(
        featviz("look", tiny_file, picture, *flags, "--out", tmp_path / "a.png").out
    )
    options = {"layers": ["0", "1"], "maps": 2, "cmap": "magma", **AS_IT_IS}
    page = fv.look(tiny_file, picture, out=tmp_path / "b.png", **options)
    page_pixels = np.asarray(Image.open(tmp_path / "a.png"))
    assert np.array_equal(np.asarray(page.image), page_pixels)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "b.png")), page_pixels)
    assert page.out == tmp_path / "b.png"
    assert json.loads(json.dumps(page.as_json()["layers"])) == printed["layers"]
    files = sorted(tmp_path.rglob("*"))
    tiny.train()
    again = fv.look(tiny, Image.open(picture), **options)
    assert all(module.training for module in tiny.modules())
    assert sorted(tmp_path.rglob("*")) == files
    assert again.out is None
    assert again.layers == page.layers
    assert np.array_equal(np.asarray(again.input), np.asarray(Image.open(picture)))
    shown = again._repr_html_()
    assert shown.count("<img ") == 1
    assert "LookResult of image-0.png: 2 layers" in shown


def test_kernels_are_those_of_the_command(
    featviz: CLI, tiny: nn.Module, tiny_file: Path, tmp_path: Path
) -> None:
    """The same pictures, in memory and in a folder; training stays on."""
    assert (
        featviz("kernels", tiny_file, "--out", tmp_path / "k", "--cmap", "viridis").code
        == 0
    )
    (file,) = (tmp_path / "k").rglob("kernel.png")
    tiny.train()
    for out in (None, tmp_path / "own"):
        (kernels,) = fv.kernels(tiny, out=out, cmap="viridis").captures
        assert np.array_equal(np.asarray(kernels.image), np.asarray(Image.open(file)))
        assert (kernels.layer, kernels.row["maps"]) == ("0", 4)
    assert all(module.training for module in tiny.modules())
    with pytest.raises(UsageError, match="no option overlay"):
        fv.kernels(tiny, overlay=0.5)  # type: ignore[call-arg]
    kernels.of.folder.joinpath(str(kernels.row["file"])).unlink()
    with pytest.raises(
        StoreError, match=r"kernel\.png' cannot be read|kernel\.png cannot be read"
    ):
        _ = kernels.image


def test_an_audit_is_that_of_the_command(
    featviz: CLI, tiny: nn.Module, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """The same document; gates, and a gallery of suspects."""
    with torch.no_grad():
        tiny[0].bias[1] = -99.0
    torch.save(tiny, tiny_file)
    done = featviz(
        "audit", tiny_file, photos, *FLAGS, "--out", tmp_path / "a", "--json"
    )
    told = json.loads(done.out)
    audit = fv.audit(tiny, photos, fail_on="dead>5%", **AS_IT_IS)
    document = json.loads(json.dumps(audit.document))
    assert {**told, "model": None} == {**document, "model": None}
    assert audit.exit_code == 4
    assert repr(audit).startswith("<audit of 2 images: ")
    assert repr(audit).endswith("; gates: 1 of 1 broken>")
    printed = featviz(
        "audit", tiny_file, photos, *FLAGS, "--out", tmp_path / "b"
    ).out.split()
    table, *broken = str(audit).rpartition("\n")
    assert table.split() == printed
    assert "gate dead>5% failed: " in broken[-1]
    html = audit._repr_html_()
    assert "gate dead&gt;5% failed" in html
    assert html.count("<img") == len(audit.files) > 0
    assert "gate" not in repr(fv.audit(tiny_file, photos, **AS_IT_IS))


def test_exemplars_are_those_of_the_command(
    featviz: CLI, tiny: nn.Module, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """The same record and sheets, by the mean or by the maximum."""
    flags = ("--layers", "Conv2d", "--top", "2", "--rank-by", "mean")
    done = featviz(
        "exemplars", tiny_file, photos, *FLAGS, *flags, "--out", tmp_path / "e"
    )
    assert done.code == 0
    record = json.loads((tmp_path / "e" / "exemplars.json").read_text())
    assert all((tmp_path / "e" / name).is_file() for name in record.pop("files"))
    exemplars = fv.exemplars(tiny, photos, nn.Conv2d, top=2, rank_by="mean", **AS_IT_IS)
    content = json.loads(json.dumps(dict(exemplars.document)))
    assert {**record, "model": None} == {**content, "model": None}
    (layer,) = exemplars.document["layers"]
    for file in (layer["sheet"], layer["channels"][0]["file"]):
        sheet = Image.open(tmp_path / "e" / file)
        assert np.array_equal(np.asarray(exemplars.picture(file)), np.asarray(sheet))
    with pytest.raises(UsageError, match="top=0: expected an integer from 1 to 1000"):
        fv.exemplars(tiny, photos, top=0)


def test_diff_takes_runs_and_folders(
    tiny: nn.Module, photos: Path, tmp_path: Path
) -> None:
    """A changed kernel is found, with and without a run directory."""
    before = fv.run(tiny, photos, "Conv2d,ReLU", **AS_IT_IS)
    kept = fv.run(tiny, photos, "Conv2d,ReLU", tmp_path / "kept", **AS_IT_IS)
    with torch.no_grad():
        tiny[0].weight[2] += 1
    after = fv.run(tiny, photos, "Conv2d,ReLU", **AS_IT_IS)
    assert fv.diff(before, tmp_path / "kept").equal
    assert fv.diff(str(kept.out), before).equal
    changed = fv.diff(before, after)
    assert not changed.equal
    assert changed.first is not None
    assert (changed.first.label, changed.first.most_changed) == ("0", [2])
    assert ">Conv2d<" in changed._repr_html_()
    assert "first at 0 (Conv2d)" in repr(changed)
    with pytest.raises(UsageError, match=r"tolerance=2: expected a number from 0 to 1"):
        fv.diff(before, after, tolerance=2)
    with pytest.raises(UsageError, match="'int' is no run"):
        fv.diff(before, 5)  # type: ignore[arg-type]


def test_report_of_a_run(
    ran: Path, tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """In its directory, or in one file; a temporary run would leave a page without
    pictures."""
    written = fv.report(ran)
    assert written.page == ran / "report" / "index.html"
    assert written.page.is_file()
    passing = fv.run(tiny, picture, "Conv2d", **AS_IT_IS)
    for options in ({}, {"out": tmp_path / "folder"}, {"single_file": True}):
        with pytest.raises(UsageError, match="the pictures of a run without out"):
            fv.report(passing, **options)  # type: ignore[arg-type]
    page = fv.report(passing, tmp_path / "maps.html", single_file=True).page
    assert page.read_text().count("data:image/png") >= 2
    with pytest.raises(StoreError, match="is no run directory"):
        fv.report(tmp_path / "nothing")


def test_capture_takes_all_leaves(tiny: nn.Module) -> None:
    """Without layers: every module that has none inside, also the model that is one
    itself."""
    model = nn.Sequential(tiny, nn.Tanh())
    with fv.capture(model) as maps:
        model(torch.zeros(1, 3, 8, 8))
    assert list(maps) == [*(f"0.{n}" for n in range(5)), "1"]
    alone = nn.Conv2d(3, 2, 1)
    with fv.capture(alone) as maps:
        alone(torch.zeros(1, 3, 8, 8))
    assert list(maps) == [""]


def test_the_hint_is_in_the_traceback(tiny: nn.Module, picture: Path) -> None:
    """Once, as a note, though one function may call another."""
    with pytest.raises(FeatvizError) as caught:
        fv.run(tiny, picture, "Conv3d")
    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]


@pytest.mark.parametrize(
    ("name", "wrong", "meant"),
    [
        *((name, "sise", "size") for name in ("layers", "audit")),
        *(("run", *pair) for pair in (("colormap", "cmap"), ("outdir", "out"))),
    ],
)
def test_misspelt_keywords_are_told(
    name: str, wrong: str, meant: str, tiny: nn.Module, picture: Path
) -> None:
    """Every function knows its own keywords and those of the model and the input."""
    images = [] if name == "layers" else [picture]
    with pytest.raises(UsageError, match=f"no option {wrong}") as caught:
        getattr(fv, name)(tiny, *images, **{wrong: "x"})
    assert caught.value.hint == f"did you mean {meant}?"
