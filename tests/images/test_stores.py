"""Images of object stores: a real S3 server on loopback, and fsspec's store in memory."""

from __future__ import annotations

import pickle
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import s3_server
from conftest import Run
from fsspec.implementations.memory import MemoryFileSystem
from runs import SMALL, complete, make_photos, run_json, tree

from featviz.errors import FileError, UsageError
from featviz.files import urls
from featviz.files.urls import Url
from featviz.images import decode, find


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """A client of an S3 server that has the bucket `pictures`."""
    with s3_server.running() as server, pytest.MonkeyPatch.context() as patch:
        import boto3

        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = boto3.client("s3")
        client.create_bucket(Bucket="pictures")
        yield client


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three pictures, one in a folder, and a file that is none."""
    make_photos(tmp_path / "photos", 2)
    make_photos(tmp_path / "photos" / "sub dir", 1)
    (tmp_path / "photos" / "notes.txt").write_text("no picture")
    return tmp_path / "photos"


def put(url: str, photos: Path) -> None:
    """Put the photos into a store."""
    protocol = url.partition(":")[0]
    # connections are kept for the whole process, in which servers come and go
    fsspec.get_filesystem_class(protocol).clear_instance_cache()
    urls._connect.cache_clear()
    fs = fsspec.filesystem(protocol, skip_instance_cache=True)
    for name, content in tree(photos).items():
        fs.pipe_file(f"{url}{name}", content)


@pytest.fixture
def store(photos: Path) -> Iterator[str]:
    """The URL of a folder in memory that holds the photos."""
    url = "memory://p/"
    put(url, photos)
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


@pytest.fixture
def s3_store(bucket: Any, photos: Path) -> str:
    """The URL of a folder on the server that holds the photos."""
    url = "s3://pictures/p/"
    put(url, photos)
    return url


def names(*arguments: str) -> list[str]:
    """Names of the samples that the arguments stand for."""
    return [sample.name for sample in find.find_samples(arguments)]


@pytest.mark.slow
def test_a_folder_of_a_store_gives_what_the_folder_gives(
    s3_store: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """The tree is the same byte for byte, and `--resume` keeps it."""
    command = ("run", tiny_file, *SMALL, "--out")
    local = tmp_path / "local"
    remote = tmp_path / "remote"
    assert featviz(*command, local, photos).code == 0
    assert featviz(*command, remote, s3_store).code == 0
    assert tree(remote) == tree(local)
    again = featviz(*command, remote, s3_store, "--resume", "--json")
    assert again.code == 0
    assert again.out.count('"kept": true') == 3


@pytest.mark.parametrize(
    "fixture", ["store", pytest.param("s3_store", marks=pytest.mark.slow)]
)
def test_what_a_url_stands_for(fixture: str, request: pytest.FixtureRequest) -> None:
    """It may be a folder with and without a slash, a glob as on disk, or a file."""
    store = request.getfixturevalue(fixture)
    folder = ["00.png", "01.png", "sub dir/00.png"]
    assert names(store) == folder
    assert names(store[:-1]) == folder
    assert names(f"{store}*/*.png") == ["sub dir/00.png"]
    assert names(f"{store}**/00.*") == ["00.png", "sub dir/00.png"]
    assert names(f"{store}sub dir/00.png") == ["00.png"]
    assert names(f"{store}notes.txt") == ["notes.txt"]
    # and each image comes once
    assert names(store, f"{store}00.png") == folder


@pytest.mark.parametrize("url", ["sub/", "*.jpg"])
def test_where_no_image_is(url: str, store: str) -> None:
    """A usage error names the folder or the pattern, as on disk."""
    message = r"no images? (in folder|matches) '(s3|memory)://"
    with pytest.raises(UsageError, match=message):
        names(f"{store}{url}")


@pytest.mark.medium
def test_a_missing_or_broken_object_is_a_failed_image(
    store: str, featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """The exit code is 3, and the others are complete."""
    out = tmp_path / "out"
    urls = [f"{store}{name}" for name in ("00.png", "gone.png", "notes.txt")]
    done = featviz("run", tiny_file, *SMALL, *urls, "--out", out)
    assert done.code == 3
    assert complete(out) == ["00.png"]
    errors = {row["image"]: row["error"] for row in run_json(out)["failures"]}
    assert errors == {
        "gone.png": "gone.png cannot be read: there is no such file in the store",
        "notes.txt": "notes.txt is no image that Pillow can read",
    }


@pytest.mark.parametrize("archive_type", ["gztar", "zip"])
def test_an_archive_in_a_store_gives_what_the_archive_gives(
    archive_type: str, store: str, photos: Path, tmp_path: Path
) -> None:
    """Names and bytes are the same, whole and one member alone, and after a change of
    process."""
    local = Path(shutil.make_archive(str(tmp_path / "a"), archive_type, photos))
    remote = f"{store}{local.name}"
    fs = fsspec.filesystem(store.partition(":")[0])
    fs.pipe_file(remote, local.read_bytes())

    samples = pickle.loads(pickle.dumps(find.find_samples([remote])))

    expected = find.find_samples([str(local)])
    assert [sample.name for sample in samples] == [sample.name for sample in expected]
    assert list(map(decode.digest, samples)) == list(map(decode.digest, expected))
    assert names(f"{remote}::sub dir/00.png") == ["sub dir/00.png"]
    with pytest.raises(UsageError, match="nothing in the archive is called so"):
        names(f"{remote}::sub dir/09.png")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint is the command that installs it."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UsageError, match="gs:// needs the package gcsfs") as raised:
        names("gs://bucket/a.png")
    assert raised.value.hint == "pip install gcsfs"


class ConnectTimeoutError(Exception):
    """As botocore calls it."""


class NoCredentialsError(Exception):
    """As botocore calls it."""


def with_status(status: int, text: str, message: str = "") -> Exception:
    """An error as libraries of HTTP raise it."""
    error: Any = OSError(text)
    error.status, error.message = status, message
    return error


def with_response(status: int, text: str) -> Exception:
    """An error as others do."""
    error: Any = RuntimeError(text)
    error.response = SimpleNamespace(status_code=status)
    return error


TO_ANN = "https://ann:pa55word@h/a.png?token=x"


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (TimeoutError(), "the store did not answer in time"),
        (ConnectTimeoutError("x"), "the store did not answer in time"),
        (NoCredentialsError("x"), "refuses access: are the credentials there?"),
        (PermissionError("x"), "refuses access: are the credentials there?"),
        (with_status(401, "x"), "refuses access: are the credentials there?"),
        (with_response(403, "x"), "refuses access: are the credentials there?"),
        (with_status(500, TO_ANN, f"No {TO_ANN}"), "answers 500 No https://h/a.png$"),
        (with_response(502, TO_ANN), "^the server answers 502$"),
        (with_response(404, "x"), "^there is no such file in the store$"),
        (FileNotFoundError("x"), "^there is no such file in the store$"),
        (FileError("its own", "hint"), "^its own"),
        (OSError(f"cannot open {TO_ANN} "), "^cannot open https://h/a.png$"),
        (ConnectionResetError(), "^ConnectionResetError$"),
    ],
    ids=repr,
)
def test_what_a_library_raises_is_one_line(raised: Exception, message: str) -> None:
    """It says what happened, without the user, the password and the query."""

    def task() -> None:
        raise raised

    with pytest.raises(FileError) as caught:
        urls.ask(Url("https://ann:pa55word@h/a.png"), task)
    assert re.search(message, caught.value.message)


class Cellar(MemoryFileSystem):
    """A store whose URL may name a user."""

    protocol = "cellar"

    def __init__(self, user: str = "", door: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.seen = (user, door)

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        user, at, _ = path.removeprefix("cellar://").rpartition("@")
        return {"user": user} if at else {}


def test_options_of_the_url_go_before_those_of_fsspecs_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that the URL leaves out hold."""
    registry = sys.modules["fsspec.registry"]
    monkeypatch.setitem(registry._registry, "cellar", Cellar)
    monkeypatch.setitem(registry.known_implementations, "cellar", {})
    configured = {"user": "bob", "door": "left"}
    monkeypatch.setitem(fsspec.config.conf, "cellar", configured)
    assert Url("cellar://ann@h/a.png").filesystem().seen == ("ann", "left")
    assert Url("cellar://h/a.png").filesystem().seen == ("bob", "left")


@pytest.mark.medium
def test_files_of_a_store_are_sorted_as_on_disk() -> None:
    """They come folder by folder: all of `a` before `a-b`."""
    fs = fsspec.filesystem("memory")
    for name in ("a-b/x.png", "a/x.png"):
        fs.pipe_file(f"memory://sorted/{name}", b"")
    assert names("memory://sorted/") == ["a/x.png", "a-b/x.png"]
    # no file, though its name has an ending
    fs.pipe_file("memory://my.bucket/y.png", b"")
    assert names("memory://my.bucket") == ["y.png"]
    fs.rm("memory://my.bucket", recursive=True)
    fs.rm("memory://sorted", recursive=True)
