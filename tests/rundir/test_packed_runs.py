"""An archive of a run where a run is taken: one line says what it is and how to unpack it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome
from rundirs import Drawn, write_run

from featviz.rundir.archive import pack

CLI = Callable[..., Outcome]

TAKERS = [
    ("report", "PACKED"),
    ("report", "RUN", "--compare", "PACKED"),
    ("diff", "PACKED", "RUN"),
    ("diff", "RUN", "PACKED"),
    ("verify", "PACKED"),
    ("sheet", "PACKED", "--layer", "x"),
    ("merge", "RUN", "PACKED", "--out", "OUT"),
]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A run of one image as a zip file, beside the run."""
    run = write_run(tmp_path / "run", {"a.png": [Drawn("x")]})
    pack(run, tmp_path / "my run.zip")
    return tmp_path / "my run.zip"


def given(featviz: CLI, words: tuple[str, ...], taken: Path) -> Outcome:
    """The outcome of a command with its files in place."""
    places = {"PACKED": taken, "RUN": taken.parent / "run", "OUT": taken.parent / "out"}
    return featviz(*(places.get(word, word) for word in words))


@pytest.mark.parametrize("words", TAKERS, ids=" ".join)
def test_an_archive_is_to_be_unpacked_first(
    featviz: CLI, packed: Path, words: tuple[str, ...]
) -> None:
    """Everywhere in the same line, with the command; nothing is written."""
    done = given(featviz, words, packed)
    said, hint = done.err.strip().splitlines()
    assert done.code == 1
    assert said == f"error: {packed} is an archive of a run, which is to be unpacked first"
    assert hint.startswith("hint: python -m zipfile -e ")
    assert sorted(path.name for path in packed.parent.iterdir()) == ["my run.zip", "run"]


def test_the_command_unpacks_it(featviz: CLI, packed: Path) -> None:
    """What the hint says works as it stands, and the run is whole."""
    hint = given(featviz, ("verify", "PACKED"), packed).err.splitlines()[1]
    command = shlex.split(hint.removeprefix("hint: ").partition(", then")[0])
    subprocess.run([sys.executable, *command[1:]], check=True)
    assert featviz("verify", packed.with_suffix("")).code == 0


@pytest.mark.parametrize("words", TAKERS, ids=" ".join)
def test_another_file_is_no_run_directory(
    featviz: CLI, packed: Path, words: tuple[str, ...]
) -> None:
    """It is called a file, and no symbolic link."""
    packed.write_bytes(b"PK\x03\x04 no archive")
    done = given(featviz, words, packed)
    assert done.code == 1 and f"{packed} is a file, not a run directory" in done.err
