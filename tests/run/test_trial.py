"""A small part of scripts/trial_kills.py, always the same: kills and double starts."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import forked
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "trial_kills.py"
FULL = os.environ.get("FEATVIZ_TRIAL", "7 1 18").split()
"""Kills, double starts and seed; `FEATVIZ_TRIAL="100 30 5" pytest
tests/run/test_trial.py` tries more."""


def run_script(*arguments: str) -> None:
    """The script, as `python SCRIPT ARGUMENTS` runs it."""
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_killed_or_started_twice_nothing_is_lost(tmp_path: Path) -> None:
    """SIGKILL, SIGTERM and SIGHUP at random moments of run, --resume, --overwrite,
    report, --tensorboard, to one of three processes, and to a worker process or the
    command that has forked it; --resume started twice. What goes on afterwards ends
    with the bytes of a run that nobody has disturbed, with nothing left beside."""
    kills, starts, seed = FULL
    options = ["--kills", kills, "--double-starts", starts, "--seed", seed]
    process = forked.fork(tmp_path / "process", run_script, str(SCRIPT), *options)
    done = process.ended()
    assert done.code == 0, done.out + done.err
    assert f"{kills} kills (" in done.out
    assert f"{starts} double starts (" in done.out
    assert done.out.count(": 0 differences") == 2
    assert "× 130" in done.out
