"""Kernels beside the channels that they make, `report --kernels`, and as a page of
their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from conftest import SCENES, Run
from PIL import Image
from runs import refused

import featviz as fv
from featviz.options.commands import ReportOptions
from featviz.report import build_report

from .markup import EVIL, page_of

NAME = "kernels #1"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small network, a run of it, and the kernels of its convolutions,
    to be copied."""
    folder = tmp_path_factory.mktemp("drawn")
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
    )
    torch.save(model.eval(), folder / "tiny.pth")
    image = SCENES / "spheres.jpg"
    fv.run(folder / "tiny.pth", image, "*", folder / "out", size=24, crop=24)
    fv.kernels(folder / "tiny.pth", out=folder / NAME)
    return folder


@pytest.fixture
def kernels(drawn: Path, tmp_path: Path) -> Path:
    """The kernels of the convolutions, beside the network and its run."""
    shutil.copytree(drawn, tmp_path, dirs_exist_ok=True)
    return tmp_path / NAME


@pytest.fixture
def run(kernels: Path) -> Path:
    """The run of the same network."""
    return kernels.parent / "out"


def rows_of(kernels: Path) -> list[dict[str, Any]]:
    """The captures of a folder of kernels."""
    rows: list[dict[str, Any]] = json.loads((kernels / "manifest.json").read_text())[
        "captures"
    ]
    return rows


def span(low: float, high: float, joint: str) -> str:
    """Two numbers with four digits."""
    return f"{low:.4g} {joint} {high:.4g}".replace("-", "−")


@pytest.mark.medium
def test_kernels_stand_on_the_pages_of_their_layers(
    featviz: Run, run: Path, kernels: Path
) -> None:
    """Each convolution has its picture; the page of the other layers has none."""
    assert featviz("report", run, "--kernels", kernels).code == 0
    addresses = []
    for index in range(4):
        pictures = page_of(run, f"layer-{index:03d}.html").pictures("kernel")
        addresses.append([unquote(str(image["src"])) for image in pictures])
    first, second = (f"../../{NAME}/{row['file']}" for row in rows_of(kernels))
    # the whole network is the last to end
    assert addresses == [[first], [], [second], []]


@pytest.mark.medium
def test_kernels_of_three_inputs_are_told_by_colours(
    featviz: Run, run: Path, kernels: Path
) -> None:
    """They are drawn as red, green and blue, which a grey key would not tell."""
    assert featviz("report", run, "--kernels", kernels).code == 0
    row = rows_of(kernels)[0]
    assert row["layout"] == "rgb"
    caption = f"red, green and blue, each from {span(*row['range'], 'to')}"
    assert caption in page_of(run, "layer-000.html").text


def test_kernels_alone_are_a_page(featviz: Run, kernels: Path) -> None:
    """It has a section for each layer in the order of the model, with the shape of the
    weights and their range, which are those of the file of weights."""
    done = featviz("report", kernels, "--json")
    assert json.loads(done.out)["page"] == str(kernels / "report" / "index.html")
    page = page_of(kernels)
    assert "tiny.pth 6 kernels in 2 layers" in page.text
    assert page.values("section", "data-item") == ["0 Conv2d", "2 Conv2d"]
    model = torch.load(kernels.parent / "tiny.pth", weights_only=False)
    for layer, shape in (("0", "4×3×3×3"), ("2", "2×4×3×3")):
        weight = model.get_submodule(layer).weight
        weights = span(weight.min(), weight.max(), "to")
        caption = f"{len(weight)} kernels · {shape} · weights {weights}"
        assert caption in page.text


def test_a_choice_of_kernels_is_told(drawn: Path, tmp_path: Path) -> None:
    """How many of them are drawn stands before how many there are."""
    chosen = tmp_path / "chosen"
    fv.kernels(drawn / "tiny.pth", "0", chosen, channels="0-2")
    build_report(chosen, ReportOptions())
    assert "3 of 4 kernels · 4×3×3×3" in page_of(chosen).text


def test_pictures_of_kernels_have_their_own_size(featviz: Run, kernels: Path) -> None:
    """Width and height are those of the file (Pillow)."""
    assert featviz("report", kernels).code == 0
    pictures = page_of(kernels).pictures("kernel")
    assert len(pictures) == 2
    for image in pictures:
        pixels = np.asarray(Image.open(kernels / "report" / unquote(str(image["src"]))))
        assert (image["height"], image["width"]) == tuple(map(str, pixels.shape[:2]))


def change(path: Path, **fields: Any) -> None:
    """Write other values into a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_odd_records_of_kernels_are_shown(featviz: Run, kernels: Path) -> None:
    """Names of layers and of the model are escaped: they stand in files of somebody
    else, which may say anything of the model and the options."""
    first, second = rows_of(kernels)
    change(kernels / "manifest.json", captures=[{**first, "layer": EVIL}, second])
    model = {"file": EVIL, "taken": {"a": {"b": None}}}
    change(kernels / "run.json", model=model, options="x")
    assert featviz("report", kernels).code == 0
    page = page_of(kernels)
    assert page.text.count(EVIL) >= 2
    assert "x" not in page.values("img", "src")


def test_what_holds_no_kernels_is_refused(
    featviz: Run, run: Path, kernels: Path
) -> None:
    """One line names the file, beside a run and alone, and nothing is written."""
    (kernels / "manifest.json").unlink()
    refused(featviz("report", run, "--kernels", kernels), 1, "manifest.json is missing")
    refused(featviz("report", kernels), 1)
    assert not list(kernels.parent.rglob("report"))
