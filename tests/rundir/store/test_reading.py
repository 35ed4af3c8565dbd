"""Runs in object stores, read: what a folder gives, and nothing from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from conftest import Run
from runs import refused, tree
from stores import URL, put, stored

from featviz.errors import StoreError
from featviz.files.urls import Url
from featviz.rundir.mirror import copied


@pytest.fixture
def there(local: Path) -> dict[str, bytes]:
    """The run in the store."""
    files = tree(local)
    for name, data in files.items():
        put(name, data)
    return files


@pytest.mark.slow
def test_readers_take_a_url(
    featviz: Run, there: dict[str, bytes], local: Path, tmp_path: Path
) -> None:
    """Report, sheet, diff and merge give what they give for the folder."""
    for index, place in enumerate((local, URL)):
        to = tmp_path / f"to{index}"
        to.mkdir()
        for command in (
            ["report", place, "--single-file", "--out", to / "maps.html"],
            ["report", place, "--zip", "--out", to / "maps.zip"],
            [
                "report",
                local,
                "--compare",
                place,
                "--single-file",
                "--out",
                to / "two.html",
            ],
            ["sheet", place, "--layers", "0", "--out", to / "sheet.png"],
            ["merge", place, "--out", to / "merged"],
            ["diff", place, local, "--out", to / "diff", "--junit", to / "diff.xml"],
        ):
            done = featviz(*command)
            assert done.code == 0, (command, done.err)
    one, two = tree(tmp_path / "to0"), tree(tmp_path / "to1")
    assert "merged/run.json" in one and one.keys() == two.keys()
    unlike = {name for name in one if one[name] != two[name]}
    # which name both places
    assert unlike <= {"diff.xml", "diff/diff.json", "two.html"}
    assert not [
        name for name in two if f"{gettempdir()}/featviz-".encode() in two[name]
    ]
    document = json.loads(featviz("diff", URL, local, "--json").out)
    assert document["equal"] and (document["base"], document["new"]) == (
        URL,
        str(local),
    )


def test_a_report_that_would_link_into_a_store_is_refused(
    featviz: Run, ran: Path
) -> None:
    """With what can be done instead; the page of a comparison, too."""
    refused(
        featviz("diff", ran, URL, "--html", "x.html"),
        2,
        f"{URL} is no folder",
        "--html out",
    )
    for command in (
        ["report", URL],
        ["report", URL, "--zip"],
        ["report", ran, "--compare", URL],
    ):
        refused(
            featviz(*command), 2, f"{URL} is no folder", "--single-file --out maps.html"
        )


def test_where_there_is_no_run_readers_say_so(featviz: Run, tmp_path: Path) -> None:
    """The message names the URL, not the copy."""
    put("notes.txt", b"mine")
    for command in (["verify"], ["merge", "--out", tmp_path / "x"]):
        refused(featviz(command[0], URL, *command[1:]), 1, f"{URL} is no run directory")
    assert not (tmp_path / "x").exists()


def test_errors_of_readers_name_the_url(
    featviz: Run, there: dict[str, bytes], tmp_path: Path
) -> None:
    """A broken run.json is one of the bucket, not one of a folder that is gone."""
    put("run.json", b"{")
    for command in (
        ["report", URL, "--zip", "--out", tmp_path / "x.zip"],
        ["verify", URL],
    ):
        refused(featviz(*command), 1, f"{URL}/run.json cannot be read")


def test_verify_names_what_is_damaged_there(
    featviz: Run, there: dict[str, bytes]
) -> None:
    """A changed byte and a lost manifest."""
    data = bytearray(there["00.png/001_0/output.png"])
    data[len(data) // 2] ^= 4
    put("00.png/001_0/output.png", bytes(data))
    done = featviz("verify", URL)
    assert done.code == 4 and "00.png/001_0/output.png has SHA-256" in done.err


HOSTILE = (
    "../out.png",
    "a/../../manifest.json",
    "/etc/passwd",
    "C:\\x",
    "./a",
    "x.exe",
    "a\0b",
)


def test_names_that_lead_elsewhere_are_not_fetched(
    there: dict[str, bytes], memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of run.json, which become folders of the copy, nor those of a
    manifest."""
    record = json.loads(there["run.json"])
    record["images"]["complete"] += HOSTILE
    put("run.json", json.dumps(record).encode())
    for name in HOSTILE:
        manifest = json.loads(there["01.png/manifest.json"])
        manifest["captures"][0]["file"] = manifest["files"][0]["file"] = name
        put("01.png/manifest.json", json.dumps(manifest).encode())
        with copied(Url.of_run(URL)) as folder:
            copy = tree(folder)
        images = ("00.png", "02.png", "03.png")
        whole = {n for n in there if n.startswith(images)}
        assert copy.keys() == {*whole, "run.json", "01.png/manifest.json"}


def test_no_more_is_read_than_the_manifest_says(there: dict[str, bytes]) -> None:
    """An object that has grown fills no disk: an error names it."""
    put("00.png/stats.npz", bytes(2**22))
    too_large = pytest.raises(
        StoreError, match=r"00\.png/stats\.npz cannot be read: it has more"
    )
    with too_large, copied(Url.of_run(URL)):
        pytest.fail("it was copied")
    assert len(stored()["00.png/stats.npz"]) == 2**22
