"""Runs in object stores, read: what a folder gives, and nothing from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import gettempdir

import pytest
from conftest import Run
from runs import refused, tree
from stores import URL, flip, put

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


@pytest.mark.medium
@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["merge"], "merged"),
        (["sheet", "--layers", "0"], "sheet.png"),
        pytest.param(["report", "--single-file"], "m.html", marks=pytest.mark.slow),
        pytest.param(["report", "--zip"], "maps.zip", marks=pytest.mark.slow),
    ],
)
def test_readers_take_a_url(
    command: list[str],
    file: str,
    featviz: Run,
    there: dict[str, bytes],
    local: Path,
    tmp_path: Path,
) -> None:
    """Merge, sheet and report give what they give for the folder."""
    name, *options = command
    for run, folder in ((local, "local"), (URL, "there")):
        out = tmp_path / "results" / folder / file
        out.parent.mkdir(parents=True)
        assert featviz(name, run, *options, "--out", out).code == 0
    results = tmp_path / "results"
    assert tree(results / "there")
    assert tree(results / "there") == tree(results / "local")


@pytest.mark.medium
def test_diff_takes_a_url(
    featviz: Run, there: dict[str, bytes], local: Path, tmp_path: Path
) -> None:
    """It is equal to the folder; results name the URL, and not the copy."""
    options = ("--out", tmp_path / "diff", "--junit", tmp_path / "diff.xml", "--json")
    document = json.loads(featviz("diff", URL, local, *options).out)
    assert document["equal"] is True
    assert (document["base"], document["new"]) == (URL, str(local))
    results = [*tree(tmp_path / "diff").values(), (tmp_path / "diff.xml").read_bytes()]
    assert f"{gettempdir()}/featviz-".encode() not in b"".join(results)


@pytest.mark.slow
def test_a_report_compares_with_a_url(
    featviz: Run, there: dict[str, bytes], local: Path, tmp_path: Path
) -> None:
    """In one file, which names the URL, and not the copy."""
    page = tmp_path / "two.html"
    compared = ("report", local, "--compare", URL, "--single-file", "--out", page)
    assert featviz(*compared).code == 0
    text = page.read_text("utf-8")
    assert URL in text
    assert f"{gettempdir()}/featviz-" not in text


@pytest.mark.medium
@pytest.mark.parametrize("options", [[URL], [URL, "--zip"], ["out", "--compare", URL]])
def test_a_report_that_would_link_into_a_store_is_refused(
    options: list[str], featviz: Run, ran: Path
) -> None:
    """The message says what can be done instead."""
    remedy = "--single-file --out maps.html"
    refused(featviz("report", *options), 2, f"{URL} is no folder", remedy)


@pytest.mark.medium
def test_a_comparison_that_would_link_into_a_store_is_refused(
    featviz: Run, ran: Path
) -> None:
    """The same holds for its page."""
    done = featviz("diff", ran, URL, "--html", "x.html")
    refused(done, 2, f"{URL} is no folder", "--html out")


@pytest.mark.parametrize("command", ["verify", "merge"])
def test_where_there_is_no_run_readers_say_so(command: str, featviz: Run) -> None:
    """The message names the URL, not the copy."""
    put("notes.txt", b"mine")
    refused(featviz(command, URL), 1, f"{URL} is no run directory")


@pytest.mark.medium
@pytest.mark.parametrize("command", [["verify", URL], ["sheet", URL, "--layers", "0"]])
def test_errors_of_readers_name_the_url(
    command: list[str], featviz: Run, there: dict[str, bytes]
) -> None:
    """A broken run.json is one of the bucket, not one of a folder that is gone."""
    put("run.json", b"{")
    refused(featviz(*command), 1, f"{URL}/run.json cannot be read")


@pytest.mark.medium
def test_verify_names_what_is_damaged_there(
    featviz: Run, there: dict[str, bytes]
) -> None:
    """A changed byte is found."""
    flip("00.png/001_0/output.png")
    refused(featviz("verify", URL), 4, "00.png/001_0/output.png has SHA-256")


HOSTILE = (
    "../out.png",
    "a/../../manifest.json",
    "/etc/passwd",
    "C:\\x",
    "./a",
    "x.exe",
    "a\0b",
)


def copied_names() -> set[str]:
    """The files that a reader fetches of the run in the store."""
    with copied(Url.of_run(URL)) as folder:
        return {*tree(folder)}


@pytest.mark.medium
def test_names_of_run_json_that_lead_elsewhere_are_not_fetched(
    there: dict[str, bytes],
) -> None:
    """They would become folders of the copy."""
    record = json.loads(there["run.json"])
    record["images"]["complete"] += HOSTILE
    put("run.json", json.dumps(record).encode())
    assert copied_names() == {*there}


@pytest.mark.medium
@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_names_of_a_manifest_that_lead_elsewhere_are_not_fetched(
    name: str, there: dict[str, bytes]
) -> None:
    """Nor are the other files of its image."""
    manifest = json.loads(there["01.png/manifest.json"])
    manifest["captures"][0]["file"] = name
    manifest["files"][0]["file"] = name
    put("01.png/manifest.json", json.dumps(manifest).encode())
    others = {path for path in there if not path.startswith("01.png")}
    assert copied_names() == {*others, "01.png/manifest.json"}


def test_no_more_is_read_than_the_manifest_says(there: dict[str, bytes]) -> None:
    """An object that has grown fills no disk: an error names it."""
    put("00.png/stats.npz", bytes(2**22))
    too_large = pytest.raises(
        StoreError, match=r"00\.png/stats\.npz cannot be read: it has more"
    )
    with too_large, copied(Url.of_run(URL)):
        pytest.fail("it was copied")
