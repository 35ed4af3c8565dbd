"""The tables of docs/models.md, whose rows are commands: read, and run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from conftest import ROOT, Outcome


class Row(NamedTuple):
    """A row of a table."""

    having: str
    """What people have."""
    command: str
    works: str


def section(title: str) -> str:
    """What docs/models.md says under a heading."""
    text = (ROOT / "docs" / "models.md").read_text()
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(title: str, least: int) -> list[Row]:
    """The rows of the table under a heading: no line is overlooked, and the last column of each
    begins with yes or no."""
    lines = re.findall(r"^\| (.+) \| `featviz (.+?)` \| (.+) \|$", section(title), re.MULTILINE)
    found = [Row(*line) for line in lines]
    assert len(found) == section(title).count("| `featviz ") >= least
    assert all(row.works.startswith(("yes", "no: `")) for row in found)
    return found


def check_row(row: Row, out: Path, featviz: Callable[..., Outcome]) -> Outcome:
    """Run a row's command: what works draws pictures; what does not ends with the words of the
    table."""
    done = featviz(*shlex.split(row.command), "--out", out)
    if row.works.startswith("yes"):
        assert done.code == 0, done.err
        assert len(list(out.glob("*/*/*.png"))) >= 1
        return done
    (words,) = re.findall(r"`(.+)`", row.works)
    assert done.code in (1, 2) and words in done.err
    assert "Traceback" not in done.err and not list(out.glob("*/*/*.png"))
    return done
