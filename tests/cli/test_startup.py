"""Help, version and completion: what they say, and that they import nothing heavy."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from conftest import Outcome

from featviz import __version__, cli

from .outcomes import Run

HEAVY = ("torch", "torchvision", "numpy", "PIL", "matplotlib", "rich")


def modules_after(*arguments: str, **environment: str) -> tuple[str, set[str]]:
    """What a command line prints, and which heavy packages it has imported by its end."""
    code = (
        "import atexit, sys\n"
        f"heavy = {HEAVY!r}\n"
        "atexit.register(lambda: print(*[m for m in heavy if m in sys.modules], file=sys.stderr))\n"
        "from featviz.cli import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=True,
    )
    return done.stdout, set(done.stderr.split())


EACH = f"""
import contextlib, io, sys
from featviz import cli
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


@pytest.mark.parametrize("words", ["featviz r", "featviz run --norm"])
def test_completion_imports_nothing_heavy(words: str) -> None:
    """Completing a command, or an option of one, does not wait for imports."""
    printed, heavy = modules_after(
        _FEATVIZ_COMPLETE="bash_complete",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
    )
    assert "plain,run" in printed or "plain,--normalize" in printed
    assert not heavy


def test_version(featviz: Run) -> None:
    """--version says the version on stdout."""
    assert featviz("--version") == Outcome(0, f"featviz, version {__version__}\n", "")


@pytest.mark.parametrize(
    "command", [[], ["run"], ["layers"], ["summary"], ["kernels"]], ids=" ".join
)
def test_help_has_examples(command: list[str], featviz: Run) -> None:
    """Every help has an example of a whole command line, and tells of both verbosities."""
    text = featviz(*command, "--help").out
    assert re.search(rf"Examples:\n +{' '.join(['featviz', *command])} \w+", text)
    whole = featviz(*command, "--help-all").out if command else ""
    assert not command or ("--quiet" in whole and "--verbose" in whole and "--config" in whole)


def test_the_group_lists_every_command(featviz: Run) -> None:
    """--help has each command with its line."""
    text = featviz("--help").out
    assert all(re.search(rf"^  {n} +{re.escape(h)}$", text, re.M) for n, h in cli.COMMANDS.items())
