"""Help, version and completion: what they say, and that they import nothing heavy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from conftest import Outcome
from PIL import Image
from torch import nn

from featviz import __version__, cli

from .outcomes import Run

HEAVY = ("torch", "torchvision", "numpy", "PIL", "matplotlib", "rich")


def after(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line's end; the last line of stderr has the heavy packages that it imported."""
    code = (
        "import atexit, sys\n"
        f"heavy = {HEAVY!r}\n"
        "atexit.register(lambda: print(*[m for m in heavy if m in sys.modules], file=sys.stderr))\n"
        "from featviz.cli import main\n"
        "main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def modules_after(*arguments: str, **environment: str) -> tuple[str, set[str]]:
    """What a command line prints, and which heavy packages it has imported by its end."""
    done = after(arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, set(done.stderr.splitlines()[-1].split())


EACH = f"""
import contextlib, io, sys
from featviz import __version__, cli
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.guarded(line.split())
    print(line, code, len(out.getvalue()) > 10, *[m for m in {HEAVY!r} if m in sys.modules])
"""
"""Prints of each command line its exit code, whether it said something, and what is imported by
then."""


def test_help_imports_nothing_heavy() -> None:
    """Help and version of all commands come at once; of a failure the first line says whose."""
    lines = ["--help", "-h", "--version", *(f"{name} --help" for name in cli.COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", EACH, *lines], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{line} 0 True" for line in lines]


NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in: a network of one's own, its weights, a program of it, and an image."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    torch.save(net.state_dict(), tmp_path / "net.pth")
    torch.save(net, tmp_path / "whole.pth")
    torch.export.save(torch.export.export(net, (torch.zeros(1, 3, 64, 64),)), tmp_path / "net.pt2")
    Image.effect_noise((80, 60), 50).convert("RGB").save(tmp_path / "noise.png")
    np.save(tmp_path / "numbers.npy", np.zeros((3, 60, 80), np.float32))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "run net.py:Net noise.png --out out",
        "run net.py:Net noise.png --out out --preset clip --size 64x48 --crop 32 --channels 3",
        "run net.py:Net numbers.npy --out out --size 32x32 --interpolation lanczos",
        "run net.pth noise.png --arch net.py:Net --out out",
        "run whole.pth noise.png --out out",
        "run net.pt2 noise.png --out out --trust",
        "look net.py:Net noise.png --out page.png",
        "layers net.py:Net",
        "kernels net.py:Net --out out",
        "audit net.py:Net noise.png",
        "exemplars net.py:Net noise.png --out out",
        "cam net.py:Net noise.png --target class:1 --out page.png",
    ],
)
def test_a_network_of_ones_own_needs_no_torchvision(line: str, own: Path) -> None:
    """torchvision takes as long to import as torch; only what is torchvision's waits for it."""
    _, heavy = modules_after(*line.split(), "-q")
    assert "torch" in heavy and "torchvision" not in heavy
    run = own / "out" / "run.json"
    if run.is_file():
        assert json.loads(run.read_text())["torchvision"] == torchvision.__version__


@pytest.mark.slow
def test_a_model_of_torchvisions_is_seen_to_import_it(own: Path) -> None:
    """The oracle of the test above tells the two apart."""
    assert "torchvision" in modules_after("layers", "resnet18", "--weights", "none")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run net.pth cat.png --max-maps 0", "max_maps=0: expected an integer ≥ 1"),
        ("run net.pth cat.png --overlay 3", "overlay=3: expected a number from 0 to 1"),
        ("run net.pth cat.png --normalize zzz", "--normalize 'zzz' is no normalization mode"),
        ("run net.pth cat.png --layers re:b[", "is no regular expression"),
        ("audit net.pth cat.png --fail-on dead>0 --fail-on ded>5%", "there is no finding 'ded'"),
        ("run net.pth cat.png --device gpu", "--device 'gpu' is no device"),
        ("kernels net.pth --nrow 0", "nrow=0: expected an integer ≥ 1"),
        ("cam net.pth cat.png --overlay 2", "overlay=2: expected a number from 0 to 1"),
        ("exemplars net.pth cat.png --top 0", "top=0: expected an integer from 1 to 1000"),
    ],
)
def test_a_bad_value_is_refused_before_anything_heavy_is_imported(words: str, message: str) -> None:
    """An error does not wait seconds for torch where the value alone is wrong."""
    done = after(words.split())
    assert done.returncode == 2
    assert message in done.stderr and not done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", [[], ["run"], ["layers"], ["kernels"]], ids=" ".join)
def test_help_has_examples(command: list[str], featviz: Run) -> None:
    """Every help has an example of a whole command line, and tells of both verbosities."""
    text = featviz(*command, "--help").out
    assert re.search(rf"Examples:\n +{' '.join(['featviz', *command])} \w+", text)
    whole = featviz(*command, "--help-all").out if command else ""
    assert not command or ("--quiet" in whole and "--verbose" in whole and "--config" in whole)


def test_the_group_lists_every_command(featviz: Run) -> None:
    """--help has each command with its line; --version says the version on stdout."""
    assert featviz("--version") == Outcome(0, f"featviz, version {__version__}\n", "")
    text = featviz("--help").out
    assert all(re.search(rf"^  {n} +{re.escape(h)}$", text, re.M) for n, h in cli.COMMANDS.items())
