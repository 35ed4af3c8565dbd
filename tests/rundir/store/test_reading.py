"""Runs in object stores, read: what a folder gives, and nothing from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from conftest import Run
from runs import refused, tree
from stores import URL, put

from featviz.errors import StoreError
from featviz.files.urls import Url
from featviz.rundir.store import Store, files_of_images


@pytest.mark.slow
def test_readers_take_a_url(featviz: Run, words: list[object], local: Path, tmp_path: Path) -> None:
    """Report, sheet, diff and merge give what they give for the folder."""
    assert featviz(*words, "--out", URL).code == 0
    for index, place in enumerate((local, URL)):
        to = tmp_path / f"to{index}"
        to.mkdir()
        for command in (
            ["report", place, "--single-file", "--out", to / "maps.html"],
            ["report", place, "--zip", "--out", to / "maps.zip"],
            ["report", local, "--compare", place, "--single-file", "--out", to / "two.html"],
            ["sheet", place, "--layer", "0", "--out", to / "sheet.png"],
            ["merge", place, "--out", to / "merged"],
            ["diff", place, local, "--out", to / "diff", "--junit", to / "diff.xml"],
        ):
            done = featviz(*command)
            assert done.code == 0, (command, done.err)
    one, two = tree(tmp_path / "to0"), tree(tmp_path / "to1")
    assert "merged/run.json" in one and one.keys() == two.keys()
    unlike = {name for name in one if one[name] != two[name]}
    assert unlike <= {"diff.xml", "diff/diff.json", "two.html"}  # which name both places
    assert not [name for name in two if f"{gettempdir()}/featviz-".encode() in two[name]]
    document = json.loads(featviz("diff", URL, local, "--json").out)
    assert document["equal"] and (document["base"], document["new"]) == (URL, str(local))


def test_parts_in_a_store_are_joined(
    featviz: Run, words: list[object], local: Path, tmp_path: Path
) -> None:
    """Shards have URLs of their own; one that is named twice is refused."""
    parts = [f"memory://bucket/part{n}" for n in "12"]
    for number, part in enumerate(parts, 1):
        assert featviz(*words, "--shard", f"{number}/2", "--out", part).code == 0
    assert featviz("merge", *parts, "--out", tmp_path / "joined").code == 0
    assert tree(tmp_path / "joined") == tree(local)
    refused(featviz("merge", *parts, parts[0], "--out", tmp_path / "x"), 2, "is named twice")


def test_a_report_that_would_link_into_a_store_is_refused(featviz: Run, ran: Path) -> None:
    """With what can be done instead; the page of a comparison, too."""
    refused(featviz("diff", ran, URL, "--html", "x.html"), 2, f"{URL} is no folder", "--html out")
    for command in (["report", URL], ["report", URL, "--zip"], ["report", ran, "--compare", URL]):
        refused(featviz(*command), 2, f"{URL} is no folder", "--single-file --out maps.html")


def test_where_there_is_no_run_readers_say_so(featviz: Run, tmp_path: Path) -> None:
    """The message names the URL, not the copy."""
    put("notes.txt", b"mine")
    for command in (["verify"], ["merge", "--out", tmp_path / "x"]):
        refused(featviz(command[0], URL, *command[1:]), 1, f"{URL} is no run directory")
    assert not (tmp_path / "x").exists()


def test_errors_of_readers_name_the_url(featviz: Run, words: list[object], tmp_path: Path) -> None:
    """A broken run.json is one of the bucket, not one of a folder that is gone."""
    assert featviz(*words, "--out", URL).code == 0
    put("run.json", b"{")
    done = featviz("report", URL, "--zip", "--out", tmp_path / "x.zip")
    refused(done, 1, f"{URL}/run.json cannot be read")
    done = featviz("verify", URL)
    assert done.code == 4 and f"{URL}/run.json cannot be read" in done.err
    assert "--resume writes it anew" in done.err


HOSTILE = (
    "../out.png",
    "a/../../manifest.json",
    "/etc/passwd",
    "a//manifest.json",
    "C:\\x\\manifest.json",
    "a\0/manifest.json",
    "./a/input.png",
    "x.exe",
    "a/x.exe",
)


def test_names_that_lead_elsewhere_are_left_out() -> None:
    """Nothing is fetched by such a name."""
    good = {"a/manifest.json": 5, "a/004_x/input.png": 7, "b/c.png/stats.npz": 1}
    found = files_of_images({**dict.fromkeys(HOSTILE, 1), **good, ".featviz.lock": 2})
    assert found["a"] == {"manifest.json": 5, "004_x/input.png": 7}
    assert found["b/c.png"] == {"stats.npz": 1}
    assert {f"{f}/{n}" for f, names in found.items() for n in names} == good.keys()


def test_hostile_objects_stay_in_the_store(
    featviz: Run, words: list[object], memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing with such names gives a report of the rest, and writes nowhere else."""
    assert featviz(*words, "--out", URL).code == 0
    real = type(memory).find

    def listing(self: Any, path: str, **more: Any) -> Any:
        found = dict(real(self, path, **more))
        return found | {f"{path}/{name}": {"type": "file", "size": 9} for name in HOSTILE}

    monkeypatch.setattr(type(memory), "find", listing)
    fetched: list[str] = []
    copy = Store.copy
    monkeypatch.setattr(
        Store, "copy", lambda self, sizes, root: (fetched.extend(sizes), copy(self, sizes, root))
    )
    assert featviz("report", URL, "--zip", "--out", tmp_path / "x.zip").code == 0
    assert not set(fetched) & set(HOSTILE) and "run.json" in fetched


def test_an_object_is_read_as_far_as_the_listing_says(memory: Any, tmp_path: Path) -> None:
    """One that grows meanwhile fills no disk."""
    put("x", bytes(range(100)))
    there = Store(Url.of_run(URL))
    there.copy({"x": 10}, tmp_path)
    assert (tmp_path / "x").read_bytes() == bytes(range(10)) and there.read("x", 3) == b"\0\1\2"
    assert there.read("y", 3) == b""
    with pytest.raises(StoreError, match="y cannot be read"):
        there.copy({"y": 1}, tmp_path)


def test_a_large_object_is_copied_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte is lost where one ends and the next begins."""
    monkeypatch.setattr("featviz.rundir.store._PIECE", 4)
    data = bytes(range(10))
    put("stats.npz", data)
    Store(Url.of_run(URL)).copy({"stats.npz": len(data)}, tmp_path)
    assert (tmp_path / "stats.npz").read_bytes() == data
