"""A real S3 server on loopback: what it holds at the end, and its refusals."""

from __future__ import annotations

from collections.abc import Iterator
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

    for name, value in {
        "AWS_ENDPOINT_URL": started.endpoint,
        "AWS_ACCESS_KEY_ID": "AKIANOBODY",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    s3fs.S3FileSystem.clear_instance_cache()
    urls._connected.cache_clear()  # of a server that has stopped
    get_backend("s3").reset()
    boto3.client("s3").create_bucket(Bucket="bucket")
    started.fault = None
    started.requests.clear()
    yield started
    started.fault = None


def test_the_tree_is_that_of_the_folder(
    server: Server, featviz: Run, words: list[object], local: Path
) -> None:
    """Byte for byte; the manifest of an image is put last; nothing shows the key."""
    done = featviz(*words, "--out", URL, "-v")
    whole = tree(local)
    assert done.code == 0 and stored(URL) == whole == tree(Path("maps"))
    puts = [
        path.removeprefix("/bucket/maps/")
        for method, path in server.requests
        if method == "PUT"
    ]
    for folder in ("00.png", "01.png", "02.png", "03.png"):
        of_image = [path for path in puts if path.startswith(folder)]
        assert of_image[-1] == f"{folder}/manifest.json"
        assert set(of_image) == {path for path in whole if path.startswith(folder)}
    assert puts[-1] == "run.json" and SECRET not in done.err
    assert not [1 for data in stored(URL).values() if SECRET.encode() in data]
    assert featviz("verify", URL).code == 0


def test_short_faults_of_the_server_are_not_seen(
    server: Server, featviz: Run, words: list[object], local: Path
) -> None:
    """Every fifth request is refused: the tree is whole."""
    count = iter(range(10**9))
    server.fault = lambda method, path: 503 if next(count) % 5 == 2 else None
    assert featviz(*words, "--out", URL).code == 0
    server.fault = None
    assert stored(URL) == tree(local)


def test_refusals_of_the_server_are_one_line(
    server: Server, featviz: Run, words: list[object]
) -> None:
    """No such bucket, no rights: with the remedy, and without the key."""
    refused(
        featviz(*words, "--out", "s3://nobucket/x"),
        1,
        "does not exist",
        "make the bucket",
    )
    server.fault = lambda method, path: 403
    done = featviz(*words, "--out", URL)
    refused(done, 1, f"{URL} cannot be written", "give credentials")
    assert SECRET not in done.err
