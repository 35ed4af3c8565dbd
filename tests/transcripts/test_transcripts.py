"""Stories: whole sessions, compared word for word with what they printed when somebody
last read them.

`FEATVIZ_TRANSCRIPTS=write pytest tests/transcripts` writes them anew. Read the
difference before you commit it."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from pathlib import Path

import pytest
import scene
import transcript
from conftest import Run

HERE = Path(__file__).parent
STORIES = sorted(HERE.glob("*.txt"))
_REMEMBERED = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "FORCE_COLOR")
"""What a job's environment would say."""


@pytest.fixture(scope="session")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the stories work with, to be copied."""
    folder = tmp_path_factory.mktemp("scene")
    scene.furnish(folder)
    return folder


@pytest.mark.medium
@pytest.mark.parametrize("story", [path.stem for path in STORIES])
def test_it_goes_as_it_was_told(
    story: str,
    featviz: Run,
    furnished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each command of a story prints what stands below it, and ends as is told there."""
    folder = shutil.copytree(furnished, tmp_path / "story")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    # no browser is there
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    for name in _REMEMBERED:
        monkeypatch.delenv(name, raising=False)
    path = HERE / f"{story}.txt"
    told = path.read_text("utf-8")
    # each story imports its own `net.py`
    monkeypatch.delitem(sys.modules, "net", raising=False)
    now = transcript.played(transcript.read(told), featviz, folder)
    sys.modules.pop("net", None)
    if os.environ.get("FEATVIZ_TRANSCRIPTS") == "write":
        path.write_text(now, "utf-8")
        return
    difference = difflib.unified_diff(
        told.splitlines(), now.splitlines(), f"{story}.txt", "now", lineterm=""
    )
    assert told == now, "\n".join(["it goes otherwise:", *difference])
