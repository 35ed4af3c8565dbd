"""WebDataset shards: what the library `webdataset` reads is what featviz reads."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
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
    folder = tmp_path / "shards"
    pictures = sorted(make_photos(folder / "pictures", 8).iterdir())
    for shard in range(4):
        members: list[tuple[str, bytes]] = []
        for number in (2 * shard, 2 * shard + 1):
            stem = f"train/{number:06d}"
            members.append((f"{stem}.png", pictures[number].read_bytes()))
            members.append((f"{stem}.cls", b"%d" % number))
            members.append((f"{stem}.json", b"{}"))
        (folder / f"s-{shard:03d}.tar").write_bytes(tarred(*members))
    return folder


def samples_of(location: object) -> list[Sample]:
    """The images of the four shards in a folder, or on a server."""
    return find.find_samples([f"{location}/s-{number:03d}.tar" for number in range(4)])


@pytest.fixture
def server(shards: Path) -> Iterator[WebServer]:
    """The shards on a web server."""
    pytest.importorskip("aiohttp", reason="images of web servers are read by aiohttp")
    with serving(shards) as served:
        yield served


@pytest.mark.medium
@pytest.mark.parametrize("is_on_a_server", [False, True])
def test_shards_are_read_as_webdataset_reads_them(
    is_on_a_server: bool, shards: Path, server: WebServer
) -> None:
    """The same keys come in the same order with the same bytes, from disk and from a
    server."""
    wds = pytest.importorskip("webdataset", reason="webdataset is the oracle")
    pattern = str(shards / "s-{000..003}.tar")  # which webdataset takes apart itself
    expected = {}
    for row in wds.WebDataset(pattern, shardshuffle=False):
        expected[f"{row['__key__']}.png"] = hashlib.sha256(row["png"]).hexdigest()

    location = server.url.rstrip("/") if is_on_a_server else shards
    digests = {sample.name: decode.digest(sample) for sample in samples_of(location)}

    assert len(expected) == 8
    assert [*digests.items()] == [*expected.items()]


@pytest.mark.parametrize("counts", [[4], [2, 2], [2, 1, 1], [1, 1, 1, 1]])
def test_each_process_reads_shards_of_its_own(counts: list[int], shards: Path) -> None:
    """They are whole, and each is exactly one process's, also where there are as many
    processes as shards."""
    samples = samples_of(shards)
    processes = [Shard(index, len(counts)) for index in range(len(counts))]
    archives = [{s.archive for s in process.of(samples)} for process in processes]
    assert [len(names) for names in archives] == counts
    numbers = chain.from_iterable(process.numbers(samples) for process in processes)
    assert sorted(numbers) == list(range(8))


def test_where_shards_are_too_few_a_process_reads_every_nth_image(shards: Path) -> None:
    """So it does where an image lies in no shard."""
    samples = samples_of(shards)
    assert list(Shard(1, 5).numbers(samples)) == [1, 6]
    loose = Sample("x.png", (Path("x.png"),))
    assert list(Shard(1, 3).numbers([*samples, loose])) == [1, 4, 7]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("ending", "pack"),
    [
        ("zip", zipped),
        ("tar.gz", lambda *members: gzip.compress(tarred(*members))),
    ],
    ids=["zip", "tar.gz"],
)
def test_readers_that_open_an_archive_at_once_do_not_disturb_each_other(
    ending: str,
    pack: Callable[..., bytes],
    shards: Path,
    server: WebServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four threads each find the archive closed, and wait for each of its blocks."""
    content = [png((18, 16)), png((24, 20))]
    members = [(f"{number}.png", data) for number, data in enumerate(content)]
    (server.root / f"packed.{ending}").write_bytes(pack(*members))
    # else an archive of more than one block would have 4 MB
    monkeypatch.setattr(urls, "_BLOCK", 256)
    samples = find.find_samples([f"{server.url}packed.{ending}"])
    assert len(samples) == 2
    samples_of(shards)  # four others, for which it was closed
    together = Barrier(4)

    def read(number: int) -> bytes:
        together.wait()
        return decode.read(samples[number % 2].path)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(40))) == content * 20
