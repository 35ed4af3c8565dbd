"""`--flat`: files with image and layer in their names, which every reader finds by the manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, Outcome
from PIL import Image

from featviz.records import Layer
from featviz.rundir.ownership import left_of_image
from featviz.rundir.read import read_json
from featviz.rundir.write import ImageFolder

BASE = ("--layers", "Conv2d,ReLU", "--capture", "output,grad", "--tensors", "npy", "--figure")


@pytest.fixture
def flat(featviz: Callable[..., Outcome], tiny_file: Path, photos: Path, tmp_path: Path) -> Path:
    """A run with --flat, beside one without in `deep`."""
    for name, more in (("deep", ()), ("flat", ("--flat",))):
        words = ("run", tiny_file, photos, *BASE, *SMALL, "--out", tmp_path / name, *more)
        assert featviz(*words).code == 0
    return tmp_path / "flat"


@pytest.mark.slow
def test_names_tell_image_layer_and_kind(flat: Path, tmp_path: Path) -> None:
    """No folder for a layer; the pictures are those of a run without the option."""
    folders = [path for path in flat.iterdir() if path.is_dir()]
    assert len(folders) == 2
    for folder in folders:
        stem = folder.name.partition(".")[0]
        wanted = {"input.png", "stats.npz", "manifest.json"} | {
            f"{stem}__{place}{ending}"
            for place in ("001_0", "002_1")
            for ending in (
                *(".png", ".npy", ".output.figure.png"),
                *(".grad.png", ".grad.npy", ".grad.figure.png"),
            )
        }
        assert {path.name for path in folder.iterdir()} == wanted
        deep = tmp_path / "deep" / folder.name
        for row, other in zip(
            read_json(folder / "manifest.json")["captures"],
            read_json(deep / "manifest.json")["captures"],
            strict=True,
        ):
            assert (row["layer"], row["kind"]) == (other["layer"], other["kind"])
            pictures = [Image.open(folder / row["file"]), Image.open(deep / other["file"])]
            assert np.array_equal(*map(np.asarray, pictures))


@pytest.mark.slow
def test_every_reader_finds_the_files(
    flat: Path, tmp_path: Path, featviz: Callable[..., Outcome]
) -> None:
    """diff finds no difference to the other names; the gallery, a sheet and an overwrite work."""
    assert featviz("diff", tmp_path / "deep", flat).code == 0
    assert featviz("report", flat).code == 0
    assert featviz("sheet", flat, "--layer", "0", "--out", tmp_path / "sheet.png").code == 0


@pytest.mark.slow
def test_run_is_resumed_and_replaced(
    flat: Path, tmp_path: Path, tiny_file: Path, photos: Path, featviz: Callable[..., Outcome]
) -> None:
    """--resume keeps what is complete and draws what is not; --overwrite leaves nothing behind."""
    one = sorted(path for path in flat.iterdir() if path.is_dir())[0]
    before = {path.name: path.read_bytes() for path in one.iterdir()}
    (one / "manifest.json").unlink()
    base = ("run", tiny_file, photos, *BASE, *SMALL, "--out", flat)
    done = featviz(*base, "--resume")
    assert done.code == 1 and "there --flat, here none" in done.err
    assert featviz(*base, "--flat", "--resume").code == 0
    assert {path.name: path.read_bytes() for path in one.iterdir()} == before
    assert featviz(*base, "--overwrite").code == 0
    assert not list(flat.rglob("*__*"))


def test_names_stay_short_and_our_own(tmp_path: Path) -> None:
    """A long or odd name of an image leaves the layer's place readable, and what a killed run left
    under such a name is known to be ours; no two files get one name."""
    layer = Layer(4, "layer1.0.conv1", "Conv2d")
    folder = ImageFolder(tmp_path, "x")
    folder.path.mkdir()
    for image in ("a/cat.jpg", "x" * 300 + ".png", "層" * 90 + ".png", "\udcff.png", ".png", "a b"):
        names = [
            folder.file(layer, name, image)
            for name in ("output.png", "output.grad.png", "grad.png", "output.npy", "grad.0.webp")
        ]
        assert len(set(names)) == 5 and all("__004_layer1.0.conv1" in name for name in names)
        assert max(map(len, names)) <= 100 and "/" not in "".join(names)
        for name in names:
            (folder.path / name).touch()
        assert sorted(left_of_image(tmp_path, "x")) == sorted(f"x/{name}" for name in names)
        for name in names:
            (folder.path / name).unlink()
    (folder.path / "holiday.png").touch()
    assert not left_of_image(tmp_path, "x")
