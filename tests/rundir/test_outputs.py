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
from runs import refused, snapshot

from featviz.records import Verdict
from featviz.rundir.studies import junit

SMALL = "--size 12 --input-channels 3"

COMMANDS = {
    "diff --html": "diff run run --html FILE",
    "diff --junit": "diff run run --junit FILE",
    "audit --junit": f"audit MODEL photo.png --junit FILE --out audited {SMALL}",
    "audit --prune-out": f"audit MODEL photo.png --prune-out FILE --out audited {SMALL}",
    "report --single-file": "report run --single-file --out FILE",
    "report --zip": "report run --zip --out FILE",
    "sheet": "sheet run --layers conv1 --out FILE",
    "look": f"look MODEL photo.png --out FILE {SMALL}",
}
QUICK = ("diff --html", "audit --prune-out", "sheet")
SLOW = [name for name in COMMANDS if name not in QUICK]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, a photograph to look at, and another one."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", {"a.png": [Drawn("conv1")]})
    Image.effect_noise((24, 20), 90).save(tmp_path / "photo.png")
    Image.effect_noise((30, 30), 90).save(tmp_path / "mine.png")
    return tmp_path


def command_of(name: str, file: str, model: Path) -> list[str]:
    """A command that writes a file."""
    command = COMMANDS[name].replace("FILE", file).replace("MODEL", str(model))
    return command.split()


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_photograph_is_not_replaced(
    name: str, folder: Path, featviz: Run, tiny_file: Path
) -> None:
    """Refused in one line with the remedy, before anything is written."""
    command = command_of(name, "mine.png", tiny_file)
    before = snapshot(folder)
    corrected = f"featviz {shlex.join(command)} --overwrite"
    refused(
        featviz(*command),
        1,
        "mine.png is there and is no ",
        "hint: name another file with --",
        f"or replace it with --overwrite: {corrected}",
    )
    assert snapshot(folder) == before


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_photograph_is_replaced_on_demand(
    name: str, folder: Path, featviz: Run, tiny_file: Path
) -> None:
    """--overwrite makes the file ours, which needs no --overwrite the next time; the
    folder of an audit does."""
    command = command_of(name, "mine.png", tiny_file)
    before = (folder / "mine.png").read_bytes()
    assert featviz(*command, "--overwrite").code == 0
    assert (folder / "mine.png").read_bytes() != before
    again = ["--overwrite"] if command[0] == "audit" else []
    assert featviz(*command, *again).code == 0


FOREIGN = {
    "page": b"<!DOCTYPE html><title>mine</title>",
    "xml": b'<testsuites name="pytest tests"></testsuites>',
    "lists": b'{"train": [1, 2]}',
    "zip": b"PK\x03\x04",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize(
    "name", ["diff --junit", "audit --prune-out", "report --single-file"]
)
def test_what_is_like_ours_is_not_ours(
    name: str, content: bytes, folder: Path, featviz: Run, tiny_file: Path
) -> None:
    """A page, XML, JSON or a zip file of another program stays."""
    (folder / "mine").write_bytes(content)
    assert featviz(*command_of(name, "mine", tiny_file)).code == 1
    assert (folder / "mine").read_bytes() == content


def test_gates_as_ci_servers_read_them() -> None:
    """A suite for each model and a case for each gate; what XML cannot hold is
    replaced."""
    verdicts = [
        Verdict("dead>5%", True, "none"),
        Verdict("nonfinite>0", True, "none"),
        Verdict("dead>0", False, "3 of 4\0"),
    ]
    (suite,) = ElementTree.fromstring(junit({"net": verdicts}))
    counts = {"tests": "3", "failures": "1", "errors": "0", "skipped": "0"}
    assert suite.attrib == {"name": "net", **counts}
    assert [case[0].tag for case in suite] == ["system-out", "system-out", "failure"]
    assert suite[2][0].attrib["message"] == "3 of 4\ufffd"
