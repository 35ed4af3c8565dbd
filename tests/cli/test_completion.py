"""Completion in bash, zsh and fish: commands, options, choices and paths, without
delay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.medium
@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("featviz run resnet18 --order s", "plain,similarity"),
        pytest.param("featviz iden", "plain,identify", marks=pytest.mark.slow),
    ],
)
def test_a_shell_gets_its_answers_without_torch(
    line: str, answer: str, tmp_path: Path
) -> None:
    """The answers are there, and only click and msgspec were imported for them."""
    typed = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", SHELL_CALL],
        env={**os.environ, "_FEATVIZ_COMPLETE": "bash_complete", **typed},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer in done.stdout.splitlines()
    assert set(done.stderr.split()) <= {
        "click",
        "featviz",
        "msgspec",
        "typing_extensions",
    }
