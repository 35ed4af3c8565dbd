"""Images of web servers: as from disk, and what a faulty or hostile server can do."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Run
from hostile_images import png, tarred
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
    # connections are kept for the whole process, in which servers come and go
    urls._connect.cache_clear()
    with serving(tmp_path / "web") as served:
        yield served
    urls._connect.cache_clear()


def failure(url: str) -> str:
    """What is said of an image that cannot be read."""
    (sample,) = find.find_samples([url])
    with pytest.raises(ImageError) as raised:
        decode.decode(sample)
    return raised.value.message


@pytest.mark.medium
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
    """The exit code is 3 as for broken files on disk: the others are complete, and
    run.json says why."""
    server.plan["/00.png"] = fault
    out = tmp_path / "out"
    files = [f"{server.url}{name}" for name in ("00.png", "01.png", "sub%20dir/02.png")]
    done = featviz("run", tiny_file, *SMALL, *files, "--out", out)
    assert done.code == 3
    assert message in done.err
    assert complete(out) == ["01.png", "02.png"]
    (failed,) = run_json(out)["failures"]
    assert failed["image"] == "00.png"
    assert message in failed["error"]
    assert "root:" not in str(tree(out))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (404, "there is no such file in the store"),
        (401, "the store refuses access: are the credentials there?"),
        (403, "the store refuses access: are the credentials there?"),
        (429, "the server answers 429 Too Many Requests"),
    ],
)
def test_an_answer_that_is_no_image_is_named(
    status: int, reason: str, server: WebServer
) -> None:
    """The line has its status; it is asked for once."""
    server.plan["/00.png"] = lambda visit: visit.send(b"", status)
    assert failure(f"{server.url}00.png") == f"00.png cannot be read: {reason}"
    assert server.seen["/00.png"] == 1


@pytest.mark.medium
def test_an_endless_body_is_cut_off(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at the size that no image has, at the first attempt; the connection is
    closed."""
    largest = bytes(2**20)
    monkeypatch.setattr(decode, "MAX_FILE_BYTES", len(largest))
    server.plan["/01.png"] = lambda visit: visit.send(largest)
    assert decode.read(Url(f"{server.url}01.png")) == largest
    server.plan["/00.png"] = endless
    assert "more than the 1048576 bytes" in failure(f"{server.url}00.png")
    assert server.hung_up.wait(10)
    assert server.seen["/00.png"] == 1


def test_a_redirect_is_followed(server: WebServer) -> None:
    """The image is another one's, and the name stays."""
    server.plan["/old.png"] = redirected("/00.png")
    (sample,) = find.find_samples([f"{server.url}old.png"])
    assert sample.name == "old.png"
    assert decode.decode(sample)[0][0].size == (18, 16)


@pytest.fixture
def secret_urls(server: WebServer) -> list[str]:
    """The URLs of an image, of one that is not available, and of one that is not there,
    with a password and a token."""
    server.plan["/00.png"] = guarded("ann", "pa55word")
    server.plan["/01.png"] = unavailable
    stem = f"http://ann:pa55word@{server.address}"
    return [f"{stem}/0{number}.png?token=t0ps3cret" for number in (0, 1, 7)]


def assert_scrubbed(text: str) -> None:
    """Neither the password nor the token stands in a text."""
    assert "pa55word" not in text
    assert "t0ps3cret" not in text


@pytest.mark.slow
def test_credentials_are_used_and_never_shown(
    featviz: Run, tiny_file: Path, secret_urls: list[str], tmp_path: Path
) -> None:
    """They stand neither in the tree nor in any message, whether the image is read or
    not."""
    out = tmp_path / "out"
    done = featviz("run", tiny_file, *SMALL, *secret_urls, "--out", out, "-v")
    assert done.code == 3
    assert complete(out) == ["00.png"]
    assert_scrubbed(f"{done.out}{done.err}{tree(out)}")


def test_credentials_are_not_shown_of_a_bad_url(
    featviz: Run, tiny_file: Path, secret_urls: list[str]
) -> None:
    """The usage error has the URL without them."""
    done = featviz("run", tiny_file, f"{secret_urls[0]}::x", f"{secret_urls[1]}/")
    assert done.code == 2
    assert_scrubbed(f"{done.out}{done.err}")


def test_an_archive_of_a_server_is_read_in_parts(server: WebServer) -> None:
    """Its images are those of the disk."""
    shutil.make_archive(str(server.root / "p"), "tar", server.root, "sub dir")
    (*_, sample) = find.find_samples([f"{server.url}p.tar"])
    assert sample.name == "sub dir/02.png"
    content = (server.root / sample.name).read_bytes()
    assert decode.digest(sample) == hashlib.sha256(content).hexdigest()


def test_a_server_that_gives_no_parts_is_told_apart(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line says what it lacks."""
    content = tarred(("a.png", png()))
    server.plan["/q.tar"] = lambda visit: visit.send(content)
    # else an archive of more than one block would have 4 MB
    monkeypatch.setattr(urls, "_BLOCK", 512)
    with pytest.raises(UsageError, match=r"q\.tar' cannot be read: .*range requests"):
        find.find_samples([f"{server.url}q.tar"])


@pytest.mark.parametrize(
    ("url", "message", "hint"),
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
def test_urls_that_are_refused(url: str, message: str, hint: str) -> None:
    """The line has the URL and the remedy; nothing is asked for."""
    with pytest.raises(FeatvizError) as raised:
        find.find_samples([url])
    assert message in raised.value.message
    assert hint in str(raised.value.hint)


def test_messages_of_libraries_are_scrubbed() -> None:
    """User, password and query go, the rest stays."""
    text = "GET 'https://ann:p@ss@h/a.png?X-Amz-Signature=abc' failed"
    assert urls.without_credentials(text) == "GET 'https://h/a.png' failed"
    remote = Url.of_file("https://ann:pw@h/a%20b.png?sig=abc")
    assert f"{remote} {remote!r}" == "https://h/a b.png Url('https://h/a b.png')"
    assert Url.of_file("http://h/a.png#top").name == "a.png"
