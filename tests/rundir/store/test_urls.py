"""URLs on the command line and in Python: which are taken, and what is said of others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import refused, tree
from stores import URL, stored

import featviz as fv
from featviz.errors import UsageError
from featviz.files.urls import Url, is_url


def test_a_url_is_told_from_a_path() -> None:
    """What has a scheme and `//`; no path of Windows, and no module."""
    for text in ("s3://b/x", "gs://b", "az://c/x", "memory://x"):
        assert is_url(text)
    for path in (
        "maps",
        "/tmp/x",
        "C:\\x",
        "s3:/b",
        "net.py:make",
        "./s3://x",
        Path("s3:/b"),
    ):
        assert not is_url(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file:///tmp/x", "a folder of this machine is given as its path"),
        ("zip://x::s3://b/x", "no place in an object store"),
        ("nosuch://b/x", "nosuch:// is no store that featviz knows"),
    ],
)
def test_what_is_no_store_is_refused(
    text: str,
    said: str,
    featviz: Run,
    words: list[object],
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    """On the command line and in Python; no folder of that name is made."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    refused(featviz(*words, "--out", text), 2, said)
    with pytest.raises(UsageError):
        fv.run(str(words[1]), str(words[2]), out=text)
    assert sorted(tmp_path.iterdir()) == before


def test_passwords_are_shown_nowhere() -> None:
    """Neither in the URL as text, nor in what a library says."""
    pytest.importorskip("s3fs")  # whose protocol the URLs name
    url = Url.of_run("s3://me:ge%20heim@bucket/maps/")
    assert str(url) == "s3://bucket/maps" and "heim" not in repr(url)
    assert (url.name, url.protocol) == ("maps", "s3")
    said = url.without_secrets(
        "no me:ge%20heim, ge heim or ge%20heim here, nor s3://you:pw@b/x"
    )
    assert "heim" not in said and "pw" not in said
    short = Url.of_run("s3://b:u@bucket/maps")
    assert (
        short.without_secrets("github.com refuses u, b:u") == "github.com refuses …, …"
    )


def test_a_missing_library_is_named(
    featviz: Run, words: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the command that installs it."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    refused(
        featviz(*words, "--out", "s3://bucket/maps"),
        2,
        "s3:// needs",
        "pip install s3fs",
    )


def test_the_api_copies_to_a_url_and_reads_it(
    words: list[object], local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pictures are those of the folder; report and diff take the run, or its URL."""
    monkeypatch.chdir(tmp_path)
    model, photos = map(str, words[1:3])
    result = fv.run(model, photos, "Conv2d,ReLU", out=URL, size=16)
    assert result.out == Path("maps") and stored() == tree(local) == tree(
        tmp_path / "maps"
    )
    assert len(result.captures) == 8
    assert fv.diff(result, URL).equal and fv.diff(URL, local).equal
    fv.report(URL, tmp_path / "x.html", single_file=True)
    assert (tmp_path / "x.html").stat().st_size > 1000
