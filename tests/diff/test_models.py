"""`featviz diff OLD NEW IMAGE...`: both models are run, and their runs compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import featviz
from featviz.errors import UsageError

from .changed_network import (
    CLI,
    SMALL,
    Run,
    documented,
    layer_of,
    network,
    one_weight,
    saved,
)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A network, and the same with one weight changed."""
    return saved(tmp_path / "old.pth"), saved(tmp_path / "new.pth", one_weight)


def test_two_models_are_compared_as_their_runs_are(
    featviz: CLI, run: Run, models: tuple[Path, Path], photos: Path
) -> None:
    """The same numbers as of two run directories with tensors; nothing stays behind,
    and the models are called by their files."""
    code, document = documented(featviz, *models, photos, *SMALL)
    base = run("base", "--tensors", "npy")
    new = run("new", "--tensors", "npy", change=one_weight)
    expected = documented(featviz, base, new)[1]
    assert code == 4
    assert document["layers"] == expected["layers"]
    assert layer_of(document, "2")["sqnr"] > 0
    assert (document["base"], document["new"]) == tuple(map(str, models))
    assert sorted(path.name for path in models[0].parent.iterdir()) == sorted(
        ["base", "model.pth", "new", "new.pth", "old.pth", "photos"]
    )


def test_runs_stay_below_out(
    featviz: CLI, models: tuple[Path, Path], photos: Path, tmp_path: Path
) -> None:
    """Two run directories and the difference maps; the last lines say where. A second
    time they are replaced with --overwrite alone."""
    out = tmp_path / "out"
    command = ("diff", *models, photos, *SMALL, "--out", out)
    done = featviz(*command)
    assert done.code == 4
    assert sorted(path.name for path in out.iterdir()) == ["base", "diff-maps", "new"]
    for folder in ("base", "new", "diff-maps"):
        assert str(out / folder) in done.err
    assert featviz("diff", out / "base", out / "new").code == 4
    again = featviz(*command)
    assert (again.code, "--overwrite" in again.err) == (1, True)
    assert featviz(*command, "--overwrite").code == 4


def test_the_page_of_two_models_shows_pictures_that_are_there(
    featviz: CLI, models: tuple[Path, Path], photos: Path, tmp_path: Path
) -> None:
    """The runs are kept beside the page."""
    page = tmp_path / "d.html"
    done = featviz("diff", *models, photos, *SMALL, "--html", page)
    assert done.code == 4
    for name in ("d.html", "d-maps", "d-runs/base", "d-runs/new"):
        assert (tmp_path / name).exists()
        assert str(tmp_path / name) in done.err


def test_what_is_neither_is_refused(
    featviz: CLI, run: Run, models: tuple[Path, Path], photos: Path
) -> None:
    """Models without images, runs with images, and a list that both would read."""
    done = featviz("diff", *models)
    assert done.code == 2
    assert "is a file, and no run directory" in done.err
    assert "featviz diff BASE NEW IMAGE..." in done.err
    base = run("base")
    done = featviz("diff", base, base, photos)
    assert done.code == 2
    assert "leave the images out" in done.err
    assert "only once" in featviz("diff", *models, "-").err


def test_an_image_that_fails_is_named(
    featviz: CLI, models: tuple[Path, Path], photos: Path
) -> None:
    """The others are compared; equal models end with exit code 3 then."""
    (photos / "c.png").write_bytes((photos / "a.png").read_bytes()[:100])
    done = featviz("diff", models[0], models[0], photos, *SMALL)
    assert done.code == 3
    assert "c.png" in done.err
    assert "2 images compared" in done.out


def test_modules_in_python(photos: Path, tmp_path: Path) -> None:
    """Two modules and an array of pixels; the names of their classes stand for them."""
    old = network()
    new = network()
    one_weight_of_new = new[2].weight.data
    one_weight_of_new[5, 3, 1, 1] += 0.02
    result = featviz.diff(old, new, photos, "Conv2d", size=32, out=tmp_path / "out")
    assert [layer.label for layer in result.differing] == ["2", "4"]
    assert result.base == "Sequential"
    assert result.out == tmp_path / "out" / "diff-maps"
    record = json.loads((result.out / "diff.json").read_text("utf-8"))
    assert record["layers"][1]["sqnr"] == pytest.approx(result.layers[1].sqnr)
    with pytest.raises(UsageError, match="models need images"):
        featviz.diff(tmp_path / "out/base", tmp_path / "out/new", size=32)


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
        rows.append([re.sub(r"<[^>]*>", "", cell) for cell in cells])
    return rows


def test_the_page_has_the_predictions_of_the_manifests(
    featviz: CLI, photos: Path, tmp_path: Path
) -> None:
    """Class and probability of each image before and after, changed ones first; a layer
    of single numbers has a table of them."""
    models = [classifier(tmp_path / f"{seed}.pth", seed) for seed in (0, 1)]
    page = tmp_path / "d.html"
    out = tmp_path / "out"
    command = ("diff", *models, photos, "--size", "32", "--layers", "Conv2d,Linear")
    done = featviz(*command, "--html", page, "--out", out)
    assert done.code == 4
    rows = prediction_rows(page.read_text("utf-8"))
    changed = []
    for name in ("a.png", "b.png"):
        scores = []
        for side in ("base", "new"):
            manifest = json.loads((out / side / name / "manifest.json").read_text())
            top = manifest["prediction"][0]
            scores += [f"class {top['index']}", f"{top['probability']:.1%}"]
        row = next(row for row in rows if row[1] == name)
        shown = [cell.replace("\N{NO-BREAK SPACE}", "") for cell in row[2:6]]
        assert shown == scores
        changed.append((scores[0] != scores[2], row[6]))
    assert {mark == "changed" for _, mark in changed} == {
        is_new for is_new, _ in changed
    }
    assert [row[6] for row in rows] == sorted((row[6] for row in rows), reverse=True)
    document = json.loads((out / "diff-maps" / "diff.json").read_text("utf-8"))
    assert len(document["predictions"]) == 2
