"""`--flat`: files with image and layer in their names, which every reader finds by the
manifest."""

from __future__ import annotations

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

BASE = (
    "--layers",
    "Conv2d,ReLU",
    "--capture",
    "output,grad",
    "--tensors",
    "npy",
    "--figure",
)


@pytest.mark.slow
def test_a_flat_run(
    tmp_path: Path, featviz: Run, tiny_file: Path, photos: Path
) -> None:
    """No folder for a layer, and the pictures of a run without the option; every reader
    finds them, --resume keeps what is complete and draws what is not, --overwrite
    leaves nothing behind."""
    flat, deep = tmp_path / "flat", tmp_path / "deep"
    base = ("run", tiny_file, photos, *BASE, *SMALL, "--out")
    assert featviz(*base, deep).code == featviz(*base, flat, "--flat").code == 0
    folders = sorted(path for path in flat.iterdir() if path.is_dir())
    assert len(folders) == 2
    for folder in folders:
        check_flat_folder(folder, deep / folder.name)

    assert featviz("diff", deep, flat).code == 0
    before = tree(flat)
    (folders[0] / "manifest.json").unlink()
    refused(featviz(*base, flat, "--resume"), 1, "there --flat, here none")
    assert featviz(*base, flat, "--flat", "--resume").code == 0
    assert tree(flat) == before
    assert featviz(*base, flat, "--overwrite").code == 0
    assert not list(flat.rglob("*__*"))


def check_flat_folder(folder: Path, deep: Path) -> None:
    """An image folder holds the files of the same image in a run without the option,
    under names that begin with the image's."""
    stem = folder.name.partition(".")[0]
    prefixes = (f"{stem}__001_0", f"{stem}__002_1")
    layers = {prefix + ending for prefix in prefixes for ending in ENDINGS}
    names = {path.name for path in folder.iterdir()}
    assert names == {"input.png", "stats.npz", "manifest.json"} | layers
    rows = read_json(folder / "manifest.json")["captures"]
    deep_rows = read_json(deep / "manifest.json")["captures"]
    for row, deep_row in zip(rows, deep_rows, strict=True):
        assert row["layer"] == deep_row["layer"]
        assert row["kind"] == deep_row["kind"]
        picture = np.asarray(Image.open(folder / row["file"]))
        assert np.array_equal(picture, np.asarray(Image.open(deep / deep_row["file"])))


ENDINGS = (
    ".png",
    ".npy",
    ".output.figure.png",
    ".grad.png",
    ".grad.npy",
    ".grad.figure.png",
)


def test_names_stay_short_and_our_own(tmp_path: Path) -> None:
    """A long or odd name of an image leaves the layer's place readable, and what a
    killed run left under such a name is known to be ours; no two files get one name."""
    layer = Layer(4, "layer1.0.conv1", "Conv2d")
    folder = ImageFolder(RunDirectory(Folder.open(tmp_path)), "x")
    for image in (
        "a/cat.jpg",
        "x" * 300 + ".png",
        "層" * 90 + ".png",
        "\udcff.png",
        ".png",
        "a b",
    ):
        names = [
            folder.file(layer, name, image)
            for name in (
                "output.png",
                "output.grad.png",
                "grad.png",
                "output.npy",
                "grad.0.webp",
            )
        ]
        assert len(set(names)) == 5 and all(
            "__004_layer1.0.conv1" in name for name in names
        )
        assert max(map(len, names)) <= 100 and "/" not in "".join(names)
        assert all(map(is_own_name, names)) and not is_own_name("holiday.png")
