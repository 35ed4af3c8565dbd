"""A run that tests change: drawn once, and copied for each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from runs import SMALL

from featviz import cli


@pytest.fixture(scope="session")
def drawn_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is: nothing in a run directory tells when and where it was drawn."""
    return tmp_path_factory.mktemp("drawn") / "out"


@pytest.fixture
def ran(tiny_file: Path, photos: Path, tmp_path: Path, drawn_once: Path) -> Path:
    """The directory of a run of the tiny model on the photos, of which a folder of
    tests has two, another four."""
    run = drawn_once.with_name(f"out-{len(list(photos.rglob('*.png')))}")
    if not run.exists():
        words = ["run", tiny_file, photos, "--out", run, *SMALL, "-q"]
        assert cli.guarded([str(word) for word in words]) == 0
    return shutil.copytree(run, tmp_path / "out")
