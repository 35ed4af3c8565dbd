"""A real S3 server on loopback: what it holds at the end, and its refusals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
import s3_server
from conftest import Run
from runs import refused, tree
from s3_server import Server
from stores import stored

from featviz.files import urls

pytestmark = pytest.mark.slow

URL = "s3://bucket/maps"
SECRET = "a-secret-key-of-nobody"


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    """One server for all tests: libraries keep their connections."""
    with s3_server.running() as server:
        yield server


@pytest.fixture
def server(
    started: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Server]:
    """The server with one empty bucket, and the variables that lead to it."""
    import boto3
    import s3fs
    from moto.backends import get_backend

    monkeypatch.setenv("AWS_ENDPOINT_URL", started.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    s3fs.S3FileSystem.clear_instance_cache()
    urls._connect.cache_clear()  # of a server that has stopped
    get_backend("s3").reset()
    boto3.client("s3").create_bucket(Bucket="bucket")
    started.fault = None
    started.requests.clear()
    yield started
    started.fault = None


def test_the_tree_is_that_of_the_folder(
    server: Server, featviz: Run, run: list[object], local: Path
) -> None:
    """It is, byte for byte, in the bucket as in the folder beside; `verify` reads it
    there."""
    assert featviz(*run, "--out", URL).code == 0
    assert stored(URL) == tree(Path("maps")) == tree(local)
    assert featviz("verify", URL).code == 0


def test_nothing_shows_the_key(server: Server, featviz: Run, run: list[object]) -> None:
    """It is in no message and no file."""
    done = featviz(*run, "--out", URL, "-v")
    assert SECRET not in done.err
    assert SECRET.encode() not in b"".join(stored(URL).values())


def test_short_faults_of_the_server_are_not_seen(
    server: Server, featviz: Run, run: list[object], local: Path
) -> None:
    """Every fifth request is refused: the tree is whole."""
    faults = cycle([None, None, 503, None, None])
    server.fault = lambda method, path: next(faults)
    assert featviz(*run, "--out", URL).code == 0
    server.fault = None
    assert stored(URL) == tree(local)


def test_a_bucket_that_does_not_exist_is_refused(
    server: Server, featviz: Run, run: list[object]
) -> None:
    """The hint has the remedy."""
    done = featviz(*run, "--out", "s3://nobucket/x")
    refused(done, 1, "does not exist", "make the bucket")


def test_a_refusal_of_the_server_is_one_line(
    server: Server, featviz: Run, run: list[object]
) -> None:
    """It has the remedy, and not the key."""
    server.fault = lambda method, path: 403
    done = featviz(*run, "--out", URL)
    refused(done, 1, f"{URL} cannot be written", "give credentials")
    assert SECRET not in done.err
