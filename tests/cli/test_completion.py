"""Completion in bash, zsh and fish: names, classes and paths, without torch and without delay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import CompletionItem
from conftest import Outcome
from torch import nn
from torchvision import models

from featviz.cli import complete as completing
from featviz.cli.commands import run

Run = Callable[..., Outcome]

SHELL_CALL = """
import atexit, sys
before = set(sys.modules)

@atexit.register
def report():
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    print(*(new - sys.stdlib_module_names), file=sys.stderr)

from featviz.cli import main
main()
"""
"""Completes a command line, and says which packages this has imported."""


def offered(values: list[CompletionItem]) -> list[tuple[str, str]]:
    return [(item.type, item.value) for item in values]


def complete(function: Callable[..., list[CompletionItem]], text: str) -> list[tuple[str, str]]:
    ctx = run.command.make_context("run", [], resilient_parsing=True)
    return offered(function(ctx, run.command.params[0], text))


def test_the_names_are_torchvisions() -> None:
    """The list that is read in place of torchvision has its models, in its order."""
    assert completing.NAMES.read_text().split() == models.list_models()


def test_the_classes_are_torchs() -> None:
    """Every class that is offered is a module of torch.nn."""
    classes = completing._CLASSES.split()
    assert {"Conv2d", "ReLU", "Linear", "BatchNorm2d"} <= set(classes)
    assert all(issubclass(getattr(nn, name), nn.Module) for name in classes)


def test_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of torchvision's names that begin so."""
    monkeypatch.chdir(tmp_path)
    expected = [("plain", name) for name in models.list_models() if name.startswith("resnet1")]
    assert complete(completing.models, "resnet1") == expected and len(expected) == 3


def test_models_and_what_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names fit, model files and folders of this folder stand with them; no hidden ones, no
    pictures. Where none fits, the shell completes paths."""
    monkeypatch.chdir(tmp_path)
    for name in ("mob.pth", "mob.png", "mobile.py", ".mob.pth", "other.pth"):
        Path(name).touch()
    Path("mobs").mkdir()
    found = complete(completing.models, "mob")
    assert found[-3:] == [("plain", "mob.pth"), ("plain", "mobile.py"), ("plain", "mobs/")]
    assert {name for _, name in found[:-3]} <= set(models.list_models())
    for text in ("mob.", "./m", "/etc/", "configs/dig", ".mob"):
        assert complete(completing.models, text) == [("file", text)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("Conv2", ["Conv2d"]),
        ("Conv2d,ReL", ["Conv2d,ReLU", "Conv2d,ReLU6"]),
        ("!Flat", ["!Flatten"]),
        ("layer1.*,!GE", ["layer1.*,!GELU"]),
        ("layer1", []),
    ],
)
def test_layers_complete_their_last_selector(text: str, values: list[str]) -> None:
    """Class names behind the last comma, and behind a `!`; what stands before stays."""
    assert complete(completing.layers, text) == [("plain", value) for value in values]


def asked(shell: str, line: str, cwd: Path) -> tuple[list[str], set[str]]:
    """What a shell would get for a command line: the answers, and the packages that were imported
    for them, without those of Python itself."""
    words = line.split(" ")
    done = subprocess.run(
        [sys.executable, "-c", SHELL_CALL],
        env={
            **os.environ,
            "_FEATVIZ_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1),
        },
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines(), set(done.stderr.split())


@pytest.mark.parametrize(
    ("shell", "line", "answer"),
    [
        ("bash", "featviz comp", "plain,completion"),
        ("bash", "featviz run resnet1", "plain,resnet152"),
        ("bash", "featviz run model.p", "file,model.p"),
        ("bash", "featviz run resnet18 photos/", "file,photos/"),
        ("bash", "featviz layers vgg1", "plain,vgg19_bn"),
        ("bash", "featviz run w.pth --arch swin_", "plain,swin_t"),
        ("bash", "featviz run resnet18 --layers Conv2d,ReL", "plain,Conv2d,ReLU6"),
        ("bash", "featviz run resnet18 --max-f", "plain,--max-files"),
        ("bash", "featviz run resnet18 --pick s", "plain,spread"),
        ("zsh", "featviz run resnet1", "resnet152"),
        ("zsh", "featviz run model.p", "file"),
        ("fish", "featviz run resnet1", "plain,resnet152"),
        ("fish", "featviz run model.p", "file,model.p"),
    ],
)
def test_shells_get_their_answers_without_torch(
    shell: str, line: str, answer: str, tmp_path: Path
) -> None:
    """The names are there, and nothing was imported for them that would take time: only click."""
    printed, packages = asked(shell, line, tmp_path)
    assert answer in printed
    assert packages == {"click", "featviz"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script(shell: str, featviz: Run) -> None:
    """`featviz completion SHELL` prints what calls featviz back, and nothing else."""
    done = featviz("completion", shell)
    assert done.code == 0 and not done.err
    assert f"_FEATVIZ_COMPLETE={shell}_complete" in done.out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.out, text=True, check=True)


def test_help_says_where_to_put_it(featviz: Run) -> None:
    """A line for each shell; another shell is a usage error that names the three."""
    text = featviz("completion", "--help").out
    for line in (
        "featviz completion bash > ~/.local/share/bash-completion/completions/featviz",
        "featviz completion zsh > ~/.zfunc/_featviz",
        "featviz completion fish > ~/.config/fish/completions/featviz.fish",
    ):
        assert line in text
    done = featviz("completion", "tcsh")
    assert done.code == 2 and "'bash', 'zsh', 'fish'" in done.err


def test_bash_completes(tmp_path: Path, featviz: Run) -> None:
    """The script, sourced in a real bash, fills COMPREPLY for a command line that ends in Tab."""
    if not shutil.which("bash"):
        pytest.skip("no bash here")
    (tmp_path / "featviz").write_text(f'#!/bin/sh\nexec {sys.executable} -m featviz "$@"\n')
    (tmp_path / "featviz").chmod(0o755)
    (tmp_path / "script").write_text(featviz("completion", "bash").out)
    code = (
        "source script; COMP_WORDS=(featviz run resnet1); COMP_CWORD=2; "
        '_featviz_completion featviz; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["resnet101", "resnet152", "resnet18"]
