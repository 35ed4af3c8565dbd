"""A real S3 server on loopback: kills, double starts, faults of the server, and flipped bits."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import s3_server
from conftest import Run
from forked import Forked
from runs import refused, tree
from s3_server import Server
from stores import stored

from featviz.files import urls
from featviz.rundir import LOCK_FILE

pytestmark = pytest.mark.slow

URL = "s3://bucket/maps"
SECRET = "a-secret-key-of-nobody"


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    """One server for all tests: libraries keep their connections."""
    with s3_server.running() as server:
        yield server


@pytest.fixture
def server(started: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """The server with one empty bucket, and the variables that lead to it."""
    import boto3
    import s3fs
    from moto.backends import get_backend

    for name, value in {
        "AWS_ENDPOINT_URL": started.endpoint,
        "AWS_ACCESS_KEY_ID": "AKIANOBODY",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "TMPDIR": str(tmp_path / "passing"),  # of processes that are killed
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "passing").mkdir()
    s3fs.S3FileSystem.clear_instance_cache()
    urls._connected.cache_clear()  # of a server that has stopped
    get_backend("s3").reset()
    boto3.client("s3").create_bucket(Bucket="bucket")
    started.fault = None
    started.requests.clear()
    yield started
    started.fault = None


def start(streams: Path, words: list[object], *more: str) -> Forked:
    """A command line in a process of its own."""
    return forked.command(streams, *words, "--out", URL, *more)


def test_the_tree_is_that_of_a_folder(
    server: Server, featviz: Run, words: list[object], local: Path
) -> None:
    """Byte for byte; the manifest of an image is asked for last; nothing shows the key."""
    done = featviz(*words, "--out", URL, "-v")
    whole = tree(local)
    assert done.code == 0 and stored(URL) == whole
    puts = [
        path.removeprefix("/bucket/maps/") for method, path in server.requests if method == "PUT"
    ]
    for folder in ("00.png", "01.png", "02.png", "03.png"):
        own = [path for path in puts if path.startswith(folder)]
        assert own[-1] == f"{folder}/manifest.json"
        assert set(own) == {path for path in whole if path.startswith(folder)}
    assert puts[0] == LOCK_FILE and puts[-1] == "run.json"
    assert SECRET not in done.err and not [
        1 for data in stored(URL).values() if SECRET.encode() in data
    ]
    again = featviz(*words, "--out", URL, "--resume")
    assert again.code == 0 and "(4 were complete before)" in again.err and stored(URL) == whole


def killed_at(server: Server, count: int, streams: Path, *words: object) -> None:
    """A run that the system kills when its n-th upload has begun, or, by chance, is over."""
    begun: list[str] = []
    process: Forked | None = None

    def kill(method: str, path: str) -> None:
        if method == "PUT" and process is not None:
            begun.append(path)
            if len(begun) == count:
                process.kill(signal.SIGKILL)

    server.fault = kill
    process = start(streams, [*words])
    code = process.ended().code
    server.fault = None
    assert code in (-signal.SIGKILL, 0)


def remove_lock() -> None:
    """As the message says that the user does."""
    import s3fs

    fs = s3fs.S3FileSystem()
    if fs.exists(f"{URL}/{LOCK_FILE}"):
        fs.rm_file(f"{URL}/{LOCK_FILE}")


def test_a_run_that_was_killed_goes_on(
    server: Server, featviz: Run, words: list[object], local: Path, tmp_path: Path
) -> None:
    """Between uploads, in them and after them, and once more while it goes on: what has a manifest
    is whole, and the end is the tree of a folder."""
    whole, chance = tree(local), random.Random(1)
    counts = [chance.randint(2, 24), chance.randint(2, 12)]
    print("killed at uploads", counts)
    for count, more in zip(counts, ([], ["--resume"]), strict=True):
        remove_lock()
        killed_at(server, count, tmp_path / f"said{count}", *words, *more)
        left = stored(URL)
        for name in [name for name in left if name.endswith("/manifest.json")]:
            folder = name.removesuffix("manifest.json")
            own = {name: data for name, data in whole.items() if name.startswith(folder)}
            assert {name: left.get(name) for name in own} == own
        assert LOCK_FILE in left or left == whole  # the kill came when the run was over
    remove_lock()
    assert featviz(*words, "--out", URL, "--resume").code == 0
    assert stored(URL) == whole


def test_of_two_that_start_together_one_draws(
    server: Server, words: list[object], local: Path, tmp_path: Path
) -> None:
    """The other ends with exit code 1 and names the first; the tree is whole."""
    for trial in range(2):
        more = ["--resume"] if trial else []
        pair = [start(tmp_path / f"said{trial}{n}", words, *more) for n in range(2)]
        ends = forked.ended(pair)
        lost = [end.err for end in ends if end.code]
        assert [end.code for end in ends].count(0) >= 1 and len(lost) <= 1, ends
        for said in lost:
            # it came when the first one wrote, when its lock was gone again, or when it had written
            assert f"error: --out {URL} " in said and "Traceback" not in said
        assert stored(URL) == tree(local)


def test_the_lock_is_made_in_one_step(server: Server, featviz: Run, words: list[object]) -> None:
    """By `If-None-Match: *`: of twenty at once one makes it."""
    from concurrent.futures import ThreadPoolExecutor

    from featviz.files.urls import Url
    from featviz.rundir.store import Store

    store = Store(Url.of_run(URL))
    with ThreadPoolExecutor(20) as pool:
        made = list(pool.map(lambda n: store.create(LOCK_FILE, str(n).encode()), range(20)))
    assert made.count(True) == 1 and stored(URL)[LOCK_FILE] == str(made.index(True)).encode()
    refused(featviz(*words, "--out", URL), 1, f"{URL} is being written by ")


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
    server: Server, featviz: Run, words: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such bucket, no rights, no server: with the remedy, and without the key."""
    refused(featviz(*words, "--out", "s3://nobucket/x"), 1, "does not exist", "make the bucket")
    server.fault = lambda method, path: 403
    done = featviz(*words, "--out", URL)
    refused(done, 1, f"{URL}/{LOCK_FILE} cannot be read", "give credentials")
    assert SECRET not in done.err
