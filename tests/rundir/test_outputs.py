"""Single files of commands: a stranger's file is replaced with --overwrite only, our
own always."""

from __future__ import annotations

import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import Run
from PIL import Image
from rundirs import Drawn, write_run

from featviz.records import Verdict
from featviz.rundir.studies import junit

SMALL = ["--size", "12", "--input-channels", "3"]

COMMANDS = {
    "diff --html": "diff run run --html FILE",
    "diff --junit": "diff run run --junit FILE",
    "audit --junit": "audit MODEL photo.png --junit FILE --out audited",
    "audit --prune-out": "audit MODEL photo.png --prune-out FILE --out audited",
    "report --single-file": "report run --single-file --out FILE",
    "report --zip": "report run --zip --out FILE",
    "sheet": "sheet run --layers conv1 --out FILE",
    "look": "look MODEL photo.png --out FILE",
}
QUICK = ("diff --html", "audit --prune-out", "sheet")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, and a photograph to look at."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", {"a.png": [Drawn("conv1")]})
    Image.effect_noise((24, 20), 90).save(tmp_path / "photo.png")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in COMMANDS],
)
def test_a_photograph_is_not_replaced(
    name: str, place: Path, featviz: Run, tiny_file: Path
) -> None:
    """Refused in one line with the way out, before anything is written. --overwrite
    replaces it: then the file is ours, which needs no --overwrite."""
    mine = place / "mine.png"
    Image.effect_noise((30, 30), 90).save(mine)
    before, there = mine.read_bytes(), sorted(place.iterdir())
    words = (
        COMMANDS[name]
        .replace("FILE", "mine.png")
        .replace("MODEL", str(tiny_file))
        .split()
    )
    words += SMALL if words[0] in ("audit", "look") else []
    done = featviz(*words)
    assert done.code == 1 and "mine.png is there and is no " in done.err, done.err
    assert "hint: name another file with --" in done.err
    assert (
        f"or replace it with --overwrite: featviz {shlex.join(words)} --overwrite"
        in done.err
    )
    assert mine.read_bytes() == before and sorted(place.iterdir()) == there
    assert featviz(*words, "--overwrite").code == 0
    assert mine.read_bytes() != before
    # its folder is in the way
    again = [*words, "--overwrite"] if words[0] == "audit" else words
    assert featviz(*again).code == 0


FOREIGN = {
    "page": b"<!DOCTYPE html><title>mine</title>",
    "xml": b'<testsuites name="pytest tests"></testsuites>',
    "lists": b'{"train": [1, 2]}',
    "zip": b"PK\x03\x04",
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize(
    "name", ["diff --junit", "audit --prune-out", "report --single-file"]
)
def test_what_is_like_ours_is_not_ours(
    name: str, kind: str, place: Path, featviz: Run, tiny_file: Path
) -> None:
    """A page, XML, JSON or a zip file of another program stays."""
    (place / "mine").write_bytes(FOREIGN[kind])
    words = (
        COMMANDS[name].replace("FILE", "mine").replace("MODEL", str(tiny_file)).split()
    )
    assert featviz(*words).code == 1
    assert (place / "mine").read_bytes() == FOREIGN[kind]


def test_gates_as_ci_servers_read_them() -> None:
    """A suite for each model and a case for each gate; what XML cannot hold is
    replaced."""
    held = [Verdict(gate, True, "none") for gate in ("dead>5%", "nonfinite>0")]
    verdicts = [*held, Verdict("dead>0", False, "3 of 4\0")]
    (suite,) = ElementTree.fromstring(junit({"net": verdicts}))
    counts = {"tests": "3", "failures": "1", "errors": "0", "skipped": "0"}
    assert suite.attrib == {"name": "net", **counts}
    assert [case[0].tag for case in suite] == ["system-out", "system-out", "failure"]
    assert suite[2][0].attrib["message"] == "3 of 4\ufffd"
