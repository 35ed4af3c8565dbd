"""Images of web servers: as from disk, and what a faulty or hostile server can do."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Run
from runs import SMALL, complete, make_photos, run_json, tree
from web_server import (
    Visit,
    WebServer,
    endless,
    guarded,
    redirected,
    serving,
    truncated,
    unavailable,
)

from featviz.errors import FeatvizError, ImageError, UsageError
from featviz.files import urls
from featviz.files.urls import Url
from featviz.images import decode, find

pytest.importorskip("aiohttp", reason="images of web servers are read by aiohttp")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    """A server of three pictures, one in a folder."""
    make_photos(tmp_path / "web", 2)
    make_photos(tmp_path / "web" / "sub dir", 3)
    urls._connected.cache_clear()
    with serving(tmp_path / "web") as served:
        yield served
    urls._connected.cache_clear()


def failure(url: str) -> str:
    """What is said of an image that cannot be read."""
    (sample,) = find.find_samples([url])
    with pytest.raises(ImageError) as raised:
        decode.decode(sample)
    return raised.value.message


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (unavailable, "cannot be read: the server answers 503 Service Unavailable"),
        pytest.param(truncated, "cannot be read", marks=pytest.mark.slow),
        pytest.param(
            redirected("file:///etc/passwd"), "cannot be read", marks=pytest.mark.slow
        ),
    ],
)
def test_a_fault_that_stays_is_one_failed_image(
    fault: Callable[[Visit], None],
    message: str,
    featviz: Run,
    tiny_file: Path,
    server: WebServer,
    tmp_path: Path,
) -> None:
    """Exit code 3 as for broken files on disk: the others are complete, and run.json
    says why."""
    server.plan["/00.png"] = fault
    files = [f"{server.url}{name}" for name in ("00.png", "01.png", "sub%20dir/02.png")]
    done = featviz("run", tiny_file, *SMALL, *files, "--out", tmp_path / "out")
    assert done.code == 3
    assert message in done.err
    assert complete(tmp_path / "out") == ["01.png", "02.png"]
    (failed,) = run_json(tmp_path / "out")["failures"]
    assert failed["image"] == "00.png"
    assert message in failed["error"]
    assert "root:" not in str(tree(tmp_path / "out"))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (404, "there is no such file in the store"),
        (403, "the store refuses access: are the credentials there?"),
        (429, "the server answers 429 Too Many Requests"),
    ],
)
def test_an_answer_that_is_no_image_is_named(
    status: int, words: str, server: WebServer
) -> None:
    """With its status; it is asked for once."""
    server.plan["/00.png"] = lambda visit: visit.send(b"", status)
    assert failure(f"{server.url}00.png") == f"00.png cannot be read: {words}"
    assert server.seen["/00.png"] == 1


def test_an_endless_body_is_cut_off(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the size that no image has, at the first attempt; the connection is closed."""
    monkeypatch.setattr(decode, "MAX_FILE_BYTES", 2**20)
    server.plan["/00.png"] = endless
    assert "more than the 1048576 bytes" in failure(f"{server.url}00.png")
    assert server.hung_up.wait(10)
    assert server.seen["/00.png"] == 1


@pytest.mark.slow
def test_credentials_are_used_and_never_shown(
    featviz: Run, tiny_file: Path, server: WebServer, tmp_path: Path
) -> None:
    """Neither in the tree, nor in any message, whether the image is read or not; a
    redirect within the web is followed, and the name stays."""
    server.plan["/old.png"] = redirected("/00.png")
    (sample,) = find.find_samples([f"{server.url}old.png"])
    assert sample.name == "old.png"
    assert decode.decode(sample)[0][0].size == (18, 16)
    server.plan["/00.png"] = guarded("ann", "pa55word")
    server.plan["/01.png"] = unavailable
    urls = [
        f"http://ann:pa55word@{server.address}/0{n}.png?token=t0ps3cret"
        for n in (0, 1, 7)
    ]
    done = featviz("run", tiny_file, *SMALL, *urls, "--out", tmp_path / "out", "-v")
    assert done.code == 3
    assert complete(tmp_path / "out") == ["00.png"]
    bad = featviz(
        "run", tiny_file, f"{urls[0]}::x", f"{urls[1]}/", "--out", tmp_path / "other"
    )
    assert bad.code == 2
    everything = f"{done.out}{done.err}{bad.out}{bad.err}{tree(tmp_path / 'out')}"
    assert [
        secret for secret in ("pa55word", "t0ps3cret") if secret in everything
    ] == []


def test_an_archive_of_a_server_is_read_in_parts(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same images as from disk, and a server that gives no parts is told apart."""
    with tarfile.open(server.root / "p.tar", "w") as tar:
        tar.add(server.root / "sub dir", "s")
    far = find.find_samples([f"{server.url}p.tar"])[0]
    assert far.name == "s/00.png"
    assert decode.decode(far)[0][0].size == (18, 16)
    archive_bytes = (server.root / "p.tar").read_bytes()
    server.plan["/q.tar"] = lambda visit: visit.send(archive_bytes)
    monkeypatch.setattr(urls, "_BLOCK", 512)
    with pytest.raises(UsageError, match=r"q\.tar' cannot be read: .*range requests"):
        find.find_samples([f"{server.url}q.tar"])


@pytest.mark.parametrize(
    ("url", "words", "hint"),
    [
        ("simplecache::http://h/a.png", "chains protocols", "the last URL alone"),
        (
            "http://h/a.png::file:///etc/passwd",
            "chains protocols",
            "the last URL alone",
        ),
        (
            "foo://h/a.png",
            "foo:// is no store that featviz knows",
            "s3://bucket/photos/",
        ),
        ("reference://h/a.png", "reference:// is no store", "s3://bucket/photos/"),
        ("file:///a.png", "file:// is no store", "s3://bucket/photos/"),
        ("http://h/photos/", "is a page of a web server", "the files on it"),
    ],
)
def test_urls_that_are_refused(url: str, words: str, hint: str) -> None:
    """One line with the URL and the remedy; nothing is asked for."""
    with pytest.raises(FeatvizError) as raised:
        find.find_samples([url])
    assert words in raised.value.message
    assert hint in str(raised.value.hint)


def test_messages_of_libraries_are_scrubbed() -> None:
    """User, password and query go, the rest stays."""
    text = "GET 'https://ann:p@ss@h/a.png?X-Amz-Signature=abc' failed"
    assert urls.scrubbed(text) == "GET 'https://h/a.png' failed"
    remote = Url.of_file("https://ann:pw@h/a%20b.png?sig=abc")
    assert f"{remote} {remote!r}" == "https://h/a b.png Url('https://h/a b.png')"
