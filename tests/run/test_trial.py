"""A small part of scripts/trial_kills.py, always the same: kills and double starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "trial_kills.py"
FULL = os.environ.get("FEATVIZ_TRIAL", "7 1 18").split()
"""Kills, double starts and seed; `FEATVIZ_TRIAL="100 30 5" pytest
tests/run/test_trial.py` tries more."""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_killed_or_started_twice_nothing_is_lost() -> None:
    """SIGKILL, SIGTERM and SIGHUP at random moments of run, --resume, --overwrite,
    report, --tensorboard, to one of three processes, and to a worker process or the
    command that has forked it; --resume started twice. What goes on afterwards ends
    with the bytes of a run that nobody has disturbed, with nothing left beside."""
    kills, starts, seed = FULL
    options = ["--kills", kills, "--double-starts", starts, "--seed", seed]
    done = subprocess.run(
        [sys.executable, SCRIPT, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills (" in done.stdout
    assert f"{starts} double starts (" in done.stdout
    assert done.stdout.count(": 0 differences") == 2
    assert "× 130" in done.stdout
