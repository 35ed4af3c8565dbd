"""What is imported for a command: nothing heavy where a value is wrong, and torchvision
only for models of torchvision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torchvision
from PIL import Image

from .outcomes import apart

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""

WITHOUT = ["run net.py:Net noise.png --out 1 --preset clip --size 64x48 --crop 32"]
OF_TORCHVISION = "layers resnet18 --weights none"
"""By which one sees that the two are told apart."""


@pytest.mark.slow
def test_a_network_of_ones_own_needs_no_torchvision(tmp_path: Path) -> None:
    """torchvision takes as long to import as torch; only what is torchvision's waits
    for it, and run.json has its version all the same."""
    (tmp_path / "net.py").write_text(NET)
    Image.effect_noise((80, 60), 50).convert("RGB").save(tmp_path / "noise.png")
    lines = [f"{line} -q" for line in (*WITHOUT, OF_TORCHVISION)]
    for line, done in zip(lines, apart(lines, tmp_path, "import torch"), strict=True):
        assert done.code == 0, (line, done.err)
        assert ("torchvision" in done.imported) == line.startswith(OF_TORCHVISION), line
    versions = {
        json.loads(path.read_text())["torchvision"]
        for path in tmp_path.glob("?/run.json")
    }
    assert versions == {torchvision.__version__}


BAD = {
    "run net.pth cat.png --nrow 0": "nrow=0: expected an integer ≥ 1",
    "run net.pth cat.png --normalize zzz": "--normalize 'zzz' is no normalization mode",
    "audit net.pth cat.png --fail-on dead>0 --fail-on ded>5%": (
        "there is no finding 'ded'"
    ),
}


@pytest.mark.parametrize("command", ["run", "audit", "exemplars", "kernels"])
def test_a_folder_of_others_at_out_is_refused_before_torch_is_imported(
    command: str, tmp_path: Path
) -> None:
    """Nothing replaces it, so that the error waits neither for torch nor for half a
    second."""
    (tmp_path / "net.py").write_text(NET)
    Image.effect_noise((80, 60), 50).save(tmp_path / "noise.png")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").touch()
    images = "" if command == "kernels" else "noise.png"
    [done] = apart(
        [f"{command} net.py:Net {images} --out thesis --overwrite"], tmp_path
    )
    assert done.code == 1
    assert "--out thesis is not empty and holds no" in done.err
    assert "torch" not in done.imported
    assert done.seconds < 0.5


def test_a_bad_value_is_refused_before_anything_heavy_is_imported(
    tmp_path: Path,
) -> None:
    """An error does not wait seconds for torch where the value alone is wrong."""
    for (line, message), done in zip(BAD.items(), apart([*BAD], tmp_path), strict=True):
        assert (done.code, done.imported) == (2, []) and message in done.err, (
            line,
            done,
        )
