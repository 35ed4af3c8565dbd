"""The functions of the commands: what they give is what the commands give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from PIL import Image
from pixels import assert_same_pixels
from torch import nn

import featviz as fv
from featviz.errors import FeatvizError, StoreError, UsageError

from .drawn import AS_IT_IS

FLAGS = ("--size", "20x24", "--mean", "0,0,0", "--std", "1,1,1")


def as_json(document: Any) -> Any:
    """A document as its reader gets it."""
    return json.loads(json.dumps(document))


def without_model(document: Any) -> Any:
    """A document without the name of its model, which a module has not."""
    return {**as_json(document), "model": None}


def is_training(model: nn.Module) -> bool:
    """Whether no module was left in eval mode."""
    return all(module.training for module in model.modules())


@pytest.mark.medium
@pytest.mark.parametrize("is_module", [True, False])
def test_layers_are_those_of_the_command(
    is_module: bool, featviz: Run, tiny: nn.Module, tiny_file: Path
) -> None:
    """The document and the table are equal, for a module and for its file."""
    command = ("layers", tiny_file, *FLAGS, "--layers", "Conv2d")
    document = json.loads(featviz(*command, "--json").out)
    table = featviz(*command).out.splitlines()
    model: Any = tiny if is_module else tiny_file

    listed = fv.layers(model, nn.Conv2d, **AS_IT_IS)

    assert as_json(listed.document) == document
    lines = str(listed).splitlines()
    assert [line.split() for line in lines] == [line.split() for line in table]


def test_layers_show_a_row_for_each(tiny: nn.Module) -> None:
    """The table of a notebook has all types, and the short form has the totals."""
    listed = fv.layers(tiny, nn.Conv2d, **AS_IT_IS)
    html = listed._repr_html_()
    assert html.count("<tr>") == 1 + len(listed.rows)
    assert all(f">{row.type}<" in html for row in listed.rows)
    assert repr(listed) == "<Listing: 6 modules, 137 parameters, 51,860 MACs>"


LOOK = {"layers": ["0", "1"], "maps": 2, "cmap": "magma", **AS_IT_IS}


@pytest.mark.slow
def test_look_is_the_page_of_the_command(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path
) -> None:
    """The page has the same pixels and numbers, and lies where `out` says."""
    of_command = tmp_path / "a.png"
    out = tmp_path / "b.png"
    options = ("--layers", "0,1", "--maps", "2", "--cmap", "magma", "--json")
    done = featviz("look", tiny_file, picture, *FLAGS, *options, "--out", of_command)

    page = fv.look(tiny_file, picture, out=out, **LOOK)

    assert page.out == out
    assert_same_pixels(page.image, of_command)
    assert_same_pixels(out, of_command)
    document = as_json(page.as_json())
    assert document["layers"] == json.loads(done.out)["layers"]


@pytest.mark.slow
def test_look_at_an_image_in_memory(
    tiny: nn.Module, tiny_file: Path, picture: Path
) -> None:
    """It has the numbers of the file; without `out` nothing is written, and training
    stays on."""
    of_file = fv.look(tiny_file, picture, **LOOK)
    files = sorted(picture.parent.rglob("*"))
    tiny.train()

    page = fv.look(tiny, Image.open(picture), **LOOK)

    assert page.layers == of_file.layers
    assert_same_pixels(page.input, picture)
    assert page.out is None
    assert sorted(picture.parent.rglob("*")) == files
    assert is_training(tiny)
    html = page._repr_html_()
    assert html.count("<img ") == 1
    assert "LookResult of image-0.png: 2 layers" in html


@pytest.mark.parametrize("out", [None, "folder"])
def test_kernels_are_those_of_the_command(
    out: str | None, featviz: Run, tiny: nn.Module, tiny_file: Path, tmp_path: Path
) -> None:
    """The pictures are the same, in memory and in a folder; training stays on."""
    of_command = tmp_path / "command"
    featviz("kernels", tiny_file, "--out", of_command, "--cmap", "viridis")
    (file,) = of_command.rglob("kernel.png")
    tiny.train()

    (kernels,) = fv.kernels(tiny, out=out, cmap="viridis").captures

    assert_same_pixels(kernels.image, file)
    assert kernels.layer == "0"
    assert kernels.row["maps"] == 4
    assert is_training(tiny)


def test_kernels_that_cannot_be_had(tiny: nn.Module, tmp_path: Path) -> None:
    """An option of other functions is refused, and a picture that is gone is named."""
    with pytest.raises(UsageError, match="no option overlay"):
        fv.kernels(tiny, overlay=0.5)
    (kernels,) = fv.kernels(tiny, out=tmp_path / "k").captures
    (tmp_path / "k" / str(kernels.row["file"])).unlink()
    with pytest.raises(StoreError, match=r"kernel\.png'? cannot be read"):
        _ = kernels.image


@pytest.fixture
def dead_file(tiny: nn.Module, tiny_file: Path) -> Path:
    """The tiny model with a dead channel; the module has one, too."""
    with torch.no_grad():
        tiny[0].bias[1] = -99.0
    torch.save(tiny, tiny_file)
    return tiny_file


@pytest.mark.medium
def test_an_audit_is_that_of_the_command(
    featviz: Run, tiny: nn.Module, dead_file: Path, photos: Path
) -> None:
    """The document and the table are equal."""
    command = ("audit", dead_file, photos, *FLAGS)
    document = json.loads(featviz(*command, "--out", "a", "--json").out)
    table = featviz(*command, "--out", "b").out

    audit = fv.audit(tiny, photos, **AS_IT_IS)

    assert without_model(audit.document) == without_model(document)
    assert str(audit).split() == table.split()
    assert repr(audit).startswith("<audit of 2 images: ")
    assert "gate" not in repr(audit)


@pytest.mark.medium
@pytest.mark.usefixtures("dead_file")
def test_an_audit_says_which_gate_failed(tiny: nn.Module, photos: Path) -> None:
    """The code, the short form, the table and the page say it; the page has a picture
    of each suspect."""
    audit = fv.audit(tiny, photos, fail_on="dead>5%", **AS_IT_IS)
    assert audit.exit_code == 4
    assert repr(audit).endswith("; gates: 1 of 1 failed>")
    assert "gate dead>5% failed: " in str(audit).splitlines()[-1]
    html = audit._repr_html_()
    assert "gate dead&gt;5% failed" in html
    assert html.count("<img") == len(audit.files) > 0


@pytest.mark.medium
def test_exemplars_are_those_of_the_command(
    featviz: Run, tiny: nn.Module, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """The record and the sheets are the same."""
    out = tmp_path / "e"
    options = ("--layers", "Conv2d", "--top", "2", "--rank-by", "mean", "--out", out)
    done = featviz("exemplars", tiny_file, photos, *FLAGS, *options)
    assert done.code == 0
    record = json.loads((out / "exemplars.json").read_text())
    assert all((out / name).is_file() for name in record.pop("files"))

    exemplars = fv.exemplars(tiny, photos, nn.Conv2d, top=2, rank_by="mean", **AS_IT_IS)

    assert without_model(dict(exemplars.document)) == without_model(record)
    (layer,) = exemplars.document["layers"]
    for file in (layer["sheet"], layer["channels"][0]["file"]):
        assert_same_pixels(exemplars.picture(file), out / file)


def test_exemplars_are_one_at_least(tiny: nn.Module, photos: Path) -> None:
    """None of each channel is refused."""
    with pytest.raises(UsageError, match="top=0: expected an integer from 1 to 1000"):
        fv.exemplars(tiny, photos, top=0)


@pytest.mark.medium
def test_diff_takes_runs_and_folders(
    tiny: nn.Module, photos: Path, tmp_path: Path
) -> None:
    """A run in memory is equal to one in a folder, by its path as text or not."""
    folder = tmp_path / "kept"
    in_memory = fv.run(tiny, photos, "Conv2d", **AS_IT_IS)
    fv.run(tiny, photos, "Conv2d", folder, **AS_IT_IS)
    assert fv.diff(in_memory, folder).equal
    assert fv.diff(str(folder), in_memory).equal


@pytest.mark.medium
def test_diff_finds_a_changed_kernel(tiny: nn.Module, photos: Path) -> None:
    """It names the first layer and the channel that changed."""
    before = fv.run(tiny, photos, "Conv2d,ReLU", **AS_IT_IS)
    with torch.no_grad():
        tiny[0].weight[2] += 1
    after = fv.run(tiny, photos, "Conv2d,ReLU", **AS_IT_IS)

    difference = fv.diff(before, after)

    assert not difference.equal
    assert difference.first.label == "0"
    assert difference.first.most_changed == [2]
    assert ">Conv2d<" in difference._repr_html_()
    assert "first at layer 0 (Conv2d)" in repr(difference)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((".", "."), {"tolerance": 2}, "tolerance=2: expected a number from 0 to 1"),
        ((".", 5), {}, "'int' is no run"),
        ((".", "."), {"layers": "Conv2d"}, "no option layers of two runs; models need"),
        ((".", "."), {"size": 8}, "no option size of two runs; models need images"),
    ],
)
def test_diff_refuses_what_is_no_run(
    arguments: Any, options: dict[str, Any], message: str
) -> None:
    """The line says what was expected."""
    with pytest.raises(UsageError, match=message):
        fv.diff(*arguments, **options)


@pytest.mark.medium
def test_report_of_a_run_directory(ran: Path, tmp_path: Path) -> None:
    """The page is written into it; a folder that is no run directory is refused."""
    page = fv.report(ran).page
    assert page == ran / "report" / "index.html"
    assert page.is_file()
    with pytest.raises(StoreError, match="is no run directory"):
        fv.report(tmp_path)


@pytest.mark.medium
@pytest.mark.parametrize("option", ["compare", "kernels", "exemplars", "audit"])
def test_what_is_to_stand_beside_a_run_must_exist(option: str, ran: Path) -> None:
    """The message is that of the command line, with the name that was meant."""
    with pytest.raises(
        UsageError, match=r"Directory 'nosuch' does not exist\."
    ) as caught:
        fv.report(ran, **{option: "nosuch"})
    assert "the current folder has no 'nosuch'" in str(caught.value.hint)


@pytest.mark.medium
def test_report_of_a_run_in_memory(
    tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """It is one file, which holds the pictures: they are gone with the run."""
    in_memory = fv.run(tiny, picture, "Conv2d", **AS_IT_IS)
    requests: list[dict[str, Any]] = [{}, {"out": "folder"}, {"single_file": True}]
    for options in requests:
        with pytest.raises(UsageError, match="the pictures of a run without out"):
            fv.report(in_memory, **options)

    page = fv.report(in_memory, tmp_path / "maps.html", single_file=True).page

    assert page.read_text().count("data:image/png") >= 2


@pytest.mark.parametrize(
    ("wrap", "layers"),
    [
        (
            lambda tiny: nn.Sequential(tiny, nn.Tanh()),
            ["0.0", "0.1", "0.2", "0.3", "0.4", "1"],
        ),
        (lambda tiny: tiny[0], [""]),
    ],
)
def test_capture_takes_all_leaves(
    wrap: Any, layers: list[str], tiny: nn.Module
) -> None:
    """Without layers it takes every module that has none inside, also the model that is
    one itself."""
    model = wrap(tiny)
    with fv.capture(model) as maps:
        model(torch.zeros(1, 3, 8, 8))
    assert list(maps) == layers


def test_the_hint_is_in_the_traceback(tiny: nn.Module, picture: Path) -> None:
    """It stands there once, as a note, though one function may call another."""
    with pytest.raises(FeatvizError) as caught:
        fv.run(tiny, picture, "Conv3d")
    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]


@pytest.mark.parametrize(
    ("name", "wrong", "meant"),
    [
        ("layers", "sise", "size"),
        ("audit", "sise", "size"),
        ("run", "colormap", "cmap"),
        ("run", "outdir", "out"),
    ],
)
def test_misspelt_keywords_are_named(
    name: str, wrong: str, meant: str, tiny: nn.Module, picture: Path
) -> None:
    """Every function knows its own keywords and those of the model and the input."""
    arguments = [tiny] if name == "layers" else [tiny, picture]
    with pytest.raises(UsageError, match=f"no option {wrong}") as caught:
        getattr(fv, name)(*arguments, **{wrong: "x"})
    assert caught.value.hint == f"did you mean {meant}?"
