"""What the repository ships works: configurations, trained networks, examples of docstrings."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
from conftest import ROOT


def train_script(name: str = "digits") -> ModuleType:
    spec = importlib.util.spec_from_file_location("train", ROOT / f"configs/train_{name}_cnn.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shipped_model_is_what_the_script_makes() -> None:
    """Same architecture, one Sequential, and at most 400 KB."""
    path = ROOT / "configs" / "digits_cnn.pth"
    shipped = torch.load(path, weights_only=False)
    assert str(shipped) == str(train_script().build_model(32))
    assert path.stat().st_size <= 400 * 1024


@pytest.mark.slow
def test_the_colour_network_knows_the_colours_of_the_scenes() -> None:
    """It is what the script makes, and gives each scene's colours to within a tenth; grey itself is
    far off."""
    script, path = train_script("colour"), ROOT / "configs" / "colour_cnn.pth"
    shipped = torch.load(path, weights_only=False)
    assert str(shipped) == str(script.build_model()) and path.stat().st_size <= 200 * 1024
    for name in script.SCENES:
        scene = script.read_scene(ROOT / "sample_images/scenes" / name)[None]
        scene = scene[..., : scene.shape[2] // 8 * 8, : scene.shape[3] // 8 * 8]
        with torch.no_grad():
            given = shipped.float()(script.grey(scene))
        coloured = scene.amax(1) - scene.amin(1) > 0.2
        error, blind = (
            (x - scene).abs().mean(1)[coloured].mean() for x in (given, script.grey(scene))
        )
        assert error < 0.1 and error < 0.85 * blind, (name, error, blind)
