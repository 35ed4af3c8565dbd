"""WebDataset shards: what the library `webdataset` reads is what featviz reads."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from hostile_images import png, tarred, zipped
from runs import make_photos
from web_server import WebServer, serving

from featviz.files import urls
from featviz.images import decode, find
from featviz.records import Sample, Shard


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """`s-000.tar` to `s-003.tar` of two samples each: a picture, a label, and a text."""
    pictures = sorted(make_photos(tmp_path / "shards" / "pictures", 8).iterdir())
    for shard in range(4):
        members = [
            (f"train/{number:06d}.{ending}", content)
            for number in (2 * shard, 2 * shard + 1)
            for ending, content in (
                ("png", pictures[number].read_bytes()),
                ("cls", b"%d" % number),
                ("json", b"{}"),
            )
        ]
        (tmp_path / "shards" / f"s-{shard:03d}.tar").write_bytes(tarred(*members))
    return tmp_path / "shards"


@pytest.fixture
def server(shards: Path) -> Iterator[WebServer]:
    """The shards on a web server."""
    pytest.importorskip("aiohttp", reason="images of web servers are read by aiohttp")
    with serving(shards) as served:
        yield served


def test_shards_are_read_as_webdataset_reads_them(
    shards: Path, server: WebServer
) -> None:
    """The same keys in the same order with the same bytes, from disk and from a server."""
    wds = pytest.importorskip("webdataset", reason="webdataset is the oracle")
    pattern = str(shards / "s-{000..003}.tar")  # which webdataset takes apart itself
    read = wds.WebDataset(pattern, shardshuffle=False)
    expected = [
        (row["__key__"], hashlib.sha256(row["png"]).hexdigest()) for row in read
    ]
    assert len(expected) == 8
    for location in (f"{shards}/", server.url):
        samples = find.find_samples([f"{location}s-{n:03d}.tar" for n in range(4)])
        digests = [
            (sample.name.removesuffix(".png"), decode.digest(sample))
            for sample in samples
        ]
        assert digests == expected


def test_each_process_reads_shards_of_its_own(shards: Path) -> None:
    """Whole ones, each exactly one process's; with too few of them, every n-th image."""
    samples = find.find_samples([str(shards / f"s-{n:03d}.tar") for n in range(4)])
    shards_samples = [Shard(index, 3).of(samples) for index in range(3)]
    read = [
        {sample.archive for sample in shard_samples} for shard_samples in shards_samples
    ]
    assert [len(archives) for archives in read] == [2, 1, 1]
    numbers = sorted(n for index in range(3) for n in Shard(index, 3).numbers(samples))
    assert numbers == list(range(8))
    assert list(Shard(1, 5).numbers(samples)) == [1, 6]
    loose = [*samples, Sample("x.png", (Path("x.png"),))]
    assert list(Shard(1, 3).numbers(loose)) == [1, 4, 7]


@pytest.mark.parametrize("ending", ["tar.gz", "zip"])
def test_readers_that_open_an_archive_at_once_do_not_disturb_each_other(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Four threads, each of which finds the archive closed, and waits for each of its
    blocks."""
    content = [png((18, 16)), png((24, 20))]
    pack = zipped if ending == "zip" else tarred
    packed = pack(*((f"{number}.png", data) for number, data in enumerate(content)))
    if ending == "tar.gz":
        packed = gzip.compress(packed)
    (server.root / f"packed.{ending}").write_bytes(packed)
    monkeypatch.setattr(urls, "_BLOCK", 256)
    paths = [
        path
        for s in find.find_samples([f"{server.url}packed.{ending}"])
        for path in s.paths
    ]
    assert len(paths) == len(content) == 2
    decode._opened.cache_clear()  # as where five other archives were opened meanwhile
    together = Barrier(4)

    def read(number: int) -> bytes:
        together.wait()
        return decode.read(paths[number % 2])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(40))) == content * 20
