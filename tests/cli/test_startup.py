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


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["-h"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Help and version come at once."""
    printed, heavy = modules_after(*arguments)
    assert printed
    assert not heavy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run net.pth cat.png --max-maps 0", "--max-maps 0 is below 1"),
        ("run net.pth cat.png --overlay 3", "--overlay 3.0 is outside 0..1"),
        ("run net.pth cat.png --normalize zzz", "--normalize 'zzz' is no normalization mode"),
        ("run net.pth cat.png --layers re:b[", "is no regular expression"),
        ("audit net.pth cat.png --fail-on dead>0 --fail-on ded>5%", "there is no finding 'ded'"),
        ("run net.pth cat.png --device gpu", "--device 'gpu' is no device"),
        ("kernels net.pth --nrow 0", "--nrow 0 is below 1"),
        ("cam net.pth cat.png --overlay 2", "--overlay 2.0 is outside 0..1"),
        ("exemplars net.pth cat.png --top 0", "--top 0 is outside 1..1000"),
    ],
)
def test_a_bad_value_is_refused_before_anything_heavy_is_imported(words: str, message: str) -> None:
    """An error does not wait seconds for torch where the value alone is wrong."""
    code = (
        "import sys\nfrom featviz.cli import main\ntry:\n    code = main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        f"print(code, *sys.modules.keys() & {HEAVY!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=True
    )
    assert message in done.stderr and done.stdout.strip() == "2"


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
