"""What is imported for a command: nothing heavy where a value is wrong, and torchvision
only for models of torchvision."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import forked
import pytest
from conftest import Outcome
from PIL import Image
from runs import run_json

from featviz import cli

from .outcomes import apart

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""


SLOW = {"torchvision", "sympy", "matplotlib", "scipy"}
"""Libraries that take a second to import."""


def run_and_tell(*arguments: str) -> None:
    """Run a command, and print which slow libraries were imported for it, beside what
    torch itself imports."""
    import torch  # noqa: F401

    before = set(sys.modules)
    code = cli.guarded(list(arguments))
    print(*sorted(SLOW & (set(sys.modules) - before)), flush=True)
    sys.exit(code)


@pytest.mark.slow
def test_a_network_of_ones_own_needs_torch_alone(tmp_path: Path) -> None:
    """torchvision takes as long to import as torch; only what is torchvision's waits
    for it, and run.json has its version all the same."""
    (tmp_path / "net.py").write_text(NET)
    Image.effect_noise((80, 60), 50).convert("RGB").save(tmp_path / "noise.png")
    line = "run net.py:Net noise.png --out out --preset clip --size 64x48 --crop 32 -q"
    done = forked.fork(tmp_path / "process", run_and_tell, *line.split()).ended()
    assert done == Outcome(0, "\n", "")
    assert run_json(tmp_path / "out")["torchvision"] == metadata.version("torchvision")


BAD = {
    "run net.pth cat.png --nrow 0": "--nrow 0: expected an integer ≥ 1",
    "run net.pth cat.png --normalize zzz": "--normalize 'zzz' is no normalization mode",
    "audit net.pth cat.png --fail-on dead>0 --fail-on ded>5%": (
        "there is no finding 'ded'"
    ),
}


@pytest.mark.medium
def test_somebodys_folder_at_out_is_refused_before_torch_is_imported(
    tmp_path: Path,
) -> None:
    """Nothing replaces it, so that the error waits neither for torch nor for half a
    second."""
    (tmp_path / "net.py").write_text(NET)
    Image.effect_noise((80, 60), 50).save(tmp_path / "noise.png")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").touch()
    lines = []
    for command in ("run", "audit", "exemplars", "kernels"):
        images = "" if command == "kernels" else "noise.png"
        lines.append(f"{command} net.py:Net {images} --out thesis --overwrite")
    for done in apart(lines, tmp_path):
        assert done.code == 1
        assert "--out thesis is not empty and holds no" in done.err
        assert "torch" not in done.imported
        assert done.seconds < 0.5


@pytest.mark.medium
def test_a_bad_value_is_refused_before_anything_heavy_is_imported(
    tmp_path: Path,
) -> None:
    """An error does not wait seconds for torch where the value alone is wrong."""
    for message, done in zip(BAD.values(), apart([*BAD], tmp_path), strict=True):
        assert done.code == 2
        assert done.imported == []
        assert message in done.err


@pytest.mark.medium
def test_an_image_that_is_not_there_is_said_before_torch_is_imported(
    tmp_path: Path,
) -> None:
    """Also behind others that are."""
    Image.effect_noise((80, 60), 50).save(tmp_path / "noise.png")
    lines = []
    for command in ("run resnet18", "look resnet18", "diff resnet18 resnet34"):
        lines += [f"{command} cat.png", f"{command} noise.png cat.png"]
    for done in apart(lines, tmp_path):
        assert done.code == 2
        assert "no image 'cat.png'" in done.err
        assert "torch" not in done.imported
