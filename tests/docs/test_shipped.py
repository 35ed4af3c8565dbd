"""What the repository ships works: configurations, trained networks, examples of docstrings."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT, Outcome

from featviz.rundir.schema import read_json


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the configurations and sample images of a clone."""
    for name in ("configs", "sample_images"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_stages_config_draws_what_it_says(clone: Path, featviz: Callable[..., Outcome]) -> None:
    """resnet18_stages: five layers, at most 64 maps, one range a layer, in colour."""
    done = featviz("run", "--config", "configs/resnet18_stages.toml", "--weights", "none")
    assert done.code == 0
    for manifest in (clone / "out-resnet18").rglob("manifest.json"):
        rows = read_json(manifest)["captures"]
        assert [row["layer"] for row in rows] == ["conv1", "layer1", "layer2", "layer3", "layer4"]
        assert all(
            row["normalize"] == "layer" and len(row.get("channels", [0] * 64)) == 64 for row in rows
        )


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
