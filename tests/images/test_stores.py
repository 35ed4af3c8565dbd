"""Images of object stores: a real S3 server on loopback, and fsspec's store in memory."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3_server
from conftest import Run
from runs import SMALL, complete, make_photos, run_json, tree

from featviz.errors import UsageError
from featviz.files import urls
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


@pytest.fixture(
    params=[pytest.param("s3://pictures/p/", marks=pytest.mark.slow), "memory://p/"]
)
def store(request: pytest.FixtureRequest, photos: Path) -> Iterator[str]:
    """The URL of a folder in a store that holds the photos."""
    if request.param.startswith("s3"):
        request.getfixturevalue("bucket")
    protocol = request.param.partition(":")[0]
    # of a server that has stopped
    fsspec.get_filesystem_class(protocol).clear_instance_cache()
    there = fsspec.filesystem(protocol, skip_instance_cache=True)
    for name, content in tree(photos).items():
        there.pipe_file(f"{request.param}{name}", content)
    urls._connected.cache_clear()
    yield request.param
    there.rm(request.param, recursive=True)


def names(*arguments: str) -> list[str]:
    """Names of the samples that the arguments stand for."""
    return [sample.name for sample in find.find_samples(arguments)]


@pytest.mark.slow
def test_a_folder_of_a_store_gives_what_the_folder_gives(
    store: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """The same tree byte for byte, and `--resume` keeps it."""
    base = ("run", tiny_file, *SMALL, "--out")
    assert featviz(*base, tmp_path / "local", photos).code == 0
    assert featviz(*base, tmp_path / "far", store).code == 0
    assert tree(tmp_path / "far") == tree(tmp_path / "local")
    again = featviz(*base, tmp_path / "far", store, "--resume", "--json")
    assert again.code == 0
    assert again.out.count('"kept": true') == 3


def test_what_a_url_stands_for(store: str) -> None:
    """Folders with and without a slash, globs as on disk, files; each image once."""
    assert names(store) == ["00.png", "01.png", "sub dir/00.png"]
    assert names(store[:-1]) == names(store) == names(store, f"{store}00.png")
    assert names(f"{store}*/*.png") == ["sub dir/00.png"]
    assert names(f"{store}**/00.*") == ["00.png", "sub dir/00.png"]
    assert names(f"{store}sub dir/00.png") == ["00.png"]
    assert names(f"{store}notes.txt") == ["notes.txt"]


@pytest.mark.parametrize("url", ["sub/", "*.jpg"])
def test_where_no_image_is(url: str, store: str) -> None:
    """A usage error that names the folder or the pattern, as on disk."""
    with pytest.raises(
        UsageError, match=r"no images? (in folder|matches) '(s3|memory)://"
    ):
        names(f"{store}{url}")


def test_a_missing_or_broken_object_is_a_failed_image(
    store: str, featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """Exit code 3, and the others are complete."""
    urls = [f"{store}{name}" for name in ("00.png", "gone.png", "notes.txt")]
    done = featviz("run", tiny_file, *SMALL, *urls, "--out", tmp_path / "out")
    assert done.code == 3
    assert complete(tmp_path / "out") == ["00.png"]
    errors = {
        row["image"]: row["error"] for row in run_json(tmp_path / "out")["failures"]
    }
    assert errors == {
        "gone.png": "gone.png cannot be read: there is no such file in the store",
        "notes.txt": "notes.txt is no image that Pillow can read",
    }


@pytest.mark.parametrize("suffix", ["tar.gz", "zip"])
def test_an_archive_in_a_store_gives_what_the_archive_gives(
    suffix: str, store: str, photos: Path, tmp_path: Path
) -> None:
    """The same names and bytes, whole and one member alone, and after a change of
    process."""
    import shutil

    archive_type = {"tar": "tar", "tar.gz": "gztar", "zip": "zip"}[suffix]
    near = Path(shutil.make_archive(str(tmp_path / "a"), archive_type, photos))
    far = f"{store}a.{suffix}"
    there = fsspec.filesystem(store.partition(":")[0])
    there.pipe_file(far, near.read_bytes())
    here = find.find_samples([str(near)])
    samples = pickle.loads(pickle.dumps(find.find_samples([far])))
    assert [sample.name for sample in samples] == [sample.name for sample in here]
    assert list(map(decode.digest, samples)) == list(map(decode.digest, here))
    assert names(f"{far}::sub dir/00.png") == ["sub dir/00.png"]
    with pytest.raises(UsageError, match="nothing in the archive is called so"):
        names(f"{far}::sub dir/09.png")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UsageError, match="gs:// needs the package gcsfs") as raised:
        names("gs://bucket/a.png")
    assert raised.value.hint == "pip install gcsfs"


def test_files_of_a_store_are_sorted_as_on_disk() -> None:
    """Folder by folder: all of `a` before `a-b`."""
    there = fsspec.filesystem("memory")
    for name in ("a-b/x.png", "a/x.png"):
        there.pipe_file(f"memory://sorted/{name}", b"")
    try:
        assert names("memory://sorted/") == ["a/x.png", "a-b/x.png"]
    finally:
        there.rm("memory://sorted", recursive=True)
