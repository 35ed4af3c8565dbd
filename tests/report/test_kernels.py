"""Kernels beside the channels that they make, `report --kernels`, and as a page of
their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import SCENES, Run
from PIL import Image
from runs import refused

import featviz as fv

from .markup import EVIL, read


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a small network, and the kernels of its convolutions, to be copied."""
    folder = tmp_path_factory.mktemp("drawn")
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
    )
    torch.save(model.eval(), folder / "tiny.pth")
    options = {"layers": "*", "size": 24, "crop": 24, "out": folder / "out"}
    fv.run(folder / "tiny.pth", SCENES / "spheres.jpg", **options)
    fv.kernels(folder / "tiny.pth", out=folder / "kernels #1")
    return folder


@pytest.fixture
def both(drawn: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run of a small network, and the kernels of its convolutions."""
    shutil.copytree(drawn, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out", tmp_path / "kernels #1"


def test_kernels_stand_on_the_pages_of_their_layers(
    featviz: Run, both: tuple[Path, Path]
) -> None:
    """Each convolution has its picture, with the numbers of its scale; other layers
    have none. A kernel of three inputs is drawn as red, green and blue, which a grey
    key would not tell."""
    run, kernels = both
    assert featviz("report", run, "--kernels", kernels).code == 0
    rows = json.loads((kernels / "manifest.json").read_text())["captures"]
    shown = {}
    for path in sorted((run / "report").glob("layer-*.html")):
        page = read(path)
        pictures = [str(a["src"]) for a in page.of("img") if "kernel" in str(a["alt"])]
        shown |= (
            {page.text.split("Layer\n")[1].split()[0]: pictures} if pictures else {}
        )
    assert shown.keys() == {row["layer"] for row in rows}
    for row in rows:
        assert shown[row["layer"]] == [f"../../kernels%20%231/{row['file']}"]
    low, high = (f"{value:.4g}".replace("-", "−") for value in rows[0]["range"])
    caption = f"red, green and blue, each from {low} to {high}"
    assert caption in read(run / "report" / "layer-001.html").text
    assert rows[0]["layout"] == "rgb"


def test_kernels_alone_are_a_page(featviz: Run, both: tuple[Path, Path]) -> None:
    """A section for each layer in the order of the model, with the picture in its own
    size, the shape of the weights and their range, which are those of the file of
    weights."""
    kernels = both[1]
    model = torch.load(kernels.parent / "tiny.pth", weights_only=False)
    done = featviz("report", kernels, "--json")
    assert done.code == 0
    assert json.loads(done.out)["page"] == str(kernels / "report/index.html")
    page = read(kernels / "report" / "index.html")
    text = page.words
    rows = json.loads((kernels / "manifest.json").read_text())["captures"]
    assert "tiny.pth 6 kernels in 2 layers" in text
    pictures = [i for i in page.of("img") if "kernel" in str(i["alt"])]
    for row, picture in zip(rows, pictures, strict=True):
        weight = model.get_submodule(row["layer"]).weight
        low, high = (f"{x:.4g}".replace("-", "−") for x in (weight.min(), weight.max()))
        shape = "×".join(map(str, weight.shape))
        caption = f"{row['maps']} kernels · {shape} · weights {low} to {high}"
        assert f"{row['layer']} {row['type']}" in text
        assert caption in text
        where = (
            kernels
            / "report"
            / str(picture["src"]).replace("%20", " ").replace("%23", "#")
        )
        with Image.open(where) as drawn:
            assert (picture["width"], picture["height"]) == tuple(map(str, drawn.size))
    assert [section["data-item"] for section in page.of("section")] == [
        f"{row['layer']} {row['type']}" for row in rows
    ]


def test_odd_records_of_kernels_are_shown(
    featviz: Run, both: tuple[Path, Path]
) -> None:
    """Names are escaped: those of layers and of the model stand in files of somebody
    else, which may say anything of the model and the options."""
    kernels = both[1]
    manifest, record = ((kernels / name) for name in ("manifest.json", "run.json"))
    content = json.loads(manifest.read_text())
    content["captures"][0]["layer"] = EVIL
    manifest.write_text(json.dumps(content))
    model = {"file": EVIL, "taken": {"a": {"b": None}}}
    record.write_text(
        json.dumps(json.loads(record.read_text()) | {"model": model, "options": "x"})
    )
    assert featviz("report", kernels).code == 0
    page = read(kernels / "report" / "index.html")
    assert page.text.count(EVIL) >= 2
    assert {i["src"] for i in page.of("img")}.isdisjoint({"x"})


def test_what_holds_no_kernels_is_refused(
    featviz: Run, both: tuple[Path, Path]
) -> None:
    """In one line, beside a run with the file and alone, and nothing is written."""
    run, kernels = both
    (kernels / "manifest.json").unlink()
    refused(featviz("report", run, "--kernels", kernels), 1, "manifest.json is missing")
    refused(featviz("report", kernels), 1)
    assert not (run / "report").exists()
    assert not (kernels / "report").exists()
