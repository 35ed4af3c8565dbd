"""URLs on the command line and in Python: which are taken, and what is said of others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import Run
from runs import refused, tree
from stores import URL, stored

import featviz as fv
from featviz.errors import UsageError
from featviz.files.urls import Url, is_url


@pytest.mark.parametrize("text", ["s3://b/x", "gs://b", "az://c/x", "memory://x"])
def test_a_url_is_one(text: str) -> None:
    """It has a scheme and `//`."""
    assert is_url(text)


@pytest.mark.parametrize(
    "path",
    ["maps", "/tmp/x", "C:\\x", "s3:/b", "net.py:make", "./s3://x", Path("s3:/b")],
)
def test_a_path_is_no_url(path: str | Path) -> None:
    """Neither one of Windows, nor a module."""
    assert not is_url(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file:///tmp/x", "a folder of this machine is given as its path"),
        ("zip://x::s3://b/x", "no place in an object store"),
        ("nosuch://b/x", "nosuch:// is no store that featviz knows"),
    ],
)
def test_what_is_no_store_is_refused(
    text: str,
    message: str,
    featviz: Run,
    run: list[object],
    tmp_path: Path,
) -> None:
    """It is on the command line and in Python; no folder of that name is made."""
    before = sorted(tmp_path.iterdir())
    refused(featviz(*run, "--out", text), 2, message)
    with pytest.raises(UsageError):
        fv.run(str(run[1]), str(run[2]), out=text)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.medium
def test_a_password_is_not_in_the_text_of_a_url() -> None:
    """Nor is the name."""
    pytest.importorskip("s3fs")  # whose protocol the URLs name
    url = Url.of_run("s3://me:ge%20heim@bucket/maps/")
    assert str(url) == "s3://bucket/maps"
    assert "heim" not in repr(url)
    assert (url.name, url.protocol) == ("maps", "s3")


@pytest.mark.parametrize(
    ("secret", "text", "shown"),
    [
        ("b:u", "github.com refuses u, b:u", "github.com refuses …, …"),
        (
            "me:ge%20heim",
            "no me:ge%20heim, ge heim or ge%20heim here, nor s3://you:pw@b/x",
            "no …, … or … here, nor s3://b/x",
        ),
    ],
)
def test_what_a_library_says_shows_no_password(
    secret: str, text: str, shown: str
) -> None:
    """Neither its own, however it is written, nor one in another URL."""
    pytest.importorskip("s3fs")
    assert Url.of_run(f"s3://{secret}@bucket/maps").without_secrets(text) == shown


def test_a_missing_library_is_named(
    featviz: Run, run: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the command that installs it."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    done = featviz(*run, "--out", "s3://bucket/maps")
    refused(done, 2, "s3:// needs", "pip install s3fs")


@pytest.mark.medium
def test_the_api_copies_to_a_url_and_reads_it(
    run: list[object], local: Path, tmp_path: Path
) -> None:
    """The pictures are those of the folder; report and diff take the run, or its URL."""
    model, photos = map(str, run[1:3])
    result = fv.run(model, photos, "Conv2d,ReLU", out=URL, size=16)
    assert result.out == Path("maps")
    assert stored() == tree(tmp_path / "maps") == tree(local)
    assert len(result.captures) == 8
    assert fv.diff(result, URL).equal
    assert fv.diff(URL, local).equal
    page = tmp_path / "x.html"
    fv.report(URL, page, single_file=True)
    assert "Feature maps of" in page.read_text("utf-8")
