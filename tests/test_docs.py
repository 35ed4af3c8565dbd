"""What the documents say works as it stands: commands of the README, configs, docstrings."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from conftest import ROOT, SCENES, Outcome
from torch import nn

from featviz import api
from featviz.rundir.read import read_json

README = (ROOT / "README.md").read_text()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a clone has, to run the README's commands in."""
    for name in ("configs", "sample_images"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(SCENES / "spheres.jpg", tmp_path / "photo.jpg")
    shutil.copytree(SCENES, tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(marker: str) -> list[str]:
    """The lines of the code block behind a marker, without their comments."""
    block = README.split(marker, 1)[1].split("```sh\n", 1)[1].split("```", 1)[0]
    whole = block.replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in whole.splitlines() if line.strip()]


def test_readme_demo_command_draws_the_digits(clone: Path, featviz: Callable[..., Outcome]) -> None:
    """The featviz half of the set-up command draws 20 folders into out-digits."""
    (line,) = commands("<!-- demo command -->")
    install, run = line.split(" && ")
    assert install == "pip install -e ."
    assert featviz(*shlex.split(run)[1:]).code == 0
    assert len([p for p in (clone / "out-digits").iterdir() if p.is_dir()]) == 20


def test_ci_runs_the_readmes_test_command() -> None:
    """.ci/run finds the command in the README, so a missing install step cannot hide."""
    (line,) = commands("<!-- test command -->")
    assert line == "pip install -e '.[test]' && python -m pytest -n 2 --dist worksteal"
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_readme_use_commands_work(clone: Path, featviz: Callable[..., Outcome]) -> None:
    """Each command under Use, with random weights where it would download some."""
    torch.save(nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU()), clone / "model.pth")
    save_weights(clone / "weights.safetensors")
    (clone / "net.py").write_text(
        "from torch import nn\n"
        "def make_net(width):\n    return nn.Sequential(nn.Conv2d(1, width, 3))\n"
    )
    lines = [line for line in commands("## Use") if line.startswith("featviz")]
    assert len(lines) == 11
    for index, line in enumerate(lines):
        words = shlex.split(line.replace("scan.png", "photo.jpg"))[1:]
        if "resnet18" in words:
            words += ["--weights", "none"]
        if words[0] == "run" and "--out" not in words:
            words += ["--out", f"out{index}"]
        assert featviz(*words).code == 0, line


@pytest.mark.slow
def test_gallery_and_diff_commands_work(clone: Path, featviz: Callable[..., Outcome]) -> None:
    """The gallery's and diff's commands work on the demonstration's run and on two parts of one."""
    (line,) = commands("<!-- demo command -->")
    assert featviz(*shlex.split(line.split(" && ")[1])[1:]).code == 0
    for part in (1, 2):
        words = ["configs/digits_cnn.pth", "sample_images/digits", "--shard", f"{part}/2"]
        assert featviz("run", *words, "--out", f"part{part}").code == 0
    for line in commands("<!-- gallery -->") + commands("<!-- diff -->"):
        done = featviz(*shlex.split(line)[1:])
        assert done.code == 0, (line, done.err)


@pytest.mark.slow
@pytest.mark.parametrize("line", commands("<!-- gradients -->"))
def test_gradient_commands_work(line: str, clone: Path, featviz: Callable[..., Outcome]) -> None:
    """The commands of the section draw what it says, with random weights."""
    done = featviz(*shlex.split(line)[1:], "--weights", "none")
    assert done.code == 0, done.err


@pytest.mark.parametrize("line", commands("<!-- audit in CI -->"))
def test_audit_command_works(line: str, clone: Path, featviz: Callable[..., Outcome]) -> None:
    """The gates of the README's example hold, and the proof says that nothing changes."""
    done = featviz(*shlex.split(line)[1:])
    assert done.code == 0, done.err
    verified = json.loads((clone / "audit" / "audit.json").read_text())["verify"]
    assert verified["largest_change"] == 0
    assert json.loads((clone / "prune.json").read_text()) == {}


@pytest.mark.parametrize("line", commands("<!-- exemplars -->"))
def test_exemplar_commands_work(line: str, clone: Path, featviz: Callable[..., Outcome]) -> None:
    """Each command gives a sheet for every layer and class that its table names."""
    done = featviz(*shlex.split(line)[1:])
    assert done.code == 0, done.err
    out = clone / ("classes" if "classes" in line else "featviz-exemplars")
    sheets = [row["sheet"] for row in json.loads((out / "exemplars.json").read_text())["layers"]]
    assert all((out / sheet).is_file() and sheet in done.out for sheet in sheets) and sheets


def save_weights(path: Path) -> None:
    from safetensors.torch import save_file
    from torchvision import models

    save_file(models.resnet50().state_dict(), path)


@pytest.mark.parametrize("line", commands("working examples:"))
def test_config_commands_work(line: str, clone: Path, featviz: Callable[..., Outcome]) -> None:
    """The configurations that the README shows run as they are shown."""
    done = featviz(*shlex.split(line)[1:])
    assert done.code == 0, done.err


def test_every_config_is_valid_and_shown() -> None:
    """Each file in configs/ is named in the README's commands or its set-up."""
    for path in (ROOT / "configs").glob("*.toml"):
        tomllib.loads(path.read_text())
        assert f"configs/{path.name}" in README


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


def test_docstring_examples() -> None:
    """The examples of the public API give what they show."""
    assert doctest.testmod(api).attempted >= 5
    assert doctest.testmod(api).failed == 0


def test_readme_exit_codes_match_the_errors() -> None:
    """The README's table has the codes that the errors carry."""
    from featviz.cli import CLOSED_PIPE, INTERRUPTED
    from featviz.errors import CHECK_FAILED, FeatvizError, UsageError

    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert {
        0,
        FeatvizError.exit_code,
        UsageError.exit_code,
        3,
        CHECK_FAILED,
        INTERRUPTED,
        CLOSED_PIPE,
    } == codes


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
def test_retraining_a_tiny_version_learns(tmp_path: Path) -> None:
    """A few hundred steps at an eighth of the width beat guessing by far."""
    script = train_script()
    threads = torch.get_num_threads()
    code = script.main(
        ["--train-size", "3000", "--epochs", "6", "--width", "8", "--test-size", "300",
         "--out", str(tmp_path / "tiny.pth")]
    )  # fmt: skip
    torch.set_num_threads(threads)
    assert code in (0, None)
    model = torch.load(tmp_path / "tiny.pth", weights_only=False)
    images, labels = script.render_digits(200, np.random.default_rng(99))
    found = model(torch.as_tensor(images)).argmax(1)
    assert (found == torch.as_tensor(labels)).float().mean() > 0.5


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


@pytest.mark.slow
def test_retraining_the_colour_network_learns(tmp_path: Path) -> None:
    """Thirty steps take the loss well down, and the same command writes the same bytes."""
    script, threads = train_script("colour"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        scenes = [script.read_scene(ROOT / "sample_images/scenes" / script.SCENES[0])]
        torch.manual_seed(0)
        first = script.train(script.build_model(), scenes, 1, 2, 0)
        files = [tmp_path / "a.pth", tmp_path / "b.pth"]
        for file in files:
            script.main(["--steps", "30", "--batch-size", "2", "--out", str(file)])
        torch.manual_seed(0)
        assert script.train(script.build_model(), scenes, 60, 2, 0) < 0.75 * first
    finally:
        torch.set_num_threads(threads)
    assert files[0].read_bytes() == files[1].read_bytes()
