"""`--flat`: files with image and layer in their names, which every reader finds by the
manifest."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, Run
from PIL import Image
from runs import refused, tree

from featviz.records import Layer
from featviz.rundir.folder import Folder
from featviz.rundir.ownership import is_own_name
from featviz.rundir.schema import read_json
from featviz.rundir.write import ImageFolder, RunDirectory

ENDINGS = (
    ".png",
    ".npy",
    ".output.figure.png",
    ".grad.png",
    ".grad.npy",
    ".grad.figure.png",
)


@pytest.fixture
def base(tiny_file: Path, photos: Path) -> list[object]:
    """A run with all kinds of files, without its folder."""
    kinds = ["--capture", "output,grad", "--tensors", "npy", "--figure"]
    return ["run", tiny_file, photos, *kinds, *SMALL, "--out"]


@pytest.fixture
def flat(featviz: Run, base: list[object], tmp_path: Path) -> Path:
    """The run with --flat."""
    assert featviz(*base, tmp_path / "flat", "--flat").code == 0
    return tmp_path / "flat"


@pytest.mark.slow
def test_a_flat_run_has_the_pictures_of_a_deep_one(
    featviz: Run, base: list[object], flat: Path, tmp_path: Path
) -> None:
    """There is no folder for a layer: names begin with the image's."""
    deep = tmp_path / "deep"
    assert featviz(*base, deep).code == 0
    assert featviz("diff", deep, flat).code == 0
    for image in ("00", "01"):
        check_flat_folder(flat / f"{image}.png", deep / f"{image}.png")


def check_flat_folder(folder: Path, deep: Path) -> None:
    """An image folder holds the files of the same image in a run without the option,
    under names that begin with the image's."""
    layers = (f"{folder.stem}__001_0", f"{folder.stem}__002_1")
    names = {layer + ending for layer, ending in product(layers, ENDINGS)}
    names |= {"input.png", "stats.npz", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == names
    rows = read_json(folder / "manifest.json")["captures"]
    deep_rows = read_json(deep / "manifest.json")["captures"]
    for row, deep_row in zip(rows, deep_rows, strict=True):
        assert (row["layer"], row["kind"]) == (deep_row["layer"], deep_row["kind"])
        picture = np.asarray(Image.open(folder / row["file"]))
        deep_picture = np.asarray(Image.open(deep / deep_row["file"]))
        np.testing.assert_array_equal(picture, deep_picture)


@pytest.mark.slow
def test_a_flat_run_goes_on_as_one(
    featviz: Run, base: list[object], flat: Path
) -> None:
    """--resume keeps what is complete and draws what is not; without --flat it is
    another run, which --overwrite replaces as a whole."""
    before = tree(flat)
    (flat / "00.png" / "manifest.json").unlink()
    refused(featviz(*base, flat, "--resume"), 1, "there --flat, here the default")
    assert featviz(*base, flat, "--flat", "--resume").code == 0
    assert tree(flat) == before
    assert featviz(*base, flat, "--overwrite").code == 0
    assert not list(flat.rglob("*__*"))


FILES = ("output.png", "output.grad.png", "grad.png", "output.npy", "grad.0.webp")


@pytest.mark.parametrize(
    "image",
    [
        "a/cat.jpg",
        "x" * 300 + ".png",
        "層" * 90 + ".png",
        "\udcff.png",
        ".png",
        "a b",
    ],
    ids=lambda name: ascii(name)[:20],
)
def test_names_stay_short_and_our_own(image: str, tmp_path: Path) -> None:
    """A long or odd name of an image leaves the layer's position readable, what a killed
    run left under such a name is known to be ours, and no two files get one name."""
    layer = Layer(4, "layer1.0.conv1", "Conv2d")
    folder = ImageFolder(RunDirectory(Folder.open(tmp_path)), "x")
    names = {folder.file(layer, name, image) for name in FILES}
    assert len(names) == 5
    for name in names:
        assert "__004_layer1.0.conv1" in name
        assert len(name) <= 100
        assert "/" not in name
        assert is_own_name(name)


def test_a_name_of_somebody_else_is_not_our_own() -> None:
    """A photograph has no layer in its name."""
    assert not is_own_name("holiday.png")


@pytest.mark.parametrize(
    ("image", "stem"),
    [
        ("in/cat.jpg", "cat"),
        (f"{'a' * 60}.jpg", "a" * 40),
        (f"{'ä' * 60}.jpg", "ä" * 20),
        (f"{'猫' * 60}.jpg", "猫" * 13),
    ],
)
def test_of_a_long_name_the_beginning_stands_in_the_files(
    image: str, stem: str, tmp_path: Path
) -> None:
    """Forty bytes at most, and whole letters: what follows tells the files apart."""
    folder = RunDirectory(Folder.open(tmp_path)).image(image)
    layer = Layer(4, "layer1.0.conv1", "Conv2d")
    name = folder.file(layer, "output.call1.png", image=image)
    assert name == f"{stem}__004_layer1.0.conv1.output.call1.png"
