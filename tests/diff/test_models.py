"""`featviz diff OLD NEW IMAGE...`: both models are run, and their runs compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
