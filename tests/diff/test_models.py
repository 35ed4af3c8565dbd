"""`featviz diff OLD NEW IMAGE...`: both models are run, and their runs compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from runs import refused, snapshot
from tiles import manifest
from torch import nn

import featviz
from featviz.errors import UsageError

from .changed_network import (
    CLI,
    IMAGES,
    SMALL,
    Pair,
    Run,
    documented,
    layer_of,
    network,
    one_weight,
    saved,
)

pytestmark = pytest.mark.medium


@pytest.fixture
def models() -> Pair:
    """A network, and the same with one weight changed."""
    return saved(Path("old.pth")), saved(Path("new.pth"), one_weight)


def test_two_models_are_compared_as_their_runs_are(
    featviz: CLI, pair: Pair, models: Pair, photos: Path
) -> None:
    """The numbers are those of two run directories with tensors; the models are called
    by their files."""
    expected = documented(featviz, *pair).document

    code, document = documented(featviz, *models, photos, *SMALL)

    assert code == 4
    assert document["layers"] == expected["layers"]
    assert layer_of(document, "2")["sqnr"] > 0
    assert [document["base"], document["new"]] == [str(model) for model in models]


def test_runs_of_two_models_do_not_stay(
    featviz: CLI, models: Pair, photos: Path, tmp_path: Path
) -> None:
    """Nothing is written that nobody has named."""
    before = snapshot(tmp_path)
    featviz("diff", *models, photos, *SMALL)
    assert snapshot(tmp_path) == before


def test_equal_models_need_no_further_layers(
    featviz: CLI, models: Pair, photos: Path
) -> None:
    """Those that differ do, where nobody chose layers."""
    images = (photos, *SMALL[:4])
    equal = featviz("diff", models[0], models[0], *images)
    assert equal.code == 0
    assert "--layers '*'" not in equal.err
    assert "--layers '*'" in featviz("diff", *models, *images).err


def test_runs_stay_below_out(featviz: CLI, models: Pair, photos: Path) -> None:
    """They are two run directories beside the difference maps; the last lines say
    where."""
    out = Path("out")
    done = featviz("diff", *models, photos, *SMALL, "--out", out)
    assert done.code == 4
    names = ["base", "diff-maps", "new"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert all(str(out / name) in done.err for name in names)
    assert featviz("diff", out / "base", out / "new").code == 4


def test_runs_are_replaced_with_overwrite_alone(
    featviz: CLI, models: Pair, photos: Path
) -> None:
    """The error names the option."""
    command = ("diff", *models, photos, *SMALL, "--out", "out")
    featviz(*command)
    refused(featviz(*command), 1, "--overwrite")
    assert featviz(*command, "--overwrite").code == 4


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_what_is_no_run_is_never_replaced(
    featviz: CLI, models: Pair, photos: Path, options: tuple[str, ...]
) -> None:
    """It is named as what it is, and not as an earlier comparison."""
    notes = Path("out/new")
    notes.parent.mkdir()
    notes.write_text("mine")
    done = featviz("diff", *models, photos, *SMALL, "--out", "out", *options)
    refused(done, 1, "out/new is a file, not a folder")
    assert notes.read_text() == "mine"


def test_the_page_of_two_models_shows_pictures_that_are_there(
    featviz: CLI, models: Pair, photos: Path
) -> None:
    """The runs are kept beside the page, and each folder is named."""
    done = featviz("diff", *models, photos, *SMALL, "--html", "d.html")
    assert done.code == 4
    for name in ("d.html", "d-maps", "d-runs/base", "d-runs/new"):
        assert Path(name).exists()
        assert f" {name}" in done.err


def test_models_without_images_are_refused(featviz: CLI, models: Pair) -> None:
    """The hint has the command that was meant."""
    hint = "featviz diff BASE NEW IMAGE..."
    refused(featviz("diff", *models), 2, "is a file, and no run directory", hint)


def test_runs_with_images_are_refused(featviz: CLI, run: Run, photos: Path) -> None:
    """There is no model to run on them."""
    base = run("base")
    refused(featviz("diff", base, base, photos), 2, "leave the images out")


def test_a_list_that_both_models_would_read_is_refused(
    featviz: CLI, models: Pair
) -> None:
    """Standard input can be read once."""
    refused(featviz("diff", *models, "-"), 2, "only once")


def test_an_image_that_fails_is_named(featviz: CLI, models: Pair, photos: Path) -> None:
    """The others are compared; equal models end with exit code 3 then."""
    (photos / "c.png").write_bytes((photos / "a.png").read_bytes()[:100])
    done = featviz("diff", models[0], models[0], photos, *SMALL)
    assert done.code == 3
    assert "c.png" in done.err
    assert "2 images compared" in done.out


def test_a_model_that_takes_none_of_the_images_ends_it(
    featviz: CLI, models: Pair, photos: Path
) -> None:
    """With the code of its run; nothing is compared."""
    torch.save(nn.Sequential(nn.Conv2d(4, 8, 3)), "four.pth")

    done = featviz("diff", "four.pth", models[1], photos, "--preset", "none")

    assert done.code == 1
    assert "the model takes 4 channels" in done.err
    assert "compared" not in done.out


def test_a_result_is_no_model(photos: Path) -> None:
    """In Python two results are compared without images."""
    result = featviz.run(network(), photos, "Conv2d", size=32)
    with pytest.raises(UsageError, match="is a run") as caught:
        featviz.diff(network(), result, photos)
    assert caught.value.hint == "leave the images out"
    assert not featviz.diff(result, result).differing


def test_modules_in_python(photos: Path) -> None:
    """Two modules and an array of pixels; the names of their classes stand for them."""
    old = network()
    new = network()
    new[2].weight.data[5, 3, 1, 1] += 0.02
    out = Path("out")

    result = featviz.diff(old, new, photos, "Conv2d", size=32, out=out)

    assert [layer.label for layer in result.differing] == ["2", "4"]
    assert result.base == "Sequential"
    assert result.out == out / "diff-maps"
    record = json.loads((result.out / "diff.json").read_text("utf-8"))
    assert record["layers"][1]["sqnr"] == pytest.approx(result.layers[1].sqnr)


def test_options_of_models_need_images() -> None:
    """Two run directories have been drawn already."""
    with pytest.raises(UsageError, match="models need images"):
        featviz.diff(Path("base"), Path("new"), size=32)


def classifier(path: Path, seed: int) -> Path:
    """A classifier of three classes, saved."""
    torch.manual_seed(seed)
    layers = (nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    torch.save(nn.Sequential(*layers, nn.Linear(4, 3)), path)
    return path


def prediction_rows(html: str) -> list[list[str]]:
    """The texts of the cells of the table of predictions."""
    rows = []
    for row in re.findall(r"<tr data-item=.*?</tr>", html, re.DOTALL):
        cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
        texts = [re.sub(r"<[^>]*>|\N{NO-BREAK SPACE}", "", cell) for cell in cells]
        rows.append(texts)
    return rows


def test_the_page_has_the_predictions_of_the_manifests(
    featviz: CLI, photos: Path
) -> None:
    """Class and probability of each image before and after, changed ones first, then those
    that moved most; a layer of single numbers has a table of them."""
    models = [classifier(Path(f"{seed}.pth"), seed) for seed in (0, 1)]
    page = Path("d.html")
    out = Path("out")
    options = ("--size", "32", "--layers", "Conv2d,Linear", "--html", page)

    assert featviz("diff", *models, photos, *options, "--out", out).code == 4

    rows = prediction_rows(page.read_text("utf-8"))
    expected = []
    for image in IMAGES:
        before = prediction(out / "base" / image)
        after = prediction(out / "new" / image)
        mark = " changed" if before[0] != after[0] else ""
        after[0] += mark
        expected.append([image, *before, *after])
    moved = {row[0]: abs(float(row[2][:-1]) - float(row[4][:-1])) for row in expected}
    expected.sort(key=lambda row: ("changed" in row[3], moved[row[0]]), reverse=True)
    assert [row[1:] for row in rows] == expected
    document = json.loads((out / "diff-maps/diff.json").read_text("utf-8"))
    assert len(document["predictions"]) == 2


def prediction(folder: Path) -> list[str]:
    """The likeliest class and its probability, as they are written."""
    guess = manifest(folder)["prediction"][0]
    return [f"class {guess['index']}", f"{guess['probability']:.1%}"]
